"""Changed files shown to the command line: exit status 0, 1 or 2, at most one message, no traceback, nothing left behind."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pyarrow
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file
from typer.testing import Result

import sparsellm
from tests.conftest import extensions, save_small
from tests.fuzzing import Changed, either, limited, mutated, replaced

INPUTS = 20
PACKED_INPUTS = 120

Command = Callable[..., Result]

SHOWN: dict[str, tuple[str, str]] = {
    "recipe.yaml": ("prune", "--config"),
    "shares.yaml": ("prune", "--allocation"),
    "words.txt": ("evaluate", "--text"),
    "words.raw": ("evaluate", "--text"),
    "words.json": ("evaluate", "--text"),
    "words.jsonl": ("evaluate", "--text"),
    "words.parquet": ("evaluate", "--text"),
    "sweep.yaml": ("sweep", ""),
    "config.json": ("prune", ""),
    "tokenizer.json": ("prune", ""),
    "tokenizer_config.json": ("prune", ""),
    "model.safetensors": ("prune", ""),
    "model.safetensors.index.json": ("prune", ""),
    "pytorch_model.bin": ("prune", ""),
    "sparsellm.json": ("verify", ""),
}
"""By the file that is changed, the command that reads it, and its option; without one it is a file of the model."""

TEXT = "the sum of the weights that stay"


def content(name: str, dense: Path) -> bytes:
    """A sound file of that name."""
    texts = {
        "recipe.yaml": "model: dense\nmethod: magnitude\nsparsity: 2:4\nseed: 3\n",
        "sweep.yaml": f"recipe: {{model: {json.dumps(str(dense))}, method: magnitude}}\naxes: {{sparsity: [50%]}}\n",
        "shares.yaml": '"self_attn.*": 50%\nmlp.*: 2:4\n',
        "words.txt": TEXT * 3,
        "words.raw": f" = Title = \n \n {TEXT * 3} \n",
        "words.json": json.dumps([TEXT, {"text": TEXT}]),
        "words.jsonl": f'{{"text": "{TEXT}"}}\n"{TEXT}"\n',
    }
    tensors = load_file(dense / "model.safetensors")
    if name in texts:
        return texts[name].encode()
    stream = io.BytesIO()
    if name == "words.parquet":
        parquet.write_table(pyarrow.table({"text": [TEXT, TEXT]}), stream)
    elif name == "pytorch_model.bin":
        torch.save(tensors, stream)
    elif name == "model.safetensors.index.json":
        return json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}).encode()
    else:
        return (dense / name).read_bytes()
    return stream.getvalue()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The smallest model, dense and pruned."""
    return save_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module", autouse=True)
def counts() -> Iterator[list[str]]:
    """A line for each reader, printed when all have run."""
    lines = [f"{'file':30} {'command':9} tried accepted message traceback"]
    yield lines
    print("\n" + "\n".join(lines))


@extensions
@pytest.mark.long
@pytest.mark.parametrize("name", SHOWN)
def test_changed_files_end_in_one_message(
    name: str, folders: dict[str, Path], tmp_path: Path, command: Command, counts: list[str]
) -> None:
    verb, option = SHOWN[name]
    model = Path(shutil.copytree(folders["pruned" if verb == "verify" else "dense"], tmp_path / "model"))
    sound = content(name, folders["pruned"] if verb == "verify" else folders["dense"])
    inside = verb != "sweep" and not option
    file = (model if inside else tmp_path) / name
    if name == "model.safetensors.index.json":
        (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    if name == "pytorch_model.bin":
        (model / "model.safetensors").unlink()
    out = tmp_path / "out"
    words: dict[str, tuple[object, ...]] = {
        "prune": (model, out, "--sparsity", "2:4", *(() if name == "recipe.yaml" else ("--method", "magnitude"))),
        "evaluate": (model, "--sequence-length", 8),
        "verify": (model,),
        "sweep": (file, out),
    }
    line = (verb, *words[verb], *((option, file) if option else ()))
    change: Changed = mutated([sound])
    if name.endswith(".json"):
        change = either(change, replaced([json.loads(sound)]))
    random = Random(name)
    file.write_bytes(sound)
    there = sorted(one.name for one in (*tmp_path.iterdir(), *model.iterdir()))
    result = command(*line)
    assert result.exit_code == 0, result.stderr
    shutil.rmtree(out, ignore_errors=True)
    statuses: list[int] = []
    failures: list[str] = []
    for _ in range(INPUTS):
        file.write_bytes(change(random))
        with limited(60):
            result = command(*line)
        statuses.append(result.exit_code)
        if fault := _fault(result):
            failures.append(f"{fault}\n    {file.read_bytes()[:400]!r}")
        if result.exit_code == 0 or (verb == "sweep" and (out / "sweep.json").is_file()):
            shutil.rmtree(out, ignore_errors=True)
        left = sorted(one.name for one in (*tmp_path.iterdir(), *model.iterdir()))
        assert left == there, f"{set(left) ^ set(there)} beside {file.read_bytes()[:400]!r}"
    refused = sum(status in (1, 2) for status in statuses) - len(failures)
    counts.append(f"{name:30} {verb:9} {INPUTS:5} {statuses.count(0):8} {refused:7} {len(failures):9}")
    assert not failures, "\n".join(failures)
    assert refused > 0


@extensions
@pytest.mark.long
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "sparsellm.json"])
def test_changed_packed_files_fail_verification_in_one_message(
    name: str, folders: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    """Any other bytes fail, except in the report, where space between values means nothing."""
    packed = tmp_path / "packed"
    sparsellm.pack(folders["pruned"], packed)
    file = packed / name
    sound = file.read_bytes()
    change: Changed = mutated([sound])
    if name.endswith(".json"):
        change = either(change, replaced([json.loads(sound)]))
    random, there, statuses = Random(name), sorted(packed.iterdir()), list[int]()
    for _ in range(PACKED_INPUTS):
        file.write_bytes(change(random))
        with limited(60):
            result = command("verify", packed)
        assert not _fault(result), file.read_bytes()[:400]
        statuses.append(result.exit_code)
        assert (result.exit_code == 0) <= (file.read_bytes() == sound or name == "sparsellm.json")
    assert statuses.count(1) > 0.9 * PACKED_INPUTS
    assert (sorted(packed.iterdir()), sorted(tmp_path.iterdir())) == (there, [packed])
    file.write_bytes(sound)
    assert command("verify", packed).exit_code == 0


def _fault(result: Result) -> str:
    """What is wrong with how a command ended, if anything."""
    message = " ".join(result.stderr.split())
    if result.exit_code not in (0, 1, 2):
        return f"exit status {result.exit_code}: {message}"
    if not isinstance(result.exception, SystemExit | None) or "Traceback" in message:
        return f"traceback: {result.exception!r}"
    errors = len(re.findall(r"(?<!\.)\berror:", message))  # a layer of a report has a field `error` too
    return f"{errors} messages: {message}" if result.exit_code == 1 and errors != 1 else ""
