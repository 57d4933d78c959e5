"""Integers of few bits: kept weights are rounded, trained and exported."""

from sparsellm.extension import Extension

EXTENSION = Extension(
    commands={"export": "sparsellm.extensions.integers.commands:export"},
    fields={"prune": ["sparsellm.extensions.integers.recipe_fields:IntegerFields"]},
    allocations={"bits": "sparsellm.extensions.integers.bit_allocation:BitAllocation"},
    sections={"export": "sparsellm.extensions.integers.exported:ExportSection"},
    side_files={"quantization.scales": "sparsellm.extensions.integers.layer_scales:ScalesFile"},
)
