"""Moves a cache through a generated group: one allocation, and one call for all its pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from poolwright.runtime.group import HostPoolGroup
from poolwright.runtime.group_plan import OFF, MemberSpec
from poolwright.runtime.integrations.fleet import Move, Sent
from poolwright.runtime.integrations.layers import STATE_POOLS
from poolwright.runtime.integrations.members import Plan
from poolwright.runtime.pool import HostPool
from poolwright.runtime.ticket import Ticket

_OF_THE_GROUP = ("page_size", "capacity_pages", "device")


class Grouped:
    """A group for the members of a cache. `names`: the group's pool of each member.
    `spare`: pages of every pool beyond those of the cache, in front of them.

    `pools` and `host_ids` by member: ids of all pages of each pool. A pool of the group that the cache does
    not need is switched off. Raises ValueError for members that are not the group's, and what it raises.
    """

    def __init__(
        self,
        made: type[HostPoolGroup],
        plans: Sequence[Plan],
        page_size: int,
        *,
        names: Mapping[str, str],
        path: str | None = None,
        spare: int = 0,
    ) -> None:
        self._path = path
        self._names = dict(names)
        taken = {self._names[plan.member.name]: plan for plan in plans}
        self._leaders = _leaders(made, taken)
        pages = {name: taken[leader].paging.pages for name, leader in self._leaders.items()}
        pages.setdefault(made.spec.anchor, 1)  # an anchor without bytes, whose pools this cache does not need
        members = made.spec.members
        arguments: dict[str, Any] = {name: _given(plan, members[name]) for name, plan in taken.items()}
        arguments |= {name: {} for name in pages if name not in taken} | _lists(made, taken)
        off = {name: OFF for name in made.spec.members if name not in {*taken, *pages}}
        device = plans[0].member.share.device
        capacity = {name: count + spare for name, count in pages.items()}
        self.group = made(**arguments, page_size=page_size, capacity_pages={**capacity, **off}, device=device)
        self.pools: dict[str, HostPool] = {n: self.group.pools[name] for n, name in self._names.items()}
        sizes = {name: self.group.pools[name].page_size for name in self._leaders}
        before = self.group.alloc({name: spare * size for name, size in sizes.items()})
        ids = self.group.alloc({name: pages[name] * size for name, size in sizes.items()})
        assert before is not None and ids is not None  # the group was made for these pages
        self.group.free(before)
        self.host_ids: dict[str, torch.Tensor] = {
            n: ids[members[name].index or name] for n, name in self._names.items()
        }

    def bind(self, tensors: Mapping[str, Mapping[str, object]]) -> None:
        self.group.bind({self._names[name]: each for name, each in tensors.items()})

    def write_back(self, moves: Mapping[str, Move]) -> dict[str, Sent]:
        ids, units = self._moves(moves)
        return self._sent(self.group.write_back(ids, units, path=self._path))

    def load(self, moves: Mapping[str, Move], order: str) -> dict[str, Sent]:
        """Submit a load; with `order` ``layer`` each layer is told on its own, over all pools."""
        ids, units = self._moves(moves)
        return self._sent(self.group.load(ids, units, order=order, path=self._path))

    def destroy(self) -> None:
        """Give all memory back. Again: nothing happens."""
        self.group.destroy()

    def _moves(
        self, moves: Mapping[str, Move]
    ) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, str]]:
        """Ids and units by pool of the group, of pools with ids of their own: the others move with them."""
        members = {name: n for n, name in self._names.items()}
        found = {name: moves[members[leader]] for name, leader in self._leaders.items()}
        return {n: (move.host, move.device) for n, move in found.items()}, {
            n: move.unit for n, move in found.items()
        }

    def _sent(self, ticket: Ticket) -> dict[str, Sent]:
        return {n: Sent(ticket, ticket.paths[name]) for n, name in self._names.items()}


def _leaders(made: type[HostPoolGroup], taken: Mapping[str, Plan]) -> dict[str, str]:
    """For each pool that has ids of its own the pool whose pages it has: itself, or where it is an anchor
    without bytes the first that takes its ids. Raises ValueError for pools that are not the group's."""
    group, members = made.spec.name, made.spec.members
    found: dict[str, str] = {}
    for name, plan in taken.items():
        share = plan.member.share
        if name not in members:
            known = ", ".join(members)
            raise ValueError(f"{group}: no pool for {plan.member.name} ({share.pool}); pools are {known}")
        if share.pool != members[name].pool.spec.name:
            expected = members[name].pool.spec.name
            hint = ""
            if {expected, share.pool} <= set(STATE_POOLS):
                hint = f"; if its states are the model's, pass pools={{{share.role!r}: {expected!r}}}"
            raise ValueError(f"{group}: {name}: expected a pool {expected}, got {share.pool}{hint}")
        source = members[name].index or name
        leader = found.setdefault(source, source if source in taken else name)
        if taken[leader].paging.pages != plan.paging.pages:
            raise ValueError(
                f"{group}: {name} moves with {leader}: expected {taken[leader].paging.pages} pages, "
                f"got {plan.paging.pages}"
            )
    for source in found:
        if source not in taken and members[source].pool.spec.components:
            raise ValueError(f"{group}: {found[source]} takes the ids of {source}, which the cache lacks")
    return {name: found[name] for name in members if name in found}


def _given(plan: Plan, member: MemberSpec) -> dict[str, Any]:
    """What the group takes for one pool: all but what it decides for all of them."""
    decided = {*_OF_THE_GROUP, *member.layers}
    return {name: value for name, value in plan.arguments.items() if name not in decided}


def _lists(made: type[HostPoolGroup], taken: Mapping[str, Plan]) -> dict[str, tuple[int, ...]]:
    """The group's lists of layers. Raises ValueError where two pools of one list have other layers."""
    found: dict[str, tuple[int, ...]] = {}
    for name, member in made.spec.members.items():
        for listed in member.layers.values():
            layers = taken[name].member.layers if name in taken else found.get(listed, ())
            if found.get(listed, ()) not in ((), layers):
                raise ValueError(f"{made.spec.name}: {listed}: {found[listed]} and {layers}")
            found[listed] = layers
    return found
