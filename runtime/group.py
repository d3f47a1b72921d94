"""The base of every generated group: pools that are allocated and moved together.

A generated class adds what its spec decides: which pools, whose ids they take, the typed constructor. The
pools are ordinary ones that share code, streams and order; a pool that takes the ids of another has no
slots of its own and is moved in every call that moves the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch

from poolwright.runtime import arguments
from poolwright.runtime import program as programs
from poolwright.runtime.backend import Code
from poolwright.runtime.choice import PATHS
from poolwright.runtime.driver import Stream
from poolwright.runtime.group_plan import GroupBytes, GroupSpec, Plan, sources
from poolwright.runtime.memory import check_available
from poolwright.runtime.moves import Move
from poolwright.runtime.opaque import opaque
from poolwright.runtime.pool import HostPool
from poolwright.runtime.program import GroupProgram
from poolwright.runtime.registration import Registration
from poolwright.runtime.shared import Movable, Shared, being_built, place
from poolwright.runtime.ticket import Ticket

Ids = tuple[torch.Tensor, torch.Tensor]
"""(host, device) ids of one pool."""

Tensors = Mapping[str, Mapping[str, object]]
LayerIds = Mapping[str, Iterable[int]]
"""By pool, as its own `bind` takes them."""


class HostPoolGroup(Movable):
    """Pools that move together, in the fixed order of the spec: one budget, one allocation, one call.

    `pools`: those that are not switched off, by name; each is an attribute too. Every method may be called
    from any thread. Raises ValueError for wrong arguments with nothing done.
    """

    spec: ClassVar[GroupSpec]
    STAGING_BYTES: ClassVar[int] = HostPool.STAGING_BYTES

    def __init__(
        self,
        *,
        device: str | torch.device,
        require: str | None,
        hugepages: bool | None,
        register: str,
        **sizes: Any,
    ) -> None:
        at = place(self.spec.name, device, hugepages, register)
        self._owner, planned = self.spec.name, Plan(self.spec, **sizes).pools()
        needed = sum(need.host for _, need in planned.values())
        check_available(self.spec.name, needed, "lower the capacity")
        folder = programs.folder_of(type(self))
        sized = {name: need.program for name, (_, need) in planned.items()}
        code = Code(GroupProgram(self.spec.name, folder, self.spec.parts, sized), at, require)
        self._shared = Shared(code, self.spec.name)
        self.pools: dict[str, HostPool] = {}
        common: dict[str, Any] = {"device": at, "require": require}
        common |= {"hugepages": hugepages, "register": register}
        token = being_built.set(self._shared)
        try:
            for name, (given, _) in planned.items():
                self._shared.member = name
                self.pools[name] = self.spec.members[name].pool(**given, **common)
            for name in self.pools:
                self._follow(name)
        except BaseException:
            self.destroy()
            raise
        finally:
            being_built.reset(token)
        self.__dict__ |= self.pools
        self._leaders = tuple((name, pool) for name, pool in self.pools.items() if pool._source is None)

    def __repr__(self) -> str:
        pools = ", ".join(f"{name}: {pool.page_num:,} pages" for name, pool in self.pools.items())
        return f"<{type(self).__name__} {pools}>"

    def _follow(self, name: str) -> None:
        """Have the pools that take the ids of this one move with it."""
        pool, members = self.pools[name], self.spec.members
        chain = [other for other in self.pools if name in sources(members, other)]
        pool._followers = tuple(self.pools[other] for other in chain)
        pool._numbers = (pool._number, *(follower._number for follower in pool._followers))
        pool._source = members[name].index
        # A page is handed out, and moved, where every pool that has it can be reached.
        memory = (pool, *pool._followers)
        pool._slots.registrations = tuple(each for of in memory for each in of._registrations)

    def __getattr__(self, name: str) -> Any:
        if name in type(self).spec.members and "pools" in self.__dict__:
            raise AttributeError(f"{self.spec.name}: pool {name!r} is switched off")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # ---- sizes

    @classmethod
    def _required_bytes(cls, **sizes: Any) -> GroupBytes:
        return GroupBytes({name: need for name, (_, need) in Plan(cls.spec, **sizes).pools().items()})

    @property
    def _registrations(self) -> tuple[Registration, ...]:
        return tuple(each for pool in self.pools.values() for each in pool._registrations)

    # ---- slots

    @opaque
    def alloc(self, counts: Mapping[str, int]) -> dict[str, torch.Tensor] | None:
        """Ids of free pages for each pool (int64, CPU), or None, with nothing taken, when any pool is full.

        `counts`: ids by pool; pools that are switched off are left out. Once all is `registered` this depends
        on the sequence of calls alone, so ranks that make the same calls get the same ids.
        """
        named, owner = self._named("alloc", counts), self.spec.name
        wanted = {name: arguments.integer(owner, f"alloc: {name}", count) for name, count in named.items()}
        taken: dict[str, torch.Tensor] = {}
        with self._slots_held(wanted), ExitStack() as undo:
            for name, count in wanted.items():
                ids = self.pools[name].alloc(count)
                if ids is None:
                    return None
                taken[name] = ids
                undo.callback(self.pools[name]._slots.free, ids)
            undo.pop_all()
        return taken

    @opaque
    def free(self, ids: Mapping[str, torch.Tensor], after: Ticket | None = None) -> dict[str, int]:
        """Give whole pages of several pools back, all or none; how many ids of each."""
        named = self._named("free", ids)
        with self._slots_held(named):
            pages = {name: self.pools[name]._freeable(each, after) for name, each in named.items()}
            for name, each in pages.items():
                self.pools[name]._slots.free_pages(each)
        return {name: each.numel() for name, each in named.items()}

    def available_size(self) -> dict[str, int]:
        """Free ids of every pool that has slots of its own."""
        return {name: pool.available_size() for name, pool in self._leaders}

    @opaque
    def clear(self) -> None:
        """Take every page back, after everything in flight. Bytes stay as they are."""
        self._alive()
        self._shared.transfers.drain()
        with self._slots_held(name for name, _ in self._leaders):
            for _, pool in self._leaders:
                pool._slots.clear()

    @contextmanager
    def _slots_held(self, names: Iterable[str]) -> Iterator[None]:
        """Slots of these pools, named in the fixed order, change only by this thread: the pools' own `alloc`
        and `free` come before or after a call of the group, never in its middle."""
        with ExitStack() as held:
            for name in names:
                held.enter_context(self.pools[name]._slots.held())
            yield

    # ---- device tensors

    def bind(self, tensors: Tensors, layer_ids: LayerIds | None = None) -> None:
        """Use these device tensors, by pool as its own `bind` takes them; all are checked before any is used.

        A pool without bytes needs none.
        """
        given = self._known("bind", tensors)
        named = {} if layer_ids is None else self._known("layer_ids", layer_ids)
        bound = {}
        for name, pool in self.pools.items():
            pool._alive()
            if name not in given and pool.program.device:
                raise ValueError(f"{self.spec.name}: bind: no tensors for pool {name!r}")
            ids = None
            if name in named:
                ids = arguments.layer_ids(self.spec.name, f"layer_ids: {name}", named[name])
            try:
                bound[pool._number] = (pool, pool._checked(given.get(name, {}), ids))
            except ValueError as error:
                raise ValueError(f"{self.spec.name}: {name}: {error}") from None
        pool._take(bound)

    def rebind(self, tensors: Tensors, layer_ids: LayerIds | None = None) -> None:
        """`bind` anew, after everything in flight."""
        self._alive()
        self._shared.transfers.drain()
        self.bind(tensors, layer_ids)

    def unbind(self) -> None:
        """Let go of the device tensors of all pools, as `HostPool.unbind` does."""
        for pool in self.pools.values():
            pool._alive()
            pool._drop_binding()
        self._shared.transfers.unbind()

    # ---- transfers

    @opaque
    def write_back(
        self,
        moves: Mapping[str, Ids],
        unit: str | Mapping[str, str] = "token",
        *,
        producer: Stream = None,
        validate: str = "cheap",
        path: str | Mapping[str, str] | None = None,
        qos: str | None = None,
        timed: bool = False,
    ) -> Ticket:
        """Copy device pages of several pools to host pages (D2H): (host, device) ids by pool.

        `unit`, `path`: for all pools, or by pool. One launch and one batch of copies for all that take the
        same path; a pool that takes another's ids moves with it.
        """
        asked = self._asked("write_back", moves)
        self._check_call("producer", producer, None, timed)
        if path is not None or not isinstance(unit, str):
            self._check_by_pool(unit, path)
        found = self._moves("write_back", asked, unit, validate, path, qos, False)
        return self._shared.transfers.submit("write_back", found, producer, timed=timed)

    @opaque
    def load(
        self,
        moves: Mapping[str, Ids],
        unit: str | Mapping[str, str] = "token",
        *,
        order: str = "bulk",
        layers: Iterable[int] | None = None,
        readers: Stream = None,
        validate: str = "cheap",
        path: str | Mapping[str, str] | None = None,
        qos: str | None = None,
        timed: bool = False,
    ) -> Ticket:
        """Copy host pages of several pools to device pages (H2D). `order` ``layer``: by layer id over all
        pools, each told on its own; `layers`: only these layer ids."""
        asked = self._asked("load", moves)
        self._check_call("readers", readers, None, timed)
        if path is not None or not isinstance(unit, str):
            self._check_by_pool(unit, path)
        if layers is not None:
            layers = arguments.layer_ids(self.spec.name, "layers", layers)
        numbers = [number for pool, _, _ in asked for number in pool._numbers]
        steps = self._shared.transfers.ordered(numbers, order, layers)
        found = self._moves("load", asked, unit, validate, path, qos, steps is not None)
        return self._shared.transfers.submit("load", found, readers, steps, timed)

    def _check_by_pool(self, unit: str | Mapping[str, str], path: str | Mapping[str, str] | None) -> None:
        if not isinstance(unit, str):
            self._known("unit", unit)
        if path is not None and not isinstance(path, str):
            for name, one in self._known("path", path).items():
                if one is not None and not isinstance(one, str):
                    known = f"one of {', '.join(PATHS)}"
                    raise arguments.refusal(self.spec.name, f"path: {name}", known, one)

    def _asked(self, direction: str, moves: Mapping[str, Ids]) -> list[tuple[HostPool, str, Ids]]:
        """The pools that are to move, in the fixed order, their names, and ids as they are given."""
        if type(moves) is dict:
            asked = [(pool, name, moves[name]) for name, pool in self._leaders if name in moves]
            if len(asked) == len(moves):
                return asked
        named = self._named(direction, moves)  # one is off, or something is refused by name
        return [(self.pools[name], name, pair) for name, pair in named.items()]

    def _moves(
        self,
        direction: str,
        asked: Sequence[tuple[HostPool, str, Ids]],
        unit: str | Mapping[str, str],
        validate: str,
        path: str | Mapping[str, str] | None,
        qos: str | None,
        layered: bool,
    ) -> list[Move]:
        self._shared.alive(self._owner)
        found: list[Move] = []
        for pool, name, pair in asked:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                got = type(pair).__name__
                raise arguments.wrong(self.spec.name, f"{direction}: {name}", "(host, device) ids", got)
            host, device = pair
            of = unit if isinstance(unit, str) else unit.get(name, "token")
            found += pool._moves(direction, host, device, of, validate, path, qos, layered)
        return found

    def destroy(self) -> None:
        """Give everything back, after everything in flight. Again: nothing happens.

        Raises PoolError when something in flight failed; everything is given back all the same.
        """
        for pool in self.pools.values():
            pool._forget()
        self._shared.end()

    # ---- pieces

    def _known(self, call: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """What is given for pools that are on, in the fixed order. Raises ValueError for unknown names."""
        known = ", ".join(self.spec.members)
        if not isinstance(given, Mapping):
            raise arguments.wrong(self._owner, call, f"a mapping by pool ({known})", type(given).__name__)
        for name in given:
            if name not in self.spec.members:
                raise ValueError(f"{self.spec.name}: {call}: no pool {name!r}; pools are {known}")
        return {name: given[name] for name in self.pools if name in given}

    def _named(self, call: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """As `_known`, for calls that take ids: only pools that have ids of their own."""
        found = self._known(call, given)
        for name in found:
            source = self.pools[name]._source
            if source is not None:
                raise ValueError(f"{self.spec.name}: {call}: {name} takes the ids of {source}: name that")
        return found
