"""Methods and solvers by name, those of packages among them, and their settings: the fields of their classes.

Each is imported when it is used.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, SchemaError

from sparsellm.errors import InvalidSetting, first_line, nearest
from sparsellm.extension import find, imported, installed, is_place, name_of_class, names_of, packages_of, place_of, version_of
from sparsellm.recipes.fields import METHODS, select_blocks, split_name

if TYPE_CHECKING:
    from sparsellm.methods import AfterSolve, BlockMethod
    from sparsellm.solvers.patterns import Pattern
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

STEP_MEMBERS = ("on_dense", "stage", "check_memory", "memory", "begin")
"""Members of a `sparsellm.pipeline.steps.ModelStep` that is named in `then`."""

BLOCKS = frozenset[int] | None
"""The type of a setting that is a selection of blocks."""

SEQUENTIAL = "true_sequential"
"""Setting of layer-wise methods that read inputs: each layer is pruned on the outputs of the pruned layers before it."""


ADDING = "docs/build-on-sparsellm.md says how to add one."
"""The end of the message for a name that no method has."""


def brought_methods() -> list[str]:
    """The names of the methods that packages and plugins bring."""
    return names_of("methods", METHODS)


def method_names() -> list[str]:
    """The names of all methods: those of sparsellm, then those that packages and plugins bring."""
    return [*METHODS, *brought_methods()]


def is_known(name: str) -> bool:
    """Whether a method or a step has this name."""
    return name in method_names() or name in names_of("steps")


def check_method_name(name: str, field: str = "method", names: Collection[str] | None = None) -> None:
    """Raise InvalidSetting unless there is a method of this name.

    Args:
        field: The field that names it.
        names: The names to choose from. Default: those of all methods.
    """
    names = method_names() if names is None else names
    if is_place(name):
        raise InvalidSetting(
            f"`{field}` got the import path {name!r}, but only a command line takes one: recipes, sweeps and reports import no "
            f"code. Pass `plugin='{name}'`, and write the name that it brings."
        )
    if name not in names:
        raise InvalidSetting(f"`{field}` is unknown: got {name!r}. {nearest(str(name), names)} {ADDING}")


def is_object(fields: Mapping[str, Any]) -> bool:
    """Whether the method in the recipe of a report is an object, which is no name of a method."""
    return "source" in fields


def names_in(fields: Mapping[str, Any]) -> dict[str, str]:
    """The names in the fields of a recipe, by field: the method, the solver among its settings, a step that packages bring."""
    settings, steps = fields.get("settings"), fields.get("then")
    solver = settings.get("solver") if isinstance(settings, Mapping) else None
    named = {"method": [fields.get("method")], "settings": [solver], "then": steps if isinstance(steps, (list, tuple)) else []}
    names = {field: [x.get("name") if isinstance(x, Mapping) else x for x in several] for field, several in named.items()}
    return {field: name for field, several in names.items() for name in reversed(several) if isinstance(name, str)}


def package_of(name: str) -> str:
    """The package that brings a method or a step, with its version; empty for one of sparsellm, and for an unknown one."""
    return "" if name in METHODS else packages_of(_door(name), name)


def package_of_pattern(pattern: Pattern) -> str:
    """The package that brings the class of a pattern, with its version; empty for one of sparsellm."""
    brought = {place: name for x in installed() for name, place in x.extension.patterns.items()}
    name = brought.get(place_of(type(pattern)))
    return packages_of("patterns", name) if name else ""


def _door(name: str) -> str:
    """The attribute of `Extension` that brings a name: "steps" for a step, unless a method has the name."""
    return "steps" if name not in brought_methods() and name in names_of("steps") else "methods"


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

    return name not in brought_methods() or _default(name).needs is not TokenCount


def is_step(name: str) -> bool:
    """Whether a method of a package is a `sparsellm.pipeline.steps.ModelStep` too; False for an unknown one."""
    return name in brought_methods() and hasattr(_default(name), "begin")


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
    if hint == BLOCKS:
        return "blocks"
    return " or ".join(map(str, get_args(hint))) if get_origin(hint) is Literal else getattr(hint, "__name__", str(hint))


def _spelled(value: Any) -> str:
    """A default in words: the name of a solver, and other values as they are."""
    places = {place: name for name, place in SOLVERS.items()}
    return next((name for place, name in places.items() if imported(place)() == value), str(value))


def solver_named(value: Any) -> LayerSolver:
    """The solver of a name, or of a mapping with its name and settings. Raises InvalidSetting for any other."""
    name, settings = split_name(value, "solver")
    if name not in SOLVERS and (name not in brought_methods() or _is_method(_default(name))):
        if is_place(name):
            check_method_name(name, "solver")
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
    method = imported(LAYERWISE[is_sequential])(_in_float32(solver) if in_float32 else solver, **by_recipe)
    return method


def _with_settings(name: str, settings: Mapping[str, Any], depth: int | None = None) -> Any:
    """The solver or method of a name with these settings."""
    default = _default(name)
    if not settings:
        return default
    known, hints = settings_of(name), get_type_hints(type(default))
    if (unknown := next((key for key in settings if key not in known), None)) is not None:
        raise _refusal(name, f"The {_door(name)[:-1]} {name} has no setting {unknown!r}.")
    values = {}
    for key, value in settings.items():
        try:
            values[key] = _value(hints[key], value, depth)
        except ValidationError as error:
            raise _refusal(
                name, f"{key} of the {_door(name)[:-1]} {name}: {error.errors()[0]['msg'].lower()}, got {value!r}."
            ) from None
    try:
        return replace(default, **values)
    except (TypeError, ValueError) as error:  # of a class of others
        raise _refusal(name, f"The {_door(name)[:-1]} {name} refuses {values}: {first_line(error)}.") from error


def _refusal(name: str, reason: str) -> InvalidSetting:
    """The error for a setting of a method, with the names and types of all."""
    listed = ", ".join(f"{x.name} ({x.type})" for x in described_settings(name))
    return InvalidSetting(f"{reason} Settings of {name}: {listed or 'none'}.")


def _value(hint: Any, value: Any, depth: int | None) -> Any:
    """The value of a setting, of the type of its field. Raises pydantic's ValidationError for a value of another type."""
    from sparsellm.solvers import LayerSolver  # imports torch

    if hint is LayerSolver:
        return solver_named(value)
    if hint == BLOCKS:
        return select_blocks(str(value), depth) if depth and value is not None else None
    return _adapter(hint).validate_json(json.dumps(value))  # in which a list is a tuple's value too


def _default(name: str) -> Any:
    """The solver or method of a name, with its default settings. Raises InvalidSetting for a class that is neither."""
    if (place := (METHODS_OF_BLOCKS | SOLVERS).get(name)) is not None:
        return imported(place)()
    if (door := _door(name)) == "methods":
        check_method_name(name)
    kind = find(door, name)
    from sparsellm.methods import BlockMethod
    from sparsellm.solvers import LayerSolver

    try:
        if not (isinstance(kind, type) and is_dataclass(kind) and kind.__dataclass_params__.frozen):  # type: ignore[attr-defined]
            raise TypeError("it is no frozen dataclass")
        if required := [x.name for x in fields(kind) if x.init and x.default is MISSING and x.default_factory is MISSING]:
            raise TypeError(f"its field {required[0]!r} has no default")
        made = kind()
        data_of(made)
        if door == "steps":
            if missing := [member for member in STEP_MEMBERS if not hasattr(made, member)]:
                raise TypeError(f"it has no `{missing[0]}`")
            return made
        if not isinstance(made, (LayerSolver, BlockMethod)):
            raise TypeError("it has neither `needs` and `solve`, nor the members of a BlockMethod")
        check_statistics(made)
        return made
    except Exception as error:  # code of others
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InvalidSetting(f"The {door[:-1]} {name} of the package {package_of(name)} cannot be used ({reason}).") from error


def step_named(value: Any) -> Any:
    """The step of a name, or of a mapping with its name and settings. Raises InvalidSetting for any other."""
    name, settings = split_name(value, "then")
    if is_place(name) or _door(str(name)) != "steps":
        check_method_name(name, "then", names_of("steps"))
        raise InvalidSetting(f"`then` {name} is the name of a method too. Give its class another text `name`.")
    return _with_settings(name, settings)


def completed_steps(values: Sequence[Any]) -> tuple[Any, ...]:
    """Steps with all of their settings, as a recipe has them. Raises InvalidSetting for an unknown or a repeated one."""
    names = [split_name(value, "then")[0] for value in values]
    if (repeated := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise InvalidSetting(f"`then` names {repeated} twice. Name each only once.")
    found = [(name, data_of(step_named(value))) for name, value in zip(names, values, strict=True)]
    return tuple({"name": name, **data} if data else name for name, data in found)


def check_statistics(made: Any) -> None:
    """Raise InvalidSetting unless the `needs` of a solver or method are statistics."""
    from sparsellm.solvers.statistics import TokenCount

    needs = made.needs
    if not (isinstance(needs, type) and issubclass(needs, TokenCount)):
        raise InvalidSetting(
            f"{type(made).__name__}.needs must be a class of input statistics: TokenCount, InputRMS or Gram. Got {needs!r}."
        )


def completed(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a method as a recipe has them: those given; of a method or solver that a package brings, all.

    Its defaults may change with its version, and the readers of a report do not know them.

    Raises:
        InvalidSetting: A setting is unknown or has a wrong value.
    """
    if name in METHODS:
        solver, _ = split_name(settings.get("solver"), "solver")
        own = {"solver": _plain("solver", Any, solver_named(settings["solver"]))} if solver in brought_methods() else {}
        return {**settings, **own}
    known, hints = settings_of(name), get_type_hints(type(_default(name)))
    kept = {key: x for key, x in settings.items() if key in known and (key == SEQUENTIAL or hints[key] == BLOCKS)}
    made = _with_settings(name, {key: x for key, x in settings.items() if key not in kept})
    return data_of(made) | kept


def method_name_of(kind: type) -> str:
    """The name of the method of a class; its place, if sparsellm has another one of the name."""
    own = {place: name for name, place in (METHODS_OF_BLOCKS | SOLVERS).items()}
    brought = {place: name for x in installed() for name, place in x.extension.methods.items() if name not in METHODS}
    place = place_of(kind)
    name = (brought | own).get(place, name_of_class(kind))
    return place if name in METHODS and place not in own else name


def source_of(kind: type) -> str:
    """The place of a class, with the version of its package."""
    module = sys.modules.get(kind.__module__)  # None for a class that was made by exec
    return f"{place_of(kind)} {version_of(module) if module else ''}".rstrip()


def data_of(made: Any) -> dict[str, Any]:
    """The settings of a solver or method as plain data: all of them; of a class of sparsellm, those that are not the defaults.

    Raises:
        InvalidSetting: JSON cannot hold one.
    """
    if not is_dataclass(made):
        return {key: _plain(f"{type(made).__name__}.{key}", type(x), x) for key, x in getattr(made, "__dict__", {}).items()}
    is_ours = type(made).__module__.startswith("sparsellm.")
    try:
        hints = get_type_hints(type(made))
    except NameError:  # of a class inside a function
        hints = {}
    values = {x.name: (getattr(made, x.name), x.default) for x in fields(made) if x.init}
    all_but = [x for x in values if is_ours or x in SET_BY_RECIPE]
    chosen = {key: x for key, (x, default) in values.items() if key not in all_but or default is MISSING or x != default}
    return {key: _plain(f"{type(made).__name__}.{key}", hints.get(key, type(x)), x) for key, x in chosen.items()}


def _plain(name: str, hint: Any, value: Any) -> Any:
    """The value of a field as plain data: a solver as its name, with its settings if it has any."""
    if any(hasattr(value, member) for member in ("needs", "project")):  # solvers, methods, and what is done to solved weights
        settings = data_of(value)
        return {"name": method_name_of(type(value)), **settings} if settings else method_name_of(type(value))
    if value is None:
        return None
    if isinstance(value, frozenset):
        return ",".join(map(str, sorted(value)))
    try:
        adapter = _adapter(hint)
        data = adapter.dump_python(adapter.validate_python(value), mode="json")
        adapter.validate_json(json.dumps(data, allow_nan=False))
    except (PydanticSchemaGenerationError, PydanticSerializationError, SchemaError, ValueError) as error:
        raise InvalidSetting(f"`{name}` must be a value of its type that JSON can hold, got {value!r}.") from error
    return data


def _adapter(hint: Any) -> TypeAdapter[Any]:
    """The reader and writer of values of a type."""
    return TypeAdapter(hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True))


def _is_method(made: Any) -> bool:
    """Whether an object is a method of blocks, and no solver."""
    return hasattr(made, "prune")


def _may_be_sequential(made: Any) -> bool:
    """Whether an object is a solver that reads inputs."""
    from sparsellm.solvers.statistics import TokenCount

    return hasattr(made, "solve") and made.needs is not TokenCount


def _in_float32(solver: Any) -> Any:
    """A solver without products in bfloat16."""
    return solver.in_float32() if hasattr(solver, "in_float32") else solver
