"""Checkpoints on disk: files, headers, configuration, tensor locations, and loading whole or block by block.

Imports `models` and the folders above it.
"""
