"""Recipes of runs whose method is an object: a solver or a method of this package or of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationInfo, model_validator

from sparsellm.errors import InvalidSetting
from sparsellm.methods import BlockMethod
from sparsellm.recipes.recipe import Recipe
from sparsellm.recipes.registry import is_object, method_names
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

    method: str
    given: Any = Field(None, exclude=True, repr=False)

    @classmethod
    def _is_method(cls, value: str, info: ValidationInfo) -> str:
        return value

    def _check_method_settings(self) -> None:
        if self.settings:
            raise InvalidSetting(f"`settings` go with the name of a method, got an object of {self.method}. Leave them out.")

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
    def _reads_inputs(self) -> bool:
        return getattr(self.given, "needs", None) is not TokenCount

    @property
    def _method_is_step(self) -> bool:
        return hasattr(self.given, "begin")


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
            f"`method` must be one of {', '.join(method_names())}, a solver (an object with needs and solve(problem, "
            f"pattern)), or a method. Got {name}."
        )
    return ObjectRecipe, {"method": name, "given": method}


def saved_kind(fields: Mapping[str, Any]) -> type[Recipe]:
    """The class of the recipe that a report of a pruning run holds."""
    return ObjectRecipe if is_object(fields) else Recipe
