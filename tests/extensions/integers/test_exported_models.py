"""Exports as what they are made from and stand for: refusal of changed models, verification, inspection and evaluation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import sparsellm
from sparsellm.errors import BadCheckpoint, InvalidSetting, VerificationFailed
from sparsellm.extensions.integers.quantization import expand_groups
from sparsellm.extensions.quantized.schemes import unpack_integers
from sparsellm.extensions.recover.block_recovery import read_recovery, recovery_plan
from sparsellm.pipeline.loading import open_model
from tests.conftest import report_of

UP = "model.layers.1.mlp.up_proj.weight"
FORMS = {"rounded": "int4", "int4": None, "int8": None}
"""Models by what `prune` rounded them to, and by what `export` does."""


@pytest.fixture(scope="module")
def pruned(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An output of `prune` without integers, and one with."""
    folder = tmp_path_factory.mktemp("pruned")
    return {
        str(values): sparsellm.prune(tiny["llama"], "magnitude", "60%", exclude=("k_proj",), values=values).save_pretrained(
            folder / str(values)
        )
        for values in (None, "int4")
    }


@pytest.fixture(scope="module")
def exports(pruned: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """An export of each form, and the model that it was made from."""
    folder = tmp_path_factory.mktemp("exports")
    made = {}
    for name, values in FORMS.items():
        sparsellm.export(pruned[str(values)], folder / name, values=None if values else name)
        made[name] = folder / name, pruned[str(values)]
    return made


def changed(folder: Path, target: Path, **tensors: Callable[[Tensor], Tensor]) -> Path:
    """A copy of a model with other tensors."""
    shutil.copytree(folder, target)
    stored = load_file(folder / "model.safetensors")
    for name, change in tensors.items():
        stored[name] = change(stored[name])
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    return target


def decoded(folder: Path) -> dict[str, Tensor]:
    """The weights that an export stands for, by the definition of the format."""
    stored = load_file(folder / "model.safetensors")
    names = [name.removesuffix("_packed") for name in stored if name.endswith("_packed")]
    weights = {name: x for name, x in stored.items() if not name.endswith(("_packed", "_scale", "_shape"))}
    for name in names:
        rows, columns = stored[f"{name}_shape"].tolist()
        words, scale = stored[f"{name}_packed"], stored[f"{name}_scale"]
        integers = unpack_integers(words, 8 if words.shape[1] * 4 == columns else 4, columns)
        factors = expand_groups(scale.float(), columns // scale.shape[1], columns)
        weights[name] = (integers * factors + 0.0).to(scale.dtype)  # scales may be negative, and zeros have no sign
        assert weights[name].shape == (rows, columns)
    return weights


@pytest.mark.parametrize("values", ["None", "int4"])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x * 2,
        lambda x: x.bfloat16() if x.dtype is torch.float32 else x.float(),
        lambda x: x * (torch.arange(x.shape[1]) != 3),
    ],
    ids=["values", "dtype", "a column of zeros"],
)
def test_a_changed_model_is_refused_by_all(
    change: Callable[[Tensor], Tensor], values: str, pruned: dict[str, Path], tiny: dict[str, Path], tmp_path: Path
) -> None:
    """`pack`, `export` and `recover` say the same of a weight that was changed since the run, and write nothing."""
    model = changed(pruned[values], tmp_path / "model", **{UP: change})
    recipe = read_recovery({"pruned": str(model), "model": str(tiny["llama"]), "calibration": "demo"})
    makers: dict[str, Callable[[], Any]] = {
        "pack": lambda: sparsellm.pack(model, tmp_path / "out"),
        "export": lambda: sparsellm.export(model, tmp_path / "out", values="int8" if values == "None" else None),
        "recover": lambda: recovery_plan(recipe, open_model(recipe).source),
    }
    for make in makers.values():
        with pytest.raises(VerificationFailed, match=f"model is not what the run made, . difference.*{UP}"):
            make()
        assert not (tmp_path / "out").exists()


def test_an_added_and_a_missing_tensor_are_refused(pruned: dict[str, Path], tmp_path: Path) -> None:
    for number, added in enumerate((True, False)):
        model = tmp_path / str(number)
        shutil.copytree(pruned["None"], model)
        stored = load_file(model / "model.safetensors")
        stored = stored | {"other": torch.ones(2)} if added else {k: x for k, x in stored.items() if k != "model.norm.weight"}
        save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises((VerificationFailed, BadCheckpoint)):
            sparsellm.export(model, tmp_path / "out", values="int4")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", FORMS)
def test_an_export_is_verified(form: str, exports: dict[str, tuple[Path, Path]], tiny: dict[str, Path]) -> None:
    """By itself, beside the dense model, and beside the model that it was made from, rounded as was asked for."""
    export, model = exports[form]
    done = sparsellm.verify(export)
    assert done.layers == report_of(export)["totals"]["pruned_layers"] == 18
    assert sparsellm.verify(export, against=tiny["llama"]).rounded == 0
    beside = sparsellm.verify(export, against=model)
    names = [name for name in load_file(export / "model.safetensors") if name.endswith("_packed")]
    assert beside.rounded == len(names) == (18 if form == "rounded" else 21)
    assert "rounded to integers, all other tensors bit by bit" in beside.compared()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (f"{UP}_packed", lambda x: x + 1, "values of .*up_proj.weight_packed were changed"),
        (f"{UP}_scale", lambda x: x * 2, "values of .*up_proj.weight_scale were changed"),
        (f"{UP}_shape", lambda x: x - torch.tensor([0, 1]), "up_proj.weight_shape"),
        ("model.norm.weight", lambda x: x * 2, "values of model.norm.weight were changed"),
    ],
)
def test_a_changed_export_is_found(
    form: str,
    name: str,
    change: Callable[[Tensor], Tensor],
    message: str,
    exports: dict[str, tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    folder = changed(exports[form][0], tmp_path / "changed", **{name: change})
    with pytest.raises((VerificationFailed, BadCheckpoint), match=message):
        sparsellm.verify(folder)


@pytest.mark.parametrize("form", FORMS)
def test_an_export_of_another_model_is_found(form: str, exports: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """Beside a model whose weights are not those that were rounded, although all reports agree."""
    export, model = exports[form]
    zeros = lambda x: x * (torch.arange(x.shape[1]) > 3)  # noqa: E731
    for number, (name, change, message) in enumerate(
        [
            (UP, lambda x: x * 2, "has other values than" if form == "rounded" else f"is not rounded to {form}"),
            (UP, zeros, "other numbers than 0 where it is 0"),
            ("model.norm.weight", lambda x: x * 2, "model.norm.weight has other values than"),
        ]
    ):
        other = changed(model, tmp_path / str(number), **{name: change})
        with pytest.raises(VerificationFailed, match=message) as caught:
            sparsellm.verify(export, against=other)
        assert len(caught.value.differences) == 1


@pytest.mark.parametrize("form", FORMS)
def test_an_export_is_inspected_and_evaluated(
    form: str, exports: dict[str, tuple[Path, Path]], text_file: Path, tmp_path: Path
) -> None:
    """As a plain model with the weights that it stands for, whole and block by block."""
    export, model = exports[form]
    plain = Path(shutil.copytree(model, tmp_path / "plain"))
    save_file(decoded(export), plain / "model.safetensors", metadata={"format": "pt"})
    found = sparsellm.inspect(export, against=plain)
    assert found.changed == found.only_here == found.only_there == ()
    assert [(x.name, x.zeros) for x in found.layers] == [(x.name, x.zeros) for x in sparsellm.inspect(plain).layers]
    settings: dict[str, Any] = {"sequence_length": 32, "evaluate_limit": 3}
    expected = sparsellm.evaluate(plain, str(text_file), **settings).perplexity
    for more in ({}, {"max_memory": "100KiB"}):
        got = sparsellm.evaluate(export, str(text_file), **settings, **more).perplexity
        assert [x.value for x in got.values()] == [x.value for x in expected.values()]


def test_transformers_loads_the_same_weights(exports: dict[str, tuple[Path, Path]]) -> None:
    pytest.importorskip("compressed_tensors", reason="transformers needs it for this format")
    from sparsellm.checkpoints.loading import open_checkpoint

    tokens = torch.arange(48).view(2, 24)
    for export, _ in exports.values():
        with torch.no_grad():
            expected = AutoModelForCausalLM.from_pretrained(export)(tokens).logits
            assert torch.equal(open_checkpoint(str(export), packed=True).load()(tokens).logits, expected)


def test_parts_that_do_not_fit_are_refused(exports: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """Before memory is taken for what a part claims."""
    for number, shape in enumerate(([10**6, 32], [48, 10**9], [-48, 32], [48, 0])):
        folder = changed(exports["int4"][0], tmp_path / str(number), **{f"{UP}_shape": lambda _, to=shape: torch.tensor(to)})
        with pytest.raises(BadCheckpoint, match=r"up_proj.* of shape"):
            sparsellm.inspect(folder)


def test_an_export_is_no_model_to_export(exports: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="compressed-tensors"):
        sparsellm.export(exports["int4"][0], tmp_path / "out")
