"""The staged path: kernels between device rows and a ring of staging slots, the copy engine to the host.

Every pool has staging memory of its own, in equal slots; those of all pools are used in step. A slot holds
whole pages in the host's layout, so every range of a page is one copy, and neighbouring host pages merge
into longer ones. While the copy engine empties one slot, kernels fill the next.

Note [Slots]: a slot is used again after the event that stands for it. Its first use in a transfer is behind
all of the direction's earlier transfers, since a write-back ends with its copies joined and a load starts
behind the one before; so events are kept from one transfer to the next only where directions share slots.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from poolwright.runtime.costs import Costs
from poolwright.runtime.driver import Driver, Event, Stream
from poolwright.runtime.indices import Batch
from poolwright.runtime.launch import Launcher, Part
from poolwright.runtime.memory import GUARD, PATTERN
from poolwright.runtime.moves import Member, Move, Ring
from poolwright.runtime.pages import spans

SLOTS = 2
"""Slots that a direction uses in turn: one is filled while the other is emptied."""


def slots_of(in_place: bool) -> int:
    """Slots of a pool: two for each direction, so that one does not wait for the other. Where rows change,
    both share two: all of the memory is to hold what waits to be captured."""
    return SLOTS if in_place else 2 * SLOTS


class _Stage:
    """A member's slots, and where the ranges of its pages lie on both sides.

    `borders`: host addresses that no copy crosses, where one registration ends and the next begins.
    """

    def __init__(self, member: Member, ring: Ring) -> None:
        self.member, self.ring, self.borders = member, ring, member.buffer.borders
        self.page_bytes = max(member.layout.page_bytes, 1)
        self.slots = [ring.slot(number) for number in range(SLOTS if ring.shared else 2 * SLOTS)]
        inside = spans(member.program, ring.slot_pages)
        self.spans = tuple(zip(spans(member.program, member.place.pages), inside, strict=True))

    def chunks(self, batch: Batch, wanted: int) -> Iterator[tuple[list[int], Batch]]:
        """About `wanted` parts of a batch that fit a slot: host pages, and the ids with positions in the slot
        for them. They come in the order of their host pages, so that runs merge."""
        host, device, on_device = batch.host.tolist(), batch.device, batch.on_device
        count = len(host)
        size = chunk_pages(count, wanted, self.ring.slot_pages)
        if on_device is None:
            places = sorted(range(count), key=host.__getitem__)
            host, device = [host[at] for at in places], array("I", [device[at] for at in places])
        span = 0 if on_device is None else len(on_device) // count
        inside = array("I", range(min(size, count)))
        for i in range(0, count, size):
            pages = host[i : i + size]
            part = on_device if on_device is None else on_device[i * span : (i + size) * span]
            both = inside[: len(pages)] + device[i : i + size]
            yield pages, Batch(batch.unit, both, len(pages), on_device=part)

    def copies(self, chunk: _Chunk, pages: Sequence[int], base: int) -> None:
        """Add the copies of these pages, which lie in a slot from address `base` on, to a chunk."""
        runs, origin = _runs(pages), self.member.place.address
        for outer, inner in self.spans:
            size, inside, start = outer.nbytes, base + inner.start, origin + outer.start
            host = [start + first * size for first, _, _ in runs]
            slot = [inside + at * size for _, at, _ in runs]
            sizes = [count * size for _, _, count in runs]
            if self.borders:
                host, slot, sizes = _cut(host, slot, sizes, self.borders)
            chunk.host.extend(host)
            chunk.slot.extend(slot)
            chunk.sizes.extend(sizes)


class _Chunk(NamedTuple):
    """One launch and one batch of copies: what goes through one slot of every pool.

    `last`: nothing else of this transfer goes through the slot.
    """

    slot_number: int
    last: bool
    parts: list[Part]
    host: list[int]
    slot: list[int]
    sizes: list[int]


class Staging:
    """Moves batches through the slots of their pools. Not thread safe: its owner holds a lock.

    `delayed`: of the last write-back, pages that were read only after others had left the staging memory,
    because they are more than it holds.
    """

    def __init__(self, driver: Driver, costs: Costs) -> None:
        self._driver, self._costs = driver, costs
        self._stages: dict[int, _Stage] = {}
        self._free: list[Event | None] = [None] * 2 * SLOTS  # see Note [Slots]
        self._turns = {"write_back": 0, "load": SLOTS}
        self._shared = False
        self.delayed = 0

    def add(self, number: int, member: Member) -> None:
        """Take in a member that has staging memory."""
        assert member.ring is not None
        self._stages[number] = _Stage(member, member.ring)
        self._shared = self._shared or member.ring.shared  # slots of all pools are used in step

    def clear(self, stream: Stream) -> None:
        """Fill all slots with zeros: padding between components is never written, and what lay there before
        is nobody's business."""
        for stage in self._stages.values():
            memory = stage.ring.memory
            self._driver.fill(memory.address, 0, memory.nbytes // 4, stream)
            self._driver.fill(memory.address + memory.nbytes, PATTERN * 0x01010101, GUARD // 4, stream)

    def write_back(
        self, launcher: Launcher, moves: Sequence[Move], stream: Stream, copies: Stream, keep: list[object]
    ) -> Event:
        """Gather in `stream`, copy in `copies`; returns the event after the last gather."""
        driver = self._driver
        self.delayed = sum(
            max(0, move.batch.count - SLOTS * self._stages[move.member].ring.slot_pages) for move in moves
        )
        for chunk in self._chunks(moves, "write_back"):
            slot = chunk.slot_number
            free = self._free[slot]
            if free is not None:
                driver.wait(stream, free)
                self._free[slot] = None
            launcher.launch("write_back", "gather", chunk.parts, stream, keep)
            driver.follow(copies, stream)
            driver.copy(chunk.host, chunk.slot, chunk.sizes, copies, inward=False)
            if self._shared or not chunk.last:
                self._free[slot] = driver.record(copies)
        return driver.record(stream)

    def load(
        self, launcher: Launcher, moves: Sequence[Move], stream: Stream, copies: Stream, keep: list[object]
    ) -> None:
        """Copy in `copies`, scatter in `stream`."""
        driver = self._driver
        driver.follow(copies, stream)
        for chunk in self._chunks(moves, "load"):
            slot = chunk.slot_number
            free = self._free[slot]
            if free is not None:
                driver.wait(copies, free)
                self._free[slot] = None
            driver.copy(chunk.slot, chunk.host, chunk.sizes, copies, inward=True)
            driver.follow(stream, copies)
            launcher.launch("load", "scatter", chunk.parts, stream, keep)
            if self._shared or not chunk.last:
                self._free[slot] = driver.record(stream)

    def _next_slot(self, direction: str) -> int:
        way = "write_back" if self._shared else direction
        slot = self._turns[way]
        self._turns[way] = slot + 1 if (slot + 1) % SLOTS else slot + 1 - SLOTS
        return slot

    def hold(self, event: Event) -> None:
        """Use no slot before `event`, which is behind everything submitted so far."""
        self._free[:] = [event] * 2 * SLOTS

    def _chunks(self, moves: Sequence[Move], direction: str) -> Iterator[_Chunk]:
        """What goes through each slot in turn: the next part of every move that has one left.

        Rows that wait to be captured fill whole slots: the ring takes in all that it can hold at once.
        """
        stages = [self._stages[move.member] for move in moves]
        pairs = list(zip(stages, moves, strict=True))
        nbytes = sum(stage.page_bytes * move.batch.count for stage, move in pairs)
        wanted = self._costs.of(direction).chunks(nbytes)
        lists = [
            stage.chunks(move.batch, 1 if direction == "write_back" and stage.member.in_place else wanted)
            for stage, move in pairs
        ]
        turns = list(zip_longest(*lists))
        for left, turn in zip(range(len(turns) - 1, -1, -1), turns, strict=True):
            slot = self._next_slot(direction)
            chunk = _Chunk(slot, left < SLOTS, [], [], [], [])
            for stage, move, part in zip(stages, moves, turn, strict=True):
                if part is not None:
                    place = stage.slots[slot]
                    chunk.parts.append((move.member, place, part[1], None))
                    stage.copies(chunk, part[0], place.address)
            yield chunk


def chunk_pages(pages: int, chunks: int, slot_pages: int) -> int:
    """Pages of each chunk when so many are cut into about so many chunks that fit a slot."""
    return max(1, min(slot_pages, -(-pages // chunks)))


def _runs(pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first page, position in the list, count) of neighbouring pages."""
    runs = []
    first = at = 0
    expected = -1
    for position, page in enumerate(pages):
        if page != expected:
            if position:
                runs.append((first, at, position - at))
            first, at = page, position
        expected = page + 1
    if pages:
        runs.append((first, at, len(pages) - at))
    return runs


def _cut(
    host: Sequence[int], slot: Sequence[int], sizes: Sequence[int], borders: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """The same copies in pieces that end at borders: the driver refuses a range of two registrations."""
    pieces = [piece for copy in zip(host, slot, sizes, strict=True) for piece in _pieces(*copy, borders)]
    return [piece[0] for piece in pieces], [piece[1] for piece in pieces], [piece[2] for piece in pieces]


def _pieces(host: int, slot: int, size: int, borders: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    end = host + size
    for border in borders[bisect_right(borders, host) :]:
        if border >= end:
            break
        yield host, slot, border - host
        slot, host = slot + border - host, border
    yield host, slot, end - host
