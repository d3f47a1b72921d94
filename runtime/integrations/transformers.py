"""Moves the cache of a Hugging Face model through host pools: cache object in, a fresh cache object filled.

Duck-typed (see `layers`): nothing of that library is imported.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from poolwright.generated import pool_class
from poolwright.runtime.errors import PoolError
from poolwright.runtime.integrations.layers import (
    CacheLike,
    LayerGroup,
    keep_books,
    keys_and_values,
    layer_groups,
    rows_of,
)
from poolwright.runtime.integrations.paging import Axes, Paging, from_pages, poison, to_pages
from poolwright.runtime.pool import HostPool
from poolwright.runtime.ticket import Ticket

__all__ = ["CacheLike", "CacheMover", "GroupMover", "LayerGroup", "Moved", "layer_groups", "pools_for"]


@dataclass(frozen=True)
class Moved:
    """One transfer: pool, direction, path taken, bytes of whole pages, seconds from submission to the end."""

    pool: str
    direction: str
    path: str
    nbytes: int
    seconds: float


def pools_for(
    cache: CacheLike, *, page_size: int, layout: str = "page_first", form: str | None = None
) -> tuple[tuple[LayerGroup, HostPool], ...]:
    """A host pool for each group of layers, with room for exactly the pages that the cache fills.

    `form` None: each pool's first form. The caller destroys the pools. Raises ValueError for sizes,
    layouts and forms that a pool does not take, and PoolError; no pool is left behind then.
    """
    made: list[tuple[LayerGroup, HostPool]] = []
    try:
        for group in layer_groups(cache):
            if page_size < 1:
                raise ValueError(f"{group.pool}: page_size: expected at least 1, got {page_size}")
            made.append((group, _pool_for(group, page_size, layout, form)))
    except BaseException:
        for _, pool in made:
            pool.destroy()
        raise
    return tuple(made)


class GroupMover:
    """Moves the layers of one group: paged device tensors of its own, a pool, the host pages they fill."""

    def __init__(self, group: LayerGroup, pool: HostPool, path: str | None) -> None:
        self.group, self.pool = group, pool
        self.paging = Paging(group.sequences, group.tokens, pool.page_size)
        self.table = self.paging.table(None)
        self.tensors: dict[str, list[torch.Tensor]] = {}
        ids = pool.alloc(self.paging.pages * pool.page_size)
        assert ids is not None  # the pool was made for these pages
        self.host_ids = ids
        self._path = path
        self._written = False

    def stage(self, layers: Sequence[Any], order: Sequence[int] | None) -> None:
        """Copy the layers' rows into new paged tensors in the pool's form and bind them."""
        self.table, self._written = self.paging.table(order), False
        rows = [rows_of(self.group, layers[number]) for number in self.group.layers]
        self.tensors = {
            name: [to_pages(each[name], self.paging, self.table, axes) for each in rows]
            for name, axes in self._axes().items()
        }
        self.pool.rebind(self.tensors)

    def write_back(self) -> Moved:
        if not self.tensors:
            raise PoolError(f"{self.group.pool}: no cache is staged; call stage() before write_back()")
        start = time.perf_counter()
        ids = self.paging.token_ids(self.table)
        moved = self._moved(self.pool.write_back(self.host_ids, ids, path=self._path), start)
        self._written = True
        return moved

    def load(self, order: Sequence[int] | None) -> Moved:
        if not self._written:
            raise PoolError(f"{self.group.pool}: no page is written back; call write_back() before load()")
        table = self.paging.table(order)
        start = time.perf_counter()
        ids = self.paging.token_ids(table)
        moved = self._moved(self.pool.load(self.host_ids, ids, path=self._path), start)
        self.table = table
        return moved

    def poison(self, layers: Sequence[Any]) -> int:
        staged = [tensor for tensors in self.tensors.values() for tensor in tensors]
        held = [t for number in self.group.layers for t in (layers[number].keys, layers[number].values)]
        return sum(poison(tensor) for tensor in (*staged, *held))

    def fill(self, cache: CacheLike) -> None:
        if not self.tensors:
            raise PoolError(f"{self.group.pool}: no cache is staged; call stage() before fill()")
        axes = self._axes()
        for at, number in enumerate(self.group.layers):
            rows = {
                name: from_pages(tensors[at], self.paging, self.table, axes[name])
                for name, tensors in self.tensors.items()
            }
            keys, values = keys_and_values(self.group, rows)
            cache.update(keys, values, number)
            keep_books(self.group, number, cache.layers[number])

    def _axes(self) -> dict[str, Axes]:
        """Axes of each component's tensors in the pool's form."""
        found = {}
        spec = self.pool.spec
        whole = {piece: dim for dim, pieces in spec.splits.items() for piece in pieces}
        for part in spec.components:
            dims = tuple(dict.fromkeys(whole.get(dim, dim) for dim in part.dims))
            names = spec.forms[self.pool.form].order
            order = [axis for name in names for axis in (dims if name == "element" else (name,))]
            found[part.name] = Axes(dims, tuple(order))
        return found

    def _moved(self, ticket: Ticket, start: float) -> Moved:
        ticket.wait()
        seconds = time.perf_counter() - start
        nbytes = self.paging.pages * self.pool.page_bytes
        return Moved(self.group.pool, ticket.direction, ticket.path, nbytes, seconds)


class CacheMover:
    """Takes a cache object to the host and back: stage, write_back, poison, load, fill.

    The pools are built for `cache` (see `pools_for`), nothing is copied before `stage`. `path` forces a
    transfer path. Use it in a ``with`` statement, or `close` it.
    """

    def __init__(
        self,
        cache: CacheLike,
        *,
        page_size: int,
        layout: str = "page_first",
        form: str | None = None,
        path: str | None = None,
    ) -> None:
        made = pools_for(cache, page_size=page_size, layout=layout, form=form)
        self.movers = tuple(GroupMover(group, pool, path) for group, pool in made)

    def stage(self, cache: CacheLike, order: Sequence[int] | None = None) -> None:
        """Copy the cache into paged device tensors: each sequence's tail padded with zeros to a whole page.

        `order`: the device page of each page in turn, a permutation, so all groups must fill as many
        pages. Raises ValueError, also if the cache does not look like the one the mover was made for.
        """
        self._same(cache)
        for mover in self.movers:
            mover.stage(cache.layers, order)

    def write_back(self) -> tuple[Moved, ...]:
        """Copy the staged pages to the host and wait: one `Moved` a pool. Raises PoolError."""
        return tuple(mover.write_back() for mover in self.movers)

    def poison(self, cache: CacheLike) -> int:
        """Overwrite the staged tensors and the cache's own with 0xFF; returns how many bytes."""
        self._same(cache)
        return sum(mover.poison(cache.layers) for mover in self.movers)

    def load(self, order: Sequence[int] | None = None) -> tuple[Moved, ...]:
        """Copy the host pages to the staged tensors and wait; `order` as in `stage`, maybe another."""
        return tuple(mover.load(order) for mover in self.movers)

    def fill(self, fresh: CacheLike) -> None:
        """Put what the staged tensors hold into a cache object that has seen no token.

        Its layers count as many seen tokens as the first cache's did. Raises ValueError for a cache that
        is not fresh or whose layers are of another kind.
        """
        numbers = {number for mover in self.movers for number in mover.group.layers}
        for number, layer in enumerate(fresh.layers):
            if number in numbers and int(layer.get_seq_length()) != 0:
                raise ValueError(
                    f"layer {number} of the cache to fill has seen {int(layer.get_seq_length())} tokens, "
                    f"expected none; hand over a new cache object"
                )
        for mover in self.movers:
            mover.fill(fresh)

    def close(self) -> None:
        """Give the pools' memory back. Again: nothing happens."""
        for mover in self.movers:
            mover.pool.destroy()

    def __enter__(self) -> CacheMover:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _same(self, cache: CacheLike) -> None:
        made_for = tuple(mover.group for mover in self.movers)
        found = layer_groups(cache)
        if found != made_for:
            raise ValueError(
                f"this mover was made for {made_for}, got a cache of {found}; make another mover"
            )


def _pool_for(group: LayerGroup, page_size: int, layout: str, form: str | None) -> HostPool:
    made = pool_class(group.pool)
    arguments: dict[str, Any] = dict(
        **group.params,
        dtype=group.dtype,
        layers=group.layers,
        page_size=page_size,
        layout=layout,
        form=next(iter(made.spec.forms)) if form is None else form,
        capacity_pages=Paging(group.sequences, group.tokens, page_size).pages,
        device=group.device,
    )
    return made(**arguments)
