"""Decoder blocks of Hugging Face models: their layers, feed-forward parts, experts and calls.

Knows no solver's class and no pattern. Imports `solvers.linalg`, and the folders above `solvers`.
"""
