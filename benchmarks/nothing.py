"""A device whose calls do nothing at no cost: what is left of a submission is Python's share of it."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from poolwright.runtime.driver import Event, Memory, Parameters, Stream
from poolwright.runtime.driver.cuda import BatchCopy, CudaEvent, CudaKernels
from poolwright.runtime.program import SizedProgram

_HERE: AbstractContextManager[None] = nullcontext()


class NoKernels:
    """Launches nothing."""

    grid: ClassVar[Mapping[str, int]] = CudaKernels.grid

    def prepare(self, name: str, purpose: str, params: Parameters) -> Callable[[Stream], None]:
        return lambda stream: None


class NoDriver:
    """Does in Python what the CUDA driver's door does, and calls nobody. Memory is the CPU's."""

    name = "nothing"

    def __init__(self) -> None:
        self._events: list[object] = []
        self._batch = BatchCopy(lambda *_: 0, 8)

    def kernels(self, program: SizedProgram, align: int, build: Callable[[], ctypes.CDLL]) -> NoKernels:
        return NoKernels()

    def guard(self) -> AbstractContextManager[None]:
        return _HERE

    def admit(self, stream: Stream, what: str) -> None:
        return None

    def allocate(self, nbytes: int) -> Memory:
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        return Memory(tensor.data_ptr(), nbytes, tensor)

    def register(self, address: int, nbytes: int) -> int:
        return address

    def unregister(self, address: int) -> None:
        return None

    def stream(self) -> Stream:
        return 1

    def torch_stream(self, stream: Stream) -> AbstractContextManager[object]:
        return _HERE

    def current_stream(self) -> Stream:
        return 0

    def record(self, stream: Stream) -> Event:
        handle = self._events.pop() if self._events else object()
        return CudaEvent(handle, self._events)

    def wait(self, stream: Stream, event: Event) -> None:
        return None

    def done(self, event: Event) -> bool:
        return True

    def synchronize(self, event: Event) -> None:
        return None

    def copy(
        self, to: Sequence[int], source: Sequence[int], sizes: Sequence[int], stream: Stream, inward: bool
    ) -> None:
        self._batch(to, source, sizes, stream)

    def upload(self, address: int, values: array[Any], stream: Stream) -> None:
        return None

    def fill(self, address: int, value: int, count: int, stream: Stream) -> None:
        return None

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        return None
