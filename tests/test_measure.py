"""Timing: what is run, in which order, and what is made of the repetitions; on a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from poolwright.runtime.tools import measure
from poolwright.runtime.tools.measure import CudaClock, HostClock, Run, Sample, Timing, interleaved, spread


class Steps:
    """A clock that tells what it timed; sample n takes n seconds."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def time(self, run: Run) -> Sample:
        self.order.append(run.name)
        run.submit()
        return Sample(float(len(self.order)), 0.0, None, True)


def test_repetitions_are_interleaved_and_turned_round() -> None:
    clock, done = Steps(), []
    runs = [Run(name, lambda name=name: done.append(name)) for name in "abc"]
    found = interleaved(runs, clock, repeats=2, warm_ups=1)
    assert clock.order == [*"abc", *"abc", *"cba"]
    assert done == clock.order
    assert [[s.seconds for s in found[name].samples] for name in "abc"] == [[4, 9], [5, 8], [6, 7]]


def test_a_limit_ends_the_repetitions_after_three_rounds() -> None:
    clock = Steps()
    found = interleaved([Run("a", lambda: None)], clock, repeats=9, warm_ups=0, limit_s=0.0)
    assert len(found["a"].samples) == measure.FEWEST_ROUNDS


def test_a_timing_is_the_median_and_the_distance_of_the_quartiles() -> None:
    samples = [Sample(s, s / 10, s / 2, s < 3) for s in (5.0, 1.0, 2.0, 4.0, 3.0)]
    timing = Timing(tuple(samples))
    assert (timing.seconds, timing.submit, timing.first, timing.covered) == (3.0, 0.3, 1.5, False)
    assert timing.spread == pytest.approx((4 - 2) / 3)
    assert (spread([7.0]), spread([0.0, 0.0])) == (0.0, 0.0)


def test_on_the_cpu_a_run_is_over_when_its_handle_is() -> None:
    calls: list[Any] = []
    run = Run("a", lambda: calls.append("submit"), lambda handle, stream: calls.append(stream))
    sample = HostClock().time(run)
    assert calls == ["submit", None]
    assert 0 <= sample.submit <= sample.seconds
    assert sample.first is None


class FakeCuda:
    """Stands for torch.cuda: a log of what was called; events are numbered in the order of records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
        self.log: list[str] = []
        outer = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: str) -> None:
                self.at = len(outer.log)
                outer.log.append(f"record on {stream}")

            def query(self) -> bool:
                return not busy

            def elapsed_time(self, other: Event) -> float:
                return 1e3 * (other.at - self.at)

        for name, value in {
            "Event": Event,
            "Stream": lambda: "side",
            "current_stream": lambda: "main",
            "synchronize": lambda: self.log.append("synchronize"),
            "_sleep": lambda cycles: self.log.append(f"sleep {cycles}"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def run(self) -> Run:
        def say(what: str) -> Any:
            return lambda handle, stream: self.log.append(f"{what} {handle} on {stream}")

        def submit() -> str:
            self.log.append("submit")
            return "ticket"

        return Run("a", submit, say("finish"), say("first"))


def test_on_a_device_time_runs_from_the_end_of_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch, busy=True)
    sample = CudaClock().time(fake.run())
    assert fake.log == [
        *("synchronize", f"sleep {measure.SHORTEST_COVER}", "record on main", "submit"),
        *("first ticket on side", "record on side", "finish ticket on main", "record on main"),
        *("synchronize", "finish ticket on None"),
    ]
    assert (sample.seconds, sample.first, sample.covered) == (5.0, 3.0, True)


def test_what_a_device_does_not_cover_is_covered_longer_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeCuda(monkeypatch, busy=False)
    clock = CudaClock()
    assert not any(clock.time(fake.run()).covered for _ in range(4))
    slept = [int(line.split()[1]) for line in fake.log if line.startswith("sleep")]
    shortest = measure.SHORTEST_COVER
    assert slept == [shortest, 4 * shortest, 16 * shortest, shortest]
    assert max(slept) <= measure.LONGEST_COVER
