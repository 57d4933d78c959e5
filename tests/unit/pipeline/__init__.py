"""Tests of `sparsellm.pipeline`."""
