"""The command that checks solvers, methods and patterns against their contract."""

from sparsellm.extension import Extension

EXTENSION = Extension(commands={"check": "sparsellm.extensions.checks.commands:check"})
