"""A configuration is held against what the weight files hold: another model's, or a damaged one, is refused in a moment."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import Result

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.errors import BadCheckpoint, SparseLLMError, UnsupportedModel
from sparsellm.pipeline.interface import prune
from tests.core.cli.test_headers import refused_by_all
from tests.core.integration.test_families import CONFIGS

MOMENT = 10
"""Seconds: what a refusal takes at most. One that builds the model first takes hours, or all the memory."""


def changed(folder: Path, **fields: Any) -> None:
    """Change fields of a configuration."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.fixture
def model(tiny: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the tiny Llama."""
    return Path(shutil.copytree(tiny["llama"], tmp_path / "model"))


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers 1,000,000,000",)),
        ({"num_hidden_layers": 10**18}, ("num_hidden_layers",)),
        ({"num_hidden_layers": 200}, ("num_hidden_layers 200", "hold 3")),
        ({"num_hidden_layers": 4}, ("num_hidden_layers 4", "hold 3")),
        ({"hidden_size": 10**12}, ("hidden_size",)),
        ({"hidden_size": 33}, ("config.json",)),
        ({"intermediate_size": 49}, ("mlp.", "49")),
        ({"vocab_size": 10**15}, ("vocab_size",)),
        ({"vocab_size": 261}, ("embed_tokens.weight", "261")),
        ({"num_attention_heads": 10**9}, ("num_attention_heads",)),
        ({"num_attention_heads": 0}, ("config.json",)),
        ({"num_attention_heads": -1}, ("config.json",)),
        ({"head_dim": 10**11}, ("head_dim",)),
        ({"num_labels": 10**6}, ("num_labels",)),
        ({"hidden_act": 5}, ("config.json",)),
        ({"hidden_size": "x"}, ("config.json",)),
        ({"text_config": [1]}, ("config.json",)),
        ({"dtype": "float33"}, ("config.json", "dtype 'float33'", "float32", "remove the field")),
        ({"dtype": "auto"}, ("dtype 'auto'", "bfloat16")),
        ({"dtype": None, "torch_dtype": "auto"}, ("torch_dtype 'auto'", "bfloat16")),
        ({"dtype": "int8"}, ("dtype 'int8'",)),
        ({"dtype": "Tensor"}, ("dtype 'Tensor'",)),
        ({"dtype": 5}, ("dtype '5'",)),
        ({"dtype": {"": "float32"}}, ("dtype",)),
        ({"text_config": {"audio_config": {"dtype": "auto"}}}, ("text_config.audio_config.dtype 'auto'",)),
    ],
    ids=lambda value: "-".join(f"{key}={x}" for key, x in value.items()) if isinstance(value, dict) else None,
)
def test_a_field_that_the_files_do_not_bear_out_is_refused(
    fields: dict[str, Any], parts: tuple[str, ...], model: Path, tmp_path: Path, command: Callable[..., Result]
) -> None:
    """Every command says what the configuration calls for and what the files hold, in a moment."""
    changed(model, **fields)
    started = time.monotonic()
    with pytest.raises(SparseLLMError):
        open_checkpoint(str(model))
    assert time.monotonic() - started < MOMENT
    refused_by_all(command, model, tmp_path, *parts)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mixtral", {"num_local_experts": 10**6}),
        ("mixtral", {"num_local_experts": 5}),
        ("qwen3_moe", {"num_experts": 10**5}),
        ("gptj", {"n_positions": 10**12}),
        ("gpt2", {"n_layer": 10**9}),
        ("opt", {"max_position_embeddings": 10**13}),
        ("gemma3_text", {"layer_types": []}),
    ],
)
def test_sizes_of_other_families_are_refused(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """By whatever name a family calls its sizes."""
    folder = tmp_path / family
    AutoModelForCausalLM.from_config(CONFIGS[family]()).save_pretrained(folder)
    open_checkpoint(str(folder))
    changed(folder, **fields)
    started = time.monotonic()
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        open_checkpoint(str(folder))
    assert time.monotonic() - started < MOMENT


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "rope_parameters", "hidden_act", "pad_token_id"])
def test_a_field_of_another_type_never_ends_in_another_error(field: str, model: Path) -> None:
    """What a configuration makes of it is transformers' matter; what it cannot make anything of is told."""
    for value in ("x", None, -1, 0, 1.5, [], [[1]], {"a": {}}, True):
        changed(model, **{field: value})
        told = "config.json"
        try:
            open_checkpoint(str(model)).skeleton()
        except SparseLLMError as error:
            told = str(error)
        assert "config.json" in told, value
        assert len(told) < 1000, value


def test_lengths_and_token_numbers_may_be_of_any_size(model: Path) -> None:
    """A long context, a large base and what a training recorded are no sizes of tensors."""
    changed(model, max_position_embeddings=10_485_760, eos_token_id=10**7, training_tokens=15 * 10**12)
    changed(model, rope_parameters={"rope_type": "default", "rope_theta": 500_000_000})
    assert open_checkpoint(str(model)).length == 10_485_760


DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32, torch.complex64, torch.bool]


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_that_are_no_plain_floats_are_refused(
    dtype: torch.dtype, form: str, model: Path, tmp_path: Path, command: Callable[..., Result]
) -> None:
    """fp8, whole and complex numbers: one answer by every command, by the headers alone."""
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(model / "model.safetensors")
    tensors[name] = tensors[name].to(dtype)
    (model / "model.safetensors").unlink()
    if form == "bin":
        torch.save(tensors, model / "pytorch_model.bin")
    else:
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    message = refused_by_all(command, model, tmp_path, name, str(dtype).removeprefix("torch."), "plain checkpoint")
    assert "float32, bfloat16, float16 or float64" in message
    with pytest.raises(UnsupportedModel):
        open_checkpoint(str(model))


def test_a_model_in_memory_with_weights_of_8_bits_is_refused(model: Path) -> None:
    """The same answer where there is no file."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    layer = loaded.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.mlp\.up_proj\.weight in int8"):
        prune(loaded, "magnitude")


def test_masks_and_positions_of_older_files_are_no_weights(model: Path) -> None:
    """Buffers of whole numbers, as GPT-2 and BERT-like files hold, do not stand in the way."""
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    tensors["model.position_ids"] = torch.arange(64).expand(1, -1).clone()
    tensors["model.layers.0.self_attn.masked_bias"] = torch.tensor(True)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert open_checkpoint(str(model)).length == 64
