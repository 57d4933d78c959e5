"""Families that the table lacks, of many forms: experts, state-space and recurrent blocks, blocks of several kinds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from sparsellm.activations.streams import CaptureRequest
from sparsellm.activations.walk import Activations
from sparsellm.checkpoints.configuration import auto_model
from sparsellm.errors import UnsupportedModel
from sparsellm.methods import LayerResult
from sparsellm.methods.layerwise import LayerWise
from sparsellm.models.architectures import ARCHITECTURES, ROUTERS
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.models.experts import expert_members, experts_of
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.outputs.inspection import inspect
from sparsellm.pipeline.loading import check_runs
from sparsellm.recipes.plan import uniform_plan
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram
from tests.conftest import byte_tokenizer, long_unless
from tests.core.integration.test_families import GATED, METHODS, MOE, batches, config, entering, tensors_of, written
from tests.core.integration.test_families import tiny as of_table
from tests.core.integration.test_forms import LACKING
from tests.core.integration.test_forms import random as of_forms
from tests.pruning import prune_blocks, walk

FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
STATE = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "expand": 2, "initializer_range": 0.2}
HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SOUND = {"num_mel_bins": 8, "encoder_layers": 3, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "d_model": 16}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mamba": config("Mamba", **STATE, time_step_rank=4),
    "falcon_mamba": config("FalconMamba", **STATE, time_step_rank=4),
    "mamba2": config("Mamba2", **STATE, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    "jamba": config(
        "Jamba", **MOE, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False,
    ),
    "bamba": config("Bamba", **GATED, **HEADS, attn_layer_indices=[1]),
    "falcon_h1": config("FalconH1", **GATED, **HEADS, mamba_d_ssm=64),
    "granitemoehybrid": config(
        "GraniteMoeHybrid", **GATED, **FOUR, **HEADS, shared_intermediate_size=32, layer_types=["mamba", "attention"]
    ),
    "recurrent_gemma": config(
        "RecurrentGemma", **{**GATED, "num_hidden_layers": 3, "intermediate_size": 192}, lru_width=32, attention_window_size=8,
        head_dim=8,
    ),
    "zamba2": config(
        "Zamba2", **{**GATED, "num_hidden_layers": 3, "num_key_value_heads": 4}, layers_block_type=["mamba", "hybrid", "mamba"],
        mamba_d_state=8, mamba_ngroups=1, n_mamba_heads=8, mamba_headdim=8, use_mem_rope=True, chunk_size=8, adapter_rank=8,
    ),
    "nemotron_h": config(
        "NemotronH", **{**GATED, "num_hidden_layers": 4}, layers_block_type=["mamba", "attention", "moe", "mlp"], **ROUTED,
        mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8, n_groups=2, chunk_size=8, head_dim=8, n_group=1, topk_group=1,
        moe_shared_expert_intermediate_size=16,
    ),
    "lfm2": config("Lfm2", **GATED, layer_types=["conv", "full_attention"], block_multiple_of=8),
    "rwkv": config(
        "Rwkv", vocab_size=260, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, intermediate_size=64,
        context_length=64,
    ),
    "dbrx": config(
        "Dbrx", vocab_size=260, d_model=32, n_heads=4, n_layers=2, max_seq_len=64,
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    ),
    "deepseek_v2": config(
        "DeepseekV2", **{**GATED, "num_key_value_heads": 4}, **ROUTED, **LATENT, n_group=2, topk_group=1,
        first_k_dense_replace=1,
    ),
    "phimoe": config("Phimoe", **GATED, **FOUR),
    "minimax_m2": config("MiniMaxM2", **GATED, **FOUR, head_dim=8),
}  # fmt: skip
"""One of each form: the coverage table of docs/families.md has every type."""

HOLDS_EXPERTS = ("jamba", "granitemoehybrid", "nemotron_h", "dbrx", "deepseek_v2", "phimoe", "minimax_m2")
QUICK = ("mamba", "jamba", "bamba", "recurrent_gemma", "nemotron_h", "dbrx")

each_form = pytest.mark.parametrize("name", [long_unless(name in QUICK, name) for name in CONFIGS])


def tiny(name: str) -> PreTrainedModel:
    """A random model whose weights are all finite, and none of them zero."""
    torch.manual_seed(0)
    made = CONFIGS[name]()
    model = auto_model(made).from_config(made).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim > 1 and (not bool(tensor.isfinite().all()) or not bool(tensor.any()) or tensor.std() < 0.01):
                tensor.normal_(0, 0.2)
    return model


def matrices(block: Block) -> set[str]:
    """The parameters of a block that are matrices of products, but for routers, and the gates of recurrent units."""
    found = {name: tensor for name, tensor in block.module.named_parameters() if tensor.ndim > 1 and 1 not in tensor.shape}
    left = (
        "conv.weight",
        "conv1d.weight",
        "conv_1d.weight",
        "A_log",
        "_bias",
        "rg_lru",
        *(f".{router}." for router in ROUTERS),
    )
    return {name for name in found if not any(part in name for part in left)}


@each_form
def test_it_is_causal(name: str) -> None:
    """Two passes that differ in the last token alone predict the same before it, as a whole and block by block."""
    for by_block in (False, True):
        check_runs(LoadedModel.of(tiny(name)), by_block=by_block, predicts=True)


@each_form
def test_every_matrix_is_a_layer(name: str) -> None:
    """The blocks are found, in order, called as the model calls them, and every matrix in them belongs to layers."""
    model = tiny(name)
    assert model.config.model_type not in ARCHITECTURES
    wanted = entering(model)
    for block, inputs in walk(model, batches()):
        assert all(torch.equal(a, b) for a, b in zip(inputs.pruned, wanted[block.index], strict=True))
    for block in blocks_of(model):
        sizes = {key: tensor.numel() for key, tensor in block.module.named_parameters()}
        held = {block.parameter(layer) for layer in block.layers}
        assert held == matrices(block)
        entries = sum(layer.in_features * layer.out_features for layer in block.layers.values())
        assert entries == sum(sizes[key] for key in held)


@each_form
@torch.no_grad()
def test_every_layer_is_shown(name: str) -> None:
    """Layer by layer a block computes the same; each layer is called with what it reads, and writes W x + b of it."""
    model = tiny(name)
    for block, inputs in walk(model, batches()):
        shown: dict[str, tuple[Tensor, Tensor]] = {}

        def hook(layer: Any, read: tuple[Tensor, ...], written: Tensor, shown: dict = shown, block: Block = block) -> None:
            shown[next(key for key, one in block.layers.items() if one is layer)] = read[0].clone(), written.clone()

        hooks = [layer.register_forward_hook(hook) for layer in block.layers.values()]
        for hidden, call in zip(inputs.pruned, inputs.calls(block), strict=True):
            before = block(hidden, call)
            shown.clear()
            with block.expose_layers(block.layers):
                torch.testing.assert_close(block(hidden, call), before, rtol=1e-4, atol=1e-5)
            assert set(shown) == set(block.layers)
            for key, (read, wrote) in shown.items():
                layer = block.layer(key)
                wanted = read @ layer.weight.T + (0 if layer.bias is None else layer.bias)
                torch.testing.assert_close(wrote, wanted, rtol=1e-4, atol=1e-5)
        for one in hooks:
            one.remove()


@pytest.mark.parametrize(
    ("name", "method", "pattern"),
    [
        long_unless(name in QUICK, name, method, ("50%", "2:4")[(place + number) % 2])
        for place, name in enumerate(CONFIGS)
        for number, method in enumerate(("sparsegpt", "alps", "published", "sparsellm"))
    ],
)
def test_pruned_exactly(name: str, method: str, pattern: str) -> None:
    """Every layer has its zeros and was solved on tokens; what is in no layer keeps its bits; outputs are finite."""
    model, dense = tiny(name), tiny(name)
    plan = uniform_plan(blocks_of(model), parse_pattern(pattern))
    results = {x.name: x for x in prune_blocks(model, batches(), METHODS[method], plan) if isinstance(x, LayerResult)}
    assert set(results) == set(plan)
    assert all(step.tokens > 0 for step in results.values())
    for block, before in zip(blocks_of(model), blocks_of(dense), strict=True):
        for layer in block.layers:
            full, weight = block.full_name(layer), block.layer(layer).weight
            assert int((weight == 0).sum()) == plan[full].count_removed(weight.shape) == results[full].zeros, full
            if pattern == "2:4":
                assert bool(((weight.unflatten(1, (-1, 4)) == 0).sum(-1) == 2).all()), full
        biases = {block.bias(layer) for layer in block.layers}
        for key, tensor in before.unpruned_parameters().items():
            if key not in biases:
                assert torch.equal(tensor, block.module.get_parameter(key)), key
    with torch.no_grad():
        assert all(bool(model(input_ids=batch).logits.isfinite().all()) for batch in batches())


@pytest.mark.parametrize(
    ("name", "method"),
    [long_unless(name in QUICK, name, ("sparsegpt", "sparsellm")[place % 2]) for place, name in enumerate(CONFIGS)],
)
def test_streamed_as_in_memory(name: str, method: str, tmp_path: Path) -> None:
    """The written files hold the same tensors either way, and load into a model of the same logits."""
    source = tmp_path / "dense"
    tiny(name).save_pretrained(source, max_shard_size="40kB")
    byte_tokenizer().save_pretrained(source)
    folders = [written(source, tmp_path / str(stream), method, offload=stream, sparsity="2:4") for stream in (False, True)]
    whole, streamed = (tensors_of(folder) for folder in folders)
    assert whole.keys() == streamed.keys()
    assert all(torch.equal(whole[key], streamed[key]) for key in whole)
    models = [auto_model(CONFIGS[name]()).from_pretrained(folder).eval() for folder in folders]
    with torch.no_grad():
        assert torch.equal(*[model(input_ids=batches()[0]).logits for model in models])
    found = inspect(str(folders[1]), str(source), "2:4")
    assert found.as_expected
    assert len(found.layers) == sum(len(block.layers) for block in blocks_of(models[0]))


@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text", *HOLDS_EXPERTS])
@torch.no_grad()
def test_one_matrix_of_one_expert(name: str) -> None:
    """A write changes exactly the layer's entries of its parameter, and nothing else in the model."""
    model = of_table(name) if name in ARCHITECTURES else tiny(name)
    block = next(block for block in blocks_of(model) if block.architecture.experts)
    for part in experts_of(block.module.get_submodule(block.architecture.experts)).names:
        layer = f"{block.architecture.experts}.2.{part}"
        before = {key: tensor.clone() for key, tensor in block.module.named_parameters()}
        weight = block.layer(layer).weight.clone()
        block.write(layer, torch.zeros_like(weight))
        changed = {key for key, tensor in block.module.named_parameters() if not torch.equal(tensor, before[key])}
        assert changed == {block.parameter(layer)}
        assert not bool(block.layer(layer).weight.any())
        after = block.module.get_parameter(block.parameter(layer))
        assert int((after != before[block.parameter(layer)]).sum()) == int((weight != 0).sum())
        block.write(layer, weight)
        assert all(torch.equal(tensor, before[key]) for key, tensor in block.module.named_parameters())


@torch.no_grad()
def test_experts_that_are_called_with_scaled_tokens() -> None:
    """Llama 4: an expert's Gram is that of its tokens times the router's score, and of others scaled for their own expert."""
    model = of_table("llama4_text")
    block, inputs = _at(model, 1)
    experts = experts_of(block.module.feed_forward.experts)
    seen: list[Tensor] = []
    hook = block.module.feed_forward.experts.register_forward_pre_hook(lambda _, given: seen.append(given[0].clone()))
    for hidden, call in zip(inputs.pruned, inputs.calls(block), strict=True):
        block(hidden, call)
    hook.remove()
    scaled = torch.cat([repeated.view(4, -1, 32) for repeated in seen], 1)
    member = torch.cat([expert_members(experts, repeated) for repeated in seen])
    assert torch.equal(member.sum(1), torch.ones(80))  # one expert a token
    for number in range(4):
        gram = Gram(32)
        name = f"feed_forward.experts.{number}.gate_proj"
        for captured in inputs.run(block, CaptureRequest([name])):
            gram.update(captured.inputs[name])
        rows = scaled[number][member[:, number]]
        lacking = max(0, 48 - len(rows))
        assert gram.tokens == len(rows) + lacking
        others = scaled.sum(0)[~member[:, number]]
        place = torch.arange(len(others))
        picked = others[(place + 1) * lacking // len(others) > place * lacking // len(others)]
        every = torch.cat([rows, picked])
        torch.testing.assert_close(gram.matrix, every.T @ every / len(every), rtol=1e-4, atol=1e-5)


def _at(model: PreTrainedModel, number: int) -> tuple[Block, Activations]:
    """A block and what enters it."""
    return next((block, inputs) for block, inputs in walk(model, batches()) if block.index == number)


class Switch(nn.Module):
    """A feed-forward part whose experts are a list of modules, as in models with code of their own; the last is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 3, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 32)) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)
        best, out = self.gate(tokens).argmax(-1), torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (mine,) = torch.where(best == number)
            if len(mine):
                out[mine] = expert(tokens[mine])
        return out.view_as(hidden)


@pytest.mark.parametrize("method", ["sparsegpt", "alps", "published", "sparsellm"])
def test_experts_in_a_list(method: str) -> None:
    """Each is solved on the tokens that it is called with; one without any loses its smallest weights, in every method."""
    torch.manual_seed(0)
    model = of_forms(LACKING["starcoder2"])
    for layer in model.model.layers:
        layer.mlp = Switch()
    blocks, dense = blocks_of(model), model.model.layers[0].mlp.experts[3][0].weight.detach().clone()
    assert [block.name for block in blocks] == ["model.layers.0", "model.layers.1"]
    plan = uniform_plan(blocks, parse_pattern("2:4"))
    results = {x.name: x for x in prune_blocks(model, batches(), METHODS[method], plan) if isinstance(x, LayerResult)}
    for block in blocks:
        counts = [results[f"{block.name}.mlp.experts.{number}.0"].tokens for number in range(4)]
        assert sum(counts) == 80
        assert counts[3] == 0
        assert all(int((layer.weight == 0).sum()) == layer.weight.numel() // 2 for layer in block.layers.values())
    groups = dense.unflatten(1, (-1, 4))
    smallest = groups.abs().argsort(-1)[..., :2]
    assert torch.equal(model.model.layers[0].mlp.experts[3][0].weight, groups.scatter(-1, smallest, 0).flatten(1))


def test_what_happens_between_blocks_is_not_overlooked() -> None:
    """RWKV halves the hidden states every so many blocks: its blocks alone are not the model, so it is refused."""
    torch.manual_seed(0)
    made = CONFIGS["rwkv"]()
    made.rescale_every = 1
    model = auto_model(made).from_config(made).eval()
    plan = uniform_plan(blocks_of(model), parse_pattern("2:4"))
    with pytest.raises(UnsupportedModel, match="changes the hidden states between"):
        list(prune_blocks(model, batches(), LayerWise(SparseGPT()), plan))


def test_blocks_that_share_weights_are_refused() -> None:
    """Zamba 2 uses one attention layer in several blocks."""
    torch.manual_seed(0)
    made = CONFIGS["zamba2"]()
    made.layers_block_type, made.num_hidden_layers = ["mamba", "hybrid", "mamba", "hybrid", "mamba", "hybrid"], 6
    made.hybrid_layer_ids = [1, 3, 5]
    with pytest.raises(UnsupportedModel, match=r"layers\.1 and .*layers\.\d share"):
        blocks_of(auto_model(made).from_config(made))


@pytest.mark.parametrize("method", ["sparsegpt", "sparsellm"])
def test_audio_tower_is_unchanged(method: str, tmp_path: Path) -> None:
    """Qwen2-Audio is opened by a class that it has; its language tower is pruned, and all else keeps its bits."""
    made = transformers.Qwen2AudioConfig(
        text_config={**GATED, "model_type": "qwen2"}, audio_config={**SOUND, "max_source_positions": 16}, audio_token_index=255
    )
    torch.manual_seed(0)
    source = tmp_path / "dense"
    transformers.Qwen2AudioForConditionalGeneration(made).save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    folders = [written(source, tmp_path / str(stream), method, offload=stream, sparsity="2:4") for stream in (False, True)]
    dense, whole, streamed = (tensors_of(folder) for folder in (source, *folders))
    assert all(torch.equal(whole[key], streamed[key]) for key in whole)
    changed = {key for key in dense if not torch.equal(dense[key], whole[key])}
    assert len([key for key in changed if key.endswith("weight")]) == 14
    assert not [key for key in changed if "audio" in key or "projector" in key]
    assert inspect(str(folders[0]), str(source), "2:4").as_expected
    notes = json.loads((folders[0] / "sparsellm.json").read_text())["notes"]
    assert [note for note in notes if "different calibration tokens" not in note] == []
