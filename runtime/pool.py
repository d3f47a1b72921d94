"""The base of every generated pool: owns host memory, hands out slots, submits transfers.

A generated class adds what its spec decides: the constructor, the formulas, the staging buffers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from poolwright.runtime import arguments, choice, env, indices
from poolwright.runtime import program as programs
from poolwright.runtime.backend import Code
from poolwright.runtime.binding import Binding, bind, check_between
from poolwright.runtime.checks import Checks, behind
from poolwright.runtime.costs import Work, predict
from poolwright.runtime.description import HostLayout, PoolSpec, bind_sizes, dtype_named, size_of
from poolwright.runtime.driver import Memory, Stream
from poolwright.runtime.errors import OutOfMemoryBudget, PoolError
from poolwright.runtime.indexing import host_view
from poolwright.runtime.memory import GUARD, HostBuffer, Units, check_available
from poolwright.runtime.moves import Member, Move, Ring
from poolwright.runtime.opaque import opaque
from poolwright.runtime.pages import Pages
from poolwright.runtime.parts import SLOTS, Slot, slot_of, slots_of, units
from poolwright.runtime.program import SizedProgram
from poolwright.runtime.registration import Registration
from poolwright.runtime.shared import Shared, being_built, place
from poolwright.runtime.slots import Slots
from poolwright.runtime.ticket import Ticket
from poolwright.runtime.transfer import together

GIB = 1 << 30
CHOICES_KEPT = 4096
"""Sizes of transfers whose path is remembered."""


@dataclass(frozen=True)
class RequiredBytes:
    """What a pool will take: `pages`, host memory, staging memory on the device, one page.

    `program`: the pool with these sizes filled in.
    """

    pages: int
    host: int
    staging: int
    page: int
    program: SizedProgram = field(repr=False)


class HostPool(Pages):
    """Host memory for the pages of one kind of cache, and their transfers.

    Ids are index units (tokens, or slots): page p is ids ``p * page_size`` to ``(p + 1) * page_size - 1``.
    Every method may be called from any thread. Raises ValueError for wrong arguments with nothing done.
    """

    STAGING_BYTES: ClassVar[int] = 256 << 20

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
        register: str,
    ) -> None:
        self.device = place(self.spec.name, device, hugepages, register)
        self.lists = {name: _layer_ids(self.spec, name, ids) for name, ids in layers.items()}
        self.layout, self.form = layout, form
        self.dtypes = dict(dtypes)
        self.program = self.sized(params, dtypes, self.lists, variants, page_size, layout, form)
        self.sizes = self.program.sizes
        self.page_size = self.sizes["page_size"]
        self.layers = _layers_of(self.program, self.lists)
        self.page_num = _capacity(self.spec, self.program, capacity_pages, capacity_bytes)
        self.size = self.page_num * self.page_size
        self.page_bytes = self.host_layout(self.page_num).page_bytes
        self._staging_bound = _staging_bound(self.spec, staging_bytes, capture_bytes)
        self._followers: tuple[HostPool, ...] = ()  # pools of a group that take this one's ids
        self._source: str | None = None  # the pool whose ids this one takes
        self._bound: Binding | None = None
        self._limits: indices.Limits | None = None
        self._forced = env.text("PATH")
        if env.text("TWIN") == "lanes" and self._forced == "auto" and self.device.type == "cpu":
            self._forced = "zero_copy"  # the kernels, played lane by lane
        self._choices: dict[tuple[object, ...], tuple[str, float | None]] = {}
        shared = being_built.get() or Shared(Code(self.program, self.device, require))
        self._shared, self._transfers = shared, shared.transfers
        self.name = self._owner = shared.member or self.spec.name
        costs = shared.code.costs.load
        # Where ranges are small, their number decides how long copies take, and neighbours are copied as one.
        self._merges = self.page_bytes < len(self._spans) * costs.copy * costs.link_rate
        nbytes = self.host_layout(self.page_num).nbytes
        advice = f"lower capacity_pages (a page takes {self.page_bytes:,} bytes)"
        check_available(self.spec.name, nbytes, advice)
        self._buffer = HostBuffer(
            nbytes,
            hugepages=env.flag("HUGEPAGES") if hugepages is None else bool(hugepages),
            numa_node=shared.code.numa_node(),
            registrar=shared.code.registrar(),
            units=[Units(span.start, span.nbytes, self.page_num) for span in self._spans],
            chunk_bytes=env.number("REGISTER_CHUNK_GB") * GIB,
            background=register == "background",
            name=self.name,
        )
        try:
            self._init_write_back_staging_buffers()
            self._number = self._join()
            self._numbers: tuple[int, ...] = (self._number,)  # with those of the pools that take its ids
        except BaseException:
            self._buffer.destroy()
            raise
        self.kv_buffer = self._buffer.tensor
        self._slots = Slots(self.page_num, self.page_size, self.name)
        self._slots.registrations = self._registrations

    def __repr__(self) -> str:
        pages = f"{self.page_num:,} pages of {self.page_bytes:,} bytes"
        return f"<{type(self).__name__} {self.name}: {pages}, layout {self.layout}, device {self.device}>"

    def _join(self) -> int:
        """Become a member of what moves together; its number there."""
        buffer = self._buffer
        address = buffer.device_address
        guards = dict(buffer.guards)
        if self.staging is not None:
            guards["behind staging memory"] = behind(self.staging)
        self._checks = Checks(self._shared.code.driver, self.program, self.page_num, address, guards)
        places = (buffer, address, self.page_num, self.lists, self.layers, self._ring())
        return self._transfers.add(Member(self.name, self.program, *places))

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
        page_size = arguments.whole(spec.name, "page_size", page_size, 1)
        arguments.one_of(spec.name, "layout", layout, spec.layouts)
        arguments.one_of(spec.name, "form", form, spec.forms)
        itemsizes = {}
        for group, allowed in spec.dtypes.items():
            known = [dtype_named(name) for name in allowed]
            if dtypes[group] not in known:
                name = "dtype" if len(spec.dtypes) == 1 else f"{group}_dtype"
                raise arguments.refusal(spec.name, name, f"one of {known}", dtypes[group])
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
        capture_bytes: int | None,
    ) -> RequiredBytes:
        program = cls.sized(params, dtypes, layers, variants, page_size, layout, form)
        pages = _capacity(cls.spec, program, capacity_pages, capacity_bytes)
        host = program.host(pages)
        slot = slot_of(program, pages, *_staging_bound(cls.spec, staging_bytes, capture_bytes))
        staging = slots_of(cls.spec.updates == "in_place") * slot.nbytes
        return RequiredBytes(pages, host.nbytes, staging, host.page_bytes, program)

    def host_layout(self, pages: int) -> HostLayout:
        """Offsets and strides of a buffer of so many pages in this pool's layout."""
        return self.program.host(arguments.whole(self.spec.name, "host_layout", pages, 0))

    @property
    def format_tag(self) -> str:
        """Names the bytes of a page: equal tags mean that pages of two pools are interchangeable."""
        spec, sizes = self.spec, self.sizes
        layers = [f"{name}={sizes[name]}" for name in spec.layer_lists]
        facts = [spec.name, f"page_size={self.page_size}", *layers, *spec.tag]
        for c in spec.components:
            dims = ",".join(f"{dim}={sizes[f'extent_{c.ident}_{dim}']}" for dim in c.dims)
            dtype = self.dtypes[c.group] if c.group else c.dtype
            align = "item" if c.align is None else size_of(c.align, sizes)
            present = c.present is None or bool(sizes[c.present])
            facts.append(f"{c.name}({dims}):{dtype}:align={align}:{present}")
        chosen = tuple(self.program.variants[name] for name in spec.variants)
        for record in spec.records:
            pad, inner = size_of(record.pad_to[chosen], sizes), ",".join(record.inner[chosen])
            facts.append(f"{record.name}({','.join(record.holds)}):{inner}:pad={pad}")
        facts += [f"{name}={value}" for name, value in sorted(self.program.variants.items())]
        facts.append("order=" + ",".join(spec.layouts[self.layout].order))
        return hashlib.sha256("|".join(facts).encode()).hexdigest()[:16]

    @property
    def _registrations(self) -> tuple[Registration, ...]:
        """That of this pool's memory; none where nothing needs to be registered."""
        return () if self._buffer.registration is None else (self._buffer.registration,)

    def _refuse_unregistered(self, batch: indices.Batch) -> None:
        """Raises ValueError for host pages that no device can reach yet."""
        registrations, ready = self._slots.registrations, self._slots.ready()
        late = min((page for page in batch.host_pages if page >= ready), default=None)
        if late is not None:
            gave_up = next((str(each.error) for each in registrations if each.error is not None), None)
            why = gave_up or f"the background has come to page {ready}; wait_registered() waits for all"
            raise ValueError(f"{self.name}: host page {late} is not registered: {why}")

    # ---- slots

    @opaque
    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Ids of free pages (int64, CPU), or None when the pool is full. `need_size` counts ids."""
        slots = self._own_slots("alloc")
        return slots.alloc(arguments.integer(self.name, "alloc", need_size))

    @opaque
    def free(self, ids: torch.Tensor, after: Ticket | None = None) -> int:
        """Give whole pages back; returns how many ids. Later transfers of them run behind `after`."""
        self._slots.free_pages(self._freeable(ids, after))
        return ids.numel()

    def _freeable(self, ids: torch.Tensor, after: Ticket | None) -> list[int]:
        """The pages of `ids`, which may be freed. Raises ValueError."""
        slots = self._own_slots("free")
        if after is not None and not isinstance(after, Ticket):
            raise arguments.refusal(self.name, "free: after", "a ticket", after)
        pages = slots.pages_of(ids)
        busy = self._transfers.in_flight(self._numbers, set(pages), after)
        if busy is not None:
            raise ValueError(
                f"{self.name}: page {busy} is in flight; wait for its ticket, detach() it, "
                f"or pass after=ticket; of a ticket that was dropped only unbind() or clear() lets pages go"
            )
        return pages

    def available_size(self) -> int:
        """Free ids."""
        return self._slots.available_size()

    @opaque
    def clear(self) -> None:
        """Take every page back, after everything in flight. Bytes stay as they are."""
        slots = self._own_slots("clear")
        self._transfers.drain()
        slots.clear()

    def _own_slots(self, call: str) -> Slots:
        self._alive()
        if self._source is not None:
            raise ValueError(f"{self.name} has no slots of its own: {call} those of {self._source}")
        return self._slots

    # ---- device tensors

    def bind(self, tensors: Mapping[str, object], layer_ids: Iterable[int] | None = None) -> None:
        """Use these device tensors: by component a list with one tensor a layer, or one tensor.

        `layer_ids`: which layers the lists hold (default: the pool's). Raises ValueError naming the
        component and dimension, for a missing component and for a tensor that belongs to none.
        """
        self._alive()
        ids = None if layer_ids is None else arguments.layer_ids(self.name, "layer_ids", layer_ids)
        self._take({self._number: (self, self._checked(tensors, ids))})

    def _checked(self, tensors: Mapping[str, object], layer_ids: Sequence[int] | None) -> Binding:
        return bind(self.program, self.lists, self.dtypes, self.device, tensors, layer_ids)

    def rebind(self, tensors: Mapping[str, object], layer_ids: Iterable[int] | None = None) -> None:
        """`bind` anew, after everything in flight."""
        self._alive()
        self._transfers.drain()
        self.bind(tensors, layer_ids)

    def unbind(self) -> None:
        """Let go of the device tensors, after everything in flight, so that their memory can be given back.

        Host pages stay as they are; transfers are refused until the next `bind`. Staging memory stays.
        Raises PoolError when something in flight failed, with the tensors let go all the same.
        """
        self._alive()
        if self._shared.group is not None:
            raise PoolError(f"{self.name} belongs to the group {self._shared.group}: unbind the group")
        self._drop_binding()
        self._transfers.unbind()

    def _drop_binding(self) -> None:
        self._bound, self._limits = None, None

    def _take(self, bound: Mapping[int, tuple[HostPool, Binding]]) -> None:
        """Use these bindings of this pool, and of others that move with it, from now on."""
        transfers = self._transfers
        every = {m.name: m.binding for m in transfers.members if m.binding is not None}
        every |= {pool.name: binding for pool, binding in bound.values()}
        check_between(self._shared.group or self.name, every)
        self._shared.code.compile(math.gcd(16, *(binding.align for binding in every.values())))
        transfers.bind({number: binding for number, (_, binding) in bound.items()})
        for pool, binding in bound.values():
            pool._bound = binding
            pool._choices.clear()
            pool._limits = indices.Limits(
                pool=pool.name,
                page_size=pool.page_size,
                host_pages=pool.page_num,
                device_pages=binding.pages,
                reserved=pool.spec.reserved,
                tokens=pool.program.tokens,
                device=pool.device,
                slots=pool._slots,
            )

    # ---- transfers

    @opaque
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
        timed: bool = False,
    ) -> Ticket:
        """Copy device pages to host pages (D2H). `producer`: the stream that filled the device rows.

        `qos` ``background``: leave the SMs to others; ``urgent``: the submission counts, too. `timed`: the
        ticket tells its seconds.
        """
        if producer is not None or path is not None or timed is not False:
            self._check_call("producer", producer, path, timed)
        moves = self._moves("write_back", host, device, unit, validate, path, qos)
        return self._transfers.submit("write_back", moves, producer, timed=timed)

    @opaque
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
        timed: bool = False,
    ) -> Ticket:
        """Copy host pages to device pages (H2D). `order` ``layer``: first layers first, each told on its own.

        `layers`: only these layer ids. `readers`: the stream that still reads the device rows. `qos` and
        `timed`: as for `write_back`.
        """
        if readers is not None or path is not None or timed is not False:
            self._check_call("readers", readers, path, timed)
        if layers is not None:
            layers = arguments.layer_ids(self.name, "layers", layers)
        steps = self._transfers.ordered(self._numbers, order, layers)
        moves = self._moves("load", host, device, unit, validate, path, qos, steps is not None)
        return self._transfers.submit("load", moves, readers, steps, timed)

    def _moves(
        self,
        direction: str,
        host: torch.Tensor,
        device: torch.Tensor,
        unit: str,
        validate: str,
        path: str | Mapping[str, str] | None,
        qos: str | None,
        layered: bool = False,
    ) -> list[Move]:
        """This pool's part of a submission, and that of the pools which take its ids. Raises ValueError."""
        if qos is not None:
            arguments.one_of(self.name, "qos", qos, ("background", "urgent"))
        if self._source is not None:
            raise ValueError(f"{self.name} is moved with {self._source}, whose ids it takes: move that")
        batch = self._batch(host, device, unit, validate, direction == "write_back")
        moves = []
        for pool in (self, *self._followers):
            ids = batch
            if pool is not self and not pool._takes(batch, self):
                ids = pool._batch(host, device, unit, validate, direction == "write_back")
            wanted = path if path is None or isinstance(path, str) else path.get(pool.name)
            taken, predicted = pool._choose(direction, ids, wanted, layered, qos)
            checks = pool._checks if validate == "full" and ids.count else None
            moves.append(Move(pool._number, pool.name, ids, taken, predicted, checks))
        return moves

    def _takes(self, batch: indices.Batch, other: HostPool) -> bool:
        """Whether ids that were checked for `other` are checked for this pool, too."""
        mine, theirs = self._limits, other._limits
        if mine is None or theirs is None or batch.unit != "pages":
            return False
        same, fewer = mine.page_size == theirs.page_size, set(mine.reserved) <= set(theirs.reserved)
        return same and fewer and mine.device_pages >= theirs.device_pages

    def overwritten_guard(self) -> str:
        """Which of the guard bytes round this pool's memory were written to, in words; empty for none."""
        self._alive()
        return self._checks.overwritten()

    def destroy(self) -> None:
        """Give everything back, after everything in flight. Again: nothing happens.

        Raises PoolError when something in flight failed; everything is given back all the same.
        """
        if self._shared.group is not None:
            raise PoolError(f"{self.name} belongs to the group {self._shared.group}: destroy the group")
        self._forget()
        self._shared.end()

    def _forget(self) -> None:
        """Let go of what is given back with the pool."""
        self._bound, self.staging = None, None
        self._checks.release()
        self.__dict__.pop("kv_buffer", None)

    # ---- names that engines know

    def can_use_write_back_jit_kernel(self, element_size: int | None = None) -> bool:
        """Whether the staged path can run: kernels are compiled; any element size is taken."""
        return any(p.available for p in self.path_report() if p.path == "staged")

    @opaque
    def backup_from_device_all_layer(
        self, device_pool: object, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        """`write_back` of token ids; the caller's stream waits for it."""
        ticket = self.write_back(host_indices, device_indices, path=self._engine_path(io_backend))
        ticket.wait_current()
        ticket.detach()

    @opaque
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
        layer = arguments.integer(self.name, "layer_id", layer_id)
        ticket = self.load(host_indices, device_indices, layers=[layer], path=path)
        ticket.wait_current()
        ticket.detach()

    def _engine_path(self, io_backend: str) -> str | None:
        known = {"kernel": None, "direct": "staged" if self.staging is not None else None}
        return known[arguments.one_of(self.name, "io_backend", io_backend, known)]

    # ---- pieces

    def _init_write_back_staging_buffers(self) -> None:
        raise PoolError(f"{type(self).__name__} has no generated staging buffers; run `codegen build`")

    def _staging_slot(self) -> Slot:
        """One slot of staging memory. Raises OutOfMemoryBudget where the bound is too small."""
        return slot_of(self.program, self.page_num, *self._staging_bound)

    def _allocate_staging(self, slot: Slot) -> Memory:
        nbytes = slots_of(self.spec.updates == "in_place") * slot.nbytes
        memory = self._shared.code.driver.allocate(nbytes + GUARD)
        return Memory(memory.address, nbytes, memory.tensor[:nbytes])

    def _view(self, memory: Memory, ident: str) -> torch.Tensor | None:
        """The first slot of a staging buffer, seen as one component's axes, then its item's bytes; None
        for a component that is not there, and where a slot is smaller than a page."""
        if not self.program.present(ident) or not self.staging_pages:
            return None
        part = self.host_layout(self.staging_pages).part(ident)
        return host_view(memory.tensor, part, self.program.itemsize(ident))

    def _ring(self) -> Ring | None:
        if self.staging is None:
            return None
        return Ring(self.staging, self.staging_pages, self._slot_bytes, self.spec.updates == "in_place")

    @property
    def _slot_bytes(self) -> int:
        return 0 if self.staging is None else self.staging.nbytes // slots_of(self.spec.updates == "in_place")

    def _batch(
        self, host: torch.Tensor, device: torch.Tensor, unit: str, validate: str, writes_host: bool
    ) -> indices.Batch:
        self._shared.alive(self.name)
        if self._limits is None:
            raise PoolError(f"{self.name}: no device tensors; call bind() before a transfer")
        found = indices.batch(self._limits, host, device, unit, validate, writes_host)
        if self._slots.registrations:
            self._refuse_unregistered(found)
        return found

    def _choose(
        self, direction: str, batch: indices.Batch, path: str | None, layered: bool, qos: str | None
    ) -> tuple[str, float | None]:
        """The path, and the seconds that the cost model expects of it."""
        pages, whole = batch.count, not layered or self.program.cuts("load")
        if batch.on_device is not None:
            whole = whole and batch.bad is None  # else the device skips wrong ones
        elif batch.unit == "tokens":
            pages, whole = -(-pages // self.page_size), False
        forced = self._forced if path is None else path
        if layered and forced == "auto" and pages > max(1, SLOTS * self.staging_pages):
            whole = False  # slots would be used again within each layer: late, and a launch for each page
        merges = whole and not layered and self._merges and forced != "zero_copy"
        merged = _merged(batch) if merges else 1
        beside = forced == "auto" and not layered and self._transfers.beside(direction)
        key = (direction, pages, layered, whole, merged, qos, forced, beside)
        taken = self._choices.get(key)
        if taken is None:
            if len(self._choices) >= CHOICES_KEPT:
                self._choices.clear()
            try:
                taken = self._choices[key] = self._decide(*key)
            except ValueError as error:
                where = " (POOLWRIGHT_PATH is set)" if path is None and self._forced != "auto" else ""
                raise ValueError(f"{self.name}: {error}{where}") from None
        return taken

    def _decide(
        self,
        direction: str,
        pages: int,
        layered: bool,
        whole: bool,
        merged: int,
        qos: str | None,
        path: str,
        beside: bool,
    ) -> tuple[str, float | None]:
        ranges = max(1, len(units(self.program)) if layered and whole else len(self._spans))
        work = Work(
            direction=direction,
            range_bytes=self.page_bytes // ranges,
            ranges=pages * ranges,
            total=pages * self.page_bytes,
            steps=max(1, len(self.layers)) if layered else 0,
            in_place=self.spec.updates == "in_place",
            whole_pages=whole,
            merged=merged,
            slot_bytes=self._slot_bytes,
            qos=qos,
            beside=beside,
        )
        costs = self._shared.code.costs
        taken = choice.choose(work, self.path_report(), costs, path)
        return taken, predict(taken, work, costs)


def _merged(batch: indices.Batch) -> int:
    """How many host pages follow each other on average, as a power of two."""
    return 1 << (batch.count // batch.runs).bit_length() - 1 if batch.runs else 1


def _staging_bound(spec: PoolSpec, staging_bytes: int, capture_bytes: int | None) -> tuple[int, str]:
    """Bytes of all slots together, and the argument that says so. A write-back of rows that change is
    captured in staging memory: that is what capture_bytes bounds. Raises ValueError."""
    staging_bytes = arguments.whole(spec.name, "staging_bytes", staging_bytes, 0)
    if capture_bytes is None:
        return staging_bytes, "staging_bytes"
    capture_bytes = arguments.whole(spec.name, "capture_bytes", capture_bytes, 0)
    if spec.updates != "in_place":
        step = "rows of this pool do not change in place: pass staging_bytes"
        raise arguments.refusal(spec.name, "capture_bytes", "None", capture_bytes, step)
    return capture_bytes, "capture_bytes"


def _layers_of(program: SizedProgram, lists: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The layers of all components that are there; without any, those given as `layers`."""
    used = {name: lists[name] for ident, name in program.lists.items() if name and program.present(ident)}
    return together(list(used.values())) if used else lists.get("layers", ())


def _layer_ids(spec: PoolSpec, name: str, ids: Iterable[int]) -> tuple[int, ...]:
    found = arguments.layer_ids(spec.name, name, ids)
    if len(set(found)) != len(found):
        raise ValueError(f"{spec.name}: {name}: layer ids must differ, got {list(found)}")
    return found


def _capacity(spec: PoolSpec, program: SizedProgram, pages: int | None, nbytes: int | None) -> int:
    """Pages of the pool from either way of giving its capacity."""
    if (pages is None) == (nbytes is None):
        got = "neither" if pages is None else "both"
        raise ValueError(f"{spec.name}: give either capacity_pages or capacity_bytes, got {got}")
    if pages is not None:
        return arguments.whole(spec.name, "capacity_pages", pages, 1)
    nbytes = arguments.whole(spec.name, "capacity_bytes", nbytes, 0)
    page = program.host(1).page_bytes
    if page == 0:
        raise ValueError(f"{spec.name}: a page of these sizes has no bytes; give capacity_pages")
    found = programs.pages_within([program], nbytes)
    if found < 1:
        advice = "raise capacity_bytes or make pages smaller"
        raise OutOfMemoryBudget(f"{spec.name}: one page", page, nbytes, advice)
    return found
