"""The events of a run, and who receives them: log, time left, display.

Imports `outputs` and the folders above it.
"""
