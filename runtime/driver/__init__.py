"""The one door to a device: everything the runtime asks of it goes through a `Driver`.

Three stand behind it: ``host`` (the CPU, executing at once), ``cuda`` (the CUDA driver API) and
``simulated`` (tests: operations run in any order that the declared waits permit).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from poolwright.runtime.native import Rows

Stream = Any
Event = Any


@dataclass(frozen=True)
class Memory:
    """Device memory: `address` for kernels and copies, `tensor` (uint8) over the same bytes."""

    address: int
    nbytes: int
    tensor: Any


class Parameters:
    """Blocks of a launch's parameters, in order, and the array of their addresses that drivers take."""

    __slots__ = ("blocks", "pointers")

    def __init__(self, *blocks: ctypes._CData) -> None:
        self.blocks = blocks
        self.pointers = (ctypes.c_void_p * len(blocks))(*[ctypes.addressof(block) for block in blocks])


class Windows(NamedTuple):
    """How a load in layer order is cut: steps of a launch in front of the others (0: there is none), and how
    many of the others are moved together."""

    first: int
    each: int


class Launch(Protocol):
    """Launches a kernel on a stream, with so many blocks and the parameters of now. Raises PoolError."""

    def __call__(self, stream: Stream, grid: int) -> None: ...


class Kernels(Protocol):
    """Compiled kernels of one program. `arrivals`: how often each block counts a step."""

    @property
    def arrivals(self) -> int: ...

    def grid(self, purpose: str, nbytes: int) -> int:
        """Blocks of a launch that moves so many bytes: `purpose` is write_back (write_back_beside:
        while loads run), load, load_layers, gather or scatter."""
        ...

    def windows(self, step_bytes: int, steps: int) -> Windows:
        """How a load in layer order of so many steps, of so many bytes each, is cut. `first` is less than
        `steps`, `each` at least 1."""
        ...

    def prepare(self, name: str, params: Parameters) -> Launch:
        """What launches kernel `name`."""
        ...


class Driver(Protocol):
    """What the runtime asks of a device. Calls that take a stream return at once, except on ``host``."""

    name: str

    def guard(self) -> AbstractContextManager[None]:
        """Makes the device the current one, for calls from a thread that has another."""
        ...

    def admit(self, stream: Stream, what: str) -> None:
        """Raises NotAdmitted when `stream` cannot take a transfer (it is being captured into a graph)."""
        ...

    def enter(self, stream: Stream, other: Stream, before: Event | None, what: str) -> None:
        """Begin a submission to `stream`: `admit` the stream `other`, `follow` it, `wait` for `before`.

        Raises NotAdmitted with nothing done. One thread at a time: who submits holds a lock.
        """
        ...

    def allocate(self, nbytes: int) -> Memory:
        """Device memory of `nbytes`, aligned to at least 256 bytes; freed with its tensor."""
        ...

    def owning(self, stream: Stream, other: Stream) -> AbstractContextManager[object]:
        """What is allocated meanwhile is for `stream`, which is behind the stream `other`.

        Memory that was given back may still be in use by work of the stream that it was allocated for, and
        is handed out again to that one alone.
        """
        ...

    def register(self, address: int, nbytes: int) -> int:
        """Pin host memory; returns the address that kernels use for it."""
        ...

    def unregister(self, address: int) -> None: ...

    def numa_node(self) -> int | None:
        """The NUMA node whose memory is nearest to the device; None where the system does not say."""
        ...

    def stream(self) -> Stream:
        """A new stream."""
        ...

    def torch_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Makes `stream` the one that torch's own operations go to."""
        ...

    def call(self, stream: Stream, work: Callable[[], None]) -> None:
        """Queue torch's operations of `work` in `stream`; they write only tensors that they make."""
        ...

    def current_stream(self) -> Stream:
        """The stream that the caller's own work goes to."""
        ...

    def launch(self, launch: Launch, stream: Stream, grid: int) -> Event:
        """Launch a kernel of this driver, then `record`, in one call: the event behind it."""
        ...

    def launch_behind(
        self, launch: Launch, stream: Stream, grid: int, other: Stream, before: Event | None, what: str
    ) -> Event:
        """`enter`, then `launch`, in one call. Raises NotAdmitted with nothing done."""
        ...

    def relay(
        self,
        launch: Launch,
        kernels: Stream,
        grid: int,
        copies: Stream,
        rows: Rows,
        inward: bool,
        free: Event | None,
        told: bool,
    ) -> Event | None:
        """Launch a kernel in stream `kernels` and copy `rows` between host memory and device memory in stream
        `copies`: `inward` copies first, else the kernel; the second behind the first, that behind `free`.

        `told`: the event behind the second. One thread at a time: who submits holds a lock.
        """
        ...

    def record(self, stream: Stream, timed: bool = False) -> Event:
        """An event behind everything submitted to `stream` so far; `timed`: one that `elapsed` takes."""
        ...

    def elapsed(self, begin: Event, end: Event) -> float:
        """Seconds between two timed events that have happened."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Work submitted to `stream` from now on runs after `event`."""
        ...

    def follow(self, stream: Stream, other: Stream) -> None:
        """Work submitted to `stream` from now on runs after everything submitted to `other` so far.

        One thread at a time: who submits holds a lock.
        """
        ...

    def done(self, event: Event) -> bool:
        """Whether the event has happened."""
        ...

    def synchronize(self, event: Event) -> None:
        """Block the caller until the event has happened."""
        ...

    def copy(
        self, to: Sequence[int], source: Sequence[int], sizes: Sequence[int], stream: Stream, inward: bool
    ) -> None:
        """Copy runs of bytes in `stream`, in any order among themselves; `inward`: host to device."""
        ...

    def upload(self, address: int, values: array[int], stream: Stream) -> None:
        """Copy numbers to device memory in `stream`; they may be dropped when the call returns."""
        ...

    def fill(self, address: int, value: int, count: int, stream: Stream) -> None:
        """Set `count` 32-bit numbers of device memory in `stream`."""
        ...

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        """Work submitted to `stream` from now on runs once the 32-bit number there is at least `value`."""
        ...
