"""Hidden states on their way through the blocks: streams, captures, cached outputs, backward passes, sensitivities.

Imports `models` and the folders above it.
"""
