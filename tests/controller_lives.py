"""Random lives of controllers on the simulated driver, beside a model of what every page and row holds.

A step is one rule of a hypothesis state machine. What the rules check: bytes at the moment at which the
contracts promise them, order and number of acks, locks, what is free.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from simulation import (
    CONFIGS,
    DEVICE_PAGES,
    GROUPS,
    HOST_PAGES,
    Config,
    GroupConfig,
    World,
    group_world,
    world,
)

from poolwright.runtime.controller import CacheController, Flight, HybridCacheController, Operation
from poolwright.runtime.errors import PoolError

CHANCE = st.randoms(use_true_random=True, note_method_calls=False)
KINDS: tuple[Config | GroupConfig, ...] = (*CONFIGS, *GROUPS)
SUBMITTING = ("record", "wait", "launch", "record", "wait", "launch", "copy", "upload", "allocate", "fill")


@dataclass
class Count:
    """What happened in all lives together."""

    steps: int = 0
    with_two_open: int = 0
    failures: int = 0
    acks: int = 0
    layers: int = 0
    refused: int = 0


@dataclass(eq=False)
class Asked:
    """An operation as the model sees it: tokens by pool, on both sides."""

    operation: Operation
    host: dict[str, list[int]]
    device: dict[str, list[int]]
    flight: Flight | None = None
    on_device: bool = False
    lost: bool = False

    @property
    def stores(self) -> bool:
        return self.operation.direction == "write_back"


class Life(RuleBasedStateMachine):
    """One life of a controller. Subclasses say what is built, and where it counts."""

    config: Config | GroupConfig
    count: Count

    def __init__(self) -> None:
        super().__init__()
        self.ended = True

    @initialize(chance=CHANCE)
    def build(self, chance: random.Random) -> None:
        self.choose = chance.randrange
        config = self.config
        self.hybrid = isinstance(config, GroupConfig)
        self.ctl: Any
        self.follows: Mapping[str, str] = {}
        if isinstance(config, GroupConfig):
            made = group_world(config, self.choose, slot_pages=1 + self.choose(2))
            self.worlds, self.follows = made.worlds, config.follows
            self.driver, self.owner = made.driver, made.group
            self.ctl = HybridCacheController(made.group, limit=6, reclaim=self.reclaim)
        else:
            one = world(config, self.choose, slot_pages=1 + self.choose(2))
            self.worlds = {one.pool.name: one}
            self.driver, self.owner = one.driver, one.pool
            self.ctl = CacheController(one.pool, limit=6, reclaim=self.reclaim)
        self.own = [name for name in self.worlds if name not in self.follows]
        self.stream, self.other = self.driver.caller, self.driver.new_stream("second")
        self.held: dict[str, set[int]] = {name: set() for name in self.own}
        self.full: dict[str, set[int]] = {name: set() for name in self.own}  # written, and acknowledged
        self.queued: list[Asked] = []
        self.running: list[Asked] = []
        self.past: list[Asked] = []  # acknowledged, but rows may not be known in every stream
        self.generous, self.ended, self.doomed = True, False, False

    # ---- choosing

    def yes(self, one_in: int = 2) -> bool:
        return self.choose(one_in) == 0

    def some(self, among: Iterable[int], most: int) -> list[int]:
        left = sorted(among)
        return [left.pop(self.choose(len(left))) for _ in range(min(len(left), 1 + self.choose(most)))]

    def chosen(self) -> list[str]:
        return self.own if self.yes() else [self.own[self.choose(len(self.own))]]

    def moved(self, name: str) -> list[World]:
        """The pools that move with this one."""
        followers = [other for other, source in self.follows.items() if source == name]
        return [self.worlds[each] for each in (name, *followers)]

    def tokens(self, name: str, pages: Sequence[int]) -> list[int]:
        return self.worlds[name].tokens(pages)

    @rule(number=st.integers(0, 2**16))
    def step(self, number: int) -> None:
        if self.ended:
            return
        steps = 5 * [self.write_now] + 4 * [self.load_now] + 8 * [self.acks] + 3 * [self.read_layer]
        steps += 2 * [self.write, self.load, self.produce, self.run] + 3 * [self.free]
        steps += [
            self.start_writing,
            self.start_loading,
            self.cancel,
            self.switch,
            self.look,
            self.reset,
            self.fail,
        ]
        self.count.steps += 1
        legs = {id(asked.flight) for asked in self.running}
        self.count.with_two_open += len(legs) >= 2
        chosen = steps[
            (number + self.choose(len(steps))) % len(steps)
        ]  # drawn alone, the first would prevail
        try:
            chosen()
        except PoolError:
            if not self.doomed:
                raise
            self.end()

    # ---- the model

    def locked(self, name: str) -> set[int]:
        entries = [*self.queued, *self.running]
        return {page for e in entries for page in e.operation.pages.get(name, ())}

    def device_pages(self, name: str, entries: Iterable[Asked]) -> set[int]:
        size = self.worlds[name].page_size
        return {token // size for e in entries for token in e.device.get(name, ())}

    def meet(self, entry: Asked, drafts: Mapping[str, tuple[list[int], list[int]]]) -> bool:
        """Whether an operation on these device pages would touch one of the entry's."""
        return any(set(pages) & self.device_pages(name, [entry]) for name, (_, pages) in drafts.items())

    def touching(self, name: str, tokens: Iterable[int], stores: bool | None = None) -> list[Asked]:
        wanted = set(tokens)
        return [
            e
            for e in (*self.running, *self.past)
            if (stores is None or e.stores == stores) and not wanted.isdisjoint(e.device.get(name, ()))
        ]

    def forget(self, entry: Asked) -> None:
        """It failed: what it would have written may hold anything."""
        entry.lost = True
        for name in entry.operation.ids:
            for one in self.moved(name):
                side, tokens = (one.host, entry.host) if entry.stores else (one.device, entry.device)
                for layer in side:
                    for token in tokens[name]:
                        layer[token] = None

    # ---- asking

    def ids(self, name: str, tokens: list[int], unit: str, on_device: bool) -> torch.Tensor:
        size = self.worlds[name].page_size
        numbers = tokens if unit == "token" else [token // size for token in tokens[::size]]
        if on_device:
            return self.worlds[name].device_ids(numbers, self.driver.current_stream())
        return torch.tensor(numbers, dtype=(torch.int64, torch.int32)[self.choose(2)])

    def queue(self, stores: bool, drafts: Mapping[str, tuple[list[int], list[int]]]) -> None:
        """Ask for an operation on these (host, device) pages; of a write only the counts are known."""
        unit = ("token", "page")[self.choose(2)]
        on_device = self.yes(5)
        device = {name: self.tokens(name, pages) for name, (_, pages) in drafts.items()}
        asking = self.other if on_device and self.yes() else self.stream
        with self.driver.use_stream(asking):
            given = {name: self.ids(name, each, unit, on_device) for name, each in device.items()}
        rivals = [e for e in self.queued if not (stores and e.stores) and self.meet(e, drafts)]
        if any(on_device or e.on_device for e in rivals):
            return  # nobody can see that, so the caller keeps from it
        clash = bool(rivals)
        same = [e for e in (*self.queued, *self.running) if e.stores == stores]
        with self.driver.use_stream(asking):
            try:
                made = self.ask(stores, drafts, given, unit)
            except ValueError as error:
                assert clash, error
                self.count.refused += 1
                return
        if made is None:
            short = stores and any(
                len(pages) > HOST_PAGES - len(self.held[name]) for name, (_, pages) in drafts.items()
            )
            assert short or len(same) >= 6
            return
        assert not clash
        host = {name: self.tokens(name, rows) for name, (rows, _) in drafts.items()}
        if stores:
            for name in drafts:
                pages = made.pages[name]
                assert len(pages) == len(drafts[name][1]) and not pages & self.held[name]
                self.held[name] |= pages
                rows = made.host[name].tolist()
                host[name] = rows if unit == "token" else self.tokens(name, rows)
        self.queued.append(Asked(made, host, device, on_device=on_device))

    def ask(
        self, stores: bool, drafts: Mapping[str, Any], given: Mapping[str, torch.Tensor], unit: str
    ) -> Operation | None:
        found: Operation | None
        if stores:
            found = self.ctl.write(given if self.hybrid else given[self.own[0]], unit=unit)
            return found
        host = {name: self.ids(name, self.tokens(name, drafts[name][0]), unit, False) for name in drafts}
        if self.hybrid:
            found = self.ctl.load({name: (host[name], given[name]) for name in drafts}, unit=unit)
        else:
            found = self.ctl.load(host[self.own[0]], given[self.own[0]], unit=unit)
        return found

    def usable(self, name: str) -> list[int]:
        reserved = {page for one in self.moved(name) for page in one.pool.spec.reserved}
        return [page for page in range(DEVICE_PAGES) if page not in reserved]

    def write(self) -> None:
        self.queue(
            True, {name: ([], self.some(self.usable(name), 1 + self.yes(4))) for name in self.chosen()}
        )

    def load(self) -> None:
        drafts = {}
        for name in self.chosen():
            rows = self.some(self.full[name], 2)
            left = self.usable(name)
            if rows:
                drafts[name] = (rows, [left.pop(self.choose(len(left))) for _ in rows])
        if drafts:
            self.queue(False, drafts)

    def reclaim(self, lacks: Mapping[str, int]) -> None:
        for name, count in lacks.items():
            size = self.worlds[name].page_size
            assert count == size * -(-count // size) > 0
            for page in sorted(self.held[name] - self.locked(name))[: count // size if self.generous else 0]:
                self.give_back(name, [page])

    # ---- starting

    def start_writing(self) -> None:
        self.start(True)

    def start_loading(self) -> None:
        self.start(False)

    def write_now(self) -> None:
        self.write()
        self.start(True)

    def load_now(self) -> None:
        self.load()
        self.start(False)
        self.read_layer()

    def start(self, stores: bool) -> None:
        entries = [e for e in self.queued if e.stores == stores]
        failing = bool(entries) and self.yes(3)
        if failing:
            self.driver.fail(SUBMITTING[self.choose(len(SUBMITTING))], skip=self.choose(3))
        with self.driver.use_stream(self.stream):
            try:
                flight = self.ctl.start_writing() if stores else self.ctl.start_loading(order=self.order())
            except PoolError:
                assert failing or self.doomed
                self.count.failures += 1
                assert not any(e.operation in self.started() for e in entries)
                return
            finally:
                self.driver.heal()
        assert flight.operations == tuple(e.operation for e in entries)
        for entry in entries:
            self.queued.remove(entry)
            self.running.append(entry)
            entry.flight = flight
            for name in entry.operation.ids:
                for one in self.moved(name):
                    if stores:
                        one.stored(entry.host[name], entry.device[name])
                    else:
                        one.loaded(entry.host[name], entry.device[name], range(len(one.config.layers)))
        for entry in entries:
            if self.failed(entry):
                self.count.failures += 1
                self.forget(entry)

    def order(self) -> str:
        return ("layer", "bulk")[self.yes(4)]

    def started(self) -> list[Operation]:
        return [running.operation for queue in self.ctl._running.values() for running in queue]

    def failed(self, entry: Asked) -> bool:
        """Whether it could not be submitted."""
        assert entry.flight is not None
        legs = [leg for leg in entry.flight._legs if entry.operation in leg.operations]
        return legs[0].ticket is None

    # ---- waiting

    def produce(self) -> None:
        """Overwrite rows, as early as the contracts allow."""
        name = self.own[self.choose(len(self.own))]
        busy = [e for e in self.running if self.yes()]
        among = self.device_pages(name, busy) or set(range(DEVICE_PAGES))
        pages = self.some(among - self.device_pages(name, self.queued), 3)
        tokens = self.tokens(name, pages)
        for entry in self.touching(name, tokens):
            if entry.lost:
                continue
            wait = entry.flight.wait_captured if entry.stores else entry.flight.wait_all
            if not self.reached(entry, wait):
                return
        for one in self.moved(name):
            one.produce(self.stream, tokens)

    def read_layer(self) -> None:
        """The rows of one layer are there as soon as it is told, whatever is still on its way."""
        name = self.own[self.choose(len(self.own))]
        loads = [e for e in self.running if not e.stores and name in e.device and not e.lost]
        if not loads:
            return
        wanted = loads[self.choose(len(loads))]
        one = self.moved(name)[self.choose(len(self.moved(name)))]
        at = self.choose(len(one.config.layers))
        for entry in self.touching(name, wanted.device[name], stores=False):
            if entry.lost:
                continue
            layer, flight = one.config.layers[at], entry.flight
            if not self.reached(entry, lambda stream, f=flight, n=layer: f.wait_layer(n, stream)):
                return
        self.count.layers += 1
        one.read(self.stream, wanted.device[name], [at])

    def reached(self, entry: Asked, wait: Any) -> bool:
        """Put the caller's stream behind it; False when a part of its flight failed."""
        assert entry.flight is not None
        try:
            wait(self.stream)
        except PoolError:
            if self.doomed:
                raise
            assert any(e.lost for e in (*self.running, *self.past) if e.flight is entry.flight)
            return False
        return True

    def switch(self) -> None:
        """Go on in the other stream, behind this one."""
        self.driver.wait(self.other, self.driver.record(self.stream))
        self.stream, self.other = self.other, self.stream

    def run(self) -> None:
        self.driver.run(None if self.yes() else self.choose(40))

    # ---- acks

    def acks(self) -> None:
        most, way = self.choose(4), ("write_back", "load", None)[self.choose(3)]
        expected = [e for e in self.running if way is None or e.operation.direction == way]
        sure = self.ctl.ready(way)
        found = self.ctl.pop_acks(most, way)
        assert min(sure, most) <= len(found) <= most
        for ack, entry in zip(found, expected, strict=False):
            assert ack.operation is entry.operation
            self.count.acks += 1
            self.running.remove(entry)
            self.past.append(entry)
            if self.doomed and ack.error is not None:
                self.forget(entry)
            assert (ack.error is not None) == entry.lost, ack.error
            for name, pages in ack.operation.pages.items():
                if entry.stores and not entry.lost:
                    self.worlds[name].compare_host(pages)
            for name in entry.operation.ids:
                if entry.stores and not entry.lost:
                    self.full[name] |= entry.operation.pages[name]
        self.past = self.past[-8:] if len(self.past) > 8 and self.flush() else self.past

    def flush(self) -> bool:
        """The caller's streams are behind everything that was acknowledged."""
        self.driver.wait(self.other, self.driver.record(self.stream))
        return True

    def cancel(self) -> None:
        if not (self.queued or self.running):
            return
        entry = (*self.queued, *self.running)[self.choose(len(self.queued) + len(self.running))]
        assert self.ctl.cancel(entry.operation) == (entry in self.queued)
        if entry in self.queued:
            self.dismiss([entry])

    def dismiss(self, entries: Iterable[Asked]) -> None:
        for entry in entries:
            self.queued.remove(entry)
            for name in entry.operation.ids if entry.stores else ():
                self.held[name] -= entry.operation.pages[name]

    # ---- pages

    def free(self) -> None:
        name = self.own[self.choose(len(self.own))]
        pages = self.some(self.held[name], 2)
        if not pages:
            return
        locked = self.locked(name) & set(pages)
        try:
            self.give_back(name, pages)
        except ValueError:
            assert locked
            self.count.refused += 1
            return
        assert not locked

    def give_back(self, name: str, pages: list[int]) -> None:
        ids = torch.tensor(self.tokens(name, pages))
        self.ctl.free({name: ids} if self.hybrid else ids)
        self.held[name] -= set(pages)
        self.full[name] -= set(pages)

    def look(self) -> None:
        """Locks, free pages and statistics are the model's."""
        self.generous = not self.yes(4)
        shown = json.loads(json.dumps(self.ctl.statistics()))
        for name in self.own:
            assert (self.ctl.locked(name) if self.hybrid else self.ctl.locked()) == self.locked(name)
            assert shown[name]["locked"] == len(self.locked(name))
            assert shown[name]["free"] == HOST_PAGES - len(self.held[name])

    def reset(self) -> None:
        if not self.yes():
            return
        dropped = self.ctl.reset()
        left = [e.operation for e in (*self.queued, *self.running)]
        assert dropped == sorted(left, key=lambda operation: operation.number)
        self.queued.clear()
        self.running.clear()
        self.past.clear()
        for name in self.own:
            self.held[name].clear()
            self.full[name].clear()
            assert self.worlds[name].pool.available_size() == self.worlds[name].pool.size

    # ---- the end

    def fail(self) -> None:
        """An operation that was or will be submitted fails. What it concerns is never told to be done."""
        if self.yes(4):
            self.count.failures += 1
            self.doomed = True
            self.driver.fail_step(self.choose(6))

    def teardown(self) -> None:
        if not self.ended:
            self.end()

    def end(self) -> None:
        self.ended = True
        self.driver.run()
        acks = self.ctl.pop_acks()
        assert [ack.operation for ack in acks] == [entry.operation for entry in self.running]
        for ack, entry in zip(acks, self.running, strict=True):
            if self.doomed and ack.error is not None:
                self.forget(entry)
            for name, pages in ack.operation.pages.items() if entry.stores and ack.error is None else ():
                self.worlds[name].compare_host(pages)
        for one in self.worlds.values():
            if not self.doomed:
                one.settle()
            one.check()
        with suppress(PoolError):
            self.owner.destroy()
