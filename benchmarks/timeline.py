"""What ran beside what: moments on one device in, speeds and slowdowns out. Moments are in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lane:
    """Things that ran one after the other: thing i from ``marks[i]`` to ``marks[i + 1]``."""

    marks: Sequence[float]

    def within(self, start: float, end: float) -> Sequence[float]:
        """The marks of the things that ran wholly between two moments; fewer than two marks: none did."""
        return [mark for mark in self.marks if start <= mark <= end]


def rate(lane: Lane, other: Lane, skip: int) -> float | None:
    """Things a second of `lane` while `other` ran too, its first `skip` things left out; None: too few."""
    inside = lane.within(other.marks[0], other.marks[-1])[skip:]
    return (len(inside) - 1) / (inside[-1] - inside[0]) if len(inside) > 1 else None


def slowdown(alone: Lane, beside: Lane, other: Lane, skip: int = 3) -> float | None:
    """How much longer things of `beside` took while `other` ran than those of `alone`, as a share."""
    quiet = rate(alone, alone, skip)
    busy = rate(beside, other, skip)
    return quiet / busy - 1 if quiet is not None and busy is not None else None
