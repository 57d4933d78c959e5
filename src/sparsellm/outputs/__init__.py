"""Outputs of runs: folder, lock, journal, report, card, digests; saved, verified and inspected.

Imports `recipes` and the folders above it.
"""
