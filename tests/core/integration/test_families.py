"""Every family of the table, as a tiny random model of its class: seen as it computes, pruned exactly, written, read again."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from sparsellm.activations.output_cache import OutputCache
from sparsellm.activations.streams import CaptureRequest
from sparsellm.errors import UnsupportedModel
from sparsellm.methods import BlockMethod, BlockResult, EpochResult, LayerResult
from sparsellm.methods.algorithm1 import Algorithm1
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.sparsellm import SparseLLM, TrueSequential
from sparsellm.models.architectures import ARCHITECTURES
from sparsellm.models.blocks import blocks_of
from sparsellm.models.feedforward import PlainFeedForward
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.outputs.inspection import inspect
from sparsellm.outputs.journal import work_directory
from sparsellm.outputs.report import Report
from sparsellm.pipeline.loading import check_runs, choose_placement, open_model
from sparsellm.pipeline.planning import estimate
from sparsellm.pipeline.preparation import make_plan, prepare_pruning
from sparsellm.pipeline.prune import prune_run
from sparsellm.pipeline.stage_memory import pruning_memory
from sparsellm.recipes.file import read_recipe
from sparsellm.recipes.plan import uniform_plan
from sparsellm.solvers import Magnitude, Wanda
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram
from tests.conftest import ROOT, byte_tokenizer, extensions, long_unless
from tests.pruning import prune_blocks, walk

SHARED = {
    "vocab_size": 260,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
GATED = {**SHARED, "intermediate_size": 48, "num_key_value_heads": 2}
GPT = {"vocab_size": 260, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "initializer_range": 0.2}
GPT |= {"bos_token_id": 1, "eos_token_id": 2}
OPT = {**{key: value for key, value in SHARED.items() if key != "initializer_range"}, "ffn_dim": 64, "init_std": 0.2}
MOE = {**GATED, "num_experts": 4, "num_experts_per_tok": 2}


def config(name: str, **settings: Any) -> Callable[[], PreTrainedConfig]:
    """A configuration of that class of transformers."""
    return partial(getattr(transformers, f"{name}Config"), **settings)


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "opt": config("OPT", **OPT, word_embed_proj_dim=32),
    "opt-350m": config("OPT", **OPT, word_embed_proj_dim=16, do_layer_norm_before=False),
    "llama": config("Llama", **GATED),
    "llama3": config("Llama", **GATED, attention_bias=True, tie_word_embeddings=True, head_dim=16),
    "mistral": config("Mistral", **GATED, sliding_window=4),
    "ministral": config("Ministral", **GATED, head_dim=8),
    "qwen2": config("Qwen2", **GATED),
    "qwen3": config("Qwen3", **GATED, head_dim=16),
    "smollm3": config("SmolLM3", **GATED),
    "stablelm": config("StableLm", **GATED),
    "stablelm-parallel": config("StableLm", **GATED, use_parallel_residual=True),
    "olmo": config("Olmo", **GATED),
    "olmo2": config("Olmo2", **GATED),
    "olmo3": config("Olmo3", **GATED),
    "cohere": config("Cohere", **GATED),
    "cohere2": config("Cohere2", **GATED),
    "granite": config("Granite", **GATED, residual_multiplier=0.5),
    "gemma": config("Gemma", **GATED, head_dim=8),
    "gemma2": config("Gemma2", **GATED, head_dim=8),
    "gemma3_text": config("Gemma3Text", **GATED, head_dim=8, layer_types=["sliding_attention", "full_attention"]),
    "phi": config("Phi", **GATED),
    "phi3": config("Phi3", **GATED),
    "gpt2": config("GPT2", **GPT),
    "gptj": config("GPTJ", **GPT, rotary_dim=4),
    "gpt_neox": config("GPTNeoX", **SHARED, intermediate_size=64),
    "gpt_neox-serial": config("GPTNeoX", **SHARED, intermediate_size=64, use_parallel_residual=False),
    "bloom": config("Bloom", vocab_size=260, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2),
    "falcon": config("Falcon", **SHARED),
    "falcon-new": config("Falcon", **SHARED, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-rw": config("Falcon", **SHARED, multi_query=False, parallel_attn=False, alibi=True, bias=True),
    "mixtral": config("Mixtral", **GATED, num_local_experts=4),
    "qwen3_moe": config("Qwen3Moe", **MOE, moe_intermediate_size=16, head_dim=8, mlp_only_layers=[1]),
    "olmoe": config("Olmoe", **MOE),
    "gpt_oss": config("GptOss", **GATED, num_local_experts=4, num_experts_per_tok=2, head_dim=8),
    "llama4_text": config(
        "Llama4Text", **GATED, intermediate_size_mlp=64, num_local_experts=4, interleave_moe_layer_step=2, head_dim=8
    ),
}
EXPERTS = ("mixtral", "qwen3_moe", "olmoe")
UNCOUPLED = ("gpt_oss",)
"""Those whose feed-forward part has an activation that SparseLLM does not solve."""
FORMS = ("gpt_neox", "llama3", "phi3", "gpt2", "qwen3_moe", "opt-350m", "gpt_oss")
"""One of each form: plain, gated, fused, Conv1D, experts, post-norm, uncoupled. The long tests have the other families."""
each_family = pytest.mark.parametrize("name", [long_unless(name in FORMS, name) for name in CONFIGS])

METHODS: dict[str, BlockMethod] = {
    "magnitude": LayerWise(Magnitude()),
    "wanda": LayerWise(Wanda()),
    "alps": LayerWise(ALPS(iterations=6, refit_steps=2)),
    "sparsegpt": LayerWise(SparseGPT()),
    "fast-admm": LayerWise(FastADMM()),
    "published": Algorithm1(SparseGPT(), epochs=2),
    "sparsellm": SparseLLM(solver=ALPS(iterations=6, refit_steps=2), rounds=1),
}


def tiny(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of two blocks."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]()).to(dtype).eval()


def batches() -> list[Tensor]:
    """Two batches of different sizes: 80 tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 250, shape, generator=generator) for shape in ((3, 20), (1, 20))]


def entering(model: PreTrainedModel) -> list[list[Tensor]]:
    """What enters each block, batch by batch, in ordinary passes of the whole model."""
    found: list[list[Tensor]] = [[] for _ in blocks_of(model)]
    hooks = [
        block.module.register_forward_pre_hook(
            lambda _, args, kwargs, many=many: many.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        for block, many in zip(blocks_of(model), found, strict=True)
    ]
    with torch.no_grad():
        for batch in batches():
            model(input_ids=batch)
    for hook in hooks:
        hook.remove()
    return found


def test_every_line_of_the_table_is_tried() -> None:
    """Each family has a tiny model here, or is the text tower of one in test_forms.py."""
    tried = {make().model_type for make in CONFIGS.values()}
    towers = {"qwen2_vl_text", "qwen2_5_vl_text"}
    assert set(ARCHITECTURES) == tried | towers


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "silu"])
def test_activations_are_those_of_transformers(activation: str) -> None:
    """What a name in a configuration means there, it means here."""
    z = 3 * torch.randn(40, 5, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    torch.testing.assert_close(PlainFeedForward("up", "down", activation).activate(z), ACT2FN[activation](z))


@each_family
def test_it_is_causal(name: str) -> None:
    """Two passes that differ in the last token alone predict the same before it, as a whole and block by block."""
    for by_block in (False, True):
        check_runs(LoadedModel.of(tiny(name)), by_block=by_block, predicts=True)


@each_family
def test_blocks_are_called_as_the_model_calls_them(name: str) -> None:
    """Every block's inputs on the walk are bit for bit those of an ordinary forward pass, and all of it is described."""
    model = tiny(name)
    wanted = entering(model)
    for block, inputs in walk(model, batches()):
        assert all(torch.equal(a, b) for a, b in zip(inputs.pruned, wanted[block.index], strict=True))
    for block in blocks_of(model):
        assert block.architecture.known
        assert bool(block.architecture.feed_forward_parts) == (name not in UNCOUPLED)
        covered = {block.parameter(layer) for layer in block.layers}
        matrices = {key for key, tensor in block.module.named_parameters() if tensor.ndim > 1 and not key.endswith("_bias")}
        assert matrices - covered <= {"mlp.gate.weight", "mlp.router.weight", "feed_forward.router.weight"}  # all but routers
        sizes = {key: tensor.numel() for key, tensor in block.module.named_parameters()}
        parts = sum(layer.in_features * layer.out_features for layer in block.layers.values())
        assert parts == sum(sizes[key] for key in covered)  # views neither overlap nor leave a gap


@each_family
@torch.no_grad()
def test_layer_by_layer_it_is_the_same_block(name: str) -> None:
    """With fused layers and experts opened a block computes the same, and every layer W x + b of what it is shown."""
    model = tiny(name)
    for block, inputs in walk(model, batches()):
        shown: dict[str, tuple[Tensor, Tensor]] = {}

        def hook(layer: Any, read: tuple[Tensor, ...], written: Tensor, shown: dict = shown) -> None:
            shown[next(key for key, one in block.layers.items() if one is layer)] = read[0].clone(), written.clone()  # noqa: B023

        hooks = [layer.register_forward_hook(hook) for layer in block.layers.values()]
        for hidden, call in zip(inputs.pruned, inputs.calls(block), strict=True):
            before = block(hidden, call)
            shown.clear()
            with block.expose_layers(block.layers):
                torch.testing.assert_close(block(hidden, call), before, rtol=1e-4, atol=1e-5)
            assert set(shown) == set(block.layers)
            for key, (read, written) in shown.items():
                layer = block.layer(key)
                wanted = read @ layer.weight.T + (0 if layer.bias is None else layer.bias)
                torch.testing.assert_close(written, wanted, rtol=1e-4, atol=1e-5)
            assert torch.equal(block(hidden, call), before)
        for one in hooks:
            one.remove()


@pytest.mark.parametrize(
    ("name", "method", "pattern"),
    [
        long_unless(name in FORMS, name, method, ("60%", "2:4")[(place + number) % 2])
        for place, name in enumerate(CONFIGS)
        for number, method in enumerate(METHODS)
        if name in FORMS or method in ("sparsegpt", "published", "sparsellm")  # one of those that prune layer by layer
    ],
)
def test_pruned_exactly(name: str, method: str, pattern: str) -> None:
    """Every layer has its zeros, also within fused parameters; what is not planned keeps its bits; outputs are finite."""
    model, dense = tiny(name), tiny(name)
    plan = uniform_plan(blocks_of(model), parse_pattern(pattern))
    if method == "published" and name in UNCOUPLED:
        with pytest.raises(UnsupportedModel, match="`blocks` none"):
            list(prune_blocks(model, batches(), METHODS[method], plan))
        return
    steps = list(prune_blocks(model, batches(), METHODS[method], plan))
    results = {step.name: step for step in steps if isinstance(step, LayerResult)}
    assert set(results) == set(plan)
    moved = {full for step in steps if isinstance(step, BlockResult) for full in step.changed_parameters}
    pruned = set()
    for block in blocks_of(model):
        for layer in block.layers:
            full, weight = block.full_name(layer), block.layer(layer).weight
            pruned.add(block.full_name(block.parameter(layer)))
            wanted = plan[full].count_removed(weight.shape)
            assert int((weight == 0).sum()) == wanted == results[full].zeros, full
            if pattern == "2:4":
                assert bool(((weight.unflatten(1, (-1, 4)) == 0).sum(-1) == 2).all()), full
            assert results[full].shape == tuple(weight.shape)
    for full, parameter in dense.named_parameters():
        if full not in pruned | moved:
            assert torch.equal(parameter, model.get_parameter(full)), full
    coupled = any(isinstance(step, EpochResult) for step in steps)
    assert coupled == (method in ("published", "sparsellm") and name not in UNCOUPLED)
    with torch.no_grad():
        assert all(bool(model(input_ids=batch).logits.isfinite().all()) for batch in batches())


@pytest.mark.parametrize(
    ("name", "method"),
    [long_unless(name in FORMS, name, ("sparsellm", "sparsegpt")[place % 2]) for place, name in enumerate(CONFIGS)],
)
def test_every_family_is_planned(name: str, method: str, tmp_path: Path) -> None:
    """Whatever its form: pruning it holds more than a block in float32."""
    tiny(name).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    recipe = read_recipe({"model": str(tmp_path), "method": method, "calibration": "given", "sparsity": "60%"})
    opened = open_model(recipe)
    ready = prepare_pruning(
        opened,
        recipe,
        *make_plan(recipe, opened),
        report=Report(recipe),
        observer=lambda _: None,
        given={"calibration": torch.cat(batches())},
    )
    planned = estimate(ready, pruning_memory, choose_placement(recipe, ready, files=True), batch=ready.batch)
    block = sum(tensor.numel() for tensor in ready.blocks[0].module.parameters())
    pruning = next(stage for stage in planned.stages if stage.name == "pruning")
    assert 4 * block < pruning.memory["cpu"] <= planned.peak.data_bytes < 2**30


def written(source: Path, output: Path, method: str, **settings: Any) -> Path:
    """A checkpoint pruned (to 60 % if not said otherwise) as a whole run does it, with its files."""
    tokens = torch.cat([batch[:, :20] for batch in batches()])
    chosen = {"method": method, "sparsity": "60%", "calibration": "given in memory", "allocation": "uniform", **settings}
    if method == "sparsellm":
        chosen |= {"settings": {"solver": "sparsegpt", "rounds": 0}}
    recipe = read_recipe({"model": str(source), "batch_size": 2, **chosen})
    said: list[str] = []
    with work_directory(output) as work:
        result = prune_run(recipe, lambda event: said.append(str(event)), given={"calibration": tokens}, work=work)
        assert any("read block by block" in told for told in said) == bool(settings.get("offload"))
        return result.save_pretrained(output)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All that its weight files hold."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("name", "method", "pattern"),
    [
        long_unless(name in FORMS[number::2], name, method, pattern)
        for place, name in enumerate(CONFIGS)
        for number, (method, pattern) in enumerate([("sparsegpt", "2:4"), ("sparsellm", "60%")])
        if name in FORMS or number == place % 2  # both for one family of each form
    ],
)
def test_streamed_as_in_memory(name: str, method: str, pattern: str, tmp_path: Path) -> None:
    """Read block by block it ends in the same tensors of the same names; read again it is the same model."""
    source = tmp_path / "dense"
    tiny(name).save_pretrained(source, max_shard_size="40kB")
    byte_tokenizer().save_pretrained(source)
    folders = [
        written(source, tmp_path / place, method, offload=place == "streamed", sparsity=pattern)
        for place in ("whole", "streamed")
    ]
    whole, streamed = (tensors_of(folder) for folder in folders)
    assert whole.keys() == streamed.keys()
    assert all(torch.equal(whole[key], streamed[key]) for key in whole)
    assert (
        json.loads((folders[1] / "sparsellm.json").read_text())["notes"]
        == json.loads((folders[0] / "sparsellm.json").read_text())["notes"]
    )
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders]
    with torch.no_grad():
        logits = [model(input_ids=batches()[0]).logits for model in models]
    assert torch.equal(*logits)
    found = inspect(str(folders[1]), str(source), pattern)
    assert found.as_expected
    assert len(found.layers) == sum(len(block.layers) for block in blocks_of(models[0]))
    assert not found.only_here
    assert not found.only_there


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("method", ["published", "sparsellm"])
def test_opt_350m_without_nan(method: str, dtype: torch.dtype) -> None:
    """The post-norm form with projections in and out, in every dtype: finite, exact, and stored as it was."""
    model = tiny("opt-350m", dtype)
    plan = uniform_plan(blocks_of(model), parse_pattern("2:4"))
    compute = None if dtype is torch.float32 else torch.float32
    results = [s for s in prune_blocks(model, batches(), METHODS[method], plan, compute) if isinstance(s, LayerResult)]
    assert len(results) == 12
    assert all(0 <= step.error < 1.5 for step in results)
    for parameter in model.parameters():
        assert parameter.dtype == dtype
        assert bool(parameter.isfinite().all())
    with torch.no_grad():
        assert bool(model.float()(input_ids=batches()[0]).logits.isfinite().all())


@extensions
@pytest.mark.parametrize("name", ["phi3", "gpt2", "mixtral"])
def test_gradient_steps_hold_the_masks_of_pieces(name: str) -> None:
    """Over a block, then over the model: every piece keeps its zeros; a parameter with a piece left dense does not move."""
    from sparsellm.extensions.recover.training.distillation import distill, last_states
    from sparsellm.extensions.recover.training.masked_training import MaskedAdam
    from tests.recovering import block_recovery

    model, dense = tiny(name), tiny(name)
    left = {"phi3": "*qkv_proj.v", "gpt2": "*c_attn.v", "mixtral": "*experts.2.up_proj"}[name]
    plan = uniform_plan(blocks_of(model), parse_pattern("60%"), exclude=[left])
    pruned, windows = tiny(name), torch.cat([batches()[0]] * 3)
    results = list(prune_blocks(pruned, list(windows.split(3)), SparseLLM(SparseGPT(), rounds=0), plan))
    list(prune_blocks(model, list(windows.split(3)), block_recovery(pruned, results, MaskedAdam(4, 1e-2)), plan))
    held = [(windows[:3],), (windows[3:6],), (windows[6:],)]
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    distill(model, held, last_states(dense, held), plan=plan, adam=MaskedAdam(10, 1e-3))
    moved = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])}
    assert moved
    for block, other in zip(blocks_of(model), blocks_of(dense), strict=True):
        frozen = {block.parameter(layer) for layer in block.layers if block.full_name(layer) not in plan}
        assert len(frozen) == 1
        assert not moved & {block.full_name(parameter) for parameter in frozen}
        for layer in block.layers:
            weight, full = block.layer(layer).weight, block.full_name(layer)
            if full in plan:
                assert int((weight == 0).sum()) == plan[full].count_removed(weight.shape), full
            else:
                assert torch.equal(weight, other.layer(layer).weight), full


@pytest.mark.parametrize("name", EXPERTS)
@torch.no_grad()
def test_each_token_goes_to_its_experts(name: str) -> None:
    """Routed tokens add up to tokens times top-k; an expert's Gram is that of its tokens, and of others where these are few."""
    model = tiny(name)
    for block, inputs in walk(model, batches(), stop=1):
        seen: list[tuple[Tensor, Tensor]] = []
        experts = block.module.get_submodule("mlp.experts")
        hook = experts.register_forward_pre_hook(lambda _, arguments, seen=seen: seen.append(arguments[:2]))
        for hidden, call in zip(inputs.pruned, inputs.calls(block), strict=True):
            block(hidden, call)
        hook.remove()
        x, chosen = (torch.cat(some) for some in zip(*seen, strict=True))
        wanted = [int((chosen == number).any(-1).sum()) for number in range(4)]
        least = max(block.layer("mlp.experts.0.down_proj").in_features, 32)
        tokens = []
        for number in range(4):
            name, gram = f"mlp.experts.{number}.up_proj", Gram(32)
            for captured in inputs.run(block, CaptureRequest([name])):
                gram.update(captured.inputs[name])
            own = x[(chosen == number).any(-1)]
            if wanted[number] >= least:
                torch.testing.assert_close(gram.matrix, own.T @ own / len(own), rtol=1e-4, atol=1e-4)
            else:
                assert gram.tokens == min(least, 80)
            tokens.append(gram.tokens)
        results = LayerWise(SparseGPT()).prune(block, inputs, uniform_plan([block], parse_pattern("50%")))
        found = {step.name.removeprefix(f"{block.name}."): step for step in results if isinstance(step, LayerResult)}
        experts_found = [found[f"mlp.experts.{number}.gate_proj"] for number in range(4)]
        assert [step.routed_tokens for step in experts_found] == wanted
        assert [step.tokens for step in experts_found] == tokens
        assert sum(wanted) == 80 * 2 == len(x) * 2
        assert found["self_attn.q_proj"].routed_tokens is None


def test_the_documented_diff_is_the_real_one() -> None:
    """docs/families.md: every added line stands in its file, there are fewer than fifteen, and every family has its row."""
    root = ROOT
    page = (root / "docs" / "families.md").read_text(encoding="utf-8")
    diff = page.split("```diff\n")[1].split("```")[0]
    text, added = "", 0
    for line in diff.splitlines():
        if line.startswith("+++ b/"):
            text = (root / line.removeprefix("+++ b/")).read_text(encoding="utf-8")
        elif line.startswith("+"):
            added += 1
            assert line[1:] in text.splitlines(), line
    assert 0 < added < 15
    for family in ARCHITECTURES:
        assert f"`{family}`" in page.split("## Other models")[0], family


@each_family
def test_true_sequential_order_is_the_same_without_recall(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Group by group on pruned inputs, to the bit what it is where every pass runs all of the block; every layer is pruned."""
    found: list[list[Tensor]] = []
    for recalls in (True, False):
        model = tiny(name)
        if not recalls:
            monkeypatch.setattr(OutputCache, "schedule", lambda self, block, module, is_last: None)
        method, blocks = TrueSequential(SparseGPT()), blocks_of(model)
        list(prune_blocks(model, batches(), method, uniform_plan(blocks, parse_pattern("50%"))))
        for block in blocks:
            assert all(abs(float((layer.weight == 0).float().mean()) - 0.5) < 0.01 for layer in block.layers.values())
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
