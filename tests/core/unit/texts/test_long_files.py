"""Files of long texts, whose documents stay on disk: those of a short file, in bounded memory."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from sparsellm.errors import BadText
from sparsellm.texts import data_sets, text_files, texts
from sparsellm.texts.data_sets import StoredDocuments
from sparsellm.texts.rows import Conversation
from sparsellm.texts.texts import read_text
from tests.conftest import TEXT


@pytest.fixture
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of more than 100 characters are long."""
    monkeypatch.setattr(data_sets, "SHORT", 100)
    monkeypatch.setattr(texts, "SHORT", 100)
    monkeypatch.setattr(text_files, "PIECE", 32)


@pytest.mark.usefixtures("_long")
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.parquet"])
def test_texts_are_those_of_a_short_file(tmp_path: Path, name: str) -> None:
    """To the character, dates and "NA" too; empty rows are counted."""
    values = [(f"document {number} é\u2028\n", "2026-01-01", "NA", "", "17")[number % 5] for number in range(400)]
    path = tmp_path / name
    content = {
        ".jsonl": "\n".join(json.dumps({"text": value}) for value in values),
        ".json": json.dumps(values),
        ".csv": "\n".join(["id,text", *(f'1,"{value}"' for value in values)]),
    }
    if name == "a.parquet":
        parquet.write_table(pyarrow.table({"text": values}), path)
    else:
        data = content[path.with_suffix("").suffix or path.suffix].encode()
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    found = read_text(str(path), "test")
    assert isinstance(found.documents, StoredDocuments)
    assert list(found.documents) == [value for value in values if value]
    assert found.documents.sizes.tolist() == [len(value) for value in values if value]
    assert found.empty == 80
    assert not found.chats


@pytest.mark.usefixtures("_long")
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_chats_are_those_of_a_short_file(tmp_path: Path, name: str) -> None:
    """With what each message has, and their tools."""
    surrogate = "\ud800" if name == "a.jsonl" else ""
    chats = [[{"role": "user", "content": f"number {number} {surrogate}"}] for number in range(99)]
    chats[7] = []
    tools = [{"name": "f", "parameters": {"x": None}}]
    path = tmp_path / name
    if name == "a.jsonl":
        path.write_text("\n".join(json.dumps({"messages": chat, "tools": tools}) for chat in chats))
    else:
        parquet.write_table(pyarrow.table({"messages": chats, "tools": [json.dumps(tools)] * len(chats)}), path)
    found = read_text(str(path), "test")
    assert found.chats
    assert list(found.documents) == [Conversation(chat, tools) for chat in chats if chat]
    assert found.empty == 1


@pytest.mark.usefixtures("_long")
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("ends", ["\n", "\r\n", "", "\r", "é漢🙂"])
def test_pieces_are_the_text(tmp_path: Path, ends: str, compressed: bool) -> None:
    """Joined they are the text to the character, whatever stands where they are cut."""
    text = "".join(f"word{number}{ends if number % 3 else ''}" for number in range(80))
    path = tmp_path / ("a.txt.gz" if compressed else "a.txt")
    data = ("\ufeff" + text).encode()
    path.write_bytes(gzip.compress(data) if compressed else data)
    read = read_text(str(path), "test")
    assert read.rows
    assert len(read.documents) > 10
    assert max(len(str(piece)) for piece in read.documents) < 64
    assert read.stream == text.replace("\r\n", "\n")
    if ends == "\n":
        assert all(str(piece).startswith("word") for piece in read.documents)


@pytest.mark.usefixtures("_long")
@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.jsonl", b'{"text": "a word"}\n' * 50 + b"oops\n", "line 51, .*JSON"),
        ("a.jsonl", b'{"text": "a word"}\n' * 50 + b'{"text": 3}\n', "line 51, .*int.*'text'"),
        ("a.jsonl", b'{"text": "a word"}\n' * 50 + b'[{"role": "user", "content": "x"}]\n', "line 51, .*chat"),
        ("a.jsonl", b'{"text": "a word"}\n' * 50 + b'{"text": "\xff"}\n', "line 51, .*0xff"),
        ("a.jsonl", b'{"text": "a word"}\n' * 50 + b'{"a": "b"}\n', "line 51, .*'text'"),
        ("a.csv", b"text,n\n" + b"a word,1\n" * 50 + b"one\n", "line 52, .*1 cells"),
        ("a.txt", b"abcd \n" * 40 + b"\xff", "line 41, .*0xff"),
        ("a.txt", b" \n" * 80, "no text"),
        ("a.txt.gz", gzip.compress(bytes(range(32, 127)) * 99)[:-9], "cannot be read"),
    ],
)
def test_bad_files_are_refused_with_the_place(tmp_path: Path, name: str, content: bytes, named: str) -> None:
    """All of a file is read before anything is pruned."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadText, match=named) as caught:
        read_text(str(path), "calibration")
    assert name in str(caught.value)


def test_a_file_that_must_be_read_whole_is_limited(tmp_path: Path) -> None:
    """Compressed ones while they are decompressed; others are not."""
    content: dict[str, Any] = {
        "a.json": json.dumps(["abc"] * 2**19).encode(),
        "a.raw.gz": gzip.compress(b"abc\n" * 2**19),
        "a.jsonl": b'{"text": "abc"}\n' * 2**17,
        "a.txt.gz": gzip.compress(b"abc " * 2**19),
    }
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
        assert read_text(str(tmp_path / name), "test", memory=2**30).documents
        if name in ("a.json", "a.raw.gz"):
            with pytest.raises(BadText, match=rf"{name} .*1 MiB.*`max_memory`"):
                read_text(str(tmp_path / name), "test", memory=2**20)
        else:
            assert read_text(str(tmp_path / name), "test", memory=2**20).documents


@pytest.mark.usefixtures("_long")
def test_nothing_is_left_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy has no name while it is used, so that another program can neither cut nor remove it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    path = tmp_path / "a.jsonl"
    path.write_text('"a word"\n' * 99)
    found = read_text(str(path), "test")
    path.unlink()
    assert list((tmp_path / "temporary").iterdir()) == []
    assert list(found.documents) == ["a word"] * 99


@pytest.mark.parametrize("kind", ["lines.txt", "line.txt", "texts.jsonl", "chats.jsonl"])
def test_long_texts_take_bounded_memory_and_time(tmp_path: Path, kind: str) -> None:
    """40 MB of .txt, also on one line, and 9 MB of .jsonl: at most 0.7 GiB with all libraries, and 15 s of a processor."""
    line = {
        "lines.txt": f"{TEXT}\n",
        "line.txt": f"{TEXT} ",
        "texts.jsonl": json.dumps({"text": TEXT}) + "\n",
        "chats.jsonl": json.dumps({"messages": [{"role": "user", "content": TEXT}]}) + "\n",
    }[kind]
    path = tmp_path / kind
    path.write_text(line * ((40 if kind.endswith("txt") else 9) * 10**6 // len(line)))
    code = f"""
import time
from tests.conftest import byte_tokenizer
from tests.meter import status_of
from sparsellm.texts.samples import calibration_windows, test_windows
from sparsellm.texts.texts import read_text
tokenizer = byte_tokenizer()
tokenizer.chat_template = "{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
started = time.process_time()
text = read_text({str(path)!r}, "calibration")
drawn = calibration_windows(text, tokenizer, samples=128, sequence_length=512, seed=0, documents="joined").windows
assert drawn.shape == (128, 512)
assert test_windows(text, tokenizer, 512, limit=16, documents="joined").windows.shape == (16, 512)
print(time.process_time() - started, status_of("VmHWM"))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, memory = ran.stdout.split()
    assert float(seconds) < 15
    assert int(memory) < 0.7 * 2**30
    assert not ran.stderr
