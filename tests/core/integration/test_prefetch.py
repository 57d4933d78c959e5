"""The next block is read while one is worked on: the same bits, errors told, nothing left behind, memory counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparsellm.activations.sensitivity import output_fisher
from sparsellm.checkpoints.block_loader import DiskWeights
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.errors import BadCheckpoint
from sparsellm.methods.layerwise import LayerWise
from sparsellm.models.blocks import blocks_of
from sparsellm.outputs.journal import Journal
from sparsellm.outputs.report import Report
from sparsellm.pipeline.loading import choose_placement, open_model
from sparsellm.pipeline.planning import estimate, fit_to_memory
from sparsellm.pipeline.preparation import make_plan, prepare_pruning
from sparsellm.pipeline.stage_memory import pruning_memory
from sparsellm.recipes.file import read_recipe
from sparsellm.recipes.plan import uniform_plan
from sparsellm.solvers import Magnitude, Wanda
from sparsellm.solvers.patterns import parse_pattern
from tests.core.integration.test_block_loader import saved, windows
from tests.meter import Meter
from tests.pruning import loaded, prune_blocks

THREAD = "prefetch_0"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(10)  # nobody waits for the end of one that has read all
            assert not thread.is_alive()


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Each tensor that is read, and the thread that reads it."""
    found: list[tuple[str, str]] = []
    plain = DiskWeights.read

    def read(self: DiskWeights, name: str) -> Tensor:
        found.append((name, threading.current_thread().name))
        return plain(self, name)

    monkeypatch.setattr(DiskWeights, "read", read)
    return found


@pytest.mark.parametrize("solver", [Magnitude(), Wanda()], ids=["nothing travels", "streams travel"])
@pytest.mark.parametrize("form", ["shards", "bin", "bf16"])
def test_prefetch_gives_the_same_bits(
    form: str, solver: Magnitude | Wanda, tmp_path: Path, readers: list[tuple[str, str]]
) -> None:
    """Whether read ahead or not; every block but the first is, each once, and nothing else."""
    folder, written = saved("llama", tmp_path / "model", form), []
    for ahead in (False, True):
        readers.clear()
        model, weights = open_checkpoint(str(folder)).stream(prefetch=ahead)
        plan = uniform_plan(blocks_of(model), parse_pattern("50%"))
        journal = Journal.begin(tmp_path / str(ahead), {})
        list(prune_blocks(model, windows().split(2), LayerWise(solver), plan, weights=weights, journal=journal))
        early = [name for name, thread in readers if thread == THREAD]
        wanted = [name for name in weights.names if ".layers.1." in name or ".layers.2." in name]
        assert sorted(early) == (sorted(wanted) if ahead else [])
        assert all(parameter.is_meta for parameter in model.parameters())
        written.append({name: weights.read(name) for name in weights.names})
    one, two = written
    assert all(torch.equal(one[name], two[name]) and one[name].dtype == two[name].dtype for name in one)


def test_sensitivities_go_ahead_and_back(tmp_path: Path, readers: list[tuple[str, str]]) -> None:
    """Forward and backward through the blocks: the same bits, and read ahead both ways."""
    folder = saved("opt", tmp_path / "model", "single")
    found = []
    for ahead in (False, True):
        readers.clear()
        model, weights = open_checkpoint(str(folder)).stream(prefetch=ahead)
        found.append(output_fisher(loaded(model, weights=weights), list(windows().split(2))))
        early = {name.split(".layers.")[1][0] for name, thread in readers if thread == THREAD}
        assert early == ({"1", "2"} if ahead else set())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("spoil", "part"), [("nan", "holds NaN or infinity in model.layers.1"), ("shape", "calls for"), ("gone", "cannot be read")]
)
def test_errors_are_told_when_their_turn_comes(spoil: str, part: str, tmp_path: Path) -> None:
    """In the caller's thread, with their message; the block before is not disturbed."""
    folder = saved("llama", tmp_path / "model", "single")
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    if spoil == "nan":
        tensors[name] = torch.full_like(tensors[name], float("nan"))
    elif spoil == "shape":
        tensors[name] = tensors[name][:5].clone()
    model, weights = open_checkpoint(str(folder)).stream(prefetch=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})  # now: what opens is sound
    one, two, three = blocks_of(model)
    with weights.block(one):
        if spoil == "gone":
            (folder / "model.safetensors").unlink()
        weights._start_prefetch(two)
    with pytest.raises(BadCheckpoint, match=part), weights.block(two, three):
        pass
    assert all(parameter.is_meta for parameter in model.parameters())


def test_interrupted_prefetch_ends_and_reads_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a block is worked on: reading ends after the tensor at hand, and the next visit reads anew."""
    folder = saved("llama", tmp_path / "model", "single")
    model, weights = open_checkpoint(str(folder)).stream(prefetch=True)
    one, two, _ = blocks_of(model)
    started, go_on, count = threading.Event(), threading.Event(), 0
    plain = DiskWeights.read

    def slow(self: DiskWeights, name: str) -> Tensor:
        nonlocal count
        if threading.current_thread().name == THREAD:
            count += 1
            started.set()
            go_on.wait(10)
        return plain(self, name)

    monkeypatch.setattr(DiskWeights, "read", slow)

    def work() -> None:
        with weights.block(one, two):
            started.wait(10)
            threading.Timer(0.05, go_on.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert count == 1
    assert weights._prefetched is None
    with weights.block(two):
        assert two.layer("mlp.up_proj").weight.device.type == "cpu"


def test_a_block_that_was_not_announced_is_read(tmp_path: Path, readers: list[tuple[str, str]]) -> None:
    folder = saved("llama", tmp_path / "model", "single")
    model, weights = open_checkpoint(str(folder)).stream(prefetch=True)
    one, two, three = blocks_of(model)
    with weights.block(one, two):
        pass
    readers.clear()
    with weights.block(three):
        name = f"{three.name}.mlp.up_proj.weight"
        assert torch.equal(three.layer("mlp.up_proj").weight, weights.read(name))
    assert {name.split(".layers.")[1][0] for name, thread in readers if thread != THREAD} == {"2"}


def test_its_memory_is_counted(tmp_path: Path) -> None:
    """From when it is sent for, by whoever counts the caller's tensors."""
    folder = saved("llama", tmp_path / "model", "single")
    model, weights = open_checkpoint(str(folder)).stream(prefetch=True)
    one, two, _ = blocks_of(model)
    size = sum(4 * tensor.numel() for tensor in one.module.parameters())
    with Meter() as meter:
        with weights.block(one, two):
            assert meter.live["cpu"] == 2 * size
        with weights.block(two):
            assert meter.live["cpu"] == size
        assert meter.live["cpu"] == 0


def test_where_there_is_no_room_nothing_is_read_ahead(tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """A plan counts one block more, and a run that fits without it goes without."""
    settings = {
        "model": str(tiny["llama"]),
        "calibration": str(text_file),
        "samples": 8,
        "sequence_length": 32,
        "sparsity": "50%",
    }
    recipe = read_recipe(settings | {"method": "sparsegpt", "offload": True})
    opened = open_model(recipe)
    ready = prepare_pruning(opened, recipe, *make_plan(recipe, opened), report=Report(recipe), observer=lambda _: None)
    place = choose_placement(recipe, ready, files=True)
    assert place.ahead
    needs = [
        estimate(ready, pruning_memory, replace(place, ahead=ahead), batch=ready.batch).peak.data_bytes
        for ahead in (False, True)
    ]
    block = max(
        sum(4 * x.numel() for x in some.module.parameters()) for some in blocks_of(open_checkpoint(recipe.model).load())
    )
    assert needs[1] - needs[0] == pytest.approx(block, rel=0.1)
    for memory, ahead in ((needs[1] + 1000, True), (sum(needs) // 2, False)):
        assert fit_to_memory(ready, replace(place, memory=memory), observer=lambda _: None)[0].ahead is ahead
    small = choose_placement(recipe.model_copy(update={"max_memory": f"{3 * block}B"}), ready, files=True)
    assert not small.ahead, "two blocks are more than half of the memory"
