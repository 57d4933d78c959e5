"""Gradual pruning: the bytes of its stages called by hand, masks that only grow, killed and resumed, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from sparsellm import prune, recover, verify
from sparsellm.pipeline.block_recovery import read_recovery
from sparsellm.studies.gradual import read_stages
from sparsellm.studies.page import report_page
from tests import processes
from tests.cli.test_bad_input import refused
from tests.conftest import report_of

if TYPE_CHECKING:
    from typer.testing import Result

Command = Callable[..., "Result"]
DATA: dict[str, Any] = {"samples": 16, "sequence_length": 32, "batch_size": 2}
WEAK: dict[str, Any] = {"solver": "magnitude", "gauss_newton_steps": 0, "exclude": ["q_proj"]}
"""Leaves something to gain."""

WORDS = ("--samples", 16, "--sequence-length", 32, "--batch-size", 2, "--steps", 4)


@pytest.fixture(scope="module")
def pruned(loud: dict[str, Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with half of the weights."""
    folder = tmp_path_factory.mktemp("pruned") / "half"
    return prune(loud["llama"], sparsity="50%", calibration=text_file, **DATA, **WEAK).save_pretrained(folder)


def tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's one file."""
    return load_file(folder / "model.safetensors")


def test_stages_equal_prune_and_recover_called_by_hand(
    pruned: Path, loud: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    """The bytes of `prune` with the zeros kept and `recover`, in turn; every stage has all zeros of the one before."""
    out = tmp_path / "out"
    words = ("--against", loud["llama"], "--calibration", text_file, *WORDS, "--evaluate", text_file, "--evaluate-limit", 2)
    ran = command("recover", pruned, out, *words, "--from", "50%", "--to", "80%", "--stages", 2)
    assert ran.exit_code == 0, ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-stages"]
    assert [path.name for path in (tmp_path / "out-stages").iterdir()] == ["68.4"]
    model = pruned
    for name, stage in (("68.4%", tmp_path / "out-stages" / "68.4"), ("80%", out)):
        settings = {"calibration": text_file, **DATA, **WEAK}
        by_hand = prune(model, sparsity=name, keep_zeros=True, **settings).save_pretrained(tmp_path / f"{name} pruned")
        again = recover(by_hand, loud["llama"], text_file, steps=4, **DATA).save_pretrained(tmp_path / name)
        one, two, before = tensors(stage), tensors(again), tensors(model)
        assert all((one[key] == two[key]).all() for key in two)
        zeros = {f"{layer['name']}.weight": layer["zeros"] for block in report_of(stage)["blocks"] for layer in block["layers"]}
        for key, count in zeros.items():
            assert int((one[key] == 0).sum()) == count
            assert not ((before[key] == 0) & (one[key] != 0)).any(), key
        assert sum(zeros.values()) / sum(one[key].numel() for key in zeros) == pytest.approx(float(name[:-1]) / 100, abs=1e-4)
        assert verify(stage, loud["llama"]).layers == len(zeros)
        model = stage
    _check_report(out, tmp_path / "out-stages" / "68.4", str(text_file))


def _check_report(out: Path, first: Path, text: str) -> None:
    """The report of the last stage has the perplexities and losses of all, and so have the card and the page."""
    report, earlier = report_of(out), report_of(first)
    stages = report["gradual"]["stages"]
    assert [stage["sparsity"] for stage in stages] == ["68.4%", "80%"]
    assert stages[:1] == earlier["gradual"]["stages"]
    for stage, one in zip(stages, (earlier, report), strict=True):
        name = Path(text).name
        assert stage["perplexity"][name]["recovered"] == one["perplexity"][name]["pruned"]
        assert stage["perplexity"][name]["pruned"] == one["pruned"]["perplexity"][name]["pruned"]
        assert stage["training"]["whole model"]["curve"] == one["recovered"]["curve"]
    page, plots = report_page(out)
    assert "--from 50%" in page
    assert "--stages 2" in page
    (curves,) = (plot for plot in plots if plot.name == "training")
    assert {row[0] for row in curves.rows} == {"68.4%, whole model", "80%, whole model"}
    card, described = " ".join((out / "README.md").read_text().split()), "after each of 2 stages of pruning from 50% to 80%"
    assert "| 68.4% |" in card
    assert f"recovered from {report['gradual']['pruned']} by 4 gradient steps over the whole model, {described}" in card
    assert described in page
    assert "after one stage of pruning from 50% to 68.4%" in " ".join((first / "README.md").read_text().split())
    seconds = sum(one["seconds"]["total"] + one["pruned"]["seconds"]["total"] for one in (earlier, report))
    assert sum(stage["seconds"] for stage in stages) == pytest.approx(seconds)
    (time,) = (plot for plot in plots if plot.name == "time")
    assert f"All stages took {seconds:.1f} seconds." in time.text


@pytest.mark.long
def test_a_killed_run_continues_at_its_stage(
    pruned: Path, loud: dict[str, Path], text_file: Path, tmp_path: Path, command: Command, server: ForkServerContext
) -> None:
    """SIGKILL in the second stage; with --resume the first is not repeated, and the bytes are those of an unbroken run."""
    out, stages = tmp_path / "out", ("--from", "50%", "--to", "70%", "--stages", 2)
    words = ("--against", loud["llama"], "--calibration", text_file, *WORDS, *stages)
    assert command("recover", pruned, tmp_path / "whole", *words).exit_code == 0
    first = tmp_path / "out-stages" / "61.3"
    processes.kill_after_first_block(server, ["recover", pruned, out, *words], tmp_path / "out-stages" / "70-pruned")
    written = (first / "model.safetensors").stat().st_mtime_ns
    refused(command("recover", pruned, out, *words), "is unfinished", "--resume")
    refused(command("recover", pruned, out, *words, "--resume", "--seed", 1), "a stage of another run: --seed was 0, now 1")
    other = (*words[:-1], 3)
    refused(command("recover", pruned, out, *other, "--resume"), "61.3, which is no stage of this run")
    ran = command("recover", pruned, out, *words, "--resume")
    assert ran.exit_code == 0, ran.stderr
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in (tmp_path / "out-stages").iterdir()] == ["61.3"]
    one, two = tensors(out), tensors(tmp_path / "whole")
    assert all((tensor == two[key]).all() for key, tensor in one.items())
    shutil.copytree(first, tmp_path / "out-stages" / "70-pruned")  # what a run leaves that is killed in its last moment
    ran = command("recover", pruned, out, *words, "--resume")
    assert "nothing to resume" in ran.stderr
    assert [path.name for path in (tmp_path / "out-stages").iterdir()] == ["61.3"]
    refused(command("recover", pruned, out, *words), "exists", "--overwrite")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--from", "50%"), "needs both --from and --to, got only --from."),
        (("--to", "80%"), "needs both --from and --to, got only --to."),
        (("--stages", 4), "needs both --from and --to, got only --stages."),
        (("--from", "80%", "--to", "60%"), "--from must be below --to, got 80% and 60%."),
        (("--from", "50%", "--to", "50%"), "--from must be below --to, got 50% and 50%."),
        (("--from", "40%", "--to", "80%"), "half is sparser than --from: its pruned layers have 50.00 % zeros, got 40%."),
        (("--from", "50%", "--to", "80%", "--stages", 0), "--stages must be from 1 to 999, got 0."),
        (("--from", "50%", "--to", "50.2%", "--stages", 4), "--stages 4 are too many from 50% to 50.2%"),
        (("--from", "50%", "--to", "2:4"), "--to must be an unstructured sparsity such as 80%, got 2:4"),
        (("--from", "50", "--to", "80%"), "--from must be in [0, 1), got 50. For 50 % write 0.5 or 50%."),
        (("--from", "50%", "--to", "180%"), "--to must be in [0, 1), got '180%'."),
        (("--from", "50%", "--to", "much"), "--to must be a fraction, a percentage or N:M, got 'much'."),
    ],
)
def test_what_is_refused(
    settings: tuple[object, ...],
    message: str,
    pruned: Path,
    loud: dict[str, Path],
    text_file: Path,
    tmp_path: Path,
    command: Command,
) -> None:
    words = ("--against", loud["llama"], "--calibration", text_file, *WORDS, *settings)
    refused(command("recover", pruned, tmp_path / "out", *words), message)
    assert list(tmp_path.iterdir()) == []


def test_another_dense_model_is_refused_before_the_first_stage(
    pruned: Path, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    words = ("--against", tiny["opt"], "--calibration", text_file, *WORDS, "--from", "50%", "--to", "80%")
    refused(command("recover", pruned, tmp_path / "out", *words), "was not made from", "--against")
    assert list(tmp_path.iterdir()) == []


def test_stages_remove_the_same_fraction_of_what_is_left(pruned: Path, loud: dict[str, Path], tmp_path: Path) -> None:
    recipe = read_recovery({"model": str(loud["llama"]), "pruned": str(pruned), "calibration": "demo"})
    gradual = read_stages(recipe, tmp_path / "out", start="50%", to="80%", stages=4)
    assert gradual is not None
    assert [str(sparsity) for sparsity in gradual.sparsities] == ["60.2%", "68.4%", "74.9%", "80%"]
    densities = [0.5, *(1 - sparsity.sparsity for sparsity in gradual.sparsities)]
    shares = [after / before for before, after in pairwise(densities)]
    assert shares == pytest.approx([0.4 ** (1 / 4)] * 4, abs=2e-3)
    assert read_stages(recipe, tmp_path / "out", start=None, to=None, stages=None) is None


def test_allocations_from_a_file_need_stages_by_hand(
    loud: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "allocation.yaml"
    file.write_text('"*": 50%\n')
    folder = tmp_path / "from-file"
    prune(loud["llama"], "magnitude", allocation=str(file)).save_pretrained(folder)
    words = ("--against", loud["llama"], "--calibration", text_file, *WORDS, "--from", "50%", "--to", "80%")
    refused(command("recover", folder, tmp_path / "out", *words), "with the sparsities of a file", "`keep_zeros`")
    shutil.rmtree(folder)
