"""Sweeps of runs, tables that compare them, figures, and the HTML report.

Imports every folder but `cli`.
"""
