"""The server of transformers, for pruned and packed models."""

from __future__ import annotations

from collections.abc import Sequence

from transformers.utils.import_utils import is_serve_available

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.errors import MissingPackage
from sparsellm.extensions.packed.formats.transformers import register


def check_serving(model: str, *, trusted: bool) -> None:
    """Check that a model can be served, without reading its weights.

    Args:
        model: A folder or hub name, pruned, packed or dense.
        trusted: Whether its own code may run.

    Raises:
        MissingPackage: The packages that the server needs are not installed.
        BadCheckpoint: The folder is missing or damaged, or holds no model.
    """
    if not is_serve_available():
        raise MissingPackage("The server of transformers needs packages: pip install 'transformers[serving]'.")
    open_checkpoint(model, trusted=trusted, packed=True)


def serve(model: str, options: Sequence[str]) -> None:
    """Serve a model until the process is interrupted. options: further words of the command line of `transformers serve`."""
    from transformers.cli import transformers as command_line  # whose `main` would look for updates on the network

    register()
    command_line.app(["serve", model, *options])
