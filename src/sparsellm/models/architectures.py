"""The table of model families: where the blocks are, which layers they hold, and what their feed-forward part computes.

A family is a line of data. `groups` lists the linear layers of a block in the order in which they run; the layers of one group
read the same input and share its moments. A family that the table lacks still has blocks and linear layers: `discovered`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from sparsellm.errors import InvalidSetting, UnsupportedModel
from sparsellm.models.activation_functions import ACTIVATION_FUNCTIONS
from sparsellm.models.experts import GATED, experts_of
from sparsellm.models.feedforward import FeedForward, GatedFeedForward, PlainFeedForward

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ROUTERS = ("gate", "router", "shared_expert_gate")
"""What the modules are called that choose experts: they are left as they are, with all that is in them."""


@dataclass(frozen=True)
class Split:
    """A layer that holds several, whose outputs are, `repeated` times over, so many of each piece.

    pieces: their names; "qkv_proj" with a piece "q" holds the layer "qkv_proj.q". shares: how many outputs of each, in
    proportion; equal ones by default. A word is a number in the configuration.
    """

    pieces: tuple[str, ...]
    shares: tuple[str | int, ...] = ()
    repeated: str | int = 1

    def resolved(self, config: Any) -> Split:
        """With the configuration's numbers."""
        shares = tuple(_number(config, share) for share in self.shares) or (1,) * len(self.pieces)
        return replace(self, shares=shares, repeated=_number(config, self.repeated))


def _number(config: Any, value: str | int) -> int:
    """A number, or the configuration's number of that name. Raises InvalidSetting for what is none, or not above 0."""
    number = getattr(config, value, None) if isinstance(value, str) else value
    if not isinstance(number, int) or number < 1:
        raise InvalidSetting(f"`splits` needs whole numbers above 0, or the configuration's keys for them, got {value!r}.")
    return number


@dataclass(frozen=True)
class Architecture:
    """Where a family keeps what this package prunes; every name but `blocks` is relative to a block.

    blocks: path of the module list of decoder blocks. groups: linear layers that share an input, in running order: attention's
    readers, its writer, then the feed-forward's. A group of which a block has none is left out there.
    feed_forward: the part that SparseLLM couples, or None where its activation is none that is solved.
    activation: the configuration's key that names the activation, or its name where the family has only one.
    splits: layers that hold several, by name. experts: the module that holds experts as three-dimensional tensors, or nothing.
    known: whether the table or a user describes the family; if not, blocks and layers are what was found.
    """

    blocks: str
    groups: tuple[tuple[str, ...], ...]
    feed_forward: FeedForward | None
    activation: str
    splits: Mapping[str, Split] = field(default_factory=dict)
    experts: str = ""
    known: bool = True
    expert_parts: tuple[FeedForward, ...] = ()

    @property
    def feed_forward_parts(self) -> tuple[FeedForward, ...]:
        """The feed-forward parts that SparseLLM couples, each by itself: the block's own, or each expert's."""
        return (*((self.feed_forward,) if self.feed_forward else ()), *self.expert_parts)

    @property
    def residual_writers(self) -> tuple[str, ...]:
        """What writes to the stream: attention's writer, then the feed-forward's or all experts' module. None where unknown."""
        if not self.known or len(self.groups) < 2:
            return ()
        return self.groups[1][0], self.experts.rpartition(".")[0] if self.experts else self.groups[-1][0]

    def resolved(self, config: Any) -> Architecture:
        """With what the configuration says: its activation, and its numbers in `splits`."""
        activation = getattr(config, self.activation, self.activation)
        return replace(
            self,
            feed_forward=_with_activation(self.feed_forward, activation),
            activation=activation,
            splits={name: split.resolved(config) for name, split in self.splits.items()},
        )

    def of(self, block: nn.Module) -> Architecture:
        """As far as a block has it: blocks of one model may differ, some with experts and some without."""
        experts = self.experts
        there = dict(block.named_modules())
        if not self.known:
            experts = next((name for name, module in there.items() if experts_of(module)), "")
        elif experts not in there:
            experts = ""
        held = experts_of(there[experts]) if experts else None
        if experts and held is None:
            form = "three-dimensional parameters gate_up_proj, or up_proj, and down_proj"
            message = f"Its experts are a {type(there[experts]).__name__}, which is none of the forms that are pruned"
            raise UnsupportedModel(f"{message}: {form}.")
        groups = self.groups if self.known else tuple((name,) for name in _linear_names(there))
        groups = tuple(group for group in groups if any(_module_of(name, self.splits) in there for name in group))
        part = self.feed_forward
        parts: tuple[FeedForward, ...] = ()
        if part and not any(part.out_proj in group for group in groups):
            part = None
        if held is not None:
            names = [tuple(f"{experts}.{number}.{name}" for name in held.names) for number in range(held.count)]
            groups += tuple(group for *readers, writer in names for group in (tuple(readers), (writer,)))
            made = (_with_activation(_part(*name), self.activation) for name in names)
            parts = tuple(part for part in made if part) if self.known and held.known else ()
        return replace(self, groups=groups, feed_forward=part, experts=experts, expert_parts=parts)


def _part(*names: str) -> FeedForward:
    """A feed-forward part of these layers: one reader or two, and a writer."""
    return GatedFeedForward(*names) if len(names) == len(GATED) else PlainFeedForward(*names)


def _with_activation(part: FeedForward | None, activation: str) -> FeedForward | None:
    """A feed-forward part with the activation that a configuration names; None where that one is not solved."""
    if isinstance(part, PlainFeedForward) and (activation == "relu" or activation in ACTIVATION_FUNCTIONS):
        return replace(part, activation=activation)
    if isinstance(part, GatedFeedForward) and activation in ACTIVATION_FUNCTIONS:
        return replace(part, activation=activation)
    return None


def _module_of(name: str, splits: Mapping[str, Split]) -> str:
    """The module that holds a layer."""
    whole, _, piece = name.rpartition(".")
    return whole if whole in splits and piece in splits[whole].pieces else name


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer, whichever way its weight lies."""
    return type(module) is nn.Linear or type(module).__name__ in ("FalconLinear", "Conv1D")


def _linear_names(modules: Mapping[str, nn.Module]) -> list[str]:
    """The linear layers among a block's modules, in the order in which they stand there; routers are none."""
    return [name for name, module in modules.items() if is_linear(module) and not {*name.split(".")} & {*ROUTERS}]


def _projections(path: str) -> tuple[tuple[str, ...], ...]:
    """The groups of a gated feed-forward part at that path."""
    return (f"{path}.gate_proj", f"{path}.up_proj"), (f"{path}.down_proj",)


_LLAMA = Architecture(
    blocks="model.layers",
    groups=(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        *_projections("mlp"),
    ),
    feed_forward=GatedFeedForward(gate="mlp.gate_proj", up="mlp.up_proj", out_proj="mlp.down_proj"),
    activation="hidden_act",
)
_GEMMA = replace(_LLAMA, activation="hidden_activation")
_EXPERTS = replace(_LLAMA, experts="mlp.experts")
_QKV = ("q", "k", "v")


def _plain(
    blocks: str, attention: str, fused: str, out: str, reader: str, writer: str, activation: str, heads: str | int = 1
) -> Architecture:
    """A family of GPT's form: one layer for queries, keys and values, head by head or one after the other, and a plain part."""
    qkv = f"{attention}.{fused}"
    return Architecture(
        blocks=blocks,
        groups=(tuple(f"{qkv}.{piece}" for piece in _QKV), (f"{attention}.{out}",), (reader,), (writer,)),
        feed_forward=PlainFeedForward(up=reader, out_proj=writer),
        activation=activation,
        splits={qkv: Split(_QKV, repeated=heads)},
    )


_WIDE = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")

ARCHITECTURES: dict[str, Architecture] = {
    "opt": Architecture(
        blocks="model.decoder.layers",
        groups=(
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("self_attn.out_proj",),
            ("fc1",),
            ("fc2",),
        ),
        feed_forward=PlainFeedForward(up="fc1", out_proj="fc2"),
        activation="activation_function",
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "ministral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "smollm3": _LLAMA,
    "stablelm": _LLAMA,
    "olmo": _LLAMA,
    "olmo2": _LLAMA,
    "olmo3": _LLAMA,
    "cohere": _LLAMA,
    "cohere2": _LLAMA,
    "granite": _LLAMA,
    "gemma": _LLAMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "qwen2_vl_text": _LLAMA,
    "qwen2_5_vl_text": _LLAMA,
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "olmoe": _EXPERTS,
    "gpt_oss": _EXPERTS,  # its experts' activation, with clamped inputs, is none that is solved
    "llama4_text": replace(
        _LLAMA,
        groups=(*_LLAMA.groups[:2], *_projections("feed_forward.shared_expert"), *_projections("feed_forward")),
        feed_forward=GatedFeedForward("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
        experts="feed_forward.experts",
    ),
    "phi": Architecture(
        blocks="model.layers",
        groups=(_LLAMA.groups[0], ("self_attn.dense",), ("mlp.fc1",), ("mlp.fc2",)),
        feed_forward=PlainFeedForward(up="mlp.fc1", out_proj="mlp.fc2"),
        activation="hidden_act",
    ),
    "phi3": Architecture(
        blocks="model.layers",
        groups=(
            ("self_attn.qkv_proj.q", "self_attn.qkv_proj.k", "self_attn.qkv_proj.v"),
            ("self_attn.o_proj",),
            ("mlp.gate_up_proj.gate", "mlp.gate_up_proj.up"),
            ("mlp.down_proj",),
        ),
        feed_forward=GatedFeedForward(gate="mlp.gate_up_proj.gate", up="mlp.gate_up_proj.up", out_proj="mlp.down_proj"),
        activation="hidden_act",
        splits={
            "self_attn.qkv_proj": Split(_QKV, ("num_attention_heads", "num_key_value_heads", "num_key_value_heads")),
            "mlp.gate_up_proj": Split(("gate", "up")),
        },
    ),
    "gpt2": _plain("transformer.h", "attn", "c_attn", "c_proj", "mlp.c_fc", "mlp.c_proj", "activation_function"),
    "gpt_neox": _plain(
        "gpt_neox.layers", "attention", "query_key_value", "dense", *_WIDE, "hidden_act", heads="num_attention_heads"
    ),
    "bloom": _plain(
        "transformer.h", "self_attention", "query_key_value", "dense", *_WIDE, "gelu_pytorch_tanh", heads="num_attention_heads"
    ),
    "gptj": Architecture(
        blocks="transformer.h",
        groups=(("attn.q_proj", "attn.k_proj", "attn.v_proj"), ("attn.out_proj",), ("mlp.fc_in",), ("mlp.fc_out",)),
        feed_forward=PlainFeedForward(up="mlp.fc_in", out_proj="mlp.fc_out"),
        activation="activation_function",
    ),
    "falcon": Architecture(  # how its three forms fuse queries, keys and values differs: that layer stays one
        blocks="transformer.h",
        groups=(("self_attention.query_key_value",), ("self_attention.dense",), _WIDE[:1], _WIDE[1:]),
        feed_forward=PlainFeedForward(*_WIDE),
        activation="activation",
    ),
}


def architecture_of(config: PretrainedConfig) -> Architecture | None:
    """The table's line for a model's configuration, with its numbers and activation; None for a family that it lacks.

    For a model that sees, the line of its language tower.
    """
    text = config.get_text_config()
    found = ARCHITECTURES.get(text.model_type) or ARCHITECTURES.get(config.model_type)
    return found.resolved(text) if found else None


def discover_architecture(model: PreTrainedModel) -> Architecture:
    """What can be told of a model of an unknown family: its blocks are the longest list of modules that all hold linear layers.

    Of a model that sees, the longest within its language tower; lists within another's modules, as of experts, are none.
    Raises UnsupportedModel where there is no such list.
    """
    tower = model if model.config.get_text_config() is model.config else model.get_decoder()
    inside = {id(module) for module in tower.modules()}
    best, length, outer = "", 0, ""
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or id(module) not in inside or (outer and name.startswith(outer)):
            continue
        if len(module) and all(any(is_linear(part) or experts_of(part) for part in child.modules()) for child in module):
            outer = f"{name}."
            if len(module) > length:
                best, length = name, len(module)
    if not best:
        raise UnsupportedModel(
            f"A {type(model).__name__} has no list of modules that all hold linear layers, so its blocks are not found. "
            "Describe it with --architecture file.yaml (docs/families.md)."
        )
    return Architecture(blocks=best, groups=(), feed_forward=None, activation="", known=False)
