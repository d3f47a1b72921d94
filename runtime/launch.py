"""Launches the kernels of one program: ids and layers become parameters, parameters a launch.

The blocks of parameters are made once and filled for each launch (the device takes a copy of them), and
few ids travel inside them: submission is a matter of microseconds.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from poolwright.runtime.driver import Driver, Kernels, Memory, Parameters, Stream
from poolwright.runtime.errors import PoolError
from poolwright.runtime.indices import Batch
from poolwright.runtime.program import SizedProgram

FEW_IDS = 128
LAYER_CAPACITY = 256


@dataclass(frozen=True)
class Place:
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
        self._few_address = ctypes.addressof(self._few)
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

    def launch(
        self,
        direction: str,
        purpose: str,
        place: Place,
        batch: Batch,
        layers: Sequence[int] | None,
        stream: Stream,
        done: int = 0,
    ) -> tuple[int, object]:
        """Move all ids, bulk or the layers at these positions; `done`: address of a counter for each.

        Returns how many blocks count each layer, and what must stay alive until the launch has run.
        """
        walk = batch.unit if layers is None else f"layer_{batch.unit}"
        kind, keep = self._ids(batch, stream)
        count = len(batch.host)
        if batch.unit == "tokens" and batch.on_device is not None:
            count *= self._program.sizes["page_size"]
        if count > self._most[walk]:
            raise PoolError(f"{count} {batch.unit} are more than one launch can count; move fewer at once")
        self._view[1], self._view[2] = _signed(place.address), place.pages
        self._count.value = count
        name = f"{direction}_{walk}_few" if kind == "few" else f"{direction}_{walk}"
        grid, block = self._kernels.grid[purpose], self._kernels.block
        if layers is None:
            self._kernels.launch(name, grid, block, self._bulk[kind], stream)
            return grid, keep
        for first in range(0, len(layers), LAYER_CAPACITY):
            part = layers[first : first + LAYER_CAPACITY]
            self._layers[0] = len(part)
            self._layers[1 : 1 + len(part)] = list(part)
            self._done.value = done + 4 * first if done else 0
            self._kernels.launch(name, grid, block, self._layered[kind], stream)
        return grid, keep

    def _ids(self, batch: Batch, stream: Stream) -> tuple[str, object]:
        """Fill the ids' block; returns its kind and what must stay alive."""
        count = len(batch.host)
        if batch.unit == "pages" and batch.on_device is None and count <= FEW_IDS:
            host, device = array("I", batch.host), array("I", batch.device)
            ctypes.memmove(self._few_address, host.buffer_info()[0], 4 * count)
            ctypes.memmove(self._few_address + 4 * FEW_IDS, device.buffer_info()[0], 4 * count)
            return "few", None
        on_device = batch.on_device
        lists = array("I", batch.host + batch.device)
        memory = self._upload(lists, stream)
        second = memory.address + 4 * count
        if batch.unit == "pages":
            self._listed[0] = memory.address
            self._listed[1] = second if on_device is None else on_device.data_ptr()
            return "listed", (memory, on_device)
        self._tokens[0], self._tokens[1] = _signed(memory.address), _signed(second)
        self._tokens[2] = self._tokens[3] = self._tokens[4] = 0
        if on_device is not None:
            self._tokens[2] = _signed(on_device.data_ptr())
            self._tokens[3] = on_device.stride(0)
            self._tokens[4] = int(on_device.dtype == torch.int64)
        return "tokens", (memory, on_device)

    def _upload(self, values: array[int], stream: Stream) -> Memory:
        memory = self._driver.allocate(4 * max(len(values), 1))
        self._driver.upload(memory.address, values, stream)
        return memory


def _signed(value: int) -> int:
    """An address as a 64-bit signed number."""
    return value - (1 << 64) if value >= 1 << 63 else value
