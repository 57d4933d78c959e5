"""The table of model families: where the blocks are, which layers they hold, and what their feed-forward part computes.

A family is a line of data. `groups` lists the linear layers of a block in the order in which they run; the layers of one group
read the same input and share its moments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparsellm.errors import UnsupportedModel
from sparsellm.feedforward import FeedForward, GatedFeedForward, PlainFeedForward

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Architecture:
    """Where a family keeps what this package prunes; every name but `blocks` is relative to a block.

    blocks: path of the module list of decoder blocks. groups: linear layers that share an input, in running order.
    feed_forward: the part that SparseLLM couples, or None where its activation is none that is solved in closed form.
    activation: the configuration's key that names the activation.
    """

    blocks: str
    groups: tuple[tuple[str, ...], ...]
    feed_forward: FeedForward | None
    activation: str


_LLAMA = Architecture(
    blocks="model.layers",
    groups=(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    ),
    feed_forward=GatedFeedForward(gate="mlp.gate_proj", up="mlp.up_proj", writer="mlp.down_proj"),
    activation="hidden_act",
)

ARCHITECTURES: dict[str, Architecture] = {
    "opt": Architecture(
        blocks="model.decoder.layers",
        groups=(
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("self_attn.out_proj",),
            ("fc1",),
            ("fc2",),
        ),
        feed_forward=PlainFeedForward(reader="fc1", writer="fc2"),
        activation="activation_function",
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}


def architecture_of(config: PretrainedConfig) -> Architecture:
    """The table's line for a model's configuration, without its feed-forward where the activation is another one.

    Raises UnsupportedModel, with the list of families, for one that the table lacks.
    """
    family = config.model_type
    if family not in ARCHITECTURES:
        raise UnsupportedModel(
            f"Models of type {family!r} are not supported. Supported: {', '.join(ARCHITECTURES)}. "
            "A new family is one line in sparsellm/architectures.py."
        )
    architecture = ARCHITECTURES[family]
    activation = getattr(config, architecture.activation)
    if architecture.feed_forward and activation != architecture.feed_forward.activation:
        return replace(architecture, feed_forward=None)
    return architecture
