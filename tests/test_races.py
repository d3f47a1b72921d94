"""Random lives of small pools on the simulator: in every order that the declared waits permit, every byte
is where the contracts say, at the moment they say it, and no two operations race."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from race_scenarios import FAILURES, SCENARIOS, Scenario
from simulation import CONFIGS, DEVICE_PAGES, HOST_PAGES, Config, DeviceIds, World, first, last, world

from poolwright.runtime import hazards
from poolwright.runtime.errors import PoolError
from poolwright.runtime.ticket import Ticket

STEPS = 20
SUBMITTING = ("allocate", "record", "wait", "copy", "upload", "fill", "launch")


@dataclass(eq=False)
class Pending:
    """A transfer that the caller's stream may not be behind yet."""

    ticket: Ticket
    stores: bool
    pages: set[int]
    tokens: set[int]
    layers: Sequence[int]
    told: bool  # layers can be waited for
    captured: bool = False


class Life:
    """One random life of a pool. `choose(n)` decides everything, also what the driver does."""

    def __init__(self, config: Config, choose: Callable[[int], int]) -> None:
        self.choose = choose
        self.world = world(config, choose, slot_pages=1 + choose(2))
        self.pool, self.driver = self.world.pool, self.world.driver
        self.stream, self.other = self.driver.caller, self.driver.new_stream("second")
        self.owned: set[int] = set()
        self.written: set[int] = set()
        self.pending: list[Pending] = []
        self.tickets: list[Pending] = []
        self.host_owner: dict[int, Pending | None] = {}
        self.device_owner: dict[tuple[int, int], Pending | None] = {}
        self.doomed = False

    def play(self) -> World:
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
        return self.world

    # ---- choosing

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
        ids = self.pool.alloc(count * self.world.page_size)
        if HOST_PAGES - len(self.owned) < count:
            assert ids is None
            return
        pages = {int(i) // self.world.page_size for i in ids}
        assert len(pages) == count and not pages & self.owned
        self.owned |= pages

    def free(self) -> None:
        pages = self.some(sorted(self.owned), 2)
        if not pages:
            return
        busy = [t for t in self.tickets if not t.ticket.acknowledged and t.pages & set(pages)]
        after = busy[self.choose(len(busy))] if busy and self.yes() else None
        ids = torch.tensor(self.world.tokens(pages))
        if any(entry is not after for entry in busy):
            with pytest.raises(ValueError, match="in flight"):
                self.pool.free(ids, after=after.ticket if after else None)
            return
        self.pool.free(ids, after=after.ticket if after else None)
        self.owned -= set(pages)

    def rarely(self) -> None:
        """Take everything back, or take other tensors."""
        if self.yes(3):
            self.pool.clear()
            self.owned.clear()
        elif self.yes():
            self.world.bind()
        else:
            return
        assert all(entry.ticket.acknowledged for entry in self.tickets)
        self.pending.clear()

    # ---- transfers

    def store(self) -> None:
        if self.yes():
            self.produce()
        pages = self.some(sorted(self.owned), 3)
        if not pages:
            return
        scattered = self.yes(4)
        host, device = self.ids(pages, scattered)
        path = "zero_copy" if scattered or self.yes() else "staged"
        self.submit(True, pages, host, device, path, range(len(self.world.config.layers)), {})

    def load(self) -> None:
        pages = self.some(sorted(self.owned & self.written), 3)
        if not pages:
            return
        scattered = self.yes(4)
        host, device = self.ids(pages, scattered)
        every = range(len(self.world.config.layers))
        if self.yes():
            path = "zero_copy" if scattered or self.yes() else "staged"
            self.submit(False, pages, host, device, path, every, {})
        elif self.yes():
            self.submit(False, pages, host, device, "zero_copy", every, {"order": "layer"})
        else:
            chosen = self.some(every, len(every))
            layers = [self.world.config.layers[layer] for layer in chosen]
            self.submit(False, pages, host, device, "zero_copy", chosen, {"layers": layers})

    def ids(self, pages: Sequence[int], scattered: bool) -> tuple[list[int], list[int]]:
        """Tokens of these host pages, and as many of the device."""
        size = self.world.page_size
        host = self.world.tokens(pages)
        if not scattered:
            left = list(range(DEVICE_PAGES))
            return host, self.world.tokens([left.pop(self.choose(len(left))) for _ in pages])
        left, tokens = list(range(DEVICE_PAGES * size)), list(host)
        device = [left.pop(self.choose(len(left))) for _ in host]
        return [tokens.pop(self.choose(len(tokens))) for _ in host], device

    def submit(
        self,
        stores: bool,
        pages: list[int],
        host: list[int],
        device: list[int],
        path: str,
        layers: Sequence[int],
        how: dict[str, object],
    ) -> None:
        size, world = self.world.page_size, self.world
        rows, others, unit = torch.tensor(host), torch.tensor(device), "token"
        whole = (
            others.reshape(-1, size).diff(dim=1).eq(1).all()
            and rows.reshape(-1, size).diff(dim=1).eq(1).all()
        )
        if self.yes(4) and host == world.tokens(pages):
            others = self.on_device(device)  # one that nobody holds after the call
        elif whole and device[::size] == [t // size * size for t in device[::size]] and self.yes():
            rows, others, unit = rows[::size] // size, others[::size] // size, "page"
        call, named = (self.pool.write_back, "producer") if stores else (self.pool.load, "readers")
        if isinstance(others, DeviceIds) or self.yes():
            how = how | {named: self.stream}
        failing = not self.doomed and self.yes(6)
        if failing:
            self.driver.fail(SUBMITTING[self.choose(len(SUBMITTING))], skip=self.choose(3))
        try:
            with self.driver.use_stream(self.other if isinstance(others, DeviceIds) else self.stream):
                ticket = call(rows, others, unit, path=path, **how)
        except PoolError:
            if not failing:
                raise
            self.lose(stores, pages, device, layers)
            return
        finally:
            if failing:
                self.driver.heal()
        entry = Pending(
            ticket, stores, set(pages), set(device), layers, bool(how.keys() & {"order", "layers"})
        )
        self.pending.append(entry)
        self.tickets.append(entry)
        if stores:
            world.stored(host, device)
            self.written |= set(pages)
            self.host_owner |= dict.fromkeys(pages, entry)
        else:
            world.loaded(host, device, layers)
            self.device_owner |= {(layer, token): entry for layer in layers for token in device}

    def on_device(self, ids: list[int]) -> DeviceIds:
        """Token ids in device memory, written by work in the stream that is current at the submission."""
        return self.world.device_ids(ids, self.other)

    def lose(self, stores: bool, pages: Sequence[int], device: Sequence[int], layers: Sequence[int]) -> None:
        """A submission failed half-way: what it would have written may hold anything."""
        if stores:
            self.written -= set(pages)
            for layer in self.world.host:
                for token in self.world.tokens(pages):
                    layer[token] = None
            self.host_owner |= dict.fromkeys(pages)
        else:
            for at in layers:
                for token in device:
                    self.world.device[at][token] = None
            self.device_owner |= {(layer, token): None for layer in layers for token in device}

    # ---- the caller's own work

    def produce(self) -> None:
        """Overwrite rows, as early as the contracts allow."""
        tokens = self.world.tokens(self.some(range(DEVICE_PAGES), 3))
        for entry in self.pending:
            if entry.tokens.isdisjoint(tokens):
                continue
            if not entry.stores:
                entry.ticket.wait(self.stream)
            elif not entry.captured:
                entry.ticket.captured.wait(self.stream)
                entry.captured = True
        self.pending = [e for e in self.pending if e.stores or e.tokens.isdisjoint(tokens)]
        self.world.produce(self.stream, tokens)
        every = range(len(self.world.config.layers))
        self.device_owner |= {(layer, token): None for layer in every for token in tokens}

    def read(self) -> None:
        """Read rows of all layers, or of one as soon as it is there."""
        tokens = self.world.tokens(self.some(range(DEVICE_PAGES), 3))
        layer = self.choose(len(self.world.config.layers))
        wanted = [layer] if self.yes() else range(len(self.world.config.layers))
        for entry in self.pending:
            if entry.stores or entry.tokens.isdisjoint(tokens):
                continue
            if entry.told and len(wanted) == 1:
                if layer in entry.layers:
                    entry.ticket.wait_layer(self.world.config.layers[layer], self.stream)
            else:
                entry.ticket.wait(self.stream)
        self.world.read(self.stream, tokens, wanted)

    def switch(self) -> None:
        """Go on in the other stream, behind this one."""
        self.driver.wait(self.other, self.driver.record(self.stream))
        self.stream, self.other = self.other, self.stream

    def wait(self) -> None:
        """Learn of the end of a transfer on the CPU."""
        if not self.tickets:
            return
        entry = self.tickets[self.choose(len(self.tickets))]
        if self.yes(3) and entry.told:
            entry.ticket.wait_layer(self.world.config.layers[entry.layers[self.choose(len(entry.layers))]])
            return
        if self.yes(3):
            entry.ticket.captured.wait()
            return
        if self.yes():
            entry.ticket.wait()
        if entry.ticket.done():
            self.pending = [e for e in self.pending if e is not entry]
            self.compare()

    def compare(self) -> None:
        """Host pages whose last write-back is known to be done are right."""
        known = [p for p, e in self.host_owner.items() if e is not None and e.ticket.acknowledged]
        self.world.compare_host(known)

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
        for entry in self.tickets:
            try:
                entry.ticket.wait()
            except PoolError:
                if not self.doomed:
                    raise
                assert entry.ticket.error is not None
                self.lose_owned(entry)
        self.compare()
        if not self.doomed:
            self.pending.clear()
            self.world.settle()
            self.pool.destroy()
        else:
            self.driver.run()
            self.world.compare_device({at for at, e in self.device_owner.items() if e is not None})
            with suppress(PoolError):
                self.pool.destroy()

    def lose_owned(self, entry: Pending) -> None:
        self.host_owner = {page: e for page, e in self.host_owner.items() if e is not entry}
        self.device_owner = {at: e for at, e in self.device_owner.items() if e is not entry}


def live(seed: int, config: Config | None = None) -> None:
    """One life; what it finds wrong names the seed."""
    chosen = config or CONFIGS[seed % len(CONFIGS)]
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
@given(st.sampled_from(CONFIGS), st.randoms(note_method_calls=False, use_true_random=False))
def test_drawn_lives(config: Config, chance: random.Random) -> None:
    Life(config, chance.randrange).play().check()


@pytest.mark.slow
@pytest.mark.usefixtures("submissions_kept")
@pytest.mark.parametrize("part", range(5))
def test_many_random_lives(part: int) -> None:
    part += 5 * (hazards.KEPT == 0)
    for seed in range(1000 + part * 500, 1000 + part * 500 + 500):
        live(seed)
