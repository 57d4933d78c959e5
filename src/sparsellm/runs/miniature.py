"""A model of the same form, every dimension divided by one number: it shows what the full one takes, in seconds."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparsellm.checkpoints.configuration import silence_transformers
from sparsellm.checkpoints.loading import Checkpoint
from sparsellm.checkpoints.model_classes import auto_model
from sparsellm.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WIDTH = 64
"""How wide a miniature is at least; wider where the model has so many heads."""

WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "ffn_dim",
    "ffn_hidden_size",
    "n_inner",
    "word_embed_proj_dim",
    "head_dim",
    "rotary_dim",
    "vocab_size",
)
"""What a configuration calls the dimensions of its matrices."""

INNER = ("intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
"""Those that need not divide exactly, and are kept whole numbers of eights, for patterns of groups."""

LENGTHS = ("max_position_embeddings", "sliding_window")
"""What it calls numbers of tokens."""


@dataclass(frozen=True)
class Miniature:
    """A checkpoint of random weights in a folder of its own. scale: what every dimension was divided by.

    Bytes of weights and activations are scale² times those of the miniature, operations of matrix products and factorisations
    scale³ times, as long as windows are scaled in length and not in number.
    """

    checkpoint: Checkpoint
    scale: int

    def length(self, tokens: int) -> int:
        """A window's length for one of so many tokens in full."""
        return max(2, tokens // self.scale)


def miniature(source: Checkpoint, folder: Path, dtype: torch.dtype) -> Miniature:
    """Write a miniature of a checkpoint's form to a folder, in a dtype. Raises UnsupportedModel where none can be made."""
    scale = _scale(source.config)
    config = shrunk(source.config, scale)
    config.dtype = dtype
    try:
        with silence_transformers(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = auto_model(config).from_config(config, dtype=dtype, trust_remote_code=source.trusted)
            model.save_pretrained(folder)
    except (ValueError, RuntimeError, AssertionError, AttributeError, KeyError) as error:
        raise UnsupportedModel(
            f"A small model of {source.name}'s form cannot be made ({error}), so its needs are unknown."
        ) from error
    return Miniature(Checkpoint(source.name, folder, model.config, source.trusted, source.architecture), scale)


def shrunk(config: PretrainedConfig, scale: int) -> PretrainedConfig:
    """A configuration with every width and length divided by `scale`."""
    small = copy.deepcopy(config)
    for part in {id(some): some for some in (small, small.get_text_config())}.values():
        for name in (*WIDTHS, *LENGTHS):
            value: Any = getattr(part, name, None)
            if isinstance(getattr(type(part), name, None), property):
                continue  # made of others, which are divided themselves
            if isinstance(value, int) and value > 1:
                setattr(part, name, _divided(value, scale, 8 if name in INNER else 2))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(part, name, None) is not None:
                setattr(part, name, 0)
    return small


def _scale(config: PretrainedConfig) -> int:
    """The largest number that divides what must stay whole: the size of a head, which stays even, and the width."""
    text = config.get_text_config()
    width, heads = int(text.hidden_size), int(text.num_attention_heads)
    head = int(getattr(text, "head_dim", None) or width // heads)
    shared = math.gcd(width, head // 2)
    divisors = [number for number in range(1, shared + 1) if shared % number == 0 and width // number >= WIDTH]
    return max(divisors, default=1)


def _divided(value: int, scale: int, step: int) -> int:
    """A dimension divided, rounded to a whole number of steps where it was one."""
    exact = value / scale
    return max(step, round(exact / step) * step) if value % step == 0 else max(1, round(exact))
