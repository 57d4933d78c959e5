"""Tests of `sparsellm.runtime`."""
