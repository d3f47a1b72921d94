"""Flights: operations that were started together, and moments of them to wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from poolwright.runtime.controller.operation import Operation
from poolwright.runtime.driver import Stream
from poolwright.runtime.errors import PoolError
from poolwright.runtime.opaque import opaque
from poolwright.runtime.storage import Status
from poolwright.runtime.ticket import Ticket


class Leg:
    """Operations of one submission. `ticket` None: it could not be submitted, and `error` says why.

    `number`: its place among all submissions; `started`: when, by the controller's clock. `seconds`: what it
    took on the device, once its end was seen; 0 when it failed. `counted`: whether statistics know it.
    `hit`, `statuses`: as in `Ack`.
    """

    def __init__(
        self,
        number: int,
        operations: Sequence[Operation],
        ticket: Ticket | None,
        error: PoolError | None,
        started: float,
    ) -> None:
        self.number, self.operations, self.ticket = number, operations, ticket
        self.error, self.started = error, started
        self.seconds: float | None = None if ticket is not None else 0.0
        self.counted, self.hit = False, 0
        self.statuses: Mapping[str, Sequence[Status]] = {}

    def over(self) -> bool:
        """Whether it came to its end, good or bad; `error` says which."""
        if self.seconds is None and self.ticket is not None:
            try:
                self.seconds = self.ticket.seconds() if self.ticket.done() else None
            except PoolError as error:
                self.error, self.seconds = error, 0.0
        return self.seconds is not None

    def moved(self, operation: Operation) -> Mapping[str, int]:
        """Pages by pool that an operation has moved, once it is over."""
        return {} if self.error is not None else {name: len(p) for name, p in operation.pages.items()}

    @property
    def paths(self) -> Mapping[str, str]:
        """By pool, the way that its pages took."""
        return {} if self.error is not None or self.ticket is None else self.ticket.paths

    def end(self) -> None:
        """Come to an end without going on; what cannot be stopped is waited for elsewhere."""

    def submitted(self) -> Ticket:
        """The ticket. Raises the error of a leg that could not be submitted."""
        if self.ticket is None:
            assert self.error is not None
            raise self.error
        return self.ticket


class Flight:
    """What a start has submitted: `operations` in order, none when nothing was queued.

    Every wait makes `stream` wait, or without one the caller, and raises TransferError when any of it
    failed: then none of the destination pages may be used. Methods may be called from any thread.
    """

    def __init__(self, legs: Sequence[Leg]) -> None:
        self._legs = tuple(legs)
        self.operations = tuple(operation for leg in legs for operation in leg.operations)

    def __bool__(self) -> bool:
        return bool(self.operations)

    @opaque
    def wait_layer(self, layer: int, stream: Stream = None) -> None:
        """Wait for one layer of a load, of every pool that has it; of a load in bulk, for all of it.

        Raises ValueError for a layer that no pool has, or that was left out by `layers`.
        """
        for leg in self._legs:
            ticket = leg.submitted()
            if ticket.layers:
                ticket.wait_layer(layer, stream)
            else:
                ticket.wait(stream)

    @opaque
    def wait_all(self, stream: Stream = None) -> None:
        """Wait for every byte; with a stream this is what stands in front of a CUDA graph's replay."""
        for leg in self._legs:
            leg.submitted().wait_all(stream)

    @opaque
    def wait_captured(self, stream: Stream = None) -> None:
        """Wait until the device rows of a write-back have been read: they may change after it."""
        for leg in self._legs:
            leg.submitted().captured.wait(stream)
