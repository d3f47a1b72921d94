"""Moves the cache of a Hugging Face model through host pools: cache object in, a fresh cache object filled.

Duck-typed (see `layers`): nothing of that library is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from poolwright.generated import group_class
from poolwright.runtime import arguments
from poolwright.runtime.choice import PATHS
from poolwright.runtime.errors import PoolError
from poolwright.runtime.integrations.books import Books
from poolwright.runtime.integrations.fleet import Fleet, Sent, SideBySide
from poolwright.runtime.integrations.grouped import Grouped
from poolwright.runtime.integrations.layers import KNOWN, ROLES, Holding
from poolwright.runtime.integrations.members import CacheLike, Member, members_of, plans, taken_apart
from poolwright.runtime.integrations.movers import MemberMover, Placing

__all__ = ["CacheLike", "CacheMover", "Member", "MemberMover", "Moved", "members_of", "plans", "taken_apart"]


@dataclass(frozen=True)
class Moved:
    """One transfer: pool, direction, path taken, bytes of whole pages."""

    pool: str
    direction: str
    path: str
    nbytes: int


class CacheMover:
    """Takes a cache object to the host and back: stage, write_back, poison, load, fill.

    The pools are built for `cache`, with room for exactly the pages that it fills; nothing is copied before
    `stage`. `page_size`: tokens of a page. `layout` and `form`: of every pool that has them (default: each
    pool's first). `pools`: by role a pool to take where several fit. `group`: a generated group that has the
    pools, so that one call moves them all; `names`: its pool of each member that has another name there;
    `spare`: pages that each of its pools has beyond those of the cache. `path` forces a transfer path. Use it
    in a ``with`` statement, or `close` it. Raises ValueError and PoolError; no pool is left behind then.
    """

    def __init__(
        self,
        cache: CacheLike,
        *,
        page_size: int,
        layout: str | None = None,
        form: str | None = None,
        pools: Mapping[str, str] | None = None,
        group: str | None = None,
        names: Mapping[str, str] | None = None,
        path: str | None = None,
        spare: int = 0,
    ) -> None:
        self._pools = _taken(pools)
        page_size = arguments.integer("CacheMover", "page_size", page_size)
        if path is not None:
            arguments.one_of("CacheMover", "path", path, PATHS)
        spare = arguments.whole("CacheMover", "spare", spare, 0)
        if spare and group is None:
            known = "0 without a group, whose pools alone have spare pages"
            raise arguments.refusal("CacheMover", "spare", known, spare, "name a group")
        self.members = members_of(taken_apart(cache, self._pools))
        called = _called(names, self.members, group)
        planned = plans(self.members, page_size=page_size, layout=layout, form=form)
        self._fleet: Fleet
        if group is None:
            self._fleet = SideBySide(planned, path)
        else:
            self._fleet = Grouped(
                group_class(group), planned, page_size, names=called, path=path, spare=spare
            )
        self._books: tuple[Books, ...] = ()
        self._written = False
        try:
            self.movers = tuple(
                MemberMover(plan, self._fleet.pools[name], self._fleet.host_ids[name])
                for name, plan in zip((member.name for member in self.members), planned, strict=True)
            )
            self._fleet.bind({mover.member.name: mover.tensors.bound for mover in self.movers})
        except BaseException:
            self.close()
            raise

    def stage(self, cache: CacheLike, place: Placing | None = None) -> None:
        """Copy the cache into device tensors: each sequence's tail padded with zeros to a whole page.

        `place`: which place each page takes (default: as they come). Raises ValueError, also if the cache
        does not look like the one the mover was made for.
        """
        holdings = self._same(cache)
        self._books, self._written = tuple(Books.of(held) for held in holdings), False
        for mover in self.movers:
            mover.stage(holdings, place)

    def write_back(self) -> tuple[Moved, ...]:
        """Copy the staged pages to the host and wait: one `Moved` a pool. Raises PoolError."""
        sent = self._fleet.write_back({each.member.name: each.move("write_back()") for each in self.movers})
        self._written = True
        return self._finished(sent)

    def poison(self, cache: CacheLike) -> int:
        """Overwrite the staged tensors and the cache's own with 0xFF; returns how many bytes."""
        holdings = self._same(cache)
        return sum(mover.poison(holdings) for mover in self.movers)

    def load(self, order: str = "bulk", place: Placing | None = None) -> tuple[Moved, ...]:
        """Copy the host pages to the staged tensors and wait; `place` as in `stage`, maybe another."""
        return self._finished(self._submit_load(order, place))

    def fill(self, fresh: CacheLike) -> None:
        """Put what the staged tensors hold into a cache object that has seen no token.

        Its layers end up with everything that the first cache's layers had. Raises ValueError for a cache
        that is not fresh or whose layers are of another kind; PoolError when nothing is staged.
        """
        layers = self._layers_of(fresh)
        for number, layer in enumerate(layers):
            self._fill(number, layer)

    def load_and_fill(self, fresh: CacheLike, place: Placing | None = None) -> tuple[Moved, ...]:
        """`load` in the order of layers over all pools, and `fill` each layer as soon as it has arrived."""
        layers = self._layers_of(fresh)
        sent = self._submit_load("layer", place)
        for number, layer in enumerate(layers):
            for mover in self.movers:
                if number in mover.member.layers:
                    sent[mover.member.name].ticket.wait_layer(number)
            self._fill(number, layer)
        return self._finished(sent)

    def close(self) -> None:
        """Give the pools' memory back. Again: nothing happens."""
        self._fleet.destroy()

    def __enter__(self) -> CacheMover:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _submit_load(self, order: str, place: Placing | None) -> dict[str, Sent]:
        if not self._written:
            raise PoolError("no page is written back; call write_back() before load()")
        for mover in self.movers:
            mover.place(place)
        return self._fleet.load({each.member.name: each.move("load()") for each in self.movers}, order)

    def _finished(self, sent: Mapping[str, Sent]) -> tuple[Moved, ...]:
        """What each member moved, after the end of it."""
        found = []
        for mover in self.movers:
            ticket, path = sent[mover.member.name]
            ticket.wait()
            nbytes = mover.paging.pages * mover.pool.page_bytes
            found.append(Moved(mover.member.share.pool, ticket.direction, path, nbytes))
        return tuple(found)

    def _fill(self, number: int, layer: object) -> None:
        books = self._books[number]
        tensors = books.blank()
        for mover in self.movers:
            if number in mover.member.layers:
                mover.restore(number, tensors)
        books.into(number, layer, tensors, self._pools)

    def _layers_of(self, fresh: Any) -> Sequence[Any]:
        """The layers of a cache to fill, made where it makes them when they are first used."""
        if not self._books:
            raise PoolError("no cache is staged; call stage() before fill()")
        make = getattr(fresh, "layer_class_to_replicate", None)
        while make is not None and len(fresh.layers) < len(self._books):
            fresh.layers.append(make())
        found = taken_apart(fresh, self._pools)
        if len(found) != len(self._books):
            raise ValueError(f"the cache to fill has {len(found)} layers, expected {len(self._books)}")
        for held, books in zip(found, self._books, strict=True):
            books.check_fresh(held)
        layers: Sequence[Any] = fresh.layers
        return layers

    def _same(self, cache: CacheLike) -> tuple[Holding, ...]:
        holdings = taken_apart(cache, self._pools)
        found = members_of(holdings)
        if found != self.members:
            raise ValueError(
                f"this mover was made for {self.members}, got a cache of {found}; make another mover"
            )
        return holdings


def _taken(pools: Mapping[str, str] | None) -> dict[str, str]:
    """`pools` by role. Raises ValueError for a role that no layer asks for."""
    if pools is None:
        return {}
    if not isinstance(pools, Mapping):
        raise arguments.refusal("CacheMover", "pools", "a mapping from role to pool", pools)
    for role in pools:
        if role not in ROLES:
            raise arguments.refusal("CacheMover", "pools", f"roles {', '.join(ROLES)}", role)
    return dict(pools)


def _called(names: Mapping[str, str] | None, members: Sequence[Member], group: str | None) -> dict[str, str]:
    """The group's pool of each member. Raises ValueError for `names` that nothing would follow."""
    found = {member.name: member.name for member in members}
    if names is None:
        return found
    if not isinstance(names, Mapping):
        raise arguments.refusal("CacheMover", "names", "a mapping from member to pool of the group", names)
    if names and group is None:
        raise arguments.refusal("CacheMover", "names", "none without a group", dict(names), "name a group")
    for member, pool in names.items():
        # Not only members of this cache: a model's names are the same for prompts that fill fewer of them.
        if member not in found and re.sub(r"_\d+$", "", str(member)) not in KNOWN:
            known, step = f"members such as {', '.join(found)}", f"members are {', '.join(KNOWN)}, or as kv_2"
            raise arguments.refusal("CacheMover", "names", known, member, step)
        if not isinstance(pool, str):
            raise arguments.refusal("CacheMover", f"names: {member}", "the name of a pool", pool)
    found |= {member: pool for member, pool in names.items() if member in found}
    for member, pool in found.items():
        others = [name for name, other in found.items() if other == pool and name != member]
        if others:
            expected, step = f"a pool of its own for {member}", f"{others[0]} has that one"
            raise arguments.refusal("CacheMover", "names", expected, pool, step)
    return found
