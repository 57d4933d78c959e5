"""Shared by the tests of training with fixed masks: tiny pruned models, data, and trainers."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from sparsellm import SparsityCallback, fixed_masks
from sparsellm.extensions.recover.training.fixed_masks import pruned_masks

VOCABULARY = 96
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, intermediate_size=24, num_key_value_heads=1, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0),
    "mixtral": MixtralConfig(**SIZES, intermediate_size=24, num_key_value_heads=1, num_local_experts=3),
}
DENSE = ("embed", "lm_head", "wte", "wpe", "gate.weight")


def pruned_model(family: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model, the same one each time, with 2 of every 4 weights along a row removed at random."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[family])  # tests change what they get
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not any(part in name for part in DENSE):
                order = torch.rand(parameter.numel() // 4, 4, generator=generator).argsort(1)
                parameter.masked_fill_((order < 2).view_as(parameter), 0)
    return model.eval()


def loaded_model(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same model, loaded from a folder to which it is written first."""
    if not folder.exists():
        pruned_model(family, dtype).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def zeros_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """The positions of the zeros of each pruned matrix."""
    masks = pruned_masks(model)
    assert len(masks) >= 8
    return masks


def kept_zeros(before: Mapping[str, Tensor], model: torch.nn.Module) -> bool:
    """Whether every zero of before is there; an optimizer in bfloat16 can round other weights to zero."""
    return all(bool((model.get_parameter(name)[mask] == 0).all()) for name, mask in before.items())


def same_zeros(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """Whether two models have zeros in the same places."""
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def sequences(count: int = 16, length: int = 12) -> list[dict[str, Tensor]]:
    """Random token ids."""
    tokens = torch.randint(VOCABULARY, (count, length), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in tokens]


def token_batches() -> list[Tensor]:
    """The same token ids in batches of four sequences."""
    return list(torch.stack([sequence["input_ids"] for sequence in sequences()]).split(4))


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Settings of a short training without a network or a GPU."""
    settings: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **settings | changes)


def train(
    model: PreTrainedModel, settings: TrainingArguments, *callbacks: TrainerCallback, resume: bool | str = False
) -> Trainer:
    """Train with masks held."""
    trainer = Trainer(model, settings, train_dataset=sequences(), callbacks=[SparsityCallback(), *callbacks])
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Tensor]) -> None:
    """A plain loop with clipped gradients."""
    for batch in batches:
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def join_group(rank: int, count: int, folder: Path) -> None:
    """Become one of several processes that train together."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # accelerate asks for them; the group below is the one used
    store = torch.distributed.FileStore(str(folder / "store"), count)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)


def sharding_arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Settings of a training under FSDP2, with each decoder block as a unit.

    accelerate ignores `fsdp` on CPUs, so it is told that the processes have a GPU each; their device stays the CPU.
    """
    settings = arguments(folder, fsdp=True, fsdp_config={"version": 2}, **changes)
    assert settings.device.type == "cpu"
    settings.distributed_state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return settings


def in_process(rank: int, count: int, folder: Path) -> None:
    """Train under DDP and under FSDP2 as one of several processes, and save the results of the first one."""
    join_group(rank, count, folder)
    batch_size = {"per_device_train_batch_size": 4 // count}
    results = {"ddp": train(pruned_model(), arguments(folder, ddp_backend="gloo", **batch_size)).model.state_dict()}
    saving = {"save_strategy": "steps", "save_steps": 2, **batch_size}
    sharded = {"fsdp": train(pruned_model(), sharding_arguments(folder, **saving)).model}
    again = sharding_arguments(folder, **batch_size)
    sharded["fsdp resumed"] = train(pruned_model(), again, resume=str(folder / "checkpoint-2")).model
    mixed = sharding_arguments(folder, bf16=True, **batch_size)
    sharded["fsdp bf16"] = train(pruned_model(dtype=torch.bfloat16), mixed).model
    sharded["fsdp loop"] = looped = pruned_model()
    for block in (*looped.model.layers, looped):
        fully_shard(block)
    optimizer = torch.optim.AdamW(looped.parameters(), lr=1e-2)
    with fixed_masks(looped, optimizer):
        steps(looped, optimizer, [batch.chunk(count)[rank] for batch in token_batches()])
    for name, model in sharded.items():
        assert isinstance(model, FSDPModule)
        results[name] = {key: tensor.full_tensor() for key, tensor in model.state_dict().items()}
    if rank == 0:
        for name, tensors in results.items():
            save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / f"{name}.safetensors")
    torch.distributed.destroy_process_group()
