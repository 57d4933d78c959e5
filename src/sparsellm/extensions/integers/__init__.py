"""Integers of few bits: kept weights are rounded, trained and exported."""

from sparsellm.extension import Extension

EXTENSION = Extension(
    commands={"export": "sparsellm.extensions.integers.commands:export"},
)
