"""The staged path: kernels between device rows and a ring of staging slots, the copy engine to the host.

Every pool has staging memory of its own, in equal slots; those of all pools are used in step. A slot holds
whole pages in the host's layout, so every range of a page is one copy, and neighbouring host pages merge
into longer ones; or, where a page is larger than a slot may be, a part of one. What goes through a slot in
one turn is a *fill*, and moves in *chunks*: while the copy engine empties one chunk, kernels fill the next,
in the same slot or the next one.

Note [Slots]: a slot is used again after the event that stands for it. A write-back is followed by others
while its copies still run, so every slot that it used has one. A load starts behind the one before, so that
its events are kept from one transfer to the next only where directions share slots. Chunks of one fill lie
side by side and wait for nothing of each other.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple

from poolwright.runtime.costs import LEAD, Costs, Rates
from poolwright.runtime.driver import Driver, Event, Launch, Stream
from poolwright.runtime.indices import Batch, Listed
from poolwright.runtime.launch import Launcher, Part
from poolwright.runtime.memory import GUARD, PATTERN
from poolwright.runtime.moves import Member, Move, Order, Place, Ring
from poolwright.runtime.native import CopyLists, Rows, Runs, in_host_order
from poolwright.runtime.parts import SLOTS, Cut, Cutter, Run, Slot
from poolwright.runtime.ticket import LayerEvents


class _Piece(NamedTuple):
    """What a chunk moves of one pool: host pages, the ids with positions in the slot for them; the position
    of the first, and which part of each page (None: all of it)."""

    pages: array[int]
    batch: Batch
    first: int
    cut: Cut | None


_Where = tuple[int, int, int, Cut | None]
"""A piece among the pages of a transfer: its first and end, the first of its fill, which part of each."""


class _Stage:
    """A member's slots, and where its pages lie on both sides."""

    def __init__(self, member: Member, ring: Ring) -> None:
        self.member, self.ring = member, ring
        self.page_bytes = max(member.layout.page_bytes, 1)
        self.slots = [ring.slot(number) for number in range(SLOTS if ring.shared else 2 * SLOTS)]
        self.cutter = Cutter(member.program, member.place.pages, Slot(ring.slot_pages, ring.slot_bytes))
        self.fills_a_page = max(1, len(self.cutter.parts))
        self.lists = CopyLists(member.place.address, member.buffer.borders)
        self._positions = array("I")
        self._shapes: dict[tuple[str, int, int], list[Sequence[_Where]]] = {}
        self._whole = _listed(self.cutter.whole)
        self._parts: dict[int, tuple[Cut, Runs]] = {}

    def fills(
        self, batch: Batch, direction: str, rates: Rates, nbytes: int, cuts: Sequence[Cut] | None = None
    ) -> Iterator[list[_Piece]]:
        """What goes through each slot in turn, in pieces that are best for a transfer of `nbytes`; or `cuts`
        of every page. Pages come in the order in which they lie on the host, so that runs merge."""
        count, most, on_device = batch.count, max(self.ring.slot_pages, 1), batch.on_device
        ids = batch.ids if on_device is not None else in_host_order(batch.ids, count)
        span = 0 if on_device is None else len(on_device) // count
        positions = min(most, count)
        if positions > len(self._positions):
            self._positions = array("I", range(positions))
        numbers = self._positions[:positions] + ids[count:]
        listed = Listed(numbers)

        def piece(start: int, end: int, fill: int, cut: Cut | None) -> _Piece:
            part = on_device if on_device is None else on_device[start * span : end * span]
            both = numbers[start - fill : end - fill] + ids[count + start : count + end]
            at = listed, start - fill, positions + start
            part_of_it = Batch(batch.unit, both, end - start, on_device=part, listed=at)
            return _Piece(ids[start:end], part_of_it, start - fill, cut)

        key = direction, count, nbytes
        shape = self._shapes.get(key) if cuts is None else None
        if shape is None:
            shape = list(self._shape(count, direction, rates, nbytes, cuts))
            if cuts is None and len(shape) <= LONGEST_KEPT:
                if len(self._shapes) >= SHAPES_KEPT:
                    self._shapes.clear()
                self._shapes[key] = shape
        for fill in shape:
            yield [piece(*where) for where in fill]

    def _shape(
        self, count: int, direction: str, rates: Rates, nbytes: int, cuts: Sequence[Cut] | None
    ) -> Iterator[Sequence[_Where]]:
        """Of so many pages, the pieces of each fill."""
        equal, end, most = rates.equal_chunks(nbytes), 0, max(self.ring.slot_pages, 1)
        for sizes in fill_sizes(count, rates.chunks(nbytes), most, direction):
            fill, end = end, end + sum(sizes)
            parts = self._cuts(direction, end - fill, -(-equal * (end - fill) // count))
            borders = list(pairwise(accumulate(sizes, initial=fill)))
            if cuts is not None:
                yield from ([(*pages, fill, cut) for pages in borders] for cut in cuts)
            elif parts:
                yield from ([(fill, end, fill, cut) for cut in part] for part in parts)
            else:
                yield [(*pages, fill, None) for pages in borders]

    def _cuts(self, direction: str, pages: int, wanted: int) -> list[list[Cut]]:
        """How so many pages are cut for about `wanted` pieces, those of each fill; none: between pages."""
        cutter, parts = self.cutter, self.cutter.parts
        if not parts and wanted > pages and direction in cutter.ways:
            parts = ((0, len(cutter.units)),)
        return [
            [
                cutter.cut(direction, part[0], *piece)
                for piece in cutter.pieces(*part, -(-wanted // len(parts)))
            ]
            for part in parts
        ]

    def runs(self, cut: Cut | None) -> Runs:
        """What copies move of every page."""
        if cut is None:
            return self._whole
        found = self._parts.get(id(cut))
        if found is None:
            if len(self._parts) >= PARTS_KEPT:
                self._parts.clear()
            found = self._parts[id(cut)] = cut, _listed(cut.runs)  # held with its list: no other has its id
        return found[1]


PARTS_KEPT = SHAPES_KEPT = 512

LONGEST_KEPT = 64
"""Fills of a shape that is kept: those of many take far longer to move than to be worked out again."""


def _listed(runs: Sequence[Run]) -> Runs:
    return Runs(array("Q", [number for run in runs for number in run]))


class _Chunk(NamedTuple):
    """Launches and one batch of copies: what goes through one slot of every pool at once.

    `first`, `last`: of its fill. `again`: the slot is used once more in this transfer. `cut`: parts of pages,
    each of which takes a launch of its own. `rows`: the copies, until the next chunk is made.
    """

    slot_number: int
    first: bool
    last: bool
    again: bool
    parts: list[Part]
    cut: list[Part]
    rows: Rows

    @property
    def launch_count(self) -> int:
        return bool(self.parts) + len(self.cut)


_Turn = Sequence[Sequence[_Piece]]
"""A fill of every move, in their order; empty for those that have none left."""


class Staging:
    """Moves batches through the slots of their pools. Not thread safe: its owner holds a lock.

    `delayed`: of the last write-back, pages that were read, in part or as a whole, only after others had left
    the staging memory, because they are more than it holds.
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
        self.delayed = sum(self._late(move) for move in moves)
        turns = self._fills(moves, "write_back")
        for chunk in self._chunks(moves, "write_back", turns, len(turns)):
            launches = self._launches(launcher, "write_back", "gather", chunk, stream, keep)
            self._out(chunk, launches, stream, copies)
        return driver.record(stream)

    def _out(
        self, chunk: _Chunk, launches: Iterator[tuple[Launch, int]], stream: Stream, copies: Stream
    ) -> None:
        driver, free = self._driver, self._wait_for(chunk)
        for _ in range(chunk.launch_count - 1):
            if free is not None:
                driver.wait(stream, free)
                free = None
            launch, grid = next(launches)
            launch(stream, grid)
        launch, grid = next(launches)
        event = driver.relay(launch, stream, grid, copies, chunk.rows, False, free, chunk.last)
        if event is not None:
            self._free[chunk.slot_number] = event

    def load(
        self,
        launcher: Launcher,
        moves: Sequence[Move],
        stream: Stream,
        copies: Stream,
        keep: list[object],
        order: Order | None = None,
    ) -> LayerEvents | None:
        """Copy in `copies`, scatter in `stream`; in an order of layers, when each of them is there."""
        driver = self._driver
        driver.follow(copies, stream)
        if order is None:
            turns = self._fills(moves, "load")
            self._move_in(launcher, self._chunks(moves, "load", turns, len(turns)), stream, copies, keep)
            return None
        events: list[Event] = []
        ends = self._windows(moves, order)
        windows = [self._layers(moves, order, *window) for window in pairwise([0, *ends])]
        left = sum(map(len, windows))
        for window in windows:
            self._move_in(launcher, self._chunks(moves, "load", window, left), stream, copies, keep)
            events.append(driver.record(stream))
            left -= len(window)
        return LayerEvents(events, ends)

    def _move_in(
        self,
        launcher: Launcher,
        chunks: Iterator[_Chunk],
        stream: Stream,
        copies: Stream,
        keep: list[object],
    ) -> None:
        driver = self._driver
        for chunk in chunks:
            launches = self._launches(launcher, "load", "scatter", chunk, stream, keep)
            told = chunk.last and (self._shared or chunk.again)
            lone, free = chunk.launch_count == 1, self._wait_for(chunk)
            launch, grid = next(launches)
            event = driver.relay(launch, stream, grid, copies, chunk.rows, True, free, told and lone)
            for launch, grid in launches:
                launch(stream, grid)
            if told:
                self._free[chunk.slot_number] = event if lone else driver.record(stream)

    def _wait_for(self, chunk: _Chunk) -> Event | None:
        """The event after which the slot of a chunk is free; from then on nobody else has to wait for it."""
        if not chunk.first:
            return None
        found, self._free[chunk.slot_number] = self._free[chunk.slot_number], None
        return found

    def _launches(
        self,
        launcher: Launcher,
        direction: str,
        purpose: str,
        chunk: _Chunk,
        stream: Stream,
        keep: list[object],
    ) -> Iterator[tuple[Launch, int]]:
        """The launches of a chunk and their blocks, each ready until the next is asked for."""
        if chunk.parts:
            yield launcher.ready(direction, purpose, chunk.parts, stream, keep)
        for part in chunk.cut:
            yield launcher.ready_steps(direction, purpose, part, stream, keep)

    def _late(self, move: Move) -> int:
        """Pages that are not in staging memory as a whole before others leave it."""
        stage = self._stages[move.member]
        held = max(stage.ring.slot_pages, 1) * SLOTS // stage.fills_a_page
        return max(0, move.batch.count - held)

    def _next_slot(self, direction: str) -> int:
        way = "write_back" if self._shared else direction
        slot = self._turns[way]
        self._turns[way] = slot + 1 if (slot + 1) % SLOTS else slot + 1 - SLOTS
        return slot

    def hold(self, event: Event) -> None:
        """Use no slot before `event`, which is behind everything submitted so far."""
        self._free[:] = [event] * 2 * SLOTS

    def _fills(self, moves: Sequence[Move], direction: str) -> list[_Turn]:
        """What goes through the slots in turn: the next fill of every move that has one left."""
        stages = [self._stages[move.member] for move in moves]
        nbytes = sum(s.page_bytes * move.batch.count for s, move in zip(stages, moves, strict=True))
        rates = self._costs.of(direction)
        fills = [s.fills(move.batch, direction, rates, nbytes) for s, move in zip(stages, moves, strict=True)]
        return list(zip_longest(*fills, fillvalue=()))

    def _windows(self, moves: Sequence[Move], order: Order) -> list[int]:
        """Where windows of an order end. The first layer, which everybody waits for, is one of its own; those
        behind it grow to what a load of all at once would be cut into."""
        nbytes = sum(self._stages[move.member].page_bytes * move.batch.count for move in moves)
        steps, ends, size = len(order.layers), [1], 1
        most = -(-steps // self._costs.of("load").equal_chunks(nbytes))
        while ends[-1] < steps:
            size = max(1, min(2 * size, most))
            ends.append(min(ends[-1] + size, steps))
        return ends

    def _layers(self, moves: Sequence[Move], order: Order, first: int, end: int) -> list[_Turn]:
        """As `_fills`, for the layers of some steps. The first window is cut between pages: everybody waits
        for what is scattered at its end."""
        fills, nbytes = [], 0
        if first == 0:
            nbytes = sum(self._stages[move.member].page_bytes * move.batch.count for move in moves)
        for move in moves:
            stage = self._stages[move.member]
            cuts = stage.cutter.window(order.steps[move.member], first, end)
            rates = self._costs.of("load")
            fills.append(stage.fills(move.batch, "load", rates, nbytes * end // len(order.layers), cuts))
        return list(zip_longest(*fills, fillvalue=()))

    def _chunks(
        self, moves: Sequence[Move], direction: str, turns: Sequence[_Turn], left: int
    ) -> Iterator[_Chunk]:
        """What is launched and copied in turn. `left`: turns of the transfer from the first of these on."""
        for number, turn in enumerate(turns, 1):
            slot, rows = self._next_slot(direction), list(zip_longest(*turn))
            for at, row in enumerate(rows, 1):
                pairs = zip(moves, row, strict=True)
                found = [(m.member, self._stages[m.member], piece) for m, piece in pairs if piece is not None]
                yield _Chunk(slot, at == 1, at == len(rows), left - number >= SLOTS, *self._made(slot, found))

    def _made(
        self, slot: int, pieces: Sequence[tuple[int, _Stage, _Piece]]
    ) -> tuple[list[Part], list[Part], Rows]:
        """Launches of whole pages, launches of parts, copies."""
        parts: list[Part] = []
        cut: list[Part] = []
        rows, count = self._rows_for(pieces), 0
        for number, stage, piece in pieces:
            place, runs = stage.slots[slot], stage.runs(piece.cut)
            if piece.cut is None:
                parts.append((number, place, piece.batch, None))
            else:
                shifted = Place(place.address - piece.cut.shift, place.pages)
                cut.append((number, shifted, piece.batch, piece.cut.steps))
            count = stage.lists.add(rows, count, runs, piece.pages, piece.first, place.address)
        return parts, cut, Rows(rows, count)

    def _rows_for(self, pieces: Sequence[tuple[int, _Stage, _Piece]]) -> array[int]:
        """Three lists in one with room for the copies of these pieces."""
        room = 3 * sum(s.lists.room(len(piece.pages), s.runs(piece.cut)) for _, s, piece in pieces)
        if room > len(self._rows):
            self._rows = array("Q", (0,)) * room
        return self._rows


def fill_sizes(pages: int, chunks: int, slot_pages: int, direction: str) -> list[list[int]]:
    """Pages of each chunk of each fill when so many are cut into about so many chunks.

    The chunk that nothing overlaps, the first of a write-back and the last of a load, is about `LEAD` times
    smaller than the others.
    """
    found = []
    for first in range(0, pages, slot_pages):
        here = min(slot_pages, pages - first)
        share = chunks * here / pages
        if first == 0 and chunks > 1 and here > 1:
            small = max(1, math.floor(here / (LEAD * max(share - 1, 1) + 1)))
            found.append([small, *_even(here - small, share - 1)])
        else:
            found.append(_even(here, share))
    return found if direction == "write_back" else [fill[::-1] for fill in found[::-1]]


def _even(pages: int, chunks: float) -> list[int]:
    count = min(pages, max(1, round(chunks)))
    each, more = divmod(pages, count)
    return [each + 1] * more + [each] * (count - more)
