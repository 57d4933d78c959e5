"""Arguments of a block other than the hidden states: recording, casting, comparing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """The arguments that a block is called with after the hidden states."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating-point tensors in a value, a container or a `Call` to `dtype`; None leaves the value as it is."""
    if dtype is None:
        return value
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Call):
        return Call(cast(value.arguments, dtype), cast(value.keywords, dtype))
    if isinstance(value, (tuple, list)):
        items = [cast(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    return value


def equal_calls(one: Any, other: Any) -> bool:
    """Whether two calls hold equal values, so that one copy serves both: masks are large and mostly equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.device == other.device and one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, Call) and isinstance(other, Call):
        return equal_calls(one.arguments, other.arguments) and equal_calls(one.keywords, other.keywords)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(equal_calls, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal_calls(one[key], other[key]) for key in one)
    return one is other or (isinstance(one, (int, float, str, bool)) and one == other)
