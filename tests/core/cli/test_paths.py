"""A model's folder leads nowhere but into itself: what it names or links to outside is refused, and ends in no output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from tests.core.cli.test_headers import refused_by_all

LINKED = (
    "LICENSE",
    "license.txt",
    "NOTICE.md",
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "modeling_own.py",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "additional_chat_templates/rag.jinja",
)


@pytest.fixture
def model(tiny: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the tiny Llama, beside which there is a private file."""
    (tmp_path / "private").write_text("a secret")
    return Path(shutil.copytree(tiny["llama"], tmp_path / "home" / "model"))


@pytest.mark.parametrize("name", LINKED)
def test_a_link_out_of_the_folder_is_refused(name: str, model: Path, tmp_path: Path, command: Callable[..., Result]) -> None:
    """Whatever the file is for, every command says which one it is and where it leads, and what to do."""
    file = model / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(tmp_path / "private")
    refused_by_all(command, model, tmp_path, file.name, "private", "outside the folder", "copy")


@pytest.mark.parametrize("link", ["relative", "twice", "a folder", "into a snapshot of another model"])
def test_links_by_detours_are_refused(link: str, model: Path, tmp_path: Path, command: Callable[..., Result]) -> None:
    """A link to a link, one within a linked folder, and one that only looks like the hub's cache."""
    if link == "relative":
        (model / "LICENSE").symlink_to("../../private")
    elif link == "twice":
        (model / "inner").symlink_to(tmp_path / "private")
        (model / "LICENSE").symlink_to("inner")
    elif link == "a folder":
        (tmp_path / "templates").mkdir()
        shutil.copy(tmp_path / "private", tmp_path / "templates" / "one.jinja")
        (model / "additional_chat_templates").symlink_to(tmp_path / "templates")
    else:
        cache = tmp_path / "models--other--model" / "blobs"
        cache.mkdir(parents=True)
        shutil.move(tmp_path / "private", cache / "0123")
        (model / "LICENSE").symlink_to(cache / "0123")
    refused_by_all(command, model, tmp_path, "outside the folder")


def test_a_shard_that_is_a_link_out_of_a_folder_within_is_refused(
    model: Path, tmp_path: Path, command: Callable[..., Result]
) -> None:
    """An index may name a folder within; what is in there must not be a link either."""
    (model / "inner").mkdir()
    shutil.move(model / "model.safetensors", tmp_path / "other.safetensors")
    (model / "inner" / "model.safetensors").symlink_to(tmp_path / "other.safetensors")
    index = {"weight_map": {"model.norm.weight": "inner/model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refused_by_all(command, model, tmp_path, "other.safetensors", "outside the folder")


def test_a_file_among_the_special_tokens_is_refused(model: Path, tmp_path: Path, command: Callable[..., Result]) -> None:
    """transformers takes what stands there for arguments of the tokenizer, and would read that file as its vocabulary."""
    (model / "special_tokens_map.json").write_text(json.dumps({"vocab_file": str(tmp_path / "private")}))
    refused_by_all(command, model, tmp_path, "special_tokens_map.json", "vocab_file")


def test_links_of_the_hubs_cache_and_within_the_folder_are_followed(
    model: Path, tmp_path: Path, command: Callable[..., Result]
) -> None:
    """A snapshot is links to the blobs beside it; a folder may be a link itself, and hold links to its own files."""
    repository = tmp_path / "models--some--model"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (model / "LICENSE").write_text("The terms")
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (model / "NOTICE").symlink_to("LICENSE")
    (tmp_path / "link").symlink_to(model)
    for number, folder in enumerate((snapshot, model, tmp_path / "link")):
        out = tmp_path / f"out{number}"
        result = command("prune", folder, out, "--method", "magnitude")
        assert result.exit_code == 0, result.stderr
        assert (out / "LICENSE").read_text() == "The terms"
        assert not any(file.is_symlink() for file in out.rglob("*"))
