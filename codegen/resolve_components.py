"""Components and split dims of a pool document, checked; repeats written out."""

from __future__ import annotations

from poolwright.codegen import expr, ir, schema
from poolwright.codegen.context import Context
from poolwright.codegen.dtypes import DTYPES, LOGICAL
from poolwright.codegen.expr import Expr
from poolwright.codegen.names import name_problem, shorten, suggest
from poolwright.codegen.nodes import Path
from poolwright.codegen.resolve_params import check_dtype

MAX_COMPONENTS = 64
"""Of a pool, repeated ones counted one by one."""


def components(ctx: Context) -> tuple[ir.Component, ...]:
    """The components in the order of the document, repeated ones as `name[0]`, `name[1]`."""
    result: list[ir.Component] = []
    idents: dict[str, str] = {}
    for name, component in ctx.spec.components.items():
        ctx.checks.name(("components", name), name_problem(name))
        with ctx.checks.part():
            for one in _instances(ctx, name, component):
                if idents.setdefault(one.ident, one.name) != one.name:
                    message = f"{one.name!r} and {idents[one.ident]!r} are both {one.ident} in generated code"
                    ctx.checks.fail(("components", name), f"{message}: rename one", key=True)
                result.append(one)
    if len(result) > MAX_COMPONENTS:
        ctx.checks.name(("components",), f"{len(result)} components, at most {MAX_COMPONENTS} are generated")
    return tuple(result)


def _instances(ctx: Context, name: str, component: schema.Component) -> list[ir.Component]:
    at: Path = ("components", name)
    if component.repeat is None:
        return [_component(ctx, at, name, name, component, None)]
    if not 1 <= component.repeat <= MAX_COMPONENTS:
        ctx.checks.fail((*at, "repeat"), f"expected 1 to {MAX_COMPONENTS}, got {component.repeat}")
    numbers = range(component.repeat)
    return [_component(ctx, at, f"{name}[{i}]", f"{name}_{i}", component, i) for i in numbers]


def _component(
    ctx: Context, at: Path, name: str, ident: str, component: schema.Component, instance: int | None
) -> ir.Component:
    for dim in component.element:
        _check_dim(ctx, dim, (*at, "element", dim))
    dims = tuple(
        ir.Dim(dim, ctx.scope.size((*at, "element", dim), size, instance=instance))
        for dim, size in component.element.items()
    )
    if component.per == "page" and not ctx.has_tokens:
        ctx.checks.fail(
            (*at, "per"), "the pages of this pool have no tokens: `per: page` says nothing, remove it"
        )
    when = component.when
    align = component.align
    return ir.Component(
        name=name,
        ident=ident,
        dims=dims,
        storage=_storage(ctx, (*at, "dtype"), component.dtype),
        layers=None if component.layers == "none" else component.layers,
        token=ctx.has_tokens and component.per != "page",
        when=None if when is None else ctx.scope.condition((*at, "when"), when, instance=instance),
        align=None if align is None else positive(ctx, (*at, "align"), align, instance),
        shard=_shard(ctx, (*at, "shard"), component),
    )


def positive(ctx: Context, path: Path, text: str, instance: int | None = None) -> Expr:
    """A size that is not 0. Raises SpecError."""
    result = ctx.scope.size(path, text, instance=instance)
    if result == expr.ZERO:
        ctx.checks.fail(path, "expected at least 1, got 0")
    return result


def _check_dim(ctx: Context, dim: str, path: Path) -> None:
    problem = name_problem(dim)
    if dim in ir.RESERVED_AXES:
        problem = f"{dim!r} is an axis of its own and cannot be an element dim"
    if problem is not None:
        ctx.checks.fail(path, problem, key=True)


def _storage(ctx: Context, path: Path, storage: schema.Storage) -> ir.Storage:
    check_dtype(ctx, storage.store, (*path, "store"), list(ctx.spec.dtypes))
    group = storage.store in ctx.spec.dtypes
    if storage.as_ is not None:
        if group:
            ctx.checks.fail((*path, "as"), "`as` needs one fixed dtype in `store`, not a dtype group")
        if storage.as_ not in DTYPES and storage.as_ not in LOGICAL:
            known = suggest(storage.as_, [*LOGICAL, *DTYPES])
            ctx.checks.fail((*path, "as"), f"unknown dtype {shorten(storage.as_)}{known}")
    return ir.Storage(
        group=storage.store if group else None,
        dtype=None if group else storage.store,
        logical=storage.as_,
    )


def _shard(ctx: Context, path: Path, component: schema.Component) -> ir.Shard | None:
    shard = component.shard
    if shard is None:
        return None
    for axis, ranks in shard.axes.items():
        if axis not in component.element:
            message = f"no element dim {shorten(axis)} in this component{suggest(axis, component.element)}"
            ctx.checks.fail((*path, "axes", axis), message, key=True)
        problem = name_problem(ranks)
        if problem is not None:
            ctx.checks.fail((*path, "axes", axis), problem)
    if shard.blocks < 1:
        ctx.checks.fail((*path, "blocks"), f"expected at least 1, got {shard.blocks}")
    if not shard.axes:
        ctx.checks.fail((*path, "axes"), "expected at least one sharded dim")
    return ir.Shard(tuple(shard.axes.items()), shard.blocks)


def splits(ctx: Context) -> tuple[tuple[str, tuple[ir.Dim, ...]], ...]:
    """Split dims with the sizes of their parts."""
    known = sorted({dim for component in ctx.spec.components.values() for dim in component.element})
    taken = set(known)
    result = []
    for dim, parts in ctx.spec.split.items():
        at: Path = ("split", dim)
        with ctx.checks.part():
            if dim not in known:
                ctx.checks.fail(at, f"no component has a dim {shorten(dim)}{suggest(dim, known)}", key=True)
            if len(parts) < 2:
                ctx.checks.fail(at, f"a dim is split into two or more parts, got {len(parts)}")
            for part in parts:
                _check_dim(ctx, part, (*at, part))
                if part in taken:
                    ctx.checks.fail((*at, part), f"{part!r} is a dim already: take another name", key=True)
                taken.add(part)
            sizes = tuple(ir.Dim(part, ctx.scope.size((*at, part), size)) for part, size in parts.items())
            result.append((dim, sizes))
    return tuple(result)
