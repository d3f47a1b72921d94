"""Times transfers: what to run in, seconds of every repetition out.

Repetitions of everything that is compared are interleaved, so that a clock or a neighbour that changes
touches all alike. On a GPU the device works on something else while the CPU submits, as in an engine: time
runs from the end of that work to the last byte, and the CPU time of the submission is told apart.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

SHORTEST_COVER, LONGEST_COVER = 4_000_000, 128_000_000
"""Device cycles of other work: about 2 ms and 70 ms."""

FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Run:
    """One thing to time. `submit` returns a handle; `finish(handle, stream)` makes the stream wait for all of
    it, `first(handle, stream)` for its first layer. A `stream` of None blocks the caller."""

    name: str
    submit: Callable[[], Any]
    finish: Callable[[Any, Any], None] = lambda handle, stream: None
    first: Callable[[Any, Any], None] | None = None


@dataclass(frozen=True)
class Sample:
    """One repetition, in seconds. `covered`: the device was busy until after the submission."""

    seconds: float
    submit: float
    first: float | None
    covered: bool


@dataclass(frozen=True)
class Timing:
    """All repetitions of one run."""

    samples: tuple[Sample, ...]

    @property
    def seconds(self) -> float:
        return statistics.median(s.seconds for s in self.samples)

    @property
    def submit(self) -> float:
        return statistics.median(s.submit for s in self.samples)

    @property
    def first(self) -> float | None:
        found = [s.first for s in self.samples if s.first is not None]
        return statistics.median(found) if found else None

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median."""
        return spread([s.seconds for s in self.samples])

    @property
    def covered(self) -> bool:
        return sum(s.covered for s in self.samples) * 2 > len(self.samples)


def spread(values: Sequence[float]) -> float:
    """Distance of the quartiles as a share of the median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


class Clock(Protocol):
    """What times one repetition."""

    def time(self, run: Run) -> Sample: ...


class HostClock:
    """For pools on the CPU, where a submission has done its work when it returns."""

    def time(self, run: Run) -> Sample:
        begin = time.perf_counter()
        handle = run.submit()
        submitted = time.perf_counter()
        run.finish(handle, None)
        return Sample(time.perf_counter() - begin, submitted - begin, None, True)


class CudaClock:
    """For pools on a CUDA device; everything runs behind torch's current stream."""

    def __init__(self) -> None:
        self._cuda: Any = torch.cuda
        self._side = self._cuda.Stream()
        self._cycles: dict[str, int] = {}

    def time(self, run: Run) -> Sample:
        stream = self._cuda.current_stream()
        start, end, early = (self._cuda.Event(enable_timing=True) for _ in range(3))
        cycles = self._cycles.get(run.name, SHORTEST_COVER)
        torch.cuda.synchronize()
        self._cuda._sleep(cycles)
        start.record(stream)
        begin = time.perf_counter()
        handle = run.submit()
        took = time.perf_counter() - begin
        covered = not start.query()
        if run.first is not None:
            run.first(handle, self._side)
            early.record(self._side)
        run.finish(handle, stream)
        end.record(stream)
        torch.cuda.synchronize()
        run.finish(handle, None)
        # What blocks is never covered: longer work in front of it would only be longer.
        wanted = cycles if covered else cycles * 4
        self._cycles[run.name] = wanted if wanted <= LONGEST_COVER else SHORTEST_COVER
        first = start.elapsed_time(early) / 1e3 if run.first is not None else None
        return Sample(start.elapsed_time(end) / 1e3, took, first, covered)


def interleaved(
    runs: Sequence[Run], clock: Clock, repeats: int, warm_ups: int = 3, limit_s: float = 60.0
) -> dict[str, Timing]:
    """Times every run `repeats` times, by turns; fewer (at least 3) once `limit_s` seconds have passed."""
    for run in runs:
        for _ in range(warm_ups):
            clock.time(run)
    found: dict[str, list[Sample]] = {run.name: [] for run in runs}
    begin = time.perf_counter()
    for turn in range(repeats):
        for run in runs if turn % 2 == 0 else reversed(runs):
            found[run.name].append(clock.time(run))
        if turn + 1 >= FEWEST_ROUNDS and time.perf_counter() - begin > limit_s:
            break
    return {name: Timing(tuple(samples)) for name, samples in found.items()}
