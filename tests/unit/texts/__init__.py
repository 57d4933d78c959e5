"""Tests of `sparsellm.texts`."""
