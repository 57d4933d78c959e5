"""Tiny random models, pruned at once, in two runs with a journal, or by two processes; what each leaves is compared."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest import SkipTest

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PreTrainedModel

from sparsellm.activations.sensitivity import output_fisher
from sparsellm.methods import BlockMethod, BlockResult, LayerResult, Plan, Step
from sparsellm.models.blocks import blocks_of
from sparsellm.models.loaded_model import LoadedModel, ResidentWeights
from sparsellm.outputs.journal import Journal
from sparsellm.pipeline.sequential import prune_blocks
from sparsellm.recipes.plan import uniform_plan
from sparsellm.runtime import autotuning
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.testing.checks import fail, undisturbed

TINY_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
TINY_FAMILIES = ("opt", "llama")
BATCHES, LENGTH = 8, 16
WAITING = 600
"""Seconds that two processes may take."""


@dataclass
class Pruned:
    """A pruned tiny model with the results of its layers."""

    model: PreTrainedModel
    plan: Plan
    layers: list[LayerResult] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The model's tensors by name."""
        tensors: dict[str, Tensor] = self.model.state_dict()
        return tensors


def tiny_model(family: str) -> PreTrainedModel:
    """The same random model each time: an OPT in bfloat16 with biases, or a Llama in float32, of two blocks."""
    if family == "opt":
        config = OPTConfig(**TINY_SIZES, word_embed_proj_dim=32, ffn_dim=64, dropout=0.0, init_std=0.2)
    else:
        config = LlamaConfig(**TINY_SIZES, intermediate_size=48, num_key_value_heads=2, initializer_range=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    return model.to(torch.bfloat16 if family == "opt" else torch.float32).eval()


def pruning_steps(pruned: Pruned, method: BlockMethod, journal: Journal | None = None) -> Iterator[Step]:
    """Prune a model by its plan, on random tokens, in float32, as runs on a CPU do.

    With a copy of the method: another run, in another process, has nothing of what this one keeps.
    """
    method = copy.deepcopy(method)
    generator = torch.Generator().manual_seed(1)
    batches = list((TINY_SIZES["vocab_size"] * torch.rand(BATCHES, 1, LENGTH, generator=generator) ** 2).long())
    loaded = LoadedModel(pruned.model, ResidentWeights(pruned.model), compute=torch.float32)
    fisher = output_fisher(loaded, batches) if method.needs_fisher else ()
    yield from prune_blocks(loaded, batches, method, pruned.plan, fisher=fisher, journal=journal)


def dense(family: str, text: str = "50%", include: tuple[str, ...] = ()) -> Pruned:
    """A tiny model that is not pruned yet, with its plan."""
    model = tiny_model(family)
    return Pruned(model, uniform_plan(blocks_of(model), parse_pattern(text), include=include))


def prune_tiny(family: str, method: BlockMethod, text: str = "50%", include: tuple[str, ...] = ()) -> Pruned:
    """A tiny model, pruned.

    Args:
        include: Patterns of names of the layers to prune; empty for all.
    """
    pruned = dense(family, text, include)
    pruned.layers += [step for step in pruning_steps(pruned, method) if isinstance(step, LayerResult)]
    return pruned


def pruned_in_two_runs(family: str, method: BlockMethod) -> PreTrainedModel:
    """A tiny model of which one run prunes the first block, and another one that finds its journal the second."""
    with tempfile.TemporaryDirectory() as name:
        first = pruning_steps(dense(family), method, Journal.begin(Path(name), {}))
        next(step for step in first if isinstance(step, BlockResult))
        first.close()  # type: ignore[attr-defined]
        second = dense(family)
        list(pruning_steps(second, method, Journal.resume(Path(name), {})))
    return second.model


def bytes_differ(one: PreTrainedModel, other: PreTrainedModel | Mapping[str, Tensor]) -> str:
    """The name of the first tensor in which two models differ, or an empty string."""
    tensors = other if isinstance(other, Mapping) else other.state_dict()
    return next((name for name, tensor in one.state_dict().items() if not torch.equal(tensor, tensors[name])), "")


def pruned_by_two(method: BlockMethod) -> dict[str, dict[str, Tensor]]:
    """The tensors of each tiny model, by family, that two processes prune together.

    Raises:
        unittest.SkipTest: Other processes cannot import the method's class, or torch has no processes here.
    """
    kind = type(method)
    if not dist.is_available() or not dist.is_gloo_available():
        raise SkipTest("this torch has no processes that work together")
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise SkipTest(f"the class {kind.__qualname__} is not at the top of a module that another process can import")
    with tempfile.TemporaryDirectory() as folder:
        chosen = autotuning.known()  # by measurements of this process: two that are made apart may choose other products
        (Path(folder) / "method.pickle").write_bytes(pickle.dumps((method, chosen)))
        command = [sys.executable, "-c", "from sparsellm.testing.tiny_models import main; main()", folder]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen([*command, str(rank)], env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for rank in (0, 1)
        ]
        try:
            said = [process.communicate(timeout=WAITING)[1] for process in started]
        finally:
            for process in started:
                process.kill()
        for process, text in zip(started, said, strict=True):
            if process.returncode:
                fail(
                    f"A process ends with: {(text.strip().splitlines() or ['nothing'])[-1]}.", "Let all processes do the same."
                )
        found: dict[str, dict[str, Tensor]] = torch.load(Path(folder) / "models.pt")
        return found


def main() -> None:
    """Prune the tiny models as one of two processes: `python -c ... FOLDER RANK`."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    method, chosen = pickle.loads((folder / "method.pickle").read_bytes())
    autotuning.adopt(chosen)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    with undisturbed():
        found = {family: prune_tiny(family, method).tensors for family in TINY_FAMILIES}
    if rank == 0:
        torch.save(found, folder / "models.pt")
    dist.barrier()
    dist.destroy_process_group()
