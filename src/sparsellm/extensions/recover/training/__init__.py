"""Training of the remaining weights with fixed masks.

Imports `methods` and the folders above it.
"""
