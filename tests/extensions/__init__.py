"""Tests of extensions: a folder for each, and files that use several."""
