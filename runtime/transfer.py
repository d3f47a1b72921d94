"""Carries out transfers of one pool over the driver door: checked batches in, tickets out.

Order is kept by three streams and by page numbers. Write-backs follow each other in one stream, loads in
another; staged copies run in a third and are joined before the next submission. A load waits for the
last write-back of its pages, a write-back for the last load of its pages; both wait for the caller's
stream, whose work filled or still reads the device rows.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from poolwright.runtime import program as programs
from poolwright.runtime.binding import Binding
from poolwright.runtime.description import HostLayout, PageRanges
from poolwright.runtime.driver import Driver, Event, Kernels, Memory, Stream
from poolwright.runtime.errors import PoolError, TransferError
from poolwright.runtime.indices import Batch
from poolwright.runtime.program import SizedProgram
from poolwright.runtime.ticket import Mark, Ticket


@dataclass(frozen=True)
class Engine:
    """What transfers run on. `kernels` None: neither zero_copy nor staged; `library` None: no CPU twin."""

    driver: Driver
    kernels: Kernels | None = None
    library: ctypes.CDLL | None = None
    threads: int = 1


@dataclass
class Ring:
    """Slots of staging memory, used in turn; `free[i]`: the event after which slot i may be overwritten."""

    memory: Memory
    slots: int
    slot_pages: int
    slot_bytes: int
    free: list[Event | None] = field(default_factory=list)
    turn: int = 0


@dataclass
class _Open:
    """A submission that may still run: its event, what must stay alive until then."""

    direction: str
    event: Event
    keep: tuple[object, ...]


class Uses:
    """Which submission used each page last. Pages that only the device knows count as all pages."""

    def __init__(self, pages: int) -> None:
        self.last = torch.zeros(pages, dtype=torch.int64)
        self._all: set[int] = set()

    def of(self, pages: torch.Tensor | None) -> set[int]:
        """Numbers of the submissions that used any of these pages."""
        found = self.last if pages is None else self.last[pages]
        return set(found.unique().tolist()) | self._all

    def touch(self, pages: torch.Tensor | None, number: int) -> None:
        if pages is None:
            self._all.add(number)
        else:
            self.last[pages] = number

    def forget(self, open_numbers: Collection[int]) -> None:
        """Drop submissions that are over."""
        self._all &= set(open_numbers)


@dataclass(frozen=True)
class Marks:
    """Moments of a submission before its end: rows captured, each layer loaded; what they refer to."""

    captured: Mark | None = None
    layers: Sequence[Mark] = ()
    keep: object = None


class Transfers:
    """The transfers of one pool."""

    def __init__(
        self, engine: Engine, program: SizedProgram, host_address: int, host_tensor: torch.Tensor, pages: int
    ):
        self.engine, self.program, self.pages = engine, program, pages
        self._host_address, self._host_tensor = host_address, host_tensor
        self._layout = program.host(pages)
        self._driver = engine.driver
        self._lock = threading.RLock()
        self._streams = {name: self._driver.stream() for name in ("write", "load", "copy", "side")}
        self._binding: Binding | None = None
        self._table: Memory | None = None
        self._ring: Ring | None = None
        self._number = 0
        self._open: dict[int, _Open] = {}
        self._lost: list[object] = []
        self._tickets: dict[int, Ticket] = {}
        self._host_use = Uses(pages)
        self._device_use = Uses(0)

    # ---- state

    def bind(self, binding: Binding) -> None:
        """Use these tensors from now on."""
        with self._lock:
            self._binding = binding
            self._device_use = Uses(binding.pages)
            self._table = self._driver.allocate(8 * len(binding.table))
            words = [w for address in binding.table for w in (address & 0xFFFFFFFF, address >> 32)]
            stream = self._streams["write"]
            self._driver.write(self._table.address, words, stream)
            for other in ("load", "copy"):
                self._driver.wait(self._streams[other], self._driver.record(stream))

    def use_ring(self, ring: Ring | None) -> None:
        self._ring = ring

    def in_flight(self, pages: torch.Tensor, after: Ticket | None) -> int | None:
        """A page among these whose transfer the caller does not know to be done, or None."""
        with self._lock:
            self._forget()
            known = after.number if after is not None else 0
            for number in self._host_use.of(pages):
                ticket = self._tickets.get(number)
                if ticket is not None and not ticket.acknowledged and number != known:
                    return int(pages[self._host_use.last[pages] == number][0])
        return None

    def drain(self) -> None:
        """Block until everything submitted has run."""
        with self._lock:
            for entry in self._open.values():
                self._driver.synchronize(entry.event)
            self._open.clear()
            for ticket in self._tickets.values():
                ticket.detach()
            self._tickets.clear()

    def _forget(self) -> None:
        """Drop what is over; what the pool hands out does not depend on it."""
        for number in [n for n, entry in self._open.items() if self._driver.done(entry.event)]:
            del self._open[number]
        self._device_use.forget(self._open.keys())
        for number in [n for n, t in self._tickets.items() if t.acknowledged]:
            del self._tickets[number]

    # ---- submission

    def write_back(self, batch: Batch, path: str, producer: Stream) -> Ticket:
        """Device rows to host pages. `producer`: the stream whose work filled the rows."""
        return self._submit("write_back", batch, path, producer, None, ())

    def load(
        self, batch: Batch, path: str, readers: Stream, layers: Sequence[int] | None, ids: Sequence[int]
    ) -> Ticket:
        """Host pages to device rows, bulk or the layers at these positions, whose ids are `ids`."""
        return self._submit("load", batch, path, readers, layers, ids)

    def _submit(
        self,
        direction: str,
        batch: Batch,
        path: str,
        other: Stream,
        layers: Sequence[int] | None,
        ids: Sequence[int],
    ) -> Ticket:
        writes_host = direction == "write_back"
        stream = self._streams["write" if writes_host else "load"]
        with self._lock, self._driver.guard():
            self._driver.admit(other, f"{self.program.spec.name}: {direction}")
            self._forget()
            self._number += 1
            keep = (batch, self._binding, self._table)
            try:
                self._behind(stream, other, direction, batch)
                marks = self._run(direction, path, batch, layers, stream)
                event = self._driver.record(stream)
            except PoolError as error:
                self._abandon(direction, batch, stream, keep)
                pages = batch.pages.tolist()
                raise TransferError(self.program.spec.name, direction, pages, str(error)) from error
            self._touch(direction, batch, event, keep)
            captured = marks.captured or Mark(self._driver, event)
            told = marks.layers or [Mark(self._driver, event)] * len(ids)
            ticket = Ticket(
                driver=self._driver,
                pool=self.program.spec.name,
                direction=direction,
                path=path,
                pages=batch.pages,
                event=event,
                captured=captured,
                layers=dict(zip(ids, told, strict=True)),
                keep=(*keep, marks),
                number=self._number,
                bad=batch.bad,
            )
            self._tickets[self._number] = ticket
            return ticket

    def _behind(self, stream: Stream, other: Stream, direction: str, batch: Batch) -> None:
        """Put the submission behind the caller's stream and behind earlier transfers of its pages."""
        self._driver.wait(stream, self._driver.record(other))
        if batch.unit == "mixed":  # ids on the device may come from another stream than the rows
            self._driver.wait(stream, self._driver.record(self._driver.current_stream()))
        if not self._open:
            return
        earlier = self._host_use.of(batch.pages) | self._device_use.of(self._device_pages(batch))
        for number in sorted(earlier & self._open.keys()):
            if self._open[number].direction != direction:  # its own direction is ordered by the stream
                self._driver.wait(stream, self._open[number].event)

    def _device_pages(self, batch: Batch) -> torch.Tensor | None:
        """Device pages of a batch, None when only the device knows them."""
        if batch.unit == "pages":
            return batch.device
        return batch.device // self.program.sizes["page_size"] if batch.unit == "tokens" else None

    def _touch(self, direction: str, batch: Batch, event: Event, keep: tuple[object, ...]) -> None:
        """Later transfers of these pages run behind this one."""
        self._host_use.touch(batch.pages, self._number)
        self._device_use.touch(self._device_pages(batch), self._number)
        self._open[self._number] = _Open(direction, event, keep)

    def _abandon(self, direction: str, batch: Batch, stream: Stream, keep: tuple[object, ...]) -> None:
        """A submission failed half-way: what had been submitted still runs, and is waited for."""
        try:
            self._driver.wait(stream, self._driver.record(self._streams["copy"]))
            self._touch(direction, batch, self._driver.record(stream), keep)
        except PoolError:
            self._lost.append(keep)  # the device answers nothing any more: never reuse what it may touch

    # ---- paths

    def _run(
        self, direction: str, path: str, batch: Batch, layers: Sequence[int] | None, stream: Stream
    ) -> Marks:
        """Submit to `stream`; returns the moments that come before its end."""
        paths: dict[str, Callable[[], Marks]] = {
            "host": lambda: self._atoms(direction, batch, layers, stream),
            "torch": lambda: self._torch(direction, batch, layers, stream),
            "zero_copy": lambda: self._zero_copy(direction, batch, layers, stream),
            "staged": lambda: self._staged(direction, batch, stream),
        }
        return Marks() if batch.count == 0 else paths[path]()

    def _bound(self) -> Binding:
        assert self._binding is not None
        return self._binding

    def _view(self, host: int, pages: int) -> ctypes.Array[ctypes.c_int64]:
        assert self._table is not None
        return programs.view(self._table.address, host, pages, self._bound().strides)

    def _atoms(self, direction: str, batch: Batch, layers: Sequence[int] | None, stream: Stream) -> Marks:
        """The CPU twin moves whole runs."""
        assert self.engine.library is not None
        function = getattr(self.engine.library, f"atoms_{batch.unit}")
        ids = [t.contiguous() for t in (batch.host, batch.device)]
        chosen = None if layers is None else (ctypes.c_int64 * max(len(layers), 1))(*layers)
        function(
            self._view(self._host_address, self.pages),
            ctypes.c_void_p(ids[0].data_ptr()),
            ctypes.c_void_p(ids[1].data_ptr()),
            ctypes.c_uint64(batch.count),
            ctypes.c_uint32(direction == "load"),
            chosen,
            ctypes.c_uint64(0 if layers is None else len(layers)),
            ctypes.c_uint32(self.engine.threads),
        )
        return Marks()

    def _zero_copy(self, direction: str, batch: Batch, layers: Sequence[int] | None, stream: Stream) -> Marks:
        """Kernels move runs between device rows and pinned host memory."""
        view = self._view(self._host_address, self.pages)
        if layers is None:
            self._launch(direction, direction, view, batch, None, stream)
            return Marks()
        counters = self._driver.allocate(4 * max(len(layers), 1))
        self._driver.write(counters.address, [0] * max(len(layers), 1), stream)
        ready = self._driver.record(stream)
        arrivals = self._launch(direction, direction, view, batch, layers, stream, counters.address)
        side = self._streams["side"]
        marks = [
            Mark(self._driver, ready, side, counters.address + 4 * n, arrivals) for n in range(len(layers))
        ]
        return Marks(layers=marks, keep=counters)

    def _launch(
        self,
        direction: str,
        purpose: str,
        view: ctypes.Array[ctypes.c_int64],
        batch: Batch,
        layers: Sequence[int] | None,
        stream: Stream,
        done: int = 0,
    ) -> int:
        """Launch kernels until all ids are moved; returns how many blocks count each layer as done.

        Ids travel in parameters, so many of them take several launches. With layers, the first layers of
        all ids then come before the last layers of any.
        """
        kernels = self.engine.kernels
        assert kernels is not None
        grid, block = kernels.grid[purpose], kernels.block
        unit = "tokens" if batch.unit == "mixed" else batch.unit
        walk = unit if layers is None else f"layer_{unit}"
        span = self.program.sizes["page_size"] if batch.unit == "mixed" else 1
        chunks = self._chunks(batch.host.numel(), walk, span)
        for first, part in _layer_parts(layers, len(chunks)):
            for capacity, start, stop in chunks:
                ids = self._ids(batch, capacity, start, stop, span)
                params: list[ctypes._CData] = [view, ids, ctypes.c_uint32((stop - start) * span)]
                if part is not None:
                    params += [programs.layer_list(part), ctypes.c_uint64(done + 4 * first if done else 0)]
                kernels.launch(f"{direction}_{walk}_{capacity}", grid, block, params, stream)
        return grid * len(chunks)

    def _chunks(self, listed: int, walk: str, span: int) -> list[tuple[int, int, int]]:
        """(capacity, first, end) of the ids of each launch."""
        most = self.program.ids_per_launch(walk, self._bound().align) // span
        if most == 0:
            raise PoolError("one page is more than one launch can count; make pages smaller")
        chunks = []
        start = 0
        while start < listed:
            capacity = programs.capacity_for(listed - start, walk)
            stop = min(start + min(capacity, most), listed)
            chunks.append((capacity, start, stop))
            start = stop
        return chunks

    def _ids(
        self, batch: Batch, capacity: int, start: int, stop: int, span: int
    ) -> ctypes.Array[ctypes.c_uint32] | ctypes.Array[ctypes.c_char]:
        host = batch.host[start:stop].tolist()
        if batch.unit == "pages":
            return programs.pairs(capacity, host, batch.device[start:stop].tolist())
        if batch.unit == "tokens":
            return programs.tokens(capacity, host, batch.device[start:stop].tolist())
        ids = batch.device
        step = ids.stride(0)
        address = ids.data_ptr() + start * span * step * ids.element_size()
        return programs.tokens(capacity, host, (), address, step, ids.dtype == torch.int64)

    def _staged(self, direction: str, batch: Batch, stream: Stream) -> Marks:
        """A ring of staging slots: kernels between device rows and staging, copy engine to the host."""
        ring, copies = self._ring, self._streams["copy"]
        assert ring is not None
        self._driver.wait(copies, self._driver.record(stream))
        order = torch.argsort(batch.host) if batch.unit == "pages" else torch.arange(batch.host.numel())
        kernel: Event = None
        for start in range(0, order.numel(), ring.slot_pages):
            part = _select(batch, order[start : start + ring.slot_pages], self.program.sizes["page_size"])
            base = ring.memory.address + ring.turn * ring.slot_bytes
            view = self._view(base, ring.slot_pages)
            inside = _rehost(part)
            moved = self._copies(part.host.tolist(), base, ring.slot_pages)
            free = ring.free[ring.turn]
            if direction == "write_back":
                if free is not None:
                    self._driver.wait(stream, free)
                self._launch("write_back", "gather", view, inside, None, stream)
                kernel = self._driver.record(stream)
                self._driver.wait(copies, kernel)
                self._driver.copy(moved[0], moved[1], moved[2], copies, inward=False)
                ring.free[ring.turn] = self._driver.record(copies)
            else:
                if free is not None:
                    self._driver.wait(copies, free)
                self._driver.copy(moved[1], moved[0], moved[2], copies, inward=True)
                self._driver.wait(stream, self._driver.record(copies))
                self._launch("load", "scatter", view, inside, None, stream)
                ring.free[ring.turn] = self._driver.record(stream)
            ring.turn = (ring.turn + 1) % ring.slots
        self._driver.wait(stream, self._driver.record(copies))
        return Marks(captured=Mark(self._driver, kernel) if direction == "write_back" else None)

    def _copies(
        self, pages: Sequence[int], base: int, slot_pages: int
    ) -> tuple[list[int], list[int], list[int]]:
        """Host addresses, staging addresses, sizes of every range; neighbouring pages are merged."""
        host: list[int] = []
        staged: list[int] = []
        sizes: list[int] = []
        runs = _runs(pages)
        there = self.program.host(slot_pages)
        for here, slot in zip(self._layout.ranges, there.ranges, strict=True):
            if here.nbytes == 0 or not (here.ident is None or self.program.present(here.ident)):
                continue
            for at, inner in zip(_offsets(here), _offsets(slot), strict=True):
                for first, position, count in runs:
                    host.append(self._host_address + at + first * here.nbytes)
                    staged.append(base + inner + position * here.nbytes)
                    sizes.append(count * here.nbytes)
        return host, staged, sizes

    def _torch(self, direction: str, batch: Batch, layers: Sequence[int] | None, stream: Stream) -> Marks:
        """Indexing, the last resort: right everywhere, fast nowhere."""
        with self._driver.torch_stream(stream):
            self._torch_parts(direction, batch, layers)
        return Marks()

    def _torch_parts(self, direction: str, batch: Batch, layers: Sequence[int] | None) -> None:
        pages, tokens = _split(batch, self.program.sizes["page_size"])
        for part in self.program.device:
            if self.program.present(part.ident):
                size = self._bound().views[part.ident][0].shape[-1]
                axes = (*(axis for axis, _, _ in self._layout.part(part.ident).axes), "byte")
                host = host_view(self._host_tensor, self._layout, part.ident, size)
                self._index(direction, part.ident, (host, axes), pages, tokens, layers)

    def _index(
        self,
        direction: str,
        ident: str,
        host: tuple[torch.Tensor, tuple[str, ...]],
        pages: tuple[torch.Tensor, torch.Tensor],
        tokens: tuple[torch.Tensor, torch.Tensor] | None,
        layers: Sequence[int] | None,
    ) -> None:
        view, axes = host
        part = next(p for p in self.program.device if p.ident == ident)
        has_layer = "layer" in axes
        count = view.shape[axes.index("layer")] if has_layer else 1
        wanted = range(count) if layers is None else layers if has_layer else range(1 if 0 in layers else 0)
        for layer in wanted:
            mine, mine_axes = _layer_of(view, axes, layer)
            tensor = self._bound().views[ident][layer if part.table is not None else 0]
            names = (*(name for name, _, _ in part.axes), "byte")
            theirs, their_axes = (
                (tensor, names) if part.table is not None else _layer_of(tensor, names, layer)
            )
            mine = mine.permute([mine_axes.index(a) for a in _lead(their_axes)])
            theirs = theirs.permute([their_axes.index(a) for a in _lead(their_axes)])
            at_host: list[torch.Tensor] = [pages[0]]
            at_device: list[torch.Tensor] = [pages[1]]
            if tokens is not None and "token" in their_axes:
                at_host.append(tokens[0])
                at_device.append(tokens[1])
            at_device = [index.to(theirs.device) for index in at_device]
            if direction == "write_back":
                mine[tuple(at_host)] = theirs[tuple(at_device)].to(mine.device)
            else:
                theirs[tuple(at_device)] = mine[tuple(at_host)].to(theirs.device)


# ---- pieces -----------------------------------------------------------------------------------


LAYERED_LAUNCHES = 64
"""Launches of a layer-ordered load of very many ids: each walks a few layers of some ids."""


def _layer_parts(layers: Sequence[int] | None, chunks: int) -> list[tuple[int, Sequence[int] | None]]:
    """(first, positions) of the layers of each round of launches."""
    if layers is None:
        return [(0, None)]
    size = programs.LAYER_CAPACITY
    if chunks > 1:
        size = min(size, max(1, len(layers) * chunks // LAYERED_LAUNCHES))
    return [(i, layers[i : i + size]) for i in range(0, len(layers), size)]


def _select(batch: Batch, order: torch.Tensor, page_size: int) -> Batch:
    """The pages of a batch at these positions."""
    if batch.unit == "pages":
        host = batch.host[order]
        return Batch("pages", host, batch.device[order], host)
    host = batch.host[order]
    device = batch.device[int(order[0]) * page_size : (int(order[-1]) + 1) * page_size]
    return Batch("mixed", host, device, host)


def _rehost(batch: Batch) -> Batch:
    """The batch with staging positions for host pages."""
    place = torch.arange(batch.host.numel())
    return Batch(batch.unit, place, batch.device, place)


def _runs(pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first page, position in the list, count) of neighbouring pages."""
    runs: list[tuple[int, int, int]] = []
    for position, page in enumerate(pages):
        if runs and runs[-1][0] + runs[-1][2] == page:
            first, at, count = runs[-1]
            runs[-1] = (first, at, count + 1)
        else:
            runs.append((page, position, 1))
    return runs


def _offsets(ranges: PageRanges) -> list[int]:
    """Where the ranges of page 0 start."""
    starts = [ranges.base]
    for extent, step in ranges.left:
        starts = [start + i * step for start in starts for i in range(extent)]
    return starts


def _split(
    batch: Batch, page_size: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]:
    """Pages on both sides, and tokens within them when ids address tokens."""
    if batch.unit == "pages":
        return (batch.host, batch.device), None
    host = batch.host
    if batch.unit == "mixed":
        host = (host[:, None] * page_size + torch.arange(page_size)).reshape(-1)
    device = batch.device.to(torch.int64)
    pages = (host // page_size, device // page_size)
    return pages, (host % page_size, device % page_size)


def host_view(buffer: torch.Tensor, layout: HostLayout, ident: str, size: int) -> torch.Tensor:
    """A component of a host (or staging) buffer: its axes, and the `size` bytes of one item last."""
    part = layout.part(ident)
    shape = [extent for _, extent, _ in part.axes]
    strides = [step for _, _, step in part.axes]
    return buffer.as_strided([*shape, size], [*strides, 1], buffer.storage_offset() + part.base)


def _layer_of(
    tensor: torch.Tensor, axes: tuple[str, ...], layer: int
) -> tuple[torch.Tensor, tuple[str, ...]]:
    if "layer" not in axes:
        return tensor, axes
    at = axes.index("layer")
    return tensor.select(at, layer), axes[:at] + axes[at + 1 :]


def _lead(axes: Sequence[str]) -> list[str]:
    """Page and token first, so that they can be indexed together."""
    first = [axis for axis in ("page", "token") if axis in axes]
    return first + [axis for axis in axes if axis not in first]
