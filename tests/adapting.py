"""LoRA with masks in several processes, for the tests of DDP and FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainingArguments

from sparsellm.extensions.recover.peft import sparse_lora
from sparsellm.extensions.recover.training.fixed_masks import FixedMasks
from tests.training import arguments, join_group, pruned_model, sequences, sharding_arguments

TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ["q_proj", "down_proj"]},
    "mixtral": {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}


def adapted_model(family: str) -> PeftModel:
    """The tiny pruned model with an adapter, the same one each time."""
    model = pruned_model(family)
    torch.manual_seed(3)
    return sparse_lora(model, LoraConfig(r=4, lora_alpha=8, **TARGETS[family])).train()


def adapter_of(model: PeftModel) -> dict[str, Tensor]:
    """The factors, whole where they are sharded."""
    trained = {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in trained.items()}


def train(model: PeftModel, settings: TrainingArguments) -> PeftModel:
    """Train by Trainer."""
    Trainer(model, settings, train_dataset=sequences()).train()
    return model


def in_process(rank: int, count: int, folder: Path) -> None:
    """Train under DDP and under FSDP2 as one of several processes; the first one saves the adapters."""
    join_group(rank, count, folder)
    batch_size = {"per_device_train_batch_size": 4 // count}
    results = {}
    for family in TARGETS:
        settings = arguments(folder, ddp_backend="gloo", ddp_find_unused_parameters=True, **batch_size)
        results[f"{family} ddp"] = adapter_of(train(adapted_model(family), settings))
        model = train(adapted_model(family), sharding_arguments(folder, **batch_size))
        assert isinstance(model, FSDPModule)
        FixedMasks(model)  # which merges copies of the sharded layers, to see that they keep their zeros
        results[f"{family} fsdp"] = adapter_of(model)
    if rank == 0:
        for name, tensors in results.items():
            save_file({key: x.clone() for key, x in tensors.items()}, folder / f"{name}.safetensors")
    torch.distributed.destroy_process_group()
