"""Trainer with fixed masks in two processes, under DDP and under FSDP2."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch
from safetensors.torch import load_file

from sparsellm import fixed_masks
from tests.training import arguments, in_process, pruned_model, steps, token_batches, train, zeros_of


def test_two_processes_train_as_one(server: ForkServerContext, tmp_path: Path) -> None:
    """The gradients are clipped, so the results depend on those of pruned weights if they are not masked."""
    processes = [server.Process(target=in_process, args=(rank, 2, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    zeros = zeros_of(pruned_model())
    trained = train(pruned_model(), arguments(tmp_path / "alone", per_device_train_batch_size=4)).model
    looped = pruned_model()
    optimizer = torch.optim.AdamW(looped.parameters(), lr=1e-2)
    with fixed_masks(looped, optimizer):
        steps(looped, optimizer, token_batches())
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    for name, alone in {"ddp": trained, "fsdp": trained, "fsdp loop": looped}.items():
        tensors = load_file(tmp_path / f"{name}.safetensors")
        assert not torch.equal(tensors["model.norm.weight"], pruned_model().model.norm.weight)
        for key, mask in zeros.items():
            assert torch.equal(tensors[key] == 0, mask), f"{name}: {key}"
            assert torch.equal(alone.get_parameter(key) == 0, mask), key
            torch.testing.assert_close(tensors[key], alone.get_parameter(key), rtol=1e-3, atol=1e-5)
    resumed = load_file(tmp_path / "fsdp resumed.safetensors")
    for key, tensor in load_file(tmp_path / "fsdp.safetensors").items():
        assert torch.equal(resumed[key], tensor), key
    tensors = load_file(tmp_path / "fsdp bf16.safetensors")
    for key, mask in zeros.items():  # accelerate trains float32 copies of bfloat16 weights
        assert tensors[key].dtype == torch.float32
        assert torch.equal(tensors[key] == 0, mask), key
