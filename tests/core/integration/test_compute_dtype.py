"""The dtype of matrix products: what it changes and what not, how `auto` chooses it, and that a run keeps it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import sparsellm
from sparsellm.activations import backward
from sparsellm.activations.output_cache import OutputCache, trace_dataflow
from sparsellm.activations.sensitivity import output_fisher
from sparsellm.activations.streams import CaptureRequest
from sparsellm.activations.walk import walk
from sparsellm.evaluation.perplexity import streamed_perplexity
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.models.loaded_model import LoadedModel, ResidentWeights
from sparsellm.outputs.journal import Journal
from sparsellm.pipeline import startup
from sparsellm.pipeline.preparation import Prepared
from sparsellm.pipeline.startup import bf16_pass_speedup, choose_products
from sparsellm.recipes.methods import method_of
from sparsellm.recipes.recipe import Recipe
from sparsellm.solvers.alps import ALPS
from tests.conftest import extensions, long_unless
from tests.core.integration.test_families import tiny as of_family
from tests.core.integration.test_walk import batches, tiny

HALF, FULL = torch.bfloat16, torch.float32
CPU = torch.device("cpu")

two_families = pytest.mark.parametrize("family", ["opt", "llama"])


def loaded(family: str, products: torch.dtype | None) -> LoadedModel:
    """A float32 model whose weights are bfloat16 numbers, as those of a bfloat16 checkpoint."""
    model = tiny(family, dtype=HALF).float()
    return LoadedModel(model, ResidentWeights(model), products=products)


@pytest.fixture
def speedup(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets what the measurement gives."""
    return lambda value: monkeypatch.setattr(startup, "bf16_pass_speedup", lambda device: value)


@torch.no_grad()
@two_families
def test_products_round_factors_and_results_and_nothing_else(family: str) -> None:
    """A layer's output is the exact product of rounded factors, rounded; the stream between blocks is not rounded."""
    seen = 0
    for block, inputs in walk(loaded(family, HALF), batches()):
        names = [
            name
            for name, layer in block.layers.items()
            if layer.in_features == block.layers[next(iter(block.layers))].in_features
        ]
        for captured in inputs.run(block, CaptureRequest(names, names)):
            for name in names:
                assert captured.inputs[name].dtype is HALF  # as the product takes them, so that statistics are of these
                x, layer = captured.inputs[name].double(), block.layer(name)
                exact = x @ layer.weight.double().T + (0 if layer.bias is None else layer.bias.double())
                assert captured.outputs[name].dtype is HALF
                torch.testing.assert_close(captured.outputs[name].double(), exact, rtol=2**-8, atol=1e-5)
                seen += 1
        for hidden in inputs.pruned:
            assert hidden.dtype is FULL
            assert block.index == 0 or not torch.equal(hidden, hidden.to(HALF).float())
    assert seen


@torch.no_grad()
@two_families
def test_cached_outputs_have_the_same_bits(family: str) -> None:
    """A module whose outputs are computed from its writer's inputs, when that is final, gives what a pass computes."""
    (block, inputs), (other, plain) = (next(walk(loaded(family, HALF), batches())) for _ in range(2))
    adder, writer = block.architecture.residual_writers or ("", "")
    module = trace_dataflow(block, inputs.pruned[0], inputs.calls(block)[0]).cacheable[adder]
    inputs.pruned.cache = OutputCache(inputs.storage, inputs.local_shapes, inputs.pruned[0])
    inputs.pruned.cache.schedule(block, module, is_last=False)
    list(inputs.run(block, CaptureRequest([adder])))
    inputs.pruned.cache.mark_final(block, [adder])
    request = CaptureRequest([writer], [module.name, writer])
    for one, two in zip(inputs.run(block, request), plain.run(other, request), strict=True):
        assert torch.equal(one.inputs[writer], two.inputs[writer])
        assert all(torch.equal(one.outputs[name], two.outputs[name]) for name in request.outputs)
        assert all(one.outputs[name].dtype is two.outputs[name].dtype for name in request.outputs)


@two_families
def test_sensitivities_are_those_of_float32_up_to_rounding(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same labels, gradients differ by a few roundings. Labels are drawn, so rounding may change some."""
    monkeypatch.setattr(backward, "sample_labels", lambda shares, generator: torch.arange(len(shares)) % shares.shape[1])
    half, full = (output_fisher(loaded(family, products), batches()) for products in (HALF, None))
    for one, two in zip(half, full, strict=True):
        assert one.dtype is FULL
        assert 0 < float((one - two).norm() / two.norm()) < 0.05


def test_texts_are_measured_in_the_full_dtype() -> None:
    """Perplexities of runs with different products can be compared."""
    windows = torch.cat([batch for batch in batches() if batch.shape[1] == batches()[0].shape[1]])
    values = [streamed_perplexity(loaded("opt", products), windows).value for products in (HALF, None)]
    assert values[0] == values[1]


@pytest.mark.parametrize(
    ("stored", "device", "setting", "gain", "expected"),
    [
        (HALF, "cpu", "auto", 2.0, HALF),
        (HALF, "cpu", "auto", 1.5, HALF),
        (HALF, "cpu", "auto", 1.1, None),
        (HALF, "cpu", "float32", 2.0, None),
        (HALF, "cpu", "bfloat16", 1.1, HALF),
        (HALF, "meta", "auto", 2.0, None),
        (HALF, "meta", "bfloat16", 2.0, None),
        (FULL, "meta", "bfloat16", 1.1, HALF),
        (FULL, "cpu", "auto", 2.0, None),
        (FULL, "cpu", "bfloat16", 1.1, HALF),
        (torch.float16, "cpu", "auto", 2.0, None),
    ],
)
def test_choice(
    stored: torch.dtype,
    device: str,
    setting: str,
    gain: float,
    expected: torch.dtype | None,
    speedup: Callable[[float], None],
) -> None:
    """`auto` rounds no float32, float16 or narrow model, and changes nothing on a device other than the CPU."""
    speedup(gain)
    recipe = Recipe(model="m", method="wanda", calibration="demo", compute_dtype=setting)  # type: ignore[arg-type]
    for width in (512, 511):
        config = SimpleNamespace(get_text_config=lambda width=width: SimpleNamespace(hidden_size=width))
        source = SimpleNamespace(dtype=lambda _: stored)
        fields = {"source": source, "device": torch.device(device), "skeleton": SimpleNamespace(config=config)}
        ready = SimpleNamespace(recipe=recipe, **fields)
        assert choose_products(cast(Prepared, ready)) is (None if setting == "auto" and width < 512 else expected)


@extensions
@pytest.mark.parametrize(
    ("stored", "setting", "gain", "expected"),
    [
        (HALF, "auto", 2.0, HALF),
        (HALF, "auto", 1.1, None),
        (HALF, "float32", 2.0, None),
        (HALF, "bfloat16", 1.1, HALF),
        (FULL, "auto", 2.0, None),
        (FULL, "bfloat16", 1.1, HALF),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_choice_of_a_recovery(
    device: str, stored: torch.dtype, setting: str, gain: float, expected: torch.dtype | None, speedup: Callable[[float], None]
) -> None:
    """Models are trained in float32 on every device, so that `auto` chooses there alike, at every width."""
    from sparsellm.extensions.recover.recipe import RecoveryRecipe

    speedup(gain)
    recipe = RecoveryRecipe(model="m", pruned="p", calibration="demo", compute_dtype=setting)  # type: ignore[arg-type]
    source = SimpleNamespace(dtype=lambda _: stored)
    ready = SimpleNamespace(source=source, device=torch.device(device), recipe=recipe)
    assert choose_products(cast(Prepared, ready)) is expected


@pytest.mark.parametrize(("asked", "rounds"), [("auto", True), ("float32", False)])
def test_float32_is_that_of_the_solver_too(asked: str, rounds: bool) -> None:
    method = method_of(Recipe.model_validate({"model": "m", "calibration": "demo", "compute_dtype": asked}), blocks=2)
    assert isinstance(method, SparseLLM)
    assert isinstance(method.solver, ALPS)
    assert method.solver.with_curvature is not None
    assert method.solver.with_curvature.low_precision is rounds


def test_magnitude_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without passes has no products to choose."""
    monkeypatch.setattr(startup, "bf16_pass_speedup", None)
    recipe, source = Recipe(model="m", method="magnitude"), SimpleNamespace(dtype=lambda _: HALF)
    ready = SimpleNamespace(source=source, device=CPU, recipe=recipe)
    assert choose_products(cast(Prepared, ready)) is None


def pruned(model: Path, text: Path, out: Path, **settings: Any) -> tuple[dict[str, Tensor], str]:
    """The tensors that a run writes, and the dtype that its report tells."""
    used = {"calibration": str(text), "samples": 4, "sequence_length": 32, "sparsity": "50%"}
    result = sparsellm.prune(str(model), **used, **settings)
    result.save_pretrained(out)
    return load_file(out / "model.safetensors"), result.report.resolved["computed_in"]


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_auto_is_one_of_the_two(
    tiny: dict[str, Path], text_file: Path, tmp_path: Path, speedup: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow machine `auto` writes the bytes of float32, on a fast one those of bfloat16, and the report says which."""
    monkeypatch.setattr(startup, "NARROW", 32)
    runs: dict[str, tuple[dict[str, Tensor], str]] = {}
    for name, setting, gain in (("32", "float32", 2), ("16", "bfloat16", 1), ("slow", "auto", 1), ("fast", "auto", 2)):
        speedup(gain)
        runs[name] = pruned(tiny["opt"], text_file, tmp_path / name, method="sparsegpt", compute_dtype=setting)
    assert [told for _, told in runs.values()] == ["torch.float32", "torch.bfloat16", "torch.float32", "torch.bfloat16"]
    assert equal(runs["slow"][0], runs["32"][0])
    assert equal(runs["fast"][0], runs["16"][0])
    assert not equal(runs["16"][0], runs["32"][0])


def test_float32_models_keep_their_numbers(tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """Products in bfloat16 that are asked for round no stored tensor: what is not pruned keeps every bit."""
    dense = load_file(tiny["llama"] / "model.safetensors")
    after, told = pruned(tiny["llama"], text_file, tmp_path / "out", effort="fast", compute_dtype="bfloat16")
    assert told == "torch.bfloat16"
    same = {name for name in dense if torch.equal(dense[name], after[name])}
    assert {name for name in dense if "proj" not in name} == same
    assert any(not torch.equal(after[name], after[name].to(HALF).float()) for name in dense if "proj" in name)


@pytest.mark.parametrize(
    "family", [long_unless(name in ("mixtral", "gpt2"), name) for name in ("mixtral", "gpt2", "qwen3_moe", "phi3", "gpt_neox")]
)
def test_other_forms_of_blocks(family: str) -> None:
    """Experts, fused and transposed layers: outputs stay within rounding of float32's, but for tokens that are routed anew."""
    outputs = []
    for products in (HALF, None):
        model = of_family(family)
        block, inputs = next(walk(LoadedModel(model, ResidentWeights(model), products=products), batches()))
        list(inputs.run(block, CaptureRequest(list(block.layers)[:1])))
        inputs.advance(block)
        outputs.append(inputs.pruned[0].clone())
    assert outputs[0].dtype is outputs[1].dtype
    errors = (outputs[0] - outputs[1]).norm(dim=-1) / outputs[1].norm(dim=-1)
    assert 0 < float(errors.median()) < 0.03


def test_resumed_run_keeps_its_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine that resumes it would choose; also that products are not rounded is kept."""
    for number, (first, second) in enumerate([(HALF, None), (None, HALF)]):
        folder = tmp_path / str(number)
        monkeypatch.setattr(startup, "choose_products", lambda *_, dtype=first: dtype)
        begun = startup._agree_on_products(cast(Any, None), Journal.begin(folder, {}))
        monkeypatch.setattr(startup, "choose_products", lambda *_, dtype=second: dtype)
        resumed = startup._agree_on_products(cast(Any, None), Journal.resume(folder, {}).share())
        assert begun is resumed is first


def test_other_processes_take_the_choice_of_the_main_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They measure nothing."""
    monkeypatch.setattr(startup, "choose_products", None)
    monkeypatch.setattr(startup.collectives, "is_main", lambda: False)
    monkeypatch.setattr(startup.collectives, "broadcast_object", lambda value: "bfloat16")
    assert startup._agree_on_products(cast(Any, None), None) is HALF


def test_speedup_is_that_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same product in float32 and in bfloat16."""
    asked: list[str | None] = []
    seen: list[torch.dtype] = []
    monkeypatch.setattr(startup, "linear", lambda *x: seen.append(torch.nn.functional.linear(*x).dtype))

    def speedup(name: str, make: Any, machine: str | None) -> float:
        for function in make():
            function()
        asked.append(machine)
        return 2.0

    monkeypatch.setattr(startup, "speedup", speedup)
    assert bf16_pass_speedup(CPU) == 2
    assert asked == [None]
    assert seen == [FULL, HALF]
