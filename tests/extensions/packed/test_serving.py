"""`serve`: what reaches the server of transformers, which is replaced here since its packages are optional."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

import sparsellm
from sparsellm.extensions.packed import serving
from tests.core.cli.test_bad_input import refused

Command = Callable[..., Result]

STUB = """
import sys
from transformers import AutoModelForCausalLM
from transformers.cli import transformers as command_line
from sparsellm.extensions.packed import serving

def app(words):
    print(words, type(AutoModelForCausalLM.from_pretrained(words[1])).__name__)

command_line.app, serving.is_serve_available = app, lambda: True
# Importing `serving` has registered the format; without it, transformers refuses a packed folder.
from sparsellm.cli.app import main
main()
"""
"""A process whose server loads the model as that of transformers does, by `from_pretrained`."""


def test_transformers_serves_a_pruned_and_a_packed_folder(loud: dict[str, Path], tmp_path: Path) -> None:
    """It gets the folder as it was named, the address, and what follows `--`."""
    sparsellm.prune(loud["llama"], "magnitude", "60%").save_pretrained(tmp_path / "pruned")
    sparsellm.pack(tmp_path / "pruned", tmp_path / "packed")
    for folder in ("pruned", "packed"):
        words = [sys.executable, "-c", STUB, "serve", folder, "--port", "8123", "--", "--device", "cpu"]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        given = ["serve", folder, "--host", "localhost", "--port", "8123", "--device", "cpu"]
        assert done.stdout.strip() == f"{given} LlamaForCausalLM"
        assert "http://localhost:8123/v1" in done.stderr


def test_what_cannot_be_served_is_refused_in_one_line(
    loud: dict[str, Path], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes").mkdir()
    monkeypatch.setattr(serving, "serve", lambda *_: pytest.fail("it was started"))
    monkeypatch.setattr(serving, "is_serve_available", lambda: True)
    refused(command("serve", tmp_path / "notes"), "config.json")
    refused(command("serve", tmp_path / "missing"), "missing")
    refused(command("serve", loud["llama"], "--port", "0"), "port", status=2)
    monkeypatch.setattr(serving, "is_serve_available", lambda: False)
    refused(command("serve", loud["llama"]), "pip install 'transformers[serving]'")
