"""Open a checkpoint: find it, refuse what cannot be pruned before anything heavy, load model and tokenizer."""

from __future__ import annotations

import copy
import json
import logging
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparsellm import demo
from sparsellm.architectures import ARCHITECTURES, architecture_of
from sparsellm.errors import BadCheckpoint, InvalidSetting, Unreachable, UnsupportedModel
from sparsellm.weights import OnDisk, locate, stored_dtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEMO = "demo:"
"""What a bundled model's name begins with."""

SHARDS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Where transformers looks for weights, in its order."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found sound on the outside: its folder and its configuration. name: as the user wrote it."""

    name: str
    folder: Path
    config: PretrainedConfig

    @property
    def length(self) -> int:
        """The most tokens that the model was made for."""
        return _length(self.config)

    def skeleton(self) -> PreTrainedModel:
        """The model without memory for its weights: shapes and names only."""
        from transformers import AutoModelForCausalLM

        with quiet_transformers(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config)

    def files(self) -> list[Path]:
        """The files that hold the weights, each there and, for safetensors, as long as its header says."""
        return _check_files(self.name, self.folder)

    def size(self) -> int:
        """Bytes that the weights take in their files."""
        return sum(file.stat().st_size for file in self.files())

    def dtype(self, wanted: str = "auto") -> torch.dtype:
        """What the model will be in: as wanted, or by default as the configuration says or, where it does not, as stored."""
        told = getattr(self.config, "dtype", None) if wanted == "auto" else getattr(torch, wanted)
        return told if isinstance(told, torch.dtype) else stored_dtype(self.files()[0])

    def stream(self, dtype: str = "auto", device: torch.device | str = "cpu") -> tuple[PreTrainedModel, OnDisk]:
        """The model without its weights, in evaluation mode, and what reads them block by block.

        Raises NotStreamable, saying why, where they must be loaded as a whole.
        """
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM

        def empty(kind: torch.dtype) -> PreTrainedModel:
            with quiet_transformers(), init_empty_weights(include_buffers=False):
                model = AutoModelForCausalLM.from_config(copy.deepcopy(self.config), dtype=kind)
            model.tie_weights()
            return model

        places = locate(self.files(), empty(torch.float32))
        kind = self.dtype(dtype)
        model = empty(kind)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        return model.eval(), OnDisk(model, places, kind, device)

    def load(self, dtype: str = "auto", device: torch.device | str = "cpu") -> PreTrainedModel:
        """The model, in evaluation mode. Raises BadCheckpoint when a weight is missing, misshapen, or not finite."""
        from transformers import AutoModelForCausalLM

        wanted: Any = dtype if dtype == "auto" else getattr(torch, dtype)
        try:
            with quiet_transformers():
                model, loaded = AutoModelForCausalLM.from_pretrained(
                    self.folder, config=self.config, dtype=wanted, output_loading_info=True, local_files_only=True
                )
        except UnpicklingError as error:
            raise BadCheckpoint(
                f"{self.name}: a .bin file holds more than tensors, and code in a weight file is not run."
            ) from error
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise BadCheckpoint(f"The weights of {self.name} cannot be loaded: {_first_line(error)}.") from error
        missing = sorted(loaded["missing_keys"])
        if missing:
            raise BadCheckpoint(
                f"{self.name} lacks {len(missing)} weights that its configuration calls for, {missing[0]} among them. "
                "The download may be incomplete, or config.json belongs to another model."
            )
        _check_finite(self.name, model)
        return model.to(device).eval()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises BadCheckpoint when the folder has none that works."""
        from transformers import AutoTokenizer

        try:
            with quiet_transformers():
                return AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:  # transformers raises many kinds, ImportError among them
            raise BadCheckpoint(
                f"{self.name} has no tokenizer that loads ({_first_line(error)}). "
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


def open_checkpoint(name: str) -> Checkpoint:
    """The checkpoint of that name: a folder, a bundled model ("demo:opt"), or a hub name.

    Reads the configuration and the weight files' headers, not the weights. Raises BadCheckpoint for a folder that is missing
    or half-written, Unreachable for a hub name without network, UnsupportedModel for what cannot be pruned.
    """
    folder = _find(name)
    config = _read_config(name, folder)
    _check_files(name, folder)
    return Checkpoint(name, folder, config)


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
        raise InvalidSetting(f"`device` got {text!r}: {_first_line(error)}. Write auto, cpu, cuda, cuda:1 or mps.") from None
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
        if not bool(parameter.isfinite().all()):
            raise BadCheckpoint(f"{name} holds NaN or infinity in {key}. Get a sound copy of the checkpoint.")


def _length(config: PretrainedConfig) -> int:
    """The most tokens that a configuration names; 2048 where it names none."""
    return int(getattr(config, "max_position_embeddings", None) or 2048)


def _find(name: str) -> Path:
    """The folder that holds a checkpoint; downloaded when it is a hub name."""
    if name.startswith(DEMO):
        return demo.model_path(name.removeprefix(DEMO))
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise BadCheckpoint(f"{name} is a file. Name the folder that holds config.json and the weights.")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name:
        raise BadCheckpoint(
            f"There is no folder {name}. Name a folder with config.json, or a hub name such as facebook/opt-125m."
        )
    return _download(name)


def _download(name: str) -> Path:
    """The local copy of a hub checkpoint."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    advice = "Pass the path of a local folder, or download it where there is a network."
    try:
        patterns = ["*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja"]
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*.msgpack", "*.h5", "original/*"]))
    except (RepositoryNotFoundError, HFValidationError):
        raise BadCheckpoint(f"There is no folder {name}, and no such model on the hub (or it is private). {advice}") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise Unreachable(
            f"There is no folder {name}, and the hub cannot be reached ({_first_line(error)}). {advice}"
        ) from None


def _read_config(name: str, folder: Path) -> PretrainedConfig:
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
    if "quantization_config" in raw:
        raise UnsupportedModel(f"{name} is quantised. Prune the plain checkpoint that it was made from.")
    if "auto_map" in raw and family not in ARCHITECTURES:
        raise UnsupportedModel(f"{name} brings its own code, which is not run. Supported: {', '.join(ARCHITECTURES)}.")
    heads = raw.get("architectures") or []
    if heads and not any(head.endswith(("ForCausalLM", "LMHeadModel")) for head in heads):
        raise UnsupportedModel(f"{name} is a {heads[0]}, not a causal language model (one that ends in ForCausalLM).")
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        if family in ARCHITECTURES:
            raise BadCheckpoint(f"{name}: config.json cannot be read: {_first_line(error)}.") from error
        raise UnsupportedModel(f"Models of type {family!r} are not supported. Supported: {', '.join(ARCHITECTURES)}.") from None
    architecture_of(config)
    return config


def _check_files(name: str, folder: Path) -> list[Path]:
    """The weight files; raises BadCheckpoint unless each is there and, for safetensors, as long as its header says."""
    present = next((folder / shard for shard in SHARDS if (folder / shard).is_file()), None)
    if present is None:
        raise BadCheckpoint(
            f"{name} has no weights: no model.safetensors and no index of shards. The download may be incomplete."
        )
    files = [present]
    if present.suffix == ".json":
        try:
            named = sorted(set(json.loads(present.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError):
            raise BadCheckpoint(f"{name}: {present.name} is damaged. Download it again.") from None
        files = [folder / file for file in named]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise BadCheckpoint(f"{name} lacks {len(missing)} of {len(files)} weight files, {missing[0]} among them.")
    for file in files:
        if file.suffix == ".safetensors":
            _check_safetensors(name, file)
    return files


def _check_safetensors(name: str, file: Path) -> None:
    """Raise BadCheckpoint unless the file is as long as its header says."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (header_size,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, Any] = json.loads(stream.read(min(header_size, size)))
        end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
    except (OSError, ValueError, struct.error, AttributeError, KeyError, TypeError):
        raise BadCheckpoint(f"{name}: {file.name} is not a safetensors file, or is cut off. Download it again.") from None
    if 8 + header_size + end != size:
        raise BadCheckpoint(
            f"{name}: {file.name} has {size:,} bytes where its header calls for {8 + header_size + end:,}. Download it again."
        )


def _first_line(error: BaseException) -> str:
    """The first line of an error's text, without its last full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
