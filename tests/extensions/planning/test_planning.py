"""What a run will take: told before it starts, close to what it then takes, and refused where it cannot be had."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

from sparsellm import prune
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.errors import BadCheckpoint
from sparsellm.extensions.planning.measured_plan import plan_pruning
from sparsellm.methods import BlockResult
from sparsellm.observers.events import LOADING, Note, Stage
from sparsellm.outputs.journal import work_directory
from sparsellm.pipeline.prune import prune_run
from sparsellm.pipeline.token_sequences import draw_windows
from sparsellm.recipes.file import read_recipe
from sparsellm.recipes.registry import solver_named
from sparsellm.runtime.products import bf16_solver_speedup
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.solvers.problem import LayerProblem, solve_bytes
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram
from sparsellm.texts import demo
from tests.conftest import byte_tokenizer, report_of
from tests.core.cli.test_bad_input import refused
from tests.meter import Meter

Command = Callable[..., Result]
QUICK = ("--sparsity", "60%", "--samples", 8, "--sequence-length", 32)


# ---- the model forms

FORMS = {
    "llama": LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1000,
    ),
    "opt": OPTConfig(
        vocab_size=1024,
        hidden_size=256,
        word_embed_proj_dim=256,
        ffn_dim=1024,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
    ),
    "opt-post-norm": OPTConfig(
        vocab_size=1024,
        hidden_size=256,
        word_embed_proj_dim=128,
        ffn_dim=1024,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        do_layer_norm_before=False,
    ),
    "untied": LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of some millions of parameters, by form; not to be written to."""
    found = {}
    for name, config in FORMS.items():
        torch.manual_seed(0)
        found[name] = tmp_path_factory.mktemp("forms") / name
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(found[name])
        byte_tokenizer().save_pretrained(found[name])
    return found


# ---- the estimate


def taken(settings: dict[str, object], folder: Path) -> dict[str, int]:
    """By stage, the most bytes of tensors that a real run held."""
    found: dict[str, int] = {}
    name = ""
    with Meter() as meter, work_directory(folder / "out") as work:

        def observe(event: object) -> None:
            nonlocal name
            if isinstance(event, Stage):
                found[name] = max(found.get(name, 0), meter.peak["cpu"])
                meter.restart()
                name = event.name.removesuffix(" dense").removesuffix(" pruned")

        result = prune_run(read_recipe(settings), observe, work=work)
        observe(Stage("end"))
        del result
    return found


CASES: dict[str, tuple[str, dict[str, object]]] = {
    "wanda": ("llama", {"method": "wanda", "samples": 64}),
    "sparsegpt, streamed, 2:4": ("opt", {"method": "sparsegpt", "sparsity": "2:4", "samples": 16, "offload": True}),
    "true-sequential": ("opt", {"method": "sparsegpt", "samples": 16, "settings": {"true_sequential": True}}),
    "true-sequential, on files": (
        "llama",
        {"method": "wanda", "samples": 64, "settings": {"true_sequential": True}, "max_memory": "60MB"},
    ),
    "streams on files": ("llama", {"method": "sparsegpt", "samples": 64, "offload": True, "max_memory": "60MB"}),
    "as published": ("opt", {"method": "algorithm1", "samples": 16, "settings": {"epochs": 2}}),
    "coupled, streamed": ("llama", {"samples": 8, "offload": True, "settings": {"rounds": 0, "solver": "magnitude"}}),
    "coupled": ("opt", {"samples": 8, "settings": {"rounds": 0, "solver": "sparsegpt"}, "allocation": "uniform"}),
    "the head too": ("untied", {"method": "sparsegpt", "samples": 16, "include": ["Linear", "lm_head"], "evaluate": ()}),
    "the head too, by default": (
        "untied",
        {"samples": 8, "settings": {"rounds": 0, "solver": "sparsegpt"}, "include": ["Linear", "lm_head"], "evaluate": ()},
    ),
}
"""Form and settings."""


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_plan_holds(case: str, folders: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """Memory at the peak within 15 % of what the real run's tensors take."""
    form, change = CASES[case]
    settings = {"model": str(folders[form]), "calibration": str(text_file), "sparsity": "60%", "sequence_length": 128}
    settings |= {"evaluate": (str(text_file),)} | change
    planned = plan_pruning(read_recipe(settings), tmp_path)
    real = taken(settings, tmp_path)
    names = {stage.name for stage in planned.stages}
    assert names <= real.keys()
    assert planned.peak.data_bytes == pytest.approx(max(real[name] for name in names), rel=0.15)


@pytest.mark.parametrize("curved", [False, True])
@pytest.mark.parametrize("solver", ["magnitude", "wanda", "sparsegpt", "fast-admm", "alps", "alps-accurate"])
def test_a_solve_takes_the_memory_that_the_solver_says(solver: str, curved: bool) -> None:
    """The bytes at the peak, for a wide and for a tall layer."""
    for outputs, inputs in ((128, 352), (352, 128)):
        x, y = torch.randn(1024, inputs), torch.randn(1024, outputs)
        gram, weight, curvature = Gram(inputs), torch.randn(outputs, inputs), y.T @ y / 1024 if curved else None
        gram.update(x)
        gram.finalize()
        bf16_solver_speedup()  # which would be measured, once in a process, within the solve
        with Meter() as meter:
            meter.hold([weight, gram.view, *([] if curvature is None else [curvature])])
            before = meter.live["cpu"]
            solver_named(solver).solve(LayerProblem(weight, gram, curvature), parse_pattern("70%"))
            held = meter.peak["cpu"] - before
        told = solve_bytes(solver_named(solver), [(outputs, inputs)], curved=curved) - weight.nbytes
        assert told == pytest.approx(held, rel=0.5)


def test_a_solver_that_says_nothing_of_memory_is_taken_to_be_like_sparsegpt() -> None:
    assert solve_bytes(object(), [(4, 8), (8, 4)]) == solve_bytes(SparseGPT(), [(4, 8), (8, 4)])


def test_files_are_foreseen(folders: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """Bytes on files: two streams for the default, what attention writes in one, and what the feed-forward part reads and is
    to write; what attention writes in the other fits into a quarter of the memory."""
    settings = {
        "model": str(folders["llama"]),
        "calibration": str(text_file),
        "samples": 64,
        "sequence_length": 64,
        "settings": {"rounds": 0, "solver": "magnitude"},
    }
    settings |= {"allocation": "uniform"}
    recipe = read_recipe(settings | {"offload": True, "max_memory": "24MB"})
    found = plan_pruning(recipe, tmp_path)
    pruning = next(stage for stage in found.stages if stage.name == "pruning")
    stream = 64 * 64 * 256 * 4
    assert pruning.files == 5 * stream
    model = found.placement.model
    room = max(found.disk_free_bytes - model, 6_000_000)
    assert found.most_samples == pytest.approx(64 * room / (6 * stream), rel=0.01)
    checkpoint = open_checkpoint(recipe.model)
    assert model == 2 * sum(x.numel() for x in checkpoint.load().parameters())
    assert found.peak.disk_bytes == model + 5 * stream + checkpoint.stamps.document_bytes


# ---- the command


def test_plan_tells_and_writes_nothing(folders: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    words = (folders["llama"], tmp_path / "out", "--calibration", text_file, "--method", "wanda", *QUICK)
    ran = command("plan", *words)
    assert ran.exit_code == 0, ran.stderr
    told = " ".join(ran.stdout.split())
    for part in (
        "3 blocks, 21 layers to prune: 6 of 256 x 256 at 60%",
        "in memory as a whole",
        "8 sequences of 32 tokens, 1 per batch",
    ):
        assert part in told
    for part in ("Peak memory on", "Disk space:", "--samples"):
        assert part in told
    data = json.loads(command("plan", *words, "--json", "--offload").stdout)
    assert data["streamed"] is True
    assert data["fits"] is True
    assert data["blocks"] == 3
    assert [stage["name"] for stage in data["stages"]] == ["pruning"]
    assert data["time"] is None
    assert "Time" not in told
    assert list(tmp_path.iterdir()) == []


def test_plan_reads_no_weights(folders: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    """A checkpoint that holds nothing but NaN is planned; pruning refuses it."""
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "model"))
    tensors = {name: torch.full_like(tensor, float("nan")) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    words = ("--calibration", text_file, "--method", "wanda", *QUICK)
    assert command("plan", folder, *words).exit_code == 0
    refused(command("prune", folder, tmp_path / "out", *words), "NaN")


def test_plan_does_not_collect_the_demo_text(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is that of a run which reads it; a model without a tokenizer is refused all the same."""
    recipe = read_recipe({"model": str(folders["llama"]), "method": "wanda", "calibration": "demo", "samples": 4})
    plans = [
        plan_pruning(recipe),
        plan_pruning(recipe, given={"calibration": draw_windows(recipe, open_checkpoint(recipe.model), 256).windows}),
    ]
    skipped, read = ((x.samples, x.length, x.batch, x.stages) for x in plans)
    assert skipped == read
    monkeypatch.setattr(demo, "named_documents", lambda split: pytest.fail(f"{split} was collected"))
    plan_pruning(recipe)
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*")))
    with pytest.raises(BadCheckpoint, match="tokenizer"):
        plan_pruning(recipe.model_copy(update={"model": str(folder)}))


def test_what_does_not_fit_is_refused(folders: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    """By `plan` and by `prune` in the same words, which name what would do; and that does."""
    words = ("--calibration", text_file, "--method", "wanda", "--sparsity", "60%", "--samples", 64, "--sequence-length", 256)
    tight = ("--max-memory", "20MB", "--no-offload", "--batch-size", 16)
    planned = command("plan", folders["llama"], *words, *tight)
    assert planned.exit_code == 1
    ran = command("prune", folders["llama"], tmp_path / "out", *words, *tight)
    refused(ran, "Pruning needs", "of memory on cpu, and 19.1 MiB may be taken. Pass --batch-size 1.")
    assert ran.stderr.splitlines()[-1] == planned.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
    assert command("prune", folders["llama"], tmp_path / "out", *words, *tight[:-1], 1).exit_code == 0
    ran = command("prune", folders["llama"], tmp_path / "other", *words, "--max-memory", "1MB")
    told = refused(ran, ", with one window at a time, and 976.6 KiB may be taken. Pass --max-memory ")
    enough = told.split("--max-memory ")[1].rstrip(".")
    assert command("prune", folders["llama"], tmp_path / "other", *words, "--max-memory", enough).exit_code == 0


def test_what_fits_only_block_by_block_is_read_so(
    folders: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    """A model that fits the memory while its run does not: read block by block without being asked, and the reason told."""
    words = ("--calibration", text_file, "--method", "wanda", "--sparsity", "60%", "--samples", 64, "--sequence-length", 256)
    words = (*words, "--batch-size", 8)
    needs = {
        flag: json.loads(command("plan", folders["llama"], *words, "--max-memory", "20MB", flag, "--json").stdout)["peak"][
            "data_bytes"
        ]
        for flag in ("--offload", "--no-offload")
    }
    between = f"{sum(needs.values()) // 2}B"
    ran = command("prune", folders["llama"], tmp_path / "out", *words, "--max-memory", between)
    assert ran.exit_code == 0, ran.stderr
    assert "note: read block by block: pruning would need" in " ".join(ran.stderr.split())
    refused(
        command("prune", folders["llama"], tmp_path / "two", *words, "--max-memory", between, "--no-offload"), "Pass --offload."
    )


def test_a_disk_that_is_too_small_is_refused(
    folders: dict[str, Path], text_file: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsellm.pipeline.planning.free_disk", lambda folder: 10_000)
    words = ("--calibration", text_file, "--method", "wanda", *QUICK, "--max-memory", "40MB")
    parts = ("of disk are needed, and 9.8 KiB are free", "another disk")
    refused(command("prune", folders["llama"], tmp_path / "out", *words), *parts)
    refused(command("plan", folders["llama"], *words), *parts)
    assert list(tmp_path.iterdir()) == []


def test_fewer_windows_at_a_time(folders: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    """Where the usual number does not fit, as many as do: told, and the same weights to rounding."""
    words = ("--calibration", text_file, "--method", "wanda", "--sparsity", "2:4", "--samples", 64, "--sequence-length", 256)
    words = (*words, "--no-offload")
    peaks = [
        json.loads(command("plan", folders["llama"], *words, "--max-memory", "50MB", "--batch-size", batch, "--json").stdout)[
            "peak"
        ]["data_bytes"]
        for batch in (8, 2, 1)
    ]
    assert peaks[0] > peaks[1] > peaks[2]
    assert command("prune", folders["llama"], tmp_path / "usual", *words).exit_code == 0
    ran = command("prune", folders["llama"], tmp_path / "fewer", *words, "--max-memory", f"{(peaks[0] + peaks[1]) // 2}B")
    assert ran.exit_code == 0, ran.stderr
    batch = report_of(tmp_path / "fewer")["resolved"]["batch_size"]
    assert 2 <= batch < report_of(tmp_path / "usual")["resolved"]["batch_size"] == 8
    assert f"{batch} windows at a time, where 8 are usual" in " ".join(ran.stderr.split())
    one, two = (_weights(tmp_path / name) for name in ("usual", "fewer"))
    moved = sum(int(((one[name] == 0) != (two[name] == 0)).sum()) for name in one)
    assert moved <= 1e-4 * sum(tensor.numel() for tensor in one.values())


def test_out_of_memory_on_the_device(
    folders: dict[str, Path], text_file: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half as many windows at a time, again and again; blocks that are finished stay, and it is told."""
    plain, finished = Gram.update, []

    def update(self: Gram, inputs: Tensor) -> None:
        if len(finished) >= 1 and inputs.numel() // inputs.shape[-1] > 2 * 32:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        plain(self, inputs)

    monkeypatch.setattr(Gram, "update", update)
    monkeypatch.setattr("sparsellm.pipeline.sequential.block_steps", _counting(finished))
    words = ("--calibration", text_file, "--method", "sparsegpt", "--sparsity", "60%", "--samples", 64, "--sequence-length", 32)
    ran = command("prune", folders["llama"], tmp_path / "out", *words)
    assert ran.exit_code == 0, ran.stderr
    assert [line for line in " ".join(ran.stderr.split()).split("note: ") if "out of memory" in line][-1].startswith(
        "cpu is out of memory: continuing with 2 sequences per batch"
    )
    report = report_of(tmp_path / "out")
    assert report["resolved"]["batch_size"] == 2
    assert [block["index"] for block in report["blocks"]] == [0, 1, 2]
    assert finished == [0, 1, 2], "the first block was not pruned again"


def test_out_of_memory_with_one_window(
    folders: dict[str, Path], text_file: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told in one message, whichever device says it in whichever words."""

    def update(self: Gram, inputs: Tensor) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried 1 bytes.")

    monkeypatch.setattr(Gram, "update", update)
    words = ("--calibration", text_file, "--method", "sparsegpt", *QUICK)
    refused(command("prune", folders["llama"], tmp_path / "out", *words), "out of memory", "shorter --sequence-length")
    assert list(tmp_path.iterdir()) == []


def test_a_model_in_memory_is_not_planned(folders: dict[str, Path], text_file: Path) -> None:
    """It is there already: it is pruned whatever the memory."""
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    tokens = torch.zeros(4, 32, dtype=torch.long)
    result = prune(model, "wanda", "60%", calibration=tokens, max_memory="1MB")
    assert result.report.sparsity == pytest.approx(0.6, abs=1e-3)


def _counting(finished: list[int]) -> Callable[..., object]:
    """`block_steps`, noting each block that it finishes."""
    from sparsellm.pipeline import sequential

    plain = sequential.block_steps

    def counted(*arguments: object, **settings: object) -> object:
        for step in plain(*arguments, **settings):  # type: ignore[arg-type]
            if isinstance(step, BlockResult):
                finished.append(step.index)
            yield step

    return counted


def _weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _extended(folder: Path) -> None:
    """Give a model a tensor that it does not use."""
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "extra.weight": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("settings", "change", "count"),
    [
        ({"samples": 2, "method": "sparsegpt"}, None, 1),  # fewer tokens than inputs
        ({"samples": 2, "method": "sparsegpt", "calibration": "demo"}, None, 1),
        ({"samples": 2, "method": "wanda", "evaluate": "calibration", "evaluate_limit": 2}, None, 2),
        ({"samples": 2, "method": "wanda"}, _extended, 1),
        ({"method": "magnitude"}, lambda folder: [x.unlink() for x in folder.glob("token*")], 1),  # no tokenizer
        ({"samples": 8, "method": "wanda", "documents": "whole", "batch_size": 4}, None, 1),
    ],
    ids=[
        "few tokens",
        "few tokens of the demo",
        "few and seen tests",
        "unused tensor",
        "no tokenizer",
        "sequences of one text",
    ],
)
def test_a_plan_has_the_notes_that_the_run_gives_before_its_work(
    settings: dict[str, object],
    change: Callable[[Path], object] | None,
    count: int,
    folders: dict[str, Path],
    text_file: Path,
    tmp_path: Path,
    command: Command,
) -> None:
    """The same in the same order; on the command line with options, in JSON and in Python."""
    model = Path(shutil.copytree(folders["llama"], tmp_path / "model"))
    if change:
        change(model)
    text = {"calibration": str(text_file)} if settings["method"] != "magnitude" else {}
    fields = {**text, "sequence_length": 32, **settings, "model": str(model), "sparsity": "60%"}
    fields |= {"evaluate": str(text_file)} if "evaluate" in fields else {}
    recipe = read_recipe(fields)
    told: list[str] = []

    class Loading(Exception):
        """The notes before the work are given."""

    def observe(event: object) -> None:
        if isinstance(event, Note):
            told.append(event.text)
        if isinstance(event, Stage) and event.name == LOADING:
            raise Loading

    with pytest.raises(Loading), work_directory(tmp_path / "out") as work:
        prune_run(recipe, observe, work=work)
    planned = plan_pruning(recipe, tmp_path / "out")
    assert list(planned.notes) == told
    assert len(told) == count, told
    assert planned.to_dict()["notes"] == planned.notes
    words = [word for name, x in fields.items() if name != "model" for word in (f"--{name.replace('_', '-')}", x)]
    ran = command("plan", model, *words)
    assert ran.exit_code == 0, ran.stderr
    assert ran.stderr.count("note: ") == count
    assert "`" not in ran.stderr
    assert len(json.loads(command("plan", model, *words, "--json").stdout)["notes"]) == count
