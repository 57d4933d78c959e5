"""What a run writes and reads again: folder, lock, journal, report, card, digests; saved, verified and inspected.

Imports `recipes` and the folders above it.
"""
