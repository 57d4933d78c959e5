"""Models that see, families that the table lacks, and checkpoints as they come."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from typer.testing import Result

from sparsellm.errors import UnsupportedModel
from sparsellm.methods import BlockResult, EpochResult, LayerResult
from sparsellm.methods.layerwise import LayerWise
from sparsellm.models.architectures import ARCHITECTURES, Architecture
from sparsellm.models.blocks import blocks_of
from sparsellm.models.feedforward import PlainFeedForward
from sparsellm.outputs.inspection import inspect
from sparsellm.recipes.plan import uniform_plan
from sparsellm.solvers import LayerSolver, Magnitude, Wanda
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.patterns import NM, Unstructured, parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram
from tests.conftest import byte_tokenizer, long_unless
from tests.core.integration.test_families import GATED, METHODS, batches, config, entering, tensors_of, tiny, written
from tests.pruning import prune_blocks, walk

VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 8}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
SEES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llava": lambda: transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**GATED),
        vision_config=transformers.CLIPVisionConfig(**VISION, patch_size=4),
        image_token_index=255,
    ),
    "llava-qwen2": lambda: transformers.LlavaConfig(
        text_config=transformers.Qwen2Config(**GATED),
        vision_config=transformers.CLIPVisionConfig(**VISION, patch_size=4),
        image_token_index=255,
    ),
    "qwen2_vl": lambda: transformers.Qwen2VLConfig(
        text_config={**GATED, "rope_parameters": ROPE},
        vision_config={"depth": 3, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
    ),
    "qwen2_5_vl": lambda: transformers.Qwen2_5_VLConfig(
        text_config={**GATED, "rope_parameters": ROPE},
        vision_config={"depth": 3, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24},
    ),
}
"""The towers that see have more layers than the language model's: these must not be taken for the blocks."""

LACKING: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt_bigcode": config("GPTBigCode", vocab_size=260, n_embd=32, n_head=4, n_layer=2, n_positions=64, initializer_range=0.2),
    "starcoder2": config("Starcoder2", **GATED),
    "qwen2_moe": config(
        "Qwen2Moe", **GATED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "llava-starcoder2": lambda: transformers.LlavaConfig(
        text_config=transformers.Starcoder2Config(**GATED),
        vision_config=transformers.CLIPVisionConfig(**VISION, patch_size=4),
        image_token_index=255,
    ),
}
"""Families without a line of the table. Whoever adds one here to it takes another."""


def random(make: Callable[[], PreTrainedConfig]) -> PreTrainedModel:
    """A tiny random model."""
    torch.manual_seed(0)
    made = make()
    auto = AutoModelForCausalLM if made.get_text_config() is made else AutoModelForImageTextToText
    return auto.from_config(made).eval()


@pytest.mark.parametrize("name", SEES)
def test_towers_are_walked_as_the_model_runs(name: str) -> None:
    """The blocks are the language tower's, described by the table, and called as an ordinary pass of a text calls them."""
    model = random(SEES[name])
    blocks = blocks_of(model)
    assert [block.name for block in blocks] == ["model.language_model.layers.0", "model.language_model.layers.1"]
    assert all(block.architecture.known and block.architecture.feed_forward_parts for block in blocks)
    wanted = entering(model)
    for block, inputs in walk(model, batches()):
        assert all(torch.equal(a, b) for a, b in zip(inputs.pruned, wanted[block.index], strict=True))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        long_unless(place % 2 == number, name, method)
        for place, name in enumerate(SEES)
        for number, method in enumerate(("sparsegpt", "sparsellm"))
    ],
)
def test_vision_tower_is_unchanged(name: str, method: str, tmp_path: Path) -> None:
    """Streamed and in memory: the language tower has its zeros, all else is bit-identical, and the files load again."""
    source = tmp_path / "dense"
    random(SEES[name]).save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    folders = [written(source, tmp_path / place, method, offload=place == "streamed") for place in ("whole", "streamed")]
    dense, whole, streamed = (tensors_of(folder) for folder in (source, *folders))
    assert dense.keys() == whole.keys() == streamed.keys()
    assert all(torch.equal(whole[key], streamed[key]) for key in whole)
    other = {key for key in dense if not torch.equal(dense[key], whole[key])}
    assert len([key for key in other if key.endswith("weight")]) == 14
    assert not [key for key in other if "visual" in key or "vision" in key or "projector" in key or "embed" in key]
    assert inspect(str(folders[0]), str(source), "60%").as_expected
    again = AutoModelForImageTextToText.from_pretrained(folders[1]).eval()
    with torch.no_grad():
        assert bool(again(input_ids=batches()[0]).logits.isfinite().all())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", LACKING)
def test_unknown_families_prune_layer_by_layer(name: str, method: str) -> None:
    """The longest list of like modules (of the language tower) is the blocks; every linear layer is pruned; nothing coupled."""
    assert not {name, LACKING[name]().get_text_config().model_type} & set(ARCHITECTURES)
    model, dense = random(LACKING[name]), random(LACKING[name])
    blocks = blocks_of(model)
    assert len(blocks) == 2
    assert "vision" not in blocks[0].name
    linear = {full for full, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    within = {full for full in linear if full.startswith(blocks[0].name.rsplit(".", 1)[0])}
    plan = uniform_plan(blocks, parse_pattern("2:4"))
    routers = {full for full in within if full.endswith("gate")}
    assert within - routers <= set(plan)
    steps = list(prune_blocks(model, batches(), METHODS[method], plan))
    assert {step.name for step in steps if isinstance(step, LayerResult)} == set(plan)
    for block in blocks:
        for layer in block.layers:
            weight = block.layer(layer).weight
            assert int((weight == 0).sum()) == weight.numel() // 2
    assert not any(isinstance(step, EpochResult) for step in steps)
    notes = {step.note for step in steps if isinstance(step, BlockResult)}
    assert len(notes) == 1
    assert "not known" in notes.pop()
    for full in routers:
        assert torch.equal(model.get_parameter(f"{full}.weight"), dense.get_parameter(f"{full}.weight"))
    with torch.no_grad():
        assert bool(model(input_ids=batches()[0]).logits.isfinite().all())


def test_the_report_says_that_nothing_was_coupled(tmp_path: Path, text_file: Path, command: Callable[..., Result]) -> None:
    """The default on an unknown family, from the command line: pruned, and told on stderr, in the report and the model card."""
    source, output = tmp_path / "dense", tmp_path / "out"
    random(LACKING["starcoder2"]).save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    words = ("--sparsity", "2:4", "--calibration", text_file, "--samples", 4, "--sequence-length", 32, "--offload")
    result = command("prune", source, output, *words)
    assert result.exit_code == 0, result.stderr
    for text in (" ".join(result.stderr.split()), (output / "README.md").read_text(), (output / "sparsellm.json").read_text()):
        assert "pruned one by one, since its model family is not known" in text
    assert inspect(str(output), str(source), "2:4").as_expected


def test_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without a list of like modules is refused, with what to do about it."""
    model = random(LACKING["starcoder2"])
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(UnsupportedModel, match="ARCHITECTURES"):
        blocks_of(model)


def test_an_entry_in_the_table_describes_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that the table lacks, described by its user, is coupled like any other, in memory and streamed."""
    described = Architecture(
        blocks="model.layers",
        groups=(
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("self_attn.o_proj",),
            ("mlp.c_fc",),
            ("mlp.c_proj",),
        ),
        feed_forward=PlainFeedForward(up="mlp.c_fc", out_proj="mlp.c_proj"),
        activation="hidden_act",
    )
    monkeypatch.setitem(ARCHITECTURES, "starcoder2", described)
    source = tmp_path / "dense"
    random(LACKING["starcoder2"]).save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    folders = [written(source, tmp_path / str(stream), "sparsellm", offload=stream, sparsity="2:4") for stream in (False, True)]
    one, other = (tensors_of(folder) for folder in folders)
    assert all(torch.equal(one[key], other[key]) for key in one)
    report = json.loads((folders[0] / "sparsellm.json").read_text())
    assert [note for note in report["notes"] if "different calibration tokens" not in note] == []
    assert all(block["epochs"] for block in report["blocks"])
    assert inspect(str(folders[0]), str(source), "2:4").as_expected


def halves(weight: Tensor) -> Tensor:
    """A weight with half of its entries removed at random, rows and columns unevenly."""
    keep = torch.rand(weight.shape, generator=torch.Generator().manual_seed(3)) > torch.linspace(0.2, 0.8, weight.shape[1])
    return weight * keep


@pytest.mark.parametrize("pattern", [Unstructured(0.7), Unstructured(0.3), NM(2, 4)], ids=str)
@pytest.mark.parametrize(
    "solver", [Magnitude(), Wanda(), SparseGPT(), FastADMM(), ALPS(), ALPS.accurate()], ids=lambda x: type(x).__name__
)
def test_what_is_gone_stays_gone(solver: LayerSolver, pattern: Unstructured | NM) -> None:
    """Every solver: old zeros stay, the count is the pattern's where there is room for it, and N:M holds in every group."""
    generator = torch.Generator().manual_seed(0)
    weight, gram = halves(torch.randn(24, 32, generator=generator)), Gram(32)
    gram.update(torch.randn(200, 32, generator=generator) @ torch.randn(32, 32, generator=generator))
    gone = weight == 0
    found = solver.solve(LayerProblem(weight, gram, pruned_mask=gone), pattern)
    assert bool((found[gone] == 0).all())
    zeros = int((found == 0).sum())
    if isinstance(pattern, NM):
        groups = (found == 0).unflatten(1, (-1, 4)).sum(-1)
        assert torch.equal(groups, gone.unflatten(1, (-1, 4)).sum(-1).clamp(min=2))
    elif pattern.sparsity > 0.5 and not isinstance(solver, (Wanda, SparseGPT)):  # those decide by row, or by block of columns
        assert zeros == pattern.count_removed(weight.shape)
    else:
        assert zeros >= max(pattern.count_removed(weight.shape), int(gone.sum()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral"])
def test_sparse_models_stay_sparse(name: str, method: str) -> None:
    """With `keep_zeros` a second pruning keeps the first one's zeros in every layer; without, values may come back."""
    model = tiny(name)
    list(prune_blocks(model, batches(), LayerWise(Magnitude()), uniform_plan(blocks_of(model), parse_pattern("40%"))))
    before = {block.full_name(key): layer.weight == 0 for block in blocks_of(model) for key, layer in block.layers.items()}
    chosen = type(METHODS[method])(**{**vars(METHODS[method]), "keep_zeros": True})
    list(prune_blocks(model, batches(), chosen, uniform_plan(blocks_of(model), parse_pattern("60%"))))
    for block in blocks_of(model):
        for key, layer in block.layers.items():
            zero = layer.weight == 0
            assert bool(zero[before[block.full_name(key)]].all()), key
            if method == "wanda":  # which decides row by row: a row that had lost more than that keeps its zeros
                share, lost = 0.6 * zero.shape[1], before[block.full_name(key)].sum(1)
                assert bool((zero.sum(1) >= lost.clamp(min=int(share))).all()), key
                assert bool((zero.sum(1) <= lost.clamp(min=int(share) + 1)).all()), key
            else:
                assert int(zero.sum()) == round(0.6 * zero.numel()), key


def test_keep_zeros_from_the_command_line(tmp_path: Path, text_file: Path, command: Callable[..., Result]) -> None:
    """The option reaches the method: half pruned by magnitude, then more by the default, the first zeros still there."""
    source, half, more = (tmp_path / name for name in ("dense", "half", "more"))
    tiny("llama").save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    assert command("prune", source, half, "--method", "magnitude", "--sparsity", "40%").exit_code == 0
    words = (
        "--calibration",
        text_file,
        "--samples",
        4,
        "--sequence-length",
        32,
        "--set",
        "rounds=0",
        "--set",
        "solver=sparsegpt",
    )
    assert command("prune", half, more, "--sparsity", "60%", "--keep-zeros", *words).exit_code == 0
    one, other = tensors_of(half), tensors_of(more)
    assert all(bool((other[key][one[key] == 0] == 0).all()) for key in one if key.endswith("proj.weight"))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        long_unless(number in (place, place - 2), name, form)
        for place, name in enumerate(("gpt2", "phi3", "mixtral", "bloom"))
        for number, form in enumerate(("bin", "float16", "bfloat16"))
    ],
)
def test_checkpoints_keep_their_form(name: str, form: str, tmp_path: Path) -> None:
    """.bin files and 16-bit weights of fused layers, transposed ones and experts: streamed as in memory, dtypes kept."""
    source = tmp_path / "dense"
    model = tiny(name) if form == "bin" else tiny(name, getattr(torch, form))
    model.save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    if form == "bin":
        torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
        (source / "model.safetensors").unlink()
    folders = [written(source, tmp_path / str(stream), "sparsegpt", offload=stream) for stream in (False, True)]
    one, other = (tensors_of(folder) for folder in folders)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert {tensor.dtype for tensor in one.values()} == {model.dtype}
    assert inspect(str(folders[1]), str(source), "60%").as_expected


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_model_with_its_own_code_is_pruned(tmp_path: Path, command: Callable[..., Result]) -> None:
    """Refused as it comes; run where it is trusted, streamed too; the code comes along, so that the output loads as well."""
    source = tmp_path / "dense"
    tiny("llama").save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    (source / "modeling_own.py").write_text(CODE)
    raw = json.loads((source / "config.json").read_text())
    raw |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    raw["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (source / "config.json").write_text(json.dumps(raw))
    words = ("--method", "magnitude", "--sparsity", "2:4")
    refused = command("prune", source, tmp_path / "out", *words)
    assert refused.exit_code == 1
    assert "--trust-remote-code" in refused.stderr
    for place in ("--no-offload", "--offload"):
        output = tmp_path / place
        result = command("prune", source, output, *words, "--trust-remote-code", place)
        assert result.exit_code == 0, result.stderr
        again = AutoModelForCausalLM.from_pretrained(output, trust_remote_code=True)
        assert type(again).__name__ == "OwnForCausalLM"
        assert int((again.model.layers[0].mlp.up_proj.weight == 0).sum()) == 48 * 16
        assert command("inspect", output, "--against", source, "--trust-remote-code", "--expect", "2:4").exit_code == 0


def test_experts_that_few_tokens_reach(tmp_path: Path) -> None:
    """A run whose router sends almost all to two experts says of the others what they were shown, and prunes them exactly."""
    source = tmp_path / "dense"
    model = tiny("olmoe")
    with torch.no_grad():
        for block in blocks_of(model):
            router = block.module.get_submodule("mlp.gate")
            router.weight[2:] *= 1e-3
    model.save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    output = written(source, tmp_path / "out", "sparsellm")
    report = json.loads((output / "sparsellm.json").read_text())
    told = [note for note in report["notes"] if "fewer tokens than their layers have inputs" in note]
    assert len(told) == 1
    layers = [layer for block in report["blocks"] for layer in block["layers"] if ".experts." in layer["name"]]
    assert {layer["zeros"] for layer in layers} == {round(0.6 * 32 * 48)}
    assert any(layer["routed_tokens"] < layer["tokens"] for layer in layers)
    by_block = [
        sum(layer["routed_tokens"] for layer in block["layers"] if "gate_proj" in layer["name"]) for block in report["blocks"]
    ]
    assert by_block == [80 * 2] * 2


def test_experts_of_another_form_are_refused() -> None:
    """Parameters of shapes that do not fit are refused at once, a forward that is none of those known on its first batch."""
    model = tiny("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj[:3].clone())
    with pytest.raises(UnsupportedModel, match="MixtralExperts"):
        blocks_of(model)
    model = tiny("mixtral")
    experts = model.model.layers[1].mlp.experts
    own = experts.forward
    experts.forward = lambda *given: 2 * own(*given)
    plan = uniform_plan(blocks_of(model), parse_pattern("2:4"))
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1, a MixtralExperts"):
        list(prune_blocks(model, batches(), LayerWise(SparseGPT()), plan))
