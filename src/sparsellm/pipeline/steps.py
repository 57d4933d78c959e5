"""Steps that the whole model takes after its blocks, such as a training. Extensions bring them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.extension import find
from sparsellm.methods import BlockMethod, BlockShapes, Memory
from sparsellm.recipes.fields import split_name
from sparsellm.recipes.registry import step_named

if TYPE_CHECKING:
    from sparsellm.models.loaded_model import LoadedModel
    from sparsellm.outputs.journal import Journal
    from sparsellm.pipeline.loading import OpenedModel, Placement
    from sparsellm.recipes.recipe import RunRecipe


@runtime_checkable
class ModelStep(Protocol):
    """A step of a run that changes the whole model once its blocks are pruned.

    A method with these members is a step as well, the first one after the blocks that it pruned. A step that recipes name in
    `then` is a frozen dataclass, whose fields are its settings.

    Attributes:
        on_dense: Names of its stages before the blocks, which compute something with the dense model.
        stage: Name of its stage after the blocks.
    """

    on_dense: ClassVar[tuple[str, ...]]
    stage: ClassVar[str]

    def check_memory(self, opened: OpenedModel, windows: Tensor) -> str:
        """Describe the memory that the step takes, given the calibration sequences, (samples, length).

        Raises:
            TooLarge: The device has less.
        """
        ...

    def memory(self, ready: Any, placement: Placement, shapes: BlockShapes) -> Iterator[tuple[str, Memory]]:
        """The memory of each of its stages, by name. ready: the `Prepared` run."""
        ...

    def begin(self, run: Any, loaded: LoadedModel, batches: Sequence[Tensor], cache: Journal | None) -> Callable[[], None]:
        """Compute what the step needs of the dense model.

        Args:
            run: The `sparsellm.pipeline.run.Run`.
            batches: Calibration token ids, each (batch, length) without padding.
            cache: Holds what is known of the dense model on the calibration sequences.

        Returns:
            A function that changes the model, whose blocks are pruned by then, and adds to the report of the run.
        """
        ...


class NamedStep(ModelStep, Protocol):
    """A step that `Extension.steps` names, and fields of a recipe ask for."""

    @classmethod
    def of(cls, recipe: RunRecipe) -> Self:
        """The step of a pruning run."""
        ...


def steps_of(recipe: RunRecipe, method: BlockMethod) -> tuple[ModelStep, ...]:
    """The steps of a pruning run, that of the method first.

    Raises:
        InvalidSetting: No installed package brings one of them, or the method has only some members of a step.
    """
    found: list[ModelStep] = [method] if isinstance(method, ModelStep) else []
    if not found and hasattr(method, "begin"):
        raise InvalidSetting(
            f"{type(method).__name__} has `begin`, and not all other members of `sparsellm.pipeline.steps.ModelStep`."
        )
    named = {split_name(value, "then")[0]: value for value in getattr(recipe, "then", ())}
    for name in recipe.steps_after:
        if name in named:
            found.append(step_named(named[name]))
            continue
        kind: type[NamedStep] | None = find("steps", name)
        if kind is None:
            raise InvalidSetting(f"{name.capitalize()} of the whole model is brought by no installed package.")
        found.append(kind.of(recipe))
    return tuple(found)
