"""Packed models of several families in transformers: outputs, generation, saving, devices, errors."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import Result

import sparsellm
from sparsellm.errors import BadCheckpoint, InvalidSetting, UnsupportedModel
from sparsellm.extensions.packed.formats import transformers as packed_transformers
from sparsellm.extensions.packed.formats import weight_converter
from sparsellm.extensions.packed.formats.linear import PackedLinear
from sparsellm.extensions.packed.formats.packed_experts import PackedExperts
from sparsellm.extensions.packed.packing import pack, unpack
from sparsellm.extensions.packed.speed import weight_bytes
from tests.conftest import SHARED, TEXT, byte_tokenizer, long_unless
from tests.core.integration.test_families import CONFIGS

FORMS = {"llama": 14, "opt": 12, "gpt2": 8, "mixtral": 32, "qwen3_moe": 23, "phi3": 8, "gemma": 14}
"""Numbers of packed layers of a family for each form: plain, biases and a tied head, transposed, experts twice, fused, tied."""


def save_pruned(folder: Path, family: str, dtype: torch.dtype) -> None:
    """Write a tiny random model of a family with three fifths of its matrices' weights at zero, and a tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]()).to(dtype)
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and id(parameter) not in embeddings and "wpe" not in name and "embed" not in name:
                parameter[torch.rand(parameter.shape) < 0.6] = 0
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="session")
def packed_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """Folders of a tiny pruned model, dense and packed, by family and dtype; not to be written to."""
    root = tmp_path_factory.mktemp("packed")

    def folders(
        family: str = "llama", dtype: torch.dtype = torch.float32, archive: bool = False, values: str | None = None
    ) -> tuple[Path, Path]:
        dense = root / f"{family}-{dtype}"
        packed = root / f"{family}-{dtype}-{'archive' if archive else 'plain'}-{values}"
        if not dense.exists():
            save_pruned(dense, family, dtype)
        if not packed.exists():
            pack(dense, packed, archive=archive, values=values)
        if values is None:
            return dense, packed
        rounded = packed.with_name(f"{packed.name}-rounded")
        if not rounded.exists():
            unpack(packed, rounded)
        return rounded, packed

    return folders


def packed_layers(model: PreTrainedModel) -> list[PackedLinear]:
    """The packed layers of a model."""
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def prompts() -> Tensor:
    """Token ids of two texts, (2, 16)."""
    return torch.tensor([list(TEXT[start : start + 16].encode()) for start in (0, 20)])


@pytest.mark.filterwarnings("ignore:.*take dense memory")
@pytest.mark.parametrize("family", [long_unless(name in ("llama", "opt", "gpt2", "mixtral"), name) for name in FORMS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_model_computes_and_generates_as_the_dense_one(
    packed_models: Callable[..., tuple[Path, Path]], family: str, dtype: torch.dtype
) -> None:
    dense_folder, folder = packed_models(family, dtype)
    dense = AutoModelForCausalLM.from_pretrained(dense_folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert len(packed_layers(model)) == FORMS[family]
    assert not model.training
    inputs = prompts()
    with torch.no_grad():
        rounding = 1e-5 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(model(inputs).logits, dense(inputs).logits, rtol=rounding, atol=rounding)
    if dtype == torch.float32:
        settings = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(inputs), "pad_token_id": 0}
        assert torch.equal(model.generate(inputs, **settings), dense.generate(inputs, **settings))


@pytest.mark.filterwarnings("ignore:.*take dense memory")
@pytest.mark.parametrize("family", [long_unless(name in ("gpt2", "mixtral"), name) for name in FORMS])
@pytest.mark.parametrize("values", [None, "int4"])
def test_a_packed_model_in_memory_is_inspected_like_its_folder(
    packed_models: Callable[..., tuple[Path, Path]], family: str, values: str | None
) -> None:
    """Its layers are decoded one at a time; they may also be compared with the dense model's."""
    dense, folder = packed_models(family, torch.bfloat16, values=values)
    model = sparsellm.load(folder)
    found, expected = sparsellm.inspect(model, dense), sparsellm.inspect(folder, dense)
    assert found.layers == expected.layers
    assert any(layer.bits for layer in found.layers) == (values is not None)
    for name in ("parameters", "zeros", "changed", "alike", "converted", "only_here", "only_there"):
        assert getattr(found, name) == getattr(expected, name), name
    assert sparsellm.inspect(dense, model).alike == found.alike > 0


@pytest.mark.filterwarnings("ignore:.*take dense memory")
@pytest.mark.parametrize("family", [long_unless(name in ("opt", "gpt2", "mixtral"), name) for name in FORMS])
@pytest.mark.parametrize("archive", [False, True])
def test_saved_model_has_the_packed_tensors(
    packed_models: Callable[..., tuple[Path, Path]], tmp_path: Path, family: str, archive: bool
) -> None:
    """A model that was loaded from an archive is written in the plain form."""
    plain = packed_models(family, torch.bfloat16)[1]
    sparsellm.load(packed_models(family, torch.bfloat16, archive)[1]).save_pretrained(tmp_path / "saved")
    first, second = (load_file(folder / "model.safetensors") for folder in (plain, tmp_path / "saved"))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert json.loads((plain / "config.json").read_text())["quantization_config"]["quant_method"] == "sparsellm"
    inputs = prompts()
    with torch.no_grad():
        assert torch.equal(sparsellm.load(tmp_path / "saved")(inputs).logits, sparsellm.load(plain)(inputs).logits)


def test_saved_shards_are_loaded_and_unpacked(packed_models: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    """All parts of a tensor are in the same one of the files that transformers writes."""
    dense, folder = packed_models()
    model = sparsellm.load(folder)
    model.save_pretrained(tmp_path / "saved", max_shard_size="4KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 3
    inputs = prompts()
    with torch.no_grad():
        assert torch.equal(sparsellm.load(tmp_path / "saved")(inputs).logits, model(inputs).logits)
    unpack(tmp_path / "saved", tmp_path / "unpacked")
    assert sparsellm.inspect(tmp_path / "unpacked", against=dense).changed == ()


@pytest.mark.parametrize("family", ["gpt2", long_unless(False, "llama"), long_unless(False, "opt")])
def test_model_without_its_head_is_loaded_and_saved(
    packed_models: Callable[..., tuple[Path, Path]], tmp_path: Path, family: str
) -> None:
    """Its tensors have other names: without the prefix of the model with a head."""
    dense, folder = packed_models(family)
    AutoModel.from_pretrained(folder).save_pretrained(tmp_path / "base")
    expected = AutoModel.from_pretrained(dense)(prompts()).last_hidden_state
    for name in (folder, tmp_path / "base"):
        model = AutoModel.from_pretrained(name)
        assert len(packed_layers(model)) == FORMS[family]
        torch.testing.assert_close(model(prompts()).last_hidden_state, expected)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert not info["unexpected_keys"]
    assert info["missing_keys"] <= {"lm_head.weight"}


@pytest.mark.parametrize("settings", [{"device_map": "cpu"}, {"device_map": "auto"}, {"device_map": {"": "cpu"}}])
def test_device_map_is_followed(packed_models: Callable[..., tuple[Path, Path]], settings: dict[str, Any]) -> None:
    model = sparsellm.load(packed_models()[1], **settings)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert model.generate(prompts(), max_new_tokens=3, attention_mask=torch.ones(2, 16)).shape == (2, 19)


def test_weights_on_the_disk_are_refused(packed_models: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="in memory"):
        sparsellm.load(packed_models()[1], device_map={"model": "disk", "lm_head": "cpu"}, offload_folder=tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "float32"])
def test_model_is_loaded_in_a_dtype(packed_models: Callable[..., tuple[Path, Path]], dtype: Any) -> None:
    dense_folder, folder = packed_models()
    model, dense = sparsellm.load(folder, dtype=dtype), AutoModelForCausalLM.from_pretrained(dense_folder, dtype=dtype)
    expected = dict(dense.named_parameters())
    assert model.dtype == dense.dtype
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            assert torch.equal(module.weight, expected[f"{name}.weight"])


def test_dtype_without_a_product_is_refused(packed_models: Callable[..., tuple[Path, Path]]) -> None:
    with pytest.raises(InvalidSetting, match="float64"):
        sparsellm.load(packed_models()[1], dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:.*take dense memory")
@pytest.mark.parametrize("family", ["gpt2", "opt", "mixtral", long_unless(False, "qwen3_moe")])
def test_dequantized_model_is_the_dense_one(
    packed_models: Callable[..., tuple[Path, Path]], tmp_path: Path, family: str
) -> None:
    dense_folder, folder = packed_models(family)
    model = sparsellm.load(folder)
    model.save_pretrained(tmp_path / "packed")
    model.dequantize()
    with torch.no_grad():
        dense = AutoModelForCausalLM.from_pretrained(dense_folder)
        assert torch.equal(model(prompts()).logits, dense(prompts()).logits)
    model.save_pretrained(tmp_path / "dense")
    first, second = (load_file(path / "model.safetensors") for path in (dense_folder, tmp_path / "dense"))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())


def test_perplexity_is_that_of_the_dense_model(packed_models: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    """As a whole, block by block, and of a model in memory."""
    dense_folder, folder = packed_models("opt", torch.bfloat16)
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 10)
    dense = sparsellm.evaluate(dense_folder, text, sequence_length=32).perplexity[str(text)].value
    for settings in ({}, {"offload": True}):
        value = sparsellm.evaluate(folder, text, sequence_length=32, **settings).perplexity[str(text)].value
        assert value == pytest.approx(dense, rel=1e-6)
    model = sparsellm.load(folder)
    value = sparsellm.evaluate(model, text, sequence_length=32, tokenizer=byte_tokenizer()).perplexity[str(text)].value
    assert value == pytest.approx(dense, rel=1e-6)
    assert packed_layers(model)[0].values.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:.*take dense memory")
@pytest.mark.parametrize("values", [None, "int4"])
@pytest.mark.parametrize("family", ["mixtral", long_unless(False, "qwen3_moe")])
def test_experts_run_packed(
    packed_models: Callable[..., tuple[Path, Path]], tmp_path: Path, family: str, values: str | None
) -> None:
    """Also a copy in memory. No parameter of three dimensions is left; the dense form of bench is that of transformers."""
    dense_folder, folder = packed_models(family, values=values)
    model = copy.deepcopy(sparsellm.load(folder))
    experts = [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert len(experts) == sum(parameter.dim() == 3 for parameter in dense_of(dense_folder).parameters()) // 2 > 0
    assert all(parameter.dim() < 3 for parameter in model.parameters())
    called = set()
    for number, name, layer in ((x, *pair) for x in range(len(experts)) for pair in experts[x].layers("down_proj")):
        layer.register_forward_hook(lambda *_, key=(number, name): called.add(key))
    with torch.no_grad():
        model(prompts()[:1, :1])
    assert len(called) == len(experts) * model.config.num_experts_per_tok, "only the experts that the token is routed to"
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 10)
    forms = ((dense_folder, {}), (folder, {}), (folder, {"offload": True}), (model, {"tokenizer": byte_tokenizer()}))
    perplexities = [
        sparsellm.evaluate(x, text, sequence_length=32, **settings).perplexity[str(text)].value for x, settings in forms
    ]
    assert perplexities == pytest.approx([perplexities[0]] * 4, rel=1e-5)
    for against in (None, dense_folder):
        result = sparsellm.bench(folder, against, batch=1, threads=1, tokens=2)
        assert result.memory_bytes["dense, torch"] == weight_bytes(dense_of(dense_folder))
        assert any("ceiling" in note and "experts" in note for note in result.notes)


def dense_of(folder: Path) -> PreTrainedModel:
    """The dense model of a folder."""
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    "name", [long_unless(name == "demo:opt", name) for name in ("demo:opt", "demo:llama", "wt2-opt", "wt2-llama")]
)
def test_trained_model_predicts_and_writes_as_the_dense_one(name: str, tmp_path: Path) -> None:
    """Perplexity, and 200 greedy tokens in float32 with the scores of all tokens at each of them."""
    trained = name if name.startswith("demo:") else str(SHARED / "models" / name)
    if name.startswith("wt2") and not Path(trained).is_dir():
        pytest.skip(f"needs the trained model {name} in {SHARED / 'models'}")
    dense_folder, folder = tmp_path / "pruned", tmp_path / "packed"
    sparsellm.prune(trained, "magnitude", "70%").save_pretrained(dense_folder)
    pack(dense_folder, folder)
    for dtype in ("bfloat16", "float32"):
        measured = [sparsellm.evaluate(x, "demo", dtype=dtype, evaluate_limit=2).perplexity for x in (dense_folder, folder)]
        assert measured[1]["demo"].value == pytest.approx(measured[0]["demo"].value, rel=1e-6)
    dense = AutoModelForCausalLM.from_pretrained(dense_folder, dtype=torch.float32)
    model = sparsellm.load(folder, dtype=torch.float32)
    assert len(packed_layers(model)) > 20
    inputs = AutoTokenizer.from_pretrained(folder)("The history of the town begins", return_tensors="pt")
    settings: dict[str, Any] = {"max_new_tokens": 200, "min_new_tokens": 200, "do_sample": False}
    written = [x.generate(**inputs, **settings, return_dict_in_generate=True, output_logits=True) for x in (model, dense)]
    assert torch.equal(*(x.sequences for x in written))
    assert written[0].sequences.shape[1] == inputs.input_ids.shape[1] + 200
    torch.testing.assert_close(*(torch.stack(x.logits) for x in written), rtol=1e-3, atol=1e-3)


def test_evaluate_prints_the_perplexity_of_a_packed_folder(
    packed_models: Callable[..., tuple[Path, Path]], tmp_path: Path, command: Callable[..., Result]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 10)
    results = [command("evaluate", folder, "--text", text, "--sequence-length", 32) for folder in packed_models("gpt2")]
    assert [result.exit_code for result in results] == [0, 0]
    dense, packed = ([line.rsplit(maxsplit=1)[0] for line in result.stdout.splitlines()] for result in results)
    assert packed == dense, "all but the seconds"


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed (the extra `eval`)")
def test_lm_eval_runs_on_a_packed_model(packed_models: Callable[..., tuple[Path, Path]]) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    dense, packed = packed_models("opt")
    requests = [Instance("loglikelihood", {}, (TEXT[:20], TEXT[20:end]), 0) for end in (30, 50)]
    scores = [
        HFLM(pretrained=model, tokenizer=byte_tokenizer()).loglikelihood(requests, disable_tqdm=True)
        for model in (AutoModelForCausalLM.from_pretrained(dense), sparsellm.load(packed))
    ]
    assert scores[0] == [(pytest.approx(score, rel=1e-5), greedy) for score, greedy in scores[1]]


def test_compiled_model_computes_the_same(packed_models: Callable[..., tuple[Path, Path]]) -> None:
    """As one graph, without code generation, which needs a compiler."""
    model = sparsellm.load(packed_models("llama")[1])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(prompts()).logits, model(prompts()).logits)


def test_packed_model_is_not_pruned(packed_models: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    folder = packed_models()[1]
    with pytest.raises(UnsupportedModel, match="sparsellm unpack"):
        sparsellm.prune(str(folder), "magnitude", "2:4")
    with pytest.raises(UnsupportedModel, match="dequantize"):
        sparsellm.prune(sparsellm.load(folder), "magnitude", "2:4", tokenizer=byte_tokenizer())


def later_version(folder: Path) -> None:
    """Say that the model is packed in a version that does not exist yet."""
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"version": 1', '"version": 2'))


def short_part(folder: Path) -> None:
    """Cut off the last byte of a part of the first packed layer."""
    with safe_open(folder / "model.safetensors", framework="pt") as stream:
        metadata = stream.metadata()
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    save_file(tensors | {name: tensors[name][:-1].clone()}, folder / "model.safetensors", metadata)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (later_version, UnsupportedModel, "version 2"),
        (lambda folder: os.truncate(folder / "model.safetensors", 20_000), BadCheckpoint, r"model\.safetensors"),
        (short_part, BadCheckpoint, r"layers\.0\..*q_proj\.weight: weight has"),
    ],
)
def test_damaged_models_are_not_loaded(
    change: Callable[[Path], object],
    error: type[Exception],
    named: str,
    packed_models: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(packed_models()[1], tmp_path / "packed"))
    change(folder)
    for load in (sparsellm.load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(error, match=named):
            load(folder)


def test_a_dense_model_is_not_loaded_as_a_packed_one(packed_models: Callable[..., tuple[Path, Path]]) -> None:
    with pytest.raises(BadCheckpoint, match="packed"):
        sparsellm.load(packed_models()[0])


def test_experts_are_said_to_be_dense(
    packed_models: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    folder, logged = packed_models("gpt_oss")[1], []
    monkeypatch.setattr(packed_transformers.logger, "warning", logged.append)
    said = r"model\.layers\.0\.mlp\.experts\.down_proj and \d others take dense memory"
    with pytest.warns(UserWarning, match=said):
        sparsellm.load(folder)
    recwarn.clear()
    AutoModelForCausalLM.from_pretrained(folder)
    assert len(logged) == 2
    assert re.match(said, logged[1])
    sparsellm.load(packed_models("opt")[1])
    assert not [warning for warning in recwarn.list if issubclass(warning.category, UserWarning)]


def test_transformers_without_this_package_raises(packed_models: Callable[..., tuple[Path, Path]]) -> None:
    """It must not run weights that it initializes."""
    code = f"""if True:
        import sys
        from transformers import AutoModelForCausalLM
        try:
            AutoModelForCausalLM.from_pretrained({str(packed_models()[1])!r})
        except Exception as error:
            print("raised", type(error).__name__)
        assert not any(name.startswith("sparsellm") for name in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "raised" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    "order",
    [
        "sparsellm.extensions.packed.formats.transformers, transformers",
        "transformers, sparsellm.extensions.packed.formats.transformers",
    ],
)
def test_one_import_registers_the_format_in_any_order(packed_models: Callable[..., tuple[Path, Path]], order: str) -> None:
    code = f"""if True:
        import {order}
        from transformers import AutoModelForCausalLM
        print(type(AutoModelForCausalLM.from_pretrained({str(packed_models()[1])!r}).model.layers[0].mlp.up_proj).__name__)
    """
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "PackedLinear"


def test_importing_the_package_changes_nothing_of_the_process() -> None:
    """It imports nothing else, and finds no modules for others."""
    code = """if True:
        import sys
        before = set(sys.modules), list(sys.meta_path), list(sys.path_hooks)
        import sparsellm
        assert list(sys.meta_path) == before[1] and list(sys.path_hooks) == before[2]
        print(sorted(name for name in set(sys.modules) - before[0] if "." not in name and name not in sys.stdlib_module_names))
    """
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "['sparsellm']"


QUANTIZED = {
    "llama": "int4",
    "opt": "int3",
    "gpt2": "int8",
    "mixtral": "int4",
    "qwen3_moe": "int8",
    "phi3": "int3",
    "gemma": "int8",
}
"""A format for each family."""


@pytest.mark.filterwarnings("ignore:.*take dense memory")
@pytest.mark.parametrize("family", [long_unless(name in ("llama", "opt", "gpt2", "mixtral"), name) for name in QUANTIZED])
def test_quantized_model_computes_as_the_unpacked_one(
    packed_models: Callable[..., tuple[Path, Path]], tmp_path: Path, family: str
) -> None:
    """In transformers: outputs, dtypes, saving, the state, and decoding the weights."""
    rounded, folder = packed_models(family, torch.float32, values=QUANTIZED[family])
    dense = AutoModelForCausalLM.from_pretrained(rounded)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    layers = packed_layers(model)
    assert len(layers) == FORMS[family]
    assert all(layer.format is not None for layer in layers)
    inputs = prompts()
    with torch.no_grad():
        expected = dense(inputs).logits
        torch.testing.assert_close(model(inputs).logits, expected, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    first, second = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "saved"))
    unpack(tmp_path / "saved", tmp_path / "unpacked")
    assert sparsellm.inspect(tmp_path / "unpacked", against=rounded).changed == ()
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    again = sparsellm.load(folder)
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(again(inputs).logits, model(inputs).logits)
    model.dequantize()
    assert not packed_layers(model)
    assert all(torch.equal(x, dict(dense.named_parameters())[name]) for name, x in model.named_parameters())


@pytest.mark.parametrize(("values", "length"), [("int4", 16), long_unless(False, "int8", 64), long_unless(False, "int3", 16)])
def test_a_quantized_bfloat16_model_is_measured_as_the_unpacked_one(
    packed_models: Callable[..., tuple[Path, Path]], values: str, length: int, tmp_path: Path
) -> None:
    """It is computed in float32, in which its scales must not be: kernels read them as bfloat16."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 2)
    folders = packed_models("llama", torch.bfloat16, values=values)
    measured = [sparsellm.evaluate(folder, text, sequence_length=length, evaluate_limit=1).perplexity for folder in folders]
    unpacked, packed = (x[str(text)].value for x in measured)
    assert packed == pytest.approx(unpacked, rel=5e-3)


def test_scales_that_were_cast_in_place_are_refused(packed_models: Callable[..., tuple[Path, Path]]) -> None:
    """Nobody notices, since no buffer is set."""
    model = sparsellm.load(packed_models("llama", torch.bfloat16, values="int4")[1])
    for layer in packed_layers(model):
        layer.scales.data = layer.scales.data.float()
    with pytest.raises(InvalidSetting, match=r"scales .*float32"), torch.no_grad():
        model(prompts()[:1, :4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_stay_in_bfloat16(packed_models: Callable[..., tuple[Path, Path]], dtype: torch.dtype) -> None:
    """A model that is loaded in another dtype, or moved to it, multiplies with the same scales."""
    _, folder = packed_models("llama", torch.float32, values="int4")
    model, loaded, moved = sparsellm.load(folder), sparsellm.load(folder, dtype=dtype), sparsellm.load(folder).to(dtype)
    for other in (loaded, moved):
        for layer, same in zip(packed_layers(model), packed_layers(other), strict=True):
            assert same.dtype == same.weight.dtype == dtype
            assert torch.equal(layer.scales, same.scales)
            assert torch.equal(layer.values, same.values)
            assert torch.equal(layer.weight.to(dtype), same.weight)
        with torch.no_grad():
            torch.testing.assert_close(other(prompts()).logits.float(), model(prompts()).logits, rtol=0.1, atol=0.1)


def test_quantized_layers_pass_gradients_and_are_compiled(packed_models: Callable[..., tuple[Path, Path]]) -> None:
    rounded, folder = packed_models("llama", torch.float32, values="int4")
    model, dense = sparsellm.load(folder), AutoModelForCausalLM.from_pretrained(rounded)
    gradients = []
    for form in (model, dense):
        inputs = form.get_input_embeddings()(prompts()).detach().requires_grad_()
        form(inputs_embeds=inputs).logits.square().sum().backward()
        gradients.append(inputs.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(prompts()).logits, model(prompts()).logits)


def test_dense_weights_are_not_put_into_a_quantized_layer(packed_models: Callable[..., tuple[Path, Path]]) -> None:
    rounded, folder = packed_models("llama", torch.float32, values="int4")
    with pytest.raises(InvalidSetting, match="integers of 4 bits"):
        sparsellm.load(folder).load_state_dict(AutoModelForCausalLM.from_pretrained(rounded).state_dict())


@pytest.mark.filterwarnings("ignore:.*take dense memory")
@pytest.mark.parametrize(
    ("family", "values"),
    [long_unless(False, "llama", None), ("llama", "int8"), ("gpt2", "int4"), long_unless(False, "mixtral", None)],
)
def test_stored_tensors_with_names_of_buffers_are_refused(
    packed_models: Callable[..., tuple[Path, Path]], tmp_path: Path, family: str, values: str | None
) -> None:
    """Plain ones of every dtype, with and without the model's prefix, and packed ones: only decoding sets buffers."""
    folder = packed_models(family, torch.bfloat16, values=values)[1]
    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    tensors, entries = load_file(folder / "model.safetensors"), json.loads(metadata["sparsellm"])
    model = sparsellm.load(folder)
    path, layer = next((path, x) for path, x in model.named_modules() if isinstance(x, PackedLinear))
    prefix = f"{model.base_model_prefix}."
    changed = shutil.copytree(folder, tmp_path / "changed")

    def refused(key: str, tensor: Tensor, listed: dict[str, Any] = entries) -> None:
        save_file(tensors | {key: tensor.clone()}, changed / "model.safetensors", metadata | {"sparsellm": json.dumps(listed)})
        for load in (sparsellm.load, AutoModelForCausalLM.from_pretrained):
            with pytest.raises((BadCheckpoint, UnsupportedModel), match=re.escape(key)):
                load(changed)
        with pytest.raises(BadCheckpoint, match=re.escape(f"would replace what is decoded for the packed layer {path}")):
            AutoModelForCausalLM.from_pretrained(changed)

    for name in layer.running:
        buffer = getattr(layer, name)
        for tensor in (buffer, buffer.long(), buffer.bool(), buffer.to(torch.int16)):
            refused(f"{path}.{name}", tensor)
    refused(f"{path.removeprefix(prefix)}.mask", layer.mask)
    stored = next(key for key in entries if key.endswith("weight") and "embed" not in key)
    refused(f"{path}.mask", tensors[stored], entries | {f"{path}.mask": entries[stored]})


def test_layers_that_were_loaded_wrongly_are_refused(
    packed_models: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever sets the buffers while transformers loads a model, they are checked before it is returned."""
    running_form = weight_converter.PackedConverter._running_form

    def wrong(*arguments: Any) -> dict[str, Tensor]:
        return {name: part + 1 if name.endswith("row_starts") else part for name, part in running_form(*arguments).items()}

    monkeypatch.setattr(weight_converter.PackedConverter, "_running_form", wrong)
    with pytest.raises(InvalidSetting, match="`row_starts`"):
        AutoModelForCausalLM.from_pretrained(packed_models()[1])
