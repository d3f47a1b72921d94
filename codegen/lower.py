"""Lowering: a pool becomes one program per variant, form and layout, with every address decided.

In: `ir.Pool`. Out: `ir.Lowered`. Sizes stay symbolic; what is decided here is structure: which axes are
constants, which are read from tensors, how long a run is contiguous on both sides, which host bytes of a
page are one range. Templates only print it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from poolwright.codegen import algebra, expr
from poolwright.codegen.algebra import Block, OrderError, Part, Placed
from poolwright.codegen.expr import ONE, Expr, integer
from poolwright.codegen.ir import (
    Axis,
    Component,
    Form,
    Item,
    Layout,
    Lowered,
    Pool,
    Program,
    Range,
    Record,
    Side,
    Stride,
    Walk,
)

UNKNOWN = frozenset({"pages"})
"""Symbols that are no constants of a compiled program: the host's capacity is an argument."""


class LowerError(ValueError):
    """A pool whose parts cannot be combined; `where` is a dotted path in its spec."""

    def __init__(self, pool: Pool, where: str, message: str) -> None:
        super().__init__(message)
        self.pool, self.where, self.message = pool, where, message


def lower(pool: Pool) -> Lowered:
    """All programs of a pool. Raises LowerError."""
    _check_names(pool)
    _check_row(pool)
    programs = [
        _program(pool, choice, form, index, layout)
        for choice in choices(pool)
        for form in pool.forms
        for index, layout in enumerate(pool.layouts)
    ]
    _check_distinct(pool, programs)
    return Lowered(pool, tuple(programs), _by_layer(pool))


def _by_layer(pool: Pool) -> tuple[str, ...]:
    """Loads come in layer order. Rows that change wait in staging memory to be captured, and their pages are
    large: a write-back of those is cut into layers, too. Other pools are spared the kernels."""
    return ("write_back", "load") if pool.updates == "in_place" else ("load",)


ROW = expr.parse("i // page_size")


def _check_row(pool: Pool) -> None:
    """The one conversion that transfers make: ids of whole pages to page rows."""
    if pool.index.row is not None and pool.index.row != ROW:
        raise LowerError(pool, "index.row", "only the row `i // page_size` (whole pages) is converted")


def _check_distinct(pool: Pool, programs: list[Program]) -> None:
    """No two names of generated code may fall together."""
    families = ["_".join(value for _, value in choice) for choice in choices(pool)]
    _check_once(pool, "variants", "combination of variants", families)
    for choice in choices(pool):
        idents = [p.ident for p in programs if p.variant == choice]
        _check_once(pool, "device", "form and layout", idents)
    names = [name for name, _ in extents(specialise(pool, choices(pool)[0]))]
    _check_once(pool, "components", "component and dim", names)
    ends = [f"{i.ident}_{w.name}" for i in programs[0].items for w in i.walks]
    ends += [f"{i.ident}_{axis.name}" for i in programs[0].items for axis in i.host.axes]
    _check_once(pool, "components", "component", ends)


def _check_once(pool: Pool, where: str, what: str, names: list[str]) -> None:
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise LowerError(pool, where, f"two {what} names make {twice!r} in generated code: rename one")


def choices(pool: Pool) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Every combination of variant choices; one empty combination without variants."""
    tables = [[(v.name, choice) for choice, _ in v.choices] for v in pool.variants]
    return tuple(itertools.product(*tables))


def specialise(pool: Pool, choice: tuple[tuple[str, str], ...]) -> Pool:
    """The pool with one choice of each variant filled in."""
    values: dict[str, Expr] = {}
    orders: dict[str, tuple[str, ...]] = {}
    for variant in pool.variants:
        for name, constant in dict(variant.choices)[dict(choice)[variant.name]]:
            if isinstance(constant, int):
                values[f"{variant.name}.{name}"] = integer(constant)
            else:
                orders[f"{variant.name}.{name}"] = constant
    if not values and not orders:
        return pool
    return replace(
        pool,
        components=tuple(_fill_component(c, values) for c in pool.components),
        records=tuple(_fill_record(r, values, orders) for r in pool.records),
        params=tuple(
            replace(p, equals=None if p.equals is None else expr.substitute(p.equals, values))
            for p in pool.params
        ),
        require=tuple(expr.substitute_cond(c, values) for c in pool.require),
    )


def _fill_component(component: Component, values: Mapping[str, Expr]) -> Component:
    return replace(
        component,
        dims=tuple(replace(d, size=expr.substitute(d.size, values)) for d in component.dims),
        when=None if component.when is None else expr.substitute_cond(component.when, values),
        align=None if component.align is None else expr.substitute(component.align, values),
    )


def _fill_record(record: Record, values: Mapping[str, Expr], orders: Mapping[str, tuple[str, ...]]) -> Record:
    inner = orders.get(record.inner[0], record.inner) if len(record.inner) == 1 else record.inner
    return replace(record, inner=inner, pad_to=expr.substitute(record.pad_to, values))


# ---- parts ------------------------------------------------------------------------------------


def parts_of(pool: Pool) -> tuple[Part, ...]:
    """What is placed: every component that no record holds, and every record as one padded row."""
    held = {name for record in pool.records for name in record.holds}
    alone = [algebra.component_part(pool, c) for c in pool.components if c.name not in held]
    return tuple(alone + [_record_part(pool, record) for record in pool.records])


def record_block(pool: Pool, record: Record) -> Block:
    """The components of a record placed inside its row."""
    members = [c for name in record.holds for c in pool.components if c.name == name]
    inside = [
        replace(part, axes={a: e for a, e in part.axes.items() if a in part.dims})
        for part in (algebra.component_part(pool, c) for c in members)
    ]
    try:
        return algebra.place(pool, inside, record.inner)
    except OrderError as error:
        raise LowerError(pool, f"records.{record.name}.inner", str(error)) from None


def _record_part(pool: Pool, record: Record) -> Part:
    members = [algebra.component_part(pool, c) for c in pool.components if c.name in record.holds]
    outer = {axis: size for axis, size in members[0].axes.items() if axis in ("page", "token", "layer")}
    row = expr.symbol(f"extent_{record.ident}_row")
    return Part(
        name=record.name,
        ident=record.ident,
        itemsize=ONE,
        align=ONE,
        axes={**outer, "row": row},
        dims=("row",),
        layers=members[0].layers,
        token="token" in outer,
        present=ONE,
        sizes={**outer, "row": row},
    )


def extents(pool: Pool) -> tuple[tuple[str, Expr], ...]:
    """Named constants of the pool: element extents, alignments of what may be empty, padded rows."""
    result: list[tuple[str, Expr]] = []
    for component in pool.components:
        dims = algebra.split_dims(pool, component.dims)
        named = [(f"extent_{component.ident}_{dim.name}", dim.size) for dim in dims]
        result += named
        align = algebra.alignment(pool, component)
        if align != algebra.full_alignment(component):
            whole = expr.product([expr.symbol(name) for name, _ in named])
            there = expr.binary("min", whole, ONE) * algebra.present(component)
            result.append((f"align_{component.ident}", ONE + (algebra.full_alignment(component) - 1) * there))
    for record in pool.records:
        size = expr.align_up(record_block(pool, record).total, record.pad_to)
        result.append((f"extent_{record.ident}_row", size))
    return tuple(result)


# ---- one program ------------------------------------------------------------------------------


def _program(
    pool: Pool, choice: tuple[tuple[str, str], ...], form: Form, index: int, layout: Layout
) -> Program:
    filled = specialise(pool, choice)
    parts = parts_of(filled)
    try:
        host = algebra.place(filled, parts, layout.order)
    except OrderError as error:
        raise LowerError(pool, f"layouts[{index}]", f"layout {layout.name}: {error}") from None
    devices = _devices(filled, parts, form)
    items = tuple(_item(filled, placed, *device) for placed, device in zip(host.placed, devices, strict=True))
    name = "_".join([*(value for _, value in choice), form.name, layout.name])
    return Program(
        ident=name,
        variant=choice,
        form=form,
        layout=layout,
        items=items,
        host_bytes=host.total,
        page_bytes=_page_bytes(host),
        ranges=_ranges(host),
        steps=tuple((f"host_{ident}_{axis}", value) for ident, axis, value in host.steps),
        token_walk=pool.has_tokens and all(item.token for item in items),
        cuts=_cuts(layout, items),
    )


def _cuts(layout: Layout, items: tuple[Item, ...]) -> bool:
    """Whether each layer of each component is one run of the host page: nothing but `page`, `component` and
    other layers stands in front of what a layer holds."""
    known = {axis.name for item in items for axis in item.host.axes}
    if "layer" not in known:
        return False
    outer = {"page", "component", "layer"}
    order = [axis for axis in layout.order if axis in known or axis in ("component", "element")]
    last = max(order.index(axis) for axis in outer if axis in order)
    return set(order[:last]) <= outer


def _devices(pool: Pool, parts: tuple[Part, ...], form: Form) -> tuple[tuple[Side, tuple[str, ...]], ...]:
    """The device side of every part and its axes right of `component`, in the order of `parts`."""
    together = not {"component", "record"} & set(form.tensors)
    if together and "layer" in form.tensors:
        _check_one_list(pool, form, parts)
    order = tuple(axis for axis in form.order if axis not in form.tensors)
    inside = tuple(_without(part, form.tensors) for part in parts)
    block: Expr | None = None
    try:
        if together:
            whole = algebra.place(pool, inside, order)
            placed, block = whole.placed, whole.size
        else:
            placed = tuple(algebra.place(pool, (part,), order).placed[0] for part in inside)
    except OrderError as error:
        raise LowerError(pool, f"device.{form.name}.order", f"form {form.name}: {error}") from None
    _check_any(pool, form, placed)
    sides = tuple(
        (_device(form, part, p, block), p.axes[len(p.axes) - p.inner :])
        for part, p in zip(parts, placed, strict=True)
    )
    if together and len(parts) > 1 and _component_left_of_page(form):
        _check_equal_blocks(pool, form, parts)
    return sides


def _check_one_list(pool: Pool, form: Form, parts: tuple[Part, ...]) -> None:
    """Tensors that every layer has one of hold components of the same layers."""
    first = parts[0]
    for part in parts[1:]:
        if part.layers != first.layers:
            raise LowerError(
                pool,
                f"device.{form.name}.tensors",
                f"form {form.name}: one tensor a layer holds {first.name} and {part.name}, so both must have "
                f"the same layers, not {first.layers or 'none'} and {part.layers or 'none'}; "
                f"index tensors by component",
            )


def _without(part: Part, tensors: tuple[str, ...]) -> Part:
    return replace(part, axes={axis: size for axis, size in part.axes.items() if axis not in tensors})


def _component_left_of_page(form: Form) -> bool:
    order = list(form.order)
    marker = next((a for a in ("component", "record") if a in order), None)
    return marker is not None and order.index(marker) < order.index("page")


def _check_any(pool: Pool, form: Form, placed: tuple[Placed, ...]) -> None:
    """`stride: any` is for an axis of tensors, not for one inside the block of a shared tensor."""
    shared = len(placed) > 1 and not {"component", "record"} & set(form.tensors)
    known = {axis for one in placed for axis in one.axes}
    inside = {axis for one in placed if shared for axis in one.axes[len(one.axes) - one.inner :]}
    for axis in form.any_stride:
        if axis not in known or axis in inside:
            raise LowerError(
                pool,
                f"device.{form.name}.stride",
                f"form {form.name}: the stride of {axis} cannot be any; axes that can: "
                f"{', '.join(sorted(known - inside)) or 'none'}",
            )


def _check_equal_blocks(pool: Pool, form: Form, parts: tuple[Part, ...]) -> None:
    """A component axis left of page in one tensor has one step, so all components must be alike."""
    first = parts[0]
    for part in parts[1:]:
        if part.itemsize != first.itemsize or list(part.sizes.items()) != list(first.sizes.items()):
            raise LowerError(
                pool,
                f"device.{form.name}.order",
                f"form {form.name}: component stands left of page in one tensor, so every component must "
                f"have the same shape and dtype: {first.name} and {part.name} differ",
            )


def _device(form: Form, part: Part, placed: Placed, block: Expr | None) -> Side:
    """Axes at or left of an axis whose stride is not known before bind get no constant stride.

    `block`: bytes of the components side by side in a tensor that they share. The table of tensors holds
    where the component itself starts: `base` is added at bind, or the step that the tensor has when
    `component` stands left of `page`.
    """
    axes = placed.axes
    page = axes.index("page")
    dynamic = [i for i, axis in enumerate(axes) if axis in form.any_stride or i < page]
    last = max(dynamic, default=-1)
    strides = tuple(Stride(axis, None if i <= last else placed.strides[i]) for i, axis in enumerate(axes))
    table = tuple(
        Axis(axis, part.axes[axis]) for axis in form.tensors if axis == "layer" and axis in part.axes
    )
    inner = None if block is None else placed.inner
    if block is not None and page >= len(axes) - placed.inner:
        return Side(algebra.axes_of(part, axes), expr.ZERO, strides, table, inner)
    return Side(algebra.axes_of(part, axes), placed.base, strides, table, inner, block)


def _item(pool: Pool, host: Placed, device: Side, inside: tuple[str, ...]) -> Item:
    part = host.part
    component = next((c for c in pool.components if c.name == part.name), None)
    side = Side(
        algebra.axes_of(part, host.axes),
        host.base,
        tuple(Stride(axis, value) for axis, value in zip(host.axes, host.strides, strict=True)),
    )
    outers: dict[str, tuple[str, ...]] = {"pages": ("page",)}
    if part.token:
        outers["tokens"] = ("page", "token")
    if part.layers is not None:
        outers["layer_pages"] = ("layer", "page")
        if part.token:
            outers["layer_tokens"] = ("layer", "page", "token")
    return Item(
        name=part.name,
        ident=part.ident,
        itemsize=part.itemsize,
        layers=part.layers,
        token=part.token,
        present=None if component is None else component.when,
        host=side,
        device=device,
        walks=tuple(_walk(name, outer, host, device, inside) for name, outer in outers.items()),
    )


def _walk(name: str, outer: tuple[str, ...], host: Placed, device: Side, inside: tuple[str, ...]) -> Walk:
    part = host.part
    unknown = {s.axis for s in device.strides if s.value is None}
    atom = algebra.common_suffix(host, inside, frozenset(outer) | unknown)
    loops = tuple(axis for axis in host.axes if axis not in outer and axis not in atom)
    size = expr.product([part.itemsize, *(part.axes[axis] for axis in reversed(atom))])
    stepped = [axis for axis in host.axes if axis not in atom]
    steps = [host.strides[host.axes.index(axis)] for axis in stepped] + [host.base]
    on_device = {stride.axis: stride.value for stride in device.strides}
    for axis in stepped:
        value = on_device.get(axis)
        if value is not None:
            steps.append(value)
    return Walk(
        name=name,
        outer=outer,
        loops=algebra.axes_of(part, loops),
        atom=algebra.axes_of(part, atom),
        atom_bytes=size,
        runs=expr.product([part.axes[axis] for axis in loops] + [part.present]),
        grain=expr.gcd([size, *(expr.grain(step, UNKNOWN) for step in steps)]),
    )


def runs_inside_layer(item: Item, walk: Walk) -> Expr:
    """Runs of one layer that lie before the same runs of the next layer on the host."""
    order = [axis.name for axis in item.host.axes]
    inside = order[order.index("layer") :]
    return expr.product([axis.extent for axis in walk.loops if axis.name in inside])


# ---- ranges -----------------------------------------------------------------------------------


def _page_bytes(host: Block) -> Expr:
    """Bytes that one page takes: everything that is multiplied by `pages`."""
    if not host.placed:
        return expr.ZERO
    if "page" in host.left:
        inside = host.left[host.left.index("page") + 1 :]
        axes = host.placed[0].part.axes
        return expr.product([host.size, *(axes[axis] for axis in inside)]) * _outside(host)
    result: Expr = integer(0)
    for placed in host.placed:
        part = placed.part
        sizes = [
            part.axes[axis] for axis in reversed(placed.axes) if axis != "page" and axis not in host.left
        ]
        result = result + expr.product([part.itemsize, *sizes, part.present])
    return result * _outside(host)


def _outside(host: Block) -> Expr:
    axes = host.placed[0].part.axes
    names = host.left[: host.left.index("page")] if "page" in host.left else host.left
    return expr.product([axes[axis] for axis in names])


def _ranges(host: Block) -> tuple[Range, ...]:
    """Contiguous host bytes of one page: one set for all parts when `page` stands outside `component`."""
    if "page" in host.left:
        placed = host.placed[0]
        return (_range(None, placed, expr.ZERO),)
    return tuple(_range(placed.part.ident, placed, placed.base) for placed in host.placed)


def _range(ident: str | None, placed: Placed, base: Expr) -> Range:
    at = placed.axes.index("page")
    left = tuple(
        (Axis(axis, placed.part.axes[axis]), placed.strides[i]) for i, axis in enumerate(placed.axes[:at])
    )
    return Range(ident, base, left, placed.strides[at])


# ---- names ------------------------------------------------------------------------------------

PYTHON_LOCALS = ("sizes", "pages", "align_up", "gcd", "min", "max", "self", "torch")


def _check_names(pool: Pool) -> None:
    """Parameters become constants beside generated names: none may be one of those."""
    taken = set(PYTHON_LOCALS)
    for name, _ in extents(specialise(pool, choices(pool)[0])):
        taken.add(name)
    taken |= {f"itemsize_{name}" for name, _ in pool.dtypes}
    taken |= {f"{kind}_{c.ident}" for kind in ("present", "align") for c in pool.components}
    for param in pool.params:
        if param.name in taken or param.name.startswith(("host_", "device_", "atom_", "runs_", "grain_")):
            raise LowerError(
                pool, f"params.{param.name}", f"parameter {param.name!r} is a name that generated code uses"
            )
