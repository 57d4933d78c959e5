"""Run before any test: Triton, which reads this when it is first imported, interprets its kernels where no GPU can run them."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
