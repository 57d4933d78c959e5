"""The journal: nothing is said to be finished that is not, and what is finished is taken up bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparsellm.allocation import uniform
from sparsellm.blocks import blocks_of
from sparsellm.checkpoint import open_checkpoint
from sparsellm.errors import BadCheckpoint, CannotResume, InvalidSetting
from sparsellm.journal import Journal
from sparsellm.methods import BlockMethod, BlockResult
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.published import PublishedSparseLLM
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.patterns import parse_pattern
from sparsellm.refinement import Descent
from sparsellm.sequential import Step, prune_blocks
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.criteria import Magnitude, Wanda
from sparsellm.solvers.sparsegpt import SparseGPT
from tests.test_weights import random_model, saved, windows

PRINT = {"model": "m", "sparsity": "60%", "samples": 6}
METHODS: dict[str, BlockMethod] = {
    "magnitude": LayerWise(Magnitude()),
    "wanda": LayerWise(Wanda()),
    "sparsegpt": LayerWise(SparseGPT()),
    "alps": LayerWise(ALPS()),
    "published": PublishedSparseLLM(SparseGPT(), epochs=2),
    "sparsellm": SparseLLM(newton=1, couple="block", refine=Descent(2, 1e-3)),
}


def steps_of(model: PreTrainedModel, method: BlockMethod, journal: Journal | None = None) -> Iterator[Step]:
    return prune_blocks(
        model, list(windows().split(2)), method, uniform(blocks_of(model), parse_pattern("60%")), journal=journal
    )


def results(steps: Iterator[Step]) -> list[BlockResult]:
    return [step for step in steps if isinstance(step, BlockResult)]


def tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stop", [0, 1, 2, 3])
@pytest.mark.parametrize("name", METHODS)
def test_a_run_goes_on_to_the_same_bits(name: str, stop: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Ended after so many blocks and resumed with the dense model: weights and results are those of an unbroken run."""
    whole, method = random_model("opt").to(dtype), METHODS[name]
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
        assert (one.epochs, one.moved, one.refined, one.note) == (other.epochs, other.moved, other.refined, other.note)


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    """Every field of a block's result, with its types."""
    found = results(steps_of(random_model("opt"), METHODS["sparsellm"], Journal.begin(tmp_path / "work", PRINT)))
    journal = Journal.resume(tmp_path / "work", PRINT)
    assert [journal.finished(index) for index in range(3)] == found
    assert found[0].refined is not None
    assert list(journal.block_files()) == [0, 1, 2]
    assert all(file.is_file() for file in journal.block_files().values())
    assert not list((tmp_path / "work").glob("*.partial"))


def test_facts_and_tensors(tmp_path: Path) -> None:
    journal = Journal.begin(tmp_path / "work", PRINT)
    journal.note("plan", {"a": 0.1, "b": [1, 2]})
    kept = {"x": torch.randn(3, 4), "y": torch.arange(5).bfloat16()}
    journal.keep_tensors("metrics", kept)
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
    with pytest.raises(CannotResume, match=r"samples was 6, now 7; sparsity was '60%', now '70%'.*--restart"):
        Journal.resume(tmp_path / "work", PRINT | {"samples": 7, "sparsity": "70%"})
    with pytest.raises(CannotResume, match=r"seed was None, now 1"):
        Journal.resume(tmp_path / "work", PRINT | {"seed": 1})
    for text in ("", "{}\n", '{"format": 0, "fingerprint": {}}\n', "no json\n", json.dumps({"format": 1})):
        (tmp_path / "work" / "journal.jsonl").write_text(text)
        with pytest.raises(CannotResume, match="no journal that this version can read"):
            Journal.resume(tmp_path / "work", PRINT)
    with pytest.raises(CannotResume, match="no journal"):
        Journal.resume(tmp_path / "nowhere", PRINT)


@pytest.mark.parametrize("spoil", ["flip", "cut", "gone"])
def test_a_damaged_block_is_told(spoil: str, tmp_path: Path) -> None:
    """One bit is enough; nothing is taken from such a file."""
    list(steps_of(random_model("opt"), METHODS["wanda"], Journal.begin(tmp_path / "work", PRINT)))
    journal = Journal.resume(tmp_path / "work", PRINT)
    file = journal.block_files()[1]
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data if spoil == "flip" else data[:-7])
    if spoil == "gone":
        file.unlink()
    model = random_model("opt")
    with pytest.raises(BadCheckpoint, match=r"block-00001\.safetensors.*--restart"):
        list(steps_of(model, METHODS["wanda"], journal))
    assert torch.equal(
        tensors(model)["model.decoder.layers.1.fc1.weight"], tensors(random_model("opt"))["model.decoder.layers.1.fc1.weight"]
    )


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
def test_streamed_runs_go_on_too(stop: int, tmp_path: Path) -> None:
    """From files block by block, ended and resumed: what the files then hold is an unbroken run's in memory."""
    folder, method = saved("llama", tmp_path / "model", "shards"), METHODS["sparsellm"]
    whole = random_model("llama")
    list(steps_of(whole, method))
    plan = uniform(blocks_of(whole), parse_pattern("60%"))
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
