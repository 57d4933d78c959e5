"""JSON and YAML that others wrote: a value, or one message that says what is wrong; never another error, never a wait."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import sparsellm
from sparsellm.errors import BadCheckpoint, InvalidSetting, SparseLLMError
from sparsellm.texts.json_files import durable, read_json
from sparsellm.texts.yaml_files import read_mapping, read_value

DEEP = 100_000


def short(value: object) -> str:
    """A test's name: the beginning of what it reads."""
    return repr(value)[:30]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"a": 1',
        b"\xff\xfe{",
        b"[" * DEEP,
        b"[" * 65 + b"]" * 65,
        b'{"a":' * DEEP,
        b'{"n": ' + b"1" * 5000 + b"}",
        b'{"n": 18446744073709551616}',
        b'{"a": 1, "b": {"c": 1, "c": 2}}',
        rb'{"a": "\ud800"}',
        rb'{"\udfff": 1}',
    ],
    ids=short,
)
def test_json_that_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"settings\.json cannot be read: "):
        read_json(file, BadCheckpoint)


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
    "content",
    [
        "a: [" + "[" * DEEP,
        "a: " + "[" * 70 + "]" * 70,
        "a: !!int x",
        "a: !!float x",
        "a: !!bool perhaps",
        "a: !!map x",
        "a: !!timestamp soon",
        "a: !!python/object/apply:os.getcwd []",
        "a: !!binary '*'",
        "a: " + "1" * 5000,
        "a: 18446744073709551616",
        'a: "\\ud800"',
        "a: 1\nb: 2\na: 3",
        "a: {b: 1, b: 2}",
        "? [1, 2]\n: 3",
        "a: &x [*x]",
        "a: \0",
        "a: &a [1]\n" + "\n".join(f"x{n}: &x{n} [*x{n - 1}, *x{n - 1}]" for n in range(1, 40)).replace("*x0", "*a"),
        "- 1",
        "",
    ],
    ids=short,
)
def test_yaml_that_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(content)
    with pytest.raises(InvalidSetting, match=r"recipe\.yaml (cannot be read|must hold)"):
        read_mapping(file, "recipe")


def test_yaml_that_is_read(tmp_path: Path) -> None:
    """Patterns, dates and yes are text, numbers and truth are not."""
    file = tmp_path / "recipe.yaml"
    file.write_text("a: 2:4\nb: 2026-13-45\nc: 1e-3\nd: -7\ne: yes\nh: true\nf: ~\ng: &g [1]\ni: *g\nj: 010\n")
    expected = {
        "a": "2:4",
        "b": "2026-13-45",
        "c": 1e-3,
        "d": -7,
        "e": "yes",
        "h": True,
        "f": None,
        "g": [1],
        "i": [1],
        "j": 10,
    }
    assert read_mapping(file, "recipe") == expected
    assert read_value("!!int x") == "!!int x"


@pytest.mark.parametrize("kind", ["pipe", "folder", "missing", "device", "NUL in the name"])
def test_only_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    """A pipe that nobody writes to is refused at once, not waited for."""
    file = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "device":
        file = Path(os.devnull)
    elif kind == "NUL in the name":
        file = tmp_path / "fi\0le"
    with pytest.raises(InvalidSetting, match="cannot be read"):
        read_json(file)
    with pytest.raises(InvalidSetting, match="cannot be read"):
        read_mapping(file, "recipe")


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
