"""Packs pruned models, and turns packed models back: file by file, tensor by tensor, without loss of a bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from sparsellm.checkpoints.headers import read_headers
from sparsellm.checkpoints.packed_files import METHOD, VERSION, FileWriter, PackedEntry, is_packed, metadata_of
from sparsellm.checkpoints.tensor_index import TensorDigest, TensorLocation, read_stored, tensor_digests
from sparsellm.errors import BadCheckpoint, InvalidSetting
from sparsellm.runs.conversion import Observe, converted, finish, write_json
from sparsellm.runs.export import check_output, is_finished
from sparsellm.runs.packed_card import dense_card, packed_card
from sparsellm.runs.packed_documents import Packed, Source, Unpacked, copy_files, matrix_sizes, report_of
from sparsellm.runs.recipe import Recipe, RecoveryRecipe
from sparsellm.runs.records import CARD
from sparsellm.runs.verification import raise_if_any, tensor_differences
from sparsellm.runtime.memory import human_bytes
from sparsellm.sparse.packed_tensors import encode_tensor

PACKABLE = ("float32", "float16", "bfloat16")
"""Dtypes that are packed."""

PAYS = 0.3
"""Fraction of zeros from which a model is packed. With fewer, a compressor of files does nearly as well."""

SPARSE = 0.1
"""Fraction of zeros from which a matrix is packed for running. With fewer, decoding costs more time than its bytes."""

CODED_BITS = {"bfloat16": 11.2, "float16": 14.2, "float32": 27.2}
"""Bits that a kept number of a Gaussian matrix takes in the plain form, for estimates."""


def pack(
    model: str | Path,
    packed: str | Path,
    *,
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
        archive: Compress further, for storage: loading takes longer, and dense matrices are packed too.
        overwrite: Replace an existing folder that sparsellm wrote.
        allow_dense: Pack a model with few zeros, and matrices with few zeros.
        positive_zeros: Store -0.0, which other software may leave where it removes a weight, as 0.0. Otherwise it is kept bit
            by bit, and takes as much as any other number.
        observe: Receives what is being done.

    Returns:
        The sizes, in all and by matrix.

    Raises:
        InvalidSetting: The model holds few zeros, or is packed.
        OutputExists: The folder exists.
        BadCheckpoint: The model is missing, incomplete or damaged, or holds NaN or infinity.
        VerificationFailed: The model is not what the run that pruned it wrote, or the result differs from the model.
    """
    source = Source.open(model)
    if is_packed(source.name, source.fields):
        raise InvalidSetting(
            f"{model} is packed already. To change its form, unpack it first: sparsellm unpack {model} FOLDER."
        )
    path = check_output(packed, overwrite, source.folder)
    observe(f"reading {model}")
    digests = _read_digests(source)
    report = report_of(source, digests)
    raise_if_any(
        model, tensor_differences(report.get("digests", {}).get("tensors", {}), digests) if "digests" in report else []
    )
    if not allow_dense:
        _check_zeros(source, digests, positive_zeros)

    def parts_of(name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Encode a tensor; return nothing if it is not packed."""
        header = digests[name]
        if header.dtype not in PACKABLE or len(header.shape) < 2:
            return {}
        enough = _removed(header, positive_zeros) >= SPARSE * header.numel
        enough |= allow_dense and header.shape[0] != source.vocabulary
        parts = encode_tensor(name, tensor, archive) if tensor.numel() and (archive or enough) else {}
        is_smaller = sum(part.nbytes for part in parts.values()) < tensor.nbytes
        return parts if is_smaller and not any(part in digests for part in parts if part != name) else {}

    def convert(file: Path, writer: FileWriter) -> None:
        """Write the tensors of a file, packed or as they are."""
        entries: dict[str, PackedEntry] = {}
        for name in read_headers(file):
            tensor = read_stored(TensorLocation(file, name))
            if positive_zeros and digests[name].negative_zeros:
                tensor = tensor + 0.0
            parts = parts_of(name, tensor)
            if parts:
                entries[name] = PackedEntry.of(tensor)
            for part, encoded in (parts or {name: tensor}).items():
                writer.add(part, encoded)
        writer.metadata = metadata_of(entries)

    form = "archive" if archive else "plain"
    settings = {"form": form, "allow_dense": allow_dense, "positive_zeros": positive_zeros}
    with converted(source, path, convert, settings=settings, verb="packing", observe=observe) as work:
        sizes = matrix_sizes([work / x for x in source.targets()], digests, positive_zeros=positive_zeros)
        weights = sum(file.stat().st_size for file in source.files), sum((work / x).stat().st_size for x in source.targets())
        skipped = copy_files(source.folder, work)
        result = Packed(str(packed), form, *weights, sizes, skipped)
        fields = source.fields | {"quantization_config": {"quant_method": METHOD, "version": VERSION, "form": form}}
        write_json(work / "config.json", fields)
        if (source.folder / CARD).is_file():
            (work / CARD).write_text(packed_card((source.folder / CARD).read_text(encoding="utf-8"), result), encoding="utf-8")
        changed = {name for name, digest in digests.items() if positive_zeros and digest.negative_zeros}
        expected = {name: digest.to_dict() for name, digest in digests.items() if name not in changed}
        difference = "differs from the model's after writing. Check memory and disk."
        finish(work, report | {"packing": result.to_dict()}, expected, difference=difference)
    return result


def unpack(packed: str | Path, model: str | Path, *, overwrite: bool = False, observe: Observe = lambda text: None) -> Unpacked:
    """Write a packed model as an ordinary one, with the same tensors bit by bit as before it was packed.

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
    """
    source = Source.open(packed)
    if not is_packed(source.name, source.fields):
        raise InvalidSetting(
            f"{packed} is not packed: its config.json has no `quantization_config` of sparsellm. Use it as it is."
        )
    path = check_output(model, overwrite, source.folder)
    report = report_of(source, None)

    def convert(file: Path, writer: FileWriter) -> None:
        """Write the tensors of a file, decoded."""
        for name in read_headers(file):
            writer.add(name, read_stored(TensorLocation(file, name)))

    with converted(source, path, convert, settings={"form": "dense"}, verb="unpacking", observe=observe) as work:
        copy_files(source.folder, work)
        fields = dict(source.fields)
        del fields["quantization_config"]
        write_json(work / "config.json", fields)
        if (source.folder / CARD).is_file():
            (work / CARD).write_text(dense_card((source.folder / CARD).read_text(encoding="utf-8")), encoding="utf-8")
        recorded = report.get("digests", {}).get("tensors")
        difference = f"is not as it was when it was packed: {packed} is damaged or was changed. Get a sound copy."
        finish(work, {key: value for key, value in report.items() if key != "packing"}, recorded, difference=difference)
    weights = [sum(file.stat().st_size for file in files) for files in (source.files, [path / x for x in source.targets()])]
    return Unpacked(str(model), *weights)


def packed_outputs(outputs: Mapping[Path, Recipe | RecoveryRecipe], *, resume: bool, overwrite: bool) -> dict[Path, Path]:
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
        if isinstance(recipe, Recipe) and recipe.pattern.sparsity < PAYS:
            limit = f"packing is for {100 * PAYS:.0f} % and more"
            raise InvalidSetting(f"`sparsity` {recipe.sparsity} is too little to pack: {limit}. Leave out `pack`.")
        target = output.with_name(f"{output.name}-packed")
        if not (resume and is_finished(target)):
            check_output(target, overwrite, output)
            targets[output] = target
    return targets


def _read_digests(source: Source) -> dict[str, TensorDigest]:
    """Read all tensors of a model: their digests and zeros. Raises BadCheckpoint for NaN or infinity."""
    digests: dict[str, TensorDigest] = {}
    for file in source.files:
        try:
            digests |= tensor_digests(file)
        except BadCheckpoint as error:
            raise BadCheckpoint(f"{source.name}: {error}") from None
    if bad := [name for name, digest in digests.items() if not digest.finite]:
        raise BadCheckpoint(f"{source.name} holds NaN or infinity in {bad[0]}. Get a sound copy of the checkpoint.")
    return digests


def _removed(digest: TensorDigest, positive_zeros: bool) -> int:
    """Return the number of a tensor's zeros that are not stored."""
    return digest.zeros - (0 if positive_zeros else digest.negative_zeros)


def _check_zeros(source: Source, digests: Mapping[str, TensorDigest], positive_zeros: bool) -> None:
    """Raise InvalidSetting for a model with few zeros in its matrices, embeddings and the head aside."""
    matrices = [x for x in digests.values() if x.dtype in PACKABLE and len(x.shape) > 1 and x.shape[0] != source.vocabulary]
    zeros, count = sum(_removed(x, positive_zeros) for x in matrices), max(sum(x.numel for x in matrices), 1)
    if zeros >= PAYS * count:
        return
    dense = sum(digest.nbytes for digest in digests.values())
    saved = sum(
        digest.nbytes - (digest.numel + (digest.numel - removed) * CODED_BITS[digest.dtype]) / 8
        for digest, removed in ((x, _removed(x, positive_zeros)) for x in matrices)
        if removed >= SPARSE * digest.numel
    )
    negative = 0 if positive_zeros else sum(digest.negative_zeros for digest in matrices)
    advice = (
        f"{negative:,} more zeros are -0.0: `positive_zeros=True` stores them as 0.0" if negative else "Name a pruned model"
    )
    raise InvalidSetting(
        f"{source.name} holds {100 * zeros / count:.1f} % zeros in its matrices, embeddings and the head aside, and packing is "
        f"for {100 * PAYS:.0f} % and more: {human_bytes(dense)} would become about {human_bytes(dense - saved)}. {advice}, or "
        "pass `allow_dense=True`."
    )
