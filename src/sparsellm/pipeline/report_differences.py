"""Differences of an output from its report, as sentences, and the error with the first of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsellm.checkpoints.tensor_index import TensorDigest
from sparsellm.errors import VerificationFailed, plural

SHOWN_DIFFERENCES = 5
"""Number of differences that a message names; all are in the error's `differences`."""


def raise_if_any(output: str | Path, differences: Sequence[str]) -> None:
    """Raise VerificationFailed if there are differences, with their number and the first of them."""
    if not differences:
        return
    rest = f"; and {len(differences) - SHOWN_DIFFERENCES} more" if len(differences) > SHOWN_DIFFERENCES else ""
    first = "; ".join(differences[:SHOWN_DIFFERENCES])
    raise VerificationFailed(
        f"{output} is not what the run made, {plural(len(differences), 'difference')}: {first}{rest}.",
        tuple(differences),
    )


def tensor_differences(recorded: Mapping[str, Any], tensors: Mapping[str, TensorDigest]) -> list[str]:
    """Differences between the tensors in an output's files and those in its report."""
    differences = [f"the tensor {key} is missing" for key in recorded if key not in tensors]
    differences += [f"the tensor {key} was not written by the run" for key in tensors if key not in recorded]
    for key in (key for key in tensors if key in recorded):
        tensor, record = tensors[key], recorded[key]
        if not tensor.finite:
            differences.append(f"{key} holds NaN or infinity")
        elif tensor.dtype != record.get("dtype"):
            differences.append(f"{key} is {tensor.dtype} where the report says {record.get('dtype')}")
        elif difference := shape_difference(key, tensor.shape, recorded):
            differences.append(difference)
        elif tensor.digest != record.get("digest"):
            differences.append(f"the values of {key} were changed since")
    return differences


def shape_difference(key: str, shape: Sequence[int], recorded: Mapping[str, Any]) -> str:
    """How a tensor's shape differs from that in a report, if it has one; empty if it does not."""
    record = recorded.get(key)
    if record is None or list(shape) == record.get("shape"):
        return ""
    return f"{key} has the shape {list(shape)} where the report says {record.get('shape')}"
