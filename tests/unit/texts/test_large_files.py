"""Files of which only what is used is read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from sparsellm.errors import BadText
from sparsellm.texts import large_files, text_files
from sparsellm.texts.large_files import JsonLines, LazyDocuments, TextPieces, file_reader
from sparsellm.texts.rows import Conversation
from sparsellm.texts.text_files import read_documents
from sparsellm.texts.texts import read_text

SMALL = 100
"""Bytes from which a file counts as large in these tests."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "SHORT", SMALL)
    monkeypatch.setattr(large_files, "PIECE_BYTES", 32)
    monkeypatch.setattr(large_files, "SEARCHED", 16)
    monkeypatch.setattr(large_files, "SEARCHED_BYTES", 7)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_rows_are_those_of_a_small_file(tmp_path: Path, name: str) -> None:
    """Each row, also by its number from the end and in slices, with None for an empty one."""
    values = [f"document {number} é\u2028" * (number % 4) or None for number in range(40)]
    path = tmp_path / name
    lines = "\n".join(json.dumps({"text": value}) + "\n" * (number % 3) for number, value in enumerate(values)).encode()
    if name == "a.parquet":
        parquet.write_table(pyarrow.table({"text": values}), path)
    else:
        path.write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
    found = read_documents(path, None)
    assert isinstance(found.texts, LazyDocuments)
    assert list(found.texts) == values
    assert found.texts[3:5] == values[3:5]
    assert len(found.texts.sizes) == len(values)
    assert found.texts.sizes[3] > found.texts.sizes[1]
    assert not found.conversations


def test_chats_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    chats = [[{"role": "user", "content": f"number {number}"}] for number in range(9)]
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    found = read_documents(path, None)
    assert not found.texts
    assert list(found.conversations) == [Conversation(chat) for chat in chats]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("ends", ["\n", "\r\n", "", " ", "é漢🙂"])
def test_pieces_are_the_text(tmp_path: Path, ends: str, compressed: bool) -> None:
    """Joined they are the text to the character, whatever stands where they are cut."""
    text = "".join(f"word{number}{ends if number % 3 else ''}" for number in range(80))
    path = tmp_path / ("a.txt.gz" if compressed else "a.txt")
    data = ("\ufeff" + text).encode()
    path.write_bytes(gzip.compress(data) if compressed else data)
    read = read_text(str(path), "test")
    assert read.rows
    assert len(read.documents) > 10
    assert read.stream == text.replace("\r\n", "\n")
    if ends == "\n":
        assert all(str(piece).startswith("word") for piece in read.documents)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n' * 20 + b"oops\n", "line 21, is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n' * 20 + b'{"text": 3}\n', "line 21, holds a int in field 'text'"),
        (
            "a.jsonl",
            b'{"text": "a"}\n' * 20 + b'[{"role": "user", "content": "x"}]\n',
            "line 21, holds a chat, the first row a",
        ),
        ("a.jsonl", b'{"text": ""}\n\n' * 20, "holds no text: all of its 20 rows are empty"),
        ("a.jsonl", b'{"text": "\xff"}\n' * 20, "is not UTF-8: byte 0xff at position 10"),
        ("a.jsonl", b'{"a": "b"}\n' * 20, "line 1, has no field 'text'"),
        ("a.txt", b"abcd " * 40 + b"\xff", "is not UTF-8: byte 0xff at position 200"),
        ("a.txt", b" \n" * 80, "all of its 5 rows are empty"),
    ],
)
def test_what_is_wrong_is_said_where_it_is_read(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadText, match=message) as caught:
        list(read_documents(path, None).texts)
    assert name in str(caught.value)


def test_a_file_that_must_be_read_whole_is_limited(tmp_path: Path) -> None:
    """Compressed ones while they are decompressed; the message says which kinds are read in part."""
    content: dict[str, Any] = {
        "a.csv": b"text\n" + b"abc\n" * 2**19,
        "a.json": json.dumps(["abc"] * 2**19).encode(),
        "a.jsonl.gz": gzip.compress(b'{"text": "abc"}\n' * 2**18),
        "a.txt.gz": gzip.compress(b"abc " * 2**19),
    }
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BadText, match=r"holds more than 1 MiB.*of a .txt, .jsonl or .parquet file, only what is used"):
            read_text(str(tmp_path / name), "test", memory=2**20)
        assert read_text(str(tmp_path / name), "test", memory=2**30).documents
    parquet.write_table(pyarrow.table({"text": ["abc"] * 2**19}), tmp_path / "a.parquet")
    with pytest.raises(BadText, match=r"holds \d MiB in text. Raise `max_memory`"):
        read_text(str(tmp_path / "a.parquet"), "test", memory=2**20)


def test_lines_and_pieces_of_an_open_file(tmp_path: Path) -> None:
    """A file that is replaced or cut meanwhile is read as it was, or ends; nothing crashes."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'"one"\n\n"two"')
    rows = JsonLines(path, file_reader(path), path.stat().st_size)
    path.unlink()
    assert [rows[number] for number in range(2)] == [("line 1", "one"), ("line 3", "two")]
    path.write_bytes(b"a" * 100)
    pieces = TextPieces(path, file_reader(path), 100)
    path.write_bytes(b"")
    assert pieces[0][1] == ""
