"""Tests of `sparsellm.data`."""
