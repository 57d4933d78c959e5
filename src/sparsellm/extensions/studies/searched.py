"""The settings that a search can vary: the values of each to choose from, and their names in messages.

Imports no torch at its top, so that a wrong value is refused at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sparsellm.errors import InvalidSetting, dtype_name
from sparsellm.extensions.integers.formats import WIDTHS
from sparsellm.solvers.patterns import Unstructured, parse_pattern

if TYPE_CHECKING:
    import torch

    from sparsellm.pipeline.loading import OpenedModel
    from sparsellm.recipes.recipe import Recipe

HIGHEST = 0.95
"""The largest sparsity that a search tries; beyond it, models of any size are far from the dense one."""

MOST_BITS = float(WIDTHS[-1])
"""The most bits a weight that a search tries: those of the widest integers."""

MOSTLY_KEPT = 0.5
"""Share of a model's bytes that bits leave as they are, from which a search over bits says so."""


@dataclass(frozen=True)
class PrunedSizes:
    """The sizes of what a recipe prunes, and of the rest of a model.

    Attributes:
        shapes: (out, in) of each layer that the recipe prunes.
        others: Number of all other weights.
        dtype: The dtype in which they are stored.
    """

    shapes: Mapping[str, tuple[int, int]]
    others: int
    dtype: torch.dtype

    @classmethod
    def of(cls, recipe: Recipe, opened: OpenedModel) -> PrunedSizes:
        """Those of a model that is opened, whose weights are not read."""
        from sparsellm.checkpoints.loading import Checkpoint
        from sparsellm.extensions.integers.bit_allocation import shapes_of
        from sparsellm.models.output_head import blocks_and_head
        from sparsellm.pipeline.preparation import make_plan

        assert isinstance(opened.source, Checkpoint)
        _, plan = make_plan(recipe, opened)
        shapes = shapes_of(blocks_and_head(opened.skeleton, plan), plan)
        numel: int = sum(tensor.numel() for tensor in opened.skeleton.parameters())
        return cls(shapes, numel - sum(map(math.prod, shapes.values())), opened.source.dtype(recipe.dtype))

    @property
    def pruned(self) -> int:
        """Number of weights of the layers that the recipe prunes."""
        return sum(map(math.prod, self.shapes.values()))


class Searched(ABC):
    """A setting that a search varies. Each value of its grid removes more of the model than the one before.

    Attributes:
        name: The field of recipes.
        noun: The setting in a sentence, after "no".
        step: The default distance between values.
        steps: The smallest and the largest distance.
        start: A value that every model can have.
        bounds: What the first and the last value of a grid are.
    """

    name: ClassVar[str]
    noun: ClassVar[str]
    step: ClassVar[float]
    steps: ClassVar[tuple[float, float]]
    start: ClassVar[float]
    bounds: ClassVar[tuple[str, str]]

    def read_step(self, text: str | float | None) -> float:
        """The distance between values. Raises InvalidSetting for one that is out of range."""
        step, (least, most) = self.step if text is None else self.read(text), self.steps
        if not least <= step <= most:
            raise InvalidSetting(f"`step` must be from {self.label(least)} to {self.label(most)}, got {self.label(step)}.")
        return step

    @abstractmethod
    def read(self, text: str | float) -> float:
        """A distance from its text. Raises InvalidSetting."""

    @abstractmethod
    def grid(self, step: float, sizes: PrunedSizes) -> list[float]:
        """The values to choose from, which are multiples of the step."""

    @abstractmethod
    def fields(self, value: float) -> dict[str, Any]:
        """The fields of a recipe with the value, and those that have no place beside it."""

    @abstractmethod
    def label(self, value: float) -> str:
        """The value in a sentence."""

    @abstractmethod
    def cell(self, value: float) -> str:
        """The value in a column of a table that `name` heads."""

    @abstractmethod
    def packed_bytes(self, value: float, sizes: PrunedSizes) -> int:
        """Upper estimate of the bytes of the pruned layers' weights once they are packed."""

    def size_note(self, sizes: PrunedSizes) -> str:
        """That the model's size falls little, whatever the value; empty if it does not, or does not matter."""
        return ""

    @abstractmethod
    def beyond(self, grid: Sequence[float], *, last: bool) -> str:
        """The advice for values beyond the last or the first one of a grid, as a sentence without full stop."""


class SparsitySearch(Searched):
    """Sparsities, in increasing order."""

    name, noun, step, start = "sparsity", "sparsity", 0.01, 0.5
    steps = (1e-3, 0.5)  # measurements of models that are closer differ by less than their standard errors
    bounds = ("the smallest sparsity that is tried", "the largest sparsity that is tried")

    def read(self, text: str | float) -> float:
        return parse_pattern(text, "step").sparsity

    def grid(self, step: float, sizes: PrunedSizes) -> list[float]:
        return [round(number * step, 12) for number in range(1, int(HIGHEST / step + 1e-9) + 1)]

    def fields(self, value: float) -> dict[str, Any]:
        return {"sparsity": str(Unstructured(value))}

    def label(self, value: float) -> str:
        return str(Unstructured(value))

    def cell(self, value: float) -> str:
        return f"{100 * value:.5g} %"

    def packed_bytes(self, value: float, sizes: PrunedSizes) -> int:
        from sparsellm.outputs.sizes import estimated_bytes

        zeros: int = round(value * sizes.pruned) - len(sizes.shapes)  # each layer rounds its count
        return estimated_bytes(sizes.pruned, max(zeros, 0), dtype_name(sizes.dtype))

    def beyond(self, grid: Sequence[float], *, last: bool) -> str:
        if last and grid[-1] >= HIGHEST - 1e-9:
            return "A pruning run takes larger ones"
        return f"Pass a smaller `step` for {'larger' if last else 'smaller'} ones"


class BitSearch(Searched):
    """Bits a weight of the pruned layers, in decreasing order."""

    name, noun, step, start = "bits", "number of bits", 0.1, 4.0
    steps = (0.01, 2.0)
    bounds = ("the most bits that are tried", "the fewest bits that are tried")

    def read(self, text: str | float) -> float:
        try:
            return float(text)
        except ValueError:
            raise InvalidSetting(f"`step` must be a number of bits such as 0.1 in a search over bits, got {text!r}.") from None

    def grid(self, step: float, sizes: PrunedSizes) -> list[float]:
        from sparsellm.extensions.integers.bit_allocation import bit_range

        least, most = bit_range(sizes.shapes)
        numbers = range(math.ceil(least / step - 1e-9), int(min(most, MOST_BITS) / step + 1e-9) + 1)
        return [bits for number in reversed(numbers) if least <= (bits := round(number * step, 12)) <= most]

    def fields(self, value: float) -> dict[str, Any]:
        return {"sparsity": None, "bits": value}

    def label(self, value: float) -> str:
        return f"{value:.10g} bits a weight"

    def cell(self, value: float) -> str:
        return f"{value:.2f}"

    def packed_bytes(self, value: float, sizes: PrunedSizes) -> int:
        return math.ceil(value * sizes.pruned / 8)

    def size_note(self, sizes: PrunedSizes) -> str:
        share = sizes.others / (sizes.others + sizes.pruned)
        if share < MOSTLY_KEPT:
            return ""
        return (
            f"{100 * share:.0f} % of the model's bytes are embeddings, output head and other weights that stay as they are, so "
            "that fewer bits make it little smaller. `embeddings='int8'` of `pack` rounds embeddings and head"
        )

    def beyond(self, grid: Sequence[float], *, last: bool) -> str:
        return (
            "Pass a smaller `step` for fewer" if last else "No integers are wider. A search over sparsity keeps 16 bits a value"
        )


SEARCHED: dict[str, Searched] = {setting.name: setting for setting in (SparsitySearch(), BitSearch())}
"""The settings by their names."""


def searched_setting(name: str) -> Searched:
    """The setting of a name. Raises InvalidSetting if a search cannot vary it."""
    if name not in SEARCHED:
        raise InvalidSetting(f"`over` must be {' or '.join(SEARCHED)}, got {name!r}.")
    return SEARCHED[name]
