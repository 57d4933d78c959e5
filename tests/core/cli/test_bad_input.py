"""Every mistake gets one clear message before heavy work, exit status 1 or 2, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from huggingface_hub.errors import RevisionNotFoundError
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel
from typer.testing import Result

from sparsellm.checkpoints.loading import Checkpoint
from sparsellm.recipes.fields import METHODS
from tests.conftest import extensions
from tests.fuzzing import limited

Command = Callable[..., Result]


@pytest.fixture
def damaged(tiny: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the tiny Llama, to be damaged."""
    return Path(shutil.copytree(tiny["llama"], tmp_path / "damaged"))


def refused(result: Result, *parts: str, status: int = 1) -> str:
    """Check that a command was refused with one message that has all the parts; the message in one line."""
    message = " ".join(result.stderr.split())
    assert result.exit_code == status, (result.exit_code, message, result.stdout)
    assert "Traceback" not in message
    assert status == 2 or message.count("error:") == 1, message
    for part in parts:
        assert part in message, message
    return message


@extensions
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--sparsity", "70"), ("[0, 1)", "70%")),
        (("--sparsity", "-0.1"), ("[0, 1)",)),
        (("--bits", "0.1"), ("--bits must be between 1.08 and 8.49", "got 0.1")),
        (("--bits", "3", "--sparsity", "50%"), ("so that --sparsity has no place",)),
        (("--bits", "3", "--values", "int4"), ("so that --values has no place",)),
        (("--sparsity", "seventy"), ("'seventy'", "70%", "2:4")),
        (("--sparsity", "100%"), ("[0, 1)",)),
        (("--sparsity", "nan"), ("nan",)),
        (("--sparsity", "4:4"), ("N < M", "4:4")),
        (("--sparsity", "0:4"), ("N < M",)),
        (("--sparsity", "5:7"), ("model.layers.0.self_attn.q_proj", "32", "--exclude")),
        (("--method", "sparsegp"), ("sparsegp", "'sparsegpt'")),
        (("--method", "hessian-magic"), ("hessian-magic", "wanda")),
        (("--set", "solver=alp"), ("'alps'",)),
        (("--dtype", "float33"), ("'float32'",)),
        (("--device", "cuda:99"), ("--device", "cuda:99", "cpu")),
        (("--device", "gpu"), ("--device", "gpu")),
        (("--device", "meta"), ("--device", "meta", "cpu")),
        (("--device", "hpu"), ("--device", "hpu", "cpu")),
        (("--blocks", "2:9"), ("3 blocks", "0 to 2")),
        (("--blocks", "some"), ("first-half",)),
        (("--set", "scope=often"), ("feedforward", "often")),
        (("--set", "blocks=often", "--method", "algorithm1"), ("first-half",)),
        (("--set", "rounds=1", "--method", "algorithm1"), ("rounds", "algorithm1", "epochs")),
        (("--set", "epochs=2"), ("epochs", "sparsellm", "rounds")),
        (("--set", "rounds"), ("NAME=VALUE", "rounds")),
        (("--set", "rounds=many"), ("rounds", "many", "integer")),
        (("--effort", "fsat"), ("--effort", "'fast'")),
        (("--values", "int5"), ("--values", "'int5'", "'int8'")),
        (("--values", "int4", "--group-size", 100), ("--group-size", "multiple of 64", "100")),
        (("--group-size", 64), ("--group-size", "--values")),
        (("--effort", "fast", "--method", "algorithm1"), ("--effort", "algorithm1")),
        (("--effort", "fast", "--method", "wanda"), ("--effort", "wanda")),
        (("--set", "scope=none", "--set", "rounds=5"), ("rounds", "scope")),
        (("--set", "rounds=5", "--method", "alps"), ("rounds", "alps", "refit_steps")),
        (("--set", "true_sequential=true"), ("true_sequential", "sparsellm")),
        (("--set", "true_sequential=true", "--method", "magnitude"), ("true_sequential", "magnitude")),
        (("--set", "true_sequential=3", "--method", "wanda"), ("true_sequential", "3")),
        (("--allocation", "fischer"), ("'fisher'", ".yaml")),
        (("--allocation", "owl", "--sparsity", "2:4"), ("owl", "2:4", "uniform")),
        (("--include", "q_porj"), ("q_porj", "'q_proj'")),
        (("--exclude", "*"), ("Nothing is left",)),
        (("--sequence-length", "65"), ("65", "64")),
        (("--samples", "0"), ("--samples", "0")),
        (("--samples", 10**23), ("--samples", "less than or equal to 2147483647")),
        (("--batch-size", 10**23), ("--batch-size", "less than or equal to 2147483647")),
        (("--values", "int4", "--group-size", 2**63), ("--group-size", "less than or equal to 2147483647")),
        (("--sequence-length", 2**63), ("--sequence-length", "less than or equal to 2147483647")),
        (("--method", "algorithm1", "--set", "alpha=0.0"), ("alpha", "0.0")),
        (("--calibration", "wikitxt2"), ("'wikitext2'",)),
        (("--calibration", "no/such/file.txt"), ("no/such/file.txt",)),
        (("--config", "no-such.yaml"), ("no-such.yaml",)),
    ],
)
def test_impossible_settings(
    words: tuple[str, ...], parts: tuple[str, ...], tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    """A setting that cannot be is refused, naming what it got and what to write."""
    before = [] if "--calibration" in words else ["--calibration", text_file]
    refused(command("prune", tiny["llama"], tmp_path / "out", *before, *words), *parts)
    assert list(tmp_path.iterdir()) == []


def test_samples_beyond_memory(
    tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that do not fit are not drawn."""
    monkeypatch.setattr("sparsellm.runtime.memory.available", lambda device: 10**5)
    words = ("--calibration", text_file, "--samples", 10**4, "--sequence-length", 32)
    refused(command("prune", tiny["llama"], tmp_path / "out", *words), "2,560,000 bytes of memory", "fewer --samples")


@extensions
def test_rounded_models_are_not_rounded_again(tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    """With other integers or the same; also before weights are read. `plan` says so too."""
    words = ("--method", "magnitude", "--sparsity", "50%")
    assert command("prune", tiny["opt"], tmp_path / "int4", *words, "--values", "int4").exit_code == 0
    for values in ("int4", "int8"):
        for words_before in (("prune", tmp_path / "int4", tmp_path / "out"), ("plan", tmp_path / "int4")):
            refused(command(*words_before, *words, "--values", values), "is quantized already, to int4", "--values")
    assert [file.name for file in tmp_path.iterdir()] == ["int4"]
    assert command("prune", tmp_path / "int4", tmp_path / "out", *words).exit_code == 0


def test_a_method_with_inputs_needs_a_text(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """No calibration text for a method that needs one: the message names what can be passed."""
    refused(command("prune", tiny["llama"], tmp_path / "out"), "--calibration", "c4")
    words = ("--method", "magnitude", "--sparsity", "50%", "--allocation", "fisher")
    refused(command("prune", tiny["llama"], tmp_path / "out", *words), "--allocation fisher needs a calibration text")


@extensions
def test_trackers(tiny: dict[str, Path], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown one, and one that is not installed, are refused before any work, by --prune and by --sweep."""
    sweep = tmp_path / "s.yaml"
    sweep.write_text(f"recipe: {{model: {tiny['opt']}, method: magnitude}}\naxes: {{sparsity: [50%]}}\n")
    for words in (("prune", tiny["opt"], tmp_path / "out", "--method", "magnitude"), ("sweep", sweep, tmp_path / "out")):
        refused(command(*words, "--report-to", "wandbb"), "--report-to", "'wandbb'", "'wandb'")
        refused(command(*words, "--report-to", "mlfow"), "'mlfow'", "'mlflow'")
        with monkeypatch.context() as patched:
            patched.setattr("sparsellm.extensions.sharing.tracking.get_available_trackers", list)
            refused(command(*words, "--report-to", "trackio"), "trackio is not installed", "pip install trackio")
    assert list(tmp_path.iterdir()) == [sweep]


def test_usage_errors_exit_2(tiny: dict[str, Path], text_file: Path, command: Command) -> None:
    """Unknown options and a missing output folder are wrong usage."""
    refused(command("prune", tiny["llama"], "--sparsty", "50%"), "--sparsty", status=2)
    refused(command("prune", tiny["llama"], "--calibration", text_file), "OUT", status=2)


@extensions
@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("model: x\nsparsty: 50%\n", ("sparsty", "'sparsity'")),
        ("model: x\nmethod: wonda\ncalibration: c4\n", ("wonda", "'wanda'")),
        ("- a\n- list\n", ("field: value",)),
        ("model: [x\n", ("is not YAML", "line 2")),
        ("samples: many\nmodel: x\ncalibration: c4\n", ("--samples", "many")),
        ("samples: yes\nmodel: x\ncalibration: c4\n", ("--samples", "valid integer", "'yes'")),
        ("samples: true\nmodel: x\ncalibration: c4\n", ("--samples got true",)),
        ("bits: true\nmodel: x\ncalibration: c4\n", ("--bits got true",)),
        ("samples: 9223372036854775808\nmodel: x\ncalibration: c4\n", ("--samples", "less than or equal to")),
        ("sparsity: 50%\n", ("no model",)),
    ],
)
def test_faulty_recipes(content: str, parts: tuple[str, ...], tmp_path: Path, command: Command) -> None:
    """Unknown fields and values in YAML are refused with the nearest right name."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(content)
    refused(command("prune", "--config", recipe, "--print-config"), *parts)


@extensions
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda text: text[: len(text) // 2], ("sparsellm.json cannot be read",)),
        (lambda text: '{"recipe": 3}', ("sparsellm.json is damaged", "recipe")),
        (lambda text: text.replace('"sparsity": "50%"', '"sparsty": "50%"'), ("unknown field 'sparsty'", "'sparsity'")),
    ],
)
def test_faulty_reports_as_recipes(
    change: Callable[[str], str], parts: tuple[str, ...], tmp_path: Path, tiny: dict[str, Path], command: Command
) -> None:
    """A damaged report gives no recipe; nor does a folder without a report."""
    out = tmp_path / "out"
    assert command("prune", tiny["opt"], out, "--method", "magnitude").exit_code == 0
    report = out / "sparsellm.json"
    text = report.read_text(encoding="utf-8")
    assert change(text) != text
    report.write_text(change(text), encoding="utf-8")
    for words in (("prune", "--config", report, tmp_path / "again"), ("plan", tiny["opt"], "--config", out)):
        refused(command(*words), *parts)
    refused(command("prune", "--config", tmp_path, tmp_path / "again"), "sparsellm.json cannot be read: No such file")
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("short.txt", "too short", ("9 tokens", "32", "--sequence-length")),
        ("empty.txt", "", ("empty.txt", "empty")),
        ("empty.json", "[]", ("empty.json",)),
        ("field.json", '[{"body": "words"}]', ("'text'", "body")),
        ("broken.json", '["words"', ("broken.json",)),
        ("broken.jsonl", '{"text": "words"}\n{"text": \n', ("broken.jsonl", "2")),
        ("words.doc", "words", ("words.doc", ".txt")),
    ],
)
def test_unusable_texts(
    name: str, content: str, parts: tuple[str, ...], tiny: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    """A text that is empty, too short, malformed, or without the field is refused before the model is read."""
    file = tmp_path / name
    file.write_text(content)
    words = ("--calibration", file, "--sequence-length", 32)
    refused(command("prune", tiny["llama"], tmp_path / "out", *words), *parts)
    assert not (tmp_path / "out").exists()


def test_wrong_field(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """--text-field with a field that is not there lists the fields that are."""
    file = tmp_path / "words.json"
    file.write_text(json.dumps([{"text": "words", "id": 1}]))
    words = ("--calibration", file, "--text-field", "story")
    refused(command("prune", tiny["llama"], tmp_path / "out", *words), "story", "text", "id")


UP = "model.layers.1.mlp.up_proj.weight"


def cut(folder: Path, size: int) -> None:
    """Cut the weight file off; a negative size is what is lost."""
    file = folder / "model.safetensors"
    os.truncate(file, size if size > 0 else file.stat().st_size + size)


def without_shard(folder: Path) -> None:
    """Put an index in the place of the weight file."""
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def with_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def fields(**changed: object) -> Callable[[Path], object]:
    """What changes fields of the configuration."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changed))

    return change


BERT = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
OWN = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


@extensions
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (shutil.rmtree, ("no folder", "damaged")),
        (lambda folder: cut(folder, -100), ("model.safetensors", "cut off")),
        (lambda folder: cut(folder, 5), ("model.safetensors", "cut off")),
        (lambda folder: (folder / "model.safetensors").unlink(), ("no weights", "model.safetensors")),
        (without_shard, ("lacks 1 of 1", "model-00002-of-00002.safetensors")),
        (lambda folder: (folder / "config.json").write_text("{}"), ("config.json", "model_type")),
        (lambda folder: (folder / "config.json").unlink(), ("config.json", "No such file")),
        (lambda folder: with_weights(folder, lambda tensors: tensors[UP][3].fill_(float("nan"))), ("NaN", UP)),
        (lambda folder: with_weights(folder, lambda tensors: tensors.pop(UP)), ("lacks 1 weights", UP)),
        (lambda folder: BertModel(BERT).save_pretrained(folder), ("BertModel", "causal")),
        (fields(architectures=["LlamaForConditionalGeneration"]), ("LlamaForConditionalGeneration", "causal")),
        (fields(is_encoder_decoder=True), ("causal",)),
        (fields(quantization_config={"quant_method": "modelopt"}), ("modelopt", "plain checkpoint")),
        (fields(quantization_config={"quant_method": "gptq"}), ("config.json", "GPTQ int4")),
        (fields(model_type="gpt_bigger"), ("'gpt_bigger'", transformers.__version__)),
        (fields(model_type="own", auto_map=OWN), ("its own code", "not run", "'own'", "--trust-remote-code")),
    ],
)
def test_models_that_are_not_there_damaged_or_of_the_wrong_kind(
    change: Callable[[Path], object], parts: tuple[str, ...], damaged: Path, tmp_path: Path, command: Command
) -> None:
    """Each is told for what it is before any pruning."""
    change(damaged)
    refused(command("prune", damaged, tmp_path / "out", "--method", "magnitude"), *parts)
    assert not (tmp_path / "out").exists()


def test_revisions(tiny: dict[str, Path], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A revision of a folder, and one that the hub does not have, are refused; one that it has is what is asked for."""
    words = (tmp_path / "out", "--method", "magnitude", "--revision", "v2")
    refused(command("prune", tiny["llama"], *words), "--revision", "'v2'", "hub name")
    asked: list[object] = []

    def download(name: str, revision: str, **_: object) -> str:
        asked.append((name, revision))
        if revision == "v2":
            raise RevisionNotFoundError("404", response=Mock())
        return str(tiny["llama"])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    refused(command("prune", "some/model", *words), "some/model", "'v2'")
    assert command("prune", "some/model", *words[:-1], "main").exit_code == 0
    assert list(dict.fromkeys(asked)) == [("some/model", "v2"), ("some/model", "main")]


def test_unsolved_activation(damaged: Path, text_file: Path, tmp_path: Path, command: Command) -> None:
    """Algorithm 1 refuses an activation that it has no closed form for, and says what works; the default prunes without it."""
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps({**config, "hidden_act": "tanh"}))
    words = ("prune", damaged, tmp_path / "out", "--calibration", text_file, "--samples", 4, "--sequence-length", 32)
    refused(command(*words, "--method", "algorithm1"), "activation", "none")
    result = command(*words)
    assert result.exit_code == 0
    assert "one by one" in result.stderr


def test_hub_name_without_network(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub name that cannot be reached: the message says what to pass instead."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    words = (tmp_path / "out", "--method", "magnitude")
    refused(command("prune", "no-such-org/no-such-model", *words), "no-such-org/no-such-model", "local folder")


def test_unwritable_place(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """An output below a file is refused before any work."""
    (tmp_path / "file").write_text("")
    refused(command("prune", tiny["opt"], tmp_path / "file" / "out", "--method", "magnitude"), "cannot be written")


def test_failure_while_writing_leaves_nothing(
    tiny: dict[str, Path], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk in the middle of writing: one message, no half of an output, and the blocks that are finished stay."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr("sparsellm.outputs.saving.write_shard", full)
    words = ("prune", tiny["opt"], tmp_path / "out", "--method", "magnitude")
    refused(command(*words), "disk is full", "3 blocks are finished and kept", "--resume")
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    assert [file.name for file in (tmp_path / "out").iterdir()] == [".sparsellm"]
    monkeypatch.undo()
    refused(command(*words), "unfinished", "--resume", "--restart")
    assert command(*words, "--resume").exit_code == 0
    assert not (tmp_path / "out" / ".sparsellm").exists()


def test_interruption_leaves_nothing(
    tiny: dict[str, Path], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C: one line, exit status 130, nothing written."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sparsellm.pipeline.prune.prune_blocks", interrupt)
    result = command("prune", tiny["opt"], tmp_path / "out", "--method", "magnitude")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_inspect_fails_on_a_broken_pattern(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """--expect passes on what was pruned so, and fails with exit status 1 on what was not, naming a layer."""
    out = tmp_path / "out"
    assert command("prune", tiny["opt"], out, "--method", "magnitude", "--sparsity", "2:4").exit_code == 0
    assert command("inspect", out, "--expect", "2:4", "--against", tiny["opt"]).exit_code == 0
    refused(command("inspect", out, "--expect", "3:4"), "do not match 3:4", "layers.0")
    refused(command("inspect", tiny["opt"], "--expect", "2:4"), "do not match 2:4")


def test_inspect_tells_what_changed(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """--against names exactly the tensors that were pruned."""
    out = tmp_path / "out"
    assert command("prune", tiny["opt"], out, "--method", "magnitude", "--include", "fc1").exit_code == 0
    found = json.loads(command("inspect", out, "--against", tiny["opt"], "--json").stdout)
    assert found["changed"] == [f"model.decoder.layers.{block}.fc1.weight" for block in range(3)]
    assert found["only_here"] == found["only_there"] == []


def test_expectation_without_any_layer_fails(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """--expect must not pass because nothing was looked at."""
    out = tmp_path / "out"
    assert command("prune", tiny["opt"], out, "--method", "magnitude").exit_code == 0
    report = json.loads((out / "sparsellm.json").read_text())
    (out / "sparsellm.json").write_text(json.dumps({**report, "blocks": []}))
    refused(command("inspect", out, "--expect", "50%"), "no such layer")


def test_overwriting_spares_what_a_run_did_not_write(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """--overwrite refuses a folder with a foreign file in it, and one that holds the model itself."""
    out = tmp_path / "out"
    words = ("--method", "magnitude", "--overwrite")
    assert command("prune", tiny["opt"], out, *words).exit_code == 0
    inner = Path(shutil.copytree(tiny["opt"], out / "dense"))
    refused(command("prune", inner, out, *words), "contains it")
    refused(command("prune", tiny["opt"], out, *words), "dense/config.json", "did not write")
    assert (inner / "model.safetensors").is_file()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    refused(command("prune", tiny["opt"], link, *words), "link")


def test_tokenizer_of_another_model(tiny: dict[str, Path], damaged: Path, text_file: Path, command: Command) -> None:
    """Token numbers beyond the embedding are found before the weights are read."""
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:20].clone()
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    words = ("--calibration", text_file, "--samples", 2, "--sequence-length", 32)
    refused(
        command("prune", damaged, damaged.parent / "out", *words), "The tokenizer of", "has 256 tokens", "embeddings for 20"
    )


def test_weights_in_another_dtype_than_the_configuration_says(damaged: Path, tmp_path: Path, command: Command) -> None:
    """Such a checkpoint is pruned in the configuration's dtype, and verified after conversion."""
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert command("prune", damaged, tmp_path / "out", "--method", "magnitude").exit_code == 0
    assert {x.dtype for x in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("size", [250, 255])
def test_output_names_that_are_too_long(size: int, tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """An output steps aside under a longer name, so that one near the file system's limit is refused at the start."""
    words = ("--method", "magnitude")
    for output in (tmp_path / ("n" * size), tmp_path / "in" / ("é" * (size // 2)) / "out" / ("n" * size)):
        refused(command("prune", tiny["llama"], output, *words), "bytes, more than the file system allows", "shorter")
    assert list(tmp_path.iterdir()) == []


def test_the_longest_output_name(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """A name that is not refused can be written."""
    most = os.pathconf(tmp_path, "PC_NAME_MAX") - len("..12345678.old")
    output = tmp_path / ("n" * most)
    refused(command("prune", tiny["llama"], tmp_path / ("n" * (most + 1)), "--method", "magnitude"), "shorter")
    assert command("prune", tiny["llama"], output, "--method", "magnitude").exit_code == 0
    assert (output / "sparsellm.json").is_file()


@pytest.mark.parametrize("words", [("--exclude", "a\udcff"), ("--calibration", "a\udcff.txt"), ("--evaluate", "\udcff.txt")])
def test_words_that_are_not_utf8(words: tuple[str, str], tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """Bytes that are not UTF-8 on the command line cannot be put into a report; the message shows them as escapes."""
    message = refused(command("prune", tiny["llama"], tmp_path / "out", "--method", "magnitude", *words), "not UTF-8 text")
    assert "\\udcff" in message
    refused(command("prune", tiny["llama"], tmp_path / "o\udcff", "--method", "magnitude"), "not UTF-8 text")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("sparsellm", "alps-accurate")])
def test_the_tokenizer_is_loaded_first(
    method: str, damaged: Path, text_file: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is damaged, missing or of another model is refused before the weights are read, by every method."""

    def load(*_: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(Checkpoint, "load", load)
    words = ("prune", damaged, tmp_path / "out", "--method", method, "--calibration", text_file, "--sequence-length", 16)
    words = words[:5] if method == "magnitude" else words
    tokens = json.loads((damaged / "tokenizer.json").read_text())
    more = {f"w{number}": 256 + number for number in range(10)}
    large = {**tokens, "added_tokens": [], "model": {**tokens["model"], "vocab": tokens["model"]["vocab"] | more}}
    (damaged / "tokenizer.json").write_text(json.dumps(large))
    refused(command(*words), "The tokenizer of", "has 266 tokens", "embeddings for 260")
    (damaged / "tokenizer.json").write_text("{")
    refused(command(*words), "no tokenizer that loads")
    assert not (tmp_path / "out").exists()
    if method != "magnitude":  # which reads no text
        (damaged / "tokenizer.json").unlink()
        refused(command(*words), "has no tokenizer: it lacks tokenizer.json (or tokenizer.model)")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["words.txt", "words.jsonl", "words.parquet", "recipe.yaml", "shares.yaml"])
def test_pipes_are_not_waited_for(name: str, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    """A pipe that nobody writes to is refused where a file of text or of settings is expected."""
    pipe = tmp_path / name
    os.mkfifo(pipe)
    option = {"recipe": "--config", "shares": "--allocation", "words": "--calibration"}[pipe.stem]
    words = ("--method", "wanda", "--sequence-length", 16, "--calibration", text_file, option, pipe)
    with limited():
        refused(command("prune", tiny["llama"], tmp_path / "out", *words), "not a regular file")
    assert list(tmp_path.iterdir()) == [pipe]
