"""Axis algebra: orders of axes become extents, strides, common runs and contiguous ranges.

One function, `place`, lays components side by side in an order of axes. It serves the host layout, the
device form and the inside of a record; only which axes stand outside `component` differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poolwright.codegen import expr
from poolwright.codegen.expr import ONE, ZERO, Expr, symbol
from poolwright.codegen.ir import Axis, Component, Dim, Pool

PAGES = symbol("pages")
PAGE_SIZE = symbol("page_size")


class OrderError(ValueError):
    """Two orders that cannot be combined; `axis` is the token to point at."""

    def __init__(self, message: str, axis: str | None = None) -> None:
        super().__init__(message)
        self.axis = axis


@dataclass(frozen=True)
class Part:
    """What is placed: a component or a record.

    `axes`: every axis it has with the symbol of its extent; `sizes`: what those symbols stand for.
    """

    name: str
    ident: str
    itemsize: Expr
    align: Expr
    axes: Mapping[str, Expr]
    dims: tuple[str, ...]
    layers: str | None
    token: bool
    present: Expr
    sizes: Mapping[str, Expr]


@dataclass(frozen=True)
class Placed:
    """A part inside a block: its axes outermost first, the byte it starts at, bytes per step of each axis."""

    part: Part
    base: Expr
    axes: tuple[str, ...]
    strides: tuple[Expr, ...]
    inner: int  # how many of the last axes stand right of `component`


@dataclass(frozen=True)
class Block:
    """Parts side by side. `size`: bytes right of `component`; `total`: bytes of everything."""

    placed: tuple[Placed, ...]
    left: tuple[str, ...]
    size: Expr
    total: Expr


def itemsize(component: Component) -> Expr:
    """Bytes of one item: a symbol of its dtype group, or the fixed dtype's size."""
    from poolwright.codegen.dtypes import DTYPES

    if component.storage.group is not None:
        return symbol(f"itemsize_{component.storage.group}")
    assert component.storage.dtype is not None
    return expr.integer(DTYPES[component.storage.dtype].itemsize)


def present(component: Component) -> Expr:
    """1, or the symbol that is 0 when the component's `when` is false."""
    return ONE if component.when is None else symbol(f"present_{component.ident}")


def split_dims(pool: Pool, dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """Element dims with split ones replaced by their parts."""
    parts = dict(pool.splits)
    return tuple(piece for dim in dims for piece in parts.get(dim.name, (dim,)))


def component_part(pool: Pool, component: Component) -> Part:
    """The part of a component that is placed on its own."""
    dims = split_dims(pool, component.dims)
    axes: dict[str, Expr] = {"page": PAGES}
    if pool.has_tokens and component.token:
        axes["token"] = PAGE_SIZE
    if component.layers is not None:
        axes["layer"] = symbol(component.layers)
    axes |= {dim.name: symbol(f"extent_{component.ident}_{dim.name}") for dim in dims}
    size = itemsize(component)
    return Part(
        name=component.name,
        ident=component.ident,
        itemsize=size,
        align=component.align if component.align is not None else size,
        axes=axes,
        dims=tuple(dim.name for dim in dims),
        layers=component.layers,
        token="token" in axes,
        present=present(component),
        sizes=axes | {dim.name: dim.size for dim in dims},
    )


def expand(pool: Pool, part: Part, order: Sequence[str]) -> tuple[str, ...]:
    """Axis names of one part in this order, `component` kept as a marker.

    `element` (and a record's `inner`) stands for the element dims not named; a split dim for its parts;
    axes that the part lacks drop out. Raises OrderError when an axis finds no place.
    """
    splits = {name: tuple(dim.name for dim in parts) for name, parts in pool.splits}
    named = {piece for axis in order for piece in splits.get(axis, (axis,))}
    result: list[str] = []
    for axis in order:
        if axis in ("component", "record"):
            result.append("component")
        elif axis in ("element", "inner"):
            result += [dim for dim in part.dims if dim not in named]
        else:
            result += [piece for piece in splits.get(axis, (axis,)) if piece in part.axes]
    missing = [axis for axis in part.axes if axis not in result]
    if missing:
        raise OrderError(f"order [{', '.join(order)}] has no place for {', '.join(missing)} of {part.name}")
    return tuple(result)


def place(pool: Pool, parts: Sequence[Part], order: Sequence[str]) -> Block:
    """Lay the parts side by side in `order`. Raises OrderError when an axis left of `component` differs."""
    expanded = [expand(pool, part, order) for part in parts]
    left = _left(parts, expanded)
    placed: list[Placed] = []
    end: Expr = ZERO
    for part, axes in zip(parts, expanded, strict=True):
        right = axes[axes.index("component") + 1 :] if "component" in axes else axes
        strides: dict[str, Expr] = {}
        size = part.itemsize
        for axis in reversed(right):
            strides[axis] = size
            size = size * part.axes[axis]
        base = expr.align_up(end, _alignment(part)) if placed else ZERO
        end = base + size * part.present
        placed.append(Placed(part, base, left + right, tuple(strides[a] for a in right), len(right)))
    block = _round_to_largest(end, parts) if len(parts) > 1 else end
    total = block
    outer: list[Expr] = []
    for axis in reversed(left):
        outer.insert(0, total)
        total = total * parts[0].axes[axis]
    return Block(
        placed=tuple(Placed(p.part, p.base, p.axes, tuple(outer) + p.strides, p.inner) for p in placed),
        left=left,
        size=block,
        total=total,
    )


def _left(parts: Sequence[Part], expanded: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Axes outside `component`; they must be the same, with the same extents, for all parts."""
    lefts = [axes[: axes.index("component")] if "component" in axes else () for axes in expanded]
    for part, left in zip(parts, lefts, strict=True):
        for axis in (*lefts[0], *left):
            if axis not in left or axis not in lefts[0] or part.sizes[axis] != parts[0].sizes[axis]:
                raise OrderError(
                    f"axis {axis} stands left of component and must be the same for all of them: "
                    f"{parts[0].name} has {_extent(parts[0], axis)}, {part.name} has {_extent(part, axis)}",
                    axis,
                )
    return lefts[0]


def _extent(part: Part, axis: str) -> str:
    return expr.to_python(part.sizes[axis]) if axis in part.axes else "no such axis"


def _round_to_largest(end: Expr, parts: Sequence[Part]) -> Expr:
    """A ragged block ends at its largest alignment. Nothing to round when all blocks are one kind."""
    largest = _alignment(parts[0])
    for part in parts[1:]:
        if _alignment(part) != largest:
            largest = expr.binary("max", largest, _alignment(part))
    return expr.align_up(end, largest)


def _alignment(part: Part) -> Expr:
    """The alignment of a part; 1 when it is absent, so that it leaves no trace in the bytes."""
    return part.align if part.present == ONE else ONE + (part.align - 1) * part.present


def common_suffix(host: Placed, device: Sequence[str], stop: frozenset[str]) -> tuple[str, ...]:
    """The longest run of axes that is innermost and in one order on both sides, none of them in `stop`."""
    inner = host.axes[len(host.axes) - host.inner :]
    count = 0
    while count < min(len(inner), len(device)):
        axis = inner[-1 - count]
        if axis != device[-1 - count] or axis in stop:
            break
        count += 1
    return inner[len(inner) - count :]


def axes_of(part: Part, names: Sequence[str]) -> tuple[Axis, ...]:
    return tuple(Axis(name, part.axes[name]) for name in names)
