"""The default method on tiny random models: what it fits on what toward what, and weighed how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PretrainedConfig, PreTrainedModel, Qwen2Config

from sparsellm.activations.output_cache import BlockDataflow, trace_dataflow
from sparsellm.activations.sensitivity import layer_curvatures, output_fisher
from sparsellm.activations.streams import CaptureRequest
from sparsellm.methods import EpochResult, LayerResult, Step, targets
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.recipes.plan import uniform_plan
from sparsellm.solvers import Magnitude
from sparsellm.solvers.linalg import add_diagonal
from sparsellm.solvers.patterns import Pattern, Unstructured, parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram, TokenCount
from tests.pruning import loaded, prune_blocks, walk
from tests.regressions import estimated_ridge, least_squares

SHARED = {"vocab_size": 128, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "max_position_embeddings": 64}
OPT = {**SHARED, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2}
GATED = {**SHARED, "intermediate_size": 40, "num_key_value_heads": 2, "initializer_range": 0.25}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "opt": partial(OPTConfig, **OPT),
    "opt-post-norm": partial(OPTConfig, **OPT, do_layer_norm_before=False),
    "opt-gelu": partial(OPTConfig, **OPT, activation_function="gelu"),
    "opt-tanh": partial(OPTConfig, **OPT, activation_function="tanh"),
    "llama": partial(LlamaConfig, **GATED),
    "qwen2-sliding": partial(Qwen2Config, **GATED, use_sliding_window=True, sliding_window=4, layer_types=MIXED),
}
two_families = pytest.mark.parametrize("family", ["opt", "llama"])
every_family = pytest.mark.parametrize("family", CONFIGS)

Signals = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Recorder:
    """SparseGPT that remembers every problem with its answer."""

    damping: float = 0.03
    seen: list[tuple[LayerProblem, Tensor]] = field(default_factory=list)

    needs: ClassVar[type[TokenCount]] = Gram

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        self.seen.append((problem, SparseGPT(damping=self.damping).solve(problem, pattern)))
        return self.seen[-1][1]


@cache
def batches() -> list[Tensor]:
    """Three batches of sequences longer than the sliding window; the last two are the first again, so that all gain alike."""
    tokens = torch.randint(0, 128, (13, 16), generator=torch.Generator().manual_seed(1))
    return list(torch.cat([tokens, tokens[:2]]).split([6, 4, 5]))


def tiny(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of three blocks, with weights large enough to matter, random biases, and uneven norms."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]())
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
    return model.to(dtype).eval()


def prune(family: str, method: SparseLLM, singly: bool = False, **choice: Any) -> tuple[PreTrainedModel, list[Step]]:
    """A fresh model pruned by 60 %, and everything that was yielded. singly: each sequence as a batch of its own."""
    model = tiny(family)
    plan = uniform_plan(blocks_of(model), parse_pattern("60%"), **choice)
    tokens = list(torch.cat(batches()).split(1)) if singly else batches()
    return model, list(prune_blocks(model, tokens, method, plan))


def state(model: PreTrainedModel) -> dict[str, Tensor]:
    """All parameters, as they now stand."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed(one: PreTrainedModel, other: PreTrainedModel) -> set[str]:
    """The parameters in which two models differ, in any bit."""
    theirs = state(other)
    return {name for name, parameter in state(one).items() if not torch.equal(parameter, theirs[name])}


def writers(block: Block) -> tuple[str, str]:
    """What writes to the stream: attention's output and the feed-forward's."""
    return block.architecture.groups[1][0], block.architecture.groups[-1][0]


def signals(model: PreTrainedModel) -> Signals:
    """What every layer and block reads and writes, (tokens, features) float64, in ordinary passes of the whole model."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def keeps(name: str) -> Callable[..., None]:
        def hook(_: object, inputs: tuple[Tensor, ...], keywords: dict[str, Tensor], output: Any) -> None:
            pair = inputs[0] if inputs else keywords["hidden_states"], output[0] if isinstance(output, tuple) else output
            x, y = (each.flatten(0, -2).double() for each in pair)
            found.setdefault(name, []).append((x, y))

        return hook

    modules = {block.name: block.module for block in blocks_of(model)}
    modules |= {block.full_name(name): layer for block in blocks_of(model) for name, layer in block.layers.items()}
    hooks = [module.register_forward_hook(keeps(name), with_kwargs=True) for name, module in modules.items()]
    with torch.no_grad():
        for batch in batches():
            model(input_ids=batch)
    for hook in hooks:
        hook.remove()
    return {name: (torch.cat([x for x, _ in many]), torch.cat([y for _, y in many])) for name, many in found.items()}


def far(got: Tensor, wanted: Tensor) -> float:
    """The relative distance of two tensors."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def aim(family: str, block: Block, name: str, dense: Signals, pruned: Signals) -> Tensor:
    """What a layer should write, (tokens, out). block: of the dense model."""
    target, (adder, writer) = dense[block.full_name(name)][1], writers(block)
    if name in (adder, writer) and family != "opt-post-norm":
        target = target + dense[block.name][0] - pruned[block.name][0]
        if name == writer:
            target = target + dense[block.full_name(adder)][1] - pruned[block.full_name(adder)][1]
    return target


@pytest.mark.parametrize("choice", [{"rounds": 0}, {"scope": "none"}], ids=str)
@every_family
@torch.no_grad()
def test_what_each_layer_reads_and_should_write(family: str, choice: dict[str, Any]) -> None:
    """In running order: Gram, W*, bias and error are those of the finished model's own passes, by float64 least squares."""
    method = SparseLLM(solver=Recorder(), **choice)
    model, steps = prune(family, method)
    teacher = tiny(family)
    dense, pruned = signals(teacher), signals(model)
    assert isinstance(method.solver, Recorder)
    order = [(block, name) for block in blocks_of(teacher) for name in block.layers]
    for (block, name), (problem, answer) in zip(order, method.solver.seen, strict=True):
        full, layer = block.full_name(name), block.layer(name)
        x, target = pruned[full][0], aim(family, block, name, dense, pruned)
        means = x.mean(0), target.mean(0)
        if layer.bias is not None:
            x, target = x - means[0], target - means[1]
        gram, prior = x.T @ x / len(x), layer.weight.double()
        wanted = least_squares(x, target, prior, estimated_ridge(x, target, prior, False), False)
        assert isinstance(problem.inputs, Gram)
        assert far(problem.inputs.matrix, gram) < 1e-5, full
        assert far(problem.weight, wanted) < 1e-3, full
        assert (problem.curvature is None) == (method.scope == "none"), full
        written = model.get_submodule(full)
        assert torch.equal(written.weight, answer), full
        found = next(step for step in steps if isinstance(step, LayerResult) and step.name == full)
        lost = target - x @ answer.double().T
        assert found.error == pytest.approx(float(lost.square().sum() / target.square().sum()), rel=1e-3), full
        assert (found.known, found.tokens, found.damping) == ("Gram", len(x), method.solver.damping)
        if layer.bias is not None:
            torch.testing.assert_close(written.bias, (means[1] - answer.double() @ means[0]).float(), rtol=1e-4, atol=1e-4)
    coupled = method.scope != "none" and family != "opt-tanh"
    assert [step.epoch for step in steps if isinstance(step, EpochResult)] == [1] * 3 * coupled


@pytest.mark.parametrize("method", [SparseLLM(), SparseLLM(Magnitude(), rounds=0)], ids=str)
@pytest.mark.parametrize("family", ["opt", "qwen2-sliding"])
def test_what_travels_on_is_what_will_be_stored(family: str, method: SparseLLM) -> None:
    """A bf16 model stays bf16, and later blocks see bit for bit what its bf16 weights, biases and norms let through."""
    model, seen = tiny(family, torch.bfloat16), []
    metrics = output_fisher(loaded(model, torch.float32), batches())
    plan = uniform_plan(blocks_of(model), parse_pattern("60%"))
    for block, inputs in walk(model, batches(), compute=torch.float32, needs_dense_stream=True, fisher=metrics):
        seen.append(list(inputs.pruned))
        list(method.prune(block, inputs, plan))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for block, inputs in walk(model, batches(), compute=torch.float32):
        assert all(torch.equal(a, b) for a, b in zip(inputs.pruned, seen[block.index], strict=True)), block.name


@pytest.mark.parametrize("family", ["opt", "qwen2-sliding"])
def test_later_layers_read_what_rounded_ones_write(family: str) -> None:
    """In a bf16 model each layer was fitted on what the bf16 layers before it in its block let through."""
    model, method = tiny(family, torch.bfloat16), SparseLLM(Recorder(), rounds=0)
    plan = uniform_plan(blocks_of(model), parse_pattern("60%"))
    list(prune_blocks(model, batches(), method, plan, torch.float32))
    assert isinstance(method.solver, Recorder)
    problems = iter(method.solver.seen)
    for block, inputs in walk(model, batches(), compute=torch.float32):
        reads: dict[str, list[Tensor]] = {name: [] for name in block.layers}
        for captured in inputs.run(block, CaptureRequest(list(reads))):
            for name, batch in captured.inputs.items():
                reads[name].append(batch)
        for name, layer in block.layers.items():
            x, known = torch.cat(reads[name]).double(), next(problems)[0].inputs
            x = x if layer.bias is None else x - x.mean(0)
            assert isinstance(known, Gram)
            assert far(known.matrix, x.T @ x / len(x)) < 1e-5, name


@two_families
@torch.no_grad()
def test_curvatures(family: str) -> None:
    """Every layer has one: the writer by Fisher, attention's layers by Jacobians, the readers by their closed form."""
    method = SparseLLM(Recorder(), rounds=0)
    pruned = signals(prune(family, method)[0])
    teacher = tiny(family)
    metrics = output_fisher(loaded(teacher, torch.float32), batches())
    assert isinstance(method.solver, Recorder)
    problems = iter(method.solver.seen)
    for block, inputs in walk(teacher, batches()):
        part, metric = block.architecture.feed_forward, metrics[block.index]
        assert part is not None
        exact = layer_curvatures(
            block,
            inputs.pruned,
            inputs.calls(block),
            list(block.layers),
            fisher=metric,
            offsets=inputs.offsets,
        )
        x = pruned[block.full_name(part.in_proj[0])][0].float()
        inner, writer = add_diagonal(metric, 1e-3), block.layer(part.out_proj).weight
        slopes = part.slopes(*(block.layer(name)(x) for name in part.in_proj))
        for name, slope in zip(part.in_proj, slopes, strict=True):
            exact[name] = (writer.T @ inner @ writer) * (slope.T @ slope / len(x))
        exact[part.out_proj] = metric
        for name in block.layers:
            found, wanted = next(problems)[0].curvature, exact[name]
            assert found is not None
            assert far(found, wanted) < 1e-4, name


@every_family
def test_residual_sums_are_recognized(family: str) -> None:
    """The output of every block is its input plus the outputs of its residual writers, except where a norm follows the sum."""
    for dtype in (torch.float32, torch.bfloat16):
        for block, inputs in walk(tiny(family, dtype), batches()):
            dataflow = trace_dataflow(block, inputs.pruned[0], inputs.calls(block)[0])
            assert dataflow.residual_sum == (family != "opt-post-norm")


@pytest.mark.parametrize("family", ["opt", "llama", "qwen2-sliding"])
def test_writers_repair_the_stream(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the correction a dense feed-forward brings the block's output closer to the dense stream's than without."""
    missed, wanted = {}, signals(tiny(family))
    for repaired in (True, False):
        if not repaired:
            monkeypatch.setattr(targets, "trace_dataflow", lambda *_: BlockDataflow({}, False))
        model = tiny(family)
        block = blocks_of(model)[0]
        plan = uniform_plan([block], Unstructured(0)) | uniform_plan([block], Unstructured(0.9), include=["self_attn.*"])
        list(prune_blocks(model, batches(), SparseLLM(SparseGPT(), rounds=0), plan))
        missed[repaired] = far(signals(model)[block.name][1], wanted[block.name][1])
    assert missed[True] < 0.96 * missed[False]
