"""Device memory for staging, as the runtime takes it: slots within a bound, never less than a page each."""

from __future__ import annotations

from poolwright.codegen.plan.plan import Plan, Planned

BOUND = 256 << 20
SLOTS = 2  # of a pool whose rows change; others have as many for each direction
ALIGN = 256


def staging_bytes(plan: Plan) -> int:
    """Bytes that all pools of one rank take on the device. Pools of a group share the bound by size."""
    if plan.group is None:
        return sum(_pool(one, BOUND) for one in plan.members)
    weights = [one.size.page_bytes * one.pages for one in plan.members]
    total = max(sum(weights), 1)
    return sum(_pool(one, BOUND * weight // total) for one, weight in zip(plan.members, weights, strict=True))


def _pool(one: Planned, bound: int) -> int:
    slots = SLOTS if one.pool.updates == "in_place" else 2 * SLOTS
    page = max(one.size.host_bytes(1), 1)
    pages = max(1, min(one.pages, bound // slots // page))
    return slots * (-(-one.size.host_bytes(pages) // ALIGN) * ALIGN)
