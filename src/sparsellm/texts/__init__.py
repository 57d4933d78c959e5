"""Calibration and test texts, token sequences, JSON and YAML readers, and the bundled demo models.

Imports `errors` and `runtime`.
"""
