"""Shows every way in changed packed models, in a process whose kernels are compiled with sanitizers.

    python -m tests.packed_fuzzing FOLDER WORK FIRST LAST [LIBRARY]

FOLDER holds sound packed models, which are copied to WORK. Prints a summary as JSON; a report of a sanitizer ends the process.
The memory of a step is the most that the process held during it (VmHWM, which begins anew with each step) beyond what it held
before and the size of the file. With sanitizers it is larger than without, by their notes on each byte.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import sparsellm
from sparsellm.checkpoints.headers import locate_all
from sparsellm.checkpoints.tensor_index import TensorDigest, tensor_digests
from sparsellm.errors import SparseLLMError
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import Quantized
from sparsellm.extensions.packed.formats import kernels
from sparsellm.extensions.packed.formats.bitmask import Bitmask
from sparsellm.extensions.packed.formats.linear import PackedLinear
from sparsellm.extensions.packed.formats.packed_tensors import PackedWeight, decode_matrix, packed_weights
from sparsellm.extensions.packed.formats.weight_converter import packed_layer
from sparsellm.runtime import native
from tests.fuzzing import TooSlow, limited
from tests.meter import start_peak, status_of
from tests.packed_changes import Weights, agree, bomb, changed_file, changed_tensor

LIMIT = 64 * 2**20
"""Bytes that a step may take beyond the size of the file."""

EVERY = {
    "tensors": 1,
    "layers": 1,
    "layer.load_state_dict": 1,
    "kernels": 1,
    "from_pretrained": 4,
    "model.load_state_dict": 8,
    "load": 32,
    "verify": 32,
    "inspect": 32,
    "unpack": 32,
}
"""Every how many inputs go through a way in, by chance: those of whole models take some 25 ms, those of folders 50 to 150."""

TOKENS = torch.arange(20)[None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.float64, torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool, torch.complex64)

FROM_TORCH = (ValueError, TypeError, RuntimeError)
"""What functions on tensors raise, torch's own checks among them."""

FROM_TRANSFORMERS = (*FROM_TORCH, SafetensorError, OSError, LookupError, AttributeError)
"""What `from_pretrained` raises for files that are no safetensors files, or do not have the tensors of the model."""


class Wrong(Exception):
    """A result that is not right."""


@dataclass
class Base:
    """A sound packed model, and what comes of it.

    Attributes:
        folder: A copy of it, whose weight file and report are changed.
    """

    folder: Path
    content: bytes = b""
    report: str = ""
    weights: Weights = field(default_factory=lambda: Weights({}, {}))
    digests: dict[str, TensorDigest] = field(default_factory=dict)
    model: Any = None
    logits: Tensor = field(default_factory=lambda: torch.zeros(0))
    buffers: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        """Its weight file."""
        return self.folder / "model.safetensors"

    @classmethod
    def open(cls, folder: Path) -> Base:
        """Read it as it is."""
        base = cls(folder)
        base.content = base.file.read_bytes()
        base.weights = Weights.of(base.content)
        base.report = (folder / "sparsellm.json").read_text(encoding="utf-8")
        base.digests = tensor_digests(base.file)
        base.model = sparsellm.load(folder)
        base.logits = logits_of(base.model)
        layers = {path: layer for path, layer in base.model.named_modules() if isinstance(layer, PackedLinear)}
        base.buffers = {path: {name: getattr(layer, name) for name in layer.running} for path, layer in layers.items()}
        return base


@dataclass
class Run:
    """What came of the steps so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)
    most: int = 0
    largest: str = ""

    def step(self, name: str, number: int, size: int, allowed: tuple[type[Exception], ...], work: Callable[[], object]) -> None:
        """Take a step: a right result or one of the errors that are allowed."""
        before = start_peak()
        try:
            with limited(30):
                work()
            outcome = "right"
        except MemoryError as error:
            outcome = "refused" if isinstance(error, SparseLLMError) else self._failed(name, number, error)
        except (SparseLLMError, *allowed):
            outcome = "refused"
        except (Exception, TooSlow) as error:
            outcome = self._failed(name, number, error)
        self.outcomes[f"{name} {outcome}"] += 1
        taken = status_of("VmHWM") - before - size
        if taken > self.most:
            self.most, self.largest = taken, f"{name}, input {number}"
        if taken > LIMIT:
            self.failures.setdefault(f"{name}: memory", f"input {number} took {taken / 2**20:.0f} MiB")

    def _failed(self, name: str, number: int, error: BaseException) -> str:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{name}: {type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
        calls = "".join(traceback.format_tb(error.__traceback__)[-6:])
        self.failures.setdefault(place, f"input {number}: {str(error)[:300]}\n{calls}")
        return "wrong"


def logits_of(model: nn.Module) -> Tensor:
    """Outputs for one token, and for more than the kernels multiply."""
    with torch.no_grad():
        return torch.cat([model(ids).logits.flatten() for ids in (TOKENS[:, :1], TOKENS)])


def check_layers(model: nn.Module) -> None:
    """Raise unless the kernels decode each packed layer as torch does."""
    for path, layer in model.named_modules():
        if isinstance(layer, PackedLinear):
            weight = layer._unchecked()
            layer.check()
            if not same(kernels.decode_rows(weight), weight.to_dense()):
                raise Wrong(path)


def same(first: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    bits = [tensor.contiguous().view(torch.uint8) for tensor in (first, other)]
    return first.dtype is other.dtype and torch.equal(*bits)


def digest(base: Base) -> None:
    """Read every tensor, as `verify` and `unpack` do."""
    digests = tensor_digests(base.file)
    sound = base.weights.entries
    for key, weight in packed_weights(base.file).items():
        if key in sound and weight.entry.sha256 == sound[key]["sha256"] and digests[key].digest != base.digests[key].digest:
            raise Wrong(key)


def run_model(load: Callable[[Path], nn.Module], base: Base) -> None:
    """Load a model, and compute with it."""
    model = load(base.folder)
    logits_of(model)
    check_layers(model)


def unpack(base: Base) -> None:
    """Write the model, and read its weights."""
    out = base.folder.with_name("unpacked")
    try:
        sparsellm.unpack(base.folder, out)
        is_recorded = (base.folder / "sparsellm.json").exists()
        if is_recorded and any(x != tensor_digests(out / base.file.name)[key] for key, x in base.digests.items()):
            raise Wrong("the unpacked model is another one")
    finally:
        shutil.rmtree(out, ignore_errors=True)


def change_state(state: dict[str, Tensor], random: Random, buffers: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Change one to three tensors of a state, or add some."""
    for _ in range(random.choices((1, 2, 3), (6, 2, 1))[0]):
        if not state:
            return
        key, other = random.choice(list(state)), random.choice(list(state))
        kind = random.randrange(8)
        if kind == 0:
            state[key] = state[other]
        elif kind == 1:
            del state[key]
        elif kind == 2:
            path = random.choice(list(buffers))
            name, buffer = random.choice(list(buffers[path].items()))
            state[f"{path}.{name}".lstrip(".")] = changed_tensor(buffer, random)
        elif kind == 3:
            state[f"{key}_mask_deflated"] = torch.frombuffer(bytearray(bomb(2**22, 0)), dtype=torch.uint8)
        else:
            state[key] = changed_tensor(state[key], random)


def load_state(base: Base, random: Random) -> None:
    """Load a changed state into the model, and compute with what it has then, whether that succeeded or not."""
    model = copy.deepcopy(base.model)
    state = dict(model.state_dict())
    change_state(state, random, base.buffers)
    try:
        model.load_state_dict(state, strict=False, assign=random.random() < 0.5)
    finally:
        logits_of(model)
    check_layers(model)


def matrices() -> list[Bitmask]:
    """Matrices of every form and of odd sizes."""
    torch.manual_seed(0)
    made: list[Bitmask] = []
    for rows, columns in ((1, 1), (5, 70), (9, 200), (3, 64)):
        keep = torch.rand(rows, columns) < 0.5
        keep[-1, -1] = True
        made += [Bitmask.from_dense((torch.randn(rows, columns) * keep).to(dtype)) for dtype in DTYPES]
        for bits, group_size in ((8, 0), (4, 64), (3, 128)):
            scales = torch.rand(rows, 1 if not group_size else -(-columns // group_size)).bfloat16()
            integers = torch.randint(-4, 4, (rows, columns), dtype=torch.int8) * keep
            rounded = Quantized(integers, scales, IntegerFormat(bits, group_size))
            made.append(Bitmask.from_quantized(rounded, keep))
    return made


def misaligned(tensor: Tensor) -> Tensor:
    """The same numbers, at an address that is no multiple of their size."""
    content = torch.cat([tensor.flatten(), tensor.new_empty(0)]).view(torch.uint8)
    memory = torch.empty(len(content) + 1, dtype=torch.uint8)
    memory[1:] = content
    return torch.frombuffer(memory.numpy(), dtype=tensor.dtype, offset=1).view(tensor.shape) if len(content) else tensor


def call_kernels(weights: list[Bitmask], random: Random) -> None:
    """Multiply by a sound matrix, or decode it, with tokens and a bias that may be wrong."""
    weight = random.choice(weights)
    rows, columns = weight.shape
    dense = weight.to_dense()
    tokens = random.choice((0, 1, 2, 3, 8, 9, 16, 17, 40))
    x = torch.randn(tokens, columns).to(random.choice(DTYPES))
    bias = torch.randn(rows).to(x.dtype) if random.random() < 0.7 else None
    kinds: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.to(random.choice(OTHERS)), lambda t: t[..., :-1], lambda t: torch.cat([t, t], -1), lambda t: t[:1],
        lambda t: t[None], lambda t: torch.stack([t, t], -1)[..., 0], misaligned, lambda t: t.flatten(), lambda t: t.T,
        lambda t: t.to("meta"), lambda t: t.expand(3, *t.shape), lambda t: t[:0], lambda t: t.to_sparse(),
    ]  # fmt: skip
    wrong = random.choice(("x", "bias", None, None))
    if wrong == "x":
        x = random.choice(kinds)(x)
    elif wrong == "bias" and bias is not None:
        bias = random.choice(kinds)(bias)
    if random.random() < 0.6:
        result = kernels.packed_matmul(x, weight, bias)
        if random.random() < 0.5:
            options = {"scales": weight.scales, "group_size": weight.format.group_size if weight.format else 0, "bias": bias}
            parts = weight.mask, weight.values, weight.row_starts
            result = torch.ops.sparsellm.packed_linear(x, *parts, columns=columns, **options)
        compare(result, x, dense, bias, weight.format is not None)
        return
    start, stop = sorted(random.choices(range(rows + 1), k=2))
    if not same(kernels.decode_rows(weight, start, stop), dense[start:stop]):
        raise Wrong("decoded")
    if random.random() < 0.2 and weight.format is None and dense.dtype is torch.bfloat16:
        kernels.dense_matmul(x, random.choice((dense, changed_tensor(dense, random), misaligned(dense))))


def compare(result: Tensor, x: Tensor, dense: Tensor, bias: Tensor | None, quantized: bool) -> None:
    """Raise unless a product is right."""
    if x.is_meta:
        return
    expected, terms = x.double() @ dense.double().T, x.double().abs() @ dense.double().abs().T
    if bias is not None:
        expected, terms = expected + bias.double(), terms + bias.double().abs()
    if result.shape != expected.shape or result.dtype is not x.dtype:
        raise Wrong(f"{result.dtype} of {tuple(result.shape)}")
    if bool(((result.double() - expected).abs() > terms * 2**-6 + 1e-3).any()):
        raise Wrong("a product")


def run_layers(base: Base, changed: Weights) -> None:
    """Decode packed tensors by what the file says of them, which is compared with no model, and compute with them."""
    packed = packed_weights(base.file)
    stored = locate_all(base.file)
    content = base.file.read_bytes()
    sound = base.weights
    different = [key for key, entry in changed.tensors.items() if sound.tensors.get(key) != entry]
    keys = [key for key in packed if any(name in different for _, name in packed[key].parts.values())] or list(packed)[:1]
    for key in keys:
        parts = {}
        for part, (_, name) in packed[key].parts.items():
            header, at = stored[name]
            read = torch.frombuffer(bytearray(content[at : at + header.nbytes] or b"\0"), dtype=torch.uint8)[: header.nbytes]
            parts[part] = read if header.dtype == "uint8" and len(header.shape) == 1 else read[None].float()
        run_layer(packed[key], decode_matrix(parts, packed[key].entry))


def run_layer(weight: PackedWeight, matrix: Bitmask) -> None:
    """Compute with a matrix as a layer does, which is built as for transformers."""
    if matrix.shape[1] > 2**12:
        return
    layer = packed_layer(replace(weight, entry=replace(weight.entry, shape=matrix.shape)), dtype=torch.float32)
    for name in layer.running:
        setattr(layer, name, getattr(matrix, name))
    for tokens in (1, 20):
        with torch.no_grad():
            layer(torch.ones(tokens, matrix.shape[1], dtype=layer.dtype))
    if matrix.mask.numel() <= 2**16 and not same(
        kernels.decode_rows(matrix), matrix.to_dense()
    ):  # which makes bytes of all bits
        raise Wrong("decoded")


def load_layer(base: Base, random: Random) -> None:
    """Load a changed state into a layer, and compute with what it has then."""
    path = random.choice(list(base.buffers))
    layer = copy.deepcopy(base.model.get_submodule(path))
    state = dict(layer.state_dict())
    change_state(state, random, {"": base.buffers[path]})
    x = torch.ones(random.choice((1, 20)), layer.in_features, dtype=layer.dtype)
    with torch.no_grad():
        try:
            layer.load_state_dict(state, strict=False, assign=random.random() < 0.5)
        finally:
            layer(x)
    check_layers(layer)


def show(base: Base, number: int, run: Run, weights: list[Bitmask]) -> None:
    """Show one changed model to the ways in."""
    random = Random(number)
    content, changed = changed_file(base.content, random, base.buffers)
    base.file.unlink()  # models that are mapped keep the one before
    base.file.write_bytes(content)
    os.utime(base.file, ns=(number, number))
    if kernels.instruction_set():
        kernels.load_kernels().use(random.choice(kernels.instruction_sets()))

    def step(name: str, allowed: tuple[type[Exception], ...], work: Callable[[], object]) -> None:
        if random.randrange(EVERY[name]) == 0:
            run.step(name, number, len(content), allowed, work)

    step("tensors", (), lambda: digest(base))
    step("layers", (), lambda: run_layers(base, changed))
    step("layer.load_state_dict", FROM_TORCH, lambda: load_layer(base, random))
    for _ in range(3):
        step("kernels", FROM_TORCH, lambda: call_kernels(weights, random))
    step("from_pretrained", FROM_TRANSFORMERS, lambda: run_model(AutoModelForCausalLM.from_pretrained, base))
    step("model.load_state_dict", FROM_TORCH, lambda: load_state(base, random))
    report = base.folder / "sparsellm.json"
    report.write_text(base.report, encoding="utf-8")
    if random.random() < 0.5:
        agree(base.folder, changed)
    step("load", (), lambda: run_model(sparsellm.load, base))
    step("verify", (), lambda: sparsellm.verify(base.folder))
    step("inspect", (), lambda: sparsellm.inspect(base.folder))
    if random.random() < 0.3:
        report.unlink()
    step("unpack", (), lambda: unpack(base))


def main(folder: str, work: str, first: int, last: int, library: str | None = None) -> None:
    """Show the inputs of some numbers, and print what came of them."""
    if library is not None:
        native.LIBRARY = Path(library)
        assert kernels.instruction_set()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    copies = [Path(shutil.copytree(path, Path(work, path.name))) for path in sorted(Path(folder).iterdir())]
    bases, weights = [Base.open(path) for path in copies], matrices()
    warm = Run()
    for base in bases:
        os.utime(base.file, ns=(0, 0))
        for way in (lambda b: run_model(sparsellm.load, b), unpack, digest, lambda b: sparsellm.verify(b.folder)):
            warm.step("sound", 0, len(base.content), (), lambda base=base, way=way: way(base))
    assert not warm.failures, warm.failures
    run, started, used = Run(), time.perf_counter(), time.process_time()
    for number in range(first, last):
        Path(work, "number.txt").write_text(str(number), encoding="utf-8")
        show(bases[number % len(bases)], number, run, weights)
    counts = {"outcomes": dict(sorted(run.outcomes.items())), "failures": run.failures, "inputs": last - first}
    memory = {"MiB": round(run.most / 2**20, 1), "at": run.largest, "sound MiB": round(warm.most / 2**20, 1)}
    times = {"seconds": round(time.perf_counter() - started, 1), "CPU seconds": round(time.process_time() - used, 1)}
    print(json.dumps(counts | {"memory": memory, "sets": kernels.instruction_sets()} | times))


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
