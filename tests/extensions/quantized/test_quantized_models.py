"""Quantized checkpoints as they are published: dequantized exactly, whole and block by block, by every command."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from typer.testing import Result

import sparsellm
from sparsellm.checkpoints.comparison import StoredTensors
from sparsellm.checkpoints.headers import TensorHeader, read_headers
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.checkpoints.remarks import remarks_to
from sparsellm.checkpoints.tensor_index import TensorLocation, read_all, stored_row_chunks
from sparsellm.errors import BadCheckpoint, UnsupportedModel
from tests.conftest import report_of
from tests.quantizing import SCHEMES, set_fields, write_mxfp4, write_plain, write_quantized

WIDTHS = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.05,
    "dtype": torch.bfloat16,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DENSE: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**WIDTHS),
    "qwen3": lambda: transformers.Qwen3Config(**WIDTHS, head_dim=16),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**WIDTHS, **EXPERTS, num_experts=4, head_dim=16),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **WIDTHS | {"num_key_value_heads": 4},
        **EXPERTS,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=20,  # with the rotary part 28 rows, which are no multiple of a block
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **WIDTHS | {"intermediate_size": 64}, num_local_experts=4, num_experts_per_tok=2, head_dim=16
    ),
}
CASES = [
    *(("llama", scheme) for scheme in SCHEMES if scheme != "FP8 in small blocks"),
    ("qwen3", "FP8 in blocks"),
    ("qwen3_moe", "FP8 in blocks"),
    ("deepseek_v3", "FP8 in blocks"),
    ("gpt_oss", "MXFP4"),
]
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def dense(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models in bfloat16, with the tokenizer of the tiny ones."""
    folder, found = tmp_path_factory.mktemp("dense"), {}
    for name, config in DENSE.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config())
        model.save_pretrained(folder / name)
        for file in tiny["llama"].glob("tokenizer*"):
            shutil.copy(file, folder / name)
        found[name] = folder / name
    return found


Written = Callable[[str, str], tuple[Path, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def written(dense: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Writes, once, a quantized checkpoint of a family; returns its folder and the tensors that it stands for."""
    folder, found = tmp_path_factory.mktemp("quantized"), dict[tuple[str, str], tuple[Path, dict[str, Tensor]]]()

    def write(family: str, scheme: str) -> tuple[Path, dict[str, Tensor]]:
        if (family, scheme) not in found:
            target = folder / f"{family}-{len(found)}"
            if scheme == "MXFP4":
                tensors = write_mxfp4(dense[family], target)
            else:
                is_router = f"{'.' if family == 'llama' else ''}mlp.gate.weight"
                tensors = write_quantized(
                    dense[family], target, scheme, layers=lambda name: ".layers." in name and not name.endswith(is_router)
                )
            found[family, scheme] = target, tensors
        return found[family, scheme]

    return write


def changed(folder: Path, target: Path, change: Callable[[dict[str, Tensor]], object], **fields: Any) -> Path:
    """A copy of a checkpoint with other tensors and fields of config.json."""
    shutil.copytree(folder, target)
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    set_fields(target, **fields)
    return target


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_weights_are_numbers_times_scales(family: str, scheme: str, written: Written) -> None:
    """Bit by bit what the definition of the format gives in float32, and that rounded once."""
    folder, expected = written(family, scheme)
    file = folder / "model.safetensors"
    for dtype in (torch.float32, torch.bfloat16):
        found = read_all([file], dtype)
        assert found.keys() == expected.keys() == read_headers(file).keys()
        for key, tensor in expected.items():
            plain = tensor.dtype is not torch.float32
            assert found[key].dtype is (tensor.dtype if plain else dtype), key
            assert torch.equal(found[key], tensor if plain else tensor.to(dtype)), key
            assert read_headers(file)[key].shape == tensor.shape
    key = next(key for key in expected if key.endswith(("down_proj.weight", "down_proj")))
    chunks = list(stored_row_chunks(TensorLocation(file, key), torch.float32))
    assert torch.equal(torch.cat(chunks), expected[key])


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_pruned_like_the_plain_model(
    family: str, scheme: str, written: Written, text_file: Path, command: Callable[..., Result], tmp_path: Path
) -> None:
    """The output is that of the dequantized checkpoint, an ordinary one, whether it is read whole or block by block."""
    folder, expected = written(family, scheme)
    plain = write_plain(folder, tmp_path / "plain", expected, torch.bfloat16)
    set_fields(plain, quantization_config=None)
    settings = ["--sparsity", "50%", "--method", "wanda", "--calibration", str(text_file), "--samples", "4"]
    settings += ["--sequence-length", "32"]
    outputs = [tmp_path / name for name in ("of plain", "whole", "by block")]
    for model, output, offload in zip((plain, folder, folder), outputs, ((), (), ("--offload",)), strict=True):
        result = command("prune", model, output, *settings, *offload)
        assert result.exit_code == 0, result.output
    first, *others = [StoredTensors(output, AutoModelForCausalLM.from_pretrained(output)) for output in outputs]
    for other in others:
        assert first.files.keys() == other.files.keys()
        assert all(torch.equal(tensor, other[key]) for key, tensor in first)
    for output in outputs:
        assert json.loads((output / "config.json").read_text()) == json.loads((plain / "config.json").read_text())
        sparsellm.verify(output, against=folder)
        assert {key: x.dtype for key, x in stored_in(output).items()} == {key: x.dtype for key, x in stored_in(plain).items()}
    for output in outputs[1:]:
        assert sum("is quantized" in note for note in report_of(output)["notes"]) == 1
    assert not any("as a whole" in note for note in report_of(outputs[2])["notes"])


def stored_in(folder: Path) -> dict[str, TensorHeader]:
    """The tensors in the files of a checkpoint."""
    return {key: header for file in folder.glob("*.safetensors") for key, header in read_headers(file).items()}


def by_transformers(folder: Path, scheme: str) -> Any:
    """The model as transformers dequantizes it."""
    settings: dict[str, Any] = {
        "FP8 in blocks": lambda: transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 32)),
        "FP8 in small blocks": lambda: transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(4, 4)),
        "MXFP4": lambda: transformers.Mxfp4Config(dequantize=True),
    }
    given = settings.get(scheme, lambda: transformers.CompressedTensorsConfig(run_compressed=False))()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=given).eval()


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("qwen3", "FP8 in blocks"),
        ("qwen3_moe", "FP8 in blocks"),
        ("deepseek_v3", "FP8 in small blocks"),  # whole ones: transformers takes others where the last one is cut off
        ("gpt_oss", "MXFP4"),
        ("llama", "compressed-tensors int4"),
        ("llama", "compressed-tensors FP8"),
    ],
)
def test_like_the_dequantization_of_transformers(family: str, scheme: str, written: Written) -> None:
    folder, _ = written(family, scheme)
    with remarks_to(lambda *_: None):
        ours = open_checkpoint(str(folder)).load()
    theirs = by_transformers(folder, scheme)
    state = theirs.state_dict()
    assert ours.state_dict().keys() <= state.keys()  # some keep the scales
    assert all(torch.equal(tensor, state[key]) for key, tensor in ours.state_dict().items())
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme.startswith("compressed-tensors")])
def test_like_the_decompression_of_compressed_tensors(scheme: str, written: Written) -> None:
    """Its own compressors, layer by layer; they multiply in the dtype of the scales, bfloat16, and so round once as well."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    if "reordered" in scheme:
        pytest.skip("compressed-tensors has dropped groups in another order since 0.15")
    folder, _ = written("llama", scheme)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = QuantizationScheme(**settings["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    stored = load_file(folder / "model.safetensors")
    found = read_all([folder / "model.safetensors"], torch.bfloat16)
    modules = sorted({key.rpartition(".")[0] for key in stored if key.endswith("weight_scale")})
    assert len(modules) == 14
    for module in modules:
        parts = {key.removeprefix(f"{module}."): x for key, x in stored.items() if key.startswith(f"{module}.")}
        theirs = compressor.decompress(parts, group)["weight"]
        assert torch.equal(found[f"{module}.weight"], theirs.to(torch.bfloat16)), module


def test_every_command_reads_them(
    written: Written, tiny: dict[str, Path], text_file: Path, command: Callable[..., Result], tmp_path: Path
) -> None:
    """`plan`, `inspect`, `evaluate`, `verify`, `recover`, each with one note on the format and the size in 16 bits."""
    folder, expected = written("qwen3", "FP8 in blocks")
    plain = write_plain(folder, tmp_path / "plain", expected, torch.bfloat16)
    set_fields(plain, quantization_config=None)
    texts, samples = ["--sequence-length", "32"], ["--calibration", text_file, "--samples", "8", "--sequence-length", "32"]
    pruned = tmp_path / "pruned"
    runs = {
        "plan": command("plan", folder, "--method", "wanda", "--sparsity", "50%", *samples),
        "prune": command("prune", folder, pruned, "--method", "wanda", "--sparsity", "50%", *samples),
        "inspect": command("inspect", folder),
        "evaluate": command("evaluate", folder, "--text", text_file, *texts),
        "recover": command("recover", pruned, tmp_path / "recovered", "--against", folder, "--steps", "2", *samples),
    }
    for name, result in runs.items():
        assert result.exit_code == 0, (name, result.output)
        counts = [
            " ".join(said.split()).count("is quantized (FP8 in blocks of 16 x 32") for said in (result.stdout, result.stderr)
        ]
        assert max(counts) == 1, (name, result.stdout, result.stderr)
    assert command("verify", pruned, "--against", folder).exit_code == 0
    integers = ["--method", "sparsegpt", "--sparsity", "50%", "--values", "int4", *samples]
    assert command("prune", folder, tmp_path / "int4", *integers).exit_code == 0
    assert command("export", tmp_path / "int4", tmp_path / "exported").exit_code == 0
    exported = json.loads((tmp_path / "exported" / "config.json").read_text())["quantization_config"]
    assert (exported["quant_method"], exported["format"]) == ("compressed-tensors", "pack-quantized")
    assert command("verify", pruned, "--against", plain).exit_code == 0
    values = [json.loads(command("evaluate", x, "--text", text_file, *texts, "--json").stdout) for x in (folder, plain)]
    assert values[0]["perplexity"][str(text_file)]["value"] == values[1]["perplexity"][str(text_file)]["value"]
    assert "quantization_config" not in json.loads((tmp_path / "recovered" / "config.json").read_text())


def test_weights_of_several_files(written: Written, tmp_path: Path) -> None:
    """Scales may be in another file than the numbers, as in DeepSeek-V3."""
    folder, expected = written("qwen3", "FP8 in blocks")
    target = Path(shutil.copytree(folder, tmp_path / "sharded"))
    stored = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    places = {key: names[key.endswith("_scale_inv") or ".1." in key] for key in stored}
    for name in names:
        save_file({key: stored[key] for key, place in places.items() if place == name}, target / name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    found = read_all([target / name for name in names], torch.float32)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor.float(), expected[key].float()) for key, tensor in found.items())
    with remarks_to(lambda *_: None):
        model = open_checkpoint(str(target)).load()
    assert torch.equal(model.state_dict()[DOWN], expected[DOWN].bfloat16())


def test_scales_of_activations_are_left_out(written: Written, tmp_path: Path) -> None:
    """Static scales of inputs and of the cache serve to quantize activations; the note counts them."""
    folder, expected = written("llama", "compressed-tensors FP8")

    def add(stored: dict[str, Tensor]) -> None:
        stored[DOWN.replace("weight", "input_scale")] = torch.ones(1)
        stored["model.layers.0.self_attn.k_scale"] = torch.ones(1)

    target, said = changed(folder, tmp_path / "static", add), []
    with remarks_to(lambda text, _: said.append(text)):
        open_checkpoint(str(target))
    assert said[0].endswith("; 2 scales of activations are left out")
    assert read_headers(target / "model.safetensors").keys() == expected.keys()


def drop(*endings: str) -> Callable[[dict[str, Tensor]], None]:
    """Removes the parts of a weight."""

    def change(stored: dict[str, Tensor]) -> None:
        for ending in endings:
            del stored[DOWN + ending]

    return change


def put(ending: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    """Replaces a part of a weight."""

    def change(stored: dict[str, Tensor]) -> None:
        stored[DOWN + ending] = value(stored[DOWN + ending]).contiguous()

    return change


FP8, INT4, NF4, ORDERED = (
    ("FP8 in blocks",),
    ("compressed-tensors int4",),
    ("bitsandbytes, nested",),
    ("compressed-tensors int8, reordered",),
)
DAMAGED: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], dict[str, Any], str]] = {
    "no scales": (*FP8, drop("_scale_inv"), {}, r"down_proj.weight is in float8_e4m3fn and has no scales"),
    "no numbers": (*FP8, drop(""), {}, r"down_proj.weight is quantized .* has no numbers"),
    "scales of another shape": (
        *FP8,
        put("_scale_inv", lambda x: x[:-1]),
        {},
        r"down_proj.weight of shape \(64, 96\) has scales \[3, 3\] in float32, and config.json says blocks of 16 x 32",
    ),
    "NaN": (*FP8, put("_scale_inv", lambda x: x * torch.nan), {}, r"down_proj.weight: its scales hold NaN or infinity"),
    "half dequantized": (
        *FP8,
        lambda stored: (stored.update({DOWN: stored[DOWN].bfloat16()}), drop("_scale_inv")(stored)),
        {},
        r"down_proj.weight is in bfloat16 and has no scales",
    ),
    "dequantized beside its scales": (
        *FP8,
        put("", lambda x: x.bfloat16()),
        {},
        r"down_proj.weight is in bfloat16, which is not FP8",
    ),
    "plain": (
        *FP8,
        lambda stored: [
            stored.update({key: x.bfloat16()}) if "float8" in str(x.dtype) else key.endswith("_inv") and stored.pop(key)
            for key, x in list(stored.items())
        ],
        {},
        r"says that the weights are quantized \(FP8 .* none of them is",
    ),
    "another block": (
        *FP8,
        lambda _: None,
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        r"has scales .* and config.json says blocks of 128 x 128, which is not FP8",
    ),
    "another method": (
        *FP8,
        lambda _: None,
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        r"says that the weights are quantized \(GPTQ int4\), and none of them is",
    ),
    "other words": (
        *INT4,
        put("_packed", lambda x: x[:, :-1]),
        {},
        r"down_proj.weight of shape \(64, 96\) is not in \[64, 11\]",
    ),
    "no shape": (*INT4, drop("_shape"), {}, r"down_proj.weight has no weight_shape"),
    "groups that are not there": (
        *ORDERED,
        put("_g_idx", lambda x: x + 1),
        {},
        r"down_proj.weight: its columns are in groups up to 6, and it has scales for 6",
    ),
    "no zero points": (
        "AWQ",
        lambda stored: stored.pop(DOWN.replace("weight", "qzeros")),
        {},
        r"down_proj.weight has numbers .* and other zero points or groups, which is not AWQ int4",
    ),
    "scales of activations of AWQ": (
        "AWQ",
        lambda stored: stored.update({"model.layers.0.mlp.act_fn.scales": torch.ones(96)}),
        {},
        r"AWQ scales of activations .*act_fn.scales",
    ),
    "plain and quantized": (
        "GPTQ",
        lambda stored: stored.update({DOWN: torch.ones(64, 96)}),
        {},
        r"down_proj.weight is stored both plain and quantized \(GPTQ int4\)",
    ),
    "a bias that the model lacks": (
        "GPTQ",
        lambda stored: stored.update({DOWN.replace("weight", "bias"): torch.ones(64)}),
        {},
        r"down_proj.bias, which is not 0, and the model has no such bias",
    ),
    "an empty part": (*FP8, put("_scale_inv", lambda x: x[:0]), {}, r"down_proj.weight has a part of shape \[0, 3\]"),
    "an endless block": (
        *NF4,
        put(".quant_state.bitsandbytes__nf4", lambda x: text(json.loads(bytes(x.tolist())) | {"blocksize": 10**30})),
        {},
        r"down_proj.weight of shape .* in blocks of 1000",
    ),
    "an infinite block": (
        *NF4,
        put(".quant_state.bitsandbytes__nf4", lambda x: text(json.loads(bytes(x.tolist())) | {"blocksize": float("inf")})),
        {},
        r"down_proj.weight has no quant_state",
    ),
    "groups as a list": (
        *INT4,
        put("_packed", lambda x: x[:, :-1]),
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": ["x"]}},
        r"weight of shape \(64, 96\) is not in \[64, 11\]",
    ),
    "another quant_state": (
        *NF4,
        put(".quant_state.bitsandbytes__nf4", lambda x: x[:-2]),
        {},
        r"down_proj.weight has no quant_state",
    ),
    "too few nested scales": (
        *NF4,
        put(
            ".quant_state.bitsandbytes__nf4",
            lambda x: text(json.loads(bytes(x.tolist())) | {"nested_blocksize": 8}),
        ),
        {},
        r"down_proj.weight: its nested scales are not those of its blocks",
    ),
}


def text(content: dict[str, Any]) -> Tensor:
    """The bytes of a JSON object."""
    return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)


@pytest.mark.parametrize("name", DAMAGED)
def test_what_contradicts_itself_is_refused(
    name: str, written: Written, text_file: Path, command: Callable[..., Result], tmp_path: Path
) -> None:
    """By one message, before anything is written."""
    scheme, change, fields, message = DAMAGED[name]
    folder = changed(written("llama", scheme)[0], tmp_path / "damaged", change, **fields)
    result = command("prune", folder, tmp_path / "out", "--sparsity", "50%", "--method", "magnitude")
    said = " ".join(result.stderr.split())
    assert result.exit_code == 1
    assert re.search(message, said), said
    assert said.count("error") <= 1
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq, bits 3"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq, bits 4, version gemv"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, load_in_8bit True"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
        ({"quant_method": "gptq", "bits": 4.0}, "gptq, bits 4.0"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq, bits 4, checkpoint_format marlin"),
        (
            {"quant_method": "compressed-tensors", "format": "x", "transform_config": {"config_groups": {"R3": {}}}},
            "compressed-tensors x",
        ),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "compressed-tensors marlin-24"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"0": {"weights": {"num_bits": 4}}, "1": {"weights": {"num_bits": 3, "type": "int"}}},
            },
            "compressed-tensors pack-quantized, int3 and int4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"0": {"weights": {"num_bits": 6, "type": "float"}}},
            },
            "compressed-tensors float-quantized, float6",
        ),
        ({}, "None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_formats_are_refused_by_name(settings: dict[str, Any], kind: str, written: Written, tmp_path: Path) -> None:
    folder = changed(written("llama", "FP8 in blocks")[0], tmp_path / "other", lambda _: None, quantization_config=settings)
    with pytest.raises(UnsupportedModel, match=re.escape(kind)):
        open_checkpoint(str(folder))


def test_other_floats_are_not_damage(written: Written, tmp_path: Path) -> None:
    """Weights in a dtype that is not read, as the configuration of other hardware has them."""

    def convert(tensors: dict[str, Tensor]) -> None:
        for key, tensor in tensors.items():
            if tensor.dtype is torch.float8_e4m3fn:
                tensors[key] = tensor.float().to(torch.float8_e4m3fnuz)

    folder = changed(written("llama", "FP8 in blocks")[0], tmp_path / "other", convert)
    with pytest.raises(UnsupportedModel, match="float8_e4m3fnuz"):
        open_checkpoint(str(folder))


def test_a_lost_configuration_is_told(written: Written, tmp_path: Path) -> None:
    folder = changed(written("llama", "FP8 in blocks")[0], tmp_path / "lost", lambda _: None, quantization_config=None)
    with pytest.raises(UnsupportedModel, match=r"config.json .*quantization_config"):
        open_checkpoint(str(folder))


def test_only_safetensors(written: Written, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written("llama", "GPTQ")[0], tmp_path / "pickled"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="not in safetensors files"):
        open_checkpoint(str(folder))


def test_variants_of_published_files_are_read(written: Written, tmp_path: Path) -> None:
    """Names of AutoFP8, int32 shapes, numbers stored as bfloat16, zero biases, a stale index, a block of further tokens."""

    def read(scheme: str, change: Callable[[dict[str, Tensor]], object], **fields: Any) -> Path:
        folder, expected = written("llama", scheme)
        target = changed(folder, tmp_path / f"{len(list(tmp_path.iterdir()))}", change, **fields)
        with remarks_to(lambda *_: None):
            state = open_checkpoint(str(target)).load().state_dict()
        assert torch.equal(state[DOWN], expected[DOWN].to(state[DOWN].dtype))
        return target

    def rename(stored: dict[str, Tensor]) -> None:
        for key in [key for key in stored if key.endswith("_scale_inv")]:
            stored[key.removesuffix("_inv")] = stored.pop(key)

    read("FP8 in blocks", rename)
    read("compressed-tensors int4", put("_shape", lambda x: x.int()))
    read("bitsandbytes", put("", lambda x: x.flatten().view(torch.bfloat16)[:, None]))
    read("GPTQ", lambda stored: [stored.pop(key) for key in list(stored) if key.endswith("g_idx")], dtype="float16")
    further = "model.layers.2.mlp.down_proj.weight"
    read("FP8 in blocks", lambda stored: stored.update({further: torch.ones(64, 96).bfloat16()}))
    stale = read("FP8 in blocks", lambda _: None)
    index = {"metadata": {}, "weight_map": {"x": "model-00001-of-00001.safetensors"}}
    (stale / "model.safetensors.index.json").write_text(json.dumps(index))
    assert DOWN in read_headers(stale / "model.safetensors")


def test_what_described_the_quantization_stays_behind(written: Written, command: Callable[..., Result], tmp_path: Path) -> None:
    """GPTQ's own file, and its biases of 0, are named in notes and not copied."""
    bias = DOWN.replace("weight", "bias")
    folder = changed(written("llama", "GPTQ")[0], tmp_path / "gptq", lambda stored: stored.update({bias: torch.zeros(64)}))
    (folder / "quantize_config.json").write_text("{}")
    result = command("prune", folder, tmp_path / "out", "--method", "magnitude", "--sparsity", "50%")
    assert result.exit_code == 0, result.stderr
    assert not (tmp_path / "out" / "quantize_config.json").exists()
    assert bias not in stored_in(tmp_path / "out")
    notes = " ".join(report_of(tmp_path / "out")["notes"])
    assert "quantize_config.json (a description of how the dense model is quantized)" in notes
    assert f"biases of 0 that the model does not have, {bias} first of 1, are left out" in notes


def test_scales_that_two_files_hold_differently_are_refused(written: Written, tmp_path: Path) -> None:
    folder, _ = written("qwen3", "FP8 in blocks")
    target = Path(shutil.copytree(folder, tmp_path / "twice"))
    stored = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    scale = f"{DOWN}_scale_inv"
    save_file(stored, target / "model-00001-of-00002.safetensors")
    save_file({scale: stored[scale] * 2, "x": torch.ones(1)}, target / "model-00002-of-00002.safetensors")
    places = dict.fromkeys(stored, "model-00001-of-00002.safetensors") | {"x": "model-00002-of-00002.safetensors"}
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    with (
        pytest.raises(BadCheckpoint, match=rf"model-0\S+ and model-0\S+ .*{scale}"),
        remarks_to(lambda *_: None),
    ):
        open_checkpoint(str(target))
