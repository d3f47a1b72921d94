"""Operations and acks: what a controller was asked for, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from poolwright.runtime.errors import PoolError
from poolwright.runtime.storage import Status

Ids = tuple[torch.Tensor, torch.Tensor]
"""(host, device) ids of one pool."""

DIRECTIONS = ("write_back", "load", "store", "fetch")
"""Between device and host; then between host and storage."""


@dataclass(frozen=True, eq=False)
class Operation:
    """A transfer that was asked for: ``write_back``, ``load``, ``store`` or ``fetch``.

    `number`: its place among all operations of the controller. `ids`: (host, device) ids by pool, in `unit`
    (``token`` or ``page``). `pages`: the host pages of every pool that moves, also of those that take
    another's ids. `key`: the caller's own, never looked at. `asked`: when, by the controller's clock.
    """

    number: int
    direction: str
    ids: Mapping[str, Ids] = field(repr=False)
    unit: str
    pages: Mapping[str, frozenset[int]] = field(repr=False)
    key: object
    asked: float

    @property
    def host(self) -> Mapping[str, torch.Tensor]:
        """Host ids by pool: what `free` takes."""
        return {name: host for name, (host, _) in self.ids.items()}


@dataclass(frozen=True, eq=False)
class Ack:
    """The end of an operation. `error` None: every byte is there; else its destination holds nothing that
    may be used. `seconds`: what its submission took on the device, or a worker for storage; 0 when it failed.
    `hit`: of a fetch, how many pages of the prefix can be restored. `statuses`: of a store, what became of
    each page, by pool.
    """

    operation: Operation
    error: PoolError | None
    seconds: float
    hit: int = 0
    statuses: Mapping[str, Sequence[Status]] = field(default_factory=dict)

    @property
    def key(self) -> object:
        """The caller's name for the operation."""
        return self.operation.key
