"""The CPU as a device: every operation is executed at once, so streams and events are only tokens."""

from __future__ import annotations

import ctypes
import functools
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch

from poolwright.runtime.driver import Event, Launch, Memory, Parameters, Stream, Windows
from poolwright.runtime.driver.relay import relay
from poolwright.runtime.native import Rows


class HostKernels:
    """Kernels of a host.cpp compiled with PW_LANES, played lane by lane; `build` makes it when first used."""

    arrivals: ClassVar[int] = 1
    block: ClassVar[int] = 32

    def __init__(self, build: Callable[[], ctypes.CDLL]) -> None:
        self._library = functools.cache(build)

    def grid(self, purpose: str, nbytes: int) -> int:
        return 3

    def windows(self, step_bytes: int, steps: int) -> Windows:
        each = max(1, 4096 // max(step_bytes, 1))
        return Windows(0, steps) if steps <= each else Windows(1, each)

    def prepare(self, name: str, params: Parameters) -> Launch:
        def launch(stream: Stream, grid: int) -> None:
            play = getattr(self._library(), f"lanes_{name}")
            play(ctypes.c_uint32(grid), ctypes.c_uint32(self.block), params.pointers)

        return launch


class HostDriver:
    """The CPU. Memory is ordinary memory; a wait never waits, because everything before it has run."""

    name = "host"

    def guard(self) -> AbstractContextManager[None]:
        return nullcontext()

    def admit(self, stream: Stream, what: str) -> None:
        return None

    def enter(self, stream: Stream, other: Stream, before: Event | None, what: str) -> None:
        return None

    def allocate(self, nbytes: int) -> Memory:
        tensor = torch.empty(nbytes + 256, dtype=torch.uint8)
        offset = -tensor.data_ptr() % 256
        tensor = tensor[offset : offset + nbytes]
        return Memory(tensor.data_ptr() if nbytes else 0, nbytes, tensor)

    def owning(self, stream: Stream, other: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def register(self, address: int, nbytes: int) -> int:
        return address

    def unregister(self, address: int) -> None:
        return None

    def numa_node(self) -> int | None:
        return None

    def stream(self) -> Stream:
        return None

    def torch_stream(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def call(self, stream: Stream, work: Callable[[], None]) -> None:
        work()

    def current_stream(self) -> Stream:
        return None

    def launch(self, launch: Launch, stream: Stream, grid: int) -> Event:
        launch(stream, grid)
        return None

    def launch_behind(
        self, launch: Launch, stream: Stream, grid: int, other: Stream, before: Event | None, what: str
    ) -> Event:
        return self.launch(launch, stream, grid)

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
        return relay(self, launch, kernels, grid, copies, rows, inward, free, told)

    def record(self, stream: Stream, timed: bool = False) -> Event:
        return time.perf_counter() if timed else None

    def elapsed(self, begin: Event, end: Event) -> float:
        return float(end - begin)

    def wait(self, stream: Stream, event: Event) -> None:
        return None

    def follow(self, stream: Stream, other: Stream) -> None:
        return None

    def done(self, event: Event) -> bool:
        return True

    def synchronize(self, event: Event) -> None:
        return None

    def copy(
        self, to: Sequence[int], source: Sequence[int], sizes: Sequence[int], stream: Stream, inward: bool
    ) -> None:
        for target, origin, size in zip(to, source, sizes, strict=True):
            ctypes.memmove(target, origin, size)

    def upload(self, address: int, values: array[int], stream: Stream) -> None:
        ctypes.memmove(address, values.buffer_info()[0], values.itemsize * len(values))

    def fill(self, address: int, value: int, count: int, stream: Stream) -> None:
        self.upload(address, array("I", [value] * count), stream)

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        found = ctypes.c_uint32.from_address(address).value
        if (found - value) & 0x80000000:  # counters go round, as on the device
            raise RuntimeError(f"waits for {value} at {address:#x}, which is {found} and will not change")
