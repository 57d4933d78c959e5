"""Which layers keep how much: scores of layers (OWL, Fisher, error curves), and the budget of zeros or bits that they share.

Imports `methods` and the folders above it.
"""
