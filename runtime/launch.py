"""Launches kernels: ids and steps of one or more pools become parameters, parameters a launch.

The blocks of parameters are made once and filled for each launch (the device takes a copy of them), and
few ids travel inside them: submission is a matter of microseconds.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from poolwright.runtime.driver import Driver, Event, Kernels, Launch, Parameters, Stream
from poolwright.runtime.errors import PoolError
from poolwright.runtime.indices import Batch, Listed
from poolwright.runtime.moves import Member, Place, Steps

FEW = 256
"""Numbers of page ids that travel in the parameters of a launch, all pools together (`Few` in prim.h)."""

CUTS_KEPT = 512

_IDS = struct.Struct("IIIIQQQqQ")
"""`Ids` in prim.h."""

_STEPS, _STEPS_AT = struct.Struct("Q"), _IDS.size - 8
"""Its last field, and where it is."""


Part = tuple[int, Place, Batch, Steps | None]
"""What a launch moves of one pool: its number, where its host pages lie, ids, in layer order as steps say."""


class Cut(NamedTuple):
    """A load in layer order as its launches cut it: `first` steps (0: none) by `grid_first` blocks, then
    `left` steps by `grid`, `each` of them at a time.

    The first steps are told by an event, the next `counted` when their counters have gone `arrivals` further,
    the others with all of it. `counting`: how many counters go on, from number `first`.
    """

    first: int
    grid_first: int
    left: int
    each: int
    grid: int
    counted: int
    counting: int
    arrivals: int


class _Block:
    """Parameters of one pool. `sizes`, `layered`: by unit, how many ids one launch can count, and bytes of an
    id. `inside`: ids in the parameters, as `ids` says where they are now."""

    def __init__(self, member: Member, align: int) -> None:
        table = 0 if member.table is None else member.table.address
        strides = () if member.binding is None else member.binding.strides
        count = sum(step is None for part in member.program.device for _, _, step in part.axes)
        self.columns = len(member.program.columns)
        self.page_size = member.program.sizes["page_size"]
        self.view = (ctypes.c_int64 * (3 + count))(_signed(table), 0, 0, *strides)
        self.ids = (ctypes.c_uint8 * _IDS.size)()
        self.place: Place | None = None  # the one in `view`
        self.inside: tuple[int, int, int] | None = None
        program = member.program
        self.sizes, self.layered = (
            {
                u: (program.ids_per_launch(u, way, align), program.bytes_per_id(u, way))
                for u in ("pages", "tokens")
            }
            for way in (False, True)
        )

    def clear(self) -> None:
        """No ids: the pool does not move."""
        ctypes.memset(self.ids, 0, _IDS.size)
        self.inside = None


class Launcher:
    """Launches kernels of bound members. Not thread safe: its owner holds a lock."""

    def __init__(self, driver: Driver, kernels: Kernels, members: Sequence[Member], align: int) -> None:
        self._driver, self._kernels = driver, kernels
        self._blocks = [_Block(member, align) for member in members]
        inside = [
            block
            for member, block in zip(members, self._blocks, strict=True)
            if member.program.device  # else the kernels know nothing of it
        ]
        self._few = (ctypes.c_uint32 * FEW)()
        self._numbers = memoryview(self._few).cast("B").cast("I")  # takes an array as one copy of its bytes
        self._steps, self._window, self._done = ctypes.c_uint32(), ctypes.c_uint32(), ctypes.c_uint64()
        blocks = [each for block in inside for each in (block.view, block.ids)]
        self._bulk = Parameters(*blocks, self._few)
        self._layered = Parameters(*blocks, self._few, self._steps, self._window, self._done)
        self._ready: dict[tuple[str, bool, str], Launch] = {}
        self._cuts: dict[tuple[int, int], Cut] = {}
        self._used: list[int] = []

    def launch(
        self,
        direction: str,
        purpose: str,
        parts: Sequence[Part],
        stream: Stream,
        keep: list[object],
        told: bool = False,
        behind: tuple[Stream, Event | None, str] | None = None,
    ) -> Event:
        """Move all ids of all parts at once. Returns the event behind it if it is to be `told`, else None.

        `keep` takes what must stay alive until the launch has run, also when it fails. `behind`: it begins a
        submission, as `Driver.enter` says, and is told; all ids have to be `inside` then, at most `FEW`.
        """
        ready, grid = self.ready(direction, purpose, parts, stream, keep)
        if behind is not None:
            other, before, what = behind
            return self._driver.launch_behind(ready, stream, grid, other, before, what)
        if told:
            return self._driver.launch(ready, stream, grid)
        ready(stream, grid)
        return None

    def ready(
        self, direction: str, purpose: str, parts: Sequence[Part], stream: Stream, keep: list[object]
    ) -> tuple[Launch, int]:
        """What `launch` launches, and its blocks; before anything else is made ready. `keep` as above."""
        unit, nbytes = self._fill(parts, stream, keep)
        found = self._ready.get((direction, False, unit)) or self._prepare(direction, False, unit)
        return found, self._kernels.grid(purpose, nbytes)

    def ready_steps(
        self, direction: str, purpose: str, part: Part, stream: Stream, keep: list[object]
    ) -> tuple[Launch, int]:
        """As `ready`, for what the steps of a part say of its pages, all at once."""
        assert part[3] is not None
        steps = len(part[3].numbers) // self._blocks[part[0]].columns
        unit, step_bytes = self._fill([part], stream, keep, steps)
        self._steps.value, self._window.value, self._done.value = steps, steps, 0
        found = self._ready.get((direction, True, unit)) or self._prepare(direction, True, unit)
        return found, self._kernels.grid(purpose, steps * step_bytes)

    def load_layers(
        self, parts: Sequence[Part], stream: Stream, keep: list[object], steps: int, counters: int, told: bool
    ) -> tuple[Cut, Event, Event]:
        """Load all ids of all parts in so many steps in layer order, counted from address `counters` on.

        Counters are as good as events, but a stream sees them later: the first steps are a launch of their
        own with an event, and the last ones are told by whatever event follows all of it. `keep` as above.
        Returns the cut, the event after its first steps, and that after all of it if it is to be `told`.
        """
        unit, step_bytes = self._fill(parts, stream, keep)
        launch = self._ready.get(("load", True, unit)) or self._prepare("load", True, unit)
        cut = self._cuts.get((step_bytes, steps)) or self._cut(step_bytes, steps)
        event: Event = None
        if cut.first:
            self._steps.value, self._window.value, self._done.value = cut.first, cut.first, 0
            event = self._driver.launch(launch, stream, cut.grid_first)
            self._go_on(parts, cut.first)
        self._steps.value, self._window.value = cut.left, cut.each
        self._done.value = counters + 4 * cut.first if cut.counted else 0
        end: Event = None
        if told:
            end = self._driver.launch(launch, stream, cut.grid)
        else:
            launch(stream, cut.grid)
        return cut, event, end

    def _cut(self, step_bytes: int, steps: int) -> Cut:
        """How a load of so many steps, of so many bytes each, is cut."""
        first, each = self._kernels.windows(step_bytes, steps)
        left = steps - first
        grids = [self._kernels.grid("load_layers", some * step_bytes) for some in (first, left)]
        counted = (left - 1) // each * each  # all but the last window
        counting, arrivals = left if counted else 0, grids[1] * self._kernels.arrivals
        if len(self._cuts) >= CUTS_KEPT:
            self._cuts.clear()
        cut = Cut(first, grids[0], left, each, grids[1], counted, counting, arrivals)
        self._cuts[step_bytes, steps] = cut
        return cut

    def _fill(
        self, parts: Sequence[Part], stream: Stream, keep: list[object], steps: int = 1
    ) -> tuple[str, int]:
        """Fill in the blocks of parameters; the unit of the kernel that takes them, and bytes (of a step).

        `steps`: how many a lane counts at once.
        """
        layered = parts[0][3] is not None
        if len(self._blocks) > 1:
            self._clear_others(parts)
        few, unit, nbytes = 0, "pages", 0
        for number, place, batch, order in parts:
            block, count = self._blocks[number], batch.count
            here = 0 if order is None else self._steps_of(order, stream, keep)
            end = few + 2 * count
            if end <= FEW and batch.inside:
                self._numbers[few:end] = batch.ids
                inside = (count, few, here)
                if block.inside != inside:
                    _IDS.pack_into(block.ids, 0, count, few + 1, 0, 0, 0, 0, 0, 0, here)
                    block.inside = inside
                few = end
            else:
                count = self._listed(block, batch, here, stream, keep)
                unit = "tokens" if batch.unit == "tokens" else unit
            most, each = (block.layered if layered else block.sizes)[batch.unit]
            if count * steps > most:
                raise PoolError(
                    f"{count} {batch.unit} are more than one launch can count; move fewer at once"
                )
            nbytes += count * each
            if block.place is not place:
                block.view[1], block.view[2] = block.place = place
        return unit, nbytes

    def _go_on(self, parts: Sequence[Part], first: int) -> None:
        """The next launch begins with step `first`."""
        for number, _, _, order in parts:
            assert order is not None and order.memory is not None
            block = self._blocks[number]
            block.inside = None
            _STEPS.pack_into(block.ids, _STEPS_AT, order.memory.address + 4 * first * block.columns)

    def _clear_others(self, parts: Sequence[Part]) -> None:
        """What the last launch moved and this one does not."""
        used = [part[0] for part in parts]
        if used != self._used:
            for number in self._used:
                self._blocks[number].clear()
            self._used = used

    def _prepare(self, direction: str, layered: bool, unit: str) -> Launch:
        name = f"{direction}_layer_{unit}" if layered else f"{direction}_{unit}"
        made = self._kernels.prepare(name, self._layered if layered else self._bulk)
        self._ready[direction, layered, unit] = made
        return made

    def _listed(self, block: _Block, batch: Batch, steps: int, stream: Stream, keep: list[object]) -> int:
        """Fill in ids that lie in device memory; how many there are."""
        count, on_device, block.inside = batch.count, batch.on_device, None
        listed, first, second = batch.listed or (Listed(batch.ids), 0, count)
        if listed.memory is None:
            listed.memory = self._driver.allocate(4 * max(len(listed.numbers), 1))
            keep.append(listed.memory)
            self._driver.upload(listed.memory.address, listed.numbers, stream)
        first, second = (listed.memory.address + 4 * at for at in (first, second))
        if batch.unit == "pages":
            second = second if on_device is None else on_device.data_ptr()
            _IDS.pack_into(block.ids, 0, count, 0, 0, 0, first, second, 0, 0, steps)
            return count
        address, step, wide = 0, 0, False
        if on_device is not None:
            count *= block.page_size
            address, step, wide = on_device.data_ptr(), on_device.stride(0), on_device.dtype == torch.int64
        _IDS.pack_into(block.ids, 0, count, 0, 1, wide, first, second, address, step, steps)
        return count

    def _steps_of(self, steps: Steps, stream: Stream, keep: list[object]) -> int:
        """Where the device has the numbers. They are written once, in the stream of every later load."""
        keep.append(steps)
        if steps.memory is None:
            memory = self._driver.allocate(4 * max(len(steps.numbers), 1))
            self._driver.upload(memory.address, steps.numbers, stream)
            steps.memory = memory
        return steps.memory.address


def _signed(value: int) -> int:
    """An address as a 64-bit signed number."""
    return value - (1 << 64) if value >= 1 << 63 else value
