"""Models whose folders lack the files of a tokenizer: refused where a text is tokenized, pruned where none is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from sparsellm import prune, recover
from sparsellm.checkpoints.loading import Checkpoint
from sparsellm.errors import BadCheckpoint
from tests.conftest import report_of

if TYPE_CHECKING:
    from typer.testing import Result

Command = Callable[..., "Result"]
TOKENS = torch.randint(0, 256, (8, 32), generator=torch.Generator().manual_seed(0))
LACKS = "has no tokenizer: it lacks tokenizer.json"


@pytest.fixture
def bare(tiny: dict[str, Path], tmp_path: Path) -> Path:
    """A Llama with a tokenizer_config.json that names a class, and none of the files that the class reads."""
    folder = Path(shutil.copytree(tiny["llama"], tmp_path / "bare"))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "unk_token":  "<unk>"}')
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("prune", "--method", "wanda", "--calibration"),
        ("prune", "--method", "magnitude", "--evaluate"),
        ("prune", "--method", "magnitude", "--task", "boolq", "--evaluate"),
        ("plan", "--method", "wanda", "--calibration"),
        ("evaluate", "--text"),
    ],
)
def test_a_text_needs_it(
    words: tuple[str, ...], bare: Path, text_file: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before the weights are read, in one message; transformers would tokenize with a vocabulary of three tokens."""
    monkeypatch.setattr(Checkpoint, "load", lambda *_, **__: pytest.fail("the weights were read"))
    name, *options = words
    folders = (bare, tmp_path / "out") if name == "prune" else (bare,)
    ran = command(name, *folders, *options, text_file, "--sequence-length", 32)
    message = " ".join(ran.stderr.split())
    assert ran.exit_code == 1
    assert message.count(LACKS) == message.count("error:") == 1, message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("offload", [False, True])
def test_without_a_text_the_model_is_pruned(offload: bool, bare: Path, tmp_path: Path, command: Command) -> None:
    """One note says that it has no tokenizer; what the folder has goes along, and nothing is made up."""
    out = tmp_path / "out"
    ran = command("prune", bare, out, "--method", "magnitude", *(("--offload",) if offload else ()))
    assert ran.exit_code == 0, ran.stderr
    assert ran.stderr.count(LACKS) == 1
    assert sum(LACKS in note for note in report_of(out)["notes"]) == 1
    assert {file.name for file in out.glob("*token*")} == {"tokenizer_config.json"}
    assert (out / "tokenizer_config.json").read_bytes() == (bare / "tokenizer_config.json").read_bytes()
    assert command("verify", out, "--against", bare).exit_code == 0


def test_token_ids_are_no_text(bare: Path, tmp_path: Path) -> None:
    """Calibration and recovery on token ids need no tokenizer either."""
    out = prune(bare, "wanda", "50%", calibration=TOKENS).save_pretrained(tmp_path / "out")
    report = recover(out, bare, TOKENS, steps=2).report
    assert sum(LACKS in note for note in report.notes) == 1
    with pytest.raises(BadCheckpoint, match=LACKS):
        recover(out, bare, ["the sum of the weights"], steps=2)


def test_sentencepiece_that_is_not_installed(
    bare: Path, text_file: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text is refused with the packages and the extra; without one the model is pruned, its tokenizer byte for byte."""
    for package in ("sentencepiece", "protobuf"):
        monkeypatch.setattr(f"transformers.utils.is_{package}_available", lambda: False)
    (bare / "tokenizer.model").write_bytes(b"\x0a\x0e no pieces")
    needs = "is a SentencePiece model, which needs sentencepiece and protobuf: pip install 'sparsellm[sentencepiece]'"
    ran = command("prune", bare, tmp_path / "out", "--method", "wanda", "--calibration", text_file, "--sequence-length", 16)
    assert ran.exit_code == 1
    assert " ".join(ran.stderr.split()).count(needs) == 1
    assert not (tmp_path / "out").exists()
    ran = command("prune", bare, tmp_path / "out", "--method", "magnitude")
    assert ran.exit_code == 0, ran.stderr
    assert sum(needs in note for note in report_of(tmp_path / "out")["notes"]) == 1
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == (bare / "tokenizer.model").read_bytes()


def test_a_damaged_tokenizer_is_refused_by_all(bare: Path, tmp_path: Path, command: Command) -> None:
    """Unlike one that is not there: its files would go along."""
    (bare / "tokenizer.json").write_text(json.dumps({"model": {}}))
    ran = command("prune", bare, tmp_path / "out", "--method", "magnitude")
    assert ran.exit_code == 1
    assert "has no tokenizer that loads" in " ".join(ran.stderr.split())
