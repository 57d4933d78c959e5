"""Calibration and test texts, token samples, safe JSON and YAML readers, and the bundled demo models.

Imports `errors` and `runtime`.
"""
