"""The hybrid pattern, "2:4@75%": N:M in some blocks of a matrix's rows, dense in the others."""

from sparsellm.extension import Extension

EXTENSION = Extension(patterns={"hybrid": "sparsellm.extensions.hybrid.pattern:HybridRows"})
