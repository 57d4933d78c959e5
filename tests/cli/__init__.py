"""Tests of the command line and of what the documentation shows."""
