"""Host memory registered in the background: which pages are there, what is refused, how it ends.

The thread of every pool stands at a gate in front of each of its chunks until the test lets it go on, so
nothing here depends on time.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import logging
import os
import random
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import ROOT
from simulation import Driver, device_ids
from test_memory import Pins

from poolwright.generated.groups.swa_full import SwaFullHostPoolGroup
from poolwright.generated.groups.target_draft import TargetDraftHostPoolGroup
from poolwright.generated.pools.mha.pool import MHATokenToKVPoolHost
from poolwright.generated.pools.mla.pool import MLATokenToKVPoolHost
from poolwright.runtime import env, memory, registration
from poolwright.runtime import pool as pools
from poolwright.runtime.controller import CacheController
from poolwright.runtime.driver.simulated import SimulationError
from poolwright.runtime.errors import OutOfMemoryBudget, PoolError, WrongProcess
from poolwright.runtime.memory import PAGE, HostBuffer, HostMemoryError, Units
from poolwright.runtime.testing import use_driver

LONG = 120.0
"""Seconds after which a thread that does not come is a failure."""

CHUNK = 2 * PAGE


class Gate:
    """Where a thread stands in front of a chunk."""

    def __init__(self) -> None:
        self._here, self._go = threading.Semaphore(0), threading.Semaphore(0)

    def stand(self) -> None:
        self._here.release()
        assert self._go.acquire(timeout=LONG)

    def wait(self) -> None:
        """Until the thread stands here: everything before is done."""
        assert self._here.acquire(timeout=LONG)
        self._here.release()

    def let(self) -> None:
        """One chunk."""
        assert self._here.acquire(timeout=LONG)
        self._go.release()

    def open(self) -> None:
        self._go.release(1000)


class Gates:
    """A gate for every thread that registers. Constructors are in the main thread and pass."""

    def __init__(self) -> None:
        self._lock, self._gates, self._opened = threading.Lock(), dict[str, Gate](), False

    def of(self, name: str) -> Gate:
        with self._lock:
            if name not in self._gates:
                self._gates[name] = Gate()
                if self._opened:
                    self._gates[name].open()
            return self._gates[name]

    def stand(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.of(threading.current_thread().name).stand()

    def open(self) -> None:
        """Let every thread go on to its end."""
        with self._lock:
            self._opened = True
            for gate in self._gates.values():
                gate.open()


class GatedDriver(Driver):
    def __init__(self) -> None:
        super().__init__(random.Random(5).randrange)
        self.gates = Gates()

    def register(self, address: int, nbytes: int) -> int:
        self.gates.stand()
        return super().register(address, nbytes)

    def registered(self) -> int:
        """Bytes that are."""
        blocks = self.shadow._blocks
        return sum(block.nbytes for block in blocks if block.kind == "host" and not block.gone)


class GatedPins(Pins):
    def __init__(self) -> None:
        super().__init__()
        self.gates = Gates()

    def register(self, address: int, nbytes: int) -> int:
        self.gates.stand()
        return super().register(address, nbytes)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("register ")]


def ended(name: str) -> None:
    """Wait for the thread of this name to end."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(LONG)
    assert name not in threads()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "number", lambda name: CHUNK if name == "REGISTER_CHUNK_GB" else 0)
    monkeypatch.setattr(pools, "GIB", 1)


@pytest.fixture
def driver() -> Iterator[GatedDriver]:
    made = GatedDriver()
    yield made
    made.gates.open()
    gc.collect()
    for name in threads():
        ended(name)
    assert not registration._under_way


MLA: dict[str, Any] = {
    "kv_lora_rank": 1024,
    "qk_rope_head_dim": 0,
    "dtype": torch.bfloat16,
    "layers": range(1),
    "page_size": 2,
    "layout": "page_first",
    "capacity_pages": 6,
}
"""A page is one page of memory, a chunk two of them."""


def mla(driver: Any, **given: Any) -> Any:
    with use_driver(driver):
        return MLATokenToKVPoolHost(**{**MLA, "register": "background", **given})


DRAFTED: dict[str, Any] = {
    "target_layers": range(2),
    "draft_layers": range(1),
    "page_size": 2,
    "layout": "page_record",
    **{
        name: {"heads": 1, "head_dim": 256, "v_head_dim": 256, "dtype": torch.bfloat16}
        for name in ("target", "draft")
    },
    "capacity_pages": {"target": 8},
    "register": "background",
}
"""The draft takes the ids of the target; its pages are half as large."""


def drafted(driver: Any, **given: Any) -> Any:
    with use_driver(driver):
        return TargetDraftHostPoolGroup(**{**DRAFTED, **given})


def bind(driver: Driver, pool: Any, device_pages: int = 8) -> list[torch.Tensor]:
    """Device rows that the CPU has written."""
    rows = [driver.tensor((device_pages * 2, 1024), torch.bfloat16) for _ in pool.layers]
    for row in rows:
        driver.cpu("first contents", row.data_ptr(), row.nbytes, writes=True)
        row.copy_(torch.randint(0, 100, row.shape))
    pool.bind({"kv": rows})
    return rows


def there_and_back(driver: Driver, pool: Any, rows: list[torch.Tensor], pages: list[int], path: str) -> None:
    """Write device pages of the same numbers back, clear them, load them."""
    ids = torch.tensor(pages)
    before = [row.clone() for row in rows]
    pool.write_back(ids, ids, unit="page", path=path).wait()
    for row in rows:
        driver.cpu("clear", row.data_ptr(), row.nbytes, writes=True)
        row.zero_()
    pool.load(ids, ids, unit="page", path=path).wait()
    for row, old in zip(rows, before, strict=True):
        at = (ids[:, None] * 2 + torch.arange(2)).flatten()
        assert torch.equal(row[at], old[at])
        driver.cpu("all of it", row.data_ptr(), row.nbytes, writes=True)
        row.copy_(old)


# ---- pages come


def test_pages_come_with_their_chunks(driver: GatedDriver) -> None:
    pool, gate = mla(driver), driver.gates.of("register mla")
    assert (pool.page_num, pool.size) == (6, 12)
    found: list[list[int]] = []
    for chunks in (1, 2, 3):
        if chunks == 3:
            pool.wait_registered()
        else:
            gate.wait()
        assert pool.available_size() == 4 and driver.registered() == chunks * CHUNK
        assert pool.registered() is (chunks == 3)
        assert pool.alloc(6) is None  # nothing taken
        found.append(pool.alloc(4).tolist())
        assert pool.alloc(2) is None and pool.available_size() == 0
        if chunks < 3:
            gate.let()
            if chunks == 2:
                ended("register mla")
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    pool.free(torch.arange(12))
    assert pool.alloc(12).tolist() == list(range(12))
    pool.destroy()
    assert driver.registered() == 0


def test_freed_pages_and_cleared_ones_do_not_count_twice(driver: GatedDriver) -> None:
    pool, gate = mla(driver), driver.gates.of("register mla")
    pool.free(pool.alloc(4))
    assert pool.available_size() == 4
    gate.let()
    gate.wait()
    assert pool.available_size() == 8 and pool.alloc(8).tolist() == list(range(8))
    pool.clear()
    assert pool.available_size() == 8 and pool.alloc(10) is None
    gate.let()
    pool.wait_registered()
    assert pool.available_size() == pool.size
    pool.destroy()


def test_now_is_the_default_and_has_no_thread(driver: GatedDriver) -> None:
    pool = mla(driver, register="now")
    assert pool.registered() and pool.available_size() == pool.size and not threads()
    pool.wait_registered()
    with use_driver(driver):
        assert MLATokenToKVPoolHost(**MLA).registered() and not threads()
    pool.destroy()


def test_one_chunk_needs_no_thread(driver: GatedDriver) -> None:
    pool = mla(driver, capacity_pages=2)
    assert pool.registered() and not threads()
    pool.destroy()


def test_on_the_cpu_nothing_is_registered_and_memory_stays_lazy() -> None:
    pool = MLATokenToKVPoolHost(**MLA, register="background")
    assert pool.registered() and pool.available_size() == pool.size and not threads()
    pool.wait_registered()
    pool.destroy()
    for call in (pool.registered, pool.wait_registered):
        with pytest.raises(PoolError, match="the pool is destroyed"):
            call()


@pytest.mark.parametrize("given", ["later", "", None, True])
def test_other_words_are_refused(given: Any) -> None:
    expected = f"mla: register: expected one of now, background, got {given!r}"
    with pytest.raises(ValueError) as error:
        MLATokenToKVPoolHost(**MLA, register=given)
    assert str(error.value) == expected
    with pytest.raises(ValueError, match="target_draft: register: expected one of now, background"):
        TargetDraftHostPoolGroup(**{**DRAFTED, "register": given})


def test_a_page_of_many_ranges_is_there_with_the_last_of_them(driver: GatedDriver) -> None:
    """Every layer of layer_first has a range of the page: chunks of the first pages of all layers come first,
    as far as chunks are smaller than a layer."""
    pool = mla(driver, layout="layer_first", layers=range(2), capacity_pages=4)
    rows, gate, base = bind(driver, pool), driver.gates.of("register mla"), pool.kv_buffer.data_ptr()
    gate.wait()
    assert pool.available_size() == 0 and pool.alloc(2) is None
    gate.let()
    gate.wait()
    assert pool.available_size() == 4
    blocks = [block.address - base for block in driver.shadow._blocks if block.kind == "host"]
    assert blocks == [0, 2 * CHUNK]  # pages 0 and 1 of either layer
    there_and_back(driver, pool, rows, [0, 1], "staged")
    gate.let()
    gate.wait()
    assert pool.available_size() == 4
    gate.let()
    pool.wait_registered()
    assert pool.available_size() == 8
    there_and_back(driver, pool, rows, [3, 0, 1, 2], "staged")
    pool.destroy()


def test_chunks_as_large_as_a_layer_bring_all_pages_at_the_end(driver: GatedDriver) -> None:
    pool = mla(driver, layout="layer_first", layers=range(2), capacity_pages=2)
    assert pool.available_size() == 0
    driver.gates.of("register mla").let()
    pool.wait_registered()
    assert pool.available_size() == 4
    pool.destroy()


def test_keys_and_values_in_blocks_of_their_own_come_in_step(driver: GatedDriver) -> None:
    with use_driver(driver):
        pool = MHATokenToKVPoolHost(
            heads=1,
            head_dim=1024,
            v_head_dim=2048,
            dtype=torch.bfloat16,
            layers=range(1),
            page_size=2,
            layout="page_first",
            capacity_pages=4,
            register="background",
        )
    gate = driver.gates.of("register mha")
    free = []
    for _ in range(5):  # two chunks of keys, four of values
        gate.wait()
        free.append(pool.available_size() // 2)
        gate.let()
    pool.wait_registered()
    assert [*free, pool.available_size() // 2] == [0, 1, 2, 2, 3, 4]
    pool.destroy()


@pytest.mark.parametrize(
    "rows",
    [
        [(0, PAGE)],
        [(0, PAGE), (16 * PAGE, 2 * PAGE)],
        [(16 * PAGE, 3 * PAGE // 2), (0, PAGE // 2)],
        [(PAGE, 576), (8 * PAGE, 1152)],
        [(n * 16 * PAGE, PAGE) for n in range(3)],
    ],
)
@pytest.mark.parametrize("pages", [1, 5, 13])
def test_pages_are_ready_when_all_their_bytes_are_pinned(rows: list[tuple[int, int]], pages: int) -> None:
    """Against a plain reading of what is pinned, with padding between the rows and behind them."""
    pins = GatedPins()
    units = [Units(start, nbytes, pages) for start, nbytes in rows]
    nbytes = max(unit.end for unit in units) + 5 * PAGE
    least = max(memory.math.lcm(unit.nbytes, PAGE) for unit in units)
    buffer = HostBuffer(
        nbytes, registrar=pins, units=units, chunk_bytes=max(3 * PAGE, least), background=True, name="it"
    )
    progress, gate = buffer.registration, pins.gates.of("register it")
    assert progress is not None
    chunks = len(buffer.borders) + 1

    def pinned(start: int, size: int) -> bool:
        """Whether one chunk has all of it: chunks split no page."""
        at = buffer.address + start
        return any(begin <= at and at + size <= begin + length for begin, length in pins.live.items())

    for chunk in range(1, chunks + 1):
        if chunk < chunks:
            gate.wait()
        else:
            progress.wait()
        assert len(pins.live) == chunk and progress.registered() is (chunk == chunks)
        whole = [
            all(pinned(u.start + p * u.nbytes, u.nbytes) for u in units) for p in [*range(pages), pages - 1]
        ]
        assert all(whole[: progress.ready])
        assert progress.ready == pages or not whole[progress.ready]
        if chunk < chunks:
            gate.let()
    assert progress.ready == pages
    buffer.destroy()
    assert not pins.live


class Willing:
    """Takes any memory."""

    def register(self, address: int, nbytes: int) -> int:
        return address

    def unregister(self, address: int) -> None:
        return None


@pytest.mark.parametrize("waited_for", [0, 2, 9])
def test_the_thread_rests_as_long_as_a_chunk_took_until_somebody_waits(
    waited_for: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five chunks behind the first; each takes 3 s of a clock that every look at it moves."""
    clock = itertools.count(0, 3)
    monkeypatch.setattr(registration.time, "monotonic", lambda: next(clock))
    chunks = [registration.Chunk(n * PAGE, PAGE, n) for n in range(6)]
    held = torch.empty(6 * PAGE, dtype=torch.uint8)
    made = registration.Registration(Willing(), held, chunks, 6, lambda *_: None)
    rests: list[float | None] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            rests.append(timeout)
            made._waited_for = len(rests) == waited_for
            return False

    made._stop, made._waited_for = Stop(), waited_for == 0
    made.begin(True, "it")
    assert made._thread is not None
    made._thread.join(LONG)
    assert made.registered() and rests == [3] * min(waited_for, 5)
    made.end()


@pytest.mark.parametrize(
    ("unit", "background", "chunk"),
    [
        (PAGE, True, 2 * PAGE),
        (
            3 * PAGE // 2,
            True,
            6 * PAGE,
        ),  # pairs end on a page of memory: four times as large
        (PAGE, False, 32 * PAGE),
        (32 * PAGE, True, 32 * PAGE),  # never larger than asked for
    ],
)
def test_chunks_beside_which_others_work_are_as_small_as_pages_permit(
    unit: int, background: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "BACKGROUND_CHUNK", 2 * PAGE)
    starts = memory._starts(96 * PAGE, 32 * PAGE, [Units(0, unit, 96 * PAGE // unit)], background)
    assert {end - start for start, end in itertools.pairwise(starts)} == {chunk}


# ---- transfers


@pytest.mark.parametrize("validate", ["off", "cheap", "full"])
@pytest.mark.parametrize("used", [False, True])
def test_pages_that_are_not_there_are_refused_at_every_level(
    driver: GatedDriver, validate: str, used: bool
) -> None:
    """Also while nothing was ever allocated, when ids are the caller's own."""
    pool = mla(driver)
    bind(driver, pool)
    if used:
        pool.alloc(2)
    why = (
        "mla: host page {} is not registered: the background has come to page 2; wait_registered() waits for"
    )
    late = "not allocated" if used and validate != "off" else why
    scattered = torch.tensor([9, 0])  # tokens of pages 4 and 0, by kernels for tokens
    calls: list[tuple[int, Callable[[], object]]] = []
    for move in (pool.write_back, pool.load):
        pages, tokens = torch.tensor([0, 5, 3]), torch.arange(4, 8)

        def whole(move: Any = move, pages: torch.Tensor = pages) -> object:
            return move(pages, torch.arange(3), unit="page", validate=validate)

        def by_token(move: Any = move, tokens: torch.Tensor = tokens) -> object:
            return move(tokens, tokens, validate=validate)

        def on_device(move: Any = move) -> object:
            ids = device_ids(torch.tensor([0, 1]), driver)
            return move(torch.tensor([1, 4]), ids, unit="page", validate=validate)

        calls += [(3, whole), (2, by_token), (4, on_device)]
        if validate != "full":
            calls.append((4, lambda move=move: move(scattered, scattered, validate=validate)))  # type: ignore[misc]
    for page, call in calls:
        with pytest.raises(ValueError) as error:
            call()
        assert late.format(page) in str(error.value)
    assert not any(stream.queue for stream in driver._streams if stream is not driver.caller)
    driver.gates.open()
    pool.destroy()


@pytest.mark.parametrize("path", ["zero_copy", "staged"])
def test_pages_that_are_there_move_meanwhile(driver: GatedDriver, path: str) -> None:
    pool, gate = mla(driver), driver.gates.of("register mla")
    rows = bind(driver, pool)
    there_and_back(driver, pool, rows, [1, 0], path)
    gate.let()
    gate.wait()
    there_and_back(driver, pool, rows, [0, 1, 2, 3], path)  # neighbours in two registrations
    gate.let()
    pool.wait_registered()
    there_and_back(driver, pool, rows, [5, 4, 3, 2, 1, 0], path)
    pool.destroy()


@pytest.mark.parametrize("path", ["zero_copy", "staged"])
def test_the_simulator_finds_what_touches_unregistered_memory(driver: GatedDriver, path: str) -> None:
    pool = mla(driver)
    bind(driver, pool)
    pool._slots.registrations = ()  # nothing is refused
    with pytest.raises(SimulationError, match="which belong to nothing"):
        pool.write_back(torch.tensor([1, 2]), torch.tensor([1, 2]), unit="page", path=path).wait()


def test_storage_reaches_pages_before_they_are_registered(driver: GatedDriver) -> None:
    pool = mla(driver)
    page = torch.arange(pool.page_bytes, dtype=torch.int64).to(torch.uint8)
    pool.set_from_flat_data_page(10, page)
    assert torch.equal(pool.get_data_page(10), page)
    ((_, address, nbytes),) = pool.page_objects(5)
    assert ctypes.string_at(address, nbytes) == bytes(page.tolist())
    assert pool.get_page_buffer_meta([10, 11]) == ([address], [nbytes])
    driver.gates.open()
    pool.wait_registered()
    assert torch.equal(pool.get_data_page(10), page)
    pool.destroy()


@pytest.mark.parametrize("old", [False, True])
def test_the_thread_does_not_write_over_what_is_there(old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if old:
        monkeypatch.setattr(memory, "_POPULATE_WRITE", 99)  # no advice that any kernel knows
    pins = GatedPins()
    buffer = HostBuffer(5 * PAGE, registrar=pins, chunk_bytes=PAGE, background=True, name="it")
    pins.gates.of("register it").wait()
    buffer.tensor[2 * PAGE :].fill_(7)  # of chunks that it has not come to
    pins.gates.open()
    assert buffer.registration is not None
    buffer.registration.wait()
    assert bool((buffer.tensor[2 * PAGE :] == 7).all()) and not buffer.tensor[:PAGE].any()
    buffer.destroy()


# ---- failures


def test_a_chunk_that_fails_leaves_the_others_in_use(
    driver: GatedDriver, caplog: pytest.LogCaptureFixture
) -> None:
    pool, gate = mla(driver, capacity_pages=8), driver.gates.of("register mla")
    rows = bind(driver, pool)
    gate.wait()
    driver.fail("register", skip=1)
    gate.let()
    with caplog.at_level(logging.ERROR, "poolwright"):
        gate.let()  # chunk 3
        ended("register mla")
    why = (
        "mla: registering chunk 3 of 4 (8,192 of 32,768 bytes) failed: register was made to fail: raise the"
        " limit of locked memory or lower the capacity; 4 of 8 pages are registered and stay in use"
    )
    assert [record.getMessage() for record in caplog.records] == [f"host memory: {why}"]
    for call in (pool.registered, pool.wait_registered) * 2:
        with pytest.raises(HostMemoryError) as error:
            call()
        assert str(error.value) == why
    assert pool.available_size() == 8 and pool.alloc(10) is None
    ids = pool.alloc(8)
    assert ids.tolist() == list(range(8)) and pool.alloc(2) is None
    there_and_back(driver, pool, rows, [3, 1, 0, 2], "staged")
    with pytest.raises(ValueError) as refused:
        pool.load(torch.tensor([4]), torch.tensor([0]), unit="page", validate="off")
    assert str(refused.value) == f"mla: host page 4 is not registered: {why}"
    assert registration.promised_bytes() == 0
    pool.destroy()
    assert driver.registered() == 0


def test_the_first_chunk_fails_in_the_constructor(driver: GatedDriver) -> None:
    driver.fail("register")
    with pytest.raises(HostMemoryError, match=r"registering chunk 1 of 3 .*was made to fail"):
        mla(driver)
    assert driver.registered() == 0 and not threads() and not registration._under_way


def test_a_thread_that_does_not_start_fails_the_constructor(
    driver: GatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("register "):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        mla(driver)
    assert driver.registered() == 0 and not registration._under_way


def interrupted(monkeypatch: pytest.MonkeyPatch, of: Any, name: str, instead: Callable[..., object]) -> None:
    """Have a method call `instead`, and interrupt behind that. Threads: only the one that registers."""
    method = getattr(of, name)

    def stopped(self: Any, *given: Any) -> None:
        if isinstance(self, threading.Thread) and not self.name.startswith("register "):
            return method(self, *given)
        instead(self, *given)
        raise KeyboardInterrupt

    monkeypatch.setattr(of, name, stopped)


def test_an_interrupt_before_the_thread_is_there_leaves_nothing_to_it(
    driver: GatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[threading.Thread] = []
    with monkeypatch.context() as patch:
        interrupted(patch, threading.Thread, "start", made.append)
        with pytest.raises(KeyboardInterrupt):
            mla(driver)
    assert driver.registered() == 0 and not registration._under_way
    driver.gates.open()
    (late,) = made
    late.start()
    late.join(LONG)
    assert not late.is_alive() and driver.registered() == 0


@pytest.mark.parametrize(
    ("of", "name"),
    [(threading.Thread, "start"), (registration.Registration, "begin")],
    ids=["start", "begin"],
)
def test_an_interrupt_while_the_thread_registers_leaves_the_end_to_it(
    driver: GatedDriver, monkeypatch: pytest.MonkeyPatch, of: Any, name: str
) -> None:
    method, gate = getattr(of, name), driver.gates.of("register mla")

    def stands(*given: Any) -> None:
        method(*given)
        gate.wait()

    with monkeypatch.context() as patch:
        interrupted(patch, of, name, stands)
        with pytest.raises(KeyboardInterrupt):
            mla(driver)
    assert driver.registered() == CHUNK and threads() == ["register mla"]
    gate.let()
    ended("register mla")
    assert driver.registered() == 0 and not registration._under_way


@pytest.mark.parametrize("register", registration.MODES)
@pytest.mark.parametrize("behind", [False, True])
def test_an_interrupt_while_a_chunk_is_registered_leaves_none(
    driver: GatedDriver, monkeypatch: pytest.MonkeyPatch, behind: bool, register: str
) -> None:
    method = driver.register
    with monkeypatch.context() as patch:
        interrupted(patch, GatedDriver, "register", lambda _, *at: method(*at) if behind else None)
        with pytest.raises(KeyboardInterrupt):
            mla(driver, register=register)
    assert driver.registered() == 0 and not threads() and not registration._under_way


def test_what_the_thread_unregisters_is_left_to_it() -> None:
    """Two ends, as an interrupted constructor has them: the second comes while the thread undoes all."""
    held: list[bool] = []

    class Ending(GatedPins):
        def unregister(self, address: int) -> None:
            if not held:
                held.append(True)
                progress.end()
                held.append(progress._memory.numel() > 0)
            super().unregister(address)

    pins = Ending()
    buffer = HostBuffer(3 * PAGE, registrar=pins, chunk_bytes=PAGE, background=True, name="it")
    assert buffer.registration is not None
    progress = buffer.registration
    pins.gates.of("register it").wait()
    buffer.release()
    pins.gates.of("register it").let()
    ended("register it")
    assert held == [True, True] and pins.calls == ["+0", "+1", "-1", "-0"]


def test_aliases_that_are_not_one_range_stop_the_thread() -> None:
    pins = GatedPins()
    pins.gap_at = 2
    buffer = HostBuffer(4 * PAGE, registrar=pins, chunk_bytes=PAGE, background=True, name="it")
    pins.gates.open()
    progress = buffer.registration
    assert progress is not None
    with pytest.raises(HostMemoryError, match=r"it: the device sees chunk 3 of 4 at 0x[0-9a-f]+, not at"):
        progress.wait()
    buffer.destroy()
    assert pins.calls == ["+0", "+1", "+2", "-2", "-1", "-0"] and not pins.live


def test_a_failing_unregister_is_told_by_destroy() -> None:
    pins = GatedPins()
    buffer = HostBuffer(3 * PAGE, registrar=pins, chunk_bytes=PAGE, background=True, name="it")
    pins.gates.open()
    assert buffer.registration is not None
    buffer.registration.wait()
    pins.stuck = {1}
    with pytest.raises(HostMemoryError, match=r"unregistering failed for 1 chunks: 0x[0-9a-f]+: rc=4 stuck"):
        buffer.destroy()
    assert list(pins.live) == [buffer.address + PAGE]


def test_bytes_that_are_promised_are_not_promised_again(
    driver: GatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts memory that nobody has touched as available."""
    pool, gate = mla(driver), driver.gates.of("register mla")
    gate.wait()
    assert registration.promised_bytes() == CHUNK  # the third chunk: the second is begun with
    free = 6 * PAGE + CHUNK
    monkeypatch.setattr(memory, "available_host_bytes", lambda: free - 1)
    with pytest.raises(OutOfMemoryBudget, match=f"needs 24,576 bytes, {6 * PAGE - 1:,} are available"):
        mla(driver)
    with pytest.raises(OutOfMemoryBudget, match=f"{6 * PAGE - 1:,} are available"):
        drafted(driver, capacity_pages={"target": 4})
    monkeypatch.setattr(memory, "available_host_bytes", lambda: free)
    other = mla(driver, register="now")
    gate.let()
    gate.let()
    pool.wait_registered()
    assert registration.promised_bytes() == 0
    other.destroy()
    pool.destroy()


# ---- the end


def test_destroy_ends_after_the_chunk_at_hand(driver: GatedDriver) -> None:
    pool, gate = mla(driver), driver.gates.of("register mla")
    bind(driver, pool)
    progress = pool._buffer.registration
    ids = torch.tensor([0, 1])
    pool.write_back(ids, ids, unit="page")  # in flight
    gate.wait()
    end = threading.Thread(target=pool.destroy)
    end.start()
    assert progress._stop.wait(LONG)
    with pytest.raises(PoolError, match="the pool is destroyed"):
        pool.wait_registered()
    assert end.is_alive() and driver.registered() == CHUNK
    gate.let()
    end.join(LONG)
    assert not end.is_alive() and not threads() and driver.registered() == 0
    assert len([block for block in driver.shadow._blocks if block.kind == "host"]) == 2
    pool.destroy()


def test_who_waits_is_told_of_the_end(driver: GatedDriver) -> None:
    pool, gate = mla(driver), driver.gates.of("register mla")
    told: list[str] = []

    def wait() -> None:
        try:
            pool.wait_registered()
        except PoolError as error:
            told.append(str(error))

    waiting, end = threading.Thread(target=wait), threading.Thread(target=pool.destroy)
    waiting.start()
    end.start()
    assert pool._buffer.registration._stop.wait(LONG)
    gate.let()
    for thread in (waiting, end):
        thread.join(LONG)
    assert told == ["mla: the pool is destroyed; build a new one"]


def test_a_dropped_pool_is_unregistered_by_its_thread(driver: GatedDriver) -> None:
    """Who drops it, perhaps inside the collector, does not wait."""
    pool, gate = mla(driver), driver.gates.of("register mla")
    gate.wait()
    held = weakref.ref(pool)
    del pool
    gc.collect()
    assert held() is None and threads() == ["register mla"] and driver.registered() == CHUNK
    gate.let()
    ended("register mla")
    assert driver.registered() == 0 and not registration._under_way


def test_a_buffer_that_is_dropped_by_its_own_thread_is_unregistered() -> None:
    held: list[HostBuffer] = []

    class Dropping(GatedPins):
        def register(self, address: int, nbytes: int) -> int:
            found = super().register(address, nbytes)
            held.clear()
            return found

    pins = Dropping()
    held.append(HostBuffer(4 * PAGE, registrar=pins, chunk_bytes=PAGE, background=True, name="it"))
    pins.gates.of("register it").let()
    ended("register it")
    assert pins.calls == ["+0", "+1", "-1", "-0"]


def test_the_constructor_that_fails_later_ends_the_thread(
    driver: GatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pool: Any) -> int:
        driver.gates.open()
        raise RuntimeError("no place")

    monkeypatch.setattr(pools.HostPool, "_join", refused)
    with pytest.raises(RuntimeError, match="no place"):
        mla(driver)
    assert not threads() and driver.registered() == 0


WHEN_STOPPED = """
helper = threading.Thread(target=lambda: (progress._stop.wait(), gate.let()), daemon=True)
helper.start()
"""
BEFORE_THE_STOP = """
atexit.register(lambda: (gate.let(), progress._thread.join()))
"""


@pytest.mark.parametrize("let", [WHEN_STOPPED, BEFORE_THE_STOP], ids=["stopped", "before"])
def test_at_exit_the_thread_ends_and_all_is_unregistered(let: str) -> None:
    """The process ends while the thread stands at a chunk. What is registered is gone before the process is,
    and nothing is said of memory that could not be touched any more: then nobody starts threads."""
    script = f"""
import atexit, threading
atexit.register(lambda: print(driver.registered(), progress._thread.is_alive(), progress._done))
from poolwright.runtime import env, pool as pools
env.number = lambda name: 8192 if name == "REGISTER_CHUNK_GB" else 0
pools.GIB = 1
import test_background_registration as tests
driver = tests.GatedDriver()
pool = tests.mla(driver, capacity_pages=10)
progress, gate = pool._buffer.registration, driver.gates.of("register mla")
gate.let()
gate.wait()
{let}
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / ".src"), str(ROOT / "tests")])}
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONG)
    assert (found.returncode, found.stdout, found.stderr) == (0, "0 False 3\n", "")


def test_a_fork_has_nothing_to_do_with_it(driver: GatedDriver) -> None:
    pool, gate = mla(driver), driver.gates.of("register mla")
    gate.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks in processes with threads
        child = os.fork()
    if child == 0:
        refused = 0
        for call in (pool.registered, pool.wait_registered):
            try:
                call()
            except WrongProcess:
                refused += 1
        before = driver.registered()
        pool.destroy()
        del pool
        gc.collect()
        good = refused == 2 and driver.registered() == before and registration.promised_bytes() == 0
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    gate.let()
    gate.let()
    pool.wait_registered()
    assert pool.available_size() == pool.size
    pool.destroy()


# ---- groups


def bind_group(driver: Driver, group: Any) -> None:
    given: dict[str, Any] = {}
    for name, pool in group.pools.items():
        shape, parts = (16, 1, 256), ("k", "v")
        given[name] = {part: [driver.tensor(shape, torch.bfloat16) for _ in pool.layers] for part in parts}
        for row in [row for rows in given[name].values() for row in rows]:
            driver.cpu("first contents", row.data_ptr(), row.nbytes, writes=True)
    group.bind(given)


def test_a_page_of_a_group_is_there_when_all_pools_have_it(driver: GatedDriver) -> None:
    """Four chunks of the target with two pages each, two of the draft with four each."""
    group = drafted(driver)
    bind_group(driver, group)
    target, draft = (driver.gates.of(f"register {name}") for name in ("target", "draft"))
    target.wait()
    draft.wait()
    assert group.available_size() == {"target": 4} and not group.registered()
    for _ in range(2):
        target.let()
    target.wait()
    assert group.available_size() == {"target": 8}  # what the draft has
    with pytest.raises(ValueError, match=r"target: host page 4 is not registered: .* come to page 4"):
        group.load({"target": (torch.tensor([4]), torch.tensor([0]))}, unit="page")
    assert group.alloc({"target": 10}) is None
    assert group.alloc({"target": 8})["target"].tolist() == list(range(8))
    ids = torch.tensor([3, 0])
    group.write_back({"target": (ids, ids)}, unit="page").wait()
    draft.let()
    ended("register draft")
    assert group.draft.registered() and not group.registered()
    assert group.available_size() == {"target": 4}
    target.let()
    group.wait_registered()
    assert group.registered() and group.available_size() == {"target": 8}
    assert group.alloc({"target": 8})["target"].tolist() == list(range(8, 16))
    ids = torch.tensor([7, 4, 0])
    group.write_back({"target": (ids, ids)}, unit="page").wait()
    group.load({"target": (ids, ids)}, unit="page", order="layer").wait()
    group.destroy()
    assert driver.registered() == 0


def test_a_pool_that_fails_bounds_those_whose_ids_it_takes(driver: GatedDriver) -> None:
    group = drafted(driver)
    bind_group(driver, group)
    target, draft = (driver.gates.of(f"register {name}") for name in ("target", "draft"))
    draft.wait()
    driver.fail("register")
    draft.let()
    ended("register draft")
    target.open()
    why = r"draft: registering chunk 2 of 2 .* made to fail: .*; 4 of 8 pages are registered and stay in use"
    for call in (group.wait_registered, group.registered, group.draft.registered):
        with pytest.raises(HostMemoryError, match=why):
            call()
    assert group.target.registered()
    assert group.available_size() == {"target": 8} and group.alloc({"target": 10}) is None
    with pytest.raises(ValueError, match=f"target: host page 6 is not registered: {why}"):
        group.target.write_back(torch.tensor([6]), torch.tensor([6]), unit="page", validate="off")
    group.destroy()
    assert driver.registered() == 0


def test_an_allocation_of_a_group_takes_all_or_nothing(driver: GatedDriver) -> None:
    """One pool has all of its pages, the other only some."""
    sizes = {"heads": 1, "head_dim": 512, "v_head_dim": 512, "dtype": torch.bfloat16}
    with use_driver(driver):
        group = SwaFullHostPoolGroup(
            full_attention_layers=[0],
            sliding_attention_layers=[1],
            full=sizes,
            swa=sizes,
            page_size=2,
            layout="page_record",
            capacity_pages={"full": 6, "swa": 2},
            register="background",
        )
    assert group.swa.registered() and threads() == ["register full"]
    assert group.available_size() == {"full": 4, "swa": 4}
    assert group.alloc({"swa": 2, "full": 6}) is None
    assert group.available_size() == {"full": 4, "swa": 4}
    gate = driver.gates.of("register full")
    gate.let()
    gate.wait()
    found = group.alloc({"swa": 2, "full": 6})
    assert {name: ids.tolist() for name, ids in found.items()} == {"full": [*range(6)], "swa": [0, 1]}
    gate.open()
    group.wait_registered()
    group.destroy()


def test_a_group_that_cannot_be_built_ends_the_threads_of_its_pools(
    driver: GatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's first chunk fails, while the target's thread stands at its second."""
    register = driver.register

    def refused(address: int, nbytes: int) -> int:
        if threading.current_thread() is threading.main_thread() and threads():
            driver.gates.of("register target").wait()
            driver.gates.open()
            raise PoolError("no more locked memory")
        return register(address, nbytes)

    monkeypatch.setattr(driver, "register", refused)
    with pytest.raises(HostMemoryError, match=r"registering chunk 1 of 2 .*no more locked memory"):
        drafted(driver)
    assert not threads() and driver.registered() == 0


def test_destroy_of_a_group_ends_every_thread_after_its_chunk(driver: GatedDriver) -> None:
    group = drafted(driver)
    gates = [driver.gates.of(f"register {name}") for name in ("target", "draft")]
    for gate in gates:
        gate.wait()
    end = threading.Thread(target=group.destroy)
    end.start()
    for pool in group.pools.values():
        assert pool._buffer.registration._stop.wait(LONG)
    for gate in gates:
        gate.let()
    end.join(LONG)
    assert not threads() and driver.registered() == 0
    assert len([block for block in driver.shadow._blocks if block.kind == "host"]) == 4


@pytest.mark.parametrize("register", ["now", "background"])
def test_memory_that_cannot_be_unregistered_holds_no_other_pool_back(
    driver: GatedDriver, monkeypatch: pytest.MonkeyPatch, register: str
) -> None:
    group = drafted(driver, register=register)
    driver.gates.open()
    group.wait_registered()
    unregister, first = driver.unregister, group.target._buffer.address

    def refused(address: int) -> None:
        if address == first:
            raise PoolError("it is stuck")
        unregister(address)

    monkeypatch.setattr(driver, "unregister", refused)
    with pytest.raises(HostMemoryError, match=r"unregistering failed for 1 chunks: 0x[0-9a-f]+: it is stuck"):
        group.destroy()
    assert driver.registered() == CHUNK


def test_a_controller_finds_pages_as_they_come(driver: GatedDriver) -> None:
    pool, gate = mla(driver), driver.gates.of("register mla")
    bind(driver, pool)
    controller = CacheController(pool)
    assert controller.write(torch.arange(6)) is None
    written = controller.write(torch.arange(4))
    assert controller.statistics()["mla"]["free"] == 0
    gate.let()
    gate.wait()
    assert controller.statistics()["mla"]["free"] == 2
    assert controller.write(torch.arange(4)) is not None and written is not None
    controller.start_writing().wait_all()
    assert [ack.error for ack in controller.pop_acks()] == [None, None]
    controller.reset()
    assert pool.available_size() == 8
    gate.open()
    pool.wait_registered()
    pool.destroy()
