"""Open a checkpoint: find it, refuse what cannot be pruned before anything heavy, load model and tokenizer."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparsellm.checkpoints.block_loader import DiskWeights, locate_tensors
from sparsellm.checkpoints.configuration import (
    check_dtypes,
    check_tensors,
    empty_model,
    read_configuration,
    read_fields,
    silence_transformers,
)
from sparsellm.checkpoints.files import (
    DEMO,
    Origin,
    card_terms,
    check_files,
    check_within,
    find_checkpoint,
    first_line,
    is_hub_name,
    licence_files,
)
from sparsellm.checkpoints.headers import TensorHeader, dtype_name, read_all_headers
from sparsellm.checkpoints.model_classes import auto_model
from sparsellm.checkpoints.tensor_index import stored_dtype
from sparsellm.errors import BadCheckpoint, InvalidSetting
from sparsellm.models.architectures import Architecture
from sparsellm.models.blocks import describe
from sparsellm.runtime import devices
from sparsellm.solvers.linalg import all_finite

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found sound on the outside: its folder and its configuration. name: as the user wrote it.

    trusted: whether code that it brings is run. architecture: what the user says of its form, if anything.
    """

    name: str
    folder: Path
    config: PretrainedConfig
    trusted: bool = False
    architecture: Architecture | None = None

    @property
    def length(self) -> int:
        """The most tokens that the model was made for."""
        return context_length(self.config)

    def skeleton(self) -> PreTrainedModel:
        """The model without memory for its weights: shapes and names only."""
        with torch.device("meta"):
            model = empty_model(self.name, self.config, self.trusted)
        model.tie_weights()
        return describe(model, self.architecture)

    def origin(self) -> Origin:
        """The model as the card of what is made from it tells of it."""
        hub = is_hub_name(self.name)
        name = self.name if hub else Path(self.name).expanduser().absolute().name
        return Origin(name, hub, card_terms(self.folder), auto_model(self.config).__name__)

    def extra_files(self) -> tuple[Path, ...]:
        """Files that what is made from the model needs too: its licence, and its code if that is run."""
        return (*licence_files(self.folder), *(sorted(self.folder.glob("*.py")) if self.trusted else ()))

    def files(self) -> list[Path]:
        """The files that hold the weights, each there and, for safetensors, as long as its header says."""
        return check_files(self.name, self.folder)

    def size(self) -> int:
        """Bytes that the weights take in their files."""
        return sum(file.stat().st_size for file in self.files())

    def dtype(self, wanted: str = "auto") -> torch.dtype:
        """What the model will be in: as wanted, or by default as the configuration says or, where it does not, as stored."""
        message = getattr(self.config, "dtype", None) if wanted == "auto" else getattr(torch, wanted)
        return message if isinstance(message, torch.dtype) else stored_dtype(self.files()[0])

    def stream(
        self, dtype: str = "auto", device: torch.device | str = "cpu", ahead: bool = False
    ) -> tuple[PreTrainedModel, DiskWeights]:
        """The model without its weights, in evaluation mode, and what reads them block by block.

        ahead: whether the next block is read while one is worked on.
        Raises NotStreamable, saying why, where they must be loaded as a whole.
        """
        from accelerate import init_empty_weights

        def empty(kind: torch.dtype) -> PreTrainedModel:
            with init_empty_weights(include_buffers=False):
                model = empty_model(self.name, copy.deepcopy(self.config), self.trusted, dtype=kind)
            model.tie_weights()  # not within the context, which makes each parameter anew
            return describe(model, self.architecture)

        kind = self.dtype(dtype)
        model = empty(kind)
        places = locate_tensors(self.files(), model)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        return model.eval(), DiskWeights(model, places, kind, device, ahead)

    def load(self, dtype: str = "auto", device: torch.device | str = "cpu") -> PreTrainedModel:
        """The model, in evaluation mode. Raises BadCheckpoint when a weight is missing, misshapen, or not finite."""
        wanted: Any = dtype if dtype == "auto" else getattr(torch, dtype)
        try:
            with silence_transformers():
                model, loaded = auto_model(self.config).from_pretrained(
                    self.folder,
                    config=self.config,
                    dtype=wanted,
                    output_loading_info=True,
                    local_files_only=True,
                    trust_remote_code=self.trusted,
                )
        except UnpicklingError as error:
            raise BadCheckpoint(
                f"{self.name}: a .bin file holds more than tensors, and code in a weight file is not run."
            ) from error
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise BadCheckpoint(f"The weights of {self.name} cannot be loaded: {first_line(error)}.") from error
        missing = sorted(loaded["missing_keys"])
        if missing:
            raise BadCheckpoint(
                f"{self.name} lacks {len(missing)} weights that its configuration calls for, {missing[0]} among them. "
                "The download may be incomplete, or config.json belongs to another model."
            )
        _check_finite(self.name, model)
        return describe(model.to(device).eval(), self.architecture)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises BadCheckpoint when the folder has none that works."""
        from transformers import AutoTokenizer

        try:
            with silence_transformers():
                return AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=self.trusted)
        except Exception as error:  # transformers raises many kinds, ImportError among them
            raise BadCheckpoint(
                f"{self.name} has no tokenizer that loads ({first_line(error)}). "
                "Copy the model's tokenizer files into the folder."
            ) from error


@dataclass(frozen=True)
class InMemoryModel:
    """A model that is already in memory, seen as a checkpoint is. It is pruned in place."""

    name: str
    model: PreTrainedModel
    given: PreTrainedTokenizerBase | None = None
    folder: None = None

    @property
    def length(self) -> int:
        """The most tokens that the model was made for."""
        return context_length(self.model.config)

    def skeleton(self) -> PreTrainedModel:
        """The model itself."""
        return self.model

    def origin(self) -> Origin:
        """The model as the card of what is made from it tells of it: by the name that it was loaded by."""
        name = str(getattr(self.model.config, "_name_or_path", ""))
        hub = bool(name) and is_hub_name(name)
        return Origin(name if hub else Path(name).name, hub, loader=auto_model(self.model.config).__name__)

    def extra_files(self) -> tuple[Path, ...]:
        """No files: there is no folder that they could be in."""
        return ()

    def load(self, dtype: str = "auto", device: torch.device | str = "cpu") -> PreTrainedModel:
        """The model itself, on the device; its dtype is its owner's matter."""
        if dtype != "auto":
            raise InvalidSetting(f"`dtype` is {dtype}, but the model is in memory already: convert it yourself, with model.to.")
        stored = self.model.named_parameters()
        check_dtypes(self.name, {key: TensorHeader(dtype_name(tensor.dtype), tuple(tensor.shape)) for key, tensor in stored})
        _check_finite(self.name, self.model)
        return self.model.to(device)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that came with it; raises InvalidSetting when none did."""
        if self.given is None:
            raise InvalidSetting("A model in memory and a text need a tokenizer: pass tokenizer=..., or token numbers.")
        return self.given


def open_checkpoint(
    name: str, revision: str | None = None, trusted: bool = False, architecture: Architecture | None = None
) -> Checkpoint:
    """The checkpoint of that name: a folder, a bundled model ("demo:opt"), or a hub name.

    revision: of a hub name; a branch, tag or commit. trusted: whether code that it brings may be run. architecture: its form,
    where the table lacks it or says otherwise.
    Reads the configuration and the weight files' headers, not the weights. Raises BadCheckpoint for a folder that is missing
    or half-written, Unreachable for a hub name without network, UnsupportedModel for what cannot be pruned.
    """
    folder = find_checkpoint(name, revision, trusted)
    if not name.startswith(DEMO):  # an installer may link a package's own files
        check_within(name, folder)
    fields = read_fields(name, folder, trusted)
    files = check_files(name, folder)
    try:
        entries = read_all_headers(files)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{name}: {error}") from None
    check_dtypes(name, entries)
    config = read_configuration(name, folder, trusted, fields, entries)
    found = Checkpoint(name, folder, config, trusted, architecture)
    check_tensors(name, found.skeleton(), files, entries)
    return found


def resolve_device(text: str) -> torch.device:
    """The device that a text means; "auto" takes an NVIDIA or AMD GPU when there is one, else the CPU.

    Raises InvalidSetting for one that is not there.
    """
    if text == "auto":
        return devices.accelerator() or torch.device("cpu")
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidSetting(f"`device` got {text!r}: {first_line(error)}. Write auto, cpu, cuda, cuda:1 or mps.") from None
    return device


def compute_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype to compute in, where it should not be the model's own: float32 for 16-bit models on a processor."""
    first = next(model.parameters())
    return torch.float32 if first.device.type == "cpu" and first.dtype in (torch.bfloat16, torch.float16) else None


def _check_finite(name: str, model: nn.Module) -> None:
    """Raise BadCheckpoint for NaN or infinity in the weights."""
    for key, parameter in model.named_parameters():
        if not all_finite(parameter):
            raise BadCheckpoint(f"{name} holds NaN or infinity in {key}. Get a sound copy of the checkpoint.")


def context_length(config: PretrainedConfig) -> int:
    """The most tokens that a configuration names; 2048 where it names none, or -1 for no limit."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else 2048
