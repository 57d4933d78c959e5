"""Remarks on checkpoints reach whoever opened them, once."""

from __future__ import annotations

import pytest

from sparsellm.checkpoints.remarks import remark, remarks_to


def test_a_context_receives_each_subject_once() -> None:
    found: list[tuple[str, bool]] = []
    with remarks_to(lambda text, is_new: found.append((text, is_new))):
        remark("of m", "m")
        remark("of ./m", "m")
        remark("of n", "n")
    assert found == [("of m", True), ("of n", True)]


def test_contexts_within_each_other() -> None:
    """Each run of a command has the remark in its report, and only the first, or the command itself, prints it."""
    outer: list[str] = []
    runs: list[bool] = []
    with remarks_to(lambda text, is_new: outer.append(text)):
        for _ in range(2):
            with remarks_to(lambda text, is_new: runs.append(is_new)):
                remark("of m", "m")
                remark("of m", "m")
        remark("of m", "m")
        remark("of n", "n")
        with remarks_to(lambda text, is_new: runs.append(is_new)):
            remark("of n", "n")
    assert outer == ["of n"]
    assert runs == [True, False, False]


def test_without_a_context_it_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="of m"):
        remark("of m", "m")
