"""JSON and YAML that others wrote: a value, or one message that says what is wrong; never another error, never a wait."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import pytest

import sparsellm
from sparsellm.errors import BadCheckpoint, InvalidSetting, SparseLLMError
from sparsellm.texts.json_files import durable, read_bytes, read_json
from sparsellm.texts.yaml_files import read_mapping, read_value

DEEP = 100_000


def short(value: object) -> str:
    """A test's name: the beginning of what it reads."""
    return repr(value)[:30]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "not JSON at line 1, column 1"),
        (b'{"a": 1', "not JSON at line 1"),
        (b"\xff\xfe{", "byte 0 is not UTF-8"),
        (b"[" * DEEP, "nested"),
        (b"[" * 65 + b"]" * 65, "nested more than 64 levels"),
        (b'{"a":' * DEEP, "nested"),
        (b'{"n": ' + b"1" * 5000 + b"}", "5,000 digits"),
        (b'{"n": 18446744073709551616}', "20 digits"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' twice"),
        (rb'{"a": "\ud800"}', "not UTF-8 text"),
        (rb'{"\udfff": 1}', "not UTF-8 text"),
    ],
    ids=short,
)
def test_json_that_is_refused(content: bytes, part: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_bytes(content)
    with pytest.raises(BadCheckpoint, match="cannot be read") as refusal:
        read_json(file, BadCheckpoint)
    assert part in str(refusal.value)


@pytest.mark.parametrize("number", [0, 2, "1", None])
def test_a_record_of_another_format_is_not_read(number: object, tmp_path: Path) -> None:
    file = tmp_path / "sparsellm.json"
    file.write_text(json.dumps({"format": number}), encoding="utf-8")
    with pytest.raises(BadCheckpoint, match=r"has the format .*; this version reads 1\."):
        sparsellm.load_report(file)


@pytest.mark.parametrize(
    "text", ['{"limit": [0.0, Infinity], "n": -3}', "[" * 60 + "]" * 60, str(2**64 - 1)], ids=["infinity", "deep", "large"]
)
def test_json_that_is_read(text: str, tmp_path: Path) -> None:
    """What python's own reader gives, infinity (which configurations of Mamba hold) and a deep but finite nesting included."""
    file = tmp_path / "settings.json"
    file.write_text(text)
    assert read_json(file) == json.loads(text)
    file.write_text(text, encoding="utf-8-sig")
    assert read_json(file) == json.loads(text)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("a: [" + "[" * DEEP, "nested"),
        ("a: " + "[" * 70 + "]" * 70, "nested more than 64 levels"),
        ("a: !!int x", "line 1 is tagged as an integer"),
        ("a: !!float x", "tagged as a number"),
        ("a: !!bool perhaps", "tagged as true or false"),
        ("a: !!timestamp soon", "has the tag"),
        ("a: !!python/object/apply:os.getcwd []", "has the tag"),
        ("a: !!binary '*'", "has the tag"),
        ("a: " + "1" * 5000, "5,000 digits"),
        ('a: "\\ud800"', "not UTF-8 text"),
        ("a: 1\nb: 2\na: 3", "'a' twice"),
        ("a: {b: 1, b: 2}", "'b' twice"),
        ("? [1, 2]\n: 3", "a key is a list"),
        ("a: &x [*x]", "not YAML"),
        ("a: \0", "not YAML"),
        ("a: &a [1]\n" + "\n".join(f"x{n}: &x{n} [*x{n - 1}, *x{n - 1}]" for n in range(1, 40)).replace("*x0", "*a"), "values"),
        ("- 1", "`field: value` lines"),
        ("", "`field: value` lines"),
    ],
    ids=short,
)
def test_yaml_that_is_refused(content: str, part: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(content)
    with pytest.raises(InvalidSetting) as refusal:
        read_mapping(file, "recipe")
    assert part in str(refusal.value)


def test_yaml_that_is_read(tmp_path: Path) -> None:
    """Patterns, dates and yes are text, numbers and truth are not; as written, all is text."""
    file = tmp_path / "recipe.yaml"
    file.write_text("a: 2:4\nb: 2026-13-45\nc: 1e-3\nd: -7\ne: yes\nh: true\nf: ~\ng: &g [1]\ni: *g\n")
    expected = {"a": "2:4", "b": "2026-13-45", "c": 1e-3, "d": -7, "e": "yes", "h": True, "f": None, "g": [1], "i": [1]}
    assert read_mapping(file, "recipe") == expected
    assert read_mapping(file, "recipe", as_written=True) == {**expected, "c": "1e-3", "d": "-7", "h": "true", "f": "~"} | {
        "g": ["1"],
        "i": ["1"],
    }
    assert read_value("!!int x") == "!!int x"


@pytest.mark.parametrize("kind", ["pipe", "folder", "missing", "device", "large", "NUL in the name"])
def test_only_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    """A pipe that nobody writes to is refused at once, not waited for."""
    file = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "device":
        file = Path(os.devnull)
    elif kind == "large":
        file.write_bytes(b"12345")
    elif kind == "NUL in the name":
        file = tmp_path / "fi\0le"
    with pytest.raises(ValueError, match=r"regular|No such file|5 bytes|directory|null"):
        read_bytes(file, 4)
    if kind != "large":
        with pytest.raises(InvalidSetting, match="cannot be read"):
            read_json(file)
        with pytest.raises(InvalidSetting, match="cannot be read"):
            read_mapping(file, "recipe")


def test_small_files_take_little_memory(tmp_path: Path) -> None:
    """Python takes memory for as many bytes as it is told to read, whatever the file has; where little is left, it fails."""
    file = tmp_path / "file.json"
    file.write_text('{"a": 1}', encoding="utf-8")
    tracemalloc.start()
    try:
        assert read_json(file) == {"a": 1}
        assert read_bytes(file, None) == b'{"a": 1}'
        assert read_mapping(file, "recipe") == {"a": 1}
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_messages_are_printable() -> None:
    """A message that quotes a file's content is short, and shows escapes for what a terminal cannot print."""
    message = str(SparseLLMError(f"got {'x' * 10**6}\ud800\x1b[2J. Take another."))
    assert len(message) < 1100
    assert message.endswith("Take another.")
    assert "\\ud800" in message
    assert "\x1b" not in message


@pytest.mark.skipif(os.name != "posix", reason="asks the system for processes as POSIX does")
def test_what_a_killed_process_left_of_a_file_is_removed(tmp_path: Path) -> None:
    """Not what a running process writes, nor one of another machine, nor files of other names."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    machine = f"{zlib.crc32(platform.node().encode()):08x}"
    kept = [
        f"a.json.{machine}.{os.getppid()}.partial",
        f"a.json.00000000.{ended.pid}.partial",
        f"b.json.{machine}.{ended.pid}.partial",
    ]
    for name in (*kept, f"a.json.{machine}.{ended.pid}.partial"):
        (tmp_path / name).touch()
    durable(tmp_path / "a.json", b"{}")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*kept, "a.json"])
