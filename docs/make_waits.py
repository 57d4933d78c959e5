"""Write the table of waits in docs/decisions.md: `python tests/simulated_device.py docs/make_waits.py`.

On a simulated device, which counts the operations that wait for a number or a shape. With `--check`, only compare: counts may
differ by 5 %, since processors round differently and solvers stop by their residuals.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import sparsellm
from sparsellm.methods import BlockResult
from tests.simulated_device import waits

PAGE = Path(__file__).with_name("decisions.md")
BEGIN, END = "<!-- waits: written by docs/make_waits.py -->\n", "<!-- end of waits -->\n"
METHODS: dict[str, dict[str, Any]] = {name: {"method": name} for name in ("magnitude", "wanda", "sparsegpt", "fast-admm")}
METHODS |= {name: {"method": name} for name in ("alps", "alps-accurate", "sparsellm", "algorithm1")}
BLOCKS, LAYERS, BATCHES = 3, 7, 4


def counted(settings: dict[str, Any]) -> tuple[int, Counter[str]]:
    """Waits of the whole run of a tiny model of the Llama form, and those of its second block by operation."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=BLOCKS, max_position_embeddings=64, initializer_range=0.2)
    model = AutoModelForCausalLM.from_config(config).eval()
    windows = torch.randint(96, (2 * BATCHES, 16), generator=torch.Generator().manual_seed(1))
    ends: list[Counter[str]] = []
    waits.clear()

    def observe(event: object) -> None:
        if isinstance(event, BlockResult):
            ends.append(waits.copy())

    sparsellm.prune(
        model, calibration=windows, sparsity="60%", device="simulated", seed=0, batch_size=2, observe=observe, **settings
    )
    return waits.total(), ends[1] - ends[0]


def table() -> str:
    """Markdown: a row for each method."""
    rows = [
        "| method | waits in a block | of these, the most frequent | waits in the whole run |",
        "|---|---|---|---|",
    ]
    for name, settings in METHODS.items():
        whole, block = counted(settings)
        kinds = ", ".join(f"`{kind}` {count}" for kind, count in block.most_common(3))
        rows.append(f"| {name} | {block.total()} | {kinds or 'none'} | {whole} |")
    return "\n".join(rows) + "\n"


def agree(old: str, new: str) -> bool:
    """Whether two tables have the same words, and numbers within 5 %."""
    pairs = zip(re.findall(r"\d+", old), re.findall(r"\d+", new), strict=False)
    close = all(abs(int(before) - int(now)) <= 0.05 * int(now) for before, now in pairs)
    return close and re.sub(r"\d+", "", old) == re.sub(r"\d+", "", new)


def main() -> None:
    """Write the table, or compare."""
    torch.set_num_threads(1)
    text = PAGE.read_text(encoding="utf-8")
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    new = table()
    if "--check" not in sys.argv:
        PAGE.write_text(text[:start] + new + text[stop:], encoding="utf-8")
    elif not agree(text[start:stop], new):
        sys.exit(f"{PAGE.name} is not what the simulated device counts:\n{new}")


if __name__ == "__main__":
    main()
