"""Device forms, host layouts and conditions of a pool document, checked against what is placed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from poolwright.codegen import expr, ir
from poolwright.codegen.collect import check_distinct
from poolwright.codegen.context import Context
from poolwright.codegen.expr import Cond
from poolwright.codegen.names import name_problem, shorten, suggest
from poolwright.codegen.nodes import Path
from poolwright.codegen.orders import Placement, Thing

MAX_PROGRAMS = 256
MAX_PLACED = 1024
"""Components of all programs together: what building takes time for."""
NOTHING = "nothing"
"""The form and the layout of a pool that has no bytes."""

Splits = tuple[tuple[str, tuple[ir.Dim, ...]], ...]


def require(ctx: Context, components: tuple[ir.Component, ...], splits: Splits) -> tuple[Cond, ...]:
    """The conditions of the document, and that the parts of every split dim multiply to it."""
    result = []
    for index, text in enumerate(ctx.spec.require):
        with ctx.checks.part():
            result.append(ctx.scope.condition(("require", index), text))
    for name, parts in splits:
        whole = [dim.size for component in components for dim in component.dims if dim.name == name]
        product = expr.product([part.size for part in parts])
        result += [Cond("==", product, size) for size in dict.fromkeys(whole)]
    return tuple(dict.fromkeys(result))


def orders(
    ctx: Context,
    known: Mapping[str, ir.Layout],
    components: tuple[ir.Component, ...],
    records: tuple[ir.Record, ...],
    splits: Splits,
) -> tuple[tuple[ir.Form, ...], tuple[ir.Layout, ...]]:
    """Forms and layouts; `known`: all layouts by name. A pool without components has one of each, empty."""
    if not ctx.spec.components:
        return _nothing(ctx)
    _check_count(ctx, len(components))
    # Orders are checked against what is placed; with some of it unreadable every order would look wrong.
    trusted = not ctx.checks.errors
    parts = {name: tuple(dim.name for dim in dims) for name, dims in splits}
    things = _things(components, records) if trusted else ()
    placement = Placement(ctx.document, things, parts, ctx.spec.index.unit)
    return _forms(ctx, placement, trusted), _layouts(ctx, known, placement, trusted)


def _nothing(ctx: Context) -> tuple[tuple[ir.Form, ...], tuple[ir.Layout, ...]]:
    for key in ("device", "layouts", "records"):
        if getattr(ctx.spec, key):
            message = f"a pool without components places nothing: remove `{key}`, or add components"
            ctx.checks.name((key,), message)
    return (ir.Form(NOTHING, (), ()),), (ir.Layout(NOTHING, ()),)


def _check_count(ctx: Context, components: int) -> None:
    choices = [len(variant.choices) for variant in ctx.variants]
    programs = math.prod([*choices, len(ctx.spec.device), len(ctx.spec.layouts)])
    if programs > MAX_PROGRAMS:
        message = f"{programs} programs (variants x forms x layouts), at most {MAX_PROGRAMS} are generated"
        ctx.checks.name(("device",), message)
    elif programs * components > MAX_PLACED:
        message = (
            f"{programs} programs (variants x forms x layouts) of {components} components are "
            f"{programs * components} placements, at most {MAX_PLACED} are generated"
        )
        ctx.checks.name(("device",), message)


def _forms(ctx: Context, placement: Placement, trusted: bool) -> tuple[ir.Form, ...]:
    result = []
    if not ctx.spec.device:
        ctx.checks.name(("device",), "missing key 'device': components need a device form", key=False)
    for name, form in ctx.spec.device.items():
        at: Path = ("device", name)
        ctx.checks.name(at, name_problem(name))
        with ctx.checks.part():
            base = None if form.base is None else ctx.scope.size((*at, "base"), form.base)
            for axis in form.stride:
                if axis not in form.order:
                    message = f"{shorten(axis)} is no axis of this order{suggest(axis, form.order)}"
                    ctx.checks.fail((*at, "stride", axis), message, key=True)
            if trusted:
                tensors, order = placement.form(name, form.tensors, form.order)
                strides = tuple("component" if a == "record" else a for a in form.stride)
                result.append(ir.Form(name, tensors, order, strides, base))
    return tuple(result)


def _layouts(
    ctx: Context, known: Mapping[str, ir.Layout], placement: Placement, trusted: bool
) -> tuple[ir.Layout, ...]:
    result = []
    if not ctx.spec.layouts:
        ctx.checks.name(("layouts",), "missing key 'layouts': components need a host layout", key=False)
    with ctx.checks.part():
        check_distinct(ctx.checks, ctx.spec.layouts, ("layouts",))
    for index, name in enumerate(ctx.spec.layouts):
        with ctx.checks.part():
            if name not in known:
                names = ", ".join(sorted(known))
                message = f"unknown layout {shorten(name)}{suggest(name, known)}; layouts are {names}"
                ctx.checks.fail(("layouts", index), message)
            layout = known[name]
            if trusted:
                placement.layout(name, layout.order, ("layouts", index))
            result.append(layout)
    return tuple(result)


def _things(components: tuple[ir.Component, ...], records: tuple[ir.Record, ...]) -> tuple[Thing, ...]:
    """What orders place: records, or the components of a pool without records."""
    if not records:
        return tuple(
            Thing("component", c.name, tuple(dim.name for dim in c.dims), c.layers is not None, c.token)
            for c in components
        )
    first = {record.name: next(c for c in components if c.name == record.holds[0]) for record in records}
    return tuple(
        Thing("record", r.name, ("inner",), first[r.name].layers is not None, first[r.name].token)
        for r in records
    )
