"""Outputs of runs in every form, shared by the tests of commands that read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, Phi3Config

import sparsellm
from tests.conftest import byte_tokenizer

SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
OUTPUTS = {
    "opt": ("opt", {"sparsity": "50%"}),
    "tied": ("llama", {"sparsity": "70%"}),
    "streamed": ("llama", {"sparsity": "2:4", "offload": True}),
    "experts": ("mixtral", {"sparsity": "2:4"}),
    "fused": ("phi3", {"sparsity": "60%", "exclude": ("*.qkv_proj.k",)}),
}
"""By name, the model and the settings of a run by magnitude."""


@pytest.fixture(scope="session")
def models(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The dense models, two of them with fused layers or experts."""
    made = dict(tiny)
    for config in (MixtralConfig(**SIZES, num_local_experts=3), Phi3Config(**SIZES)):
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("dense") / config.model_type
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        made[config.model_type] = folder
    return made


@pytest.fixture(scope="session")
def outputs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The five outputs; not to be written to."""
    from sparsellm.outputs.journal import work_directory
    from sparsellm.pipeline.prune import prune_run
    from sparsellm.recipes.file import read_recipe

    made: dict[str, Path] = {}
    for name, (model, settings) in OUTPUTS.items():
        out = tmp_path_factory.mktemp("outputs") / name
        recipe = read_recipe({"model": str(models[model]), "method": "magnitude", **settings})
        with work_directory(out) as work:
            made[name] = prune_run(recipe, work=work).save_pretrained(out)
    return made


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of random models with the bundled models' classes and tokenizers, two blocks and a quarter of the width."""
    from transformers import AutoConfig, AutoTokenizer

    from sparsellm.texts.demo import FAMILIES, model_path

    folders = {}
    for family in FAMILIES:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(model_path(family))
        config.num_hidden_layers = 2
        for name in ("hidden_size", "word_embed_proj_dim", "ffn_dim", "intermediate_size"):
            if hasattr(config, name):
                setattr(config, name, getattr(config, name) // 4)
        if hasattr(config, "head_dim"):
            config.head_dim //= 4
        folders[family] = tmp_path_factory.mktemp("bundled") / family
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[family])
        AutoTokenizer.from_pretrained(model_path(family)).save_pretrained(folders[family])
    return folders


@pytest.fixture(scope="module")
def packed(outputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed OPT; not to be written to."""
    folder = tmp_path_factory.mktemp("packed") / "opt"
    sparsellm.pack(outputs["opt"], folder)
    return folder


@pytest.fixture(scope="session")
def made(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pruned model, and the same packed; not to be written to."""
    folders = {name: tmp_path_factory.mktemp("made") / name for name in ("run", "packed")}
    sparsellm.prune(tiny["llama"], "magnitude", "60%").save_pretrained(folders["run"])
    sparsellm.pack(folders["run"], folders["packed"])
    return folders


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in a folder's weight files."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same_bits(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors have the same names, dtypes, shapes and bits."""
    return first.keys() == other.keys() and all(
        x.dtype == other[name].dtype and x.shape == other[name].shape and x.numpy(force=True).tobytes() == raw(other[name])
        if x.dtype != torch.bfloat16
        else torch.equal(x.view(torch.int16), other[name].view(torch.int16))
        for name, x in first.items()
    )


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor that numpy has a dtype for."""
    return tensor.numpy(force=True).tobytes()
