"""The measurement of decoding speeds, on a clock that the models move, and the dense forms beside a packed model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparsellm.extensions.packed.formats import kernel_library, kernels, linear
from sparsellm.extensions.packed.formats.linear import PackedLinear
from sparsellm.extensions.packed.record import CEILING, PACKED, TORCH
from sparsellm.extensions.packed.speed import measure_speeds, step_weights, unpacked, weight_bytes, with_own_kernel

READ = 1000
"""Bytes a second that the made-up memory delivers to a thread."""


def packed_model(folder: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The model of a folder with about half of its weights removed and its blocks' layers packed; the same at each call."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and "lm_head" not in name:
            weight = layer.weight.data.masked_fill(torch.rand(layer.weight.shape, generator=generator) < 0.5, 0)
            model.set_submodule(name, PackedLinear.from_dense(weight, layer.bias))
    return model.eval()


class Timed(nn.Module):
    """A model of 25 float32 weights and a vocabulary of 7 that takes some seconds of a clock for each token of a sequence."""

    def __init__(self, seconds: float, clock: list[float]) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(7, 5), nn.Linear(5, 5, bias=False)
        self.seconds, self.clock = seconds, clock

    def forward(self, tokens: Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
        assert use_cache
        self.clock[0] += self.seconds * tokens.shape[1]
        return SimpleNamespace(logits=torch.zeros(*tokens.shape, 7), past_key_values=())


def test_speeds_are_tokens_of_all_sequences_by_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the threads that are asked for, which are as before afterwards."""
    clock, before = [0.0], torch.get_num_threads()
    monkeypatch.setattr("sparsellm.extensions.packed.speed.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(
        kernel_library, "read_seconds", lambda weights: sum(x.nbytes for x in weights) / (READ * torch.get_num_threads())
    )
    models = {TORCH: Timed(4, clock), PACKED: Timed(1, clock)}
    speeds, bandwidth = measure_speeds(models, batches=[1, 3], threads=[1, 2], prompt=6, tokens=5)
    assert torch.get_num_threads() == before
    assert bandwidth == {1: READ, 2: 2 * READ}
    for speed in speeds:
        if speed.form == CEILING:  # 25 weights of 4 bytes are read for each token of all sequences
            assert speed.decode == speed.batch * speed.threads * READ / 100
            assert speed.prefill is None
        else:
            seconds = {TORCH: 4, PACKED: 1}[speed.form]
            assert (speed.decode, speed.prefill) == (speed.batch / seconds, speed.batch / seconds)
    places = [(speed.form, speed.threads, speed.batch) for speed in speeds]
    assert places == [(form, t, b) for t in (1, 2) for b in (1, 3) for form in (TORCH, PACKED, CEILING)]


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_decoded_weights_give_the_logits_of_packed_ones(tiny: dict[str, Path], family: str) -> None:
    packed = packed_model(tiny[family], torch.float32)
    dense, tokens = unpacked(packed).eval(), torch.arange(12)[None]
    assert not any(isinstance(module, PackedLinear) for module in dense.modules())
    assert any(isinstance(module, PackedLinear) for module in packed.modules()), "the packed model is unchanged"
    with torch.no_grad():
        torch.testing.assert_close(dense(tokens).logits, packed(tokens).logits, rtol=1e-5, atol=1e-5)
    assert dense.get_input_embeddings().weight is packed.get_input_embeddings().weight
    original = AutoModelForCausalLM.from_pretrained(tiny[family], dtype=torch.float32)
    assert weight_bytes(dense) == weight_bytes(original) > weight_bytes(packed)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_step_reads_every_matrix_and_the_head_once(tiny: dict[str, Path], family: str) -> None:
    """Counted from the names: tied embeddings are the head; OPT's positions are looked up."""
    model = AutoModelForCausalLM.from_pretrained(tiny[family], dtype=torch.float32)
    names = [name for name, _ in model.named_parameters() if "embed_positions" not in name]
    assert any("embed_tokens" in name for name in names), "the head is tied to the embeddings"
    assert not any("lm_head" in name for name in names)
    assert sorted(map(id, step_weights(model))) == sorted(id(model.get_parameter(name)) for name in names)


def test_embeddings_that_are_not_the_head_are_not_read() -> None:
    weights = step_weights(nn.Sequential(nn.Embedding(100, 5), nn.Linear(5, 100, bias=False)))
    assert [weight.nbytes for weight in weights] == [2000]


def test_the_own_kernel_takes_bfloat16_and_few_tokens(tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def dense_matmul(x: Tensor, weight: Tensor) -> Tensor:
        calls.append(len(x))
        return x @ weight.T

    monkeypatch.setattr(linear, "dense_matmul", dense_matmul)
    monkeypatch.setattr(linear, "is_faster_dense", lambda tokens: tokens == 4)
    monkeypatch.setattr(kernels, "instruction_sets", lambda: ["avx512"])
    model = AutoModelForCausalLM.from_pretrained(tiny["opt"], dtype=torch.bfloat16).eval()
    copied, layers = with_own_kernel(model), sum(isinstance(module, nn.Linear) for module in model.modules())
    assert copied is not None
    for tokens in (1, 4, 5, linear.DENSE_TOKENS[-1] + 1):
        calls.clear()
        with torch.no_grad():
            logits = copied(torch.arange(tokens)[None]).logits
            assert calls == ([tokens] * layers if tokens <= linear.DENSE_TOKENS[-1] else [])
            torch.testing.assert_close(logits, model(torch.arange(tokens)[None]).logits, rtol=0.02, atol=0.02)
    head = copied.get_output_embeddings()
    head.by_kernel = False  # as in a packed model: where the kernel was measured to be faster
    for tokens, count in ((4, 1), (5, 0)):
        calls.clear()
        with torch.no_grad():
            head(torch.ones(tokens, head.in_features, dtype=torch.bfloat16))
        assert len(calls) == count
    assert weight_bytes(copied) == weight_bytes(model)
    assert with_own_kernel(AutoModelForCausalLM.from_pretrained(tiny["llama"], dtype=torch.float32)) is None
    monkeypatch.setattr(kernels, "instruction_sets", list)
    assert with_own_kernel(model) is None
