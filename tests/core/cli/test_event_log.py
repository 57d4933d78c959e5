"""The log: a line for every event, there while the run works, whole after a kill, and beside the finished model."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import Result

import sparsellm
from sparsellm.checkpoints.files import WORK
from sparsellm.observers.events import EventLog, Note
from sparsellm.outputs.folder import LOG
from sparsellm.outputs.journal import Journal
from tests.conftest import report_of

Command = Callable[..., Result]


def lines_of(text: str) -> list[dict]:
    """The lines, each strict JSON with the same four fields."""

    def no_word(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    found = [json.loads(line, parse_constant=no_word) for line in text.splitlines()]
    assert all(list(line) == ["time", "seconds", "event", "fields"] for line in found)
    return found


def test_every_event_is_a_line(tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    """What happened in its order: recipe, figures, layers, epochs, blocks, totals; the report lists the file."""
    out = tmp_path / "out"
    words = ("--calibration", text_file, "--samples", 8, "--sequence-length", 32, "--evaluate", text_file)
    ran = command("prune", tiny["opt"], out, *words)
    assert ran.exit_code == 0, ran.stderr
    found, report = lines_of((out / LOG).read_text(encoding="utf-8")), report_of(out)
    by_kind = {kind: [x["fields"] for x in found if x["event"] == kind] for kind in {x["event"] for x in found}}
    assert by_kind["Begun"] == [
        {
            "name": "out",
            "recipe": {name: x for name, x in report["recipe"].items() if name != "command"},
            "environment": report["environment"],
            "tight": False,
        }
    ]
    layers = [layer for block in report["blocks"] for layer in block["layers"]]
    assert [(x["name"], x["zeros"], x["error"]) for x in by_kind["LayerResult"]] == [
        (x["name"], x["zeros"], x["error"]) for x in layers
    ]
    assert by_kind["EpochResult"] == [epoch for block in report["blocks"] for epoch in block["epochs"]]
    assert [block["index"] for block in by_kind["BlockResult"]] == [0, 1, 2]
    assert [note["text"] for note in by_kind.get("Note", [])] == report["notes"]
    figures = report["perplexity"][text_file.name]
    assert [(x["when"], x["on"], x["value"], x["standard_error"]) for x in by_kind["Measured"]] == [
        (when, text_file.name, figures[when]["value"], figures[when]["standard_error"]) for when in ("dense", "pruned")
    ]
    assert by_kind["Ended"] == [{"totals": report["totals"], "seconds": report["seconds"]["total"]}]
    assert found[-1]["event"] == "Ended"
    seconds = [line["seconds"] for line in found]
    assert seconds == sorted(seconds)
    assert abs((datetime.now(UTC) - datetime.fromisoformat(found[-1]["time"])).total_seconds()) < 600
    assert LOG in report["files"]
    assert command("prune", tiny["opt"], out, *words, "--overwrite").exit_code == 0
    told = " ".join(ran.stderr.split())
    assert f"perplexity on {text_file.name}, dense: " in told
    assert f"perplexity on {text_file.name}, pruned: " in told


def test_a_killed_run_s_log_survives_and_goes_on(
    tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines are in the work folder as they come; a resumed run drops a torn last one and writes after the others."""
    plain, out = Journal.store_block, tmp_path / "out"
    seen: list[int] = []

    def keep(self: Journal, block: object, result: object) -> Path:
        seen.append(len(lines_of((out / WORK / LOG).read_text(encoding="utf-8"))))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return plain(self, block, result)  # type: ignore[arg-type]

    monkeypatch.setattr(Journal, "store_block", keep)
    words = (
        "prune",
        tiny["llama"],
        out,
        "--method",
        "wanda",
        "--calibration",
        text_file,
        "--samples",
        4,
        "--sequence-length",
        32,
    )
    assert command(*words).exit_code == 130
    assert seen[0] < seen[1] < seen[2]
    monkeypatch.undo()
    log = out / WORK / LOG
    before = log.read_text(encoding="utf-8")
    with log.open("a", encoding="utf-8") as stream:
        stream.write('{"time": "2026-')
    refused = command(*words, "--resume", "--seed", 5)
    assert refused.exit_code == 1
    assert log.read_text(encoding="utf-8") == before + '{"time": "2026-'  # a run that is refused says nothing in another's log
    assert command(*words, "--resume").exit_code == 0
    text = (out / LOG).read_text(encoding="utf-8")
    kept, now = lines_of(before), lines_of(text)
    assert [line["event"] for line in now[: len(kept)]] == [line["event"] for line in kept]
    assert [line["time"] for line in now[: len(kept)]] == [line["time"] for line in kept]
    found = lines_of(text)
    assert [line["event"] for line in found].count("Begun") == 2
    assert [line["event"] for line in found].count("Ended") == 1
    blocks = [line["fields"] for line in found if line["event"] == "BlockResult"]
    assert [block["index"] for block in blocks] == [0, 1, 0, 1, 2]  # the finished ones are told again
    assert blocks[:2] == blocks[2:4]


def test_from_python_without_a_work_folder(tiny: dict[str, Path], tmp_path: Path) -> None:
    """`save_pretrained` writes the lines that were kept in memory."""
    result = sparsellm.prune(tiny["opt"], method="magnitude", sparsity="2:4")
    out = result.save_pretrained(tmp_path / "out")
    found = lines_of((out / LOG).read_text(encoding="utf-8"))
    assert [line["event"] for line in found].count("LayerResult") == 18
    assert found[-1]["event"] == "Ended"
    assert LOG in report_of(out)["files"]


def test_lines_before_and_after_there_is_a_file(tmp_path: Path) -> None:
    """What was said before there is a file comes first; all of it is in the text too."""
    file, log = tmp_path / "log", EventLog()
    file.write_bytes(b'{"a": 1}\n{"torn')
    log(Note("one"))
    log.keep(file)
    log(Note("two"))
    text = file.read_text(encoding="utf-8")
    assert text == log.text
    assert text.startswith('{"a": 1}\n')
    assert [line["fields"] for line in lines_of(text.removeprefix('{"a": 1}\n'))] == [{"text": "one"}, {"text": "two"}]


def test_freed_memory_is_returned_where_blocks_are_read(
    tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    """`Begun` says so to the observer that sets the allocator, for a model that is read block by block."""
    words = ("--method", "magnitude", "--calibration", text_file, "--offload")
    assert command("prune", tiny["opt"], tmp_path / "out", *words).exit_code == 0
    lines = lines_of((tmp_path / "out" / LOG).read_text(encoding="utf-8"))
    assert [line["fields"]["tight"] for line in lines if line["event"] == "Begun"] == [True]
