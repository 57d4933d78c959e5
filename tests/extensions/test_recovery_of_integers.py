"""Recovery of models that were rounded to integers: they are trained with scales, norms and biases, and the mask is held."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import sparsellm
from sparsellm import prune, recover, verify
from sparsellm.errors import BadCheckpoint, InvalidSetting, VerificationFailed
from sparsellm.extensions.integers.scales_file import read_scales
from sparsellm.extensions.recover import model_training as training
from sparsellm.extensions.recover.training import distillation
from sparsellm.extensions.recover.training.masked_training import MaskedAdam
from sparsellm.outputs.folder import SCALES_FILE
from tests import processes
from tests.conftest import long_unless, report_of
from tests.core.cli.test_bad_input import refused

if TYPE_CHECKING:
    from typer.testing import Result

Command = Callable[..., "Result"]
TOKENS = torch.randint(0, 256, (64, 32), generator=torch.Generator().manual_seed(3))
SETTINGS: dict[str, Any] = {"steps": 60, "batch_size": 2}
ROUNDED: dict[str, Any] = {
    "int4": {"sparsity": "60%", "values": "int4", "exclude": ["q_proj"]},
    "int3": {"sparsity": "2:4", "values": "int3"},
    "bits": {"bits": 3.0},
}
Matrices = Mapping[str, tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps, on no generated sequences."""
    monkeypatch.setattr(distillation, "MODEL_ADAM", MaskedAdam(60, 3e-3))
    monkeypatch.setattr(training, "READS", 1000)


def rounded(model: Path, folder: Path, how: str = "int4") -> Path:
    """A checkpoint in a folder that is pruned by a method that leaves something to gain, and rounded."""
    settings = {"method": "magnitude", "calibration": TOKENS, "batch_size": 2, **ROUNDED[how]}
    return prune(model, **settings).save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(loud: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Rounded checkpoints of both families; not to be written to."""
    folder = tmp_path_factory.mktemp("rounded")
    return {family: rounded(model, folder / family) for family, model in loud.items()}


def integers_of(folder: Path) -> Matrices:
    """The integers and the scales of each rounded tensor, by stored name, read from the files themselves."""
    tensors, found = load_file(folder / "model.safetensors"), {}
    for name, scales in read_scales(folder).items():
        quantized = scales.quantized(tensors[name])
        assert quantized is not None, name
        found[name] = (quantized.integers, scales.scales)
    return found


def packed_masks(folder: Path, target: Path) -> dict[str, Tensor]:
    """The masks that `pack` stores of a model."""
    sparsellm.pack(folder, target)
    return {key: x for key, x in load_file(target / "model.safetensors").items() if "mask" in key or "groups" in key}


def changed_integers(before: Matrices, after: Matrices) -> float:
    """The fraction of integers that changed; none of them to or from 0."""
    assert before
    assert before.keys() == after.keys()
    changed = total = 0
    for name, (integers, scales) in before.items():
        assert after[name][1].shape == scales.shape
        assert torch.equal(after[name][0] == 0, integers == 0), name
        changed += int((after[name][0] != integers).sum())
        total += int((integers != 0).sum())
    return changed / total


@pytest.mark.parametrize(
    ("family", "scope", "how"),
    [
        long_unless((family, scope, how) in (("opt", "model", "bits"), ("llama", "block", "int4")), family, scope, how)
        for family in ("opt", "llama")
        for scope in ("model", "block")
        for how in ROUNDED
    ],
)
def test_integers_and_scales_train(family: str, scope: Any, how: str, loud: dict[str, Path], tmp_path: Path) -> None:
    """The output is a quantized checkpoint with the same mask, other integers and scales; its report is of what is written."""
    folder = rounded(loud[family], tmp_path / "pruned", how)
    result = recover(folder, loud[family], TOKENS, scope=scope, **SETTINGS)
    out = result.save_pretrained(tmp_path / "out")
    before, after, report = integers_of(folder), integers_of(out), report_of(out)
    changed = changed_integers(before, after)
    assert changed < 0.5
    assert changed > 0 or scope == "block"  # whose steps are too few and small
    assert any(not torch.equal(after[name][1], scales) for name, (_, scales) in before.items())
    layers = {f"{layer['name']}.weight": layer for block in report["blocks"] for layer in block["layers"]}
    assert layers.keys() == before.keys()
    earlier = {f"{layer['name']}.weight": layer for block in report_of(folder)["blocks"] for layer in block["layers"]}
    for name, layer in layers.items():
        assert layer["zeros"] == int((before[name][0] == 0).sum())
        assert all(layer[key] == earlier[name][key] for key in ("bits", "group_size", "bits_per_weight"))
    trainings = [report["recovered"]] if scope == "model" else [block["refined"] for block in report["blocks"]]
    assert any(training["after"] < training["before"] for training in trainings)
    assert not any(training["after"] > training["before"] for training in trainings)
    assert any("norm" in name for block in report["blocks"] for name in block["changed_parameters"])
    assert verify(out, loud[family]).layers == len(layers)
    one, two = packed_masks(folder, tmp_path / "packed"), packed_masks(out, tmp_path / "packed again")
    assert one
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())
    sizes = {(tmp_path / name / "model.safetensors").stat().st_size for name in ("packed", "packed again")}
    assert len(sizes) == 1
    assert verify(tmp_path / "packed again").layers == len(layers)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_the_loss_is_that_of_what_is_written(
    family: str, folders: dict[str, Path], loud: dict[str, Path], text_file: Path, tmp_path: Path
) -> None:
    """The perplexity in the report is that of the output as any program reads it, and of its packed form."""
    settings = {**SETTINGS, "evaluate": [str(text_file)], "sequence_length": 32, "evaluate_limit": 8}
    result = recover(folders[family], loud[family], TOKENS, **settings)
    out = result.save_pretrained(tmp_path / "out")
    wanted = result.report.perplexity[str(text_file)]["pruned"].value
    again = sparsellm.evaluate(out, text_file, sequence_length=32, evaluate_limit=8)
    assert again.perplexity[str(text_file)].value == pytest.approx(wanted, rel=1e-6)
    assert result.report.before(str(text_file)).value != pytest.approx(wanted, rel=1e-4)  # type: ignore[union-attr]


def test_recovered_again(folders: dict[str, Path], loud: dict[str, Path], tmp_path: Path) -> None:
    """A recovery of a recovery holds the mask too."""
    first = recover(folders["opt"], loud["opt"], TOKENS, **SETTINGS).save_pretrained(tmp_path / "first")
    second = recover(first, loud["opt"], TOKENS, scope="block", **SETTINGS).save_pretrained(tmp_path / "second")
    found = [integers_of(folder) for folder in (folders["opt"], first, second)]
    for one, two in itertools.pairwise(found):
        changed_integers(one, two)
        assert any(not torch.equal(scales, two[name][1]) for name, (_, scales) in one.items())


def test_fused_layers_and_what_was_packed(tmp_path: Path) -> None:
    """GPT-2 stores (in, out) and three layers in a tensor; integers that `pack` made come back from `unpack`."""
    from tests.training import pruned_model

    dense = tmp_path / "dense"
    pruned_model("gpt2").save_pretrained(dense)
    tokens = TOKENS % 96
    prune(dense, "wanda", "50%", calibration=tokens).save_pretrained(tmp_path / "pruned")
    sparsellm.pack(tmp_path / "pruned", tmp_path / "packed", values="int4")
    sparsellm.unpack(tmp_path / "packed", tmp_path / "back")
    out = recover(tmp_path / "back", dense, tokens, **SETTINGS).save_pretrained(tmp_path / "out")
    before, after = read_scales(tmp_path / "back"), read_scales(out)
    assert before.keys() == after.keys()
    assert any("c_attn" in name for name in before)
    tensors, others = load_file(tmp_path / "back" / "model.safetensors"), load_file(out / "model.safetensors")
    changed = 0
    for name, scales in before.items():
        pairs = [x.quantized(y[name].T) for x, y in ((scales, tensors), (after[name], others))]
        assert all(pairs)
        one, two = (x.integers for x in pairs if x)
        assert torch.equal(one == 0, two == 0)
        changed += int((one != two).sum())
    assert changed
    assert all(layer["bits"] == 4 for block in report_of(out)["blocks"] for layer in block["layers"])
    assert verify(out, dense).layers == 12


def test_what_cannot_be_recovered(folders: dict[str, Path], loud: dict[str, Path], tmp_path: Path) -> None:
    """One sentence each, before anything is trained, and no output."""
    sound, dense = folders["llama"], loud["llama"]
    with pytest.raises(InvalidSetting, match="`train`"):
        recover(sound, dense, TOKENS, train="lora")
    folder = Path(shutil.copytree(sound, tmp_path / "copy"))
    data = (folder / SCALES_FILE).read_bytes()
    (folder / SCALES_FILE).write_bytes(data[:-7])
    with pytest.raises(VerificationFailed, match=r"quantization\.scales"):
        recover(folder, dense, TOKENS)
    (folder / SCALES_FILE).unlink()
    with pytest.raises(BadCheckpoint, match=r"quantization\.scales"):
        recover(folder, dense, TOKENS)
    prune(dense, "magnitude", "50%", exclude=["q_proj"]).save_pretrained(tmp_path / "some")
    sparsellm.pack(tmp_path / "some", tmp_path / "packed", values="int4")
    sparsellm.unpack(tmp_path / "packed", tmp_path / "back")
    with pytest.raises(InvalidSetting, match=r"q_proj\.weight"):
        recover(tmp_path / "back", dense, TOKENS)


@pytest.mark.long
@pytest.mark.parametrize(("scope", "entry"), [("model", b'"training"'), ("block", b'"block"')])
def test_killed_and_resumed(
    scope: str,
    entry: bytes,
    folders: dict[str, Path],
    loud: dict[str, Path],
    text_file: Path,
    tmp_path: Path,
    command: Command,
    server: ForkServerContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGKILL during the training; --resume continues to the same bytes, those of the side file among them."""
    monkeypatch.undo()  # the other process has the usual learning rate
    out = tmp_path / "out"
    words: tuple[object, ...] = ("--against", loud["llama"], "--calibration", text_file, "--samples", 16, "--batch-size", 2)
    words = (*words, "--sequence-length", 32, "--steps", 150, "--scope", scope)
    assert command("recover", folders["llama"], tmp_path / "whole", *words).exit_code == 0
    processes.kill_at(server, ["recover", folders["llama"], out, *words], out, entry)
    refused(command("recover", folders["llama"], out, *words), "is unfinished", "--resume")
    ran = command("recover", folders["llama"], out, *words, "--resume")
    assert ran.exit_code == 0, ran.stderr
    for name in ("model.safetensors", SCALES_FILE):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert (out / SCALES_FILE).read_bytes() != (folders["llama"] / SCALES_FILE).read_bytes()
