"""Files of others, changed at random: whatever a file holds, reading it ends in a value or in one message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from sparsellm.allocation import from_file
from sparsellm.patterns import parse_pattern
from sparsellm.recipe import Recipe
from sparsellm.recipe_file import read_recipe
from sparsellm.sweep_file import read_sweep
from sparsellm.texts import read_text
from tests.fuzzing import Changed, either, fuzz, mutated, replaced

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))

pytestmark = pytest.mark.long


def both(texts: list[str]) -> Changed:
    """Changes of YAML's bytes and of its values."""
    return either(mutated([text.encode() for text in texts]), replaced([yaml.safe_load(text) for text in texts], yaml=True))


def test_recipes(tmp_path: Path) -> None:
    full = Recipe(model="demo:opt", calibration="demo", evaluate=("demo",), only=("q_proj",), prompt=("a",)).to_yaml()
    short = "model: demo:opt\nmethod: alps\nsparsity: 2:4\ncalibration: demo\nbatch: 3\nalpha: 1e-3\nmemory: 1GiB\n"

    def read() -> None:
        recipe = read_recipe({}, tmp_path / "recipe.yaml")
        recipe.to_yaml().encode()
        recipe.to_method(4)
        recipe.describe()

    fuzz(tmp_path / "recipe.yaml", both([full, short]), read)


def test_sweeps(tmp_path: Path) -> None:
    texts = [file.read_text() for file in RECIPES if "axes:" in file.read_text()]
    file = tmp_path / "sweep.yaml"
    fuzz(file, both(sorted(texts, key=len)[:4]), lambda: (read_sweep(file), read_sweep(file, smoke=True)))


def test_allocations(tmp_path: Path) -> None:
    file = tmp_path / "shares.yaml"
    shapes = {f"layers.{block}.{layer}": (16, 8) for block in range(2) for layer in ("attn.q", "attn.k", "mlp.up")}
    total = parse_pattern("50%")
    texts = ['"attn.q": 50%\n"layers.0.*": 2:4\n', "mlp.up: 0.7\nattn.*: 25%\n"]
    fuzz(file, both(texts), lambda: from_file(file, dict.fromkeys(shapes, total), shapes, total))


TEXTS = {
    ".txt": [b"the sum of the weights\r\nthat stay\n"],
    ".raw": [b" = Title = \n \n A line . \n"],
    ".json": [json.dumps(["one", {"text": "two"}, {"text": "three", "id": 3}]).encode()],
    ".jsonl": [b'{"text": "one"}\n"two"\n\n{"text": "three", "id": [1]}\n'],
}


@pytest.mark.parametrize("suffix", TEXTS)
def test_texts(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"words{suffix}"

    def read() -> None:
        text = read_text(str(file), "calibration")
        text.stream.encode()

    fuzz(file, mutated(TEXTS[suffix]), read)
