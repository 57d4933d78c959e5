"""Perplexity and zero-shot accuracy of a loaded model.

Imports `activations` and the folders before it, but no pruning methods.
"""
