"""Two small bundled models, and the English they were trained on, so that `sparsellm demo` needs no network.

The models (`models/opt`, `models/llama`) were made by `sparsellm.data.demo.train`. The text is read from the user's own Python
by `sparsellm.data.demo.text`, so none of it is shipped.
"""

from __future__ import annotations

from pathlib import Path

from sparsellm.errors import BadCheckpoint, InvalidSetting

FAMILIES = ("opt", "llama")


def model_path(family: str) -> Path:
    """The folder of the bundled model of this `family`, ready for `from_pretrained`.

    Raises `InvalidSetting` for a name outside `FAMILIES`, and `BadCheckpoint` when the installation lacks the model.
    """
    if family not in FAMILIES:
        raise InvalidSetting(f"`family` must be one of {', '.join(FAMILIES)}, got {family!r}.")
    path = Path(__file__).parent / "models" / family
    if not (path / "model.safetensors").is_file():
        raise BadCheckpoint(
            f"The bundled {family} model is not at {path}: this installation lacks it. "
            f"Reinstall sparsellm from its wheel, or train it anew: python -m sparsellm.data.demo.train {family} {path}"
        )
    return path
