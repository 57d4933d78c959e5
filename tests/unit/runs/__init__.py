"""Tests of `sparsellm.runs`."""
