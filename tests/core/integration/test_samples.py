"""Texts from files and names, and the windows cut from them."""

from __future__ import annotations

import gzip
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import sparsellm
from sparsellm.errors import BadText, InvalidSetting, Unreachable
from sparsellm.texts.samples import calibration_windows, test_windows
from sparsellm.texts.texts import Text, read_text
from sparsellm.texts.tokenized import added_tokens, tokenize
from tests.conftest import SHARED

BOS, PAD = 1, 2

PAPERS: dict[str, Any] = {"family": "llama"}
"""With a text of the papers: sequences as their code cuts them, in which the stream alone begins with <s>."""


def tokenizer(padded: bool = False) -> PreTrainedTokenizerFast:
    """A word is a token, its number the word's plus ten; the stream begins with <s>. At most eight tokens, it says."""
    vocabulary = {"<unk>": 0, "<s>": BOS, "<pad>": PAD} | {str(number): number + 10 for number in range(5000)}
    vocabulary |= {f"<{number}>": number for number in range(3, 10)}  # tokenizers 0.22 warns of numbers without a token
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    if padded:
        backend.enable_padding(pad_id=PAD, pad_token="<pad>", length=4096)
        backend.enable_truncation(6)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", pad_token="<pad>", unk_token="<unk>", model_max_length=8
    )


def counting(first: int, count: int) -> str:
    return " ".join(str(number) for number in range(first, first + count))


def runs(windows: Tensor) -> bool:
    """Whether every window counts up by one: cut out of `counting` as it stands there."""
    return bool((windows.diff(dim=1) == 1).all())


# ---- files


def written(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("a.txt", "one\n\ntwo\n", ["one\n\ntwo\n"]),
        ("a.TXT", "\ufeffone\r\ntwo", ["one\ntwo"]),
        ("a.json", '["one", "two"]', ["one", "two"]),
        ("a.json", '[{"text": "one", "url": 1}, "two"]', ["one", "two"]),
        ("a.jsonl", '{"text": "o\\nne"}\n\n"tw\u2028o"\n', ["o\nne", "tw\u2028o"]),
        ("a.json", '{"text": "one"}\n{"text": "two"}', ["one", "two"]),
        ("a.jsonl", '{"messages": [], "text": "one"}', ["one"]),
        ("a.csv", 'url,text\n1,"o\nne"\n\n2,two\n', ["o\nne", "two"]),
        ("a.csv", f"story\n{'long ' * 40_000}\n", ["long " * 40_000]),
        ("a.txt.gz", gzip.compress(b"one", mtime=0), ["one"]),
        ("a.JSONL.GZ", gzip.compress(b'{"text": "one"}', mtime=0), ["one"]),
        ("a.json.gz", gzip.compress(b'{"text": "one"}\n{"text": "two"}', mtime=0), ["one", "two"]),
        ("a.csv.gz", gzip.compress(b"text\none", mtime=0), ["one"]),
        ("a.raw", " \n = A = \n \n b \n", ["", " = A = \n", "", " b \n"]),
    ],
)
def test_files_by_suffix(tmp_path: Path, name: str, content: str | bytes, documents: list[str]) -> None:
    """Every kind of file gives its documents, joined by an empty line, and is named after itself."""
    text = read_text(written(tmp_path, name, content), "test")
    assert list(text.documents) == documents
    assert text.stream == "\n\n".join(documents)
    assert text.source == name
    assert text.rows == (name == "a.raw")


def test_parquet_and_fields(tmp_path: Path) -> None:
    """A column of Parquet, and a field of JSON, by their names."""
    parquet.write_table(pyarrow.table({"body": ["one", "two"], "n": [1, 2]}), tmp_path / "a.parquet")
    assert list(read_text(str(tmp_path / "a.parquet"), "test", "body").documents) == ["one", "two"]
    name = written(tmp_path, "a.jsonl", '{"body": "one"}')
    assert list(read_text(name, "calibration", "body").documents) == ["one"]
    for path in (name, str(tmp_path / "a.parquet")):
        with pytest.raises(BadText, match=r"'text'.*'body'"):
            read_text(path, "test")


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.txt", b"", "empty"),
        ("a.txt", b" \n\n", "no text.* 1 "),
        ("a.json", b"[]", "no text.* 0 "),
        ("a.doc", b"text", r"'\.doc'.*\.txt, .*\.parquet"),
        ("a.gz", b"text", r"'\.gz'.*\.txt\.gz"),
        ("a.parquet.gz", b"text", r"'\.gz'.*\.txt\.gz"),
        ("a.txt.gz", b"text", ""),
        ("a.txt.gz", gzip.compress(b"text " * 99, mtime=0)[:-9], ""),
        ("a.txt", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("a.csv", b"text", "no text.* 0 "),
        ("a.csv", b"a,b\n1,2", "'text'.*'a', 'b'.*`text_field`"),
        ("a.csv", b"a,text\n1,2\n3\n", "line 3, .*1 cells.*line 1 .*2"),
        ("a.csv", b'text\n"a"b\n', "line 2, .*CSV"),
        ("a.jsonl", b'{"messages": [{"content": "a"}]}', "line 1, .*list.*'messages'"),
        ("a.jsonl", b'"one"\n{"messages": [{"role": "user", "content": "a"}]}', "line 2, .*chat"),
        ("a.txt", b"one\ntwo \xff", "line 2, .*UTF-8.*0xff"),
        ("a.json", b'[\n"one",\n"two"', "line 3, .*JSON"),
        ("a.json", b'{"text": "one"}', "list.*dict"),
        ("a.json", b'["one", 2]', "entry 2, .*int"),
        ("a.jsonl", b'"one"\n\n{"text": oops}', "line 3, .*JSON"),
        ("a.jsonl", b'{"text": null}\n""\n{"messages": [], "text": ""}', "no text.* 3 "),
        ("a.jsonl", b'"one"\n{"a": 1, "b": 2}', "line 2, .*'text'.*'a', 'b'"),
        ("a.parquet", b"PAR1 not at all", "Parquet"),
        ("missing.txt", None, "no file"),
        ("missing/text", None, "no file"),
        ("wikitext", None, "'wikitext'.*'wikitext2'"),
        ("something", None, "c4, demo, ptb, wikitext2"),
        (".", None, "folder"),
    ],
)
def test_bad_texts_are_refused_with_the_place(tmp_path: Path, name: str, content: bytes | None, named: str) -> None:
    """The message names the file, and where in it; for a word that is no path, the texts or the nearest of them."""
    with pytest.raises(BadText, match=named) as caught:
        read_text(name if content is None else written(tmp_path, name, content), "test")
    assert name in str(caught.value)


# ---- names


class Asked:
    """Stands in for `datasets.load_dataset`: notes what it is asked for, and gives `rows`."""

    def __init__(self, column: str, rows: list[str]) -> None:
        self.data = datasets.Dataset.from_dict({column: rows, "url": rows})
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **options: Any) -> datasets.Dataset:
        self.calls.append((args, options))
        assert datasets.are_progress_bars_disabled()
        return self.data


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, list[str]], Asked]:
    def answering(column: str, rows: list[str]) -> Asked:
        asked = Asked(column, rows)
        monkeypatch.setattr(datasets, "load_dataset", asked)
        return asked

    return answering


def test_wikitext2(hub: Callable[[str, list[str]], Asked]) -> None:
    """The raw configuration; rows joined by two line ends, blank ones too; never one row as a document."""
    asked = hub("text", ["", " = A = \n", "", "b \n"])
    text = read_text("wikitext2", "test")
    assert text.stream == "\n\n = A = \n\n\n\n\nb \n"
    assert (text.source, text.rows, text.test_windows) == ("wikitext2 test", True, None)
    read_text("wikitext2", "calibration", field="ignored")
    for (args, options), part in zip(asked.calls, ("test", "train"), strict=True):
        assert args == ("Salesforce/wikitext", "wikitext-2-raw-v1")
        assert options["split"] == part


def test_ptb(hub: Callable[[str, list[str]], Asked]) -> None:
    """Its own field, joined by spaces, from the revision without a script."""
    asked = hub("sentence", ["a b", "c"])
    assert read_text("ptb", "test").stream == "a b c"
    assert read_text("ptb", "calibration").source == "ptb train"
    assert asked.calls[0] == (("ptb-text-only/ptb_text_only", None), {"split": "test", "revision": "refs/convert/parquet"})
    assert asked.calls[1][1]["split"] == "train"


def test_c4(hub: Callable[[str, list[str]], Asked]) -> None:
    """One file of each split; to test, 1,100 documents joined by spaces and 256 windows; to calibrate, every document."""
    asked = hub("text", [counting(row % 7, 30) for row in range(1200)])
    test, calibration = read_text("c4", "test"), read_text("c4", "calibration")
    assert len(test.documents) == 1100
    assert len(calibration.documents) == 1200
    assert test.stream.count(" ") == 1100 * 30 - 1
    assert test_windows(test, tokenizer(), 16, **PAPERS).windows.shape == (256, 16)
    assert test_windows(test, tokenizer(), 16, limit=300, **PAPERS).windows.shape == (300, 16)
    assert calibration_windows(calibration, tokenizer(), samples=8, sequence_length=16, seed=0, **PAPERS).windows.shape == (
        8,
        16,
    )
    names = ["en/c4-validation.00000-of-00008.json.gz", "en/c4-train.00000-of-01024.json.gz"]
    for (_, options), name, part in zip(asked.calls, names, ("validation", "train"), strict=True):
        assert options["data_files"] == {part: name}
        assert options["split"] == part
        assert options["verification_mode"] == "no_checks"  # the data set says it has more splits than one file


@pytest.mark.parametrize("error", [ConnectionError("Couldn't reach it"), ValueError("Couldn't find cache"), RuntimeError()])
def test_without_the_hub(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The message says what to pass instead, and the libraries' own settings are as they were."""

    def fails(*_: Any, **__: Any) -> None:
        raise error

    level = logging.getLogger("huggingface_hub").level
    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(Unreachable, match=r"'c4'.*allenai/c4.*\.txt") as caught:
        read_text("c4", "calibration")
    assert str(error) in str(caught.value)
    assert logging.getLogger("huggingface_hub").level == level
    assert not datasets.are_progress_bars_disabled()


def test_offline_says_so_and_nothing_else(tmp_path: Path) -> None:
    """With HF_HUB_OFFLINE and an empty cache there is one error at once, and not a line of the libraries' own."""
    code = (
        "from sparsellm.texts.texts import read_text; from sparsellm.errors import Unreachable\n"
        "try: read_text('wikitext2', 'test')\n"
        "except Unreachable as error: assert 'HF_HUB_OFFLINE is set' in str(error)"
    )
    source = str(Path(sparsellm.__file__).parents[1])
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": source}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's text comes from its own module, the held-out part to test; a Python without sources says so."""
    from sparsellm.texts import texts

    monkeypatch.setattr(texts, "_read_demo", texts._read_demo.__wrapped__)  # what a process read stays read
    monkeypatch.setattr(texts.demo, "named_documents", lambda part: {"a": part, "b": "b"})
    assert read_text("demo", "calibration") == Text(("train", "b"), "\n\n", "demo train")
    assert read_text("demo", "test") == Text(("held-out", "b"), "\n\n", "demo held-out")

    def fails(_: str) -> None:
        raise BadText("no sources")

    monkeypatch.setattr(texts.demo, "named_documents", fails)
    with pytest.raises(BadText, match="no sources"):
        read_text("demo", "test")


# ---- windows


def test_tokenize_is_whole_and_silent(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """One special token at the stream's start; no padding, no truncation, and no warning of its length."""
    text = Text((counting(0, 20), counting(20, 20)), "\n\n", "two", published=True)
    for padded in (False, True):
        tokens = tokenize(tokenizer(padded), text.stream, added_tokens(tokenizer(padded)))
        assert tokens.dtype == torch.long
        assert tokens.tolist() == [BOS, *range(10, 50)]
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_windows_of_a_stream() -> None:
    """Full windows at places that the seed alone decides, and a sentence that says so."""
    text = Text((counting(0, 2000), counting(2000, 999)), " ", "numbers.txt", published=True)
    drawn = calibration_windows(text, tokenizer(padded=True), samples=64, sequence_length=100, seed=0, **PAPERS)
    assert drawn.windows.shape == (64, 100)
    assert drawn.windows.dtype == torch.long
    assert drawn.windows.is_contiguous()
    assert runs(drawn.windows[drawn.windows[:, 0] != BOS])
    assert drawn.description == (
        "64 windows of 100 tokens at random places of one stream of 3,000 tokens (numbers.txt), seed 0"
    )
    again = calibration_windows(text, tokenizer(), samples=64, sequence_length=100, seed=0, **PAPERS)
    assert torch.equal(again.windows, drawn.windows)
    other = calibration_windows(text, tokenizer(), samples=64, sequence_length=100, seed=1, **PAPERS)
    assert not torch.equal(other.windows, drawn.windows)
    assert len({int(start) for start in drawn.windows[:, 0]}) > 32


def test_every_place_of_a_stream_can_be_drawn() -> None:
    """The first and the last window too; a text of one window gives that one."""
    text = Text((counting(0, 9),), " ", "ten tokens", published=True)
    windows = calibration_windows(text, tokenizer(), samples=200, sequence_length=8, seed=0, **PAPERS).windows
    assert {tuple(window) for window in windows.tolist()} == {
        (BOS, *range(10, 17)), tuple(range(10, 18)), tuple(range(11, 19))
    }  # fmt: skip
    windows = calibration_windows(text, tokenizer(), samples=2, sequence_length=10, seed=0, **PAPERS).windows
    assert windows.tolist() == [[BOS, *range(10, 19)]] * 2


def test_windows_of_documents() -> None:
    """With enough long documents each window is within one, no document twice; short documents never enter."""
    long = [counting(100 * index, 40) for index in range(6)]
    short = [counting(3000 + 10 * index, 9) for index in range(50)]  # 10 tokens with <s>: not longer than a window
    text = Text(tuple(short + long), " ", "c4 train", published=True)
    drawn = calibration_windows(text, tokenizer(), samples=6, sequence_length=10, seed=3, **PAPERS)
    first = drawn.windows[:, 1] - 10
    assert sorted((first // 100).tolist()) == [0, 1, 2, 3, 4, 5]
    assert runs(drawn.windows[:, 1:])
    assert drawn.description == ("6 windows of 10 tokens, each at a random place of one of 56 documents (c4 train), seed 3")
    padded = calibration_windows(text, tokenizer(padded=True), samples=6, sequence_length=10, seed=3, **PAPERS)
    assert torch.equal(padded.windows, drawn.windows)
    assert "one stream" in calibration_windows(text, tokenizer(), samples=7, sequence_length=10, seed=3, **PAPERS).description


def test_few_documents_are_tokenized_where_many_are_long() -> None:
    """The text as a whole is not tokenized for a few windows."""
    calls: list[str] = []

    def counted(string: str, **_: Any) -> dict[str, list[int]]:
        calls.append(string)
        return {"input_ids": list(range(len(string)))}

    text = Text(("x" * 50,) * 1000, " ", "many", published=True)
    windows = calibration_windows(text, counted, samples=5, sequence_length=20, seed=0, **PAPERS).windows  # type: ignore[arg-type]
    assert windows.shape == (5, 20)
    assert len([x for x in calls if x != "a"]) == 5


def test_rows_are_never_documents() -> None:
    """Rows of one text give windows that go on from row to row."""
    text = Text(tuple(counting(20 * row, 20) for row in range(100)), " ", "rows", rows=True, published=True)
    drawn = calibration_windows(text, tokenizer(), samples=4, sequence_length=8, seed=0, **PAPERS)
    assert "one stream of 2,001 tokens" in drawn.description


def test_test_windows_are_consecutive() -> None:
    """The stream from its start, what is left over dropped, and no more than the limit."""
    text = Text((counting(0, 52),), " ", "numbers.txt", published=True)
    windows = test_windows(text, tokenizer(padded=True), 10, **PAPERS).windows
    assert windows.flatten().tolist() == [BOS, *range(10, 59)]
    assert windows.shape == (5, 10)
    assert torch.equal(test_windows(text, tokenizer(), 10, limit=2, **PAPERS).windows, windows[:2])
    limited = Text(text.documents, " ", "c4 validation", test_windows=3, published=True)
    assert torch.equal(test_windows(limited, tokenizer(), 10, **PAPERS).windows, windows[:3])


SHORT, EMPTY = (Text(words, " ", "short.txt", published=True) for words in ((counting(0, 11),), ()))


@pytest.mark.parametrize(
    ("find", "error", "named"),
    [
        (
            partial(calibration_windows, SHORT, samples=4, sequence_length=2048, seed=0),
            BadText,
            "12 .*2,048.*`sequence_length=12`",
        ),
        (partial(test_windows, SHORT, sequence_length=2048), BadText, "12 .*2,048.*`sequence_length=12`"),
        (partial(test_windows, EMPTY, sequence_length=8), BadText, "1 .*8"),
        (partial(calibration_windows, SHORT, samples=0, sequence_length=8, seed=0), InvalidSetting, "`samples`.*0"),
        (partial(test_windows, SHORT, sequence_length=1), InvalidSetting, "`sequence_length`.*1"),
        (partial(test_windows, SHORT, sequence_length=8, limit=0), InvalidSetting, "`limit`.*0"),
    ],
)
def test_too_short_and_impossible(find: Callable[..., object], error: type[Exception], named: str) -> None:
    """A text below one window names both sizes and the way out; settings that cannot be are refused."""
    with pytest.raises(error, match=named):
        find(tokenizer=tokenizer(), **PAPERS)


@pytest.mark.long
def test_the_papers_protocol_on_wikitext2() -> None:
    """287,644 GPT-2 tokens, which the papers' codes get from the hub's rows: from a .raw file the same."""
    raw = SHARED / "data/wikitext-2/wiki.test.raw"
    if not raw.exists():
        pytest.skip(f"{raw} is not here: it is never committed")
    gpt2 = AutoTokenizer.from_pretrained(SHARED / "data/tokenizers/gpt2")
    rows = tuple(line if line.strip() else "" for line in raw.read_text(encoding="utf-8").splitlines(keepends=True))
    assert len(tokenize(gpt2, "\n\n".join(rows))) == 287_644
    assert tuple(read_text(str(raw), "test").documents) == rows
    assert test_windows(read_text(str(raw), "test"), gpt2, 2048, **PAPERS).windows.shape == (140, 2048)


@pytest.mark.long
def test_c4_sample_is_enough_for_the_papers_windows() -> None:
    """128 windows of 2,048 tokens; the sample has fewer documents of that length, so they come from the stream."""
    path = SHARED / "data/c4/c4_1480.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here: it is never committed")
    gpt2 = AutoTokenizer.from_pretrained(SHARED / "data/tokenizers/gpt2")
    text = read_text(str(path), "calibration")
    assert len(text.documents) == 1480
    assert "one stream" in calibration_windows(text, gpt2, samples=128, sequence_length=2048, seed=0, **PAPERS).description
    assert "1,480 documents" in calibration_windows(text, gpt2, samples=64, sequence_length=256, seed=0, **PAPERS).description
