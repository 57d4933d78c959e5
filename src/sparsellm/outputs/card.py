"""The model card of a run in Markdown, from the template card.md."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from huggingface_hub import ModelCardData
from jinja2 import Environment, StrictUndefined, Template

from sparsellm.checkpoints.files import Origin
from sparsellm.evaluation.results import plus_minus

HUB_ADDRESS = "https://huggingface.co"
"""Base address of a card's links to models on the hub."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
"""A valid model name on the hub, which rejects cards with any other base model."""

ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
"""Characters that HTML interprets, by code, with their escapes."""


def metadata(origin: Origin) -> str:
    """The metadata at the head of a card, as YAML."""
    data = ModelCardData(
        base_model=origin.name if HUB_NAME.fullmatch(origin.name) else None,
        library_name="transformers",
        pipeline_tag="image-text-to-text" if origin.loader == "AutoModelForImageTextToText" else "text-generation",
        tags=["sparsellm", "pruning", "sparse"],
        **origin.terms,
    )
    return str(data.to_yaml())


def link(origin: Origin) -> str:
    """The name of the dense model, linked if it is on the hub."""
    on_hub = origin.hub and HUB_NAME.fullmatch(origin.name)
    return f"[{origin.name}]({HUB_ADDRESS}/{origin.name})" if on_hub else plain(origin.name)


@cache
def template() -> Template:
    """The template of the card; to compile it takes a tenth of a run on a tiny model."""
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters.update(plain=plain, fenced=fenced, plus_minus=plus_minus)
    return environment.from_string(Path(__file__).with_suffix(".md").read_text(encoding="utf-8"))


def plain(text: str) -> str:
    """Escape a text for use within one line or table cell; line breaks become spaces.

    Underscores within words are not escaped, since Markdown does not interpret them.
    """
    line = "".join(character for character in " ".join(text.split()) if character.isprintable())
    line = re.sub(r"([\\`*\[\]|~$#])", r"\\\1", line).translate(ENTITIES)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\_", line)


def fenced(text: str) -> str:
    """A code block of YAML with this text; the fence is longer than any run of backticks in the text."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return "\n".join([f"{fence}yaml", *text.rstrip().splitlines(), fence])
