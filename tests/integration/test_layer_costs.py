"""What layers cost: predicted against sums over single weights, measured against the model with the dense layer put back."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import Result

import sparsellm
from sparsellm.activations.backward import sample_labels
from sparsellm.activations.fisher_diagonal import FisherFactors, weight_costs
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.evaluation.measurements import LayerCosts
from sparsellm.methods import LayerResult
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.models.blocks import blocks_of
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.pipeline import costliest_layers as layer_costs
from sparsellm.pipeline.cached_allocation import cached_allocation
from sparsellm.pipeline.events import Event, Note
from sparsellm.pipeline.journal import Journal
from sparsellm.pipeline.plan import uniform_plan
from sparsellm.pipeline.recipe import Recipe
from sparsellm.pipeline.recovery_recipe import RecoveryRecipe
from sparsellm.pipeline.token_sequences import read_test
from sparsellm.solvers import Wanda
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.studies.page import report_page
from tests import made_up
from tests.integration.test_families import tiny as of_family
from tests.integration.test_sparsellm_method import batches
from tests.pruning import prune_blocks

SETTINGS = {"sparsity": "70%", "samples": 8, "sequence_length": 32, "evaluate_limit": 6}


def second_moments(model: PreTrainedModel, windows: Iterable[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """By layer, E[g²] of each output and E[x²] of each input, summed token by token in float64."""
    layers = {block.full_name(name): block.layer(name) for block in blocks_of(model) for name in block.layers}
    sums = {name: (torch.zeros(x.out_features).double(), torch.zeros(x.in_features).double()) for name, x in layers.items()}
    tokens = 0
    for number, window in enumerate(windows):
        seen: dict[str, tuple[Tensor, Tensor]] = {}
        hooks = [
            layer.register_forward_hook(lambda _, read, wrote, name=name, seen=seen: seen.update({name: (read[0], wrote)}))
            for name, layer in layers.items()
        ]
        logits = model(input_ids=window, use_cache=False).logits[0].float()
        labels = sample_labels(logits.detach().softmax(-1), torch.Generator().manual_seed(number))
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        gradients = torch.autograd.grad(loss, [seen[name][1] for name in layers])
        for name, gradient in zip(layers, gradients, strict=True):
            sums[name][0].add_(gradient.detach().flatten(0, -2).double().square().sum(0))
            sums[name][1].add_(seen[name][0].detach().flatten(0, -2).double().square().sum(0))
        tokens += window.numel()
        for hook in hooks:
            hook.remove()
    return {name: (gradients / tokens, inputs / tokens) for name, (gradients, inputs) in sums.items()}


@pytest.mark.parametrize("method", [LayerWise(Wanda()), SparseLLM(Wanda(), gauss_newton_steps=1)], ids=["wanda", "sparsellm"])
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_predicted_cost_is_the_sum_over_removed_weights(family: str, method: LayerWise | SparseLLM) -> None:
    """Half of E[g²] E[x²] W² of each weight that is zero afterwards; layers without factors have no prediction."""
    model = of_family(family).float()
    moments = second_moments(model, torch.cat(batches()).split(1))
    plan = uniform_plan(blocks_of(model), parse_pattern("60%"))
    factors: dict[str, FisherFactors] = {}
    for _ in weight_costs(model, batches(), plan, factors=factors):
        pass
    dropped = next(name for name in plan if name.endswith("v_proj"))
    del factors[dropped]
    dense = {name: model.get_parameter(f"{name}.weight").detach().double().clone() for name in plan}
    steps = prune_blocks(model, batches(), method, plan, factors=factors)
    results = {step.name: step for step in steps if isinstance(step, LayerResult)}
    assert results.keys() == plan.keys()
    assert results[dropped].predicted_kl is None
    for name in factors:
        total = 0.0
        weight, (gradients, inputs) = model.get_parameter(f"{name}.weight"), moments[name]
        for row, column in (weight == 0).nonzero().tolist():
            total += 0.5 * float(gradients[row] * inputs[column] * dense[name][row, column] ** 2)
        assert results[name].predicted_kl == pytest.approx(total, rel=1e-4), name
        assert total > 0


def test_a_resumed_run_has_the_same_factors(tmp_path: Path) -> None:
    """The allocation from the journal comes with the factors that it was computed from; another set of layers has its own."""
    loaded = LoadedModel.of(of_family("opt").float())
    recipe = Recipe(model="m", sparsity="60%", calibration="demo")
    plan = uniform_plan(blocks_of(loaded.model), parse_pattern("60%"))
    journal = Journal.begin(tmp_path, {})
    first = cached_allocation(recipe, loaded, batches(), plan=plan, cache=journal)
    again = cached_allocation(recipe, loaded, [], plan=plan, cache=Journal.resume(tmp_path, {}))
    assert again.plan == first.plan
    assert again.factors.keys() == first.factors.keys() == plan.keys()
    for name, pair in first.factors.items():
        assert torch.equal(pair.gradients, again.factors[name].gradients)
        assert torch.equal(pair.inputs, again.factors[name].inputs)
    some = {name: pattern for name, pattern in plan.items() if "fc1" in name}
    narrow = recipe.model_copy(update={"include": ("fc1",)})
    cached_allocation(narrow, loaded, batches(), plan=some, cache=journal)
    assert cached_allocation(narrow, loaded, [], plan=some, cache=journal).factors.keys() == some.keys()
    assert cached_allocation(recipe, loaded, [], plan=plan, cache=journal).factors.keys() == plan.keys()


def divergence(dense: PreTrainedModel, pruned: PreTrainedModel, windows: Tensor) -> float:
    """The mean KL divergence of all tokens' predictions, from whole passes of both models."""
    with torch.no_grad():
        target, predicted = (model(input_ids=windows).logits.double().log_softmax(-1) for model in (dense, pruned))
    return float((target.exp() * (target - predicted)).sum(-1).mean())


@pytest.mark.parametrize("family", ["opt", pytest.param("llama", marks=pytest.mark.long)])
def test_measured_cost_is_that_of_putting_the_dense_layer_back(
    family: str, loud: dict[str, Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the five worst layers and for those that stand out together; the weights are those of a run without measurement."""
    settings = SETTINGS | {"calibration": str(text_file), "effort": "fast"}
    first = sparsellm.prune(loud[family], **settings, evaluate=str(text_file)).report
    assert first.layer_costs is not None
    drops = sorted(layer.measured_kl for layer in first.layers if layer.measured_kl is not None)
    least = drops[2] / first.layer_costs.kl  # so that three of the five stand out
    monkeypatch.setattr(layer_costs, "OUTSTANDING", -math.inf)
    monkeypatch.setattr(layer_costs, "LEAST_SHARE", least)
    result = sparsellm.prune(loud[family], **settings, evaluate=str(text_file))
    unmeasured = sparsellm.prune(loud[family], **settings)
    for name, parameter in result.model.named_parameters():
        assert torch.equal(parameter, unmeasured.model.get_parameter(name)), name
    assert unmeasured.report.layer_costs is None
    dense = AutoModelForCausalLM.from_pretrained(loud[family], dtype=torch.float32)
    pruned = copy.deepcopy(result.model).float()
    recipe = Recipe(model=str(loud[family]), method="magnitude", evaluate=(str(text_file),), evaluate_limit=6)
    windows = read_test(recipe, open_checkpoint(str(loud[family])), str(text_file), length=32).windows
    costs = result.report.layer_costs
    assert costs is not None
    kl = divergence(dense, pruned, windows)
    assert costs.kl == pytest.approx(kl, rel=2e-3)
    assert costs.tokens == windows.numel() == 6 * 32

    def drop(*names: str) -> float:
        model = copy.deepcopy(pruned)
        with torch.no_grad():
            for name in names:
                for key, tensor in dense.get_submodule(name).state_dict().items():
                    model.get_submodule(name).state_dict()[key].copy_(tensor)
        return kl - divergence(dense, model, windows)

    layers = sorted(result.report.layers, key=lambda layer: -(layer.predicted_kl or 0))
    assert all(layer.measured_kl is None for layer in layers[5:])
    for layer in layers[:5]:
        assert layer.measured_kl == pytest.approx(drop(layer.name), rel=1e-2, abs=1e-3 * kl), layer.name
    weights = {layer.name: layer.shape[0] * layer.shape[1] for layer in layers}
    outstanding = {layer.name for layer in layers[:5] if (layer.measured_kl or 0) >= least * costs.kl}
    assert set(costs.exclude) == outstanding
    assert len(outstanding) == 3
    assert costs.gain == pytest.approx(drop(*costs.exclude), rel=1e-2, abs=1e-3 * kl)
    assert costs.share == pytest.approx(sum(weights[name] for name in outstanding) / sum(weights.values()))
    saved = sparsellm.load_report(result.save_pretrained(tmp_path / "out"))
    assert saved.layer_costs == replace(costs, text=text_file.name)  # outputs hold no absolute paths
    frame = saved.to_frame()
    assert frame.predicted_kl.tolist() == [layer.predicted_kl for layer in result.report.layers]
    assert frame.measured_kl.notna().sum() == 5
    # The options that are suggested are options of `prune`.
    kept = sparsellm.prune(loud[family], **settings, exclude=costs.exclude).report.layers
    assert {layer.name for layer in kept} == weights.keys() - set(costs.exclude)


def test_the_sentences_of_costs() -> None:
    """One line without layers that stand out, two with them."""
    costs = LayerCosts("some/text.txt", 2048, 0.5, ("a.b", "c"), 0.1, 0.05)
    head, sentence = costs.describe()
    assert head == "KL divergence from dense: 0.5 nats per token (2,048 tokens of text.txt)."
    assert sentence == "With 2 layers dense, 5.0 % of the pruned weights, it is 20 % lower:"
    assert LayerCosts("text.txt", 2048, 0.0, (), 0.0, 0.0).describe()[1:] == []


@pytest.mark.parametrize("method", ["sparsellm", "alps", "wanda"])
def test_a_table_has_what_was_measured_and_predictions_only_where_they_hold(method: str) -> None:
    """0.0436 and 0.0381 are predicted where 0.00235 and -0.0004 are measured; without compensation predictions do hold."""
    recipe = Recipe(model="m", sparsity="50%", calibration="demo", method=method, allocation="fisher")
    pairs = {"a": (0.0436, 0.00235), "b": (0.0381, -0.0004), "c": (0.02, 0.011), "d": (0.01, None)}

    def layers(**changes: None) -> list[LayerResult]:
        return [
            replace(made_up.layer(name, "50%", predicted_kl=predicted, measured_kl=measured), **changes)
            for name, (predicted, measured) in pairs.items()
        ]

    measured = ["costliest of 3 layers", "measured KL"], [["c", "0.011"], ["a", "0.00235"], ["b", "-0.0004"]]
    assert layer_costs.worst_layers_table(layers(), recipe) == measured
    head, lines = layer_costs.worst_layers_table(layers(measured_kl=None), recipe)
    assert bool(lines) == (method == "wanda")
    if lines:
        assert (head, lines[0]) == (["costliest layers", "predicted KL"], ["a", "0.0436"])
    recovery = RecoveryRecipe(model="m", pruned="p", calibration="demo")
    assert layer_costs.worst_layers_table(layers(), recovery) == ([], []), "training has changed what was measured"


def test_what_the_command_says(loud: dict[str, Path], text_file: Path, tmp_path: Path, command: Callable[..., Result]) -> None:
    """A table within 80 columns; nothing where the run has no prediction; a hint, or a note, where nothing was measured."""
    words = ["--calibration", text_file, "--samples", 4, "--sequence-length", 32, "--method", "wanda"]
    tested = ["--evaluate", text_file, "--evaluate-limit", 4, "--allocation", "fisher"]
    measured = command("prune", loud["llama"], tmp_path / "a", *words, *tested)
    lines = measured.stdout.splitlines()
    head = next(line for line in lines if line.startswith("costliest of 5 layers"))
    assert head.endswith("  measured KL")
    assert "predicted" not in measured.stdout
    costs = [float(line.split()[-1]) for line in lines[lines.index(head) + 1 : lines.index(head) + 6]]
    assert costs == sorted(costs, reverse=True)
    table = lines[lines.index(head) : lines.index(head) + 7]
    assert table[-1].startswith("KL divergence from dense: ")
    assert max(map(len, table)) <= 80
    predicted = command("prune", loud["llama"], tmp_path / "b", *words, "--allocation", "fisher")
    assert "Pass --evaluate TEXT to measure what layers cost." in predicted.stdout.splitlines()
    assert "costliest layers" in predicted.stdout
    uniform = command("prune", loud["llama"], tmp_path / "c", *words, *tested[:-2])
    assert "costliest" not in uniform.stdout
    report = json.loads((tmp_path / "c" / "sparsellm.json").read_text(encoding="utf-8"))
    assert report["layer_costs"] is None
    assert {layer["predicted_kl"] for block in report["blocks"] for layer in block["layers"]} == {None}
    streamed = command("prune", loud["llama"], tmp_path / "d", *words, *tested, "--offload")
    note = "the layers that cost most are predicted but not measured: the model is read block by block"
    assert f"note: {note}" in streamed.stderr
    both = [sparsellm.load_report(tmp_path / name).to_frame().predicted_kl.tolist() for name in ("a", "d")]
    assert both[0] == both[1]


def test_layers_that_stand_out_as_options(
    loud: dict[str, Path], text_file: Path, tmp_path: Path, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line to copy, on the terminal and in the page."""
    monkeypatch.setattr(layer_costs, "OUTSTANDING", 0.1)
    monkeypatch.setattr(layer_costs, "LEAST_SHARE", 0.0)
    words = ["--calibration", text_file, "--samples", 4, "--sequence-length", 32, "--method", "wanda", "--allocation", "fisher"]
    ran = command("prune", loud["llama"], tmp_path / "out", *words, "--evaluate", text_file, "--evaluate-limit", 4)
    costs = sparsellm.load_report(tmp_path / "out").layer_costs
    assert costs
    assert costs.exclude
    options = " ".join(f"--exclude {name}" for name in costs.exclude)
    assert options in ran.stdout.splitlines()
    page, _ = report_page(tmp_path / "out")
    assert f"<pre>{options}</pre>" in page
    assert "Layers that cost most" in page


def test_a_model_in_memory_is_not_measured(loud: dict[str, Path], text_file: Path) -> None:
    """Its dense layers are overwritten; one note says so."""
    events: list[Event] = []
    model = AutoModelForCausalLM.from_pretrained(loud["llama"])
    tokenizer = AutoTokenizer.from_pretrained(loud["llama"])
    settings = SETTINGS | {"calibration": str(text_file), "evaluate": str(text_file), "allocation": "fisher"}
    result = sparsellm.prune(model, "wanda", tokenizer=tokenizer, observe=events.append, **settings)
    notes = [event.text for event in events if isinstance(event, Note)]
    assert "the layers that cost most are predicted but not measured: the dense model is not in files" in notes
    assert result.report.layer_costs is None
    assert all(layer.predicted_kl for layer in result.report.layers)
