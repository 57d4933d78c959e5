"""Writes small checkpoints in the quantization schemes of published ones, with the weights that they stand for.

Codes and scales are drawn at random, and packed and multiplied number by number in Python, as the scheme's definition says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
"""The values of four bits in bitsandbytes' NF4 (Dettmers et al. 2023, appendix E)."""


class Quantized(NamedTuple):
    """The stored tensors of a weight, by what is added to the name of its module, and the weight, (out, in) in float32."""

    parts: dict[str, Tensor]
    weight: Tensor


Quantize = Callable[[tuple[int, ...], torch.Generator], Quantized]


def scales(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random scales around 0.02, rounded to a dtype."""
    return (0.01 + 0.02 * torch.rand(shape, generator=generator)).to(dtype)


def times(numbers: Any, scale_of: Callable[[int, int], Any]) -> Tensor:
    """Numbers, (out, in), each times its scale, in float32."""
    rows, columns = len(numbers), len(numbers[0])
    weight = np.empty((rows, columns), np.float32)
    for row in range(rows):
        for column in range(columns):
            weight[row, column] = np.float32(numbers[row][column]) * np.float32(scale_of(row, column))
    return torch.from_numpy(weight)


def float8(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random numbers of FP8."""
    return (torch.randn(shape, generator=generator) * 2).to(torch.float8_e4m3fn)


def blocks_of_float8(block: tuple[int, int], dtype: torch.dtype = torch.float32) -> Quantize:
    """FP8 with a scale for each block (DeepSeek-V3, Qwen3-FP8), the last ones cut off by the edges of the weight."""

    def quantize(shape: tuple[int, ...], generator: torch.Generator) -> Quantized:
        numbers = float8(shape, generator)
        scale = scales((-(-shape[0] // block[0]), -(-shape[1] // block[1])), generator, dtype)
        values = scale.float().tolist()
        weight = times(numbers.float().tolist(), lambda row, column: values[row // block[0]][column // block[1]])
        return Quantized({"weight": numbers, "weight_scale_inv": scale}, weight)

    return quantize


def float8_rows(shape: tuple[int, ...], generator: torch.Generator) -> Quantized:
    """FP8 of compressed-tensors with a scale in bfloat16 for each row."""
    numbers, scale = float8(shape, generator), scales((shape[0], 1), generator, torch.bfloat16)
    values = scale.float().tolist()
    return Quantized({"weight": numbers, "weight_scale": scale}, times(numbers.float().tolist(), lambda row, _: values[row][0]))


def int8_rows(shape: tuple[int, ...], generator: torch.Generator) -> Quantized:
    """int8 of compressed-tensors with a scale for each row."""
    numbers = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    scale = (scales((shape[0], 1), generator) / 20).bfloat16()
    values = scale.float().tolist()
    return Quantized({"weight": numbers, "weight_scale": scale}, times(numbers.tolist(), lambda row, _: values[row][0]))


def packed_words(codes: list[list[int]], bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes of each row packed into words of 32 bits, lowest first; `order` says which of them comes at each place."""
    held = 32 // bits
    order = order or tuple(range(held))
    rows = [[*row, *[0] * (-len(row) % held)] for row in codes]
    words = [
        [sum(row[start + order[place]] << bits * place for place in range(held)) for start in range(0, len(row), held)]
        for row in rows
    ]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)  # wraps around


def packed_integers(bits: int, group: int, *, asymmetric: bool = False, reordered: bool = False) -> Quantize:
    """int4 or int8 of compressed-tensors, packed, with scales for groups of columns, in their order or in another one."""

    def quantize(shape: tuple[int, ...], generator: torch.Generator) -> Quantized:
        rows, columns = shape
        groups, half = columns // group, 2 ** (bits - 1)
        numbers = torch.randint(-half, half, shape, generator=generator).tolist()
        scale = (scales((rows, groups), generator) * (8 / half)).bfloat16()
        zero = torch.randint(-half, half, (rows, groups), generator=generator).tolist() if asymmetric else [[0] * groups] * rows
        index = (
            torch.randperm(columns, generator=generator) // group if reordered else torch.arange(columns) // group
        ).tolist()
        values = scale.float().tolist()
        shifted = [[numbers[r][c] - zero[r][index[c]] for c in range(columns)] for r in range(rows)]
        parts = {
            "weight_packed": packed_words([[x + half for x in row] for row in numbers], bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(shape),
        }
        if asymmetric:
            by_group = [[zero[r][g] + half for r in range(rows)] for g in range(groups)]
            parts["weight_zero_point"] = packed_words(by_group, bits).T.contiguous()
        if reordered:
            parts["weight_g_idx"] = torch.tensor(index, dtype=torch.int32)
        return Quantized(parts, times(shifted, lambda row, column: values[row][index[column]]))

    return quantize


def groups_of(columns: int, group: int, generator: torch.Generator, reordered: bool) -> list[int]:
    """The group of each column."""
    order = torch.randperm(columns, generator=generator) if reordered else torch.arange(columns)
    return (order // group).tolist()


def e2m1(code: int) -> float:
    """The number of a code of FP4."""
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def packed_float4(shape: tuple[int, ...], generator: torch.Generator) -> Quantized:
    """FP4 of compressed-tensors (NVFP4): scales in FP8 for groups of 16 columns, and one of them all."""
    codes = torch.randint(0, 16, shape, generator=generator)
    scale = (torch.rand(shape[0], shape[1] // 16, generator=generator) * 100 + 1).to(torch.float8_e4m3fn)
    whole = torch.tensor([4000.0])
    values = (scale.float() / whole).tolist()
    numbers = [[e2m1(code) for code in row] for row in codes.tolist()]
    parts = {
        "weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scale,
        "weight_global_scale": whole,
    }
    return Quantized(parts, times(numbers, lambda row, column: values[row][column // 16]))


def mxfp4_experts(shape: tuple[int, ...], generator: torch.Generator) -> Quantized:
    """MXFP4 of GPT-OSS for experts of shape (experts, in, out): groups of 32 inputs with a power of two."""
    experts, inputs, outputs = shape
    codes = torch.randint(0, 16, (experts, outputs, inputs), generator=generator)
    exponents = torch.randint(118, 123, (experts, outputs, inputs // 32), generator=generator)
    weight = torch.empty(shape)
    for expert in range(experts):
        numbers = [[e2m1(code) for code in row] for row in codes[expert].tolist()]
        values = exponents[expert].tolist()
        matrix = times(numbers, lambda row, column, of=values: 2.0 ** (of[row][column // 32] - 127))
        weight[expert] = matrix.T
    packed = (codes[:, :, ::2] | codes[:, :, 1::2] << 4).to(torch.uint8).view(experts, outputs, inputs // 32, 16)
    return Quantized({"_blocks": packed, "_scales": exponents.to(torch.uint8)}, weight)


def bitsandbytes(*, nested: bool) -> Quantize:
    """NF4 of bitsandbytes in blocks of 64 consecutive weights, whose scales are bytes themselves if `nested`."""

    def quantize(shape: tuple[int, ...], generator: torch.Generator) -> Quantized:
        count = shape[0] * shape[1]
        codes = torch.randint(0, 16, (count,), generator=generator)
        codes = torch.cat([codes, codes.new_zeros(count % 2)])
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
        found = {"weight.quant_map": torch.tensor(NF4)}
        blocks = -(-count // 64)
        if nested:
            of_bytes, outer = torch.linspace(-1, 1, 256), 0.02 * torch.rand(-(-blocks // 256), generator=generator) + 0.01
            absmax = torch.randint(0, 256, (blocks,), generator=generator, dtype=torch.uint8)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0625}
            found |= {"weight.nested_absmax": outer, "weight.nested_quant_map": of_bytes}
            values = [
                float(np.float32(of_bytes[int(byte)]) * np.float32(outer[place // 256]) + np.float32(0.0625))
                for place, byte in enumerate(absmax)
            ]
        else:
            absmax = scales((blocks,), generator) * 4
            values = absmax.tolist()
        numbers = [[NF4[int(codes[r * shape[1] + c])] for c in range(shape[1])] for r in range(shape[0])]
        weight = times(numbers, lambda row, column: values[(row * shape[1] + column) // 64])
        text = json.dumps(state).encode()
        found |= {
            "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
            "weight.absmax": absmax,
            "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(text), dtype=torch.uint8).clone(),
        }
        return Quantized(found, weight)

    return quantize


def gptq(bits: int, group: int, *, version: int = 1, reordered: bool = False) -> Quantize:
    """GPTQ: (in, out), several inputs a word, zero points less one in the first version."""

    def quantize(shape: tuple[int, ...], generator: torch.Generator) -> Quantized:
        outputs, inputs = shape
        groups, most = inputs // group, 2**bits - 1
        numbers = torch.randint(0, most + 1, (inputs, outputs), generator=generator).tolist()
        zero = torch.randint(0, most + 1, (groups, outputs), generator=generator).tolist()
        scale = (scales((groups, outputs), generator) * (8 / 2 ** (bits - 1))).half()
        index = groups_of(inputs, group, generator, reordered)
        values = scale.float().tolist()
        shifted = [[numbers[i][o] - zero[index[i]][o] for i in range(inputs)] for o in range(outputs)]
        parts = {
            "qweight": packed_words([[row[o] for row in numbers] for o in range(outputs)], bits).T.contiguous(),
            "qzeros": packed_words([[x - (version == 1) for x in row] for row in zero], bits),
            "scales": scale,
            "g_idx": torch.tensor(index, dtype=torch.int32),
        }
        return Quantized(parts, times(shifted, lambda row, column: values[index[column]][row]))

    return quantize


def awq(shape: tuple[int, ...], generator: torch.Generator) -> Quantized:
    """AWQ: (in, out), eight outputs a word in AutoAWQ's order, groups of 16 inputs."""
    outputs, inputs = shape
    numbers = torch.randint(0, 16, (inputs, outputs), generator=generator).tolist()
    zero = torch.randint(0, 16, (inputs // 16, outputs), generator=generator).tolist()
    scale = scales((inputs // 16, outputs), generator, torch.float16)
    values = scale.float().tolist()
    shifted = [[numbers[i][o] - zero[i // 16][o] for i in range(inputs)] for o in range(outputs)]
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": packed_words(numbers, 4, order), "qzeros": packed_words(zero, 4, order), "scales": scale}
    return Quantized(parts, times(shifted, lambda row, column: values[column // 16][row]))


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    """The configuration of a checkpoint of compressed-tensors with one group of layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


INTEGERS = {"type": "int", "symmetric": True, "dynamic": False}
SCHEMES: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "FP8 in blocks": (blocks_of_float8((16, 32)), {"quant_method": "fp8", "weight_block_size": [16, 32]}),
    "FP8 in small blocks": (blocks_of_float8((4, 4)), {"quant_method": "fp8", "weight_block_size": [4, 4]}),
    "FP8, scales in FP8": (
        blocks_of_float8((8, 16), torch.float8_e8m0fnu),
        {"quant_method": "fp8", "weight_block_size": [8, 16], "scale_fmt": "ue8m0"},
    ),
    "compressed-tensors FP8": (
        float8_rows,
        compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True, dynamic=False),
    ),
    "compressed-tensors int8": (int8_rows, compressed("int-quantized", num_bits=8, strategy="channel", **INTEGERS)),
    "compressed-tensors int4": (
        packed_integers(4, 16),
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=16, **INTEGERS),
    ),
    "compressed-tensors int4, zero points": (
        packed_integers(4, 16, asymmetric=True),
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=16, **INTEGERS | {"symmetric": False}),
    ),
    "compressed-tensors int8, reordered": (
        packed_integers(8, 16, reordered=True),
        compressed("pack-quantized", num_bits=8, strategy="group", group_size=16, actorder="group", **INTEGERS),
    ),
    "compressed-tensors NVFP4": (
        packed_float4,
        compressed(
            "nvfp4-pack-quantized",
            num_bits=4,
            type="float",
            strategy="tensor_group",
            group_size=16,
            symmetric=True,
            dynamic=False,
        ),
    ),
    "bitsandbytes": (bitsandbytes(nested=False), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bitsandbytes, nested": (bitsandbytes(nested=True), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "GPTQ": (gptq(4, 16), {"quant_method": "gptq", "bits": 4, "group_size": 16}),
    "GPTQ, reordered": (
        gptq(8, 16, version=2, reordered=True),
        {"quant_method": "gptq", "bits": 8, "group_size": 16, "checkpoint_format": "gptq_v2"},
    ),
    "AWQ": (awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}),
}
"""The schemes of layers, with the `quantization_config` of a checkpoint."""


def write_quantized(
    dense: Path, folder: Path, scheme: str, *, layers: Callable[[str], bool] = lambda name: ".layers." in name
) -> dict[str, Tensor]:
    """Write a checkpoint like a dense one, with random weights of a scheme in its linear layers.

    Args:
        dense: A checkpoint in one safetensors file.
        folder: The folder to write, with the other files of the dense one.
        scheme: A name in `SCHEMES`.
        layers: Which modules are quantized, of those whose weight is a matrix.

    Returns:
        The tensors of the model that it stands for, in float32 where they were quantized.
    """
    quantize, settings = SCHEMES[scheme]
    shutil.copytree(dense, folder)
    generator = torch.Generator().manual_seed(len(scheme))
    stored, expected = dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in load_file(dense / "model.safetensors").items():
        module = key.removesuffix("weight")
        if key.endswith(".weight") and tensor.ndim == 2 and layers(key):
            quantized = quantize(tuple(tensor.shape), generator)
            stored |= {f"{module}{part}": x for part, x in quantized.parts.items()}
            expected[key] = quantized.weight
        else:
            stored[key] = expected[key] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_fields(folder, quantization_config=settings)
    return expected


def write_mxfp4(dense: Path, folder: Path) -> dict[str, Tensor]:
    """Write a checkpoint of GPT-OSS as it is published; returns the tensors of the model that it stands for."""
    shutil.copytree(dense, folder)
    generator = torch.Generator().manual_seed(0)
    stored, expected = dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in load_file(dense / "model.safetensors").items():
        if key.endswith(("gate_up_proj", "down_proj")):
            quantized = mxfp4_experts(tuple(tensor.shape), generator)
            stored |= {f"{key}{part}": x for part, x in quantized.parts.items()}
            expected[key] = quantized.weight
        else:
            stored[key] = expected[key] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    set_fields(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": left_out})
    return expected


def write_plain(dense: Path, folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Path:
    """Write the checkpoint that a quantized one stands for, rounded to a dtype."""
    shutil.copytree(dense, folder)
    stored = load_file(folder / "model.safetensors")
    rounded = {
        key: x.contiguous() if key in stored and stored[key].dtype is x.dtype else x.to(dtype) for key, x in tensors.items()
    }
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def set_fields(folder: Path, **fields: Any) -> None:
    """Set fields of config.json; None removes them."""
    file = folder / "config.json"
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}, indent=2))
