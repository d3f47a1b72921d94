"""The pools of a cache and what moves them: moves by member in, tickets by member out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from poolwright.runtime.integrations.members import Plan
from poolwright.runtime.pool import HostPool
from poolwright.runtime.ticket import Ticket


class Move(NamedTuple):
    """Ids of one member's pages and their unit."""

    host: torch.Tensor
    device: torch.Tensor
    unit: str


class Sent(NamedTuple):
    """What was submitted for one member: its ticket, maybe that of others too, and its path."""

    ticket: Ticket
    path: str


class Fleet(Protocol):
    """Pools by member, and `host_ids` of all their pages."""

    pools: dict[str, HostPool]
    host_ids: dict[str, torch.Tensor]

    def bind(self, tensors: Mapping[str, Mapping[str, object]]) -> None: ...

    def write_back(self, moves: Mapping[str, Move]) -> dict[str, Sent]: ...

    def load(self, moves: Mapping[str, Move], order: str) -> dict[str, Sent]: ...

    def destroy(self) -> None: ...


class SideBySide:
    """A pool of its own for each member; every pool takes a call of its own.

    `host_ids`: ids of all pages of each pool. Raises what the pools raise; none is left behind then.
    """

    def __init__(self, plans: Sequence[Plan], path: str | None) -> None:
        self._path = path
        self.pools: dict[str, HostPool] = {}
        self.host_ids: dict[str, torch.Tensor] = {}
        try:
            for plan in plans:
                name = plan.member.name
                pool = self.pools[name] = plan.build()
                ids = pool.alloc(plan.paging.pages * pool.page_size)
                assert ids is not None  # the pool was made for these pages
                self.host_ids[name] = ids
        except BaseException:
            self.destroy()
            raise

    def bind(self, tensors: Mapping[str, Mapping[str, object]]) -> None:
        for name, pool in self.pools.items():
            pool.bind(tensors[name])

    def write_back(self, moves: Mapping[str, Move]) -> dict[str, Sent]:
        tickets = {n: self.pools[n].write_back(*move, path=self._path) for n, move in moves.items()}
        return {name: Sent(ticket, ticket.path) for name, ticket in tickets.items()}

    def load(self, moves: Mapping[str, Move], order: str) -> dict[str, Sent]:
        """Submit loads; with `order` ``layer`` each layer is told on its own."""
        tickets = {n: self.pools[n].load(*move, order=order, path=self._path) for n, move in moves.items()}
        return {name: Sent(ticket, ticket.path) for name, ticket in tickets.items()}

    def destroy(self) -> None:
        """Give every pool's memory back. Again: nothing happens."""
        for pool in self.pools.values():
            pool.destroy()
