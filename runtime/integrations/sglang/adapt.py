"""Bound pools in, host pools of SGLang's out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from poolwright.runtime import arguments
from poolwright.runtime.group import HostPoolGroup
from poolwright.runtime.integrations.sglang.host_pool import HiCachePool, kind_of
from poolwright.runtime.integrations.sglang.layers import numbered
from poolwright.runtime.integrations.sglang.objects import page_parts
from poolwright.runtime.integrations.sglang.submissions import Submissions
from poolwright.runtime.pool import HostPool

Numbers = Mapping[int, int]
"""The engine's layer number (what its layer mapper gives) to the pool's layer id."""


def host_pool(pool: HostPool, *, layers: Numbers | None = None, draft_layers: int = 0) -> HiCachePool:
    """One pool as a host pool of the engine.

    `layers`: where the engine's numbers are not positions in the pool's own list; numbers that are left out
    are layers that the pool lacks. `draft_layers`: how many at the end of the list are those of draft models.
    Raises ValueError.
    """
    if not isinstance(pool, HostPool):
        raise arguments.refusal("host_pool", "pool", "a pool", pool)
    (made,) = _made(pool, {pool.name: pool}, {pool.name: layers}, {pool.name: draft_layers})
    return made


def host_pools(
    group: HostPoolGroup,
    *,
    layers: Mapping[str, Numbers] | None = None,
    draft_layers: Mapping[str, int] | None = None,
) -> dict[str, HiCachePool]:
    """Every pool of a group as a host pool of the engine, by name; what it moves together is one submission.

    The arguments are those of `host_pool`, by pool. Raises ValueError.
    """
    if not isinstance(group, HostPoolGroup):
        raise arguments.refusal("host_pools", "group", "a group of pools", group)
    known = ", ".join(group.pools)
    for what, given in (("layers", layers), ("draft_layers", draft_layers)):
        if given is not None and not isinstance(given, Mapping):
            raise arguments.refusal(group.spec.name, what, f"a mapping by pool ({known})", given)
        for name in given or ():
            if name not in group.pools:
                raise ValueError(f"{group.spec.name}: {what}: no pool {name!r}; pools are {known}")
    return {pool.pool_label: pool for pool in _made(group, group.pools, layers or {}, draft_layers or {})}


def _made(
    owner: HostPool | HostPoolGroup,
    pools: Mapping[str, HostPool],
    layers: Mapping[str, Numbers | None],
    drafts: Mapping[str, int],
) -> list[HiCachePool]:
    counted = {name: numbered(pool, layers.get(name), drafts.get(name, 0)) for name, pool in pools.items()}
    submissions = Submissions(owner, {name: found.ids.values() for name, found in counted.items()})
    tag = _tag(pools)
    return [
        kind_of(page_parts(pool))(owner, pool, submissions, counted[name], tag)
        for name, pool in pools.items()
    ]


def _tag(pools: Mapping[str, HostPool]) -> str:
    """Names the bytes of a page of all these pools: the engine puts that of the anchor into every key."""
    tags = [f"{name}={pool.format_tag}" for name, pool in pools.items()]
    return "poolwright-" + hashlib.sha256("|".join(tags).encode()).hexdigest()[:16]
