"""Write measured figures into the pages and the help: all between `<!-- name -->` and `<!-- /name -->`, and the charts.

sparsellm demo --output FOLDER --json > benchmarks/measured/demo.json
python benchmarks/render.py
python docs/make_cli.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import assisted
import decode
import documents
import excess
import few_bits
import gpu
import gpu_products
import hybrid
import larger_model
import masked_lora
import memory_budget
import packing
import papers
import peer_gptq
import planning
import popular_models
import processes
import quality
import recover
import recover_memory
import results
import rounding
import search
import smaller_faster
import solvers
import speed_tables
import streaming
import time_left
import tokens
import width
from measuring import MEASURED, ROOT, markdown_table

from sparsellm.extensions.packed.record import PACKED, TORCH
from sparsellm.observers.display import with_standard_error
from sparsellm.runtime.memory import human_bytes

PAGES = (
    "README.md",
    "docs/smaller-faster.md",
    "docs/quick-start.md",
    "docs/results.md",
    "docs/calibration.md",
    "docs/large-models.md",
    "docs/packing.md",
    "docs/distributed.md",
    "docs/popular-models.md",
    "docs/report.md",
    "docs/search.md",
    "docs/deploying.md",
    "docs/fine-tuning.md",
    "docs/recover.md",
    "docs/few-bits.md",
    "docs/hybrid.md",
    "docs/methods/sparsellm.md",
    "docs/methods/algorithm1.md",
    "examples/papers/README.md",
)
PICTURES = ROOT / "docs" / "pictures"
CHARTS = {
    PICTURES / "perplexity.svg": quality.chart,
    PICTURES / "few-bits.svg": few_bits.chart,
    PICTURES / "few-tokens.svg": tokens.chart,
}
CARD = PICTURES / "card.png"
"""What other sites show beside a link to the documentation."""


def demo_table() -> list[str]:
    """What `sparsellm demo` found, as a Markdown table, and the packed model's size and speed."""
    data = json.loads((MEASURED / "demo.json").read_text())
    rows = []
    for row in data["rows"]:
        value = with_standard_error(row["perplexity"], row["standard_error"])
        rows.append([row["method"], value, f"{100 * row['sparsity']:.1f} %", f"{row['seconds']:.1f}"])
    head = [f"{data['model']}, {data['sparsity']} removed", "perplexity", "zeros", "seconds"]
    return [*markdown_table(head, rows), *(["", *packed_lines(data["packed"])] if "packed" in data else [])]


def packed_lines(bench: dict[str, Any]) -> list[str]:
    """The size and the speed of the packed model beside the dense one's."""
    packed, dense = (next(x for x in bench["speeds"] if x["form"] == form) for form in (PACKED, TORCH))
    sizes = human_bytes(bench["disk_bytes"]), human_bytes(bench["memory_bytes"][TORCH])
    speeds = f"{packed['decode']:.0f} tokens a second packed, {dense['decode']:.0f} dense"
    ratios = f"{packed['times_torch']:.2f} × torch, {packed['times_ceiling']:.2f} of memory's speed"
    return [
        f"Packed it takes {sizes[0]}, dense {sizes[1]}. It decodes {speeds}:",
        f"{ratios}. Python takes most of that time; models of more than 1 GB gain more.",
    ]


TABLES: dict[str, Callable[[], list[str]]] = {
    "demo": demo_table,
    "perplexity": quality.brief_table,
    "models": quality.model_tables,
    "shares": quality.shares_table,
    "larger models": larger_model.table,
    "larger models, shares": larger_model.shares_by_size,
    "larger models, in short": larger_model.in_short,
    "documents": documents.table,
    "one seed": results.summary_table,
    "time": lambda: speed_tables.bargain_table(speed_tables.TODAY, "perplexity"),
    "race": speed_tables.race_table,
    "race, 4 blocks": lambda: speed_tables.race_table(4),
    "race, AVX2": lambda: speed_tables.race_table(4, speed_tables.AVX2_FILE),
    "wide": speed_tables.wide_table,
    "width": width.table,
    "gpu": gpu.table,
    "gpu products": gpu_products.table,
    "hybrid": hybrid.table,
    "recovered": recover.table,
    "recovery seconds": recover.seconds_table,
    "offload": streaming.tables,
    "planning": planning.tables,
    "memory": memory_budget.table,
    "recover memory": recover_memory.table,
    "time left": time_left.table,
    "few tokens": tokens.shares_table,
    "popular models": popular_models.table,
    "hours": popular_models.hours,
    "rounding": rounding.table,
    "packing": packing.table,
    "packing dtypes": packing.other_dtypes,
    "packing values": packing.values_table,
    "packing speed": packing.speed_table,
    "processes": processes.table,
    "search": search.table,
    "smaller, faster": smaller_faster.table,
    "smaller, faster, models": smaller_faster.quality,
    "smaller, in short": smaller_faster.in_short,
    "decode": decode.table,
    "decode, in short": decode.in_short,
    "assisted": assisted.table,
    "several": search.several_table,
    "costs": processes.costs,
    "efforts": excess.efforts_table,
    "efforts in short": excess.efforts_in_short,
    "few bits": few_bits.table,
    "peer gptq": peer_gptq.table,
    "few bits, in short": few_bits.in_short,
    "few bits, compared": few_bits.compared,
    "few bits, llama.cpp": few_bits.llama_cpp,
    "few bits, rounding": few_bits.rounding,
    "masked lora": masked_lora.table,
    "solvers": solvers.tables,
    "papers": papers.table,
    "epochs": results.epochs_tables,
}
"""By the name that stands in the pages."""

BLOCK = re.compile(rf"<!-- ({'|'.join(TABLES)}) -->\n.*?<!-- /\1 -->", re.DOTALL)


def render(page: str) -> str:
    """The text of a page, with every table as the figures are now."""

    def filled(block: re.Match[str]) -> str:
        return "\n".join([f"<!-- {block[1]} -->", *TABLES[block[1]](), f"<!-- /{block[1]} -->"])

    return BLOCK.sub(filled, page)


def main() -> None:
    for picture, chart in CHARTS.items():
        picture.write_text(chart(), encoding="utf-8")
    CARD.write_bytes(quality.card())
    for name in PAGES:
        file = ROOT / name
        file.write_text(render(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
