"""Checks of solvers, methods and patterns against every promise of their contract, for their authors; ours pass them too.

Each promise is one check with a name. In a test of pytest:

    @parametrize_with_checks([RIA(), RIA(power=1.0), InOrder(RIA())])
    def test_contract(subject, check):
        check(subject)
"""

from __future__ import annotations

from sparsellm.testing.checks import Check, FailedCheck
from sparsellm.testing.suites import check_method, check_pattern, check_solver, checks_of, parametrize_with_checks

__all__ = ["Check", "FailedCheck", "check_method", "check_pattern", "check_solver", "checks_of", "parametrize_with_checks"]
