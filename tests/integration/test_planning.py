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
from sparsellm.methods import BlockResult
from sparsellm.runs.events import Stage
from sparsellm.runs.forecasting import forecast
from sparsellm.runs.meter import FACTOR, PASS, PRODUCT, SPECTRUM, Meter, rates
from sparsellm.runs.miniature import miniature
from sparsellm.runs.placement import choose_placement
from sparsellm.runs.planning import plan_run
from sparsellm.runs.preparation import prepare
from sparsellm.runs.recipe_file import read_recipe
from sparsellm.runs.report import Report
from sparsellm.runs.run import run
from sparsellm.runs.workspace import work_directory
from sparsellm.solvers.statistics import Gram
from tests.cli.test_bad_input import refused
from tests.conftest import byte_tokenizer, report_of

Command = Callable[..., Result]
QUICK = ("--sparsity", "60%", "--samples", 8, "--sequence-length", 32)


# ---- the meter


def test_the_meter_counts_memory() -> None:
    """What is held at once, once however many views there are; what was there before counts when it is held or read."""
    with Meter() as meter:
        a = torch.zeros(100, 100)
        assert meter.peak == {"cpu": 40_000}
        b = a.view(10, 1000)[1:]
        c = a + 1
        assert meter.live["cpu"] == 80_000
        del a, c
        assert meter.live["cpu"] == 40_000, "a view holds all of it"
        del b
        assert meter.live["cpu"] == 0
        assert meter.peak == {"cpu": 80_000}
        d = torch.ones(10, dtype=torch.float64)
        meter.restart()
        assert meter.peak == {"cpu": 80}
        d.mul_(2)
        assert meter.peak == {"cpu": 80}
    before = torch.zeros(50)
    with Meter() as meter:
        meter.hold([before])
        assert meter.live["cpu"] == 200


def test_the_meter_counts_operations() -> None:
    """By the textbooks' counts."""
    a, b, c = torch.randn(30, 40), torch.randn(40, 50), torch.randn(50, 50)
    definite, row = c @ c.T + 50 * torch.eye(50), c[0].clone()
    with Meter() as meter:
        a @ b
        torch.addmm(torch.zeros(30, 50), a, b)
        torch.nn.functional.linear(a, b.T)
        assert meter.work[PRODUCT] == 3 * 2 * 30 * 40 * 50
        meter.restart()
        c.addr_(row, row)
        assert meter.work == {PRODUCT: 2 * 50 * 50}
        meter.restart()
        lower = torch.linalg.cholesky_ex(definite).L
        torch.cholesky_solve(b.T, lower)
        torch.linalg.solve_triangular(lower, b.T, upper=False)
        assert meter.work[FACTOR] == pytest.approx(50**3 / 3 + 2 * 40 * 50**2 + 40 * 50**2)
        meter.restart()
        torch.linalg.eigh(definite)
        assert meter.work[SPECTRUM] == 9 * 50**3
        meter.restart()
        a * 2
        assert meter.work == {PASS: 2 * 4 * 30 * 40}
        q = torch.randn(2, 3, 16, 8)
        meter.restart()
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        assert meter.work[PRODUCT] == pytest.approx(4 * 2 * 3 * 16 * 16 * 8, rel=0.01)


def test_rates_are_of_this_machine() -> None:
    assert all(1e6 < rate < 1e16 for rate in rates(torch.device("cpu"), 0.02).values())


# ---- the miniature

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


@pytest.mark.parametrize("form", FORMS)
def test_a_miniature_is_of_the_same_form(form: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """As many blocks, heads and layers; parameters in proportion to the scale's square; a model that runs."""
    source = open_checkpoint(str(folders[form]))
    small = miniature(source, tmp_path / "small", torch.bfloat16)
    assert small.scale == 4
    model = small.checkpoint.load()
    whole = sum(tensor.numel() for tensor in source.skeleton().parameters())
    assert small.scale**2 * sum(tensor.numel() for tensor in model.parameters()) == pytest.approx(whole, rel=0.05)
    assert model.dtype == torch.bfloat16
    assert model(torch.zeros(2, small.length(256), dtype=torch.long)).logits.shape == (2, 64, 256)
    assert source.config.hidden_size == 256, "the configuration that was read is as it was"


# ---- the forecast


def taken(settings: dict[str, object], folder: Path) -> dict[str, tuple[int, float]]:
    """By stage, the most bytes of tensors that a real run held, and its floating-point operations."""
    found: dict[str, tuple[int, float]] = {}
    name = ""
    with Meter() as meter, work_directory(folder / "out") as work:

        def observe(event: object) -> None:
            nonlocal name
            if isinstance(event, Stage):
                found[name] = (
                    max(meter.peak.get("cpu", 0), found.get(name, (0, 0.0))[0]),
                    sum(amount for kind, amount in meter.work.items() if kind != PASS) + found.get(name, (0, 0.0))[1],
                )
                meter.restart()
                name = event.name.split(" dense")[0].split(" pruned")[0]

        result = run(read_recipe(settings), observe, work=work)
        observe(Stage("end"))
        del result
    return found


CASES: dict[str, tuple[str, dict[str, object]]] = {
    "wanda": ("llama", {"method": "wanda", "samples": 64}),
    "sparsegpt, streamed, 2:4": ("opt", {"method": "sparsegpt", "sparsity": "2:4", "samples": 16, "offload": True}),
    "true-sequential": ("opt", {"method": "sparsegpt", "samples": 16, "true_sequential": True}),
    "true-sequential, on files": ("llama", {"method": "wanda", "samples": 64, "true_sequential": True, "max_memory": "60MB"}),
    "streams on files": ("llama", {"method": "sparsegpt", "samples": 64, "offload": True, "max_memory": "60MB"}),
    "as published": ("opt", {"as_published": True, "samples": 16, "epochs": 2}),
    "coupled, streamed": ("llama", {"samples": 8, "gauss_newton_steps": 0, "offload": True, "solver": "magnitude"}),
    "coupled": ("opt", {"samples": 8, "gauss_newton_steps": 0, "solver": "sparsegpt", "allocation": "uniform"}),
}
"""Form and settings."""


@pytest.mark.parametrize("case", CASES)
def test_a_forecast_holds(case: str, folders: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """Stage by stage, memory within a tenth of what the real run's tensors take at the peak, operations within a fifth."""
    form, change = CASES[case]
    settings = {"model": str(folders[form]), "calibration": str(text_file), "sparsity": "60%", "sequence_length": 128} | change
    settings["evaluate"] = (str(text_file),)
    recipe = read_recipe(settings)
    ready = prepare(recipe, None, None, Report(recipe, {}), lambda _: None)
    place = choose_placement(recipe, ready.source, ready.device, files=True)
    told = {stage.name: stage for stage in forecast(recipe, ready, place, timed=False).stages}
    real = taken(settings, tmp_path)
    assert told.keys() <= real.keys()
    peak = max(bytes_ for name, (bytes_, _) in real.items() if name in told)
    assert max(stage.memory["cpu"] for stage in told.values()) == pytest.approx(peak, rel=0.1)
    for name, stage in told.items():
        times = 2 if name == "measuring" else 1  # before and after
        assert stage.operations * times == pytest.approx(real[name][1], rel=0.2), name


def test_files_are_foreseen(folders: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """Bytes on files: two streams for the default, what attention writes in one, and what the feed-forward part reads and is
    to write; what attention writes in the other fits into a quarter of the memory."""
    settings = {
        "model": str(folders["llama"]),
        "calibration": str(text_file),
        "samples": 64,
        "sequence_length": 64,
        "gauss_newton_steps": 0,
    }
    settings |= {"solver": "magnitude", "allocation": "uniform"}
    recipe = read_recipe(settings | {"offload": True, "max_memory": "24MB"})
    found = plan_run(recipe, tmp_path)
    pruning = next(stage for stage in found.found.stages if stage.name == "pruning")
    stream = 64 * 64 * 256 * 4
    assert pruning.files == 5 * stream
    assert found.found.a_window == pytest.approx(6 * stream / 64, rel=0.01)
    assert (
        found.found.kept
        == found.found.place.model
        == 2 * sum(x.numel() for x in open_checkpoint(recipe.model).load().parameters())
    )


# ---- the command


def test_plan_tells_and_writes_nothing(folders: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    words = (folders["llama"], tmp_path / "out", "--calibration", text_file, "--method", "wanda", *QUICK)
    ran = command("plan", *words)
    assert ran.exit_code == 0, ran.stderr
    told = " ".join(ran.stdout.split())
    for part in (
        "3 blocks; 21 layers to prune: 6 of 256 x 256 at 60%",
        "in memory as a whole",
        "8 sequences of 32 tokens, 1 per batch",
    ):
        assert part in told
    for part in ("Peak:", "Disk:", "Time: about", "--samples"):
        assert part in told
    data = json.loads(command("plan", *words, "--json", "--offload").stdout)
    assert data["streamed"] is True
    assert data["fits"] is True
    assert data["blocks"] == 3
    assert [stage["name"] for stage in data["stages"]] == ["pruning"]
    assert list(tmp_path.iterdir()) == []


def test_plan_reads_no_weights(folders: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    """A checkpoint that holds nothing but NaN is planned; pruning refuses it."""
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "model"))
    tensors = {name: torch.full_like(tensor, float("nan")) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    words = ("--calibration", text_file, "--method", "wanda", *QUICK)
    assert command("plan", folder, *words).exit_code == 0
    refused(command("prune", folder, tmp_path / "out", *words), "NaN")


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
    monkeypatch.setattr("sparsellm.runs.planning.free_disk", lambda folder: 10_000)
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
    monkeypatch.setattr("sparsellm.pruning.sequential._prune_block", _counting(finished))
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
    result = prune(model, "wanda", "60%", tokens, max_memory="1MB")
    assert result.report.sparsity == pytest.approx(0.6, abs=1e-3)


def _counting(finished: list[int]) -> Callable[..., object]:
    """`_prune_block`, noting each block that it finishes."""
    from sparsellm.pruning import sequential

    plain = sequential._prune_block

    def counted(*arguments: object) -> object:
        for step in plain(*arguments):  # type: ignore[arg-type]
            if isinstance(step, BlockResult):
                finished.append(step.index)
            yield step

    return counted


def _weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
