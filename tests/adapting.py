"""LoRA with masks in several processes, for the tests of DDP and FSDP."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainingArguments

from sparsellm.peft import sparse_lora
from tests.training import arguments, pruned_model, sequences, steps, token_batches

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


def loop(model: PeftModel, batches: Sequence[Tensor]) -> PeftModel:
    """Train in a plain loop with clipped gradients."""
    steps(model, torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-2), batches)
    return model


def in_process(rank: int, count: int, folder: Path) -> None:
    """Train under DDP and under FSDP2 as one of several processes; the first one saves the adapters.

    accelerate leaves FSDP out on CPUs, so its sharding is done here: each decoder block, then the rest.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # accelerate asks for them; the group below is the one used
    store = torch.distributed.FileStore(str(folder / "store"), count)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
    for family in TARGETS:
        settings = arguments(
            folder, per_device_train_batch_size=4 // count, ddp_backend="gloo", ddp_find_unused_parameters=True
        )
        results = {"ddp": adapter_of(train(adapted_model(family), settings))}
        model = adapted_model(family)
        for block in (*model.get_base_model().model.layers, model):
            fully_shard(block)
        results["fsdp"] = adapter_of(loop(model, [batch.chunk(count)[rank] for batch in token_batches()]))
        if rank == 0:
            for name, tensors in results.items():
                save_file({key: x.clone() for key, x in tensors.items()}, folder / f"{family} {name}.safetensors")
    torch.distributed.destroy_process_group()
