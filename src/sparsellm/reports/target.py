"""What a search must meet: a perplexity, an accuracy or a size; and what it measures at each sparsity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sparsellm.checkpoints.headers import dtype_name
from sparsellm.checkpoints.loading import Checkpoint
from sparsellm.errors import InvalidSetting
from sparsellm.models.output_head import blocks_and_head
from sparsellm.runs.loading import OpenedModel
from sparsellm.runs.preparation import make_plan
from sparsellm.runs.recipe import Recipe
from sparsellm.runs.recipe_fields import parse_size
from sparsellm.runtime.memory import human_bytes
from sparsellm.solvers.patterns import Unstructured
from sparsellm.sparse.packed_tensors import estimated_bytes


@dataclass(frozen=True)
class Target:
    """What the pruned model must meet: exactly one of the three.

    Attributes:
        perplexity_increase: Largest relative increase of the perplexity on every text that the recipe evaluates.
        accuracy: Smallest accuracy by task.
        size: Largest number of bytes of the weights, as `packed_size` estimates it.
    """

    perplexity_increase: float | None = None
    accuracy: Mapping[str, float] | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        if (given := sum(value not in (None, {}) for value in vars(self).values())) != 1:
            raise InvalidSetting(
                f"Name one target: `max_perplexity_increase`, `min_accuracy` or `max_size`; got {given or 'none'}."
            )

    @classmethod
    def read(
        cls,
        max_perplexity_increase: str | float | None = None,
        min_accuracy: Mapping[str, float] | Sequence[str] | str | None = None,
        max_size: str | int | None = None,
    ) -> Target:
        """Read a target from "5%" or 0.05, from "boolq:0.6" or {"boolq": 0.6}, or from "500MB" or a number of bytes.

        Raises:
            InvalidSetting: A value is invalid, or not exactly one is given.
        """
        increase = None if max_perplexity_increase is None else _fraction("max_perplexity_increase", max_perplexity_increase)
        items = min_accuracy.items() if isinstance(min_accuracy, Mapping) else _split(min_accuracy)
        accuracy: dict[str, float] = {}
        for task, value in items:
            if not task:
                raise InvalidSetting(f"`min_accuracy` needs a task and an accuracy, as boolq:0.60; got {value!r}.")
            accuracy[task] = _fraction("min_accuracy", value)
            if accuracy[task] > 1:
                raise InvalidSetting(f"`min_accuracy` must be at most 1, or 100%, got {value} for {task}.")
        size = parse_size("max_size", max_size) if isinstance(max_size, str) else max_size
        return cls(increase, accuracy or None, size)

    def __str__(self) -> str:
        if self.size is not None:
            return f"weights of at most {human_bytes(self.size)} once packed"
        if self.accuracy:
            return "an accuracy of at least " + ", ".join(f"{value:g} on {task}" for task, value in self.accuracy.items())
        return f"a perplexity increase of at most {100 * (self.perplexity_increase or 0.0):.10g} %"

    def is_met(self, perplexity: Mapping[str, float], dense: Mapping[str, float], accuracy: Mapping[str, float]) -> bool:
        """Whether measurements meet the target: perplexity of the model and of the dense one by text, accuracy by task."""
        if self.accuracy:
            return all(accuracy[task] >= least for task, least in self.accuracy.items())
        return all(perplexity[text] <= dense[text] * (1 + (self.perplexity_increase or 0.0)) for text in dense)


@dataclass(frozen=True)
class Point:
    """One sparsity of a search.

    Attributes:
        effort: Effort of the method sparsellm, or the name of another method.
        met: Whether the target is met.
        increase: Its largest relative increase over the texts; None if none was measured.
        size: Bytes of the packed weights; None unless the target is a size.
    """

    sparsity: float
    effort: str
    met: bool
    perplexity: Mapping[str, float]
    increase: float | None
    accuracy: Mapping[str, float]
    size: int | None
    seconds: float

    def describe(self) -> str:
        """The sparsity with what was measured of it."""
        figures = [f"an accuracy of {value:.3g} on {task}" for task, value in self.accuracy.items()]
        figures = figures or [f"a perplexity increase of {100 * (self.increase or 0.0):.3g} %"]
        return f"{Unstructured(self.sparsity)} has {', '.join(figures)}"


def packed_size(recipe: Recipe, opened: OpenedModel, sparsity: float) -> int:
    """Upper estimate of the bytes of a pruned model's weights once they are packed.

    Args:
        recipe: Selects the layers and the dtype.
    """
    _, plan = make_plan(recipe.model_copy(update={"sparsity": str(Unstructured(sparsity))}), opened)
    blocks = blocks_and_head(opened.skeleton, plan)
    counts = [x.in_features * x.out_features for b in blocks for n, x in b.layers.items() if b.full_name(n) in plan]
    assert isinstance(opened.source, Checkpoint)
    dtype = opened.source.dtype(recipe.dtype)
    pruned = sum(counts)
    zeros: int = Unstructured(sparsity).count_removed(pruned) - len(counts)  # each layer rounds its count
    others: int = sum(tensor.numel() for tensor in opened.skeleton.parameters()) - pruned
    return others * dtype.itemsize + estimated_bytes(pruned, max(zeros, 0), dtype_name(dtype))


def _fraction(field: str, value: str | float) -> float:
    """A fraction from "5%" or 0.05. Raises InvalidSetting, which names the field."""
    text = str(value).strip()
    with suppress(ValueError):
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if math.isfinite(number) and number >= 0 and (text.endswith("%") or number <= 1):
            return number
    raise InvalidSetting(f"`{field}` must be a percentage such as 5% or a fraction such as 0.05, got {text!r}.")


def _split(texts: Sequence[str] | str | None) -> Iterable[tuple[str, str]]:
    """Task and accuracy of each text "TASK:ACCURACY"."""
    for text in [texts] if isinstance(texts, str) else texts or ():
        task, _, value = text.rpartition(":")
        yield task, value
