"""The checks of solvers, methods and patterns together, for a script, for pytest and for the command line."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

from sparsellm.errors import InvalidSetting
from sparsellm.methods import BlockMethod
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.patterns import Pattern
from sparsellm.testing.checks import Check
from sparsellm.testing.method_checks import METHOD_CHECKS
from sparsellm.testing.pattern_checks import PATTERN_CHECKS
from sparsellm.testing.solver_checks import SOLVER_CHECKS

if TYPE_CHECKING:
    from _pytest.mark import MarkDecorator


def check_solver(solver: LayerSolver) -> None:
    """Check every promise of a solver on small layers, and on a tiny model for resumed runs. Takes a second or two.

    Raises:
        FailedCheck: The first promise that it breaks.
    """
    _check_all(solver, SOLVER_CHECKS)


def check_method(method: BlockMethod) -> None:
    """Check every promise of a method on a tiny OPT and a tiny Llama, also killed and resumed and in two processes.

    Takes some ten seconds, half of which the two processes take to start.

    Raises:
        FailedCheck: The first promise that it breaks.
    """
    _check_all(method, METHOD_CHECKS)


def check_pattern(pattern: Pattern) -> None:
    """Check every promise of a sparsity pattern on small matrices.

    Raises:
        FailedCheck: The first promise that it breaks.
    """
    _check_all(pattern, PATTERN_CHECKS)


def checks_of(subject: object) -> Sequence[Check]:
    """The checks of an object: a solver, a method or a pattern. Raises InvalidSetting if it is none of them."""
    if isinstance(subject, type):
        raise InvalidSetting(f"Checks take an object, got the class {subject.__name__}. Pass {subject.__name__}().")
    if isinstance(subject, Pattern):
        return PATTERN_CHECKS
    if hasattr(subject, "prune"):
        return METHOD_CHECKS
    if hasattr(subject, "solve"):
        return SOLVER_CHECKS
    raise InvalidSetting(f"A {type(subject).__name__} has neither solve nor prune, and is no Pattern: it cannot be checked.")


def parametrize_with_checks(subjects: Iterable[object]) -> MarkDecorator:
    """Parametrize a test of pytest, which takes `subject` and `check`, with every check of every object.

    Args:
        subjects: Solvers, methods and patterns, as objects.
    """
    import pytest

    cases = [
        pytest.param(subject, check, id=f"{_label(subject)}-{check.name}")
        for subject in subjects
        for check in checks_of(subject)
    ]
    return pytest.mark.parametrize(("subject", "check"), cases)


def _check_all(subject: Any, checks: Sequence[Check]) -> None:
    """Run checks one after the other, with a warning for each that cannot be made here."""
    for check in checks:
        try:
            check(subject)
        except SkipTest as reason:
            warnings.warn(f"{check.name} of {type(subject).__name__} is left out: {reason}", stacklevel=3)


def _label(subject: Any) -> str:
    """The class of an object, with the settings that differ from their defaults."""
    kind = type(subject).__name__
    if isinstance(subject, Pattern):
        return str(subject)
    changed = [x for x in fields(subject) if x.repr and getattr(subject, x.name) != x.default] if is_dataclass(subject) else []
    values = {x.name: getattr(subject, x.name) for x in changed}
    return f"{kind}({', '.join(f'{name}={_label(x) if is_dataclass(x) else x}' for name, x in values.items())})"
