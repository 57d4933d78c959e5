"""A check: one promise with its name, and what is said where it is broken."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, NoReturn
from unittest import SkipTest

import numpy as np
import torch

from sparsellm.errors import first_line


class FailedCheck(AssertionError):
    """A broken promise: the message has the promise, what was seen, and how to mend it."""


class Fault(Exception):
    """The fault that a check has seen, and how to mend it, in two sentences."""


@dataclass(frozen=True)
class Check:
    """One promise of a contract; calling it checks an object.

    Attributes:
        function: Checks an object. The first paragraph of its docstring is the promise.
    """

    function: Callable[[Any], None]

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    @property
    def promise(self) -> str:
        """The promise, in a sentence."""
        return " ".join((self.function.__doc__ or "").partition("\n\n")[0].split())

    def __call__(self, subject: Any) -> None:
        """Check an object in one thread, and leave the states of random generators as they were.

        Raises:
            FailedCheck: It breaks the promise.
            unittest.SkipTest: It cannot be checked here, for the reason that is given.
        """
        title = f"{self.name} of {type(subject).__name__}: {self.promise}"
        try:
            with undisturbed():
                self.function(subject)
        except Fault as fault:
            raise FailedCheck(f"{title} {fault}") from None
        except SkipTest:
            raise
        except Exception as error:  # code of others
            raise FailedCheck(f"{title} It raises {type(error).__name__}: {first_line(error)}.") from error


def fail(seen: str, mend: str) -> NoReturn:
    """End a check with what was seen and how to mend it, two sentences."""
    raise Fault(f"{seen} {mend}")


@contextmanager
def undisturbed() -> Iterator[None]:
    """A context of one thread without gradients, after which random generators have the states that they had before."""
    threads, states = torch.get_num_threads(), (random.getstate(), np.random.get_state())
    torch.set_num_threads(1)  # the last bits of a sum depend on their number
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])


def seed_everything(seed: int) -> None:
    """Seed the global random generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def is_frozen_dataclass(subject: Any) -> bool:
    """Whether an object is of a class that `dataclass(frozen=True)` made."""
    return is_dataclass(subject) and bool(getattr(subject, "__dataclass_params__").frozen)  # noqa: B009 (no public type has it)


def check_settings(subject: Any) -> None:
    """It is a frozen dataclass whose fields, but for a solver, have defaults and values that JSON holds: its settings."""
    if not is_frozen_dataclass(subject):
        fail(f"{type(subject).__name__} is none.", "Decorate the class with @dataclass(frozen=True).")
    for x in (x for x in fields(subject) if x.init):
        value = getattr(subject, x.name)
        if is_dataclass(value) and not isinstance(value, type):
            check_settings(value)
            continue
        if x.default is MISSING and x.default_factory is MISSING:
            fail(f"{x.name} has no default.", "Give it one.")
        try:
            read = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            fail(f"{x.name}={value!r} is no JSON.", "Make it a number, a text, true, false or None.")
        if replace(subject, **{x.name: read}) != subject:
            fail(f"{x.name}={value!r} is {read!r} when JSON is read.", "Use a type that JSON has.")
