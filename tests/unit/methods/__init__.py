"""Tests of `sparsellm.methods`."""
