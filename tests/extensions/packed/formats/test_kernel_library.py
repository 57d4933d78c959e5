"""The speed of memory is one that machines have, with the compiled library and without."""

from __future__ import annotations

from unittest import mock

from sparsellm.extensions.packed.formats import kernel_library


def test_bandwidth_is_that_of_memory() -> None:
    assert 1e8 < kernel_library.stream_bandwidth() < 1e13
    with mock.patch.object(kernel_library, "load_kernels", return_value=None):
        assert 1e8 < kernel_library.stream_bandwidth() < 1e13
