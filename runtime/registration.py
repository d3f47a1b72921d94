"""Host memory pinned chunk by chunk. In: a mapping, its chunks, a registrar. Out: how far it is pinned."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch

from poolwright.runtime.errors import PoolError

MODES = ("now", "background")

_log = logging.getLogger("poolwright")
_under_way: set[Registration] = set()


class HostMemoryError(PoolError):
    """Host memory could not be placed, registered or unregistered as asked; none of it is held."""


class Registrar(Protocol):
    """Pins host memory for a device. Both calls raise on failure."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin ``address .. address + nbytes``; the address that the device uses for it."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register` of this address."""
        ...


class Chunk(NamedTuple):
    """The `nbytes` bytes from byte `start` of a mapping on; `first`: the least page that has bytes there."""

    start: int
    nbytes: int
    first: int


Touch = Callable[[torch.Tensor, bool], object]
"""Has these bytes of a mapping in memory; True: nobody has written there yet."""


class Registration:
    """Pins the chunks of one mapping, those of the least pages first.

    `chunks`: in the order in which they are pinned. `ready`: pages from 0 on that are pinned with all their
    bytes, `pages` in the end; it only grows. `alias`: what the device calls byte 0. `left`: bytes of chunks
    that nobody has begun with. `error`: why the thread gave up. The mapping is held until everything is
    undone: it must not go away while it is registered.
    """

    def __init__(
        self, registrar: Registrar, memory: torch.Tensor, chunks: Sequence[Chunk], pages: int, touch: Touch
    ) -> None:
        self._registrar, self._memory, self._touch = registrar, memory, touch
        self.chunks = sorted(chunks, key=lambda chunk: chunk.first)
        self._done = 0  # so many of them are registered
        self._held: list[int] = []
        self.pages, self.ready, self.alias, self.left = pages, 0, 0, memory.numel()
        self.error: HostMemoryError | None = None
        self.owner = os.getpid()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        # An end may come from the collector, in the midst of anything that the thread does.
        self._lock = threading.RLock()
        self._running = self._ended = self._waited_for = False

    def begin(self, background: bool, name: str) -> None:
        """Register all chunks, or the first and leave the others to a thread, in which `name` is the pool's.

        Raises HostMemoryError, and what else goes wrong, with nothing registered; an interrupt that comes
        when the thread is there already leaves unregistering to it, as `end` does.
        """
        try:
            self._advance(True)
            while self._done < len(self.chunks) and not background:
                self._advance(True)
            if self._done < len(self.chunks):
                self._start(name)
        except BaseException as error:
            self._end(str(error))
            raise

    def registered(self) -> bool:
        """Whether every chunk is. Raises HostMemoryError when the thread gave up."""
        if self.error is not None:
            raise HostMemoryError(str(self.error)) from self.error
        return self._done == len(self.chunks)

    def wait(self) -> None:
        """Block until the thread has ended, which rests no more. Raises HostMemoryError when it gave up."""
        self._waited_for = True
        if self._thread is not None:
            self._thread.join()
        self.registered()

    def ask_to_stop(self) -> None:
        """Have the thread end after the chunk at hand."""
        self._stop.set()

    def stop(self) -> None:
        """`ask_to_stop`, and wait for it. What is registered stays."""
        if self._thread is not None and os.getpid() == self.owner:
            _halt(self._stop, self._thread)

    def end(self) -> None:
        """Unregister everything, or have the thread do so after the chunk at hand. Never waits for that: a
        collector may call, and whoever it interrupts may hold a lock that the thread needs.

        Raises HostMemoryError for chunks that could not be unregistered, after all others.
        """
        if os.getpid() == self.owner:  # in a fork the registration is the parent's
            self._end("destroying a host buffer")

    # ---- pieces

    def _end(self, during: str) -> None:
        """`end`; `during`: what it is part of."""
        with self._lock:
            self._ended = True
            here = not self._running
        self._stop.set()
        if here:
            _under_way.discard(self)
            self._undo(during)

    def _start(self, name: str) -> None:
        # Whoever is interrupted in here cannot know whether there is a thread: it says so itself (`_go_on`).
        thread = threading.Thread(target=self._go_on, args=(name,), name=f"register {name}", daemon=True)
        _under_way.add(self)
        thread.start()
        self._thread = thread
        # For the end of the process: it runs before that of the pool, which unregisters. Until the thread has
        # ended it holds this.
        weakref.finalize(self, _halt, self._stop, thread)

    def _go_on(self, name: str) -> None:
        """The thread: all other chunks. It rests after each for as long as that took: others get in then."""
        with self._lock:
            if self._ended:
                return  # nobody has waited for it, and nothing is registered any more
            self._running = True
        try:
            while self._done < len(self.chunks) and not self._stop.is_set():
                began = time.monotonic()
                self._advance(False)
                if not self._waited_for:
                    self._stop.wait(time.monotonic() - began)
        except Exception as error:
            there = f"{self.ready:,} of {self.pages:,} pages are registered and stay in use"
            self.error = HostMemoryError(f"{name}: {error}; {there}")
            self.error.__cause__ = error
            if threading.main_thread().is_alive():  # else the process ends, and with it what touches memory
                _log.error("host memory: %s", self.error)
        _under_way.discard(self)
        with self._lock:
            self._running = self._ended  # until it is undone: nobody else begins with that meanwhile
        if self._running:
            self._undo("a dropped host buffer")

    def _advance(self, fresh: bool) -> None:
        """Have the next chunk in memory and register it. Raises HostMemoryError; those before it stay."""
        chunk, count, base = self.chunks[self._done], len(self.chunks), self._memory.data_ptr()
        address, number = base + chunk.start, self._done + 1
        self.left -= chunk.nbytes
        self._touch(self._memory[chunk.start : chunk.start + chunk.nbytes], fresh)
        try:
            alias = self._registrar.register(address, chunk.nbytes)
        except Exception as error:
            raise HostMemoryError(
                f"registering chunk {number} of {count} ({chunk.nbytes:,} of {self._memory.numel():,} bytes)"
                f" failed: {error}: raise the limit of locked memory or lower the capacity"
            ) from error
        except BaseException:  # an interrupt, before it was registered or behind
            with suppress(Exception):
                self._registrar.unregister(address)
            raise
        self._held.append(address)
        if number == 1:
            self.alias = alias - chunk.start
        if alias != self.alias + chunk.start:
            raise HostMemoryError(
                f"the device sees chunk {number} of {count} at {alias:#x}, not at"
                f" {self.alias + chunk.start:#x} beside the chunks before it, but kernels need one base:"
                f" raise chunk_bytes to {self._memory.numel():,} for a single chunk"
            )
        self.ready = self.pages if number == count else self.chunks[number].first
        self._done = number

    def _undo(self, during: str) -> None:
        """Unregister every chunk, last first, and let the mapping go.

        Raises HostMemoryError for chunks that fail, after all of them.
        """
        failures = []
        while self._held:
            start = self._held.pop()
            try:
                self._registrar.unregister(start)
            except Exception as error:
                failures.append(f"{start:#x}: {error}")
        self._memory = torch.empty(0, dtype=torch.uint8)
        if failures:
            raise HostMemoryError(f"{during}; unregistering failed for {len(failures)} chunks: {failures[0]}")


def promised_bytes() -> int:
    """Host memory of this process that threads have yet to touch: the kernel still counts it as available."""
    return sum(each.left for each in tuple(_under_way) if each.owner == os.getpid())


def _halt(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join()
