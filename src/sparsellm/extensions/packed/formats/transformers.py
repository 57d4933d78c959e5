"""Loads packed checkpoints through transformers, as quantized models of the method "sparsellm", and saves them.

Importing this file registers the method: transformers' own `from_pretrained` then loads packed checkpoints too.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import Chunk, WeightConverter, WeightTransform, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from sparsellm.checkpoints.files import checkpoint_name
from sparsellm.checkpoints.headers import read_headers
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.checkpoints.machine_cache import use_cache
from sparsellm.errors import BadCheckpoint, InvalidSetting, dtype_name
from sparsellm.extensions.packed.formats import kernels
from sparsellm.extensions.packed.formats.bitmask import DTYPES
from sparsellm.extensions.packed.formats.linear import DenseLinear, PackedLinear
from sparsellm.extensions.packed.formats.packed_experts import NUMBERS, decode_layers, number_layers
from sparsellm.extensions.packed.formats.packed_tensors import pack_again, packed_weights
from sparsellm.extensions.packed.formats.weight_converter import PATTERN, plan_conversion
from sparsellm.extensions.packed.packed_files import PACKED_METHOD, PACKED_VERSION, check_version, metadata_of, parts_of

logger = logging.get_logger(f"transformers.quantizers.{PACKED_METHOD}")


@register_quantization_config(PACKED_METHOD)
class SparseLLMConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The `quantization_config` of a packed checkpoint.

    Args:
        version: Version of the format.
        **fields: Its other fields.
    """

    def __init__(self, version: int = PACKED_VERSION, **fields: Any) -> None:
        self.__dict__.update(fields, quant_method=PACKED_METHOD, version=version)
        check_version("The checkpoint", {"quantization_config": vars(self)})


@register_quantizer(PACKED_METHOD)
class SparseLLMQuantizer(HfQuantizer):  # type: ignore[misc]
    """Builds a model with packed layers, and writes its packed form.

    transformers calls the methods in this order: `validate_environment`, `update_dtype`, `_process_model_before_weight_loading`
    (the model is on the meta device), `update_weight_conversions`, `param_needs_quantization` for each tensor, and
    `_process_model_after_weight_loading`.
    """

    requires_calibration = True  # a dense checkpoint cannot be loaded with it
    is_trainable = False
    is_compileable = True
    note = ""
    """A note for the user on what does not run packed."""

    def is_serializable(self) -> bool:
        """Return whether `save_pretrained` writes the model."""
        return True

    def validate_environment(self, *arguments: Any, device_map: Any = None, **keywords: Any) -> None:
        """Raise InvalidSetting for weights that would be offloaded to the disk."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise InvalidSetting("`device_map` puts weights on the disk, and packed ones must be in memory.")

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to load in; raise InvalidSetting for one in which packed weights are not multiplied."""
        if dtype not in DTYPES:
            raise InvalidSetting(f"`dtype` got {dtype_name(dtype)}; packed models run in float32, bfloat16 or float16.")
        return dtype

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **keywords: Any
    ) -> None:
        """Keep the model until transformers tells how it names the tensors."""
        use_cache()  # of what the kernels measure
        self._model, self._files = model, [Path(file) for file in checkpoint_files or ()]

    def update_weight_conversions(self, weight_conversions: list[WeightTransform], model: Any = None) -> list[WeightTransform]:
        """Put packed layers into the model, and the converter that loads them in front of transformers' own."""
        model, self._model = self._model, None
        self.packed = {name: weight for file in self._files for name, weight in packed_weights(file).items()}
        if not self.packed:
            raise BadCheckpoint("config.json says that the model is packed, and its weight files list no packed tensors.")
        dense = {key for file in self._files for key in read_headers(file)} - self.packed.keys()
        converter = plan_conversion(model, weight_conversions, packed=self.packed, dense=dense)
        self._scales = converter.scales
        if decoded := converter.decoded():
            others = f" and {len(decoded) - 1} others" if decoded[1:] else ""
            self.note = f"{decoded[0]}{others} take dense memory: only linear layers run packed."
            logger.warning(self.note)
        return [converter, *weight_conversions]

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **keywords: Any) -> bool:
        """Return whether the loaded tensor may have another shape than the tensor on the meta device: kept values."""
        path, _, name = param_name.rpartition(".")
        return name == "values" and isinstance(model.get_submodule(path), PackedLinear)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **keywords: Any) -> PreTrainedModel:
        """Check packed layers, let dense ones use the kernels, and keep what transformers did with the stored tensors.

        Saving reverts it.
        """
        for module in model.modules():
            if isinstance(module, PackedLinear):
                module.check()
            if type(module) is nn.Linear and kernels.instruction_sets():
                module.__class__ = DenseLinear
        self._conversions, model._weight_conversions = model._weight_conversions, []
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors of the packed checkpoint by stored name, and the metadata of its files.

        The parts of a packed tensor are joined, so that transformers writes them to one file. It asks `PartsSplitter` to
        divide them again.
        """
        state = remove_tied_weights_from_state_dict(model.state_dict(), model)
        experts = number_layers(model, state)
        modules = {path: module for path, module in model.named_modules() if isinstance(module, PackedLinear)}
        layers = {id(state[f"{path}.weight"]): module for path, module in modules.items() if f"{path}.weight" in state}
        model._weight_conversions = self._conversions
        stored = revert_weight_conversion(model, state)
        numbered = {key: experts[int(x)] for key, x in stored.items() if x.dtype is NUMBERS}
        decoded = {key for key, tensor in self.packed.items() if tensor.is_sparse} | numbered.keys()
        entries, lengths = {}, {}
        for key in [key for key, tensor in sorted(stored.items()) if id(tensor) in layers or key in decoded]:
            layer = layers.get(id(stored[key]))
            if key in numbered:
                layer, named = numbered[key]
                parts, entries[key] = {key + part.removeprefix("weight"): x for part, x in named.items()}, layer.packed_entry()
            elif layer is None:
                parts, entries[key] = pack_again(key, stored[key], self.packed[key].entry, self._scales.get(key))
            else:
                parts = {name: stored.pop(name) for name in parts_of(key, stored).values()}
                entries[key] = layer.packed_entry()
            lengths[key] = {name: len(part) for name, part in parts.items()}
            stored[key] = torch.cat(list(parts.values()))
        model._weight_conversions = [PartsSplitter(lengths)]
        return stored, metadata_of(entries)

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        """Replace packed layers by dense ones."""
        # A name comes from the configuration, once save_pretrained has written it.
        found: torch.dtype | None = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        decode_layers(model, found)
        model._weight_conversions = self._conversions
        return model


def register() -> None:
    """Let transformers load packed checkpoints too."""  # by the import of this file


def load(
    model: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: str | torch.dtype = "auto",
    **keywords: Any,
) -> PreTrainedModel:
    """Load a packed checkpoint as a model that computes with its packed weights.

    `from_pretrained` of transformers does the same after `register`, with fewer checks and longer error messages.

    Args:
        model: A folder that `sparsellm pack` wrote, or a hub name.
        revision: Branch, tag or commit of a hub name.
        trust_remote_code: Whether the checkpoint's own code may run.
        dtype: float32, bfloat16 or float16; that of the checkpoint by default.
        **keywords: Further arguments of `from_pretrained`, such as `device_map`.

    Returns:
        The model, in evaluation mode.

    Raises:
        BadCheckpoint: The folder is missing, damaged, or not packed.
        UnsupportedModel: It is packed in another version of the format, or transformers does not have the model.
    """
    checkpoint = open_checkpoint(checkpoint_name(model), revision, trust_remote_code, packed=True)
    if not checkpoint.packed:
        raise BadCheckpoint(f"{model} is not packed. Pack it, and name the result: sparsellm pack {model} FOLDER.")
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    loaded = checkpoint.load(name, device=None, **keywords)  # which silences transformers
    if loaded.hf_quantizer.note:
        warnings.warn(loaded.hf_quantizer.note, stacklevel=2)
    return loaded


class PartsSplitter(WeightConverter):  # type: ignore[misc]
    """A converter that divides the joined parts of packed tensors when transformers saves a model.

    The parts share memory, and transformers writes tensors that do to one file.

    Args:
        lengths: The sizes of the parts of each tensor, by their names.
    """

    __slots__ = ("joined", "lengths")

    def __init__(self, lengths: Mapping[str, Mapping[str, int]]) -> None:
        super().__init__(PATTERN, PATTERN, [Chunk()])
        self.lengths = lengths
        self.joined = torch.empty(0)

    def __deepcopy__(self, memo: dict[int, Any]) -> PartsSplitter:
        """Return a converter without a tensor. transformers makes one for every packed tensor."""
        return PartsSplitter(self.lengths)

    def reverse_transform(self) -> PartsSplitter:
        """Return itself: transformers reverses the converters of loading."""
        return self

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the name, and the pattern of this converter if it is the name of joined parts."""
        return source_key, PATTERN if source_key in self.lengths else None

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        """Take the joined parts."""
        self.joined = future

    def convert(self, layer_name: str, **keywords: Any) -> dict[str, Tensor]:
        """Return the parts by name."""
        lengths = self.lengths[layer_name]
        return dict(zip(lengths, self.joined.split(list(lengths.values())), strict=True))
