"""The files and names that texts are read from: one list, in help and in every message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparsellm import prune, recover
from sparsellm.cli.app import app
from sparsellm.errors import BadText, InvalidSetting
from sparsellm.texts.paths import TEXT_FILES, TEXT_NAMES
from sparsellm.texts.text_files import READERS
from sparsellm.texts.texts import HUB_TEXTS, check_text


def test_the_list_is_that_of_the_readers() -> None:
    assert re.findall(r"\.\w+", TEXT_FILES) == [*READERS, ".txt", ".gz"]
    assert {*HUB_TEXTS, "demo"} == set(TEXT_NAMES)


@pytest.mark.parametrize("command", ["prune", "recover", "plan", "search", "evaluate"])
def test_help_has_the_list(command: str) -> None:
    text = " ".join(CliRunner().invoke(app, [command, "--help"], terminal_width=10_000).stdout.replace("│", " ").split())
    assert f"{', '.join(TEXT_NAMES)}, or a {TEXT_FILES} file." in text


@pytest.mark.parametrize("name", ["missing.jsonl", "folder", "a.doc", "nothing of that name"])
def test_messages_have_the_list(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.doc").write_text("text")
    with pytest.raises(BadText) as caught:
        check_text(str(tmp_path / name) if " " not in name else name)
    assert TEXT_FILES in str(caught.value)


def test_a_run_without_a_text_has_the_list(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting) as caught:
        prune("demo:opt", "wanda")
    assert f"pass a {TEXT_FILES} file as `calibration`, or one of {', '.join(TEXT_NAMES)}." in str(caught.value)
    out = prune("demo:opt", "magnitude").save_pretrained(tmp_path / "out")
    with pytest.raises(InvalidSetting) as caught:
        recover(out, "demo:opt")
    assert TEXT_FILES in str(caught.value)
