"""Tests of `sparsellm.extensions.packed.formats`."""
