"""What happened in a run as lines of JSON, kept while it works and beside its model."""

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
"""The file with the lines, in the work folder and in the output."""


class EventLog:
    """An observer that makes a line of every event: `time` (UTC), `seconds`, `event`, and the event's own `fields`.

    seconds: since this process began the run. An infinite or undefined number is a word, as in the report.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._file: Path | None = None
        self._started = time.perf_counter()

    def __call__(self, event: Event) -> None:
        """Take in one event; it is in the file, where there is one, when this returns."""
        message = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "seconds": round(time.perf_counter() - self._started, 3),
            "event": type(event).__name__,
            "fields": asdict(event),
        }
        line = json.dumps(finite(message), allow_nan=False, default=_plain) + "\n"
        self._lines.append(line)
        self._write(line)

    def keep(self, file: Path) -> None:
        """From here on every line is also in a file: those so far, and each as it comes.

        After the lines of an earlier process, but for a last one that was cut off.
        """
        before = file.read_bytes() if file.exists() else b""
        whole = before[: before.rfind(b"\n") + 1]
        if whole != before:
            file.write_bytes(whole)
        now = "".join(self._lines)
        self._lines.insert(0, whole.decode(errors="replace"))
        self._file = file
        self._write(now)

    @property
    def text(self) -> str:
        """All lines."""
        return "".join(self._lines)

    def _write(self, text: str) -> None:
        """Add to the file. Opened each time: a killed process leaves all that was said."""
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(text)


def _plain(recipe: BaseModel) -> Any:
    """A recipe as plain data."""
    return recipe.model_dump(mode="json")
