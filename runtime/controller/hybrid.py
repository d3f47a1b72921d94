"""The controller of a group: several pools, one operation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from poolwright.runtime import arguments
from poolwright.runtime.controller.base import LIMIT, Controller, Reclaim
from poolwright.runtime.controller.operation import Ids, Operation
from poolwright.runtime.group import HostPoolGroup
from poolwright.runtime.opaque import opaque


class HybridCacheController(Controller):
    """Write-backs and loads of the pools of one bound group.

    Arguments as `CacheController`'s. Ids are named by pool, for any of the pools that have ids of their own.
    """

    def __init__(
        self,
        group: HostPoolGroup,
        *,
        limit: int = LIMIT,
        reclaim: Reclaim | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not isinstance(group, HostPoolGroup):
            raise arguments.refusal("HybridCacheController", "group", "a group of pools", group)
        super().__init__(group, limit, reclaim, clock)

    @opaque
    def write(
        self, device: Mapping[str, torch.Tensor], *, unit: str = "token", key: object = None
    ) -> Operation | None:
        """As `CacheController.write`: host pages for all pools, or None with nothing taken."""
        return self._write(device, unit, key)

    @opaque
    def load(self, moves: Mapping[str, Ids], *, unit: str = "token", key: object = None) -> Operation | None:
        """As `CacheController.load`: (host, device) ids by pool."""
        return self._load(moves, unit, key)

    @opaque
    def alloc(self, counts: Mapping[str, int]) -> dict[str, torch.Tensor] | None:
        """As `CacheController.alloc`: ids for all pools, or None with nothing taken."""
        return self._alloc(self._named("alloc", counts))

    @opaque
    def free(self, host: Mapping[str, torch.Tensor], *, unit: str = "token") -> None:
        """As `CacheController.free`: all pages, or none."""
        self._free(host, unit)

    @opaque
    def locked(self, name: str) -> set[int]:
        """As `CacheController.locked`, of one pool."""
        if not isinstance(name, str):
            raise arguments.refusal(self._name, "locked", f"one of {', '.join(self._own)}", name)
        return self._locked(*self._named("locked", {name: None}))
