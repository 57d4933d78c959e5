"""Tokenizers whose files are missing, incomplete, contradictory, or for packages that are not installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsellm.checkpoints.tokenizers import NoTokenizer, load_tokenizer
from sparsellm.errors import BadCheckpoint, MissingPackage
from tests.conftest import byte_tokenizer

VOCABULARY = json.dumps({token: number for number, token in enumerate(["<unk>", "<s>", "</s>", "a", "b", "ab"])})
MERGES = "#version: 0.2\na b\n"


def folder_of(folder: Path, kind: str | None, model_type: str = "llama", **files: str) -> Path:
    """A folder with the configuration of a model, of a tokenizer if there is a class, and further files."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if kind is not None:
        tokens = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **tokens}))
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("kind", "model_type", "files", "lacks"),
    [
        ("PreTrainedTokenizerFast", "llama", {}, "tokenizer.json (or tokenizer.model)"),
        ("LlamaTokenizer", "llama", {}, "tokenizer.json (or tokenizer.model)"),
        ("LlamaTokenizer", "llama", {"added_tokens.json": '{"<x>": 5}'}, "tokenizer.json (or tokenizer.model)"),
        ("GPT2Tokenizer", "gpt2", {}, "tokenizer.json (or vocab.json and merges.txt)"),
        ("GPT2Tokenizer", "gpt2", {"vocab.json": VOCABULARY}, "tokenizer.json (or merges.txt)"),
        ("GPT2Tokenizer", "gpt2", {"merges.txt": MERGES}, "tokenizer.json (or vocab.json)"),
        ("CTRLTokenizer", "ctrl", {"vocab.json": VOCABULARY}, "merges.txt"),
        ("BertTokenizer", "llama", {}, "tokenizer.json (or vocab.txt)"),
        ("NoSuchTokenizer", "llama", {}, "tokenizer.json (or tokenizer.model)"),
        (None, "llama", {}, "tokenizer.json (or tokenizer.model)"),
        (None, "gpt2", {}, "tokenizer.json (or vocab.json and merges.txt)"),
    ],
)
def test_missing_files(kind: str | None, model_type: str, files: dict[str, str], lacks: str, tmp_path: Path) -> None:
    """transformers makes a tokenizer without a vocabulary of some of these; the message has the files that are missing."""
    with pytest.raises(NoTokenizer) as found:
        load_tokenizer("m", folder_of(tmp_path, kind, model_type, **files), trusted=False)
    assert str(found.value) == f"m has no tokenizer: it lacks {lacks}. Copy the model's tokenizer files into the folder."


@pytest.mark.parametrize(
    ("kind", "files", "tokens"),
    [
        ("GPT2Tokenizer", {"vocab.json": VOCABULARY, "merges.txt": MERGES}, [5]),
        ("ByT5Tokenizer", {}, [100, 101, 1]),  # of bytes: it reads no file
    ],
)
def test_tokenizers_without_a_file_for_all(kind: str, files: dict[str, str], tokens: list[int], tmp_path: Path) -> None:
    tokenizer = load_tokenizer("m", folder_of(tmp_path, kind, **files), trusted=False)
    assert tokenizer("ab")["input_ids"] == tokens


def test_damaged_files_are_not_missing(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "PreTrainedTokenizerFast", **{"tokenizer.json": "{"})
    with pytest.raises(BadCheckpoint, match="m has no tokenizer") as found:
        load_tokenizer("m", folder, trusted=False)
    assert not isinstance(found.value, NoTokenizer)


def test_numbers_of_added_tokens_that_contradict_each_other(tmp_path: Path) -> None:
    folder_of(tmp_path, None)
    byte_tokenizer().save_pretrained(tmp_path)
    load_tokenizer("m", tmp_path, trusted=False)
    file = tmp_path / "tokenizer_config.json"
    added = {"256": {"content": "<s>", "special": True}, "999": {"content": "</s>", "special": True}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"added_tokens_decoder": added}))
    with pytest.raises(BadCheckpoint, match=r"tokenizer_config\.json .*'</s>' .*999.*257"):
        load_tokenizer("m", tmp_path, trusted=False)


@pytest.mark.parametrize("absent", [("sentencepiece",), ("protobuf",), ("sentencepiece", "protobuf")])
def test_packages_that_are_not_installed(absent: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names those that are missing, and the extra."""
    for package in ("sentencepiece", "protobuf"):
        monkeypatch.setattr(f"transformers.utils.is_{package}_available", lambda package=package: package not in absent)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", _fail)
    folder = folder_of(tmp_path, "LlamaTokenizer", **{"tokenizer.model": "\n\x0e"})
    with pytest.raises(MissingPackage, match=rf"{' and '.join(absent)}: .*sparsellm\[sentencepiece\]"):
        load_tokenizer("m", folder, trusted=False)


def _fail(*_: object, **__: object) -> None:
    raise ImportError("a package is missing")


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write the model of SentencePiece that it learns from a text."""
    spm = pytest.importorskip("sentencepiece", reason="the extra `sentencepiece` is not installed")
    pytest.importorskip("google.protobuf", reason="the extra `sentencepiece` is not installed")
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("\n".join(f"The sum of {n} weights that stay, and  {n * n} others." for n in range(200)))

    def write(folder: Path, **settings: object) -> Path:
        numbers = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
        more = {"vocab_size": 400, "model_type": "bpe", "byte_fallback": True, **numbers, **settings}
        spm.SentencePieceTrainer.train(input=str(text), model_prefix=str(folder / "tokenizer"), minloglevel=2, **more)
        (folder / "tokenizer.vocab").unlink()
        return folder

    return write


@pytest.mark.parametrize(
    "settings", [{}, {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}], ids=["nfkc", "as Llama 2"]
)
def test_texts_are_tokenized_as_sentencepiece_does(
    settings: dict[str, object], pieces: Callable[..., Path], tmp_path: Path
) -> None:
    """Also spaces, line breaks and letters that its normalization replaces, and with an index at which a text begins."""
    spm = sys.modules["sentencepiece"]
    folder = pieces(folder_of(tmp_path, "LlamaTokenizer"), **settings)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"legacy": True, "add_bos_token": True}))
    own = spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer = load_tokenizer("m", folder, trusted=False)
    for text in ("The sum, 12 weights.  Others é 漢", "  two\nlines \t and ﬁ ｗ  ", "stay", "a\n\nb"):
        assert tokenizer(text)["input_ids"] == [1, *own.encode(text)], text
