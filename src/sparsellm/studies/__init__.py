"""Several runs: sparsities, gradual pruning, search and sweeps; comparisons, figures, and the HTML report.

Imports every folder but `cli`.
"""
