"""LoRA with masks: the layers against a direct formula, merging, saved adapters, and what is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import sparsellm
from sparsellm.errors import BadCheckpoint, InvalidSetting, UnsupportedModel
from sparsellm.extensions.recover.training.fixed_masks import FixedMasks
from tests.conftest import byte_tokenizer
from tests.training import arguments, kept_zeros, loaded_model, pruned_model, same_zeros, sequences, token_batches, zeros_of

pytest.importorskip("peft", reason="LoRA needs PEFT: pip install 'sparsellm[train]'")
import peft
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, PolyConfig, PromptTuningConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import Trainer

from sparsellm.extensions.recover.peft import merge, sparse_lora

TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ["q_proj", "down_proj"]},
    "gpt2": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    "mixtral": {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
BATCH = token_batches()[0]


def config(family: str, **changes: Any) -> LoraConfig:
    """An adapter of rank 4 and scale 2."""
    return LoraConfig(**{"r": 4, "lora_alpha": 8, **TARGETS[family], **changes})


def trained(model: PeftModel, steps: int = 3) -> PeftModel:
    """Train an adapter in a plain loop, with nothing besides."""
    optimizer = torch.optim.AdamW([part for part in model.parameters() if part.requires_grad], lr=2e-2)
    for _ in range(steps):
        model(input_ids=BATCH, labels=BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=BATCH).logits


def merged_quietly(model: PeftModel) -> PreTrainedModel:
    """Merge; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return merge(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", TARGETS)
def test_the_merged_model_is_the_trained_one(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit by bit, also from the saved adapter, and after saving, loading and packing; transposed layers and experts too."""
    zeros = zeros_of(pruned_model(family, dtype))
    model = trained(sparse_lora(pruned_model(family, dtype), config(family)))
    expected = logits(model)
    assert not torch.equal(expected, logits(pruned_model(family, dtype)))
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(sparse_lora(pruned_model(family, dtype), tmp_path / "adapter").eval()), expected)
    merged = merged_quietly(model)
    assert type(merged) is type(pruned_model(family))
    assert torch.equal(logits(merged), expected)
    assert same_zeros(zeros, zeros_of(merged))
    assert {parameter.dtype for parameter in merged.parameters()} == {dtype}
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()), expected)
    byte_tokenizer().save_pretrained(tmp_path / "merged")
    sparsellm.pack(tmp_path / "merged", tmp_path / "packed", allow_dense=True)
    sparsellm.unpack(tmp_path / "packed", tmp_path / "unpacked")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "unpacked").eval()), expected)


@pytest.mark.parametrize("changes", [{}, {"lora_dropout": 0.5}, {"use_rslora": True, "lora_bias": True}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_layer_against_the_direct_formula(family: str, changes: dict[str, Any]) -> None:
    """Output and gradients, in training, of x (M * (W0 + s B A))^T + b, by autograd through the dense product."""
    adapted = sparse_lora(pruned_model(family), config(family, **changes)).train()
    layer = next(module for module in adapted.modules() if type(module).__name__ == "SparseLinear")
    nn.init.normal_(layer.lora_B["default"].weight)
    if changes.get("lora_bias"):
        nn.init.normal_(layer.lora_B["default"].bias)
    layer.base_layer.weight.requires_grad_(True)
    weight, scale = layer.base_layer.weight, 8 / 4 ** (0.5 if "use_rslora" in changes else 1)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = torch.randn(3, 5, a.shape[1], requires_grad=True)
    torch.manual_seed(0)
    output = layer(x)
    torch.manual_seed(0)
    dropped = nn.functional.dropout(x, changes.get("lora_dropout", 0.0))
    product = (b @ a).T if family == "gpt2" else b @ a
    update = torch.where(weight != 0, product * scale, torch.zeros(()))
    sides = (weight, update) if family == "gpt2" else (weight.T, update.T)
    expected = x @ sides[0] + dropped @ sides[1]
    for bias in (layer.base_layer.bias, *([layer.lora_B["default"].bias * scale] if "lora_bias" in changes else [])):
        expected = expected if bias is None else expected + bias
    torch.testing.assert_close(output, expected)
    direction = torch.randn_like(output)
    for got, wanted in zip(
        torch.autograd.grad(output, (x, a, b), direction), torch.autograd.grad(expected, (x, a, b), direction), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_gradients_through_experts_are_those_of_the_direct_formula() -> None:
    """The loss of the whole model as a function of A and B, against the model with the merged weights put in by hand."""
    adapted = sparse_lora(pruned_model("mixtral"), config("mixtral", target_modules=None))
    factors = {name: part for name, part in adapted.named_parameters() if part.requires_grad}
    for part in factors.values():
        nn.init.normal_(part, std=0.1)
    loss = adapted(input_ids=BATCH, labels=BATCH).loss
    loss.backward()
    plain = pruned_model("mixtral")
    merged: dict[str, Tensor] = {}
    for name in (name for name in factors if "lora_A" in name):
        a, b = factors[name].detach().requires_grad_(), factors[name.replace("lora_A", "lora_B")].detach().requires_grad_()
        layer = name.split(".layers.")[1][0]
        key = f"model.layers.{layer}.mlp.experts." + ("gate_up_proj" if a.shape[1] == 16 and b.shape[0] == 48 else "down_proj")
        weight = plain.get_parameter(key).detach()
        delta = torch.stack([b[:, number::3] @ a[4 * number : 4 * number + 4] for number in range(3)])
        merged[key] = torch.where(weight != 0, weight + 2 * delta, torch.zeros(()))
        merged[f"{key} factors"] = (a, b, factors[name].grad, factors[name.replace("lora_A", "lora_B")].grad)
    weights = {key: value for key, value in merged.items() if not key.endswith(" factors")}
    expected = torch.func.functional_call(plain, weights, (), {"input_ids": BATCH, "labels": BATCH}).loss
    torch.testing.assert_close(loss, expected)
    for key in weights:
        a, b, *got = merged[f"{key} factors"]
        for one, other in zip(got, torch.autograd.grad(expected, (a, b), retain_graph=True), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_merging_a_dense_adapter_says_what_it_loses(dtype: torch.dtype) -> None:
    """The part of B A outside of the masks, as a fraction of its squared norm."""
    zeros = zeros_of(pruned_model(dtype=dtype))
    adapted = trained(get_peft_model(pruned_model(dtype=dtype), LORA))
    layers = {name: module for name, module in adapted.named_modules() if hasattr(module, "get_delta_weight")}
    update = {name: layer.get_delta_weight("default").float() for name, layer in layers.items()}
    outside = {name: part[layers[name].base_layer.weight == 0].square().sum() for name, part in update.items()}
    share = float(sum(outside.values()) / sum(part.square().sum() for part in update.values()))
    with pytest.warns(UserWarning, match="was not trained with the masks") as caught:
        merged = merge(adapted)
    stated = float(str(caught[0].message).split("remove ")[1].split("%")[0]) / 100
    assert stated == pytest.approx(share, abs=2e-3)
    assert kept_zeros(zeros, merged)
    assert dtype is torch.bfloat16 or same_zeros(zeros, zeros_of(merged))
    reference = pruned_model(dtype=dtype).get_parameter("model.layers.0.self_attn.q_proj.weight")
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    expected = torch.where(reference != 0, (reference + update[name]).to(dtype), torch.zeros((), dtype=dtype))
    assert torch.equal(merged.get_parameter("model.layers.0.self_attn.q_proj.weight"), expected)


def test_other_adapters_of_peft_merge_with_masks() -> None:
    """IA3 scales rows, so its zeros stay without a warning; DoRA changes all weights."""
    zeros = zeros_of(pruned_model())
    scaled = IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])
    assert same_zeros(zeros, zeros_of(merged_quietly(trained(get_peft_model(pruned_model(), scaled)))))
    dora = LoraConfig(r=4, use_dora=True, target_modules=["q_proj"])
    with pytest.warns(UserWarning, match="was not trained with the masks"):
        merged = merge(trained(get_peft_model(pruned_model(), dora)))
    assert same_zeros(zeros, zeros_of(merged))


def test_adapters_can_be_switched_and_disabled() -> None:
    model = sparse_lora(pruned_model(), LORA).eval()
    with torch.no_grad():
        for name, part in model.named_parameters():
            if "lora_B" in name:
                part.normal_()
    before = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(pruned_model()))
    model.merge_adapter()
    assert same_zeros(
        zeros_of(pruned_model()),
        {
            name.split("model.", 2)[2].replace(".base_layer", ""): mask
            for name, mask in zeros_of(model).items()
            if "lora" not in name
        },
    )
    assert torch.equal(logits(model), before)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), before)
    with pytest.raises(InvalidSetting, match="`adapter_names`"):
        model(input_ids=BATCH, adapter_names=["default"] * len(BATCH))


def test_trainer_trains_saves_and_resumes_an_adapter(tmp_path: Path) -> None:
    """A checkpoint at the second step of four continues to the same bytes."""

    def run(folder: Path, steps: int, resume: bool) -> dict[str, Tensor]:
        settings = arguments(folder, max_steps=steps, save_strategy="steps", save_steps=2, lr_scheduler_type="constant")
        trainer = Trainer(sparse_lora(pruned_model(), LORA), settings, train_dataset=sequences())
        trainer.train(resume_from_checkpoint=resume or None)
        return merged_quietly(trainer.model).state_dict()

    whole = run(tmp_path / "whole", 4, False)
    run(tmp_path / "broken", 2, False)
    resumed = run(tmp_path / "broken", 4, True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    model = pruned_model()
    model.load_state_dict(resumed)
    assert same_zeros(zeros_of(pruned_model()), zeros_of(model))


@pytest.mark.long
def test_a_compiled_adapter_trains() -> None:
    model = sparse_lora(pruned_model(), LORA)
    compiled = torch.compile(model, backend="aot_eager")
    loss = compiled(input_ids=BATCH, labels=BATCH).loss
    loss.backward()
    torch.testing.assert_close(loss, model(input_ids=BATCH, labels=BATCH).loss)


def saved_adapter(folder: Path, change: Callable[[Path], object] = str) -> Path:
    """A saved adapter of the Llama, whose files are changed."""
    sparse_lora(pruned_model(), LORA).save_pretrained(folder / "llama")
    change(folder / "llama")
    return folder / "llama"


def ia3(folder: Path) -> Path:
    """A saved adapter of another kind."""
    get_peft_model(pruned_model(), IA3).save_pretrained(folder / "ia3")
    return folder / "ia3"


def first_layer_only(folder: Path) -> None:
    """Leave out the factors of the other layers, which PEFT would leave as they begin."""
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "layers.0" in name}, file)


def cut(name: str) -> Callable[[Path], object]:
    """Cut off the second half of a file."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:200])


IA3 = IA3Config(target_modules=["q_proj"], feedforward_modules=[])
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no such layer": (lambda _: config("llama", target_modules=["query"]), InvalidSetting, "`target_modules`"),
    "dense layers only": (lambda _: config("llama", target_modules=["embed_tokens"]), InvalidSetting, "has zeros"),
    "DoRA": (lambda _: config("llama", use_dora=True), InvalidSetting, "DoRA"),
    "PiSSA": (lambda _: config("llama", init_lora_weights="pissa"), InvalidSetting, "`init_lora_weights='pissa'`"),
    "a whole layer": (lambda _: config("llama", modules_to_save=["o_proj"]), InvalidSetting, "`modules_to_save`.*o_proj"),
    "IA3": (lambda _: IA3, InvalidSetting, "IA3Config"),
    "a saved IA3": (ia3, InvalidSetting, "ia3.*IA3Config"),
    "an empty folder": (lambda folder: folder, BadCheckpoint, SETTINGS),
    "no weights": (lambda f: saved_adapter(f, lambda x: (x / WEIGHTS).unlink()), BadCheckpoint, WEIGHTS),
    "damaged weights": (lambda folder: saved_adapter(folder, cut(WEIGHTS)), BadCheckpoint, "llama is damaged"),
    "damaged settings": (lambda folder: saved_adapter(folder, cut(SETTINGS)), BadCheckpoint, "llama is damaged"),
    "of fewer layers": (lambda folder: saved_adapter(folder, first_layer_only), InvalidSetting, r"llama .*model\.layers\.1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsuitable_adapters_are_refused(case: str, tmp_path: Path) -> None:
    """In one message, and the model is left without an adapter."""
    make, error, named = REFUSED[case]
    given, model = make(tmp_path), pruned_model()
    with pytest.raises(error, match=named):
        sparse_lora(model, given)
    assert not any("lora" in name for name, _ in model.named_parameters())


def other_width() -> PreTrainedModel:
    """The Llama with a narrower feed-forward part."""
    settings = pruned_model().config
    settings.intermediate_size = 20
    model = AutoModelForCausalLM.from_config(settings)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[:, ::2] = 0
    return model


def quantized(model: Any) -> Any:
    """The model, which says that it is quantized."""
    model.is_quantized = True
    return model


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: "demo:llama", InvalidSetting, "`model`.*str"),
        (lambda: pruned_model("gpt2"), InvalidSetting, r"llama .*q_proj"),
        (other_width, InvalidSetting, r"down_proj.*\(4, 24\).*\(4, 20\)"),
        (lambda: quantized(pruned_model()), UnsupportedModel, "quantized"),
        (lambda: sparse_lora(pruned_model(), LORA), InvalidSetting, "adapter already"),
    ],
)
def test_models_that_cannot_have_the_adapter_are_refused(
    make: Callable[[], Any], error: type[Exception], named: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=named):
        sparse_lora(make(), saved_adapter(tmp_path))


def merged_before() -> Any:
    """A model whose adapter is merged."""
    model = sparse_lora(pruned_model(), LORA)
    model.merge_adapter()
    return model


PROMPTS = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
POLY = PolyConfig(r=4, target_modules=["q_proj"], n_tasks=1, task_type="CAUSAL_LM")
COPIED = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["o_proj"])


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: "demo:llama", InvalidSetting, "`model`.*str"),
        (pruned_model, InvalidSetting, "LlamaForCausalLM"),
        (lambda: get_peft_model(pruned_model(), PROMPTS), InvalidSetting, "PeftModelForCausalLM"),
        (lambda: get_peft_model(quantized(pruned_model()), LORA), UnsupportedModel, "quantized"),
        (merged_before, InvalidSetting, "merged already"),
        (lambda: trained(get_peft_model(pruned_model(), COPIED)), InvalidSetting, "o_proj.*SparsityCallback"),
        (lambda: get_peft_model(pruned_model(), POLY), InvalidSetting, "q_proj"),
    ],
)
def test_models_that_cannot_be_merged_are_refused(make: Callable[[], Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        merge(make())


class Delta(nn.Module, BaseTunerLayer):
    """An adapter of a kind that PEFT does not have: it adds, or scales the whole weight, and may not be merged."""

    adapter_layer_names = ("delta",)

    def __init__(self, base_layer: nn.Module, kind: str) -> None:
        super().__init__()
        self.base_layer, self.kind = base_layer, kind
        self.delta = nn.ParameterDict({"default": nn.Parameter(torch.zeros_like(base_layer.weight))})

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        if self.kind == "unmerged":
            raise NotImplementedError
        weight, delta = self.base_layer.weight.data, self.delta["default"]
        weight.add_(delta if self.kind == "adds" else weight * delta)


Q = {"target_modules": ["q_proj"]}
ADAPTERS: dict[str, tuple[PeftConfig | str, bool]] = {
    "LoRA": (LoraConfig(**Q), False),
    "DoRA": (LoraConfig(**Q, use_dora=True), False),
    "experts": (LoraConfig(target_parameters=["mlp.up_proj.weight"]), False),
    "AdaLoRA": (peft.AdaLoraConfig(**Q, total_step=10), False),
    "LoHa": (peft.LoHaConfig(**Q), False),
    "LoKr": (peft.LoKrConfig(**Q), False),
    "OFT": (peft.OFTConfig(**Q, r=0, oft_block_size=4), False),
    "BOFT": (peft.BOFTConfig(**Q, boft_block_size=4), False),
    "VeRA": (peft.VeraConfig(**Q, r=4), False),
    "HRA": (peft.HRAConfig(**Q), False),
    "FourierFT": (peft.FourierFTConfig(**Q, n_frequency=20), False),
    "RandLora": (peft.RandLoraConfig(**Q, r=4), False),
    "MiSS": (peft.MissConfig(**Q, r=4), False),
    "SHiRA": (peft.ShiraConfig(**Q, r=2), False),
    "layers that PEFT trains as a copy": (peft.LNTuningConfig(**Q), False),
    "IA3": (IA3Config(**Q, feedforward_modules=[]), True),
    "norms": (peft.LNTuningConfig(target_modules=["input_layernorm"]), True),
    "tokens": (peft.TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[1]), True),
    "an embedding": (LoraConfig(target_modules=["embed_tokens"]), True),
    "a whole layer": (LoraConfig(target_modules=["embed_tokens"], modules_to_save=["o_proj"]), True),
    "prompts": (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), True),
    "an unknown kind that adds": ("adds", False),
    "an unknown kind without a merge": ("unmerged", False),
    "an unknown kind that scales": ("scales", True),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_masks_are_held_under_adapters_that_keep_them(name: str) -> None:
    """Whatever the kind; training under others leaves the weights below them, and a merge fills their zeros."""
    config, accepted = ADAPTERS[name]
    model = pruned_model()
    if isinstance(config, str):
        model.model.layers[1].self_attn.q_proj = Delta(model.model.layers[1].self_attn.q_proj, config)
    else:
        model = get_peft_model(model, config)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with nullcontext() if accepted else pytest.raises(InvalidSetting, match=r"_proj adds to pruned weights.*sparse_lora"):
        FixedMasks(model)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("family", TARGETS)
def test_masks_are_held_under_a_masked_adapter(family: str) -> None:
    """Also under a second adapter of the same linear layers."""
    model = sparse_lora(pruned_model(family), config(family))
    FixedMasks(model)
    if family != "mixtral":  # PEFT does not add a second one to experts
        model.add_adapter("second", config(family))
        FixedMasks(model)


@pytest.mark.parametrize(
    ("init", "changes"), [("pissa", True), ("pissa_niter_2", True), ("olora", True), ("orthogonal", False)]
)
def test_zeros_are_those_of_the_folder_where_an_adapter_changed_the_weights(init: str, changes: bool, tmp_path: Path) -> None:
    """The merged weights are those that PEFT merges, with the folder's masks; without the folder it is refused."""
    zeros = zeros_of(model := loaded_model(tmp_path / "pruned"))
    settings = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=init)
    trained(get_peft_model(model, settings)).save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(loaded_model(tmp_path / "pruned"), tmp_path / "adapter")
    dense, nameless = copy.deepcopy(model).merge_and_unload().state_dict(), copy.deepcopy(model)
    with pytest.raises(InvalidSetting, match=r"has lost .*pruned" if changes else "adds to pruned"):
        FixedMasks(model)
    with pytest.warns(UserWarning, match="was not trained with the masks"):
        merged = merge(model)
    for key, tensor in merged.state_dict().items():
        assert torch.equal(tensor, dense[key].masked_fill(zeros[key], 0) if key in zeros else dense[key]), key
    nameless.get_base_model().name_or_path = ""
    for call in (FixedMasks, merge) if changes else ():
        with pytest.raises(InvalidSetting, match=init):
            call(nameless)


def test_a_base_that_was_changed_by_hand_is_refused_or_masked(tmp_path: Path) -> None:
    """Below the adapter the zeros of the folder come back, with a warning; elsewhere nothing says what the change is."""

    def changed(model: nn.Module, name: str) -> Any:
        next(module for path, module in model.named_modules() if path.endswith(name)).weight.data.add_(0.1)
        return model

    zeros = zeros_of(loaded_model(tmp_path / "pruned"))
    with pytest.warns(UserWarning, match="they remove .*, in .*q_proj"):
        merged = merge(changed(trained(get_peft_model(loaded_model(tmp_path / "pruned"), LORA)), "q_proj.base_layer"))
    assert kept_zeros(zeros, merged)
    for call in (merge, sparse_lora):
        adapted = get_peft_model if call is merge else lambda model, _: model
        with pytest.raises(InvalidSetting, match=r"lost .*o_proj"):
            call(changed(adapted(loaded_model(tmp_path / "pruned"), LORA), "o_proj"), *(() if call is merge else (LORA,)))
    for model in (pruned_model(), loaded_model(tmp_path / "pruned")):
        with pytest.raises(InvalidSetting, match=r"mlp\.down_proj has lost zeros since"):
            merge(changed(sparse_lora(model, LORA), "down_proj.base_layer"))


def test_kinds_that_merge_twice() -> None:
    """PEFT merges each layer again as it removes the adapters, and OSF does not know that it has been."""
    zeros = zeros_of(pruned_model())
    model = get_peft_model(pruned_model(), peft.OSFConfig(**Q))
    for part in model.parameters():
        part.data.mul_(1.1 if part.requires_grad else 1)
    with pytest.warns(UserWarning, match="masks"):
        assert same_zeros(zeros, zeros_of(merge(model)))


TIED: dict[str, tuple[dict[str, Any], bool]] = {
    "the embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, False),
    "the head": ({"target_modules": ["q_proj", "lm_head"]}, False),
    "both": ({"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}, True),
    "tokens": ({"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]}, True),
    "neither": ({"target_modules": ["q_proj"]}, True),
}


@pytest.mark.filterwarnings("ignore:.*tie")
@pytest.mark.parametrize("case", TIED)
def test_tied_embeddings_are_merged_as_they_were_trained(case: str, tmp_path: Path) -> None:
    """An adapter of one of them leaves the other as it is, so that they are no longer tied, also once saved and loaded."""
    settings, tied = TIED[case]
    model = sparse_lora(pruned_model(), LoraConfig(r=4, **settings)).eval()
    with torch.no_grad():
        for part in model.parameters():
            part.add_(torch.randn_like(part) * 0.1 * part.requires_grad)
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(sparse_lora(pruned_model(), tmp_path / "adapter").eval()), expected)
    merged = merge(model)
    merged.save_pretrained(tmp_path)
    for result in (merged, AutoModelForCausalLM.from_pretrained(tmp_path).eval()):
        torch.testing.assert_close(logits(result), expected)
        assert (result.lm_head.weight is result.model.embed_tokens.weight) is tied
        assert result.config.tie_word_embeddings is tied
