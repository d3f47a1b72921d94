"""Bytes of a member's pool on one rank, from the formulas that its generated class has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from poolwright.codegen import ir
from poolwright.codegen.commands.bind import Bound, resolve, values
from poolwright.codegen.expr import Expr, Int
from poolwright.codegen.plan.config import PlanError
from poolwright.codegen.plan.rank import RankSize


@dataclass(frozen=True)
class Sized:
    """A pool's host order with every number filled in but its capacity."""

    program: ir.Program
    known: Mapping[str, Expr]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on the host, all layers."""
        return self.number(self.program.page_bytes)

    def host_bytes(self, pages: int) -> int:
        """Bytes of host memory of so many pages, padding between blocks included."""
        return self.number(self.program.host_bytes, pages)

    def number(self, value: Expr, pages: int = 1) -> int:
        """The value of a formula for so many pages."""
        found = resolve(value, {**self.known, "pages": Int(pages)})
        assert isinstance(found, int), f"{found} is not bound"
        return found


def chosen_dtypes(pool: ir.Pool, wanted: Mapping[str, str]) -> dict[str, str]:
    """A dtype for every group of the pool: the wanted one, else its first. Raises PlanError."""
    chosen = {group: wanted.get(group, names[0]) for group, names in pool.dtypes}
    for group, names in pool.dtypes:
        if chosen[group] not in names:
            raise PlanError(
                f"--kv-dtype: pool {pool.name} holds no {chosen[group]}; it takes {', '.join(names)}"
            )
    return chosen


def program_of(lowered: ir.Lowered, variants: Mapping[str, str], layout: str) -> ir.Program:
    """The pool's program in a layout, and in its first form. Raises PlanError for a layout it lacks.

    A pool without components has one layout, whatever is asked for.
    """
    pool = lowered.pool
    names = [one.name for one in pool.layouts]
    if not pool.components:
        layout = names[0]
    if layout not in names:
        raise PlanError(f"--layout {layout}: pool {pool.name} has the layouts {', '.join(names)}")
    wanted = (_choice(pool, variants), pool.forms[0].name, layout)
    return next(p for p in lowered.programs if (p.variant, p.form.name, p.layout.name) == wanted)


def size_pool(
    pool: ir.Pool,
    program: ir.Program,
    params: Mapping[str, RankSize],
    dtypes: Mapping[str, str],
    layers: int,
    page_size: int,
) -> Sized:
    """The pool with these numbers; `page_size` counts its own rows."""
    numbers = _numbers(pool, params) | {"page_size": page_size}
    numbers |= {c.layers: layers for c in pool.components if c.layers is not None}
    words = tuple(f"{name}={number}" for name, number in numbers.items())
    bound = Bound(numbers, dtypes, dict(program.variant), words)
    return Sized(program, values(pool, bound, program.variant))


def _choice(pool: ir.Pool, variants: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((variant.name, variants[variant.name]) for variant in pool.variants)


def _numbers(pool: ir.Pool, params: Mapping[str, RankSize]) -> dict[str, int]:
    """Every parameter that is not computed, a list by element, with defaults for what is not given."""
    result: dict[str, int] = {}
    for param in pool.params:
        given = params.get(param.name, param.default)
        if param.equals is not None or given is None:
            continue
        parts = given if isinstance(given, tuple) else (given,)
        if param.length is None:
            result[param.name] = parts[0]
            continue
        for i in range(param.length):
            part = parts[i] if i < len(parts) else param.default
            assert part is not None, f"{param.name} is a list of {param.length} integers"
            result[f"{param.name}_{i}"] = part
    return result
