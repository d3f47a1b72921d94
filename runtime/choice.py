"""Chooses the path of a transfer: a pure function of what is moved and of what this machine can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poolwright.runtime.costs import BACKGROUND_PATIENCE, Costs, Work, predict, told_soon

PATHS = ("zero_copy", "staged", "host", "torch")


@dataclass(frozen=True)
class Availability:
    """Whether a path can run here; when not, why, and the command that mends it."""

    path: str
    available: bool
    reason: str
    mend: str = ""


def choose(work: Work, paths: Sequence[Availability], costs: Costs, forced: str = "auto") -> str:
    """The path to take: the CPU twin where it can run, rows that change by `staged`, else the fastest.

    What runs in the background takes `staged`, which needs no SMs while it waits for the link, unless that is
    much slower. Raises ValueError when the forced one cannot be taken, naming why.
    """
    usable = [p.path for p in paths if p.available and (p.path != "staged" or work.whole_pages)]
    if forced != "auto":
        return _forced(forced, usable, paths, work)
    if "host" in usable:
        return "host"
    if "staged" in usable and _by_copies(work, usable, costs):
        return "staged"
    for path in PATHS:
        if path in usable:
            return path
    raise ValueError("no path can run: " + "; ".join(f"{p.path}: {p.reason}" for p in paths))


def _by_copies(work: Work, usable: Sequence[str], costs: Costs) -> bool:
    if "zero_copy" not in usable or (work.in_place and work.direction == "write_back"):
        return True
    if work.steps and (work.qos == "urgent" or not told_soon(work, costs)):
        return False
    staged, direct = predict("staged", work, costs), predict("zero_copy", work, costs)
    assert staged is not None and direct is not None
    return staged < direct * (BACKGROUND_PATIENCE if work.qos == "background" else 1)


def _forced(path: str, usable: Sequence[str], paths: Sequence[Availability], work: Work) -> str:
    if path in usable:
        return path
    report = next((p for p in paths if p.path == path), None)
    reason = ""
    if report and report.available:
        what = "scattered tokens, or pages checked on the device"
        if work.steps:
            what = f"single layers that are no runs of the host page, {what}"
        reason = f"it moves whole pages, and these are {what}"
    reason = reason or (report.reason if report else f"expected one of {', '.join(PATHS)}")
    raise ValueError(f"path {path!r} was asked for and cannot be taken: {reason}")
