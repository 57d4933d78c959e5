"""Prune pre-trained language models towards the global goal, block by block."""

__version__ = "0.1.0.dev0"
