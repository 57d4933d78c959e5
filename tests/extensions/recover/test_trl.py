"""TRL's SFT and DPO trainers with fixed masks and with masked adapters, on chat data without a network."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from sparsellm import SparsityCallback
from tests.conftest import byte_tokenizer, long_unless
from tests.training import arguments, same_zeros, zeros_of

pytest.importorskip("trl", reason="the trainers are TRL's: pip install 'sparsellm[train]'")
import trl
from peft import LoraConfig, PeftModel

from sparsellm.extensions.recover.peft import merge, sparse_lora

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
QUESTIONS = [{"role": "user", "content": f"what is {number}"} for number in range(8)]
CHATS = [{"messages": [question, {"role": "assistant", "content": "a number"}]} for question in QUESTIONS]
PREFERENCES = [
    {
        "prompt": [question],
        "chosen": [{"role": "assistant", "content": "a number"}],
        "rejected": [{"role": "assistant", "content": "no"}],
    }
    for question in QUESTIONS
]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An attempt to connect fails the test."""
    tried: list[object] = []

    def refuse(*words: object, **_: object) -> None:
        tried.append(words)
        raise OSError("the tests have no network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert not tried


def chat_model() -> PreTrainedModel:
    """A tiny model of bytes, half of its weights removed."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=260, **sizes, num_key_value_heads=1))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.masked_fill_(torch.rand_like(parameter) < 0.5, 0)
    return model


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of bytes, with a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def trainer_of(kind: str, model: Any, folder: Path, *callbacks: SparsityCallback) -> Any:
    """TRL's trainer of a kind."""
    settings = arguments(folder, max_steps=2).to_dict()
    used = {name: settings[name] for name in ("max_steps", "per_device_train_batch_size", "learning_rate", "weight_decay")}
    used |= {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "bf16": False, "max_length": 64}
    trainer, config, data = {
        "SFT": (trl.SFTTrainer, trl.SFTConfig, CHATS),
        "DPO": (trl.DPOTrainer, trl.DPOConfig, PREFERENCES),
    }[kind]
    reference = {"ref_model": chat_model()} if kind == "DPO" and not isinstance(model, PeftModel) else {}
    return trainer(
        model,
        **reference,
        args=config(str(folder), **used),
        train_dataset=Dataset.from_list(data),
        processing_class=chat_tokenizer(),
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize("kind", ["SFT", long_unless(False, "DPO")])
def test_all_weights(kind: str, tmp_path: Path) -> None:
    zeros, before = zeros_of(chat_model()), chat_model().state_dict()
    trainer = trainer_of(kind, chat_model(), tmp_path, SparsityCallback())
    trainer.train()
    after = trainer.model.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in zeros)
    assert same_zeros(zeros, zeros_of(trainer.model))


@pytest.mark.parametrize("kind", [long_unless(False, "SFT"), "DPO"])
def test_masked_adapters(kind: str, tmp_path: Path) -> None:
    """With DPO, the reference is the model without the adapter."""
    zeros, before = zeros_of(chat_model()), chat_model().state_dict()
    adapted = sparse_lora(chat_model(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    trainer = trainer_of(kind, adapted, tmp_path)
    trainer.train()
    merged = merge(trainer.model)
    assert same_zeros(zeros, zeros_of(merged))
    changed = {name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in zeros if "q_proj" in name or "down_proj" in name}
