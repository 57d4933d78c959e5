"""A tiny random model of any type of transformers, from its configuration class, for `python benchmarks/families.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sparsellm.checkpoints.configuration import silence_transformers

VOCABULARY = 384
LAYERS = 4
"""Blocks of a tiny model at most; as many as it takes to have one of each kind, and two at least."""

MOST = 60_000_000
"""Parameters of a tiny model, at most: towers that see keep some of their own sizes."""

SIZES: dict[str, int] = {
    r"(\w+_)?hidden_size|n_embd|d_model|dim|word_embed_proj_dim|embedding_size|embed_dim|emb_dim|width|proj\w*_dim": 64,
    r"(\w+_)?(intermediate|ffn_hidden|ffn)_size(_mlp)?|\w*ffn_dim|n_inner|d_ff|d_inner|\w*mlp_dim": 96,
    r"(num|n)_(hidden_)?layers?|(en|de)coder_layers|depth|num_blocks|num_(en|de)coder_layers": 2,
    r"num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads": 4,
    r"(num_key_value|num_kv|n_kv|kv_n)_heads|multi_query_group_num": 2,
    r"\w*mamba_(n|num)_heads|n_mamba_heads": 8,
    r"(\w+_)?head_dim|attention_head_size|kv_channels|d_kv|d_head|head_size|mamba_d_head|mamba_headdim": 16,
    r"rotary_dim|qk_rope_head_dim": 8,
    r"\w*lora_rank|q_rank|kv_rank": 32,
    r"vocab_size\w*|\w+_vocab_size|\w*_vocab": VOCABULARY,
    r"codebook_size": 256,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|max_sequence_length|max_source_positions": 256,
    r"max_target_positions": 256,
    r"sliding_window\w*|attention_window|window_size|attention_chunk_size|local_attention\w*|chunk_size": 16,
    r"num_(local_)?experts|n_routed_experts|moe_num_experts|num_moe_experts": 4,
    r"num_experts_per_tok|moe_top_?k|num_experts_per_token|moe_k|top_k_experts|num_selected_experts": 2,
    r"n_group|topk_group|num_expert_group|n_groups": 1,
    r"zero_expert_num": 2,
    r"(\w+_)?(state_size|d_state|state)": 8,
    r"image_size": 32,
    r"patch_size": 8,
}
"""What a configuration's field of that name becomes, where it is a number and larger."""


DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
UNSET = {"head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_key_value_heads": 4, "num_experts_per_tok": 2}
"""What is set where a configuration leaves it open and its models do not."""


def shrunk(config: PreTrainedConfig, **exceptions: Any) -> PreTrainedConfig:
    """A tiny configuration of the same class."""
    fields = _shrunk(config.to_dict())
    for path, value in exceptions.items():
        *parts, last = path.split(".")
        inner = fields
        for part in parts:
            inner = inner[part]
        inner[last] = value
    return type(config)(**fields)


def _shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    """A configuration's fields with every size tiny, its own configurations' too."""
    deep = next((n for key in DEPTHS if isinstance(n := fields.get(key), int)), 0)
    rows = _rows(fields, deep)
    found: dict[str, Any] = {}
    for key, value in fields.items():
        if key in ("transformers_version", "architectures", "dtype"):
            continue
        if key == "per_layer_config" and value:
            found[key] = {str(n): _shrunk(_own(value, row)) for n, row in enumerate(rows) if _own(value, row)}
        elif isinstance(value, dict):
            found[key] = _shrunk(value)
        elif key == "mrope_section" and isinstance(value, list):
            found[key] = [8 - 2 * (len(value) - 1), *[2] * (len(value) - 1)]
        elif isinstance(value, list) and deep > 1 and len(value) == deep and rows:
            found[key] = [_tiny(key, value[row], len(rows)) for row in rows]
        elif key == "num_key_value_heads" and value == fields.get("num_attention_heads"):
            found[key] = _tiny("num_attention_heads", value, 0)
        elif value is None and key in UNSET and "num_attention_heads" in fields:
            found[key] = UNSET[key]
        else:
            found[key] = _tiny(key, value, len(rows))
    return found


def _own(settings: dict[str, Any], row: int) -> dict[str, Any]:
    """What `per_layer_config` says of a block."""
    return next((value for key, value in settings.items() if int(key) == row), {})


def _rows(fields: dict[str, Any], deep: int) -> list[int]:
    """Which blocks to keep: the first of each kind, where the configuration lists kinds."""
    lists = [value for value in fields.values() if isinstance(value, list) and len(value) == deep and deep > 1]
    if not lists:
        return []
    own = fields.get("per_layer_config") or {}
    first: dict[str, int] = {}
    for number in range(deep):
        first.setdefault(str([*(many[number] for many in lists), _own(own, number)]), number)
    rows = sorted(first.values())[:LAYERS]
    return rows if len(rows) > 1 else [rows[0], rows[0]]


def _tiny(key: Any, value: Any, layers: int) -> Any:
    """A field's tiny value."""
    if not isinstance(key, str) or isinstance(value, bool):
        return value
    if isinstance(value, float) and re.fullmatch(r"\w*dropout\w*|\w*drop|\w*pdrop", key):
        return 0.0
    return _number(key, value, layers) if isinstance(value, int) else value


def _number(key: str, value: int, layers: int) -> int:
    """A field's tiny value."""
    for names, size in SIZES.items():
        if re.fullmatch(names, key):
            return min(value, layers if size == 2 and layers and "layer" in key else size)
    if re.fullmatch(r"\w*token_(id|index)|(bos|eos|pad|sep|cls|unk)\w*_id|\w*_token", key) and value >= VOCABULARY:
        return VOCABULARY - 1 - sum(map(ord, key)) % 64
    return value


def config_of(kind: str) -> PreTrainedConfig:
    """A tiny configuration of a type."""
    with silence_transformers():
        return shrunk(CONFIG_MAPPING[kind](**NEEDED.get(kind, {})), **EXCEPTIONS.get(kind, {}))


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 16,
}
"""Gemmas whose later blocks attend to keys and values of earlier ones."""

SEE_PLACES = (
    "glm46v",
    "glm4v",
    "glm_ocr",
    "glmga",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen2_5_omni_thinker",
    "paddleocr_vl",
    "hunyuan_vl",
)
"""Types whose text configuration leaves open how positions in images are rotated."""

NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
}
"""Fields without which a type has no configuration."""

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"linear_num_heads": 4},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE | {"mrope_section": [4, 2, 2]}}},
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": ROPE | {"mrope_section": [4, 2, 2]}}},
    "cpmant": {"dim_head": 16, "dim_ff": 96, "position_bias_num_buckets": 32, "position_bias_max_distance": 64},
    "ctrl": {"dff": 96},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma": {"text_config.num_experts": 4, "text_config.top_k_experts": 2, "text_config.moe_intermediate_size": 32},
    "ernie4_5_vl_moe": {"text_config.rope_parameters": ROPE | {"mrope_section": [2, 2, 4]}},
    "gemma3n_text": SHARED
    | {"intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0], "laurel_rank": 16},
    "gemma4_text": SHARED | {"per_layer_config": {}},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "mistral4": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    "moshi": {"vocab_size": 256},
    "qwen4_exp_text": INDEXER,
    "qwen4_exp": {f"text_config.{name}": value for name, value in INDEXER.items()},
    "recurrent_gemma": {"lru_width": 64, "intermediate_size": 768},
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    "chameleon": {"vocabulary_map": {"<image>": 5}, "vq_config.base_channels": 32},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "adapter_rank": 16, "hybrid_layer_ids": [1]},
    "dots3_note_text": {"head_dim": 32},
    "dots3_note": {"text_config.head_dim": 32},
    "emu3": {"vocabulary_map": {"<image>": 5}, "vq_config.base_channels": 32},
    "janus": {"vq_config.base_channels": 32},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "glm4v_moe": {"text_config.rope_parameters": ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
} | {kind: {"text_config.rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}} for kind in SEE_PLACES}
"""Fields of a type that no rule above sets right; a dot leads into a configuration within it."""


def tiny_model(kind: str) -> PreTrainedModel:
    """A random model of a type. Raises ValueError where its configuration does not get small."""
    config = config_of(kind)
    with silence_transformers(), torch.device("meta"):
        large = auto_class(config).from_config(config)
    count = sum(tensor.numel() for tensor in large.parameters())
    if count > MOST:
        raise ValueError(f"{count:,} parameters are left")
    torch.manual_seed(0)
    with silence_transformers():
        return auto_class(config).from_config(config).float().eval()


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that makes a model of a configuration, whether this package opens it or not."""
    alone = config.get_text_config() is config
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText)[:: 1 if alone else -1]:
        if type(config) in auto._model_mapping:
            return auto
    raise ValueError(f"no class makes a {type(config).__name__}")


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write a tiny model to a folder, with a tokenizer of bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with silence_transformers():
        model.save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
