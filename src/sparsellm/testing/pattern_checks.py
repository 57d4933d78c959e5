"""The promises of a sparsity pattern, on small matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.solvers.patterns import NM, Pattern, Unstructured, keep_unpruned
from sparsellm.testing.checks import Check, fail, is_frozen_dataclass

SHAPES = [(1, 16), (7, 13), (24, 64), (64, 240), (128, 256)]
"""(out, in); those that do not fit a pattern are left out."""

MANY_ROWS = 4096
"""Rows for which the fraction removed is compared with `sparsity`; a pattern of whole rows rounds it where there are few."""

OWN = (NM, Unstructured)


def cases(subject: Pattern) -> Iterator[tuple[Pattern, Tensor]]:
    """Positive scores of each shape that fits, all different and with many that are equal, and the pattern for these costs."""
    fitting = []
    for shape in SHAPES:
        with suppress(InvalidSetting):
            subject.check(shape)
            fitting.append(shape)
    if not fitting:
        fail(f"No shape of {SHAPES} fits.", "Let check() refuse only what keep() cannot do.")
    for seed, shape in enumerate(fitting):
        generator = torch.Generator().manual_seed(seed)
        for scores in (0.5 + torch.rand(shape, generator=generator), 1.0 + torch.randint(0, 3, shape, generator=generator)):
            yield subject.for_costs(scores.clone), scores


def check_written_form(pattern: Pattern) -> None:
    """It is a frozen dataclass that its class parses from its `str`, which no pattern of sparsellm takes for its own."""
    text, parse = str(pattern), type(pattern).parse
    if not is_frozen_dataclass(pattern):
        fail(f"{type(pattern).__name__} is none.", "Decorate the class with @dataclass(frozen=True).")
    if (parsed := parse(text)) != pattern:
        fail(f"{text!r} is parsed as {parsed!r}, not as {pattern!r}.", "Write all fields in __str__, and read them in parse.")
    for own in OWN:
        if not isinstance(pattern, own) and own.parse(text) is not None:
            fail(f"{text!r} is a {own.__name__} too.", "Choose a form of its own.")
    if parse("no such pattern") is not None:
        fail("It is parsed from any text.", "Return None for texts of another form.")


def check_removed_count(subject: Pattern) -> None:
    """`keep` is a mask of the scores' shape that removes `count_removed` weights, about the fraction `sparsity`."""
    for pattern, scores in cases(subject):
        keep, count = pattern.keep(scores), pattern.count_removed(scores.shape)
        if keep.shape != scores.shape or keep.dtype != torch.bool:
            fail(f"It is {keep.dtype} of {tuple(keep.shape)}.", "Return a bool mask, True where a weight is kept.")
        if (removed := int((~keep).sum())) != count:
            fail(f"It removes {removed} of {tuple(scores.shape)}, and count_removed says {count}.", "Make the two agree.")
        tall = (MANY_ROWS, scores.shape[1])
        if abs((count := pattern.count_removed(tall)) / math.prod(tall) - pattern.sparsity) > 0.01:
            fail(f"{count} of {tall} is not the fraction {pattern.sparsity}.", "Make sparsity and counts agree.")


def check_holds(subject: Pattern) -> None:
    """`holds` is true of weights with the mask of `keep` and of zeros, and false of a dense weight."""
    for pattern, scores in cases(subject):
        for weight, wanted in ((scores * pattern.keep(scores), True), (torch.zeros_like(scores), True), (scores, False)):
            if not pattern.count_removed(scores.shape):
                continue
            if pattern.holds(weight) != wanted:
                zeros = int((weight == 0).sum())
                fail(
                    f"It is {not wanted} of a {tuple(weight.shape)} with {zeros} zeros.", "Count the zeros where they must be."
                )


def check_unchanged_scores(subject: Pattern) -> None:
    """`keep` does not write to its scores, and depends on them alone."""
    for pattern, scores in cases(subject):
        before = scores.clone()
        for per_row in (False, True):
            first = pattern.keep(scores, per_row=per_row)
            if not torch.equal(scores, before):
                fail("The scores are changed in place.", "Change a copy.")
            if not torch.equal(first, pattern.keep(scores.T.contiguous().T, per_row=per_row)):
                fail("The mask depends on how scores are stored in memory.", "Do not rely on the memory of a tensor.")


def check_pruned_masks(subject: Pattern) -> None:
    """Negative scores are removed first: a weight that has the pattern already loses no other weights."""
    for pattern, scores in cases(subject):
        others = torch.rand(scores.shape, generator=torch.Generator().manual_seed(1))
        pruned = ~pattern.keep(others)
        if more := int((pruned != ~keep_unpruned(pruned, scores, pattern.keep)).sum()):
            fail(f"Of a {tuple(scores.shape)} that has it, {more} more are removed.", "Compare scores with their signs.")


def check_rows(subject: Pattern) -> None:
    """With `per_row` the layer's total is exact; if all columns are chosen together, rows differ by at most one weight."""
    for pattern, scores in cases(subject):
        removed = (~pattern.keep(scores, per_row=True)).sum(1)
        if int(removed.sum()) != pattern.count_removed(scores.shape):
            fail(f"{int(removed.sum())} are removed.", f"count_removed is {pattern.count_removed(scores.shape)}.")
        if pattern.column_span is None and int(removed.max() - removed.min()) > 1:
            fail(f"Rows lose {int(removed.min())} to {int(removed.max())} weights.", "Share them out evenly.")


def check_column_span(subject: Pattern) -> None:
    """The mask of `column_span` columns does not depend on the others: solvers choose it for them alone."""
    for pattern, scores in cases(subject):
        if (span := pattern.column_span) is None:
            continue
        parts = [pattern.keep(part) for part in scores.split(span, dim=1)]
        if not torch.equal(pattern.keep(scores), torch.cat(parts, dim=1)):
            fail(f"Of {span} columns alone it is another one.", "Set column_span to what is chosen together; None for all.")


PATTERN_CHECKS = tuple(
    map(
        Check,
        (
            check_written_form,
            check_removed_count,
            check_holds,
            check_unchanged_scores,
            check_pruned_masks,
            check_rows,
            check_column_span,
        ),
    )
)
"""In the order in which a failure is likely the cause of those after it."""
