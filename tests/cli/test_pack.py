"""`pack` and `unpack`: every tensor and file comes back, other commands say what to do, damage is one message."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

import sparsellm
from sparsellm.checkpoints.headers import locate_all
from sparsellm.errors import BadCheckpoint, InvalidSetting, OutputExists, SparseLLMError, UnsupportedModel, VerificationFailed
from sparsellm.runs import conversion, packing
from sparsellm.runs.quantization_file import read_scales
from sparsellm.solvers.quantization import integer_range
from tests.cli.conftest import OUTPUTS
from tests.conftest import long_unless, report_of
from tests.fuzzing import Tally, attempt

Command = Callable[..., Result]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in a folder's weight files."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same_bits(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors have the same names, dtypes, shapes and bits."""
    return first.keys() == other.keys() and all(
        x.dtype == other[name].dtype and x.shape == other[name].shape and x.numpy(force=True).tobytes() == raw(other[name])
        if x.dtype != torch.bfloat16
        else torch.equal(x.view(torch.int16), other[name].view(torch.int16))
        for name, x in first.items()
    )


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor that numpy has a dtype for."""
    return tensor.numpy(force=True).tobytes()


@pytest.fixture(scope="module")
def packed(outputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed OPT; not to be written to."""
    folder = tmp_path_factory.mktemp("packed") / "opt"
    sparsellm.pack(outputs["opt"], folder)
    return folder


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("name", [long_unless(name in ("opt", "streamed", "experts"), name) for name in OUTPUTS])
def test_every_file_comes_back(name: str, archive: bool, outputs: dict[str, Path], tmp_path: Path) -> None:
    """Biases, tied heads, several files, experts and fused layers: packed, verified, and unpacked to the same bytes."""
    model = outputs[name]
    result = sparsellm.pack(model, tmp_path / "packed", archive=archive)
    assert result.packed_bytes < result.dense_bytes
    assert len(result.packed) > 3
    assert all(matrix.packed_bytes < matrix.dense_bytes for matrix in result.packed)
    files = [file for folder in (model, tmp_path / "packed") for file in sorted(folder.glob("*.safetensors"))]
    assert (result.dense_bytes, result.packed_bytes) == tuple(
        sum(file.stat().st_size for file in files if file.parent == folder) for folder in (model, tmp_path / "packed")
    )
    verified = sparsellm.verify(tmp_path / "packed")
    assert verified.tensors == len(tensors_of(model))
    assert not list(tmp_path.glob("packed/*.partial"))
    sparsellm.unpack(tmp_path / "packed", tmp_path / "back")
    assert same_bits(tensors_of(model), tensors_of(tmp_path / "back"))
    names = {file.name for file in model.iterdir()}
    assert names == {file.name for file in (tmp_path / "back").iterdir()}
    weights = {file.name for file in model.glob("*.safetensors*")} | {"sparsellm.json"}
    assert [x for x in names - weights if not filecmp.cmp(model / x, tmp_path / "back" / x, shallow=False)] == []
    assert sparsellm.verify(tmp_path / "back").tensors == verified.tensors
    assert report_of(tmp_path / "back")["blocks"] == report_of(model)["blocks"]


def test_packed_files_are_what_the_documentation_says(packed: Path, outputs: dict[str, Path]) -> None:
    """Configuration, metadata and names; the embeddings, which are dense, stay tensors as they were."""
    config = json.loads((packed / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "sparsellm", "version": 1, "form": "plain"}
    dense = tensors_of(outputs["opt"])
    with safe_open(packed / "model.safetensors", "pt") as file:
        entries = json.loads(file.metadata()["sparsellm"])
        names = set(file.keys())
        weight = "model.decoder.layers.0.fc1.weight"
        assert entries[weight] == {"shape": [64, 32], "dtype": "bfloat16", "sha256": entries[weight]["sha256"]}
        assert file.get_tensor(weight).shape == (int((dense[weight] != 0).sum()),)
        assert {f"{weight}_mask", f"{weight}_codes", f"{weight}_dictionary"} <= names
        table = "model.decoder.embed_tokens.weight"
        assert table not in entries
        assert torch.equal(file.get_tensor(table), dense[table])
    assert set(entries) == {name for name, x in dense.items() if (x == 0).float().mean() > 0.1 and x.ndim == 2}


def test_report_and_card_say_the_sizes(packed: Path, outputs: dict[str, Path]) -> None:
    """The report has the size of every matrix, and the card says that the zeros are not stored and how to load the model."""
    packing = report_of(packed)["packing"]
    assert packing["packed_bytes"] == (packed / "model.safetensors").stat().st_size
    assert packing["form"] == "plain"
    matrices = {matrix["name"]: matrix for matrix in packing["matrices"]}
    fc1 = matrices["model.decoder.layers.0.fc1.weight"]
    assert (fc1["zeros"], fc1["dense_bytes"], fc1["packed"]) == (1024, 64 * 32 * 2, True)
    assert not matrices["model.decoder.embed_tokens.weight"]["packed"]
    card = (packed / "README.md").read_text()
    assert "The zeros are not stored" in card
    assert "`import sparsellm` first" in card
    assert "stored as ordinary numbers" not in card
    assert "```python\nimport sparsellm\nfrom transformers import" in card
    assert "stored as ordinary numbers" in (outputs["opt"] / "README.md").read_text()


def test_inspect_counts_the_zeros_of_a_packed_model(packed: Path, outputs: dict[str, Path], tiny: dict[str, Path]) -> None:
    """The same zeros as in the model that was packed, and the same differences from the dense one."""
    here, there = sparsellm.inspect(packed, tiny["opt"], "50%"), sparsellm.inspect(outputs["opt"], tiny["opt"], "50%")
    assert here.as_expected
    assert here.packed.startswith("Packed (plain form): ")
    assert there.packed == ""
    assert (here.layers, here.zeros, here.changed, here.alike) == (there.layers, there.zeros, there.changed, there.alike)
    assert not sparsellm.inspect(packed, outputs["opt"]).changed
    assert sparsellm.verify(packed, tiny["opt"]).against == str(tiny["opt"])


def test_models_of_other_software_are_packed(tiny: dict[str, Path], tmp_path: Path) -> None:
    """A folder without a report, weights in a .bin file, -0.0 where weights were removed, and files of other formats."""
    folder = tmp_path / "foreign"
    shutil.copytree(tiny["llama"], folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "layers" in name:
            tensors[name] = tensor * (tensor.abs() > tensor.abs().median())
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    (folder / "model.gguf").write_bytes(b"x")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    with pytest.raises(InvalidSetting, match=r"more zeros are -0\.0: `positive_zeros=True` stores them"):
        sparsellm.pack(folder, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    kept = sparsellm.pack(folder, tmp_path / "kept", allow_dense=True)
    assert sum(matrix.negative_zeros for matrix in kept.packed) > 1000
    sparsellm.unpack(tmp_path / "kept", tmp_path / "same")
    assert same_bits(tensors_of(tmp_path / "same"), tensors)
    result = sparsellm.pack(folder, tmp_path / "packed", positive_zeros=True)
    assert result.skipped == ("model.gguf",)
    assert result.bits < kept.bits - 5
    assert (tmp_path / "packed" / "README.md").read_text().startswith("---\nlicense: mit\n---\n<!-- packed -->\nThe zeros")
    assert sparsellm.verify(tmp_path / "packed").tensors == len(tensors)
    sparsellm.unpack(tmp_path / "packed", tmp_path / "back")
    back = tensors_of(tmp_path / "back")
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert not any(bool((x[x == 0].signbit()).any()) for x in back.values())
    assert (tmp_path / "back" / "README.md").read_text() == (folder / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "back")) == 259
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, tensors["model.layers.0.mlp.up_proj.weight"])


def test_a_dense_model_is_refused(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """With its zeros, both sizes and the option; with the option the model is packed nevertheless."""
    result = command("pack", tiny["opt"], tmp_path / "packed")
    assert result.exit_code == 1
    assert "holds 0.0 % zeros in its matrices" in result.stderr
    assert "would become about" in result.stderr
    assert result.stderr.rstrip().endswith("pass --allow-dense.")
    assert not (tmp_path / "packed").exists()
    assert command("pack", tiny["opt"], tmp_path / "packed", "--allow-dense").exit_code == 0
    sparsellm.unpack(tmp_path / "packed", tmp_path / "back")
    assert same_bits(tensors_of(tiny["opt"]), tensors_of(tmp_path / "back"))


def test_commands_in_text_and_json(outputs: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """What both commands print."""
    result = command("pack", outputs["opt"], tmp_path / "packed")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "18 matrices take" in lines[0]
    assert "bits a weight (plain form)" in lines[0]
    assert lines[1].startswith("2 matrices with few zeros stay dense: model.decoder.embed_positions.weight, ")
    assert lines[2].startswith("Wrote")
    report = json.loads(command("pack", outputs["opt"], tmp_path / "other", "--archive", "--json").stdout)
    assert report["form"] == "archive"
    assert report["packed_bytes"] < (tmp_path / "packed" / "model.safetensors").stat().st_size
    back = json.loads(command("unpack", tmp_path / "packed", tmp_path / "back", "--json").stdout)
    assert back["dense_bytes"] == (tmp_path / "back" / "model.safetensors").stat().st_size


def test_prune_packs_its_output_too(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """`--pack` writes OUT and OUT-packed, resumes either, and refuses before pruning what it would refuse after."""
    words = ("prune", tiny["opt"], tmp_path / "out", "--method", "magnitude", "--quiet", "--pack")
    for sparsity in ("20%", "1:4"):
        result = command(*words, "--sparsity", sparsity)
        assert (result.exit_code, list(tmp_path.iterdir())) == (1, [])
        assert f"--sparsity {sparsity} is too little to pack: packing is for 30 % and more. Leave out --pack." in result.stderr
    result = command(*words)
    assert result.exit_code == 0, result.stderr
    assert "18 matrices take" in result.stdout
    sparsellm.unpack(tmp_path / "out-packed", tmp_path / "back")
    assert same_bits(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "back"))
    shutil.rmtree(tmp_path / "out")
    assert "out-packed exists" in command(*words).stderr
    assert not (tmp_path / "out").exists()
    assert command(*words, "--overwrite", "--json").stdout.startswith("{")
    shutil.rmtree(tmp_path / "out-packed")
    result = command(*words, "--resume")
    assert "is finished: there is nothing to resume" in result.stderr
    assert "18 matrices take" in result.stdout
    assert sparsellm.verify(tmp_path / "out-packed").layers == 18


def test_the_page_of_a_packed_model_says_its_size(packed: Path, tmp_path: Path, command: Command) -> None:
    """In the sentence on its zeros."""
    assert command("report", packed, "--output", tmp_path / "page.html").exit_code == 0
    assert "Packed (plain form): " in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("pack", "PACKED", "NEW"), "is packed already. To change its form, unpack it first: sparsellm unpack"),
        (("unpack", "MODEL", "NEW"), "is not packed: its config.json has no"),
        (("pack", "MODEL", "PACKED"), "exists. Choose another name, or pass --overwrite"),
        (("unpack", "PACKED", "MODEL"), "exists. Choose another name, or pass --overwrite"),
        (("pack", "MODEL", "MODEL", "--overwrite"), "is never overwritten"),
        (("pack", "NOWHERE", "NEW"), "There is no folder"),
        (
            ("prune", "PACKED", "NEW", "--method", "magnitude", "--sparsity", "60%"),
            "is packed. Unpack it, and name the result: sparsellm unpack",
        ),
        (("recover", "PACKED", "NEW", "--against", "DENSE", "--calibration", "demo"), "is packed. Unpack it"),
        (("plan", "PACKED", "--method", "magnitude", "--sparsity", "60%"), "is packed. Unpack it"),
    ],
)
def test_wrong_input_is_one_message(
    words: tuple[str, ...],
    message: str,
    packed: Path,
    outputs: dict[str, Path],
    tiny: dict[str, Path],
    tmp_path: Path,
    command: Command,
) -> None:
    """Exit status 1 and one line that says what to do; nothing is written."""
    names = {"PACKED": packed, "MODEL": outputs["opt"], "NEW": tmp_path / "new", "NOWHERE": "./nowhere", "DENSE": tiny["opt"]}
    result = command(*(names.get(word, word) for word in words))
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "new").exists()


def test_damaged_packed_models_are_refused(packed: Path, tmp_path: Path) -> None:
    """A later version, a file that is cut off, and tensors, packed and dense, whose checksums differ."""
    folder = tmp_path / "packed"
    weights = (packed / "model.safetensors").read_bytes()

    def fresh() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(packed, folder)

    fresh()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["version"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    for read in (lambda: sparsellm.unpack(folder, tmp_path / "new"), lambda: sparsellm.inspect(folder)):
        with pytest.raises(UnsupportedModel, match="version 2 of the format, and this sparsellm reads version 1"):
            read()
    fresh()
    (folder / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors is damaged or cut off"):
        sparsellm.unpack(folder, tmp_path / "new")
    with pytest.raises(VerificationFailed, match="is damaged or cut off"):
        sparsellm.verify(folder)
    fresh()
    (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(
        BadCheckpoint, match=r"packed: model\.safetensors: model\.\S+ has another checksum than when it was packed"
    ):
        sparsellm.unpack(folder, tmp_path / "new")
    with pytest.raises(VerificationFailed, match=r"model\.safetensors was changed since"):
        sparsellm.verify(folder)
    fresh()
    stored, entries = locate_all(folder / "model.safetensors")
    position = next(start for name, (header, start) in stored.items() if name not in entries and header.shape[1:])
    (folder / "model.safetensors").write_bytes(weights[:position] + bytes([weights[position] ^ 1]) + weights[position + 1 :])
    with pytest.raises(VerificationFailed, match=r"model\.\S+ is not as it was when it was packed: .*packed is damaged"):
        sparsellm.unpack(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_packed_tensor_that_is_not_listed_is_refused(packed: Path, tmp_path: Path) -> None:
    """Its parts would be read as tensors of their own; a list that names another one twice has lost one."""
    folder = shutil.copytree(packed, tmp_path / "packed")
    content = (packed / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    listed = json.loads(header["__metadata__"]["sparsellm"])
    (first, entry), *rest = listed.items()
    twice = f'{{"{first}": {json.dumps(entry)}, {json.dumps(listed)[1:]}'
    for text, message in {
        json.dumps(dict(rest)): f"it does not list {first}, of which it holds the parts",
        twice: f"its list of packed tensors (it names '{first}' twice)",
    }.items():
        header["__metadata__"]["sparsellm"] = text
        changed = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(changed).to_bytes(8, "little") + changed + content[end:])
        with pytest.raises(BadCheckpoint, match=re.escape(message)):
            sparsellm.unpack(folder, tmp_path / "new")


def test_changed_models_are_refused(outputs: dict[str, Path], tmp_path: Path) -> None:
    """A model whose tensors are not those that its report lists is not packed."""
    folder = tmp_path / "model"
    shutil.copytree(outputs["opt"], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.decoder.layers.0.fc1.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(VerificationFailed, match=r"fc1\.weight were changed since"):
        sparsellm.pack(folder, tmp_path / "packed")
    tensors["model.decoder.layers.0.fc1.weight"][0, 0] = torch.inf
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"holds NaN or infinity in model\.decoder\.layers\.0\.fc1\.weight"):
        sparsellm.pack(folder, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_an_interrupted_pack_continues(
    outputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Finished files are kept, with a note, and not written again; another form starts anew; the result is the same."""
    model, folder = outputs["streamed"], tmp_path / "packed"
    written: list[str] = []
    add = conversion.FileWriter.add

    def counting(writer: conversion.FileWriter, name: str, tensor: torch.Tensor) -> None:
        written.append(name)
        if limit and len(written) > limit:
            raise KeyboardInterrupt
        add(writer, name, tensor)

    monkeypatch.setattr(conversion.FileWriter, "add", counting)
    limit = 0
    sparsellm.pack(model, tmp_path / "whole")
    total = len(written)
    written, limit = [], 1  # within the first file
    result = command("pack", model, folder)
    assert (result.exit_code, folder.exists()) == (130, False)
    assert "nothing was written" in result.stderr
    written, limit = [], total * 2 // 3
    result = command("pack", model, folder)
    assert result.exit_code == 130
    assert "weight files are finished and kept: run it again to continue" in result.stderr
    with pytest.raises(InvalidSetting, match="unfinished"):
        sparsellm.verify(folder)
    written, limit = [], 0
    assert command("pack", model, folder).exit_code == 0
    assert 0 < len(written) < total * 2 // 3
    assert {file.name for file in folder.iterdir()} == {file.name for file in (tmp_path / "whole").iterdir()}
    match, mismatch, errors = filecmp.cmpfiles(folder, tmp_path / "whole", [x.name for x in folder.iterdir()], shallow=False)
    assert (mismatch, errors) == ([], [])
    assert len(match) > 5


def test_settings_that_change_start_anew(outputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were finished in the plain form are not part of an archive."""
    model, folder = outputs["streamed"], tmp_path / "packed"

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "replacing", fail)
        with pytest.raises(OSError, match="No space left") as failure:
            sparsellm.pack(model, folder)
    assert "weight files are finished and kept: run it again to continue" in failure.value.__notes__[0]
    assert len(list((folder / ".sparsellm" / "weights").glob("*.safetensors"))) == len(list(model.glob("*.safetensors")))
    sparsellm.pack(model, folder, archive=True)
    sparsellm.pack(model, tmp_path / "other", archive=True)
    for file in (tmp_path / "other").glob("*.safetensors"):
        assert filecmp.cmp(file, folder / file.name, shallow=False)
    with pytest.raises(OutputExists):
        sparsellm.pack(model, folder)
    sparsellm.pack(model, folder, overwrite=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(OutputExists, match=r"notes\.txt, which sparsellm did not write"):
        sparsellm.pack(model, folder, overwrite=True)


def damage(content: bytes, random: Random) -> bytes:
    """A weight file with one to three changes of its header or its data."""
    length = 8 + int.from_bytes(content[:8], "little")
    for _ in range(random.randint(1, 3)):
        at = random.randrange(length) if random.random() < 0.5 else random.randrange(len(content))
        kind = random.randrange(6)
        if kind <= 2:
            content = content[:at] + bytes([random.randrange(256)]) + content[at + 1 :]
        elif kind == 3:
            content = content[:at]
        elif kind == 4:
            digits = [index for index, byte in enumerate(content[:length]) if 48 <= byte < 58] or [0]
            at = random.choice(digits)
            content = content[:at] + str(random.randrange(10)).encode() + content[at + 1 :]
        else:
            size = random.randint(1, 64)
            content = content[:at] + random.randbytes(size) + content[at + size :]
        length = min(length, len(content)) or 1
    return content or b"x"


@pytest.mark.parametrize("inputs", [long_unless(inputs == 200, inputs) for inputs in (200, 10_000)])
def test_mutated_files_are_refused_in_one_message(inputs: int, packed: Path, tmp_path: Path) -> None:
    """Reading any changed weight file raises one short message, or finds the tensors of the model; nothing is left behind."""
    folder = tmp_path / "packed"
    shutil.copytree(packed, folder)
    valid = (folder / "model.safetensors").read_bytes()
    random, tally = Random(0), Tally()
    source = packing.Source.open(packed)
    expected = packing._read_digests(source)
    entries = locate_all(packed / "model.safetensors")[1]
    for _ in range(inputs):
        file = folder / "model.safetensors"
        file.write_bytes(damage(valid, random))
        os.utime(file, ns=(tally.tried, tally.tried))

        def read() -> None:
            digests = packing._read_digests(packing.Source.open(folder))
            assert all(digests[name] == expected[name] for name in entries if name in digests)

        attempt(tally, read)
    assert tally.message > 0.4 * inputs
    assert sorted(x.name for x in tmp_path.iterdir()) == ["packed"]
    file.write_bytes(damage(valid, random)[:-1])
    with pytest.raises(SparseLLMError):
        sparsellm.verify(folder)


QUANTIZED = {"int8": 8, "int4": 4, "int3": 3}


@pytest.mark.parametrize("values", QUANTIZED)
@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("name", [long_unless(name in ("opt", "experts"), name) for name in OUTPUTS])
def test_rounded_models_are_packed_and_come_back(
    name: str, archive: bool, values: str, outputs: dict[str, Path], tmp_path: Path
) -> None:
    """The layers are multiples of their scales, zeros stay, and packing what was unpacked gives the same files."""
    result = sparsellm.pack(outputs[name], tmp_path / "packed", values=values, archive=archive)
    assert {matrix.value_bits for matrix in result.packed if "embed" not in matrix.name} >= {QUANTIZED[values]}
    verified = sparsellm.verify(tmp_path / "packed")
    sparsellm.unpack(tmp_path / "packed", tmp_path / "back")
    assert sparsellm.verify(tmp_path / "back").tensors == verified.tensors
    before, after = tensors_of(outputs[name]), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    scales = read_scales(tmp_path / "back")
    assert scales
    for key, tensor in before.items():
        if key not in scales:
            assert same_bits({key: tensor}, {key: after[key]})
            continue
        assert bool((after[key][tensor == 0] == 0).all())
        assert not bool((after[key] == 0).logical_and(after[key].signbit()).any())
        matrix = after[key].transpose(-1, -2) if scales[key].transposed else after[key]
        matrix = matrix.reshape(len(scales[key].scales), -1).double()
        size = scales[key].group_size or matrix.shape[1]
        expanded = scales[key].scales.double().repeat_interleave(size, 1)[:, : matrix.shape[1]]
        integers = torch.where(expanded != 0, matrix / expanded, 0)
        assert float((integers - integers.round()).abs().max()) < 2**-8 * 2 ** (QUANTIZED[values] - 1)
        least, largest = integer_range(QUANTIZED[values], 0)
        assert least - 0.5 < float(integers.min()) <= float(integers.max()) < largest + 0.5
    again = sparsellm.pack(tmp_path / "back", tmp_path / "again", archive=archive)
    assert not again.rounded
    for file in (tmp_path / "packed").glob("*.safetensors"):
        assert filecmp.cmp(file, tmp_path / "again" / file.name, shallow=False)


def test_dense_models_are_rounded(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """Without an option: a dense model is small too. Its embeddings stay as they are."""
    result = command("pack", tiny["llama"], tmp_path / "packed", "--values", "int4", "--group-size", "64")
    assert result.exit_code == 0, result.stderr
    assert "(plain form, int4 values)" in result.stdout
    assert "read back. Its weights are rounded" in result.stdout
    with safe_open(tmp_path / "packed" / "model.safetensors", "pt") as file:
        entries = json.loads(file.metadata()["sparsellm"])
    assert all((entry["bits"], entry["group_size"]) == (4, 64) for entry in entries.values())
    assert all("layers" in name for name in entries)
    sparsellm.unpack(tmp_path / "packed", tmp_path / "back")
    dense, back = tensors_of(tiny["llama"]), tensors_of(tmp_path / "back")
    for name, tensor in dense.items():
        error = float((back[name].float() - tensor.float()).norm() / tensor.float().norm())
        assert (0.01 < error < 0.2) if name in entries else error == 0


def test_a_model_that_is_not_its_scales_times_integers_is_refused(outputs: dict[str, Path], tmp_path: Path) -> None:
    """One message that says what to do; nothing is written."""
    sparsellm.pack(outputs["opt"], tmp_path / "packed", values="int4")
    sparsellm.unpack(tmp_path / "packed", tmp_path / "back")
    (tmp_path / "back" / "sparsellm.json").unlink()
    tensors = load_file(tmp_path / "back" / "model.safetensors")
    tensors["model.decoder.layers.0.fc1.weight"][0, 0] = 0.77
    save_file(tensors, tmp_path / "back" / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"fc1\.weight is not what quantization\.scales says") as caught:
        sparsellm.pack(tmp_path / "back", tmp_path / "again")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "again").exists()
    (tmp_path / "back" / "quantization.scales").unlink()
    sparsellm.pack(tmp_path / "back", tmp_path / "again")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--values", "int5"), "--values got 'int5'; it must be int8, int4, int3."),
        (("--values", "int4", "--group-size", "100"), "--group-size must be a multiple of 64"),
        (("--values", "int4", "--group-size", "-64"), "--group-size must be a multiple of 64"),
        (("--group-size", "64"), "--group-size goes with --values"),
    ],
)
def test_impossible_values_are_one_message(
    words: tuple[str, ...], message: str, outputs: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    result = command("pack", outputs["opt"], tmp_path / "new", *words)
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_models_quantized_by_other_software_are_refused(method: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny["llama"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    for values in (None, "int4"):
        with pytest.raises(InvalidSetting, match=rf"is quantized already \({method}\)\. Pack the plain checkpoint"):
            sparsellm.pack(folder, tmp_path / "new", values=values)
    assert not (tmp_path / "new").exists()


def test_models_quantized_already_are_not_rounded_again(outputs: dict[str, Path], tmp_path: Path) -> None:
    sparsellm.pack(outputs["opt"], tmp_path / "packed", values="int8")
    with pytest.raises(InvalidSetting, match="is packed already"):
        sparsellm.pack(tmp_path / "packed", tmp_path / "new", values="int4")
    sparsellm.unpack(tmp_path / "packed", tmp_path / "back")
    with pytest.raises(InvalidSetting, match="is quantized already, to int8, and `values` would round it again"):
        sparsellm.pack(tmp_path / "back", tmp_path / "new", values="int4")


def test_interrupted_packing_with_other_scales_starts_again(
    outputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished files are kept for the same values only."""
    converted: list[str] = []
    convert = packing._Form.convert

    def interrupted(self: Any, file: Path, writer: Any) -> None:
        converted.append(file.name)
        if len(converted) in (2, 4):
            raise KeyboardInterrupt
        convert(self, file, writer)

    monkeypatch.setattr(packing._Form, "convert", interrupted)
    for values in ("int4", "int3"):
        with pytest.raises(KeyboardInterrupt):
            sparsellm.pack(outputs["streamed"], tmp_path / "packed", values=values)
    sparsellm.pack(outputs["streamed"], tmp_path / "packed", values="int3")
    assert converted[0] == converted[2] != converted[4], "int3 began anew, and went on"
    monkeypatch.undo()
    sparsellm.pack(outputs["streamed"], tmp_path / "whole", values="int3")
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert filecmp.cmp(file, tmp_path / "packed" / file.name, shallow=False)


@pytest.mark.long
def test_random_damage_to_quantized_files_is_one_message(outputs: dict[str, Path], tmp_path: Path) -> None:
    """Files are read as before, or refused in one message."""
    folder = tmp_path / "packed"
    sparsellm.pack(outputs["opt"], folder, values="int4")
    expected, random, tally = packing._read_digests(packing.Source.open(folder)), Random(0), Tally()
    file = folder / "model.safetensors"
    valid, entries = file.read_bytes(), locate_all(file)[1]
    for _ in range(300):
        file.write_bytes(damage(valid, random))
        os.utime(file, ns=(tally.tried, tally.tried))

        def read() -> None:
            digests = packing._read_digests(packing.Source.open(folder))
            assert all(digests[name] == expected[name] for name in entries if name in digests)

        attempt(tally, read)
    assert tally.message > 100
