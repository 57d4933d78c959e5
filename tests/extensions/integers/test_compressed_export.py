"""Exports to compressed-tensors: what is written, that transformers computes with it as with the model, and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import sparsellm
from sparsellm.errors import BadCheckpoint, InvalidSetting, OutputExists, UnsupportedModel
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import Quantized, Scales, round_to_nearest
from sparsellm.extensions.integers.scales_file import write_scales
from sparsellm.extensions.packed.packing import pack
from sparsellm.extensions.quantized.schemes import pack_integers, unpack_integers
from sparsellm.outputs.folder import SCALES_FILE
from tests.conftest import byte_tokenizer
from tests.extensions.packed.test_packed_models import save_pruned

FORMATS = {"q_proj": (4, 128), "k_proj": (3, 64), "v_proj": (4, 0), "o_proj": (4, 64), "down_proj": (8, 0)}
"""Bits and group size of the layers that have others than 4 and 64."""


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Quantized]]:
    """Folder of a sparse model whose layers are scales times integers, and these; not to be written to."""
    folder = tmp_path_factory.mktemp("rounded") / "model"
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 208, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **sizes)).bfloat16()
    layers = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and ".layers." in name:
                bits, size = FORMATS.get(name.split(".")[-2], (4, 64))
                layers[name] = round_to_nearest(
                    parameter.float(), IntegerFormat(bits, size), mask=torch.rand(parameter.shape) < 0.4
                )
                parameter.copy_(layers[name].to_dense())
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    write_scales(folder, {name: Scales(x.scales, x.format) for name, x in layers.items()})
    return folder, layers


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("columns", [64, 75])
def test_integers_are_packed_by_their_definition(num_bits: int, columns: int) -> None:
    """Integer i of a row stands at bit num_bits · i of the row's words, plus 2^(num_bits - 1)."""
    largest = 2 ** (num_bits - 1) - 1
    integers = torch.randint(-largest, largest + 1, (3, columns), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    words = pack_integers(integers, num_bits)
    for row, packed in zip(integers.tolist(), words.tolist(), strict=True):
        bits = sum((word % 2**32) << 32 * number for number, word in enumerate(packed))
        assert [(bits >> num_bits * i) % 2**num_bits - largest - 1 for i in range(columns)] == row
    assert torch.equal(unpack_integers(words, num_bits, columns), integers)


def test_the_library_packs_alike() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers", reason="not installed")
    integers = torch.randint(-7, 8, (3, 75), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    for num_bits in (4, 8):
        assert torch.equal(pack_integers(integers, num_bits), helpers.pack_to_int32(integers, num_bits))


def test_integers_and_scales_are_written_as_they_are(rounded: tuple[Path, dict[str, Quantized]], tmp_path: Path) -> None:
    """Layers that vLLM fuses get equal groups, and groups that do not divide a row smaller ones, with repeated scales."""
    folder, layers = rounded
    result = sparsellm.export(folder, tmp_path / "out")
    dense, stored = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    schemes = {name: group["weights"] for group in config["config_groups"].values() for name in group["targets"]}
    assert config["ignore"] == ["lm_head"]
    assert not (tmp_path / "out" / SCALES_FILE).exists()
    for name, quantized in layers.items():
        module, columns = name.removesuffix(".weight"), quantized.integers.shape[1]
        bits, size = (8, None) if "down_proj" in name else (4, 64)
        assert (schemes[module]["num_bits"], schemes[module].get("group_size")) == (bits, size)
        assert schemes[module]["strategy"] == ("group" if size else "channel")
        integers, scale = unpack_integers(stored[f"{name}_packed"], bits, columns), stored[f"{name}_scale"]
        assert torch.equal(integers, quantized.integers)
        assert stored[f"{name}_shape"].tolist() == list(quantized.integers.shape)
        assert torch.equal((integers.unflatten(1, (scale.shape[1], -1)) * scale[:, :, None]).flatten(1), dense[name])
    assert {name for name in stored if name in dense} == dense.keys() - layers.keys()
    assert all(torch.equal(stored[name], dense[name]) for name in dense.keys() - layers.keys())
    assert (result.layers, result.zeros) == (len(layers), sum(int((x.integers == 0).sum()) for x in layers.values()))
    with pytest.raises(OutputExists):
        sparsellm.export(folder, tmp_path / "out")


def test_transformers_computes_as_with_the_model(rounded: tuple[Path, dict[str, Quantized]], tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="transformers needs it for this format")
    folder, _ = rounded
    sparsellm.export(folder, tmp_path / "out")
    tokens = torch.arange(48).view(2, 24)
    with torch.no_grad():
        expected, logits = (AutoModelForCausalLM.from_pretrained(x)(tokens).logits for x in (folder, tmp_path / "out"))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_without_scales_is_rounded_to_nearest(tmp_path: Path, dtype: torch.dtype) -> None:
    """In groups of 128 columns or whole rows; the zeros stay, and nothing else is lost than by that rounding."""
    save_pruned(tmp_path / "model", "opt", dtype)
    dense = load_file(tmp_path / "model" / "model.safetensors")
    for values, bits in (("int4", 4), ("int8", 8)):
        sparsellm.export(tmp_path / "model", tmp_path / values, values=values)
        stored = load_file(tmp_path / values / "model.safetensors")
        names = [name.removesuffix("_packed") for name in stored if name.endswith("_packed")]
        assert len(names) == 12
        for name in names:
            expected = round_to_nearest(dense[name].float(), IntegerFormat(bits, 0 if bits == 8 else 128))
            assert torch.equal(unpack_integers(stored[f"{name}_packed"], bits, dense[name].shape[1]), expected.integers)
            assert torch.equal(stored[f"{name}_scale"].bfloat16(), expected.scales)
            assert stored[f"{name}_scale"].dtype is dtype
            assert bool((expected.integers[dense[name] == 0] == 0).all())


def test_refusals(rounded: tuple[Path, dict[str, Quantized]], tmp_path: Path) -> None:
    """One message for each, and nothing is written."""
    folder, layers = rounded
    save_pruned(tmp_path / "plain", "llama", torch.bfloat16)
    save_pruned(tmp_path / "transposed", "gpt2", torch.bfloat16)
    pack(tmp_path / "plain", tmp_path / "packed")
    changed = Path(shutil.copytree(folder, tmp_path / "changed"))
    tensors = load_file(changed / "model.safetensors")
    tensors[next(iter(layers))][0, 0] += 1
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    for name, values, error, message in (
        (folder, "int4", InvalidSetting, "already"),
        (tmp_path / "plain", None, InvalidSetting, "`values`"),
        (tmp_path / "plain", "int3", InvalidSetting, "int4 or int8"),
        (tmp_path / "packed", "int4", UnsupportedModel, "is packed"),
        (tmp_path / "transposed", "int4", UnsupportedModel, "GPT-2"),
        (changed, None, BadCheckpoint, "times integers"),
    ):
        with pytest.raises(error, match=message):
            sparsellm.export(name, tmp_path / "out", values=values)
        assert not (tmp_path / "out").exists()
