"""Parts of a report: totals, and sections that extensions bring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from sparsellm.checkpoints.remarks import remark
from sparsellm.errors import InvalidSetting
from sparsellm.extension import find
from sparsellm.texts.json_files import first_fault


class Section(ABC):
    """Base of a part of a report that an extension brings, under a name of its own in the file."""

    @classmethod
    @abstractmethod
    def from_dict(cls, data: Any) -> Self:
        """Read plain data. Raises pydantic's ValidationError, or ValueError, for any other than `to_dict` gives."""

    @abstractmethod
    def to_dict(self) -> Any:
        """Plain data, ready for JSON."""

    def describe(self) -> str:
        """The sentences on it for the page of the run; may be empty."""
        return ""

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of the weights in the packed form that the section is on; None if it is on something else."""
        return None

    def compare(self, output: Any, tensors: Any, model: Any, model_tensors: Any) -> tuple[list[str], int] | None:
        """Compare the output with the model that it was made from, in place of the comparison with the dense model.

        Args:
            output: The `sparsellm.outputs.verification.Output`.
            tensors: Its `sparsellm.checkpoints.comparison.StoredTensors`.
            model: The other model, a `Checkpoint` or `InMemoryModel`.
            model_tensors: Its tensors.

        Returns:
            A sentence for each difference, and the number of layers that were compared after rounding; None if the output was
            not made from this model.
        """
        return None


@dataclass(frozen=True)
class UnknownSection(Section):
    """A section of an extension that is not installed or cannot be imported: it is kept as it is."""

    data: Any

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Keep plain data."""
        return cls(data)

    def to_dict(self) -> Any:
        """The same."""
        return self.data


def read_sections(data: Mapping[str, Any], own: Collection[str]) -> dict[str, Section]:
    """The sections in the plain data of a report, by name.

    Args:
        own: Names of the entries that are no sections.

    Raises:
        ValueError: A section is damaged.
    """
    sections: dict[str, Section] = {}
    for name in (name for name in data if name not in own):
        try:
            kind = find("sections", name, Section) or UnknownSection
        except InvalidSetting as error:  # a section that cannot be read is kept, and stops no command
            remark(str(error).removesuffix("."), ("section", name))
            kind = UnknownSection
        try:
            sections[name] = kind.from_dict(data[name])
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # the last ones from code of others
            raise ValueError(f"{name}: {first_fault(error)}") from None
    return sections
