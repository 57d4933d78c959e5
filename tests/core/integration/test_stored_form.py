"""Tensors that a run does not prune are written as they are stored, whatever their dtypes, and compared before it prunes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3PreTrainedModel

import sparsellm
from sparsellm.checkpoints import block_loader
from sparsellm.checkpoints.loading import Checkpoint
from sparsellm.errors import BadCheckpoint, SparseLLMError, UnsupportedModel
from sparsellm.outputs.verification import verify
from tests.conftest import byte_tokenizer, extensions, long_unless
from tests.core.integration.test_families import GATED, tensors_of, written

LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
LATER = {**ROUTED, "first_k_dense_replace": 1}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
NUMBERED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**LATER, **LATENT},
    "glm4_moe": {**LATER, "head_dim": 8},
    "dots1": {**LATER, "n_shared_experts": 1},
    "exaone_moe": {**NUMBERED, "n_group": 1, "topk_group": 1, "head_dim": 8, "first_k_dense_replace": 1},
    "hy_v3": {**LOCAL, "num_experts": 4, "first_k_dense_replace": 1},
    "kimi_linear": {},
    "lfm2_moe": {**NUMBERED, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "nemotron_h": {
        **ROUTED, "layers_block_type": ["moe", "attention"], "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 1, "moe_shared_expert_intermediate_size": 16,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_num_shared_experts": 1,
        "moe_intermediate_size": 16,
    },
    "minimax_m2": {**LOCAL, "rotary_dim": 8},
    "afmoe": {**NUMBERED, "num_dense_layers": 1, "head_dim": 8},
    "gemma4_text": {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 260},
}  # fmt: skip
"""Types with a bias of the router that checkpoints store in float32, or (gemma4_text) another stored buffer."""

STRICT, LENIENT, UNKNOWN = ("deepseek_v3", "ernie4_5_moe", "lfm2_moe"), ("afmoe",), ("minimax_m2",)
"""Of these transformers keeps the bias in float32 always, beside float16, or never."""


def checkpoint(folder: Path, kind: str, **settings: Any) -> dict[str, Tensor]:
    """Write a model in bfloat16, with buffers and biases of the router in float32; return its tensors."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **GATED | {"num_key_value_heads": 4} | settings))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    for key, tensor in stored.items():
        is_wide = key.endswith(("correction_bias", "expert_bias", "layer_scalar"))
        stored[key] = torch.linspace(0.81713, 1.06341, tensor.numel()).view_as(tensor) if is_wide else tensor.bfloat16()
    store(folder, stored, dtype="bfloat16")
    return stored


def store(folder: Path, tensors: dict[str, Tensor], **fields: Any) -> None:
    """Write tensors and fields of config.json in place of those of a checkpoint."""
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def pruned(source: Path, **settings: Any) -> list[Path]:
    """The model pruned in memory and read block by block."""
    settings = {"sparsity": "50%", **settings}
    return [written(source, source.parent / f"out-{x}", "wanda", offload=x, **settings) for x in (False, True)]


def check_alike(folders: list[Path]) -> dict[str, Tensor]:
    """Check that outputs hold the same tensors in the same dtypes, and return these."""
    whole, streamed = (tensors_of(folder) for folder in folders)
    assert whole.keys() == streamed.keys()
    for key, tensor in whole.items():
        assert tensor.dtype == streamed[key].dtype, key
        assert torch.equal(tensor, streamed[key]), key
    return whole


@extensions
@pytest.mark.parametrize("kind", [long_unless(kind in (*STRICT, *LENIENT, *UNKNOWN), kind) for kind in KINDS])
def test_what_is_never_trained_is_written_as_it_is_stored(kind: str, tmp_path: Path) -> None:
    """In float32 beside bfloat16, without a note, in memory and read block by block, where the pruned weights are the same."""
    stored = checkpoint(tmp_path / "dense", kind, **KINDS[kind])
    wide = {key for key, tensor in stored.items() if tensor.dtype is torch.float32}
    assert wide
    folders = pruned(tmp_path / "dense")
    found = check_alike(folders)
    assert all(found[key].dtype == tensor.dtype for key, tensor in stored.items())
    assert all(torch.equal(found[key], stored[key]) for key in wide)
    for folder in folders:
        report = json.loads((folder / "sparsellm.json").read_text())
        assert not [note for note in report["notes"] if "rounded" in note]
        assert "dtype_changed" not in report
        assert verify(folder, tmp_path / "dense").converted == ""
    sparsellm.pack(folders[0], tmp_path / "packed")
    sparsellm.unpack(tmp_path / "packed", tmp_path / "unpacked")
    assert all(torch.equal(tensors_of(tmp_path / "unpacked")[key], stored[key]) for key in wide)


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the feed-forward part of Qwen3 buffers in dtypes of their own, and has some of its weights kept in float32."""
    before = Qwen3MLP.__init__

    def init(self: Qwen3MLP, config: Any, **arguments: Any) -> None:
        before(self, config, **arguments)
        self.register_buffer("wide", torch.ones(3, dtype=torch.float64))
        self.register_buffer("narrow", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("plain", torch.ones(3))
        self.register_buffer("count", torch.ones(3, dtype=torch.int64))
        self.register_buffer("computed", torch.ones(3), persistent=False)

    monkeypatch.setattr(Qwen3MLP, "__init__", init)
    monkeypatch.setattr(Qwen3PreTrainedModel, "_keep_in_fp32_modules_strict", ["q_norm", "down_proj"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
def test_buffers_and_kept_parameters_of_any_dtype(dtype: str, kept: torch.dtype, buffers: None, tmp_path: Path) -> None:
    """A buffer is written as it came, also one that the class does not store; a kept weight is pruned in float32."""
    stored = checkpoint(tmp_path / "dense", "qwen3", head_dim=8)
    for key in [key for key in stored if key.endswith("mlp.wide")]:
        numbers = torch.tensor([1 / 3, 2 / 3, 5 / 7], dtype=torch.float64)
        part = key.removesuffix("wide")
        stored |= {key: numbers, f"{part}narrow": numbers.float(), f"{part}plain": numbers.half(), f"{part}other": numbers + 1}
        stored |= {f"{part}count": torch.tensor([2**40 + 1, 2, 3]), f"{part}computed": numbers.float()}
    stored |= {key: stored[key].to(kept) + 1e-4 for key in stored if key.endswith(("q_norm.weight", "down_proj.weight"))}
    store(tmp_path / "dense", stored)
    folders = pruned(tmp_path / "dense", dtype=dtype)
    found = check_alike(folders)
    for key, tensor in stored.items():
        if ".mlp." in key and not key.endswith("weight"):
            assert found[key].dtype is tensor.dtype, key
            assert torch.equal(found[key], tensor), key
        elif key.endswith(("q_norm.weight", "down_proj.weight")) and kept is torch.float32:
            assert found[key].dtype is torch.float32
    assert {found[key].dtype for key in found if key.endswith("up_proj.weight")} == {getattr(torch, dtype)}
    for folder in folders:
        assert verify(folder, tmp_path / "dense").converted in ("", dtype)
        assert json.loads((folder / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize(
    ("fault", "offload"), [("forward", False), ("load", False), ("load", True), ("not finite", False), ("not finite", True)]
)
def test_what_would_fail_at_the_end_fails_before_the_first_block(
    fault: str, offload: bool, buffers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that changes its tensors, and tensors that the model does not use and that are not finite."""
    stored = checkpoint(tmp_path / "dense", "qwen3", head_dim=8)
    error: type[SparseLLMError] = UnsupportedModel
    said = "does not keep 2 tensors of .*mlp.plain first"
    if fault == "forward":
        before = Qwen3MLP.forward

        def forward(self: Qwen3MLP, x: Tensor) -> Tensor:
            self.plain.add_(1)
            return before(self, x)

        monkeypatch.setattr(Qwen3MLP, "forward", forward)
    elif fault == "load" and offload:
        read = block_loader.read_stored
        monkeypatch.setattr(
            block_loader, "read_stored", lambda place, dtype: read(place, dtype) + (1 if "mlp.plain" in place.key else 0)
        )
    elif fault == "load":
        load = Checkpoint.load

        def loaded(self: Checkpoint, *arguments: Any) -> PreTrainedModel:
            model = load(self, *arguments)
            for layer in model.model.layers:
                layer.mlp.plain += 1
            return model

        monkeypatch.setattr(Checkpoint, "load", loaded)
    else:
        error, said = BadCheckpoint, "holds NaN or infinity in mtp.scale"
        store(tmp_path / "dense", stored | {"mtp.scale": torch.tensor([1.0, float("inf")])})
    monkeypatch.setattr("sparsellm.pipeline.prune.prune_blocks", None)  # which is not reached
    with pytest.raises(error, match=said):
        written(tmp_path / "dense", tmp_path / "out", "wanda", sparsity="50%", offload=offload, dtype="float32")
    assert not (tmp_path / "out" / "config.json").exists()


@extensions
@pytest.mark.parametrize("offload", [False, True])
def test_metadata_of_the_files_stay(offload: bool, tiny: dict[str, Path], tmp_path: Path) -> None:
    """What another program wrote into the header of a weight file, in all forms of the output."""
    dense = Path(shutil.copytree(tiny["llama"], tmp_path / "dense"))
    written_by = {"format": "pt", "merged_by": "mergekit", "note": "\u00fc"}
    save_file(load_file(dense / "model.safetensors"), dense / "model.safetensors", written_by)
    written(dense, tmp_path / "out", "wanda", sparsity="50%", offload=offload)
    sparsellm.export(tmp_path / "out", tmp_path / "exported", values="int8")
    sparsellm.pack(tmp_path / "out", tmp_path / "packed")
    sparsellm.unpack(tmp_path / "packed", tmp_path / "unpacked")
    for name in ("out", "exported", "packed", "unpacked"):
        for file in (tmp_path / name).glob("*.safetensors"):
            with safe_open(file, "pt") as stream:
                found = stream.metadata()
            assert found.pop("sparsellm", None) is None or name == "packed"
            assert found == written_by, name
