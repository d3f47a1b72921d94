"""Launches the kernels of one program: ids and layers become parameters, parameters a launch.

The blocks of parameters are made once and filled for each launch (the device takes a copy of them), and
few ids travel inside them: submission is a matter of microseconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from poolwright.runtime.driver import Driver, Kernels, Parameters, Stream
from poolwright.runtime.errors import PoolError
from poolwright.runtime.indices import Batch
from poolwright.runtime.program import SizedProgram

FEW_IDS = 128
LAYER_CAPACITY = 256


class Place(NamedTuple):
    """Where host pages lie for a launch: pinned host memory, or a slot of staging memory."""

    address: int
    pages: int


class Launcher:
    """Launches kernels of a bound program. Not thread safe: its owner holds a lock."""

    def __init__(
        self,
        driver: Driver,
        kernels: Kernels,
        program: SizedProgram,
        align: int,
        table: int,
        strides: Sequence[int],
    ):
        self._driver, self._kernels, self._program = driver, kernels, program
        self._most = {w.name: program.ids_per_launch(w.name, align) for w in program.walks}
        self._view = (ctypes.c_int64 * (3 + len(strides)))(_signed(table), 0, 0, *strides)
        self._few = (ctypes.c_uint32 * (2 * FEW_IDS))()
        self._numbers = memoryview(self._few).cast("B").cast("I")  # takes an array as one copy of its bytes
        self._listed = (ctypes.c_uint64 * 2)()
        self._tokens = (ctypes.c_int64 * 5)()
        self._count = ctypes.c_uint32()
        self._layers = (ctypes.c_uint32 * (1 + LAYER_CAPACITY))()
        self._done = ctypes.c_uint64()
        kinds: dict[str, ctypes._CData] = {"few": self._few, "listed": self._listed, "tokens": self._tokens}
        self._bulk = {k: Parameters(self._view, ids, self._count) for k, ids in kinds.items()}
        self._layered = {
            k: Parameters(self._view, ids, self._count, self._layers, self._done) for k, ids in kinds.items()
        }
        self._ready: dict[tuple[str, str, str, bool], Callable[[Stream], None]] = {}
        self._arrivals = dict(kernels.grid)

    def launch(
        self,
        direction: str,
        purpose: str,
        place: Place,
        batch: Batch,
        layers: Sequence[int] | None,
        stream: Stream,
        keep: list[object],
        done: int = 0,
    ) -> int:
        """Move all ids, bulk or the layers at these positions; `done`: address of a counter for each.

        Returns how many blocks count each layer. `keep` takes what must stay alive until the launch has
        run, also when it fails.
        """
        walk = batch.unit if layers is None else f"layer_{batch.unit}"
        kind = self._ids(batch, stream, keep)
        count = len(batch.host)
        if batch.unit == "tokens" and batch.on_device is not None:
            count *= self._program.sizes["page_size"]
        if count > self._most[walk]:
            raise PoolError(f"{count} {batch.unit} are more than one launch can count; move fewer at once")
        self._view[1], self._view[2] = place
        self._count.value = count
        launch = self._ready.get((direction, purpose, kind, layers is None))
        if launch is None:
            launch = self._prepare(direction, purpose, kind, walk, layers is None)
        if layers is None:
            launch(stream)
            return self._arrivals[purpose]
        for first in range(0, len(layers), LAYER_CAPACITY):
            part = layers[first : first + LAYER_CAPACITY]
            self._layers[0] = len(part)
            self._layers[1 : 1 + len(part)] = list(part)
            self._done.value = done + 4 * first if done else 0
            launch(stream)
        return self._arrivals[purpose]

    def _prepare(
        self, direction: str, purpose: str, kind: str, walk: str, bulk: bool
    ) -> Callable[[Stream], None]:
        name = f"{direction}_{walk}_few" if kind == "few" else f"{direction}_{walk}"
        params = (self._bulk if bulk else self._layered)[kind]
        made = self._kernels.prepare(name, purpose, params)
        self._ready[direction, purpose, kind, bulk] = made
        return made

    def _ids(self, batch: Batch, stream: Stream, keep: list[object]) -> str:
        """Fill the ids' block; returns its kind."""
        count = len(batch.host)
        if batch.unit == "pages" and batch.on_device is None and count <= FEW_IDS:
            self._numbers[:count] = batch.host
            self._numbers[FEW_IDS : FEW_IDS + count] = batch.device
            return "few"
        on_device = batch.on_device
        lists = batch.host + batch.device
        memory = self._driver.allocate(4 * max(len(lists), 1))
        keep.append(memory)
        self._driver.upload(memory.address, lists, stream)
        second = memory.address + 4 * count
        if batch.unit == "pages":
            self._listed[0] = memory.address
            self._listed[1] = second if on_device is None else on_device.data_ptr()
            return "listed"
        self._tokens[0], self._tokens[1] = _signed(memory.address), _signed(second)
        self._tokens[2] = self._tokens[3] = self._tokens[4] = 0
        if on_device is not None:
            self._tokens[2] = _signed(on_device.data_ptr())
            self._tokens[3] = on_device.stride(0)
            self._tokens[4] = int(on_device.dtype == torch.int64)
        return "tokens"


def _signed(value: int) -> int:
    """An address as a 64-bit signed number."""
    return value - (1 << 64) if value >= 1 << 63 else value
