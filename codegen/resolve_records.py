"""Records of a pool document, checked against the components that they hold."""

from __future__ import annotations

from collections.abc import Sequence

from poolwright.codegen import ir, schema
from poolwright.codegen.collect import check_list
from poolwright.codegen.context import Context
from poolwright.codegen.names import name_problem, shorten, suggest
from poolwright.codegen.nodes import Path
from poolwright.codegen.orders import FORM_STEP
from poolwright.codegen.resolve_components import positive


def records(ctx: Context, components: tuple[ir.Component, ...]) -> tuple[ir.Record, ...]:
    """The records; with any, every component is held by exactly one."""
    names = {c.name: c for c in components}
    idents = {c.ident for c in components}
    held: dict[str, str] = {}
    result = []
    for name, record in ctx.spec.records.items():
        at: Path = ("records", name)
        ctx.checks.name(at, name_problem(name))
        with ctx.checks.part():
            if name in idents:
                ctx.checks.fail(at, f"{name!r} is a component already: take another name", key=True)
            check_list(ctx.checks, record.holds, (*at, "holds"))
            members = _members(ctx, at, record, components)
            _check_members(ctx, at, members)
            for member in members:
                if member.name in held:
                    message = f"record {held[member.name]!r} holds {member.name!r} already"
                    ctx.checks.fail((*at, "holds"), message)
                held[member.name] = name
            inner = _inner(ctx, (*at, "inner"), record, members)
            pad_to = positive(ctx, (*at, "pad_to"), record.pad_to)
            result.append(ir.Record(name, name, tuple(member.name for member in members), inner, pad_to))
    if ctx.spec.records and not ctx.checks.errors:
        for left in names:
            if left not in held:
                message = "no record holds this component; in a pool with records each is held by one"
                ctx.checks.name(("components", left.split("[")[0]), message)
    return tuple(result)


def _members(
    ctx: Context, at: Path, record: schema.Record, components: tuple[ir.Component, ...]
) -> list[ir.Component]:
    members: list[ir.Component] = []
    for index, name in enumerate(record.holds):
        found = [c for c in components if name in (c.name, c.name.split("[")[0])]
        if name not in ctx.spec.components and not found:
            known = [c.name for c in components]
            ctx.checks.fail((*at, "holds", index), f"unknown component {shorten(name)}{suggest(name, known)}")
        members += found
    return members


def _check_members(ctx: Context, at: Path, members: Sequence[ir.Component]) -> None:
    """A row is placed as one: what it holds has the same layers, tokens and condition."""
    for one in members[1:]:
        same = (one.layers, one.token, one.when) == (members[0].layers, members[0].token, members[0].when)
        if not same:
            message = f"{members[0].name!r} and {one.name!r} differ in layers, per or when"
            ctx.checks.fail((*at, "holds"), f"{message}: a record holds components that agree in all three")


def _inner(
    ctx: Context, path: Path, record: schema.Record, members: Sequence[ir.Component]
) -> tuple[str, ...]:
    orders = [tuple(record.inner)]
    if len(record.inner) == 1 and "." in record.inner[0]:
        orders = _inner_constant(ctx, path, record.inner[0])
    for order in orders:
        _check_inner(ctx, path, order, members, named=len(orders) > 1 or order != tuple(record.inner))
    return tuple(record.inner)


def _inner_constant(ctx: Context, path: Path, text: str) -> list[tuple[str, ...]]:
    name, _, constant = text.partition(".")
    variant = next((v for v in ctx.variants if v.name == name), None)
    if variant is None:
        known = suggest(name, ctx.spec.variants)
        ctx.checks.fail((*path, 0), f"unknown variant {shorten(name)}{known}")
    orders = [dict(constants).get(constant) for _, constants in variant.choices]
    ctx.scope.used.add(name)
    result = [order for order in orders if isinstance(order, tuple)]
    if len(result) != len(orders):
        ctx.checks.fail((*path, 0), f"variant {name!r} has no axis order {shorten(constant)}")
    return result


def _check_inner(
    ctx: Context, path: Path, order: tuple[str, ...], members: Sequence[ir.Component], named: bool
) -> None:
    dims = {dim.name for member in members for dim in member.dims}
    for index, axis in enumerate(order):
        at = path if named else (*path, index)
        if axis not in dims and axis not in ("component", "element"):
            known = suggest(axis, ["component", "element", *sorted(dims)])
            ctx.checks.fail(at, f"no component of the record has an axis {shorten(axis)}{known}")
        if axis in order[:index]:
            ctx.checks.fail(at, f"axis {axis!r} is placed twice")
    if "component" not in order:
        ctx.checks.fail(path, "the order inside a record places 'component', this one does not")
    left = order[: order.index("component")]
    for member in members:
        sizes = {dim.name: dim.size for dim in member.dims}
        missing = [dim for dim in sizes if dim not in order and "element" not in order]
        if missing:
            left_out = f"{missing[0]!r} of component {member.name!r}"
            ctx.checks.fail(path, f"inner order has no place for {left_out}: {FORM_STEP}")
        for axis in left:
            if axis == "element" or sizes.get(axis) != {d.name: d.size for d in members[0].dims}.get(axis):
                message = f"axis {axis!r} stands left of component: it must have one extent in all components"
                ctx.checks.fail(path, message)
