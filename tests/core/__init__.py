"""Tests of what prunes a model; they pass without the folder of extensions."""
