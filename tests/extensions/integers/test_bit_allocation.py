"""Bit allocation, against brute force, a direct formula and the bytes that are stored."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

import sparsellm
from sparsellm.activations.fisher_diagonal import FisherFactors, weight_costs
from sparsellm.errors import InvalidSetting
from sparsellm.extensions.integers import error_curves
from sparsellm.extensions.integers.bit_allocation import BitBudget, LayerFormat, bit_range
from sparsellm.extensions.integers.error_curves import DENSITIES, DESCENT, ROUNDED, ErrorCurve, measure_errors
from sparsellm.extensions.integers.formats import WIDTHS, IntegerFormat
from sparsellm.extensions.integers.quantization import DAMPING, gptq, round_to_nearest
from sparsellm.methods import LayerResult
from sparsellm.models.blocks import blocks_of
from sparsellm.recipes.plan import uniform_plan
from sparsellm.solvers.linalg import add_diagonal
from sparsellm.solvers.patterns import Unstructured
from tests.core.integration.test_sparsellm_method import batches, signals, tiny, two_families

Shapes = dict[str, tuple[int, int]]


def random_problem(seed: int, shapes: list[tuple[int, int]]) -> tuple[dict[str, ErrorCurve], Shapes]:
    """Layers whose pruning errors fall with the density and whose rounding errors fall with the bits, unequal in size."""
    generator = np.random.default_rng(seed)
    curves: dict[str, ErrorCurve] = {}
    for number in range(len(shapes)):
        scale, power, rounding = 10 ** generator.uniform(-3, 0), generator.uniform(1, 3), 10 ** generator.uniform(-3, -1)
        pruning = np.array([(1 - density) ** power for density in DENSITIES])
        curves[f"layer{number}"] = [list(scale * (pruning + rounding * 4.0 ** (3 - bits))) for bits in WIDTHS]
    return curves, {f"layer{number}": shape for number, shape in enumerate(shapes)}


def error_of(curves: dict[str, ErrorCurve], formats: dict[str, LayerFormat]) -> float:
    """The interpolated error of all layers."""
    total = 0.0
    for name, layer in formats.items():
        logs = np.log(curves[name][WIDTHS.index(layer.format.bits)])
        total += math.exp(np.interp(math.log(layer.kept / math.prod(layer.shape)), np.log(DENSITIES), logs))
    return total


def options_of(curves: dict[str, ErrorCurve], shapes: Shapes) -> tuple[np.ndarray, np.ndarray]:
    """Costs and errors of the formats with 41 densities and each width, (layers, formats)."""
    densities = np.concatenate([np.geomspace(0.05, 0.95, 40), [1.0]])
    formats = [[LayerFormat.of(shapes[name], bits, d) for bits in WIDTHS for d in densities] for name in shapes]
    errors = [[error_of(curves, {name: x}) for x in each] for name, each in zip(shapes, formats, strict=True)]
    return np.array([[x.stored_bits for x in each] for each in formats]), np.array(errors)


@pytest.mark.parametrize("seed", range(3))
def test_allocation_is_close_to_brute_force(seed: int) -> None:
    """Of three layers most budgets have the best combination of widths and densities; some fit no three of them closely."""
    curves, shapes = random_problem(seed, [(64, 256), (128, 256), (256, 128)])
    costs, errors = options_of(curves, shapes)
    all_costs = costs[0][:, None, None] + costs[1][None, :, None] + costs[2][None, None, :]
    all_errors = errors[0][:, None, None] + errors[1][None, :, None] + errors[2][None, None, :]
    ratios = []
    for budget in (0.9, 1.5, 2.3, 3.0, 3.9, 4.3, 5.0, 7.5):
        least = all_errors[all_costs <= budget * sum(map(math.prod, shapes.values()))].min()
        ratios.append(error_of(curves, BitBudget(curves, shapes, budget).formats) / least)
    assert np.median(ratios) < 1.03
    assert max(ratios) < 1.4


@pytest.mark.parametrize("seed", range(2))
def test_allocation_is_close_to_the_dual_bound(seed: int) -> None:
    """The error of thirty layers is close to the Lagrangian's lower bound, which no allocation may reach."""
    sizes = 64 * np.random.default_rng(seed).integers(1, 9, (30, 2))
    curves, shapes = random_problem(seed, [(int(out), int(into)) for out, into in sizes])
    costs, errors = options_of(curves, shapes)
    for budget in (0.9, 2.3, 4.3):
        total = budget * sum(map(math.prod, shapes.values()))
        bound = max((errors + x * costs).min(1).sum() - x * total for x in np.geomspace(1e-12, 1e-2, 600))
        assert 0.98 < error_of(curves, BitBudget(curves, shapes, budget).formats) / bound < 1.2


@pytest.mark.parametrize("seed", range(2))
def test_total_is_exact(seed: int) -> None:
    """All layers together take the budget, or a little less, at its ends too."""
    sizes = np.random.default_rng(seed).integers(1, 12, (9, 2)) * 64
    curves, shapes = random_problem(seed, [(int(out), int(into) - 3) for out, into in sizes])
    least, most = bit_range(shapes)
    for bits in (least, 1.7, 3.1, 4.9, most):
        formats = BitBudget(curves, shapes, float(bits)).formats
        total = sum(layer.stored_bits for layer in formats.values()) / sum(map(math.prod, shapes.values()))
        assert total <= bits * (1 + 1e-12)
        assert total > bits - 0.001 or all(x.kept == math.prod(x.shape) for x in formats.values())


@pytest.mark.parametrize("taken", [1.0, 0.8])
def test_what_finished_layers_leave_goes_to_the_others(taken: float) -> None:
    """Those that are left take the rest of the total; a finished layer keeps its format."""
    curves, shapes = random_problem(3, [(64, 256), (128, 256), (256, 128), (64, 512)])
    budget = BitBudget(curves, shapes, 2.3)
    finished = budget.formats["layer1"]
    each = taken * finished.stored_bits / math.prod(finished.shape)
    fields: dict[str, Any] = {"pattern": finished.pattern, "shape": finished.shape, "bits_per_weight": each}
    budget.spend([LayerResult("layer1", zeros=0, error=0, known="Gram", damping=0, tokens=1, epoch=1, seconds=0, **fields)])
    assert budget.formats["layer1"] == finished
    rest = 2.3 * sum(map(math.prod, shapes.values())) - each * math.prod(finished.shape)
    others = sum(layer.stored_bits for name, layer in budget.formats.items() if name != "layer1")
    assert 0.999 * rest < others <= rest


def test_layers_of_one_tensor_have_one_format() -> None:
    """Density, bits and group size are the same, and the total holds."""
    curves, shapes = random_problem(0, [(64, 256), (128, 256), (256, 128), (64, 256)])
    for bits in (1.0, 2.3, 3.7):
        formats = BitBudget(curves, shapes, bits, together=[("layer0", "layer3", "layer1")]).formats
        together = [formats[name] for name in ("layer0", "layer1", "layer3")]
        assert len({layer.format for layer in together}) == 1
        assert max(x.pattern.sparsity for x in together) - min(x.pattern.sparsity for x in together) < 1e-4
        assert formats.keys() == shapes.keys()
        assert sum(x.stored_bits for x in formats.values()) < bits * sum(map(math.prod, shapes.values())) + 32 * len(shapes)


@two_families
def test_errors_follow_the_formula(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every row sampled, rounding a dense weight costs the mean over tokens of the weighted squared output error."""
    monkeypatch.setattr(error_curves, "MEASURED_ROWS", 1000)
    model, factors = tiny(family), dict[str, FisherFactors]()
    read, plan = signals(model), uniform_plan(blocks_of(model), Unstructured(0))
    for _ in weight_costs(model, batches(), plan, factors=factors):
        pass
    curves = measure_errors(model, batches(), plan, factors)
    assert curves.keys() == plan.keys()
    for block, name in itertools.chain.from_iterable([(b, name) for name in b.layers] for b in blocks_of(model)):
        full_name, weight = block.full_name(name), block.layer(name).weight.detach().double()
        inputs, gradients = read[full_name][0].double(), factors[full_name].gradients.double()
        gram, scaled = (inputs.T @ inputs / len(inputs)).float(), (weight * gradients.unsqueeze(1) * 0.5**0.5).float()
        for number, bits in enumerate(WIDTHS):
            form = IntegerFormat.default(bits, 1.0)
            rounded = [round_to_nearest(scaled, form, importance=gram.diagonal())]
            rounded += [gptq(scaled, add_diagonal(gram, DAMPING), form)] if bits < 8 else []
            lost = [((x.to_dense().double() - scaled) @ inputs.T).square().sum(0).mean() for x in rounded]
            assert curves[full_name][number][-1] == pytest.approx(DESCENT * float(min(lost)), rel=1e-3)
        errors = np.array(curves[full_name])
        assert (errors[:, ROUNDED[0] :: 2][:, :-1] > errors[:, ROUNDED[0] :: 2][:, 1:]).all()  # more weights, less error
        assert (errors[0, list(ROUNDED)] >= errors[1, list(ROUNDED)]).all()  # so do more bits


def packed_bits(folder: Path, packed: Path, layers: list[LayerResult]) -> float:
    """Bits a weight that the pruned layers of an output take once it is packed."""
    sizes = sparsellm.pack(folder, packed, allow_dense=True).matrices
    weights = sum(math.prod(layer.shape) for layer in layers)
    matrices = [matrix for matrix in sizes if matrix.value_bits is not None]
    assert sum(math.prod(matrix.shape) for matrix in matrices) == weights
    return 8 * sum(matrix.packed_bytes for matrix in matrices) / weights


def random_model(family: str) -> PreTrainedModel:
    """A random model whose layers are large against the last bytes of their parts."""
    torch.manual_seed(0)
    common: dict[str, Any] = {"vocab_size": 260, "num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 4}
    config = (
        LlamaConfig(**common, intermediate_size=192, num_key_value_heads=2, max_position_embeddings=64)
        if family == "llama"
        else GPT2Config(vocab_size=260, n_layer=3, n_embd=128, n_head=4, n_positions=64)
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("family", "bits"),
    [("llama", 3.0), *(pytest.param(*case, marks=pytest.mark.long) for case in (("llama", 1.2), ("gpt2", 2.3)))],
)
def test_packed_layers_take_the_budget(family: str, bits: float, tmp_path: Path) -> None:
    """At most the bits that were asked for, and less by less than 1 %; the report says what `pack` stores."""
    tokens = torch.randint(0, 260, (8, 64), generator=torch.Generator().manual_seed(0))
    result = sparsellm.prune(random_model(family), bits=bits, effort="fast", calibration=tokens)
    assert isinstance(result, sparsellm.Result)
    result.save_pretrained(tmp_path / "pruned")
    stored = packed_bits(tmp_path / "pruned", tmp_path / "packed", result.report.layers)
    assert 0.99 * bits < stored <= bits
    report = result.report.to_dict()
    assert report["totals"]["bits_of_pruned_layers"] == pytest.approx(stored, rel=1e-3 if family == "gpt2" else 1e-9)
    layers = [layer for block in report["blocks"] for layer in block["layers"]]
    assert all(layer["bits"] in WIDTHS and layer["bits_per_weight"] > 0 for layer in layers)
    assert f"{report['totals']['bits_of_pruned_layers']:.3f} bits a weight" in result.summary()["size"]


@pytest.mark.long
@pytest.mark.parametrize("bits", [2.3, 3.0])
def test_bundled_model_takes_the_budget(bits: float, tmp_path: Path) -> None:
    """As for random models, and several widths are used."""
    result = sparsellm.prune("demo:opt", bits=bits, effort="fast", calibration="demo", samples=8)
    assert isinstance(result, sparsellm.Result)
    result.save_pretrained(tmp_path / "pruned")
    assert 0.99 * bits < packed_bits(tmp_path / "pruned", tmp_path / "packed", result.report.layers) <= bits
    assert len({layer.bits for layer in result.report.layers}) > 1


def test_budgets_out_of_reach_are_refused_before_work() -> None:
    """The least that layers can take is their masks with few weights of 3 bits, and the most 8 bits a weight."""
    least, most = bit_range({"layer": (256, 512)})
    assert 0.5 < least < 0.7
    assert 8 < most < 8.1
    model = random_model("gpt2")
    for bits in (0.3, 9.0):
        with pytest.raises(InvalidSetting, match=rf"`bits` must be between 0\.\d+ and 8\.\d+ .*, got {bits:g}"):
            sparsellm.prune(model, bits=bits, calibration=torch.ones(1, 8, dtype=torch.long))
    with pytest.raises(InvalidSetting, match="leave the output head out of `include`"):
        sparsellm.prune(model, bits=2.0, calibration=torch.ones(1, 8, dtype=torch.long), include=["lm_head", "mlp.c_fc"])
    with pytest.raises(InvalidSetting, match=r"c_attn\.k and .*c_attn\.q are stored in one tensor"):
        sparsellm.prune(model, bits=2.0, calibration=torch.ones(1, 8, dtype=torch.long), exclude=["attn.c_attn.q"])


@pytest.mark.parametrize(
    "other",
    [{"sparsity": "50%"}, {"values": "int4"}, {"group_size": 64}, {"allocation": "fisher"}],
)
def test_bits_go_with_no_other_size(other: dict[str, Any]) -> None:
    """Each setting that `bits` replaces is refused beside it."""
    (name,) = other
    with pytest.raises(InvalidSetting, match=f"`{name}` has no place"):
        sparsellm.prune("demo:opt", bits=3.0, calibration="demo", **other)
    with pytest.raises(InvalidSetting, match="A run with `bits` needs a calibration text"):
        sparsellm.prune("demo:opt", "magnitude", bits=3.0)


def test_formats_never_store_a_mask_that_takes_more_than_it_saves() -> None:
    """A layer of which few weights are removed keeps all."""
    for bits in WIDTHS:
        every = LayerFormat.of((64, 256), bits, 1.0)
        for density in (0.9, 0.7, 0.66, 0.3):
            layer = LayerFormat.of((64, 256), bits, density)
            fewer = replace(layer, kept=math.floor(density * 64 * 256))
            assert layer.stored_bits == min(fewer.stored_bits, replace(every, format=layer.format).stored_bits)
