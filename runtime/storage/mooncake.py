"""Storage in Mooncake Store: pages in the memory of other processes and machines, found by a master.

The library can report success for a write that did not happen and for a read that filled nothing, can read
into memory after a failure, and can take long to fail. What is done about it stands beside each call.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence

from poolwright.runtime.errors import PoolError
from poolwright.runtime.storage import engine as engines
from poolwright.runtime.storage.base import Item, Status, Storage
from poolwright.runtime.storage.breaker import Breaker
from poolwright.runtime.storage.engine import Engine, Waits
from poolwright.runtime.storage.scratch import Placed, Scratch, arguments

_log = logging.getLogger("poolwright")

NO_SPACE, NOT_READY, NOT_FOUND, RPC_FAILED, RPC_TIMED_OUT = -200, -703, -704, -900, -901
ABSENT = (NOT_READY, NOT_FOUND)  # the former: being written
RECONNECT_S = 4.5  # the library tries so long to reach a master that is gone; measured


class MooncakeStorage(Storage):
    """Objects in the Mooncake Store of one master. Use `connect`.

    Small chunks, few workers: against a hung server the library takes up to `waits.stall_s` for each object
    in turn. `bound_s` is what a call takes at worst; after a failure that cost time, calls end at once with
    ERROR for `rest_s` seconds.
    """

    def __init__(
        self,
        engine: Engine,
        waits: Waits,
        *,
        protocol: str = "tcp",
        chunk: int = 8,
        workers: int = 2,
        rest_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("mooncake", chunk, workers)
        workers = int(workers)
        self.bound_s = workers * self.chunk * waits.stall_s + 3 * max(waits.reply_s, RECONNECT_S)
        self._engine, self._waits, self._clock = engine, waits, clock
        self._breaker = Breaker(rest_s, clock)
        self._registers = protocol == "rdma"
        self._registered: set[tuple[int, int]] = set()
        self._scratch: queue.SimpleQueue[Scratch] = queue.SimpleQueue()
        for _ in range(workers):
            self._scratch.put(Scratch(self.register, self._unregister))

    @classmethod
    def connect(
        cls,
        master: str = "127.0.0.1:50051",
        *,
        host: str = "127.0.0.1",
        protocol: str = "tcp",
        device: str = "",
        chunk: int = 8,
        workers: int = 2,
        rest_s: float = 5.0,
    ) -> MooncakeStorage:
        """A client of the master at `master` (host:port); it lends no memory of its own.

        `host`: how others reach this machine. `protocol`: tcp, or rdma with the names of `device`s.
        Raises ValueError for wrong arguments, BackendUnavailable for what is missing.
        """
        if protocol not in ("tcp", "rdma"):
            raise ValueError(f"protocol: expected tcp or rdma, got {protocol!r}")
        waits = engines.shorten()
        engine = engines.connect(master, host, protocol, device)
        return cls(engine, waits, protocol=protocol, chunk=chunk, workers=workers, rest_s=rest_s)

    def register(self, address: int, nbytes: int) -> None:
        """Make a pool's host buffer known before its pages move over RDMA; again: nothing happens.

        Over TCP nothing is done: there it is not needed, and peers could then overwrite the memory.
        Raises PoolError when the library refuses.
        """
        if not self._registers or (address, nbytes) in self._registered:
            return
        code = self._engine.register_buffer(address, nbytes)
        if code != 0:
            raise PoolError(f"mooncake: {nbytes:,} bytes at {address:#x} cannot be registered: code {code}")
        self._registered.add((address, nbytes))

    def _unregister(self, address: int, nbytes: int) -> None:
        if (address, nbytes) in self._registered:
            self._registered.discard((address, nbytes))
            self._engine.unregister_buffer(address)

    # ---- chunks of different keys, on a worker thread

    def _put(self, items: Sequence[Item]) -> list[Status]:
        with self._place(items) as places:
            for placed in places:
                placed.pack()
            put = self._engine.batch_put_from_multi_buffers
            codes = self._call(lambda: put(*arguments(places)), len(places))
        # 0 is also the answer while another writer, alive or dead, has not finished the same key.
        written = [item.key for item, code in zip(items, codes, strict=True) if code == 0]
        there = dict(zip(written, self._exists(written), strict=True)) if written else {}
        return [_stored(code, there.get(item.key)) for item, code in zip(items, codes, strict=True)]

    def _get(self, items: Sequence[Item]) -> list[Status]:
        with self._place(items) as places:
            for placed in places:
                placed.blank()
            get = self._engine.batch_get_into_multi_buffers
            codes = self._call(lambda: get(*arguments(places)), len(places))
            done = [_delivered(placed, code) for placed, code in zip(places, codes, strict=True)]
        damaged = [
            item.key
            for item, status, code in zip(items, done, codes, strict=True)
            if status is Status.MISS and code not in ABSENT
        ]
        if damaged:  # what is stored first stays: it would be in the way of every later put
            _log.warning("storage mooncake: damaged and dropped: %s", ", ".join(damaged))
            self._remove(damaged)
        return done

    def _exists(self, keys: Sequence[str]) -> list[Status]:
        codes = self._call(lambda: self._engine.batch_is_exist(list(keys)), len(keys))
        return [{1: Status.HIT, 0: Status.MISS}.get(code, Status.ERROR) for code in codes]

    def _remove(self, keys: Sequence[str]) -> list[Status]:
        # Forced: else an object that was read within its lease, 10 s, cannot be removed.
        codes = self._call(lambda: self._engine.batch_remove(list(keys), True), len(keys))
        return [{0: Status.HIT, NOT_FOUND: Status.MISS}.get(code, Status.ERROR) for code in codes]

    def _close(self) -> None:
        while not self._scratch.empty():
            self._scratch.get().free()
        for address, nbytes in tuple(self._registered):
            self._unregister(address, nbytes)
        self._engine.close()

    # ---- pieces

    @contextlib.contextmanager
    def _place(self, items: Sequence[Item]) -> Iterator[list[Placed]]:
        """Memory beside the pages, until the library has let go of it."""
        scratch = self._scratch.get()
        try:
            yield scratch.place(items)
        finally:
            self._scratch.put(scratch)

    def _call(self, run: Callable[[], list[int]], count: int) -> list[int]:
        """The library's code for each key; RPC_FAILED for all while the breaker is open."""
        if not self._breaker.enter():
            return [RPC_FAILED] * count
        failed = True
        start = self._clock()
        try:
            codes = run()
            # A node that died fails at once and concerns its own keys only; waiting concerns everybody.
            slow = self._clock() - start >= self._waits.stall_s and any(code < 0 for code in codes)
            failed = slow or any(code in (RPC_FAILED, RPC_TIMED_OUT) for code in codes)
        finally:
            self._breaker.leave(failed)
        if len(codes) != count:
            raise PoolError(f"mooncake: expected {count} codes, got {codes}")
        return codes


def _stored(code: int, seen: Status | None) -> Status:
    """What a put came to. `seen`: what the store said about the key afterwards, where the put succeeded."""
    if code == 0 and seen is not None:
        return Status.REFUSED if seen is Status.MISS else seen
    return Status.REFUSED if code == NO_SPACE else Status.ERROR


def _delivered(placed: Placed, code: int) -> Status:
    """What a get brought. The code alone does not tell: a buffer may be left as it was, or half filled."""
    if code < 0:
        return Status.MISS if code in ABSENT else Status.ERROR
    if code != placed.nbytes or not placed.whole():
        return Status.MISS
    placed.unpack()
    return Status.HIT
