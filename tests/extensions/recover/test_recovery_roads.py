"""Each set of trained parameters in each scope: what changes and what stays, in float32 and bfloat16, reloaded and packed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import product
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from sparsellm import load_report, pack, prune, recover, unpack, verify
from sparsellm.errors import InvalidSetting
from sparsellm.extensions.recover import model_training as training
from sparsellm.extensions.recover.recipe import SCOPE_STEPS
from sparsellm.extensions.recover.training import distillation
from sparsellm.extensions.recover.training.masked_training import MaskedAdam
from sparsellm.extensions.studies.page import report_page
from sparsellm.runtime import products
from tests import processes
from tests.conftest import long_unless, report_of
from tests.core.cli.test_bad_input import refused
from tests.extensions.recover.test_recovery import TOKENS, pruned, tensors
from tests.extensions.recover.test_recovery_by_block import count_steps

if TYPE_CHECKING:
    from typer.testing import Result

Command = Callable[..., "Result"]
SENTENCES = (torch.arange(32) * (1 + torch.arange(16).unsqueeze(1) % 3)) % 40
"""Sequences that can be learnt, (16, 32): counting by one, two or three."""

SETTINGS: dict[str, Any] = {"steps": 20, "batch_size": 2}


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual steps are for trained models: a random one of this size only gets worse by them, and generates noise."""
    monkeypatch.setattr(distillation, "MODEL_ADAM", MaskedAdam(20, 3e-3))
    monkeypatch.setattr(training, "READS", 1000)


@pytest.fixture(scope="module")
def folders(loud: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pruned checkpoints: of OPT in bfloat16, of Llama in float32."""
    folder = tmp_path_factory.mktemp("pruned")
    return {family: pruned(loud[family], folder / family) for family in ("opt", "llama")}


CASES = [
    (family, train, scope, (number + (family == "llama")) % 2 == 1)
    for family in ("opt", "llama")
    for number, (train, scope) in enumerate(product(("full", "lora"), ("model", "block")))
]
"""Trained parameters and scope, every other time with products in bfloat16."""

QUICK = {CASES[number] for number in (1, 2, 4, 7)}


@pytest.mark.parametrize(
    ("family", "train", "scope"),
    [
        long_unless((family == "opt") == (train == "full" and scope == "model"), family, train, scope)
        for family in ("opt", "llama")
        for train, scope in (("full", "model"), ("lora", "model"), ("full", "block"))
    ],
)
def test_products_of_large_layers(
    family: str,
    train: Any,
    scope: Any,
    folders: dict[str, Path],
    loud: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A linear layer is computed by another function where it is large, which none of these models is."""
    settings = {**SETTINGS, "train": train, "scope": scope, "compute_dtype": "float32"}
    calls: list[int] = []

    def kernel(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        calls.append(inputs.shape[0])
        return torch.nn.functional.linear(inputs, weight, bias)

    expected = tensors(recover(folders[family], loud[family], SENTENCES, **settings).save_pretrained(tmp_path / "small"))
    monkeypatch.setattr(products, "MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(products, "_kernel", lambda: kernel)
    found = tensors(recover(folders[family], loud[family], SENTENCES, **settings).save_pretrained(tmp_path / "large"))
    assert calls
    assert any(not torch.equal(found[name], tensor) for name, tensor in tensors(folders[family]).items())
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("family", [long_unless(family == "opt", family) for family in ("opt", "llama")])
def test_best_effort_of_a_bundled_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of the usual size, on this processor's own products."""
    monkeypatch.setitem(SCOPE_STEPS, "model", 4)
    monkeypatch.setattr(distillation, "MODEL_ADAM", MaskedAdam(4, 1e-4))
    shape: dict[str, int] = {"samples": 8, "sequence_length": 128}
    report = prune(f"demo:{family}", effort="best", sparsity="80%", calibration="demo", **shape).report
    assert report.recovered is not None
    before, *later = (point.held_out for point in report.recovered.curve)
    assert len(later) == 4
    assert all(0.5 * before < loss < 1.5 * before for loss in later)


@pytest.mark.parametrize(("family", "train", "scope", "half"), [long_unless(case in QUICK, *case) for case in CASES])
def test_zeros_stay_and_only_what_is_trained_changes(
    family: str,
    train: Any,
    scope: Any,
    half: bool,
    folders: dict[str, Path],
    loud: dict[str, Path],
    tmp_path: Path,
) -> None:
    """In the output, after transformers saves it again, and in the packed model; the held-out loss falls."""
    settings = {"train": train, "scope": scope, **SETTINGS}
    settings["compute_dtype"] = "bfloat16" if half else "float32"
    result = recover(folders[family], loud[family], SENTENCES, **settings)
    out = result.save_pretrained(tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(out, dtype="auto").save_pretrained(tmp_path / "again")
    pack(out, tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "unpacked")
    before, after = tensors(folders[family]), tensors(out)
    layers = {f"{layer.name}.weight" for layer in result.report.layers}
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    for other in ("again", "unpacked"):
        assert all(torch.equal(tensor, after[name]) for name, tensor in tensors(tmp_path / other).items())
    for name in layers:
        assert torch.equal(after[name] == 0, before[name] == 0), name
    assert layers <= moved
    assert (moved == layers) == (train == "lora")
    assert set(result.report.changed_outside) == {name for name in moved if ".layers." not in name}
    assert bool(result.report.changed_outside) == (train == "full" and scope == "model")
    trained = [x for x in (result.report.recovered, *(block.refined for block in result.report.blocks)) if x]
    assert sum(x.after for x in trained) < sum(x.before for x in trained)
    assert all(x.curve[0].held_out == x.before and min(p.held_out for p in x.curve) == x.after for x in trained)
    assert {tensor.dtype for tensor in after.values()} == {tensor.dtype for tensor in before.values()}
    assert verify(out, loud[family]).layers == len(layers)


def test_low_rank_changes_of_some_layers(folders: dict[str, Path], loud: dict[str, Path]) -> None:
    """Only layers that `lora_targets` names change."""
    before = tensors(folders["llama"])
    settings = {"train": "lora", "lora_targets": ["up_proj", "*.0.mlp.down_proj"], "lora_rank": 2, **SETTINGS}
    state = recover(folders["llama"], loud["llama"], TOKENS, **settings).model.state_dict()
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, state[name])}
    assert moved == {f"model.layers.{n}.mlp.up_proj.weight" for n in range(3)} | {"model.layers.0.mlp.down_proj.weight"}


@pytest.mark.parametrize("scope", ["model", "block"])
def test_the_command_in_every_scope(
    scope: str, folders: dict[str, Path], loud: dict[str, Path], tmp_path: Path, text_file: Path, command: Command
) -> None:
    """The display expects every stage."""
    words = ["--calibration", text_file, "--samples", 16, "--sequence-length", 32, "--steps", 2, "--scope", scope]
    done = command("recover", folders["llama"], tmp_path / "out", "--against", loud["llama"], *words)
    assert done.exit_code == 0, done.stderr
    assert report_of(tmp_path / "out")["recovered"] is not None or scope == "block"


def test_the_report_has_three_perplexities_and_the_curve(
    folders: dict[str, Path], loud: dict[str, Path], tmp_path: Path, text_file: Path
) -> None:
    """Before pruning, after it and after the recovery; the second is that of the pruned folder. The page draws the curve."""
    settings = {"evaluate": str(text_file), "samples": 16, "sequence_length": 32, **SETTINGS}
    result = recover(folders["opt"], loud["opt"], str(text_file), **settings)
    out = result.save_pretrained(tmp_path / "out")
    middle = prune(folders["opt"], "magnitude", "0%", evaluate=str(text_file), sequence_length=32).report
    (text,) = result.report.perplexity
    dense, before, after = result.report.in_order(text)
    assert before.value == middle.perplexity[text]["dense"].value
    assert result.summary()["perplexity"].count("→") == 2
    card = (out / "README.md").read_text()
    assert all(f"{x.value:.3f}" in card for x in (dense, before, after))
    changed = [name for block in result.report.blocks for name in block.changed_parameters] + [*result.report.changed_outside]
    assert verify(out, against=loud["opt"]).changed == len(changed) > 0
    curve = report_of(out)["recovered"]["curve"]
    assert [point["step"] for point in curve] == [0, *range(2, 21, 2)]
    assert curve[0]["training"] is None
    assert load_report(out).recovered is not None
    page = report_page(out)[0]
    assert "Training" in page
    assert "before the recovery" in page


def test_a_loss_that_turns_nan_is_told(
    folders: dict[str, Path], loud: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best state is kept, and a note names the step. The products of the factors overflow."""
    monkeypatch.setattr(distillation, "MODEL_ADAM", MaskedAdam(20, 1e37))
    report = recover(folders["llama"], loud["llama"], TOKENS, **SETTINGS, train="lora").report
    assert any("the best weights before it were kept" in note for note in report.notes)


def test_a_recovery_ends_early(folders: dict[str, Path], loud: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "MODEL_ADAM", MaskedAdam(20, 0.1))
    report = recover(folders["llama"], loud["llama"], TOKENS, **SETTINGS, patience=2).report
    assert any("stopped at step 4 of 20: the held-out loss was lowest at step 0" in note for note in report.notes)


def test_a_training_that_wins_nothing_is_told(
    folders: dict[str, Path],
    loud: dict[str, Path],
    text_file: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A note has the losses, the weights stay, and the table has a column for each of three measurements."""
    monkeypatch.setattr(distillation, "MODEL_ADAM", MaskedAdam(20, 100))
    out, half = tmp_path / "out", folders["llama"]
    reads = ("--calibration", text_file, "--evaluate", text_file, "--samples", 16, "--sequence-length", 32)
    ran = command("recover", half, out, "--against", loud["llama"], *reads, "--steps", 20)
    assert ran.exit_code == 0, ran.stderr
    training = report_of(out)["recovered"]
    assert training["steps"] == 0
    best = min(point["held_out"] for point in training["curve"][1:])
    told = f"no step lowered the held-out loss, {training['before']:.4g} before and at best {best:.4g} after"
    assert told in " ".join(ran.stderr.split())
    assert "The learning rate was at its height after 2 of 20 steps, the loss " in ran.stderr
    assert "Pass more --steps, by default 1200" in " ".join(ran.stderr.split())
    assert (out / "model.safetensors").read_bytes() == (half / "model.safetensors").read_bytes()
    nothing = "othing was recovered from llama: none of 20 gradient steps over the whole model lowered the held-out loss"
    assert f"{loud['llama']}: N{nothing}" in ran.stdout
    assert f"No step lowered the held-out loss, {training['before']:.4g}: training changed nothing." in ran.stdout.splitlines()
    card = " ".join((out / "README.md").read_text().split())
    in_output = nothing.replace("from llama", "from llama (2)")  # without its folder, and unlike the dense model's
    assert f"n{in_output}. " in card
    page, plots = report_page(out)
    assert f"was pruned. N{in_output}: " in page
    assert "; nothing was recovered; " in page
    assert "; verified when written." in page
    assert "pruned, nothing recovered</title>" in page
    assert next(x for x in plots if x.name == "training").text.endswith("No step lowered it: these weights are unchanged.")
    for said in (ran.stdout, card, page):
        assert "recovered from llama by" not in said
    lines = [re.split(r"  +", line.strip()) for line in ran.stdout.splitlines()]
    (row,) = (line for line in lines if len(line) == 6 and line[0] != "text")
    head = lines[lines.index(row) - 1]
    assert head == ["text", "dense perplexity", "pruned perplexity", "recovered perplexity", "change", "by the recovery"]
    assert row[2] == row[3] != row[1]
    assert row[5] == "no difference measurable (+0.0 ± 0.0 %)"


def test_a_held_out_loss_that_becomes_nan_is_told() -> None:
    parameters = {"x": torch.nn.Parameter(torch.ones(2))}

    def loss(number: int) -> Iterator[Tensor]:
        moved = bool((parameters["x"] != 1).any())
        yield parameters["x"].sum() * (float("nan") if moved and number == 3 else 1.0)

    result = MaskedAdam(1, 0.1).run(parameters, {}, loss, groups=4, seed=0)
    assert "the held-out loss became infinite or undefined at step 1" in result.note
    assert torch.equal(parameters["x"], torch.ones(2))


def test_the_pruned_model_is_not_its_own_teacher(folders: dict[str, Path]) -> None:
    """By whatever name it is given."""
    half = folders["llama"]
    other = half.parent / ".." / half.parent.name / half.name
    with pytest.raises(InvalidSetting, match="`against`"):
        recover(half, str(other), TOKENS)


def test_an_interrupted_training_says_what_is_kept(
    folders: dict[str, Path],
    loud: dict[str, Path],
    text_file: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The state of the training, and not the blocks, whose weights are only copied before it."""
    count_steps(monkeypatch, interrupted_at=20)
    data = ("--against", loud["llama"], "--calibration", text_file, "--samples", 4, "--sequence-length", 32)
    ran = command("recover", folders["llama"], tmp_path / "out", *data, "--steps", 40)
    assert ran.exit_code == 130
    assert "interrupted; the state of the training is kept: pass --resume" in " ".join(ran.stderr.split())


@pytest.mark.long
@pytest.mark.parametrize("train", ["full", "lora"])
def test_training_killed_and_resumed(
    train: str,
    folders: dict[str, Path],
    loud: dict[str, Path],
    text_file: Path,
    tmp_path: Path,
    command: Command,
    server: ForkServerContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGKILL during the training of the whole model; --resume continues after the last validation to the same bytes."""
    monkeypatch.undo()  # the other process has the usual learning rate
    out = tmp_path / "out"
    words: tuple[object, ...] = ("--against", loud["llama"], "--calibration", text_file, "--samples", 16, "--batch-size", 2)
    words = (*words, "--sequence-length", 32, "--steps", 200, "--train", train)
    assert command("recover", folders["llama"], tmp_path / "whole", *words).exit_code == 0
    processes.kill_at(server, ["recover", folders["llama"], out, *words], out, b'"training"')
    refused(command("recover", folders["llama"], out, *words), "is unfinished", "--resume")
    ran = command("recover", folders["llama"], out, *words, "--resume")
    assert ran.exit_code == 0, ran.stderr
    one, two = load_file(out / "model.safetensors"), load_file(tmp_path / "whole" / "model.safetensors")
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert report_of(out)["recovered"] == report_of(tmp_path / "whole")["recovered"]
