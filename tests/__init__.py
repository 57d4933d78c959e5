"""Run before any test: Triton, which reads this when it is first imported, interprets its kernels where no GPU can run them."""

import os
import shutil

# Not asked of torch, whose import takes longer than most files of tests/core/unit.
if shutil.which("nvidia-smi") is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    os.environ.setdefault("TRITON_INTERPRET", "1")
