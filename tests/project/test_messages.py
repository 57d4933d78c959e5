"""Messages name settings in Python's words, between backticks; the command line writes its options in their place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import typer

from sparsellm.cli.app import app
from sparsellm.cli.console import in_options
from sparsellm.extensions.recover.recipe import RecoveryRecipe
from sparsellm.observers.display import Display
from sparsellm.observers.events import Note
from sparsellm.recipes.recipe import Recipe

PACKAGE = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists()) / "src" / "sparsellm"
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]

FIELDS = set(Recipe.model_fields) | set(RecoveryRecipe.model_fields)

KEYWORDS = {"against", "record", "changes", "output", "overwrite", "private", "restart", "resume", "runs", "smoke", "text"}
KEYWORDS |= {
    "allow_dense",
    "embeddings",
    "figures",
    "max_perplexity_increase",
    "max_size",
    "min_accuracy",
    "pack",
    "positive_zeros",
}
KEYWORDS |= {"inplace", "measure", "over", "step", "threads", "tokenizer", "tokens", "values"}
"""Arguments of public functions that messages name, besides the fields of recipes."""

OF_FILES = {"model_type", "tie_word_embeddings", "weight_map", "metadata", "digests", "files", "messages", "role", "content"}
OF_FILES |= {"input_ids", "attention_mask", "quantization_config"}
"""Entries of JSON files and of batches. Keys of YAML files, some of which are called like settings, end with a colon."""

OF_FUNCTIONS = {"device_map", "family", "fisher", "report_to", "windows"}
OF_FUNCTIONS |= {"adapter_names", "cpu_ram_efficient_loading", "fsdp", "init_lora_weights", "modules_to_save", "target_modules"}
OF_FUNCTIONS |= {"mask", "out", "row_starts", "state_dict"}
"""Arguments of single functions that the command line does not have, or has under another name."""

OF_INTERFACES = {"begin", "name", "needs", "prune", "solve", "sparsellm.pipeline.steps.ModelStep"}
"""Members of solvers, methods and steps, in messages for those who write them."""

OTHER_PROGRAMS = {"hf auth login", "sparsellm.register()"} | {
    f"sparsellm {command}" for command in ("bench", "prune MODEL OUT", "unpack")
}


def messages(file: Path) -> Iterator[tuple[int, str]]:
    """Every string of a file that is not a docstring, with its line; "\\0" stands for what an f-string fills in."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    left_out = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    left_out |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)


OUTSIDE = {"cli", "fields.py", "recipe_fields.py", "commands.py", "facts.py", "run_again.py"}
"""The command line, the descriptions that its help and the docstrings of Python share, and the commands in reports."""

LIBRARY = [path for path in sorted(PACKAGE.rglob("*.py")) if not OUTSIDE & set(path.relative_to(PACKAGE).parts)]


def wrong_words(text: str) -> Iterator[str]:
    """What a message calls by a name that Python does not have: an option, or a word between backticks."""
    if not re.match(r"sparsellm \w+ |var\(", text):
        yield from re.findall(r"(?<!\w)--[a-z].*", text)
    for quoted in re.findall("`([^`]*)`", text):
        name, is_set, value = quoted.partition("=")
        if quoted in OTHER_PROGRAMS or "\0" in name or re.match(r"\w+(\.\w+)?:|[\w.]+: ", quoted):
            continue
        known = name in FIELDS | KEYWORDS | OF_FILES | OF_FUNCTIONS | OF_INTERFACES
        if not known or (is_set and not re.fullmatch(r"\0|True|False|\d+|'[^']*'", value)):
            yield quoted


def test_the_library_names_settings_in_the_words_of_python() -> None:
    """No option of the command line, except in whole commands; between backticks only names that exist."""
    wrong = [
        f"{file.relative_to(PACKAGE)} line {line}: {word}"
        for file in LIBRARY
        for line, text in messages(file)
        for word in wrong_words(text)
    ]
    assert not wrong
    assert [*wrong_words("Pass --samples, `sample` or `samples=x`, not `samples=4` nor `sparsellm prune MODEL OUT`.")] == [
        "--samples, `sample` or `samples=x`, not `samples=4` nor `sparsellm prune MODEL OUT`.",
        "sample",
        "samples=x",
    ]


@pytest.mark.parametrize(
    ("command", "python", "options"),
    [
        ("prune", "Pass fewer `samples`.", "Pass fewer --samples."),
        ("prune", "Pass `sequence_length=128`.", "Pass --sequence-length 128."),
        ("prune", "Pass `offload=False`, or `keep_zeros=True`.", "Pass --no-offload, or --keep-zeros."),
        ("prune", "Leave out `exclude='*.k proj'` or `method='alps'`.", "Leave out --exclude '*.k proj' or --method alps."),
        ("prune", "There is no `model`.", "There is no MODEL."),
        ("recover", "Pass it as `against`, not as `pruned`.", "Pass it as --against, not as PRUNED."),
        ("sweep", "Leave out `smoke`, or change `samples` in `changes`.", "Leave out --smoke, or change `samples` in --set."),
        ("push", "Run `hf auth login`, or pass `overwrite=True`.", "Run `hf auth login`, or pass --overwrite."),
        ("sweep", "Try `dtype='float32'`, or more tokens.", "Try --set dtype=float32, or more tokens."),
        ("sweep", "Pass `offload=False` or `include='*.k proj'`.", "Pass --set offload=false or --set 'include=*.k proj'."),
        ("demo", "Choose another name, or pass `overwrite=True` to replace it.", "Choose another name."),
        ("evaluate", "Name another device or try `batch_size=1`, in words.", "Name another device, in words."),
        ("sweep", "Pass the original settings, or `restart=True`.", "Pass the original settings."),
        (
            "pack",
            "Choose another name, or pass `overwrite=True` to replace it.",
            "Choose another name, or pass --overwrite to replace it.",
        ),
        ("demo", "Pass `overwrite=True`, or leave it.", "Pass `overwrite=True`, or leave it."),
        ("prune", r"`overwrite=False` `exclude='a\b'` `samples='4`", r"`overwrite=False` `exclude='a\b'` `samples='4`"),
        ("prune", "samples 'samples' `samples:` `samples=x` ``", "samples 'samples' `samples:` `samples=x` ``"),
    ],
)
def test_the_command_line_names_its_options(command: str, python: str, options: str) -> None:
    """Only names between backticks that the command has an option or an argument for."""
    assert in_options(python, typer.Context(COMMANDS[command])) == options


def test_notes_of_a_run_name_options_too(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("quiet", partial(in_options, context=typer.Context(COMMANDS["prune"]))) as display:
        display(Note("Not measured. Try `dtype='float32'`."))
    assert capsys.readouterr().err == "note: Not measured. Try --dtype float32.\n"


def test_every_field_has_its_option() -> None:
    for field in FIELDS - {"pruned", "against"}:
        spelled = {"model": "MODEL", "settings": "--set"}
        expected = spelled.get(field, f"--{field.replace('_', '-')}")
        command = "prune" if field in Recipe.model_fields else "recover"
        assert in_options(f"`{field}`", typer.Context(COMMANDS[command])) == expected
