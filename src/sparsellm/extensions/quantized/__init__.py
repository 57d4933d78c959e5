"""Quantized checkpoints as they are published: their weights are dequantized as they are read."""

from sparsellm.extension import Extension

METHODS_READ = ("fp8", "fbgemm_fp8", "mxfp4", "compressed-tensors", "bitsandbytes", "gptq", "awq")

EXTENSION = Extension(readers=dict.fromkeys(METHODS_READ, "sparsellm.extensions.quantized.reader:QuantizedReader"))
