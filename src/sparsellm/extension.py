"""Extensions: packages that bring commands, options and more, and how they are found.

An extension is an object of `Extension`. The metadata of its package name it, in pyproject.toml:

    [project.entry-points."sparsellm.extensions"]
    ria = "my_pruner:EXTENSION"

sparsellm's own extensions, in `sparsellm.extensions`, are found in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
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


@dataclass(frozen=True)
class Installed:
    """An extension of an installed package.

    Attributes:
        name: Name of its entry point.
        package: Name of its package.
        version: Version of its package.
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
        module, _, name = value.partition(":")
        try:
            found: Any = getattr(import_module(module), name) if name else import_module(module)
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


@cache
def installed() -> tuple[Installed, ...]:
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
    """The packages that bring a name by a door, with their versions; usually one."""
    found = [x for x in installed() if name in getattr(x.extension, door)]
    return " and ".join(f"{x.package} {x.version}" for x in found)


def find(door: str, name: str, base: type = object) -> Any:
    """Import the object that an extension brings by a door under a name; None if there is none.

    Args:
        base: The class of which it must be a subclass, for doors that take classes of one.

    Raises:
        InvalidSetting: Two packages bring it, it cannot be imported, or it is no such class.
    """
    found = [x for x in installed() if name in getattr(x.extension, door)]
    if len(found) > 1:
        raise InvalidSetting(f"The packages {packages_of(door, name)} both bring {name!r} ({door}). Uninstall one of them.")
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
            if sum(name in getattr(extension.extension, door) for extension in installed()) > 1:
                found[name] = error
            else:
                PROBLEMS.append(str(error).removesuffix("."))
    return found


def _loaded(point: EntryPoint) -> Installed:
    """The extension that an entry point names."""
    package, version = (point.dist.name, point.dist.version) if point.dist else ("unknown", "")
    try:
        extension = point.load()
        if not isinstance(extension, Extension):
            raise TypeError(f"{point.value} is no sparsellm.Extension but {type(extension).__name__}")
    except Exception as error:  # code of others
        reason = CIRCLE if "partially initialized module 'sparsellm" in str(error) else first_line(error)
        PROBLEMS.append(f"the extension {point.name} of the package {package} cannot be loaded: {reason}")
        return Installed(point.name, package, version, error=reason)
    return Installed(point.name, package, version, extension)
