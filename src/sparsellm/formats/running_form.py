"""Checks of packed matrices before kernels read them: the layout of their parts at each call, their numbers once."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting, dtype_name
from sparsellm.formats.bitmask import VALUES_PADDING, Bitmask, integer_dtype, starts_of_rows
from sparsellm.formats.parts import DTYPES
from sparsellm.solvers.integers import MASK_WORD

Dtypes = tuple[torch.dtype, ...]


def check_layout(weight: Bitmask) -> None:
    """Check the layout of the parts. Takes a few microseconds.

    Of the numbers in them only the last position is read, for the length of the values, and not on a GPU, where that waits.

    Raises:
        InvalidSetting: A part has another dtype, shape or device than kernels read, or is not contiguous and aligned.
    """
    rows, columns = weight.shape
    kinds: Dtypes = DTYPES if weight.format is None else (integer_dtype(weight.format),)
    needed: list[tuple[str, Tensor, Dtypes, tuple[int, ...]]] = [
        ("mask", weight.mask, (torch.uint8,), (rows, -(-columns // MASK_WORD) * MASK_WORD // 8)),
        ("row_starts", weight.row_starts, (torch.int64,), (rows + 1,)),
        ("values", weight.values, kinds, (max(weight.values.numel(), VALUES_PADDING),)),
    ]
    if weight.format is not None and weight.scales is not None:
        needed.append(("scales", weight.scales, (torch.bfloat16,), (rows, weight.format.checked().groups(columns))))
    for name, part, dtypes, shape in needed:
        check_tensor(f"`{name}` of a packed matrix", part, dtypes, shape, device=weight.mask.device)
    if weight.row_starts.is_cpu:
        _check_length(weight.values, int(weight.row_starts[-1]), "`row_starts`")


def check_tensor(name: str, tensor: Tensor, dtypes: Dtypes, shape: tuple[int, ...], *, device: torch.device) -> None:
    """Raise InvalidSetting unless a tensor that kernels read or write by its address is as they need it.

    Args:
        name: What it is, for the message.
        tensor: The tensor.
        dtypes: The dtypes that it may have.
        shape: The shape that it must have.
        device: The device on which it must be.
    """
    fits = tensor.shape == shape and tensor.dtype in dtypes and tensor.device == device
    if fits and tensor.is_contiguous() and is_aligned(tensor):
        return
    kinds = " or ".join(dtype_name(dtype) for dtype in dtypes)
    strides = "" if tensor.is_contiguous() else f" with strides {tuple(tensor.stride())}"
    place = f" at an address that is no multiple of {tensor.itemsize}" if fits and not strides else ""
    got = f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}{strides}{place} on {tensor.device}"
    raise InvalidSetting(f"{name} is {got}; contiguous {kinds} of shape {tuple(shape)} on {device} is needed.")


def is_aligned(tensor: Tensor) -> bool:
    """Whether a tensor begins at a multiple of the size of its numbers, as processors and compilers may rely on."""
    return tensor.data_ptr() % tensor.itemsize == 0


def check_numbers(weight: Bitmask) -> None:
    """Check the layout of a matrix, and that its mask, its positions of rows and the length of its values agree.

    Reads the mask once.

    Raises:
        InvalidSetting: They do not agree: a kernel would read values that are another row's, or behind the last one.
    """
    check_layout(weight)
    columns, mask = weight.shape[1], weight.mask
    behind = mask[:, -(-columns // 8) :].any() or (columns % 8 and (mask[:, columns // 8] >> columns % 8).any())
    if behind:
        raise InvalidSetting(f"`mask` of a packed matrix keeps columns behind the last one of {columns}: it is damaged.")
    expected = starts_of_rows(mask, weight.format)
    if not torch.equal(weight.row_starts, expected):
        row = int((weight.row_starts != expected).nonzero()[0])
        raise InvalidSetting(
            f"`row_starts` of a packed matrix has {int(weight.row_starts[row])} at row {row}, where its mask calls for "
            f"{int(expected[row])}: it is damaged. Load the weight again."
        )
    _check_length(weight.values, int(expected[-1]), "mask")


def _check_length(values: Tensor, kept: int, source: str) -> None:
    """Raise InvalidSetting unless values are as many as another part says, and their padding."""
    if len(values) != kept + VALUES_PADDING:
        raise InvalidSetting(
            f"`values` of a packed matrix has {len(values):,} elements, where its {source} calls for "
            f"{kept + VALUES_PADDING:,}: it is damaged. Load the weight again."
        )
