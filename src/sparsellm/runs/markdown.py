"""Text from elsewhere put into Markdown so that it shows as it is: no markup, no HTML, no end of a code fence."""

from __future__ import annotations

import re

ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def plain(text: str) -> str:
    """A text as part of one line, or of one cell of a table: line breaks become spaces, markup is escaped.

    An underscore within a word is left, since Markdown leaves it too.
    """
    line = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    line = re.sub(r"([\\`*\[\]|~$#])", r"\\\1", line).translate(ENTITIES)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\_", line)


def fenced(text: str, language: str = "") -> list[str]:
    """The lines of a code block that holds a text; its fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", *text.rstrip().splitlines(), fence]
