"""The staged path: kernels between device rows and a ring of staging slots, the copy engine to the host.

Every pool has staging memory of its own, in equal slots; those of all pools are used in step. A slot holds
whole pages in the host's layout, so every range of a page is one copy, and neighbouring host pages merge
into longer ones. While the copy engine empties one slot, kernels fill the next.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from poolwright.runtime.costs import Costs
from poolwright.runtime.driver import Driver, Event, Stream
from poolwright.runtime.indices import Batch
from poolwright.runtime.launch import Launcher, Part
from poolwright.runtime.moves import Member, Move, Place, Ring

SLOTS = 2


@dataclass(frozen=True)
class _Span:
    """One range of a page, on the host and in a slot: where page 0 starts, bytes of a page."""

    host: int
    slot: int
    nbytes: int


class _Stage:
    """A member's slots, and where the ranges of its pages lie on both sides."""

    def __init__(self, member: Member, ring: Ring) -> None:
        self.member, self.ring = member, ring
        self.page_bytes = max(member.layout.page_bytes, 1)
        inside = member.program.host(ring.slot_pages)
        self.spans = tuple(
            _Span(member.place.address + here, there, outer.nbytes)
            for outer, inner in zip(member.layout.ranges, inside.ranges, strict=True)
            if outer.nbytes and (outer.ident is None or member.program.present(outer.ident))
            for here, there in zip(outer.starts, inner.starts, strict=True)
        )

    def chunks(self, batch: Batch, wanted: int) -> Iterator[Batch]:
        """At least `wanted` parts of a batch that fit a slot, in the order of their host pages, so that runs
        merge."""
        count = len(batch.host)
        size = max(1, min(self.ring.slot_pages, -(-count // wanted)))
        if batch.on_device is not None:
            span = len(batch.on_device) // count
            for i in range(0, count, size):
                part = batch.on_device[i * span : (i + size) * span]
                yield batch._replace(host=batch.host[i : i + size], on_device=part)
            return
        order = sorted(range(count), key=batch.host.__getitem__)
        host = [batch.host[i] for i in order]
        device = [batch.device[i] for i in order]
        for i in range(0, count, size):
            yield batch._replace(host=host[i : i + size], device=device[i : i + size])


@dataclass
class _Chunk:
    """One launch and one batch of copies: what goes through one slot of every pool."""

    parts: list[Part]
    host: array[int]
    slot: array[int]
    sizes: array[int]


class Staging:
    """Moves batches through the slots of their pools. Not thread safe: its owner holds a lock.

    `delayed`: of the last write-back, pages that were read only after others had left the staging memory,
    because they are more than it holds.
    """

    def __init__(self, driver: Driver, costs: Costs) -> None:
        self._driver, self._costs = driver, costs
        self._stages: dict[int, _Stage] = {}
        self._free: list[Event | None] = [None] * SLOTS  # after which a slot may be used again
        self._turn = 0
        self.delayed = 0

    def add(self, number: int, member: Member) -> None:
        """Take in a member that has staging memory."""
        assert member.ring is not None
        self._stages[number] = _Stage(member, member.ring)

    def clear(self, stream: Stream) -> None:
        """Fill all slots with zeros: padding between components is never written, and what lay there before
        is nobody's business."""
        for stage in self._stages.values():
            memory = stage.ring.memory
            self._driver.fill(memory.address, 0, memory.nbytes // 4, stream)

    def write_back(
        self, launcher: Launcher, moves: Sequence[Move], stream: Stream, copies: Stream, keep: list[object]
    ) -> Event:
        """Gather in `stream`, copy in `copies`; returns the event after the last gather."""
        driver = self._driver
        gathered: Event = None
        self.delayed = sum(
            max(0, len(move.batch.host) - SLOTS * self._stages[move.member].ring.slot_pages) for move in moves
        )
        for slot, chunk in self._chunks(moves, "write_back"):
            free = self._free[slot]
            if free is not None:
                driver.wait(stream, free)
            launcher.launch("write_back", "gather", chunk.parts, stream, keep)
            gathered = driver.record(stream)
            driver.wait(copies, gathered)
            driver.copy(chunk.host, chunk.slot, chunk.sizes, copies, inward=False)
            self._free[slot] = driver.record(copies)
        return gathered

    def load(
        self, launcher: Launcher, moves: Sequence[Move], stream: Stream, copies: Stream, keep: list[object]
    ) -> None:
        """Copy in `copies`, scatter in `stream`."""
        driver = self._driver
        driver.wait(copies, driver.record(stream))
        for slot, chunk in self._chunks(moves, "load"):
            free = self._free[slot]
            if free is not None:
                driver.wait(copies, free)
            driver.copy(chunk.slot, chunk.host, chunk.sizes, copies, inward=True)
            driver.wait(stream, driver.record(copies))
            launcher.launch("load", "scatter", chunk.parts, stream, keep)
            self._free[slot] = driver.record(stream)

    def hold(self, event: Event) -> None:
        """Use no slot before `event`, which is behind everything submitted so far."""
        self._free[:] = [event] * SLOTS

    def _chunks(self, moves: Sequence[Move], direction: str) -> Iterator[tuple[int, _Chunk]]:
        """(slot, what goes through it) for each turn: the next part of every move that has one left.

        Rows that wait to be captured fill whole slots: the ring takes in all that it can hold at once.
        """
        stages = [self._stages[move.member] for move in moves]
        nbytes = sum(
            stage.page_bytes * len(move.batch.host) for stage, move in zip(stages, moves, strict=True)
        )
        wanted = self._costs.of(direction).chunks(nbytes)
        lists = [
            stage.chunks(move.batch, 1 if direction == "write_back" and stage.member.in_place else wanted)
            for stage, move in zip(stages, moves, strict=True)
        ]
        for turn in zip_longest(*lists):
            slot, self._turn = self._turn, (self._turn + 1) % SLOTS
            chunk = _Chunk([], array("Q"), array("Q"), array("Q"))
            for stage, move, part in zip(stages, moves, turn, strict=True):
                if part is not None:
                    _into(chunk, move.member, stage, part, stage.ring.slot(slot))
            yield slot, chunk


def _into(chunk: _Chunk, number: int, stage: _Stage, batch: Batch, place: Place) -> None:
    """Add a part of one pool to a chunk: positions in the slot for host pages, copies of merged runs."""
    inside = batch._replace(host=list(range(len(batch.host))))
    chunk.parts.append(Part(number, place, inside))
    runs, borders = _runs(batch.host), stage.member.buffer.borders
    for span in stage.spans:
        base = place.address + span.slot
        copies = (
            [span.host + first * span.nbytes for first, _, _ in runs],
            [base + at * span.nbytes for _, at, _ in runs],
            [count * span.nbytes for _, _, count in runs],
        )
        for into, found in zip(
            (chunk.host, chunk.slot, chunk.sizes), _cut(*copies, borders) if borders else copies, strict=True
        ):
            into.extend(found)


def _runs(pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first page, position in the list, count) of neighbouring pages."""
    runs = []
    first = at = 0
    for position, page in enumerate(pages):
        if position and page == pages[position - 1] + 1:
            continue
        if position:
            runs.append((first, at, position - at))
        first, at = page, position
    if pages:
        runs.append((first, at, len(pages) - at))
    return runs


def _cut(
    host: Sequence[int], slot: Sequence[int], sizes: Sequence[int], borders: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """The same copies, cut where they cross a border between two registrations of host memory: the driver
    refuses a range that lies in two."""
    parts = [part for copy in zip(host, slot, sizes, strict=True) for part in _parts(*copy, borders)]
    return [part[0] for part in parts], [part[1] for part in parts], [part[2] for part in parts]


def _parts(host: int, slot: int, size: int, borders: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    end = host + size
    for border in borders[bisect_right(borders, host) :]:
        if border >= end:
            break
        yield host, slot, border - host
        slot, host = slot + border - host, border
    yield host, slot, end - host
