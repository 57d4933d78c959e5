"""Names the methods of this folder. It imports neither of them, nor torch, so that command lines stay fast."""

from sparsellm.extension import Extension

EXTENSION = Extension(methods={"elsa": "elsa:ELSA", "sparse-swaps": "sparse_swaps:SparseSwaps"})
