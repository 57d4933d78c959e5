"""Sweeps of many runs, their comparison, figures, and the HTML report.

Imports every folder but `cli`.
"""
