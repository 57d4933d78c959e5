"""Open a checkpoint: find it, refuse what cannot be pruned before anything heavy, load model and tokenizer."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparsellm.architectures import ARCHITECTURES, Architecture
from sparsellm.blocks import describe
from sparsellm.errors import BadCheckpoint, InvalidSetting, UnsupportedModel
from sparsellm.files import card_terms, check_files, find_checkpoint, first_line, is_hub_name, licence_files
from sparsellm.linalg import all_finite
from sparsellm.places import stored_dtype
from sparsellm.report import Origin
from sparsellm.weights import OnDisk, locate

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
        return _length(self.config)

    def skeleton(self) -> PreTrainedModel:
        """The model without memory for its weights: shapes and names only."""
        with quiet_transformers(), torch.device("meta"):
            return describe(auto_model(self.config).from_config(self.config, trust_remote_code=self.trusted), self.architecture)

    def origin(self) -> Origin:
        """The model as the card of what is made from it tells of it."""
        hub = is_hub_name(self.name)
        name = self.name if hub else Path(self.name).expanduser().absolute().name
        return Origin(name, hub, card_terms(self.folder), auto_model(self.config).__name__)

    def along(self) -> tuple[Path, ...]:
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
        told = getattr(self.config, "dtype", None) if wanted == "auto" else getattr(torch, wanted)
        return told if isinstance(told, torch.dtype) else stored_dtype(self.files()[0])

    def stream(
        self, dtype: str = "auto", device: torch.device | str = "cpu", ahead: bool = False
    ) -> tuple[PreTrainedModel, OnDisk]:
        """The model without its weights, in evaluation mode, and what reads them block by block.

        ahead: whether the next block is read while one is worked on.
        Raises NotStreamable, saying why, where they must be loaded as a whole.
        """
        from accelerate import init_empty_weights

        def empty(kind: torch.dtype) -> PreTrainedModel:
            with quiet_transformers(), init_empty_weights(include_buffers=False):
                config = copy.deepcopy(self.config)
                model = auto_model(config).from_config(config, dtype=kind, trust_remote_code=self.trusted)
            model.tie_weights()
            return describe(model, self.architecture)

        kind = self.dtype(dtype)
        model = empty(kind)
        places = locate(self.files(), model)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        return model.eval(), OnDisk(model, places, kind, device, ahead)

    def load(self, dtype: str = "auto", device: torch.device | str = "cpu") -> PreTrainedModel:
        """The model, in evaluation mode. Raises BadCheckpoint when a weight is missing, misshapen, or not finite."""
        wanted: Any = dtype if dtype == "auto" else getattr(torch, dtype)
        try:
            with quiet_transformers():
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
            with quiet_transformers():
                return AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=self.trusted)
        except Exception as error:  # transformers raises many kinds, ImportError among them
            raise BadCheckpoint(
                f"{self.name} has no tokenizer that loads ({first_line(error)}). "
                "Copy the model's tokenizer files into the folder."
            ) from error


@dataclass(frozen=True)
class Loaded:
    """A model that is already in memory, seen as a checkpoint is. It is pruned in place."""

    name: str
    model: PreTrainedModel
    given: PreTrainedTokenizerBase | None = None
    folder: None = None

    @property
    def length(self) -> int:
        """The most tokens that the model was made for."""
        return _length(self.model.config)

    def skeleton(self) -> PreTrainedModel:
        """The model itself."""
        return self.model

    def origin(self) -> Origin:
        """The model as the card of what is made from it tells of it: by the name that it was loaded by."""
        name = str(getattr(self.model.config, "_name_or_path", ""))
        hub = bool(name) and is_hub_name(name)
        return Origin(name if hub else Path(name).name, hub, loader=auto_model(self.model.config).__name__)

    def along(self) -> tuple[Path, ...]:
        """No files: there is no folder that they could be in."""
        return ()

    def load(self, dtype: str = "auto", device: torch.device | str = "cpu") -> PreTrainedModel:
        """The model itself, on the device; its dtype is its owner's matter."""
        if dtype != "auto":
            raise InvalidSetting(f"`dtype` is {dtype}, but the model is in memory already: convert it yourself, with model.to.")
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
    config = _read_config(name, folder, trusted)
    check_files(name, folder)
    return Checkpoint(name, folder, config, trusted, architecture)


def auto_model(config: PretrainedConfig) -> Any:
    """The class of transformers that makes a model with a head from a configuration: of text alone, one that sees or hears."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    if config.get_text_config() is config:
        return AutoModelForCausalLM
    hears = (
        type(config) in AutoModelForMultimodalLM._model_mapping
        and type(config) not in AutoModelForImageTextToText._model_mapping
    )
    return AutoModelForMultimodalLM if hears else AutoModelForImageTextToText


def device_of(text: str) -> torch.device:
    """The device that a text means; "auto" takes an NVIDIA or AMD GPU when there is one, else the CPU.

    Raises InvalidSetting for one that is not there.
    """
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
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


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within the context transformers prints no bars and no warnings: this package says itself what matters."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _check_finite(name: str, model: nn.Module) -> None:
    """Raise BadCheckpoint for NaN or infinity in the weights."""
    for key, parameter in model.named_parameters():
        if not all_finite(parameter):
            raise BadCheckpoint(f"{name} holds NaN or infinity in {key}. Get a sound copy of the checkpoint.")


def _length(config: PretrainedConfig) -> int:
    """The most tokens that a configuration names; 2048 where it names none."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or 2048)


def _read_config(name: str, folder: Path, trusted: bool) -> PretrainedConfig:
    """The configuration, of a kind that can be pruned."""
    from transformers import AutoConfig

    file = folder / "config.json"
    if not file.is_file():
        raise BadCheckpoint(f"{name} has no config.json. Name the folder of a checkpoint, as save_pretrained writes it.")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        family = raw["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        raise BadCheckpoint(f"{name}: config.json is not the configuration of a model (no `model_type`).") from None
    if any("quantization_config" in some for some in (raw, raw.get("text_config") or {})):
        raise UnsupportedModel(f"{name} is quantised. Prune the plain checkpoint that it was made from.")
    sees = isinstance(raw.get("text_config"), dict) or "vision_config" in raw
    heads = raw.get("architectures") or []
    wanted = ("ForCausalLM", "LMHeadModel", *(("ForConditionalGeneration",) if sees else ()))
    if raw.get("is_encoder_decoder") or (heads and not trusted and not any(head.endswith(wanted) for head in heads)):
        what = heads[0] if heads else family
        raise UnsupportedModel(f"{name} is a {what}, not a causal language model (one that ends in ForCausalLM).")
    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if "auto_map" in raw and not trusted:
            raise UnsupportedModel(
                f"{name} brings its own code, which is not run: transformers itself has no models of type {family!r}. "
                "If you trust it, pass --trust-remote-code."
            ) from None
        if family in ARCHITECTURES:
            raise BadCheckpoint(f"{name}: config.json cannot be read: {first_line(error)}.") from error
        raise UnsupportedModel(
            f"The installed transformers {version('transformers')} has no models of type {family!r}: {first_line(error)}."
        ) from None
