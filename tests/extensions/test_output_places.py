"""What is not an output's own stays as it is: what links in it lead to, and what another command finished there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import Result

import sparsellm
from sparsellm.checkpoints.files import REPORT, WORK
from sparsellm.errors import OutputExists
from sparsellm.extensions.integers import compressed_export
from sparsellm.extensions.packed import packing
from sparsellm.outputs import folder as output_folder
from sparsellm.outputs import journal, saving
from sparsellm.pipeline import several
from tests.conftest import long_unless

Command = Callable[..., Result]


@pytest.fixture(scope="module")
def made(tiny: dict[str, Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pruned model, and the same one packed; not to be written to."""
    folder = tmp_path_factory.mktemp("made")
    sparsellm.prune(tiny["llama"], "magnitude", "70%").save_pretrained(folder / "pruned")
    packing.pack(folder / "pruned", folder / "packed")
    return {"dense": tiny["llama"], "text": text_file, "pruned": folder / "pruned", "packed": folder / "packed"}


QUICK = ("--calibration", "{text}", "--samples", 2, "--sequence-length", 32, "--method", "wanda")
TRAINED = ("--against", "{dense}", "--calibration", "{text}", "--samples", 4, "--sequence-length", 32, "--steps", 1)
COMMANDS: dict[str, tuple[object, ...]] = {
    "prune": ("prune", "{dense}", "{out}", "--sparsity", "60%", *QUICK, "--restart", "--overwrite"),
    "prune, resumed": ("prune", "{dense}", "{out}", "--sparsity", "60%", *QUICK, "--resume", "--overwrite"),
    "several": ("prune", "{dense}", "{out}", "--sparsity", "60%,80%", *QUICK, "--restart", "--overwrite"),
    "recover": ("recover", "{pruned}", "{out}", *TRAINED, "--overwrite"),
    "search": ("search", "{dense}", "{out}", "--max-size", "1MB", *QUICK, "--overwrite"),
    "pack": ("pack", "{pruned}", "{out}", "--overwrite"),
    "unpack": ("unpack", "{packed}", "{out}", "--overwrite"),
    "export": ("export", "{pruned}", "{out}", "--values", "int8", "--overwrite"),
}
"""A line of every command that writes an output, as one that may replace what is there."""


def words(name: str, made: dict[str, Path], out: Path) -> list[str]:
    return [str(word).format(**made, out=out) for word in COMMANDS[name]]


PLACES = (WORK, f"{WORK}/export", f"{WORK}/weights", "model.safetensors", "notes")
"""Where in an output a link is; the outputs of several runs are in folders of their own, and a finished one is not resumed."""


@pytest.mark.parametrize(
    ("name", "place"),
    [
        long_unless(y == WORK or x == "pack", x, y)
        for x in COMMANDS
        for y in PLACES
        if y.startswith(WORK) or x not in ("several", "prune, resumed")
    ],
)
def test_links_in_an_output_are_not_followed(
    name: str, place: str, made: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    """The command is refused, and the folder or the file that the link leads to is as it was."""
    out, mine = tmp_path / "out", tmp_path / "mine"
    shutil.copytree(made["pruned"], out)
    (mine / "export").mkdir(parents=True)
    for file in ("diary", "export/thesis", "half.partial", "journal.jsonl"):
        (mine / file).write_text("x")
    if name == "several":
        shutil.rmtree(out)
    target = mine / "diary" if place == "model.safetensors" else mine
    (out / place).parent.mkdir(parents=True, exist_ok=True)
    (out / place).unlink(missing_ok=True)
    (out / place).symlink_to(target)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    refused = command(*words(name, made, out))
    message = " ".join(refused.stderr.split())
    assert refused.exit_code == 1, (message, refused.stdout)
    assert "a link" in message, message
    assert message.count("error:") == 1, message
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_links_in_the_folder_of_a_sweep_are_not_followed(made: dict[str, Path], tmp_path: Path, command: Command) -> None:
    file, mine = tmp_path / "s.yaml", tmp_path / "mine"
    file.write_text(f"recipe: {{model: {made['dense']}, method: magnitude, sparsity: 60%}}\naxes: {{seed: [0, 1]}}\n")
    assert command("sweep", file, tmp_path / "out").exit_code == 0
    (tmp_path / "out" / "cells").rename(mine)
    for cell in mine.iterdir():
        (cell / "half.partial").write_text("x")
        (cell / "result.json").unlink()
    (tmp_path / "out" / "cells").symlink_to(mine)
    before = sorted(mine.rglob("*"))
    refused = command("sweep", file, tmp_path / "out")
    assert refused.exit_code == 1
    assert "cells, a link" in " ".join(refused.stderr.split())
    assert sorted(mine.rglob("*")) == before


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("several", "prune, resumed")])
def test_what_another_command_finishes_meanwhile_is_not_replaced(
    name: str, made: dict[str, Path], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is free when a command checks it, and finished by another one when the command locks it."""
    out = tmp_path / "out"
    locked = output_folder.locked

    @contextmanager
    def finished_before(path: str | Path) -> Iterator[Path]:
        if Path(path) == out and not out.exists():
            shutil.copytree(made["pruned"], out)
        with locked(path) as folder:
            yield folder

    for module in (saving, compressed_export, packing, several, journal):
        monkeypatch.setattr(module, "locked", finished_before, raising=False)
    refused = command(*(word for word in words(name, made, out) if word not in ("--overwrite", "--restart")))
    message = " ".join(refused.stderr.split())
    assert refused.exit_code == 1, message
    assert "exists" in message, message
    expected = {file.name: file.read_bytes() for file in made["pruned"].iterdir()}
    assert {file.name: file.read_bytes() for file in out.iterdir()} == expected
    assert (out / REPORT).is_file()


def test_an_empty_folder_may_be_the_output(tiny: dict[str, Path], tmp_path: Path) -> None:
    """As a process leaves that is killed as soon as it made it; but not one that holds folders."""
    out = tmp_path / "out"
    out.mkdir()
    sparsellm.prune(tiny["llama"], "magnitude", "60%").save_pretrained(out)
    sparsellm.verify(out)
    (tmp_path / "other" / "folder").mkdir(parents=True)
    with pytest.raises(OutputExists, match="other exists"):
        sparsellm.prune(tiny["llama"], "magnitude", "60%").save_pretrained(tmp_path / "other")
    assert (tmp_path / "other" / "folder").is_dir()
