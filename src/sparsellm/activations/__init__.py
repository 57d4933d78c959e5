"""Hidden states on their way through the blocks: streams, hooks, cached outputs, backward passes, sensitivities.

Imports `checkpoints` and the folders above it.
"""
