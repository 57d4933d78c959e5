"""What the gradient stages need in memory is told and refused before weights are read; and the whole model's stage itself."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from typer.testing import Result

from sparsellm import prune, recover
from sparsellm.checkpoints.loading import Checkpoint
from sparsellm.cli.allocator import manage_memory
from sparsellm.errors import InvalidSetting, SparseLLMError, TooLarge
from sparsellm.extensions.recover.training import distillation
from sparsellm.extensions.recover.training.masked_training import MaskedAdam
from sparsellm.extensions.recover.training.trained_weights import COPIES, trained_bytes
from sparsellm.models.blocks import blocks_of
from sparsellm.observers.events import Begun
from sparsellm.recipes.file import read_recipe
from sparsellm.runtime.memory import (
    available,
    check_fits,
    human_bytes,
    peak_memory,
)
from sparsellm.solvers.patterns import parse_pattern
from tests.conftest import long_unless, report_of
from tests.core.cli.test_bad_input import refused
from tests.meter import Meter

Command = Callable[..., Result]
CPU = torch.device("cpu")
BLOCK = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48 + 2 * 32
"""Parameters of one block of the tiny Llama: attention, feed-forward, norms."""

STREAMS = 2 * 4 * (8 * 32) * 32
"""Bytes of two streams, for 8 windows of 32 tokens."""

HEAD, NORM = 260 * 32, 32
"""Parameters of the output head and of the last norm."""

MODEL = 7 * 4 * 3 * BLOCK + 8 * 4 * (HEAD + NORM) + 4 * HEAD + 4 * (8 * 32 * 32 + 3 * 32 * 260 + 32 * 32 * 3)
"""Bytes of gradient steps over the whole model, one window at a time."""

TEXT = ("--samples", 8, "--sequence-length", 32, "--batch-size", 2)
QUICK = ("--sparsity", "60%", *TEXT)
WHOLE = ("--scope", "model", "--steps", 16)
BLOCKS = ("--scope", "block", "--steps", 5)
WEAK = ("--set", "solver=magnitude", "--set", "rounds=0")
"""Leaves something to gain."""


FREED = """
import os
import sys
from pathlib import Path
import torch
from sparsellm.cli.allocator import keep_pages
if "keep" in sys.argv:
    keep_pages()
kept = 0
for _ in range(20):
    freed = torch.ones(4_000_000).data_ptr()
    regions = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    kept += any(int(first, 16) <= freed < int(end, 16) for first, end in regions)
print(kept, os.environ.get("THP_MEM_ALLOC_ENABLE"))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's thresholds can be set")
@pytest.mark.parametrize(
    ("words", "variables", "kept"),
    [
        (["keep"], {}, "20 1"),
        long_unless(False, [], {"MALLOC_TRIM_THRESHOLD_": "0"}, "0 None"),
        long_unless(False, ["keep"], {"MALLOC_TRIM_THRESHOLD_": "0", "THP_MEM_ALLOC_ENABLE": "0"}, "0 0"),
    ],
)
def test_freed_memory_stays_in_the_process(words: list[str], variables: dict[str, str], kept: str) -> None:
    """Twenty tensors of 16 MB, one after the other, stay mapped when they are freed; what a user set stays."""
    # A run in this process has set what its children would find set.
    plain = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE" and "MALLOC" not in name}
    words = [sys.executable, "-c", FREED, *words]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=plain | variables)
    assert done.stdout.strip() == kept


def test_only_the_command_line_changes_the_process(
    tiny: dict[str, Path], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`prune` of Python sets no variable, no threshold of the heap and no peak; `sparsellm prune` does."""
    called: list[str] = []
    for name in ("keep_pages", "return_pages", "reset_peak"):
        monkeypatch.setattr(f"sparsellm.cli.allocator.{name}", lambda name=name: called.append(name))
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    result = prune(tiny["opt"], method="magnitude")
    assert result.report.peak_memory_bytes > 0
    assert (called, "THP_MEM_ALLOC_ENABLE" in os.environ) == ([], False)
    assert command("prune", tiny["opt"], tmp_path / "out", "--method", "magnitude").exit_code == 0
    assert called == ["keep_pages", "reset_peak"]
    recipe = result.report.recipe
    manage_memory(Begun("one", recipe, {}))
    assert called == ["keep_pages", "reset_peak"]
    manage_memory(Begun("one", recipe, {}, tight=True))
    assert called == ["keep_pages", "reset_peak", "return_pages"]


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual steps are for trained models: a random one of this size only gets worse by them."""
    monkeypatch.setattr(distillation, "MODEL_ADAM", MaskedAdam(20, 1e-3))


two_families = pytest.mark.parametrize("family", ["opt", "llama"])


def test_human_bytes() -> None:
    """With the unit that leaves few digits."""
    assert [human_bytes(count) for count in (0, 1023, 51712, 5.25 * 2**30)] == ["0 B", "1023 B", "50.5 KiB", "5.2 GiB"]


def test_sizes_in_words() -> None:
    """Decimal and binary units, with their fraction; the recipe keeps what was written."""
    sizes = {"16GiB": 16 * 2**30, "500MB": 500 * 10**6, "1.5 gib": 3 * 2**29, "2T": 2 * 10**12}
    for words, count in sizes.items():
        recipe = read_recipe({"model": "demo:opt", "method": "magnitude", "max_memory": words})
        assert (recipe.memory_bytes, recipe.max_memory) == (count, words)


@pytest.mark.parametrize(
    "words", ["", "16", "GiB", "1,5GiB", "-1GB", "0GB", "1e3GB", "16 GiBs", "1.2.3GB", "10000000EiB", "16GiB 3"]
)
def test_sizes_that_are_none(words: str) -> None:
    """Are refused in one message, a plain number and a decimal comma among them."""
    with pytest.raises(InvalidSetting, match=re.escape(f"`max_memory` must be a size such as 16GiB or 500MB, got {words!r}.")):
        read_recipe({"model": "demo:opt", "method": "magnitude", "max_memory": words})


def test_available_here() -> None:
    """This machine tells, and tells no more than it has."""
    found = available(CPU)
    assert 0 < found <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_what_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte more than is free is refused, with both numbers."""
    monkeypatch.setattr("sparsellm.runtime.memory.available", lambda device: 7168)
    check_fits(7168, CPU, stage="All", advice="Nothing.")
    with pytest.raises(TooLarge, match=r"^All needs 7,169 bytes of memory on cpu, and 7,168 are free\. Ask less\.$"):
        check_fits(7169, CPU, stage="All", advice="Ask less.")


def test_available_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free there, not what there is."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (11, 22))
    assert available(torch.device("cuda")) == 11


def test_too_large_is_a_memory_error() -> None:
    """Whoever catches the one or the other catches it."""
    assert issubclass(TooLarge, MemoryError)
    assert issubclass(TooLarge, SparseLLMError)


def test_copies_of_what_is_trained() -> None:
    """A descent holds no more than it is said to, but for what the loss itself makes: as many times the parameters."""
    parameters = {str(number): nn.Parameter(torch.randn(1000, 200)) for number in range(5)}

    def loss(number: int) -> Iterator[Tensor]:
        for _ in range(3):
            yield sum((some.sum() for some in parameters.values()), torch.zeros(()))  # its gradient is a number, spread

    with Meter() as meter:
        meter.hold(parameters.values())
        MaskedAdam(3, 1e-3).run(parameters, {}, loss, groups=4, seed=0)
    assert meter.peak["cpu"] == pytest.approx(COPIES * 4 * 1_000_000, rel=0.01)


def test_bytes_by_hand(tiny: dict[str, Path]) -> None:
    """Seven float32 copies of a block."""
    model = AutoModelForCausalLM.from_pretrained(tiny["llama"])
    blocks = blocks_of(model)
    assert [trained_bytes(block) for block in blocks] == 3 * [7 * 4 * BLOCK]
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 100)
    larger = BLOCK + 32 * (100 - 48) + 100
    assert trained_bytes(blocks[1]) == 7 * 4 * larger


@pytest.fixture(scope="module")
def pruned(tiny: dict[str, Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama, pruned by magnitude."""
    settings = {"settings": {"solver": "magnitude", "rounds": 0}, "samples": 8, "sequence_length": 32}
    result = prune(tiny["llama"], sparsity="60%", calibration=text_file, **settings)
    return result.save_pretrained(tmp_path_factory.mktemp("pruned") / "llama")


@pytest.mark.parametrize(
    ("words", "free", "parts"),
    [
        (BLOCKS, 1000, ("Training a block", f"{28 * BLOCK + STREAMS:,}", "1,000", "--samples")),
        (BLOCKS, 28 * BLOCK + STREAMS - 1, (f"{28 * BLOCK + STREAMS:,}",)),
        (WHOLE, 1000, ("1,000",)),
        ((*WHOLE[:3], 26), MODEL + 4 * 5 * 32 * 32 - 1, (f"{MODEL + 4 * 5 * 32 * 32:,}",)),
        (WHOLE, MODEL - 1, ("Training the whole model", f"{MODEL:,}", f"{MODEL - 1:,}", "--scope block", "--batch-size")),
    ],
)
def test_refused_before_weights_are_read(
    words: tuple[object, ...],
    free: int,
    parts: tuple[str, ...],
    tiny: dict[str, Path],
    pruned: Path,
    text_file: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stage that does not fit: one message with both numbers and what to do; no weights read, nothing written."""
    loaded: list[object] = []
    monkeypatch.setattr(Checkpoint, "load", lambda *arguments: loaded.append(arguments))
    monkeypatch.setattr("sparsellm.runtime.memory.available", lambda device: free)
    base = ("recover", pruned, tmp_path / "out", "--against", tiny["llama"], "--calibration", text_file, *TEXT)
    refused(command(*base, *words), *parts)
    assert not loaded
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [WHOLE, BLOCKS])
def test_what_fits_is_run(
    words: tuple[object, ...],
    tiny: dict[str, Path],
    pruned: Path,
    text_file: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Just enough memory is enough, and is told."""
    needed = MODEL if words is WHOLE else 28 * BLOCK + STREAMS
    monkeypatch.setattr("sparsellm.runtime.memory.available", lambda device: needed)
    base = ("recover", pruned, tmp_path / "out", "--against", tiny["llama"], "--calibration", text_file, *TEXT)
    ran = command(*base, *words)
    assert ran.exit_code == 0, ran.stderr
    assert ("training a block takes" in ran.stderr) == (words is BLOCKS)
    assert (f"training the whole model takes {human_bytes(MODEL)}" in ran.stderr) == (words is WHOLE)


@pytest.mark.parametrize("words", [("--method", "sparsegpt"), ()])
def test_pruning_asks_for_no_gradient_memory(
    words: tuple[object, ...],
    tiny: dict[str, Path],
    text_file: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without gradient steps nobody asks."""
    monkeypatch.setattr("sparsellm.runtime.memory.available", lambda device: 0)
    ran = command("prune", tiny["llama"], tmp_path / "out", "--calibration", text_file, *QUICK, *words)
    assert ran.exit_code == 0, ran.stderr


@pytest.mark.parametrize("family", ["opt", pytest.param("llama", marks=pytest.mark.long)])
def test_the_whole_model(family: str, loud: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    """The divergence on held-back windows falls; zeros exact, what is not planned untouched, the same bytes twice."""
    words = ("--calibration", text_file, *QUICK, *WEAK, "--exclude", "q_proj")
    assert command("prune", loud[family], tmp_path / "pruned", *words).exit_code == 0
    words = ("--against", loud[family], "--calibration", text_file, *TEXT, *WHOLE)
    for name in ("one", "two"):
        ran = command("recover", tmp_path / "pruned", tmp_path / name, *words)
        assert ran.exit_code == 0, ran.stderr
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]
    report = report_of(tmp_path / "one")
    found = report["recovered"]
    assert 0 < found["after"] < found["before"]
    assert 0 < found["steps"] <= 20
    assert not found["note"]
    assert "training the whole model" in report["seconds"]
    before, after = load_file(loud[family] / "model.safetensors"), load_file(tmp_path / "one" / "model.safetensors")
    layers = {f"{layer['name']}.weight": layer for block in report["blocks"] for layer in block["layers"]}
    moved = {name for block in report["blocks"] for name in block["changed_parameters"]}.union(report["changed_outside"])
    assert {key for key, tensor in after.items() if not torch.equal(tensor, before[key])} == layers.keys() | moved
    assert not any("q_proj" in name for name in layers.keys() | moved)
    assert sum("norm" in name for name in moved) == (7 if family == "llama" else 14)
    assert [name.split(".")[-2] for name in moved if "embed" in name or "head" in name] == ["embed_tokens"]  # the head's too
    for key, layer in layers.items():
        zeros = int((after[key] == 0).sum())
        assert zeros == layer["zeros"] == parse_pattern(layer["pattern"]).count_removed(after[key].shape)


@two_families
@torch.no_grad()
def test_the_divergence_is_that_of_the_held_back_windows(family: str, loud: dict[str, Path], tmp_path: Path) -> None:
    """Before and after are the mean over these windows' tokens of KL(dense || pruned), in nats."""
    tokens = torch.randint(0, 256, (8, 32), generator=torch.Generator().manual_seed(3))
    settings: dict[str, Any] = {"settings": {"solver": "magnitude", "rounds": 0}, "sparsity": "80%"}
    start = prune(loud[family], **settings, batch_size=2, calibration=tokens)
    start.save_pretrained(tmp_path / "pruned")
    found = recover(tmp_path / "pruned", loud[family], tokens, steps=16, batch_size=2, compute_dtype="float32")
    assert found.report.recovered is not None
    assert found.report.recovered.steps > 0
    dense, before, after = (
        model.float()(tokens[7:]).logits.double().log_softmax(-1)
        for model in (AutoModelForCausalLM.from_pretrained(loud[family]), start.model, found.model)
    )
    for pruned, told in ((before, found.report.recovered.before), (after, found.report.recovered.after)):
        assert told == pytest.approx(float((dense.exp() * (dense - pruned)).sum(-1).mean()), rel=0.02)


@pytest.mark.parametrize(
    ("family", "sound", "note"),
    [
        long_unless((family == "opt") == (sound == 1), family, sound, note)
        for family in ("opt", "llama")
        for sound, note in (
            (0, "not refined: the loss is not finite"),
            (1, "infinite or undefined at step 1: the best weights before it were kept"),
            (2, "infinite or undefined at step 2: the best weights before it were kept"),
        )
    ],
)
def test_a_loss_that_is_not_finite(
    family: str,
    sound: int,
    note: str,
    tiny: dict[str, Path],
    text_file: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights are those from before the stage, bit for bit; note and report say so, and the run ends well."""
    words = ("--calibration", text_file, *TEXT)
    assert command("prune", tiny[family], tmp_path / "before", *words, *WEAK).exit_code == 0
    plain, calls = distillation.kl_of_logits, list[int]()

    def divergence(teacher: Tensor, student: Tensor) -> Tensor:
        calls.append(1)
        return plain(teacher, student) * (1.0 if len(calls) <= sound else float("nan"))

    monkeypatch.setattr(distillation, "kl_of_logits", divergence)
    ran = command("recover", tmp_path / "before", tmp_path / "out", "--against", tiny[family], *words, *WHOLE)
    assert ran.exit_code == 0, ran.stderr
    assert note in " ".join(ran.stderr.split())
    found = report_of(tmp_path / "out")
    assert note in found["recovered"]["note"]
    assert any(note in each for each in found["notes"])
    assert found["recovered"]["steps"] == 0
    assert found["recovered"]["after"] == found["recovered"]["before"]
    assert (found["recovered"]["before"] == "nan") == (sound == 0)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("before", "out")]
    assert files[0] == files[1]


def test_few_windows_are_held_back_too(loud: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    """Without a batch size named, some windows are held back also where all of them are few tokens."""
    words = ("--calibration", text_file, "--samples", 32, "--sequence-length", 32)
    assert command("prune", loud["llama"], tmp_path / "pruned", *words, "--sparsity", "60%", *WEAK).exit_code == 0
    base = ("recover", tmp_path / "pruned", tmp_path / "out", "--against", loud["llama"])
    assert command(*base, *words, *WHOLE).exit_code == 0
    assert report_of(tmp_path / "out")["recovered"]["steps"] > 0


def told(words: str) -> list[int]:
    """Numbers that a process of its own prints."""
    imports = "import torch; from sparsellm.runtime.memory import peak_memory; from sparsellm.cli.allocator import reset_peak"
    words = f"{imports}; {words}"
    found = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True).stdout
    return [int(word) for word in found.split()]


def test_the_peak_is_this_process_s_own() -> None:
    """A small program that a large one starts tells of itself."""
    large = torch.ones(2**28)
    assert peak_memory() > large.nbytes
    assert 2**24 < told("print(peak_memory())")[0] < large.nbytes


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this system does not forget a peak")
def test_a_peak_is_reset() -> None:
    """What came before a run is not counted as its own."""
    before, after = told("torch.ones(2**28); print(peak_memory()); reset_peak(); print(peak_memory())")
    assert before > 2**30 > after > 2**24
