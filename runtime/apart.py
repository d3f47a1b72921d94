"""Whether bound tensors share a byte: a load would overwrite what it has just written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """The bytes of one tensor that are used: runs of `run` bytes from address `start` on, repeated along
    `axes`, (bytes a step, extent) with the longest step first. `name`: the component that it is of.
    `owner`: the pool, where only those of different pools are compared."""

    name: str
    start: int
    run: int
    axes: tuple[tuple[int, int], ...]
    owner: str = ""

    @property
    def end(self) -> int:
        return self.start + self.run + sum(step * (extent - 1) for step, extent in self.axes)


def rows(name: str, start: int, run: int, axes: Iterable[tuple[int, int]]) -> Rows:
    """The rows along `axes`, (bytes a step, extent) in any order; what is packed is one run."""
    left: list[tuple[int, int]] = []
    for step, extent in sorted(axes):
        if extent == 1:
            continue
        if step == run and not left:
            run *= extent
        else:
            left.append((step, extent))
    return Rows(name, start, run, tuple(reversed(left)))


def sharing(every: Sequence[Rows]) -> tuple[Rows, Rows] | None:
    """The first two of these, by address, that have a byte in common, or None. Rows of one owner may."""
    before: list[Rows] = []
    for one in sorted(every, key=lambda each: each.start):
        before = [other for other in before if other.end > one.start]
        for other in before:
            if (one.owner != other.owner or not one.owner) and meet(other, one):
                return other, one
        before.append(one)
    return None


def meet(one: Rows, other: Rows) -> bool:
    """Whether a byte is in both."""
    steps: dict[int, tuple[int, int]] = {}
    for step, extent in one.axes:
        low, high = steps.get(step, (0, 0))
        steps[step] = low, high + extent - 1
    for step, extent in other.axes:
        low, high = steps.get(step, (0, 0))
        steps[step] = low - extent + 1, high
    return _reaches(sorted(steps, reverse=True), steps, other.start - one.start, one.run, other.run)


def _reaches(
    left: Sequence[int], steps: Mapping[int, tuple[int, int]], distance: int, run: int, other: int
) -> bool:
    """Whether some number of each step leads from a run to one that begins `distance` further, or as near
    that both have a byte in common."""
    if not left:
        return -other < distance < run
    step, rest = left[0], left[1:]
    most = run - 1 + sum(steps[each][1] * each for each in rest)
    least = 1 - other + sum(steps[each][0] * each for each in rest)
    low, high = steps[step]
    first = max(low, -((most - distance) // step))
    last = min(high, (distance - least) // step)
    return any(_reaches(rest, steps, distance - times * step, run, other) for times in range(first, last + 1))
