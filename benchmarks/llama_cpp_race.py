"""llama.cpp on a Llama model in bf16 and in types of fewer bits, by llama-cpp-python; part of `python benchmarks/decode.py`.

pip install llama-cpp-python gguf
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsellm.formats import memory_reads
from sparsellm.pipeline.decoding import step_weights

ROUNDS = 5
WHOLE = "BF16"
TYPES = (WHOLE, "Q8_0", "Q4_0", "Q4_K_M", "Q2_K")
"""Types of files. llama.cpp makes the others from the first one; the letters after a K say which matrices have more bits."""
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Layers of a block by their names in a GGUF file."""


def measure(model: Any, folder: Path, threads: Sequence[int], *, batches: Sequence[int], tokens: int) -> list[dict[str, Any]]:
    """Tokens a second of each type of GGUF file, in the form of `Speed`, and the ceiling in turns with it.

    Empty without llama-cpp-python and gguf.
    """
    try:
        import gguf
        import llama_cpp
    except ImportError as error:
        print(f"llama.cpp is left out: {error}", file=sys.stderr)
        return []
    weights = step_weights(model)
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(quiet := llama_cpp.llama_log_callback(lambda *_: None), None)
    speeds = []
    whole = folder / f"{WHOLE}.gguf"
    write(gguf, model, whole, gguf.GGMLQuantizationType.BF16)
    for kind in TYPES:
        file = folder / f"{kind}.gguf"
        if kind != WHOLE:
            quantize(llama_cpp, whole, file, kind)
        loaded = llama_cpp.llama_model_load_from_file(bytes(file), llama_cpp.llama_model_default_params())
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
        llama_cpp.llama_model_free(loaded)
        if kind != WHOLE:
            file.unlink()
    whole.unlink()
    del quiet
    return speeds


def write(gguf: Any, model: Any, file: Path, kind: Any) -> None:
    """Write a model whose blocks are equal, without a tokenizer, with matrices of one type."""
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    decoder, ones = model.get_decoder(), np.ones(config.hidden_size, np.float32)
    block = {name: quantized(gguf, decoder.layers[0].get_submodule(path), kind) for path, name in NAMES.items()}
    outside = {"token_embd": quantized(gguf, decoder.embed_tokens, kind), "output": quantized(gguf, model.lm_head, kind)}
    for name, array in named(block, outside, config.num_hidden_layers):
        writer.add_tensor(f"{name}.weight", array, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", ones)
    for number in range(config.num_hidden_layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{number}.{norm}.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(llama_cpp: Any, whole: Path, file: Path, kind: str) -> None:
    """Write a file of another type. Matrices that matter more have more bits, as llama.cpp chooses."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if llama_cpp.llama_model_quantize(bytes(whole), bytes(file), parameters):
        raise RuntimeError(f"llama.cpp could not write {kind}")


def named(block: dict[str, Any], outside: dict[str, Any], blocks: int) -> Iterator[tuple[str, Any]]:
    """All matrices by name."""
    yield from outside.items()
    for number in range(blocks):
        yield from ((f"blk.{number}.{name}", array) for name, array in block.items())


def quantized(gguf: Any, module: nn.Module, kind: Any) -> Any:
    """The bytes of a matrix."""
    return gguf.quants.quantize(module.weight.float().numpy(), kind)


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
        reads.append(sum(memory_reads.read_seconds(weights) for _ in range(tokens)))
    llama_cpp.llama_batch_free(step)
    llama_cpp.llama_free(context)
    return median(seconds[1:]), median(reads[1:])
