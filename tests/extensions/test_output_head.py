"""The output head, pruned where `include` names it: against direct solves on its inputs, and through every command."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from itertools import islice
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import Result

from sparsellm import prune, recover, verify
from sparsellm.allocation.rules import allocate
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.errors import InvalidSetting, UnsupportedModel, VerificationFailed
from sparsellm.extensions.recover.training import distillation
from sparsellm.extensions.recover.training.distillation import last_states, loss_terms
from sparsellm.extensions.recover.training.masked_training import MaskedAdam
from sparsellm.extensions.studies.page import report_page
from sparsellm.methods import BlockMethod, BlockResult
from sparsellm.methods.algorithm1 import Algorithm1
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.sparsellm import SparseLLM, TrueSequential
from sparsellm.models.blocks import blocks_of
from sparsellm.models.coverage import coverage_of
from sparsellm.models.output_head import blocks_and_head, logits_of_states, outside_parameters, states_entering_head
from sparsellm.outputs.inspection import inspect
from sparsellm.outputs.journal import Journal
from sparsellm.recipes.plan import list_layers, uniform_plan
from sparsellm.solvers import Magnitude, Wanda
from sparsellm.solvers.patterns import NM, Pattern, Unstructured, parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram
from tests import processes
from tests.conftest import long_unless
from tests.core.unit.solvers.test_sparsegpt import direct
from tests.pruning import prune_blocks
from tests.regressions import estimated_ridge, least_squares

Command = Callable[..., Result]
HALF = Unstructured(0.5)
TOKENS = torch.randint(0, 64, (6, 16), generator=torch.Generator().manual_seed(1))
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "gemma2": {**SIZES, "head_dim": 16, "num_key_value_heads": 2, "final_logit_softcapping": 2.0},
    "granite": {**SIZES, "logits_scaling": 4.0, "residual_multiplier": 0.5},
    "gpt_neox": SIZES,  # the head is embed_out
    "phi": SIZES,  # the head has a bias
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 16},  # the head reads 16 features of 32
}


def random_model(family: str = "llama", **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    names = {"initializer_range": 0.2, "init_std": 0.2, "tie_word_embeddings": False, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **FAMILIES[family] | names | settings)
    return AutoModelForCausalLM.from_config(config).eval()


def head_of(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    return head


def head_name(model: PreTrainedModel) -> str:
    return next(name for name, module in model.named_modules() if module is head_of(model))


def inputs_of_head(model: PreTrainedModel) -> Tensor:
    """What the head reads in a forward pass of all of `TOKENS`, (tokens, in)."""
    found: list[Tensor] = []
    handle = head_of(model).register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].flatten(0, -2)))
    with torch.no_grad():
        model(input_ids=TOKENS)
    handle.remove()
    return found[0]


def prune_all(model: PreTrainedModel, method: BlockMethod, pattern: Pattern, **settings: Any) -> list[BlockResult]:
    """Prune every layer and the head."""
    name = head_name(model)
    plan = uniform_plan(blocks_and_head(model, [name]), pattern, include=["Linear", name])
    assert len(plan) == 1 + sum(len(block.layers) for block in blocks_of(model))
    steps = prune_blocks(model, list(TOKENS.split(2)), method, plan, **settings)
    return [step for step in steps if isinstance(step, BlockResult)]


def problem(weight: Tensor, inputs: Tensor) -> LayerProblem:
    gram = Gram(inputs.shape[1], inputs.device)
    gram.update(inputs)
    gram.finalize()
    return LayerProblem(weight, gram)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_states_are_the_models(family: str) -> None:
    """The states that enter the head give the model's logits, scaled and capped as these are; with another head, its logits."""
    model = random_model(family)
    with torch.no_grad():
        states, wanted = states_entering_head(model, TOKENS), model(input_ids=TOKENS).logits
        assert torch.equal(states.flatten(0, 1), inputs_of_head(model))
        assert torch.equal(logits_of_states(model, blocks_of(model), tokens=TOKENS, states=states), wanted)
        other, dense = copy.deepcopy(head_of(model)), copy.deepcopy(head_of(model))
        other.weight.mul_(-1)
        found = logits_of_states(model, blocks_of(model), tokens=TOKENS, states=states, head=other)
        head_of(model).weight.mul_(-1)
        assert torch.equal(found, model(input_ids=TOKENS).logits)
        assert not torch.allclose(found, wanted)
        assert torch.equal(logits_of_states(model, blocks_of(model), tokens=TOKENS, states=states, head=dense), wanted)


def test_a_model_that_calls_no_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it has none, or one that its forward pass leaves out."""
    model = random_model()
    for head in (None, nn.Linear(32, 64)):
        monkeypatch.setattr(model, "get_output_embeddings", lambda head=head: head)
        with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM .*`scope='block'`"):
            states_entering_head(model, TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_does_not_diverge_from_itself(family: str) -> None:
    """The loss of a model against itself is 0, also where its logits are scaled or capped."""
    model, groups = random_model(family), [(batch,) for batch in TOKENS.split(2)]
    states = last_states(model, groups)
    terms = loss_terms(model, groups, states)
    assert [float(sum(terms(number))) for number in range(3)] == pytest.approx([0, 0, 0], abs=1e-7)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_outside_of_the_blocks(family: str, tied: bool) -> None:
    """Last norms, projections and the head; embeddings only where the head shares their weight."""
    model = random_model(family, tie_word_embeddings=tied)
    shared = model.get_input_embeddings().weight is head_of(model).weight
    names = outside_parameters(model, ())
    assert all(parameter is model.get_parameter(name) for name, parameter in names.items())
    assert any(parameter is head_of(model).weight for parameter in names.values())
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    found = {id(module.weight) for module in embeddings} & {id(parameter) for parameter in names.values()}
    assert len(found) == shared
    others = {id(parameter) for block in blocks_of(model) for parameter in block.module.parameters()}
    others |= {id(module.weight) for module in embeddings}
    assert {id(x) for x in names.values()} == ({id(x) for x in model.parameters()} - others) | found
    left = outside_parameters(model, [head_name(model)])
    assert names.keys() - left.keys() == ({f"{head_name(model)}.weight"} if not shared else set())


@pytest.mark.parametrize("pattern", [HALF, NM(2, 4)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_sparsegpt_equals_the_direct_loop_on_the_final_hidden_states(family: str, pattern: Pattern) -> None:
    """The inputs are those of a plain forward pass of the model with pruned blocks, before any softcap or scale of logits."""
    model = random_model(family)
    dense = head_of(model).weight.detach().clone()
    results = prune_all(model, LayerWise(SparseGPT()), pattern)
    inputs = inputs_of_head(model)
    wanted = direct(problem(dense, inputs), pattern, 128, 0.01)
    found = head_of(model).weight.detach()
    assert torch.equal(found == 0, wanted == 0)
    assert torch.allclose(found.double(), wanted, atol=1e-4)
    (layer,) = results[-1].layers
    assert (results[-1].name, layer.name, layer.zeros) == (head_name(model), head_name(model), int((found == 0).sum()))
    outputs = inputs.double() @ dense.double().T
    error = ((inputs.double() @ found.double().T - outputs).square().sum() / outputs.square().sum()).item()
    assert layer.error == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("method", [LayerWise(Wanda()), TrueSequential(Wanda()), Algorithm1(Wanda())], ids=repr)
def test_wanda_keeps_the_largest_scores_of_each_row(method: BlockMethod) -> None:
    model = random_model("gemma2")
    dense = head_of(model).weight.detach().clone()
    prune_all(model, method, HALF)
    scores = dense.abs() * inputs_of_head(model).square().mean(0).sqrt()
    wanted = torch.zeros_like(dense, dtype=torch.bool).scatter_(1, scores.topk(16, 1).indices, True)
    assert torch.equal(head_of(model).weight, dense * wanted)


def test_magnitude_needs_no_inputs() -> None:
    model = random_model()
    dense = head_of(model).weight.detach().clone()
    prune_all(model, LayerWise(Magnitude()), HALF)
    assert torch.equal(
        head_of(model).weight, dense * (dense.abs() > dense.abs().flatten().sort().values[dense.numel() // 2 - 1])
    )


@pytest.mark.parametrize("family", ["llama", "granite", "phi"])
def test_the_default_fits_the_head_to_the_dense_logits(family: str) -> None:
    """With a solver that only selects: the weights of the ridge regression of the dense head's outputs on the pruned inputs."""
    model, original = random_model(family), random_model(family)
    prune_all(model, SparseLLM(solver=Magnitude(), rounds=0), HALF)
    dense, inputs, head = inputs_of_head(original).double(), inputs_of_head(model).double(), head_of(original)
    assert not torch.allclose(dense, inputs, atol=0.1)
    weight = head.weight.detach().double()
    targets = dense @ weight.T
    if head.bias is not None:  # fitted together with the weights, and not pruned
        inputs, targets = inputs - inputs.mean(0), targets - targets.mean(0)
    fitted = least_squares(inputs, targets, weight, estimated_ridge(inputs, targets, weight, False), False)
    kept = fitted.abs() > fitted.abs().flatten().sort().values[fitted.numel() // 2 - 1]
    assert torch.allclose(head_of(model).weight.double(), fitted * kept, atol=1e-3)


@pytest.mark.parametrize(
    ("include", "taken", "others"),
    [
        ([], False, 14),
        (["*"], False, 14),
        (["Linear"], False, 14),
        (["re:.*"], False, 14),
        (["lm_head"], True, 0),
        (["lm_*"], True, 0),
        (["re:lm_head$"], True, 0),
        (["re:(lm_head|.*q_proj)$"], True, 2),
        (["Linear", "lm_head"], True, 14),
        (["q_proj", "lm_head"], True, 2),
    ],
)
def test_only_a_pattern_that_names_it_takes_the_head(include: list[str], taken: bool, others: int) -> None:
    blocks = blocks_and_head(random_model(), ["lm_head"])
    plan = uniform_plan(blocks, HALF, include=include)
    assert ("lm_head" in plan, len(plan) - taken) == (taken, others)
    assert [layer.name for layer in list_layers(blocks, HALF, include=include) if not layer.name.startswith("model.")] == (
        ["lm_head"] if taken else []
    )
    if taken and others:  # --blocks leaves the head as it is, --exclude wins
        assert "lm_head" in uniform_plan(blocks, HALF, chosen=frozenset({0}), include=include)
        assert "lm_head" not in uniform_plan(blocks, HALF, include=include, exclude=["lm_head"])
    with pytest.raises(InvalidSetting, match=r"`include`.*lm_head"):
        uniform_plan(blocks[:-1], HALF, include=["lm_head"])


def test_a_tied_head_is_refused() -> None:
    model = random_model(tie_word_embeddings=True)
    with pytest.raises(UnsupportedModel, match=r"lm_head .*model\.embed_tokens\.weight.*`include`"):
        list(prune_blocks(model, [TOKENS], LayerWise(Magnitude()), {"lm_head": HALF}))
    assert blocks_and_head(model, ["model.layers.0.mlp.up_proj"]) == blocks_of(model)


@pytest.mark.parametrize("rule", ["owl", "fisher"])
def test_allocation_leaves_the_head_its_sparsity(rule: str) -> None:
    """The other layers get what they would get without it."""
    model = random_model()
    alone = uniform_plan(blocks_of(model), HALF)
    both = allocate(rule, model, [TOKENS], alone | {"lm_head": HALF})
    assert both == allocate(rule, model, [TOKENS], alone) | {"lm_head": HALF}
    assert allocate(rule, model, [TOKENS], {"lm_head": HALF}) == {"lm_head": HALF}


def test_coverage_is_of_the_blocks() -> None:
    model = random_model()
    blocks = blocks_of(model)
    plan = uniform_plan(blocks, HALF, include=["mlp"])
    coverage = coverage_of(model, blocks)
    assert coverage.of_plan(blocks, [*plan, "lm_head"]) == coverage.of_plan(blocks, plan)


@pytest.mark.parametrize(
    ("stop", "streamed"),
    [long_unless(stop % 2 == streamed, stop, streamed) for stop in (0, 1, 2, 3) for streamed in (False, True)],
)
def test_runs_resume_to_the_same_bits(stop: int, streamed: bool, tmp_path: Path) -> None:
    """In memory, and from bf16 files block by block, ended after so many blocks, the head among them, and resumed."""
    dtype, compute = (torch.bfloat16, torch.float32) if streamed else (torch.float32, None)
    random_model("gemma2").to(dtype).save_pretrained(tmp_path / "model")
    whole, method = AutoModelForCausalLM.from_pretrained(tmp_path / "model"), SparseLLM(rounds=1)
    wanted = prune_all(whole, method, HALF, compute=compute)
    for attempt in (stop, 4):
        work = tmp_path / "work"
        journal = Journal.resume(work, {}) if work.exists() else Journal.begin(work, {})
        weights: dict[str, Any] = {}
        model = random_model("gemma2")
        if streamed:
            model, weights["weights"] = open_checkpoint(str(tmp_path / "model")).stream()
        plan = uniform_plan(blocks_and_head(model, ["lm_head"]), HALF, include=["Linear", "lm_head"])
        steps = prune_blocks(model, list(TOKENS.split(2)), method, plan, compute, journal=journal, **weights)
        found = list(islice((step for step in steps if isinstance(step, BlockResult)), attempt))
    assert [x.zeros for block in found for x in block.layers] == [x.zeros for block in wanted for x in block.layers]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(weights["weights"].read(name) if streamed else model.state_dict()[name], tensor)


@pytest.fixture(scope="module")
def untied(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a head of its own."""
    folder = tmp_path_factory.mktemp("untied")
    model = AutoModelForCausalLM.from_pretrained(tiny["llama"])
    tensors = {**model.state_dict(), "lm_head.weight": torch.randn(260, 32, generator=torch.Generator().manual_seed(5))}
    model.config.tie_word_embeddings = False
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    AutoTokenizer.from_pretrained(tiny["llama"]).save_pretrained(folder)
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


BOTH = ("--include", "Linear", "--include", "lm_head")


@pytest.mark.parametrize("more", [(), ("--offload",)], ids=["in memory", "streamed"])
def test_a_killed_command_goes_on_to_the_same_bytes(
    more: tuple[str, ...], untied: Path, text_file: Path, tmp_path: Path, command: Command, server: ForkServerContext
) -> None:
    """And what it writes is verified, inspected, listed and drawn with the head."""
    text = ("--calibration", text_file, "--samples", 8, "--sequence-length", 32)
    words = (*text, *BOTH, "--sparsity", "2:4", "--method", "alps")
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert command("prune", untied, whole, *words, "--evaluate", text_file, "--evaluate-limit", 2).exit_code == 0
    processes.kill_after_first_block(server, ["prune", untied, out, *words, *more], out)
    ran = command("prune", untied, out, *words, *more, "--resume")
    assert ran.exit_code == 0, ran.stderr
    assert "22 layers hold 50.00 % zeros" in ran.stdout
    one, two = tensors_of(whole), tensors_of(out)
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())
    assert NM(2, 4).holds(two["lm_head.weight"])
    assert verify(out, untied).layers == 22
    zeros = {layer.name: layer for layer in inspect(out, expect="2:4").layers}
    assert (zeros["lm_head"].zeros, zeros["lm_head"].holds) == (260 * 16, True)
    planned = command("plan", untied, *words, "--layers", "--json")
    listed = {layer["name"]: layer["pattern"] for layer in json.loads(planned.stdout)["each_layer"]}
    assert (len(listed), listed["lm_head"], json.loads(planned.stdout)["blocks"]) == (22, "2:4", 3)
    page = report_page(whole)[0]
    assert "3 blocks by 8 kinds of layer" in page
    assert re.search(r"<td>lm_head</td>(<td></td>){7}<td>0\.\d+</td>", page)


def test_a_changed_head_is_found(untied: Path, tmp_path: Path) -> None:
    out = prune(untied, sparsity="50%", method="magnitude", include=["lm_head"]).save_pretrained(tmp_path / "out")
    before = tensors_of(untied)
    changed = {key for key, tensor in tensors_of(out).items() if not torch.equal(tensor, before[key])}
    assert changed == {"lm_head.weight"}
    assert verify(out, untied).layers == 1
    tensors = tensors_of(out)
    tensors["lm_head.weight"][0] = 1.0
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(VerificationFailed, match=r"lm_head\.weight"):
        verify(out)


def test_the_command_refuses_a_tied_head(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    ran = command("prune", tiny["llama"], tmp_path / "out", "--method", "magnitude", "--include", "lm_head")
    assert ran.exit_code == 1
    assert "error: lm_head cannot be pruned, because it is tied" in ran.stderr
    assert "Leave it out of --include" in ran.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rule", ["uniform", "owl", "fisher"])
def test_the_plan_estimates_the_head(rule: str, untied: Path, text_file: Path, command: Command) -> None:
    """With the blocks it takes as much memory as either alone at least, and at most as both together."""
    words = ("--calibration", text_file, "--samples", 8, "--sequence-length", 32, "--allocation", rule, "--json")
    memory = []
    for include in ((), BOTH, BOTH[2:]):
        stages = json.loads(command("plan", untied, *words, *include).stdout)["stages"]
        memory.append(next(stage["memory"]["cpu"] for stage in stages if stage["name"] == "pruning"))
    blocks, both, head = memory
    assert 0 < max(blocks, head) <= both < blocks + head


@pytest.mark.parametrize("scope", ["block", "model"])
def test_recovery_keeps_the_head(scope: Any, untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, while other weights train toward the dense model, whose predictions are those of its own head."""
    monkeypatch.setattr(distillation, "MODEL_ADAM", MaskedAdam(20, 1e-3))
    tokens = TOKENS.repeat(2, 2)
    include = ["Linear", "lm_head"]
    out = prune(untied, calibration=tokens, sparsity="50%", method="wanda", include=include).save_pretrained(tmp_path / "out")
    result = recover(out, untied, tokens, scope=scope, steps=20, batch_size=2)
    again = result.save_pretrained(tmp_path / "again")
    before, after = tensors_of(out), tensors_of(again)
    assert torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"], after["model.layers.0.mlp.up_proj.weight"])
    assert verify(again, untied).layers == 22
    if scope == "model":
        held_out = tokens[-distillation.count_held_out(tokens) :]
        with torch.no_grad():
            logits = [AutoModelForCausalLM.from_pretrained(x)(input_ids=held_out).logits.log_softmax(-1) for x in (untied, out)]
        divergence = (logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean()
        assert result.report.recovered is not None
        assert result.report.recovered.before == pytest.approx(float(divergence), rel=1e-4)


def test_a_file_may_give_the_head_its_pattern(untied: Path, tmp_path: Path) -> None:
    (tmp_path / "shares.yaml").write_text('lm_head: 25%\n"*.q_proj": "2:4"\n')
    include, file = ["Linear", "lm_head"], str(tmp_path / "shares.yaml")
    result = prune(untied, sparsity="50%", method="magnitude", include=include, allocation=file)
    layers = {layer.name: layer for layer in result.report.layers}
    assert str(layers["lm_head"].pattern) == "25%"
    assert layers["lm_head"].zeros == 260 * 8
    total = sum(layer.shape[0] * layer.shape[1] for layer in layers.values())
    assert sum(layer.zeros for layer in layers.values()) == parse_pattern("50%").count_removed([total])
