"""The interface of every storage, and what all of them do alike: batches, duplicates, threads, the end.

In: keys, and addresses of pages in host memory. Out: one `Status` for each key. A page that is lost is a
status, never an exception.
"""

from __future__ import annotations

import ctypes
import enum
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Self, TypeVar

from poolwright.runtime.errors import PoolError, WrongProcess
from poolwright.runtime.scalars import index

_log = logging.getLogger("poolwright")
_T = TypeVar("_T", "Item", str)

KEYS = 512  # of one call that moves no pages


class Status(enum.Enum):
    """What became of one key.

    ``HIT``: stored, delivered whole, there, removed. ``MISS``: not there, or not whole. ``REFUSED``: not
    stored now (no room, or somebody else's write is under way), may be tried again. ``ERROR``: the storage
    failed or is taking a rest. After anything but HIT a `get` may have written parts of the destination.
    """

    HIT = "hit"
    MISS = "miss"
    REFUSED = "refused"
    ERROR = "error"


@dataclass(frozen=True)
class Item:
    """One object and where its bytes lie: (address, bytes) of each part, in order. No part may be empty."""

    key: str
    parts: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(nbytes for _, nbytes in self.parts)


def positive(name: str, value: object) -> int:
    """The integer that a value stands for, at least 1. Raises ValueError, naming `name`."""
    found = index(value)
    if found is None or found < 1:
        raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}")
    return found


class Storage(ABC):
    """Keeps objects of host memory by key.

    A key stands for its bytes: what is stored under it first stays, until it is removed, evicted or found
    damaged. Every call returns when the storage has let go of the memory, so pages stay reserved exactly
    that long; `bound_s` says how long it takes at worst when servers are dead or hung (0: as long as the
    file system). Methods may be called from any thread of the process that opened the storage. They raise
    ValueError for wrong arguments with nothing done, PoolError after `close` and WrongProcess after a fork.

    A backend defines the four methods for a chunk of different keys: up to `chunk` of `put` and `get`, up to
    KEYS of the others, one call a worker thread at a time.
    """

    bound_s: float = 0.0

    def __init__(self, name: str, chunk: int, workers: int) -> None:
        workers = positive(f"{name}: workers", workers)
        self.name, self.chunk = name, positive(f"{name}: chunk", chunk)
        self._owner = os.getpid()
        self._closed = False
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix=name)

    def put(self, items: Sequence[Item]) -> list[Status]:
        """Store each item. HIT: an object of this key and size is there now. Of equal keys one is written."""
        first = _first_of_each(items)
        done = self._spread(self._put, list(first.values()), self.chunk)
        return [done[item.key] for item in items]

    def get(self, items: Sequence[Item]) -> list[Status]:
        """Fill each item's memory. HIT: every byte is there and passed its checksum; else do not use it.

        Raises ValueError when two items have the same destination.
        """
        first = _first_of_each(items)
        starts = [item.parts[0][0] for item in items if item.parts]
        if len(set(starts)) != len(starts):
            raise ValueError(f"{self.name}: get: two items have the same destination; give each its own page")
        done = self._spread(self._get, list(first.values()), self.chunk)
        for item in items:
            source = first[item.key]
            if item is not source and done[item.key] is Status.HIT:
                _copy(source, item)
        return [done[item.key] for item in items]

    def exists(self, keys: Sequence[str]) -> list[Status]:
        """HIT or MISS for each key: a guess, for a server may have died since it answered."""
        done = self._spread(self._exists, list(dict.fromkeys(keys)), KEYS)
        return [done[key] for key in keys]

    def remove(self, keys: Sequence[str]) -> list[Status]:
        """Forget each key. HIT: it was there."""
        done = self._spread(self._remove, list(dict.fromkeys(keys)), KEYS)
        return [done[key] for key in keys]

    def close(self) -> None:
        """Wait for running calls, then give everything back. Again: nothing happens."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        self._workers.shutdown(wait=True)
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what a backend defines

    @abstractmethod
    def _put(self, items: Sequence[Item]) -> list[Status]: ...

    @abstractmethod
    def _get(self, items: Sequence[Item]) -> list[Status]: ...

    @abstractmethod
    def _exists(self, keys: Sequence[str]) -> list[Status]: ...

    @abstractmethod
    def _remove(self, keys: Sequence[str]) -> list[Status]: ...

    @abstractmethod
    def _close(self) -> None: ...

    # ---- pieces

    def _spread(
        self, run: Callable[[Sequence[_T]], list[Status]], given: Sequence[_T], size: int
    ) -> dict[str, Status]:
        """`run` on chunks of `given`, on the worker threads; statuses by key, after all of them ended."""
        if os.getpid() != self._owner:
            raise WrongProcess(f"storage {self.name}", self._owner, os.getpid())
        chunks = [given[at : at + size] for at in range(0, len(given), size)]
        futures: list[Future[list[Status]]] = []
        try:
            for chunk in chunks:
                futures.append(self._workers.submit(self._guarded, run, chunk))
        except RuntimeError:
            raise PoolError(f"storage {self.name} is closed: open a new one") from None
        finally:
            wait(futures)  # also when interrupted: until then the memory is in use
        found: dict[str, Status] = {}
        for chunk, future in zip(chunks, futures, strict=True):
            for each, status in zip(chunk, future.result(), strict=True):
                found[each if isinstance(each, str) else each.key] = status
        return found

    def _guarded(self, run: Callable[[Sequence[_T]], list[Status]], chunk: Sequence[_T]) -> list[Status]:
        try:
            return run(chunk)
        except Exception:
            _log.exception("storage %s: a batch of %d failed", self.name, len(chunk))
            return [Status.ERROR] * len(chunk)


def _first_of_each(items: Sequence[Item]) -> dict[str, Item]:
    """The first item of each key. Raises ValueError for items of one key that are not cut alike."""
    first: dict[str, Item] = {}
    for item in items:
        known = first.setdefault(item.key, item)
        sizes = [nbytes for _, nbytes in item.parts]
        if known is not item and sizes != [nbytes for _, nbytes in known.parts]:
            raise ValueError(f"{item.key}: given twice in one call, with other sizes the second time")
        if any(nbytes < 1 for nbytes in sizes):
            raise ValueError(f"{item.key}: every part needs at least 1 byte, got {sizes}")
    return first


def _copy(source: Item, target: Item) -> None:
    for (start, nbytes), (to, _) in zip(source.parts, target.parts, strict=True):
        ctypes.memmove(to, start, nbytes)
