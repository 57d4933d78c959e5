"""Escaping of external text for Markdown, so that it cannot add markup or HTML, or end a code block."""

from __future__ import annotations

import re

ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def plain(text: str) -> str:
    """Escape a text for use within one line or table cell; line breaks become spaces.

    Underscores within words are not escaped, since Markdown does not interpret them.
    """
    line = "".join(character for character in " ".join(text.split()) if character.isprintable())
    line = re.sub(r"([\\`*\[\]|~$#])", r"\\\1", line).translate(ENTITIES)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\_", line)


def fenced(text: str, language: str = "") -> list[str]:
    """Lines of a code block with this text; the fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", *text.rstrip().splitlines(), fence]
