"""Llama models as GGUF files, and what llama.cpp predicts with them; part of `python benchmarks/bits.py` and decode.py.

pip install llama-cpp-python gguf
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

try:
    import gguf
    import llama_cpp
except ImportError as error:
    gguf = llama_cpp = None
    missing: str = f"llama.cpp is left out: {error}"
else:
    missing = ""
    SILENT = llama_cpp.llama_log_callback(lambda *_: None)  # called for each line of the log; it must not be freed
    llama_cpp.llama_log_set(SILENT, None)
    llama_cpp.llama_backend_init()

WHOLE = "BF16"
TYPES = (WHOLE, "Q8_0", "Q4_0", "Q4_K_M", "Q2_K")
"""Types of files. llama.cpp makes the others from the first one; the letters after a K say which matrices have more bits."""

GROUP = 256
"""Columns that share scales in types with a K."""

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

NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Context with a file that llama.cpp has opened."""
    model = llama_cpp.llama_model_load_from_file(bytes(file), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp could not read {file}")
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


def write(model: Any, file: Path) -> None:
    """Write a Llama in bfloat16, without a tokenizer.

    Its feed-forward part is as wide as the next multiple of `GROUP`: the units that are added are zero.
    """
    config, kind = model.config, gguf.GGMLQuantizationType.BF16
    inner = -(-config.intermediate_size // GROUP) * GROUP
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    decoder = model.get_decoder()
    matrices = {"token_embd": decoder.embed_tokens.weight}
    if not config.tie_word_embeddings:
        matrices["output"] = model.lm_head.weight
    vectors = {"output_norm": decoder.norm.weight}
    for number, block in enumerate(decoder.layers):
        matrices |= {f"blk.{number}.{name}": as_stored(block.get_submodule(path), path, config) for path, name in NAMES.items()}
        vectors |= {f"blk.{number}.{name}": block.get_submodule(path).weight for path, name in NORMS.items()}
    for name, matrix in matrices.items():
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(matrix.detach().float().numpy(), kind), raw_dtype=kind)
    for name, vector in vectors.items():
        writer.add_tensor(f"{name}.weight", vector.detach().float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_stored(layer: Any, path: str, config: Any) -> Tensor:
    """The weight of a layer, with zeros for the units that are added.

    transformers rotates pairs of one number of each half of a head, llama.cpp neighbors: rows of a head change their places.
    """
    weight: Tensor = layer.weight.detach()
    added = -config.intermediate_size % GROUP
    if path.endswith(("gate_proj", "up_proj")):
        return pad(weight, (0, 0, 0, added))
    if path.endswith("down_proj"):
        return pad(weight, (0, added))
    if path.endswith(("q_proj", "k_proj")):
        heads = config.num_attention_heads if path.endswith("q_proj") else config.num_key_value_heads
        return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    return weight


def importance(model: Any, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Mean squares of the inputs of each layer of the blocks, by its name in a file: llama.cpp weights errors by them."""
    sums: dict[str, Tensor] = {}

    def add(name: str, inputs: Tensor) -> None:
        squares = inputs.flatten(0, 1).double().square().sum(0)
        sums[name] = sums.get(name, torch.zeros_like(squares)) + squares

    handles, count = [], 0
    for number, block in enumerate(model.get_decoder().layers):
        for path, name in NAMES.items():
            layer, full = block.get_submodule(path), f"blk.{number}.{name}.weight"
            handles.append(layer.register_forward_pre_hook(lambda _, inputs, full=full: add(full, inputs[0])))
    with torch.no_grad():
        for batch in batches:
            model(batch)
            count += batch.numel()
    for handle in handles:
        handle.remove()
    added = -model.config.intermediate_size % GROUP
    return {name: pad(x / count, (0, added if "ffn_down" in name else 0)).float() for name, x in sums.items()}


def quantize(whole: Path, file: Path, kind: str, *, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write a file of another type. Matrices that matter more have more bits, as llama.cpp chooses.

    Args:
        whole: The file in bfloat16.
        file: The file to write.
        kind: One of `TYPES`.
        weights: What `importance` returns, maybe nothing; embeddings and head then stay in bfloat16.
    """
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if weights is not None:
        parameters.output_tensor_type = parameters.token_embedding_type = int(gguf.GGMLQuantizationType.BF16)
    if weights:
        entries = (llama_cpp.llama_model_imatrix_data * (len(weights) + 1))()  # the last one has no name
        for entry, (name, vector) in zip(entries, weights.items(), strict=False):
            address = ctypes.cast(vector.data_ptr(), ctypes.POINTER(ctypes.c_float))
            entry.name, entry.data, entry.size = name.encode(), address, len(vector)
        parameters.imatrix = entries
    if llama_cpp.llama_model_quantize(bytes(whole), bytes(file), parameters):
        raise RuntimeError(f"llama.cpp could not write {kind}")


def bits_of(file: Path) -> float:
    """Bits a weight of the matrices of all blocks."""
    matrices = [x for x in gguf.GGUFReader(file).tensors if x.name.startswith("blk.") and "norm" not in x.name]
    return 8 * sum(int(x.n_bytes) for x in matrices) / sum(int(x.n_elements) for x in matrices)


def perplexity(file: Path, windows: Tensor) -> float:
    """Exponential of the mean loss of all predictions of sequences, (sequences, length), that llama.cpp computes."""
    return math.exp(mean(losses(file, windows)))


def losses(file: Path, windows: Tensor) -> list[float]:
    """The mean loss of each of some sequences, (sequences, length), that llama.cpp computes."""
    length = windows.shape[1]
    found = []
    with opened(file) as model:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = length
        parameters.n_threads = parameters.n_threads_batch = torch.get_num_threads()
        context = llama_cpp.llama_init_from_model(model, parameters)
        vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        batch = llama_cpp.llama_batch_init(length, 0, 1)
        batch.n_tokens = length
        for sequence in windows.tolist():
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            for position, token in enumerate(sequence):
                batch.token[position], batch.pos[position], batch.logits[position] = token, position, True
                batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
            if llama_cpp.llama_decode(context, batch):
                raise RuntimeError("llama.cpp could not decode")
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (length, vocabulary))
            found.append(float(cross_entropy(torch.from_numpy(logits[:-1].copy()), torch.tensor(sequence[1:]))))
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
    return found
