"""What an output's documents say of the machine that a run was on: the last component of a path, and no more of it."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from pydantic import BaseModel

from sparsellm.checkpoints.files import is_hub_name
from sparsellm.runs.recipe import RunRecipe

COMPONENT = r"[^\s/\"'`<>|,;:()\[\]{}*?\\]+"
"""A name within a path, where the text does not say where the path ends."""

OF_PATHS = ("model", "pruned", "architecture", "calibration", "allocation", "task_data", "evaluate")
"""Fields of a recipe that may name files."""


class Paths:
    """Replaces absolute paths by their last component: those that a recipe names, and those of folders that exist here.

    Two paths of the recipe with the same last component get different names.
    """

    def __init__(self, recipe: RunRecipe) -> None:
        self._names: dict[str, str] = {}
        for field in OF_PATHS:
            value = getattr(recipe, field, None)
            for path in (value,) if isinstance(value, str) else value or ():
                self._add(path, is_hub_name(path) if field == "model" else not _is_file(path))
        places = (Path.home(), Path.cwd(), Path(tempfile.gettempdir()), Path(sys.prefix), Path(sys.base_prefix))
        for place in places:
            for known in (str(place), str(place.resolve())):
                if len(PurePath(known).parts) > 1:
                    self._names.setdefault(known, PurePath(known).name)
        known = "|".join(re.escape(path) for path in sorted(self._names, key=len, reverse=True))
        start = r"(?:(?<=file://)|(?<![\w./~-]))"
        whole = rf"(?P<known>{known})(?P<rest>(?:/+{COMPONENT})*)(?![\w-])"
        self._pattern = re.compile(rf"{start}(?:{whole}|~?/{COMPONENT}(?:/+{COMPONENT})+|~/+{COMPONENT})")

    def _add(self, path: str, elsewhere: bool) -> None:
        """Take in a path as it is written, as it is absolute, and as it is without links."""
        if elsewhere:
            return
        absolute = Path(path).expanduser().absolute()
        name, number = absolute.name or path, 1
        while name in self._names.values() and absolute.as_posix() not in self._names:
            number += 1
            name = f"{absolute.name} ({number})"
        for written in (path, str(absolute), str(absolute.resolve())):
            if "/" in written or "\\" in written:
                self._names.setdefault(written, name)

    def without(self, value: Any) -> Any:
        """The same text, list, mapping, dataclass or model, with names for paths."""
        found = value
        if isinstance(value, str):
            found = self._pattern.sub(self._name, value)
        elif isinstance(value, PurePath):
            found = value.name
        elif isinstance(value, Mapping):
            found = {self.without(key): self.without(one) for key, one in value.items()}
        elif isinstance(value, (list, tuple)):
            found = type(value)(self.without(one) for one in value)
        elif isinstance(value, BaseModel):
            found = value.model_copy(update={name: self.without(getattr(value, name)) for name in type(value).model_fields})
        elif is_dataclass(value) and not isinstance(value, type):
            found = replace(value, **{field.name: self.without(getattr(value, field.name)) for field in fields(value)})
        return found

    def without_in_lines(self, text: str) -> str:
        """The same lines of JSON, with names for paths."""
        return "".join(self._line(line) + "\n" for line in text.splitlines())

    def _line(self, line: str) -> str:
        """One line; as plain text where it is no JSON."""
        try:
            return json.dumps(self.without(json.loads(line)), allow_nan=False)
        except ValueError:
            found: str = self.without(line)
            return found

    def _name(self, match: re.Match[str]) -> str:
        """What stands for a path in a text."""
        if (known := match["known"]) is not None:
            return match["rest"].rpartition("/")[2] or self._names[known]
        parts = [part for part in match[0].split("/") if part]
        here = match[0].startswith("~") or Path("/", parts[0]).is_dir()
        return parts[-1] if here else match[0]


def _is_file(path: str) -> bool:
    """Whether a text or another file of a recipe is a path; it is the name of a text or of a rule otherwise."""
    try:
        return Path(path).expanduser().is_absolute() or Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def clean_settings(folder: Path) -> None:
    """Put names for the absolute paths that transformers leaves in a folder's settings, such as `_name_or_path`."""
    for file in sorted(folder.glob("*config*.json")):
        settings = json.loads(file.read_text(encoding="utf-8"))
        if (cleaned := _whole(settings)) != settings:
            file.write_text(json.dumps(cleaned, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _whole(value: Any) -> Any:
    """The same settings, with a name for every text that is an absolute path and nothing else."""
    if isinstance(value, dict):
        return {key: _whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    path = isinstance(value, str) and "\n" not in value and len(PurePath(value).parts) > 2 and PurePath(value).is_absolute()
    return PurePath(value).name if path else value
