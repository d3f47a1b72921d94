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
_GIVEN = ("capacity_pages", "capacity_bytes", "staging_bytes", "capture_bytes", "page_size")
"""Arguments of a pool that its group decides."""

_ONE_PAGE = {"capacity_pages": 1, "staging_bytes": 1 << 62}
"""Arguments of a pool of which only the size of a page is asked."""


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


def sources(members: Mapping[str, MemberSpec], name: str) -> list[str]:
    """The pools whose ids this one takes, directly or through others, nearest first."""
    found = []
    at = members[name].index
    while at is not None:
        found.append(at)
        at = members[at].index
    return found


@dataclass(frozen=True)
class Plan:
    """Sizes and a budget of a group, as its constructor takes them. What is wrong raises ValueError."""

    spec: GroupSpec
    sizes: Mapping[str, object]
    layers: Mapping[str, Iterable[int]]
    members: Mapping[str, Mapping[str, object] | None]
    page_size: int
    layout: str | None
    capacity_bytes: int | None
    capacity_pages: Mapping[str, int | str] | None
    budget: Mapping[str, float | str] | None
    staging_bytes: int
    capture_bytes: int | None

    def pools(self) -> dict[str, tuple[dict[str, Any], RequiredBytes]]:
        """The constructor's arguments of every pool that is on, and what it will take."""
        spec = self.spec
        known = bind_params(spec.name, spec.params, self.sizes)
        amounts = self._amounts()
        lists = {name: arguments.layer_ids(spec.name, name, ids) for name, ids in self.layers.items()}
        given = {name: self._arguments(name, known, lists) for name in amounts}
        single = {name: self._need(name, {**each, **_ONE_PAGE}) for name, each in given.items()}
        for name, count in self._pages(single, amounts).items():
            given[name]["capacity_pages"] = count
        for name, bound in self._staging(single, given).items():
            given[name]["staging_bytes"] = bound
        return {name: (each, self._need(name, each)) for name, each in given.items()}

    def _wrong(self, text: str) -> ValueError:
        return ValueError(f"{self.spec.name}: {text}")

    def _amounts(self) -> dict[str, float | None]:
        """The budget of every pool that is on, None where none is given."""
        members = self.spec.members
        for what, given in (("budget", self.budget), ("capacity_pages", self.capacity_pages)):
            if given is not None and not isinstance(given, Mapping):
                raise self._wrong(f"{what}: expected a mapping by name of the pool, got {given!r}")
            for name in given or ():
                if name not in members:
                    raise self._wrong(f"{what}: no pool {name!r}; pools are {', '.join(members)}")
        if self.budget is not None and self.capacity_pages is not None:
            raise self._wrong("give either capacity_pages or budget, got both")
        amounts: dict[str, Any] = {**self.spec.budget, **(self.budget or {})}
        amounts |= {name: OFF if n == OFF else None for name, n in (self.capacity_pages or {}).items()}
        off = {name for name, amount in amounts.items() if amount == OFF}
        off |= {name for name in members if off & set(sources(members, name))}
        if self.spec.anchor in off:
            raise self._wrong(f"the anchor {self.spec.anchor} cannot be off: a cache keeps its ids")
        return {name: self._amount(name, amounts.get(name)) for name in members if name not in off}

    def _amount(self, name: str, given: object) -> float | None:
        """A budget: a fraction as a float, bytes as an int."""
        if given is None:
            return None
        amount = float(given) if isinstance(given, float) else index(given)
        if amount is None or amount <= 0 or (isinstance(amount, float) and not amount <= 1):
            raise self._wrong(f"budget of {name}: expected a fraction, bytes or 'off', got {given!r}")
        return amount

    def _arguments(self, name: str, known: Sizes, lists: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """What the constructor of a pool takes, without its capacity."""
        member, given = self.spec.members[name], self.members[name]
        taken = inspect.signature(member.pool.required_bytes).parameters  # type: ignore[attr-defined]
        fixed: dict[str, Any] = {param: size_of(formula, known) for param, formula in member.params.items()}
        fixed |= {own: lists[ids] for own, ids in member.layers.items()}
        fixed |= {"page_size": self.page_size} if "page_size" in taken else {}
        if given is not None and not isinstance(given, Mapping):
            raise arguments.refusal(self.spec.name, name, "arguments of its pool by name", given)
        for argument in given or ():
            if argument not in taken or argument in fixed or argument in _GIVEN:
                free = ", ".join(word for word in taken if word not in fixed and word not in _GIVEN)
                raise self._wrong(f"{name}: unknown argument {argument!r}; it takes {free or 'none'}")
        # A pool without bytes has no host order to choose.
        common = {} if self.layout is None or not member.pool.spec.components else {"layout": self.layout}
        found = {**common, **(given or {}), **fixed}
        for argument, parameter in taken.items():
            if parameter.default is inspect.Parameter.empty and argument not in found:
                raise self._wrong(f"{name}: argument {argument!r} is missing")
        return found

    def _need(self, name: str, given: Mapping[str, Any]) -> RequiredBytes:
        try:
            found: RequiredBytes = self.spec.members[name].pool.required_bytes(**given)  # type: ignore[attr-defined]
        except ValueError as error:
            raise self._wrong(f"{name}: {error}") from None
        return found

    def _pages(
        self, single: Mapping[str, RequiredBytes], amounts: Mapping[str, float | None]
    ) -> dict[str, int]:
        """Pages of every pool: pools that take another's ids have as many, and count into its page."""
        members, asked = self.spec.members, self.capacity_pages
        owners = {name: (sources(members, name) or [name])[-1] for name in single}
        families = {name: [other for other in single if owners[other] == name] for name in owners.values()}
        counts: dict[str, int] = {}
        if asked is None:
            shares = self._shares(families, amounts)
            counts = {n: self._fitting(family, single, shares[n]) for n, family in families.items()}
            return {name: counts[owner] for name, owner in owners.items()}
        if self.capacity_bytes is not None:
            raise self._wrong("give either capacity_pages or capacity_bytes, got both")
        for name in families:
            count = index(asked.get(name))
            if count is None or count < 1:
                expected = f"at least 1 page or 'off' for {name}"
                raise arguments.refusal(self.spec.name, "capacity_pages", expected, asked.get(name))
            counts[name] = count
        extra = next((name for name, count in asked.items() if count != OFF and name not in families), None)
        if extra is not None:
            raise self._wrong(f"capacity_pages: {extra} has as many as {members[extra].index}; leave it out")
        return {name: counts[owner] for name, owner in owners.items()}

    def _shares(
        self, families: Mapping[str, Sequence[str]], amounts: Mapping[str, float | None]
    ) -> dict[str, int]:
        """Bytes of every pool that has ids of its own, with the pools that take them."""
        most = self.capacity_bytes
        if most is not None:
            most = arguments.whole(self.spec.name, "capacity_bytes", most, 0)
        if len(families) == 1 and most is not None and not any(amounts.values()):
            return dict.fromkeys(families, most)
        found: dict[str, int] = {}
        for name, family in families.items():
            given = [amount for other in family if (amount := amounts[other]) is not None]
            kinds = {type(amount) for amount in given}
            if len(kinds) != 1:
                expected = f"budget: expected fractions or bytes for {', '.join(family)}"
                raise self._wrong(f"{expected}, got {[amounts[other] for other in family]}")
            if kinds == {float} and most is None:
                raise self._wrong("give capacity_bytes, of which the budget's fractions are taken")
            found[name] = int(sum(given) * (most if most is not None and kinds == {float} else 1))
        total = sum(found.values())
        if most is not None and total > most:
            raise self._wrong(f"budget: {total:,} bytes in all, more than the {most:,} given")
        return found

    def _fitting(self, family: Sequence[str], single: Mapping[str, RequiredBytes], nbytes: int) -> int:
        """Pages of these pools that fit `nbytes`. Raises OutOfMemoryBudget."""
        page, names = sum(single[name].page for name in family), ", ".join(family)
        if page == 0:
            raise self._wrong(f"a page of {names} has no bytes; give capacity_pages")
        count = pages_within([single[name].program for name in family], nbytes)
        if count < 1:
            what, advice = f"{self.spec.name}: one page of {names}", "raise its budget or capacity_bytes"
            raise OutOfMemoryBudget(what, page, nbytes, advice)
        return count

    def _staging(
        self, single: Mapping[str, RequiredBytes], given: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, int]:
        """The bound of every pool's staging memory. Raises OutOfMemoryBudget."""
        staging, capture = arguments.whole(self.spec.name, "staging_bytes", self.staging_bytes, 0), None
        if self.capture_bytes is not None:
            capture = arguments.whole(self.spec.name, "capture_bytes", self.capture_bytes, 0)
        weights = {name: single[name].page * each["capacity_pages"] for name, each in given.items()}
        least = {name: least_bytes(single[name].program) for name in weights}
        changing = {name for name in weights if self.spec.members[name].pool.spec.updates == "in_place"}
        if capture is None:
            return self._split("staging_bytes", staging, weights, least)
        if not changing:
            step = "no pool that is on has rows that change in place: pass staging_bytes"
            raise arguments.refusal(self.spec.name, "capture_bytes", "None", capture, step)
        kept = {name: weight for name, weight in weights.items() if name not in changing}
        captured = {name: weights[name] for name in changing}
        return self._split("staging_bytes", staging, kept, least) | self._split(
            "capture_bytes", capture, captured, least
        )

    def _split(
        self, what: str, nbytes: int, weights: Mapping[str, int], least: Mapping[str, int]
    ) -> dict[str, int]:
        """Shares of `nbytes`, the argument `what`: the least that each pool takes, of the rest in proportion
        to the weights."""
        needed = sum(least[name] for name in weights)
        if needed > nbytes:
            pools = ", ".join(f"{name} {least[name]:,}" for name in weights)
            whose = f"{self.spec.name}: staging memory ({pools})"
            raise OutOfMemoryBudget(whose, needed, nbytes, f"raise {what}")
        total, rest = max(sum(weights.values()), 1), nbytes - needed
        return {name: least[name] + rest * weight // total for name, weight in weights.items()}
