"""Files beside the weights of a checkpoint, such as the scales of rounded weights. Extensions bring them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from sparsellm.checkpoints.headers import stored_weights
from sparsellm.checkpoints.tensor_index import Stored, locations_of
from sparsellm.errors import InvalidSetting
from sparsellm.extension import find, names_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StoredFormat(Protocol):
    """The format of the numbers of a weight."""

    def fields_of(self, weight: Tensor) -> dict[str, Any]:
        """The entries `bits`, `group_size` and `bits_per_weight` of a result on a weight, (out, in), of the format."""
        ...


@runtime_checkable
class HoldsFormats(Protocol):
    """A module that holds weights in another form."""

    def weight_formats(self) -> Mapping[str, StoredFormat]:
        """The formats of those that have one, by the parameter."""
        ...


class SideFile(Protocol):
    """A file of a checkpoint, under a name of its own."""

    @staticmethod
    def write(folder: Path, model: PreTrainedModel, report: Any) -> str:
        """Write the file of a checkpoint that was just written.

        Args:
            folder: The folder of the checkpoint.
            model: The model, or a skeleton that gives the names of its parameters.
            report: The `sparsellm.outputs.report.Report` of the run, whose blocks have the `scales` of their layers.

        Returns:
            A note for the report; may be empty.
        """
        ...

    @staticmethod
    def formats(folder: Path) -> Mapping[str, StoredFormat]:
        """The formats of weights by their stored names. Raises BadCheckpoint for a damaged file."""
        ...


def write_side_files(folder: Path, model: PreTrainedModel, report: Any) -> list[str]:
    """Write the side files of a checkpoint whose layers have scales, and return notes. Arguments as `SideFile.write`.

    One that cannot be imported is left out with a note: its package need not have taken part in the run.
    """
    notes: list[str] = []
    for name in names_of("side_files"):
        try:
            file: SideFile = find("side_files", name)
        except InvalidSetting as error:
            notes.append(f"{name} is not written: {str(error).removesuffix('.')}")
        else:
            notes.append(file.write(folder, model, report))
    return [note for note in notes if note]


def formats_of(tensors: Mapping[str, Stored | Tensor]) -> dict[str, StoredFormat]:
    """The formats of tensors by what weight files and side files say, under the names that the argument gives them.

    A tensor that is stored in pieces has the format of the first one that has any.
    """
    listed: dict[Path, dict[str, StoredFormat]] = {}
    found: dict[str, StoredFormat] = {}
    for name, stored in tensors.items():
        for location in locations_of(stored):
            if location.file not in listed:
                weights = stored_weights(location.file) if location.file.suffix == ".safetensors" else {}
                listed[location.file] = {key: x.integers for key, x in weights.items() if x.integers is not None}
                for side in names_of("side_files"):
                    if (location.file.parent / side).is_file():
                        listed[location.file] |= find("side_files", side).formats(location.file.parent)
            if location.key in listed[location.file]:
                found.setdefault(name, listed[location.file][location.key])
    return found
