"""A loaded model: where its weights are and how a walk computes, and passes through what is outside of its blocks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsellm.errors import InvalidSetting, SparseLLMError, UnsupportedModel
from sparsellm.models.blocks import Block, Call
from sparsellm.models.contexts import replace_forward
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.offload import OffloadManager
from sparsellm.solvers.linalg import count_zeros

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Weights(ABC):
    """Makes a model's tensors available to a walk through the model, one part at a time.

    Attributes:
        on_disk: Whether tensors are read from files for each context and discarded after it.
    """

    on_disk = False

    def block(self, block: Block, next_block: Block | None = None) -> AbstractContextManager[None]:
        """Make a block's tensors available within the context.

        Args:
            next_block: The block that is needed next, which may be read in the meantime.
        """
        return nullcontext()

    def non_block(self) -> AbstractContextManager[None]:
        """Make the tensors outside the blocks available within the context: embeddings, last norm, head."""
        return nullcontext()

    def relocate(self, names: Iterable[str], file: Path) -> None:  # noqa: B027  (tensors in memory stay there)
        """Read these tensors, by their names in the model, from another safetensors file from now on."""

    @abstractmethod
    def size(self) -> tuple[int, int, int]:
        """Return the number of parameters, tied ones counted once, how many of them are zero, and their bytes."""


class ResidentWeights(Weights):
    """The weights of a model whose tensors are all in memory."""

    def __init__(self, model: nn.Module) -> None:
        check_in_memory(model)
        self._model = model

    def size(self) -> tuple[int, int, int]:
        tensors = list(self._model.parameters())
        return sum(x.numel() for x in tensors), sum(map(count_zeros, tensors)), sum(x.nbytes for x in tensors)


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with the settings of a walk through it.

    Attributes:
        model: The model, on the meta device if its weights are read block by block.
        weights: Loads the weights of each block.
        storage: Stores streams and what methods keep per batch.
        compute: Dtype of the computation; None for the model's own. Stored weights keep their dtype.
        memory: Bytes that the run may take on its device.
        note: Why the weights are where they are, for the user; may be empty.
        products: Dtype of the matrix products of passes through the blocks, as in `product_dtype_context`; None for `compute`.
    """

    model: PreTrainedModel
    weights: Weights
    storage: OffloadManager = field(default_factory=OffloadManager)
    compute: torch.dtype | None = None
    memory: float = math.inf
    note: str = ""
    products: torch.dtype | None = None

    @property
    def computed_in(self) -> torch.dtype:
        """Dtype of the matrix products of passes through the blocks."""
        return self.products or self.compute or self.model.dtype

    @classmethod
    def of(cls, model: PreTrainedModel | LoadedModel, compute: torch.dtype | None = None) -> LoadedModel:
        """Return a `LoadedModel` as it is, and a model in memory with the default settings, computing in `compute`."""
        return model if isinstance(model, LoadedModel) else cls(model, ResidentWeights(model), compute=compute)


class PartialOutput(Exception):
    """The model took a part of a block's output for the hidden states."""


EXTRA_OUTPUTS = (None, 0, 1, 2, 3)
"""Possible numbers of values after the hidden states in a block's output tuple; None for a block that returns a tensor."""


def run_with_replaced_blocks(
    blocks: Sequence[Block], answer: Callable[[Block, Tensor, Call], Tensor], run: Callable[[], Any]
) -> Any:
    """Run the model with replaced forward functions of its blocks, and return the model's output.

    Depending on the family, a block returns the hidden states or a tuple that starts with them. All forms in `EXTRA_OUTPUTS`
    are tried; the right one keeps the shape of the hidden states from block to block.

    Args:
        answer: Replaces the forward function; maps the block, the hidden states (batch, seq, model) and the other arguments to
            new hidden states.
    """

    def run_once(extra: int | None) -> Any:
        shapes: list[torch.Size] = []

        def forward_of(block: Block) -> Callable[..., Any]:
            def forward(hidden: Tensor, *arguments: Any, **keywords: Any) -> Any:
                shapes.append(hidden.shape)
                if hidden.shape != shapes[0]:
                    raise PartialOutput
                output = answer(block, hidden, Call(arguments, keywords))
                return output if extra is None else (output, *[None] * extra)

            return forward

        with ExitStack() as stack:
            for block in blocks:
                stack.enter_context(replace_forward(block.module, forward_of(block)))
            return run()

    first_error: Exception | None = None
    for extra in EXTRA_OUTPUTS:
        try:
            return run_once(extra)
        except SparseLLMError:
            raise
        except (PartialOutput, RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
            if devices.is_out_of_memory(error):
                raise
            if first_error is None or isinstance(first_error, PartialOutput):
                first_error = error
    assert first_error is not None
    raise first_error


def equal_calls(one: Any, other: Any) -> bool:
    """Whether two calls hold equal values, so that one copy serves both: masks are large and mostly equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.device == other.device and one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, Call) and isinstance(other, Call):
        return equal_calls(one.arguments, other.arguments) and equal_calls(one.keywords, other.keywords)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(equal_calls, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal_calls(one[key], other[key]) for key in one)
    return one is other or (isinstance(one, (int, float, str, bool)) and one == other)


def block_inputs(model: PreTrainedModel, blocks: Sequence[Block], batch: Tensor) -> list[tuple[Tensor, Call]]:
    """Return the hidden states and other arguments that each block is called with, with blocks that return their input.

    The hidden states of every block are therefore those of the first.

    Args:
        batch: Token ids, (batch, seq).

    Raises:
        UnsupportedModel: The model does not run on token ids alone, changes the hidden states between blocks, or does not call
            each block exactly once.
    """
    inputs: dict[int, tuple[Tensor, Call]] = {}
    class_name = type(model).__name__

    def record(block: Block, hidden: Tensor, call: Call) -> Tensor:
        if block.index in inputs:
            raise UnsupportedModel(f"A {class_name} runs {block.name} more than once for every text and cannot be pruned.")
        inputs[block.index] = hidden, call
        before = blocks[max(block.index - 1, 0)]
        if not equal_calls(inputs[before.index][0], hidden):
            message = f"The model changes the hidden states between {before.name} and {block.name}."
            raise UnsupportedModel(f"{message} Such models cannot be pruned block by block.")
        return hidden

    def run() -> Any:
        inputs.clear()  # the model runs once for each form of the blocks' outputs
        return model.base_model(input_ids=batch.to(input_device(model)), use_cache=False)

    with model_errors(model, "block by block on text alone"):
        run_with_replaced_blocks(blocks, record, run)
    missing = [block.name for block in blocks if block.index not in inputs]
    if missing:
        raise UnsupportedModel(f"A {class_name} does not run {missing[0]} on text, so the inputs of its layers are unknown.")
    return [inputs[block.index] for block in blocks]


def check_in_memory(model: nn.Module, *, hooks: bool = False) -> None:
    """Raise InvalidSetting for tensors without values, with which torch computes all the same.

    Args:
        hooks: Accept those that hooks of accelerate load when they are used.
    """
    for path, module in model.named_modules():
        for name, tensor in chain(module.named_parameters(path, recurse=False), module.named_buffers(path, recurse=False)):
            if tensor.is_meta and not (hooks and hasattr(module, "_hf_hook")):
                raise InvalidSetting(f"{name} is not in memory. Load the whole model, or pass its folder.")


def check_is_model(model: Any, expected: str = "A model of transformers is needed") -> None:
    """Raise InvalidSetting for what is no model of transformers, such as a pipeline or a module that wraps one."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return
    inner = next((x for x in ("model", "module", "_orig_mod") if isinstance(getattr(model, x, None), PreTrainedModel)), "")
    advice = f" Pass its attribute {inner}." if inner else ""
    advice = " Merge its adapters, and pass the result." if hasattr(model, "merge_and_unload") else advice
    raise InvalidSetting(f"{expected}, got {type(model).__name__}.{advice}")


@contextmanager
def model_errors(model: PreTrainedModel, how: str) -> Iterator[None]:
    """Turn errors of the model's own code within the context into UnsupportedModel, except out-of-memory errors.

    Args:
        how: Completes the message "A ... cannot be run ...".
    """
    try:
        yield
    except Exception as error:  # the model's code may fail in any way on unchecked values of its configuration
        if isinstance(error, SparseLLMError) or devices.is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UnsupportedModel(f"A {type(model).__name__} cannot be run {how} ({reason}).") from error


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device on which a model expects token ids: that of its input embedding."""
    return model.get_input_embeddings().weight.device  # type: ignore[no-any-return]


def stream_bytes(loaded: LoadedModel, batches: Sequence[Tensor]) -> int:
    """Return the bytes of a stream: the hidden states of this process's batches, in the dtype of the computation."""
    embedding = loaded.model.get_input_embeddings().weight
    width: int = loaded.model.config.get_text_config().hidden_size
    dtype = loaded.compute or embedding.dtype
    return sum(batch.numel() for batch in collectives.shard(batches)) * width * dtype.itemsize
