"""A whole run from recipe to verified checkpoint: preparation, stages, report, export, verification, tracking.

Imports every folder but `reports` and `cli`.
"""
