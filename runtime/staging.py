"""The staged path: kernels between device rows and a ring of staging slots, the copy engine to the host.

Every pool has staging memory of its own, in equal slots; those of all pools are used in step. A slot holds
whole pages in the host's layout, so every range of a page is one copy, and neighbouring host pages merge
into longer ones. While the copy engine empties one slot, kernels fill the next. What nothing overlaps, the
first chunk of a write-back and the last of a load, is small.

Note [Slots]: a slot is used again after the event that stands for it. Its first use in a transfer is behind
all of the direction's earlier transfers, since a write-back ends with its copies joined and a load starts
behind the one before; so events are kept from one transfer to the next only where directions share slots.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from poolwright.runtime.costs import LEAD, Costs, alone
from poolwright.runtime.driver import Driver, Event, Stream
from poolwright.runtime.indices import Batch
from poolwright.runtime.launch import Launcher, Part
from poolwright.runtime.memory import GUARD, PATTERN
from poolwright.runtime.moves import Member, Move, Ring
from poolwright.runtime.native import CopyLists, Runs, in_host_order
from poolwright.runtime.pages import spans

SLOTS = 2
"""Slots that a direction uses in turn: one is filled while the other is emptied."""


def slots_of(in_place: bool) -> int:
    """Slots of a pool: two for each direction, so that one does not wait for the other. Where rows change,
    both share two: all of the memory is to hold what waits to be captured."""
    return SLOTS if in_place else 2 * SLOTS


class _Stage:
    """A member's slots, and where the ranges of its pages lie on both sides."""

    def __init__(self, member: Member, ring: Ring) -> None:
        self.member, self.ring = member, ring
        self.page_bytes = max(member.layout.page_bytes, 1)
        self.slots = [ring.slot(number) for number in range(SLOTS if ring.shared else 2 * SLOTS)]
        runs = array("Q")
        inside = spans(member.program, ring.slot_pages)
        for here, there in zip(spans(member.program, member.place.pages), inside, strict=True):
            runs.extend((here.start, here.nbytes, there.start, there.nbytes, here.nbytes))
        self.runs = Runs(runs)
        self.lists = CopyLists(member.place.address, member.buffer.borders)

    def chunks(self, batch: Batch, direction: str, wanted: int) -> Iterator[tuple[array[int], Batch]]:
        """About `wanted` parts of a batch that fit a slot: host pages, and the ids with positions in the slot
        for them. They come in the order of their host pages, so that runs merge."""
        count, on_device = batch.count, batch.on_device
        ids = batch.ids if on_device is not None else in_host_order(batch.ids, count)
        span = 0 if on_device is None else len(on_device) // count
        sizes = chunk_sizes(count, wanted, self.ring.slot_pages)
        inside, first = array("I", range(max(sizes))), 0
        for size in sizes if direction == "write_back" else reversed(sizes):
            end = first + size
            there = None if on_device is None else on_device[first * span : end * span]
            both = inside[:size] + ids[count + first : count + end]
            yield ids[first:end], Batch(batch.unit, both, size, on_device=there)
            first = end


class _Chunk(NamedTuple):
    """One launch and one batch of copies: what goes through one slot of every pool.

    `last`: nothing else of this transfer goes through the slot. `host`, `slot`, `sizes`: the copies.
    """

    slot_number: int
    last: bool
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
        self._free: list[Event | None] = [None] * 2 * SLOTS  # see Note [Slots]
        self._turns = {"write_back": 0, "load": SLOTS}
        self._shared = False
        self._rows = array("Q")  # three lists of copies of a chunk
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
            stage.chunks(move.batch, direction, 1 if self._fills(stage, direction) else wanted)
            for stage, move in pairs
        ]
        turns, rows = list(zip_longest(*lists)), self._rows_for(pairs)
        room = len(rows) // 3
        for left, turn in zip(range(len(turns) - 1, -1, -1), turns, strict=True):
            slot, count = self._next_slot(direction), 0
            parts: list[Part] = []
            for (stage, move), part in zip(pairs, turn, strict=True):
                if part is not None:
                    place = stage.slots[slot]
                    parts.append((move.member, place, part[1], None))
                    count = stage.lists.add(rows, count, stage.runs, part[0], 0, place.address)
            copies = rows[:count], rows[room : room + count], rows[2 * room : 2 * room + count]
            yield _Chunk(slot, left < SLOTS, parts, *copies)

    def _rows_for(self, pairs: Sequence[tuple[_Stage, Move]]) -> array[int]:
        """Three lists in one with room for the copies of a chunk: host and slot addresses, bytes."""
        room = 3 * sum(stage.lists.room(stage.ring.slot_pages, stage.runs) for stage, _ in pairs)
        if room > len(self._rows):
            self._rows = array("Q", (0,)) * room
        return self._rows

    def _fills(self, stage: _Stage, direction: str) -> bool:
        """Whether pages fill whole slots."""
        return direction == "write_back" and stage.member.in_place


def chunk_sizes(pages: int, chunks: int, slot_pages: int) -> list[int]:
    """Pages of each chunk when so many are cut into about so many chunks that fit a slot.

    The first is the one that nothing overlaps: it is about `LEAD` times smaller. One chunk that does not fit
    becomes whole slots.
    """
    if chunks == 1 or pages == 1:
        full, rest = divmod(pages, slot_pages)
        return [slot_pages] * full + [rest] * (rest > 0)
    size = min(slot_pages, math.ceil(pages * (1 - alone(chunks)) / (chunks - 1)))
    full, lead = divmod(pages, size)
    if 0 < lead <= size // 3:
        return [lead] + [size] * full
    lead = max(1, size // LEAD)
    full = -(-(pages - lead) // size)
    each, more = divmod(pages - lead, full)
    return [lead] + [each + 1] * more + [each] * (full - more)
