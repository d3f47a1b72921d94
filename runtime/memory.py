"""Host memory of a pool. In: bytes, placement, a registrar. Out: one buffer, pinned now or by a thread."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import platform
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from poolwright.runtime.budget import available_host_bytes
from poolwright.runtime.errors import OutOfMemoryBudget
from poolwright.runtime.registration import Chunk, HostMemoryError, Registrar, Registration, promised_bytes

__all__ = ["HostBuffer", "HostMemoryError", "Registrar", "Units", "available_host_bytes"]

PAGE = 4096
HUGE_PAGE = 2 << 20

GUARD = 256
"""Bytes on both sides of a buffer, and behind staging memory, that nobody may write."""

PATTERN = 0xA5
"""What each of them holds."""

MOST_THREADS = 16

BACKGROUND_CHUNK = 64 << 20
"""Bytes of a chunk beside which others work: the driver lets nobody in while it registers one."""

_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1  # a pool may be larger than a node: binding to it would have the kernel end the process
_POPULATE_WRITE = 23  # since Linux 5.14: pages are made without being written a second time from here


@dataclass(frozen=True)
class Units:
    """Copy units side by side: `count` of `nbytes` each, from byte `start` of a buffer on."""

    start: int
    nbytes: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes * self.count


class HostBuffer:
    """One anonymous mapping of `nbytes`, zeroed, aligned to 4 KiB (2 MiB with `hugepages`).

    With a `registrar` the memory is touched by `threads` threads (0: up to 16) and registered in chunks of
    at most `chunk_bytes` that split none of `units`; without one it stays lazy. Either everything is
    registered or an error is raised and nothing is held; with `background` this is so for the first chunk,
    and a thread goes on with the others: `registration` says how far. Memory comes from NUMA node
    `numa_node` while that has any; `placement` says so, or why the kernel refused.

    `device_address`: what the device calls its first byte; without a registrar the host address. `borders`:
    addresses, as the device has them, between two chunks. A copy must not cross one.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        hugepages: bool = False,
        numa_node: int | None = None,
        threads: int = 0,
        registrar: Registrar | None = None,
        units: Sequence[Units] = (),
        chunk_bytes: int = 16 << 30,
        background: bool = False,
        name: str = "a host buffer",
    ) -> None:
        """Raises ValueError for impossible sizes, OutOfMemoryBudget, HostMemoryError."""
        _check_units(nbytes, units)
        self.nbytes = nbytes
        self.placement = "any NUMA node"
        self.borders: tuple[int, ...] = ()
        self.address = self.device_address = 0
        self.registration: Registration | None = None
        self._tensor: torch.Tensor | None = torch.empty(0, dtype=torch.uint8)
        self._release: Callable[[], object] = lambda: None
        if nbytes == 0:
            return
        self._tensor = _map(nbytes, hugepages)
        self.address = self.device_address = self._tensor.data_ptr()
        try:
            starts = _starts(nbytes, chunk_bytes, units, background)
            if numa_node is not None:
                self.placement = _prefer(self.address, nbytes, numa_node)
            for guard in self.guards.values():
                guard.fill_(PATTERN)
            if registrar is not None:
                touch = partial(_touch, threads=threads or min(os.cpu_count() or 1, MOST_THREADS))
                pages = max((unit.count for unit in units), default=1)
                chunks = _chunks([*starts, nbytes], units, pages)
                self._register(Registration(registrar, self.tensor, chunks, pages, touch), background, name)
        except BaseException:
            self.release()  # unmapped now, not when the traceback goes
            raise

    def _register(self, registration: Registration, background: bool, name: str) -> None:
        self._release = weakref.finalize(self, registration.end)  # whatever interrupts what follows
        # When the process ends the last one made would be the first to go, with transfers still in
        # flight; the pool's own end waits for them and then destroys this.
        self._release.atexit = False
        registration.begin(background, name)
        self.registration, self.device_address = registration, registration.alias
        self.borders = tuple(sorted(registration.alias + chunk.start for chunk in registration.chunks)[1:])

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes: uint8 ``[nbytes]``. It may outlive the buffer, but is not registered then."""
        if self._tensor is None:
            raise HostMemoryError("the host buffer was destroyed: make a new one")
        return self._tensor

    @property
    def guards(self) -> dict[str, torch.Tensor]:
        """Bytes that must hold `PATTERN`, by where they lie; none when the buffer has no bytes."""
        start = self.tensor.storage_offset()
        places = {"before host memory": start - GUARD, "behind host memory": start + self.nbytes}
        return {
            where: self.tensor.as_strided((GUARD,), (1,), at) for where, at in places.items() if self.nbytes
        }

    def destroy(self) -> None:
        """Unregister, then unmap; memory that a tensor still shows goes with that tensor. Idempotent. A
        thread that registers comes to the end of its chunk first.

        Raises HostMemoryError when a chunk could not be unregistered; all others are by then.
        """
        if self.registration is not None:
            self.registration.stop()
        self.release()

    def release(self) -> None:
        """`destroy` for a finalizer: it waits for no thread. One that registers unregisters in the end."""
        # Not closed by hand: torch does not lock the mapping it reads, and would be left with a hole.
        self._tensor = None
        self._release()

    def __enter__(self) -> HostBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()


def check_available(owner: str, nbytes: int, advice: str) -> None:
    """Raises OutOfMemoryBudget for more bytes than are left and promised to no other pool."""
    available = max(0, available_host_bytes() - promised_bytes())
    if nbytes > available:
        raise OutOfMemoryBudget(f"{owner}: host memory", nbytes, available, advice)


def _check_units(nbytes: int, units: Sequence[Units]) -> None:
    if nbytes < 0 or any(unit.nbytes < 1 or unit.start < 0 or unit.end > nbytes for unit in units):
        raise ValueError(
            f"expected nbytes >= 0 and units of at least a byte in them, got {nbytes:,}, {units}"
        )


def _starts(nbytes: int, chunk_bytes: int, units: Sequence[Units], background: bool) -> list[int]:
    """Where chunks start; in the background they are as small as units permit."""
    small = BACKGROUND_CHUNK
    while background and small < chunk_bytes:
        with suppress(ValueError):
            return _chunk_starts(nbytes, small, units)
        small *= 4
    return _chunk_starts(nbytes, chunk_bytes, units)


def _chunk_starts(nbytes: int, chunk_bytes: int, units: Sequence[Units]) -> list[int]:
    """Where chunks start: on a memory page, since none may be registered twice, and inside no unit."""
    placed = sorted(units, key=lambda unit: unit.start)
    starts = [0]
    while nbytes - starts[-1] > chunk_bytes:
        at = _last_cut(starts[-1] + chunk_bytes, placed)
        if at <= starts[-1]:
            raise ValueError(
                f"a chunk of {chunk_bytes:,} bytes from byte {starts[-1]:,} of a host buffer can end nowhere:"
                f" no copy unit of {units[0].nbytes if units else 0:,} bytes ends on a memory page there;"
                " raise POOLWRIGHT_REGISTER_CHUNK_GB"
            )
        starts.append(at)
    return starts


def _chunks(borders: Sequence[int], units: Sequence[Units], pages: int) -> list[Chunk]:
    """The chunks between these bytes; their first page is the least unit of any row that has bytes there."""
    found = []
    for start, end in itertools.pairwise(borders):
        inside = [unit for unit in units if unit.start < end and start < unit.end]
        firsts = (max(start - unit.start, 0) // unit.nbytes for unit in inside)  # no chunk splits a unit
        found.append(Chunk(start, end - start, min(firsts, default=pages if units else 0)))
    return found


def _last_cut(limit: int, units: Sequence[Units]) -> int:
    """The last byte up to `limit` where a chunk may end; `units` in the order of their starts."""
    at = limit // PAGE * PAGE
    for unit in reversed(units[: bisect_right(units, at, key=lambda unit: unit.start)]):
        if unit.end <= at:
            return at
        step = math.lcm(unit.nbytes, PAGE)
        first = next((c for c in range(unit.start, unit.start + step, unit.nbytes) if c % PAGE == 0), None)
        if first is not None and first <= at:
            return first + (at - first) // step * step
        at = unit.start // PAGE * PAGE  # nowhere in these units: before them, where others may lie
    return at


def _map(nbytes: int, hugepages: bool) -> torch.Tensor:
    alignment = HUGE_PAGE if hugepages else PAGE
    try:
        mapping = mmap.mmap(-1, alignment + nbytes + GUARD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        available = available_host_bytes()
        raise OutOfMemoryBudget("a host buffer", nbytes, available, "lower the capacity") from None
    if hugepages:
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            mapping.close()
            raise HostMemoryError(f"the kernel gives no huge pages: {error}: use hugepages=False") from error
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = alignment - whole.data_ptr() % alignment
    return whole[start : start + nbytes]


def _prefer(address: int, nbytes: int, node: int) -> str:
    """Let the pages of this range come from NUMA node `node` as long as it has any; what came of it."""
    if node < 0:
        raise ValueError(f"expected a NUMA node >= 0, got {node}")
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    # The kernel reads one bit less than it is told.
    refused = _mbind(address, nbytes, mask, len(mask) * bits + 1)
    return f"NUMA node {node}" if not refused else f"any NUMA node; node {node} was refused: {refused}"


def _mbind(address: int, nbytes: int, mask: ctypes.Array[ctypes.c_ulong], bits: int) -> str:
    """The system call, which libc does not wrap; "" or why it failed."""
    machine = platform.machine()
    if machine not in _MBIND:
        return f"its system call is known for {sorted(_MBIND)}, not {machine}"
    libc = ctypes.CDLL(None, use_errno=True)
    sizes = ctypes.c_ulong
    arguments = sizes(address), sizes(nbytes), ctypes.c_long(_MPOL_PREFERRED), mask, sizes(bits), sizes(0)
    failed = libc.syscall(ctypes.c_long(_MBIND[machine]), *arguments)
    return os.strerror(ctypes.get_errno()) if failed else ""


def _touch(memory: torch.Tensor, fresh: bool, threads: int) -> None:
    """Have every page of these bytes there; `fresh`: nobody has written to them. ctypes lets go of the
    interpreter lock, so threads do run side by side. Each holds the mapping: whoever is interrupted in here,
    by a second interrupt or as a thread starts, may leave them behind."""
    nbytes = memory.numel()
    part = -(-nbytes // threads // HUGE_PAGE) * HUGE_PAGE
    with ThreadPoolExecutor(threads) as pool:
        parts = [memory[start : start + part] for start in range(0, nbytes, part)]
        list(pool.map(_populate, parts, itertools.repeat(fresh)))


def _populate(memory: torch.Tensor, fresh: bool) -> None:
    """Have the pages of one part there; it may begin anywhere in a page."""
    libc, address, nbytes = ctypes.CDLL(None), memory.data_ptr(), memory.numel()
    first = address // PAGE * PAGE
    size = ctypes.c_size_t(address + nbytes - first)
    if libc.madvise(ctypes.c_void_p(first), size, ctypes.c_int(_POPULATE_WRITE)) != 0 and fresh:
        ctypes.memset(address, 0, nbytes)  # an older kernel; what is in use is left to registration
