"""Two small bundled models and their training text, so that `sparsellm demo` needs no network.

`sparsellm.data.demo.train` trained the models (`models/opt`, `models/llama`). `sparsellm.data.demo.text` collects the text from
the running Python's standard library, so it is not part of the package.
"""

from __future__ import annotations

from pathlib import Path

from sparsellm.errors import BadCheckpoint, InvalidSetting

FAMILIES = ("opt", "llama")


def model_path(family: str) -> Path:
    """Return the folder of a bundled model, for `from_pretrained`.

    Args:
        family: A name of `FAMILIES`.

    Raises:
        InvalidSetting: If the name is not in `FAMILIES`.
        BadCheckpoint: If the installation does not include the model.
    """
    if family not in FAMILIES:
        raise InvalidSetting(f"`family` must be one of {', '.join(FAMILIES)}, got {family!r}.")
    path = Path(__file__).parent / "models" / family
    if not (path / "model.safetensors").is_file():
        raise BadCheckpoint(
            f"The bundled {family} model is not at {path}: this installation does not include it. "
            f"Reinstall sparsellm from its wheel, or train it again: python -m sparsellm.data.demo.train {family} {path}"
        )
    return path
