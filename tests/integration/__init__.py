"""Tests of whole runs from Python, on tiny random models."""
