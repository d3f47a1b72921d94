"""A group in; a table of its pools, and what it means in words, out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from poolwright.codegen import expr, ir

_HIT = {
    "all_pages": "needs every page of a prefix",
    "trailing_pages": "needs only the last pages of a prefix",
}


def table(group: ir.Group, pools: Sequence[ir.Pool]) -> Iterator[str]:
    """One line a pool: spec, whose ids it takes, layers, budget, parameters."""
    by_name, budget = {pool.name: pool for pool in pools}, dict(group.budget)
    head = ("name", "pool", "ids of", "layers", "budget", "parameters")
    lines = [head]
    for ref in group.pools:
        given = ", ".join(f"{name}={expr.to_python(size)}" for name, size in ref.params)
        ids = index(ref, by_name[ref.pool]) or "its own"
        layers = ref.layers or "given to it"
        lines.append((ref.name, ref.pool, ids, layers, budget.get(ref.name, "given"), given or "given to it"))
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    for line in lines:
        yield "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()


def words(group: ir.Group, pools: Sequence[ir.Pool]) -> Iterator[str]:
    """What the spec means."""
    by_name = {pool.name: pool for pool in pools}
    yield f"{group.name} moves {len(group.pools)} pools together. {group.summary}".rstrip()
    yield f"The ids of {group.anchor} are those that a cache keeps; they are handed out in the order below."
    for param in group.params:
        yield f"Parameter {param.name}: {'an integer' if param.length is None else 'integers'}."
    for ref in group.pools:
        yield ""
        yield f"{ref.name} is a pool {ref.pool}: {by_name[ref.pool].summary}"
        yield from (f"  {line}" for line in _member(group, ref, by_name[ref.pool]))


def index(ref: ir.PoolRef, pool: ir.Pool) -> str | None:
    """The pool of the group whose ids this one takes."""
    return ref.index or pool.index.space


def _member(group: ir.Group, ref: ir.PoolRef, pool: ir.Pool) -> Iterator[str]:
    source = index(ref, pool)
    if source is not None:
        yield f"takes the ids of {source}, has as many pages, and is moved in every call that moves {source}"
    if ref.layers is not None:
        yield f"its layers are {ref.layers}"
    for name, size in ref.params:
        yield f"its {name} is {expr.to_python(size)}"
    yield _HIT[ref.hit] + (f"; is restored with {ref.restore_with}" if ref.restore_with else "")
    amount = dict(group.budget).get(ref.name)
    if amount == "off":
        yield "is off unless the constructor gives it a budget"
    elif amount is not None:
        yield f"takes {amount} {'of the budget' if '.' in amount else 'bytes'}"
