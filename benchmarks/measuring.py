"""What the scripts run as `python benchmarks/...` share: files of figures, commands, and models with random weights."""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedConfig

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.errors import plural

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks" / "measured"
CUT: dict[str, Any] = {"bos": "no"}
"""How tables of several models cut their sequences: anywhere in the joined text, as the papers' code does, also for
models whose tokenizer adds a BOS token."""

TOKENIZER_OF = "demo:llama"
"""The model whose tokenizer the models with random weights have."""


def processor() -> str:
    """Name of the processor, as far as the system has one."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def read_figures(file: Path) -> dict[str, Any]:
    """The figures in a file of `MEASURED`, empty if it does not exist."""
    figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return figures


def write_figures(file: Path, figures: dict[str, Any], machine: str = "") -> None:
    """Write figures, with the machine that this is, or another's name."""
    machine = machine or f"{processor()}, {plural(torch.get_num_threads(), 'thread')}, torch {torch.__version__}"
    partial = file.with_name(f".{file.name}.partial")  # so that an interruption leaves the figures that were there
    partial.write_text(json.dumps(figures | {"machine": machine}, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)


def record(file: Path, key: str, figure: Any, *, machine: str = "") -> None:
    """Add one figure to a file and print it. machine: as in `write_figures`."""
    write_figures(file, read_figures(file) | {key: figure}, machine)
    print(key, figure, file=sys.stderr, flush=True)


def require_gpu() -> tuple[torch.device, str]:
    """The GPU, and its name for a file of figures. Without one the program ends."""
    if not torch.cuda.is_available():
        sys.exit("no GPU: torch finds no NVIDIA or AMD GPU here, so nothing was measured.")
    device = torch.device("cuda")
    return device, f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """The lines of a Markdown table. left: numbers of the columns that are aligned to the left."""
    rule = "".join("---|" if number in left else "---:|" for number in range(len(head)))
    return [f"| {' | '.join(head)} |", f"|{rule}", *(f"| {' | '.join(row)} |" for row in rows)]


def add_measure(commands: Any, patterns: Sequence[str], seeds: Sequence[int], name: str = "measure") -> argparse.ArgumentParser:
    """The command `measure MODEL` of a script, or one of another name, with the texts, patterns and seeds."""
    parser: argparse.ArgumentParser = commands.add_parser(name)
    parser.add_argument("model")
    parser.add_argument("--calibrate", default="demo")
    parser.add_argument("--test", default="demo")
    parser.add_argument("--patterns", nargs="+", default=patterns)
    parser.add_argument("--seeds", nargs="+", type=int, default=seeds)
    return parser


def measure_or_show(description: str | None, measure: Callable[[], None], table: Callable[[], list[str]]) -> None:
    """Run a script with the commands `measure` and `table`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "table"))
    if parser.parse_args().command == "measure":
        measure()
    else:
        print("\n".join(table()))


def arguments(command: str, *positional: str | Path, **options: Any) -> list[str]:
    """Arguments of `sparsellm`: the command, its arguments, and options by name, where True and False are flags."""
    result = [command, *map(str, positional)]
    for name, value in options.items():
        option = name.replace("_", "-")
        result += [f"--{option}" if value else f"--no-{option}"] if isinstance(value, bool) else [f"--{option}", str(value)]
    return result


def program(module: str = "sparsellm", processes: int = 1) -> list[str]:
    """The command that runs a module or a script, by `torchrun` if there are several processes."""
    run = [module] if module.endswith(".py") else ["-m", module]
    if processes == 1:
        return [sys.executable, *run]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *run]


def peak(command: list[str]) -> tuple[int, float]:
    """Run a command; its peak resident memory in bytes, and its seconds."""
    started = time.perf_counter()
    # A process of its own, because the peak of a child starts at what its parent holds.
    child = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(done.returncode)"
    )
    done = subprocess.run([sys.executable, "-c", child, *command], stdout=subprocess.PIPE, text=True, check=True)
    unit = 1 if sys.platform == "darwin" else 1024
    return int(done.stdout) * unit, time.perf_counter() - started


def llama_config(blocks: int, width: int) -> PreTrainedConfig:
    """A Llama configuration with tied embeddings and the vocabulary of `TOKENIZER_OF`."""
    return LlamaConfig(
        vocab_size=open_checkpoint(TOKENIZER_OF).config.vocab_size,
        hidden_size=width,
        intermediate_size=width * 11 // 4 // 64 * 64,
        num_hidden_layers=blocks,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )


def write_random_model(folder: Path, config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write a model with random weights, and a tokenizer; memory holds one block at a time.

    Returns:
        Bytes of the weights.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parts: dict[str, dict[str, torch.Size]] = {}
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        block = re.match(r".*layers\.\d+(?=\.)", name)
        if name not in tied:
            parts.setdefault(block[0] if block else "embeddings", {})[name] = tensor.shape
    folder.mkdir(parents=True)
    config.dtype, config.architectures = dtype, [type(model).__name__]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(open_checkpoint(TOKENIZER_OF).folder).save_pretrained(folder)
    generator, places, total = torch.Generator().manual_seed(0), dict[str, str](), 0
    for part, shapes in parts.items():
        tensors = {name: _random(name, shape, generator).to(dtype) for name, shape in shapes.items()}
        save_file(tensors, folder / f"{part}.safetensors", metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, f"{part}.safetensors")
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """A matrix that keeps the size of its inputs, the weight of a norm, or a bias."""
    if len(shape) > 1:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
