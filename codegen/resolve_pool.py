"""One pool document in, `ir.Pool` out: every step of it in turn, then what concerns the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from poolwright.codegen import expr, ir, schema
from poolwright.codegen.collect import Checks, check_distinct
from poolwright.codegen.context import Context
from poolwright.codegen.load import Document
from poolwright.codegen.names import (
    argument_problem,
    class_problem,
    name_problem,
    pattern_problem,
    shorten,
    text_problem,
)
from poolwright.codegen.nodes import Path
from poolwright.codegen.resolve_components import components, splits
from poolwright.codegen.resolve_orders import orders, require
from poolwright.codegen.resolve_params import dtypes, params, variants
from poolwright.codegen.resolve_records import records
from poolwright.codegen.scope import Scope


def resolve_pool(document: Document[schema.Pool], layouts: Mapping[str, ir.Layout], stem: str) -> ir.Pool:
    """The pool of a document; `stem`: the name that its file gives it. Raises SpecErrors."""
    ctx = _context(document)
    spec = ctx.spec
    _head(ctx, stem)
    _check_arguments(ctx)
    index = _index(ctx)
    parts = components(ctx)
    pieces = splits(ctx)
    rows = records(ctx, parts)
    conditions = require(ctx, parts, pieces)
    pool = ir.Pool(
        name=spec.pool,
        class_name=spec.class_,
        summary=spec.summary,
        index=index,
        updates=spec.updates,
        params=params(ctx),
        dtypes=dtypes(ctx),
        components=parts,
        records=rows,
        forms=(),
        layouts=(),
        variants=ctx.variants,
        splits=pieces,
        require=conditions,
        reserved=tuple(spec.reserved),
        not_carried=tuple(spec.not_carried),
        valid_if=None if spec.snapshot is None else spec.snapshot.valid_if,
        tag=tuple(spec.tag),
        source=document.path,
    )
    device, host = orders(ctx, layouts, parts, rows, pieces)
    _check_use(ctx)
    ctx.checks.finish()
    return replace(pool, forms=device, layouts=host)


def _context(document: Document[schema.Pool]) -> Context:
    spec, checks = document.value, Checks(document)
    tables = variants(checks, spec)
    checks.finish()  # without its variants everything else would look wrong
    lists = {name: param.list_ for name, param in spec.params.items() if param.list_ is not None}
    layer_lists = {component.layers for component in spec.components.values()} - {"none"}
    scalars = (set(spec.params) - set(lists)) | layer_lists | {"page_size", "layers"}
    scope = Scope(document, frozenset(scalars), lists, {variant.name: variant for variant in tables})
    return Context(document, checks, scope, tables)


def _head(ctx: Context, stem: str) -> None:
    spec, checks = ctx.spec, ctx.checks
    checks.name(("pool",), name_problem(spec.pool), key=False)
    if spec.pool != stem:
        message = f"expected {stem!r}, the name of the file, got {shorten(spec.pool)}: rename one of them"
        checks.name(("pool",), message, key=False)
    checks.name(("class",), class_problem(spec.class_), key=False)
    checks.name(("summary",), text_problem(spec.summary), key=False)
    if spec.snapshot is not None:
        checks.name(("snapshot", "valid_if"), text_problem(spec.snapshot.valid_if), key=False)
    for key, texts, problem in (
        ("tag", spec.tag, text_problem),
        ("not_carried", spec.not_carried, pattern_problem),
    ):
        for index, text in enumerate(texts):
            checks.name((key, index), problem(text), key=False)
        with checks.part():
            check_distinct(checks, texts, (key,))
    _check_reserved(ctx)


def _check_reserved(ctx: Context) -> None:
    with ctx.checks.part():
        for index, row in enumerate(ctx.spec.reserved):
            if row < 0:
                ctx.checks.fail(("reserved", index), f"expected a row number, got {row}")
        check_distinct(ctx.checks, ctx.spec.reserved, ("reserved",))


def _check_arguments(ctx: Context) -> None:
    """All arguments of the constructor share one namespace."""
    taken: dict[str, str] = {}
    for name, path, what in _arguments(ctx):
        problem = argument_problem(name)
        if problem is None and taken.get(name, what) != what:
            problem = f"{name!r} is {taken[name]} already: take another name"
        ctx.checks.name(path, problem, key=path[0] != "components")
        taken.setdefault(name, what)


def _arguments(ctx: Context) -> list[tuple[str, Path, str]]:
    result: list[tuple[str, Path, str]] = []
    for name, param in ctx.spec.params.items():
        path: Path = ("params", name)
        result.append((name, path, f"parameter {name!r}"))
        result += [
            (f"{name}_{i}", path, f"element {i} of parameter {name!r}")
            for i in range(min(param.list_ or 0, 64))
        ]
    result += [(name, ("variants", name), "a variant") for name in ctx.spec.variants]
    for name, component in ctx.spec.components.items():
        if component.layers not in ("none", "layers"):
            result.append((component.layers, ("components", name, "layers"), "a layer list"))
    for group in ctx.spec.dtypes:
        ctx.checks.name(("dtypes", group), name_problem(group))
        result.append((f"{group}_dtype", ("dtypes", group), f"the argument of dtype group {group!r}"))
    return result


def _index(ctx: Context) -> ir.Index:
    index = ctx.spec.index
    row = None
    with ctx.checks.part():
        if index.space is not None:
            ctx.checks.name(("index", "space"), name_problem(index.space), key=False)
        if index.row is not None:
            if index.space is None:
                ctx.checks.fail(
                    ("index", "row"),
                    "a conversion needs the `space` that the indices come from",
                    key=True,
                )
            row = ctx.scope.size(("index", "row"), index.row, row=True)
            if "i" not in expr.symbols(row):
                ctx.checks.fail(("index", "row"), "a conversion is an expression over `i`, the index")
    return ir.Index(index.unit, index.space, row)


def _check_use(ctx: Context) -> None:
    """A parameter without any effect is a mistake somewhere else: a size that forgot it."""
    if ctx.checks.errors:
        return
    for name in ctx.spec.params:
        if name not in ctx.scope.used and name not in ctx.spec.tag:
            message = f"nothing uses parameter {name!r}: use it in a size, name it in `tag`, or remove it"
            ctx.checks.name(("params", name), message)
    for name in ctx.spec.variants:
        if name not in ctx.scope.used:
            ctx.checks.name(
                ("variants", name), f"nothing uses variant {name!r}: use a constant of it, or remove it"
            )
