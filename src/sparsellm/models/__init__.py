"""Decoder blocks of Hugging Face models: their layers, feed-forward parts, experts and calls.

Independent of solver classes and patterns. Imports `solvers.linalg`, and the folders above `solvers`.
"""
