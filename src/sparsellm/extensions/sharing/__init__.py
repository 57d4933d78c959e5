"""Sharing of results: upload to the Hugging Face hub, and experiment trackers."""

from sparsellm.extension import Extension

TRACKED = ("sparsellm.extensions.sharing.commands:Tracking",)

EXTENSION = Extension(
    commands={"push": "sparsellm.extensions.sharing.commands:push"},
    options=dict.fromkeys(("prune", "recover", "search", "sweep"), TRACKED),
)
