"""Fixed masks in plain loops and in transformers' Trainer, against torch.nn.utils.prune and unbroken runs."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import prune
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, TrainerCallback

import sparsellm
from sparsellm.errors import InvalidSetting, UnsupportedModel, VerificationFailed
from sparsellm.extensions.recover.training.fixed_masks import DEEPSPEED, FixedMasks, pruned_masks
from tests.conftest import byte_tokenizer
from tests.training import arguments, kept_zeros, loaded_model, pruned_model, same_zeros, token_batches, train, zeros_of

OPTIMIZERS: dict[str, Any] = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Muon": lambda p: torch.optim.Muon([weight for weight in p if weight.ndim == 2], lr=1e-2),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
}
BATCH = token_batches()[0]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float = 0.0) -> None:
    """One step of a plain loop."""

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=BATCH, labels=BATCH).loss
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        return float(loss.detach())

    optimizer.step(closure)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zeros_stay_under_any_optimizer(name: str, dtype: torch.dtype) -> None:
    """Also with momentum from before the context, which is not masked; without the context, the same steps fill them."""
    model = pruned_model(dtype=dtype)
    zeros, pruned = zeros_of(model), {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    step(model, optimizer)
    assert not same_zeros(zeros, pruned_masks(model))
    model.load_state_dict(pruned)
    with sparsellm.fixed_masks(model, optimizer):
        step(model, optimizer)
        step(model, optimizer)
    assert kept_zeros(zeros, model)
    assert dtype is torch.bfloat16 or same_zeros(zeros, zeros_of(model))
    assert any(not torch.equal(model.get_parameter(key), pruned[key]) for key in zeros)


def test_clipped_training_is_that_of_torch_prune() -> None:
    """torch's pruning reparametrisation multiplies the weight by its mask, so its gradients are those of the masked model."""
    model, reference = pruned_model(), pruned_model()
    zeros = zeros_of(model)
    for key, mask in zeros.items():
        prune.custom_from_mask(reference.get_submodule(key.removesuffix(".weight")), "weight", ~mask)
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (model, reference)]
    with sparsellm.fixed_masks(model, optimizers[0]):
        for _ in range(3):
            for part, optimizer in zip((model, reference), optimizers, strict=True):
                step(part, optimizer, clip=0.5)
    for key in zeros:
        layer = reference.get_submodule(key.removesuffix(".weight"))
        masked = layer.weight_orig * layer.weight_mask
        torch.testing.assert_close(model.get_parameter(key), masked, rtol=1e-5, atol=1e-7)


def test_masks_are_of_matrices_that_were_pruned() -> None:
    """Transposed layers and experts too; neither padding of embeddings, nor biases, nor matrices of zeros alone."""
    model = pruned_model("gpt2")
    model.transformer.wte.weight.data[0] = 0
    assert model.lm_head.weight is model.transformer.wte.weight
    assert set(zeros_of(model)) == {
        f"transformer.h.{number}.{part}.weight"
        for number in range(2)
        for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    masks = zeros_of(pruned_model("mixtral"))
    assert masks["model.layers.0.mlp.experts.gate_up_proj"].ndim == 3
    layer = nn.Linear(4, 4)
    nn.init.zeros_(layer.weight)
    assert not pruned_masks(layer)


def test_zeros_stay_where_an_optimizer_or_a_cast_replaces_the_memory_of_weights() -> None:
    """`parameter.data = ...` leaves the parameter, but not the memory that it had."""

    class Rebinding(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            for parameter in self.param_groups[0]["params"]:
                parameter.data = parameter.data - 1e-2
            return loss

    model = pruned_model()
    zeros = zeros_of(model)
    with sparsellm.fixed_masks(model, optimizer := Rebinding(model.parameters(), lr=0.1)):
        step(model, optimizer)
        model.bfloat16()
        step(model, optimizer)
    assert kept_zeros(zeros, model)
    weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(VerificationFailed, match="pruned weights are not zero"), sparsellm.fixed_masks(model, optimizer):
        weight.data = torch.ones_like(weight)


def test_a_lost_zero_raises() -> None:
    model = pruned_model()
    weight = model.model.layers[1].mlp.up_proj.weight.data
    rows, columns = (indices[:3] for indices in torch.where(weight == 0))
    message = r"^3 pruned weights are not zero.*3 of them in model\.layers\.1\.mlp\.up_proj\.weight"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(VerificationFailed, match=message), sparsellm.fixed_masks(model, optimizer):
        weight[rows, columns] = 1.0
    with pytest.raises(ZeroDivisionError), sparsellm.fixed_masks(model, optimizer):
        weight[0, 0] /= 0 / 0  # the error of a loop is not hidden by the check


def test_an_optimizer_that_the_context_does_not_know_is_noticed() -> None:
    model = pruned_model()
    known, unknown = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
    step(model, unknown)
    model.load_state_dict(pruned_model().state_dict())
    with pytest.raises(VerificationFailed, match="not zero after training"), sparsellm.fixed_masks(model, known):
        step(model, unknown)


def test_hooks_end_with_the_context() -> None:
    model = pruned_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sparsellm.fixed_masks(model, optimizer):
        pass
    step(model, optimizer)
    assert not pruned_masks(model)


@pytest.mark.long
def test_a_compiled_model_keeps_its_zeros() -> None:
    model = pruned_model()
    zeros = zeros_of(model)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with sparsellm.fixed_masks(compiled, optimizer):
        step(compiled, optimizer)
    assert same_zeros(zeros, zeros_of(model))


def test_models_without_zeros_and_weights_that_others_hold_are_refused() -> None:
    dense = nn.Linear(4, 4)
    with pytest.raises(InvalidSetting, match="no zeros"):
        FixedMasks(dense)
    masks = FixedMasks(pruned_model())
    with pytest.raises(InvalidSetting, match=r"model\.layers"):
        masks.attach(dense)
    dense.weight.ds_id = 0
    with pytest.raises(UnsupportedModel) as caught:
        FixedMasks(dense)
    assert str(caught.value) == DEEPSPEED


PARAMETERS = {
    "llama": "model.layers.0.self_attn.o_proj.weight",
    "gpt2": "transformer.h.0.mlp.c_proj.weight",
    "mixtral": "model.layers.0.mlp.experts.gate_up_proj",
}


@pytest.mark.parametrize("family", PARAMETERS)
def test_zeros_of_the_folder_that_are_gone_are_noticed(family: str, tmp_path: Path) -> None:
    """All of a matrix, or one; also in what wraps the model. More zeros than in the folder are the model's own."""
    name, model = PARAMETERS[family], loaded_model(tmp_path / "pruned", family)
    state = torch.get_rng_state()
    FixedMasks(model)
    assert torch.equal(torch.get_rng_state(), state)
    for count in (1, None):
        model = loaded_model(tmp_path / "pruned", family)
        weight = model.get_parameter(name).data.view(-1)
        weight[(weight == 0).nonzero()[:count]] = 1.0
        for seen in (model, nn.ModuleDict({"policy": model})):
            with pytest.raises(InvalidSetting, match=rf"lost {count or ''}.*pruned.* (policy\.)?{name}"):
                FixedMasks(seen)
        with pytest.raises(InvalidSetting, match="lost"):
            train(model, arguments(tmp_path))
        model.name_or_path = ""
        FixedMasks(model)
    model = loaded_model(tmp_path / "pruned", family)
    model.get_parameter(name).data.view(-1)[:4] = 0
    FixedMasks(model)


def test_a_model_is_compared_with_what_it_was_loaded_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without its head, in another dtype, resized, in the hub's cache, and not where the folder is gone."""
    folder = tmp_path / "pruned"

    def changed(model: PreTrainedModel) -> PreTrainedModel:
        next(layer for layer in model.modules() if isinstance(layer, nn.Linear)).weight.data += 0.1
        return model

    for model in (loaded_model(folder), AutoModel.from_pretrained(folder), loaded_model(folder).bfloat16()):
        FixedMasks(model)
        with pytest.raises(InvalidSetting, match="has lost"):
            FixedMasks(changed(model))
    model = loaded_model(folder)
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.ones(20, 16))
    with pytest.raises(InvalidSetting, match=r"lost .*pruned.*up_proj"):
        FixedMasks(model)
    cache = tmp_path / "hub" / "models--some--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    (cache / "snapshots").mkdir()
    folder.rename(cache / "snapshots" / ("0" * 40))
    model = changed(loaded_model(cache / "snapshots" / ("0" * 40)))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, told in (("some/model", True), ("some/other", False), (str(folder), False), ("", False)):
        model.name_or_path = name
        with pytest.raises(InvalidSetting, match="some/model") if told else nullcontext():
            FixedMasks(model)


def test_a_model_that_was_pruned_in_memory_has_zeros_of_its_own(tmp_path: Path) -> None:
    """Some of the folder's are gone: of four zeros in a row, 2:4 keeps two, which are updated."""
    model = pruned_model()
    for weight in (model.get_parameter(name).data for name in zeros_of(model)):
        weight.add_(0.1 * torch.randn_like(weight))[:, 8:12] = 0
    zeros = zeros_of(model)
    model.save_pretrained(tmp_path)
    settings = {"sparsity": "2:4", "calibration": torch.randint(96, (4, 16))}
    sparsellm.prune(loaded := loaded_model(tmp_path), "sparsegpt", **settings)
    for result in (loaded, sparsellm.prune(tmp_path, "sparsegpt", **settings).model):
        assert not kept_zeros(zeros, result)
        FixedMasks(result)


class Packed(nn.Linear):
    """A layer whose weight holds integers, as those of bitsandbytes do."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)


def test_packed_and_quantized_models_are_refused(tmp_path: Path) -> None:
    """By what their layers hold; a packed model becomes one with weights again."""
    loaded_model(tmp_path / "pruned")
    byte_tokenizer().save_pretrained(tmp_path / "pruned")
    sparsellm.pack(tmp_path / "pruned", tmp_path / "packed", allow_dense=True)
    packed = sparsellm.load(tmp_path / "packed")
    dynamic = torch.ao.nn.quantized.dynamic.Linear(4, 4)
    for model in (packed, nn.Sequential(nn.Linear(4, 4), dynamic), nn.Sequential(nn.Linear(4, 4), Packed())):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
        with pytest.raises(UnsupportedModel, match="sparsellm unpack"), sparsellm.fixed_masks(model, optimizer):
            pass
    FixedMasks(packed.dequantize())


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("mixtral", torch.float32), ("gpt2", torch.float32)])
def test_trainer_keeps_zeros(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Through accumulation, weight decay, saving, loading and packing; a Trainer without the callback loses them."""
    zeros = zeros_of(pruned_model(family, dtype))
    trainer = train(pruned_model(family, dtype), arguments(tmp_path, gradient_accumulation_steps=2, max_steps=3))
    assert same_zeros(zeros, zeros_of(trainer.model))
    trainer.save_model(str(tmp_path / "saved"))
    byte_tokenizer().save_pretrained(tmp_path / "saved")
    assert same_zeros(zeros, zeros_of(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")))
    sparsellm.pack(tmp_path / "saved", tmp_path / "packed", allow_dense=True)
    sparsellm.unpack(tmp_path / "packed", tmp_path / "unpacked")
    stored, unpacked = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "unpacked"))
    assert stored.keys() == unpacked.keys()
    assert all(torch.equal(stored[key], unpacked[key]) for key in stored)


def fill(*_: Any, model: nn.Module, **__: Any) -> None:
    """What an optimizer may do: change every weight."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)


def test_trainer_restores_zeros_after_each_step_and_checks_them_at_the_end(tmp_path: Path) -> None:
    during, afterwards = TrainerCallback(), TrainerCallback()
    during.on_pre_optimizer_step = fill
    afterwards.on_step_end = fill
    assert same_zeros(zeros_of(pruned_model()), zeros_of(train(pruned_model(), arguments(tmp_path), during).model))
    with pytest.raises(VerificationFailed, match="not zero"):
        train(pruned_model(), arguments(tmp_path), afterwards)


class Kill(TrainerCallback):
    """Ends the process as the kernel does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(folder: Path) -> None:
    """A training that is killed in its third step, after a checkpoint at the second."""
    train(pruned_model(dtype=torch.bfloat16), arguments(folder, save_strategy="steps", save_steps=2), Kill())


def test_a_killed_run_resumes_to_the_same_bytes(server: ForkServerContext, tmp_path: Path) -> None:
    process = server.Process(target=killed, args=(tmp_path / "killed",))
    process.start()
    whole = train(pruned_model(dtype=torch.bfloat16), arguments(tmp_path / "whole")).model.state_dict()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    settings = arguments(tmp_path / "killed", save_strategy="steps", save_steps=2)
    resumed = train(pruned_model(dtype=torch.bfloat16), settings, resume=True)
    assert resumed.state.global_step == 4
    for key, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, whole[key]), key
