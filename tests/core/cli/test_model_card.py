"""The model card: what the hub reads of it, whose license it carries, and that it says how to load the model."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

import sparsellm
from sparsellm.checkpoints.files import card_terms
from tests.conftest import report_of

Command = Callable[..., Result]
CARD = """---
license: other
license_name: open-rail
license_link: LICENSE.md
language:
- en
- no
base_model: somebody/else
tags: [text]
extra_gated_prompt: "Sign here"
---
# A model
"""


@pytest.fixture
def licensed(tiny: dict[str, Path], tmp_path: Path) -> Path:
    """A tiny model with a card, its license and what goes with it."""
    folder = Path(shutil.copytree(tiny["opt"], tmp_path / "tiny-opt"))
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    for name in ("LICENSE.md", "Notice", "USE_POLICY.md", "training_notes.md"):
        (folder / name).write_text(f"the words of {name}\n", encoding="utf-8")
    return folder


def told(folder: Path) -> dict[str, Any]:
    """The card's front matter, as huggingface_hub reads it."""
    return ModelCard.load(folder / "README.md").data.to_dict()


def test_a_hub_model_s_card(licensed: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """It links its base, carries license and language, and the license's files come along; twice the same bytes."""
    asked: list[dict[str, Any]] = []

    def download(name: str, **words: Any) -> str:
        asked.append(words)
        return str(licensed)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    for out in ("one", "two"):
        assert command("prune", "some/tiny-opt", out, "--method", "magnitude").exit_code == 0
    one = tmp_path / "one"
    assert (one / "README.md").read_bytes() == (tmp_path / "two" / "README.md").read_bytes()
    found = told(one)
    assert found.pop("tags") == ["sparsellm", "pruning", "sparse"]
    assert found == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "some/tiny-opt",
        "license": "other",
        "license_name": "open-rail",
        "license_link": "LICENSE.md",
        "language": ["en", "no"],
    }
    text = (one / "README.md").read_text(encoding="utf-8")
    assert "Pruned from [some/tiny-opt](https://huggingface.co/some/tiny-opt) with sparsellm" in text
    for name in ("LICENSE.md", "Notice", "USE_POLICY.md"):
        assert (one / name).read_text(encoding="utf-8") == f"the words of {name}\n"
        assert name in report_of(one)["files"]
    assert (one / "training_notes.md").exists()
    there = [
        "README.md",
        "LICENSE",
        "LICENSE.txt",
        "license.md",
        "Notice",
        "NOTICE.pdf",
        "USE_POLICY.md",
        "figure.png",
        "model.h5",
        "model.py",
    ]
    wanted = filter_repo_objects(there, ignore_patterns=asked[0]["ignore_patterns"])
    assert list(wanted) == there[:-2]
    assert command("prune", "some/tiny-opt", "one", "--method", "magnitude", "--overwrite").exit_code == 0


def test_a_folder_s_card(licensed: Path, tmp_path: Path) -> None:
    """The folder's plain name is the base, unlinked; the example in the card loads the model."""
    out = sparsellm.prune(licensed, method="magnitude").save_pretrained(tmp_path / "out")
    assert told(out)["base_model"] == "tiny-opt"
    text = (out / "README.md").read_text(encoding="utf-8")
    assert "Pruned from tiny-opt with" in text
    assert "huggingface.co" not in text
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example
    names: dict[str, Any] = {}
    exec(example[1].replace("FOLDER", str(out)), names)
    assert names["model"].config.model_type == "opt"
    assert len(names["tokenizer"]) == len(AutoTokenizer.from_pretrained(licensed))


@pytest.mark.parametrize("name", ["demo:opt", "a name with spaces"])
def test_a_name_that_the_hub_would_refuse_is_no_base(name: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    """The card names it in its text alone, and the rest of it is valid."""
    model = name if ":" in name else shutil.copytree(tiny["opt"], tmp_path / name)
    out = sparsellm.prune(model, method="magnitude").save_pretrained(tmp_path / "out")
    assert "base_model" not in told(out)
    assert "license" not in told(out)
    assert f"Pruned from {name} with" in (out / "README.md").read_text(encoding="utf-8")


def test_a_model_in_memory(tiny: dict[str, Path], tmp_path: Path) -> None:
    """By the name that it was loaded by; one that was made in memory has no base."""
    model = AutoModelForCausalLM.from_pretrained(tiny["opt"])
    out = sparsellm.prune(model, method="magnitude").save_pretrained(tmp_path / "one")
    assert told(out)["base_model"] == "opt"
    model = AutoModelForCausalLM.from_config(model.config)
    model.config._name_or_path = ""
    out = sparsellm.prune(model, method="magnitude").save_pretrained(tmp_path / "two")
    assert "base_model" not in told(out)
    assert "Pruned with sparsellm" in (out / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("---\nlicense: mit\n---\n", {"license": "mit"}),
        ("---\nlicense: [mit, apache-2.0]\nlanguage: no\n---\n", {"license": ["mit", "apache-2.0"], "language": "no"}),
        ("---\nlicense: {a: b}\nlicense_name:\n---\n", {}),
        ("---\n- license\n---\n", {}),
        ("---\nlicense: [mit\n---\n", {}),
        ("---\nlicense: mit\n", {}),
        ("# license: mit\n", {}),
        ("", {}),
        ("\ufeff---\r\nlicense: mit\r\n---\r\n", {"license": "mit"}),
    ],
)
def test_what_cards_say_of_their_terms(text: str, terms: dict[str, Any], tmp_path: Path) -> None:
    """Text and lists of text are taken over; what cannot be read is left out, and is no reason to fail."""
    (tmp_path / "README.md").write_bytes(text.encode())
    assert card_terms(tmp_path) == terms
    (tmp_path / "README.md").write_bytes(b"\xff\xfe")
    assert card_terms(tmp_path) == {}
    (tmp_path / "README.md").unlink()
    assert card_terms(tmp_path) == {}
