"""Bytes of the weights, written and packed: those of the files, in the report, and the same wherever results are shown."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from typer.testing import Result

import sparsellm
from sparsellm.checkpoints.headers import read_headers
from sparsellm.outputs.report import load_report
from sparsellm.outputs.sizes import estimated_bytes
from sparsellm.runtime.memory import human_bytes

CALIBRATED = {"calibration": "demo", "samples": 2, "sequence_length": 64}
RUNS: dict[str, dict[str, Any]] = {
    "70%": {"method": "magnitude", "sparsity": "70%"},
    "2:4": {"method": "magnitude", "sparsity": "2:4"},
    "int4": {"method": "sparsegpt", "sparsity": "50%", "values": "int4"} | CALIBRATED,
}


@pytest.mark.parametrize("name", RUNS)
def test_the_sizes_of_a_run_are_those_of_its_files(name: str, tmp_path: Path) -> None:
    """As written exactly; packed from above, and once packed exactly. A layer's bytes add up to them."""
    report = sparsellm.prune("demo:opt", **RUNS[name], output=tmp_path / "out").report
    sizes = report.sizes
    assert sizes
    assert sizes == load_report(tmp_path / "out").sizes
    assert sizes.written == sum(header.nbytes for header in read_headers(tmp_path / "out" / "model.safetensors").values())
    assert (sizes.bits is not None) == ("values" in RUNS[name])
    packed = sparsellm.pack(tmp_path / "out", tmp_path / "packed")
    assert packed.packed_bytes <= sizes.packed < 1.15 * packed.packed_bytes
    found = load_report(tmp_path / "packed").sizes
    assert found
    assert (found.written, found.packed, found.measured) == (sizes.written, packed.packed_bytes, True)
    layers = pytest.importorskip("pandas") and report.to_frame()
    assert sizes.written - sizes.packed == (layers.weight_bytes - layers.packed_bytes).sum()
    sparsellm.verify(tmp_path / "packed")


def test_the_same_sizes_stand_wherever_results_do(tmp_path: Path, command: Callable[..., Result]) -> None:
    """On the terminal, in card, page and report, of a run, of a recovery and of several outputs; as integers in JSON."""
    pruned, recovered = tmp_path / "out", tmp_path / "recovered"
    printed = command("prune", "demo:opt", pruned, "--method", "magnitude", "--sparsity", "60%").stdout
    words = ["--against", "demo:opt", "--calibration", "demo", "--samples", 2, "--sequence-length", 64]
    again = command("recover", pruned, recovered, "--scope", "block", "--steps", 1, *words).stdout
    for folder, text in ((pruned, printed), (recovered, again)):
        report = load_report(folder)
        page = html.unescape(sparsellm.report(folder).read_text(encoding="utf-8"))
        for place in (text, (folder / "README.md").read_text(encoding="utf-8"), page):
            assert str(report.sizes) in " ".join(place.split()), place
        totals = json.loads(command("report", folder, "--json").stdout)["totals"]
        assert report.sizes
        assert (totals["weight_bytes"], totals["packed_bytes"]) == (report.sizes.written, report.sizes.packed)
    printed = command("prune", "demo:opt", tmp_path / "both", "--method", "magnitude", "--sparsity", "60%,5%").stdout
    first, second = (load_report(tmp_path / "both" / name).sizes for name in ("60", "5"))
    assert first
    assert second
    assert human_bytes(first.packed) in printed
    assert second.packed == second.written, "packing saves nothing below a tenth of zeros"
    assert printed.count(human_bytes(second.written)) == 3, "the size of both, and the packed size of the second"


def test_an_export_has_the_size_of_its_files(tmp_path: Path) -> None:
    sparsellm.prune("demo:opt", **RUNS["70%"], output=tmp_path / "out")
    exported = sparsellm.export(tmp_path / "out", tmp_path / "export", values="int4")
    sizes = load_report(tmp_path / "export").sizes
    assert sizes
    assert (sizes.packed, sizes.measured) == (exported.exported_bytes, True)


def test_a_model_that_no_run_wrote_has_its_size(tmp_path: Path) -> None:
    packed = sparsellm.pack("demo:opt", tmp_path / "packed", allow_dense=True)
    sizes = load_report(tmp_path / "packed").sizes
    assert sizes
    assert sizes.packed == packed.packed_bytes
    with safe_open(sparsellm.unpack(tmp_path / "packed", tmp_path / "dense").output + "/model.safetensors", "pt") as file:
        assert sizes.written == sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118
    assert not load_report(tmp_path / "dense").sizes.measured  # type: ignore[union-attr]


def test_dtypes_that_are_not_packed_stay_as_large() -> None:
    assert estimated_bytes(1000, 900, "float64") == 8000
    assert estimated_bytes(0, 0, "bfloat16") == 0
