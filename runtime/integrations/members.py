"""The pools that a cache needs: a cache object in, members out, each with the pool to build for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from poolwright.generated import pool_class
from poolwright.runtime.integrations.layers import Holding, Share, holding
from poolwright.runtime.integrations.paging import Paging
from poolwright.runtime.pool import HostPool
from poolwright.runtime.program import SizedProgram

_CACHE = {"layers", "layer_class_to_replicate", "offloading", "only_non_sliding", "prefetch_stream"}
"""Attributes of a cache object; all that a model's state needs is in `layers`."""


class CacheLike(Protocol):
    """What is asked of a cache object."""

    @property
    def layers(self) -> Sequence[Any]: ...


@dataclass(frozen=True)
class Member:
    """Layers of a cache that look alike and share a pool. `name` is the role of the share, numbered."""

    name: str
    share: Share
    layers: tuple[int, ...]

    def rows_a_page(self, tokens: int) -> int:
        """Rows of a page that holds so many tokens. Raises ValueError if they are no whole number of rows."""
        if tokens < 1:
            raise ValueError(f"{self.name}: page_size: expected at least 1, got {tokens}")
        if tokens % self.share.tokens_a_row:
            raise ValueError(
                f"{self.name}: page_size: expected a multiple of {self.share.tokens_a_row}, the tokens of "
                f"one entry, got {tokens}"
            )
        return tokens // self.share.tokens_a_row


def taken_apart(cache: CacheLike, pools: Mapping[str, str]) -> tuple[Holding, ...]:
    """Every layer of the cache taken apart. `pools`: see `layers.holding`.

    Raises ValueError for something else than a cache, and for anything in it that is not known.
    """
    name, layers = type(cache).__name__, getattr(cache, "layers", None)
    if layers is None:
        raise ValueError(
            f"expected a cache object with `layers` (as DynamicCache has), got {name}; "
            f"of an encoder-decoder cache hand over self_attention_cache"
        )
    extra = sorted(set(vars(cache)) - _CACHE)
    if extra:
        raise ValueError(f"{name} also has {', '.join(extra)}, which may hold state that no pool takes")
    if getattr(cache, "offloading", False):
        raise ValueError(f"{name} offloads its layers itself; build it with offloading=False")
    return tuple(holding(number, layer, pools) for number, layer in enumerate(layers))


def members_of(holdings: Sequence[Holding]) -> tuple[Member, ...]:
    """The pools that these layers need, in the order of their first layers. Raises ValueError for none."""
    found: dict[Share, list[int]] = {}
    for number, held in enumerate(holdings):
        for share in held.shares:
            if share.rows != 0:
                found.setdefault(share, []).append(number)
    if not found:
        raise ValueError("the cache holds no tokens; run the prefill first")
    named: dict[str, int] = {}
    members = []
    for share, numbers in found.items():
        named[share.role] = count = named.get(share.role, 0) + 1
        name = share.role if count == 1 else f"{share.role}_{count}"
        members.append(Member(name, share, tuple(numbers)))
    return tuple(members)


@dataclass(frozen=True)
class Plan:
    """A pool to build: its class and what its constructor takes."""

    member: Member
    paging: Paging
    made: type[HostPool]
    arguments: Mapping[str, Any]

    def program(self) -> SizedProgram:
        """What the pool will compile. Raises ValueError for sizes that the pool does not take."""
        share, given = self.member.share, self.arguments
        sizes = dict(share.params), dict(share.dtypes), {"layers": self.member.layers}
        return self.made.sized(*sizes, {}, given.get("page_size", 1), given["layout"], given["form"])

    def build(self) -> HostPool:
        """The pool. Raises ValueError and PoolError."""
        return self.made(**self.arguments)


def plans(
    members: Sequence[Member], *, page_size: int, layout: str | None = None, form: str | None = None
) -> tuple[Plan, ...]:
    """The pools for these members; arguments as in `CacheMover`. Raises ValueError, also for a layout or form
    that no pool has."""
    specs = [pool_class(member.share.pool).spec for member in members]
    for what, name, known in (
        ("layout", layout, {each: None for spec in specs for each in spec.layouts}),
        ("form", form, {each: None for spec in specs for each in spec.forms}),
    ):
        if name is not None and name not in known:
            raise ValueError(f"{what}: expected one of {', '.join(known)}, got {name!r}")
    return tuple(_plan(member, page_size, layout, form) for member in members)


def _plan(member: Member, page_size: int, layout: str | None, form: str | None) -> Plan:
    share, made = member.share, pool_class(member.share.pool)
    rows_a_page, least = member.rows_a_page(page_size), math.ceil(share.tokens / page_size)
    paging = Paging(share.sequences, share.rows or 1, rows_a_page if share.rows else 1, max(least, 1))
    dtypes = {"dtype" if len(share.dtypes) == 1 else f"{group}_dtype": dtype for group, dtype in share.dtypes}
    tokens = {"page_size": page_size} if made.spec.unit == "token" else {}
    arguments: dict[str, Any] = dict(
        **dict(share.params),
        **dtypes,
        **tokens,
        layers=member.layers,
        layout=layout if layout in made.spec.layouts else next(iter(made.spec.layouts)),
        form=form if form in made.spec.forms else next(iter(made.spec.forms)),
        capacity_pages=paging.pages,
        device=share.device,
    )
    return Plan(member, paging, made, arguments)
