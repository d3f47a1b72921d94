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
    """Parts side by side. `size`: bytes right of `component`; `total`: bytes of everything.

    `steps`: (ident, axis or ``base``, bytes) of all parts, each made of those before it.
    """

    placed: tuple[Placed, ...]
    left: tuple[str, ...]
    size: Expr
    total: Expr
    steps: tuple[tuple[str, str, Expr], ...]


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


def alignment(pool: Pool, component: Component) -> Expr:
    """Where the component may start: a symbol when it may have no bytes, as they leave no trace then."""
    given = full_alignment(component)
    alone = given == ONE or len(pool.components) == 1
    return given if alone or not may_be_empty(pool, component) else symbol(f"align_{component.ident}")


def full_alignment(component: Component) -> Expr:
    """The alignment of a component that has bytes."""
    return itemsize(component) if component.align is None else component.align


def may_be_empty(pool: Pool, component: Component) -> bool:
    """Whether some parameters leave the component without bytes in a row."""
    if component.when is not None:
        return True
    known = bounds(pool)
    zeros = [cond.left for cond in pool.require if cond.op == "==" and cond.right == ZERO]
    even = frozenset(value for value in zeros if value is not None)
    return any(expr.interval(dim.size, known, even)[0] < 1 for dim in component.dims)


def bounds(pool: Pool) -> dict[str, expr.Interval]:
    """What the pool's constructor lets the parameters be."""
    known: dict[str, expr.Interval] = {"page_size": (1, None)}
    for param in pool.params:
        if param.equals is not None:
            found = expr.interval(param.equals, known)
        elif param.one_of:
            found = min(param.one_of), max(param.one_of)
        else:
            found = param.min or 0, param.max
        names = [param.name] if param.length is None else [f"{param.name}_{i}" for i in range(param.length)]
        known |= dict.fromkeys(names, found)
    return known


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
        align=alignment(pool, component),
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
    if not parts:
        return Block((), (), ZERO, ZERO, ())
    expanded = [expand(pool, part, order) for part in parts]
    left = _left(parts, expanded)
    placed: list[Placed] = []
    steps: list[tuple[str, str, Expr]] = []
    end: Expr = ZERO
    for part, axes in zip(parts, expanded, strict=True):
        right = axes[axes.index("component") + 1 :] if "component" in axes else axes
        strides: dict[str, Expr] = {}
        size = part.itemsize
        base = expr.align_up(end, part.align) if placed else ZERO
        steps.append((part.ident, "base", base))
        for axis in reversed(right):
            strides[axis] = size
            steps.append((part.ident, axis, size))
            size = size * part.axes[axis]
        end = base + size * part.present
        placed.append(Placed(part, base, left + right, tuple(strides[a] for a in right), len(right)))
    block = _round_to_largest(end, parts) if len(parts) > 1 else end
    total = block
    outer: list[Expr] = []
    for axis in reversed(left):
        outer.insert(0, total)
        steps += [(part.ident, axis, total) for part in parts]
        total = total * parts[0].axes[axis]
    return Block(
        placed=tuple(Placed(p.part, p.base, p.axes, tuple(outer) + p.strides, p.inner) for p in placed),
        left=left,
        size=block,
        total=total,
        steps=tuple(steps),
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
    return expr.to_text(part.sizes[axis]) if axis in part.axes else "no such axis"


def _round_to_largest(end: Expr, parts: Sequence[Part]) -> Expr:
    """A ragged block ends at its largest alignment. Nothing to round when all blocks are one kind."""
    largest: Expr = ONE
    for align in dict.fromkeys(part.align for part in parts):
        largest = align if largest == ONE else largest if align == ONE else expr.binary("max", largest, align)
    return expr.align_up(end, largest)


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
