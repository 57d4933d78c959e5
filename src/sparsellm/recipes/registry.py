"""Methods and solvers by name, those of packages among them, and their settings: the fields of their classes.

Each is imported when it is used.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from sparsellm.errors import InvalidSetting, first_line, nearest
from sparsellm.extension import find, packages_of
from sparsellm.recipes.fields import BROUGHT_METHODS, METHODS, select_blocks, split_name

if TYPE_CHECKING:
    from sparsellm.methods import AfterSolve, BlockMethod
    from sparsellm.solvers.problem import LayerSolver

SOLVERS = {
    "magnitude": "sparsellm.solvers.scores:Magnitude",
    "wanda": "sparsellm.solvers.scores:Wanda",
    "sparsegpt": "sparsellm.solvers.sparsegpt:SparseGPT",
    "fast-admm": "sparsellm.solvers.fast_admm:FastADMM",
    "alps": "sparsellm.solvers.alps:ALPS",
    "alps-accurate": "sparsellm.solvers.alps:ALPS.accurate",
}
"""Where the layer solvers are; each is also a layer-wise method of its name."""

METHODS_OF_BLOCKS = {
    "sparsellm": "sparsellm.methods.sparsellm:SparseLLM",
    "algorithm1": "sparsellm.methods.algorithm1:Algorithm1",
}
"""Where the methods are that prune a block."""

LAYERWISE = {False: "sparsellm.methods.layerwise:LayerWise", True: "sparsellm.methods.sparsellm:TrueSequential"}
"""Where layer-wise methods are, without and with `SEQUENTIAL`."""

SET_BY_RECIPE = ("keep_zeros", "after_solve")
"""Fields of methods that other fields of a recipe set."""

SEQUENTIAL = "true_sequential"
"""Setting of layer-wise methods that read inputs: each layer is pruned on the outputs of the pruned layers before it."""


def method_names() -> list[str]:
    """The names of all methods: those of sparsellm, then those that packages bring."""
    return [*METHODS, *BROUGHT_METHODS]


def check_method_name(name: str) -> None:
    """Raise InvalidSetting unless there is a method of this name."""
    if name not in (names := method_names()):
        raise InvalidSetting(f"`method` is unknown: got {name!r}. {nearest(name, names)}")


def is_object(fields: Mapping[str, Any]) -> bool:
    """Whether the method in the recipe of a report names the class of an object, and no method that can be named."""
    method, packages = fields.get("method"), fields.get("packages")
    has_name = method in method_names() or (isinstance(packages, dict) and "method" in packages)
    return isinstance(method, str) and not has_name


def names_in(fields: Mapping[str, Any]) -> dict[str, str]:
    """The names of methods in the fields of a recipe, by field: the method, and the solver among its settings."""
    settings = fields.get("settings")
    solver = settings.get("solver") if isinstance(settings, Mapping) else None
    named = {"method": fields.get("method"), "settings": solver.get("name") if isinstance(solver, Mapping) else solver}
    return {field: name for field, name in named.items() if isinstance(name, str)}


def package_of(name: str) -> str:
    """The package that brings a method, with its version; empty for a method of sparsellm, and for an unknown one."""
    return "" if name in METHODS else packages_of("methods", name)


def description_of(name: str) -> str:
    """A method in a few words; of one that a package brings, the first line of its docstring, or why it cannot be used."""
    if name in METHODS:
        return METHODS[name]
    try:
        return (inspect.getdoc(type(_default(name))) or name).partition("\n")[0].removesuffix(".")
    except InvalidSetting as error:
        return str(error).removesuffix(".")


def reads_inputs(name: str) -> bool:
    """Whether a method reads the inputs of layers, so that it needs a calibration text; True for an unknown one."""
    if name in METHODS:
        return name != "magnitude"  # without an import of torch
    from sparsellm.solvers.statistics import TokenCount

    return name not in BROUGHT_METHODS or _default(name).needs is not TokenCount


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a method, with their defaults."""
    default = _default(name)
    found = {x.name: getattr(default, x.name) for x in fields(default) if x.init and x.name not in SET_BY_RECIPE}
    return found | ({SEQUENTIAL: False} if _may_be_sequential(default) else {})


@dataclass(frozen=True)
class DescribedSetting:
    """A setting of a method, in words."""

    name: str
    type: str
    default: str
    description: str


def described_settings(name: str) -> list[DescribedSetting]:
    """The settings of a method with what the docstring of its class says of them."""
    text = (inspect.getdoc(type(_default(name))) or "").partition("Attributes:\n")[2]
    lines = {m[1]: " ".join(m[2].split()) for m in re.finditer(r"^ {4}(\w+): (.*(?:\n {8,}.*)*)", text, re.MULTILINE)}
    lines[SEQUENTIAL] = "Prune each layer on the outputs of the pruned layers before it in its block."
    types = get_type_hints(type(_default(name))) | {SEQUENTIAL: bool}
    found = settings_of(name).items()
    return [DescribedSetting(key, _type_name(types[key]), _spelled(x), lines.get(key, "")) for key, x in found]


def _type_name(hint: Any) -> str:
    """The type of a setting in a word."""
    from sparsellm.solvers import LayerSolver  # imports torch

    if hint is LayerSolver:
        return "solver"
    if hint == frozenset[int] | None:
        return "blocks"
    return " or ".join(map(str, get_args(hint))) if get_origin(hint) is Literal else getattr(hint, "__name__", str(hint))


def _spelled(value: Any) -> str:
    """A default in words: the name of a solver, and other values as they are."""
    places = {place: name for name, place in SOLVERS.items()}
    return next((name for place, name in places.items() if _imported(place)() == value), str(value))


def solver_named(value: Any) -> LayerSolver:
    """The solver of a name, or of a mapping with its name and settings. Raises InvalidSetting for any other."""
    name, settings = split_name(value, "solver")
    if name not in SOLVERS and (name not in BROUGHT_METHODS or _is_method(_default(name))):
        raise InvalidSetting(f"The solver is unknown: got {name!r}. {nearest(str(name), SOLVERS)}")
    solver: LayerSolver = _with_settings(name, settings)
    return solver


def build(
    name: str,
    settings: Mapping[str, Any],
    *,
    depth: int | None = None,
    keep_zeros: bool = False,
    after_solve: AfterSolve | None = None,
    in_float32: bool = False,
) -> BlockMethod:
    """Build a method.

    Args:
        settings: The settings that differ from their defaults.
        depth: Number of blocks of the model; None where settings are only checked.
        keep_zeros: Field of the recipe.
        after_solve: What is done to solved weights.
        in_float32: Whether solvers do without products in bfloat16.

    Raises:
        InvalidSetting: A setting is unknown or has a wrong value.
    """
    method: BlockMethod
    by_recipe: dict[str, Any] = {"keep_zeros": keep_zeros, "after_solve": after_solve}
    if _is_method(default := _default(name)):
        made = _with_settings(name, settings, depth)
        if in_float32 and hasattr(made, "solver"):
            made = replace(made, solver=_in_float32(made.solver))
        known = {x.name for x in fields(made)}
        if wrong := next((key for key, x in by_recipe.items() if x and key not in known), None):
            raise InvalidSetting(f"`{wrong}` goes with a solver, and the method {name} has no such field. Leave it out.")
        method = replace(made, **{key: x for key, x in by_recipe.items() if key in known})
        return method
    own = dict(settings)
    is_sequential = own.pop(SEQUENTIAL, False) if _may_be_sequential(default) else False
    if not isinstance(is_sequential, bool):
        raise _refusal(name, f"{SEQUENTIAL} of the method {name} must be true or false, got {is_sequential!r}.")
    solver = _with_settings(name, own)
    method = _imported(LAYERWISE[is_sequential])(_in_float32(solver) if in_float32 else solver, **by_recipe)
    return method


def _with_settings(name: str, settings: Mapping[str, Any], depth: int | None = None) -> Any:
    """The solver or method of a name with these settings."""
    default = _default(name)
    if not settings:
        return default
    known, hints = settings_of(name), get_type_hints(type(default))
    if unknown := next((key for key in settings if key not in known), None):
        raise _refusal(name, f"The method {name} has no setting {unknown!r}.")
    values = {}
    for key, value in settings.items():
        try:
            values[key] = _value(hints[key], value, depth)
        except ValidationError as error:
            raise _refusal(name, f"{key} of the method {name}: {error.errors()[0]['msg'].lower()}, got {value!r}.") from None
    try:
        return replace(default, **values)
    except (TypeError, ValueError) as error:  # of a class of others
        raise _refusal(name, f"The method {name} refuses {values}: {first_line(error)}.") from error


def _refusal(name: str, reason: str) -> InvalidSetting:
    """The error for a setting of a method, with the names and types of all."""
    listed = ", ".join(f"{x.name} ({x.type})" for x in described_settings(name))
    return InvalidSetting(f"{reason} Settings of {name}: {listed or 'none'}.")


def _value(hint: Any, value: Any, depth: int | None) -> Any:
    """The value of a setting, of the type of its field. Raises pydantic's ValidationError for a value of another type."""
    from sparsellm.solvers import LayerSolver  # imports torch

    if hint is LayerSolver:
        return solver_named(value)
    if hint == frozenset[int] | None:
        return select_blocks(str(value), depth) if depth else None
    return TypeAdapter(hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True)).validate_python(value)


def _default(name: str) -> Any:
    """The solver or method of a name, with its default settings. Raises InvalidSetting for a class that is neither."""
    if (place := (METHODS_OF_BLOCKS | SOLVERS).get(name)) is not None:
        return _imported(place)()
    check_method_name(name)
    kind = find("methods", name)
    from sparsellm.methods import BlockMethod
    from sparsellm.solvers import LayerSolver

    try:
        made = kind()
        if not (is_dataclass(kind) and isinstance(made, (LayerSolver, BlockMethod))):
            raise TypeError("it is no frozen dataclass with needs and solve, or with the members of a BlockMethod")
        return made
    except Exception as error:  # code of others
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InvalidSetting(f"The method {name} of the package {package_of(name)} cannot be used ({reason}).") from error


def _is_method(made: Any) -> bool:
    """Whether an object is a method of blocks, and no solver."""
    return hasattr(made, "prune")


def _may_be_sequential(made: Any) -> bool:
    """Whether an object is a solver that reads inputs."""
    from sparsellm.solvers.statistics import TokenCount

    return not _is_method(made) and made.needs is not TokenCount


def _in_float32(solver: Any) -> Any:
    """A solver without products in bfloat16."""
    return solver.in_float32() if hasattr(solver, "in_float32") else solver


def _imported(place: str) -> Any:
    """Import the object at a place, "module:name"."""
    module, _, name = place.partition(":")
    return attrgetter(name)(import_module(module))
