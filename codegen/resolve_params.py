"""Parameters, variants and dtype groups of a pool document, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from poolwright.codegen import expr, ir, schema
from poolwright.codegen.collect import Checks, check_list, check_params
from poolwright.codegen.context import Context
from poolwright.codegen.dtypes import DTYPES, LOGICAL
from poolwright.codegen.expr import Expr
from poolwright.codegen.names import name_problem, shorten, suggest
from poolwright.codegen.nodes import Path


def params(ctx: Context) -> tuple[ir.Param, ...]:
    """The parameters; a size without a lower bound gets 0."""
    check_params(ctx.checks, ctx.spec.params)
    result = []
    for name, param in ctx.spec.params.items():
        equals = None
        if param.equals is not None:
            with ctx.checks.part():
                equals = _equals(ctx, name, param.equals)
        free = param.min is None and param.one_of is None and param.equals is None
        one_of = tuple(param.one_of or ())
        least = 0 if free else param.min
        result.append(ir.Param(name, least, param.max, one_of, equals, param.list_, param.default))
    return tuple(result)


def _equals(ctx: Context, name: str, text: str) -> Expr:
    path: Path = ("params", name, "equals")
    result = ctx.scope.size(path, text)
    names = list(ctx.spec.params)
    for later in names[names.index(name) :]:
        if later in expr.symbols(result) and (later == name or ctx.spec.params[later].equals is not None):
            reason = "itself" if later == name else f"{later!r}, which is computed after it: move it up"
            ctx.checks.fail(path, f"{name!r} is computed from {reason}")
    return result


def dtypes(ctx: Context) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The dtype groups, each used and each of known dtypes."""
    used = {component.dtype.store for component in ctx.spec.components.values()}
    for group, names in ctx.spec.dtypes.items():
        with ctx.checks.part():
            if group in DTYPES or group in LOGICAL:
                ctx.checks.fail(
                    ("dtypes", group),
                    f"a dtype group cannot have the name of a dtype: {group!r}",
                    key=True,
                )
            check_list(ctx.checks, names, ("dtypes", group))
            for index, dtype in enumerate(names):
                check_dtype(ctx, dtype, ("dtypes", group, index), ())
            if group in ctx.spec.params:
                ctx.checks.fail(
                    ("dtypes", group), f"{group!r} is a parameter already: take another name", key=True
                )
            if group not in used:
                ctx.checks.fail(("dtypes", group), f"no component uses dtype group {group!r}", key=True)
    return tuple((group, tuple(names)) for group, names in ctx.spec.dtypes.items())


def check_dtype(ctx: Context, dtype: str, path: Path, groups: Sequence[str]) -> None:
    """Raise SpecError unless `dtype` has storage of its own or is one of `groups`."""
    if dtype in LOGICAL:
        ctx.checks.fail(path, f"{dtype!r} is packed: write {{store: uint8, as: {dtype}}}")
    if dtype not in DTYPES and dtype not in groups:
        ctx.checks.fail(path, f"unknown dtype {shorten(dtype)}{suggest(dtype, [*groups, *DTYPES])}")


def variants(checks: Checks, spec: schema.Pool) -> tuple[ir.Variant, ...]:
    """The variants, each with the same constants in all of its choices."""
    result = []
    for name, choices in spec.variants.items():
        with checks.part():
            result.append(_variant(checks, name, choices))
    return tuple(result)


def _variant(checks: Checks, name: str, choices: Mapping[str, Mapping[str, schema.Constant]]) -> ir.Variant:
    at: Path = ("variants", name)
    if not choices:
        checks.fail(at, "expected at least one choice")
    first, model = next(iter(choices.items()))
    result = []
    for choice, constants in choices.items():
        checks.name((*at, choice), name_problem(choice))
        for key in constants:
            if key not in model:
                message = f"choice {first!r} has no constant {key!r}: all choices have the same"
                checks.fail((*at, choice, key), message, key=True)
        for key in model:
            if key not in constants:
                checks.fail((*at, choice), f"choice {choice!r} has no constant {key!r}", key=True)
        values = [(key, _constant(checks, (*at, choice, key), one)) for key, one in constants.items()]
        for key, value in values:
            if isinstance(value, int) != (model[key].value is not None):
                checks.fail((*at, choice, key), f"{key!r} is not of the same kind as in choice {first!r}")
        result.append((choice, tuple(values)))
    return ir.Variant(name, tuple(result))


def _constant(checks: Checks, path: Path, constant: schema.Constant) -> int | tuple[str, ...]:
    checks.name(path, name_problem(str(path[-1])))
    if (constant.value is None) == (constant.order is None):
        checks.fail(path, "expected an integer or a list of axes")
    if constant.value is None:
        return tuple(constant.order or ())
    if constant.value < 0:
        checks.fail(path, f"sizes are not negative, got {constant.value}")
    return constant.value
