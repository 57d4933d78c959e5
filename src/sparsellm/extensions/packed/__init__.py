"""Packed models: their format, codec, kernels and layers."""

from sparsellm.extension import Extension

EXTENSION = Extension(
    commands={"pack": "sparsellm.extensions.packed.commands:pack", "unpack": "sparsellm.extensions.packed.commands:unpack"},
    options={"prune": ("sparsellm.extensions.packed.commands:Packing",)},
    facts={"packed": "sparsellm.extensions.packed.facts"},
    sections={"packing": "sparsellm.extensions.packed.record:Packed"},
    readers={"sparsellm": "sparsellm.extensions.packed.reader:PackedReader"},
)
