"""The controller of one pool."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from poolwright.runtime import arguments
from poolwright.runtime.controller.base import LIMIT, Controller, Reclaim
from poolwright.runtime.controller.lone import Lone
from poolwright.runtime.controller.operation import Operation
from poolwright.runtime.opaque import opaque
from poolwright.runtime.pool import HostPool


class CacheController(Controller):
    """Write-backs and loads of one bound pool.

    `limit`: operations of one direction that may lack an ack. `reclaim`: called with {pool: ids that lack}
    when a write finds too few free pages; it frees some. `clock`: seconds.
    """

    def __init__(
        self,
        pool: HostPool,
        *,
        limit: int = LIMIT,
        reclaim: Reclaim | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not isinstance(pool, HostPool):
            raise arguments.refusal("CacheController", "pool", "a pool", pool)
        super().__init__(Lone(pool), limit, reclaim, clock)

    @opaque
    def write(self, device: torch.Tensor, *, unit: str = "token", key: object = None) -> Operation | None:
        """Queue a write-back of these device ids to host pages that are allocated for it.

        None, with nothing taken, when there is no room: no free pages even after `reclaim`, or `limit`
        operations without an ack. The rows must stay as they are until the flight's `wait_captured`.
        """
        return self._write({self._name: device}, unit, key)

    @opaque
    def load(
        self, host: torch.Tensor, device: torch.Tensor, *, unit: str = "token", key: object = None
    ) -> Operation | None:
        """Queue a load of host pages into device pages; None when `limit` operations lack an ack.

        Raises ValueError for host pages that are not allocated, or whose write-back has no ack yet.
        """
        return self._load({self._name: (host, device)}, unit, key)

    @opaque
    def alloc(self, count: int) -> torch.Tensor | None:
        """Ids of free pages for something else, after `reclaim` where there are too few; or None."""
        found = self._alloc({self._name: count})
        return None if found is None else found[self._name]

    @opaque
    def free(self, host: torch.Tensor, *, unit: str = "token") -> None:
        """Give host pages back. Raises ValueError for pages that an operation holds."""
        self._free({self._name: host}, unit)

    @opaque
    def locked(self) -> set[int]:
        """Host pages (page numbers) that operations hold: not to be chosen for eviction."""
        return self._locked(self._name)
