"""A model and what is asked for in; every pool of one rank with its bytes, pages and share of memory out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from poolwright.codegen import ir, lower
from poolwright.codegen.plan.config import PlanError
from poolwright.codegen.plan.model import Member, Model
from poolwright.codegen.plan.rank import RankSize, rank_params
from poolwright.codegen.plan.sizes import Sized, chosen_dtypes, program_of, size_pool

STATE_SHARE = 0.3


@dataclass(frozen=True)
class Asked:
    """What a plan is made for. Capacity is `tokens` or `host_bytes`; `states`: places to resume at."""

    ranks: int = 1
    page_size: int | None = None
    layout: str = "page_first"
    tokens: int | None = None
    states: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True)
class Planned:
    """One pool of one rank. `pages` is its capacity, `copies` how many ranks hold the same bytes."""

    member: Member
    lowered: ir.Lowered
    params: Mapping[str, RankSize]
    dtypes: Mapping[str, str]
    page_size: int
    size: Sized
    copies: float
    pages: int = 0

    @property
    def pool(self) -> ir.Pool:
        return self.lowered.pool

    @property
    def grows(self) -> bool:
        return self.member.rows.grows

    @property
    def host_bytes(self) -> int:
        return self.size.host_bytes(self.pages)

    @property
    def state_pages(self) -> int:
        """Pages that one place to resume at takes."""
        return self.member.rows.pages_of_state(self.page_size)


@dataclass(frozen=True)
class Plan:
    """All pools of one rank. `tokens` and `states` are what they hold; None where the model keeps none."""

    asked: Asked
    page_size: int
    members: tuple[Planned, ...]
    group: ir.Group | None
    tokens: int | None
    states: int | None
    notes: tuple[str, ...]

    @property
    def token_bytes(self) -> float:
        """Bytes that one token of history takes."""
        return sum(one.size.page_bytes for one in self.members if one.grows) / self.page_size

    @property
    def state_bytes(self) -> int:
        """Bytes that one place to resume at takes: its state slots, or its window."""
        return _cost(one for one in self.members if not one.grows)

    @property
    def host_bytes(self) -> int:
        return sum(one.host_bytes for one in self.members)


def make_plan(
    model: Model, pools: Mapping[str, ir.Pool], groups: Mapping[str, ir.Group], asked: Asked
) -> Plan:
    """The plan of one rank. Raises PlanError naming the option or the config's field."""
    for heads in model.divided:
        heads.of(asked.ranks)
    page_size = model.page_size if asked.page_size is None else asked.page_size
    members = tuple(_member(one, pools[one.pool], page_size, asked) for one in model.members)
    group = None if model.group is None else groups[model.group]
    pages, states = _capacity(members, page_size, asked, _state_share(group, members))
    members = tuple(replace(one, pages=(pages if one.grows else states * one.state_pages)) for one in members)
    tokens = pages * page_size if any(one.grows for one in members) else None
    held = None if all(one.grows for one in members) else states
    return Plan(asked, page_size, members, group, tokens, held, model.notes)


def _member(member: Member, pool: ir.Pool, page_size: int, asked: Asked) -> Planned:
    dtypes, rows = chosen_dtypes(pool, member.dtypes), member.rows.page(page_size)
    lowered = lower.lower(pool)
    program = program_of(lowered, member.variants, asked.layout)

    def sized(ranks: int) -> tuple[dict[str, RankSize], Sized]:
        params = rank_params(pool, member, ranks)
        return params, size_pool(pool, program, params, dtypes, len(member.layers), rows)

    params, size = sized(asked.ranks)
    whole = sized(1)[1].page_bytes
    copies = size.page_bytes * asked.ranks / whole if whole else 1.0
    return Planned(member, lowered, params, dtypes, rows, size, copies)


# ---- capacity ---------------------------------------------------------------------------------


def _capacity(members: Sequence[Planned], page_size: int, asked: Asked, share: float) -> tuple[int, int]:
    """Pages of history, and places to resume at, that what is asked for comes to."""
    history = [one for one in members if one.grows]
    resume = [one for one in members if not one.grows]
    if asked.tokens is not None and not history:
        raise PlanError("--tokens: this model keeps states alone; give --states or --host-gb")
    if asked.states is not None and not resume:
        raise PlanError("--states: this model keeps no state or window; give --tokens or --host-gb")
    if asked.tokens is not None:
        pages = -(-asked.tokens // page_size)
        if asked.states is not None or not resume:
            return pages, asked.states or 0
        return pages, max(1, int(_bytes(history, pages) * share / (1 - share)) // _cost(resume))
    if not history and asked.states is not None:
        return 0, asked.states
    assert asked.host_bytes is not None
    part = int(asked.host_bytes * share)
    if asked.states is not None:
        part = _bytes(resume, asked.states)
        states = asked.states
        if part >= asked.host_bytes:
            raise PlanError(
                f"--states {states}: {states} places to resume at take {part:,} bytes of "
                f"{asked.host_bytes:,}, which leaves none for pages; lower --states or raise --host-gb"
            )
    else:
        states = _fitting(resume, part, "state") if resume else 0
    return (_fitting(history, asked.host_bytes - part, "page") if history else 0), states


def _fitting(members: Sequence[Planned], host_bytes: int, what: str) -> int:
    """How many pages (or states) of all the members fit. Raises PlanError when not one does."""
    cost = _cost(members)
    if cost == 0:
        raise PlanError(f"--host-gb: a {what} of this model has no bytes; give --tokens")
    found = max(host_bytes, 0) // cost
    # Blocks of a pool start at aligned places, so all pages may take a little more than their sum.
    while found and _bytes(members, found) > host_bytes:
        found -= 1
    if not found:
        raise PlanError(
            f"--host-gb: {max(host_bytes, 0):,} bytes are left for {what}s, and one takes {cost:,}; "
            f"raise --host-gb"
        )
    return found


def _cost(members: Iterable[Planned]) -> int:
    return sum(one.size.page_bytes * (1 if one.grows else one.state_pages) for one in members)


def _bytes(members: Iterable[Planned], count: int) -> int:
    return sum(one.size.host_bytes(count * (1 if one.grows else one.state_pages)) for one in members)


def _state_share(group: ir.Group | None, members: Sequence[Planned]) -> float:
    """What part of memory the group's budget gives to members that do not grow with the history."""
    if all(one.grows for one in members):
        return 0.0
    if not any(one.grows for one in members):
        return 1.0
    budget = {} if group is None else {name: text for name, text in group.budget if text != "off"}
    total = sum(float(text) for text in budget.values())
    if not total:
        return STATE_SHARE
    return sum(float(budget.get(m.member.name, 0)) for m in members if not m.grows) / total
