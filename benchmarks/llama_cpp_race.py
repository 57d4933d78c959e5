"""llama.cpp on a Llama model in bf16 and in types of fewer bits, by llama-cpp-python; part of `python benchmarks/decode.py`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import gguf_models
import torch
from torch import Tensor

from sparsellm.extensions.packed.formats import kernel_library
from sparsellm.extensions.packed.speed import step_weights

ROUNDS = 5


def measure(model: Any, folder: Path, threads: Sequence[int], *, batches: Sequence[int], tokens: int) -> list[dict[str, Any]]:
    """Tokens a second of each type of GGUF file, in the form of `Speed`, and the ceiling in turns with it.

    Empty without llama-cpp-python and gguf.
    """
    if gguf_models.missing:
        print(gguf_models.missing, file=sys.stderr)
        return []
    import llama_cpp

    weights, speeds = step_weights(model), []
    whole = folder / f"{gguf_models.WHOLE}.gguf"
    gguf_models.write(model, whole)
    for kind in gguf_models.TYPES:
        file = folder / f"{kind}.gguf"
        if kind != gguf_models.WHOLE:
            gguf_models.quantize(whole, file, kind)
        with gguf_models.opened(file) as loaded:
            for count in threads:
                for batch in batches:
                    torch.set_num_threads(count)
                    seconds, reads = decode(llama_cpp, loaded, weights, threads=count, batch=batch, tokens=tokens)
                    speeds.append({"form": f"llama.cpp {kind}", "threads": count, "batch": batch})
                    speeds[-1] |= {
                        "decode": batch * tokens / seconds,
                        "ceiling": batch * tokens / reads,
                        "bytes": file.stat().st_size,
                    }
        if kind != gguf_models.WHOLE:
            file.unlink()
    whole.unlink()
    return speeds


def decode(
    llama_cpp: Any, model: Any, weights: Sequence[Tensor], *, threads: int, batch: int, tokens: int
) -> tuple[float, float]:
    """Medians of the seconds in which sequences of equal tokens grow by `tokens`, and in which weights are read as often."""
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch, parameters.n_seq_max = 256 * batch, 64, batch
    parameters.n_threads = parameters.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, parameters)
    step = llama_cpp.llama_batch_init(batch, 0, 1)
    step.n_tokens, seconds, reads = batch, list[float](), list[float]()
    for number in range(1 + ROUNDS):
        started = time.perf_counter()
        for position in range(number * tokens, (number + 1) * tokens):
            for sequence in range(batch):
                step.token[sequence], step.pos[sequence], step.logits[sequence] = 1, position, True
                step.n_seq_id[sequence], step.seq_id[sequence][0] = 1, sequence
            if llama_cpp.llama_decode(context, step):
                raise RuntimeError("llama.cpp could not decode")
        seconds.append(time.perf_counter() - started)
        reads.append(sum(kernel_library.read_seconds(weights) for _ in range(tokens)))
    llama_cpp.llama_batch_free(step)
    llama_cpp.llama_free(context)
    return median(seconds[1:]), median(reads[1:])
