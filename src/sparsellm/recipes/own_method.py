"""Recipes of runs whose method is an object: a solver or a method of this package or of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from sparsellm.errors import InvalidSetting
from sparsellm.methods import BlockMethod
from sparsellm.recipes.fields import METHODS, is_object
from sparsellm.recipes.recipe import Recipe
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.statistics import TokenCount

OF_THE_METHOD = ("keep_zeros",)
"""Fields that `LayerWise` takes, so that they go with a solver but not with a method."""


class ObjectRecipe(Recipe):
    """A recipe whose method is an object.

    Attributes:
        method: The name of its class, which reports show.
        given: The solver or method; None for a recipe that is read from a report.
    """

    method: str  # type: ignore[assignment]
    given: Any = Field(None, exclude=True, repr=False)

    @model_validator(mode="after")
    def _check_no_settings(self) -> ObjectRecipe:
        if self.settings:
            raise InvalidSetting(f"`settings` go with the name of a method, got an object of {self.method}. Leave them out.")
        return self

    @model_validator(mode="after")
    def _check_given(self) -> ObjectRecipe:
        if self.given is None:
            return self
        if isinstance(self.given, BlockMethod) and (name := self._first_changed(*OF_THE_METHOD) or self.projecting):
            raise InvalidSetting(f"`{name}` goes with a solver, got the method {self.method}. Leave it out.")
        needs = self.given.needs
        if not (isinstance(needs, type) and issubclass(needs, TokenCount)):
            raise InvalidSetting(
                f"{self.method}.needs must be a class of input statistics: TokenCount, InputRMS or Gram. Got {needs!r}."
            )
        return self

    @property
    def reads_text(self) -> bool:
        return getattr(self.given, "needs", None) is not TokenCount or self.allocates


def method_fields(method: Any) -> tuple[type[Recipe], dict[str, Any]]:
    """The class of a recipe with this method, a name or an object, and the fields that set it.

    Raises:
        InvalidSetting: It is neither a name nor a solver or method.
    """
    if isinstance(method, str):
        return Recipe, {"method": method}
    name = f"the class {method.__name__}" if isinstance(method, type) else type(method).__name__
    if isinstance(method, type) or not isinstance(method, (BlockMethod, LayerSolver)):
        raise InvalidSetting(
            f"`method` must be one of {', '.join(METHODS)}, a solver (an object with needs and solve(problem, pattern)), or a "
            f"method. Got {name}."
        )
    return ObjectRecipe, {"method": name, "given": method}


def saved_kind(fields: Mapping[str, Any]) -> type[Recipe]:
    """The class of the recipe that a report of a pruning run holds."""
    return ObjectRecipe if is_object(fields) else Recipe
