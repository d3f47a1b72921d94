"""Device memory for staging, as the runtime takes it: two slots within a bound, never less than a page."""

from __future__ import annotations

from poolwright.codegen.plan.plan import Plan, Planned

BOUND = 64 << 20
SLOTS = 2
ALIGN = 256


def staging_bytes(plan: Plan) -> int:
    """Bytes that all pools of one rank take on the device. Pools of a group share the bound by size."""
    if plan.group is None:
        return sum(_pool(one, BOUND) for one in plan.members)
    weights = [one.size.page_bytes * one.pages for one in plan.members]
    total = max(sum(weights), 1)
    return sum(_pool(one, BOUND * weight // total) for one, weight in zip(plan.members, weights, strict=True))


def _pool(one: Planned, bound: int) -> int:
    page = max(one.size.host_bytes(1), 1)
    slot = max(1, min(one.pages, bound // SLOTS // page))
    return SLOTS * (-(-one.size.host_bytes(slot) // ALIGN) * ALIGN)
