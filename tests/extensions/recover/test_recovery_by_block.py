"""Recovery of one block after the other: a block's training is durable, and memory is that of one block."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from sparsellm import prune
from sparsellm.checkpoints.files import WORK
from sparsellm.extensions.recover.block_recovery import read_recovery
from sparsellm.extensions.recover.recipe import RecoveryRecipe
from sparsellm.extensions.recover.run import recover_run
from sparsellm.extensions.recover.training import masked_training
from sparsellm.observers.events import Stage
from sparsellm.outputs.journal import work_directory
from tests import processes
from tests.conftest import byte_tokenizer, report_of
from tests.core.cli.test_bad_input import refused
from tests.meter import Meter

if TYPE_CHECKING:
    from typer.testing import Result

Command = Callable[..., "Result"]
STEPS = 200
SIZES = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 2}


@pytest.fixture
def words(tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> tuple[object, ...]:
    """A recovery of the tiny Llama, block by block, without its output."""
    pruned = prune(tiny["llama"], "magnitude", "60%").save_pretrained(tmp_path / "pruned")
    data = ("--calibration", text_file, "--samples", 16, "--sequence-length", 32, "--batch-size", 2)
    return ("recover", pruned, "--against", tiny["llama"], *data, "--scope", "block", "--steps", STEPS)


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def count_steps(monkeypatch: pytest.MonkeyPatch, *, interrupted_at: int | None = None) -> list[int]:
    """Count the gradient steps that are taken, one entry each; Ctrl-C comes after so many."""
    taken: list[int] = []
    step = masked_training._State.step

    def counted(self: Any, *arguments: Any, **keywords: Any) -> float:
        if len(taken) == interrupted_at:
            raise KeyboardInterrupt
        taken.append(1)
        return step(self, *arguments, **keywords)

    monkeypatch.setattr(masked_training._State, "step", counted)
    return taken


def same_result(one: Path, two: Path) -> bool:
    """Whether two recoveries have the same bytes and the same losses."""
    losses = [[block["refined"] for block in report_of(folder)["blocks"]] for folder in (one, two)]
    first, second = tensors(one), tensors(two)
    assert len(first) > 20
    assert all(training["curve"] for training in losses[0])
    return (
        first.keys() == second.keys()
        and all(torch.equal(x, second[name]) for name, x in first.items())
        and losses[0] == losses[1]
    )


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="in memory", marks=pytest.mark.long),
        pytest.param(("--offload",), id="streamed"),
        pytest.param(("--train", "lora", "--lora-rank", 4), id="lora", marks=pytest.mark.long),
    ],
)
def test_a_block_that_is_killed_continues(
    more: tuple[object, ...],
    words: tuple[object, ...],
    tmp_path: Path,
    command: Command,
    server: ForkServerContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGKILL in the middle of the second block: --resume takes only the steps after the stored state, to the same bytes."""
    name, pruned, *rest = words
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert command(name, pruned, whole, *rest, *more).exit_code == 0
    processes.kill_at(server, [name, pruned, out, *rest, *more], out, b'"training": "model.layers.1"')
    refused(command(name, pruned, out, *rest, *more), "is unfinished", "--resume")
    taken = count_steps(monkeypatch)
    ran = command(name, pruned, out, *rest, *more, "--resume")
    assert ran.exit_code == 0, ran.stderr
    blocks = len(report_of(out)["blocks"])
    assert (blocks - 2) * STEPS <= len(taken) <= (blocks - 1) * STEPS - STEPS // masked_training.VALIDATIONS
    assert same_result(out, whole)
    assert not (out / WORK).exists()


def test_an_interrupted_first_block_is_kept(
    words: tuple[object, ...], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before a block is finished leaves the state of its training, and says so."""
    name, pruned, *rest = words
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert command(name, pruned, whole, *rest).exit_code == 0
    with monkeypatch.context() as patch:
        count_steps(patch, interrupted_at=STEPS // 2)
        ran = command(name, pruned, out, *rest)
    assert ran.exit_code == 130
    assert "the state of the training is kept: pass --resume" in " ".join(ran.stderr.split())
    taken = count_steps(monkeypatch)
    assert command(name, pruned, out, *rest, "--resume").exit_code == 0
    assert len(taken) < len(report_of(out)["blocks"]) * STEPS
    assert same_result(out, whole)


def stage_peaks(depth: int, folder: Path, text: Path) -> tuple[dict[str, int], int]:
    """The most bytes of tensors in each stage of a recovery within 2.6 MB, and the bytes that one block and its streams take.

    The formula: seven copies of what is trained, the dense block, the two streams, and F with its root. The activations of a
    batch are left out.
    """
    config = LlamaConfig(**SIZES, num_hidden_layers=depth, max_position_embeddings=64)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    pruned = prune(folder / "model", "magnitude", "50%").save_pretrained(folder / "pruned")
    settings = {"scope": "block", "calibration": str(text), "samples": 16, "sequence_length": 32, "steps": 10, "batch_size": 4}
    more = {"offload": True, "max_memory": "2.6MB"}
    recipe = read_recovery({"model": str(folder / "model"), "pruned": str(pruned), **settings, **more})
    peaks: dict[str, int] = {}
    stages = ["reading"]

    def observe(event: object) -> None:
        if isinstance(event, Stage):
            peaks[stages[-1]] = meter.peak["cpu"]
            stages.append(event.name)
            meter.restart()

    with Meter() as meter, work_directory(folder / "out") as work:
        model = recover_run(recipe, observe, work=work).model
    peaks[stages[-1]] = meter.peak["cpu"]
    block = 4 * sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    width = config.hidden_size
    return peaks, 8 * block + 2 * 4 * 16 * 32 * width + 2 * 4 * width**2


def test_one_block_and_its_streams_are_held(text_file: Path, tmp_path: Path) -> None:
    """The peak does not grow with the number of blocks: it is that of one block, its training, the streams and one batch."""
    (few, expected), (many, _) = (stage_peaks(depth, tmp_path / str(depth), text_file) for depth in (2, 6))
    stage = RecoveryRecipe.stage
    assert few[stage] == pytest.approx(expected, rel=0.2)
    assert many[stage] == pytest.approx(few[stage], rel=0.01)
    assert max(many.values()) == many[stage]
