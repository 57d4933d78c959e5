"""Trains a Llama and an OPT of 30 to 100 million parameters, prunes them by every method, and compares: docs/results.md.

    python benchmarks/english.py ~/english                                              # text, on any Debian machine
    python benchmarks/larger_model.py prepare ~/english --work ~/larger                 # tokenizer, minutes of a CPU
    python benchmarks/larger_model.py measure ~/english --work ~/larger --minutes 9     # everything, on a GPU
    python benchmarks/larger_model.py measure ~/english --work ~/larger-cpu --minutes 150 --size small --models llama
    python benchmarks/larger_model.py table

TEXT is a folder or files of text (.txt, also .xz, .gz or .bz2). What a folder has in held-back.txt, or else the last twentieth
of the text, is measured and never trained on. The cells that matter most are measured first; when time runs out, the same
command goes on from the models in --work with the missing cells. Two processes may each measure one of the --models.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bits import apply, layers_of, sparse_bits
from filelock import FileLock
from forms import MAIN, OURS
from gptq import GPTQ, Grid
from measuring import MEASURED, ROOT, markdown_table, processor, read_figures, write_figures
from torch import Tensor
from training import (
    SPECIAL_TOKENS,
    Training,
    build_tokenizer,
    fit,
    observer,
    save,
    sequence_losses,
    tell_positions_from_tokens,
    windows,
)
from training_texts import Texts, read_texts, token_ids
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    OPTConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import sparsellm
from sparsellm.checkpoints.loading import compute_dtype
from sparsellm.errors import BadText, InvalidSetting, SparseLLMError, plural
from sparsellm.methods.sparsellm import TrueSequential
from sparsellm.models.contexts import compute_dtype_context
from sparsellm.observers.events import DIGESTING, LOADING, OPENING, READING_TEXTS
from sparsellm.pipeline.startup import LEAST_GAIN, bf16_pass_speedup
from sparsellm.runtime.devices import empty_cache, is_out_of_memory
from sparsellm.runtime.products import fast_linear_layers

NAMES = {"llama": "Llama", "opt": "OPT"}
FAMILIES = tuple(NAMES)
DEVICES = {"cpu": "CPU: models of 10 million parameters", "cuda": "GPU: models of 44 million parameters"}

TRAINING_SHARE = 0.4
"""Fraction of the minutes for training, the same for each model."""

REPEATS = 4
"""How often the training may see the text: four times are almost as good as new text (Muennighoff et al., Scaling
data-constrained language models, NeurIPS 2023)."""

TOKENIZER_CHARACTERS = 30_000_000
"""Characters, from all parts of the text, that the tokenizer is trained on."""

CHECKED = 64
"""Sequences of held-back text whose loss is printed during training; nothing is chosen by it."""

FORMS: dict[str, dict[str, Any]] = {
    "Wanda": {"method": "wanda"},
    "SparseGPT": MAIN["SparseGPT"],
    "ALPS": MAIN["ALPS"],
    "Algorithm 1": MAIN["Algorithm 1"],
    "sparsellm, `--effort fast`": OURS | {"effort": "fast"},
    "sparsellm": OURS,
    "sparsellm, `--effort best`": OURS | {"effort": "best"},
}
"""Settings of `prune` by the row of the table."""

PATTERNS = ("50%", "60%", "70%", "80%", "90%", "2:4", "3:4")
IN_SHORT = ("70%", "80%", "2:4")
COMPARED, BEST = ("SparseGPT", "ALPS", "sparsellm"), "sparsellm, `--effort best`"

GRIDS = {"dense GPTQ int4": Grid(4, 128), "dense GPTQ int3": Grid(3, 128)}
FEW_BITS: dict[str, dict[str, Any]] = {
    "`--bits 4.125`": {"bits": 4.125},
    "`--bits 3.125`": {"bits": 3.125},
    "sparse int4, 50%": {"sparsity": "50%", "values": "int4"},
    "sparse int4, 70%": {"sparsity": "70%", "values": "int4"},
    "`--bits 2.3`": {"bits": 2.3},
}
"""Settings of `prune` by the row of the table; the first two take as many bits a weight as the dense forms."""

GPU_CHECKS = (("gpu.py", "--methods", "Algorithm 1"), ("width.py", "measure"), ("gpu_products.py", "measure"))
"""What a GPU measures in the minutes that are left: a block of Llama-2-7B by Algorithm 1; a block 8,192 wide, and its peak
memory beside that of `plan`; products of 4 bits, and a whole packed model that decodes."""

NOT_PRUNING = (OPENING, READING_TEXTS, DIGESTING, LOADING)


class TimeIsUp(BaseException):
    """The minutes are over; no handler of errors catches it."""


@dataclass(frozen=True)
class Size:
    """The models and what they are trained, pruned and measured with.

    Attributes:
        length: Tokens of a sequence.
        batch: Sequences of a training step.
        samples: Calibration sequences.
        measured: Most sequences of held-back text that are measured, at even distances.
    """

    width: int
    blocks: int
    vocabulary: int
    length: int
    batch: int
    samples: int = 128
    measured: int = 400
    peak: float = 2e-3


SIZES = {
    "large": Size(width=512, blocks=12, vocabulary=12_000, length=512, batch=64),
    "small": Size(width=320, blocks=6, vocabulary=8_000, length=256, batch=4),
}
"""large: 44 million parameters; small: 10 million, for CPUs."""


@dataclass(frozen=True)
class Bench:
    """One call: where models and figures are, and what is given.

    Attributes:
        file: The figures.
        work: Tokenizer, tokens and trained models.
    """

    size: Size
    texts: Texts
    work: Path
    file: Path
    device: torch.device
    minutes: float
    families: Sequence[str] = FAMILIES
    seed: int = 0

    def identity(self) -> dict[str, Any]:
        """What the tokenizer, the tokens and the trained models in `work` depend on."""
        return {
            "text": self.texts.digest,
            **{name: getattr(self.size, name) for name in ("width", "blocks", "vocabulary", "length")},
        }

    def figures(self) -> dict[str, Any]:
        """All that was measured so far."""
        return {"steps": {}, "models": {}, "cells": {}} | read_figures(self.file)

    @contextmanager
    def changed(self) -> Iterator[dict[str, Any]]:
        """The figures, to be changed and written; processes take turns."""
        for folder in (self.file.parent, self.work):
            folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.work / "figures.lock"):
            figures = self.figures()
            yield figures
            machine = f"{processor()}, {plural(torch.get_num_threads(), 'thread')}"
            if self.device.type == "cuda":
                machine = torch.cuda.get_device_name(self.device)
            write_figures(self.file, figures, f"{machine}, torch {torch.__version__}")

    def record(self, kind: str, key: str, figure: Any) -> None:
        """Add a figure and print it."""
        with self.changed() as figures:
            figures[kind][key] = figure
        observer(f"{key}: {json.dumps({name: value for name, value in figure.items() if name != 'losses'})}")


# ---- texts


def prepared_tokenizer(bench: Bench) -> PreTrainedTokenizerBase:
    """The tokenizer in `work`, trained if there is none.

    Raises:
        InvalidSetting: The one in `work` was trained on another text, or for another size.
    """
    folder, wanted = bench.work / "tokenizer", {name: bench.identity()[name] for name in ("text", "vocabulary")}
    if not folder.is_dir():
        pieces = bench.texts.train.split("\n\n")
        step = max(1, len(bench.texts.train) // TOKENIZER_CHARACTERS)
        tokenizer = build_tokenizer(pieces[::step], bench.size.vocabulary, bench.size.length)
        with _new_folder(folder) as partial:
            tokenizer.save_pretrained(partial)
            (partial / "trained-on.json").write_text(json.dumps(wanted), encoding="utf-8")
    found = json.loads((folder / "trained-on.json").read_text(encoding="utf-8"))
    if found != wanted:
        raise InvalidSetting(f"The tokenizer in {folder} was trained on {found}, not on {wanted}. Name another --work folder.")
    return AutoTokenizer.from_pretrained(folder)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder that takes its name when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        signal.setitimer(signal.ITIMER_REAL, 0)  # its next alarm would interrupt this
        shutil.rmtree(partial, ignore_errors=True)
        raise


# ---- training


def build_model(family: str, size: Size) -> PreTrainedModel:
    """A model with random weights and tied embeddings."""
    shared: dict[str, Any] = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "num_hidden_layers": size.blocks,
        "num_attention_heads": size.width // 64,
        "max_position_embeddings": size.length,
        "tie_word_embeddings": True,
        **SPECIAL_TOKENS,
    }
    if family == "llama":
        return AutoModelForCausalLM.from_config(LlamaConfig(**shared, intermediate_size=size.width * 8 // 3 // 64 * 64))
    config = OPTConfig(**shared, word_embed_proj_dim=size.width, ffn_dim=4 * size.width, dropout=0.0)
    model = AutoModelForCausalLM.from_config(config)
    decoder = model.model.decoder
    tell_positions_from_tokens(decoder.embed_tokens.weight, decoder.embed_positions.weight)
    return model


def train(bench: Bench, family: str, tokenizer: PreTrainedTokenizerBase, ids: Tensor, held_back: Tensor) -> None:
    """Train a model and write it to `work`."""
    torch.manual_seed(bench.seed)
    size, on_gpu = bench.size, bench.device.type == "cuda"
    training = Training(
        minutes=bench.minutes * TRAINING_SHARE / len(bench.families),
        seed=bench.seed,
        batch=size.batch,
        length=size.length,
        peak=size.peak,
        bfloat16=on_gpu or bf16_pass_speedup(bench.device) >= LEAST_GAIN,
        repeats=REPEATS,
    )
    model = build_model(family, size).to(bench.device)
    parameters, progress = sum(weight.numel() for weight in model.parameters()), None
    observer(f"{family}: {parameters:,} parameters, {len(ids):,} tokens of text, {training.minutes:.1f} minutes")
    for progress in fit(model, ids, held_back[:CHECKED], training):  # noqa: B007
        pass
    assert progress is not None
    record = {
        **bench.identity(),
        "parameters": parameters,
        "tokens in text": len(ids),
        "tokens trained on": progress.step * size.batch * size.length,
        "steps": progress.step,
        "minutes": round(progress.minutes, 2),
        "training": asdict(training) | {"steps": progress.step},
    }
    with _new_folder(bench.work / family) as partial:
        save(model, tokenizer, partial)
        (partial / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def trained(bench: Bench, family: str) -> dict[str, Any]:
    """How the model in `work` was trained.

    Raises:
        InvalidSetting: It was trained on another text, or is of another size.
    """
    record = json.loads((bench.work / family / "training.json").read_text(encoding="utf-8"))
    found = {name: record.get(name) for name in bench.identity()}
    if found != bench.identity():
        raise InvalidSetting(
            f"The model in {bench.work / family} was trained with {found}, not with {bench.identity()}. "
            "Name another --work folder."
        )
    return record


# ---- cells


def cells() -> list[tuple[str, str]]:
    """The row and the column of each cell, those that matter most first; few bits have no column."""
    first = [(form, pattern) for pattern in ("80%", "70%") for form in COMPARED]
    first += [(form, "2:4") for form in COMPARED] + [(BEST, "80%")]
    first += [(form, "") for form in (*GRIDS, *FEW_BITS)]
    rest = [(form, pattern) for pattern in ("80%", "70%", "2:4", "60%", "50%", "90%", "3:4") for form in FORMS]
    return list(dict.fromkeys([*first, *rest]))


def losses_of(bench: Bench, model: PreTrainedModel, held_back: Tensor) -> Tensor:
    """The loss of each sequence of held-back text, in the dtype that the device computes a model in."""
    model.to(bench.device)
    with compute_dtype_context(model, compute_dtype(model)), fast_linear_layers():
        return sequence_losses(model, held_back)


def measure_cell(bench: Bench, family: str, form: str, pattern: str, samples: Tensor) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Prune or round a model; the result, and what that took."""
    folder, started = bench.work / family, time.perf_counter()
    if form in GRIDS:
        grid = GRIDS[form]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(bench.device)
        apply(model, TrueSequential(GPTQ(grid)), samples.split(8))
        shapes = [layer.weight.shape for layer in layers_of(model).values()]
        bits = sum(grid.bits_per_weight(shape[1]) * shape.numel() for shape in shapes) / sum(shape.numel() for shape in shapes)
        return model, {"bits": bits, "seconds": time.perf_counter() - started}
    settings = FORMS.get(form, {}) | FEW_BITS.get(form, {}) | ({"sparsity": pattern} if pattern else {})
    result = sparsellm.prune(str(folder), calibration=samples, device=str(bench.device), seed=bench.seed, **settings)
    seconds = sum(spent for stage, spent in result.report.seconds.items() if stage not in (*NOT_PRUNING, "total"))
    figure: dict[str, Any] = {"seconds": seconds, "sparsity": result.report.sparsity}
    if form in FEW_BITS:
        with tempfile.TemporaryDirectory() as place:
            figure["bits"] = sparsellm.pack(result.save_pretrained(f"{place}/pruned"), f"{place}/packed").bits
    elif form == "sparsellm" and ":" not in pattern:
        figure["bits"] = sparse_bits(result.model.cpu(), 16)
    return result.model, figure


def measure_family(bench: Bench, family: str, samples: Tensor, held_back: Tensor, wanted: Sequence[tuple[str, str]]) -> bool:
    """Measure cells of a model that were not measured before; whether none failed."""
    key = f"{family} | dense"
    if key not in bench.figures()["cells"]:
        started = time.perf_counter()
        losses = losses_of(bench, AutoModelForCausalLM.from_pretrained(bench.work / family, dtype="auto"), held_back)
        dense = {"perplexity": math.exp(losses.mean()), "standard_error": math.exp(losses.mean()) * error_of(losses)}
        bench.record("cells", key, dense | {"seconds": time.perf_counter() - started, "losses": losses.tolist()})
    dense_losses = torch.tensor(bench.figures()["cells"][key]["losses"], dtype=torch.float64)
    passed = True
    for form, pattern in wanted:
        key = f"{family} | {form} | {pattern} | {bench.seed}"
        if key in bench.figures()["cells"]:
            continue
        try:
            if bench.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(bench.device)
            model, figure = measure_cell(bench, family, form, pattern, samples)
            if bench.device.type == "cuda":
                figure["peak"] = torch.cuda.max_memory_allocated(bench.device)
            losses = losses_of(bench, model, held_back)
        except (SparseLLMError, RuntimeError, MemoryError) as error:
            if not isinstance(error, SparseLLMError | MemoryError) and not is_out_of_memory(error):
                raise
            reason = str(error) if isinstance(error, SparseLLMError) else f"{bench.device} is out of memory"
            observer(f"not measured: {key}: {reason}. The other cells go on.")
            passed = False
            continue
        finally:
            model = None
            empty_cache(bench.device)
        excess = losses - dense_losses
        figure |= {"perplexity": math.exp(losses.mean()), "excess": float(excess.mean()), "standard_error": error_of(excess)}
        bench.record("cells", key, figure)
    return passed


def error_of(values: Tensor) -> float:
    """The standard error of a mean over sequences."""
    return float(values.std(correction=1)) / math.sqrt(len(values))


# ---- the whole


def prepare(bench: Bench) -> tuple[PreTrainedTokenizerBase, Tensor, Tensor]:
    """The tokenizer, the token ids to train on, and the sequences to measure.

    Raises:
        BadText: The text has fewer tokens than the calibration sequences, or the held-back text fewer than two sequences.
    """
    started, size = time.perf_counter(), bench.size
    tokenizer = prepared_tokenizer(bench)
    ids, rest = token_ids(tokenizer, bench.texts.train), token_ids(tokenizer, bench.texts.held_back)
    held_back = windows(rest, size.length)
    held_back = held_back[:: max(1, len(held_back) // size.measured)][: size.measured]
    if len(ids) < size.samples * size.length or len(held_back) < 2:
        raise BadText(
            f"The text has {len(ids):,} tokens, of which {size.samples} x {size.length} are needed to calibrate, and "
            f"{len(rest):,} held back, of which 2 x {size.length} are needed. Give more text."
        )
    bench.record("steps", "tokenizer and tokens", {"seconds": time.perf_counter() - started, "tokens": len(ids)})
    return tokenizer, ids, held_back


def measure(bench: Bench, wanted: Sequence[tuple[str, str]]) -> bool:
    """Train the models that are not there, and measure the cells that are not known; whether none failed."""
    tokenizer, ids, held_back = prepare(bench)
    for family in bench.families:
        if not (bench.work / family).is_dir():
            train(bench, family, tokenizer, ids, held_back)
        record = trained(bench, family)
        if bench.figures()["models"].get(family) != record:
            with bench.changed() as figures:  # the cells of another model go
                figures["cells"] = {key: cell for key, cell in figures["cells"].items() if not key.startswith(f"{family} | ")}
            bench.record("models", family, record)
    generator = torch.Generator().manual_seed(bench.seed)
    starts = torch.randint(len(ids) - bench.size.length + 1, (bench.size.samples, 1), generator=generator)
    samples = ids[starts + torch.arange(bench.size.length)].long()
    passed = True
    for cell in [None, *wanted]:  # each cell of every model before the next one; the first are the dense models
        for family in bench.families:
            passed &= measure_family(bench, family, samples, held_back, [] if cell is None else [cell])
    return passed


def check_gpu() -> bool:
    """Run the other scripts for GPUs, each of which keeps its own figures; whether none failed."""
    done = [subprocess.run([sys.executable, str(ROOT / "benchmarks" / name), *more], check=False) for name, *more in GPU_CHECKS]
    return not any(process.returncode for process in done)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Context that raises `TimeIsUp` when the time is over."""

    def end(*_: object) -> None:
        raise TimeIsUp

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)  # again, since an exception within a finalizer is lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def run(options: argparse.Namespace) -> int:
    """Measure; the exit status."""
    started = time.perf_counter()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.threads:
        torch.set_num_threads(options.threads)
    file = options.file or MEASURED / f"larger-model-{device.type}.json"
    wanted = [cell for cell in cells() if cell[0] in options.only and cell[1] in (*options.patterns, "")]
    bench: Bench | None = None
    try:
        with time_limit(60 * options.minutes):
            texts = read_texts(options.text)
            bench = Bench(SIZES[options.size], texts, options.work, file, device, options.minutes, options.models, options.seed)
            if options.command == "prepare":
                prepare(bench)
                return 0
            passed = measure(bench, wanted)
            if device.type == "cuda":
                passed &= check_gpu()
    except TimeIsUp:
        known = len(bench.figures()["cells"]) if bench else 0
        observer(f"{options.minutes:g} minutes are over: {known} cells are in {file}. The same command goes on from there.")
        return 1
    except SparseLLMError as error:
        observer(f"error: {error}")
        return 1
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not is_out_of_memory(error):
            raise
        size = SIZES[options.size]
        observer(
            f"error: {device} is out of memory in training with {size.batch} sequences of {size.length} tokens a step. "
            "Free its memory, or pass a smaller --size. What is finished is kept."
        )
        return 1
    observer(f"{(time.perf_counter() - started) / 60:.1f} minutes; the figures are in {file}.")
    return 0 if passed else 1


# ---- tables


def figures_of(device: str) -> dict[str, Any]:
    """What was measured on a kind of device, "cpu" or "cuda"; empty if nothing was."""
    return read_figures(MEASURED / f"larger-model-{device}.json")


def found(figures: dict[str, Any], family: str, form: str, pattern: str) -> dict[str, Any] | None:
    """The cell of the first seed."""
    return next((c for key, c in figures["cells"].items() if key.startswith(f"{family} | {form} | {pattern} | ")), None)


def in_words(cell: dict[str, Any] | None) -> str:
    """The excess with its standard error."""
    return "" if cell is None else f"{cell['excess']:.4f} ± {cell['standard_error']:.4f}"


def table() -> list[str]:
    """Every model's excess by method and pattern, then its forms of few bits."""
    lines = []
    for device in ("cpu", "cuda"):
        figures = figures_of(device)
        for family, record in figures.get("models", {}).items():
            dense = figures["cells"][f"{family} | dense"]
            size, seen = (f"{record[name] / 1e6:.1f} million" for name in ("parameters", "tokens trained on"))
            lines += [
                f"**{NAMES[family]}** of {size} parameters, trained for {record['minutes']:.0f} minutes on {seen} tokens; "
                f"{figures['machine']}. Dense perplexity {dense['perplexity']:.2f} ± {dense['standard_error']:.2f}.",
                "",
            ]
            rows = [[form, *(in_words(found(figures, family, form, pattern)) for pattern in PATTERNS)] for form in FORMS]
            rows += [[f"*sparsellm / {base}*", *shares(figures, family, base).values()] for base in ("SparseGPT", "ALPS")]
            lines += [*markdown_table(["", *PATTERNS], [row for row in rows if any(row[1:])]), ""]
            few = [(form, found(figures, family, form, "")) for form in (*GRIDS, *FEW_BITS)]
            few += [(f"sparse bfloat16, {pattern}", found(figures, family, "sparsellm", pattern)) for pattern in ("70%", "80%")]
            bits = [[form, f"{cell['bits']:.2f}", in_words(cell)] for form, cell in few if cell]
            lines += [*markdown_table(["", "bits a weight", "excess"], bits), ""] if bits else []
        if not figures:
            lines += [f"Not measured yet on a {DEVICES[device]}.", ""]
    return lines[:-1]


def shares(figures: dict[str, Any], family: str, base: str) -> dict[str, str]:
    """By pattern, the default's excess as a share of another method's; empty where that is not more than its error."""
    result = {}
    for pattern in PATTERNS:
        mine, other = (found(figures, family, form, pattern) for form in ("sparsellm", base))
        shown = mine and other and other["excess"] > 2 * other["standard_error"]
        result[pattern] = f"{mine['excess'] / other['excess']:.2f}" if mine and other and shown else ""
    return result


def shares_by_size() -> list[str]:
    """The default's shares of other methods' excess by model."""
    rows = []
    for device in DEVICES:
        figures = figures_of(device)
        for family, record in figures.get("models", {}).items():
            ratios = [shares(figures, family, base) for base in ("SparseGPT", "ALPS")]
            seen = f"{record['tokens trained on'] / record['parameters']:.1f}"
            row = [NAMES[family], f"{record['parameters'] / 1e6:.0f} million", seen]
            rows.append(row + [ratio[pattern] for ratio in ratios for pattern in IN_SHORT])
    heads = [f"{base}, {pattern}" for base in ("SparseGPT", "ALPS") for pattern in IN_SHORT]
    return markdown_table(["", "parameters", "tokens for each", *heads], sorted(rows))


def in_short() -> list[str]:
    """What the README says of the largest models that were measured."""
    figures = next(figures for device in ("cuda", "cpu") if (figures := figures_of(device)).get("models"))
    size = max(record["parameters"] for record in figures["models"].values())
    known = [shares(figures, family, "SparseGPT") for family in figures["models"]]
    parts = [f"{' and '.join(each[pattern] for each in known)} at {pattern}" for pattern in IN_SHORT]
    return [
        f"On a Llama and an OPT of {size / 1e6:.0f} million parameters the default has these shares of SparseGPT's excess:",
        f"{', '.join(parts)} ([larger models](docs/results.md#larger-models)). They were trained on little text.",
    ]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("prepare", "measure"):
        command = commands.add_parser(name)
        command.add_argument("text", type=Path, nargs="+")
        command.add_argument("--work", type=Path, required=True, help="folder of the tokenizer and the trained models")
        command.add_argument("--minutes", type=float, default=9.0 if name == "measure" else 60.0)
        command.add_argument("--size", choices=SIZES, default="large")
        command.add_argument("--device")
        command.add_argument("--threads", type=int)
        command.add_argument("--file", type=Path, help="figures, in place of those of docs/results.md")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--models", nargs="+", choices=FAMILIES, default=FAMILIES)
        rows = (*FORMS, *GRIDS, *FEW_BITS)
        command.add_argument("--only", nargs="+", choices=rows, default=rows, help="rows of the tables")
        command.add_argument("--patterns", nargs="+", choices=PATTERNS, default=PATTERNS, help="columns of the tables")
    commands.add_parser("table")
    options = parser.parse_args(words)
    if options.command == "table":
        print("\n".join(table()))
        return 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
