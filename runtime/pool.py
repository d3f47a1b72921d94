"""The base of every generated pool: owns host memory, hands out slots, submits transfers.

A generated class adds what its spec decides: the constructor, the formulas, the staging buffers.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from poolwright.runtime import choice, env, indices
from poolwright.runtime import program as programs
from poolwright.runtime.backend import Backend
from poolwright.runtime.binding import Binding
from poolwright.runtime.checks import Checks, behind
from poolwright.runtime.choice import Availability, Work
from poolwright.runtime.description import HostLayout, PoolSpec, bind_sizes, dtype_named, size_of
from poolwright.runtime.driver import Memory, Stream
from poolwright.runtime.errors import OutOfMemoryBudget, PoolError, WrongProcess
from poolwright.runtime.indexing import host_view
from poolwright.runtime.memory import GUARD, HostBuffer, Units, available_host_bytes
from poolwright.runtime.pages import Pages
from poolwright.runtime.program import SizedProgram
from poolwright.runtime.slots import Slots
from poolwright.runtime.staging import Ring
from poolwright.runtime.ticket import Ticket
from poolwright.runtime.transfer import Transfers

PAGE_ALIGN = 256
GIB = 1 << 30


@dataclass(frozen=True)
class RequiredBytes:
    """What a pool will take: `pages`, host memory, staging memory on the device, one page."""

    pages: int
    host: int
    staging: int
    page: int


class HostPool(Pages):
    """Host memory for the pages of one kind of cache, and their transfers.

    Ids are index units (tokens, or slots): page p is ids ``p * page_size`` to ``(p + 1) * page_size - 1``.
    Every method may be called from any thread. Raises ValueError for wrong arguments with nothing done.
    """

    STAGING_BYTES: ClassVar[int] = 64 << 20
    STAGING_SLOTS: ClassVar[int] = 2

    can_use_write_back_jit: bool
    staging: Memory | None
    staging_pages: int

    def __init__(
        self,
        *,
        params: Mapping[str, object],
        dtypes: Mapping[str, torch.dtype],
        layers: Mapping[str, Iterable[int]],
        variants: Mapping[str, str],
        page_size: int,
        layout: str,
        form: str,
        capacity_pages: int | None,
        capacity_bytes: int | None,
        staging_bytes: int,
        capture_bytes: int | None,
        device: str | torch.device,
        require: str | None,
        hugepages: bool | None,
    ) -> None:
        _whole(self.spec, "staging_bytes", staging_bytes, 0)
        if capture_bytes is not None:
            _whole(self.spec, "capture_bytes", capture_bytes, 0)
        lists = {name: _layer_ids(self.spec, name, ids) for name, ids in layers.items()}
        self.layers = lists["layers"]
        self.layout, self.form, self.page_size = layout, form, page_size
        self.dtypes = dict(dtypes)
        self.device = torch.device("cpu") if torch.device(device).type == "cpu" else torch.device(device)
        self.program = self.sized(params, dtypes, lists, variants, page_size, layout, form)
        self.sizes = self.program.sizes
        self.page_num = _capacity(self.spec, self.program, capacity_pages, capacity_bytes)
        self.size = self.page_num * page_size
        self.page_bytes = self.host_layout(self.page_num).page_bytes
        # A write-back of rows that change is captured in staging: that is what capture_bytes bounds.
        in_place = self.spec.updates == "in_place"
        self.staging_bytes = staging_bytes if capture_bytes is None or not in_place else capture_bytes
        self._owner = os.getpid()
        self._bound: Binding | None = None
        self._limits: indices.Limits | None = None
        self._forced = env.text("PATH")
        if env.text("TWIN") == "lanes" and self._forced == "auto" and self.device.type == "cpu":
            self._forced = "zero_copy"  # the kernels, played lane by lane
        self._choices: dict[tuple[str, int, bool, bool, str], str] = {}
        self._destroyed = False
        self._backend = Backend(self.program, self.device, require)
        nbytes = self.host_layout(self.page_num).nbytes
        available = available_host_bytes()
        if nbytes > available:
            advice = f"lower capacity_pages (a page takes {self.page_bytes:,} bytes)"
            raise OutOfMemoryBudget(f"{self.spec.name}: host memory", nbytes, available, advice)
        self._buffer = HostBuffer(
            nbytes,
            hugepages=env.flag("HUGEPAGES") if hugepages is None else hugepages,
            numa_node=self._backend.numa_node(),
            registrar=self._backend.registrar(),
            units=[Units(span.start, span.nbytes, self.page_num) for span in self._spans],
            chunk_bytes=env.number("REGISTER_CHUNK_GB") * GIB,
        )
        self.kv_buffer = self._buffer.tensor
        address = self._buffer.device_address(0) if nbytes else 0
        self._slots = Slots(self.page_num, page_size, self.spec.name)
        self._transfers = Transfers(
            self._backend.engine(), self.program, address, self.kv_buffer, self.page_num
        )
        self._init_write_back_staging_buffers()
        self._transfers.use_ring(self._ring(), self._buffer.borders)
        guards = dict(self._buffer.guards)
        if self.staging is not None:
            guards["behind staging memory"] = behind(self.staging)
        self._checks = Checks(self._backend.driver, self.program, self.page_num, address, guards)
        # Held by the finalizer, both outlive a pool that is dropped with work in flight.
        self._end = weakref.finalize(self, _end, self._transfers, self._buffer, self._owner)

    # ---- sizes

    @classmethod
    def sized(
        cls,
        params: Mapping[str, object],
        dtypes: Mapping[str, torch.dtype],
        layers: Mapping[str, Iterable[int]],
        variants: Mapping[str, str],
        page_size: int,
        layout: str,
        form: str,
    ) -> SizedProgram:
        """The program of these sizes, before anything is built. Raises ValueError."""
        spec = cls.spec
        _whole(spec, "page_size", page_size, 1)
        _one_of(spec, "layout", layout, spec.layouts)
        _one_of(spec, "form", form, spec.forms)
        itemsizes = {}
        for group, allowed in spec.dtypes.items():
            known = [dtype_named(name) for name in allowed]
            if dtypes[group] not in known:
                raise ValueError(f"{spec.name}: {group} dtype: expected one of {known}, got {dtypes[group]}")
            itemsizes[group] = dtypes[group].itemsize
        counts = {name: len(_layer_ids(spec, name, ids)) for name, ids in layers.items()}
        try:
            sizes = bind_sizes(spec, params, itemsizes, counts, page_size, variants)
            made = SizedProgram(spec, programs.folder_of(cls), sizes, dict(variants), form, layout)
            made.host(1)
        except ZeroDivisionError:
            given = ", ".join(f"{name}={value}" for name, value in params.items())
            raise ValueError(f"{spec.name}: a size or alignment divides by zero with {given}") from None
        return made

    @classmethod
    def _required_bytes(
        cls,
        *,
        params: Mapping[str, object],
        dtypes: Mapping[str, torch.dtype],
        layers: Mapping[str, Iterable[int]],
        variants: Mapping[str, str],
        page_size: int,
        layout: str,
        form: str,
        capacity_pages: int | None,
        capacity_bytes: int | None,
        staging_bytes: int,
    ) -> RequiredBytes:
        program = cls.sized(params, dtypes, layers, variants, page_size, layout, form)
        pages = _capacity(cls.spec, program, capacity_pages, capacity_bytes)
        host = program.host(pages)
        slot = _slot_pages(program, pages, staging_bytes, cls.STAGING_SLOTS)
        staging = cls.STAGING_SLOTS * indices_align(program.host(slot).nbytes)
        return RequiredBytes(pages, host.nbytes, staging, host.page_bytes)

    def host_layout(self, pages: int) -> HostLayout:
        """Offsets and strides of a buffer of so many pages in this pool's layout."""
        return self.program.host(pages)

    @property
    def format_tag(self) -> str:
        """Names the bytes of a page: equal tags mean that pages of two pools are interchangeable."""
        spec, sizes = self.spec, self.sizes
        facts = [spec.name, f"page_size={self.page_size}", f"layers={sizes['layers']}", *spec.tag]
        for c in spec.components:
            dims = ",".join(f"{dim}={sizes[f'extent_{c.ident}_{dim}']}" for dim in c.dims)
            dtype = self.dtypes[c.group] if c.group else c.dtype
            align = "item" if c.align is None else size_of(c.align, sizes)
            facts.append(f"{c.name}({dims}):{dtype}:align={align}:{self._has(c.present)}")
        chosen = tuple(self.program.variants[name] for name in spec.variants)
        for record in spec.records:
            pad, inner = size_of(record.pad_to[chosen], sizes), ",".join(record.inner[chosen])
            facts.append(f"{record.name}({','.join(record.holds)}):{inner}:pad={pad}")
        facts += [f"{name}={value}" for name, value in sorted(self.program.variants.items())]
        facts.append("order=" + ",".join(spec.layouts[self.layout].order))
        return hashlib.sha256("|".join(facts).encode()).hexdigest()[:16]

    def _has(self, present: str | None) -> bool:
        return present is None or bool(self.sizes[present])

    # ---- slots

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Ids of free pages (int64, CPU), or None when the pool is full. `need_size` counts ids."""
        self._alive()
        return self._slots.alloc(need_size)

    def free(self, ids: torch.Tensor, after: Ticket | None = None) -> int:
        """Give whole pages back; returns how many ids. Later transfers of them run behind `after`."""
        self._alive()
        pages = self._slots.pages_of(ids)
        busy = self._transfers.in_flight(set(pages), after)
        if busy is not None:
            raise ValueError(
                f"{self.spec.name}: page {busy} is in flight; wait for its ticket, detach() it, "
                f"or pass after=ticket"
            )
        self._slots.free_pages(pages)
        return ids.numel()

    def available_size(self) -> int:
        """Free ids."""
        return self._slots.available_size()

    def clear(self) -> None:
        """Take every page back, after everything in flight. Bytes stay as they are."""
        self._alive()
        self._transfers.drain()
        self._slots.clear()

    # ---- device tensors

    def bind(self, tensors: Mapping[str, object], layer_ids: Iterable[int] | None = None) -> None:
        """Use these device tensors: by component a list with one tensor a layer, or one tensor.

        `layer_ids`: which layers the lists hold (default: the pool's). Raises ValueError naming the
        component and dimension, for a missing component and for a tensor that belongs to none.
        """
        self._alive()
        bound = self._backend.bind(self, tensors, self.layers if layer_ids is None else tuple(layer_ids))
        self._backend.compile(bound.align)
        self._transfers.bind(bound, self._backend.engine())
        self._bound = bound
        self._choices.clear()
        self._limits = indices.Limits(
            pool=self.spec.name,
            page_size=self.page_size,
            host_pages=self.page_num,
            device_pages=bound.pages,
            reserved=self.spec.reserved,
            tokens=self.program.tokens,
            device=self.device,
        )

    def rebind(self, tensors: Mapping[str, object], layer_ids: Iterable[int] | None = None) -> None:
        """`bind` anew, after everything in flight."""
        self._alive()
        self._transfers.drain()
        self.bind(tensors, layer_ids)

    # ---- transfers

    def write_back(
        self,
        host: torch.Tensor,
        device: torch.Tensor,
        unit: str = "token",
        *,
        producer: Stream = None,
        validate: str = "cheap",
        path: str | None = None,
        qos: str | None = None,
    ) -> Ticket:
        """Copy device pages to host pages (D2H). `producer`: the stream that filled the device rows."""
        self._check_qos(qos)
        ids = self._batch(host, device, unit, validate, True)
        taken = self._choose("write_back", ids, path, False)
        checks = self._checks if validate == "full" else None
        return self._transfers.submit("write_back", ids, taken, self._caller(producer), checks=checks)

    def load(
        self,
        host: torch.Tensor,
        device: torch.Tensor,
        unit: str = "token",
        *,
        order: str = "bulk",
        layers: Iterable[int] | None = None,
        readers: Stream = None,
        validate: str = "cheap",
        path: str | None = None,
        qos: str | None = None,
    ) -> Ticket:
        """Copy host pages to device pages (H2D). `order` ``layer``: first layers first, each told on its own.

        `layers`: only these layer ids. `readers`: the stream that still reads the device rows.
        """
        if order not in ("bulk", "layer"):
            raise ValueError(f"{self.spec.name}: order: expected layer or bulk, got {order!r}")
        ordered = order == "layer" and self.program.has_layers
        positions = self._positions(layers) if ordered or layers is not None else None
        named = [] if positions is None else [self.layers[position] for position in positions]
        self._check_qos(qos)
        ids = self._batch(host, device, unit, validate, False)
        taken = self._choose("load", ids, path, positions is not None)
        checks = self._checks if validate == "full" else None
        return self._transfers.submit("load", ids, taken, self._caller(readers), positions, named, checks)

    def path_report(self) -> tuple[Availability, ...]:
        """Every path: whether it can run here; when not, why, and the command that mends it."""
        return self._backend.report()

    def overwritten_guard(self) -> str:
        """Which of the guard bytes round this pool's memory were written to, in words; empty for none."""
        self._alive()
        return self._checks.overwritten()

    def destroy(self) -> None:
        """Give everything back, after everything in flight. Again: nothing happens.

        Raises PoolError when something in flight failed; everything is given back all the same.
        """
        if self._destroyed:
            return
        self._destroyed = True
        self._bound, self.staging = None, None
        self._checks.release()
        del self.kv_buffer, self._transfers  # both hold host memory
        self._end()

    # ---- names that engines know

    def can_use_write_back_jit_kernel(self, element_size: int | None = None) -> bool:
        """Whether the staged path can run: kernels are compiled; any element size is taken."""
        return any(p.available for p in self.path_report() if p.path == "staged")

    def backup_from_device_all_layer(
        self, device_pool: object, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        """`write_back` of token ids; later work of this pool is ordered behind it."""
        self.write_back(host_indices, device_indices, path=self._engine_path(io_backend)).detach()

    def load_to_device_per_layer(
        self,
        device_pool: object,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
    ) -> None:
        """`load` of one layer's token ids; the caller's stream waits for it."""
        path = self._engine_path(io_backend)
        path = None if path == "staged" else path  # one layer of a page is no range of the copy engine
        ticket = self.load(host_indices, device_indices, layers=[layer_id], path=path)
        stream = self._caller(None)
        if stream is not None:
            ticket.wait(stream)
        ticket.detach()

    def _engine_path(self, io_backend: str) -> str | None:
        known = {"kernel": None, "direct": "staged" if self.staging is not None else None}
        if io_backend not in known:
            raise ValueError(f"{self.spec.name}: io_backend: expected kernel or direct, got {io_backend!r}")
        return known[io_backend]

    # ---- pieces

    def _init_write_back_staging_buffers(self) -> None:
        raise PoolError(f"{type(self).__name__} has no generated staging buffers; run `codegen build`")

    def _staging_capacity(self) -> int:
        """Pages of one staging slot."""
        return _slot_pages(self.program, self.page_num, self.staging_bytes, self.STAGING_SLOTS)

    def _allocate_staging(self, slot_bytes: int) -> Memory:
        nbytes = self.STAGING_SLOTS * indices_align(slot_bytes)
        memory = self._backend.driver.allocate(nbytes + GUARD)
        return Memory(memory.address, nbytes, memory.tensor[:nbytes])

    def _view(self, memory: Memory, layout: HostLayout, ident: str) -> torch.Tensor | None:
        """The first slot of a staging buffer, seen as one component's axes, then its item's bytes; None
        for a component that is not there."""
        if not self.program.present(ident):
            return None
        return host_view(memory.tensor, layout, ident, self.program.itemsize(ident))

    def _ring(self) -> Ring | None:
        if self.staging is None:
            return None
        slot = indices_align(self.host_layout(self.staging_pages).nbytes)
        return Ring(self.staging, self.STAGING_SLOTS, self.staging_pages, slot, [None] * self.STAGING_SLOTS)

    def _settle(self, pages: set[int], reads: bool) -> None:
        self._transfers.settle(pages, reads)

    def _alive(self) -> None:
        if self._destroyed:
            raise PoolError(f"{self.spec.name}: the pool is destroyed; build a new one")
        if os.getpid() != self._owner:
            raise WrongProcess(f"pool {self.spec.name}", self._owner, os.getpid())

    def _batch(
        self, host: torch.Tensor, device: torch.Tensor, unit: str, validate: str, writes_host: bool
    ) -> indices.Batch:
        self._alive()
        if self._limits is None:
            raise PoolError(f"{self.spec.name}: no device tensors; call bind() before a transfer")
        return indices.batch(self._limits, host, device, unit, validate, writes_host)

    def _choose(self, direction: str, batch: indices.Batch, path: str | None, layered: bool) -> str:
        forced = self._forced if path is None else path
        pages_known = batch.on_device is None or batch.bad is None  # else the device skips wrong ones
        whole = not layered and pages_known and (batch.unit == "pages" or batch.on_device is not None)
        key = (direction, len(batch.host_pages), layered, whole, forced)
        taken = self._choices.get(key)
        if taken is None:
            taken = self._choices[key] = self._decide(*key)
        return taken

    def _decide(self, direction: str, pages: int, layered: bool, whole: bool, forced: str) -> str:
        ranges = pages * max(1, self._backend.range_count)
        total = pages * self.page_bytes
        work = Work(
            direction=direction,
            range_bytes=total // max(1, ranges),
            ranges=ranges,
            total=total,
            layered=layered,
            in_place=self.spec.updates == "in_place",
            whole_pages=whole,
        )
        try:
            return choice.choose(work, self.path_report(), forced)
        except ValueError as error:
            raise ValueError(f"{self.spec.name}: {error}") from None

    def _positions(self, layers: Iterable[int] | None) -> Sequence[int]:
        if layers is None:
            return range(len(self.layers))
        if not self.program.has_layers:
            raise ValueError(f"{self.spec.name}: no component has layers here; load without layers=")
        positions = []
        for layer in layers:
            if layer not in self.layers:
                raise ValueError(f"{self.spec.name}: layer {layer} is not one of {list(self.layers)}")
            if self.layers.index(layer) in positions:
                raise ValueError(f"{self.spec.name}: layer {layer} stands twice in one list")
            positions.append(self.layers.index(layer))
        return positions

    def _check_qos(self, qos: str | None) -> None:
        if qos not in (None, "background", "urgent"):
            raise ValueError(f"{self.spec.name}: qos: expected background or urgent, got {qos!r}")

    def _caller(self, stream: Stream) -> Stream:
        return self._backend.driver.current_stream() if stream is None else stream


def _end(transfers: Transfers, buffer: HostBuffer, owner: int) -> None:
    """What is left to do when a pool goes, destroyed or dropped."""
    if os.getpid() != owner:
        return  # in a fork the device is the parent's
    try:
        transfers.drain()
    finally:
        buffer.destroy()


def indices_align(nbytes: int) -> int:
    """Slots of staging memory start at multiples of this."""
    return -(-nbytes // PAGE_ALIGN) * PAGE_ALIGN


def _slot_pages(program: SizedProgram, pages: int, staging_bytes: int, slots: int) -> int:
    """Pages of one slot: all slots together stay within the bound, but one page always fits."""
    page = max(program.host(1).nbytes, 1)
    return max(1, min(pages, staging_bytes // slots // page))


def _layer_ids(spec: PoolSpec, name: str, ids: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(ids, Iterable):
        raise ValueError(f"{spec.name}: {name}: expected layer ids such as range(3), got {ids!r}")
    found = tuple(ids)
    if len(set(found)) != len(found):
        raise ValueError(f"{spec.name}: {name}: layer ids must differ, got {list(found)}")
    if any(type(layer) is not int or layer < 0 for layer in found):
        raise ValueError(f"{spec.name}: {name}: expected layer ids from 0, got {list(found)}")
    return found


def _whole(spec: PoolSpec, name: str, value: object, least: int) -> int:
    """The value, which has to be an integer of at least `least`. Raises ValueError."""
    if type(value) is not int or value < least:
        raise ValueError(f"{spec.name}: {name}: expected an integer of at least {least}, got {value!r}")
    return value


def _one_of(spec: PoolSpec, what: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"{spec.name}: {what}: expected one of {', '.join(known)}, got {value!r}")


def _capacity(spec: PoolSpec, program: SizedProgram, pages: int | None, nbytes: int | None) -> int:
    """Pages of the pool from either way of giving its capacity."""
    if (pages is None) == (nbytes is None):
        raise ValueError(f"{spec.name}: give either capacity_pages or capacity_bytes")
    if pages is not None:
        return _whole(spec, "capacity_pages", pages, 1)
    assert nbytes is not None
    _whole(spec, "capacity_bytes", nbytes, 0)
    page = program.host(1).page_bytes
    if page == 0:
        raise ValueError(f"{spec.name}: a page of these sizes has no bytes; give capacity_pages")
    found = nbytes // page
    while found > 0 and program.host(found).nbytes > nbytes:
        found -= 1
    if found < 1:
        raise OutOfMemoryBudget(
            f"{spec.name}: one page", page, nbytes, "raise capacity_bytes or make pages smaller"
        )
    return found
