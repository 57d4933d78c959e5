"""Tests of `sparsellm.formats`."""
