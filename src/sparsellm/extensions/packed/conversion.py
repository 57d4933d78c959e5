"""Converts the weight files of a model one by one into an output, which is continued after an interruption."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsellm.checkpoints.files import REPORT, WORK
from sparsellm.checkpoints.headers import file_metadata
from sparsellm.checkpoints.stamps import SourceChanged, unchanged
from sparsellm.checkpoints.stored_form import write_index
from sparsellm.errors import VerificationFailed, checkpoint_errors
from sparsellm.extensions.packed.documents import Source
from sparsellm.extensions.packed.packed_files import PACKED_METHOD, PACKED_VERSION, FileWriter
from sparsellm.outputs.folder import free_disk, locked, replacing
from sparsellm.outputs.saving import raise_system_errors, set_default_permissions
from sparsellm.outputs.verification import proven
from sparsellm.pipeline.planning import check_disk
from sparsellm.texts.json_files import durable, read_json, strict_json

FINISHED_WEIGHTS = "weights"
"""Subfolder of the work folder with finished weight files."""

Observe = Callable[[str], None]
"""Receives what is being done, such as "packing model.safetensors"."""


@contextmanager
def converted(
    source: Source,
    path: Path,
    convert: Callable[[Path, FileWriter], None],
    *,
    size: Callable[[Path], int],
    settings: Mapping[str, Any],
    verb: str,
    observe: Observe,
) -> Iterator[Path]:
    """Convert the weight files of a model, and provide the folder with them that becomes the output at the end.

    Finished files are kept after an error, unless the model or the settings change before the next call.

    Args:
        source: The model.
        path: The output.
        convert: Writes the tensors of a file.
        size: About how many bytes are written for a file; 0 if it is not known.
        settings: What the content of the files depends on, besides the model.
        verb: What is done to the files, for `observe`.
        observe: Receives what is being done.

    Raises:
        TooLarge: The output needs more than is free on its disk.
    """
    stamps = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in source.files]
    key = {"version": PACKED_VERSION, "model": str(source.folder.resolve()), "files": stamps, **settings}
    with locked(path):
        finished = path / WORK / FINISHED_WEIGHTS
        try:
            _keep_finished(finished, key)
            targets = dict(zip(source.files, source.targets(), strict=True))
            left = {file: target for file, target in targets.items() if not (finished / target).exists()}
            with checkpoint_errors(source.name):
                sizes = [size(file) for file in left]
            needed = sum(sizes) + max(sizes, default=0)  # a file is written in parts, which are then joined
            check_disk(path, needed, free_disk(path))
            with raise_system_errors(path, needed):
                for file, target in left.items():
                    observe(f"{verb} {file.name}")
                    metadata = {key: x for key, x in file_metadata([file]).items() if key != PACKED_METHOD}
                    with FileWriter(finished / target, metadata) as writer, checkpoint_errors(source.name):
                        convert(file, writer)
                observe("reading back what was written")
                with replacing(path) as work, unchanged(source.stamps):
                    for target in targets.values():
                        (finished / target).rename(work / target)
                    write_index(work, source.targets())
                    yield work
        except SourceChanged:
            shutil.rmtree(finished, ignore_errors=True)
            raise
        except BaseException as error:
            count = len(list(finished.glob("*.safetensors"))) if finished.is_dir() else 0
            if count:
                error.add_note(f"{count} of {len(source.files)} weight files are finished and kept: run it again to continue")
            else:
                shutil.rmtree(finished, ignore_errors=True)
            raise


def _keep_finished(finished: Path, key: Mapping[str, Any]) -> None:
    """Create the folder of finished files; remove those of another model or of other settings, and parts of files."""
    record = finished / "settings.json"
    if finished.is_dir() and (not record.is_file() or read_json(record) != key):
        shutil.rmtree(finished)
    finished.mkdir(exist_ok=True)
    for partial in finished.glob("*.partial"):
        partial.unlink()
    durable(record, json.dumps(key).encode())


def finish(work: Path, report: Mapping[str, Any], recorded: Mapping[str, Any] | None, *, difference: str) -> None:
    """Write the report with new digests, after comparing the tensors that were written with those recorded, if any.

    Args:
        work: The folder that becomes the output.
        report: The report without digests.
        recorded: The digests of the tensors before they were converted.
        difference: What it means if a tensor has another digest, and what to do.
    """
    set_default_permissions(work)
    written = proven(work, report)
    tensors = written["digests"]["tensors"]
    if wrong := sorted(name for name, record in (recorded or {}).items() if record != tensors.get(name)):
        raise VerificationFailed(f"{wrong[0]} {difference}", tuple(wrong))
    (work / REPORT).write_text(strict_json(written) + "\n", encoding="utf-8")
    set_default_permissions(work)
