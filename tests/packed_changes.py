"""Packed weight files that are nearly sound, and those that are made to deceive: parts, entries and tensors are changed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from sparsellm.extensions.packed.formats.encoding import PARTS
from sparsellm.extensions.packed.packed_files import PACKED_METHOD, STORED_KINDS
from tests.fuzzing import damage, replaced

KINDS = [*STORED_KINDS.values()]
WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
"""Bytes of a number; of the other kinds one."""

BUFFERS = ("mask", "values", "row_starts", "scales")
"""Names of the buffers of packed layers."""

BOMBS = [(2**power, strategy) for power in (12, 17, 22, 26) for strategy in (zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY)]
"""Bytes that a stream becomes; by Huffman codes alone, which archives have, it is an eighth of them."""

MOST = 2**16
"""Bytes that a change adds at most. A byte may hold `NUMBERS_A_BYTE` numbers: larger files may need the memory by right."""


@dataclass
class Weights:
    """A safetensors file in parts.

    Attributes:
        metadata: Its metadata.
        tensors: The kind, the shape and the bytes of each tensor.
    """

    metadata: dict[str, str]
    tensors: dict[str, tuple[str, list[int], bytes]]

    @classmethod
    def of(cls, content: bytes) -> Weights:
        """Read a sound file."""
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        metadata = header.pop("__metadata__")
        places = {key: slice(*(end + at for at in entry["data_offsets"])) for key, entry in header.items()}
        return cls(metadata, {key: (entry["dtype"], entry["shape"], content[places[key]]) for key, entry in header.items()})

    @property
    def entries(self) -> dict[str, Any]:
        """What the metadata say of packed tensors."""
        entries: dict[str, Any] = json.loads(self.metadata[PACKED_METHOD])
        return entries

    def list(self, entries: Mapping[str, Any]) -> None:
        """Replace what the metadata say of packed tensors."""
        self.metadata = self.metadata | {PACKED_METHOD: json.dumps(entries)}

    def put(self, key: str, content: bytes, kind: str = "U8", shape: list[int] | None = None) -> None:
        """Add or replace a tensor."""
        self.tensors[key] = (kind, [len(content) // WIDTHS.get(kind, 1)] if shape is None else shape, content)

    def header(self) -> dict[str, Any]:
        """Return the header."""
        header: dict[str, Any] = {"__metadata__": self.metadata}
        at = 0
        for key, (kind, shape, content) in self.tensors.items():
            header[key] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + len(content)]}
            at += len(content)
        return header

    def written(self, header: bytes | None = None, spaces: int = 0) -> bytes:
        """Return the file, with another header or more spaces behind it."""
        text = (json.dumps(self.header()).encode() if header is None else header) + b" " * spaces
        return len(text).to_bytes(8, "little") + text + b"".join(content for *_, content in self.tensors.values())


@cache
def bomb(size: int, strategy: int) -> bytes:
    """A stream of zeros."""
    compressor = zlib.compressobj(9, memLevel=9, strategy=strategy)
    return compressor.compress(bytes(size)) + compressor.flush()


def packed_parts(weights: Weights) -> list[str]:
    """Names of the parts of packed tensors in a file."""
    parts = [key + part.removeprefix("weight") for key in weights.entries for part in PARTS]
    return [part for part in parts if part in weights.tensors]


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor."""
    return torch.cat([tensor.detach().flatten(), tensor.new_empty(0)]).view(torch.uint8).numpy().tobytes()


def change_part(weights: Weights, random: Random) -> None:
    """Swap, lengthen, shorten, empty, fill or remove a part, or turn a bit in it."""
    names = packed_parts(weights)
    key, other = random.choice(names), random.choice(names)
    content = weights.tensors[key][2]
    at, size = random.randrange(len(content) + 1), random.choice((1, 2, 7, 8, 64, 4096))
    flipped = bytearray(content or b"\0")
    flipped[at % len(flipped)] ^= 1 << random.randrange(8)
    kinds = [b"", content[:-size], content[size:], content + random.randbytes(size), content + bytes(size), bytes(flipped)]
    kinds += [random.randbytes(len(content)), bytes(len(content)), b"\xff" * len(content), weights.tensors[other][2], b""]
    number = random.randrange(len(kinds))
    if number == len(kinds) - 1:
        del weights.tensors[key]
        return
    if number == len(kinds) - 2:
        weights.put(other, content)
    weights.put(key, kinds[number])


def misdescribe(weights: Weights, random: Random) -> None:
    """Give a tensor another kind or shape of as many bytes, or another name."""
    key = random.choice(list(weights.tensors))
    kind, shape, content = weights.tensors.pop(key)
    other = random.choice(list(weights.tensors))
    if random.random() < 0.3:
        names = [other, f"{key}_mask", key.removeprefix("model."), f"model.{key}", key.rpartition(".")[0], f"{key}x"]
        weights.tensors[random.choice(names)] = kind, shape, content
        return
    kind = random.choice(KINDS)
    count = len(content) // WIDTHS.get(kind, 1)
    shapes = [[count], [1, count], [count, 1], [2, count // 2], [count // 4, 2, 2], shape, [0, 2**40], [2**40, 0], []]
    weights.put(key, content[: count * WIDTHS.get(kind, 1)], kind, random.choice(shapes))


def bomb_part(weights: Weights, random: Random) -> None:
    """Put a stream of many zeros in place of a part, and perhaps a shape to fit them into the metadata."""
    key = random.choice(list(weights.entries))
    part = random.choice([part for part in PARTS if part.endswith("deflated")])
    size, strategy = random.choice([kind for kind in BOMBS if len(bomb(*kind)) <= MOST])
    weights.tensors.pop((key + part.removeprefix("weight")).removesuffix("_deflated"), None)
    weights.put(key + part.removeprefix("weight"), bomb(size, strategy))
    if part == "weight_deflated":
        weights.put(key, b"")
    if random.random() < 0.5:
        entries = weights.entries
        entries[key]["shape"] = random.choice([[size * 8, 1], [1, size * 8], [size, 1], [size // 8, 64], [2**40, 1]])
        weights.list(entries)


def empty_rows(weights: Weights, random: Random) -> None:
    """Let a packed tensor be one that keeps nothing, of as many rows as its bytes may hold."""
    key = random.choice(list(weights.entries))
    entries = weights.entries
    columns = random.choice((1, 1, 3, 8, 64, 4096))
    rows = random.choice((MOST * 64, MOST * 8, 2**12)) // columns or 1
    if entries[key].get("bits"):
        rows = min(rows, MOST * 2)  # with a scale each
    for part in packed_parts(weights):
        if part.startswith(key):
            del weights.tensors[part]
    weights.put(key, b"")
    weights.put(f"{key}_mask_deflated", bomb(-(-rows * columns // 8), zlib.Z_HUFFMAN_ONLY))
    if entries[key].get("bits"):
        weights.put(f"{key}_scales_deflated", bomb(2 * rows, zlib.Z_HUFFMAN_ONLY))
        entries[key]["group_size"] = 0
    entries[key]["shape"] = [rows, columns]
    weights.list(entries)


def change_entries(weights: Weights, random: Random) -> None:
    """Change what the metadata say of a packed tensor, in its own words."""
    entries = weights.entries
    key, other = random.choice(list(entries)), random.choice(list(entries))
    entry = entries[key]
    rows, columns = entry["shape"][0], entry["shape"][-1]
    shapes = [
        [columns, rows],
        [rows * 2, columns],
        [rows, columns * 2],
        [rows * columns, 1],
        [1, rows * columns],
        [2**62, 2**62],
    ]
    shapes += [[rows, columns, 1], [rows, columns + 1], [rows - 1, columns], [2**40, 1], [1, 2**40], [0, columns], [rows, -1]]
    choices: dict[str, list[Any]] = {
        "shape": shapes,
        "dtype": ["bfloat16", "float16", "float32", "float64", "int8"],
        "bits": [None, 3, 4, 8, 2, 16, 0, True, 4.0, "4"],
        "group_size": [0, 64, 128, 192, 2**40, 2**63, 2**64, -64, 65],
        "transposed": [True, False, None],
        "sha256": ["", entries[other]["sha256"]],
    }
    name = random.choice(list(choices))
    entry[name] = random.choice(choices[name])
    if random.random() < 0.1:
        entries[other] = entries.pop(key)
    weights.list(entries)


@cache
def _changed_text(text: str) -> Callable[[Random], bytes]:
    return replaced([json.loads(text)])


def change_list(weights: Weights, random: Random) -> None:
    """Put anything in place of something that the metadata say of packed tensors."""
    text = _changed_text(weights.metadata[PACKED_METHOD])(random).decode()
    weights.metadata = weights.metadata | {PACKED_METHOD: text}


def add_buffers(weights: Weights, random: Random, buffers: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Add tensors named like the buffers of a packed layer: the right ones, or changed ones.

    Args:
        buffers: Those of the layers of the loaded model, by path and name.
    """
    path = random.choice(list(buffers))
    stored = [key.removesuffix(".weight") for key in weights.entries]
    names = random.sample(BUFFERS, random.randint(1, len(BUFFERS)))
    prefix = random.choice((path, path, path, path.removeprefix("model."), f"model.{path}", random.choice(stored)))
    for name in names:
        right = buffers[path].get(name, torch.zeros(1))
        tensor = right if random.random() < 0.3 else changed_tensor(right, random)
        kind = STORED_KINDS.get(str(tensor.dtype).removeprefix("torch."), "U8")
        content = bytes_of(tensor)
        weights.put(f"{prefix}.{name}", content, kind, list(tensor.shape))


def changed_tensor(tensor: Tensor, random: Random) -> Tensor:
    """A tensor with another dtype, another shape or other numbers."""
    dtypes = (torch.uint8, torch.int8, torch.bool, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32)
    some = random.choice((1, 2, 64))
    shapes = [
        lambda: tensor.to(random.choice((*dtypes, torch.float64, torch.bfloat16))),
        lambda: tensor[: max(0, len(tensor) - some)],
        lambda: torch.cat([tensor, tensor[:some]]),
        lambda: tensor.flatten() if tensor.dim() > 1 else tensor[None],
        lambda: torch.stack([tensor, tensor], dim=-1)[..., 0],  # strided
        lambda: tensor[:0],
    ]
    if random.random() < 0.6:
        return random.choice(shapes)()
    if tensor.dtype == torch.int64 and random.random() < 0.5:
        return tensor + random.choice((1, -1, 2**40, -(2**40), 2**62))
    content = bytearray(bytes_of(tensor))
    if not content:
        return tensor
    flipped = bytearray(content)
    flipped[random.randrange(len(content))] ^= 1 << random.randrange(8)
    numbers = random.choice((flipped, bytearray(random.randbytes(len(content))), bytearray(b"\xff" * len(content))))
    return torch.frombuffer(numbers, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def changed_file(content: bytes, random: Random, buffers: Mapping[str, Mapping[str, Tensor]]) -> tuple[bytes, Weights]:
    """A packed weight file with one to three changes, and what it would be without those of its header and its bytes."""
    weights = Weights.of(content)
    kinds = (change_part, misdescribe, bomb_part, empty_rows, change_entries, change_list, None)
    chosen = random.choices(("file", "bytes", "header", "spaces"), (8, 1, 1, 1))[0]
    if chosen == "bytes":
        return damage(content, random), weights
    if chosen == "header":
        return weights.written(replaced([weights.header()])(random)), weights
    if chosen == "spaces":  # nothing is aligned
        return weights.written(spaces=random.randrange(8)), weights
    for _ in range(random.choices((1, 2, 3), (6, 2, 1))[0]):
        change = random.choices(kinds, (4, 2, 2, 1, 3, 1, 4))[0]
        try:
            if change is None:
                add_buffers(weights, random, buffers)
            else:
                change(weights, random)
        except (
            KeyError,
            ValueError,
            TypeError,
            IndexError,
            AttributeError,
            RecursionError,
        ):  # an earlier change left nothing to change
            continue
    return weights.written(spaces=random.choice((0, 0, 0, random.randrange(8)))), weights


def agree(folder: Path, weights: Weights) -> None:
    """Let the report of a folder say what its weight file does of the shapes of packed tensors."""
    file = folder / "sparsellm.json"
    report = json.loads(file.read_text(encoding="utf-8"))
    try:
        for key, entry in weights.entries.items():
            if key in report["digests"]["tensors"]:
                report["digests"]["tensors"][key]["shape"] = entry["shape"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return
    file.write_text(json.dumps(report), encoding="utf-8")
