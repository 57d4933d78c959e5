"""Messages about files: damage is told once, a file that may not be read is not damaged, and names are shown harmlessly."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import Result

from sparsellm.checkpoints.tensor_index import TensorLocation, read_stored
from sparsellm.cli.console import text_table
from sparsellm.errors import BadCheckpoint, BadText, InvalidSetting
from sparsellm.extensions.packed.formats.packed_tensors import packed_weights
from sparsellm.recipes import selection
from sparsellm.recipes.selection import name_matcher
from sparsellm.texts.texts import read_text
from tests.core.cli.test_bad_input import refused

Command = Callable[..., Result]


@pytest.mark.parametrize(
    "words", [("unpack", "PACKED", "out"), ("inspect", "PACKED"), ("evaluate", "PACKED", "--text", "demo")]
)
def test_damage_is_told_once(
    words: tuple[str, ...], packed: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of packed tensors that is not one: not also a file that is cut off, to be downloaded again."""
    monkeypatch.chdir(tmp_path)
    file = Path(shutil.copytree(packed, tmp_path / "damaged")) / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = {key: text.replace('"shape"', '"shap"') for key, text in header["__metadata__"].items()}
    written = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(written)) + written + data[8 + length :])
    message = refused(command(*("damaged" if word == "PACKED" else word for word in words)), "its list of packed tensors")
    assert message.partition("error: ")[2].count("damaged") == 2  # the name of the folder, too
    assert "Download" not in message


@pytest.mark.parametrize(
    "error", [BadCheckpoint("its parts are wrong"), PermissionError(13, "Permission denied"), MemoryError()]
)
def test_errors_that_say_what_is_wrong_stay(error: Exception, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this package, many of which are OSErrors too, of permission and of memory."""
    monkeypatch.setattr("sparsellm.extensions.packed.formats.packed_tensors.PackedWeight.decode", Mock(side_effect=error))
    file = packed / "model.safetensors"
    key = next(iter(packed_weights(file)))
    with pytest.raises(type(error)) as raised:
        read_stored(TensorLocation(file, key))
    assert raised.value is error or raised.value.__cause__ is error


def test_files_that_may_not_be_read(tiny: dict[str, Path], tmp_path: Path, text_file: Path) -> None:
    """A text is refused before the model is opened, and weights are not called damaged."""
    if os.geteuid() == 0 and not shutil.which("setpriv"):
        pytest.skip("root reads every file, and setpriv is not installed")
    model = Path(shutil.copytree(tiny["llama"], tmp_path / "model"))
    secret = Path(shutil.copy(text_file, tmp_path / "secret.txt"))
    without = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"] if os.geteuid() == 0 else []
    if without and subprocess.run([*without, "true"], check=False, capture_output=True).returncode:
        pytest.skip("root reads every file here")

    def told(*words: object) -> str:
        command = [*without, sys.executable, "-m", "sparsellm", "prune", model, tmp_path / "out", *words]
        return subprocess.run([*map(str, command)], check=False, capture_output=True, text=True).stderr

    secret.chmod(0)
    (model / "config.json").write_text("{")
    assert "secret.txt' cannot be read: Permission denied" in told("--calibration", secret)
    shutil.copy(tiny["llama"] / "config.json", model)
    (model / "model.safetensors").chmod(0)
    message = told("--method", "magnitude")
    assert "model.safetensors" in message
    assert "ermission denied" in message
    assert "damaged" not in message


def test_an_unreadable_text_is_told_before_the_model_is_opened(
    tiny: dict[str, Path], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Mock(side_effect=AssertionError("the model was opened"))
    monkeypatch.setattr("sparsellm.pipeline.loading.open_checkpoint", opened)
    for option in ("--calibration", "--evaluate"):
        words = ("prune", tiny["llama"], tmp_path / "out", "--method", "wanda", "--calibration", "demo", option)
        refused(command(*words, tmp_path / "no.txt"), "There is no file")
        refused(command(*words, tmp_path), "is a folder")


@pytest.mark.parametrize("name", ["a\x1b[31mb", "bell\x07", "line\rback"])
def test_control_characters_in_names(name: str, tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """A path of the user's reaches no terminal as a command: in results, notes, tables and errors."""
    out = tmp_path / name
    results = [command("prune", tiny["opt"], out, "--method", "magnitude"), command("verify", out)]
    results += [command("prune", tiny["opt"], out, "--method", "magnitude"), command("pack", out, tmp_path / f"{name}2")]
    assert [x.exit_code for x in results] == [0, 0, 1, 0]
    for result in results:
        printed = result.stdout + result.stderr
        assert not set(printed) & {"\x1b", "\x07", "\r"}
        assert repr(name)[1:-1] in printed


def test_names_stay_whole_in_narrow_tables() -> None:
    from rich.console import Console

    console = Console(width=40)
    name = "a-cell-with-a-name-of-some-length"
    with console.capture() as capture:
        console.print(text_table(["cell", "state"], [[name, "words that go on for longer than the line"]], words=True))
    assert name in capture.get()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_results_that_cannot_be_printed(unbuffered: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    """The output is complete, and the disk is not what is full."""
    command = [sys.executable, "-m", "sparsellm", "prune", tiny["opt"], tmp_path / "out", "--method", "magnitude", "--quiet"]
    with open("/dev/full", "w") as full:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        words = [*map(str, command)]
        done = subprocess.run(words, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1
    assert "The result cannot be printed: No space left on device. What the command wrote to files is complete." in done.stderr
    assert (tmp_path / "out" / "sparsellm.json").exists()


@pytest.mark.parametrize("pattern", [r"re:(\w+\.?)+!", r"re:(.|\w)*$^", r"re:((a|aa)+)+b"])
def test_expressions_that_never_end(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MATCHING_SECONDS", 0.2)
    is_match = name_matcher(pattern, "`include`")
    started = time.process_time()
    with pytest.raises(InvalidSetting, match=r"`include`.*0\.2 seconds"):
        is_match("a" * 60 if "aa" in pattern else "model.layers.0.self_attn.q_proj.and.so.on.to.the.end")
    assert time.process_time() - started < 2
    assert name_matcher(r"re:.*(\.\w+)+_proj", "`include`")("model.layers.0.self_attn.q_proj")


def test_a_text_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "text.txt"
    file.write_text("words")
    monkeypatch.setattr(Path, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(BadText, match=r"text\.txt.*Permission denied"):
        read_text(str(file), "calibration")
