"""Carries out transfers of one pool over the driver door: checked batches in, tickets out.

Order is kept by streams and by pages. Write-backs follow each other in one stream, loads in another;
staged copies run in streams of their own, joined at the end of a submission. A submission waits for the
caller's stream, whose work filled or still reads the device rows, and for running transfers of the other
direction that touch a page of its own, on either side.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from poolwright.runtime import indexing
from poolwright.runtime.binding import Binding
from poolwright.runtime.checks import Checks
from poolwright.runtime.driver import Driver, Event, Kernels, Memory, Stream
from poolwright.runtime.errors import PoolError, TransferError
from poolwright.runtime.hazards import Hazards, Submission
from poolwright.runtime.indices import Batch
from poolwright.runtime.launch import Launcher, Place
from poolwright.runtime.memory import GUARD, PATTERN
from poolwright.runtime.program import SizedProgram, view
from poolwright.runtime.staging import Ring, Staging
from poolwright.runtime.ticket import LayerMarks, Ticket

STREAMS = ("write", "load", "copy_out", "copy_in", "side")

_counters_of_all_pools: list[Memory] = []
"""Never given back: a caller's stream may come to its wait for a layer when the pool is long gone."""


@dataclass(frozen=True)
class Engine:
    """What transfers run on. `kernels` None: neither zero_copy nor staged; `library` None: no CPU twin."""

    driver: Driver
    kernels: Kernels | None = None
    library: ctypes.CDLL | None = None
    threads: int = 1


class _Ran(NamedTuple):
    """What a path submitted: the event after which rows are captured, progress by layer."""

    captured: Event = None
    layers: LayerMarks | None = None


class Transfers:
    """The transfers of one pool. Any thread may submit."""

    def __init__(
        self,
        engine: Engine,
        program: SizedProgram,
        host_address: int,
        host_tensor: torch.Tensor,
        pages: int,
    ) -> None:
        self.engine, self.program, self.pages = engine, program, pages
        self._pool = program.spec.name
        self._layout = program.host(pages)
        self._host = Place(host_address, pages)
        self._host_tensor = host_tensor
        self._driver = engine.driver
        self._lock = threading.RLock()
        self._streams = {name: self._driver.stream() for name in STREAMS}
        self._binding: Binding | None = None
        self._table: Memory | None = None
        self._launcher: Launcher | None = None
        self._staging: Staging | None = None
        self._hazards = Hazards(self._driver)
        self._lost: list[object] = []
        self._counters: Memory | None = None
        self._reached: list[int] = []
        self._paths: dict[str, Callable[[str, Batch, Sequence[int] | None, Stream, list[object]], _Ran]] = {
            "host": self._atoms,
            "torch": self._indexing,
            "zero_copy": self._zero_copy,
            "staged": self._staged,
        }

    # ---- state

    def bind(self, binding: Binding, engine: Engine) -> None:
        """Use these tensors, and code compiled for them, from now on."""
        with self._lock, self._driver.guard():
            self.engine, self._binding = engine, binding
            self._table = self._driver.allocate(8 * max(len(binding.table), 1))
            stream = self._streams["write"]
            self._driver.upload(self._table.address, array("Q", binding.table), stream)
            if self._counters is None:
                self._counters = self._new_counters(stream)
            self._driver.synchronize(self._driver.record(stream))  # nothing else keeps the table until then
            if engine.kernels is not None:
                self._launcher = Launcher(
                    self._driver,
                    engine.kernels,
                    self.program,
                    binding.align,
                    self._table.address,
                    binding.strides,
                )

    def use_ring(self, ring: Ring | None, borders: Sequence[int] = ()) -> None:
        """Stage through this ring; None: not at all. No copy crosses one of `borders`, host addresses."""
        if ring is not None:
            # Padding between components is never written: it must not hold what lay there before.
            with self._lock, self._driver.guard():
                stream = self._streams["write"]
                end = ring.memory.address + ring.memory.nbytes
                self._driver.fill(ring.memory.address, 0, ring.memory.nbytes // 4, stream)
                self._driver.fill(end, PATTERN * 0x01010101, GUARD // 4, stream)
                self._driver.synchronize(self._driver.record(stream))
            self._staging = Staging(
                self._driver, self.program, ring, self._layout, self._host.address, borders
            )

    def in_flight(self, pages: set[int], after: Ticket | None) -> int | None:
        """A page among these whose transfer the caller does not know to be done, or None."""
        with self._lock:
            return self._hazards.in_flight(pages, after)

    def settle(self, pages: set[int], reads: bool) -> None:
        """Block until nothing submitted touches these host pages. Their tickets count as waited for.

        `reads`: raises TransferError when a write-back into one of them failed.
        """
        with self._lock:
            running, tickets = self._hazards.touching(pages)
        for entry in running:
            try:
                self._driver.synchronize(entry.event)
            except PoolError as error:
                if reads and entry.direction == "write_back":
                    failed = sorted(entry.batch.host_pages)
                    raise TransferError(self._pool, entry.direction, failed, str(error)) from error
        for ticket in tickets:
            ticket.wait() if reads else ticket.settle()

    def drain(self) -> None:
        """Block until everything submitted has run."""
        with self._lock:
            self._hazards.drain()

    # ---- submission

    def submit(
        self,
        direction: str,
        batch: Batch,
        path: str,
        other: Stream,
        layers: Sequence[int] | None = None,
        ids: Sequence[int] = (),
        checks: Checks | None = None,
    ) -> Ticket:
        """Submit a ``write_back`` or ``load``. `other`: the stream that filled, or still reads, the rows.

        `layers`: positions of the layers to load, in this order; `ids`: their layer ids. `checks`:
        compare the pages when they have arrived. Raises TransferError; no page may be used then.
        """
        stream = self._streams["write" if direction == "write_back" else "load"]
        with self._lock, self._driver.guard():
            self._driver.admit(other, self._pool)
            self._hazards.forget()
            keep: list[object] = [batch, self._binding, self._table]
            try:
                self._behind(stream, other, direction, batch)
                ran = _Ran() if not batch.host else self._paths[path](direction, batch, layers, stream, keep)
                verdict = None
                if checks is not None and batch.host and self._binding is not None:
                    ran = _Ran()  # see Note [Comparing in order]
                    verdict = checks.compare(batch, layers, self._binding.views, stream, keep)
                event = self._driver.record(stream)
            except PoolError as error:
                self._abandon(direction, batch, stream, other, keep)
                pages = sorted(batch.host_pages)
                raise TransferError(self._pool, direction, pages, str(error)) from error
            captured = event if ran.captured is None else ran.captured
            ticket = Ticket(
                *(self._driver, self._pool, direction, path, batch.host_pages),
                *(event, captured, ran.layers, ids, verdict),
            )
            self._hazards.add(Submission(direction, event, batch, keep), ticket)
            return ticket

    def _behind(self, stream: Stream, other: Stream, direction: str, batch: Batch) -> None:
        """Put the submission behind the caller's stream and behind running transfers of its pages."""
        driver = self._driver
        driver.wait(stream, driver.record(other))
        if batch.on_device is not None:  # ids on the device may come from another stream than the rows
            driver.wait(stream, driver.record(driver.current_stream()))
        for event in self._hazards.before(direction, batch):
            driver.wait(stream, event)

    def _abandon(
        self, direction: str, batch: Batch, stream: Stream, other: Stream, keep: list[object]
    ) -> None:
        """A submission failed half-way: what had been submitted still runs. Later transfers wait for it, and
        so does the caller's stream, since there is no ticket to wait for."""
        try:
            for name in STREAMS[:4]:
                self._driver.wait(stream, self._driver.record(self._streams[name]))
            event = self._driver.record(stream)
            self._driver.wait(other, event)
            if self._staging is not None:
                self._staging.hold(event)
            self._hazards.add(Submission(direction, event, batch, keep), None)
        except PoolError:
            self._lost.append(keep)  # the device answers nothing any more: never reuse what it may touch

    # ---- paths

    def _zero_copy(
        self,
        direction: str,
        batch: Batch,
        layers: Sequence[int] | None,
        stream: Stream,
        keep: list[object],
    ) -> _Ran:
        """Kernels move runs between device rows and pinned host memory."""
        assert self._launcher is not None
        if layers is None:
            self._launcher.launch(direction, direction, self._host, batch, None, stream, keep)
            return _Ran()
        counters, self._counters = self._counters, None  # an unknown part of a failed launch may still count
        if counters is None:
            counters = self._new_counters(stream)
            self._driver.synchronize(self._driver.record(stream))
        arrivals = self._launcher.launch(
            direction, direction, self._host, batch, layers, stream, keep, counters.address
        )
        self._counters = counters
        values = [value + arrivals & 0xFFFFFFFF for value in self._reached[: len(layers)]]
        self._reached[: len(layers)] = values
        return _Ran(layers=LayerMarks(self._driver, None, self._streams["side"], counters.address, values))

    def _new_counters(self, stream: Stream) -> Memory:
        """A counter for each place in the order of layers. They only ever grow, so that nobody who waits
        for an earlier load waits for a later one. Nobody may wait for them before they are filled."""
        count = self.program.sizes["layers"]
        counters = self._driver.allocate(4 * max(count, 1))
        _counters_of_all_pools.append(counters)
        self._driver.fill(counters.address, 0, max(count, 1), stream)
        self._reached = [0] * count
        return counters

    def _staged(
        self,
        direction: str,
        batch: Batch,
        layers: Sequence[int] | None,
        stream: Stream,
        keep: list[object],
    ) -> _Ran:
        """Kernels and copy engine in turns over a ring of staging slots."""
        assert self._staging is not None and self._launcher is not None and layers is None
        if direction == "write_back":
            copies = self._streams["copy_out"]
            return _Ran(captured=self._staging.write_back(self._launcher, batch, stream, copies, keep))
        self._staging.load(self._launcher, batch, stream, self._streams["copy_in"], keep)
        return _Ran()

    def _atoms(
        self,
        direction: str,
        batch: Batch,
        layers: Sequence[int] | None,
        stream: Stream,
        keep: list[object],
    ) -> _Ran:
        """The CPU twin moves whole runs."""
        assert self.engine.library is not None and self._binding is not None and self._table is not None
        function = getattr(self.engine.library, f"atoms_{batch.unit}")
        host, device = array("q", batch.host), array("q", batch.device)
        chosen = None if layers is None else (ctypes.c_int64 * max(len(layers), 1))(*layers)
        function(
            view(self._table.address, self._host.address, self.pages, self._binding.strides),
            ctypes.c_void_p(host.buffer_info()[0]),
            ctypes.c_void_p(device.buffer_info()[0]),
            ctypes.c_uint64(len(host)),
            ctypes.c_uint32(direction == "load"),
            chosen,
            ctypes.c_uint64(0 if layers is None else len(layers)),
            ctypes.c_uint32(self.engine.threads),
        )
        return _Ran()

    def _indexing(
        self,
        direction: str,
        batch: Batch,
        layers: Sequence[int] | None,
        stream: Stream,
        keep: list[object],
    ) -> _Ran:
        """Indexing by torch, the last resort: right everywhere, fast nowhere."""
        assert self._binding is not None
        with self._driver.torch_stream(stream):
            indexing.move(
                self.program, self._layout, self._host_tensor, self._binding.views, direction, batch, layers
            )
        return _Ran()
