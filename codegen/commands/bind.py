"""`--set name=value` in, values for the symbols of a pool's programs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poolwright.codegen import expr, ir, lower
from poolwright.codegen.commands.common import InputError, unknown
from poolwright.codegen.dtypes import DTYPES
from poolwright.codegen.expr import Expr, ExprError, Int

LIMIT = 1 << 40


@dataclass(frozen=True)
class Bound:
    """What was set: integers by symbol, dtypes by group, choices by variant, and the words as given."""

    numbers: Mapping[str, int]
    dtypes: Mapping[str, str]
    choices: Mapping[str, str]
    words: tuple[str, ...]


def bind(pool: ir.Pool, words: Sequence[str]) -> Bound:
    """Read the words against the pool. Raises InputError for unknown names and values out of bounds."""
    numbers: dict[str, int] = {}
    dtypes = {group: allowed[0] for group, allowed in pool.dtypes if len(allowed) == 1}
    choices: dict[str, str] = {}
    seen: set[str] = set()
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise InputError(f"--set {word}: expected name=value, for example --set page_size=64")
        if name in seen:
            raise InputError(f"--set {word}: {name} is set twice; leave one")
        seen.add(name)
        if name in dict(pool.dtypes):
            dtypes[name] = _one_of("dtype of " + name, value, dict(pool.dtypes)[name])
        elif name in (variants := {variant.name: variant for variant in pool.variants}):
            choices[name] = _one_of(name, value, [choice for choice, _ in variants[name].choices])
        else:
            numbers |= _numbers(pool, name, value)
    return Bound(_defaults(pool) | numbers, dtypes, choices, tuple(words))


def values(pool: ir.Pool, bound: Bound, choice: tuple[tuple[str, str], ...]) -> dict[str, Expr]:
    """Every symbol of the programs of this variant choice: numbers where known, else over parameters."""
    filled = lower.specialise(pool, choice)
    known: dict[str, Expr] = {name: Int(number) for name, number in bound.numbers.items()}
    try:
        for param in filled.params:
            if param.equals is not None:
                known[param.name] = expr.substitute(param.equals, known)
        _require(filled, known)
        for name, size in lower.extents(filled):
            known[name] = expr.substitute(size, known)
            _sized(name, known[name])
        for component in filled.components:
            if component.when is not None:
                known |= _present(component, known)
    except ExprError as error:
        raise InputError(
            f"pool {pool.name}: {error} with {' '.join(bound.words)}; set other values"
        ) from None
    known |= {f"itemsize_{group}": Int(DTYPES[name].itemsize) for group, name in bound.dtypes.items()}
    return known


def resolve(value: Expr, known: Mapping[str, Expr]) -> int | str:
    """The number, or the text of what stays symbolic."""
    for _ in range(8):  # a padded row is made of extents, and those of parameters
        value = expr.substitute(value, known)
    return value.value if isinstance(value, Int) else expr.to_text(value)


def _numbers(pool: ir.Pool, name: str, value: str) -> dict[str, int]:
    params = {param.name: param for param in pool.params}
    counts = {"pages", "page_size", "layers"} | {c.layers for c in pool.components if c.layers is not None}
    if name in counts:
        return {name: _integer(name, value, 1)}
    if name not in params:
        settable = [p for p in params if params[p].equals is None]
        groups = [group for group, _ in pool.dtypes]
        known = [*settable, *groups, *(v.name for v in pool.variants), *sorted(counts)]
        raise InputError(f"--set {name}={value}: {unknown('name', name, known)}")
    param = params[name]
    if param.equals is not None:
        raise InputError(
            f"--set {name}={value}: {name} is {expr.to_text(param.equals)}; set what it is made of"
        )
    if param.length is None:
        return {name: _checked(param, value)}
    parts = value.split(",")
    if len(parts) > param.length or (len(parts) < param.length and param.default is None):
        raise InputError(
            f"--set {name}={value}: expected {param.length} integers with commas, got {len(parts)}"
        )
    return {f"{name}_{i}": _checked(param, part) for i, part in enumerate(parts)}


def _defaults(pool: ir.Pool) -> dict[str, int]:
    """The parameters that need not be set."""
    found: dict[str, int] = {}
    for param in pool.params:
        if param.default is not None:
            names = (
                [param.name] if param.length is None else [f"{param.name}_{i}" for i in range(param.length)]
            )
            found |= dict.fromkeys(names, param.default)
    return found


def _checked(param: ir.Param, value: str) -> int:
    number = _integer(param.name, value, param.min)
    if param.max is not None and number > param.max:
        raise InputError(f"--set {param.name}={value}: expected at most {param.max}")
    if param.one_of and number not in param.one_of:
        raise InputError(f"--set {param.name}={value}: expected one of {', '.join(map(str, param.one_of))}")
    return number


def _integer(name: str, value: str, least: int | None) -> int:
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20) or int(digits) > LIMIT:
        raise InputError(f"--set {name}={value}: expected an integer of at most {LIMIT}")
    if least is not None and int(value) < least:
        raise InputError(f"--set {name}={value}: expected at least {least}")
    return int(value)


def _one_of(what: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise InputError(f"--set: {unknown(what, value, known)}")
    return value


def _require(pool: ir.Pool, known: Mapping[str, Expr]) -> None:
    for cond in pool.require:
        filled = expr.substitute_cond(cond, known)
        if not expr.symbols(filled) and not expr.holds(filled, {}):
            raise InputError(f"pool {pool.name} requires {expr.cond_to_text(cond)}; set other values")


def _sized(name: str, size: Expr) -> None:
    if isinstance(size, Int) and size.value < 0:
        raise InputError(f"{name} is {size.value}, and an extent is at least 0; set other values")


def _present(component: ir.Component, known: Mapping[str, Expr]) -> dict[str, Expr]:
    assert component.when is not None
    filled = expr.substitute_cond(component.when, known)
    if expr.symbols(filled):
        return {}
    return {f"present_{component.ident}": Int(int(expr.holds(filled, {})))}
