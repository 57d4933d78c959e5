"""Opens checkpoints: checks whether they can be pruned before the weights are read, and loads models and tokenizers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from sparsellm.checkpoints.block_loader import DiskWeights, locate_tensors
from sparsellm.checkpoints.configuration import (
    auto_model,
    check_doubles,
    check_index,
    check_kind,
    check_tensors,
    empty_model,
    read_config,
    read_configuration,
    silence_transformers,
)
from sparsellm.checkpoints.documents import (
    DocumentFiles,
    documents_of,
    folder_for_transformers,
    without_quantization,
)
from sparsellm.checkpoints.files import (
    Origin,
    card_terms,
    check_files,
    find_checkpoint,
    is_hub_name,
    short_name,
)
from sparsellm.checkpoints.headers import FLOATS, check_dtypes, found_weights, read_headers
from sparsellm.checkpoints.machine_cache import use_cache
from sparsellm.checkpoints.readers import TensorHeader, is_lossless, reader_of
from sparsellm.checkpoints.remarks import remark
from sparsellm.checkpoints.stamps import Stamps
from sparsellm.checkpoints.tensor_index import read_all
from sparsellm.checkpoints.tokenizers import load_tokenizer
from sparsellm.errors import BadCheckpoint, InvalidSetting, UnsupportedModel, checkpoint_errors, dtype_name, first_line
from sparsellm.models.loaded_model import check_in_memory, check_is_model
from sparsellm.runtime.devices import raise_unless_damaged
from sparsellm.solvers.linalg import all_finite
from sparsellm.texts.json_files import read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose configuration and file headers are checked, but whose weights are not read.

    Attributes:
        name: Its name as the user wrote it.
        packed: Whether it is packed. Its configuration and its skeleton are those of the dense model.
        quantization: How its weights are quantized, in a sentence; empty if they are not. They are dequantized when read.
        stamps: Its files as they were when it was opened.
    """

    name: str
    folder: Path
    config: PretrainedConfig
    stamps: Stamps
    trusted: bool = False
    packed: bool = False
    quantization: str = ""
    model: ClassVar[None] = None

    @property
    def length(self) -> int:
        """Maximum sequence length of the model, in tokens."""
        return context_length(self.config)

    def skeleton(self, dtype: str = "auto") -> PreTrainedModel:
        """Return the model on the meta device: names, shapes, and the dtypes of a model that is loaded in `dtype`."""
        with torch.device("meta"):
            model = empty_model(self.name, self.config, self.trusted, self.dtype(dtype))
        model.tie_weights()
        return model

    def origin(self) -> Origin:
        """Return the description of the model for the cards of models made from it."""
        return Origin(short_name(self.name), is_hub_name(self.name), card_terms(self.folder), auto_model(self.config).__name__)

    def documents(self, written: Collection[str]) -> DocumentFiles:
        """Return which files besides the weights go along to outputs, which have those named `written` in another form."""
        return documents_of(self.folder, weights=self.files(), trusted=self.trusted, written=written)

    def files(self) -> list[Path]:
        """Return the weight files. Raises BadCheckpoint if one is missing or truncated."""
        return check_files(self.name, self.folder)

    def dtype(self, name: str = "auto") -> torch.dtype:
        """Return the dtype to load in: that of the name; for "auto" that of the configuration, or else of the first tensor."""
        dtype = getattr(self.config, "dtype", None) if name == "auto" else getattr(torch, name)
        if dtype is None and (found := found_weights(self.folder)) and found.dtype:
            dtype = getattr(torch, found.dtype)
        if isinstance(dtype, torch.dtype):
            return dtype
        floats = [header.dtype for header in read_headers(self.files()[0]).values() if header.dtype in FLOATS]
        return getattr(torch, (floats or ["float32"])[0])  # type: ignore[no-any-return]

    def stream(
        self, dtype: str = "auto", device: torch.device | str = "cpu", prefetch: bool = False
    ) -> tuple[PreTrainedModel, DiskWeights]:
        """Return the model in evaluation mode with its parameters on the meta device, and the reader of its weights.

        Args:
            device: Device of the weights while they are in use, and of the buffers.
            prefetch: Whether to read the next block while one is in use.

        Raises:
            NotStreamable: The checkpoint must be loaded as a whole.
        """
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            model = empty_model(self.name, self.config, self.trusted, self.dtype(dtype))
        model.tie_weights()  # outside the context, which replaces every parameter
        locations = locate_tensors(self.files(), model)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        return model.eval(), DiskWeights(model, locations, device=device, prefetch=prefetch)

    def load(self, dtype: str = "auto", device: torch.device | str | None = "cpu", **keywords: Any) -> PreTrainedModel:
        """Load the model, in evaluation mode. The layers of a packed model are those of its reader.

        Args:
            dtype: A name as for `dtype`.
            device: Device of the model; None for the one that `keywords` name.
            **keywords: Further arguments of `from_pretrained`.

        Raises:
            BadCheckpoint: A weight is missing, not finite, or has the wrong shape, or a file cannot be read.
        """
        torch_dtype: Any = dtype if dtype == "auto" else getattr(torch, dtype)
        if self.packed and (reader := reader_of(self.name, read_json(self.folder / "config.json", BadCheckpoint))):
            reader.register()
        stays = device is not None and torch.device(device).type == "cpu"  # another device has its own memory
        reading = read_unmapped() if stays else nullcontext()
        try:
            with silence_transformers(), reading, folder_for_transformers(self.folder) as folder:
                auto = type(self.skeleton()) if self.quantization else auto_model(self.config)
                model, loaded = auto.from_pretrained(
                    None if self.quantization else folder,
                    **({"state_dict": read_all(self.files(), self.dtype(dtype))} if self.quantization else {}),
                    **({} if self.packed else {"config": self.config}),
                    dtype=torch_dtype,
                    output_loading_info=True,
                    local_files_only=True,
                    trust_remote_code=self.trusted,
                    **keywords,
                )
        except InvalidSetting:
            raise
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise_unless_damaged(error)
            raise BadCheckpoint(f"The weights of {self.name} cannot be loaded: {first_line(error)}.") from error
        missing = sorted(loaded["missing_keys"])
        if missing:
            raise BadCheckpoint(
                f"{self.name} lacks {len(missing)} weights that its configuration calls for, {missing[0]} among them. "
                "The download may be incomplete, or config.json belongs to another model."
            )
        _check_finite(self.name, model)
        return (model if device is None else model.to(device)).eval()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer, as `load_tokenizer`."""
        return load_tokenizer(self.name, self.folder, trusted=self.trusted)


@dataclass(frozen=True)
class InMemoryModel:
    """A model in memory with the interface of `Checkpoint`. It is pruned in place.

    Raises InvalidSetting unless all of its tensors are in memory, and UnsupportedModel unless its parameters are plain tensors
    of floating-point numbers: those of quantized models are not.
    """

    name: str
    model: PreTrainedModel
    own_tokenizer: PreTrainedTokenizerBase | None = None
    folder: ClassVar[None] = None
    quantization: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_in_memory(self.model)
        parameters = dict(self.model.named_parameters())
        check_dtypes(self.name, {key: TensorHeader(dtype_name(x.dtype), tuple(x.shape)) for key, x in parameters.items()})
        for key, tensor in parameters.items():
            kind = type(tensor.data).__name__ if tensor.layout is torch.strided else f"{tensor.layout} tensor"
            if kind != "Tensor":
                raise UnsupportedModel(f"{self.name} holds {key} as a {kind}. Load the plain checkpoint that it was made from.")

    @property
    def packed(self) -> bool:
        """Whether the model computes with packed weights."""
        return is_lossless(getattr(self.model, "quantization_method", None))

    @property
    def length(self) -> int:
        """Maximum sequence length of the model, in tokens."""
        return context_length(self.model.config)

    def skeleton(self, dtype: str = "auto") -> PreTrainedModel:
        """Return the model itself, in its own dtype; for a packed model the dense one, on the meta device."""
        if not self.packed:
            return self.model
        with torch.device("meta"):
            model = empty_model(self.name, self.model.config, trusted=True, dtype=self.dtype())
        model.tie_weights()
        return model

    def dtype(self, name: str = "auto") -> torch.dtype:
        """Return the model's dtype. Raises InvalidSetting for the name of another one."""
        own: torch.dtype = self.model.dtype
        if name not in ("auto", dtype_name(own)):
            raise InvalidSetting(
                f"`dtype` is {name}, but the model is in memory as {dtype_name(own)}: convert it with model.to."
            )
        return own

    def origin(self) -> Origin:
        """Return the description of the model for the cards of models made from it, by the name it was loaded from."""
        name = str(getattr(self.model.config, "_name_or_path", ""))
        hub = bool(name) and is_hub_name(name)
        return Origin(name if hub else Path(name).name, hub, loader=auto_model(self.model.config).__name__)

    def load(self, dtype: str = "auto", device: torch.device | str = "cpu") -> PreTrainedModel:
        """Return the model itself, on the device. Raises InvalidSetting for another dtype, as `dtype` does."""
        self.dtype(dtype)
        _check_finite(self.name, self.model)
        return self.model.to(device)

    def digest(self) -> str:
        """Return the number of parameters and the SHA-256 digest of configuration and tensors, every byte of which is read."""
        settings = {name: value for name, value in self.model.config.to_dict().items() if name != "_name_or_path"}
        settings["attention"] = getattr(self.model.config, "_attn_implementation", None)  # which decides the last bits
        found = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
        for name, tensor in chain(self.model.named_parameters(), self.model.named_buffers()):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return f"{self.model.num_parameters():,} parameters, SHA-256 {found.hexdigest()[:32]}"

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer. Raises InvalidSetting if there is none."""
        if self.own_tokenizer is None:
            raise InvalidSetting(
                "A text needs the tokenizer of the model in memory: pass it as `tokenizer`, or token ids in place of the text."
            )
        return self.own_tokenizer


def open_checkpoint(name: str, revision: str | None = None, trusted: bool = False, *, packed: bool = False) -> Checkpoint:
    """Open a checkpoint, and check its configuration and the headers of its weight files. The weights are not read.

    Args:
        revision: Branch, tag or commit of a hub name.
        trusted: Whether the checkpoint's own code may run.
        packed: Whether it may be packed. Its tensors are then decoded when they are read.

    Raises:
        BadCheckpoint: The folder is missing, incomplete or damaged, or the tensors are not what config.json says of them.
        Unreachable: The hub cannot be reached.
        UnsupportedModel: The model cannot be pruned.
    """
    folder = find_checkpoint(name, revision, trusted)
    fields = read_config(name, folder)
    reader = reader_of(name, fields)
    is_packed = reader is not None and reader.lossless
    if is_packed and not packed:
        raise UnsupportedModel(f"{name} is packed. Unpack it, and name the result: sparsellm unpack {name} FOLDER.")
    fields = without_quantization(fields)
    check_kind(name, fields, trusted)
    files = check_files(name, folder)
    if reader and not is_packed and any(file.suffix != ".safetensors" for file in files):
        raise UnsupportedModel(
            f"{name} is quantized, and its weights are not in safetensors files, the only ones that are dequantized. "
            "Get a copy in safetensors files."
        )
    stamps = Stamps.of(name, folder, files, documents_of(folder, weights=files, trusted=trusted))
    with checkpoint_errors(name):
        headers = {key: header for file in files for key, header in read_headers(file).items()}
        found = found_weights(folder)
    check_dtypes(name, headers, packed=is_packed)
    quantization = ""
    if found and not found.lossless:
        parameters = sum(header.numel for header in headers.values())
        quantization = found.describe(short_name(name), sum(file.stat().st_size for file in files), parameters)
    if quantization and not packed:
        remark(quantization, (folder.resolve(), "quantized"))
    config = read_configuration(name, folder, trusted=trusted, fields=fields, headers=headers)
    checkpoint = Checkpoint(name, folder, config, stamps, trusted, is_packed, quantization)
    skeleton = checkpoint.skeleton()
    if not check_tensors(name, skeleton, fields=fields, files=files, headers=headers):
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = False
        skeleton = checkpoint.skeleton()
    check_doubles(name, files)
    check_index(name, folder, skeleton, files=files, headers=headers)
    return checkpoint


def compute_dtype(model: nn.Module) -> torch.dtype | None:
    """Return float32 for 16-bit models on a CPU; otherwise None, to compute in the model's dtype."""
    first = next(model.parameters())
    return torch.float32 if first.device.type == "cpu" and first.dtype in (torch.bfloat16, torch.float16) else None


def _check_finite(name: str, model: nn.Module) -> None:
    """Raise BadCheckpoint if a weight is not finite."""
    for key, parameter in model.named_parameters():
        if not all_finite(parameter):
            raise BadCheckpoint(f"{name} holds NaN or infinity in {key}. Get a sound copy of the checkpoint.")


def context_length(config: PretrainedConfig) -> int:
    """Return the maximum sequence length of a configuration, in tokens; 2048 if it has none, or -1 for no limit."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else 2048


@contextmanager
def read_unmapped() -> Iterator[None]:
    """Have transformers read weights into memory within the context, as this package does, instead of mapping their files.

    A mapped file that another program writes to changes the loaded model, and one that is cut off ends the process.
    """
    from transformers import modeling_utils

    opened = modeling_utils.safe_open
    modeling_utils.safe_open = lambda *arguments, **keywords: opened(*arguments, **keywords | {"backend": "pread"})
    try:
        yield
    finally:
        modeling_utils.safe_open = opened


def named_model(
    model: str | Path | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[dict[str, str], InMemoryModel | None]:
    """The recipe's fields for a model, and the model with its tokenizer if it is in memory.

    Raises:
        InvalidSetting: The model is neither named nor a model of transformers, or not all of its weights are in memory.
        UnsupportedModel: As `InMemoryModel`.
    """
    if isinstance(model, (str, Path)):
        return {"model": str(model)}, None
    check_is_model(model, "A model is a folder, a hub name, or a model of transformers in memory")
    name = str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
    return {"model": name, "device": str(model.device)}, InMemoryModel(name, model, tokenizer)


def open_source(model: str | Path | PreTrainedModel, *, trusted: bool, packed: bool = False) -> Checkpoint | InMemoryModel:
    """Open a checkpoint, which may be packed if `packed`, or take a model in memory.

    Raises:
        SparseLLMError: As `named_model` and `open_checkpoint`.
    """
    use_cache()
    fields, source = named_model(model, None)
    return source or open_checkpoint(fields["model"], trusted=trusted, packed=packed)
