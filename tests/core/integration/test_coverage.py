"""How much of a model is pruned: counted, told where it is a part, and refused before any work where it is too little."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM
from typer.testing import Result

import sparsellm
from sparsellm.errors import UnsupportedModel
from sparsellm.models.blocks import blocks_of
from sparsellm.models.coverage import coverage_of
from tests.conftest import byte_tokenizer, extensions, report_of
from tests.core.integration.test_families import CONFIGS, GATED, batches, tiny

Command = Callable[..., Result]
WORDS = ("--method", "magnitude", "--sparsity", "2:4")


def saved(config: transformers.PreTrainedConfig, folder: Path) -> Path:
    """A random model of a configuration, in a folder with a tokenizer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def bart(tmp_path: Path) -> Path:
    """A decoder with attention to an encoder that a causal model does not have."""
    sizes = {"d_model": 32, "decoder_ffn_dim": 48, "decoder_layers": 2, "decoder_attention_heads": 4, "is_decoder": True}
    config = transformers.BartConfig(vocab_size=260, max_position_embeddings=64, is_encoder_decoder=False, **sizes)
    return saved(config, tmp_path / "bart")


def test_every_matrix_of_a_known_family_is_covered() -> None:
    for name in CONFIGS:
        model = tiny(name)
        found = coverage_of(model, blocks_of(model))
        assert (found.share, found.describe()) == (1.0, ""), name
        matrices = [
            tensor.numel()
            for block in blocks_of(model)
            for key, tensor in block.module.named_parameters()
            if tensor.ndim > 1 and not key.endswith(("mlp.gate.weight", "router.weight", "_bias"))
        ]
        assert found.total == sum(matrices), name


def test_a_matrix_outside_of_all_layers_is_named() -> None:
    """A matrix that no layer covers lowers the share; biases, norms, convolutions, embeddings and routers do not."""
    model = tiny("llama")
    before = coverage_of(model, blocks_of(model))
    for module in (block.module for block in blocks_of(model)):
        module.mixer = nn.Module()
        module.mixer.weight = nn.Parameter(torch.ones(16, 8))
        module.mixer.weight_bias = nn.Parameter(torch.ones(16, 8))
        module.conv, module.places, module.router = nn.Conv1d(4, 8, 3), nn.Embedding(9, 9), nn.Linear(4, 4)
    found = coverage_of(model, blocks_of(model))
    assert found.total - before.total == 2 * 128
    assert found.prunable == before.prunable
    assert list(found.unpruned) == ["model.layers.0.mixer.weight", "model.layers.1.mixer.weight"]
    assert found.uncovered == "model.layers.*.mixer.weight (256 weights)"


def test_a_second_list_of_blocks_is_counted() -> None:
    """Blocks that are not those that are pruned are no less part of the model."""
    model = tiny("llama")
    model.model.others = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2))
    found = coverage_of(model, blocks_of(model))
    assert found.total - found.prunable == 2 * 64
    assert found.unpruned["model.others.0.0.weight"] == 32


def test_shared_parameters_count_once() -> None:
    model = tiny("llama")
    blocks = blocks_of(model)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    found = coverage_of(model, blocks)
    assert found.total == sum(
        tensor.numel() for name, tensor in model.named_parameters() if ".layers." in name and tensor.ndim > 1
    )
    assert found.share == 1.0


@pytest.fixture
def half_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of a family without a line in the table, whose experts are matrices of an unknown form."""
    monkeypatch.setattr("sparsellm.models.architectures.experts_of", lambda module: None)
    monkeypatch.delitem(sparsellm.models.architectures.ARCHITECTURES, "mixtral")
    return saved(transformers.MixtralConfig(**GATED, num_local_experts=4), tmp_path / "dense")


@extensions
@pytest.mark.parametrize("verb", ["prune", "plan"])
def test_a_model_that_is_covered_in_part_is_refused(
    verb: str, half_covered: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its weights are read, with the share and what is not covered."""
    monkeypatch.setattr("sparsellm.checkpoints.loading.Checkpoint.load", lambda *_: pytest.fail("the weights were read"))
    result = command(verb, half_covered, *([tmp_path / "out"] if verb == "prune" else []), *WORDS)
    assert result.exit_code == 1
    message = " ".join(result.stderr.split())
    assert "Only 14.3 % of the matrix weights in the blocks of a MixtralForCausalLM can be pruned" in message
    assert "model.layers.*.mlp.experts.gate_up_proj" in message
    assert "At least 95 %" in message
    assert not (tmp_path / "out").exists()


@extensions
def test_a_part_that_layers_cover_is_told(
    half_covered: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the layers hold enough, they are pruned, and stdout, report and card say how much of the blocks that is."""
    monkeypatch.setattr("sparsellm.models.coverage.MIN_COVERAGE", 0.1)
    out = tmp_path / "out"
    planned = command("plan", half_covered, *WORDS)
    result = command("prune", half_covered, out, *WORDS)
    assert result.exit_code == 0, result.stderr
    found = report_of(out)["coverage"]
    assert found["pruned"] == 2 * (2 * 32 * 32 + 2 * 32 * 16)
    assert found["share"] == found["pruned"] / found["matrix_weights"] < 0.15
    assert set(found["not_covered"]) == {
        f"model.layers.{block}.{name}" for block in range(2) for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    }
    told = f"The pruned layers hold {100 * found['share']:.2f} % of the matrix weights in the blocks. No layer covers"
    for text in (planned.stdout, result.stdout, (out / "README.md").read_text(encoding="utf-8")):
        assert told in " ".join(text.split())


def test_a_part_that_the_user_chooses_is_told(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """--include is no lack of the model's form: no parameter is said to be without a layer, but the share is said."""
    result = command("prune", tiny["llama"], tmp_path / "out", *WORDS, "--include", "mlp.*")
    share = 100 * 3 * 32 * 48 / (3 * 32 * 48 + 2 * 32 * 32 + 2 * 32 * 16)
    assert f"The pruned layers hold {share:.2f} % of the matrix weights in the blocks." in " ".join(result.stdout.split())
    found = report_of(tmp_path / "out")["coverage"]
    assert found["not_covered"] == {}
    assert found["prunable"] == found["matrix_weights"]


def test_nothing_is_told_of_a_whole_model(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    result = command("prune", tiny["llama"], tmp_path / "out", *WORDS)
    assert "matrix weights" not in result.stdout
    assert report_of(tmp_path / "out")["coverage"]["share"] == 1.0


@pytest.mark.parametrize("method", ["sparsegpt", "sparsellm"])
def test_layers_that_text_does_not_reach_are_refused(
    method: str, bart: Path, text_file: Path, tmp_path: Path, command: Command
) -> None:
    """Attention to an encoder that is not there: named by the message, and left dense when the user says so."""
    words = ("--method", method, "--sparsity", "2:4", "--calibration", text_file, "--samples", 2, "--sequence-length", 16)
    result = command("prune", bart, tmp_path / "out", *words)
    assert result.exit_code == 1
    assert "encoder_attn.k_proj is not called when the model reads text" in " ".join(result.stderr.split())
    assert "--exclude 'encoder_attn*'" in " ".join(result.stderr.split())
    skipped = command("prune", bart, tmp_path / "out", *words, "--exclude", "encoder_attn*", "--restart")
    assert skipped.exit_code == 0, skipped.stderr
    assert "of the matrix weights in the blocks" in " ".join(skipped.stdout.split())


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ("images", "cannot be run block by block on text alone"),
        ("never", "does not run model.layers.1 on text"),
        ("twice", "runs model.layers.0 more than once"),
    ],
)
def test_models_that_do_not_run_block_by_block_are_refused(form: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    forward = model.model.forward

    def twice(**words: object) -> object:
        forward(**words)
        return forward(**words)

    if form == "images":
        monkeypatch.setattr(model.model, "forward", lambda pixels, **words: forward(**words))
    elif form == "never":
        monkeypatch.setattr(model.config, "num_hidden_layers", 1)
    else:
        monkeypatch.setattr(model.model, "forward", twice)
    with pytest.raises(UnsupportedModel, match=told):
        sparsellm.prune(model, "sparsegpt", "2:4", calibration=torch.cat([batch[:, :16] for batch in batches()]))


def test_types_that_no_class_opens_are_refused(tmp_path: Path, command: Command) -> None:
    """A configuration that transformers knows, of a model that is no causal language model."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    result = command("prune", tmp_path, tmp_path / "out", *WORDS)
    assert result.exit_code == 1
    assert "no causal language model of type 'vit'" in " ".join(result.stderr.split())


def test_parameters_without_dimensions_are_compared(tmp_path: Path, command: Command) -> None:
    """Apertus learns two numbers of its activation: the output is verified against them too."""
    dense = saved(transformers.ApertusConfig(**GATED), tmp_path / "dense")
    result = command("prune", dense, tmp_path / "out", *WORDS)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    ("config", "share"),
    [(transformers.RecurrentGemmaConfig, 0.98), (transformers.MambaConfig, 1.0), (transformers.JambaConfig, 1.0)],
)
def test_state_space_models_of_usual_sizes_are_covered(config: type[transformers.PreTrainedConfig], share: float) -> None:
    """Decay rates are no matrices; the gates of RecurrentGemma, head by head, are, and a small share of all of them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(num_hidden_layers=8))
    assert share <= coverage_of(model, blocks_of(model)).share <= 1.0
