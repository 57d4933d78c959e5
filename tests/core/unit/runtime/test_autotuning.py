"""Comparisons of computations: measured once on a machine, kept where the machine was idle."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sparsellm.checkpoints import machine_cache
from sparsellm.checkpoints.machine_cache import use_cache
from sparsellm.models import sparse_matmul
from sparsellm.models.sparse_matmul import max_density, skips_zeros
from sparsellm.runtime import autotuning, products
from sparsellm.runtime.autotuning import adopt, forget, known, measure_speedup, speedup, unsteady

NAME = "a product of another kind"


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of this test's own cache."""
    monkeypatch.setattr(autotuning, "store", None)  # what it was is set again at the end
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use_cache()
    forget()
    yield tmp_path / "sparsellm" / machine_cache.FILE
    forget()


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Asks as another process does; measurements give 1, 2, 3 and so on."""
    numbers = itertools.count(1)

    def another_process(*, steady: bool = True) -> float:
        monkeypatch.setattr(autotuning, "measure_speedup", lambda *_: (float(next(numbers)), steady))
        forget()
        return speedup(NAME, lambda: (lambda: None, lambda: None))

    return another_process


def test_a_machine_is_measured_once(ask: Callable[..., float], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes read the file; another processor, number of threads or version is measured anew."""
    assert [ask(), ask()] == [1, 1]
    for module, name in ((torch, "get_num_threads"), (autotuning, "processor")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda: 77)
            assert ask() > 1
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9")
        assert ask() == 4
    assert ask() == 1
    assert {name for values in json.loads(file.read_text()).values() for name in values} == {NAME}


@pytest.mark.parametrize(
    "content", ["{", "[]", "null", '{"a": 1}', '{"a": {"b": "c"}}', '{"a": {"b": null}}', "[" * 10**5, "\x00"]
)
def test_a_damaged_file_is_replaced(content: str, ask: Callable[..., float], file: Path) -> None:
    file.parent.mkdir()
    file.write_text(content)
    assert [ask(), ask()] == [1, 1]


@pytest.mark.parametrize("value", ["-1", "0", "NaN", "Infinity", "1e999"])
def test_a_number_that_is_no_speedup_is_measured_again(value: str, ask: Callable[..., float], file: Path) -> None:
    ask()
    file.write_text(file.read_text().replace("1.0", value))
    assert ask() == 2


def test_what_was_measured_under_load_is_told_and_not_kept(ask: Callable[..., float], file: Path) -> None:
    assert ask(steady=False) == 1
    assert unsteady() == [NAME]
    assert not file.exists()
    assert ask() == 2
    assert not unsteady()
    assert ask() == 2


def test_it_can_be_kept_all_the_same(ask: Callable[..., float]) -> None:
    ask(steady=False)
    autotuning.keep()
    assert not unsteady()
    assert ask() == 1


def test_a_cache_that_cannot_be_written_does_not_matter(ask: Callable[..., float], file: Path) -> None:
    file.parent.write_text("a file where the folder would be")
    assert [ask(), ask()] == [1, 2]


def test_a_user_without_a_home_folder(ask: Callable[..., float], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", missing)
    use_cache()
    assert autotuning.store is None
    assert [ask(), ask()] == [1, 2]


def test_results_are_adopted_and_forgotten() -> None:
    adopt({NAME: 3.0})
    assert speedup(NAME, lambda: (lambda: None, lambda: None)) == 3
    adopt({"another": 2.0})
    assert speedup(NAME, lambda: (lambda: time.sleep(0.002), lambda: time.sleep(0.001))) < 3


def test_two_at_a_time_measure_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits, and reads what the first one wrote."""
    calls: list[int] = []

    def slowly(*_: object) -> tuple[float, bool]:
        calls.append(1)
        time.sleep(0.2)
        return 2.0, True

    monkeypatch.setattr(autotuning, "measure_speedup", slowly)
    found: list[float] = []
    threads = [threading.Thread(target=lambda: found.append(speedup(NAME, lambda: (int, int)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [2, 2]
    assert len(calls) == 1


def test_a_measurement_may_need_another_one() -> None:
    inner = lambda: speedup("inner", lambda: (int, int))  # noqa: E731
    assert speedup("outer", lambda: (inner, inner)) > 0
    assert known().keys() == {"inner", "outer"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], Callable[[], None]]:
    """Makes computations that take given seconds by a clock of the test, and a tenth of a second from then on."""
    now = [0.0]
    monkeypatch.setattr(autotuning.time, "perf_counter", lambda: now[0])

    def computation(seconds: list[float]) -> Callable[[], None]:
        left = iter(seconds)

        def compute() -> None:
            now[0] += next(left, 0.1)

        return compute

    return computation


def test_measurement_is_the_quotient_of_the_shortest_times(clock: Callable[[list[float]], Callable[[], None]]) -> None:
    """The first round, which is slow, does not count, nor do times that other programs lengthen."""
    usual, other = [9, 0.06, 0.04, 0.04, 0.06], [1, 0.02, 0.2, 0.02, 0.02]
    assert measure_speedup(clock(usual), clock(other)) == (pytest.approx(0.04 / 0.02), True)


def test_a_measurement_under_load_is_noticed(clock: Callable[[list[float]], Callable[[], None]]) -> None:
    """The shortest time of every second round is a half longer than that of the others."""
    usual, other = [1, 0.06, 0.04, 0.06, 0.04], [1, 0.02, 0.02, 0.02, 0.02]
    assert measure_speedup(clock(usual), clock(other)) == (pytest.approx(2), False)


def test_the_choices_of_this_machine() -> None:
    """They are within bounds, and measured in a second."""
    products.onednn_speedup()
    assert 0 <= max_density() <= 0.5
    assert 0 <= max_density(torch.bfloat16) <= 0.5
    assert len(known()) <= 5


@pytest.mark.parametrize(
    ("fixed", "slope", "limit"),
    [(0.0, 4.0, 0.25 / 1.1), (0.3, 1.0, 0.25 / 0.55 / 1.1), (0.1, 0.4, 0.5), (0.4, 5.0, (1 / 1.1 - 0.4) / 5), (3.0, 12.0, 0.0)],
)
def test_zeros_are_skipped_where_fixed_costs_leave_a_gain(fixed: float, slope: float, limit: float) -> None:
    """The kernel takes `fixed + slope * density` of a dense product's time; beside fast ones it always loses."""
    name = sparse_matmul.SKIPPING_ZEROS
    adopt({name: 1 / (fixed + slope * 0.25), f"{name}, 5% nonzero": 1 / (fixed + slope * 0.05)})
    assert max_density() == pytest.approx(limit)
    weight = torch.zeros(512, 512)
    weight[: int(512 * limit)] = 1
    assert skips_zeros(weight) is (limit > 0)
    weight[: int(512 * limit) + 1] = 1
    assert not skips_zeros(weight)
