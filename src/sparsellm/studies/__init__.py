"""Several runs: sparsities, search and sweeps; comparisons, figures, and the HTML report.

Imports every folder but `cli`.
"""
