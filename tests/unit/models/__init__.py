"""Tests of `sparsellm.models`."""
