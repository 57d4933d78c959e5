"""Planning: the memory, disk space and time of a run, before it begins. Knows the extension that recovers."""

from sparsellm.extension import Extension

EXTENSION = Extension(commands={"plan": "sparsellm.extensions.planning.commands:plan"})
