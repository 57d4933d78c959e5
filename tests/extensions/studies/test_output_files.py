"""Files that commands write beside outputs: their own are replaced, those of others only on request, outputs never."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

import sparsellm
from sparsellm.errors import InvalidSetting, OutputExists
from sparsellm.extensions.studies.interface import check_pages, write_pages

Command = Callable[..., Result]

WRITERS: dict[str, tuple[str, ...]] = {
    "report": ("report", "{run}", "--output", "{file}"),
    "comparison": ("report", "{run}", "{other}", "--output", "{file}"),
    "bench": ("bench", "{packed}", "--tokens", "1", "--batch", "1", "--threads", "1", "--output", "{file}"),
}
"""Lines that write a page."""


def words(name: str, made: Path, file: Path) -> list[str]:
    places = {"run": made / "run", "other": made / "other", "packed": made / "packed", "file": file}
    return [word.format(**places) for word in WRITERS[name]]


@pytest.fixture(scope="module")
def made(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two pruned models, and one of them packed; not to be written to."""
    folder = tmp_path_factory.mktemp("made")
    for name, sparsity in (("run", "60%"), ("other", "80%")):
        sparsellm.prune(tiny["llama"], "magnitude", sparsity).save_pretrained(folder / name)
    sparsellm.pack(folder / "run", folder / "packed")
    return folder


@pytest.mark.parametrize("name", WRITERS)
def test_a_page_replaces_pages_and_nothing_else_in_silence(name: str, made: Path, tmp_path: Path, command: Command) -> None:
    page = tmp_path / "new" / "page.html"
    assert command(*words(name, made, page)).exit_code == 0
    first = page.read_bytes()
    assert command(*words(name, made, page)).exit_code == 0, "an earlier page is replaced"
    mine = tmp_path / "thesis.html"
    mine.write_text("<html>mine, pruned by sparsellm</html>")
    refused = command(*words(name, made, mine))
    assert refused.exit_code == 1
    message = " ".join(refused.stderr.split())
    assert "exists, and sparsellm did not write it" in message
    assert "--overwrite" in message
    assert mine.read_text().startswith("<html>mine")
    assert command(*words(name, made, mine), "--overwrite").exit_code == 0
    assert mine.read_bytes()[:200] == first[:200]


@pytest.mark.parametrize("name", WRITERS)
def test_a_page_that_cannot_be_written(
    name: str, made: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the user's file; where the folder tells, before the work."""
    page = tmp_path / "page.html"

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", f"{page}.0123.456.partial")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", read_only)
        refused = command(*words(name, made, page))
    assert refused.exit_code == 1
    assert f"error: Read-only file system: {page}.\n" in refused.stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for work in ("report_page", "read_comparison", "measure_bench"):
        monkeypatch.setattr(f"sparsellm.extensions.studies.interface.{work}", None)
    page = tmp_path / "file" / "page.html"
    refused = command(*words(name, made, page))
    assert refused.exit_code == 1
    assert f"error: {page} cannot be written: {tmp_path / 'file'} is not a writable folder.\n" in refused.stderr


@pytest.mark.parametrize("file", ["model.safetensors", "sparsellm.json", "page.html", "new/page.html", "../link.html"])
@pytest.mark.parametrize("name", WRITERS)
def test_nothing_is_written_into_an_output(name: str, file: str, made: Path, tmp_path: Path, command: Command) -> None:
    run = Path(shutil.copytree(made / "run", tmp_path / "out"))
    if file == "../link.html":
        (tmp_path / "link.html").symlink_to(run / "model.safetensors")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for more in ((), ("--overwrite",)):
        refused = command(*words(name, made, run / file), *more)
        assert refused.exit_code == 1
        assert "is inside out, the output of a run" in " ".join(refused.stderr.split())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_plots_replace_plots_and_nothing_else_in_silence(made: Path, tmp_path: Path, command: Command) -> None:
    """All files are checked before the first is written."""
    figures, page = tmp_path / "figures", tmp_path / "page.html"
    line = ("report", made / "run", "--output", page, "--figures", figures)
    assert command(*line).exit_code == 0
    written = {file.name: file.read_bytes() for file in figures.iterdir()}
    assert {Path(name).suffix for name in written} == {".svg", ".png"}
    assert command(*line).exit_code == 0
    assert {file.name: file.read_bytes() for file in figures.iterdir()} == written
    for name in (next(name for name in written if name.endswith(suffix)) for suffix in (".svg", ".png")):
        (figures / name).write_bytes(b"mine")
        page.unlink()
        refused = command(*line)
        assert refused.exit_code == 1
        assert name in refused.stderr
        assert not page.exists()
        assert (figures / name).read_bytes() == b"mine"
        assert command(*line, "--overwrite").exit_code == 0
    assert {file.name: file.read_bytes() for file in figures.iterdir()} == written
    into = command("report", made / "run", "--output", page, "--figures", made / "run")
    assert into.exit_code == 1
    assert "the output of a run" in " ".join(into.stderr.split())


def test_from_python(made: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    with pytest.raises(OutputExists, match="overwrite=True"):
        sparsellm.report(made / "run", mine)
    with pytest.raises(OutputExists, match="overwrite=True"):
        sparsellm.report([made / "run", made / "other"], mine)
    sparsellm.report(made / "run", mine, overwrite=True)
    sparsellm.report([made / "run", made / "other"], mine)  # a page by now
    with pytest.raises(InvalidSetting, match="is a folder"):
        sparsellm.report(made / "run", tmp_path)


def test_the_page_beside_a_run(made: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default file is no exception."""
    shutil.copytree(made / "run", tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    Path("out.html").write_text("mine")
    assert command("report", "out").exit_code == 1
    assert Path("out.html").read_text() == "mine"
    Path("out.html").unlink()
    assert command("report", "out").exit_code == 0
    assert command("report", "out").exit_code == 0


def test_files_in_an_unfinished_output_and_links_to_files(tmp_path: Path) -> None:
    (tmp_path / "out" / ".sparsellm").mkdir(parents=True)
    with pytest.raises(InvalidSetting, match="output of a run"):
        check_pages([tmp_path / "out" / "page.html"], overwrite=True)
    (tmp_path / "mine").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("link", "dangling"):
        with pytest.raises(OutputExists):
            check_pages([tmp_path / name], overwrite=False)
    write_pages({tmp_path / "link": b"page"}, overwrite=True)
    assert (tmp_path / "mine").read_text() == "x"
