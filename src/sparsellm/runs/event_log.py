"""Log of a run's events as JSON lines, written during the run and saved beside the model."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sparsellm.runs.events import Event
from sparsellm.runs.report import finite

LOG = "sparsellm-log.jsonl"
"""Name of the log file, in the work folder and in the output."""


class EventLog:
    """Observer that appends one JSON line per event.

    A line has `time` (UTC), `seconds` since this process started the run, `event` (the class name) and the event's `fields`.
    Infinite and undefined numbers are strings, as in the report.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._file: Path | None = None
        self._started = time.perf_counter()

    def __call__(self, event: Event) -> None:
        """Log one event; it has been written to the file, if there is one, when this returns."""
        message = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "seconds": round(time.perf_counter() - self._started, 3),
            "event": type(event).__name__,
            "fields": asdict(event),
        }
        line = json.dumps(finite(message), allow_nan=False, default=_recipe_to_dict) + "\n"
        self._lines.append(line)
        self._write(line)

    def keep(self, file: Path) -> None:
        """Write the lines so far and all later ones to a file.

        They follow the lines of an earlier process; an incomplete last line is removed.
        """
        content = file.read_bytes() if file.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        if complete != content:
            file.write_bytes(complete)
        text = self.text
        self._lines.insert(0, complete.decode(errors="replace"))
        self._file = file
        self._write(text)

    @property
    def text(self) -> str:
        """All lines."""
        return "".join(self._lines)

    def _write(self, text: str) -> None:
        """Append to the file, which is opened and closed each time so that a killed process loses no line."""
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(text)


def _recipe_to_dict(recipe: BaseModel) -> Any:
    """Convert a recipe to plain data."""
    return recipe.model_dump(mode="json")
