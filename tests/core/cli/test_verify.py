"""`verify`: five outputs as they were written pass, and every single change to any of them is found."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import Result

import sparsellm
from sparsellm.checkpoints.files import REPORT, WORK
from sparsellm.checkpoints.tensor_index import report_digest
from sparsellm.errors import BadCheckpoint, InvalidSetting, VerificationFailed
from tests.conftest import report_of
from tests.core.cli.test_bad_input import refused
from tests.outputs import OUTPUTS

Command = Callable[..., Result]
Change = Callable[[Path], None]


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def holding(folder: Path, wanted: Callable[[str, Tensor], bool], number: int = 0) -> tuple[Path, str]:
    """The file and the name of a stored tensor that is as wanted."""
    found = [(file, key) for file in weight_files(folder) for key, x in load_file(file).items() if wanted(key, x)]
    return found[number]


def is_pruned(key: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and "layers" in key and tensor.count_nonzero().item() < tensor.numel()


def is_norm(key: str, _: Tensor) -> bool:
    return "norm" in key and key.endswith("weight")


def is_embedding(key: str, _: Tensor) -> bool:
    return "embed_tokens" in key


def edited(wanted: Callable[[str, Tensor], bool], edit: Callable[[Tensor], Tensor]) -> Change:
    """A change that edits the numbers of one tensor."""

    def change(folder: Path) -> None:
        file, key = holding(folder, wanted)
        tensors = load_file(file)
        tensors[key] = edit(tensors[key].clone()).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})

    return change


def put(mask: Callable[[Tensor], Tensor], value: float) -> Callable[[Tensor], Tensor]:
    """An edit of the first entry of a mask."""

    def edit(tensor: Tensor) -> Tensor:
        tensor[tuple(mask(tensor).nonzero()[0])] = value
        return tensor

    return edit


def flip(tensor: Tensor) -> Tensor:
    """The lowest bit of the first entry that is not zero."""
    bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    bits[tuple(tensor.nonzero()[0])] ^= 1
    return tensor


def turn(tensor: Tensor) -> Tensor:
    """The sign of the first zero."""
    first = tuple((tensor == 0).nonzero()[0])
    tensor[first] = -tensor[first]
    return tensor


def renamed(names: Callable[[dict[str, Tensor], str], dict[str, Tensor]], wanted: Callable[[str, Tensor], bool]) -> Change:
    """A change of which tensors a file holds."""

    def change(folder: Path) -> None:
        file, key = holding(folder, wanted)
        save_file(names(load_file(file), key), file, metadata={"format": "pt"})

    return change


def swap(folder: Path) -> None:
    """Two tensors of one shape change places, each by itself as sound as before."""
    (one, first), (two, second) = holding(folder, is_norm), holding(folder, is_norm, 1)
    if one == two:
        tensors = load_file(one)
        tensors[first], tensors[second] = 2 * tensors[second], tensors[first]
        save_file(tensors, one, metadata={"format": "pt"})
        return
    a, b = load_file(one), load_file(two)
    a[first], b[second] = 2 * b[second], a[first]
    save_file(a, one, metadata={"format": "pt"})
    save_file(b, two, metadata={"format": "pt"})


def settings(file: str, field: str, value: Any) -> Change:
    """A change of one field of a file of settings."""

    def change(folder: Path) -> None:
        told = json.loads((folder / file).read_text())
        told[field] = value
        (folder / file).write_text(json.dumps(told))

    return change


def byte(file: str) -> Change:
    """A change of one byte in the middle of a file."""

    def change(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / file).write_bytes(data)

    return change


def reported(edit: Callable[[dict[str, Any]], Any], sealed: bool = False) -> Change:
    """A change of the report; sealed: with its own digest made to agree."""

    def change(folder: Path) -> None:
        report = report_of(folder)
        edit(report)
        if sealed:
            report["digests"]["report"] = report_digest(report)
        (folder / "sparsellm.json").write_text(json.dumps(report))

    return change


def first_layer(report: dict[str, Any]) -> dict[str, Any]:
    return report["blocks"][0]["layers"][0]


def more_metadata(folder: Path) -> None:
    file = weight_files(folder)[0]
    save_file(load_file(file), file, metadata={"format": "pt", "made": "elsewhere"})


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "model.safetensors.index.json").read_text())


def repointed(folder: Path) -> None:
    index = index_of(folder)
    first, *_, last = index["weight_map"]
    index["weight_map"][first] = index["weight_map"][last]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def swapped_shards(folder: Path) -> None:
    one, two, *_ = weight_files(folder)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def overwritten(edit: Callable[[bytes], bytes]) -> Change:
    """A change of a weight file's bytes."""

    def change(folder: Path) -> None:
        file = weight_files(folder)[0]
        file.write_bytes(edit(file.read_bytes()))

    return change


def other_digest(report: dict[str, Any]) -> None:
    next(iter(report["digests"]["tensors"].values()))["digest"] = "0"


CHANGES: dict[str, Change] = {
    "a bit of a pruned weight": edited(is_pruned, flip),
    "a bit of a norm": edited(is_norm, flip),
    "a doubled weight": edited(is_pruned, lambda x: 2 * x),
    "a norm times 1.5": edited(is_norm, lambda x: 1.5 * x),
    "one number of the embedding": edited(is_embedding, put(torch.isfinite, 0.25)),
    "a zero filled": edited(is_pruned, put(lambda x: x == 0, 0.001)),
    "a weight more zeroed": edited(is_pruned, put(lambda x: x != 0, 0.0)),
    "a zero of the other sign": edited(is_pruned, turn),
    "NaN in a pruned weight": edited(is_pruned, put(torch.isfinite, float("nan"))),
    "infinity in a norm": edited(is_norm, put(torch.isfinite, float("inf"))),
    "rows in another order": edited(is_pruned, lambda x: x.flip(0)),
    "another dtype": edited(is_pruned, lambda x: x.half()),
    "another shape": edited(is_pruned, lambda x: x.reshape(-1)),
    "two tensors swapped": swap,
    "a layer dropped": renamed(lambda held, key: {k: x for k, x in held.items() if k != key} or {"x": held[key]}, is_pruned),
    "a norm dropped": renamed(lambda held, key: {k: x for k, x in held.items() if k != key} or {"x": held[key]}, is_norm),
    "a tensor added": renamed(lambda held, key: held | {f"{key}.more": held[key].clone()}, is_norm),
    "a tensor renamed": renamed(lambda held, key: {k + "_" * (k == key): x for k, x in held.items()}, is_norm),
    "metadata of a weight file": more_metadata,
    "a weight file cut off": overwritten(lambda data: data[:-1]),
    "a weight file of zeros": overwritten(lambda data: bytes(999)),
    "a field of the configuration": settings("config.json", "max_position_embeddings", 65),
    "a configuration of a billion blocks": settings("config.json", "num_hidden_layers", 10**9),
    "no configuration": lambda folder: (folder / "config.json").unlink(),
    "a byte of the tokenizer": byte("tokenizer.json"),
    "no tokenizer configuration": lambda folder: (folder / "tokenizer_config.json").unlink(),
    "a field of the generation configuration": settings("generation_config.json", "temperature", 7.0),
    "a byte of the log": byte("sparsellm-log.jsonl"),
    "another weight file": lambda folder: save_file({"x": torch.zeros(1)}, folder / "adapter_model.safetensors"),
    "a file of pickled weights": lambda folder: torch.save({}, folder / "pytorch_model.bin"),
    "code": lambda folder: (folder / "modeling_own.py").write_text("import os") and None,
    "zeros in the report": reported(lambda report: first_layer(report).update(zeros=1)),
    "a pattern in the report": reported(lambda report: first_layer(report).update(pattern="1:4")),
    "a layer less in the report": reported(lambda report: report["blocks"][0]["layers"].pop()),
    "a perplexity in the report": reported(lambda report: report["perplexity"].update(c4={"pruned": {"value": 1.0}})),
    "a tensor's digest in the report": reported(other_digest),
    "zeros in a sealed report": reported(lambda report: first_layer(report).update(zeros=1), sealed=True),
    "a pattern in a sealed report": reported(lambda report: first_layer(report).update(pattern="3:4"), sealed=True),
    "a layer less in a sealed report": reported(lambda report: report["blocks"][0]["layers"].pop(), sealed=True),
    "a layer's name in a sealed report": reported(lambda report: first_layer(report).update(name="no.such"), sealed=True),
    "totals of a sealed report": reported(lambda report: report["totals"].update(sparsity_of_model=0.9), sealed=True),
    "a layer twice in a sealed report": reported(
        lambda report: report["blocks"][0]["layers"][1].update(first_layer(report)), sealed=True
    ),
    "a file less in a sealed report": reported(lambda report: report["files"].remove("config.json"), sealed=True),
}
OF_SHARDS: dict[str, Change] = {
    "a shard deleted": lambda folder: weight_files(folder)[-1].unlink(),
    "a shard twice": lambda folder: shutil.copy(weight_files(folder)[0], folder / "model-00099-of-00099.safetensors") and None,
    "two shards swapped": swapped_shards,
    "an index entry re-pointed": repointed,
    "an index entry less": settings("model.safetensors.index.json", "weight_map", {}),
}


def message(folder: Path) -> str | None:
    """What `verify` says of an output; None where it finds nothing."""
    try:
        sparsellm.verify(folder)
    except (VerificationFailed, BadCheckpoint) as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_single_change_is_found(name: str, outputs: dict[str, Path], tmp_path: Path) -> None:
    """Unchanged it passes, then it is refused after each change, in one message."""
    sparsellm.verify(outputs[name])
    changes = CHANGES | (OF_SHARDS if len(weight_files(outputs[name])) > 1 else {})
    missed = []
    for number, (what, change) in enumerate(changes.items()):
        folder = Path(shutil.copytree(outputs[name], tmp_path / str(number)))
        change(folder)
        if (fault := message(folder)) is None or "\n" in fault:
            missed.append(what)
        shutil.rmtree(folder)
    print(f"{name}: {len(changes) - len(missed)} of {len(changes)} changes found")
    assert len(changes) >= 30
    assert missed == []


@pytest.mark.parametrize("name", OUTPUTS)
def test_what_was_not_pruned_is_the_dense_model_s(name: str, models: dict[str, Path], outputs: dict[str, Path]) -> None:
    """Against the model that it came from it holds, against another of that form it does not."""
    model = OUTPUTS[name][0]
    done = sparsellm.verify(outputs[name], against=str(models[model]))
    report = report_of(outputs[name])
    assert done.layers == report["totals"]["pruned_layers"]
    assert done.files == len(report["files"])
    assert done.tensors == len(report["digests"]["tensors"])


def test_against_a_dense_model_that_differs(models: dict[str, Path], outputs: dict[str, Path], tmp_path: Path) -> None:
    """A norm, and the piece of a fused layer that was left dense."""
    dense = Path(shutil.copytree(models["phi3"], tmp_path / "dense"))
    tensors = load_file(dense / "model.safetensors")
    for key, what in (("model.norm.weight", "model.norm.weight"), ("model.layers.0.self_attn.qkv_proj.weight", "qkv_proj.k")):
        save_file(tensors | {key: 2 * tensors[key]}, dense / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(VerificationFailed, match=f"1 difference: .*{what} was not pruned and differs") as caught:
            sparsellm.verify(outputs["fused"], against=str(dense))
        assert len(caught.value.differences) == 1


def test_the_command(outputs: dict[str, Path], models: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """One sentence and exit status 0; one message and exit status 1; the same as JSON."""
    ran = command("verify", outputs["opt"], "--against", models["opt"])
    assert ran.exit_code == 0, ran.stderr
    assert "match its report; all other tensors equal those of" in ran.stdout
    told = json.loads(command("verify", outputs["opt"], "--json").stdout)
    assert told["holds"] is True
    assert told["differences"] == []
    own = Path(shutil.copytree(outputs["opt"], tmp_path / "own"))
    CHANGES["a norm times 1.5"](own)
    refused(
        command("verify", own), "is not what the run made", "norm.weight were changed since", "model.safetensors was changed"
    )
    ran = command("verify", own, "--json")
    assert ran.exit_code == 1
    assert len(json.loads(ran.stdout)["differences"]) == 2


def test_a_card_may_be_edited(outputs: dict[str, Path], tmp_path: Path) -> None:
    """Its words are its owner's; other files, which loading does not read, may lie beside it."""
    own = Path(shutil.copytree(outputs["opt"], tmp_path / "own"))
    (own / "README.md").write_text("My words.")
    (own / "notes.txt").write_text("My notes.")
    sparsellm.verify(own)


def test_in_the_hub_s_cache(outputs: dict[str, Path], tmp_path: Path) -> None:
    """There every file is a link to one among the blobs; one that leads elsewhere is refused."""
    repository = tmp_path / "models--me--opt"
    blobs, place = repository / "blobs", repository / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    place.mkdir(parents=True)
    for number, file in enumerate(sorted(outputs["opt"].iterdir())):
        shutil.copy(file, blobs / str(number))
        (place / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
    sparsellm.verify(place)
    (place / "README.md").unlink()
    (place / "README.md").symlink_to(shutil.copy(outputs["opt"] / "README.md", tmp_path / "private"))
    with pytest.raises(BadCheckpoint, match=r"lists README\.md, which is not in the folder or is a link out of it"):
        sparsellm.verify(place)


REFUSED: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no folder": (shutil.rmtree, InvalidSetting, "own"),
    "no report": (lambda folder: (folder / REPORT).unlink(), InvalidSetting, REPORT),
    "an unfinished output": (lambda folder: (folder / WORK).mkdir(), InvalidSetting, "own"),
    "a missing file": (lambda folder: (folder / "config.json").unlink(), BadCheckpoint, "config.json"),
    "a file outside": (reported(lambda report: report["files"].append("../secret")), BadCheckpoint, "../secret"),
    "no digests": (reported(lambda report: report.pop("digests")), BadCheckpoint, REPORT),
    "half of a report": (lambda folder: (folder / REPORT).write_text("{"), BadCheckpoint, REPORT),
    "nested lists": (lambda folder: (folder / REPORT).write_text("[" * 100_000), BadCheckpoint, REPORT),
    "null": (lambda folder: (folder / REPORT).write_text("null"), BadCheckpoint, REPORT),
    "a number of files": (lambda folder: (folder / REPORT).write_text('{"files": 1}'), BadCheckpoint, REPORT),
    "an empty block": (reported(lambda report: report.update(blocks=[{}])), BadCheckpoint, REPORT),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_output_is_refused(what: str, outputs: dict[str, Path], tmp_path: Path) -> None:
    change, error, named = REFUSED[what]
    own = Path(shutil.copytree(outputs["opt"], tmp_path / "own"))
    change(own)
    with pytest.raises(error, match=re.escape(named)):
        sparsellm.verify(own)


def test_a_kept_weight_that_the_disk_changed(tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither zeros nor the dense model tell what a kept weight should be: it is held against the memory."""
    from sparsellm.outputs import saving

    check = saving.check_written

    def damaging(work: Path, *more: Any, **keywords: Any) -> None:
        CHANGES["a doubled weight"](work)
        check(work, *more, **keywords)

    monkeypatch.setattr(saving, "check_written", damaging)
    result = sparsellm.prune(tiny["opt"], method="magnitude")
    with pytest.raises(VerificationFailed, match="weight has other values than in memory"):
        result.save_pretrained(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_is_not_finite_is_not_written(tiny: dict[str, Path], tmp_path: Path) -> None:
    """A run that ends in NaN leaves no output."""
    result = sparsellm.prune(tiny["opt"], method="magnitude")
    weight = result.model.model.decoder.layers[0].fc1.weight
    with torch.no_grad():
        weight[tuple(weight.nonzero()[0])] = float("nan")
    with pytest.raises(VerificationFailed, match=r"layers\.0\.fc1\.weight holds NaN or infinity"):
        result.save_pretrained(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
