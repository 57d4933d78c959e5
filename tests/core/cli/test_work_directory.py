"""Unfinished outputs: kept while something is finished of them, gone on with to the same bytes, and nobody's but one's."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
from click.testing import Result
from filelock import FileLock
from safetensors.torch import load_file

from sparsellm import prune
from sparsellm.checkpoints.files import WORK
from sparsellm.errors import BadCheckpoint, TooLarge, VerificationFailed
from sparsellm.methods import BlockResult
from sparsellm.models.blocks import Block
from sparsellm.outputs.folder import EXPORT, REPLACED, SCALES_FILE
from sparsellm.outputs.journal import JOURNAL, Journal
from tests import processes
from tests.conftest import extensions, long_unless, report_of
from tests.core.cli.test_bad_input import refused

Command = Callable[..., Result]
Ends = Callable[[int, type[BaseException] | BaseException], None]
ERRORS: dict[str, Callable[[], BaseException]] = {
    "Ctrl-C": KeyboardInterrupt,
    "a full disk": lambda: OSError(errno.ENOSPC, "No space left on device", "somewhere"),
    "verification": lambda: VerificationFailed("A layer differs."),
}
QUICK = ("--sparsity", "60%", "--samples", 6, "--sequence-length", 32, "--batch-size", 2)
METHODS = ["magnitude", "wanda", "sparsegpt", "fast-admm", "alps", "sparsellm"]
STREAMED = ("--offload",)
"""A tiny model fits any memory: what is larger goes the same way."""


@pytest.fixture
def words(tiny: dict[str, Path], text_file: Path) -> tuple[object, ...]:
    """A run on the tiny Llama but for its output and method."""
    return (tiny["llama"], "--calibration", text_file, *QUICK)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Make the next run end by an error after so many blocks; with -1 never."""
    plain = Journal.store_block

    def after(blocks: int, error: type[BaseException] | BaseException) -> None:
        def keep(self: Journal, block: Block, result: BlockResult) -> Path:
            if len(self.block_files()) == blocks:
                raise error
            return plain(self, block, result)

        monkeypatch.setattr(Journal, "store_block", plain if blocks < 0 else keep)

    return after


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(one: Path, other: Path) -> bool:
    """Whether two outputs hold the same weights and card."""
    a, b = weights_of(one), weights_of(other)
    card = (one / "README.md").read_bytes() == (other / "README.md").read_bytes()
    return card and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@extensions
def test_an_unfinished_output_is_no_model(words: tuple[object, ...], tmp_path: Path, command: Command) -> None:
    """Every command that reads a model, or the report of a run, says what the matter is, and writes nothing."""
    model, *rest = words
    out, other = tmp_path / "out", tmp_path / "x"
    (out / WORK).mkdir(parents=True)
    (out / WORK / JOURNAL).write_text("{}\n")
    for line in (
        ("pack", out, other),
        ("inspect", out),
        ("inspect", model, "--against", out),
        ("evaluate", out, "--text", "demo"),
        ("evaluate", model, "--text", "demo", "--against", out),
        ("plan", out, *rest),
        ("prune", out, other, *rest),
        ("recover", out, other, "--against", model, "--calibration", "demo"),
        ("bench", out),
        ("verify", out),
        ("report", out),
        ("report", out, other),
    ):
        refused(command(*line), f"{out} is unfinished. Finish it first: resume the run that writes it.")
    with pytest.raises(BadCheckpoint, match=r"out is unfinished\. Finish it first"):
        prune(out, "magnitude", "50%")
    assert not other.exists()


def test_an_output_that_is_being_replaced_is_a_model_until_then(
    words: tuple[object, ...], tmp_path: Path, command: Command
) -> None:
    copied = Path(shutil.copytree(str(words[0]), tmp_path / "out"))
    (copied / WORK).mkdir()
    assert command("inspect", copied).exit_code == 0


@pytest.mark.parametrize(
    ("method", "memory"),
    [
        long_unless((place + number) % 2 == 0, method, memory)
        for place, method in enumerate(METHODS)
        for number, memory in enumerate(((), STREAMED))
    ],
)
def test_interrupted_and_resumed(
    method: str,
    memory: tuple[str, ...],
    words: tuple[object, ...],
    tmp_path: Path,
    command: Command,
    ends: Ends,
) -> None:
    """Ctrl-C after the first and the second block: what is kept and how to go on is said; the end is an unbroken run's."""
    model, *rest = words
    base = (*rest, "--method", method, *memory)
    assert command("prune", model, tmp_path / "whole", *base).exit_code == 0
    out = tmp_path / "out"
    for blocks in (1, 2):
        ends(blocks, KeyboardInterrupt)
        ran = command("prune", model, out, *base, *(("--resume",) if blocks == 2 else ()))
        assert ran.exit_code == 130
        count = ("1 block is", "2 blocks are")[blocks - 1]
        assert f"interrupted; {count} finished and kept: pass --resume to continue" in " ".join(ran.stderr.split())
        assert [file.name for file in out.iterdir()] == [WORK]
    ends(-1, KeyboardInterrupt)
    refused(command("prune", model, out, *base), "is unfinished", "--resume", "--restart")
    refused(command("prune", model, out, *base, "--seed", 1, "--resume"), " --seed was 0, now 1. Pass")
    assert command("prune", model, out, *base, "--resume").exit_code == 0
    assert same(out, tmp_path / "whole")
    assert not (out / WORK).exists()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "whole"]


def test_an_interrupted_run_that_replaces_an_output_names_both_options(
    words: tuple[object, ...], tmp_path: Path, command: Command, ends: Ends
) -> None:
    """The output that is there is kept until the new one is written, and replaced only if asked for by name."""
    model, *rest = words
    out, base = tmp_path / "out", (*rest, "--method", "wanda")
    assert command("prune", model, out, *base).exit_code == 0
    before = weights_of(out)
    ends(1, KeyboardInterrupt)
    ran = command("prune", model, out, *base, "--seed", 1, "--overwrite")
    said = " ".join(ran.stderr.split())
    assert "pass --resume and --overwrite to continue, or --restart and --overwrite to start over" in said
    assert all(torch.equal(x, weights_of(out)[name]) for name, x in before.items())
    ends(-1, KeyboardInterrupt)
    refused(command("prune", model, out, *base, "--seed", 1, "--resume"), "exists", "--overwrite")
    assert command("prune", model, out, *base, "--seed", 1, "--resume", "--overwrite").exit_code == 0
    assert not (out / WORK).exists()
    assert report_of(out)["recipe"]["seed"] == 1


def test_streamed_is_the_same_model(words: tuple[object, ...], tmp_path: Path, command: Command) -> None:
    """Read block by block: said, in another number of files, the same tensors."""
    model, *rest = words
    assert command("prune", model, tmp_path / "one", *rest, "--evaluate", rest[1]).exit_code == 0
    ran = command("prune", model, tmp_path / "two", *rest, *STREAMED, "--evaluate", rest[1])
    assert ran.exit_code == 0
    assert "note: read block by block" in " ".join(ran.stderr.split())
    one, two = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert len(list((tmp_path / "two").glob("*.safetensors"))) > 3


def test_nothing_is_left_where_nothing_was_finished(
    words: tuple[object, ...], tmp_path: Path, command: Command, ends: Ends
) -> None:
    model, *rest = words
    ends(0, KeyboardInterrupt)
    ran = command("prune", model, tmp_path / "out", *rest, "--method", "wanda")
    assert ran.exit_code == 130
    assert "interrupted; nothing was written" in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_resume_and_restart_do(words: tuple[object, ...], tmp_path: Path, command: Command, ends: Ends) -> None:
    """Resume starts where there is nothing, and says so where all is done; restart throws away what there is."""
    model, *rest = words
    out, base = tmp_path / "out", (*rest, "--method", "wanda")
    assert command("prune", model, out, *base, "--resume").exit_code == 0
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    ran = command("prune", model, out, *base, "--resume")
    assert ran.exit_code == 0
    assert "is finished" in ran.stderr
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == before
    refused(command("prune", model, out, *base), "exists", "--overwrite")
    refused(command("prune", model, out, *base, "--resume", "--restart"), "one of them")
    ends(1, KeyboardInterrupt)
    again = tmp_path / "again"
    assert command("prune", model, again, *base).exit_code == 130
    (again / WORK / "activations-left").mkdir()
    ends(-1, KeyboardInterrupt)
    assert command("prune", model, again, *base, "--seed", 3, "--restart").exit_code == 0
    assert command("prune", model, tmp_path / "third", *base, "--seed", 3).exit_code == 0
    assert same(again, tmp_path / "third")


def test_a_changed_model_is_not_gone_on_with(words: tuple[object, ...], tmp_path: Path, command: Command, ends: Ends) -> None:
    model, *rest = words
    copied = Path(shutil.copytree(str(model), tmp_path / "model"))
    ends(1, KeyboardInterrupt)
    assert command("prune", copied, tmp_path / "out", *rest, "--method", "wanda").exit_code == 130
    ends(-1, KeyboardInterrupt)
    file = copied / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    resumed = command("prune", copied, tmp_path / "out", *rest, "--method", "wanda", "--resume")
    refused(resumed, "file model.safetensors was", "--restart")
    assert (tmp_path / "out" / WORK / JOURNAL).exists()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-02'),
        ("config.json", '"rope_theta": 10000.0', '"rope_theta": 500.0'),
        ("generation_config.json", "{", '{"temperature": 0.5, '),
        ("tokenizer.json", "{", "{ "),
        ("tokenizer_config.json", "{", "{ "),
        ("chat_template.jinja", "a", "b"),
        ("LICENSE", "a", "b"),
        ("README.md", "mit", "apache-2.0"),
        ("shares.yaml", "50%", "55%"),
    ],
)
def test_a_changed_file_is_not_gone_on_with(
    name: str, old: str, new: str, words: tuple[object, ...], tmp_path: Path, command: Command, ends: Ends
) -> None:
    """Blocks of two models never end in one output: each file that decides the result counts with its contents."""
    model, *rest = words
    copied = Path(shutil.copytree(str(model), tmp_path / "model"))
    (copied / "chat_template.jinja").write_text("a")
    (copied / "LICENSE").write_text("a")
    (copied / "README.md").write_text("---\nlicense: mit\n---\n")
    shares = tmp_path / "shares.yaml"
    shares.write_text('"mlp.*": 50%\n')
    base = ("prune", copied, tmp_path / "out", *rest, "--method", "wanda", "--allocation", shares)
    ends(1, KeyboardInterrupt)
    assert command(*base).exit_code == 130
    ends(-1, KeyboardInterrupt)
    file = shares if name == shares.name else copied / name
    stat, text = file.stat(), file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    refused(command(*base, "--resume"), "This is not the run that was started", "--restart")
    file.write_text(text)
    assert command(*base, "--resume").exit_code == 0


def test_a_model_copied_again_is_gone_on_with(words: tuple[object, ...], tmp_path: Path, command: Command, ends: Ends) -> None:
    """The same contents at another time: a folder that was removed and downloaded again."""
    model, *rest = words
    copied = Path(shutil.copytree(str(model), tmp_path / "model"))
    ends(1, KeyboardInterrupt)
    assert command("prune", copied, tmp_path / "out", *rest, "--method", "wanda").exit_code == 130
    ends(-1, KeyboardInterrupt)
    shutil.rmtree(copied)
    shutil.copytree(str(model), copied)
    for file in copied.iterdir():
        os.utime(file)
    assert command("prune", copied, tmp_path / "out", *rest, "--method", "wanda", "--resume").exit_code == 0


def test_a_damaged_journal_is_reported(words: tuple[object, ...], tmp_path: Path, command: Command, ends: Ends) -> None:
    model, *rest = words
    base = (*rest, "--method", "wanda")
    assert command("prune", model, tmp_path / "whole", *base).exit_code == 0
    ends(2, KeyboardInterrupt)
    assert command("prune", model, tmp_path / "out", *base).exit_code == 130
    ends(-1, KeyboardInterrupt)
    with (tmp_path / "out" / WORK / JOURNAL).open("a") as stream:
        stream.write("null\n")
    ran = command("prune", model, tmp_path / "out", *base, "--resume")
    assert ran.exit_code == 0
    assert "of the journal is damaged: 2 finished blocks" in " ".join(ran.stderr.split())
    assert same(tmp_path / "out", tmp_path / "whole")


@pytest.mark.parametrize("stage", ["the first block", "the second block", "verification"])
@pytest.mark.parametrize("cause", ERRORS)
def test_messages_agree(
    stage: str,
    cause: str,
    words: tuple[object, ...],
    tmp_path: Path,
    command: Command,
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever ends a run: what is kept is said once, is true, and comes with how to go on exactly where there is something."""
    model, *rest = words
    error = ERRORS[cause]()
    kept = {"the first block": 0, "the second block": 1, "verification": 3}[stage]

    def fail(*_: object, **__: object) -> None:
        raise error

    if stage == cause == "verification":
        monkeypatch.setattr("sparsellm.outputs.verification.count_zeros", lambda _: -1)
    elif stage == "verification":
        monkeypatch.setattr("sparsellm.outputs.saving.check_written", fail)
    else:
        ends(kept, error)
    ran = command("prune", model, tmp_path / "out", *rest, "--method", "wanda")
    message = " ".join(ran.stderr.split())
    assert ran.exit_code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    count = "1 block is" if kept == 1 else f"{kept} blocks are"
    assert (f"{count} finished and kept: pass --resume to continue, or --restart" in message) == (kept > 0), message
    assert ("nothing was written" in message) == (not kept and not isinstance(error, VerificationFailed)), message
    assert message.count("--resume") == (kept > 0), message
    assert message.lower().count("kept") == (kept > 0), message
    assert [file.name for file in tmp_path.iterdir()] == (["out"] if kept else [])
    assert not list(tmp_path.rglob("export"))


def test_an_error_before_the_journal_is_read_keeps_it(
    words: tuple[object, ...], tmp_path: Path, command: Command, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a resumed run reads its texts: nothing is lost, and the message does not say that nothing was written."""
    model, *rest = words
    base = ("prune", model, tmp_path / "out", *rest, "--method", "wanda")
    ends(2, KeyboardInterrupt)
    assert command(*base).exit_code == 130
    ends(-1, KeyboardInterrupt)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sparsellm.pipeline.preparation.prepare_pruning", interrupt)
        ran = command(*base, "--resume")
    assert "interrupted; blocks that were finished before are kept: pass --resume" in " ".join(ran.stderr.split())
    ran = command(*base, "--seed", 1, "--resume")
    refused(ran, "--seed was 0, now 1", "--restart")
    assert "pass --resume" not in ran.stderr
    assert command(*base, "--resume").exit_code == 0


def test_one_process_at_a_time(words: tuple[object, ...], tmp_path: Path, command: Command) -> None:
    model, *rest = words
    folder = tmp_path / "out" / WORK
    folder.mkdir(parents=True)
    with FileLock(folder / "lock"):
        ran = command("prune", model, tmp_path / "out", *rest, "--method", "wanda")
    refused(ran, "Another process is working on")


def test_a_crash_between_the_two_renames(
    words: tuple[object, ...],
    tmp_path: Path,
    command: Command,
    ends: Ends,
) -> None:
    """The unfinished output stands under its old name: it is put back, and the run goes on."""
    model, *rest = words
    base = (*rest, "--method", "wanda")
    ends(2, KeyboardInterrupt)
    assert command("prune", model, tmp_path / "out", *base).exit_code == 130
    moved = tmp_path / ".out.0123abcd.old"
    (tmp_path / "out" / WORK / EXPORT).mkdir()
    (tmp_path / "out" / WORK / REPLACED).write_text(moved.name)
    (tmp_path / "out").rename(moved)
    ends(-1, KeyboardInterrupt)
    refused(command("prune", model, tmp_path / "out", *base), "is unfinished")
    assert command("prune", model, tmp_path / "out", *base, "--resume").exit_code == 0
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@extensions
@pytest.mark.parametrize(
    "further",
    [(), STREAMED, pytest.param(("--values", "int4"), marks=pytest.mark.long)],
    ids=["in memory", "streamed", "integers"],
)
def test_a_killed_run_resumes_to_the_same_bytes(
    further: tuple[str, ...], words: tuple[object, ...], tmp_path: Path, command: Command, server: ForkServerContext
) -> None:
    """SIGKILL as soon as the journal names a first block: the lock is free, and the end is the same."""
    model, *rest = words
    out, base = tmp_path / "out", [*rest, "--method", "alps", *further]
    assert command("prune", model, tmp_path / "whole", *base).exit_code == 0
    processes.kill_after_first_block(server, ["prune", model, out, *base], out)
    ran = command("prune", model, out, *base, "--resume")
    assert ran.exit_code == 0, ran.stderr
    assert same(out, tmp_path / "whole")
    if "--values" in further:
        assert (out / SCALES_FILE).read_bytes() == (tmp_path / "whole" / SCALES_FILE).read_bytes()
    assert not (out / WORK).exists()


@extensions
def test_what_needs_the_whole_model_says_so(words: tuple[object, ...], tmp_path: Path, command: Command) -> None:
    model, *rest = words
    refused(
        command("prune", model, tmp_path / "out", *rest, "--effort", "best", *STREAMED),
        "needs the whole model in memory",
        "raise --max-memory",
    )
    assert list(tmp_path.iterdir()) == []
    refused(command("prune", model, tmp_path / "out", *rest, "--max-memory", "plenty"), "16GiB", "'plenty'")


def test_without_an_output_the_model_must_fit(words: tuple[object, ...]) -> None:

    with pytest.raises(TooLarge, match="Name the folder to write"):
        prune(words[0], "wanda", "60%", calibration=words[2], max_memory="100KB", samples=4, sequence_length=32)  # type: ignore[arg-type]


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
from sparsellm.cli.app import app
app(sys.argv[2:])
"""
"""The command line in a process that may not write files larger than so many bytes: for it the disk is full."""


@pytest.mark.parametrize(
    ("limit", "more", "kept"),
    [
        long_unless(False, 2_000, ("--offload", "--max-memory", "500KB", "--samples", 48), 0),  # an activation file
        long_unless(False, 20_000, (), 0),  # the first block
        (70_000, (), 3),  # the finished checkpoint
    ],
)
def test_a_full_disk_is_one_message_and_the_run_resumes(
    limit: int, more: tuple[str, ...], kept: int, words: tuple[object, ...], tmp_path: Path, command: Command
) -> None:
    """One message in the system's words wherever it happens, nothing half-written, and the run goes on once there is room."""
    model, *rest = words
    base = [str(word) for word in ("prune", model, tmp_path / "out", *rest, "--method", "wanda", *more)]
    done = subprocess.run([sys.executable, "-c", LIMITED, str(limit), *base], capture_output=True, text=True, check=False)
    told = " ".join(done.stderr.split())
    assert done.returncode == 1, told
    assert done.stderr.count("\nerror:") == 1, told
    assert "File too large" in told
    assert "Traceback" not in told
    count = "1 block is" if kept == 1 else f"{kept} blocks are"
    assert (f"{count} finished and kept" in told) == (kept > 0), told
    assert [file.name for file in tmp_path.iterdir()] == (["out"] if kept else [])
    assert not list(tmp_path.rglob("*.partial"))
    ran = command(*base, "--resume")
    assert ran.exit_code == 0, ran.stderr
    assert command("prune", model, tmp_path / "whole", *rest, "--method", "wanda", *more).exit_code == 0
    assert same(tmp_path / "out", tmp_path / "whole")
