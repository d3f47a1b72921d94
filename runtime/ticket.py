"""Ticket: the handle of a submitted transfer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from poolwright.runtime.checks import Verdict
from poolwright.runtime.driver import Driver, Event, Stream
from poolwright.runtime.errors import PoolError, TransferError


class Mark:
    """A moment on the device: an event, or with `address` a 32-bit number there that reaches `value`.

    `side`: a stream of the pool's own, on which a blocking wait for a number is put.
    """

    def __init__(
        self, driver: Driver, event: Event, side: Stream = None, address: int = 0, value: int = 0
    ) -> None:
        self._driver, self._event, self._side = driver, event, side
        self._address, self._value = address, value

    def __bool__(self) -> bool:
        raise TypeError("a moment is not a flag: call wait(), or wait(stream)")

    def wait(self, stream: Stream = None) -> None:
        """Make `stream` wait for it; without a stream, block the caller."""
        driver = self._driver
        if self._address:
            with driver.guard():
                driver.wait_value(self._side if stream is None else stream, self._address, self._value)
                if stream is None:
                    driver.synchronize(driver.record(self._side))
        elif stream is None:
            driver.synchronize(self._event)
        else:
            driver.wait(stream, self._event)


class LayerMarks(NamedTuple):
    """When each layer of a load is there: all at `event`, or as counters at `address` reach `values`."""

    driver: Driver
    event: Event
    side: Stream = None
    address: int = 0
    values: Sequence[int] = ()

    def mark(self, position: int) -> Mark:
        if not self.address:
            return Mark(self.driver, self.event)
        return Mark(self.driver, self.event, self.side, self.address + 4 * position, self.values[position])


class Ticket:
    """A submitted transfer: which way it goes, by which path, when it is done.

    A page stays in flight until the caller has waited for the ticket or `done()` has told him True:
    what the pool hands out never depends on timing. `pages`: the host pages. `verdict` is asked once it is
    done: what is wrong all the same, and with which of them.
    """

    __slots__ = (
        *("_acknowledged", "_captured", "_driver", "_event", "_ids", "_layers", "_lock", "_verdict"),
        *("direction", "error", "pages", "path", "pool"),
    )

    def __init__(
        self,
        driver: Driver,
        pool: str,
        direction: str,
        path: str,
        pages: set[int],
        event: Event,
        captured: Event,
        layers: LayerMarks | None,
        ids: Sequence[int],
        verdict: Verdict | None,
    ) -> None:
        self.pool, self.direction, self.path, self.pages = pool, direction, path, pages
        self.error: TransferError | None = None
        self._driver, self._event, self._captured = driver, event, captured
        self._layers, self._ids, self._verdict = layers, ids, verdict
        self._lock = threading.Lock()
        self._acknowledged = False

    @property
    def captured(self) -> Mark:
        """When the device rows have been read: they may change after it."""
        return Mark(self._driver, self._captured)

    @property
    def acknowledged(self) -> bool:
        """Whether the caller knows that it is done."""
        return self._acknowledged

    def done(self) -> bool:
        """Whether every byte has arrived. Raises TransferError if the transfer failed."""
        if not self._acknowledged:
            try:
                if self._driver.done(self._event):
                    self._acknowledge()
            except PoolError as error:
                self._broken(error)
        self._check()
        return self._acknowledged

    def wait(self, stream: Stream = None) -> None:
        """Make `stream` wait for all of it; without a stream, block the caller. Raises TransferError."""
        self._check()
        if stream is not None:
            self._driver.wait(stream, self._event)
            return
        try:
            self._driver.synchronize(self._event)
        except PoolError as error:
            self._broken(error)
        self._acknowledge()
        self._check()

    def wait_layer(self, layer: int, stream: Stream = None) -> None:
        """As `wait`, for one layer of a load. Raises ValueError for a layer that it does not load."""
        if layer not in self._ids:
            known = ", ".join(map(str, self._ids)) or "none"
            raise ValueError(
                f"layer {layer} is not told on its own by this {self.direction} (layers {known})"
            )
        self._check()
        marks = self._layers or LayerMarks(self._driver, self._event)
        try:
            marks.mark(self._ids.index(layer)).wait(stream)
        except PoolError as error:
            self._broken(error)
        self._check()

    def wait_all(self, stream: Stream = None) -> None:
        """As `wait`; the way to put a load in front of a CUDA graph's replay."""
        self.wait(stream)

    def detach(self) -> None:
        """Give up the ticket: its pages count as known, later work on them is still ordered behind it."""
        self._acknowledged = True

    def settle(self) -> None:
        """As `wait`; a failure is kept for whoever asks."""
        with suppress(TransferError):
            self.wait()

    def _broken(self, error: PoolError) -> None:
        """An error of the device fails the ticket for good: none of its pages may be used."""
        self._fail(str(error), sorted(self.pages))
        self._acknowledge()

    def _fail(self, cause: str, pages: Sequence[int]) -> None:
        self.error = TransferError(self.pool, self.direction, pages, cause)

    def _acknowledge(self) -> None:
        with self._lock:
            if self.error is None and self._verdict is not None:  # also of a ticket that was given up
                found = self._verdict()
                if found is not None:
                    self._fail(*found)
            self._acknowledged, self._verdict = True, None

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
