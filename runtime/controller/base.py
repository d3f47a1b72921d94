"""What every controller does: operations queued, started together, acknowledged in order."""

from __future__ import annotations

import heapq
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple, TypeVar

import torch

from poolwright.runtime import arguments
from poolwright.runtime.controller import ids
from poolwright.runtime.controller.book import Book, Queued
from poolwright.runtime.controller.flight import Flight, Leg
from poolwright.runtime.controller.lone import Lone
from poolwright.runtime.controller.operation import DIRECTIONS, Ack, Ids, Operation
from poolwright.runtime.controller.statistics import Statistics
from poolwright.runtime.driver import Event, Stream
from poolwright.runtime.errors import PoolError, TransferError
from poolwright.runtime.group import HostPoolGroup
from poolwright.runtime.indices import UNITS
from poolwright.runtime.opaque import opaque
from poolwright.runtime.ticket import Ticket
from poolwright.runtime.transfer import ORDERS

_T = TypeVar("_T")

LIMIT = 1024
"""Operations of one direction that may wait, run, or lie finished with nobody having taken their acks."""

Reclaim = Callable[[Mapping[str, int]], object]
"""Told how many ids every pool lacks; frees pages through the controller."""


class Running(NamedTuple):
    """A started operation whose ack nobody has taken."""

    operation: Operation
    leg: Leg


class Controller:
    """The operations of one pool or group, in the order in which they were asked for.

    It has no threads and calls nobody back but `reclaim`. An operation waits in a queue until
    `start_writing` or `start_loading` submits what is queued, and is over for the caller when `pop_acks`
    has handed out its ack. Until then its host pages are locked: `free` refuses them, so nobody is handed
    them. Everything but the moment of an ack depends on the sequence of calls alone, so ranks that make the
    same calls, and take as many acks, hold the same pages. (Pools that are still registered in the background
    have pages by and by: ranks agree on that first.)

    Methods may be called from any thread. Raises ValueError for wrong arguments with nothing done,
    WrongProcess after a fork.
    """

    def __init__(
        self,
        pools: HostPoolGroup | Lone,
        limit: int,
        reclaim: Reclaim | None,
        clock: Callable[[], float],
    ) -> None:
        self._name = pools.spec.name if isinstance(pools, HostPoolGroup) else pools.name
        limit = arguments.whole(self._name, "limit", limit, 1)
        if reclaim is not None and not callable(reclaim):
            raise arguments.refusal(self._name, "reclaim", "a function of {pool: ids that lack}", reclaim)
        if not callable(clock):
            raise arguments.refusal(self._name, "clock", "a function that gives seconds", clock)
        self._pools, self._limit, self._reclaim, self._clock = pools, limit, reclaim, clock
        self._own = {name: pool for name, pool in pools.pools.items() if pool._source is None}
        self._anchor = next(iter(self._own.values()))
        self._driver = self._anchor._shared.code.driver
        self._lock = threading.RLock()
        self._book = Book(self._own)
        self._queues: dict[str, list[Queued]] = {direction: [] for direction in DIRECTIONS}
        self._running: dict[str, deque[Running]] = {direction: deque() for direction in DIRECTIONS}
        self._statistics = Statistics({name: pool.page_bytes for name, pool in pools.pools.items()})
        self._operations = self._legs = 0

    # ---- starting

    @opaque
    def start_writing(
        self, *, producer: Stream = None, path: str | None = None, qos: str | None = None
    ) -> Flight:
        """Submit every queued write-back. `producer`: the stream that filled the device rows.

        Raises, with all of them still queued, what concerns no pages, such as a graph that is being captured.
        When a submission fails half-way, its operations get failed acks, and the flight raises.
        """

        def submit(moves: Mapping[str, Ids], unit: str) -> Ticket:
            return self._pools.write_back(moves, unit, producer=producer, path=path, qos=qos, timed=True)

        return self._start("write_back", submit)

    @opaque
    def start_loading(
        self,
        *,
        order: str = "layer",
        layers: Iterable[int] | None = None,
        readers: Stream = None,
        path: str | None = None,
        qos: str | None = None,
    ) -> Flight:
        """Submit every queued load, as `start_writing` does. `readers`: the stream that still reads the rows.

        `order` ``layer``: first layers first, each can be waited for; ``bulk``: all at once.
        """
        if order not in ORDERS:  # also where nothing is queued, which submits nothing
            raise arguments.refusal(self._name, "order", "layer or bulk", order)
        wanted = None if layers is None else arguments.layer_ids(self._name, "layers", layers)

        def submit(moves: Mapping[str, Ids], unit: str) -> Ticket:
            how: dict[str, Any] = {"order": order, "layers": wanted, "readers": readers}
            return self._pools.load(moves, unit, path=path, qos=qos, timed=True, **how)

        return self._start("load", submit)

    def _start(self, direction: str, submit: Callable[[Mapping[str, Ids], str], Ticket]) -> Flight:
        with self._lock:
            self._alive()
            queue = self._queues[direction]
            legs: list[Leg] = []
            while queue:
                together = ids.together(queue)
                legs.append(self._submit(together, submit, first=not legs))
                del queue[: len(together)]
            return Flight(legs)

    def _submit(
        self, together: Sequence[Queued], submit: Callable[[Mapping[str, Ids], str], Ticket], first: bool
    ) -> Leg:
        operations = [queued.operation for queued in together]
        started, ticket, failed = self._clock(), None, None
        try:
            self._behind(together)
            ticket = submit(ids.merged(operations), operations[0].unit)
        except PoolError as error:
            if first and not isinstance(error, TransferError):
                raise
            failed = error
        leg = Leg(self._legs, operations, ticket, failed, started)
        self._legs += 1
        for queued in together:
            self._book.started(queued)
            self._running[queued.operation.direction].append(Running(queued.operation, leg))
        return leg

    def _behind(self, together: Sequence[Queued]) -> None:
        """Have the current stream, from which ids are read, wait for the work that makes them."""
        events = [queued.ready for queued in together if queued.ready is not None]
        if not events:
            return
        with self._driver.guard():
            stream = self._driver.current_stream()
            self._driver.admit(stream, self._anchor.name)
            for event in events:
                self._driver.wait(stream, event)

    # ---- acks

    @opaque
    def ready(self, direction: str | None = None) -> int:
        """How many acks `pop_acks` would hand out now: what ranks take the minimum of."""
        with self._lock:
            self._alive()
            return sum(1 for _ in self._over(direction))

    @opaque
    def pop_acks(self, max_n: int | None = None, direction: str | None = None) -> list[Ack]:
        """Acks of operations that are over, in the order in which they were started, at most `max_n`.

        `direction` (``write_back``, ``load``, ``store``, ``fetch``): only of these, so that storage holds
        nothing up. Nothing that is over is told before what
        was started before it. Their host pages are the caller's again, those of a failed one too: it frees
        them or uses them for something else.
        """
        if max_n is not None:
            max_n = arguments.integer(self._name, "max_n", max_n)
            if not 0 <= max_n <= sys.maxsize:
                raise arguments.refusal(self._name, "max_n", "a number from 0, or None for all", max_n)
        with self._lock:
            self._alive()
            acks = []
            for operation, leg in list(islice(self._over(direction), max_n)):
                self._running[operation.direction].popleft()
                self._book.release(operation)
                assert leg.seconds is not None
                acks.append(Ack(operation, leg.error, leg.seconds, leg.hit, leg.statuses))
            return acks

    def _over(self, direction: str | None) -> Iterator[Running]:
        """Operations that are over, up to the first that is not."""
        if direction is not None:
            arguments.one_of(self._name, "direction", direction, DIRECTIONS)
        asked = self._running.values() if direction is None else (self._running[direction],)
        ordered = heapq.merge(*asked, key=lambda running: running.leg.number)
        return takewhile(lambda running: self._ended(running.leg), ordered)

    def _ended(self, leg: Leg) -> bool:
        known = leg.counted
        if not known and leg.over():
            leg.counted = known = True
            self._statistics.add(leg)
        return known

    @opaque
    def cancel(self, operation: Operation) -> bool:
        """Take back an operation that is not started yet: whether it was. There is no ack for it, and the
        pages that `write` took are free again. What is started comes to its end, and its ack with it."""
        if not isinstance(operation, Operation):
            raise arguments.refusal(self._name, "cancel", "an operation", operation)
        with self._lock:
            self._alive()
            queue = self._queues[operation.direction]
            for at, queued in enumerate(queue):
                if queued.operation is operation:
                    del queue[at]
                    self._drop(queued)
                    return True
            return False

    def _drop(self, queued: Queued) -> None:
        self._book.started(queued)
        self._book.release(queued.operation)
        if queued.operation.direction == "write_back":
            self._pools.free(self._tokens(queued.operation.host, queued.operation.unit))

    @opaque
    def reset(self) -> list[Operation]:
        """Wait for everything that runs, then forget all operations and take every page of the pools back.

        Returns the operations that had no ack, in order; nobody will hear of them again.
        """
        with self._lock:
            self._alive()
            started = [running.operation for queue in self._running.values() for running in queue]
            queued = [each.operation for queue in self._queues.values() for each in queue]
            for leg in [running.leg for queue in self._running.values() for running in queue]:
                leg.end()
            try:
                self._pools.clear()
            except PoolError:
                self._pools.clear()  # what failed was waited for, too: nothing is left to run
            for direction in DIRECTIONS:
                self._running[direction].clear()
                self._queues[direction].clear()
            self._book.clear()
            return sorted(started + queued, key=lambda operation: operation.number)

    # ---- what is going on

    @opaque
    def statistics(self) -> dict[str, dict[str, object]]:
        """By pool: pages in all, free and locked; by direction operations, failed ones, pages, bytes, GB/s by
        the device's clock, seconds in the queue in all and at most, submissions by path. Numbers and text
        only, ready for JSON. What has ended counts once `ready` or `pop_acks` has seen it."""
        with self._lock:
            self._alive()
            found: dict[str, dict[str, object]] = {}
            for name, pool in self._pools.pools.items():
                found[name] = {"pages": pool.page_num, **self._statistics.of(name)}
            for name, pool in self._own.items():
                found[name]["free"] = pool.available_size() // pool.page_size
                found[name]["locked"] = len(self._book.locked(name))
            return found

    # ---- pieces

    def _alive(self) -> None:
        self._anchor._alive()

    def _locked(self, name: str) -> set[int]:
        with self._lock:
            return self._book.locked(name)

    def _room(self, direction: str) -> bool:
        return len(self._queues[direction]) + len(self._running[direction]) < self._limit

    def _alloc(self, counts: Mapping[str, int]) -> dict[str, torch.Tensor] | None:
        """Ids of free pages; when there are too few, after one call of `reclaim`."""
        found = self._pools.alloc(counts)
        if found is not None or self._reclaim is None:
            return found
        free = {name: self._own[name].available_size() for name in counts}
        self._reclaim({name: n - free[name] for name, n in counts.items() if n > free[name]})
        return self._pools.alloc(counts)

    def _free(self, host: Mapping[str, torch.Tensor], unit: str) -> None:
        arguments.one_of(self._name, "unit", unit, UNITS)
        listed = {name: ids.listed(name, "free", each) for name, each in self._named("free", host).items()}
        named = self._tokens(listed, unit)
        with self._lock:
            self._alive()
            for name, each in named.items():
                pool = self._own[name]
                locked = self._book.locked(name)
                locked = locked & ids.pages_of(each, pool.page_size) if locked else locked
                if locked:
                    raise ValueError(
                        f"{name}: page {min(locked)} is held by an operation; cancel it or take its ack"
                    )
            self._pools.free(named)

    def _write(self, given: Mapping[str, torch.Tensor], unit: str, key: object) -> Operation | None:
        arguments.one_of(self._name, "unit", unit, UNITS)
        device = {n: ids.listed(n, "write", each) for n, each in self._named("write", given).items()}
        with self._lock:
            self._alive()
            if not self._room("write_back"):
                return None
        sizes = {name: self._own[name].page_size for name in device}
        counts = {name: each.numel() * ids.tokens_of(unit, sizes[name]) for name, each in device.items()}
        taken = self._alloc(counts)  # without the lock: reclaim may be waiting for another thread
        if taken is None:
            return None
        host = {name: ids.in_unit(each, unit, sizes[name]) for name, each in taken.items()}
        moves = {name: (host[name], each) for name, each in device.items()}
        made = None
        try:
            made = self._queue("write_back", moves, unit, key)
        finally:
            if made is None:
                self._pools.free(taken)
        return made

    def _load(self, given: Mapping[str, Ids], unit: str, key: object) -> Operation | None:
        return self._queue("load", self._named("load", given), unit, key)

    def _queue(self, direction: str, moves: dict[str, Ids], unit: str, key: object) -> Operation | None:
        """Check an operation and queue it; None when the queue is full. Raises ValueError."""
        batches = {}
        for name, pair in moves.items():
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise arguments.refusal(self._name, f"{direction}: {name}", "(host, device) ids", pair)
            host, device = pair
            for move in self._own[name]._moves(direction, host, device, unit, "cheap", None, None):
                batches[move.name] = move.batch
        on_device = any(not device.is_cpu for _, device in moves.values())
        ready = None
        if on_device:
            with self._driver.guard():
                ready = self._driver.record(self._driver.current_stream())
        pages = {name: frozenset(batch.host_pages) for name, batch in batches.items()}
        there = {name: frozenset(batches[name].device_pages or ()) for name in moves}
        with self._lock:
            queued = self._accept(direction, moves, unit, key, pages, there, ready)
            if queued is None:
                return None
            self._queues[direction].append(queued)
            return queued.operation

    def _accept(
        self,
        direction: str,
        moves: Mapping[str, Ids],
        unit: str,
        key: object,
        pages: Mapping[str, frozenset[int]],
        there: Mapping[str, frozenset[int]],
        ready: Event = None,
    ) -> Queued | None:
        """An operation with its pages locked; None without room. Raises ValueError for pages in other use."""
        if not self._room(direction):
            return None
        for name in moves:
            self._book.check(direction, name, pages[name], there[name])
            idle = self._own[name]._slots.idle(pages[name])
            if idle is not None:
                raise ValueError(f"{name}: host page {idle} is not allocated; pass what alloc returned")
        queued = Queued(
            Operation(self._operations, direction, moves, unit, pages, key, self._clock()), there, ready
        )
        self._operations += 1
        self._book.add(queued)
        return queued

    def _begin(
        self,
        direction: str,
        host: Mapping[str, torch.Tensor],
        key: object,
        leg: Callable[[Operation, int], Leg],
    ) -> Operation | None:
        """Begin an operation between host and storage on these token ids; None without room."""
        with self._lock:
            self._alive()
            pages = {}
            for name, each in host.items():
                found = frozenset(self._own[name]._slots.pages_of(each, direction))
                for pool in (self._own[name], *self._own[name]._followers):
                    pages[pool.name] = found
            moves = {name: (each, each[:0]) for name, each in host.items()}
            queued = self._accept(direction, moves, "token", key, pages, dict.fromkeys(host, frozenset()))
            if queued is None:
                return None
            self._running[direction].append(Running(queued.operation, leg(queued.operation, self._legs)))
            self._legs += 1
            return queued.operation

    def _named(self, call: str, given: Mapping[str, _T]) -> dict[str, _T]:
        """What is given by pool, in the fixed order. Raises ValueError for pools without ids of their own."""
        known = ", ".join(self._own)
        if not isinstance(given, Mapping):
            raise arguments.refusal(self._name, call, f"a mapping by pool ({known})", given)
        for name in given:
            if name not in self._own:
                raise ValueError(
                    f"{self._name}: {call}: no pool {name!r} with ids of its own; there are {known}"
                )
        return {name: given[name] for name in self._own if name in given}

    def _tokens(self, host: Mapping[str, torch.Tensor], unit: str) -> dict[str, torch.Tensor]:
        """Ids of `unit` as ids of tokens."""
        return {name: ids.in_tokens(each, unit, self._own[name].page_size) for name, each in host.items()}
