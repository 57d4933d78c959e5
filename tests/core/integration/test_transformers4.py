"""Models as transformers 4 wrote them, which is most of the hub: pruned here, they compute the same under both versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sparsellm import prune, verify
from tests.conftest import byte_tokenizer
from tests.core.integration.test_families import GATED, GPT, MOE, OPT, SHARED

VERSIONS = (
    "transformers==4.57.6",
    "tokenizers==0.22.1",
    "huggingface_hub==0.36.0",
    "requests",
    "filelock",
    "charset-normalizer",
)
ROPE = {"rope_theta": 50_000.0}
SETTINGS: dict[str, tuple[str, dict]] = {
    "opt": ("OPT", {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "llama": ("Llama", {**GATED, **ROPE, "attention_bias": True}),
    "llama-3": ("Llama", {**GATED, **ROPE, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }}),
    "mistral": ("Mistral", {**GATED, **ROPE, "sliding_window": 8}),
    "qwen2": ("Qwen2", {**GATED, **ROPE}),
    "qwen3": ("Qwen3", {**GATED, **ROPE, "head_dim": 16}),
    "smollm3": ("SmolLM3", {**GATED, **ROPE, "no_rope_layer_interval": 2}),
    "stablelm": ("StableLm", {**GATED, **ROPE, "partial_rotary_factor": 0.5}),
    "olmo": ("Olmo", {**GATED, **ROPE, "clip_qkv": 1.0}),
    "olmo2": ("Olmo2", {**GATED, **ROPE}),
    "cohere": ("Cohere", {**GATED, **ROPE, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", {**GATED, **ROPE, "sliding_window": 8}),
    "granite": ("Granite", {**GATED, **ROPE, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "gemma": ("Gemma", {**GATED, **ROPE, "head_dim": 8}),
    "gemma2": ("Gemma2", {**GATED, **ROPE, "head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 3.0}),
    "gemma3_text": ("Gemma3Text", {**GATED, **ROPE, "head_dim": 8, "sliding_window": 8, "rope_local_base_freq": 5_000.0}),
    "phi": ("Phi", {**GATED, **ROPE, "partial_rotary_factor": 0.25}),
    "phi3": ("Phi3", {**GATED, **ROPE, "partial_rotary_factor": 0.5}),
    "gpt2": ("GPT2", {**GPT, "activation_function": "relu", "n_inner": 48}),
    "gptj": ("GPTJ", {**GPT, "rotary_dim": 4}),
    "gpt_neox": ("GPTNeoX", {**SHARED, "intermediate_size": 64, "rotary_pct": 0.5, "rotary_emb_base": 5_000}),
    "bloom": ("Bloom", {"vocab_size": 260, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}),
    "falcon": ("Falcon", {**SHARED, "new_decoder_architecture": True, "num_kv_heads": 2, **ROPE}),
    "mixtral": ("Mixtral", {**GATED, **ROPE, "num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", {**MOE, **ROPE, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {**MOE, **ROPE, "clip_qkv": 2.0}),
    "gpt_oss": ("GptOss", {**GATED, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "rope_theta": 50_000.0}),
}  # fmt: skip
"""By family, its class and settings that are not its defaults."""

MAKE = """
import json, sys, torch, transformers
transformers.logging.set_verbosity_error()
for name, (kind, fields) in json.load(open(sys.argv[1])).items():
    torch.manual_seed(0)
    config = getattr(transformers, kind + "Config")(**fields)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[2] + "/" + name)
"""
RUN = """
import os, sys, torch, transformers
from safetensors.torch import save_file
transformers.logging.set_verbosity_error()
tokens = torch.arange(40)[None] * 7 % 250
folders = [f for f in sorted(os.listdir(sys.argv[1])) if os.path.isdir(sys.argv[1] + "/" + f)]
with torch.no_grad():
    models = {f: transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/" + f).float() for f in folders}
    save_file({f: model(tokens).logits.contiguous() for f, model in models.items()}, sys.argv[2])
"""
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python with transformers 4 beside this one's other packages."""
    folder = tmp_path_factory.mktemp("transformers4")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *VERSIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"transformers 4 cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}


def test_outputs_compute_the_same_under_both_versions(old: dict[str, str], tmp_path: Path) -> None:
    """Each family with other settings than its defaults: logits of both versions, and every document byte for byte."""
    dense, pruned = tmp_path / "dense", tmp_path / "pruned"
    dense.mkdir()
    pruned.mkdir()
    (tmp_path / "settings.json").write_text(json.dumps(SETTINGS))
    subprocess.run([sys.executable, "-c", MAKE, str(tmp_path / "settings.json"), str(dense)], env=old, check=True)
    for name in SETTINGS:
        byte_tokenizer().save_pretrained(dense / name)
        out = prune(str(dense / name), "magnitude", "50%").save_pretrained(pruned / name)
        assert verify(out, dense / name).against is not None
        documents = [file.name for file in (dense / name).iterdir() if file.suffix != ".safetensors"]
        assert [x for x in documents if (out / x).read_bytes() != (dense / name / x).read_bytes()] == []
        stored = [{key for file in folder.glob("*.safetensors") for key in load_file(file)} for folder in (dense / name, out)]
        assert stored[0] == stored[1], name
    subprocess.run([sys.executable, "-c", RUN, str(pruned), str(tmp_path / "logits")], env=old, check=True)
    found, tokens, different = load_file(tmp_path / "logits"), torch.arange(40)[None] * 7 % 250, {}
    for name in SETTINGS:
        with torch.no_grad():
            wanted = AutoModelForCausalLM.from_pretrained(pruned / name).float()(tokens).logits
        error = float((found[name] - wanted).abs().max() / wanted.abs().max())
        if not error < 1e-3:
            different[name] = error
    assert different == {}
