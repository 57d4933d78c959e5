"""An extension of Griffe, by which the site sets this project's plain docstrings: each explained argument gets a line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from griffe import Attribute, Class, Extension, Function, Object

EXPLAINED = re.compile(r"(?:^|(?<=[.;])\s+)(\w+(?:, \w+)*):\s")
"""Where the explanation of names may begin, as in `alpha, beta: as in the paper.`"""

AFTERWARDS = re.compile(r"(?<=\.)\s+(?=(?:Raises|Returns|Cost|Follows)\b)")
"""Where a sentence begins that no longer belongs to the last name explained."""


class Lists(Extension):
    """Sets what docstrings say of arguments and fields as lists."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of a function or a class."""
        if obj.docstring is not None and isinstance(obj, Class | Function):
            names = _names(obj)
            paragraphs = re.split(r"\n\s*\n", obj.docstring.value)
            obj.docstring.value = "\n\n".join(part for paragraph in paragraphs for part in listed(paragraph, names))


def _names(obj: Class | Function) -> set[str]:
    """What an object's docstring may explain: a function's arguments, a class's fields."""
    if isinstance(obj, Function):
        return {parameter.name for parameter in obj.parameters}
    return {name for name, member in obj.members.items() if isinstance(member, Attribute)}


def listed(paragraph: str, names: set[str]) -> Iterator[str]:
    """The paragraph, cut into what stands before the first explained name, a list, and what follows the list."""
    starts = [found for found in EXPLAINED.finditer(paragraph) if set(found[1].split(", ")) <= names]
    if not starts:
        yield paragraph
        return
    if before := paragraph[: starts[0].start()].strip():
        yield before
    ends = [*(found.start() for found in starts[1:]), len(paragraph)]
    says = [" ".join(paragraph[found.end() : end].split()) for found, end in zip(starts, ends, strict=True)]
    says[-1], *after = AFTERWARDS.split(says[-1], maxsplit=1)
    marks = [", ".join(f"`{name}`" for name in found[1].split(", ")) for found in starts]
    yield "\n".join(f"- {mark}: {said}" for mark, said in zip(marks, says, strict=True))
    yield from after
