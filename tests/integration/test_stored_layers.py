"""`inspect` of an output by its files alone says what it says with the class of its model, which it asks in all other cases."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import Result

import sparsellm
from sparsellm.errors import BadCheckpoint, SparseLLMError
from sparsellm.models.architectures import ARCHITECTURES
from sparsellm.pipeline.inspection import Inspection, _listed_by_class, _listed_by_files, stored_layers
from sparsellm.pipeline.loading import open_source
from tests.conftest import byte_tokenizer, long_unless
from tests.integration import test_families, test_hybrids
from tests.integration.test_tied_weights import BODIES, HEADS, store, tied_model

Command = Callable[..., Result]

TOLD_BY_FILES = {name for name, x in ARCHITECTURES.items() if not x.splits and not x.experts} - {
    "qwen2_vl_text",  # towers of other models
    "qwen2_5_vl_text",
}
QUICK = ("llama3", "gpt2", "phi3", "mixtral")


def ask_the_class(patch: pytest.MonkeyPatch) -> None:
    """Have `inspect` import the class for every model."""
    patch.setattr("sparsellm.pipeline.inspection.stored_layers", lambda _: None)


def said(command: Command, folder: Path) -> list[tuple[int, str, str]]:
    """What the command says of a folder: the lines, the data, and of two patterns whether they hold.

    Progress lines are left out: they show the machine's memory in use at the moment.
    """
    ran = [command("inspect", folder, *more) for more in ((), ("--json",), ("--expect", "2:4"), ("--expect", "60%", "--json"))]
    return [(one.exit_code, one.stdout, re.sub(r".*  memory \d+%\n", "", one.stderr)) for one in ran]


@pytest.mark.parametrize("name", [long_unless(name in QUICK, name) for name in test_families.CONFIGS])
def test_the_files_say_what_the_class_says(
    name: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same layers, tensors and words for every family, of some layers pruned, of all, and packed.

    The files are asked for every family of which each layer is a tensor of its own.
    """
    dense = tmp_path / "dense"
    model = test_families.tiny(name, torch.bfloat16)
    model.save_pretrained(dense)
    byte_tokenizer().save_pretrained(dense)
    layers = [layer for block in test_families.blocks_of(model) for layer in block.layers]
    sparsellm.prune(dense, "magnitude", "2:4").save_pretrained(tmp_path / "all")
    sparsellm.prune(dense, "magnitude", "60%", include=f"*{layers[-1].rpartition('.')[2]}").save_pretrained(tmp_path / "some")
    sparsellm.pack(tmp_path / "all", tmp_path / "packed")
    told = model.config.model_type in TOLD_BY_FILES
    for folder in (tmp_path / "all", tmp_path / "some", tmp_path / "packed"):
        by_files, by_class = (
            _listed_by_files(str(folder)),
            _listed_by_class(open_source(folder, trusted=False, packed=True)),
        )
        assert (by_files is not None) == told
        if by_files is not None:
            assert [*by_files.tensors.files] == [*by_class.tensors.files]
            names = [{key: [layer for layer, _ in x.layers[key]] for key in x.layers} for x in (by_files, by_class)]
            assert names[0] == names[1]
            assert sum(map(len, names[0].values())) == len(layers)
        without = said(command, folder)
        with monkeypatch.context() as patch:
            ask_the_class(patch)
            assert said(command, folder) == without
    assert _listed_by_files(str(dense)) is None


@pytest.mark.parametrize("name", [long_unless(name in test_hybrids.QUICK, name) for name in test_hybrids.CONFIGS])
def test_other_families_are_not_told_by_files(name: str, tmp_path: Path) -> None:
    test_hybrids.tiny(name).save_pretrained(tmp_path / "dense")
    sparsellm.prune(tmp_path / "dense", "magnitude", "50%").save_pretrained(tmp_path / "out")
    assert stored_layers(str(tmp_path / "out")) is None


def edited(file: Path, **fields: object) -> None:
    """Change fields of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors") | {"other.weight": torch.zeros(3, 4)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_other_shapes(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {key: tensors[key].T.contiguous()}, folder / "model.safetensors", metadata={"format": "pt"})


CHANGES: dict[str, Callable[[Path], object]] = {
    "a configuration of other sizes": lambda out: edited(out / "config.json", intermediate_size=40),
    "an unknown activation": lambda out: edited(out / "config.json", hidden_act="foo"),
    "fewer blocks": lambda out: edited(out / "config.json", num_hidden_layers=2),
    "another family": lambda out: edited(out / "config.json", model_type="mistral"),
    "a class of another family": lambda out: edited(out / "config.json", architectures=["OPTForCausalLM"]),
    "other totals": lambda out: edited(out / "sparsellm.json", notes=["other"]),
    "a damaged report": lambda out: edited(out / "sparsellm.json", blocks=3),
    "no digests": lambda out: edited(out / "sparsellm.json", digests=None),
    "no configuration": lambda out: (out / "config.json").unlink(),
    "an index": lambda out: (out / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
    "a tensor less": without_a_tensor,
    "a tensor more": with_a_tensor,
    "another shape": with_other_shapes,
    "damaged weights": lambda out: (out / "model.safetensors").write_bytes(b"damaged"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_output_is_told_by_its_class(
    change: Callable[[Path], object], tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is refused, or counted, in the same words."""
    out = tmp_path / "out"
    sparsellm.prune(tiny["llama"], "magnitude", "2:4").save_pretrained(out)
    assert stored_layers(str(out)) is not None
    change(out)

    def answer() -> object:
        try:
            return sparsellm.inspect(out)
        except SparseLLMError as error:
            return type(error), str(error)

    found = answer()
    with monkeypatch.context() as patch:
        ask_the_class(patch)
        assert answer() == found
    if isinstance(found, Inspection):
        assert stored_layers(str(out)) is None


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """The names in all files together are those of the run; those of each file are not."""
    test_families.tiny("llama").save_pretrained(tmp_path / "dense", max_shard_size="40kB")
    sparsellm.prune(tmp_path / "dense", "magnitude", "2:4").save_pretrained(tmp_path / "out")
    first, second, *_ = sorted((tmp_path / "out").glob("*.safetensors"))
    assert stored_layers(str(tmp_path / "out")) is not None
    key, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {key: tensor + 1}, second, metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match="both hold"):
        sparsellm.inspect(tmp_path / "out")


def test_other_values_are_counted_as_before(tiny: dict[str, Path], tmp_path: Path) -> None:
    """The values of the weights, which tell no names, are read in any case, and not compared with the report."""
    out = tmp_path / "out"
    sparsellm.prune(tiny["llama"], "magnitude", "2:4").save_pretrained(out)
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].zero_()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    assert stored_layers(str(out)) is not None
    found = {layer.name: layer.sparsity for layer in sparsellm.inspect(out).layers}
    assert [name for name, sparsity in found.items() if sparsity == 1] == ["model.layers.0.mlp.up_proj"]


def test_the_class_tells_where_the_run_had_another(
    tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model in memory may be none that its configuration describes; another transformers may have other names."""
    model = AutoModelForCausalLM.from_pretrained(tiny["llama"])
    sparsellm.prune(model, "magnitude", "2:4").save_pretrained(tmp_path / "memory")
    assert stored_layers(str(tmp_path / "memory")) is None
    sparsellm.prune(tiny["llama"], "magnitude", "2:4").save_pretrained(tmp_path / "out")
    assert stored_layers(str(tmp_path / "out")) is not None
    monkeypatch.setattr("sparsellm.pipeline.inspection.version", lambda _: "4.57.0")
    assert stored_layers(str(tmp_path / "out")) is None


def test_the_class_tells_what_is_tied_and_which_layer_is_the_head(tmp_path: Path) -> None:
    """Whether two tensors are one parameter, and where the head is, the files do not say."""
    store(tied_model("llama3", tmp_path / "tied"), tmp_path / "tied", "single")
    sparsellm.prune(tmp_path / "tied", "magnitude", "2:4").save_pretrained(tmp_path / "both")
    assert len([key for key in load_file(tmp_path / "both" / "model.safetensors") if key.endswith((*HEADS, *BODIES))]) == 2
    assert stored_layers(str(tmp_path / "both")) is None
    test_families.tiny("llama").save_pretrained(tmp_path / "untied")
    result = sparsellm.prune(tmp_path / "untied", "magnitude", "2:4", include=("*_proj", "lm_head"))
    result.save_pretrained(tmp_path / "head")
    assert stored_layers(str(tmp_path / "head")) is None
    assert "lm_head" in {layer.name for layer in sparsellm.inspect(tmp_path / "head", expect="2:4").layers}


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_recovered_and_exported_outputs(
    family: str, tiny: dict[str, Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their reports count and list the same as those of pruned outputs."""
    text = {"calibration": text_file, "samples": 8, "sequence_length": 32}
    sparsellm.prune(tiny[family], "magnitude", "60%", values="int8").save_pretrained(tmp_path / "int8")
    sparsellm.export(tmp_path / "int8", tmp_path / "export")
    sparsellm.prune(tiny[family], "magnitude", "60%").save_pretrained(tmp_path / "run")
    sparsellm.recover(tmp_path / "run", tiny[family], steps=2, **text).save_pretrained(tmp_path / "recovered")
    for name in ("int8", "export", "recovered"):
        found = sparsellm.inspect(tmp_path / name, expect="60%")
        assert stored_layers(str(tmp_path / name)) is not None, name
        with monkeypatch.context() as patch:
            ask_the_class(patch)
            assert sparsellm.inspect(tmp_path / name, expect="60%") == found, name
