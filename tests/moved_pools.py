"""Random pools with memory: device tensors laid out, transfers run, and what they must have done computed.

Host and device are one arena of random bytes each. What a transfer does not own in an arena - other pages,
padding, space between tensors, guards - must stay as it was, so whole arenas are compared.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import oracle
import torch
from compiled_pools import Compiled
from random_pools import Chance, Sample, replace_axes

GUARD = 64
ABSENT = 0xFFFFFFFF
IDS = struct.Struct("IIIIQQQqQ")
GRID, BLOCK = 2, 3


# ---- device tensors ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Devices:
    """All device tensors in one arena: by part the places of its bytes, and where its tensors start."""

    nbytes: int
    offsets: Mapping[str, torch.Tensor]
    starts: Mapping[str, tuple[int, ...]]


def place_devices(sample: Sample, pages: int, align: int, chance: Chance) -> Devices:
    """Tensors of so many pages; addresses and strides known only at bind are multiples of `align`."""
    form, end = sample.form, GUARD
    inside = [replace_axes(part, form.tensors) for part in sample.placed(pages)]
    found: dict[str, list[torch.Tensor]] = {part.name: [] for part in inside}
    starts: dict[str, list[int]] = {part.name: [] for part in inside}
    for group in [[part] for part in inside] if "component" in form.tensors else [inside]:
        extra = chance.integer(0, 2)
        padding = {axis: oracle.Padding(align, align * extra) for axis in dynamic_axes(sample, group)}
        for _ in range(_tensors(sample, group[0].name)):
            placed = oracle.place(group, form.order, sample.splits, padding)
            for part in group:
                found[part.name].append(placed.offsets[part.name] + end)
                starts[part.name].append(end)
            end += -(-placed.nbytes // align) * align + align * chance.integer(0, 2)
    offsets = {}
    for part in sample.parts:
        tensors = found[part.name]
        tabled = "layer" in form.tensors and "layer" in part.axes
        offsets[part.name] = torch.stack(tensors, list(part.axes).index("layer")) if tabled else tensors[0]
    return Devices(end + GUARD, offsets, {name: tuple(at) for name, at in starts.items()})


def dynamic_axes(sample: Sample, parts: Sequence[oracle.Part]) -> set[str]:
    """Axes whose stride only a tensor can tell: left of `page`, or at or left of a stride declared free."""
    found: set[str] = set()
    for part in parts:
        axes = [axis for axis in oracle.words(sample.form.order, part, sample.splits) if axis != "component"]
        free = [i for i, axis in enumerate(axes) if axis in sample.form.any_stride]
        found |= set(axes[: max([axes.index("page"), *(i + 1 for i in free)])])
    return found


def _tensors(sample: Sample, name: str) -> int:
    """How many tensors hold a part: one for each layer, or one."""
    part = next(part for part in sample.parts if part.name == name)
    return part.axes["layer"] if "layer" in sample.form.tensors and "layer" in part.axes else 1


def step(offsets: torch.Tensor, axis: int) -> int | None:
    """Bytes from one index of an axis to the next; None when there is no next one."""
    if offsets.numel() == 0 or offsets.shape[axis] < 2:
        return None
    first = [0] * offsets.dim()
    second = [int(at == axis) for at in range(offsets.dim())]
    return int(offsets[tuple(second)] - offsets[tuple(first)])


# ---- transfers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """Ids of one transfer. `unit`: what they address; `layers`: positions, None for all."""

    unit: str
    load: bool
    host: tuple[int, ...]
    device: tuple[int, ...]
    layers: tuple[int, ...] | None


class Arena:
    """Host and device memory of one compiled pool, and its argument block."""

    def __init__(self, compiled: Compiled, pages: tuple[int, int], align: int, chance: Chance) -> None:
        self.sample = sample = compiled.built.sample
        self.compiled, self.pages, self.chance = compiled, pages, chance
        placed = oracle.place(sample.placed(pages[0]), sample.layout.order, sample.splits)
        self.host_offsets = {name: at + GUARD for name, at in placed.offsets.items()}
        self.devices = place_devices(sample, pages[1], align, chance)
        seed = torch.Generator().manual_seed(chance.integer(0, 1 << 30))
        self.host = _random_bytes(placed.nbytes + 2 * GUARD, seed)
        self.device = _random_bytes(self.devices.nbytes, seed)

    def describe(self, parts: Sequence[Any], align: int) -> None:
        """Take the addresses and strides that a bind would take. `parts`: device parts of the pool."""
        addresses: list[int] = []
        strides: list[int] = []
        for part in parts:
            addresses += [self.device.data_ptr() + at for at in self._first_bytes(part)]
            offsets = self.devices.offsets[part.ident]
            axes = list(self._axes(part.ident))
            for axis, _, packed in part.axes:
                if packed is None:
                    found = step(offsets, axes.index(axis)) if self._is_there(part.ident) else None
                    strides.append(3 * align if found is None else found)
        self.table = (ctypes.c_uint64 * len(addresses))(*addresses)
        host = self.host.data_ptr() + GUARD
        self.view = (ctypes.c_int64 * (3 + len(strides)))(
            ctypes.addressof(self.table), host, self.pages[0], *strides
        )

    def _axes(self, ident: str) -> Mapping[str, int]:
        return next(part.axes for part in self.sample.parts if part.name == ident)

    def _is_there(self, ident: str) -> bool:
        part = next(part for part in self.sample.parts if part.name == ident)
        return part.present and self.devices.offsets[ident].numel() > 0

    def _first_bytes(self, part: Any) -> list[int]:
        """What the table says: where the component starts in each tensor."""
        starts = self.devices.starts[part.ident]
        if not self._is_there(part.ident):
            return list(starts)
        offsets = self.devices.offsets[part.ident]
        if "layer" in self.sample.form.tensors and "layer" in self._axes(part.ident):
            layer = list(self._axes(part.ident)).index("layer")
            first = [int(one.flatten()[0]) for one in offsets.unbind(layer)]
        else:
            first = [int(offsets.flatten()[0])]
        return first

    def transfers(self, tokens: bool, layered: bool) -> Iterator[Transfer]:
        """Both directions, whole pages and tokens, all layers and some."""
        chance, size = self.chance, self.sample.values["page_size"]
        layers = self.sample.values["layers"]
        for unit, rows in [("pages", 1)] + ([("tokens", size)] if tokens else []):
            for load in (False, True):
                for some in (None, chance.shuffled(range(layers))[: chance.integer(1, layers)]):
                    if some is not None and not layered:
                        continue
                    here = chance.shuffled(range(self.pages[0] * rows))
                    there = chance.shuffled(range(self.pages[1] * rows))
                    count = chance.integer(1, min(len(here), len(there)))
                    chosen = None if some is None else tuple(some)
                    yield Transfer(unit, load, tuple(here[:count]), tuple(there[:count]), chosen)

    def expected(self, transfer: Transfer) -> tuple[torch.Tensor, torch.Tensor]:
        """Both arenas as they must be afterwards."""
        host, device = self.host.clone(), self.device.clone()
        for part in self.sample.parts:
            if not part.present:
                continue
            here = self._rows(self.host_offsets[part.name], part, transfer.host, transfer)
            there = self._rows(self.devices.offsets[part.name], part, transfer.device, transfer)
            if transfer.load:
                device[there] = self.host[here]
            else:
                host[here] = self.device[there]
        return host, device

    def _rows(
        self, offsets: torch.Tensor, part: oracle.Part, ids: Sequence[int], transfer: Transfer
    ) -> torch.Tensor:
        axes = list(part.axes)
        if transfer.layers is not None:
            if "layer" in axes:
                offsets = offsets.index_select(axes.index("layer"), torch.tensor(transfer.layers))
            elif 0 not in transfer.layers:  # a part without layers moves with the first one
                return torch.empty(0, dtype=torch.int64)
        if transfer.unit == "tokens":
            offsets = offsets.flatten(0, 1)
        return offsets[torch.tensor(ids)].flatten()

    def _steps(self, transfer: Transfer) -> list[int] | None:
        """The numbers of every step: see `columns` in kernels.cu."""
        columns = ["layer" in part.axes for part in self.sample.parts]
        if transfer.layers is None:
            return None
        rest = [0 if layer == 0 else ABSENT for layer in transfer.layers]
        rows = zip(transfer.layers, rest, strict=True)
        return [number if column else other for number, other in rows for column in columns]

    def atoms(self, transfer: Transfer) -> None:
        """Run the CPU twin that moves whole runs."""
        count, steps = len(transfer.host), self._steps(transfer)
        self.compiled.call(
            f"atoms_{transfer.unit}",
            ctypes.byref(self.view),
            (ctypes.c_int64 * count)(*transfer.host),
            (ctypes.c_int64 * count)(*transfer.device),
            ctypes.c_uint64(count),
            ctypes.c_uint32(transfer.load),
            None if steps is None else (ctypes.c_uint32 * len(steps))(*steps),
            ctypes.c_uint64(len(transfer.layers or ())),
            ctypes.c_uint32(1),
        )

    def lanes(self, transfer: Transfer) -> None:
        """Run the kernel itself, lane by lane. Write-backs by layer exist where rows change in place."""
        self._launch(transfer, transfer.unit, transfer.host, transfer.device, len(transfer.host))

    def lanes_in_place(self, transfer: Transfer) -> None:
        """Run the kernel for tokens with whole host pages and device token ids that it reads in place."""
        size, step = self.sample.values["page_size"], self.chance.integer(1, 3)
        tokens = [page * size + i for page in transfer.device for i in range(size)]
        wide = self.chance.percent(50)
        memory = ((ctypes.c_int64 if wide else ctypes.c_int32) * (len(tokens) * step))()
        memory[::step] = tokens
        place = (ctypes.addressof(memory), step, int(wide))
        self._launch(transfer, "tokens", transfer.host, (), len(tokens), place)

    def _launch(
        self,
        transfer: Transfer,
        unit: str,
        host: Sequence[int],
        device: Sequence[int],
        count: int,
        memory: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        here, there = (ctypes.c_uint32 * len(host))(*host), (ctypes.c_uint32 * len(device))(*device)
        steps = self._steps(transfer) or []
        numbers = (ctypes.c_uint32 * len(steps))(*steps)
        address, step, wide = memory
        fields = (count, 0, unit == "tokens", wide, ctypes.addressof(here), ctypes.addressof(there))
        ids = ctypes.create_string_buffer(IDS.pack(*fields, address, step, ctypes.addressof(numbers)))
        few = (ctypes.c_uint32 * 256)()
        params = [ctypes.addressof(self.view), ctypes.addressof(ids), ctypes.addressof(few)]
        layers = transfer.layers or ()
        done, number = (ctypes.c_uint32 * len(layers))(), ctypes.c_uint32(len(layers))
        where = ctypes.c_uint64(ctypes.addressof(done))
        window = ctypes.c_uint32(self.chance.integer(1, len(layers) + 1))  # steps that move together
        if layers:
            params += [ctypes.addressof(number), ctypes.addressof(window), ctypes.addressof(where)]
        block = (ctypes.c_void_p * len(params))(*params)
        name = "_".join(
            ["lanes", "load" if transfer.load else "write_back", *(["layer"] if layers else []), unit]
        )
        self.compiled.call(name, ctypes.c_uint32(GRID), ctypes.c_uint32(BLOCK), block)
        assert list(done) == [GRID] * len(layers)


def _random_bytes(count: int, seed: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=seed)


def differences(got: torch.Tensor, expected: torch.Tensor) -> str:
    """Where two arenas differ, in words; empty when they do not."""
    at = torch.nonzero(got != expected).flatten()
    first = ", ".join(str(int(i) - GUARD) for i in at[:8])
    return f"{at.numel()} of {math.prod(got.shape)} bytes differ, first at {first}" if at.numel() else ""
