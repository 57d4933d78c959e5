"""The speed of a packed model as an HTML page."""

from __future__ import annotations

import json

from sparsellm.pipeline.speed_record import Bench
from sparsellm.studies.figures import style
from sparsellm.studies.page import render
from sparsellm.studies.speed_plots import LEGEND, size_line, speed_plot, speed_tables


def speed_page(bench: Bench, command: str) -> str:
    """The HTML page of a measurement, with the command that made it."""
    settings = ("prompts", f"{bench.prompt} tokens"), ("decoded", f"{bench.tokens} tokens in each of several turns")
    with style():
        return render(
            {
                "title": f"{bench.model}: speed and size",
                "verdict": bench.describe(),
                "lead": size_line(bench),
                "remarks": [" ".join(LEGEND)],
                "notes": bench.notes,
                "tables": speed_tables(bench),
                "legend": "",
                "worst": None,
                "not_predicted": "",
                "plots": [speed_plot(bench)],
                "samples": {},
                "layers": [],
                "command": command,
                "inputs": [],
                "file": "bench.json",
                "settings": json.dumps(bench.to_dict(), indent=1),
                "environment": bench.environment | dict(settings),
            }
        )
