"""Recipes of runs whose method is an object: a solver or a method of this package or of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationInfo, model_validator

from sparsellm.errors import InvalidSetting
from sparsellm.methods import BlockMethod
from sparsellm.recipes.recipe import Recipe
from sparsellm.recipes.registry import check_statistics, data_of, is_object, method_name_of, method_names, source_of
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.statistics import TokenCount

OF_THE_METHOD = ("keep_zeros",)
"""Fields that `LayerWise` takes, so that they go with a solver but not with a method."""


class ObjectRecipe(Recipe):
    """A recipe whose method is an object.

    Attributes:
        method: Its name, as that of a method that is named.
        settings: Its fields, as plain data.
        source: Where its class is, "module:name", with the version of the package.
        given: The solver or method; None for a recipe that is read from a report.
    """

    method: str
    source: str
    given: Any = Field(None, exclude=True, repr=False)

    @classmethod
    def _is_method(cls, value: str, info: ValidationInfo) -> str:
        return value

    @classmethod
    def _complete_settings(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return value

    def _check_method_settings(self) -> None:
        pass

    @property
    def _is_default_method(self) -> bool:
        return False

    @model_validator(mode="after")
    def _check_given(self) -> ObjectRecipe:
        if self.given is None:
            return self
        if isinstance(self.given, BlockMethod) and (name := self._first_changed(*OF_THE_METHOD) or self.projecting):
            raise InvalidSetting(f"`{name}` goes with a solver, got the method {self.method}. Leave it out.")
        check_statistics(self.given)
        return self

    @property
    def _reads_inputs(self) -> bool:
        return getattr(self.given, "needs", None) is not TokenCount

    @property
    def _method_is_step(self) -> bool:
        return hasattr(self.given, "begin")


def method_fields(method: Any, settings: Mapping[str, Any]) -> tuple[type[Recipe], dict[str, Any]]:
    """The class of a recipe with this method, a name or an object, and the fields that set it.

    Args:
        settings: The other fields, of which `settings` go with a name only.

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
    if settings.get("settings"):
        raise InvalidSetting(f"`settings` go with the name of a method, got an object of {name}. Leave them out.")
    fields = {"method": method_name_of(type(method)), "settings": data_of(method), "source": source_of(type(method))}
    return ObjectRecipe, fields | {"given": method}


def saved_kind(fields: Mapping[str, Any]) -> type[Recipe]:
    """The class of the recipe that a report of a pruning run holds."""
    return ObjectRecipe if is_object(fields) else Recipe
