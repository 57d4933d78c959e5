"""Patterns: what a text means, how many weights stay, and which."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsellm.errors import InvalidSetting, SparseLLMError
from sparsellm.solvers.patterns import NM, Pattern, Unstructured, keep_largest, parse_pattern

PARSED: list[tuple[str | float, Pattern]] = [
    ("70%", Unstructured(0.7)),
    ("70 %", Unstructured(0.7)),
    (" 70% ", Unstructured(0.7)),
    ("0.7", Unstructured(0.7)),
    (".7", Unstructured(0.7)),
    ("7e-1", Unstructured(0.7)),
    (0.7, Unstructured(0.7)),
    ("0", Unstructured(0.0)),
    (0, Unstructured(0.0)),
    ("0%", Unstructured(0.0)),
    ("12.5%", Unstructured(0.125)),
    ("99.9%", Unstructured(0.999)),
    ("2:4", NM(2, 4)),
    (" 3 : 4 ", NM(3, 4)),
    ("4:8", NM(4, 8)),
    ("1:2", NM(1, 2)),
    ("15:16", NM(15, 16)),
]

REFUSED = [
    ("70", "`sparsity`.*70%"),
    (70, "`sparsity`.*70%"),
    *((text, f"`sparsity`.*got {text}") for text in ("1", "100%", "150%", "-0.1", "-5%", "nan", "inf", math.nan)),
    *((text, f"`sparsity`.*'{text}'") for text in ("", "%", "half", "2:4:8", "2:", ":4", "-1:4", "2.5:4")),
    *((text, f"N:M.*{text}") for text in ("0:4", "4:4", "8:4")),
]

SHAPES = [(1, 1), (1, 2), (1, 7), (7, 1), (2, 3), (3, 5), (5, 12), (13, 11), (17, 136), (33, 40), (96, 256)]
SHARES = [0.0, 0.01, 0.1, 1 / 3, 0.5, 0.62, 0.7, 0.9, 0.99, 0.999]


def scores(shape: tuple[int, int], seed: int = 0, ties: bool = False) -> Tensor:
    """Random scores; with ties, drawn from three values only."""
    generator = torch.Generator().manual_seed(seed)
    if ties:
        return torch.randint(0, 3, shape, generator=generator).float()
    return torch.rand(shape, generator=generator)


def brute_keep(values: list[float], removed: int) -> list[bool]:
    """Keep all but the `removed` smallest; of equals the earlier go. Plain Python."""
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    gone = set(order[:removed])
    return [i not in gone for i in range(len(values))]


@pytest.mark.parametrize(("text", "pattern"), PARSED)
def test_texts_mean_their_pattern(text: str | float, pattern: Pattern) -> None:
    """Every accepted spelling gives the pattern, to rounding of the division by 100."""
    parsed = parse_pattern(text)
    assert type(parsed) is type(pattern)
    assert parsed.sparsity == pytest.approx(pattern.sparsity, abs=1e-15)
    assert parsed.column_span == pattern.column_span


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_bad_texts_are_refused(text: str | float, message: str) -> None:
    """What is no pattern raises InvalidSetting, which is a ValueError, and says what was got."""
    with pytest.raises(InvalidSetting, match=message) as caught:
        parse_pattern(text)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, SparseLLMError)


def test_descriptions() -> None:
    """Both kinds spell out the fraction removed."""
    assert NM(3, 4).describe() == "3:4 (3 of every 4 removed, 75.0 %)"
    assert NM(2, 4).describe() == "2:4 (2 of every 4 removed, 50.0 %)"
    assert Unstructured(0.7).describe() == "70 % removed, unstructured"
    assert (NM(3, 4).column_span, Unstructured(0.5).column_span) == (4, None)


@pytest.mark.parametrize("share", SHARES)
def test_unstructured_counts_are_exact(share: float) -> None:
    """Exactly round(share * count) weights go, with ties and without, over the layer and by rows."""
    pattern = Unstructured(share)
    for shape, ties in itertools.product(SHAPES, (False, True)):
        score, expected = scores(shape, ties=ties), round(share * shape[0] * shape[1])
        layer, rows = pattern.keep(score), pattern.keep(score, per_row=True)
        assert layer.dtype == rows.dtype == torch.bool
        assert layer.shape == rows.shape == torch.Size(shape)
        assert int((~layer).sum()) == int((~rows).sum()) == expected == pattern.count_removed(score.shape)
        per_row = (~rows).sum(1)
        assert int(per_row.max() - per_row.min()) <= 1


@pytest.mark.parametrize("share", SHARES)
def test_unstructured_agrees_with_sorting(share: float) -> None:
    """The largest stay, and of equals the later ones: as plain Python sorts them."""
    pattern = Unstructured(share)
    for shape, ties in itertools.product([(1, 1), (1, 9), (5, 12), (13, 11), (17, 40)], (False, True)):
        score = scores(shape, seed=1, ties=ties)
        removed = pattern.count_removed(score.shape)
        assert pattern.keep(score).flatten().tolist() == brute_keep(score.flatten().tolist(), removed)
        for row, kept in zip(score, pattern.keep(score, per_row=True), strict=True):
            assert kept.tolist() == brute_keep(row.tolist(), int((~kept).sum()))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("pattern", [NM(1, 2), NM(2, 4), NM(3, 4), NM(1, 4), NM(4, 8), NM(3, 5), NM(15, 16)])
def test_every_group_keeps_its_largest(pattern: NM, ties: bool) -> None:
    """Each group loses exactly N, the same ones that plain Python sorting removes; per_row changes nothing."""
    score = scores((7, 6 * pattern.group), seed=2, ties=ties)
    keep = pattern.keep(score)
    assert torch.equal(keep, pattern.keep(score, per_row=True))
    groups = zip(score.view(-1, pattern.group), keep.view(-1, pattern.group), strict=True)
    for values, kept in groups:
        assert kept.tolist() == brute_keep(values.tolist(), pattern.zeros)
    assert int((~keep).sum()) == pattern.count_removed(score.shape)


@pytest.mark.parametrize("pattern", [Unstructured(0.5), NM(2, 4), NM(1, 2), NM(3, 8), NM(2, 5), NM(200, 300)], ids=str)
def test_holds_and_counts_by_their_definition(pattern: Pattern) -> None:
    """As groups counted one by one say, with one weight more or less than the pattern leaves at a random position too."""
    random = torch.Generator().manual_seed(0)
    for kept in ("mask", "one more", "one less", "all", "none"):
        weight = torch.rand(9, 600, generator=random) + 0.1
        place = tuple(torch.randint(600, (2,), generator=random) % torch.tensor(weight.shape))
        mask = {"all": torch.ones(9, 600), "none": torch.zeros(9, 600)}.get(kept, pattern.keep(weight))
        weight *= mask
        if kept.startswith("one"):
            weight[place] = kept == "one more"
        zeros = (weight == 0).unflatten(1, (-1, pattern.group)).sum(-1) if isinstance(pattern, NM) else (weight == 0).sum()
        wanted = pattern.zeros if isinstance(pattern, NM) else pattern.count_removed(weight.shape)
        holds, count = pattern.holds_async(weight)
        assert bool(holds) == bool((zeros >= wanted).all()) == pattern.holds(weight), kept
        assert int(count) == int((weight != 0).sum()), kept


def test_ties_go_by_position() -> None:
    """Where all scores are equal the earlier positions go."""
    equal = torch.zeros(2, 4)
    assert Unstructured(0.5).keep(equal).tolist() == [[False] * 4, [True] * 4]
    assert Unstructured(0.5).keep(equal, per_row=True).tolist() == [[False, False, True, True]] * 2
    assert NM(3, 4).keep(equal).tolist() == [[False, False, False, True]] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_count_exactly(dtype: torch.dtype) -> None:
    """Coarse dtypes are full of ties; the counts stay exact."""
    score = scores((19, 24)).to(dtype)
    assert int((~Unstructured(0.7).keep(score)).sum()) == round(0.7 * score.numel())
    assert bool((NM(2, 4).keep(score).view(-1, 4).sum(1) == 2).all())


@pytest.mark.parametrize(("pattern", "width"), [(NM(2, 4), 6), (NM(3, 4), 3), (NM(4, 8), 12)])
def test_indivisible_widths_name_the_numbers(pattern: NM, width: int) -> None:
    """check() and keep() refuse a width that the group does not divide, and name pattern, group and width."""
    message = rf"{pattern} .*{pattern.group}, got {width}"
    with pytest.raises(InvalidSetting, match=message):
        pattern.check((5, width))
    with pytest.raises(InvalidSetting, match=message):
        pattern.keep(torch.rand(5, width))
    pattern.check((5, 2 * pattern.group))
    Unstructured(0.5).check((5, width))


@settings(deadline=None, derandomize=True, max_examples=200, database=None)
@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=40), data=st.data())
def test_keep_largest_is_a_stable_sort(values: list[int], data: st.DataObject) -> None:
    """keep_largest equals a stable sort for any counts and any ties."""
    removed = data.draw(st.integers(0, len(values)))
    keep = keep_largest(torch.tensor(values, dtype=torch.float32), removed)
    assert keep.tolist() == brute_keep([float(value) for value in values], removed)
