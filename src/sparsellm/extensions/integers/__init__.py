"""Integers of few bits: kept weights are rounded, trained and exported."""

from sparsellm.extension import Extension

EXTENSION = Extension(
    commands={"export": "sparsellm.extensions.integers.commands:export"},
    fields={"prune": ["sparsellm.extensions.integers.recipe_fields:IntegerFields"]},
    allocations={"bits": "sparsellm.extensions.integers.bit_allocation:BitAllocation"},
    sections={"export": "sparsellm.extensions.integers.compressed_export:ExportSection"},
    side_files={"quantization.scales": "sparsellm.extensions.integers.scales_file:ScalesFile"},
)
