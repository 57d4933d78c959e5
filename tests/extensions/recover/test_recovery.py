"""Recovery of a pruned checkpoint: the same arithmetic as its parts called by hand, zeros exact, killed and resumed, errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparsellm import load_report, prune, recover, verify
from sparsellm.checkpoints.files import WORK
from sparsellm.checkpoints.loading import compute_dtype
from sparsellm.errors import BadCheckpoint, InvalidSetting, VerificationFailed
from sparsellm.extensions.recover.block_recovery import RATE
from sparsellm.extensions.recover.model_training import model_step
from sparsellm.extensions.recover.training import distillation
from sparsellm.extensions.recover.training.distillation import (
    adam_for,
    distill,
    group_batches,
    last_states,
)
from sparsellm.extensions.recover.training.generation import generate_samples
from sparsellm.extensions.recover.training.masked_training import MaskedAdam
from sparsellm.extensions.studies.page import report_page
from sparsellm.methods import BlockResult
from sparsellm.observers.events import Event
from sparsellm.outputs.inspection import inspect
from sparsellm.texts.padding import split_batches
from tests import processes
from tests.conftest import long_unless, report_of
from tests.core.cli.test_bad_input import refused
from tests.pruning import prune_blocks
from tests.recovering import block_recovery

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typer.testing import Result

Command = Callable[..., "Result"]
TOKENS = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(3)).repeat(4, 1)
"""Each sequence four times, so that the held-out ones are trained on, too: a random model learns nothing of other random
tokens, and the last bits would decide whether a step lowers their loss."""

WEAK: dict[str, Any] = {"settings": {"solver": "magnitude", "rounds": 0}, "batch_size": 2, "exclude": ["q_proj"]}
"""Leaves something to gain."""

families = pytest.mark.parametrize("family", ["opt", "llama"])


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual steps are for trained models: a random one of this size only gets worse by them."""
    monkeypatch.setattr(distillation, "MODEL_ADAM", MaskedAdam(20, 1e-3))


def load(folder: Path, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model


def pruned(model: Path, folder: Path, **settings: Any) -> Path:
    """A pruned checkpoint in a folder."""
    return prune(model, calibration=TOKENS, **{"sparsity": "60%", **WEAK, **settings}).save_pretrained(folder)


def tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's one file."""
    return load_file(folder / "model.safetensors")


def with_own_head(model: Path, folder: Path) -> Path:
    """A copy of a checkpoint whose head has a weight of its own."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    (embeddings,) = (tensor for name, tensor in tensors(folder).items() if "embed_tokens" in name)
    save_file({**tensors(folder), "lm_head.weight": embeddings.flip(1)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def alike(model: PreTrainedModel, folder: Path) -> bool:
    """Whether a model has the very bits that a checkpoint holds."""
    state = model.state_dict()
    return all(torch.equal(state[key], tensor) for key, tensor in tensors(folder).items())


@pytest.mark.parametrize(
    ("family", "steps", "generated"),
    [
        long_unless((family == "opt") == (steps == 20), family, steps, generated)
        for family in ("opt", "llama")
        for steps, generated in ((16, 0), (20, 4), (28, 12))
    ],
)
def test_recovery_of_the_whole_model_equals_its_parts(
    family: str, steps: int, generated: int, tiny: dict[str, Path], tmp_path: Path
) -> None:
    """The bytes of its parts called by hand: the dense model reads and writes, then gradient steps from the pruned weights."""
    folder = pruned(tiny[family], tmp_path / "pruned")
    products = torch.bfloat16 if steps == 28 else None
    asked: Any = "bfloat16" if products else "float32"
    result = recover(folder, tiny[family], TOKENS, steps=steps, batch_size=2, compute_dtype=asked)
    out = result.save_pretrained(tmp_path / "out")
    dense, model = load(tiny[family]), load(folder)
    step = model_step(*TOKENS.shape)
    compute = compute_dtype(dense)
    more = generate_samples(dense, TOKENS, generated, seed=0, compute=compute)
    groups, back = group_batches(TOKENS, more, step, min(step, 2))
    plan = {layer.name: layer.pattern for layer in result.report.layers}
    adam, states = adam_for(model, steps), last_states(dense, groups, compute)
    settings: dict[str, Any] = {"outside": True, "head": dense.get_output_embeddings()}
    found, moved = distill(model, groups, states, plan=plan, adam=adam, held_out=back, products=products, **settings)
    assert result.report.recovered == found
    assert alike(model, out)
    changed = {name for block in result.report.blocks for name in block.changed_parameters}
    assert set(moved) <= changed.union(result.report.changed_outside)


@pytest.mark.parametrize(
    ("family", "tied"),
    [long_unless(tied == (family == "llama"), family, tied) for family in ("opt", "llama") for tied in (True, False)],
)
def test_a_recovered_model_is_recovered_again(
    family: str, tied: bool, loud: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    """The head and the last norm that the first recovery trained are the second's too, in memory and block by block."""
    dense = loud[family] if tied else with_own_head(loud[family], tmp_path / "own")
    settings: dict[str, Any] = {"calibration": TOKENS, "steps": 40, "batch_size": 2}
    folder = pruned(dense, tmp_path / "pruned")
    first = recover(folder, dense, **settings).save_pretrained(tmp_path / "first")
    trained = load_report(first).changed_outside
    assert len(trained) == (3 if family == "opt" else 2)
    assert ("lm_head.weight" in trained) == (not tied)
    untrained, before = tensors(dense), tensors(first)
    assert not any(torch.equal(before[name], untrained[name]) for name in trained)
    streamed = tmp_path / "streamed"
    words = ("--calibration", text_file, "--samples", 8, "--sequence-length", 32, "--steps", 5, "--scope", "block", "--offload")
    ran = command("recover", first, streamed, "--against", dense, *words)
    assert ran.exit_code == 0, ran.stderr
    roads: dict[str, dict[str, Any]] = {"block": {"scope": "block"}, "full": {}}
    for name, more in roads.items():
        recover(first, dense, **settings, **more).save_pretrained(tmp_path / name)
    for out in (streamed, *(tmp_path / name for name in roads)):
        assert verify(out, dense).changed == verify(out).changed > len(trained)
        assert load_report(out).changed_outside == trained
        after = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) == (out.name != "full") for name in trained), out
    again = prune(first, sparsity="70%", calibration=TOKENS, keep_zeros=True, **WEAK).save_pretrained(tmp_path / "again")
    assert load_report(again).changed_outside == trained
    assert verify(again, dense).changed >= len(trained)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        long_unless((family == "opt") == (dtype == "bfloat16"), family, dtype)
        for family in ("opt", "llama")
        for dtype in ("float32", "bfloat16")
    ],
)
def test_recovery_by_blocks_equals_its_parts(family: str, dtype: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    """The bytes of `prune_blocks` with the block's own steps, on both streams."""
    folder = pruned(tiny[family], tmp_path / "pruned", dtype=dtype)
    result = recover(folder, tiny[family], TOKENS, scope="block", steps=20, batch_size=2, compute_dtype="float32")
    out = result.save_pretrained(tmp_path / "out")
    kind = getattr(torch, dtype)
    dense, model = load(tiny[family], kind), load(folder)
    plan = {layer.name: layer.pattern for layer in result.report.layers}
    method = block_recovery(model, result.report.blocks, MaskedAdam(20, RATE))
    steps = list(prune_blocks(dense, split_batches(TOKENS, 2), method, plan, None if kind == torch.float32 else torch.float32))
    assert alike(dense, out)
    assert {tensor.dtype for tensor in tensors(out).values()} == {kind}
    blocks = [step for step in steps if isinstance(step, BlockResult)]
    assert [block.refined for block in result.report.blocks] == [block.refined for block in blocks]
    assert any(block.refined and block.refined.after < block.refined.before for block in blocks)


@pytest.mark.parametrize(
    ("family", "scope"),
    [
        long_unless((family == "opt") == (scope == "model"), family, scope)
        for family in ("opt", "llama")
        for scope in ("model", "block")
    ],
)
def test_zeros_stay_and_other_weights_train(family: str, scope: Any, loud: dict[str, Path], tmp_path: Path) -> None:
    """Zeros are the pruned checkpoint's, weights between them move, all else is the dense model's; report and page say so."""
    folder = pruned(loud[family], tmp_path / "pruned")
    seen: list[Event] = []
    result = recover(folder, loud[family], TOKENS, scope=scope, steps=20, observe=seen.append, batch_size=2)
    out = result.save_pretrained(tmp_path / "out")
    before, after, dense, report = tensors(folder), tensors(out), tensors(loud[family]), report_of(out)
    layers = {f"{layer['name']}.weight": layer for block in report["blocks"] for layer in block["layers"]}
    moved = {name for block in report["blocks"] for name in block["changed_parameters"]}
    last = {"embed_tokens", "final_layer_norm" if family == "opt" else "norm"}  # the head's weight is the embedding's
    outside = report.get("changed_outside", [])
    assert {name.split(".")[-2] for name in outside} == (last if scope == "model" else set())
    moved.update(outside)
    assert layers
    for name, tensor in after.items():
        if name in layers:
            assert torch.equal(tensor == 0, before[name] == 0), name
            assert layers[name]["zeros"] == int((tensor == 0).sum())
            assert not torch.equal(tensor, before[name]), name
        else:
            assert torch.equal(tensor, dense[name]) == (name not in moved), name
    assert any("norm" in name for name in moved)
    assert not any("q_proj" in name for name in [*layers, *moved])
    assert verify(str(out), str(loud[family])).layers == len(layers)
    assert inspect(str(out), expect="60%").as_expected
    assert report["recipe"]["pruned"] == "pruned"
    assert report["pruned"]["recipe"]["method"] == "sparsellm"
    assert report["pruned"]["digest"] == report_of(folder)["digests"]["report"]
    assert (report["recovered"] is not None) == (scope == "model")
    card = (out / "README.md").read_text()
    assert "recovered from pruned by 20 gradient steps over" in card
    assert "Recipe of the pruned checkpoint" in card
    assert "sparsellm recover" in report_page(out)[0]
    assert sum(isinstance(event, BlockResult) for event in seen) == 3


def test_recovered_again(tiny: dict[str, Path], tmp_path: Path) -> None:
    """A recovered checkpoint can be recovered further: by blocks, then as a whole."""
    folder = pruned(tiny["llama"], tmp_path / "pruned", dtype="bfloat16")
    first = recover(folder, tiny["llama"], TOKENS, scope="block", steps=10, batch_size=2).save_pretrained(tmp_path / "first")
    second = recover(first, tiny["llama"], TOKENS, scope="model", steps=10, batch_size=2).save_pretrained(tmp_path / "second")
    one, two = tensors(folder), tensors(second)
    for layer in (layer for block in report_of(second)["blocks"] for layer in block["layers"]):
        assert torch.equal(one[f"{layer['name']}.weight"] == 0, two[f"{layer['name']}.weight"] == 0)
    assert {tensor.dtype for tensor in two.values()} == {torch.bfloat16}
    assert report_of(second)["pruned"]["pruned"]["recipe"]["method"] == "sparsellm"


def test_zeros_are_kept_from_stage_to_stage(loud: dict[str, Path], tmp_path: Path) -> None:
    """Pruned and recovered by turns, as in docs/recover.md: each model has the zeros of the one before, and others train."""
    model = dense = loud["llama"]
    for sparsity in (0.5, 0.7, 0.8):
        folder = pruned(model, tmp_path / f"{sparsity}", sparsity=sparsity, keep_zeros=True)
        out = recover(folder, dense, TOKENS, steps=20, batch_size=2).save_pretrained(tmp_path / f"{sparsity} recovered")
        before, between, after = tensors(model), tensors(folder), tensors(out)
        layers = [f"{layer['name']}.weight" for block in report_of(out)["blocks"] for layer in block["layers"]]
        assert layers
        for name in layers:
            assert not ((before[name] == 0) & (between[name] != 0)).any(), name
            assert torch.equal(between[name] == 0, after[name] == 0), name
            assert not torch.equal(between[name], after[name]), name
        zeros = sum(int((after[name] == 0).sum()) for name in layers)
        assert zeros / sum(after[name].numel() for name in layers) == pytest.approx(sparsity, abs=1e-3)
        assert verify(out, dense).layers == len(layers)
        model = out


@pytest.mark.parametrize("more", [(), ("--offload",)], ids=["in memory", "streamed"])
def test_killed_and_resumed(
    more: tuple[str, ...], tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command, server: ForkServerContext
) -> None:
    """SIGKILL once a block is finished; the same command with --resume comes to the same bytes."""
    folder, out = pruned(tiny["llama"], tmp_path / "pruned"), tmp_path / "out"
    words = (
        "--against",
        tiny["llama"],
        "--calibration",
        text_file,
        "--samples",
        16,
        "--sequence-length",
        32,
        "--batch-size",
        2,
    )
    words = (*words, "--scope", "block", "--steps", 60, *more)
    assert command("recover", folder, tmp_path / "whole", *words).exit_code == 0
    processes.kill_after_first_block(server, ["recover", folder, out, *words], out)
    assert not (out / "sparsellm.json").exists()
    refused(command("recover", folder, out, *words), "is unfinished", "--resume")
    ran = command("recover", folder, out, *words, "--resume")
    assert ran.exit_code == 0, ran.stderr
    one, two = ({key: tensor for file in sorted(x.glob("*.safetensors")) for key, tensor in load_file(file).items()}
                for x in (out, tmp_path / "whole"))  # fmt: skip
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())
    assert not (out / WORK).exists()


def test_another_pruned_checkpoint_is_another_run(
    tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run does not go on with a pruned checkpoint that was put in the place of the first."""
    folder = pruned(tiny["llama"], tmp_path / "pruned")
    words = (
        "--against",
        tiny["llama"],
        "--calibration",
        text_file,
        "--samples",
        16,
        "--sequence-length",
        32,
        "--batch-size",
        2,
    )
    words = (folder, tmp_path / "out", *words, "--scope", "block", "--steps", 2)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr("sparsellm.extensions.recover.run.recovery_warnings", interrupted)
        assert command("recover", *words).exit_code == 130
    shutil.rmtree(folder)
    pruned(tiny["llama"], folder, sparsity="50%")
    refused(command("recover", *words, "--resume"), "not the run that was started", "pruned checkpoint")


def damaged(folder: Path) -> Path:
    """A pruned checkpoint one weight of which was changed."""
    found = tensors(folder)
    key = next(key for key in found if "up_proj" in key)
    found[key] = found[key] + 1
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def sound(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pruned(tiny["llama"], tmp_path_factory.mktemp("pruned") / "llama")


def doubled(dense: Path, folder: Path) -> Path:
    """A dense model whose weights are twice those of another."""
    shutil.copytree(dense, folder)
    found = tensors(folder)
    save_file({key: 2 * tensor for key, tensor in found.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def other_words(dense: Path, folder: Path) -> Path:
    """A dense model with another word in its tokenizer."""
    shutil.copytree(dense, folder)
    words = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(words.replace('"A": ', '"swapped": ', 1))
    return folder


def without_weights(folder: Path) -> Path:
    """A pruned checkpoint without its weight file."""
    (folder / "model.safetensors").unlink()
    return folder


Make = Callable[[dict[str, Path], Path], Path]
REFUSED: list[tuple[Make | None, Make | None, dict[str, Any], type[Exception], str]] = [
    (lambda tiny, _: tiny["llama"], None, {}, InvalidSetting, "not written by sparsellm"),
    (lambda _, folder: folder / "nowhere", None, {}, InvalidSetting, "nowhere"),
    (lambda tiny, folder: pruned(tiny["llama"], folder / "none", sparsity="0%"), None, {}, InvalidSetting, "none has no zeros"),
    (lambda _, folder: damaged(folder / "copy"), None, {}, VerificationFailed, "up_proj"),
    (lambda _, folder: without_weights(folder / "copy"), None, {}, BadCheckpoint, r"model\.safetensors"),
    (None, lambda tiny, _: tiny["opt"], {}, InvalidSetting, "opt.*`against`"),
    (None, lambda tiny, folder: doubled(tiny["llama"], folder / "other"), {}, VerificationFailed, "embed_tokens.*dense model"),
    (None, lambda tiny, folder: other_words(tiny["llama"], folder / "other"), {}, InvalidSetting, "tokenizers.*'A'.*`against`"),
    (None, None, {"scope": "modle"}, InvalidSetting, "`scope`.*'model'"),
    (None, None, {"steps": 0}, InvalidSetting, "`steps`"),
    (None, None, {"patience": 10}, InvalidSetting, "`patience`"),
    (None, None, {"lora_rank": 4}, InvalidSetting, "`lora_rank`.*`train`"),
    (None, None, {"train": "lora", "lora_targets": "upp_proj"}, InvalidSetting, "`lora_targets`.*'upp_proj'.*'up_proj'"),
    (None, None, {"sparsity": "50%"}, InvalidSetting, "'sparsity'"),
]


@pytest.mark.parametrize(("pruned_by", "dense_by", "settings", "error", "named"), REFUSED)
def test_what_cannot_be_recovered(
    pruned_by: Make | None,
    dense_by: Make | None,
    settings: dict[str, Any],
    error: type[Exception],
    named: str,
    tiny: dict[str, Path],
    sound: Path,
    tmp_path: Path,
) -> None:
    """One sentence that says what was got, before any weight is trained."""
    shutil.copytree(sound, tmp_path / "copy")
    checkpoint = pruned_by(tiny, tmp_path) if pruned_by else sound
    dense = dense_by(tiny, tmp_path) if dense_by else tiny["llama"]
    with pytest.raises(error, match=named):
        recover(checkpoint, dense, TOKENS, **settings)


def test_what_the_command_refuses(
    tiny: dict[str, Path], sound: Path, text_file: Path, tmp_path: Path, command: Command
) -> None:
    """An output that is there, the pruned checkpoint or the dense model as output, no text; and no model to recover toward."""
    words = ("--against", tiny["llama"], "--samples", 16, "--sequence-length", 32, "--steps", 2)
    text = ("--calibration", text_file)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    refused(command("recover", sound, tmp_path / "full", *words, *text), "exists", "--overwrite")
    refused(command("recover", sound, sound, *words, *text, "--overwrite"), "never overwritten")
    refused(command("recover", sound, sound, *words, *text, "--resume"), "never overwritten")
    refused(command("recover", sound, tiny["llama"], *words, *text, "--overwrite"), "sparsellm did not write")
    refused(command("recover", sound, tmp_path / "out", *words), "Recovery needs a calibration text", "--calibration")
    refused(command("recover", sound, tmp_path / "out", *words, *text, "--offload"), "needs the whole model in memory")
    refused(command("recover", sound, tmp_path / "out", *text), "Missing option '--against'", status=2)
    assert not (tmp_path / "out").exists()
    ran = command("recover", sound, tmp_path / "out", *words, *text, "--json")
    assert ran.exit_code == 0, ran.stderr
    assert json.loads(ran.stdout)["recipe"]["scope"] == "model"
    refused(command("prune", "--config", tmp_path / "out", "--print-config"), "is the report of a recovery")
    assert command("recover", sound, tmp_path / "out", *words, *text, "--overwrite").exit_code == 0
