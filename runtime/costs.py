"""What a transfer costs: work and a few constants in, predicted seconds of each path out.

The constants belong to a device and its link. Those of `DEFAULTS` were measured once; `tune` measures them
for the machine it runs on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAD = 8
"""A staged transfer's kernels and copies overlap but for one chunk, so many times smaller than the others:
kernels are done with a large one before the copy engine is with the small one, by a factor of 2 at least."""

BACKGROUND_PATIENCE = 1.5
"""A transfer in the background may take so many times as long, if it leaves the SMs to others for it."""


BESIDE = {"write_back": 3, "load": 2}
"""How many times the CPU's part counts while the other direction is in use: for both of them; for a
write-back once more. It can give way to loads at little cost, and the CPU of a shared host is at times half
as fast as when its part was measured."""

FRONT = 3
"""Windows of a load in layer order that are smaller than its chunks would be."""

FIRST_LATE = 20e-6
"""Seconds that the CPU may spend on the copies of a first layer, which everybody waits for."""


@dataclass(frozen=True)
class Work:
    """What is moved: ``write_back`` or ``load``, bytes of one range, ranges, bytes in all.

    `merged`: ranges that are neighbours on the host and copied as one, on average. `steps`: layers that are
    told one by one, 0: none are. `slot_bytes`: what a slot of staging memory holds. `qos`: ``background``,
    ``urgent`` or None. `beside`: transfers of the other direction run.
    """

    direction: str
    range_bytes: int
    ranges: int
    total: int
    steps: int = 0
    in_place: bool = False
    whole_pages: bool = True
    merged: int = 1
    slot_bytes: int = 32 << 20
    qos: str | None = None
    beside: bool = False


@dataclass(frozen=True)
class Rates:
    """Constants of one direction: times in seconds, rates in bytes a second.

    `direct_start`, `direct_rate`: kernels over the link; `direct_beside`: while the other direction is in use
    (a load beside the copy engine's writes; a write-back in so few blocks that loads keep their rate).
    `staged_start`: before the first byte; `chunk`: what each chunk adds; `relayout_rate`: kernels between
    device rows and staging memory, which overlap with copies except for one chunk; `link_rate`, `copy`: the
    copy engine, and the least time that a copy takes. `submit_direct`, `submit_chunk`, `submit_copy`: the
    CPU's part.
    """

    direct_start: float
    direct_rate: float
    direct_beside: float
    staged_start: float
    chunk: float
    relayout_rate: float
    link_rate: float
    copy: float
    submit_direct: float
    submit_chunk: float
    submit_copy: float

    def chunks(self, nbytes: int) -> int:
        """Into how many chunks so many bytes are best cut: more cost more, fewer overlap less."""
        bought = nbytes / self.relayout_rate / self.chunk  # chunks, for what relayout alone takes
        if bought * (1 - alone(2)) <= 1:
            return 1
        return 1 + max(1, round((math.sqrt(LEAD * bought) - 1) / LEAD))

    def equal_chunks(self, nbytes: int) -> int:
        """As `chunks`, where all have to be about as large: the square root that balances both."""
        return max(1, round(math.sqrt(nbytes / self.relayout_rate / self.chunk)))


@dataclass(frozen=True)
class Costs:
    """Constants of both directions; `source`: where they come from."""

    write_back: Rates
    load: Rates
    source: str

    def of(self, direction: str) -> Rates:
        return self.write_back if direction == "write_back" else self.load


DEFAULTS = Costs(
    write_back=Rates(
        direct_start=4.4e-6,
        direct_rate=52.0e9,
        direct_beside=48.0e9,
        staged_start=14.1e-6,
        chunk=2.0e-6,
        relayout_rate=1.72e12,
        link_rate=55.1e9,
        copy=0.37e-6,
        submit_direct=25e-6,
        submit_chunk=35e-6,
        submit_copy=0.6e-6,
    ),
    load=Rates(
        direct_start=6.2e-6,
        direct_rate=50.8e9,
        direct_beside=33.0e9,
        staged_start=8.0e-6,
        chunk=4.9e-6,
        relayout_rate=0.90e12,
        link_rate=55.3e9,
        copy=0.37e-6,
        submit_direct=25e-6,
        submit_chunk=35e-6,
        submit_copy=0.6e-6,
    ),
    source="an H200 behind PCIe Gen5 x16 (benchmarks/fit_costs.py on the headline grid)",
)


def alone(chunks: int) -> float:
    """The share of all bytes that is in the chunk which nothing overlaps."""
    return 1 / (LEAD * (chunks - 1) + 1)


def predict(path: str, work: Work, costs: Costs) -> float | None:
    """Seconds that `work` takes by this path, on a device that does nothing else, or only transfers of the
    other direction; None: nothing is known.

    The CPU's part counts for what is urgent: else other work of the device hides it. Where transfers run in
    both directions the CPU submits those of the other one, too (`BESIDE`), and both wait for the slowest.
    """
    if path not in ("zero_copy", "staged"):
        return None
    rates = costs.of(work.direction)
    device, cpu = (_direct if path == "zero_copy" else _staged)(work, rates)
    if work.beside:
        return max(device, BESIDE[work.direction] * cpu)
    return max(device, cpu) if work.qos == "urgent" else device


def told_soon(work: Work, costs: Costs) -> bool:
    """Whether staged copies of a first layer are few enough to be submitted at once."""
    return work.ranges <= max(work.steps, 1) * FIRST_LATE / costs.of(work.direction).submit_copy


def _direct(work: Work, rates: Rates) -> tuple[float, float]:
    """Seconds of the device and of the CPU."""
    rate = rates.direct_beside if work.beside else rates.direct_rate
    return rates.direct_start + work.total / rate, rates.submit_direct


def _staged(work: Work, rates: Rates) -> tuple[float, float]:
    chunks = max(rates.chunks(work.total), -(-work.total // max(work.slot_bytes, 1)))
    if work.steps:  # small windows in front
        chunks = min(chunks + FRONT, work.steps)
    copies = max(-(-work.ranges // work.merged), chunks)
    moving = max(work.total / rates.link_rate, copies * rates.copy)
    first = work.total * alone(chunks) / rates.relayout_rate
    device = rates.staged_start + chunks * rates.chunk + first + moving
    return device, chunks * rates.submit_chunk + copies * rates.submit_copy
