"""Chooses the path of a transfer: a pure function of what is moved and of what this machine can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PATHS = ("zero_copy", "staged", "host", "torch")


@dataclass(frozen=True)
class Availability:
    """Whether a path can run here; when not, why, and the command that mends it."""

    path: str
    available: bool
    reason: str
    mend: str = ""


@dataclass(frozen=True)
class Work:
    """What is moved: ``write_back`` or ``load``, bytes of one range, ranges, bytes in all."""

    direction: str
    range_bytes: int
    ranges: int
    total: int
    layered: bool = False
    in_place: bool = False
    whole_pages: bool = True


STAGED_RANGE = 128 << 10
"""From ranges of this size on the copy engine outruns the SMs (docs/benchmarks.md)."""

STAGED_TOTAL = 24 << 20
"""Below this total a pipeline has no time to fill."""


def choose(work: Work, paths: Sequence[Availability], forced: str = "auto") -> str:
    """The path to take. Raises ValueError when the forced one cannot be taken, naming why."""
    usable = [p.path for p in paths if p.available and (p.path != "staged" or work.whole_pages)]
    if forced != "auto":
        if forced in usable:
            return forced
        report = next((p for p in paths if p.path == forced), None)
        reason = ""
        if report and report.available:
            what = "single layers" if work.layered else "scattered tokens, or pages checked on the device"
            reason = f"it moves whole pages, and these are {what}"
        reason = reason or (report.reason if report else f"expected one of {', '.join(PATHS)}")
        raise ValueError(f"path {forced!r} was asked for and cannot be taken: {reason}")
    if "host" in usable:
        return "host"
    if "staged" in usable and not work.layered:
        if work.in_place and work.direction == "write_back":
            return "staged"
        if work.range_bytes >= STAGED_RANGE and work.total >= STAGED_TOTAL:
            return "staged"
    for path in PATHS:
        if path in usable:
            return path
    raise ValueError("no path can run: " + "; ".join(f"{p.path}: {p.reason}" for p in paths))
