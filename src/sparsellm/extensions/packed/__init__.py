"""Packed models: their format, codec, kernels and layers."""

from sparsellm.extension import Extension

EXTENSION = Extension(
    commands={name: f"sparsellm.extensions.packed.commands:{name}" for name in ("pack", "unpack", "serve")},
    options={"prune": ("sparsellm.extensions.packed.commands:Packing",)},
    facts={"packed": "sparsellm.extensions.packed.facts"},
    sections={"packing": "sparsellm.extensions.packed.record:Packed"},
    readers={"sparsellm": "sparsellm.extensions.packed.reader:PackedReader"},
)
