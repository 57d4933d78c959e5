"""The main path: `prune_blocks`, the plan of patterns, the allocation of sparsity, and the journal of finished blocks.

Imports `methods` and the folders above it.
"""
