"""Controllers in every order of calls, operations and failures: see `controller_lives`."""

from __future__ import annotations

import pytest
from controller_lives import KINDS, Count, Life
from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from poolwright.runtime.controller.base import Controller
from poolwright.runtime.controller.book import Book
from poolwright.runtime.controller.flight import Flight, Leg
from poolwright.runtime.errors import PoolError


def lives(steps: int, number: int) -> None:
    """At least so many steps, in lives of all kinds in turn. They must not be idle."""
    count = Count()
    chosen = settings(max_examples=2, stateful_step_count=50, derandomize=False, phases=[Phase.generate])
    while count.steps < steps:
        facts = {"count": count, "config": KINDS[number % len(KINDS)]}
        run_state_machine_as_test(seed(number)(type("Lived", (Life,), facts)), settings=chosen)
        number += 1
    assert count.with_two_open * 3 >= count.steps, count
    assert count.failures * 100 >= count.steps, count
    assert count.acks * 20 >= count.steps and count.layers * 200 >= count.steps and count.refused, count


def test_lives() -> None:
    lives(1000, 0)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_many_lives(part: int) -> None:
    lives(3000, 1000 * (part + 1))


def _no_wait(self: Flight, *_: object) -> None:
    return None


MUTATIONS: dict[str, tuple[object, str, object]] = {
    "a layer is told before it is there": (Flight, "wait_layer", _no_wait),
    "a load is told before it is there": (Flight, "wait_all", _no_wait),
    "rows count as captured at once": (Flight, "wait_captured", _no_wait),
    "every submission is over at once": (Leg, "over", lambda self: True),
    "an error is no end": (Leg, "over", lambda self: self.ticket is not None and self.ticket.done()),
    "nothing is locked": (Book, "locked", lambda self, name: set()),
    "a page that is written may be loaded": (Book, "check", lambda *_: None),
    "ids are read before they are there": (Controller, "_behind", lambda *_: None),
    "locks stay": (Book, "release", lambda *_: None),
    "locks go with the start": (Book, "started", lambda self, queued: self.release(queued.operation)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_lives_notice(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[mutation])
    with pytest.raises((AssertionError, PoolError, ValueError, ExceptionGroup)):
        lives(3000, 0)
