"""Model families: the path of their blocks, the linear layers of a block, and its feed-forward part.

Each family is one `Architecture` in the table `ARCHITECTURES`. `discover_architecture` finds the blocks and linear layers of
families that are not in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from sparsellm.errors import UnsupportedModel
from sparsellm.models.experts import GATED, experts_of
from sparsellm.models.feedforward import ACTIVATION_FUNCTIONS, FeedForward, GatedFeedForward, PlainFeedForward

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of modules that route tokens to experts. They are not pruned, nor is anything inside them."""


@dataclass(frozen=True)
class Split:
    """How the outputs of a fused layer divide into pieces: `repeated` runs, each with `shares` outputs of every piece.

    A string in `shares` or `repeated` is the name of a number in the model's configuration.

    Attributes:
        pieces: Names of the pieces; piece "q" of "qkv_proj" is the layer "qkv_proj.q".
        shares: Relative number of outputs of each piece; equal by default.
        repeated: Number of runs, such as the number of heads.
    """

    pieces: tuple[str, ...]
    shares: tuple[str | int, ...] = ()
    repeated: str | int = 1

    def resolved(self, config: Any) -> Split:
        """Replace names by the configuration's numbers."""
        shares = tuple(_number(config, share) for share in self.shares) or (1,) * len(self.pieces)
        return replace(self, shares=shares, repeated=_number(config, self.repeated))


def _number(config: Any, value: str | int) -> int:
    """Return a positive integer, given directly or by its name in the configuration; raise UnsupportedModel for others."""
    number = getattr(config, value, None) if isinstance(value, str) else value
    if not isinstance(number, int) or number < 1:
        raise UnsupportedModel(f"Fused layers are split by whole numbers above 0, and config.json has {number!r} for {value}.")
    return number


@dataclass(frozen=True)
class Architecture:
    """The layers of a model family. Every name but `blocks` is relative to a block.

    Attributes:
        blocks: Path of the module list of decoder blocks.
        groups: Linear layers that share an input and its statistics, in running order: attention's input projections, its
            output projection, then the feed-forward layers. A block skips groups of which it has no layer.
        feed_forward: The layers that SparseLLM prunes together; None where their activation function is not supported.
        activation: The configuration's key that names the activation function, or the name itself.
        splits: Fused layers by name.
        experts: The module that holds the experts as three-dimensional parameters; empty for none.
        known: Whether the table describes the family; False for a discovered architecture.
        expert_parts: The feed-forward layers of each expert; set by `of`.
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
        """The feed-forward parts that SparseLLM prunes: the block's own, then each expert's."""
        return (*((self.feed_forward,) if self.feed_forward else ()), *self.expert_parts)

    @property
    def residual_writers(self) -> tuple[str, ...]:
        """The modules that add to the residual stream: attention's output projection, then that of the feed-forward part.

        The second is the module of all experts where a block has experts. Empty for a discovered architecture.
        """
        if not self.known or len(self.groups) < 2:
            return ()
        return self.groups[1][0], self.experts.rpartition(".")[0] if self.experts else self.groups[-1][0]

    def resolved(self, config: Any) -> Architecture:
        """Replace names by the configuration's activation function and numbers."""
        activation = getattr(config, self.activation, self.activation)
        return replace(
            self,
            feed_forward=_with_activation(self.feed_forward, activation),
            activation=activation,
            splits={name: split.resolved(config) for name, split in self.splits.items()},
        )

    def of(self, block: nn.Module) -> Architecture:
        """Return the architecture of one block: blocks of a model may differ, some with experts and some without.

        Raises:
            UnsupportedModel: The experts are not stored in a supported form.
        """
        path = self.experts
        modules = dict(block.named_modules())
        if not self.known:
            path = next((name for name, module in modules.items() if experts_of(module)), "")
        elif path not in modules:
            path = ""
        experts = experts_of(modules[path]) if path else None
        if path and experts is None:
            form = "three-dimensional parameters gate_up_proj, or up_proj, and down_proj"
            message = f"Its experts are a {type(modules[path]).__name__}, which is none of the forms that are pruned"
            raise UnsupportedModel(f"{message}: {form}.")
        groups = self.groups if self.known else tuple((name,) for name in _linear_names(modules))
        groups = tuple(group for group in groups if any(_module_name(name, self.splits) in modules for name in group))
        expert_parts: tuple[FeedForward, ...] = ()
        has_part = self.feed_forward is not None and any(self.feed_forward.out_proj in group for group in groups)
        feed_forward = self.feed_forward if has_part else None
        if experts is not None:
            layers = [tuple(f"{path}.{number}.{name}" for name in experts.names) for number in range(experts.count)]
            groups += tuple(group for *in_proj, out_proj in layers for group in (tuple(in_proj), (out_proj,)))
            if self.known and experts.known:
                part_class = GatedFeedForward if len(experts.names) == len(GATED) else PlainFeedForward
                parts = (_with_activation(part_class(*names), self.activation) for names in layers)
                expert_parts = tuple(part for part in parts if part)
        return replace(self, groups=groups, feed_forward=feed_forward, experts=path, expert_parts=expert_parts)


def _with_activation(part: FeedForward | None, activation: str) -> FeedForward | None:
    """Set the activation function of a feed-forward part; None where it is not supported."""
    is_supported = activation in ACTIVATION_FUNCTIONS or (activation == "relu" and isinstance(part, PlainFeedForward))
    return replace(part, activation=activation) if part is not None and is_supported else None


def _module_name(name: str, splits: Mapping[str, Split]) -> str:
    """Return the name of the module that holds a layer: the fused layer of a piece, otherwise the layer."""
    fused, _, piece = name.rpartition(".")
    return fused if fused in splits and piece in splits[fused].pieces else name


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer, with a weight of (out, in) or, as in `Conv1D`, (in, out)."""
    return type(module) is nn.Linear or type(module).__name__ in ("FalconLinear", "Conv1D")


def _linear_names(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the linear layers among a block's modules, in order of definition, without routers."""
    return [name for name, module in modules.items() if is_linear(module) and not {*name.split(".")} & {*ROUTERS}]


def _gated_groups(path: str) -> tuple[tuple[str, ...], ...]:
    """Return the groups of the gated feed-forward part at a path."""
    return (f"{path}.gate_proj", f"{path}.up_proj"), (f"{path}.down_proj",)


_LLAMA = Architecture(
    blocks="model.layers",
    groups=(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        *_gated_groups("mlp"),
    ),
    feed_forward=GatedFeedForward(gate="mlp.gate_proj", up="mlp.up_proj", out_proj="mlp.down_proj"),
    activation="hidden_act",
)
_QKV = ("q", "k", "v")


def _plain(
    blocks: str, qkv: tuple[str, ...], attention_out: str, *, up: str, down: str, activation: str, heads: str | int = 1
) -> Architecture:
    """Build a family with a plain feed-forward part; `qkv` is one fused layer, head by head or in turn, or three."""
    splits = {qkv[0]: Split(_QKV, repeated=heads)} if len(qkv) == 1 else {}
    return Architecture(
        blocks=blocks,
        groups=(tuple(f"{qkv[0]}.{piece}" for piece in _QKV) if splits else qkv, (attention_out,), (up,), (down,)),
        feed_forward=PlainFeedForward(up=up, out_proj=down),
        activation=activation,
        splits=splits,
    )


_WIDE = {"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
_ATTENTION = _LLAMA.groups[0]
_LLAMA_LIKE = (
    "llama mistral ministral qwen2 qwen3 smollm3 stablelm olmo olmo2 olmo3 cohere cohere2 granite gemma "
    "qwen2_vl_text qwen2_5_vl_text"
)

ARCHITECTURES: dict[str, Architecture] = {
    "opt": _plain(
        "model.decoder.layers", _ATTENTION, "self_attn.out_proj", up="fc1", down="fc2", activation="activation_function"
    ),
    **dict.fromkeys(_LLAMA_LIKE.split(), _LLAMA),
    **dict.fromkeys(("gemma2", "gemma3_text"), replace(_LLAMA, activation="hidden_activation")),
    # The activation function of gpt_oss's experts, with clamped inputs, is not supported.
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmoe", "gpt_oss"), replace(_LLAMA, experts="mlp.experts")),
    "llama4_text": replace(
        _LLAMA,
        groups=(*_LLAMA.groups[:2], *_gated_groups("feed_forward.shared_expert"), *_gated_groups("feed_forward")),
        feed_forward=GatedFeedForward("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
        experts="feed_forward.experts",
    ),
    "phi": _plain("model.layers", _ATTENTION, "self_attn.dense", up="mlp.fc1", down="mlp.fc2", activation="hidden_act"),
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
    "gpt2": _plain(
        "transformer.h", ("attn.c_attn",), "attn.c_proj", up="mlp.c_fc", down="mlp.c_proj", activation="activation_function"
    ),
    "gpt_neox": _plain(
        "gpt_neox.layers",
        ("attention.query_key_value",),
        "attention.dense",
        **_WIDE,
        activation="hidden_act",
        heads="num_attention_heads",
    ),
    "bloom": _plain(
        "transformer.h",
        ("self_attention.query_key_value",),
        "self_attention.dense",
        **_WIDE,
        activation="gelu_pytorch_tanh",
        heads="num_attention_heads",
    ),
    "gptj": _plain(
        "transformer.h",
        ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "attn.out_proj",
        up="mlp.fc_in",
        down="mlp.fc_out",
        activation="activation_function",
    ),
    # The three variants of falcon fuse queries, keys and values differently: pruned as one layer.
    "falcon": Architecture(
        blocks="transformer.h",
        groups=(("self_attention.query_key_value",), ("self_attention.dense",), *((name,) for name in _WIDE.values())),
        feed_forward=PlainFeedForward(up=_WIDE["up"], out_proj=_WIDE["down"]),
        activation="activation",
    ),
}


def architecture_of(config: PretrainedConfig) -> Architecture | None:
    """Look up the architecture of a configuration, resolved with its values; None for a family that is not in the table.

    For a multimodal model it is the architecture of the language model.
    """
    text_config = config.get_text_config()
    architecture = ARCHITECTURES.get(text_config.model_type) or ARCHITECTURES.get(config.model_type)
    return architecture.resolved(text_config) if architecture else None


def discover_architecture(model: PreTrainedModel) -> Architecture:
    """Find the blocks of a model of an unknown family: the longest module list whose items all hold linear layers.

    In a multimodal model only the language model is searched. Lists nested in such a list, as of experts, do not count.

    Raises:
        UnsupportedModel: There is no such list.
    """
    language_model = model if model.config.get_text_config() is model.config else model.get_decoder()
    candidates = {id(module) for module in language_model.modules()}
    longest, length, outer = "", 0, ""
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or id(module) not in candidates or (outer and name.startswith(outer)):
            continue
        if len(module) and all(any(is_linear(part) or experts_of(part) for part in child.modules()) for child in module):
            outer = f"{name}."
            if len(module) > length:
                longest, length = name, len(module)
    if not longest:
        raise UnsupportedModel(
            f"A {type(model).__name__} has no list of modules that all hold linear layers, so its blocks are not found. "
            "Describe the family in ARCHITECTURES of sparsellm.models.architectures (docs/families.md)."
        )
    return Architecture(blocks=longest, groups=(), feed_forward=None, activation="", known=False)
