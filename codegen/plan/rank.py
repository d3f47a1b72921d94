"""One rank's share of a member: the spec's `shard` decides which sizes are divided, the config how."""

from __future__ import annotations

from poolwright.codegen import expr, ir
from poolwright.codegen.plan.model import Member, Split

RankSize = int | tuple[int, ...]


def divided_params(pool: ir.Pool) -> frozenset[str]:
    """Parameters that tensor parallelism divides: those in the sizes of sharded axes and of no other axis.

    ``conv: {channel: 3 * heads * head_dim}`` sharded by channel divides `heads` alone where another axis,
    of one head, is `head_dim` long.
    """
    sharded: set[str] = set()
    whole: set[str] = set()
    for component in pool.components:
        axes = {} if component.shard is None else dict(component.shard.axes)
        for dim in component.dims:
            (sharded if axes.get(dim.name) == "tp" else whole).update(expr.symbols(dim.size))
    return frozenset(sharded - whole) & param_names(pool)


def param_names(pool: ir.Pool) -> frozenset[str]:
    """Names of the parameters as expressions see them: a list has one for each of its elements."""
    names: set[str] = set()
    for param in pool.params:
        names |= {param.name} if param.length is None else {f"{param.name}_{i}" for i in range(param.length)}
    return frozenset(names)


def rank_params(pool: ir.Pool, member: Member, ranks: int) -> dict[str, RankSize]:
    """The member's parameters on one of so many ranks. Raises PlanError where they cannot be divided."""
    divided = divided_params(pool)
    result: dict[str, RankSize] = {}
    for name, size in member.params.items():
        if isinstance(size, tuple):
            result[name] = tuple(_share(f"{name}_{i}" in divided, part, ranks) for i, part in enumerate(size))
        else:
            result[name] = _share(name in divided, size, ranks)
    return result


def _share(divided: bool, size: int | Split, ranks: int) -> int:
    if isinstance(size, int):
        assert not divided, "a size that the spec divides is made of heads"
        return size
    return size.of(ranks if divided else 1)
