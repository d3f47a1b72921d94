"""A device whose calls do nothing at no cost: what is left of a submission is Python's share of it."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from poolwright.runtime import jit, native
from poolwright.runtime.driver import Event, Launch, Parameters, Stream, Windows, sizes
from poolwright.runtime.driver.cuda import CudaEvent, CudaKernels, CudaLaunch
from poolwright.runtime.driver.host import HostDriver
from poolwright.runtime.program import GroupProgram, SizedProgram


def _nothing(*_: object) -> None:
    """A call of the driver."""


_HERE: AbstractContextManager[None] = nullcontext()


@functools.cache
def _functions() -> native.Functions:
    unit = jit.Unit("nothing", Path(__file__).with_suffix(".cpp"))
    function = ctypes.cast(jit.load_host(jit.host_libraries([unit])[0])["nothing"], ctypes.c_void_p).value
    return native.Functions(*[function] * 7, 8)


class NoKernels:
    """Launches nothing."""

    arrivals: ClassVar[int] = CudaKernels.arrivals

    def grid(self, purpose: str, nbytes: int) -> int:
        return sizes.blocks(purpose, nbytes)

    def windows(self, step_bytes: int, steps: int) -> Windows:
        return sizes.windows(step_bytes, steps)

    def prepare(self, name: str, params: Parameters) -> Launch:
        kernel = native.Kernel(1, 512, ctypes.addressof(params.pointers))
        return CudaLaunch(name, kernel, native.Calls(_functions(), 0))


class NoDriver(HostDriver):
    """Does in Python what the CUDA driver's door does for a submission, and calls nobody."""

    name = "nothing"

    def __init__(self) -> None:
        self._events: list[tuple[object, int]] = []
        self._followed: dict[int, object] = {}
        self._calls = native.Calls(_functions(), 1)

    def kernels(
        self, source: SizedProgram | GroupProgram, align: int, build: Callable[[], ctypes.CDLL]
    ) -> NoKernels:
        return NoKernels()

    def guard(self) -> AbstractContextManager[None]:
        return _HERE

    def stream(self) -> Stream:
        return 1

    def current_stream(self) -> Stream:
        return 0

    def enter(self, stream: Stream, other: Stream, before: Event | None, what: str) -> None:
        self._calls.enter(stream, other, 0 if before is None else before.number)

    def launch(self, launch: Any, stream: Stream, grid: int) -> Event:
        event = self.record(stream)
        launch(stream, grid, event.number)
        return event

    def launch_behind(
        self, launch: Any, stream: Stream, grid: int, other: Stream, before: Event | None, what: str
    ) -> Event:
        event, ahead = self.record(stream), 0 if before is None else before.number
        self._calls.launch_behind(launch.kernel.at, stream, grid, event.number, other, ahead)
        return event

    def relay(
        self,
        launch: Any,
        kernels: Stream,
        grid: int,
        copies: Stream,
        rows: native.Rows,
        inward: bool,
        free: Event | None,
        told: bool,
    ) -> Event | None:
        event, ahead = self.record(kernels) if told else None, 0 if free is None else free.number
        behind = 0 if event is None else event.number
        self._calls.relay(launch.kernel.at, grid, kernels, copies, ahead, behind, rows, inward)
        return event

    def record(self, stream: Stream, timed: bool = False) -> Event:
        handle, number = self._events.pop() if self._events else (object(), 1)
        return CudaEvent(handle, number, self._events)

    def elapsed(self, begin: Event, end: Event) -> float:
        return 0.0

    def follow(self, stream: Stream, other: Stream) -> None:
        event = self._followed.get(other)
        if event is None:
            event = self._followed[other] = object()
        if _nothing(event, other) is None:
            _nothing(stream, event)

    def copy(
        self, to: Sequence[int], source: Sequence[int], sizes: Sequence[int], stream: Stream, inward: bool
    ) -> None:
        return None

    def upload(self, address: int, values: array[int], stream: Stream) -> None:
        return None

    def fill(self, address: int, value: int, count: int, stream: Stream) -> None:
        return None

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        return None
