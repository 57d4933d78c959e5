"""Digests of the tensors in weight files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsellm.checkpoints.headers import KINDS
from sparsellm.checkpoints.tensor_index import tensor_digests
from sparsellm.errors import BadCheckpoint

BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64, "BF16": 16, "BOOL": 8}


@pytest.mark.parametrize("shape", [[4, 4], [16], [0, 2**40], [2**40, 0]], ids=str)
def test_tensors_of_every_kind_have_a_digest_or_are_refused(shape: list[int], tmp_path: Path) -> None:
    """Those of fewer than 16 bits with an exponent are refused; torch has not all of them, and counts in none."""
    for kind in KINDS:
        small = kind == "F4" or kind.startswith(("F6_", "F8_"))
        bits = BITS.get(kind) or (8 if small else int(kind[1:]))
        data = bytes(16 * bits // 8 if 0 not in shape else 0)
        header = json.dumps({"x": {"dtype": kind, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
        file = tmp_path / f"{kind}.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header + data)
        if small:
            with pytest.raises(BadCheckpoint, match=rf"\.safetensors .* x in {KINDS[kind]}"):
                tensor_digests(file)
            continue
        digest = tensor_digests(file)["x"]
        assert (digest.zeros, digest.finite) == (16 if data else 0, True), kind
