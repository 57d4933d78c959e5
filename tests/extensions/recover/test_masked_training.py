"""Gradient steps with the masks held: the descent itself, and on one block."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

from sparsellm.activations.streams import Stream
from sparsellm.activations.walk import Activations
from sparsellm.extensions.recover.training.block_training import refine_block
from sparsellm.extensions.recover.training.masked_training import MaskedAdam, Pieces
from sparsellm.methods import BlockResult, Plan, Step, TrainingResult
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.models.blocks import blocks_of
from sparsellm.recipes.plan import uniform_plan
from sparsellm.solvers import Magnitude
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.texts.padding import split_batches, windows_a_step
from tests.pruning import prune_blocks
from tests.recovering import block_recovery

FULL, HALF = torch.float32, torch.bfloat16
NAN = float("nan")
NAMES = {"opt": ("fc1", "fc2"), "llama": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}

every_family = pytest.mark.parametrize("family", ["opt", "llama"])


@cache
def noisy(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets of linear regressions, by batch: (batches, tokens, in) and (batches, tokens, out)."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    x = torch.randn(count, 20, 6, generator=generator)
    return x, x @ truth.T + 0.1 * torch.randn(count, 20, 4, generator=generator)


def regression(count: int) -> tuple[nn.Parameter, dict[str, Tensor], Callable[[int], Tensor]]:
    """A weight to be fitted, half of it masked, its mask, and its loss on a batch."""
    weight = nn.Parameter(torch.zeros(4, 6))
    keep = torch.rand(4, 6, generator=torch.Generator().manual_seed(2)) > 0.5
    x, y = noisy(count)
    return weight, {"weight": keep}, lambda number: (x[number] @ weight.T - y[number]).square().mean()


def whole(loss: Callable[[int], Tensor]) -> Pieces:
    """A loss that is computed in one piece."""
    return lambda number: iter([loss(number)])


def held_back(loss: Callable[[int], Tensor], start: int, end: int) -> float:
    """The mean loss over some batches."""
    with torch.no_grad():
        return sum(float(loss(number)) for number in range(start, end)) / (end - start)


@pytest.mark.parametrize(
    ("count", "held", "back"),
    [(2, 0.125, 1), (8, 0.125, 1), (16, 0.125, 2), (8, 0.5, 4), (3, 0.5, 2), (2, 0.9, 1)],
)
def test_a_descent(count: int, held: float, back: int) -> None:
    """The loss of the last batches falls and is what is told; what is masked stays zero; the same call, the same bits."""
    weight, keep, loss = regression(count)
    looked: set[int] = set()

    def spied(number: int) -> Tensor:
        if torch.is_grad_enabled():
            looked.add(number)
        return loss(number)

    before = held_back(loss, count - back, count)
    found = MaskedAdam(200, 0.05, held).run({"weight": weight}, keep, whole(spied), groups=count, seed=3)
    assert looked == set(range(count - back))
    assert found.before == pytest.approx(before)
    assert found.after == held_back(loss, count - back, count) < 0.9 * before
    assert (0 < found.steps <= 200, found.note) == (True, "")
    assert not bool(weight[~keep["weight"]].any())
    assert bool(weight[keep["weight"]].all())
    again, keep, loss = regression(count)
    assert MaskedAdam(200, 0.05, held).run({"weight": again}, keep, whole(loss), groups=count, seed=3) == found
    assert torch.equal(again, weight)
    if count > 3:
        other, keep, loss = regression(count)
        MaskedAdam(200, 0.05, held).run({"weight": other}, keep, whole(loss), groups=count, seed=4)
        assert not torch.equal(other, weight)


def test_pieces_add_up() -> None:
    """A loss in pieces gives the steps of their sum, and the looks too."""
    found = []
    for parts in ([1.0], [0.25, 0.5, 0.25]):
        weight, keep, loss = regression(8)
        result = MaskedAdam(100, 0.05).run(
            {"weight": weight}, keep, lambda n, loss=loss, parts=parts: (part * loss(n) for part in parts), groups=8, seed=3
        )
        found.append((result, weight.detach()))
    (one, wanted), (other, got) = found
    assert (other.before, other.after) == (pytest.approx(one.before), pytest.approx(one.after))
    assert torch.allclose(got, wanted, atol=1e-4)


def test_the_rate_falls_to_nothing() -> None:
    """With one slope all along Adam's steps show the rate: a rise over five steps times a fall from `rate` to nearly 0."""
    weight = nn.Parameter(torch.zeros(1))
    MaskedAdam(50, 0.01).run({"weight": weight}, {}, whole(lambda _: weight.sum()), groups=2, seed=0)
    rates = [0.01 * min(1, (step + 1) / 5) * (1 - step / 50) for step in range(50)]
    assert float(weight.detach()) == pytest.approx(-sum(rates), rel=1e-3)


@pytest.mark.parametrize(("start", "high"), [(1.0, False), (0.05, True)])
def test_a_rate_too_high_falls(start: float, high: bool) -> None:
    """A first validation of over twice the loss at the start: the steps begin anew, at a rate that the excess makes smaller."""
    weight = nn.Parameter(torch.tensor([start]))
    path = nn.Parameter(torch.tensor([start]))
    found = MaskedAdam(50, 0.8).run({"weight": weight}, {}, whole(lambda _: (weight**2).sum()), groups=2, seed=0)
    losses, best = [float(path.detach() ** 2)], (float(path.detach() ** 2), 0)
    optimizer, scale = torch.optim.Adam([path], betas=(0.9, 0.95)), 1.0
    for step in range(1, 51):
        optimizer.param_groups[0]["lr"] = scale * 0.8 * min(1, step / 5) * (1 - (step - 1) / 50)
        optimizer.zero_grad()
        (path**2).sum().backward()
        optimizer.step()
        if step % 5 == 0:
            losses.append(float(path.detach() ** 2))
            best = min(best, (losses[-1], step))
        if step == 5 and losses[1] > 2 * losses[0]:
            scale = (2 * losses[0] / losses[1]) ** 0.5
            path.data.fill_(start)
    assert (scale < 1) == high
    assert [point.held_out for point in found.curve] == pytest.approx(losses, rel=1e-4)
    assert (found.after, found.steps) == (pytest.approx(best[0], rel=1e-4), best[1])


def test_the_best_look_stays() -> None:
    """Of the looks, one in ten steps, the best state of the held-back batch is returned, whatever comes after."""
    weight = nn.Parameter(torch.zeros(1))

    def loss(number: int) -> Tensor:
        return (weight - (-1 if number == 0 else -0.3)).square().sum()  # what is trained on goes past what is held back

    found = MaskedAdam(100, 0.02).run({"weight": weight}, {}, whole(loss), groups=2, seed=0)
    path = nn.Parameter(torch.zeros(1))
    optimizer, best = torch.optim.Adam([path], betas=(0.9, 0.95)), (0.09, 0, 0.0)
    for step in range(1, 101):
        optimizer.param_groups[0]["lr"] = 0.02 * min(1, step / 10) * (1 - (step - 1) / 100)
        optimizer.zero_grad()
        (path + 1).square().sum().backward()
        optimizer.step()
        if step % 10 == 0:
            best = min(best, (float((path + 0.3).detach().square()), step, float(path.detach())))
    assert 0 < best[1] < 100
    assert found.steps == best[1]
    assert found.after == pytest.approx(best[0])
    assert float(weight.detach()) == pytest.approx(best[2])
    assert float(path.detach()) < best[2]


def test_never_worse_than_before() -> None:
    """Where every look is worse than the start, the weights are the start's to the bit, and no steps are told."""
    weight, keep, loss = regression(4)
    with torch.no_grad():
        weight.normal_(generator=torch.Generator().manual_seed(5)).mul_(keep["weight"])
    before = weight.detach().clone()
    found = MaskedAdam(20, 0.05).run(
        {"weight": weight}, keep, whole(lambda n: -loss(n) if n < 3 else loss(n)), groups=4, seed=0
    )
    assert torch.equal(weight, before)
    assert (found.steps, found.after, found.note) == (0, found.before, "")


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_loss_that_is_not_finite(bad: float) -> None:
    """At the start nothing is done; midway the best state before it stays; on a held-back look it is no improvement. Told."""
    weight, keep, loss = regression(4)
    before = weight.detach().clone()
    found = MaskedAdam(20, 0.05).run(
        {"weight": weight}, keep, whole(lambda n: loss(n) * bad if n == 3 else loss(n)), groups=4, seed=0
    )
    assert torch.equal(weight, before)
    assert (found.steps, found.note) == (0, "not refined: the loss is not finite")
    taken: list[int] = []

    def breaks(number: int) -> Tensor:
        taken.extend([number] if torch.is_grad_enabled() else [])
        return loss(number) * (bad if len(taken) == 37 else 1)

    found = MaskedAdam(100, 0.02).run({"weight": weight}, keep, whole(breaks), groups=4, seed=0)
    assert found.note == "the loss became infinite or undefined at step 37: the best weights before it were kept"
    assert found.steps == 30
    assert len(taken) == 37
    assert found.after == held_back(loss, 3, 4) < found.before
    assert not bool(weight[~keep["weight"]].any())
    weight, keep, loss = regression(4)

    def ends(number: int) -> Tensor:
        return loss(number) * (bad if number == 3 and bool(weight.any()) else 1)

    assert MaskedAdam(20, 0.05).run({"weight": weight}, keep, whole(ends), groups=4, seed=0).steps == 0
    assert not bool(weight.any())


@pytest.mark.parametrize(("steps", "batches", "said"), [(0, 8, ""), (5, 1, "only one group"), (5, 0, "only one group")])
def test_nothing_to_do(steps: int, batches: int, said: str) -> None:
    """Without steps or parameters nothing is done; with one group there is none to hold back, and the note says so."""
    weight, keep, loss = regression(8)
    found = MaskedAdam(steps, 0.1).run({"weight": weight}, keep, whole(loss), groups=batches, seed=0)
    assert said in found.note
    assert (found.steps, bool(found.note), bool(weight.any())) == (0, bool(said), False)
    assert MaskedAdam(5, 0.1).run({}, {}, whole(loss), groups=8, seed=0).steps == 0


def tiny(family: str, dtype: torch.dtype = FULL) -> PreTrainedModel:
    """A random model of two blocks, with weights large enough to matter and random biases."""
    torch.manual_seed(0)
    shared = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 32}
    shared |= {"num_attention_heads": 2, "tie_word_embeddings": True}
    if family == "opt":
        model: PreTrainedModel = OPTForCausalLM(OPTConfig(**shared, ffn_dim=32, word_embed_proj_dim=16, init_std=0.2))
    else:
        sizes = {"num_key_value_heads": 1, "initializer_range": 0.25, "intermediate_size": 24}
        model = LlamaForCausalLM(LlamaConfig(**shared, **sizes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    return model.to(dtype).eval()


@cache
def batches() -> list[Tensor]:
    """Eight batches of four sequences of twelve random tokens."""
    return list(torch.randint(0, 64, (32, 12), generator=torch.Generator().manual_seed(1)).split(4))


def refined(
    family: str, steps: int, dtype: torch.dtype = FULL, compute: torch.dtype = FULL, **choice: Any
) -> tuple[PreTrainedModel, Plan, list[Step]]:
    """A fresh model with pruned weights and gradient steps on each block, its plan, and everything that was yielded."""
    model, pruned = tiny(family, dtype), tiny(family, dtype)
    plan = uniform_plan(blocks_of(model), parse_pattern("60%"), **choice)
    results = list(prune_blocks(pruned, batches(), SparseLLM(Magnitude(), rounds=0), plan, compute))
    told = list[Step]()
    for step in prune_blocks(model, batches(), block_recovery(pruned, results, MaskedAdam(steps, 1e-3)), plan, compute):
        told.append(step)
        if isinstance(step, BlockResult):  # what travels on is what will be stored
            block = blocks_of(model)[step.index].module
            assert all(torch.equal(tensor, tensor.to(dtype).to(tensor)) for tensor in block.parameters())
    return model, plan, told


@pytest.mark.parametrize(("dtype", "compute"), [(FULL, FULL), (HALF, HALF), (HALF, FULL)], ids=str)
@every_family
def test_blocks_are_refined(family: str, dtype: torch.dtype, compute: torch.dtype) -> None:
    """Zeros stay where they were without the steps; what was not planned keeps every bit; the error told falls; dtypes stay."""
    (before, plan, _), (model, _, steps), (again, _, _) = (
        refined(family, steps, dtype=dtype, compute=compute, chosen=frozenset({1}), exclude=["q_proj"]) for steps in (0, 40, 40)
    )
    (told,) = (step for step in steps if isinstance(step, TrainingResult))
    (block,) = (step for step in steps if isinstance(step, BlockResult))
    assert 0 < told.steps <= 40
    assert 0 < told.after < told.before
    assert block.refined is told
    assert model.lm_head.weight is model.get_input_embeddings().weight
    moved, dense = set[str](), dict(tiny(family, dtype).named_parameters())
    for (name, one), other, same in zip(model.named_parameters(), before.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, same)
        assert (one.dtype, one.requires_grad, one.grad) == (dtype, True, None)
        layer = name.rsplit(".", 1)[0]
        if layer in plan and one.ndim == 2:
            assert torch.equal(one == 0, other == 0), name
            assert int((one == 0).sum()) == round(0.6 * one.numel())
            assert not torch.equal(one, other), name
        elif one.ndim == 2 or "layers.1." not in name or "q_proj" in name:
            assert torch.equal(one, dense[name]), name
        elif not torch.equal(one, dense[name]):
            moved.add(name)
    assert moved == set(block.changed_parameters)
    assert moved


@pytest.mark.parametrize("weighed", [True, False], ids=["metric", "plain"])
@every_family
def test_what_is_told_of_a_block(family: str, weighed: bool) -> None:
    """Before and after are E‖h - block(x)‖² in the metric on the held-back batch, over E‖h‖² on all; h is the dense stream."""
    model, names = tiny(family), NAMES[family]
    block, root = blocks_of(model)[0], torch.randn(16, 16, generator=torch.Generator().manual_seed(2))
    metric, inputs = root @ root.T + torch.eye(16), Activations.from_model(model, blocks_of(model), batches(), streams=([], []))
    inputs.begin_block(block)
    inputs.pruned = Stream([hidden.detach() * 1.1 for hidden in inputs.pruned], [inputs.calls(block)])
    with torch.no_grad():
        targets = [block(hidden, call) for hidden, call in zip(inputs.dense or [], inputs.calls(block), strict=True)]
        for name in names:
            block.write(name, block.layer(name).weight * parse_pattern("50%").keep(block.layer(name).weight.abs()))
    keep, parameters = {name: block.layer(name).weight != 0 for name in names}, [f"{name}.weight" for name in names]

    def count(errors: Tensor) -> float:
        return float(((errors @ metric) * errors if weighed else errors.square()).sum(-1).mean())

    def missed() -> float:
        with torch.no_grad():
            power = sum(count(target) for target in targets) / len(targets)
            return count(block(inputs.pruned[-1], inputs.calls(block)[-1]) - targets[-1]) / power

    before, start = missed(), copy.deepcopy(block.module.state_dict())
    found = refine_block(block, inputs, keep, names=parameters, fisher=metric if weighed else None, adam=MaskedAdam(40, 3e-3))
    assert found.before == pytest.approx(before, rel=1e-4)
    assert found.after == pytest.approx(missed(), rel=1e-4)
    assert found.after < 0.95 * found.before
    for name, tensor in block.module.state_dict().items():
        assert torch.equal(tensor, start[name]) == (name not in parameters), name
    assert all(bool((block.layer(name).weight[~keep[name]] == 0).all()) for name in names)


@pytest.mark.parametrize(("samples", "step"), [(64, 8), (50, 6), (7, 1)])
def test_batches_do_not_lie_astride_two_steps(samples: int, step: int) -> None:
    """Every window once and in order, at most `batch` together, and a batch ends wherever a step's group does."""
    windows = torch.arange(samples * 512).reshape(samples, 512)
    assert windows_a_step(samples, 512) == step
    for batch in (1, 3, 5, 8, 64):
        found = split_batches(windows, batch)
        assert torch.equal(torch.cat(found), windows)
        assert max(len(some) for some in found) == min(batch, samples)
        ends = {int(some[-1, -1]) // 512 + 1 for some in found}
        assert batch > step or set(range(step, samples, step)) <= ends, batch


@every_family
def test_how_many_windows_travel_together_changes_rounding_only(family: str) -> None:
    """Gradient steps over a block read the same windows however many travel together."""
    windows = torch.randint(0, 48, (32, 12), generator=torch.Generator().manual_seed(1))  # a step reads four
    found = []
    for batch in (4, 3, 1):
        model = tiny(family)
        plan = uniform_plan(blocks_of(model), parse_pattern("60%"), chosen=frozenset({0}))
        pruned = tiny(family)
        results = list(prune_blocks(pruned, windows.split(4), LayerWise(Magnitude()), plan))
        method = block_recovery(pruned, results, MaskedAdam(20, 1e-3))
        (block,) = (
            step for step in prune_blocks(model, split_batches(windows, batch), method, plan) if isinstance(step, BlockResult)
        )
        found.append((block.refined, blocks_of(model)[0].layer(NAMES[family][0]).weight))
    (one, wanted), *others = found
    assert one is not None
    assert one.after < one.before
    for other, weight in others:
        assert other is not None
        assert (other.before, other.after) == (pytest.approx(one.before, rel=1e-4), pytest.approx(one.after, rel=1e-3))
        assert torch.equal(weight == 0, wanted == 0)
