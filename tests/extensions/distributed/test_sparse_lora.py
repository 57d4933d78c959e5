"""LoRA with masks in two processes, under DDP and under FSDP2; and the kinds of sharding that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from sparsellm.errors import InvalidSetting, UnsupportedModel
from tests.training import arguments, pruned_model, same_zeros, token_batches, zeros_of

pytest.importorskip("peft", reason="LoRA needs PEFT: pip install 'sparsellm[train]'")
from peft import LoraConfig
from peft.utils.other import fsdp_auto_wrap_policy

from sparsellm.extensions.recover.peft import merge, sparse_lora
from tests.adapting import TARGETS, adapted_model, adapter_of, in_process, train


def test_two_processes_adapt_as_one(server: ForkServerContext, tmp_path: Path) -> None:
    """The factors are those of one process on the same global batches, and merging them keeps every zero."""
    processes = [server.Process(target=in_process, args=(rank, 2, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    alone = {}
    for family in TARGETS:
        settings = arguments(tmp_path / "alone", per_device_train_batch_size=4)
        alone[family] = adapter_of(train(adapted_model(family), settings))
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    for family, kind in product(alone, ("ddp", "fsdp")):
        name, expected = f"{family} {kind}", alone[family]
        model, initial = adapted_model(family), adapter_of(adapted_model(family))
        tensors = load_file(tmp_path / f"{name}.safetensors")
        assert tensors.keys() == expected.keys() == initial.keys()
        for key, tensor in tensors.items():
            assert not torch.equal(tensor, initial[key]), f"{name}: {key} was not trained"
            torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=1e-5)
        model.load_state_dict(tensors, strict=False)
        assert same_zeros(zeros_of(pruned_model(family)), zeros_of(merge(model)))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("part", ["q_proj.base_layer", "q_proj.lora_A.default"])
def test_a_layer_that_is_sharded_in_parts_is_refused(part: str) -> None:
    model = adapted_model("llama")
    for name, module in model.named_modules():
        if name.endswith(part):
            fully_shard(module)
    fully_shard(model)
    with pytest.raises(UnsupportedModel, match="decoder blocks"):
        model(input_ids=token_batches()[0])


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("policy", [None, fsdp_auto_wrap_policy], ids=["one unit", "PEFT's units"])
def test_version_1_of_fsdp_is_refused(policy: Callable[..., Any] | None) -> None:
    model = adapted_model("llama")
    units = policy(model) if policy else None
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=units, use_orig_params=policy is None, device_id=torch.device("cpu")
    )
    with pytest.raises(UnsupportedModel, match="FSDP"):
        wrapped(input_ids=token_batches()[0])


@pytest.mark.usefixtures("group")
def test_a_sharded_model_gets_no_adapter_and_is_not_merged() -> None:
    model = fully_shard(pruned_model())
    with pytest.raises(InvalidSetting, match="sharded"):
        sparse_lora(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(InvalidSetting, match="sharded"):
        merge(fully_shard(adapted_model("llama")))
