"""Files of others, changed at random: whatever a file holds, reading it ends in a value or in one message."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from random import Random

import pyarrow
import pytest
import torch
import yaml
from pyarrow import parquet
from safetensors.torch import load_file

from sparsellm.checkpoints.files import card_terms
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.errors import CannotResume, SparseLLMError
from sparsellm.extensions.studies.measures import measures
from sparsellm.extensions.studies.page import report_page
from sparsellm.extensions.studies.sweep_file import read_sweep
from sparsellm.extensions.studies.sweep_runner import CellFolder, saved_sweep
from sparsellm.extensions.studies.sweep_runner import _open as save_sweep
from sparsellm.extensions.studies.tables import table, to_markdown
from sparsellm.models.blocks import blocks_of
from sparsellm.outputs.inspection import inspect
from sparsellm.outputs.journal import Journal
from sparsellm.outputs.report import load_report
from sparsellm.outputs.verification import foreign_file, read_finished
from sparsellm.pipeline.loading import check_vocabulary
from sparsellm.recipes.file import read_recipe
from sparsellm.recipes.methods import method_of
from sparsellm.recipes.plan import plan_from_file, uniform_plan
from sparsellm.recipes.recipe import Recipe
from sparsellm.recipes.selection import LayerName
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.texts.texts import read_text
from tests.conftest import ROOT, save_small
from tests.fuzzing import Changed, either, every, fuzz, mutated, replaced

RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))

pytestmark = pytest.mark.long


def both(texts: list[str]) -> Changed:
    """Changes of YAML's bytes and of its values."""
    return either(mutated([text.encode() for text in texts]), replaced([yaml.safe_load(text) for text in texts], yaml=True))


def test_recipes(tmp_path: Path) -> None:
    recipe = Recipe(model="demo:opt", calibration="demo", evaluate=("demo",), include=("q_proj",))
    full = yaml.safe_dump(recipe.model_dump(mode="json"))
    short = "model: demo:opt\nmethod: alps\nsparsity: 2:4\ncalibration: demo\nbatch_size: 3\nalpha: 1e-3\nmax_memory: 1GiB\n"

    def read() -> None:
        recipe = read_recipe({}, tmp_path / "recipe.yaml")
        recipe.to_yaml().encode()
        method_of(recipe, 4)
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
    layers = [LayerName(name, shape) for name, shape in shapes.items()]
    fuzz(file, both(texts), lambda: plan_from_file(file, dict.fromkeys(shapes, total), layers, total))


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


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one block and width 8 with its tokenizer, pruned by magnitude; not to be written to."""
    return save_small(tmp_path_factory.mktemp("small"))["pruned"]


@pytest.fixture
def copied(small: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(small, tmp_path / "copied"))


def values(file: Path) -> Changed:
    """Changes of the bytes of a file of JSON, and of its values."""
    return either(mutated([file.read_bytes()]), replaced([json.loads(file.read_bytes())]))


def test_configurations(copied: Path) -> None:
    fuzz(copied / "config.json", values(copied / "config.json"), lambda: opened(copied))


def opened(folder: Path) -> None:
    """A model opened as a run opens it, as far as its blocks and their layers."""
    checkpoint = open_checkpoint(str(folder))
    blocks = blocks_of(checkpoint.skeleton())
    uniform_plan(blocks, parse_pattern("2:4"))
    assert checkpoint.length > 0


def test_headers(copied: Path) -> None:
    file = copied / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, rest = json.loads(content[8 : 8 + size]), content[8 + size :]
    inside = either(replaced([header]), mutated([content[8 : 8 + size]]))
    with_size = lambda random: (text := inside(random)) and len(text).to_bytes(8, "little") + text + rest  # noqa: E731
    fuzz(file, either(with_size, mutated([content])), lambda: inspect(str(copied)))


def test_indices(copied: Path) -> None:
    names = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").rename(copied / "model-00001-of-00001.safetensors")
    index = copied / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}))
    fuzz(index, values(index), lambda: inspect(str(copied)))


def test_pickles(copied: Path) -> None:
    file = copied / "pytorch_model.bin"
    torch.save(load_file(copied / "model.safetensors"), file)
    legacy = copied / "legacy"
    torch.save(load_file(copied / "model.safetensors"), legacy, _use_new_zipfile_serialization=False)
    (copied / "model.safetensors").unlink()
    contents = [file.read_bytes(), legacy.read_bytes(), pickle.dumps({"a": 1}), pickle.dumps([1, "x"])]
    legacy.unlink()
    fuzz(file, mutated(contents), lambda: inspect(str(copied)))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizers(name: str, copied: Path) -> None:
    checkpoint = open_checkpoint(str(copied))

    def read() -> None:
        check_vocabulary(checkpoint.skeleton(), checkpoint, needed=True)

    fuzz(copied / name, values(copied / name), read)


def test_reports(copied: Path) -> None:
    """By all that read one: push and verify, inspect, what may be written over."""
    file = copied / "sparsellm.json"

    def read() -> None:
        foreign_file(copied, {"config.json"})
        measures(load_report(file))
        read_finished(copied)

    fuzz(file, values(file), read)


def test_report_pages(copied: Path) -> None:
    """Every report that is accepted makes a page; fewer, since a page is drawn."""
    file = copied / "sparsellm.json"

    def page() -> None:
        report_page(copied)[0].encode()

    fuzz(file, replaced([json.loads(file.read_text())]), page, inputs=100)


def test_sweep_folders(small: Path, tmp_path: Path) -> None:
    source = tmp_path / "sweep.yaml"
    source.write_text("recipe: {model: demo:opt, calibration: demo}\naxes: {method: [alps, wanda], sparsity: [50%, 2:4]}\n")
    sweep = read_sweep(source)
    home = tmp_path / "home"
    save_sweep(home, sweep)
    cell = CellFolder(home, sweep.cells[0])
    cell.folder.mkdir(parents=True)
    result = {"labels": dict(cell.cell.labels), "report": json.loads((small / "sparsellm.json").read_text())}
    cell.result.write_text(json.dumps(result))

    def read() -> None:
        saved = saved_sweep(home)
        outcomes = [CellFolder(home, one).outcome() for one in saved.cells if one == cell.cell]
        to_markdown(saved, table(saved, outcomes))

    whole = (home / "sweep.json").read_bytes()
    for wrong in ({"columns": "depth"}, {"axes": {"method": ["alps", "wanda"]}}):
        (home / "sweep.json").write_text(json.dumps(json.loads(whole) | wrong))
        with pytest.raises(SparseLLMError, match=r"sweep\.json"):
            read()
    fuzz(home / "sweep.json", values(home / "sweep.json"), read)
    (home / "sweep.json").write_bytes(whole)
    fuzz(cell.result, mutated([cell.result.read_bytes()]), read, inputs=300)
    layer = result["report"]["blocks"][0]["layers"][0] | {
        "bits": 4,
        "group_size": 32,
        "bits_per_weight": 3.5,
        "routed_tokens": 8,
    }
    result["report"]["blocks"][0]["layers"] = [layer | {"damping": 0.01}]
    fuzz(cell.result, every(result), read)


def test_parquet(tmp_path: Path) -> None:
    file = tmp_path / "words.parquet"
    table = pyarrow.table({"text": ["one", "two", "three"], "id": [1, 2, 3]})
    contents = []
    for compression in ("none", "snappy"):
        parquet.write_table(table, file, compression=compression)
        contents.append(file.read_bytes())
    fuzz(file, mutated(contents), lambda: read_text(str(file), "calibration"))


def test_journals(tmp_path: Path) -> None:
    """A line that is not as it was written counts as not there; the rest of the run's files are checked by their digests."""
    folder = tmp_path / "work"
    told = {"recipe.method": "alps", "file": [1, "a"]}
    journal = Journal.begin(folder, told)
    journal.store_fact("batch", 3)
    journal.store_tensors("windows", {"x": torch.ones(2)})
    content = journal.file.read_bytes()
    lines = either(mutated([content]), lambda random: b"\n".join(_line(line, random) for line in content.split(b"\n")))

    def read() -> None:
        try:
            resumed = Journal.resume(folder, told)
        except CannotResume as error:
            if "another version" in str(error):  # its number was changed
                return
            raise
        assert resumed.fact("batch") in (3, None)
        resumed.store_fact("batch", 4)

    fuzz(journal.file, lines, read, refuses=False)


def _line(line: bytes, random: Random) -> bytes:
    """A journal's line, changed now and then."""
    return replaced([json.loads(line)])(random) if line and random.random() < 0.5 else line


def test_cards(copied: Path) -> None:
    """What a dense model's card says of its license is left out where it cannot be read; nothing is refused for it."""
    content = b"---\nlicense: mit\nlanguage: [en, no]\n---\n# A model\n"
    fuzz(copied / "README.md", mutated([content]), lambda: card_terms(copied), refuses=False)
