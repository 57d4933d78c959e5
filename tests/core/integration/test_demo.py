"""The demo's text and its bundled models."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparsellm.errors import BadCheckpoint, BadText, InvalidSetting
from sparsellm.texts import demo
from sparsellm.texts.demo import FAMILIES, is_held_out, model_path, named_documents

# ---- text


@pytest.fixture(scope="module")
def splits() -> dict[str, dict[str, str]]:
    """Both splits of the library's English by name."""
    return {"train": named_documents("train"), "held-out": named_documents("held-out")}


def test_splits_are_disjoint(splits: dict[str, dict[str, str]]) -> None:
    """No document is in both splits, and about a tenth is held out."""
    fitted, held = splits["train"], splits["held-out"]
    assert not fitted.keys() & held.keys()
    assert not set(fitted.values()) & set(held.values())
    assert 0.05 < len(held) / (len(fitted) + len(held)) < 0.2
    assert sum(map(len, fitted.values())) > 1_000_000


def test_documents_are_deterministic(splits: dict[str, dict[str, str]]) -> None:
    """The same texts in the same order each time, sorted by name, none blank."""
    assert list(named_documents("held-out").items()) == list(splits["held-out"].items())
    for named in splits.values():
        assert list(named) == sorted(named)
        assert all(document.strip() for document in named.values())


def test_split_of_known_names() -> None:
    """A name's split never changes: the bundled models were trained on the one side of it."""
    held = ["calendar", "copy", "datetime", "dis", "statistics", "tarfile", "topic truth", "unittest.case"]
    fitted = ["argparse", "asyncio.tasks", "typing", "topic assert", "decimal", "json"]
    assert [name for name in held + fitted if is_held_out(name)] == held


def test_no_tests_nor_foreign_packages(splits: dict[str, dict[str, str]]) -> None:
    """Test packages, applications and installed packages are not the library's English; a package is its own module."""
    names = set(splits["train"]) | set(splits["held-out"])
    parts = {part for name in names for part in name.split(".")}
    assert not parts & (demo.SKIPPED | {"torch", "pip", "__init__"})
    assert {"unittest.case", "doctest", "json", "importlib", "topic with"} <= names


def test_docstrings_in_file_order(tmp_path: Path) -> None:
    """Docstrings come as they stand in the file, joined by blank lines, and the sources are not run."""
    (tmp_path / "a.py").write_text(
        'r"""First."""\nraise SystemExit\nclass A:\n    """Second.\n\n    More.\n    """\n'
        '    async def f(self):\n        """Third."""\ndef g():\n    "Fourth."\ndef h(): pass\n'
    )
    assert "\n\n".join(demo._docstrings(tmp_path / "a.py")) == "First.\n\nSecond.\n\nMore.\n\nThird.\n\nFourth."
    (tmp_path / "broken.py").write_text("def (")
    assert demo._docstrings(tmp_path / "broken.py") == []


def test_python_without_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Python that ships no sources, or no topics, says what to do."""
    monkeypatch.setattr(demo.sysconfig, "get_path", lambda _: str(tmp_path))
    (tmp_path / "bare.py").write_text("x = 1\n")
    with pytest.raises(BadText, match="without its sources"):
        named_documents("train")
    monkeypatch.setattr(demo.sysconfig, "get_path", lambda _: str(tmp_path / "python.zip"))
    with pytest.raises(BadText, match="without its sources"):
        named_documents("train")
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(BadText, match="topics"):
        named_documents("train")


# ---- bundled models


@pytest.mark.parametrize("family", FAMILIES)
def test_bundled_model(family: str) -> None:
    """Each loads with its tokenizer, has widths that N:M patterns divide, and predicts English."""
    model = AutoModelForCausalLM.from_pretrained(model_path(family))
    tokenizer = AutoTokenizer.from_pretrained(model_path(family))
    config = model.config
    assert (config.model_type, model.dtype) == (family, torch.bfloat16)
    assert len(tokenizer) == config.vocab_size == 2048
    assert tokenizer.model_max_length == config.max_position_embeddings == 256
    special = [(tokenizer.bos_token_id, config.bos_token_id), (tokenizer.pad_token_id, config.pad_token_id)]
    assert [*special, (tokenizer.eos_token_id, config.eos_token_id)] == [(0, 0), (1, 1), (2, 2)]
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            assert module.in_features % 16 == module.out_features % 16 == 0

    sentence = "Return the number of items in the list. Unlike é, 中 is a letter of another alphabet."
    ids = tokenizer(sentence, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == sentence
    assert model(input_ids=ids[:, :10], labels=ids[:, :10]).loss < 6  # a guess at random costs log(2048) = 7.6


@pytest.mark.parametrize("family", FAMILIES)
def test_what_bundled_models_are_for(family: str) -> None:
    """Their records say that half of the weights hardly matter, and that 80 % clearly do."""
    found = json.loads((model_path(family) / "training.json").read_text())["held_out_perplexity"]
    half, most = (math.log(found[name] / found["dense"]) for name in ("magnitude 50%", "magnitude 80%"))
    assert half < most / 8  # half of the weights cost a fraction of what four fifths do,
    assert most > math.log(2)  # and those cost so much that methods can differ


def test_bundled_size() -> None:
    """Models and tokenizers together stay under 10 MB."""
    files = [path for family in FAMILIES for path in model_path(family).iterdir()]
    assert sum(path.stat().st_size for path in files) < 10_000_000


def test_model_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An unknown family is refused, and so is an installation without the models."""
    with pytest.raises(InvalidSetting, match=r"demo:gpt2.*demo:opt, demo:llama"):
        model_path("gpt2")
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(BadCheckpoint, match="opt"):
        model_path("opt")


def test_demo_imports_nothing_heavy() -> None:
    """The package and the text need the standard library alone."""
    code = "import sys, sparsellm.texts.demo; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
