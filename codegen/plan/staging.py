"""Device memory for staging, as the runtime takes it: slots within a bound, of pages or of parts of one."""

from __future__ import annotations

import math

from poolwright.codegen import ir
from poolwright.codegen.plan.plan import Plan, Planned

BOUND = 256 << 20
SLOTS = 2  # of a pool whose rows change; others have as many for each direction
ALIGN = 16


def bound_of(plan: Plan) -> int:
    """What `staging_bytes` has to be: the default, or the least that the pools take where that is more."""
    least = [_slots(one) * _least_slot(one) for one in plan.members]
    return max(BOUND, sum(least) if plan.group is not None else max(least))


def staging_bytes(plan: Plan) -> int:
    """Bytes that all pools of one rank take on the device. Pools of a group share the bound: each has the
    least that it takes, and of the rest in proportion to its size."""
    bound = bound_of(plan)
    if plan.group is None:
        return sum(_pool(one, bound) for one in plan.members)
    least = [_slots(one) * _least_slot(one) for one in plan.members]
    weights = [one.size.page_bytes * one.pages for one in plan.members]
    total, rest = max(sum(weights), 1), bound - sum(least)
    return sum(
        _pool(one, own + rest * weight // total)
        for one, own, weight in zip(plan.members, least, weights, strict=True)
    )


def _pool(one: Planned, bound: int) -> int:
    page = one.size.page_bytes
    if page == 0:
        return 0
    most = bound // _slots(one) // ALIGN * ALIGN
    pages = min(one.pages, most // page)
    while pages > 0 and one.size.host_bytes(pages) > most:
        pages -= 1
    return _slots(one) * (_align(one.size.host_bytes(pages)) if pages else most)


def _slots(one: Planned) -> int:
    return SLOTS if one.pool.updates == "in_place" else 2 * SLOTS


def _least_slot(one: Planned) -> int:
    page = _align(one.size.host_bytes(1))
    if not one.size.program.cuts or "write_back" not in one.lowered.by_layer:
        return page
    return min(page, max((_largest_unit(one, item) for item in one.size.program.items), default=page))


def _largest_unit(one: Planned, item: ir.Item) -> int:
    """Bytes of a slot that holds any layer of a component, or all of one without layers."""
    walk = next(w for w in item.walks if w.name == ("pages" if item.layers is None else "layer_pages"))
    nbytes = one.size.number(walk.atom_bytes) * one.size.number(walk.runs)
    step = item.host.stride("layer") if item.layers is not None else None
    period = ALIGN // math.gcd(ALIGN, one.size.number(step)) if step is not None else 1
    starts = [
        one.size.number(item.host.base) + at * (0 if step is None else one.size.number(step))
        for at in range(min(period, len(one.member.layers)) if item.layers is not None else 1)
    ]
    return max((_align(start % ALIGN + nbytes) for start in starts), default=0) if nbytes else 0


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
