"""A simulated accelerator: tensors that say `simulated:0`, keep their numbers in ordinary memory, and do not mix.

    python tests/simulated_device.py tests/several.py FOLDER "" simulated
    python tests/simulated_device.py -m sparsellm prune MODEL OUT --device simulated

Torch lets a Python program register one backend for the whole process (`PrivateUse1`), so the simulation runs in processes of
its own.

Simulated:

- Where tensors are. An operation on tensors of the device and of the CPU raises what CUDA raises, with its exceptions: copies,
  indices on the CPU, and single numbers on the CPU in elementwise operations.
- When the host waits: operations whose result, or its shape, the host has to know are counted in `waits`.
- The device module (`torch.simulated`): streams, events, memory, and names. A stream runs what it is given at once.
- Autograd, in the device's own thread; parameters, `Module.to`, `copy.deepcopy`, views, in-place operations, `tensor.data`.
- Collective operations, by gloo.

Not simulated: speed, limits of memory, work that goes on while the host does (a missing wait between streams is not found),
arithmetic other than the CPU's, autocast (it changes nothing), kernels written in Triton, random numbers of its own (a
generator gives the CPU's), and pinned memory (it is ordinary memory here).
"""

from __future__ import annotations

import os
import runpy
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

TYPE = "simulated"
DEVICE = torch.device("cpu")  # `start` puts the simulated one here: before it, torch does not know the name
FREE = 4 << 30
"""Bytes of memory that the device says are free."""

waits: Counter[str] = Counter()
"""How often the host waited for the device, by the name of the operation."""

aten = torch.ops.aten

READS = frozenset(
    (
        "_local_scalar_dense",
        "_linalg_check_errors",
        "_linalg_eigh",
        "_linalg_svd",
        "_unique",
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "linalg_lstsq",
        "masked_select",
        "multinomial",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
    )
)
"""Operations that need a number, a count or an error code from the device before they return."""

COPIES = frozenset(("copy_", "_to_copy", "is_same_size"))
"""Operations that take tensors of both sides."""

INDEXED = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))
"""Operations whose indices may be on the CPU."""


WHOLE = ("silu_backward", "mish_backward")
"""Operations that torch takes apart for a device without a kernel of its own; the CPU and GPUs have one."""


FACTORIES = ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "logspace", "randperm")
"""Factories that resize an empty tensor, which a tensor of this kind cannot be."""


class SimulatedTensor(torch.Tensor):
    """A tensor of the simulated device. Its numbers are those of `held`, a CPU tensor of the same shape and strides."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> SimulatedTensor:
        form = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype, "device": DEVICE}
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, **form)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:
        return f"SimulatedTensor({self.held})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """With the next method, what makes `Module.to` exchange a parameter in place, so that tied ones stay tied."""
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: object) -> SimulatedTensor:
        return cls(inner["held"])

    def __reduce_ex__(self, _: object) -> tuple[Any, ...]:
        return SimulatedTensor, (self.held,)

    def tolist(self) -> Any:
        """As from a GPU, after one wait."""
        waits["tolist"] += 1
        return self.held.tolist()

    def __setitem__(self, place: Any, value: Any) -> None:
        """As for CUDA, a number stays on the CPU: where a mask says the place, nothing is waited for."""
        super().__setitem__(place, value if isinstance(value, Tensor) else torch.tensor(value, dtype=self.dtype))

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: SimulatedTensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Sequence = (), keywords: dict | None = None) -> Any:
        return _dispatched(function, tuple(arguments), dict(keywords or {}))


def _dispatched(function: Any, arguments: tuple, keywords: dict) -> Any:
    """The operation on the held tensors, after the device's own rules were checked."""
    name = function._schema.name.split("::")[1]
    _refuse_mixed(function, name, arguments, keywords)
    waits[name] += _host_waits(name, arguments, keywords)
    if name == "record_stream":
        return None
    plain, plain_keywords = tree_map(_held, arguments), tree_map(_held, keywords)
    there = True
    if keywords.get("device") is not None:
        there = torch.device(keywords["device"]).type == TYPE
        plain_keywords["device"] = torch.device("cpu") if there else keywords["device"]
    plain_keywords.pop("pin_memory", None)
    found = _computed(function, name, plain, plain_keywords)
    if name == "copy_":
        return arguments[0]
    for leaf in tree_leaves((arguments, keywords)):
        if isinstance(leaf, SimulatedTensor) and leaf.shape != leaf.held.shape and torch.Tag.inplace_view not in function.tags:
            raise NotImplementedError(f"{function} resized a simulated tensor.")
    if not there:
        return found
    wrapped = tree_map(lambda value: SimulatedTensor(value) if isinstance(value, Tensor) else value, found)
    if function.namespace != "aten":
        return found if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(found)) else _originals(found, arguments)
    return return_and_correct_aliasing(function, arguments, keywords, wrapped)


def _computed(function: Any, name: str, arguments: tuple, keywords: dict) -> Any:
    """The operation on CPU tensors, also where only GPUs have it for a dtype."""
    if name == "histc" and not arguments[0].is_floating_point():
        return function(arguments[0].double(), *arguments[1:], **keywords).to(arguments[0].dtype)
    return function(*arguments, **keywords)


def _held(value: Any) -> Any:
    """The tensor that a simulated one holds; anything else as it is."""
    return value.held if isinstance(value, SimulatedTensor) else value


def _originals(found: Any, arguments: tuple) -> Any:
    """The results of a collective operation, which are its arguments, as the simulated tensors that they came from."""
    known = {id(leaf.held): leaf for leaf in tree_leaves(arguments) if isinstance(leaf, SimulatedTensor)}
    return tree_map(lambda value: known.get(id(value), value) if isinstance(value, Tensor) else value, found)


def _refuse_mixed(function: Any, name: str, arguments: tuple, keywords: dict) -> None:
    """Raise RuntimeError, as CUDA does, where tensors of the device and of the CPU meet."""
    if name in COPIES:
        return
    leaves = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
    single = torch.Tag.pointwise in function.tags or name in INDEXED or name in ("fill_", "fill")
    foreign = [leaf for leaf in leaves if not isinstance(leaf, SimulatedTensor) and not (single and leaf.ndim == 0)]
    if name in INDEXED and isinstance(arguments[0], SimulatedTensor):
        foreign = [leaf for leaf in foreign if not any(leaf is index for index in arguments[1])]
    if foreign:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and cpu! "
            f"(when checking arguments of {function})"
        )


def _host_waits(name: str, arguments: tuple, keywords: dict) -> bool:
    """Whether the host waits for the device in an operation, as it does with CUDA."""
    if name == "_to_copy":
        target = keywords.get("device")
        return target is not None and torch.device(target).type == "cpu" and not keywords.get("non_blocking")
    if name == "copy_":
        asynchronous = (len(arguments) > 2 and arguments[2]) or keywords.get("non_blocking")
        return not isinstance(arguments[0], SimulatedTensor) and not asynchronous
    if name in INDEXED:
        masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments[1])
        number = len(arguments) > 2 and not isinstance(arguments[2], SimulatedTensor)  # then CUDA fills by the mask
        return masked and not number
    if name == "repeat_interleave":
        return keywords.get("output_size") is None
    return name in READS or bool(keywords.get("check_errors"))


class Stream:
    """A stream that runs what it is given at once."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or DEVICE

    def wait_stream(self, stream: Stream) -> None:
        """Nothing is left to wait for."""

    def wait_event(self, event: Event) -> None:
        """Nothing is left to wait for."""

    def record_event(self) -> Event:
        return Event()

    def synchronize(self) -> None:
        """The host waits."""
        waits["synchronize"] += 1


class Event:
    """An event that is over when it is recorded; between two of them no time passes."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        """Over at once."""

    def elapsed_time(self, end: Event) -> float:
        return 0.0

    def synchronize(self) -> None:
        """The host waits: for a point in the work, not for a number; counted apart."""
        waits["synchronize"] += 1


class DeviceModule:
    """What torch.cuda is for NVIDIA's GPUs, with the same names: `torch.simulated`."""

    Stream = Stream
    Event = Event

    def __init__(self) -> None:
        self._stream = Stream()

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        """There is one."""

    def get_device_name(self, device: object = None) -> str:
        return "simulated accelerator"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers are the CPU's."""

    def current_stream(self, device: object = None) -> Stream:
        return self._stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def synchronize(self, device: object = None) -> None:
        """The host waits."""
        waits["synchronize"] += 1

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return FREE, FREE

    def memory_allocated(self, device: object = None) -> int:
        return 0

    def max_memory_allocated(self, device: object = None) -> int:
        return 0

    def empty_cache(self) -> None:
        """Nothing is cached."""


class Generator(torch.Generator):
    """A generator of any device: the CPU's numbers for the simulated one."""

    def __new__(cls, device: torch.device | str = "cpu") -> Generator:
        device = torch.device(device)
        return super().__new__(cls, "cpu" if device.type == TYPE else device)


_libraries: list[torch.library.Library] = []


def start() -> None:
    """Register the device in this process, for good."""
    global DEVICE  # noqa: PLW0603  (one for the process)
    backend_registration._setup_privateuseone_for_python_backend(TYPE, backend_module=DeviceModule())
    DEVICE = torch.device(TYPE, 0)
    every, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _libraries.extend((every, library))  # what they register goes with them
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    for name in FACTORIES:
        packet, _, overload = name.partition(".")
        library.impl(name, _factory(getattr(getattr(aten, packet), overload or "default")), "PrivateUse1")
    for name in WHOLE:
        library.impl(name, getattr(aten, name).default, "PrivateUse1")  # never reached: dispatch to Python comes before
    dist.Backend.default_device_backend_map[TYPE] = "gloo"
    torch.Generator = Generator  # type: ignore[misc]
    empty, pointer, size = torch.empty, safetensors.torch.storage_ptr, safetensors.torch.storage_size

    def unpinned(*size: Any, pin_memory: bool = False, **keywords: Any) -> Tensor:
        return empty(*size, **keywords)

    torch.empty = unpinned  # type: ignore[assignment]
    safetensors.torch.storage_ptr = lambda tensor: pointer(_held(tensor))
    safetensors.torch.storage_size = lambda tensor: size(_held(tensor))


def _empty(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    """What all factories but the next make their tensors with."""
    return SimulatedTensor(torch.empty(size, dtype=dtype, device="cpu"))


def _empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    return SimulatedTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _factory(function: Any) -> Any:
    """A factory whose tensors have the shape that it finds out itself."""

    def made(*arguments: Any, device: object = None, pin_memory: object = None, **keywords: Any) -> Tensor:
        return SimulatedTensor(function(*arguments, device="cpu", **keywords))

    return made


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """A copy that torch makes beside dispatch to Python, in `torch.tensor`."""
    _held(target).copy_(_held(source))
    return target


def main(words: list[str]) -> None:
    """Run a program, or with -m a module, in which the device exists."""
    start()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    sys.modules["tests.simulated_device"] = sys.modules["__main__"]  # the program may import this file: for `waits`
    status = 0
    try:
        main(sys.argv[1:])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # autograd's thread of the simulated device would otherwise abort the interpreter's end now and then
