"""The journal: nothing is said to be finished that is not, and what is finished is taken up bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparsellm.activations.walk import Activations
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.errors import BadCheckpoint, CannotResume, InvalidSetting
from sparsellm.methods import BlockMethod, BlockResult, LayerResult, Plan, Step
from sparsellm.methods.algorithm1 import Algorithm1
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.outputs.journal import Journal
from sparsellm.recipes.plan import uniform_plan
from sparsellm.solvers import Magnitude, Wanda
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.solvers.sparsegpt import SparseGPT
from tests.conftest import extensions, long_unless
from tests.core.integration.test_block_loader import random_model, saved, windows
from tests.pruning import prune_blocks


class ScaledNorms(LayerWise):
    """A method of one's own that changes norms and biases, and leaves them with more digits than the model stores."""

    def prune(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[LayerResult]:
        yield from super().prune(block, inputs, plan)
        for parameter in block.unpruned_parameters().values():
            parameter.mul_(1.001)


PRINT = {"model": "m", "sparsity": "60%", "samples": 6}
METHODS: dict[str, BlockMethod] = {
    "magnitude": LayerWise(Magnitude()),
    "wanda": LayerWise(Wanda()),
    "sparsegpt": LayerWise(SparseGPT()),
    "alps": LayerWise(ALPS()),
    "published": Algorithm1(SparseGPT(), epochs=2),
    "sparsellm": SparseLLM(rounds=1),
    "norms": ScaledNorms(Wanda()),
}


def steps_of(model: PreTrainedModel, method: BlockMethod, journal: Journal | None = None) -> Iterator[Step]:
    """Prune by float32 computations, as a model of 16 bits is pruned on a CPU."""
    plan = uniform_plan(blocks_of(model), parse_pattern("60%"))
    return prune_blocks(model, list(windows().split(2)), method, plan, torch.float32, journal=journal)


def recovery() -> BlockMethod:
    """Gradient steps over each block of a model that was pruned before."""
    from sparsellm.extensions.recover.training.masked_training import MaskedAdam
    from tests.recovering import block_recovery

    pruned = random_model("opt")
    return block_recovery(pruned, list(steps_of(pruned, METHODS["wanda"])), MaskedAdam(2, 1e-3))


def results(steps: Iterator[Step]) -> list[BlockResult]:
    return [step for step in steps if isinstance(step, BlockResult)]


def tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "stop", "dtype"),
    [
        long_unless(
            name in ("wanda", "norms") or stop == (1 if dtype is torch.float32 else 2),
            *(name, stop, dtype),
            marks=[extensions] if name == "recovery" else [],
        )
        for name in [*METHODS, "recovery"]
        for stop in range(4)
        for dtype in (torch.float32, torch.bfloat16)
    ],
    ids=str,
)
def test_runs_resume_to_the_same_bits(name: str, stop: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Ended after so many blocks and resumed with the dense model: weights and results are those of an unbroken run."""
    whole, method = random_model("opt").to(dtype), recovery() if name == "recovery" else METHODS[name]
    wanted = results(steps_of(whole, method))
    first = steps_of(random_model("opt").to(dtype), method, Journal.begin(tmp_path / "work", PRINT))
    for _ in islice((step for step in first if isinstance(step, BlockResult)), stop):
        pass
    del first
    journal = Journal.resume(tmp_path / "work", PRINT)
    assert [journal.finished(index) is not None for index in range(3)] == [index < stop for index in range(3)]
    model = random_model("opt").to(dtype)
    found = results(steps_of(model, method, journal))
    assert all(torch.equal(tensor, tensors(whole)[key]) for key, tensor in tensors(model).items())
    for one, other in zip(found, wanted, strict=True):
        assert [(x.name, x.zeros, x.error) for x in one.layers] == [(x.name, x.zeros, x.error) for x in other.layers]
        assert (one.epochs, one.changed_parameters, one.refined, one.note) == (
            other.epochs,
            other.changed_parameters,
            other.refined,
            other.note,
        )


@extensions
def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    """Every field of a block's result, with its types."""
    found = results(steps_of(random_model("opt"), recovery(), Journal.begin(tmp_path / "work", PRINT)))
    journal = Journal.resume(tmp_path / "work", PRINT)
    assert [journal.finished(index) for index in range(3)] == found
    assert found[0].refined is not None
    assert list(journal.block_files()) == [0, 1, 2]
    assert all(file.is_file() for file in journal.block_files().values())
    assert not list((tmp_path / "work").glob("*.partial"))


def test_facts_and_tensors(tmp_path: Path) -> None:
    journal = Journal.begin(tmp_path / "work", PRINT)
    journal.store_fact("plan", {"a": 0.1, "b": [1, 2]})
    kept = {"x": torch.randn(3, 4), "y": torch.arange(5).bfloat16()}
    journal.store_tensors("metrics", kept)
    again = Journal.resume(tmp_path / "work", PRINT)
    assert again.fact("plan") == {"a": 0.1, "b": [1, 2]}
    assert again.fact("other") is None
    assert again.tensors("other") is None
    found = again.tensors("metrics")
    assert found is not None
    assert found.keys() == kept.keys()
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in kept.items())


@pytest.mark.parametrize("cut", [1, 5, 40, 100_000])
def test_a_line_that_was_cut_off_does_not_count(cut: int, tmp_path: Path) -> None:
    """Of a journal that ends in the middle of a line the lines before it count, and it goes on after them."""
    list(steps_of(random_model("opt"), METHODS["wanda"], Journal.begin(tmp_path / "work", PRINT)))
    file = tmp_path / "work" / "journal.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][: -min(cut, len(lines[-1]) - 1)])
    journal = Journal.resume(tmp_path / "work", PRINT)
    assert [journal.finished(index) is not None for index in range(3)] == [True, True, False]
    model = random_model("opt")
    list(steps_of(model, METHODS["wanda"], journal))
    assert [json.loads(line).get("block") for line in file.read_text().splitlines()] == [None, 0, 1, 2]
    whole = random_model("opt")
    list(steps_of(whole, METHODS["wanda"]))
    assert all(torch.equal(tensor, tensors(whole)[key]) for key, tensor in tensors(model).items())


def test_another_run_is_refused(tmp_path: Path) -> None:
    Journal.begin(tmp_path / "work", PRINT)
    with pytest.raises(CannotResume, match=r"samples .*6.*7.*sparsity .*'60%'.*'70%'.*`restart=True`"):
        Journal.resume(tmp_path / "work", PRINT | {"samples": 7, "sparsity": "70%"})
    with pytest.raises(CannotResume, match=r"`sparsity` .*None.*'65%'"):
        Journal.resume(tmp_path / "work", PRINT | {"recipe.sparsity": "65%"})
    with pytest.raises(CannotResume, match=r"file recipe\.sparsity .*None.*1"):
        Journal.resume(tmp_path / "work", PRINT | {"file recipe.sparsity": 1})
    with pytest.raises(CannotResume, match=r"seed .*None.*1"):
        Journal.resume(tmp_path / "work", PRINT | {"seed": 1})
    for text in ('{"format": 0, "fingerprint": {}}\n', '{"format": 1}\n'):
        (tmp_path / "work" / "journal.jsonl").write_text(text)
        with pytest.raises(CannotResume, match=r"another version.*`restart=True`"):
            Journal.resume(tmp_path / "work", PRINT)
    with pytest.raises(CannotResume, match=r"no journal to read.*`restart=True`"):
        Journal.resume(tmp_path / "nowhere", PRINT)


Lines = list[str]
SPOILT: dict[str, tuple[Callable[[Lines], Lines], int]] = {
    "edited": (lambda x: [*x[:2], x[2].replace('"zeros": ', '"zeros": 1'), x[3]], 1),
    "a field added": (lambda x: [*x[:2], '{"note": 1, ' + x[2][1:], x[3]], 1),
    "a list": (lambda x: [*x[:2], "[1]\n", *x[3:]], 1),
    "null": (lambda x: [*x[:2], "null\n", *x[2:]], 1),
    "nested": (lambda x: [*x[:2], "[" * 100_000 + "\n", *x[2:]], 1),
    "empty": (lambda x: [*x[:2], "\n", *x[2:]], 1),
    "joined": (lambda x: [*x[:2], x[2].rstrip(), x[3]], 1),
    "removed": (lambda x: [*x[:2], x[3]], 1),
    "twice": (lambda x: [*x[:2], x[1], *x[2:]], 1),
    "reordered": (lambda x: [*x[:2], x[3], x[2]], 1),
    "a fact slipped in": (lambda x: [*x[:3], '{"fact": "batch", "value": 1}\n', x[3]], 2),
    "the fingerprint edited": (lambda x: [x[0].replace("60%", "70%"), *x[1:]], 0),
    "the fingerprint empty": (lambda x: ["{}\n", *x[1:]], 0),
    "the fingerprint null": (lambda x: ["null\n", *x[1:]], 0),
    "the fingerprint cut off": (lambda x: [x[0][:20]], 0),
    "no line": (lambda x: [], 0),
}
"""How a journal of three blocks is spoilt, and how many of its blocks still count."""


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_line_is_reported_and_done_again(how: str, tmp_path: Path) -> None:
    """What stands before it counts, `lost` says so, and the end is that of an unbroken run."""
    whole, spoil = random_model("opt"), SPOILT[how]
    list(steps_of(whole, METHODS["wanda"], Journal.begin(tmp_path / "work", PRINT)))
    file = tmp_path / "work" / "journal.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(spoil[0](lines)))
    journal = Journal.resume(tmp_path / "work", PRINT)
    assert list(journal.block_files()) == list(range(spoil[1]))
    assert "of the journal is damaged" in journal.damage
    model = random_model("opt")
    list(steps_of(model, METHODS["wanda"], journal))
    assert all(torch.equal(tensor, tensors(whole)[key]) for key, tensor in tensors(model).items())
    again = Journal.resume(tmp_path / "work", PRINT)
    assert list(again.block_files()) == [0, 1, 2]
    assert again.damage == ""


def test_a_line_of_another_run_does_not_count(tmp_path: Path) -> None:
    """The same block of a run with another fingerprint, copied into the journal."""
    for name in ("one", "two"):
        list(steps_of(random_model("opt"), METHODS["wanda"], Journal.begin(tmp_path / name, PRINT | {"run": name})))
    one, two = ((tmp_path / name / "journal.jsonl").read_text().splitlines(keepends=True) for name in ("one", "two"))
    (tmp_path / "one" / "journal.jsonl").write_text("".join([*one[:2], *two[2:]]))
    journal = Journal.resume(tmp_path / "one", PRINT | {"run": "one"})
    assert list(journal.block_files()) == [0]
    assert journal.damage.startswith("line 3 of the journal")


@pytest.mark.parametrize("spoil", ["flip", "cut", "gone"])
def test_a_damaged_block_is_done_again(spoil: str, tmp_path: Path) -> None:
    """One bit is enough; nothing is taken from such a file, nor from those of the blocks after it."""
    whole = random_model("opt")
    list(steps_of(whole, METHODS["wanda"], Journal.begin(tmp_path / "work", PRINT)))
    file = tmp_path / "work" / "block-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data if spoil == "flip" else data[:-7])
    if spoil == "gone":
        file.unlink()
    journal = Journal.resume(tmp_path / "work", PRINT)
    assert list(journal.block_files()) == [0]
    assert journal.damage.startswith("block-00001.safetensors ")
    model = random_model("opt")
    list(steps_of(model, METHODS["wanda"], journal))
    assert all(torch.equal(tensor, tensors(whole)[key]) for key, tensor in tensors(model).items())
    assert Journal.resume(tmp_path / "work", PRINT).damage == ""


def test_damaged_tensors_are_found_again(tmp_path: Path) -> None:
    """Sensitivities and the like: what was finished after them does not count."""
    journal = Journal.begin(tmp_path / "work", PRINT)
    journal.store_fact("before", 1)
    journal.store_tensors("metrics", {"x": torch.ones(3)})
    journal.store_fact("after", 2)
    (tmp_path / "work" / "metrics.safetensors").write_bytes(b"")
    again = Journal.resume(tmp_path / "work", PRINT)
    assert (again.fact("before"), again.fact("after"), again.tensors("metrics")) == (1, None, None)


def test_a_file_that_changes_under_a_run_is_refused(tmp_path: Path) -> None:
    journal = Journal.begin(tmp_path / "work", PRINT)
    journal.store_tensors("metrics", {"x": torch.ones(3)})
    (tmp_path / "work" / "metrics.safetensors").write_bytes(b"")
    with pytest.raises(BadCheckpoint, match=r"metrics\.safetensors"):
        journal.tensors("metrics")


def test_half_written_files_are_removed(tmp_path: Path) -> None:
    """A process that is killed while it writes a block leaves them."""
    Journal.begin(tmp_path / "work", PRINT)
    for resume in (Journal.resume, Journal.begin):
        (tmp_path / "work" / "block-00000.safetensors.4711.partial").write_bytes(b"half")
        resume(tmp_path / "work", PRINT)
        assert [file.name for file in (tmp_path / "work").iterdir()] == ["journal.jsonl"]


@pytest.mark.parametrize("failing", ["write", "replace"])
def test_a_block_that_cannot_be_written_is_not_finished(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: the error is the system's own, the journal does not name the block, and no half of a file is left."""
    journal = Journal.begin(tmp_path / "work", PRINT)
    steps = steps_of(random_model("opt"), METHODS["wanda"], journal)
    next(step for step in steps if isinstance(step, BlockResult))

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((Path, "replace") if failing == "replace" else ("os.fsync",)), full)
    with pytest.raises(OSError, match="No space left"):
        list(steps)
    monkeypatch.undo()
    assert not list((tmp_path / "work").glob("*.partial"))
    again = Journal.resume(tmp_path / "work", PRINT)
    assert [again.finished(index) is not None for index in range(3)] == [True, False, False]


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_streamed_runs_resume_to_the_same_bits(stop: int, tmp_path: Path) -> None:
    """From files block by block, ended and resumed: what the files then hold is an unbroken run's in memory."""
    folder, method = saved("llama", tmp_path / "model", "shards"), METHODS["sparsellm"]
    whole = random_model("llama")
    list(steps_of(whole, method))
    plan = uniform_plan(blocks_of(whole), parse_pattern("60%"))
    for attempt in (stop, 3):
        model, weights = open_checkpoint(str(folder)).stream()
        work = tmp_path / "work"
        journal = Journal.resume(work, PRINT) if work.exists() else Journal.begin(work, PRINT)
        steps = prune_blocks(model, list(windows().split(2)), method, plan, weights=weights, journal=journal)
        for _ in islice((step for step in steps if isinstance(step, BlockResult)), attempt):
            pass
    for block in blocks_of(model):
        with weights.block(block):
            for name, tensor in block.module.state_dict().items():
                assert torch.equal(tensor, tensors(whole)[block.full_name(name)])
    with pytest.raises(InvalidSetting, match="needs a journal"):
        next(prune_blocks(model, list(windows().split(2)), method, plan, weights=weights))
