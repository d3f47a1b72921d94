"""One pool, form, layout and set of sizes in; every transfer worth comparing, and what it did wrong, out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from poolwright.runtime.description import HostLayout, PageRanges
from poolwright.runtime.parts import SLOT_ALIGN, slot_align, slots_of
from poolwright.runtime.pool import HostPool
from poolwright.runtime.program import SizedProgram
from poolwright.runtime.tools import oracle
from poolwright.runtime.tools.expected import Contents, equal, places
from poolwright.runtime.tools.samples import Sample, arguments, takes_page_size

COUNTS = (1, 63, 64, 65, 128, 129)
HOST_PAGES, DEVICE_PAGES = 131, 137
STAGING_PAGES = 7
LANES, IN_FLIGHT = 3 * 32, 8
"""Of a launch on the CPU twin: lanes, and vectors that each moves in one round."""


@dataclass(frozen=True)
class Case:
    """One transfer. `host`, `device`: page ids. `shuffled`: single tokens, out of order. `layers`: ids."""

    direction: str
    path: str
    unit: str
    host: torch.Tensor
    device: torch.Tensor
    dtype: torch.dtype = torch.int64
    shuffled: bool = False
    layers: tuple[int, ...] | None = None
    order: str = "bulk"
    validate: str = "cheap"
    strided: bool = False
    on_device: bool = False

    @property
    def label(self) -> str:
        words = [self.direction, f"path {self.path}", f"{self.host.numel()} pages by {self.unit}"]
        words += ["tokens shuffled"] if self.shuffled else []
        words += [f"layers {list(self.layers)}"] if self.layers is not None else []
        words += ["in layer order"] if self.order == "layer" else []
        return ", ".join(words)


class Before(NamedTuple):
    """Bytes of both sides before a transfer, the ids that are handed over, copies of them."""

    host: torch.Tensor
    arena: torch.Tensor
    ids: tuple[torch.Tensor, torch.Tensor]
    kept: tuple[torch.Tensor, torch.Tensor]


def sized(pool_class: type[HostPool], sample: Sample, form: str, layout: str) -> SizedProgram:
    """The program of these sizes, before anything is built."""
    params, dtypes, layers = sample.params, sample.dtypes, sample.layers
    page_size = sample.page_size if takes_page_size(pool_class) else 1
    return pool_class.sized(params, dtypes, layers, sample.variants, page_size, layout, form)


class Bench:
    """A built and bound pool with its oracle. Raises whatever building or binding raises.

    `staging_bytes`: its bound; None: slots of STAGING_PAGES pages.
    """

    def __init__(
        self,
        pool_class: type[HostPool],
        sample: Sample,
        form: str,
        layout: str,
        device: str = "cpu",
        staging_bytes: int | None = None,
    ) -> None:
        given: dict[str, Any] = {**arguments(pool_class, sample), "form": form, "layout": layout}
        page = pool_class.required_bytes(**given, capacity_pages=1)  # type: ignore[attr-defined]
        slots = slots_of(pool_class.spec.updates == "in_place")
        wanted = slots * slot_align(STAGING_PAGES * page.host) if staging_bytes is None else staging_bytes
        given["staging_bytes"] = wanted
        self.required = pool_class.required_bytes(**given, capacity_pages=HOST_PAGES)  # type: ignore[attr-defined]
        self._watch(pool_class(**given, capacity_pages=HOST_PAGES, device=device), sample)
        self.pool.bind(self.device.tensors, layer_ids=self.device.layer_ids)

    @classmethod
    def of(cls, pool: HostPool, sample: Sample) -> Bench:
        """A bench for a pool that is there and not bound yet: a group binds all of its pools at once."""
        made = cls.__new__(cls)
        made._watch(pool, sample)
        return made

    def _watch(self, pool: HostPool, sample: Sample) -> None:
        """Lay out host bytes and device tensors by the oracle."""
        self.host_pages, self.device_pages = pool.page_num, pool.page_num + DEVICE_PAGES - HOST_PAGES
        self.pool, self.spec, self.sample, layout, form = pool, pool.spec, sample, pool.layout, pool.form
        sizes, dtypes, variants = self.pool.sizes, sample.dtypes, sample.variants
        self._facts = (self.spec, sizes, dtypes, variants)
        self.host = oracle.host(*self._facts, layout, self.host_pages)
        self.device = oracle.device(
            *self._facts, form, self.device_pages, self.pool.lists, sample.shift, self.pool.device
        )
        self._random = torch.Generator().manual_seed(20)
        padding = torch.ones(self.host.nbytes, dtype=torch.bool)
        for at in self.host.bytes:
            padding[at.at] = False
        # Padding is zero, as it always is: the copy engine takes it along with a page.
        self._fillings = Contents(self.host.nbytes, self._random, padding)
        self._arenas = Contents(self.device.arena.numel(), self._random)
        self._places = places(self.host.bytes, self.device.bytes)

    def close(self) -> None:
        """Give the pool's memory back."""
        self.pool.destroy()

    # ---- sizes

    def sizes(self) -> Iterator[str]:
        """Everything that can be compared without a transfer, one text each."""
        yield self._paths()
        for pages in (1, 3, self.host_pages):
            found = self.host
            if pages != self.host_pages:
                found = oracle.host(*self._facts, self.pool.layout, pages)
            layout = self.pool.host_layout(pages)
            yield self._layout(layout, found, pages)
            yield self._ranges(layout, found, pages)
        yield self._required()
        yield self._tables()
        yield self._staging()

    def _paths(self) -> str:
        """Nothing is compared by a path that is not there."""
        if not self.spec.components:
            return ""  # there is nothing to move
        missing = [path for path in self.pool.path_report() if not path.available]
        wanted = [p for p in missing if p.path != "host" or self.pool.device.type == "cpu"]
        return "".join(f"path {path.path} cannot run: {path.reason}" for path in wanted[:1])

    def _layout(self, layout: HostLayout, found: oracle.Host, pages: int) -> str:
        if layout.nbytes != found.nbytes:
            return f"host bytes of {pages} pages: expected {found.nbytes}, got {layout.nbytes}"
        numbers = torch.arange(layout.nbytes)
        for part in oracle.parts(*self._facts[:3]):
            if part.empty or part.name not in {at.name for at in found.bytes}:
                continue  # nothing of it, or a record, whose bytes are compared by its components
            here = layout.part(part.ident)
            shape = [*(extent for _, extent, _ in here.axes), part.itemsize]
            reach = here.base + sum((extent - 1) * step for _, extent, step in here.axes) + part.itemsize
            if reach > layout.nbytes:
                return f"{part.name}: {pages} pages reach to byte {reach} of {layout.nbytes}"
            seen = numbers.as_strided(shape, [*(step for _, _, step in here.axes), 1], here.base)
            names = (*(axis for axis, _, _ in here.axes), "byte")
            seen = seen.permute([names.index(axis) for axis in part.names])
            expected = next(at for at in found.bytes if at.name == part.name)
            if seen.shape != expected.at.shape or not torch.equal(seen, expected.at):
                return f"{part.name}: base, extents or strides of pool.py differ from the layout's order"
        return ""

    def _ranges(self, layout: HostLayout, found: oracle.Host, pages: int) -> str:
        """Ranges of a page hold its bytes, those of all pages hold every byte once, save gaps."""
        owner = torch.full((layout.nbytes,), -1)
        total = 0
        for of in layout.ranges:
            starts = range_starts(of)
            total += len(starts) * of.nbytes
            for start, page in itertools.product(starts, range(pages)):
                first = start + page * of.nbytes
                if of.nbytes and (first < 0 or first + of.nbytes > layout.nbytes):
                    return f"a range of page {page} is bytes {first} on, {of.nbytes} of {layout.nbytes}"
                if bool((owner[first : first + of.nbytes] != -1).any()):
                    return f"byte {first} on is in two ranges"
                owner[first : first + of.nbytes] = page
        if total != layout.page_bytes:
            return f"ranges of a page: expected page_bytes {layout.page_bytes} in all, got {total}"
        for at in found.bytes:
            own = torch.arange(pages).view(-1, *[1] * (at.at.dim() - 1))
            if not bool((owner[at.at] == own).all()):
                return f"{at.name}: ranges of {pages} pages do not hold the bytes of their page"
        inside = sum(at.at.numel() for at in found.bytes)
        gaps = layout.nbytes - inside
        uncovered = int((owner == -1).sum())
        return "" if uncovered <= gaps else f"{uncovered} bytes are in no range, but only {gaps} are gaps"

    def _required(self) -> str:
        pool, required = self.pool, self.required
        taken = (pool.page_num, pool.kv_buffer.numel(), pool.page_bytes)
        said = (required.pages, required.host, required.page)
        if taken != said:
            return f"pages, host and page bytes: required_bytes says {said}, taken are {taken}"
        if pool.staging is not None and pool.staging.nbytes != required.staging:
            return f"staging bytes: required_bytes says {required.staging}, taken are {pool.staging.nbytes}"
        again = pool.program.host(pool.page_num).nbytes
        return "" if again == self.host.nbytes else f"host bytes: expected {self.host.nbytes}, got {again}"

    def _tables(self) -> str:
        """Components whose layers are tensors of their own have one address a layer, others one."""
        tensors = self.spec.forms[self.pool.form].tensors
        for part in oracle.parts(*self._facts[:3]):
            layers = dict(part.axes).get("layer")
            expected = layers if "layer" in tensors else None
            got = next(p.table for p in self.pool.program.device if p.ident == part.ident)
            if got != expected:
                return f"{part.name}: tensors of its own for each layer: expected {expected}, got {got}"
        return ""

    def _staging(self) -> str:
        """The views of a staging slot show the bytes that the oracle places there."""
        pool = self.pool
        if pool.staging is None:
            return "" if not pool.can_use_write_back_jit else "can_use_write_back_jit without staging memory"
        # Slots are aligned, which is room for more where pages are few bytes.
        most = STAGING_PAGES + SLOT_ALIGN // max(pool.page_bytes, 1)
        if not STAGING_PAGES <= pool.staging_pages <= most:
            return f"staging pages: expected {STAGING_PAGES} to {most}, got {pool.staging_pages}"
        found = oracle.host(*self._facts, pool.layout, pool.staging_pages)
        pool.staging.tensor.copy_(Contents(pool.staging.nbytes, self._random).next())
        memory = pool.staging.tensor.cpu()
        for part in oracle.parts(*self._facts[:3]):
            expected = next((at for at in found.bytes if at.name == part.name), None)
            if part.empty or expected is None:
                continue
            view: torch.Tensor = getattr(pool, f"staging_{part.ident}")
            names = (*(a for a, _, _ in pool.host_layout(pool.staging_pages).part(part.ident).axes), "byte")
            seen = view.cpu().permute([names.index(axis) for axis in part.names])
            if not torch.equal(seen, memory[expected.at]):
                return f"staging_{part.ident} does not show the bytes of {part.name}"
        pool.staging.tensor.zero_()  # as it was: padding in it is copied with a page
        return ""

    # ---- transfers

    def cases(self) -> Iterator[Case]:
        """Every transfer to compare, in a fixed order: one of each kind in turn: faults show early."""
        paths = [path.path for path in self.pool.path_report() if path.available]
        single = [path for path in paths if path != "staged"]  # no range of the copy engine is part of a page
        kinds = [self._whole_pages(paths), self._runs(paths), self._special(paths)]
        if self.pool.program.has_layers:
            kinds.insert(1, self._layered(paths if self.pool.program.cuts("load") else single))
        if self.pool.program.tokens and self.pool.page_size > 1:
            kinds.insert(1, self._tokens(single))
        if "zero_copy" in paths:
            kinds.insert(2, self._last_rounds())
        for turn in itertools.zip_longest(*kinds):
            yield from (case for case in turn if case is not None)

    def _whole_pages(self, paths: Sequence[str]) -> Iterator[Case]:
        """Permuted pages in every count; ids as tokens and as pages, 32 and 64 bits, in turn."""
        turn = itertools.cycle(itertools.product(("token", "page"), (torch.int64, torch.int32)))
        for count, path, direction in itertools.product(COUNTS[::-1], paths, ("write_back", "load")):
            unit, dtype = next(turn)
            yield Case(direction, path, unit, *self.ids(count), dtype=dtype)
        if self.pool.device.type != "cpu":
            unit = "token" if self.pool.program.tokens else "page"
            for direction, path, count in itertools.product(("write_back", "load"), paths, COUNTS[::2]):
                yield Case(direction, path, unit, *self.ids(count), on_device=True)

    def _runs(self, paths: Sequence[str]) -> Iterator[Case]:
        """Neighbours on one side or both, and runs that end at the last page."""
        host, device = torch.arange(self.host_pages), self._free()
        for direction, path in itertools.product(("write_back", "load"), paths):
            yield Case(direction, path, "page", host[-40:], device[-40:])
            yield Case(direction, path, "token", host[:40], self.ids(40)[1])
            pieces = [host[90:100], host[3:4], host[40:60], host[4:9]]
            yield Case(direction, path, "page", torch.cat(pieces), device[7:43].flip(0))

    def _special(self, paths: Sequence[str]) -> Iterator[Case]:
        for direction, path in itertools.product(("write_back", "load"), paths):
            host, device = self.ids(13)
            yield Case(direction, path, "token", host[:0], device[:0])
            yield Case(direction, path, "token", host, device, strided=True)
            yield Case(direction, path, "page", host, device, validate="full")
        yield Case("load", paths[0], "page", torch.tensor([5, 5, 2]), self._free()[:3])

    def _layered(self, paths: Sequence[str]) -> Iterator[Case]:
        ids = self.pool.layers
        for path in paths:
            for layer, count in itertools.product(ids[::-1], (129, 1)):
                yield Case("load", path, "page", *self.ids(count), layers=(layer,))
            yield Case("load", path, "token", *self.ids(65), layers=tuple(reversed(ids)))
            yield Case("load", path, "page", *self.ids(129), order="layer")
            yield Case("load", path, "token", *self.ids(9), layers=ids[:1], order="layer")

    def _tokens(self, paths: Sequence[str]) -> Iterator[Case]:
        """Single tokens of whole pages in any order."""
        for count, path in itertools.product((129, 1, 64), paths):
            for direction in ("write_back", "load"):
                yield Case(direction, path, "token", *self.ids(count), shuffled=True)
            load = Case("load", path, "token", *self.ids(count), shuffled=True)
            yield replace(load, order="layer", dtype=torch.int32)
            if self.pool.program.has_layers:
                yield replace(load, layers=self.pool.layers[-1:])

    def _last_rounds(self) -> Iterator[Case]:
        """Counts whose very last vector is a lane's first in its last round: a bound of one less drops it."""
        program = self.pool.program
        for walk in program.walks:
            tokens, layers = "tokens" in walk.name, self.pool.layers[:1] if "layer" in walk.name else None
            each = walk.runs * walk.atom // walk.vector(16) * (self.pool.page_size if tokens else 1)
            counts = (
                c for c in range(1, self.host_pages) if each and (c * each - 1) % (LANES * IN_FLIGHT) < LANES
            )
            count = next(counts, None)
            if count is not None and (program.tokens or not tokens):
                unit = "token" if tokens else "page"
                case = Case("load", "zero_copy", unit, *self.ids(count), shuffled=tokens, layers=layers)
                yield case
                if layers is None:
                    yield replace(case, direction="write_back")

    def ids(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """So many pages of each side, in no order."""
        free = self._free()
        host = torch.randperm(self.host_pages, generator=self._random)[:count]
        return host, free[torch.randperm(len(free), generator=self._random)[:count]]

    def _free(self) -> torch.Tensor:
        """Device pages that may be moved."""
        return torch.tensor([page for page in range(self.device_pages) if page not in self.spec.reserved])

    def transfer(self, case: Case) -> str:
        """Submit one transfer and compare both sides, whole; the first difference in words, or ""."""
        before = self.begin(case)
        how: dict[str, Any] = {"path": case.path, "validate": case.validate}
        if case.direction == "write_back":
            ticket = self.pool.write_back(*before.ids, case.unit, **how)
        else:
            ticket = self.pool.load(*before.ids, case.unit, order=case.order, layers=case.layers, **how)
        ticket.wait()
        return self.end(case, before)

    def begin(self, case: Case) -> Before:
        """Fill both sides anew; what they hold, and the ids to hand over."""
        host, arena = self._fillings.next(), self._arenas.next()
        self.pool.kv_buffer.copy_(host)
        self.device.arena.copy_(arena)
        ids = self._lists(case)
        return Before(host, arena, ids, (ids[0].clone(), ids[1].clone()))

    def end(self, case: Case, before: Before) -> str:
        """Compare both sides, whole, with what the transfer had to do; the first difference, or ""."""
        if not all(torch.equal(ids, kept) for ids, kept in zip(before.ids, before.kept, strict=True)):
            return f"{case.label}: the caller's ids were changed"
        self._apply(case, before.host, before.arena, before.kept[0].cpu(), before.kept[1].cpu())
        return self._compare(case, before.host, before.arena)

    def _lists(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """The id tensors that the caller hands over."""
        host, device = case.host, case.device
        if case.unit == "token":
            steps = torch.arange(self.pool.page_size)
            host = (host[:, None] * self.pool.page_size + steps).flatten()
            device = (device[:, None] * self.pool.page_size + steps).flatten()
        if case.shuffled:
            host = host[torch.randperm(host.numel(), generator=self._random)]
            device = device[torch.randperm(device.numel(), generator=self._random)]
        host, device = host.to(case.dtype), device.to(case.dtype)
        if case.strided:
            host = torch.stack([host, torch.full_like(host, -7)], 1)[:, 0]
            device = torch.stack([device, torch.full_like(device, -7)], 1)[:, 0]
        return host, device.to(self.pool.device) if case.on_device else device

    def _apply(
        self,
        case: Case,
        host: torch.Tensor,
        arena: torch.Tensor,
        host_ids: torch.Tensor,
        device_ids: torch.Tensor,
    ) -> None:
        """What the transfer has to do, on the bytes from before it."""
        size = self.pool.page_size if case.unit == "token" else 1
        tokens = [(ids.long() // size, ids.long() % size) for ids in (host_ids, device_ids)]
        # Each pair of pages once: what has no tokens would be moved again for every token of its page.
        pairs = sorted(set(zip(tokens[0][0].tolist(), tokens[1][0].tolist(), strict=True)))
        pages = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
        first_only = case.layers is not None and not {*self.pool.layers[:1]} <= {*case.layers}
        for place in self._places:
            by_token = case.unit == "token" and "token" in place.axes
            here = place.host[tokens[0]] if by_token else place.host[pages[0]]
            over = place.device[tokens[1]] if by_token else place.device[pages[1]]
            if "layer" in place.axes:
                if case.layers is not None:
                    mine = self.pool.lists[place.layers or ""]
                    chosen = [mine.index(layer) for layer in case.layers if layer in mine]
                    axis = place.axes.index("layer") - by_token
                    rows = torch.tensor(chosen, dtype=torch.int64)
                    here, over = here.index_select(axis, rows), over.index_select(axis, rows)
            elif first_only:
                continue  # a component without layers comes with the first one
            if case.direction == "write_back":
                place.move(arena, over, host, here)
            else:
                place.move(host, here, arena, over)

    def _compare(self, case: Case, host: torch.Tensor, arena: torch.Tensor) -> str:
        found = self.pool.kv_buffer, self.device.arena.cpu()
        places = self.host.bytes, self.device.bytes
        for side, here, expected, known in zip(("host", "device"), found, (host, arena), places, strict=True):
            if not equal(here, expected):
                at = int((here != expected).nonzero()[0])
                place = where(known, at, "padding" if side == "host" else "guard or another tensor")
                return (
                    f"{case.label}: {side} byte {at} ({place}): expected {int(expected[at]):#04x}, "
                    f"got {int(here[at]):#04x}"
                )
        broken = self.pool.overwritten_guard()
        return f"{case.label}: {broken}" if broken else ""


def range_starts(of: PageRanges) -> list[int]:
    """Where the ranges of page 0 start."""
    starts = [of.base]
    for extent, step in of.left:
        starts = [start + index * step for start in starts for index in range(extent)]
    return starts


def where(known: Sequence[oracle.Bytes], byte: int, otherwise: str) -> str:
    """Component and indices of a byte, or `otherwise` when it is no component's."""
    for at in known:
        found = (at.at == byte).nonzero()
        if found.numel():
            place = ", ".join(f"{axis} {int(i)}" for axis, i in zip(at.axes, found[0], strict=True))
            return f"{at.name}, {place}"
    return otherwise
