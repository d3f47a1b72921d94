"""Axes and orders of a pool in, where every logical byte lies on both sides out.

Nothing here knows a stride, base, run or range of the generated formulas: of a pool's sizes only extents,
itemsizes and alignments are used. The bytes of every component are numbered in a fixed logical order
[page, token, layer, dims..., byte]; numbers are permuted to an order and concatenated with torch, and
what comes out is read backwards: the offset of each logical byte.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from poolwright.runtime.description import Component, Form, PoolSpec, Record, align_up, dtype_named, size_of

MARKERS = ("component", "record")
REST = ("element", "inner")
PADDING = -1


@dataclass(frozen=True)
class Part:
    """What is placed: a component or a record. `axes`: (name, extent) without `page`, in logical order.

    `layers`: its layer list.
    """

    name: str
    ident: str
    axes: tuple[tuple[str, int], ...]
    itemsize: int
    align: int
    dtype: torch.dtype
    layers: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return ("page", *(name for name, _ in self.axes), "byte")

    def shape(self, pages: int) -> tuple[int, ...]:
        return (pages, *(extent for _, extent in self.axes), self.itemsize)

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes if name not in ("token", "layer"))

    @property
    def empty(self) -> bool:
        return math.prod(self.shape(1)) == 0


@dataclass(frozen=True)
class Bytes:
    """Offsets of one component's bytes, shaped as `axes` say. `layers`: its layer list."""

    name: str
    axes: tuple[str, ...]
    at: torch.Tensor
    layers: str | None = None


@dataclass(frozen=True)
class Host:
    """A host buffer of `nbytes`; what no entry of `bytes` names is padding."""

    nbytes: int
    bytes: tuple[Bytes, ...]


@dataclass(frozen=True)
class Device:
    """An arena that holds every device tensor between guards. `tensors`: what `bind` takes.

    `layer_ids`: what the lists in it hold, None for each component's own. `bytes`: offsets into the arena of
    all pages.
    """

    arena: torch.Tensor
    tensors: Mapping[str, object]
    layer_ids: tuple[int, ...] | None
    bytes: tuple[Bytes, ...]


# ---- what is placed ---------------------------------------------------------------------------


def has_tokens(spec: PoolSpec) -> bool:
    """Whether pages consist of tokens."""
    return any("token" in (*form.tensors, *form.order) for form in spec.forms.values())


def parts(spec: PoolSpec, sizes: Mapping[str, int], dtypes: Mapping[str, torch.dtype]) -> tuple[Part, ...]:
    """Every component that no record holds, then every record as one padded row of bytes."""
    alone = [_component(spec, c, sizes, dtypes) for c in spec.components if not c.held]
    return (*alone, *(_record(spec, record, sizes, dtypes) for record in spec.records))


def _component(
    spec: PoolSpec, component: Component, sizes: Mapping[str, int], dtypes: Mapping[str, torch.dtype]
) -> Part:
    axes = [("token", sizes["page_size"])] if component.token and has_tokens(spec) else []
    axes += [("layer", sizes[component.layers])] if component.layers is not None else []
    axes += [(dim, sizes[f"extent_{component.ident}_{dim}"]) for dim in component.dims]
    dtype = dtypes[component.group] if component.group else dtype_named(str(component.dtype))
    align = dtype.itemsize
    if component.align is not None:
        align = size_of(component.align, sizes)
    absent = component.present is not None and not sizes[component.present]
    itemsize = 0 if absent else dtype.itemsize
    empty = absent or any(extent == 0 for name, extent in axes if name not in ("token", "layer"))
    aligned = 1 if empty else align
    return Part(
        component.name, component.ident, tuple(axes), itemsize, aligned, dtype, layers=component.layers
    )


def _record(
    spec: PoolSpec, record: Record, sizes: Mapping[str, int], dtypes: Mapping[str, torch.dtype]
) -> Part:
    first = next(c for c in spec.components if c.name == record.holds[0])
    outer = [(n, e) for n, e in _component(spec, first, sizes, dtypes).axes if n in ("token", "layer")]
    row = ("row", sizes[f"extent_{record.ident}_row"])
    return Part(record.name, record.ident, (*outer, row), 1, 1, torch.uint8, layers=first.layers)


def _members(
    spec: PoolSpec,
    record: Record,
    sizes: Mapping[str, int],
    dtypes: Mapping[str, torch.dtype],
    variants: Mapping[str, str],
) -> list[Bytes]:
    """Where each component of a record, and the padding, lies inside its row. Raises ValueError."""
    held = [c for name in record.holds for c in spec.components if c.name == name]
    inside = []
    for part in (_component(spec, c, sizes, dtypes) for c in held):
        dims = tuple(axis for axis in part.axes if axis[0] in part.dims)
        inside.append(Part(part.name, part.ident, dims, part.itemsize, part.align, part.dtype))
    order = record.inner[tuple(variants[name] for name in spec.variants)]
    flat, found = _arrange(inside, order, spec.splits, 1)
    row = sizes[f"extent_{record.ident}_row"]
    if flat > row:
        raise ValueError(f"{spec.name}: record {record.name}: its components take {flat} bytes, a row {row}")
    rest = torch.ones(row, dtype=torch.bool)
    for at in found:
        rest[at.at.flatten()] = False
    padding = Bytes(f"{record.name} padding", ("page", "byte"), rest.nonzero().flatten()[None])
    return [*found, padding]


# ---- orders -----------------------------------------------------------------------------------


def expand(order: Sequence[str], part: Part, splits: Mapping[str, Sequence[str]]) -> list[str]:
    """Axes of one part in this order; one "component" marks where components stand side by side."""
    pieces = [piece for axis in order for piece in splits.get(axis, (axis,))]
    rest = [dim for dim in part.dims if dim not in pieces]
    expanded: list[str] = []
    for axis in pieces:
        expanded += ["component"] if axis in MARKERS else rest if axis in REST else [axis]
    return [axis for axis in expanded if axis == "component" or axis in part.names]


def _arrange(
    placed: Sequence[Part], order: Sequence[str], splits: Mapping[str, Sequence[str]], pages: int
) -> tuple[int, list[Bytes]]:
    """Bytes in all, and the offset of every byte, of parts laid out in `order`."""
    if not placed:
        return 0, []
    blocks: list[torch.Tensor] = []
    first = end = 0
    for part in placed:
        shape = part.shape(pages)
        numbers = torch.arange(first, first + math.prod(shape)).reshape(shape)
        first += numbers.numel()
        axes = expand(order, part, splits)
        axes = axes if "page" in axes else ["page", *axes]  # a record's row, of which there is one
        cut = axes.index("component") if "component" in axes else 0
        axes = [axis for axis in axes if axis != "component"]
        left, right = axes[:cut], axes[cut:]
        turned = numbers.permute([part.names.index(axis) for axis in (*left, *right, "byte")])
        block = turned.reshape(*turned.shape[: len(left)], math.prod(turned.shape[len(left) :]))
        start = align_up(end, part.align) if blocks else 0
        blocks.append(torch.nn.functional.pad(block, (start - end, 0), value=PADDING))
        end = start + block.shape[-1]
    if len(placed) > 1:
        gap = align_up(end, max(part.align for part in placed)) - end
        blocks[-1] = torch.nn.functional.pad(blocks[-1], (0, gap), value=PADDING)
    flat = torch.cat(blocks, dim=-1).flatten()
    where = torch.empty(first, dtype=torch.int64)
    filled = (flat != PADDING).nonzero().flatten()
    where[flat[filled]] = filled
    found, at = [], 0
    for part in placed:
        count = math.prod(part.shape(pages))
        at_part = where[at : at + count].reshape(part.shape(pages))
        found.append(Bytes(part.name, part.names, at_part, part.layers))
        at += count
    return flat.numel(), found


def _open_records(
    spec: PoolSpec,
    sizes: Mapping[str, int],
    dtypes: Mapping[str, torch.dtype],
    variants: Mapping[str, str],
    found: Sequence[Bytes],
) -> tuple[Bytes, ...]:
    """Records taken apart into their components; what has no bytes is left out."""
    opened = [at for at in found if at.name not in {record.name for record in spec.records}]
    for record in spec.records:
        whole = next((at for at in found if at.name == record.name), None)
        if whole is None:
            continue  # no component of it is there
        rows, outer = whole.at.squeeze(-1), whole.axes[:-2]
        for member in _members(spec, record, sizes, dtypes, variants):
            axes, at_member = (*outer, *member.axes[1:]), rows[..., member.at[0]]
            opened.append(Bytes(member.name, axes, at_member, whole.layers))
    return tuple(at for at in opened if at.at.numel())


# ---- both sides -------------------------------------------------------------------------------


def host(
    spec: PoolSpec,
    sizes: Mapping[str, int],
    dtypes: Mapping[str, torch.dtype],
    variants: Mapping[str, str],
    layout: str,
    pages: int,
) -> Host:
    """The host side of a layout with so many pages."""
    placed = parts(spec, sizes, dtypes)
    nbytes, found = _arrange(placed, spec.layouts[layout].order, spec.splits, pages)
    return Host(nbytes, _open_records(spec, sizes, dtypes, variants, found))


@dataclass(frozen=True)
class _Tensor:
    """One device tensor in the arena: `offset` of its first byte, `first` of page 0 in it; axes as (name,
    extent, bytes a step). `rows`: how many there are when pages and tokens are one dimension."""

    dtype: torch.dtype
    offset: int
    first: int
    axes: tuple[tuple[str, int, int], ...]
    rows: int | None

    def bound(self, arena: torch.Tensor) -> torch.Tensor:
        """The tensor as an engine has it."""
        axes = list(self.axes)
        if self.rows is not None:
            at = [name for name, _, _ in axes].index("page")
            axes[at : at + 2] = [("row", self.rows, axes[at + 1][2])]
        size = self.dtype.itemsize
        made = torch.empty(0, dtype=self.dtype, device=arena.device)
        shape, strides = [e for _, e, _ in axes], [s // size for _, _, s in axes]
        return made.set_(arena.untyped_storage(), self.offset // size, shape, strides)

    def positions(self, pages: int) -> tuple[tuple[str, ...], torch.Tensor]:
        """Axes and offsets of every item of pages 0 and on."""
        at = torch.tensor(self.offset + self.first)
        for name, extent, step in self.axes:
            at = at[..., None] + torch.arange(pages if name == "page" else extent) * step
        return tuple(name for name, _, _ in self.axes), at


def device(
    spec: PoolSpec,
    sizes: Mapping[str, int],
    dtypes: Mapping[str, torch.dtype],
    variants: Mapping[str, str],
    form: str,
    pages: int,
    lists: Mapping[str, tuple[int, ...]],
    shift: int = 0,
    where: str | torch.device = "cpu",
) -> Device:
    """Device tensors of a form with so many pages, in one arena; each starts `shift` bytes off 16.

    `lists`: layer ids by list.
    """
    placed = [part for part in parts(spec, sizes, dtypes) if not part.empty]
    chosen = spec.forms[form]
    listed = "layer" in chosen.tensors
    used = {part.layers for part in placed if part.layers is not None}
    single = lists[min(used)] if len(used) == 1 else None
    # Engines hold more layers than one pool keeps.
    layer_ids = (0, *single) if listed and single is not None else single
    arena = _Arena(shift)
    made: dict[str, tuple[bool, list[_Tensor]]] = {}
    found: list[Bytes] = []
    apart = bool(set(MARKERS) & set(chosen.tensors))
    tokens = sizes["page_size"] if has_tokens(spec) else 1
    for group in [[part] for part in placed] if apart else [placed] if placed else []:
        shape = _shape(spec, chosen, group, chosen.first_row(sizes), tokens, pages)
        name = group[0].name if apart else spec.name
        tabled = listed and "layer" in dict(group[0].axes)
        layers = lists[group[0].layers or ""] if tabled else ()
        ids = (layer_ids or layers) if tabled else (0,)
        tensors = [shape.at(arena) for _ in ids]
        made[name] = tabled, tensors
        wanted = [tensors[ids.index(layer)] for layer in layers] if tabled else tensors
        found += shape.logical(group, wanted, tabled, pages)
    memory = torch.zeros(arena.end + GUARD, dtype=torch.uint8, device=where)
    bound = {
        name: [tensor.bound(memory) for tensor in some] if tabled else some[0].bound(memory)
        for name, (tabled, some) in made.items()
    }
    return Device(memory, bound, layer_ids, _open_records(spec, sizes, dtypes, variants, found))


GUARD = 160
"""Bytes between tensors; a multiple of 16."""


class _Arena:
    """Hands out places in the arena."""

    def __init__(self, shift: int) -> None:
        self.end, self._shift = 0, shift

    def take(self, nbytes: int) -> int:
        start = align_up(self.end, 16) + GUARD + self._shift
        self.end = start + nbytes
        return start


@dataclass(frozen=True)
class _Shape:
    """What all tensors of a component, or of components side by side in one, look like.

    `blocks`: components that differ are bytes of a block; where the bytes of each lie in it.
    """

    dtype: torch.dtype
    axes: tuple[tuple[str, int, int], ...]
    nbytes: int
    first: int
    rows: int | None
    blocks: tuple[Bytes, ...]

    def at(self, arena: _Arena) -> _Tensor:
        return _Tensor(self.dtype, arena.take(self.nbytes), self.first, self.axes, self.rows)

    def logical(
        self, group: Sequence[Part], tensors: Sequence[_Tensor], tabled: bool, pages: int
    ) -> list[Bytes]:
        """Offsets of each part of a group in logical order."""
        names = ["layer" if tabled else "table", *(name for name, _, _ in self.axes)]
        whole = torch.stack([tensor.positions(pages)[1] for tensor in tensors])
        found = []
        for index, part in enumerate(group):
            axes, at = list(names), whole
            if self.blocks:
                block = self.blocks[index]
                axes, at = [*axes[:-1], *block.axes[1:]], at[..., block.at[0]]
            else:
                axes, at = [*axes, "byte"], at[..., None] + torch.arange(part.itemsize)
            for gone, position in (("table", 0), ("component", index)):
                if gone in axes:
                    at = at.select(axes.index(gone), position)
                    axes.remove(gone)
            turned = at.permute([axes.index(axis) for axis in part.names])
            found.append(Bytes(part.name, part.names, turned, part.layers))
        return found


def _shape(spec: PoolSpec, form: Form, group: Sequence[Part], base: int, tokens: int, pages: int) -> _Shape:
    """One component's tensors, or those that all components of `group` share; page 0 at row `base`."""
    part = group[0]
    order = [axis for axis in expand(form.order, part, spec.splits) if axis not in form.tensors]
    extents, dtype = dict(part.axes), part.dtype
    blocks: tuple[Bytes, ...] = ()
    if set(MARKERS) & set(form.tensors):
        order = [axis for axis in order if axis != "component"]
    elif any(other.axes != part.axes or other.dtype != part.dtype for other in group):
        left = order[: order.index("component")]
        extents["block"], blocks = _blocks(spec, form, group, left)
        order, dtype = [*left, "block"], torch.uint8
    names = [*order, ""]
    merged = names[names.index("page") + 1] == "token" and "page" not in form.any_stride
    rows = base + pages * tokens + (tokens // 2 if order[0] == "page" else 0) if merged else None
    extents |= {"page": base // tokens + pages, "component": len(group)}
    axes: list[tuple[str, int, int]] = []
    steps: dict[str, int] = {}
    step = dtype.itemsize
    for axis in reversed(order):
        step = align_up(step, part.align) if axis == "component" else step
        steps[axis] = step = step + 32 * (axis in form.any_stride)
        axes.insert(0, (axis, extents[axis], step))
        step = rows * steps["token"] if axis == "page" and rows is not None else step * extents[axis]
    first = base * steps["token"] if merged else base // tokens * steps["page"]
    return _Shape(dtype, tuple(axes), step, first, rows, blocks)


def _blocks(
    spec: PoolSpec, form: Form, group: Sequence[Part], left: Sequence[str]
) -> tuple[int, tuple[Bytes, ...]]:
    """Bytes of unequal components side by side, and where each lies."""
    outside = (*left, *form.tensors)
    inside = [replace(part, axes=tuple(a for a in part.axes if a[0] not in outside)) for part in group]
    marker = next(at for at, axis in enumerate(form.order) if axis in MARKERS)
    flat, found = _arrange(inside, form.order[marker:], spec.splits, 1)
    return flat, tuple(found)
