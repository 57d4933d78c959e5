"""Files that random changes made and that once ended in a traceback, and configurations that only a forward pass refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import LlamaConfig
from typer.testing import Result

from sparsellm.checkpoints.files import card_terms, check_files
from sparsellm.checkpoints.loading import context_length
from sparsellm.errors import BadCheckpoint, BadText
from sparsellm.outputs.verification import read_output
from sparsellm.texts.texts import read_text
from tests.conftest import long_unless

Command = Callable[..., Result]

NAMES = ["n" * 256 + ".safetensors", "d/" * 3000 + "a.safetensors", "a\0b.safetensors"]
"""Names that no file can have."""


@pytest.mark.parametrize("name", NAMES, ids=["long part", "long path", "NUL"])
def test_index_naming_an_impossible_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors\.index\.json"):
        check_files("model", tmp_path)


@pytest.mark.parametrize("name", NAMES, ids=["long part", "long path", "NUL"])
def test_report_naming_an_impossible_file(name: str, tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    command("prune", tiny["llama"], tmp_path / "out", "--method", "magnitude")
    file = tmp_path / "out" / "sparsellm.json"
    report = json.loads(file.read_text())
    file.write_text(json.dumps({**report, "files": [*report["files"], name]}))
    with pytest.raises(BadCheckpoint, match=r"sparsellm\.json"):
        read_output(tmp_path / "out")


def test_parquet_of_text_that_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "words.parquet"
    words = pyarrow.StringArray.from_buffers(1, pyarrow.array([0, 1], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"\xf4"))
    parquet.write_table(pyarrow.table({"text": words}), file)
    with pytest.raises(BadText, match=r"words\.parquet"):
        read_text(str(file), "calibration")


@pytest.mark.parametrize("head", ["language: " + "{" * 5000, "language: " + "[" * 5000, "license: [", "license: a\nlicense: b"])
def test_card_that_cannot_be_read_says_nothing(head: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\n# A model\n")
    assert card_terms(tmp_path) == {}


@pytest.mark.parametrize("longest", [-1, 0])
def test_configuration_without_a_limit_of_tokens(longest: int) -> None:
    assert context_length(LlamaConfig(max_position_embeddings=longest)) == 2048


UNRUN = [
    ("opt", {"dropout": -1}),
    ("opt", {"dropout": 1.5}),
    ("opt", {"num_attention_heads": -1}),
    ("opt", {"num_attention_heads": -4}),
    ("opt", {"return_dict": 0}),
    ("llama", {"num_hidden_layers": 0}),
    ("llama", {"num_hidden_layers": -1}),
]
"""Fields with which transformers builds a model, which fails when it is first run or has no blocks."""


@pytest.mark.parametrize(
    ("family", "fields", "way"),
    [
        long_unless((place + number) % 4 == 0, *case, way)  # each once, and each way with some
        for place, case in enumerate(UNRUN)
        for number, way in enumerate(("prune", "prune --offload", "prune --evaluate", "evaluate"))
    ],
)
def test_configuration_that_fails_in_the_first_pass(
    family: str, fields: dict[str, Any], way: str, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    """It is refused in one message before any layer is pruned, and nothing is left."""
    model, out = Path(shutil.copytree(tiny[family], tmp_path / "model")), tmp_path / "out"
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | fields))
    drawn = ("--calibration", text_file, "--samples", 2, "--sequence-length", 32, "--method", "wanda")
    words = {
        "prune": ("prune", model, out, *drawn),
        "prune --offload": ("prune", model, out, *drawn, "--offload"),
        "prune --evaluate": ("prune", model, out, "--method", "magnitude", "--evaluate", text_file, "--sequence-length", 32),
        "evaluate": ("evaluate", model, "--text", text_file, "--sequence-length", 32),
    }[way]
    result = command(*words)
    message = " ".join(result.stderr.split())
    assert result.exit_code == 1, (result.exception, message)
    assert message.count("error:") == 1, message
    assert "config.json" in message, message
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_evaluate_refuses_the_tokenizer_of_another_model(
    tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    model = Path(shutil.copytree(tiny["llama"], tmp_path / "model"))
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"word{number}": len(vocabulary) + number for number in range(20)}
    file.write_text(json.dumps(tokenizer))
    result = command("evaluate", model, "--text", text_file, "--sequence-length", 32)
    message = " ".join(result.stderr.split())
    assert result.exit_code == 1, message
    assert "The tokenizer of" in message, message
    assert "276 tokens" in message, message
    assert "embeddings for 260" in message, message
