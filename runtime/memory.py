"""Host memory of a pool. In: bytes, placement, a registrar. Out: one buffer, pinned whole or not at all."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from poolwright.runtime.budget import available_host_bytes
from poolwright.runtime.errors import OutOfMemoryBudget, PoolError

__all__ = ["HostBuffer", "HostMemoryError", "Registrar", "available_host_bytes"]

PAGE = 4096
HUGE_PAGE = 2 << 20

_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_BIND = 2


class HostMemoryError(PoolError):
    """Host memory could not be placed, registered or unregistered as asked; nothing is held."""


class Registrar(Protocol):
    """Pins host memory for a device. Both calls raise on failure."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin ``address .. address + nbytes``; the address that the device uses for it."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register` of this address."""
        ...


class HostBuffer:
    """One anonymous mapping of `nbytes`, zeroed, aligned to 4 KiB (2 MiB with `hugepages`).

    With a `registrar` the memory is touched by `threads` threads (0: up to 8) and registered in chunks of
    at most `chunk_bytes` that never split a copy unit of `granularity` bytes; without one it stays lazy
    unless `touch` is set. Either everything is registered or an error is raised and nothing is held.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        hugepages: bool = False,
        numa_node: int | None = None,
        threads: int = 0,
        registrar: Registrar | None = None,
        granularity: int = 1,
        chunk_bytes: int = 16 << 30,
        touch: bool = False,
    ) -> None:
        """Raises ValueError for impossible sizes, OutOfMemoryBudget, HostMemoryError."""
        chunk = _chunk_size(nbytes, granularity, chunk_bytes)
        self.nbytes = nbytes
        self.address = 0
        self._alias = 0
        self._tensor: torch.Tensor | None = torch.empty(0, dtype=torch.uint8)
        self._release: Callable[[], object] = lambda: None
        if nbytes == 0:
            return
        self._tensor = _map(nbytes, hugepages)
        self.address = self._alias = self._tensor.data_ptr()
        try:
            if numa_node is not None:
                _bind(self.address, nbytes, numa_node)
            if registrar is not None or touch:
                _touch(self.address, nbytes, threads or min(os.cpu_count() or 1, 8))
            if registrar is not None:
                self._alias = _register(registrar, self.address, nbytes, chunk)
        except BaseException:
            self._tensor = None  # unmapped now, not when the traceback goes
            raise
        if registrar is not None:
            chunks = range(self.address, self.address + nbytes, chunk)
            # The tensor is held until then: memory must not go away while it is registered.
            held = (registrar, chunks, self._tensor, os.getpid())
            self._release = weakref.finalize(self, _unregister_here, *held)

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes: uint8 ``[nbytes]``. It may outlive the buffer, but is not registered then."""
        if self._tensor is None:
            raise HostMemoryError("the host buffer was destroyed: make a new one")
        return self._tensor

    def device_address(self, offset: int = 0) -> int:
        """What the device calls byte `offset`; without a registrar the host address. Raises ValueError."""
        if not 0 <= offset <= self.nbytes:
            raise ValueError(f"expected an offset of 0 to {self.nbytes:,}, got {offset:,}")
        if self._tensor is None:
            raise HostMemoryError("the host buffer was destroyed: make a new one")
        return self._alias + offset

    def destroy(self) -> None:
        """Unregister, then unmap; memory that a tensor still shows goes with that tensor. Idempotent.

        Raises HostMemoryError when a chunk could not be unregistered; all others are by then.
        """
        # Not closed by hand: torch does not lock the mapping it reads, and would be left with a hole.
        self._tensor = None
        self._release()

    def __enter__(self) -> HostBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()


def _chunk_size(nbytes: int, granularity: int, chunk_bytes: int) -> int:
    """Bytes of a chunk: whole copy units, and whole memory pages, of which none may be registered twice."""
    if nbytes < 0 or granularity < 1:
        raise ValueError(f"expected nbytes >= 0 and granularity >= 1, got {nbytes:,} and {granularity:,}")
    if granularity > chunk_bytes:
        raise ValueError(
            f"a copy unit of {granularity:,} bytes does not fit a chunk of {chunk_bytes:,} bytes:"
            " raise chunk_bytes"
        )
    if nbytes <= chunk_bytes:
        return chunk_bytes
    step = math.lcm(granularity, PAGE)
    if step > chunk_bytes:
        raise ValueError(
            f"copy units of {granularity:,} bytes end on a memory page every {step:,} bytes only, more than a"
            f" chunk of {chunk_bytes:,}: make the unit a multiple of {PAGE} or raise chunk_bytes"
        )
    return chunk_bytes // step * step


def _map(nbytes: int, hugepages: bool) -> torch.Tensor:
    alignment = HUGE_PAGE if hugepages else PAGE
    spare = alignment - PAGE
    try:
        mapping = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
    start = -whole.data_ptr() % alignment
    return whole[start : start + nbytes]


def _bind(address: int, nbytes: int, node: int) -> None:
    """Let the pages of this range come from NUMA node `node` only."""
    if node < 0:
        raise ValueError(f"expected a NUMA node >= 0, got {node}")
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    # The kernel reads one bit less than it is told.
    failed = _mbind(address, nbytes, mask, len(mask) * bits + 1)
    if failed:
        raise HostMemoryError(
            f"{nbytes:,} bytes cannot be bound to NUMA node {node}: {os.strerror(failed)}: use numa_node=None"
        )


def _mbind(address: int, nbytes: int, mask: ctypes.Array[ctypes.c_ulong], bits: int) -> int:
    """The system call, which libc does not wrap; 0 or the error number."""
    machine = platform.machine()
    if machine not in _MBIND:
        raise HostMemoryError(
            f"NUMA binding is known for {sorted(_MBIND)}, not {machine}: use numa_node=None"
        )
    libc = ctypes.CDLL(None, use_errno=True)
    sizes = ctypes.c_ulong
    arguments = sizes(address), sizes(nbytes), ctypes.c_long(_MPOL_BIND), mask, sizes(bits), sizes(0)
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(_MBIND[machine]), *arguments) else 0


def _touch(address: int, nbytes: int, threads: int) -> None:
    """Have every page there. ctypes lets go of the interpreter lock, so threads do run side by side."""
    part = -(-nbytes // threads // HUGE_PAGE) * HUGE_PAGE
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, nbytes, part):
            pool.submit(ctypes.memset, address + start, 0, min(part, nbytes - start))


def _register(registrar: Registrar, address: int, nbytes: int, chunk: int) -> int:
    """Register everything, or nothing and raise; the device's address of the first byte."""
    chunks = range(address, address + nbytes, chunk)
    base = 0
    for k, start in enumerate(chunks):
        size = min(chunk, address + nbytes - start)
        try:
            alias = registrar.register(start, size)
        except Exception as error:
            why = f"registering chunk {k + 1} of {len(chunks)} ({size:,} of {nbytes:,} bytes) failed: {error}"
            _unregister(registrar, chunks[:k], why)
            raise HostMemoryError(f"{why}: raise the limit of locked memory or lower the capacity") from error
        base = alias if k == 0 else base
        if alias - base != start - address:
            why = (
                f"the device sees chunk {k + 1} of {len(chunks)} at {alias:#x}, not at"
                f" {base + start - address:#x} behind the chunks before it, but kernels need one base"
            )
            _unregister(registrar, chunks[: k + 1], why)
            raise HostMemoryError(f"{why}: raise chunk_bytes to {nbytes:,} for a single chunk")
    return base


def _unregister_here(registrar: Registrar, chunks: range, memory: torch.Tensor, owner: int) -> None:
    """Unregister what this process registered; `memory` is held until then."""
    if os.getpid() == owner:  # in a fork the registration is the parent's
        _unregister(registrar, chunks, "destroying a host buffer")


def _unregister(registrar: Registrar, chunks: range, during: str) -> None:
    """Unregister every chunk, last first. Raises HostMemoryError for those that fail, after all of them."""
    failures = []
    for start in reversed(chunks):
        try:
            registrar.unregister(start)
        except Exception as error:
            failures.append(f"{start:#x}: {error}")
    if failures:
        raise HostMemoryError(f"{during}; unregistering failed for {len(failures)} chunks: {failures[0]}")
