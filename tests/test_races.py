"""Random lives of small pools on the simulator: in every order that the declared waits permit, every byte
is where the contracts say, at the moment they say it, and no two operations race."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from race_scenarios import FAILURES, SCENARIOS, Scenario
from simulation import (
    CONFIGS,
    DEVICE_PAGES,
    GROUPS,
    HOST_PAGES,
    Config,
    DeviceIds,
    GroupConfig,
    GroupWorld,
    World,
    first,
    group_world,
    last,
    world,
)

from poolwright.runtime import hazards
from poolwright.runtime.errors import PoolError
from poolwright.runtime.ticket import Ticket

STEPS = 20
SUBMITTING = ("allocate", "record", "wait", "copy", "upload", "fill", "launch")


@dataclass(eq=False)
class Pending:
    """One pool's part of a transfer that the caller's stream may not be behind yet."""

    ticket: Ticket
    stores: bool
    pages: set[int]
    tokens: set[int]
    layers: Sequence[int]
    told: bool  # layers can be waited for
    captured: bool = False


@dataclass
class Part:
    """One pool and what the caller knows of it. `followers`: pools that take its ids."""

    name: str
    world: World
    followers: list[Part] = field(default_factory=list)
    owned: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    pending: list[Pending] = field(default_factory=list)
    tickets: list[Pending] = field(default_factory=list)
    host_owner: dict[int, Pending | None] = field(default_factory=dict)
    device_owner: dict[tuple[int, int], Pending | None] = field(default_factory=dict)

    @property
    def pool(self) -> Any:
        return self.world.pool

    @property
    def moved(self) -> list[Part]:
        """The pools that a transfer of this one moves."""
        return [self, *self.followers]

    @property
    def every(self) -> range:
        return range(len(self.world.config.layers))

    def usable(self) -> list[int]:
        reserved = self.pool.spec.reserved
        return [page for page in range(DEVICE_PAGES) if page not in reserved]

    def took(self, draft: Draft, ticket: Ticket, layers: Sequence[int], told: bool) -> None:
        """A transfer was submitted: what it will have done, in the model."""
        entry = Pending(ticket, draft.stores, set(draft.pages), set(draft.device), layers, told)
        self.pending.append(entry)
        self.tickets.append(entry)
        if draft.stores:
            self.world.stored(draft.host, draft.device)
            self.written |= entry.pages
            self.host_owner |= dict.fromkeys(entry.pages, entry)
        else:
            self.world.loaded(draft.host, draft.device, layers)
            self.device_owner |= {(layer, token): entry for layer in layers for token in draft.device}

    def lose(self, draft: Draft, layers: Sequence[int]) -> None:
        """A submission failed half-way: what it would have written may hold anything."""
        if draft.stores:
            self.written -= set(draft.pages)
            for layer in self.world.host:
                for token in self.world.tokens(draft.pages):
                    layer[token] = None
            self.host_owner |= dict.fromkeys(draft.pages)
        else:
            for at in layers:
                for token in draft.device:
                    self.world.device[at][token] = None
            self.device_owner |= {(layer, token): None for layer in layers for token in draft.device}

    def forget(self, entry: Pending) -> None:
        """A transfer failed: nothing is known of what it would have written."""
        self.host_owner = {page: e for page, e in self.host_owner.items() if e is not entry}
        self.device_owner = {at: e for at, e in self.device_owner.items() if e is not entry}

    def compare(self) -> None:
        """Host pages whose last write-back is known to be done are right."""
        known = [p for p, e in self.host_owner.items() if e is not None and e.ticket.acknowledged]
        self.world.compare_host(known)


@dataclass(frozen=True)
class Draft:
    """What one pool moves in a submission: tokens of both sides, and the lists that are handed over."""

    part: Part
    stores: bool
    pages: Sequence[int]
    host: Sequence[int]
    device: Sequence[int]
    ids: tuple[torch.Tensor, torch.Tensor]
    unit: str
    path: str


class Life:
    """One random life of a pool, or of a group of pools. `choose(n)` decides everything, also what the
    driver does."""

    def __init__(self, config: Config | GroupConfig, choose: Callable[[int], int]) -> None:
        self.choose = choose
        slots, chunks = choose(3), (1, 3, 7)[choose(3)]
        self.whole: World | GroupWorld
        self.group: Any = None
        if isinstance(config, Config):
            self.whole = world(config, choose, slots, chunks)
            self.parts = [Part(config.label, self.whole)]
        else:
            self.whole = made = group_world(config, choose, slots, chunks)
            self.group = made.group
            parts = {name: Part(name, each) for name, each in made.worlds.items()}
            for name, source in config.follows.items():
                parts[source].followers.append(parts[name])
            self.parts = [part for name, part in parts.items() if name not in config.follows]
        self.every = [part for own in self.parts for part in own.moved]
        self.driver = self.whole.driver
        self.stream, self.other = self.driver.caller, self.driver.new_stream("second")
        self.doomed = False

    def play(self) -> Life:
        steps = [self.alloc, self.store, self.store, self.store, self.load, self.load, self.load, self.wait]
        steps += [self.wait, self.produce, self.produce, self.read, self.read, self.free, self.switch]
        steps += [self.run, self.compare, self.rarely, self.fail]
        try:
            for prelude in (self.alloc, self.alloc, self.store, self.store):
                prelude()
            for _ in range(STEPS):
                steps[self.choose(len(steps))]()
        except PoolError:
            if not self.doomed:
                raise
        self.end()
        return self

    def check(self) -> None:
        for part in self.every:
            part.world.check()

    # ---- choosing

    def one(self, among: list[Part]) -> Part:
        return among[self.choose(len(among))] if len(among) > 1 else among[0]

    def some(self, among: Sequence[int], most: int) -> list[int]:
        """A few different ones, in any order."""
        left = list(among)
        count = min(len(left), 1 + self.choose(most))
        return [left.pop(self.choose(len(left))) for _ in range(count)]

    def yes(self, one_in: int = 2) -> bool:
        return self.choose(one_in) == 0

    # ---- slots

    def alloc(self) -> None:
        count = 1 + self.choose(2)
        asked = self.parts if self.group is not None and self.yes() else [self.one(self.parts)]
        full = any(HOST_PAGES - len(part.owned) < count for part in asked)
        counts = {part.name: count * part.world.page_size for part in asked}
        if self.group is not None:
            found = self.group.alloc(counts)
        else:
            ids = asked[0].pool.alloc(*counts.values())
            found = None if ids is None else {asked[0].name: ids}
        if full:
            assert found is None
            return
        for part in asked:
            pages = {int(i) // part.world.page_size for i in found[part.name]}
            assert len(pages) == count and not pages & part.owned
            part.owned |= pages

    def free(self) -> None:
        part = self.one(self.parts)
        pages = self.some(sorted(part.owned), 2)
        if not pages:
            return
        tickets = [t for t in part.tickets if not t.ticket.acknowledged and t.pages & set(pages)]
        after = tickets[self.choose(len(tickets))] if tickets and self.yes() else None
        ids = torch.tensor(part.world.tokens(pages))
        if any(entry is not after for entry in tickets):
            with pytest.raises(ValueError, match="in flight"):
                part.pool.free(ids, after=after.ticket if after else None)
            return
        part.pool.free(ids, after=after.ticket if after else None)
        part.owned -= set(pages)

    def rarely(self) -> None:
        """Take everything back, or take other tensors."""
        if self.yes(3):
            (self.group or self.parts[0].pool).clear()
            for part in self.parts:
                part.owned.clear()
        elif self.yes():
            self.whole.bind()
        else:
            return
        for part in self.every:
            assert all(entry.ticket.acknowledged for entry in part.tickets)
            part.pending.clear()

    # ---- transfers

    def store(self) -> None:
        if self.yes():
            self.produce()
        drafts = [draft for part in self.chosen() if (draft := self.draft(part, True)) is not None]
        if drafts:
            self.submit(drafts, None, {})

    def load(self) -> None:
        drafts = [draft for part in self.chosen() if (draft := self.draft(part, False)) is not None]
        if not drafts:
            return
        if self.yes():
            self.submit(drafts, None, {})
            return
        drafts = [draft if self.by_layers(draft) else replace(draft, path="zero_copy") for draft in drafts]
        lists = [part.world.config.layers for draft in drafts for part in draft.part.moved]
        layers = sorted({layer for ids in lists for layer in ids})
        if self.yes():
            self.submit(drafts, layers, {"order": "layer"})
        else:
            some = self.some(layers, len(layers))
            self.submit(drafts, some, {"layers": some})

    def by_layers(self, draft: Draft) -> bool:
        """Whether the path of a draft takes single layers, too."""
        return all(part.pool.program.cuts("load") for part in draft.part.moved)

    def chosen(self) -> list[Part]:
        """The pools that take part in a submission."""
        if len(self.parts) == 1:
            return self.parts
        return self.parts if self.yes() else [self.one(self.parts)]

    def draft(self, part: Part, stores: bool) -> Draft | None:
        """Pages of a pool to move, as tokens or pages, on either side."""
        made, size = part.world, part.world.page_size
        pages = self.some(sorted(part.owned if stores else part.owned & part.written), 3)
        if not pages:
            return None
        scattered = self.yes(4)
        host, device = self.ids(part, pages, scattered)
        path = "zero_copy" if scattered or self.yes() else "staged"
        rows, others, unit = torch.tensor(host), torch.tensor(device), "token"
        whole = (
            others.reshape(-1, size).diff(dim=1).eq(1).all()
            and rows.reshape(-1, size).diff(dim=1).eq(1).all()
        )
        if self.yes(4) and host == made.tokens(pages):
            others = made.device_ids(device, self.other)  # one that nobody holds after the call
        elif whole and device[::size] == [t // size * size for t in device[::size]] and self.yes():
            rows, others, unit = rows[::size] // size, others[::size] // size, "page"
        return Draft(part, stores, pages, host, device, (rows, others), unit, path)

    def ids(self, part: Part, pages: Sequence[int], scattered: bool) -> tuple[list[int], list[int]]:
        """Tokens of these host pages, and as many of the device."""
        size, left = part.world.page_size, part.usable()
        host = part.world.tokens(pages)
        if not scattered:
            return host, part.world.tokens([left.pop(self.choose(len(left))) for _ in pages])
        places, tokens = part.world.tokens(left), list(host)
        device = [places.pop(self.choose(len(places))) for _ in host]
        assert size
        return [tokens.pop(self.choose(len(tokens))) for _ in host], device

    def submit(self, drafts: list[Draft], layers: list[int] | None, how: dict[str, object]) -> None:
        stores, named = drafts[0].stores, "producer" if drafts[0].stores else "readers"
        on_device = any(isinstance(draft.ids[1], DeviceIds) for draft in drafts)
        if on_device or self.yes():
            how = how | {named: self.stream}
        failing = not self.doomed and self.yes(6)
        if failing:
            self.driver.fail(SUBMITTING[self.choose(len(SUBMITTING))], skip=self.choose(3))
        moved = [(draft, part) for draft in drafts for part in draft.part.moved]
        positions = {
            part.name: part.every
            if layers is None
            else [part.world.config.layers.index(x) for x in layers if x in part.world.config.layers]
            for _, part in moved
        }
        try:
            with self.driver.use_stream(self.other if on_device else self.stream):
                ticket = self.call(drafts, stores, how)
        except PoolError:
            if not failing:
                raise
            for draft, part in moved:
                part.lose(draft, positions[part.name])
            return
        finally:
            if failing:
                self.driver.heal()
        for draft, part in moved:
            part.took(draft, ticket, positions[part.name], layers is not None)

    def call(self, drafts: list[Draft], stores: bool, how: dict[str, object]) -> Ticket:
        """One call of the pool, or of the group for all of its pools."""
        owner = self.group or drafts[0].part.pool
        if self.group is not None and len(drafts) == 1 and self.yes(4):
            owner = drafts[0].part.pool
        call = owner.write_back if stores else owner.load
        if owner is not self.group:
            found: Ticket = call(*drafts[0].ids, drafts[0].unit, path=drafts[0].path, **how)
            return found
        paths = {part.name: draft.path for draft in drafts for part in draft.part.moved}
        ids = {draft.part.name: draft.ids for draft in drafts}
        units = {draft.part.name: draft.unit for draft in drafts}
        made: Ticket = call(ids, units, path=paths, **how)
        assert made.paths == paths
        return made

    # ---- the caller's own work

    def produce(self) -> None:
        """Overwrite rows, as early as the contracts allow."""
        part = self.one(self.every)
        tokens = part.world.tokens(self.some(range(DEVICE_PAGES), 3))
        for entry in part.pending:
            if entry.tokens.isdisjoint(tokens):
                continue
            if not entry.stores:
                entry.ticket.wait(self.stream)
            elif not entry.captured:
                entry.ticket.captured.wait(self.stream)
                entry.captured = True
        part.pending = [e for e in part.pending if e.stores or e.tokens.isdisjoint(tokens)]
        part.world.produce(self.stream, tokens)
        part.device_owner |= {(layer, token): None for layer in part.every for token in tokens}

    def read(self) -> None:
        """Read rows of all layers, or of one as soon as it is there."""
        part = self.one(self.every)
        tokens = part.world.tokens(self.some(range(DEVICE_PAGES), 3))
        layer = self.choose(len(part.every))
        wanted = [layer] if self.yes() else part.every
        for entry in part.pending:
            if entry.stores or entry.tokens.isdisjoint(tokens):
                continue
            if entry.told and len(wanted) == 1:
                if layer in entry.layers:
                    entry.ticket.wait_layer(part.world.config.layers[layer], self.stream)
            else:
                entry.ticket.wait(self.stream)
        part.world.read(self.stream, tokens, wanted)

    def switch(self) -> None:
        """Go on in the other stream, behind this one."""
        self.driver.wait(self.other, self.driver.record(self.stream))
        self.stream, self.other = self.other, self.stream

    def wait(self) -> None:
        """Learn of the end of a transfer on the CPU."""
        part = self.one(self.every)
        if not part.tickets:
            return
        entry = part.tickets[self.choose(len(part.tickets))]
        if self.yes(3) and entry.told and entry.layers:
            layer = entry.layers[self.choose(len(entry.layers))]
            entry.ticket.wait_layer(part.world.config.layers[layer])
            return
        if self.yes(3):
            entry.ticket.captured.wait()
            return
        if self.yes():
            entry.ticket.wait()
        if entry.ticket.done():
            part.pending = [e for e in part.pending if e is not entry]
            self.compare()

    def compare(self) -> None:
        for part in self.every:
            part.compare()

    def run(self) -> None:
        self.driver.run(self.choose(4))

    def fail(self) -> None:
        """An operation that was or will be submitted fails; no ticket it concerns may say that it is done."""
        if self.yes(4) and not self.doomed:
            self.doomed = True
            self.driver.fail_step(self.choose(6))

    # ---- the end

    def end(self) -> None:
        if self.doomed:
            self.driver.heal()
        for part in self.every:
            for entry in part.tickets:
                try:
                    entry.ticket.wait()
                except PoolError:
                    if not self.doomed:
                        raise
                    assert entry.ticket.error is not None
                    part.forget(entry)
        self.compare()
        owner = self.group or self.parts[0].pool
        if not self.doomed:
            for part in self.every:
                part.world.settle()
            owner.destroy()
        else:
            self.driver.run()
            for part in self.every:
                known = {at for at, e in part.device_owner.items() if e is not None}
                part.world.compare_device(known)
            with suppress(PoolError):
                owner.destroy()


KINDS: tuple[Config | GroupConfig, ...] = (*CONFIGS, *GROUPS)


def live(seed: int, config: Config | GroupConfig | None = None) -> None:
    """One life; what it finds wrong names the seed."""
    chosen = config or KINDS[seed % len(KINDS)]
    try:
        Life(chosen, random.Random(seed).randrange).play().check()
    except Exception as error:
        error.add_note(f"seed {seed}, {chosen.label}")
        raise


CHOICES = {"first": first, "last": last, "random": random.Random(5).randrange}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario: Scenario, choose: Callable[[int], int]) -> None:
    scenario(choose)


@pytest.mark.parametrize("scenario", FAILURES, ids=lambda scenario: scenario.__name__)
def test_failures(scenario: Scenario) -> None:
    scenario(random.Random(6).randrange)


def test_a_fork_is_refused() -> None:
    """In a child of the process that made it a pool says so, and the parent's goes on."""
    script = """
import os, random, torch
from poolwright.runtime.errors import WrongProcess
from simulation import CONFIGS, world
made = world(CONFIGS[0], random.Random(0).randrange)
ids = made.pool.alloc(2)
child = os.fork()
if child == 0:
    try:
        made.pool.write_back(ids, torch.tensor([2, 3]))
    except WrongProcess as error:
        os._exit(7 if str(os.getppid()) in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
made.pool.write_back(ids, torch.tensor([2, 3])).wait()
made.pool.destroy()
"""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent / ".src")])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=[0, 8])
def submissions_kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many running submissions the pool does not ask for: none, so that all others are, or eight."""
    monkeypatch.setattr(hazards, "KEPT", request.param)


@pytest.mark.usefixtures("submissions_kept")
@pytest.mark.parametrize("part", range(5))
def test_random_lives(part: int) -> None:
    part += 5 * (hazards.KEPT == 0)
    for seed in range(part * 45, part * 45 + 45):
        live(seed)


@settings(max_examples=50)
@given(st.sampled_from(KINDS), st.randoms(note_method_calls=False, use_true_random=False))
def test_drawn_lives(config: Config | GroupConfig, chance: random.Random) -> None:
    Life(config, chance.randrange).play().check()


@pytest.mark.slow
@pytest.mark.usefixtures("submissions_kept")
@pytest.mark.parametrize("part", range(5))
def test_many_random_lives(part: int) -> None:
    part += 5 * (hazards.KEPT == 0)
    for seed in range(1000 + part * 500, 1000 + part * 500 + 500):
        live(seed)


def test_a_process_that_ends_waits_for_what_is_in_flight() -> None:
    """Host memory is unregistered behind the last copy, though nothing destroyed the pool."""
    lines = (
        "from race_scenarios import MLA, store",
        "from simulation import first, world",
        "made = world(MLA, first)",
        "store(made, [0, 1], [0, 1], 'staged')",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
