"""Tests of `sparsellm.sparse`."""
