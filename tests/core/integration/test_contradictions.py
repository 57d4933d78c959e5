"""Weight files and their index that contradict each other: one message, or a rule, the same whole and block by block."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import sparsellm
from sparsellm.errors import BadCheckpoint
from tests.conftest import extensions, report_of
from tests.core.cli.test_bad_input import refused

if TYPE_CHECKING:
    from typer.testing import Result

Command = Callable[..., "Result"]
NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
KEY = "model.layers.1.mlp.up_proj.weight"


class Shards:
    """A Llama in two files with an index; its tied head is in the index alone, as in some published models."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        self.files: list[dict[str, Tensor]] = [{}, {}]
        for name, tensor in self.tensors.items():
            self.files["layers.1" in name][name] = tensor
        self.places = {name: NAMES[number] for number, file in enumerate(self.files) for name in file}
        self.places["lm_head.weight"] = NAMES[0]

    def write(self) -> None:
        """Write the files and the index."""
        for name, stored in zip(NAMES, self.files, strict=True):
            save_file(stored, self.folder / name, {"format": "pt"})
        index = {"metadata": {"total_size": 1}, "weight_map": self.places}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def shards(tiny: dict[str, Path], tmp_path: Path) -> Shards:
    """A Llama in two files."""
    return Shards(Path(shutil.copytree(tiny["llama"], tmp_path / "model")))


def absent(shards: Shards) -> None:
    shards.places["mtp.eh_proj.weight"] = NAMES[1]


def twice(shards: Shards) -> None:
    shards.files[0][KEY] = shards.tensors[KEY] + 1


def without_metadata(shards: Shards) -> None:
    shards.write()
    (shards.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards.places}))


@extensions
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (absent, ("model.safetensors.index.json", "mtp.eh_proj.weight")),
        (twice, (*NAMES, KEY)),
        (without_metadata, ("model.safetensors.index.json", "`metadata`")),
    ],
)
def test_refused(
    change: Callable[[Shards], None], named: Sequence[str], offload: bool, shards: Shards, tmp_path: Path, command: Command
) -> None:
    change(shards)
    if change is not without_metadata:
        shards.write()
    ran = command("prune", shards.folder, tmp_path / "out", "--method", "magnitude", *(("--offload",) if offload else ()))
    refused(ran, *named)
    assert not (tmp_path / "out").exists()
    if change is twice:
        with pytest.raises(BadCheckpoint, match=KEY):
            sparsellm.pack(shards.folder, tmp_path / "packed")


def test_not_refused(shards: Shards, tmp_path: Path) -> None:
    """A tensor that is twice there with the same bits, and an index that has tensors in other files than they are in."""
    shards.files[0][KEY] = shards.tensors[KEY].clone()
    shards.places = {name: NAMES[place == NAMES[0]] for name, place in shards.places.items()}
    shards.write()
    out = sparsellm.prune(shards.folder, "magnitude", "50%").save_pretrained(tmp_path / "out")
    pruned = {name: x for file in out.glob("*.safetensors") for name, x in load_file(file).items()}
    assert pruned.keys() == shards.tensors.keys()
    assert torch.equal(pruned[KEY], shards.tensors[KEY] * (pruned[KEY] != 0))


def test_of_several_sets_of_weights_one_is_read(shards: Shards, tmp_path: Path) -> None:
    """That of transformers; a note names the files of the others."""
    shards.write()
    save_file({name: x + 1 for name, x in shards.tensors.items()}, shards.folder / "model.safetensors", {"format": "pt"})
    torch.save(shards.tensors, shards.folder / "pytorch_model.bin")
    out = sparsellm.prune(shards.folder, "magnitude", "50%").save_pretrained(tmp_path / "out")
    name = "model.embed_tokens.weight"
    assert torch.equal(load_file(out / "model.safetensors")[name], shards.tensors[name] + 1)
    (note,) = (note for note in report_of(out)["notes"] if "not copied" in note)
    assert note == f"not copied: {NAMES[0]}, {NAMES[1]}, pytorch_model.bin (weights that are not loaded)"
