"""The staged path: kernels between device rows and a ring of staging slots, the copy engine to the host.

A slot holds whole pages in the host's layout, so every range of a page is one copy, and neighbouring host
pages merge into longer ones. While the copy engine empties one slot, kernels fill the next.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from poolwright.runtime.description import HostLayout
from poolwright.runtime.driver import Driver, Event, Memory, Stream
from poolwright.runtime.indices import Batch
from poolwright.runtime.launch import Launcher, Place
from poolwright.runtime.program import SizedProgram

SMALLEST_CHUNK = 2 << 20
CHUNKS = 8
"""A transfer is cut into about so many chunks: enough to overlap both stages, few enough to submit."""


@dataclass
class Ring:
    """Slots of staging memory, used in turn; `free[i]`: the event after which slot i may be overwritten."""

    memory: Memory
    slots: int
    slot_pages: int
    slot_bytes: int
    free: list[Event | None] = field(default_factory=list)
    turn: int = 0

    def take(self) -> tuple[int, int]:
        """(number, address) of the next slot."""
        slot = self.turn
        self.turn = (slot + 1) % self.slots
        return slot, self.memory.address + slot * self.slot_bytes


@dataclass(frozen=True)
class _Span:
    """One range of a page, on the host and in a slot: where page 0 starts, bytes of a page."""

    host: int
    slot: int
    nbytes: int


class Staging:
    """Moves batches through a ring."""

    def __init__(
        self,
        driver: Driver,
        program: SizedProgram,
        ring: Ring,
        host: HostLayout,
        host_address: int,
        borders: Sequence[int] = (),
    ) -> None:
        self._driver, self._program, self._ring = driver, program, ring
        self._host_address, self._borders = host_address, borders
        self._page_bytes = max(host.page_bytes, 1)
        inside = program.host(ring.slot_pages)
        self._spans = tuple(
            _Span(here, there, outer.nbytes)
            for outer, inner in zip(host.ranges, inside.ranges, strict=True)
            if outer.nbytes and (outer.ident is None or program.present(outer.ident))
            for here, there in zip(outer.starts, inner.starts, strict=True)
        )

    def write_back(
        self, launcher: Launcher, batch: Batch, stream: Stream, copies: Stream, keep: list[object]
    ) -> Event:
        """Gather in `stream`, copy in `copies`; returns the event after the last gather."""
        driver, ring = self._driver, self._ring
        gathered: Event = None
        for chunk in self._chunks(batch):
            slot, base = ring.take()
            free = ring.free[slot]
            if free is not None:
                driver.wait(stream, free)
            place = Place(base, ring.slot_pages)
            launcher.launch("write_back", "gather", place, _inside(chunk), None, stream, keep)
            gathered = driver.record(stream)
            driver.wait(copies, gathered)
            host, staged, sizes = self._copies(chunk.host, base)
            driver.copy(host, staged, sizes, copies, inward=False)
            ring.free[slot] = driver.record(copies)
        driver.wait(stream, driver.record(copies))
        return gathered

    def load(
        self, launcher: Launcher, batch: Batch, stream: Stream, copies: Stream, keep: list[object]
    ) -> None:
        """Copy in `copies`, scatter in `stream`."""
        driver, ring = self._driver, self._ring
        driver.wait(copies, driver.record(stream))
        for chunk in self._chunks(batch):
            slot, base = ring.take()
            free = ring.free[slot]
            if free is not None:
                driver.wait(copies, free)
            host, staged, sizes = self._copies(chunk.host, base)
            driver.copy(staged, host, sizes, copies, inward=True)
            driver.wait(stream, driver.record(copies))
            place = Place(base, ring.slot_pages)
            launcher.launch("load", "scatter", place, _inside(chunk), None, stream, keep)
            ring.free[slot] = driver.record(stream)

    def hold(self, event: Event) -> None:
        """Use no slot before `event`, which is behind everything submitted so far."""
        self._ring.free[:] = [event] * self._ring.slots

    def _chunks(self, batch: Batch) -> list[Batch]:
        """Parts of a batch that fit a slot, in the order of their host pages, so that runs merge."""
        count = len(batch.host)
        wanted = max(SMALLEST_CHUNK, count * self._page_bytes // CHUNKS) // self._page_bytes
        size = max(1, min(self._ring.slot_pages, wanted))
        if batch.on_device is not None:
            span = len(batch.on_device) // count
            return [
                batch._replace(
                    host=batch.host[i : i + size],
                    on_device=batch.on_device[i * span : (i + size) * span],
                )
                for i in range(0, count, size)
            ]
        here, there = batch.host.tolist(), batch.device.tolist()
        order = sorted(range(count), key=here.__getitem__)
        host, device = array("I", [here[i] for i in order]), array("I", [there[i] for i in order])
        return [
            batch._replace(host=host[i : i + size], device=device[i : i + size])
            for i in range(0, count, size)
        ]

    def _copies(self, pages: Sequence[int], base: int) -> tuple[list[int], list[int], list[int]]:
        """Host addresses, slot addresses, sizes of every copy; neighbouring pages are merged."""
        runs = _runs(pages)
        host = [
            self._host_address + span.host + first * span.nbytes
            for span in self._spans
            for first, _, _ in runs
        ]
        slot = [base + span.slot + at * span.nbytes for span in self._spans for _, at, _ in runs]
        sizes = [count * span.nbytes for span in self._spans for _, _, count in runs]
        if self._borders:
            host, slot, sizes = _cut(host, slot, sizes, self._borders)
        return host, slot, sizes


def _inside(chunk: Batch) -> Batch:
    """The chunk with positions in the slot for host pages."""
    return chunk._replace(host=array("I", range(len(chunk.host))))


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
