"""Device memory for staging, as the runtime takes it: two slots within a bound, never less than a page."""

from __future__ import annotations

from poolwright.codegen.plan.plan import Plan, Planned

BOUND = 64 << 20
SLOTS = 2
ALIGN = 256


def staging_bytes(plan: Plan) -> int:
    """Bytes that all pools of one rank take on the device."""
    return sum(_pool(one) for one in plan.members)


def _pool(one: Planned) -> int:
    page = max(one.size.host_bytes(1), 1)
    slot = max(1, min(one.pages, BOUND // SLOTS // page))
    return SLOTS * (-(-one.size.host_bytes(slot) // ALIGN) * ALIGN)
