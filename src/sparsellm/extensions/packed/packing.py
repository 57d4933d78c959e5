"""Packs pruned models, and turns packed models back: file by file, tensor by tensor, without loss of a bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from sparsellm.checkpoints.comparison import StoredTensors, layers_by_parameter
from sparsellm.checkpoints.documents import read_config_text, with_member, without_member, write_config
from sparsellm.checkpoints.headers import read_headers
from sparsellm.checkpoints.loading import open_checkpoint, open_source
from sparsellm.checkpoints.tensor_index import TensorDigest, TensorLocation, locations_of, read_stored
from sparsellm.errors import InvalidSetting, UnsupportedModel, VerificationFailed
from sparsellm.extensions.integers.formats import BITS_OF, IntegerFormat
from sparsellm.extensions.integers.quantization import Quantized, Scales, round_to_nearest
from sparsellm.extensions.integers.scales_file import (
    check_unrounded,
    exact_integers,
    read_scales,
    stamp,
    stored_scales,
    write_scales,
)
from sparsellm.extensions.packed.card import dense_card, packed_card
from sparsellm.extensions.packed.conversion import (
    Observe,
    Source,
    converted,
    copy_files,
    finish,
    matrix_sizes,
    read_checked,
    report_of,
)
from sparsellm.extensions.packed.formats.packed_tensors import encode_tensor, pack_quantized
from sparsellm.extensions.packed.packed_files import (
    PACKED_METHOD,
    PACKED_VERSION,
    FileWriter,
    PackedEntry,
    can_hold,
    is_packed,
    metadata_of,
)
from sparsellm.extensions.packed.record import Packed, Unpacked
from sparsellm.outputs.folder import CARD, is_finished
from sparsellm.outputs.saving import check_output, claimed
from sparsellm.outputs.sizes import SPARSE, estimated_bytes
from sparsellm.outputs.verification import read_output, shape_difference
from sparsellm.recipes.recipe import Recipe, RunRecipe
from sparsellm.texts.paths import local_path

PACKABLE = ("float32", "float16", "bfloat16")
"""Dtypes that are packed."""

PAYS = 0.3
"""Fraction of zeros from which a model is packed. With fewer, a compressor of files does nearly as well."""


@dataclass(frozen=True)
class _Form:
    """How the tensors of a model are packed."""

    archive: bool
    allow_dense: bool
    positive_zeros: bool
    values: Mapping[str, Values]
    digests: Mapping[str, TensorDigest]
    vocabulary: int | None

    def encode(self, name: str, tensor: Tensor) -> tuple[dict[str, Tensor], PackedEntry | None]:
        """Return the tensors that are stored for a tensor, and its entry; None if it is stored as it is."""
        digest = self.digests[name]
        if self.positive_zeros and digest.negative_zeros:
            tensor = tensor + 0.0
        parts, entry = self._parts(name, tensor, digest) if digest.dtype in PACKABLE and tensor.dim() > 1 else ({}, None)
        size = sum(part.nbytes for part in parts.values())
        fits = entry is not None and size < tensor.nbytes and can_hold(size, entry.matrix)
        if not fits or any(part in self.digests for part in parts if part != name):
            return {name: tensor}, None
        return parts, entry

    def _parts(self, name: str, tensor: Tensor, digest: TensorDigest) -> tuple[dict[str, Tensor], PackedEntry | None]:
        """Return the parts and the entry of a matrix; none if it is not packed."""
        if name in self.values and tensor.numel():
            values = self.values[name]
            entry = PackedEntry(tuple(tensor.shape), digest.dtype, "", transposed=values.transposed)
            weight = entry.matrix_of(tensor)
            quantized = exact_integers(name, weight, values) if isinstance(values, Scales) else values.quantized(weight)
            return pack_quantized(name, quantized, entry, self.archive)
        enough = _removed(digest, self.positive_zeros) >= SPARSE * digest.numel
        enough |= self.allow_dense and tensor.shape[0] != self.vocabulary
        if tensor.numel() and (self.archive or enough):
            return encode_tensor(name, tensor, self.archive), PackedEntry.of(tensor)
        return {}, None

    def size(self, file: Path) -> int:
        """About how many bytes are written for a file; 0 for an archive, of which that is not known."""
        return 0 if self.archive else sum(map(self._size, read_headers(file)))

    def _size(self, name: str) -> int:
        """About how many bytes are written for a tensor."""
        digest = self.digests[name]
        if digest.dtype not in PACKABLE or len(digest.shape) < 2:
            return digest.nbytes
        if name in self.values:
            density, columns = 1 - digest.zeros / max(digest.numel, 1), digest.shape[-1 - self.values[name].transposed]
            bits = format_of(self.values[name], density).bits_per_weight(density, columns) if columns else 0
            return min(digest.nbytes, math.ceil(digest.numel * bits / 8))
        return estimated_bytes(digest.numel, _removed(digest, self.positive_zeros), digest.dtype)

    def convert(self, file: Path, writer: FileWriter) -> None:
        """Write the tensors of a file, packed or as they are."""
        entries: dict[str, PackedEntry] = {}
        for name in read_headers(file):
            parts, entry = self.encode(name, read_stored(TensorLocation(file, name)))
            entries |= {} if entry is None else {name: entry}
            for part, encoded in parts.items():
                writer.add(part, encoded)
        writer.metadata |= metadata_of(entries)

    def changed(self) -> set[str]:
        """Return the names of the tensors that may differ from the model's once they are packed."""
        rounded = {name for name, values in self.values.items() if isinstance(values, NearestIntegers)}
        zeros = {name for name in self.digests if self.positive_zeros or name in self.values}
        return rounded | {name for name in zeros if self.digests[name].negative_zeros}


def pack(
    model: str | Path,
    packed: str | Path,
    *,
    values: str | None = None,
    group_size: int | None = None,
    embeddings: str | None = None,
    archive: bool = False,
    overwrite: bool = False,
    allow_dense: bool = False,
    positive_zeros: bool = False,
    observe: Observe = lambda text: None,
) -> Packed:
    """Write a pruned model in packed form. `unpack` gives every tensor back bit by bit.

    Needs memory for a few times the largest tensor, and disk space for the result. The result is read back and compared with
    the model. If packing is interrupted, the same call continues it.

    Args:
        model: Folder of the pruned model, hub name, or "demo:opt".
        packed: Folder to write.
        values: Round the layers of the blocks to "int8", "int4" or "int3" with scales, dense layers too. By default nothing is
            rounded: the weights of a model that `prune` quantized are stored as their integers.
        group_size: Columns that share a scale, a multiple of 64, or 0 for whole rows. By default whole rows for int8, otherwise
            about 128 kept weights.
        embeddings: Round the embeddings of tokens and the output head to "int8", "int4" or "int3" with scales. A loaded model
            holds the embeddings, and a head that is tied to them, in their own dtype.
        archive: Compress further, for storage: loading takes longer, and dense matrices are packed too.
        overwrite: Replace an existing folder that sparsellm wrote.
        allow_dense: Pack a model with few zeros, and matrices with few zeros.
        positive_zeros: Store negative zeros, which other software may leave where it removes a weight, as 0.0. Otherwise
            negative zero is stored like any non-zero value.
        observe: Receives what is being done.

    Returns:
        The sizes, in all and by matrix.

    Raises:
        InvalidSetting: The model holds few zeros, is packed or quantized, or `values`, `group_size` or `embeddings` are
            impossible.
        OutputExists: The folder exists.
        BadCheckpoint: The model is missing, incomplete or damaged, or holds NaN or infinity.
        UnsupportedModel: `values` or `embeddings` is set, and the model's layers are unknown.
        VerificationFailed: The model is not what the run that pruned it wrote, or the result differs from the model.
        TooLarge: The disk has too little room.
    """
    source = Source.open(model)
    if is_packed(source.fields):
        raise InvalidSetting(
            f"{model} is packed already. To change its form, unpack it first: sparsellm unpack {model} FOLDER."
        )
    source.check_plain("Pack")
    with claimed(packed, overwrite, source.folder) as path:
        quantized = values_of(source, values, group_size)
        outside = embedding_values(source, embeddings)
        observe(f"reading {model}")
        digests, report = read_checked(source)
        if not allow_dense and not quantized:
            _check_zeros(source, digests, positive_zeros)
        packing = _Form(archive, allow_dense, positive_zeros, outside | quantized, digests, source.vocabulary)
        form = "archive" if archive else "plain"
        settings = {"form": form, "allow_dense": allow_dense, "positive_zeros": positive_zeros}
        settings |= {"values": values, "group_size": group_size, "embeddings": embeddings, "scales": stamp(source.folder)}
        convert = partial(converted, source, path, packing.convert, size=packing.size)
        with convert(settings=settings, verb="packing", observe=observe) as work:
            quantization = {"quant_method": PACKED_METHOD, "version": PACKED_VERSION, "form": form}
            write_config(work, with_member(read_config_text(source.folder), "quantization_config", quantization))
            written = [work / target for target in source.targets()]
            sizes = matrix_sizes(written, digests, positive_zeros=positive_zeros)
            before, after = (sum(file.stat().st_size for file in files) for files in (source.files, written))
            skipped = tuple(copy_files(source, work).noted)
            result = Packed(form, before, after, sizes, skipped, rounded=bool(values or embeddings), output=str(packed))
            if (card := source.folder / CARD).is_file():
                text = packed_card(card.read_text(encoding="utf-8"), result, pruned=bool(report.get("blocks")))
                (work / CARD).write_text(text, encoding="utf-8")
            expected = {name: digests[name].to_dict() for name in digests.keys() - packing.changed()}
            difference = "differs from the model's after writing. Check memory and disk."
            finish(work, report | {"packing": result.to_dict()}, expected, difference=difference)
        return result


def unpack(packed: str | Path, model: str | Path, *, overwrite: bool = False, observe: Observe = lambda text: None) -> Unpacked:
    """Write a packed model as an ordinary one, with the same tensors bit by bit as before it was packed.

    Those that were rounded to integers as they were packed come back as the rounded ones.

    Args:
        packed: Folder that `pack` wrote, or hub name.
        model: Folder to write.
        overwrite: Replace an existing folder that sparsellm wrote.
        observe: Receives what is being done.

    Returns:
        The sizes.

    Raises:
        InvalidSetting: The folder is not packed.
        UnsupportedModel: It is packed in a later version of the format.
        OutputExists: The folder to write exists.
        BadCheckpoint: A file is missing or damaged, or a tensor has another checksum than when it was packed.
        VerificationFailed: The result differs from the report in the packed folder.
        TooLarge: The disk has too little room.
    """
    source = Source.open(packed)
    if not is_packed(source.fields):
        raise InvalidSetting(
            f"{packed} is not packed: its config.json has no `quantization_config` of sparsellm. Use it as it is."
        )
    report = report_of(source, None)
    recorded = report.get("digests", {}).get("tensors")
    difference = f"is not as it was when it was packed: {packed} is damaged or was changed. Get a sound copy."
    if not recorded:
        _check_configured(source)

    def convert(file: Path, writer: FileWriter) -> None:
        """Write the tensors of a file, decoded."""
        for name, header in read_headers(file).items():
            if wrong := shape_difference(name, header.shape, recorded or {}):
                raise VerificationFailed(f"{name} {difference}", (wrong,))
            writer.add(name, read_stored(TensorLocation(file, name)))

    def size(file: Path) -> int:
        """The bytes of the tensors of a file, decoded."""
        return sum(header.nbytes for header in read_headers(file).values())

    settings = {"form": "dense"}
    with (
        claimed(model, overwrite, source.folder) as path,
        converted(source, path, convert, size=size, settings=settings, verb="unpacking", observe=observe) as work,
    ):
        copy_files(source, work)
        if scales := stored_scales(source.files):
            write_scales(work, scales)
        write_config(work, without_member(read_config_text(source.folder), "quantization_config"))
        if (source.folder / CARD).is_file():
            (work / CARD).write_text(dense_card((source.folder / CARD).read_text(encoding="utf-8")), encoding="utf-8")
        finish(work, {key: value for key, value in report.items() if key != "packing"}, recorded, difference=difference)
    weights = [sum(file.stat().st_size for file in files) for files in (source.files, [path / x for x in source.targets()])]
    return Unpacked(str(model), *weights)


def packed_outputs(outputs: Mapping[Path, RunRecipe], *, resume: bool, overwrite: bool) -> dict[Path, Path]:
    """Return the folder OUT-packed that each output OUT of runs is to be packed into, without those that are finished.

    Args:
        outputs: The recipe of each output.
        resume: Whether finished ones may exist.
        overwrite: Whether they are replaced.

    Raises:
        InvalidSetting: A recipe removes too little, or a folder cannot be written.
        OutputExists: A folder exists.
    """
    targets = {}
    for output, recipe in outputs.items():
        if isinstance(recipe, Recipe) and recipe.sparsity is not None and recipe.pattern.sparsity < PAYS:
            limit = f"packing is for {100 * PAYS:.0f} % and more"
            raise InvalidSetting(f"`sparsity` {recipe.sparsity} is too little to pack: {limit}. Leave out `pack`.")
        target = output.with_name(f"{output.name}-packed")
        finished = resume and is_finished(target) and is_finished(output)
        if not (finished and read_output(local_path(target)).repeats(read_output(local_path(output)))):
            check_output(target, overwrite, output)
            targets[output] = target
    return targets


def _check_configured(source: Source) -> None:
    """Raise BadCheckpoint for tensors of other shapes than config.json calls for, if transformers has the model."""
    with suppress(UnsupportedModel):
        open_checkpoint(source.name, packed=True)


def _removed(digest: TensorDigest, positive_zeros: bool) -> int:
    """Return the number of a tensor's zeros that are not stored."""
    return digest.zeros - (0 if positive_zeros else digest.negative_zeros)


def _check_zeros(source: Source, digests: Mapping[str, TensorDigest], positive_zeros: bool) -> None:
    """Raise InvalidSetting for a model with few zeros in its matrices, embeddings and the head aside."""
    matrices = [x for x in digests.values() if x.dtype in PACKABLE and len(x.shape) > 1 and x.shape[0] != source.vocabulary]
    zeros, count = sum(_removed(x, positive_zeros) for x in matrices), max(sum(x.numel for x in matrices), 1)
    if zeros >= PAYS * count:
        return
    negative = 0 if positive_zeros else sum(digest.negative_zeros for digest in matrices)
    advice = (
        f"{negative:,} more zeros are -0.0: `positive_zeros=True` stores them as 0.0" if negative else "Name a pruned model"
    )
    raise InvalidSetting(
        f"{source.name} holds {100 * zeros / count:.1f} % zeros in its matrices, embeddings and the head aside, and packing is "
        f"for {100 * PAYS:.0f} % and more. {advice}, or pass `allow_dense=True`."
    )


@dataclass(frozen=True)
class NearestIntegers:
    """How a weight is rounded as it is packed.

    Attributes:
        name: The name of the integers, such as "int4".
        group_size: Columns that share a scale, 0 for whole rows; None to choose by the fraction of kept weights.
        transposed: Whether the weight is stored as (in, out).
    """

    name: str
    group_size: int | None
    transposed: bool = False

    def quantized(self, weight: Tensor) -> Quantized:
        """Round the kept weights of (out, in)."""
        keep = weight != 0
        return round_to_nearest(weight, format_of(self, float(keep.float().mean())), mask=keep)


Values = NearestIntegers | Scales
"""How a weight is packed as integers: rounded, or with the scales of a weight that is quantized already."""


def format_of(values: Values, density: float) -> IntegerFormat:
    """The format that a weight with a fraction of kept weights is packed in."""
    return values.format if isinstance(values, Scales) else IntegerFormat.parse(values.name, values.group_size, density)


def values_of(source: Source, values: str | None, group_size: int | None) -> dict[str, Values]:
    """Return the weights of a model that are packed as integers, by stored name.

    Args:
        source: The model.
        values: "int8", "int4" or "int3": round the layers of the blocks. None packs what is quantized already.
        group_size: Columns that share a scale, a multiple of 64, or 0 for whole rows; None chooses it for each layer.

    Raises:
        InvalidSetting: The format is impossible, or the model is quantized already.
        BadCheckpoint: The side file is damaged.
        UnsupportedModel: The model's layers are unknown.
    """
    scales = read_scales(source.folder)
    if values is None:
        if group_size is not None:
            raise InvalidSetting("`group_size` goes with `values`. Name the integers, as in `values='int4'`, or leave it out.")
        return dict(scales)
    IntegerFormat.parse(values, group_size, density=1)  # which checks them
    check_unrounded(source.name, scales)
    return {name: NearestIntegers(values, group_size, transposed) for name, transposed in _layer_weights(source).items()}


def embedding_values(source: Source, values: str | None) -> dict[str, Values]:
    """Return the embeddings of tokens and the output head as weights that are packed as integers, by stored name.

    Args:
        source: The model.
        values: The name of the integers; None for none.

    Raises:
        InvalidSetting: There are no such integers.
        UnsupportedModel: The model is unknown, or its embeddings have no name of their own in the files.
    """
    if values is None:
        return {}
    if values not in BITS_OF:
        raise InvalidSetting(f"`embeddings` got {values!r}; it must be {', '.join(BITS_OF)}.")
    rounding = NearestIntegers(values, None)
    skeleton = open_source(source.name, trusted=False).skeleton()
    modules = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    wanted = {id(module.weight) for module in modules if module is not None}
    files = StoredTensors(source.folder, skeleton).files
    places = [files.get(name) for name, weight in skeleton.named_parameters() if id(weight) in wanted]
    if not all(isinstance(place, TensorLocation) for place in places):
        raise UnsupportedModel(f"The embeddings of {source.name} are stored in pieces. Leave out `embeddings`.")
    return {place.key: rounding for place in places if isinstance(place, TensorLocation)}


def _layer_weights(source: Source) -> dict[str, bool]:
    """Return the stored names of the weights of the linear layers in the blocks, and whether each is (in, out)."""
    skeleton = open_source(source.name, trusted=False).skeleton()
    tensors = StoredTensors(source.folder, skeleton)
    weights: dict[str, bool] = {}
    for parameter, ((block, name), *_) in layers_by_parameter(skeleton, ()).items():
        stored = tensors.files.get(parameter)
        if isinstance(stored, TensorLocation):
            view = block.views.get(name)
            weights[stored.key] = view is not None and view.transposed
        elif stored is not None:
            weights |= {location.key: False for location in locations_of(stored)}
    return weights
