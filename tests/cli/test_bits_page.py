"""The page of a sweep over integers and budgets of bits shows perplexity against stored bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import Result

from sparsellm.studies.page import report_page
from tests.cli.test_report_page import check

Command = Callable[..., Result]


@pytest.mark.parametrize(
    ("recipe", "axes", "expected"),
    [
        ({"sparsity": "60%"}, {"values": ["int8", "int4"], "sparsity": ["50%", "70%"]}, {"int8", "int4"}),
        ({}, {"bits": [2.5, 4.0]}, {"all"}),
        ({"values": "int4"}, {"sparsity": ["60%"], "samples": [2, 3]}, set()),
    ],
)
def test_perplexity_against_bits(
    recipe: dict[str, str],
    axes: dict[str, list[object]],
    expected: set[str],
    tiny: dict[str, Path],
    text_file: Path,
    tmp_path: Path,
    command: Command,
) -> None:
    """A point for each cell at the bits of its report; a chart of one value of bits is left out."""
    shared = {"model": str(tiny["opt"]), "method": "sparsegpt", "calibration": str(text_file), "samples": 2}
    shared |= {"sequence_length": 32, "evaluate": [str(text_file)], "evaluate_limit": 2}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"recipe": shared | recipe, "axes": axes}), encoding="utf-8")
    done = command("sweep", tmp_path / "sweep.yaml", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    text, plots = report_page(tmp_path / "out")
    check(text, plots)
    reports = [json.loads(file.read_text()) for file in sorted((tmp_path / "out" / "cells").glob("*/result.json"))]
    bits = {f"{cell['report']['totals']['bits_of_pruned_layers']:.3f}" for cell in reports}
    found = {plot.name: plot for plot in plots}
    assert ("bits-0" in found) == (len(bits) > 1)
    if expected:
        assert {row[2] for row in found["bits-0"].rows} == bits
        svg = found["bits-0"].inline()
        assert all(label in svg for label in expected - {"all"})
