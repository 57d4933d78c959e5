"""Opens the folder of a checkpoint, for every command alike: finds it, checks its files, tells what beside them is not read."""

from __future__ import annotations

from pathlib import Path

from sparsellm.checkpoints.documents import ADAPTER
from sparsellm.checkpoints.files import DEMO, check_within, find_checkpoint
from sparsellm.checkpoints.remarks import remark


def open_folder(name: str, revision: str | None = None, with_code: bool = False) -> Path:
    """Return the folder of a checkpoint, whose files may be read.

    Args:
        name: A folder, a bundled model such as "demo:opt", or a hub name.
        revision: Branch, tag or commit of a hub name.
        with_code: Whether to download Python files too.

    Raises:
        SparseLLMError: As `find_checkpoint` and `check_within`.
    """
    folder = find_checkpoint(name, revision, with_code)
    if not name.startswith(DEMO):  # installers may link the files of a package
        check_within(name, folder)
    _tell_adapter(name, folder)
    return folder


def _tell_adapter(name: str, folder: Path) -> None:
    """Remark that an adapter beside the weights is not read; transformers would load it where PEFT is installed."""
    if files := sorted(file.name for file in folder.iterdir() if ADAPTER.fullmatch(file.name)):
        remark(
            f"{name} has an adapter beside its weights ({', '.join(files)}), which is neither loaded nor copied. "
            "To have it in the model, merge it first: PEFT's merge_and_unload",
            (folder.resolve(), "adapter"),
        )
