"""Packed checkpoints: their format, the modules that compute with them, and the kernels.

Imports `models` and `checkpoints` and the folders above them.
"""
