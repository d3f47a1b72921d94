"""Bound pools in, host pools of SGLang's out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

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
    for name in [*(layers or {}), *(draft_layers or {})]:
        if name not in group.pools:
            known = ", ".join(group.pools)
            raise ValueError(f"{group.spec.name}: no pool {name!r}; pools are {known}")
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
