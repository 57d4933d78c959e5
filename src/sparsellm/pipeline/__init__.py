"""A whole run from recipe to verified checkpoint: preparation, plan, journal, stages, report, export, verification, tracking.

Imports every folder but `studies` and `cli`.
"""
