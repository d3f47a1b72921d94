"""A pool as a group of one: the calls that controllers make, in the form that groups have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from poolwright.runtime.controller.operation import Ids
from poolwright.runtime.pool import HostPool
from poolwright.runtime.ticket import Ticket


class Lone:
    """One pool, under its own name. Every mapping has that one key."""

    def __init__(self, pool: HostPool) -> None:
        self.name, self.pools = pool.name, {pool.name: pool}
        self._pool = pool

    def alloc(self, counts: Mapping[str, int]) -> dict[str, torch.Tensor] | None:
        ids = self._pool.alloc(counts[self._pool.name])
        return None if ids is None else {self._pool.name: ids}

    def free(self, ids: Mapping[str, torch.Tensor]) -> dict[str, int]:
        return {name: self._pool.free(each) for name, each in ids.items()}

    def clear(self) -> None:
        self._pool.clear()

    def write_back(self, moves: Mapping[str, Ids], unit: str, **how: Any) -> Ticket:
        return self._pool.write_back(*moves[self._pool.name], unit, **how)

    def load(self, moves: Mapping[str, Ids], unit: str, **how: Any) -> Ticket:
        return self._pool.load(*moves[self._pool.name], unit, **how)
