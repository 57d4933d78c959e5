"""Which model types of the installed transformers are pruned: a tiny model of each, 2:4, by SparseGPT and by the default.

python benchmarks/families.py            # the types that benchmarks/measured/families.json lacks, then docs/families.md
python benchmarks/families.py llama opt  # these again
python benchmarks/families.py --again 4  # all again, 4 at a time
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import tiny_models
import torch
from measuring import MEASURED, ROOT
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

import sparsellm
from sparsellm.activations.walk import walk
from sparsellm.errors import SparseLLMError
from sparsellm.methods import BlockResult
from sparsellm.models.blocks import blocks_of
from sparsellm.models.coverage import MIN_COVERAGE, coverage_of

FILE = MEASURED / "families.json"
PAGE = ROOT / "docs" / "families.md"
START, END = "<!-- table of types -->\n", "<!-- end of table of types -->\n"
METHODS = {"sparsegpt": "SparseGPT", "sparsellm": "default"}
SECONDS = 90
"""What a type may take: one that takes longer is an error."""

PRUNED, REFUSED, ERROR = "pruned", "refused", "error"


def types() -> list[str]:
    """Every type that transformers has a causal language model of, of text alone or of text and images."""
    alone = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return sorted({*alone, *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def measured(kind: str) -> dict:
    """What becomes of a tiny model of a type."""
    tokens = torch.randint(3, 250, (8, 32), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = tiny_models.tiny_model(kind)
            tiny_models.save(model, Path(folder) / "dense")
        except Exception as error:
            return {"not_built": told(error)}
        found = {"model": type(model).__name__} | known_form(model)
        for method in METHODS:
            found[method] = attempt(Path(folder), method, tokens)
        if any(found[method]["outcome"] == PRUNED for method in METHODS) and (fault := strays(model, tokens)):
            found |= {method: {"outcome": ERROR, "said": fault} for method in METHODS}
        return found


def known_form(model: PreTrainedModel) -> dict:
    """Whether the table describes the model, and how much of it can be pruned."""
    try:
        blocks = blocks_of(model)
        covered = coverage_of(model, blocks)
        return {"known": blocks[0].architecture.known, "coverage": covered.share, "not_covered": covered.uncovered}
    except SparseLLMError:
        return {"known": False, "coverage": None, "not_covered": ""}


def attempt(folder: Path, method: str, tokens: Tensor) -> dict:
    """One run as a user's, from a folder to a folder: its outcome, and what was said where it is not pruned."""
    blocks: list[BlockResult] = []

    def watch(event: object) -> None:
        if isinstance(event, BlockResult):
            blocks.append(event)

    try:
        result = sparsellm.prune(folder / "dense", method, "2:4", calibration=tokens, observe=watch)
        if fault := dense_layers(result.model):
            return {"outcome": ERROR, "said": fault}
        result.save_pretrained(folder / method)
    except SparseLLMError as error:
        late = f" (after {len(blocks)} blocks)" if blocks else ""
        said = " ".join(str(error).replace(str(folder / "dense"), "The model").split()) + late
        return {"outcome": ERROR if blocks else REFUSED, "said": said}
    except Exception as error:
        return {"outcome": ERROR, "said": told(error)}
    return {"outcome": PRUNED}


def dense_layers(model: PreTrainedModel) -> str:
    """What is wrong with a model that was pruned 2:4; empty where nothing is.

    Counted on the parameters themselves: half of what the coverage says can be pruned must be zero.
    """
    blocks = blocks_of(model)
    for block in blocks:
        for name, layer in block.layers.items():
            if bool(((layer.weight == 0).unflatten(1, (-1, 4)).sum(-1) < 2).any()):
                return f"{block.full_name(name)} is not 2:4"
    zeros = sum(int((tensor == 0).sum()) for block in blocks for tensor in block.module.parameters() if tensor.ndim > 1)
    covered = coverage_of(model, blocks)
    return "" if 2 * zeros >= MIN_COVERAGE * covered.total else f"{zeros} zeros in {covered.total} matrix weights"


@torch.no_grad()
def strays(model: PreTrainedModel, tokens: Tensor) -> str:
    """Whether what enters a block on the walk is not what enters it in an ordinary pass of the dense model; empty if not."""
    batches, blocks = [tokens[:3], tokens[3:6], tokens[6:7]], blocks_of(model)  # two alike: their calls may be kept once
    entering: list[list[Tensor]] = [[] for _ in blocks]
    hooks = [
        block.module.register_forward_pre_hook(
            lambda _, args, words, many=many: many.append((args[0] if args else words["hidden_states"]).clone()),
            with_kwargs=True,
        )
        for block, many in zip(blocks, entering, strict=True)
    ]
    for batch in batches:
        model(input_ids=batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    for block, inputs in walk(model, batches):
        for found, wanted in zip(inputs.pruned, entering[block.index], strict=True):
            if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-5):
                return f"what enters {block.name} on the walk differs by {float((found - wanted).abs().max()):.2g}"
    return ""


def told(error: BaseException) -> str:
    """An error and where it came from, without paths."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:160]} ({Path(last.filename).name})"


@dataclass
class Trial:
    """A type measured in a process of its own, which may die or hang."""

    kind: str
    process: BaseProcess
    pipe: Connection
    started: float

    @classmethod
    def of(cls, kind: str) -> Trial:
        """Start one."""

        def work(pipe: Connection) -> None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)  # OpenMP's threads are not forked
            pipe.send(measured(kind))

        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=work, args=(there,))
        process.start()
        there.close()
        return cls(kind, process, here, time.monotonic())

    @property
    def over(self) -> bool:
        """Whether it has answered, died, or taken too long."""
        return self.pipe.poll() or time.monotonic() - self.started > SECONDS

    def result(self) -> dict:
        """Its answer; the process ends."""
        try:
            found = self.pipe.recv() if self.pipe.poll() else None
        except EOFError:
            found = None
        self.process.kill()
        self.process.join()
        lost = {"outcome": ERROR, "said": f"no answer within {SECONDS} seconds"}
        return found or {"model": "", "known": False, "coverage": None, "not_covered": "", **dict.fromkeys(METHODS, lost)}


def isolated(kinds: list[str], jobs: int) -> Iterator[tuple[str, dict]]:
    """Each type with what was measured of it, in the order in which they end; jobs: how many at a time."""
    waiting, running = list(kinds), list[Trial]()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(Trial.of(waiting.pop(0)))
        connection.wait([trial.pipe for trial in running], timeout=1)
        for trial in [some for some in running if some.over]:
            running.remove(trial)
            yield trial.kind, trial.result()


def rows(kinds: dict[str, dict]) -> list[str]:
    """The table of types as lines of Markdown."""
    lines = ["| `model_type` | form | coverage | SparseGPT | default | why not |", "|---|---|---:|---|---|---|"]
    for kind, found in sorted(kinds.items()):
        if "not_built" in found:
            lines.append(f"| `{kind}` | | | not tried | not tried | {cell(found['not_built'])} |")
            continue
        share = "" if found["coverage"] is None else f"{100 * found['coverage']:.1f} %"
        outcomes = [found[method]["outcome"] for method in METHODS]
        said = dict.fromkeys(cell(found[method].get("said", "")) for method in METHODS if found[method].get("said"))
        form = "in the table" if found["known"] else "found"
        lines.append(f"| `{kind}` | {form} | {share} | {' | '.join(outcomes)} | {next(iter(said), '')} |")
    return lines


def cell(text: str) -> str:
    """A text as it may stand in a cell of a table: its first sentence."""
    first = text.split(". ", maxsplit=1)[0].rstrip(".")
    return first.replace("|", "/").replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_")


def counts(kinds: dict[str, dict]) -> str:
    """How many types are pruned, in a sentence."""
    tried = [found for found in kinds.values() if "not_built" not in found]
    both = [found for found in tried if all(found[method]["outcome"] == PRUNED for method in METHODS)]
    one = [found for found in tried if found not in both and any(found[method]["outcome"] == PRUNED for method in METHODS)]
    failed = [found for found in tried if any(found[method]["outcome"] == ERROR for method in METHODS)]
    return (
        f"Of {len(kinds)} types {len(both)} are pruned by both, {len(one)} by one of the two; {len(failed)} end in an error, "
        f"the others are refused; {len(kinds) - len(tried)} were not tried."
    )


def page(text: str, data: dict) -> str:
    """The page of families with the table of types of the measured figures."""
    before, rest = text.split(START)
    _, after = rest.split(END)
    middle = [f"{counts(data['types'])} (transformers {data['transformers']})", "", *rows(data["types"])]
    return before + START + "\n".join(middle) + "\n" + END + after


def main(words: list[str]) -> None:
    """Measure, keeping each type's figures as they come, and write the table."""
    data = json.loads(FILE.read_text()) if FILE.exists() else {"transformers": version("transformers"), "types": {}}
    again = types() if "--again" in words else [word for word in words if word in types()]
    jobs = next((int(word) for word in words if word.isdigit()), os.cpu_count() or 1)
    for kind, found in isolated(again or [kind for kind in types() if kind not in data["types"]], jobs):
        data["types"][kind] = found
        FILE.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
        print(kind, *(found.get(method, {}).get("outcome", "not built") for method in METHODS), flush=True)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), data), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
