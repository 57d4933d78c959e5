"""Training of the weights that are left, with masks held.

Imports `methods` and the folders above it.
"""
