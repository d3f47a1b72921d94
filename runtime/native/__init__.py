"""The runtime's own compiled code: what a submission does for every id, and its calls of the driver.

`submit.cpp` is built once on a machine, with its C++ compiler, and kept in the cache of compiled code.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
def _taking(name: str, *, locked: bool = False) -> Any:
    """A function of the compiled code that takes one block of words, and returns a signed one.

    A block is made for each call: any thread may call, and that costs half of what several arguments do.
    `locked`: called with the interpreter's lock held: it is over sooner than the lock would change hands.
    """
    loader = ctypes.PyDLL if locked else ctypes.CDLL
    function: Any = loader(None, handle=library()._handle)[name]
    function.restype = ctypes.c_int64
    return function


class Functions(ctypes.Structure):
    """Addresses of functions of the CUDA driver, as `Functions` in submit.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("capturing", "record", "wait", "launch")),
        *((name, ctypes.c_void_p) for name in ("copy_in", "copy_out", "batch")),
        ("batch_arguments", ctypes.c_uint64),
    )


REFUSED = 1
"""`Stage` in submit.cpp: nothing was done."""


def stopped(found: int) -> tuple[int, int]:
    """Where a call stopped (`Stage` in submit.cpp), and the driver's error."""
    return divmod(found, 1 << 32)


_BEGIN, _LAUNCH, _LONE = struct.Struct("5Q"), struct.Struct("5Q"), struct.Struct("10Q")
_BATCH, _RELAY = struct.Struct("7Q"), struct.Struct("12Q")


class Calls:
    """Calls of the CUDA driver, several in one, through its `functions`. `between`: an event for putting one
    stream behind another; one thread at a time.

    Streams, events and kernels are numbers, an event of 0 is none. What is returned is 0 when all is done.
    """

    __slots__ = ("_at", "_between", "_copies", "_enter", "_kept", "_launch", "_lone", "_relay")

    def __init__(self, functions: Functions, between: int) -> None:
        self._kept, self._at, self._between = functions, ctypes.addressof(functions), between
        self._enter, self._launch, self._lone = map(_taking, ("enter", "launch", "launch_behind"))
        self._copies, self._relay = map(_taking, ("copies", "relay"))

    def enter(self, stream: int, other: int, before: int) -> int:
        """Put `stream` behind `other` and behind event `before`; else what `stopped` reads."""
        found: int = self._enter(_BEGIN.pack(self._at, self._between, stream, other, before))
        return found

    def launch(self, kernel: int, stream: int, grid: int, event: int) -> int:
        """Launch `grid` blocks and record `event` behind them; else what `stopped` reads; `REFUSED`: it was
        not launched."""
        found: int = self._launch(_LAUNCH.pack(self._at, kernel, stream, grid, event))
        return found

    def launch_behind(self, kernel: int, stream: int, grid: int, event: int, other: int, before: int) -> int:
        """`enter`, then `launch`; else what `stopped` reads."""
        at = self._at
        words = _LONE.pack(at, self._between, stream, other, before, at, kernel, stream, grid, event)
        found: int = self._lone(words)
        return found

    def copies(self, to: int, source: int, sizes: int, count: int, stream: int, inward: bool) -> int:
        """Copy runs of bytes, given as addresses of three lists; else the driver's error."""
        found: int = self._copies(_BATCH.pack(self._at, to, source, sizes, count, stream, inward))
        return found

    def relay(
        self,
        kernel: int,
        grid: int,
        kernels: int,
        copies: int,
        free: int,
        event: int,
        rows: Rows,
        inward: bool,
    ) -> int:
        """Launch in stream `kernels` and copy in stream `copies`: copies first if `inward`, else last. The
        first of both waits for event `free`; `event` is recorded behind the other. Else an error's number."""
        room, at = len(rows.numbers) // 3, rows.numbers.buffer_info()[0]
        streams = kernels, copies, free, self._between, event
        words = _RELAY.pack(self._at, kernel, grid, *streams, at, room, rows.used, inward)
        found: int = self._relay(words)
        return found


class Rows(NamedTuple):
    """Copies between host memory and a slot in three equal rows: host addresses, slot addresses, bytes, of
    which the first `used` are meant."""

    numbers: array[int]
    used: int

    def row(self, number: int) -> array[int]:
        """One of the three."""
        first = number * (len(self.numbers) // 3)
        return self.numbers[first : first + self.used]


class Kernel:
    """A kernel for `Calls`, `at` its address: `function` in blocks of `block` threads. `parameters`: the
    address of the array of its parameters' addresses."""

    __slots__ = ("_kept", "at")

    def __init__(self, function: int, block: int, parameters: int) -> None:
        self._kept = array("Q", (function, block, parameters))
        self.at = self._kept.buffer_info()[0]


_QUESTION = struct.Struct("6Q")


class PageCheck:
    """Checks lists of pages of one pool.

    `taken`: a byte for each host page, looked up where `ALLOCATED` is asked; it keeps its size.
    """

    __slots__ = ("_at", "_call", "_kept")

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
        self._call, self._at = _taking("pages_of", locked=True), limits.buffer_info()[0]
        self._kept = limits, marks, refused, flags

    def runs(self, host: int, device: int, count: int, ask: int, out: array[int]) -> int:
        """Check `count` pages of the lists at both addresses (`device` 0: of the host's alone) and write them
        to `out`, the host's first; runs of neighbouring host pages, or what is wrong."""
        found: int = self._call(_QUESTION.pack(self._at, host, device, count, ask, out.buffer_info()[0]))
        return found


Run = tuple[int, int, int, int, int]
"""Bytes that every page has: start and step of pages in host memory, start and step of positions in a slot,
how many."""


class Runs:
    """`Run`s as one list of numbers: their `count`, and where they are."""

    __slots__ = ("_kept", "at", "count")

    def __init__(self, numbers: array[int]) -> None:
        self._kept, self.at, self.count = numbers, numbers.buffer_info()[0], len(numbers) // 5


_STAMPED = struct.Struct("5Q")


class Stamps:
    """A number for each page; 0: none was given. Numbers are given in ascending order."""

    __slots__ = ("_latest", "_numbers", "_stamp")

    def __init__(self) -> None:
        self._numbers = array("Q", (0,))
        self._stamp, self._latest = (_taking(name, locked=True) for name in ("stamp", "latest"))

    def give(self, pages: array[int], number: int) -> None:
        """Give these pages (32-bit) a number."""
        needed = self._stamp(self._words(pages, number))
        if needed > len(self._numbers):
            self._numbers.extend(array("Q", (0,)) * (needed - len(self._numbers)))
            self._stamp(self._words(pages, number))

    def latest(self, pages: array[int]) -> int:
        """The largest number that one of these pages has."""
        found: int = self._latest(self._words(pages, 0))
        return found

    def _words(self, pages: array[int], number: int) -> bytes:
        (numbers, room), (ids, count) = self._numbers.buffer_info(), pages.buffer_info()
        return _STAMPED.pack(numbers, room, ids, count, number)


_LISTED = struct.Struct("10Q")


class CopyLists:
    """Lists of copies between pages of one pool in host memory, from address `origin` on, and a slot.

    `borders`: host addresses that no copy crosses, ascending.
    """

    __slots__ = ("_at", "_call", "_kept")

    def __init__(self, origin: int, borders: Sequence[int]) -> None:
        self._call, crossed = _taking("copies_of", locked=True), array("Q", borders)
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
        place = (numbered, count, first, base, at, room // 3, used)
        found: int = self._call(_LISTED.pack(self._at, runs.at, runs.count, *place))
        if 3 * found > room:
            raise ValueError(f"copies of {count} pages: expected room for {found}, got {room // 3}")
        return found


@functools.cache
def _in_host_order() -> Any:
    function = ctypes.PyDLL(None, handle=library()._handle).in_host_order
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p], None
    return function


def in_host_order(ids: array[int], count: int) -> array[int]:
    """`count` host pages and behind them the device's, in the order of the host's."""
    found, room = ids[:], ids[:]
    _in_host_order()(found.buffer_info()[0], count, room.buffer_info()[0])
    return found
