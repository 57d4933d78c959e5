"""Kernels are tested also where this machine would choose torch's products."""

from __future__ import annotations

import pytest

from sparsellm.extensions.packed.formats import kernels, linear


@pytest.fixture(autouse=True)
def _kernels_multiply_what_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads work on small matrices too."""
    monkeypatch.setattr(kernels, "is_faster", lambda tokens, dtype: True)
    monkeypatch.setattr(kernels, "least_for_threads", lambda: 0)
    for module in (kernels, linear):
        monkeypatch.setattr(module, "is_faster_dense", lambda tokens: True)
