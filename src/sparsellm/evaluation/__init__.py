"""Perplexity, zero-shot accuracy and generated samples of a loaded model.

Imports `activations` and the folders before it, but no pruning methods.
"""
