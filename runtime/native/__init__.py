"""The runtime's own compiled code: what a submission does for every id, and its calls of the driver.

`submit.cpp` is built once on a machine, with its C++ compiler, and kept in the cache of compiled code.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poolwright.runtime import jit

UNIT = jit.Unit("runtime", Path(__file__).resolve().parent / "submit.cpp")

# `Wrong` and `Ask` in submit.cpp.
NOT_WHOLE, HOST_OUTSIDE, DEVICE_OUTSIDE, RESERVED, HOST_TWICE, DEVICE_TWICE, HOST_IDLE = range(-1, -8, -1)
HOST_WIDE, DEVICE_WIDE, BY_TOKEN, HOST_ONCE, DEVICE_ONCE, ALLOCATED = 1, 2, 4, 8, 16, 32


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled code. Raises CompileError, and BackendUnavailable where there is neither it nor a
    compiler."""
    return jit.load_host(jit.host_libraries([UNIT])[0])


@functools.cache
def _pages_of() -> Any:
    """`pages_of` in submit.cpp, called with the interpreter's lock held: it is over sooner than the lock
    would change hands."""
    function = ctypes.PyDLL(None, handle=library()._handle).pages_of
    pointer, word = ctypes.c_void_p, ctypes.c_uint64
    function.argtypes = [pointer, pointer, pointer, word, word, pointer]
    function.restype = ctypes.c_int64
    return function


class Functions(ctypes.Structure):
    """Addresses of functions of the CUDA driver, as `Functions` in submit.cpp."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("capturing", "record", "wait", "launch"))


REFUSED = 1
"""`Stage` in submit.cpp: nothing was done."""


class Enter:
    """Puts one stream behind another, through `functions` of the driver; `between`: an event for it.

    `call` takes stream, other stream, and an event that comes before, too, or 0; it returns 0 when all is
    done, else what `stopped` reads. One thread at a time.
    """

    __slots__ = ("_kept", "call")

    def __init__(self, functions: Functions, between: int) -> None:
        call: Any = library()["enter"]
        call.argtypes, call.restype = [ctypes.c_void_p] * 5, ctypes.c_int64
        self._kept = functions
        self.call = functools.partial(call, ctypes.addressof(functions), between)


def stopped(found: int) -> tuple[int, int]:
    """Where a call stopped (`Stage` in submit.cpp), and the driver's error."""
    return divmod(found, 1 << 32)


class LaunchKernel:
    """Launches `function` in blocks of `block` threads, through `functions` of the driver.

    `parameters`: the address of the array of its parameters' addresses. `call` takes stream, number of
    blocks, and an event to record behind the launch, or 0; it returns 0 when all is done, else what `stopped`
    reads; `REFUSED`: it was not launched.
    """

    __slots__ = ("_kept", "call")

    def __init__(self, functions: Functions, function: int, block: int, parameters: int) -> None:
        call: Any = library()["launch"]
        pointer, word = ctypes.c_void_p, ctypes.c_uint64
        call.argtypes, call.restype = [pointer, pointer, pointer, word, pointer], ctypes.c_int64
        kernel = array("Q", (function, block, parameters))
        self._kept = functions, kernel
        self.call = functools.partial(call, ctypes.addressof(functions), kernel.buffer_info()[0])


class PageCheck:
    """Checks lists of pages of one pool; `at` is the address of its limits, `call` takes it first.

    `taken`: a byte for each host page, looked up where `ALLOCATED` is asked; it keeps its size.
    """

    __slots__ = ("_kept", "at", "call")

    def __init__(
        self,
        page_size: int,
        host_pages: int,
        device_pages: int,
        reserved: Sequence[int],
        taken: bytearray | None = None,
    ) -> None:
        marks = [array("Q", (0,)) * (pages // 64 + 1) for pages in (host_pages, device_pages)]
        refused = array("Q", reserved)
        host, device = (each.buffer_info()[0] for each in marks)
        flags = (ctypes.c_char * len(taken)).from_buffer(taken) if taken else None
        known = 0 if flags is None else ctypes.addressof(flags)
        words = (page_size, host_pages, host, device_pages, device, len(refused), refused.buffer_info()[0])
        limits = array("Q", (*words, known))
        self.call, self.at = _pages_of(), limits.buffer_info()[0]
        self._kept = limits, marks, refused, flags


Run = tuple[int, int, int, int, int]
"""Bytes that every page has: start and step of pages in host memory, start and step of positions in a slot,
how many."""


class Runs:
    """`Run`s as one list of numbers: their `count`, and where they are."""

    __slots__ = ("_kept", "at", "count")

    def __init__(self, numbers: array[int]) -> None:
        self._kept, self.at, self.count = numbers, numbers.buffer_info()[0], len(numbers) // 5


class CopyLists:
    """Lists of copies between pages of one pool in host memory, from address `origin` on, and a slot.

    `borders`: host addresses that no copy crosses, ascending.
    """

    __slots__ = ("_at", "_call", "_kept")

    def __init__(self, origin: int, borders: Sequence[int]) -> None:
        self._call, crossed = _copies_of(), array("Q", borders)
        host = array("Q", (origin, len(borders), crossed.buffer_info()[0]))
        self._kept, self._at = (crossed, host), host.buffer_info()[0]

    def room(self, pages: int, runs: Runs) -> int:
        """How many copies so many pages are at most: borders lie between pages."""
        return pages * runs.count

    def add(self, rows: array[int], used: int, runs: Runs, pages: array[int], first: int, base: int) -> int:
        """Append to three equal `rows` that hold `used` copies: host addresses, slot addresses, bytes.

        `pages`: the first has position `first` in the slot at `base`. Neighbours become one copy. Returns how
        many copies the rows hold then. Raises ValueError when they have no room for them.
        """
        at, room = rows.buffer_info()
        numbered, count = pages.buffer_info()
        found: int = self._call(
            self._at, runs.at, runs.count, numbered, count, first, base, at, room // 3, used
        )
        if 3 * found > room:
            raise ValueError(f"copies of {count} pages: expected room for {found}, got {room // 3}")
        return found


@functools.cache
def _copies_of() -> Any:
    function = ctypes.PyDLL(None, handle=library()._handle).copies_of
    pointer, word = ctypes.c_void_p, ctypes.c_uint64
    function.argtypes = [pointer, pointer, word, pointer, word, word, word, pointer, word, word]
    function.restype = word
    return function


@functools.cache
def _in_host_order() -> Any:
    function = ctypes.PyDLL(None, handle=library()._handle).in_host_order
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_uint64], None
    return function


def in_host_order(ids: array[int], count: int) -> array[int]:
    """`count` host pages and behind them the device's, in the order of the host's."""
    found = ids[:]
    _in_host_order()(found.buffer_info()[0], count)
    return found
