"""Storage behind a controller: host pages stored under hashes of tokens, prefixes fetched ahead of need."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from poolwright.runtime import arguments
from poolwright.runtime.controller.base import Controller
from poolwright.runtime.controller.flight import Leg
from poolwright.runtime.controller.hits import boundaries, leading, rules_of
from poolwright.runtime.controller.ids import listed
from poolwright.runtime.controller.operation import Ack, Operation
from poolwright.runtime.errors import PoolError
from poolwright.runtime.group import HostPoolGroup
from poolwright.runtime.pool import HostPool
from poolwright.runtime.storage import PageStore, Status, Storage

Pages = Mapping[str, tuple[Sequence[str], torch.Tensor]]
"""By pool, hashes and the host ids of as many pages."""


@dataclass(frozen=True)
class Outcome:
    """What a worker has done: pages moved by pool, and what the ack says."""

    moved: Mapping[str, int]
    seconds: float = 0.0
    hit: int = 0
    statuses: Mapping[str, Sequence[Status]] = field(default_factory=dict)


class StorageLeg(Leg):
    """An operation that a worker carries out. `stop`: asks it to end soon; `path`: the storage's name."""

    def __init__(
        self, number: int, operation: Operation, started: float, future: Future[Outcome], path: str
    ) -> None:
        super().__init__(number, (operation,), None, None, started)
        self.seconds = None
        self.stop = threading.Event()
        self._future, self._path = future, path
        self._outcome = Outcome({})

    def over(self) -> bool:
        if self.seconds is None and self._future.done():
            try:
                self._outcome = self._future.result()
            except PoolError as error:
                self.error = error
            self.seconds = self._outcome.seconds
            self.hit, self.statuses = self._outcome.hit, self._outcome.statuses
        return self.seconds is not None

    def moved(self, operation: Operation) -> Mapping[str, int]:
        return self._outcome.moved

    @property
    def paths(self) -> Mapping[str, str]:
        return dict.fromkeys(self._outcome.moved, self._path)

    def end(self) -> None:
        self.stop.set()
        wait([self._future])


class Tier:
    """Storage for the pages of a controller's pools. One for each controller.

    Operations are those of the controller: they begin at once on `workers` threads, hold their host pages
    and end with an ack of direction ``store`` or ``fetch``. A page that storage does not have whole is no
    hit, whatever the reason, and no exception.

    `model`, `shard`: as in `storage.Namespace`. `trailing`: of how many pages the rule of a pool speaks whose
    spec says ``hit: trailing_pages``, 1 if not named. `step`: pages that are fetched between two looks at
    `cancel`. Raises ValueError.
    """

    def __init__(
        self,
        controller: Controller,
        storage: Storage,
        *,
        model: str,
        shard: str,
        trailing: Mapping[str, int] | None = None,
        step: int = 32,
        workers: int = 1,
    ) -> None:
        if not isinstance(controller, Controller):
            raise arguments.refusal("Tier", "controller", "a controller", controller)
        self._name = controller._name
        if not isinstance(storage, Storage):
            raise arguments.refusal(self._name, "storage", "a storage", storage)
        step = arguments.whole(self._name, "step", step, 1)
        workers = arguments.whole(self._name, "workers", workers, 1)
        if trailing is not None and not isinstance(trailing, Mapping):
            raise arguments.refusal(self._name, "trailing", "pages by pool", trailing)
        pools = controller._pools.pools
        group = controller._pools if isinstance(controller._pools, HostPoolGroup) else None
        self._controller, self._storage, self._step = controller, storage, step
        self._rules = rules_of(self._name, pools, group, trailing or {})
        self._stores: dict[str, PageStore] = {}
        self._owners: dict[str, str] = {}  # of every pool with bytes, the pool whose ids it takes
        for owner, pool in controller._own.items():
            for member in (pool, *pool._followers):
                if self._rules[owner].trailing is not None:  # there are no more pages than that
                    self._rules[member.name] = self._rules[owner]
                if member.page_bytes:
                    self._owners[member.name] = owner
                    self._stores[member.name] = self._store_of(member, model, shard)
        self._legs: dict[int, StorageLeg] = {}
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix=f"tier of {controller._anchor.name}")

    # ---- asking

    def store(self, pages: Pages, *, key: object = None) -> Operation | None:
        """Begin to store host pages under hashes, those of pools that take their ids with them; None when
        `limit` stores lack an ack. Raises ValueError for pages that are being written."""
        named = {n: self._given(n, pair) for n, pair in self._controller._named("store", pages).items()}
        hashes_of = {name: hashes for name, (hashes, _) in named.items()}
        numbers = {name: self._pages_of(name, host) for name, (_, host) in named.items()}

        def work(stop: threading.Event) -> Outcome:
            statuses = {}
            for member, owner in self._owners.items():
                if owner in hashes_of:
                    statuses[member] = self._stores[member].put(hashes_of[owner], numbers[owner])
            moved = {name: found.count(Status.HIT) for name, found in statuses.items()}
            return Outcome(moved, statuses=statuses)

        return self._begin("store", {name: host for name, (_, host) in named.items()}, key, work)

    def fetch(self, hashes: Sequence[str], *, key: object = None) -> Operation | None:
        """Reserve host pages for a prefix and begin to fill them; None when there is no room for it.

        The ack's `hit` says how much of it can be restored; `keep` then gives the rest back.
        """
        wanted, controller = self._hashes(hashes), self._controller
        counts = {}
        for name, pool in controller._own.items():
            counts[name] = len(self._rules[name].needs(len(wanted))) * pool.page_size
        taken = controller._alloc(counts)
        if taken is None:
            return None
        numbers = {name: self._pages_of(name, ids) for name, ids in taken.items()}
        made = None
        try:
            made = self._begin("fetch", taken, key, lambda stop: self._fill(wanted, numbers, stop))
        finally:
            if made is None:
                controller._pools.free(taken)
        return made

    def cancel(self, operation: Operation) -> bool:
        """Ask a fetch to end soon, with what it has by then; whether it was still at it. Its ack comes."""
        if not isinstance(operation, Operation):
            raise arguments.refusal(self._name, "cancel", "an operation", operation)
        leg = self._legs.get(operation.number)
        if leg is None or leg.over():
            return False
        leg.stop.set()
        return True

    def keep(self, ack: Ack, pages: int) -> dict[str, torch.Tensor]:
        """Host ids by pool of the first `pages` of a fetched prefix, for a load; what is not needed for them
        is free again. Empty for 0.

        Also empty for fewer pages than were hit in a group with trailing pages: they are those of another
        boundary. Raises ValueError for more than `ack.hit`.
        """
        if not isinstance(ack, Ack):
            raise arguments.refusal(self._name, "keep", "an ack", ack)
        pages = arguments.integer(self._name, "keep", pages)
        if ack.operation.direction != "fetch" or not 0 <= pages <= ack.hit:
            raise arguments.refusal(self._name, "keep", f"0 to {ack.hit} pages of a fetch", pages)
        ends = any(self._rules[name].trailing is not None for name in self._owners)
        kept = 0 if ends and pages != ack.hit else pages
        found, rest = {}, {}
        for name, ids in ack.operation.host.items():
            count = len(self._rules[name].needs(kept)) * self._controller._own[name].page_size
            found[name], rest[name] = ids[:count], ids[count:]
        self._controller._free(rest, "token")
        return found if kept else {}

    def keys(self, page_hash: str) -> dict[str, str]:
        """The key of this hash in storage for every pool with bytes."""
        (page_hash,) = self._hashes([page_hash])
        return {name: store.namespace.key(page_hash) for name, store in self._stores.items()}

    def close(self) -> None:
        """End what runs, then the threads. The storage stays open. Again: nothing happens."""
        if os.getpid() != self._controller._anchor._shared.owner:
            return  # in a fork there are no such threads
        for leg in list(self._legs.values()):
            leg.end()
        self._workers.shutdown(wait=True)

    # ---- pieces

    def _begin(
        self,
        direction: str,
        host: Mapping[str, torch.Tensor],
        key: object,
        work: Callable[[threading.Event], Outcome],
    ) -> Operation | None:
        controller = self._controller

        def leg(operation: Operation, number: int) -> StorageLeg:
            future: Future[Outcome] = Future()
            made = StorageLeg(number, operation, controller._clock(), future, self._storage.name)
            self._legs = {n: each for n, each in self._legs.items() if not each.over()}
            self._legs[operation.number] = made
            self._workers.submit(_carry_out, future, work, made.stop)
            return made

        return controller._begin(direction, host, key, leg)

    def _store_of(self, pool: HostPool, model: str, shard: str) -> PageStore:
        try:
            return PageStore(self._storage, pool, model=model, name=pool.name, shard=shard)
        except ValueError as error:
            raise ValueError(f"{self._name}: {error}") from None

    def _given(
        self, name: str, pair: tuple[Sequence[str], torch.Tensor]
    ) -> tuple[tuple[str, ...], torch.Tensor]:
        """Hashes and as many host pages of this pool. Raises ValueError."""
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise arguments.refusal(self._name, f"store: {name}", "(hashes, host ids)", pair)
        hashes, host = self._hashes(pair[0]), listed(name, "store", pair[1])
        expected = len(hashes) * self._controller._own[name].page_size
        if host.numel() != expected:
            raise ValueError(
                f"{name}: store: expected {expected} ids for {len(hashes)} pages, got {host.numel()}; "
                f"pass all ids of a page for each hash"
            )
        return hashes, host

    def _hashes(self, hashes: Sequence[str]) -> tuple[str, ...]:
        """The hashes. Raises ValueError for what is no hash, here and not in a worker."""
        if isinstance(hashes, (str, torch.Tensor)) or not isinstance(hashes, Iterable):
            raise arguments.refusal(self._name, "hashes", "a list of page hashes", hashes)
        found = tuple(hashes)
        for store in list(self._stores.values())[:1]:
            for each in found:
                try:
                    store.namespace.key(each)
                except ValueError as error:
                    raise ValueError(f"{self._name}: {error}") from None
        return found

    def _pages_of(self, name: str, ids: torch.Tensor) -> list[int]:
        size = self._controller._own[name].page_size
        found: list[int] = (ids[::size] // size).tolist()
        return found

    def _fill(
        self, hashes: Sequence[str], numbers: Mapping[str, Sequence[int]], stop: threading.Event
    ) -> Outcome:
        """Fill reserved pages: of pools that need all pages as far as storage has them, then what the others
        need for the last boundary that is there."""
        moved = dict.fromkeys(self._stores, 0)
        most = self._fill_whole(hashes, numbers, stop, moved)
        ends = {name: rule for name, rule in self._rules.items() if self._at_the_end(name)}
        there = {name: _hits(self._stores[name].exists(hashes[:most])) for name in ends}
        if not ends:
            return Outcome(moved, hit=most)
        for boundary in boundaries(ends, there):
            if stop.is_set():
                break
            if all(self._fill_end(name, boundary, hashes, numbers, moved) for name in ends):
                return Outcome(moved, hit=boundary)
        return Outcome(moved)

    def _at_the_end(self, name: str) -> bool:
        return name in self._stores and self._rules[name].trailing is not None

    def _fill_whole(
        self,
        hashes: Sequence[str],
        numbers: Mapping[str, Sequence[int]],
        stop: threading.Event,
        moved: dict[str, int],
    ) -> int:
        """How many leading pages every pool has that needs all, filled."""
        done = 0
        while done < len(hashes) and not stop.is_set():
            part = slice(done, done + self._step)
            came = len(hashes[part])
            for name, owner in self._owners.items():
                if self._rules[name].trailing is None:
                    found = _hits(self._stores[name].get(hashes[part], numbers[owner][part]))
                    moved[name] += sum(found)
                    came = min(came, leading(found))
            done += came
            if came < len(hashes[part]):
                break
        return done

    def _fill_end(
        self,
        name: str,
        boundary: int,
        hashes: Sequence[str],
        numbers: Mapping[str, Sequence[int]],
        moved: dict[str, int],
    ) -> bool:
        """Whether the trailing pages of this boundary came, each whole."""
        owner, needs = self._owners[name], self._rules[name].needs(boundary)
        first = 0 if self._rules[owner].trailing is not None else needs.start
        pages = numbers[owner][first : first + len(needs)]
        found = _hits(self._stores[name].get([hashes[page] for page in needs], pages))
        moved[name] += sum(found)
        return all(found)


def _hits(statuses: Sequence[Status]) -> list[bool]:
    return [status is Status.HIT for status in statuses]


def _carry_out(
    future: Future[Outcome], work: Callable[[threading.Event], Outcome], stop: threading.Event
) -> None:
    """Runs on a worker: whatever happens, the future gets its end."""
    began = time.perf_counter()
    try:
        done = work(stop)
        seconds = time.perf_counter() - began
        future.set_result(Outcome(done.moved, seconds, done.hit, done.statuses))
    except PoolError as error:
        future.set_exception(error)
    except Exception as error:
        future.set_exception(PoolError(f"storage: {type(error).__name__}: {error}"))
