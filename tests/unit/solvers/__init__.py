"""Tests of `sparsellm.solvers`."""
