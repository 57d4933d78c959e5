"""A run from recipe to result: preparation, memory, start, stages, measurements; several runs; functions in Python.

Imports every folder but `cli` and extensions.
"""
