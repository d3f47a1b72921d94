"""Ticket: the handle of a submitted transfer."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from poolwright.runtime import arguments
from poolwright.runtime.driver import Driver, Event, Stream
from poolwright.runtime.errors import PoolError, TransferError
from poolwright.runtime.moves import Move, Order
from poolwright.runtime.opaque import opaque


class Counter(NamedTuple):
    """The moment when a number on the device reaches `value`.

    `side`: a stream of the pool's own, on which a blocking wait for it is put.
    """

    side: Stream
    address: int
    value: int


class LayerMarks(NamedTuple):
    """When each step of a load is there: the first `begin` at `event`, the next `counted` when their counters
    are `ahead` of what `values` say, the others with the whole load. From `address` on there is a counter for
    each step."""

    event: Event
    begin: int
    counted: int
    side: Stream
    address: int
    values: Sequence[int]
    ahead: int

    def moment(self, step: int, end: Event) -> Event | Counter:
        """When `step` is there; `end`: the event of the whole load."""
        if step < self.begin:
            return self.event
        if step >= self.begin + self.counted:
            return end
        return Counter(self.side, self.address + 4 * step, self.values[step] + self.ahead & 0xFFFFFFFF)


class LayerEvents(NamedTuple):
    """When each step of a load is there: those in front of ``ends[n]`` at ``events[n]``."""

    events: Sequence[Event]
    ends: Sequence[int]

    def moment(self, step: int, end: Event) -> Event:
        """When `step` is there."""
        return self.events[bisect_right(self.ends, step)]


class Mark:
    """A moment on the device."""

    __slots__ = ("_event", "_ticket")

    def __init__(self, ticket: Ticket, event: Event) -> None:
        self._ticket, self._event = ticket, event

    def __bool__(self) -> bool:
        raise TypeError("a moment is not a flag: call wait(), or wait(stream)")

    @opaque
    def wait(self, stream: Stream = None) -> None:
        """Make `stream` wait for it; without a stream, block the caller. Raises TransferError."""
        self._ticket.reach(self._event, stream)


_asking = threading.Lock()
"""Held while a verdict is asked for, of whatever ticket."""


class Ticket:
    """A submitted transfer: which way it goes, by which path, when it is done.

    A page stays in flight until the caller has waited for the ticket or `done()` has told him True:
    what the pool hands out never depends on timing. `moved`: host pages by pool; `paths`: the path of each.
    `delayed`: pages of a write-back whose rows were read only after others had left the staging memory;
    `captured` is that much later. `predicted`: seconds by the cost model on a device that does nothing else,
    all pools together; None where it knows nothing of a path. `verdict` is asked once all is done: what is
    wrong all the same.
    """

    __slots__ = (
        *("_acknowledged", "_began", "_captured", "_driver", "_event", "_marks", "_moves", "_order"),
        *("_verdict", "delayed", "direction", "error", "pool"),
    )

    def __init__(
        self,
        driver: Driver,
        pool: str,
        direction: str,
        moves: Sequence[Move],
        event: Event,
        captured: Event,
        marks: LayerMarks | LayerEvents | None,
        order: Order | None,
        delayed: int,
        verdict: Callable[[], TransferError | None] | None,
        began: Event = None,
    ) -> None:
        self.pool, self.direction, self.delayed = pool, direction, delayed
        self.error: TransferError | None = None
        self._driver, self._event, self._captured, self._began = driver, event, captured, began
        self._moves, self._marks, self._order = moves, marks, order
        self._verdict = verdict
        self._acknowledged = False

    @property
    def moved(self) -> Mapping[str, set[int]]:
        """The host pages of each pool."""
        return {move.name: move.batch.host_pages for move in self._moves}

    @property
    def pages(self) -> set[int]:
        """The host pages, of all pools."""
        return set().union(*(move.batch.host_pages for move in self._moves))

    @property
    def paths(self) -> Mapping[str, str]:
        """The path that each pool took."""
        return {move.name: move.path for move in self._moves}

    @property
    def path(self) -> str:
        """The path, or those of several pools joined by a plus sign."""
        return "+".join(dict.fromkeys(move.path for move in self._moves))

    @property
    def predicted(self) -> float | None:
        """Seconds by the cost model; None where it knows nothing."""
        known = [move.predicted for move in self._moves if move.predicted is not None]
        return sum(known) if len(known) == len(self._moves) else None

    def seconds(self) -> float:
        """Seconds from when it could begin to its last byte; blocks until then. Raises TransferError, and
        ValueError unless it was submitted with ``timed=True``."""
        if self._began is None:
            raise ValueError(f"{self.pool}: this {self.direction} was not timed: submit it with timed=True")
        self.wait()
        return self._driver.elapsed(self._began, self._event)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that can be waited for on their own, in the order in which they come."""
        return () if self._order is None else self._order.layers

    @property
    def captured(self) -> Mark:
        """When the device rows have been read: they may change after it."""
        return Mark(self, self._captured)

    @property
    def acknowledged(self) -> bool:
        """Whether the caller knows that it is done."""
        return self._acknowledged

    @opaque
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

    @opaque
    def wait(self, stream: Stream = None) -> None:
        """Make `stream` wait for all of it; without a stream, block the caller. Raises TransferError."""
        self.reach(self._event, stream)
        if stream is None:
            self._acknowledge()
            self._check()

    @opaque
    def wait_layer(self, layer: int, stream: Stream = None) -> None:
        """As `wait`, for one layer of a load, of every pool that has it.

        For a layer of pools that have nothing in this load, only what pools without layers load is waited
        for: any layer may need it. Raises ValueError for any other layer that it does not load.
        """
        layers = self.layers
        if type(layer) is not int:
            layer = arguments.integer(self.pool, "layer", layer)
        if layer in layers:
            self._reach_step(layers.index(layer), stream)
        elif self._order is not None and layer in self._order.others:
            if self._order.rest is not None:
                self._reach_step(self._order.rest, stream)
        else:
            known = ", ".join(map(str, layers)) or "none"
            raise ValueError(
                f"{self.pool}: layer {layer} is not told on its own by this {self.direction} (layers {known})"
            )

    def _reach_step(self, step: int, stream: Stream) -> None:
        end, marks = self._event, self._marks
        self.reach(end if marks is None else marks.moment(step, end), stream)

    @opaque
    def wait_all(self, stream: Stream = None) -> None:
        """As `wait`; the way to put a load in front of a CUDA graph's replay."""
        self.wait(stream)

    @opaque
    def wait_current(self, layer: int | None = None) -> None:
        """Make the stream that the caller's work goes to now wait for all of it, or for one layer.

        Where there are no streams (the CPU) it blocks. Raises TransferError, and ValueError as `wait_layer`.
        """
        stream = self._driver.current_stream()
        if layer is None:
            self.wait(stream)
        else:
            self.wait_layer(layer, stream)

    def detach(self) -> None:
        """Give up the ticket: its pages count as known, later work on them is still ordered behind it."""
        self._acknowledged = True

    def settle(self) -> None:
        """As `wait`; a failure is kept for whoever asks."""
        with suppress(TransferError):
            self.wait()

    def reach(self, moment: Event | Counter, stream: Stream) -> None:
        """Make `stream`, or the caller, wait for a moment. Raises TransferError, ValueError for no stream."""
        self._check()
        driver = self._driver
        arguments.stream(self.pool, "stream", stream, driver)
        try:
            if isinstance(moment, Counter):
                with driver.guard():
                    target = moment.side if stream is None else stream
                    driver.wait_value(target, moment.address, moment.value)
                    if stream is None:
                        driver.synchronize(driver.record(moment.side))
            elif stream is None:
                driver.synchronize(moment)
            else:
                driver.wait(stream, moment)
        except PoolError as error:
            self._broken(error)
        self._check()

    def _broken(self, error: PoolError) -> None:
        """An error of the device fails the ticket for good: none of its pages may be used."""
        self.error = failure(self.pool, self.direction, self._moves, str(error))
        self._acknowledge()

    def _acknowledge(self) -> None:
        if self._verdict is not None:
            with _asking:  # once, whoever comes first
                if self.error is None and self._verdict is not None:  # also of a ticket that was given up
                    self.error = self._verdict()
                self._verdict = None
        self._acknowledged = True

    def _check(self) -> None:
        if self.error is not None:
            raise self.error


def failure(pool: str, direction: str, moves: Sequence[Move], cause: str) -> TransferError:
    """The error of a transfer of these pages."""
    return TransferError(pool, direction, {m.name: sorted(m.batch.host_pages) for m in moves}, cause)
