"""What an output says of the machine that it was made on, and what names and texts can put into its documents."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

import sparsellm
from sparsellm.checkpoints.documents import without_paths
from sparsellm.evaluation.results import Accuracy, Perplexity
from sparsellm.outputs.card import fenced, plain
from sparsellm.outputs.report import Report
from sparsellm.recipes.path_names import PathNames
from sparsellm.recipes.recipe import Recipe
from tests.conftest import extensions, report_of
from tests.core.cli.test_bad_input import refused

Command = Callable[..., Result]
HOSTILE = [
    "<img src=x onerror=1>",
    "a | b ` c",
    "```",
    "**bold** _very_ [link](javascript:1)",
    "x\n# heading\n---\nlicense: mit",
    "$x$ ~~y~~ &lt;b&gt; \\",
    "![](x)",
]


def everything_in(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file())


@pytest.mark.parametrize("streamed", [False, True])
def test_no_path_of_the_machine(
    streamed: bool, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file that a recipe can name is in a folder with a telling name, which nothing of the output holds."""
    place = tmp_path / "Zq7 secret place"
    place.mkdir()
    monkeypatch.setenv("HOME", str(place / "homeZq7"))
    model = Path(shutil.copytree(tiny["llama"], place / "own model"))
    told = json.loads((model / "config.json").read_text()) | {"_name_or_path": str(model), "note": {"at": str(place / "x")}}
    (model / "config.json").write_text(json.dumps(told))
    for folder in ("one", "two"):
        (place / folder).mkdir()
        shutil.copy(text_file, place / folder / "words.txt")
    (place / "shares.yaml").write_text('"q_proj": 60%\n')
    out = tmp_path / "out"
    monkeypatch.chdir(place)
    ran = command(
        *("prune", "own model", out, "--method", "wanda", "--allocation", place / "shares.yaml", "--samples", 4),
        *("--calibration", "one/words.txt", "--evaluate", "one/words.txt", "--evaluate", place / "two" / "words.txt"),
        *("--sequence-length", 32, "--evaluate-limit", 2, *(["--offload"] if streamed else [])),
    )
    assert ran.exit_code == 0, ran.stderr
    found = everything_in(out)
    assert b"Zq7" not in found
    assert str(tmp_path).encode() not in found
    report = report_of(out)
    assert report["recipe"]["model"] == "own model"
    assert report["recipe"]["calibration"] == "words.txt"
    assert report["recipe"]["evaluate"] == ["words.txt", "words.txt (2)"]
    assert report["recipe"]["allocation"] == "shares.yaml"
    assert list(report["perplexity"]) == ["words.txt", "words.txt (2)"]
    assert json.loads((out / "config.json").read_text())["note"] == {"at": "x"}
    sparsellm.verify(out, against=str(model))


def test_no_path_of_a_model_in_memory(tiny: dict[str, Path], tmp_path: Path) -> None:
    """By the folder that it was loaded from."""
    place = shutil.copytree(tiny["opt"], tmp_path / "Zq7" / "small")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    out = sparsellm.prune(model, method="magnitude", tokenizer=tokenizer).save_pretrained(tmp_path / "out")
    assert b"Zq7" not in everything_in(out)
    assert report_of(out)["recipe"]["model"] == "small"


def test_names_of_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file has one name however it is written, another file of the same name a number; what is no path stays."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "words.txt").touch()
    monkeypatch.chdir(tmp_path)
    texts = ("demo", "one/words.txt", str(tmp_path / "one" / "words.txt"), "two/words.txt")
    recipe = Recipe(model="facebook/opt-125m", method="wanda", calibration="two/../one/words.txt", evaluate=texts)
    names = PathNames(recipe)
    assert names.recipe(recipe).calibration == "words.txt"
    assert names.recipe(recipe).evaluate == ("demo", "words.txt", "words.txt", "words.txt (2)")
    assert (names.recipe(recipe).model, names["some/other"]) == ("facebook/opt-125m", "some/other")
    assert names.keys({"two/words.txt": 1, "demo": 2}) == {"words.txt (2)": 1, "demo": 2}


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ("{home}/models/x", "x"),
        ("/usr//lib/x", "x"),
        (r"{home}/say \"b\"", r"say \"b\""),
        ("/nowhere-at-all/items/x", "/nowhere-at-all/items/x"),
        ("https://huggingface.co/a/b/c", "https://huggingface.co/a/b/c"),
        ("see {home}/x", "see {home}/x"),
        ("/think", "/think"),
        ("</s>", "</s>"),
    ],
)
def test_paths_in_a_configuration(value: str, left: str, tmp_path: Path) -> None:
    """Whole strings that are paths on this machine, and no other byte."""
    text = '{{"at":  "{0}", "in": [1.50, "{0}"]}}\n'
    value, left = (x.replace("{home}", str(tmp_path)) for x in (value, left))
    assert without_paths(text.format(value).encode()) == text.format(left).encode()


def card_of(text: str) -> str:
    """The card of a run in which everything that can be named is named by a text."""
    recipe = Recipe(model=f"some/{text}", calibration=text, exclude=(text, f"```\n{text}\n````\n"))
    report = Report(recipe, {"sparsellm": "0"}, calibration=f"4 windows of {text}", notes=[text])
    report.perplexity = {text: {"dense": Perplexity(1.0, None, 1, 8, 8, text, 0.0)}}
    report.tasks = {text: {"pruned": Accuracy(0.5, None, None, 4)}}
    report.origin = type(report.origin)(text, hub=True, terms={"license": text, "language": [text]})
    return report.to_markdown()


@pytest.mark.parametrize("text", HOSTILE)
def test_the_card_shows_names_as_they_are(text: str) -> None:
    """Rendered, a name is text and nothing else: same headings, tables, code blocks; no HTML, no links, no emphasis."""
    markdown = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    body, usual = (re.sub(r"\A---\n.*?\n---\n", "", card_of(x), flags=re.DOTALL) for x in (text, "plain"))

    def kinds(source: str) -> list[str]:
        return [token.type for token in markdown.parse(source)]

    assert kinds(body) == kinds(usual)
    children = [child for token in markdown.parse(body) for child in token.children or ()]
    assert {child.type for child in children} <= {"text", "softbreak", "text_special", "code_inline"}
    blocks = [token.content for token in markdown.parse(body) if token.type == "fence" and token.info == "yaml"]
    assert yaml.safe_load(blocks[0])["exclude"][0] == text
    shown = " ".join("".join(child.content for child in token.children or ()) for token in markdown.parse(body))
    assert " ".join(text.split()) in shown


@pytest.mark.parametrize("text", HOSTILE)
def test_the_card_s_front_matter_is_its_own(text: str) -> None:
    """A license's words are one value, whatever they hold; a name that the hub would refuse is no base."""
    data = ModelCard(card_of(text)).data.to_dict()
    assert data["license"] == text
    assert data["language"] == [text]
    assert "base_model" not in data
    assert set(data) == {"library_name", "pipeline_tag", "license", "language", "tags"}


def test_markdown_of_ordinary_names() -> None:
    """They stay as they are, and a fence is as long as it must be."""
    for name in ("model.layers.0.self_attn.q_proj", "some/tiny-opt", "70 %, 2:4 (true-sequential)", "words.txt"):
        assert plain(name) == name
    assert fenced("a\n") == "```yaml\na\n```"
    assert fenced("````") == "`````yaml\n````\n`````"


@extensions
def test_names_on_disk(tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    """A model's folder and a text whose names are HTML and Markdown: pruned, verified, and reported on one page."""
    model = Path(shutil.copytree(tiny["opt"], tmp_path / "<img src=x onerror=alert(1)>"))
    text = Path(shutil.copy(text_file, tmp_path / "a`b|c\n<script>d.txt"))
    out = tmp_path / "<b>out"
    words = ("--method", "wanda", "--samples", 4, "--sequence-length", 32, "--calibration", text, "--evaluate", text)
    ran = command("prune", model, out, *words, "--evaluate-limit", 2)
    assert ran.exit_code == 0, ran.stderr
    card = (out / "README.md").read_text(encoding="utf-8")
    outside = re.sub(r"^(`{3,}).*?^\1$", "", card, flags=re.DOTALL | re.MULTILINE)
    assert "<" not in outside
    sparsellm.verify(out)
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    ran = command("report", out, "--output", page)
    assert ran.exit_code == 0, ran.stderr
    html = page.read_text(encoding="utf-8")
    assert "<script" not in html
    assert "<img" not in html
    assert "<b>out" not in html
    assert "&lt;img src=x onerror=alert(1)&gt;" in html


@pytest.mark.parametrize("file", ["README.md", "model.safetensors", "config.json", "sparsellm.json"])
def test_overwrite_deletes_only_what_was_written(file: str, tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """A file of the run whose bytes are another's by now stays, and the message names it; one that was removed is no matter."""
    out = tmp_path / "out"
    words = ("prune", tiny["opt"], out, "--method", "magnitude", "--overwrite")
    assert command(*words).exit_code == 0
    if file == "model.safetensors":
        tensors = load_file(out / file)
        save_file(tensors | {"lm_head.weight": tensors["model.decoder.embed_tokens.weight"] + 1}, out / file)
    elif file == "sparsellm.json":
        (out / file).write_text(json.dumps(report_of(out) | {"notes": ["mine"]}))
    else:
        (out / file).write_text((out / file).read_text() + "\n")
    before = everything_in(out)
    refused(command(*words), f"holds {file}, which was changed since", "Move it away")
    assert everything_in(out) == before
    (out / file).unlink()
    if file == "sparsellm.json":
        refused(command(*words), "which sparsellm did not write")
    else:
        moved = out.rename(tmp_path / "moved")
        assert command("prune", tiny["opt"], moved, *words[3:]).exit_code == 0
        sparsellm.verify(moved)
