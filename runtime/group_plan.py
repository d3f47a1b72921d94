"""What the pools of a group are built with: sizes and a budget in; arguments and bytes of each pool out."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from poolwright.runtime import arguments
from poolwright.runtime.description import Param, SizeOf, Sizes, bind_params, size_of
from poolwright.runtime.errors import OutOfMemoryBudget
from poolwright.runtime.parts import least_bytes
from poolwright.runtime.pool import HostPool, RequiredBytes
from poolwright.runtime.program import pages_within
from poolwright.runtime.scalars import index

OFF = "off"
NO_BOUND = 1 << 62
_GIVEN = ("capacity_pages", "capacity_bytes", "staging_bytes", "capture_bytes", "page_size")
"""Arguments of a pool that its group decides."""


@dataclass(frozen=True)
class MemberSpec:
    """A pool of a group. `layers`: the group's list for one of its own; `index`: the pool whose ids it
    takes; `params`: its parameters that follow from the group's."""

    pool: type[HostPool]
    layers: Mapping[str, str] = field(default_factory=dict)
    index: str | None = None
    hit: str = "all_pages"
    restore_with: str | None = None
    params: Mapping[str, SizeOf] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupSpec:
    """A group as its spec says it. `budget`: a fraction, bytes or ``off`` for each pool."""

    name: str
    source: str
    anchor: str
    members: Mapping[str, MemberSpec]
    parts: tuple[str, ...]
    budget: Mapping[str, float | str] = field(default_factory=dict)
    params: tuple[Param, ...] = ()


@dataclass(frozen=True)
class GroupBytes:
    """What a group will take: each pool, host memory and staging memory of all."""

    pools: Mapping[str, RequiredBytes]

    @property
    def host(self) -> int:
        return sum(pool.host for pool in self.pools.values())

    @property
    def staging(self) -> int:
        return sum(pool.staging for pool in self.pools.values())


def plan(
    spec: GroupSpec,
    *,
    sizes: Mapping[str, object],
    layers: Mapping[str, Iterable[int]],
    members: Mapping[str, Mapping[str, object] | None],
    page_size: int,
    layout: str | None,
    capacity_bytes: int | None,
    capacity_pages: Mapping[str, int | str] | None,
    budget: Mapping[str, float | str] | None,
    staging_bytes: int,
    capture_bytes: int | None,
) -> dict[str, tuple[dict[str, Any], RequiredBytes]]:
    """The constructor's arguments of every pool that is on, and what it will take."""
    known = bind_params(spec.name, spec.params, sizes)
    staging_bytes = arguments.whole(spec.name, "staging_bytes", staging_bytes, 0)
    if capture_bytes is not None:
        capture_bytes = arguments.whole(spec.name, "capture_bytes", capture_bytes, 0)
    amounts = _amounts(spec, budget, capacity_pages)
    lists = {name: arguments.layer_ids(spec.name, name, ids) for name, ids in layers.items()}
    given = {name: _arguments(spec, name, members[name], known, lists, page_size, layout) for name in amounts}
    sized = {"capacity_pages": 1, "staging_bytes": NO_BOUND}
    single = {name: _need(spec, name, each, **sized) for name, each in given.items()}
    pages = _pages(spec, single, amounts, capacity_bytes, capacity_pages)
    for name, count in pages.items():
        given[name]["capacity_pages"] = count
    weights = {name: single[name].page * count for name, count in pages.items()}
    changing = {name for name in weights if spec.members[name].pool.spec.updates == "in_place"}
    if capture_bytes is not None and not changing:
        step = "no pool that is on has rows that change in place: pass staging_bytes"
        raise arguments.refusal(spec.name, "capture_bytes", "None", capture_bytes, step)
    least = {name: least_bytes(single[name].program) for name in weights}
    kept = {name: weights[name] for name in weights if capture_bytes is None or name not in changing}
    bounds = _split(spec, "staging_bytes", staging_bytes, kept, least)
    if capture_bytes is not None:
        bounds |= _split(spec, "capture_bytes", capture_bytes, {n: weights[n] for n in changing}, least)
    for name, bound in bounds.items():
        given[name]["staging_bytes"] = bound
    return {name: (each, _need(spec, name, each)) for name, each in given.items()}


def sources(members: Mapping[str, MemberSpec], name: str) -> list[str]:
    """The pools whose ids this one takes, directly or through others, nearest first."""
    found = []
    at = members[name].index
    while at is not None:
        found.append(at)
        at = members[at].index
    return found


def _amounts(
    spec: GroupSpec,
    budget: Mapping[str, float | str] | None,
    capacity_pages: Mapping[str, int | str] | None,
) -> dict[str, float | None]:
    """The budget of every pool that is on, None where none is given. Raises ValueError."""
    for what, given in (("budget", budget), ("capacity_pages", capacity_pages)):
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(f"{spec.name}: {what}: expected a mapping by name of the pool, got {given!r}")
        for name in given or ():
            if name not in spec.members:
                known = ", ".join(spec.members)
                raise ValueError(f"{spec.name}: {what}: no pool {name!r}; pools are {known}")
    if budget is not None and capacity_pages is not None:
        raise ValueError(f"{spec.name}: give either capacity_pages or budget")
    amounts: dict[str, Any] = {**spec.budget, **(budget or {})}
    amounts |= {name: OFF if pages == OFF else None for name, pages in (capacity_pages or {}).items()}
    off = {name for name, amount in amounts.items() if amount == OFF}
    off |= {name for name in spec.members if off & set(sources(spec.members, name))}
    if spec.anchor in off:
        raise ValueError(f"{spec.name}: the anchor {spec.anchor} cannot be off: a cache keeps its ids")
    return {name: _amount(spec, name, amounts.get(name)) for name in spec.members if name not in off}


def _amount(spec: GroupSpec, name: str, given: object) -> float | None:
    """A budget: a fraction as a float, bytes as an int. Raises ValueError."""
    if given is None:
        return None
    amount = float(given) if isinstance(given, float) else index(given)
    if amount is None or amount <= 0 or (isinstance(amount, float) and not amount <= 1):
        raise ValueError(f"{spec.name}: budget of {name}: expected a fraction, bytes or 'off', got {given!r}")
    return amount


def _arguments(
    spec: GroupSpec,
    name: str,
    given: Mapping[str, object] | None,
    known: Sizes,
    lists: Mapping[str, tuple[int, ...]],
    page_size: int,
    layout: str | None,
) -> dict[str, Any]:
    """What the constructor of a pool takes, without its capacity. Raises ValueError."""
    member = spec.members[name]
    taken = inspect.signature(member.pool.required_bytes).parameters  # type: ignore[attr-defined]
    fixed: dict[str, Any] = {param: size_of(formula, known) for param, formula in member.params.items()}
    fixed |= {own: lists[ids] for own, ids in member.layers.items()}
    fixed |= {"page_size": page_size} if "page_size" in taken else {}
    if given is not None and not isinstance(given, Mapping):
        raise arguments.refusal(spec.name, name, "arguments of its pool by name", given)
    for argument in given or ():
        if argument not in taken or argument in fixed or argument in _GIVEN:
            free = [word for word in taken if word not in fixed and word not in _GIVEN]
            raise ValueError(
                f"{spec.name}: {name}: unknown argument {argument!r}; it takes {', '.join(free) or 'none'}"
            )
    # A pool without bytes has no host order to choose.
    common = {} if layout is None or not member.pool.spec.components else {"layout": layout}
    found = {**common, **(given or {}), **fixed}
    for argument, parameter in taken.items():
        if parameter.default is inspect.Parameter.empty and argument not in found:
            raise ValueError(f"{spec.name}: {name}: argument {argument!r} is missing")
    return found


def _need(spec: GroupSpec, name: str, arguments: Mapping[str, Any], **more: Any) -> RequiredBytes:
    try:
        found: RequiredBytes = spec.members[name].pool.required_bytes(**arguments, **more)  # type: ignore[attr-defined]
    except ValueError as error:
        raise ValueError(f"{spec.name}: {name}: {error}") from None
    return found


def _pages(
    spec: GroupSpec,
    single: Mapping[str, RequiredBytes],
    amounts: Mapping[str, float | None],
    capacity_bytes: int | None,
    capacity_pages: Mapping[str, int | str] | None,
) -> dict[str, int]:
    """Pages of every pool: pools that take another's ids have as many, and count into its page."""
    members = spec.members
    families = {
        name: [name, *(other for other in single if name in sources(members, other))]
        for name in single
        if members[name].index is None
    }
    if capacity_pages is not None:
        if capacity_bytes is not None:
            raise ValueError(f"{spec.name}: give either capacity_pages or capacity_bytes")
        counts = {name: _given_pages(spec, name, capacity_pages) for name in families}
        extra = [n for n, pages in capacity_pages.items() if pages != OFF and n not in families]
        if extra:
            raise ValueError(
                f"{spec.name}: capacity_pages: {extra[0]} has as many as {members[extra[0]].index}; "
                f"leave it out"
            )
    else:
        shares = _shares(spec, families, amounts, capacity_bytes)
        counts = {name: _fitting(spec, family, single, shares[name]) for name, family in families.items()}
    return {name: counts[(sources(members, name) or [name])[-1]] for name in single}


def _given_pages(spec: GroupSpec, name: str, capacity_pages: Mapping[str, int | str]) -> int:
    count = capacity_pages.get(name)
    pages = index(count)
    if pages is None or pages < 1:
        raise ValueError(
            f"{spec.name}: capacity_pages: expected at least 1 page or 'off' for {name}, got {count!r}"
        )
    return pages


def _shares(
    spec: GroupSpec,
    families: Mapping[str, Sequence[str]],
    amounts: Mapping[str, float | None],
    capacity_bytes: int | None,
) -> dict[str, int]:
    """Bytes of every pool that has ids of its own, with the pools that take them."""
    if capacity_bytes is not None:
        capacity_bytes = arguments.whole(spec.name, "capacity_bytes", capacity_bytes, 0)
    if len(families) == 1 and capacity_bytes is not None and not any(amounts.values()):
        return dict.fromkeys(families, capacity_bytes)
    found: dict[str, int] = {}
    for name, family in families.items():
        given = [amount for other in family if (amount := amounts[other]) is not None]
        kinds = {type(amount) for amount in given}
        if not given or len(kinds) != 1:
            raise ValueError(
                f"{spec.name}: budget: expected fractions or bytes for {', '.join(family)}, "
                f"got {[amounts[other] for other in family]}"
            )
        if kinds == {float}:
            if capacity_bytes is None:
                raise ValueError(
                    f"{spec.name}: give capacity_bytes, of which the budget's fractions are taken"
                )
            found[name] = int(capacity_bytes * sum(given))
        else:
            found[name] = int(sum(given))
    total = sum(found.values())
    if capacity_bytes is not None and total > capacity_bytes:
        raise ValueError(
            f"{spec.name}: budget: {total:,} bytes in all, more than the {capacity_bytes:,} given"
        )
    return found


def _fitting(spec: GroupSpec, family: Sequence[str], single: Mapping[str, RequiredBytes], nbytes: int) -> int:
    """Pages of these pools that fit `nbytes`."""
    page = sum(single[name].page for name in family)
    if page == 0:
        raise ValueError(f"{spec.name}: a page of {', '.join(family)} has no bytes; give capacity_pages")
    count = pages_within([single[name].program for name in family], nbytes)
    if count < 1:
        what, advice = f"{spec.name}: one page of {', '.join(family)}", "raise its budget or capacity_bytes"
        raise OutOfMemoryBudget(what, page, nbytes, advice)
    return count


def _split(
    spec: GroupSpec, what: str, nbytes: int, weights: Mapping[str, int], least: Mapping[str, int]
) -> dict[str, int]:
    """Shares of `nbytes`, the argument `what`: the least that each pool takes, of the rest in proportion to
    the weights. Raises OutOfMemoryBudget."""
    needed = sum(least[name] for name in weights)
    if needed > nbytes:
        pools = ", ".join(f"{name} {least[name]:,}" for name in weights)
        raise OutOfMemoryBudget(f"{spec.name}: staging memory ({pools})", needed, nbytes, f"raise {what}")
    total, rest = max(sum(weights.values()), 1), nbytes - needed
    return {name: least[name] + rest * weight // total for name, weight in weights.items()}
