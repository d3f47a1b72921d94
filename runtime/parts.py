"""Pages in parts: what a slot of staging memory holds, and how a page is cut into layers.

In a buffer of a single page every layout has each layer of a component as one run, and these *units* lie one
behind the other (lowering says which layouts: `Program.cuts`). A part of a page is a row of units. It is
staged at the addresses of a page that begins so many bytes in front of the slot.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple

from poolwright.runtime.description import HostLayout, align_up
from poolwright.runtime.errors import OutOfMemoryBudget
from poolwright.runtime.moves import ABSENT, Steps
from poolwright.runtime.program import SizedProgram, pages_within

SLOTS = 2
"""Slots that a direction uses in turn: one is filled while the other is emptied."""

SLOT_ALIGN = 16
"""Slots start at multiples of this: the widest vector."""


class Slot(NamedTuple):
    """A slot of staging memory: whole pages that it holds (0: a part of one), its bytes."""

    pages: int
    nbytes: int


class Unit(NamedTuple):
    """Bytes of a page that are never cut: of component number `column` the layer at `position` of its list,
    or all of one that has no layers (position 0). `start`: its first byte in a buffer of one page."""

    start: int
    nbytes: int
    column: int
    position: int


class Run(NamedTuple):
    """Contiguous bytes of every page on both sides of a copy: of page p those from ``start + p * step`` on,
    which are staged for the n-th page of a slot from ``inside + n * inside_step`` on."""

    start: int
    step: int
    inside: int
    inside_step: int
    nbytes: int


class Cut(NamedTuple):
    """The same units of some pages: what kernels and copies are told. `shift`: bytes of the page in front of
    what the slot holds."""

    steps: Steps
    runs: tuple[Run, ...]
    shift: int


def slots_of(in_place: bool) -> int:
    """Slots of a pool: two for each direction, so that one does not wait for the other. Where rows change,
    both share two: all of the memory is to hold what waits to be captured."""
    return SLOTS if in_place else 2 * SLOTS


def slot_align(nbytes: int) -> int:
    """The bytes of a slot that holds so many."""
    return align_up(nbytes, SLOT_ALIGN)


# ---- the size of a slot ------------------------------------------------------------------------


def slot_of(program: SizedProgram, pages: int, bound: int, name: str) -> Slot:
    """The slot of a pool of so many pages: all slots together take at most `bound` bytes, which the argument
    `name` gave. A page that does not fit is cut where the layout permits it.

    Raises OutOfMemoryBudget where the least part of a page does not fit.
    """
    if program.host(1).page_bytes == 0:
        return Slot(0, 0)
    count = slots_of(program.spec.updates == "in_place")
    most = bound // count // SLOT_ALIGN * SLOT_ALIGN
    fitting = min(pages, pages_within([program], most))
    if fitting:
        return Slot(fitting, slot_align(program.host(fitting).nbytes))
    if most >= least_slot(program):
        return Slot(0, most)
    what = "one layer of a component" if _cut_both_ways(program) else "one page"
    raise OutOfMemoryBudget(
        f"{program.spec.name}: staging memory of {count} slots, {what} each",
        count * least_slot(program),
        bound,
        f"raise {name}",
    )


def least_slot(program: SizedProgram) -> int:
    """Bytes that a slot has at least."""
    page = slot_align(program.host(1).nbytes)
    if not _cut_both_ways(program):
        return page
    return min(page, max(slot_align(unit.start % SLOT_ALIGN + unit.nbytes) for unit in units(program)))


def least_bytes(program: SizedProgram) -> int:
    """Bytes of staging memory that a pool takes at least."""
    return slots_of(program.spec.updates == "in_place") * least_slot(program)


def _cut_both_ways(program: SizedProgram) -> bool:
    """Whether slots may be smaller than a page: they serve both directions."""
    return program.cuts("write_back") and program.cuts("load")


# ---- cutting a page ----------------------------------------------------------------------------


def units(program: SizedProgram) -> tuple[Unit, ...]:
    """What a page may be cut into, as it lies in a buffer of one page."""
    layout, found = program.host(1), []
    for column, (ident, layers) in enumerate(program.lists.items()):
        if not program.present(ident):
            continue
        axes = layout.part(ident).axes
        inside = [extent for axis, extent, _ in axes if axis not in ("page", "layer")]
        nbytes = program.itemsize(ident) * math.prod(inside)
        extent = 1 if layers is None else next(e for axis, e, _ in axes if axis == "layer")
        for position in range(extent):
            found.append(Unit(_place(layout, ident, position)[0], nbytes, column, position))
    return tuple(sorted(found))


def _place(layout: HostLayout, ident: str, position: int) -> tuple[int, int]:
    """Where a unit of page 0 starts in a buffer, and bytes from one page to the next."""
    part = layout.part(ident)
    steps = {axis: step for axis, _, step in part.axes}
    return part.base + position * steps.get("layer", 0), steps["page"]


class Cutter:
    """Cuts the pages of one pool of so many pages for slots of one kind.

    `parts`: what goes through a slot that is smaller than a page, as (first, end) of `units`.
    """

    def __init__(self, program: SizedProgram, pages: int, slot: Slot) -> None:
        self._program, self._slot = program, slot
        self._host, self._staged = program.host(pages), program.host(max(slot.pages, 1))
        self.whole = tuple(
            Run(outer.start, outer.nbytes, inner.start, inner.nbytes, outer.nbytes)
            for outer, inner in zip(program.spans(pages), program.spans(max(slot.pages, 1)), strict=True)
        )
        self.ways = [way for way in ("write_back", "load") if program.cuts(way)]
        self.units = units(program) if self.ways else ()
        ends = accumulate((len(row) for row in self._fitting(self.units)), initial=0)
        self.parts = () if slot.pages else tuple(pairwise(ends))
        self._cuts: dict[tuple[str, int, int, int], Cut] = {}

    def _fitting(self, units: Sequence[Unit]) -> Iterator[Sequence[Unit]]:
        """These units in rows that fit a slot."""
        first = 0
        for at, unit in enumerate(units):
            if unit.start + unit.nbytes - _shift(units[first]) > self._slot.nbytes:
                yield units[first:at]
                first = at
        if units:
            yield units[first:]

    def pieces(self, first: int, end: int, count: int) -> list[tuple[int, int]]:
        """These units in at most so many pieces of about equal bytes."""
        total, done = sum(unit.nbytes for unit in self.units[first:end]), 0
        found: list[tuple[int, int]] = []
        for at in range(first, end):
            done += self.units[at].nbytes
            if at + 1 == end or done * count >= total * (len(found) + 1):
                found.append((first, at + 1))
                first = at + 1
        return found

    def cut(self, direction: str, part: int, first: int, end: int) -> Cut:
        """What moves these units, which lie in the slot where the part that begins with unit `part` has them.
        Each direction has steps of its own: its stream writes them once."""
        key = (direction, part, first, end)
        found = self._cuts.get(key)
        if found is None:
            found = self._cuts[key] = self._cut(self.units[first:end], self.units[part])
        return found

    def _cut(self, chosen: Sequence[Unit], front: Unit) -> Cut:
        shift = 0 if self._slot.pages else _shift(front)
        runs = _joined([self._run(unit, shift) for unit in chosen])
        return Cut(Steps(_rows(chosen, len(self._program.columns))), runs, shift)

    def window(self, steps: Steps, first: int, end: int) -> list[Cut]:
        """What moves the layers of these steps: one cut where slots hold pages, else as many as it takes."""
        found = steps.cuts.get((first, end))
        if found is None:
            width = len(self._program.columns)
            numbers = steps.numbers[first * width : end * width]
            wanted = {(at % width, number) for at, number in enumerate(numbers)}
            chosen = [unit for unit in self.units if (unit.column, unit.position) in wanted]
            rows = [chosen] if self._slot.pages and chosen else self._fitting(chosen)
            found = steps.cuts[first, end] = [self._cut(row, row[0]) for row in rows]
        return found

    def _run(self, unit: Unit, shift: int) -> Run:
        ident = self._program.columns[unit.column]
        start, step = _place(self._host, ident, unit.position)
        inside, inside_step = _place(self._staged, ident, unit.position)
        return Run(start, step, inside - shift, inside_step, unit.nbytes)


def _shift(unit: Unit) -> int:
    """Bytes of the page in front of a slot that begins with this unit."""
    return unit.start // SLOT_ALIGN * SLOT_ALIGN


def _rows(chosen: Sequence[Unit], columns: int) -> array[int]:
    """Steps that move these units, each component's from the first step on."""
    lists: list[list[int]] = [[] for _ in range(columns)]
    for unit in chosen:
        lists[unit.column].append(unit.position)
    rows = zip_longest(*lists, fillvalue=ABSENT)
    return array("I", [number for row in rows for number in row])


def _joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Neighbours on both sides become one."""
    found: list[Run] = []
    for run in runs:
        last = found[-1] if found else None
        if last is not None and run == last._replace(
            start=last.start + last.nbytes, inside=last.inside + last.nbytes, nbytes=run.nbytes
        ):
            found[-1] = last._replace(nbytes=last.nbytes + run.nbytes)
        else:
            found.append(run)
    return tuple(found)
