"""Removal of local paths from the files of an output: only a path's last component is published."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import product
from pathlib import Path, PurePath
from typing import Any

from pydantic import BaseModel

from sparsellm.checkpoints.files import DEMO, is_hub_name
from sparsellm.pipeline.recipe import RunRecipe
from sparsellm.pipeline.recipe_fields import ALLOCATIONS, fields_with
from sparsellm.texts.paths import home, is_task_file, local_path
from sparsellm.texts.texts import NAMES

COMPONENT = r"[^\s/\"'`<>|,;:()\[\]{}*?\\]+"
"""Regular expression of one path component; a path ends at any other character."""


class Paths:
    """Replaces absolute paths by their last component: the recipes' paths, and paths below folders of this machine.

    Two of the recipes' paths with the same last component get different names.
    """

    def __init__(self, *recipes: RunRecipe) -> None:
        self._names: dict[str, str] = {}
        for recipe, field in product(recipes, sorted(fields_with("path"), key=lambda name: name not in ("model", "pruned"))):
            value = getattr(recipe, field, None)
            for path in (value,) if isinstance(value, str) else value or ():
                if not is_hub_name(path) if field == "model" else is_file(path):
                    self._add(path)
        machine = (home(), Path.cwd(), Path(tempfile.gettempdir()), Path(sys.prefix), Path(sys.base_prefix))
        for folder in filter(None, machine):
            for path in (str(folder), str(folder.resolve())):
                if len(PurePath(path).parts) > 1:
                    self._names.setdefault(path, PurePath(path).name)
        prefixes = "|".join(re.escape(path) for path in sorted(self._names, key=len, reverse=True))
        start = r"(?:(?<=file://)|(?<![\w./~-]))"
        below = rf"(?P<prefix>{prefixes})(?P<rest>(?:/+{COMPONENT})*)(?![\w-])"
        self._pattern = re.compile(rf"{start}(?:{below}|~?/{COMPONENT}(?:/+{COMPONENT})+|~/+{COMPONENT})")

    def _add(self, path: str) -> None:
        """Name a path as written, as an absolute path, and with links resolved."""
        absolute = local_path(path).absolute()
        name, number = absolute.name or path, 1
        while name in self._names.values() and absolute.as_posix() not in self._names:
            number += 1
            name = f"{absolute.name} ({number})"
        for spelling in (path, str(absolute), str(absolute.resolve())):
            if "/" in spelling or "\\" in spelling:
                self._names.setdefault(spelling, name)

    def without(self, value: Any) -> Any:
        """Copy a text, list, mapping, dataclass or pydantic model with names in place of paths."""
        result = value
        if isinstance(value, str):
            result = self._pattern.sub(self._name, value)
        elif isinstance(value, PurePath):
            result = value.name
        elif isinstance(value, Mapping):
            result = {self.without(key): self.without(item) for key, item in value.items()}
        elif isinstance(value, (list, tuple)):
            result = type(value)(self.without(item) for item in value)
        elif isinstance(value, BaseModel):
            result = value.model_copy(update={name: self.without(getattr(value, name)) for name in type(value).model_fields})
        elif is_dataclass(value) and not isinstance(value, type):
            result = replace(value, **{field.name: self.without(getattr(value, field.name)) for field in fields(value)})
        return result

    def without_in_lines(self, text: str) -> str:
        """Copy lines of JSON with names in place of paths."""
        return "".join(self._line(line) + "\n" for line in text.splitlines())

    def _line(self, line: str) -> str:
        """Copy one line, as JSON or as plain text."""
        try:
            return json.dumps(self.without(json.loads(line)), allow_nan=False)
        except ValueError:
            result: str = self.without(line)
            return result

    def _name(self, match: re.Match[str]) -> str:
        """The name that replaces a matched path."""
        if (prefix := match["prefix"]) is not None:
            return match["rest"].rpartition("/")[2] or self._names[prefix]
        parts = [part for part in match[0].split("/") if part]
        local = match[0].startswith("~") or Path("/", parts[0]).is_dir()
        return parts[-1] if local else match[0]


def clean_copies(folder: Path, paths: Paths) -> list[str]:
    """Put names in place of paths of this machine in a folder's configuration files; return the names of files that had any.

    Every other byte of these files, which are the user's, stays.
    """
    changed = []
    for file in sorted(folder.glob("*config*.json")):
        text = file.read_bytes().decode("utf-8", errors="surrogateescape")
        if (cleaned := paths.without(text)) != text:
            file.write_bytes(cleaned.encode("utf-8", errors="surrogateescape"))
            changed.append(file.name)
    return changed


def local_files(recipe: RunRecipe) -> list[tuple[str, str]]:
    """Fields and values of a recipe that may be the last part of a local path, which outputs keep of it."""
    values = []
    for field in fields_with("path"):
        value = getattr(recipe, field, None)
        for name in (value,) if isinstance(value, str) else value or ():
            known = (*NAMES, *ALLOCATIONS) if field in ("calibration", "evaluate", "allocation") else ()
            on_hub = field == "model" and ("/" in name or recipe.revision is not None)
            is_name = field == "task" and not is_task_file(name)
            if not (name in known or on_hub or is_name or name.startswith(DEMO)):
                values.append((field, name))
    return values


def is_file(path: str) -> bool:
    """Whether a recipe's value is a path, and not the name of a text or of an allocation rule."""
    try:
        return local_path(path).is_absolute() or local_path(path).exists()
    except (OSError, ValueError, RuntimeError):
        return False


def clean_settings(folder: Path) -> None:
    """Replace the absolute paths that transformers writes to a folder's configuration files, such as `_name_or_path`."""
    for file in sorted(folder.glob("*config*.json")):
        settings = json.loads(file.read_text(encoding="utf-8"))
        if (cleaned := _without_absolute(settings)) != settings:
            file.write_text(json.dumps(cleaned, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _without_absolute(value: Any) -> Any:
    """Copy settings with a name in place of every string that is an absolute path."""
    if isinstance(value, dict):
        return {key: _without_absolute(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_absolute(item) for item in value]
    is_path = isinstance(value, str) and "\n" not in value and len(PurePath(value).parts) > 2 and PurePath(value).is_absolute()
    return PurePath(value).name if is_path else value
