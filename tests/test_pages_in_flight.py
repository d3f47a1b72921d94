"""Pages that transfers still touch: their bytes are never torn, on the simulated device in any order."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from race_scenarios import load, produce, store
from simulation import CONFIGS, World, first, last, world

from poolwright.runtime.driver.simulated_memory import SimulationError
from poolwright.runtime.errors import PoolError, TransferError
from poolwright.runtime.pool import HostPool

Choose = Callable[[int], int]
ORDERS = [first, last, random.Random(1).randrange, random.Random(2).randrange]
READS: list[Callable[[World, int], object]] = [
    lambda made, page: made.pool.get_data_page(page * made.page_size),
    lambda made, page: made.pool.get_page_buffer_meta(made.tokens([page])),
    lambda made, page: made.pool.page_objects(page),
]


def looked_at(made: World, read: Callable[[World, int], object], page: int) -> None:
    """Ask for a page, then have the CPU read every row of it: the simulator knows what it may read."""
    read(made, page)
    made.compare_host([page])
    made.check()


@pytest.mark.parametrize("choose", ORDERS)
@pytest.mark.parametrize("path", ["zero_copy", "staged"])
@pytest.mark.parametrize("config", CONFIGS[:5:2], ids=lambda config: config.label)
def test_a_page_is_whole_when_it_is_handed_out(config, path: str, choose: Choose) -> None:
    made = world(config, choose)
    for read, page in zip(READS, (0, 2, 4), strict=True):
        produce(made, 1, 3, 5)
        store(made, [0, 2, 4], [1, 3, 5], path)
        looked_at(made, read, page)
    flat = made.pool.get_data_page(0)
    made.pool.clear()
    assert torch.equal(flat, made.pool.get_data_page(0))
    made.pool.destroy()


@pytest.mark.parametrize("read", READS)
def test_without_the_wait_the_simulator_sees_a_torn_page(
    read: Callable[[World, int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostPool, "_settle", lambda *_: None)
    made = world(CONFIGS[0], first)
    produce(made, 1)
    store(made, [0], [1])
    with pytest.raises(SimulationError, match="comparison of host page 0 on the CPU reads"):
        looked_at(made, read, 0)


def test_a_detached_write_back_is_waited_for() -> None:
    made = world(CONFIGS[0], first)
    store(made, [0], [1]).detach()
    looked_at(made, READS[0], 0)
    made.pool.destroy()


def test_a_page_that_was_read_counts_as_waited_for() -> None:
    made = world(CONFIGS[0], first)
    ids = made.pool.alloc(2 * made.page_size)
    store(made, [0], [1])
    store(made, [1], [2])
    made.pool.get_data_page(0)
    made.pool.free(ids[: made.page_size])
    with pytest.raises(ValueError, match="page 1 is in flight"):
        made.pool.free(ids[made.page_size :])
    made.pool.destroy()


def test_a_load_is_not_known_to_be_done_because_its_page_was_read() -> None:
    made = world(CONFIGS[0], first)
    ids = made.pool.alloc(made.page_size)
    store(made, [0], [1]).wait()
    load(made, [0], [2])
    made.pool.get_data_page(0)
    with pytest.raises(ValueError, match="page 0 is in flight"):
        made.pool.free(ids)
    made.pool.destroy()


@pytest.mark.parametrize("choose", ORDERS)
def test_a_page_is_filled_behind_the_loads_that_read_it(choose: Choose) -> None:
    made = world(CONFIGS[0], choose)
    store(made, [0, 1], [2, 3])
    load(made, [0, 1], [4, 5], "staged")
    load(made, [0, 1], [6, 7], order="layer")
    fresh = torch.arange(made.pool.page_bytes, dtype=torch.uint8)
    made.pool.set_from_flat_data_page(0, fresh)
    made.settle()
    made.check()
    assert torch.equal(made.pool.get_data_page(0), fresh)
    made.pool.destroy()


def test_a_failed_write_back_is_never_read_as_a_page() -> None:
    for detached in (False, True):
        made = world(CONFIGS[0], first)
        made.driver.fail_step()
        ticket = store(made, [0], [1])
        if detached:
            ticket.detach()  # type: ignore[attr-defined]
        with pytest.raises(TransferError, match=r"mla: write_back of 1 pages \(0\) failed: .*made to fail"):
            made.pool.get_data_page(0)
        made.pool.set_from_flat_data_page(0, made.pool.get_dummy_flat_data_page())
        made.pool.get_data_page(2)
        with pytest.raises(PoolError, match="made to fail"):
            made.pool.destroy()
