"""Moves the layers of one member between a cache object and the device tensors of a pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from poolwright.runtime.errors import PoolError
from poolwright.runtime.integrations.contents import Path
from poolwright.runtime.integrations.fleet import Move
from poolwright.runtime.integrations.layers import Holding
from poolwright.runtime.integrations.members import Plan
from poolwright.runtime.integrations.paging import DeviceTensors, box, in_order, poison
from poolwright.runtime.pool import HostPool

Placing = Callable[[int], Sequence[int]]
"""From how many pages there are, which place each of them takes: a permutation."""


class MemberMover:
    """One member: device tensors of its own for a pool, `host_ids` of the pages that they fill.

    Raises ValueError for a component of the pool that the member does not fill.
    """

    def __init__(self, plan: Plan, pool: HostPool, host_ids: torch.Tensor) -> None:
        self.member, self.paging, self.pool, self.host_ids = plan.member, plan.paging, pool, host_ids
        self.unit = "token" if pool.program.tokens else "page"
        self.tensors = DeviceTensors(pool, self.paging.pages, plan.member.share.row_axis)
        self.table = self.paging.table(self.tensors.pages, None)
        self.staged = False
        claimed = {claim.component for claim in self.member.share.claims}
        missing = [name for name in self.tensors.parts if name not in claimed]
        if missing:
            raise ValueError(
                f"{self.member.name}: nothing fills component {missing[0]!r} of {self.member.share.pool}"
            )

    def stage(self, holdings: Sequence[Holding], place: Placing | None) -> None:
        """Copy the layers' rows into the device tensors, padding in zeros."""
        self.place(place)
        for tensor in self.tensors.all():
            tensor.zero_()
        table = self.table.to(self.pool.device)
        for at, number in enumerate(self.member.layers):
            rows = {name: self._blank(name) for name in self.tensors.parts}
            for claim_box, tensor in self._boxes(rows, holdings[number].contents.tensors):
                claim_box.copy_(tensor)
            for name, each in rows.items():
                self.tensors.pages_of(name, at)[table] = self.paging.paged(each)
        self.staged = True

    def place(self, place: Placing | None) -> None:
        """Let each page take the device page that `place` says (default: as they come). Raises ValueError."""
        order = None if place is None else place(self.paging.pages)
        self.table = self.paging.table(self.tensors.pages, order)

    def move(self, call: str) -> Move:
        """Ids of all pages where they are placed. Raises PoolError, naming the call, if nothing is staged."""
        if not self.staged:
            raise PoolError(f"{self.member.name}: no cache is staged; call stage() before {call}")
        size = self.pool.page_size
        if self.unit == "page":
            return Move(torch.tensor(self.host_pages()), self.table, self.unit)
        device = (self.table[:, None] * size + torch.arange(size)).reshape(-1)
        return Move(self.host_ids, device, self.unit)

    def host_pages(self) -> list[int]:
        """The host page of each page in turn."""
        found: list[int] = (self.host_ids[:: self.pool.page_size] // self.pool.page_size).tolist()
        return found

    def poison(self, holdings: Sequence[Holding]) -> int:
        """Overwrite the device tensors and what the layers hold of this member; returns how many bytes."""
        held = [
            holdings[number].contents.tensors[claim.path]
            for number in self.member.layers
            for claim in self.member.share.claims
        ]
        return sum(poison(tensor) for tensor in (*self.tensors.all(), *held))

    def restore(self, number: int, into: Mapping[Path, torch.Tensor]) -> None:
        """Copy what the device tensors hold of layer `number` into the tensors of `Books.blank`."""
        at, table = self.member.layers.index(number), self.table.to(self.pool.device)
        rows = {
            name: self.paging.unpaged(self.tensors.pages_of(name, at)[table]) for name in self.tensors.parts
        }
        for claim_box, tensor in self._boxes(rows, into):
            tensor.copy_(claim_box)

    def _blank(self, name: str) -> torch.Tensor:
        """Zeros [sequence, row, element dims] of a component."""
        like = self.tensors.pages_of(name, 0)
        return like.new_zeros(self.paging.sequences, self.paging.rows, *like.shape[2:])

    def _boxes(
        self, rows: Mapping[str, torch.Tensor], tensors: Mapping[Path, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each claim the box of `rows` and the part of its tensor that belong together, axes alike."""
        found = []
        for claim in self.member.share.claims:
            name, tensor = claim.component, tensors[claim.path].detach()
            if tensor.dtype != rows[name].dtype:
                raise ValueError(
                    f"{self.member.name}: {name}: expected {rows[name].dtype}, got {tensor.dtype}"
                )
            dims, extents = self.tensors.dims(name), self.tensors.extents[name]
            try:
                axes = [" ".join(self.pool.spec.splits.get(axis, (axis,))) for axis in claim.axes]
                wanted = ("sequence", "row", *dims)
                seen = in_order(tensor, axes, wanted, extents)[:, : self.paging.rows]
                place = box(rows[name], dims, dict(claim.at), seen.shape[2:])
                if place.shape != seen.shape:
                    raise ValueError(
                        f"expected {tuple(place.shape[:2])} sequences and rows, got {tuple(seen.shape)}"
                    )
                found.append((place, seen))
            except ValueError as error:
                pool = self.member.share.pool
                raise ValueError(f"{self.member.name}: {name} of pool {pool} does not fit: {error}") from None
        return found
