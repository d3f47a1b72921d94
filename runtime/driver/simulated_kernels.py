"""Kernels of the simulator: the twin's `lanes`, played on copied parameters, every byte accounted for.

In: a sized program and its compiled lanes. Out: operations whose steps are phases of a launch. Which bytes
a launch touches is computed from the same description of both sides that its constants come from.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from poolwright.runtime.driver import Launch, Parameters, Stream, Windows
from poolwright.runtime.program import SizedProgram

if TYPE_CHECKING:
    from poolwright.runtime.driver.simulated import SimulatedDriver, Touch

SKIPPED = 0xFFFFFFFF

IDS = struct.Struct("IIIIQQQqQ")
"""`Ids` in prim.h."""

Axes = Sequence[tuple[str, int, int]]
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Side:
    """One component on one side: runs of bytes behind an id's first byte, bytes a page and a token step."""

    table: int  # position in the table of tensors; -1: the host
    runs: Runs
    page: int
    token: int

    def at(self, base: int, page: int, token: int) -> Iterator[tuple[int, int]]:
        first = base + page * self.page + token * self.token
        for offset, nbytes in self.runs:
            yield first + offset, nbytes


@dataclass(frozen=True)
class Call:
    """One pool's part of a launch as its parameters say it, read when it runs.

    `ids`: (host, device), pages or tokens; `at`: where each part stands in this step, None: all layers.
    """

    pool: int
    tokens: bool
    view: Sequence[int]
    ids: Sequence[tuple[int, int]]
    at: tuple[int | None, ...] | None


class SimulatedKernels:
    """Kernels of programs. `build` gives their compiled lanes and is asked when the first one runs."""

    arrivals: ClassVar[int] = 1
    block: ClassVar[int] = 4

    def __init__(
        self, driver: SimulatedDriver, programs: Sequence[SizedProgram], build: Callable[[], ctypes.CDLL]
    ) -> None:
        self._driver, self._build = driver, build
        self._programs = [program for program in programs if program.device]
        self._sides: dict[tuple[object, ...], list[Side]] = {}

    @cached_property
    def _library(self) -> ctypes.CDLL:
        return self._build()

    def grid(self, purpose: str, nbytes: int) -> int:
        return 2

    def windows(self, step_bytes: int, steps: int) -> Windows:
        """Loads of tests move all steps in one launch, or a first one and then one or several at a time."""
        each = max(1, 40 // max(step_bytes, 1))
        return Windows(0, steps) if steps <= each else Windows(1, each)

    def prepare(self, name: str, params: Parameters) -> Launch:
        return lambda stream, grid: self.launch(name, grid, params, stream)

    def launch(self, name: str, grid: int, params: Parameters, stream: Stream) -> None:
        """Queue a launch. A kernel in layer order becomes two for all steps that it moves together: all
        blocks but one count and have moved nothing, then everything is moved and the last one counts."""
        blocks = [type(b).from_buffer_copy(b) for b in params.blocks]  # type: ignore[attr-defined]
        steps: list[Callable[[Touch], None]] = []
        if "_layer_" not in name:
            steps.append(lambda touch: self._play(touch, name, grid, blocks))
            self._driver.enqueue("launch", name, stream, steps)
            return
        count, window, done = (int(block.value) for block in blocks[-3:])
        for step in range(0, count, window):
            now = min(window, count - step)
            phase = [*blocks[:-3], ctypes.c_uint32(now), ctypes.c_uint32(now), ctypes.c_uint64(0)]
            for at, program in enumerate(self._programs):
                ids = list(IDS.unpack(blocks[2 * at + 1]))
                ids[-1] += 4 * step * len(program.columns) if ids[0] else 0
                phase[2 * at + 1] = type(blocks[2 * at + 1]).from_buffer_copy(IDS.pack(*ids))
            counted = [done + 4 * n for n in range(step, step + now)] if done else []
            steps += self._phases(name, grid, phase, counted)
        counters = [done + 4 * n for n in range(count)] if done else []
        self._driver.enqueue("launch", name, stream, steps, counters=counters)

    def _phases(
        self, name: str, grid: int, blocks: list[ctypes._CData], counters: Sequence[int]
    ) -> list[Callable[[Touch], None]]:
        def early(touch: Touch) -> None:
            for counter in counters:
                touch.arrive(counter, grid - 1)

        def move(touch: Touch) -> None:
            self._play(touch, name, grid, blocks)
            for counter in counters:
                touch.arrive(counter, 1)

        return [early, move] if counters else [move]

    def _play(self, touch: Touch, name: str, grid: int, blocks: Sequence[ctypes._CData]) -> None:
        loads = name.startswith("load")
        for call in self._calls(touch, "_layer_" in name, blocks):
            host, device = self._touched(touch, call)
            for address, nbytes in host if loads else device:
                touch.read(address, nbytes)
            for address, nbytes in device if loads else host:
                touch.write(address, nbytes)
        function = getattr(self._library, f"lanes_{name}")
        function(ctypes.c_uint32(grid), ctypes.c_uint32(self.block), Parameters(*blocks).pointers)

    # ---- what a launch touches

    def _calls(self, touch: Touch, layered: bool, blocks: Sequence[ctypes._CData]) -> Iterator[Call]:
        few = list(blocks[2 * len(self._programs)])  # type: ignore[call-overload]
        for pool, program in enumerate(self._programs):
            count, first, by_token, wide, host, device, memory, step, steps = IDS.unpack(blocks[2 * pool + 1])
            if count == 0:
                continue
            if first:
                pairs = zip(few[first - 1 :][:count], few[first - 1 + count :][:count], strict=True)
            elif not memory:
                pairs = zip(touch.numbers(host, count), touch.numbers(device, count), strict=True)
            else:
                size = program.sizes["page_size"]
                pages = touch.numbers(host, count // size)
                width = 8 if wide else 4
                ids = [touch.numbers(memory + n * step * width, 1, width)[0] for n in range(count)]
                hosts = [page * size + n for page in pages for n in range(size)]
                pairs = zip(hosts, [n & SKIPPED for n in ids], strict=True)
            moved = [pair for pair in pairs if pair[1] != SKIPPED]
            view = list(blocks[2 * pool])  # type: ignore[call-overload]
            if not layered:
                yield Call(pool, bool(by_token), view, moved, None)
                continue
            width = len(program.columns)
            for n in range(int(blocks[-3].value)):  # type: ignore[attr-defined]
                at = tuple(touch.numbers(steps + 4 * n * width, width))
                yield Call(pool, bool(by_token), view, moved, at)

    def _touched(self, touch: Touch, call: Call) -> tuple[Runs, Runs]:
        """Merged runs of bytes on the host (or in a slot of staging memory) and on the device."""
        table, host_base, pages, *strides = (value & (1 << 64) - 1 for value in call.view)
        sides = self._described(call, pages, tuple(strides))
        size = self._programs[call.pool].sizes["page_size"]
        addresses = {s.table: touch.numbers(table + 8 * s.table, 1, 8)[0] for s in sides if s.table >= 0}
        addresses[-1] = host_base
        found: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        for pair in call.ids:
            at = [divmod(i, size) if call.tokens else (i, 0) for i in pair]
            for side in sides:
                here = side.table >= 0
                found[here].extend(side.at(addresses[side.table], *at[here]))
        return merged(found[0]), merged(found[1])

    def _described(self, call: Call, pages: int, strides: tuple[int, ...]) -> Sequence[Side]:
        key = (call.pool, call.tokens, call.at, pages, strides)
        if key not in self._sides:
            self._sides[key] = list(self._describe(call, pages, strides))
        return self._sides[key]

    def _describe(self, call: Call, pages: int, strides: tuple[int, ...]) -> Iterator[Side]:
        program, free, first = self._programs[call.pool], iter(strides), 0
        layout, tokens = program.host(pages), call.tokens
        for number, part in enumerate(program.device):
            axes = [(n, e or 0, next(free) if s is None else s) for n, e, s in part.axes]
            entry, first = first, first + (1 if part.table is None else part.table)
            host = layout.part(part.ident)
            layer = None if call.at is None else call.at[number]
            if not program.present(part.ident) or layer == SKIPPED:
                continue
            if program.lists[part.ident] is None:
                layer = None  # all of it
            width = program.itemsize(part.ident)
            yield _side(-1, host.base, host.axes, width, tokens, layer)
            if part.table is None:
                yield _side(entry, 0, axes, width, tokens, layer)
                continue
            for each in range(part.table) if layer is None else [layer]:
                yield _side(entry + each, 0, axes, width, tokens, layer)


def _side(table: int, base: int, axes: Axes, width: int, tokens: bool, layer: int | None) -> Side:
    steps = {name: step for name, _, step in axes}
    fixed = {"page"} | ({"token"} if tokens else set()) | (set() if layer is None else {"layer"})
    first = base + (steps.get("layer", 0) * layer if layer is not None else 0)
    left = [(extent, step) for name, extent, step in axes if name not in fixed]
    return Side(table, _runs(first, left, width), steps["page"], steps.get("token", 0))


def _runs(first: int, axes: Sequence[tuple[int, int]], width: int) -> Runs:
    """All bytes of these axes as runs."""
    starts = [first]
    for extent, step in axes:
        starts = [start + i * step for start in starts for i in range(extent)]
    return merged([(start, width) for start in starts]) if math.prod(e for e, _ in axes) else ()


def merged(runs: Sequence[tuple[int, int]]) -> Runs:
    """Runs of bytes in order; neighbours become one."""
    if not runs:
        return ()
    ordered = sorted(set(runs))
    cuts = [i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if a[0] + a[1] != b[0]]
    groups = pairwise([0, *cuts, len(ordered)])
    return tuple((ordered[i][0], ordered[j - 1][0] + ordered[j - 1][1] - ordered[i][0]) for i, j in groups)
