"""Extensions: packages that bring commands, options and more, and how they are found.

An extension is an object of `Extension`. The metadata of its package name it, in pyproject.toml:

    [project.entry-points."sparsellm.extensions"]
    ria = "my_pruner:EXTENSION"

sparsellm's own extensions, in `sparsellm.extensions`, are found in the same way. A plugin is an extension without metadata: a
module that the user names, on the command line or in Python.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import (
    EntryPoint,
    PackageNotFoundError,
    distribution,
    entry_points,
    packages_distributions,
    version,
)
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from sparsellm.errors import InvalidSetting, first_line

ENTRY_POINTS = "sparsellm.extensions"
"""The group of the entry points that name extensions."""


@dataclass(frozen=True, kw_only=True)
class Extension:
    """Names of what a package brings.

    Values are import strings, "module:name", so that finding an extension imports no more than the module that holds this
    object. That module imports nothing of `sparsellm.recipes`, which itself asks for extensions as it is imported. The modules
    of commands, options and fields are imported for every command line and should import little.

    Attributes:
        methods: By its name, a class of a solver or method: a frozen dataclass with the members of
            `sparsellm.solvers.LayerSolver` or `sparsellm.methods.BlockMethod`. Its fields, each with a default, are its
            settings.
        commands: By its name on the command line, a function that `typer` makes a command of.
        options: By the name of a command that runs recipes, classes of further options: subclasses of
            `sparsellm.cli.run_options.RunOptions`.
        fields: By "prune", classes of further fields of its recipes, which become options and keywords too: subclasses of
            `sparsellm.recipes.fields.FurtherFields`.
        readers: By the `quant_method` in config.json, a reader of weights that are stored in another form: a class with the
            attributes of `sparsellm.checkpoints.readers.Reader`.
        sections: By its name in sparsellm.json, a class of a part of reports: a subclass of
            `sparsellm.outputs.sections.Section`.
        recipes: By the command that runs it, a class of recipes: a subclass of `sparsellm.recipes.recipe.RunRecipe`.
        steps: By its name in `RunRecipe.steps_after`, a class of what the whole model goes through after its blocks, with the
            methods of `sparsellm.pipeline.steps.NamedStep`.
        patterns: By any name, a class of sparsity patterns: a subclass of `sparsellm.solvers.patterns.Pattern`.
        allocations: By its name in `allocation`, a class of a rule that sets each layer's pattern, with the methods of
            `sparsellm.pipeline.cached_allocation.Rule`.
        side_files: By its name, a class that writes and reads a file beside the weights, with the methods of
            `sparsellm.checkpoints.side_files.SideFile`.
        facts: By its entry in `sparsellm info --json`, a module with `examine()`, which gives the entry, and `rows(entry)`,
            which gives lines, each a name and a text, by the title of their part.
        observers: By any name, a function that is called with the recipe of each run, in each process, and returns an observer
            of its events (`sparsellm.observers.events`), or None.
        views: By "html", a function of a result of a run to the HTML that notebooks show of it; by "plot", one of a result and
            the name of a plot to a figure of matplotlib.
        products: By the type of a device, such as "cuda", a function (left, right) to the product of two matrices on it, (m, k)
            and (k, n), for `sparsellm.runtime.products.matmul`.
    """

    methods: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    fields: Mapping[str, Sequence[str]] = field(default_factory=dict)
    readers: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, str] = field(default_factory=dict)
    recipes: Mapping[str, str] = field(default_factory=dict)
    steps: Mapping[str, str] = field(default_factory=dict)
    patterns: Mapping[str, str] = field(default_factory=dict)
    allocations: Mapping[str, str] = field(default_factory=dict)
    side_files: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    observers: Mapping[str, str] = field(default_factory=dict)
    views: Mapping[str, str] = field(default_factory=dict)
    products: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Installed:
    """An extension of an installed package, or a plugin.

    Attributes:
        name: Name of its entry point, or the plugin as the user names it.
        package: Name of its package; of a plugin, of its module.
        version: Version of its package; empty for a plugin without one.
        extension: The object; without contents if it cannot be loaded.
        error: Why it cannot be loaded, or an empty string.
    """

    name: str
    package: str
    version: str
    extension: Extension = field(default_factory=Extension)
    error: str = ""

    @property
    def brings(self) -> dict[str, list[str]]:
        """By attribute of `Extension`, the names of what it brings."""
        return {door: list(names) for door, names in vars(self.extension).items() if names}

    def load(self, value: str, base: type = object) -> Any:
        """Import what an import string of the extension names. Raises InvalidSetting, which names the package.

        Args:
            base: The class of which it must be a subclass, if it must be one.
        """
        try:
            found = imported(value)
            if base is not object and not issubclass(found, base):
                raise TypeError(f"it is no subclass of {base.__module__}.{base.__name__}")
        except Exception as error:  # code of others
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise InvalidSetting(f"{value} of the package {self.package} cannot be imported ({reason}).") from error
        return found


PROBLEMS: list[str] = []
"""A line on each extension, or part of one, that cannot be used. Commands that do not need it run all the same."""


CIRCLE = "its module imports much of sparsellm; keep EXTENSION in one that imports sparsellm.extension only"
"""Why a module cannot be loaded that imports one which asks for extensions as it is imported."""

_LISTING: list[bool] = []
"""Not empty while extensions are listed."""

PLUGINS: list[Installed] = []
"""The plugins that this process has loaded."""

DOORS_OF_CLASSES = {"solve": "methods", "prune": "methods", "begin": "steps", "count_removed": "patterns"}
"""By a member that a class has, the attribute of `Extension` that brings it."""

OF_PACKAGES_ONLY = ("commands", "options", "fields", "recipes")
"""Attributes of `Extension` that make the command line and recipes, which are made before a plugin is loaded."""


def installed() -> tuple[Installed, ...]:
    """The extensions of all installed packages, by name, and the plugins."""
    return (*_of_packages(), *PLUGINS)


@cache
def _of_packages() -> tuple[Installed, ...]:
    """The extensions of all installed packages, by name."""
    if _LISTING:
        raise ImportError(CIRCLE)
    _LISTING.append(True)
    try:
        points = sorted(entry_points(group=ENTRY_POINTS), key=lambda point: (point.name, point.value))
        return tuple(_loaded(point) for point in points)
    finally:
        _LISTING.clear()


def names_of(door: str, taken: Collection[str] = ()) -> list[str]:
    """The names of all that extensions bring by a door, in the order of the extensions.

    A name that is `taken` by sparsellm itself is left out with a line in `PROBLEMS`.
    """
    names = list(dict.fromkeys(name for extension in installed() for name in getattr(extension.extension, door)))
    for name in (name for name in names if name in taken):
        line = f"{name!r} ({door}) of the package {packages_of(door, name)} is not used: sparsellm has one"
        PROBLEMS.extend([line] if line not in PROBLEMS else [])
    return [name for name in names if name not in taken]


def packages_of(door: str, name: str) -> str:
    """The packages and plugins that bring a name by a door, with their versions; usually one."""
    return " and ".join(f"{x.package} {x.version}".rstrip() for x in _bringing(door, name))


def _bringing(door: str, name: str) -> list[Installed]:
    """The extensions that bring a name by a door; of those that bring the same object, the first."""
    found: dict[str, Installed] = {}
    for x in (x for x in installed() if name in getattr(x.extension, door)):
        found.setdefault(getattr(x.extension, door)[name], x)
    return list(found.values())


def find(door: str, name: str, base: type = object) -> Any:
    """Import the object that an extension brings by a door under a name; None if there is none.

    Args:
        base: The class of which it must be a subclass, for doors that take classes of one.

    Raises:
        InvalidSetting: Two packages bring it, it cannot be imported, or it is no such class.
    """
    found = _bringing(door, name)
    if len(found) > 1:
        raise InvalidSetting(f"{packages_of(door, name)} both bring {name!r} ({door}). Uninstall or leave out one of them.")
    return found[0].load(getattr(found[0].extension, door)[name], base) if found else None


def named(door: str, taken: Collection[str] = ()) -> dict[str, Any]:
    """Import the objects that extensions bring by a door, by name; an InvalidSetting to raise for a name of two packages.

    What cannot be imported, or has a name that is `taken` by sparsellm itself, is left out with a line in `PROBLEMS`.
    """
    found: dict[str, Any] = {}
    for name in names_of(door, taken):
        try:
            found[name] = find(door, name)
        except InvalidSetting as error:
            if len(_bringing(door, name)) > 1:
                found[name] = error
            else:
                PROBLEMS.append(str(error).removesuffix("."))
    return found


def imported(place: str) -> Any:
    """Import the object at a place, "module:name", or a module.

    What a module prints as it is imported goes to stderr, since stdout is for results. One that ends the process raises
    ImportError.
    """
    module, _, name = place.partition(":")
    try:
        with redirect_stdout(sys.stderr):
            found = import_module(module)
    except SystemExit as error:
        raise ImportError(f"it ends the process as it is imported, with status {error.code}") from error
    return attrgetter(name)(found) if name else found


def load_plugin(place: str) -> Extension:
    """Import a plugin, whose names are then known as those of installed packages.

    Args:
        place: A module: its `EXTENSION`, or else each class of a solver, method, step or pattern that it defines, by the text
            `name` of the class or by its name in small letters. Or "module:name", for such a class that the module names too.

    Raises:
        InvalidSetting: It cannot be imported, or brings nothing.
    """
    module, _, name = place.partition(":")
    if known := next((x for x in PLUGINS if x.name == place), None):
        return known.extension
    try:
        found = imported(module)
        extension = _extension_of(found, name)
    except Exception as error:  # code of others
        raise InvalidSetting(f"`plugin` {place} cannot be used ({type(error).__name__}: {first_line(error)}).") from error
    left_out = [door for door in OF_PACKAGES_ONLY if getattr(extension, door)]
    if left_out and module not in {x.package.replace("-", "_") for x in _of_packages()}:
        PROBLEMS.append(f"{' and '.join(left_out)} of the plugin {place} are left out: only an installed package brings them")
    extension = replace(extension, **{door: {} for door in left_out})
    PLUGINS.append(Installed(place, module, version_of(found), extension))
    return extension


def check_plugins(places: Iterable[Any], where: str) -> None:
    """Raise InvalidSetting for a plugin that is not loaded: a recipe, a sweep or a report names it, and imports no code."""
    loaded = {x.name for x in PLUGINS}
    if (missing := next((x for x in map(str, places) if not {x, x.partition(":")[0]} & loaded), None)) is not None:
        raise InvalidSetting(f"{where} needs the plugin {missing}, and a file imports no code. Pass `plugin='{missing}'`.")


def _extension_of(module: ModuleType, name: str) -> Extension:
    """The `EXTENSION` of a module, or an extension of its classes; with its class of a name, if that is not empty."""
    stated = getattr(module, "EXTENSION", None)
    is_stated = isinstance(stated, Extension)
    extension = stated if isinstance(stated, Extension) else Extension()
    kinds = [x for x in vars(module).values() if isinstance(x, type) and f"{x.__module__}.".startswith(f"{module.__name__}.")]
    chosen = [attrgetter(name)(module)] if name else []
    for kind in [*([] if is_stated else kinds), *chosen]:
        door = next((door for member, door in DOORS_OF_CLASSES.items() if hasattr(kind, member)), "")
        if chosen == [kind] and not (door and isinstance(kind, type)):
            raise TypeError("it is no frozen dataclass with `solve` or `prune`, no step and no pattern")
        if door and place_of(kind) not in getattr(extension, door).values():
            extension = replace(extension, **{door: {**getattr(extension, door), name_of_class(kind): place_of(kind)}})
    if extension == Extension():
        raise TypeError(f"{module.__name__} has no EXTENSION, and no class of a solver, method, step or pattern")
    return extension


def name_at(place: str, door: str) -> str:
    """The name of a class at an import path, once its plugin is loaded; empty if it does not come in by this door."""
    names = {x: name for name, x in getattr(load_plugin(place), door).items()}
    return str(names.get(place_of(imported(place)), ""))


def is_place(text: Any) -> bool:
    """Whether a text is an import path, "module:name"."""
    return isinstance(text, str) and re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", text) is not None


def place_of(kind: type) -> str:
    """The place of a class, "module:name"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def name_of_class(kind: type) -> str:
    """The name of a class that no `EXTENSION` names: its text `name`, or its own name in small letters."""
    stated = vars(kind).get("name")
    return stated if isinstance(stated, str) else kind.__name__.lower()


def version_of(module: ModuleType) -> str:
    """The version of a module, of itself or of its package; empty without one."""
    if stated := getattr(module, "__version__", ""):
        return str(stated)
    file = Path(getattr(module, "__file__", None) or "")  # built-in modules and notebooks have none
    return package_with(module.__name__.partition(".")[0], file).rpartition(" ")[2]


@cache
def package_with(module: str, file: Path) -> str:
    """The installed package that has a module of the top level, with its version; empty if none has. file: the module's."""
    with suppress(PackageNotFoundError):
        found = distribution(module)
        return f"{found.name} {found.version}"
    if not {"site-packages", "dist-packages"} & set(file.parts):
        return ""
    names = packages_distributions().get(module, [])  # which takes a second in a large environment
    return " and ".join(f"{name} {version(name)}" for name in names)


def _loaded(point: EntryPoint) -> Installed:
    """The extension that an entry point names."""
    package, version = (point.dist.name, point.dist.version) if point.dist else ("unknown", "")
    try:
        extension = imported(f"{point.module}:{point.attr}")
        if not isinstance(extension, Extension):
            raise TypeError(f"{point.value} is no sparsellm.Extension but {type(extension).__name__}")
    except Exception as error:  # code of others
        reason = CIRCLE if "partially initialized module 'sparsellm" in str(error) else first_line(error)
        PROBLEMS.append(f"the extension {point.name} of the package {package} cannot be loaded: {reason}")
        return Installed(point.name, package, version, error=reason)
    return Installed(point.name, package, version, extension)
