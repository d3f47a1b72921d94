"""Where the time of a first layer goes: the start, the slowest warp, or the stream that waits for a value.

In: a CUDA device. Out: a line for each load in layer order, in microseconds after the moment from which it
could begin. `arrivals`: when the first, the middle and the last warp have counted the first layer, as seen by
a kernel that watches the counter; `value`: when a stream goes on that waits for the value; `spin`: when a
kernel does that spins on the counter; `event`: when a stream goes on that waits for the event of a load of
the first layer alone, which the others follow. The first is one launch here, else the first layer would
never be counted. `share` is the load's own time divided by its layers. Blocks,
and vectors that a thread has in flight, are varied.

Run ``python benchmarks/first_layer.py``; ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

import shapes
from asked import asked

from poolwright.runtime import jit, program
from poolwright.runtime.driver import Parameters, Windows
from poolwright.runtime.driver.cuda import CudaKernels

CELLS = ((4, 1), (4, 8), (0, 8), (0, 64), (1, 8), (1, 64), (2, 8), (2, 64))
"""Position in SHAPES, pages."""

COVER = 4_000_000
"""Device cycles in which everything is submitted: about 2 ms."""

PATIENCE = 200_000_000
"""Nanoseconds after which a kernel stops waiting."""

MOST_ARRIVALS = 4096


def counted(kernels: CudaKernels, step_bytes: int, steps: int) -> Windows:
    """Every window of one launch, so that a counter tells the first layer too."""
    return Windows(0, max(1, min((512 << 10) // step_bytes, steps - 1)))


class Clocks:
    """Kernels that write the device's time into slots of one buffer."""

    def __init__(self) -> None:
        major, minor = torch.cuda.get_device_capability()
        source = Path(__file__).with_suffix(".cu")
        cubins = jit.cubins(jit.Unit("first_layer", source), f"sm_{major}{minor}")
        self._kernels = CudaKernels(cubins)
        self.times = torch.zeros(MOST_ARRIVALS + 16, dtype=torch.int64, device="cuda")
        self._kept: list[Any] = []

    def _launch(self, name: str, stream: Any, *blocks: Any) -> None:
        parameters = Parameters(*blocks)
        self._kept.append(parameters)
        self._kernels.prepare(name, parameters)(stream.cuda_stream, 1)

    def _slot(self, slot: int) -> ctypes.c_uint64:
        return ctypes.c_uint64(self.times.data_ptr() + 8 * slot)

    def stamp(self, slot: int, stream: Any) -> None:
        self._launch("stamp", stream, self._slot(slot))

    def spin(self, slot: int, address: int, value: int, stream: Any) -> None:
        patience = ctypes.c_uint64(PATIENCE)
        self._launch(
            "spin", stream, ctypes.c_uint64(address), ctypes.c_uint32(value), self._slot(slot), patience
        )

    def watch(self, slot: int, address: int, base: int, count: int, stream: Any) -> None:
        patience = ctypes.c_uint64(PATIENCE)
        numbers = ctypes.c_uint32(base), ctypes.c_uint32(count)
        self._launch("watch", stream, ctypes.c_uint64(address), *numbers, self._slot(slot), patience)

    def read(self) -> list[int]:
        torch.cuda.synchronize()
        self._kept.clear()
        return [int(value) for value in self.times.tolist()]


START, VALUE, SPUN, END, ALONE, ARRIVALS = 0, 1, 2, 3, 4, 16


class Bench:
    """One pool: loads in layer order, watched."""

    def __init__(self, rig: shapes.Rig, pages: int, clocks: Clocks) -> None:
        self.rig, self.clocks = rig, clocks
        self.host, self.device = rig.lists(pages, "scattered")
        make: Callable[[], Any] = torch.cuda.Stream
        self._streams = [make() for _ in range(4)]

    def _covered(self) -> Any:
        sleep: Callable[[int], None] = torch.cuda._sleep
        torch.cuda.synchronize()
        self.clocks.times.zero_()
        stream = torch.cuda.current_stream()
        sleep(COVER)
        self.clocks.stamp(START, stream)
        return stream

    def together(self) -> list[float]:
        """First, middle and last arrival, the value waited for, the spinning kernel, the whole load."""
        pool, clocks = self.rig.pool, self.clocks
        reached = pool._transfers._reached[0] + pool._transfers._ahead & 0xFFFFFFFF
        stream = self._covered()
        ticket = pool.load(self.host, self.device, unit="page", order="layer")
        marks = ticket._marks
        assert marks is not None
        moment = marks.moment(0, None)
        count = moment.value - reached & 0xFFFFFFFF
        assert count <= MOST_ARRIVALS
        watcher, waiter, spinner, _ = self._streams
        clocks.watch(ARRIVALS, moment.address, reached, count, watcher)
        clocks.spin(SPUN, moment.address, moment.value, spinner)
        ticket.wait_layer(pool.layers[0], waiter)
        clocks.stamp(VALUE, waiter)
        ticket.wait(stream)
        clocks.stamp(END, stream)
        times = clocks.read()
        arrivals = sorted(times[ARRIVALS : ARRIVALS + count])
        found = [arrivals[0], arrivals[count // 2], arrivals[-1], times[VALUE], times[SPUN], times[END]]
        return [(each - times[START]) / 1e3 for each in found]

    def alone(self) -> float:
        """The first layer as a load of its own, waited for by its event, with the others behind it."""
        pool, clocks = self.rig.pool, self.clocks
        self._covered()
        first = pool.load(self.host, self.device, unit="page", layers=pool.layers[:1])
        pool.load(self.host, self.device, unit="page", layers=pool.layers[1:])
        waiter = self._streams[3]
        first.wait(waiter)
        clocks.stamp(ALONE, waiter)
        times = clocks.read()
        return (times[ALONE] - times[START]) / 1e3


def median(rows: list[list[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def measure(cell: tuple[int, int], options: argparse.Namespace, clocks: Clocks) -> Iterator[str]:
    """A line for each count of blocks."""
    shape, pages = shapes.SHAPES[cell[0]], cell[1]
    rig = shapes.Rig(shape, pages, "cuda:0")
    bench = Bench(rig, pages, clocks)
    usual = CudaKernels.grid
    for blocks in options.blocks:
        grid: Any = usual if not blocks else lambda self, purpose, nbytes, blocks=blocks: blocks
        CudaKernels.grid = grid  # type: ignore[method-assign]
        rows = [[*bench.together(), bench.alone()] for _ in range(options.repeats + 2)][2:]
        first, middle, last, value, spun, end, alone = median(rows)
        share = end / shape.layers
        yield (
            f"{shape.name:18} {shape.page_size:3} {pages:4} blocks {blocks or 'own':>4} x {options.flight}"
            f"  share {share:7.1f}  arrivals {first:6.1f} {middle:6.1f} {last:6.1f}  value {value:6.1f}"
            f"  spin {spun:6.1f}  event {alone:6.1f}  end {end:8.1f}"
        )
    CudaKernels.grid = usual  # type: ignore[method-assign]
    rig.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="where the time of a first layer goes")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--blocks", type=int, nargs="+", default=[0, 4, 8, 16], help="0: what the pool takes")
    parser.add_argument("--flight", type=int, default=8, help="vectors that a thread has in flight")
    options = asked(parser)
    plain = program.SizedProgram.constants

    def constants(self: program.SizedProgram, of: str = "") -> tuple[tuple[str, str], ...]:
        return (*plain(self, of), ("PW_IN_FLIGHT", str(options.flight)))

    program.SizedProgram.constants = constants  # type: ignore[method-assign]
    CudaKernels.windows = counted  # type: ignore[method-assign]
    make: Callable[[], Any] = torch.cuda.Stream
    with torch.cuda.stream(make()):
        clocks = Clocks()
        for cell in CELLS:
            for line in measure(cell, options, clocks):
                print(line, flush=True)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
