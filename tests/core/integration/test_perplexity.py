"""Perplexity against the model's own loss, window by window."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
)

import sparsellm
from sparsellm.errors import InvalidSetting, NonFinite, UnsupportedModel
from sparsellm.evaluation.perplexity import streamed_perplexity
from sparsellm.evaluation.perplexity import token_perplexity as perplexity
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.texts.samples import test_windows
from sparsellm.texts.texts import read_text
from tests.conftest import SHARED

VOCABULARY, LENGTH = 96, 24


def small(family: str, dtype: torch.dtype = torch.float32) -> OPTForCausalLM | LlamaForCausalLM:
    """A model of two blocks with random weights, large enough that windows differ in their loss; dropout is on."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    places = {"max_position_embeddings": LENGTH}
    if family == "opt":
        config = OPTConfig(**sizes, **places, ffn_dim=64, word_embed_proj_dim=32, dropout=0.5, init_std=0.2)
        return OPTForCausalLM(config).to(dtype).eval()
    config = LlamaConfig(**sizes, **places, intermediate_size=48, attention_dropout=0.5, initializer_range=0.2)
    return LlamaForCausalLM(config).to(dtype).eval()


def windows(count: int = 7) -> Tensor:
    return torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def slow_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """(windows,) float64: the loss that the model itself computes, one window at a time."""
    return torch.tensor([float(model(window[None], labels=window[None]).loss) for window in windows], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_equals_the_models_own_loss(family: str, dtype: torch.dtype) -> None:
    """The mean of the windows' losses, exponentiated, with the standard error of that mean times it."""
    model = small(family, dtype)
    losses = slow_losses(model, windows())
    found = perplexity(model, windows(), "random", batch=1)
    assert found.value == pytest.approx(float(losses.mean().exp()), rel=1e-5)
    assert found.standard_error == pytest.approx(found.value * float(losses.std()) / math.sqrt(7), rel=1e-3)
    assert (found.windows, found.length, found.source) == (7, LENGTH, "random")
    assert found.seconds > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_batch_changes_nothing(dtype: torch.dtype) -> None:
    """Any batch gives the same figures, but for the rounding of the model's dtype."""
    model = small("opt", dtype)
    alone = perplexity(model, windows(), batch=1)
    for batch in (2, 7, 100, None):
        found = perplexity(model, windows(), batch=batch)
        assert found.value == pytest.approx(alone.value, rel=1e-5 if dtype == torch.float32 else 1e-2)
        assert found.standard_error == pytest.approx(alone.standard_error, rel=1e-3 if dtype == torch.float32 else 0.1)


def test_the_batch_keeps_the_logits_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many windows at a time as fit, and one where none does; progress is told after each."""
    for limit, steps in ((3 * LENGTH * VOCABULARY * 4, [3, 6, 7]), (1, [1, 2, 3, 4, 5, 6, 7])):
        monkeypatch.setattr("sparsellm.evaluation.perplexity.LOGITS_MEMORY", limit)
        told: list[tuple[int, int]] = []
        perplexity(small("opt"), windows(), progress=lambda done, total, told=told: told.append((done, total)))
        assert told == [(step, 7) for step in steps]


def test_leaves_the_model_as_it_was() -> None:
    """Dropout is off while measuring; the training mode is back afterwards, after an error too; no gradients."""
    model = small("opt").train()
    first, second = perplexity(model, windows()), perplexity(model, windows())
    assert first.value == second.value
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())

    def fails(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perplexity(model, windows(), progress=fails)
    assert model.training


def test_one_window_has_no_standard_error() -> None:
    found = perplexity(small("llama"), windows(1))
    assert math.isfinite(found.value)
    assert found.standard_error is None


def test_an_infinite_perplexity_is_a_result() -> None:
    """Logits that are finite but ruinous give infinity; NaN is an error that names the window."""
    model = small("opt")
    with torch.no_grad():
        model.model.decoder.final_layer_norm.weight.mul_(1e6)
    found = perplexity(model, windows())
    assert found.value == math.inf
    assert found.standard_error is None
    with torch.no_grad():
        model.model.decoder.embed_positions.weight[5] = math.nan
    with pytest.raises(NonFinite, match="window 0"):
        perplexity(model, windows())


def test_nothing_but_tokens_is_passed() -> None:
    """No mask, so that each window is seen as the codes see it, and no cache is built."""

    class Uniform(nn.Module):
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=VOCABULARY))

        def get_input_embeddings(self) -> nn.Embedding:
            return nn.Embedding(VOCABULARY, 1)

        def forward(self, **words: Tensor | bool) -> SimpleNamespace:
            assert words.keys() == {"input_ids", "use_cache"}
            assert words["use_cache"] is False
            return SimpleNamespace(logits=torch.zeros(*words["input_ids"].shape, VOCABULARY))

    found = perplexity(Uniform(), windows())  # type: ignore[arg-type]
    assert found.value == pytest.approx(VOCABULARY)
    assert found.standard_error == pytest.approx(0, abs=1e-6)


def not_causal(kind: str) -> PreTrainedModel:
    """A model in which a token changes what is predicted before it: in all blocks, or in the last one only."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": LENGTH}
    gemma = {**sizes, "num_key_value_heads": 2, "head_dim": 8}
    if kind == "gemma3":
        layers = ["sliding_attention", "full_attention"]
        config = Gemma3TextConfig(**gemma, use_bidirectional_attention=True, sliding_window=4, layer_types=layers)
        return Gemma3ForCausalLM(config).eval()
    if kind == "paligemma":
        tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision = {**tower, "image_size": 28, "patch_size": 14, "projection_dim": 32}
        config = PaliGemmaConfig(text_config={**gemma, "model_type": "gemma"}, vision_config=vision, image_token_index=95)
        return PaliGemmaForConditionalGeneration(config).eval()
    if kind == "bert":
        return BertLMHeadModel(BertConfig(**sizes)).eval()
    model = small("llama")
    norm = model.model.layers[-1].input_layernorm
    norm.register_forward_hook(lambda _, inputs, output: output + 0.1 * output.roll(-1, 1))
    return model


@pytest.mark.parametrize("kind", ["gemma3", "paligemma", "last block"])
def test_a_model_that_is_not_causal_has_no_figures(kind: str) -> None:
    """By what it computes, whatever its type: in memory, by block, of a run. Pruning it is legal, and noted."""
    model, tokens = not_causal(kind), windows()
    settings = {"method": "wanda", "sparsity": "50%", "calibration": tokens, "samples": 7}
    for measure in (
        lambda: sparsellm.perplexity(model, tokens),
        lambda: sparsellm.evaluate(model, tokens),
        lambda: streamed_perplexity(LoadedModel.of(model), tokens),
        lambda: sparsellm.prune(model, evaluate=tokens, **settings),
    ):
        with pytest.raises(UnsupportedModel, match="not causal"):
            measure()
    assert any("not causal" in note for note in sparsellm.prune(model, **settings).report.notes)


def test_bert_is_not_causal() -> None:
    """It has the head of a language model, and attends in both directions unless it `is_decoder`."""
    with pytest.raises(UnsupportedModel, match="not causal"):
        sparsellm.perplexity(not_causal("bert"), windows())


@pytest.mark.parametrize("shape", [(0, 8), (3, 1), (8,), (1, 2, 8)])
def test_windows_that_cannot_be(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidSetting, match="`windows`"):
        perplexity(small("opt"), torch.zeros(shape, dtype=torch.long))


def test_another_models_tokens() -> None:
    with pytest.raises(InvalidSetting, match=r"`windows` .*96"):
        perplexity(small("opt"), torch.full((2, 8), VOCABULARY))


@pytest.mark.long
def test_a_trained_model_on_wikitext2() -> None:
    """The dense figure of the shared OPT, known from before; the mean over windows is the model's own."""
    folder = SHARED / "models/wt2-opt"
    if not folder.exists():
        pytest.skip(f"{folder} is not here: it is never committed")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = read_text(str(SHARED / "data/wikitext-2/test.txt"), "test")
    tokens = test_windows(text, AutoTokenizer.from_pretrained(folder), 256, limit=40).windows
    found = perplexity(model, tokens, text.source)
    assert found.value == pytest.approx(42.0, abs=0.1)
    assert found.standard_error == pytest.approx(2.0, abs=1.0)
    assert found.value == pytest.approx(float(slow_losses(model.eval(), tokens).mean().exp()), rel=1e-5)
