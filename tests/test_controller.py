"""Contracts of controllers, one by one: room, order, locks, failures, numbers. Lives are in another file."""

from __future__ import annotations

import itertools
import json
import os
import random
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from simulation import CONFIGS, GROUPS, World, first, group_world, world

from poolwright.generated.pools.mla.pool import MLATokenToKVPoolHost
from poolwright.runtime.controller import CacheController, HybridCacheController
from poolwright.runtime.errors import PoolError, TransferError, WrongProcess

P = 2
MLA, HYBRID, DRAFTED = CONFIGS[0], GROUPS[0], GROUPS[2]


def made(**how: Any) -> tuple[World, CacheController]:
    one = world(MLA, random.Random(0).randrange)
    return one, CacheController(one.pool, **how)


def ids(*pages: int, size: int = P) -> torch.Tensor:
    return torch.tensor([page * size + n for page in pages for n in range(size)])


def settled(one: World, controller: Any) -> list[Any]:
    one.driver.run()
    acks: list[Any] = controller.pop_acks()
    return acks


def test_what_is_written_is_loaded_by_the_cpu_alone() -> None:
    """Without a GPU the same calls move the same bytes."""
    pool = MLATokenToKVPoolHost(
        kv_lora_rank=3, qk_rope_head_dim=2, dtype=torch.bfloat16, layers=range(3), page_size=P,
        layout="page_first", capacity_pages=4, device="cpu",
    )  # fmt: skip
    rows = [torch.randn(12, 5).to(torch.bfloat16) for _ in range(3)]
    before = [row.clone() for row in rows]
    pool.bind({"kv": rows})
    controller = CacheController(pool)
    one, two = controller.write(ids(1), key="one"), controller.write(ids(3), key="two")
    assert one is not None and two is not None
    controller.start_writing().wait_captured()
    assert [ack.key for ack in controller.pop_acks()] == ["one", "two"]
    for row in rows:
        row.zero_()
    controller.load(one.host[pool.name], ids(5))
    controller.load(two.host[pool.name], ids(0))
    flight = controller.start_loading()
    for layer in range(3):
        flight.wait_layer(layer)
        assert torch.equal(rows[layer][10:12], before[layer][2:4])
        assert torch.equal(rows[layer][0:2], before[layer][6:8])
    assert [ack.error for ack in controller.pop_acks()] == [None, None]
    pool.destroy()


# ---- room


def test_a_write_without_room_takes_nothing() -> None:
    one, controller = made()
    assert controller.write(ids(0, 1, 2, 3, 4, 5)) is None
    assert one.pool.available_size() == one.pool.size and not controller.locked()


def test_reclaim_is_told_what_lacks_and_is_asked_once() -> None:
    told: list[Mapping[str, int]] = []
    one = world(MLA, first)

    def reclaim(lacks: Mapping[str, int]) -> None:
        told.append(dict(lacks))
        if kept:
            controller.free(kept.pop())

    kept: list[torch.Tensor] = []
    controller = CacheController(one.pool, reclaim=reclaim)
    written = controller.write(ids(0, 1, 2, 3))
    assert written is not None
    controller.start_writing()
    settled(one, controller)
    assert controller.write(ids(0, 1)) is None
    kept.append(written.host["mla"][:2])
    assert controller.write(ids(0, 1)) is not None
    assert told == [{"mla": 2}, {"mla": 2}]


def test_a_group_takes_pages_of_all_pools_or_of_none() -> None:
    made_group = group_world(HYBRID, first)
    controller = HybridCacheController(made_group.group)
    wide = {"kv": ids(0, size=3), "state": torch.arange(1, 7)}
    assert controller.write(wide) is None
    assert made_group.group.available_size() == {"kv": 15, "state": 5}


@pytest.mark.parametrize("direction", ["write_back", "load"])
def test_queues_are_bounded_until_acks_are_taken(direction: str) -> None:
    one, controller = made(limit=2)
    source = controller.write(ids(0))
    assert source is not None
    controller.start_writing()
    settled(one, controller)
    room = itertools.count(1)

    def ask() -> Any:
        page = ids(next(room))
        return (
            controller.write(page) if direction == "write_back" else controller.load(source.host["mla"], page)
        )

    start = controller.start_writing if direction == "write_back" else controller.start_loading
    assert ask() is not None
    start()
    assert ask() is not None and ask() is None
    start()
    one.driver.run()
    assert ask() is None, "what nobody has acknowledged still counts"
    assert len(controller.pop_acks(1)) == 1
    assert ask() is not None


# ---- acks


def test_acks_come_in_the_order_of_starts_whatever_ends_first() -> None:
    one, controller = made()
    first_write = controller.write(ids(0))
    assert first_write is not None
    controller.start_writing()
    settled(one, controller)
    controller.load(first_write.host["mla"], ids(4), key="load")
    controller.write(ids(1), key="write")
    controller.start_writing()
    controller.start_loading()
    one.driver.run()
    assert controller.ready() == 2 and controller.ready("load") == 1
    assert [ack.key for ack in controller.pop_acks()] == ["write", "load"]


def test_ranks_that_take_as_many_acks_hold_the_same_pages() -> None:
    """Two ranks whose transfers end at other times agree by the minimum of `ready`."""
    ranks = []
    for _ in range(2):
        one = world(MLA, first)  # asking whether something is done does not make it go on
        ranks.append((one, CacheController(one.pool)))
    seen = []
    for turn in range(6):
        for rank, (one, controller) in enumerate(ranks):
            controller.write(ids(turn), key=turn)
            controller.start_writing()
            if (turn + rank) % 3:
                one.driver.run()
        ready = [controller.ready() for _, controller in ranks]
        agreed = min(ready)
        taken = [controller.pop_acks(agreed) for _, controller in ranks]
        assert [ack.key for ack in taken[0]] == [ack.key for ack in taken[1]]
        for (_, controller), acks in zip(ranks, taken, strict=True):
            for ack in acks:
                controller.free(ack.operation.host["mla"])
        assert ranks[0][1].locked() == ranks[1][1].locked()
        seen.append(ready)
    assert any(one != other for one, other in seen) and any(min(ready) for ready in seen), seen


@pytest.mark.parametrize("max_n", [0, 1, 2, 5, None])
def test_no_more_acks_than_asked_for(max_n: int | None) -> None:
    one, controller = made()
    for page in range(3):
        controller.write(ids(page), key=page)
    controller.start_writing()
    one.driver.run()
    wanted = 3 if max_n is None else min(3, max_n)
    assert [ack.key for ack in controller.pop_acks(max_n)] == list(range(wanted))
    assert controller.ready() == 3 - wanted


def test_an_empty_operation_is_acknowledged_as_any_other() -> None:
    one, controller = made()
    nothing = controller.write(torch.empty(0, dtype=torch.int64), key="nothing")
    assert nothing is not None and nothing.host["mla"].numel() == 0
    controller.start_writing().wait_all()
    assert [ack.key for ack in settled(one, controller)] == ["nothing"]


def test_a_start_with_nothing_queued_waits_for_nothing() -> None:
    one, controller = made()
    for flight in (controller.start_writing(), controller.start_loading()):
        assert not flight and flight.operations == ()
        flight.wait_layer(0, one.driver.caller)
        flight.wait_all()
    with pytest.raises(ValueError, match="mla: order: expected layer or bulk, got 'layers'"):
        controller.start_loading(order="layers")


# ---- where ids lie


@pytest.mark.parametrize("places", list(itertools.product("cd", repeat=3)), ids="".join)
@pytest.mark.parametrize("unit", ["token", "page"])
def test_ids_of_several_operations_may_lie_anywhere(places: tuple[str, ...], unit: str) -> None:
    """On the CPU (c) or the device (d), of either width, also in one batch."""
    one, controller = made()
    stamps = [one.produce(one.driver.caller, one.tokens([page])) for page in range(3)]

    def given(page: int, place: str) -> torch.Tensor:
        numbers = [page] if unit == "page" else one.tokens([page])
        if place == "d":
            return one.device_ids(numbers, one.driver.caller)
        return torch.tensor(numbers, dtype=torch.int32 if page % 2 else torch.int64)

    written = [controller.write(given(n, place), unit=unit, key=n) for n, place in enumerate(places)]
    controller.start_writing()
    assert [ack.key for ack in settled(one, controller)] == [0, 1, 2]
    for n, (operation, place) in enumerate(zip(written, places, strict=True)):
        assert operation is not None
        controller.load(operation.host["mla"], given(5 + n, place), unit=unit)
        for layer in one.device:
            layer[(5 + n) * P : (6 + n) * P] = [stamps[n]] * P
    controller.start_loading().wait_all(one.driver.caller)
    one.read(one.driver.caller, one.tokens([5, 6, 7]))
    assert [ack.error for ack in settled(one, controller)] == [None] * 3
    one.settle()
    one.check()


@pytest.mark.parametrize("mixed", [False, True])
def test_what_goes_together_is_one_submission(mixed: bool) -> None:
    one, controller = made()
    for page in range(3):
        where = one.device_ids(one.tokens([page]), one.driver.caller) if mixed and page == 1 else ids(page)
        controller.write(where)
    controller.start_writing()
    settled(one, controller)
    shown: Any = controller.statistics()["mla"]["write_back"]
    assert sum(shown["paths"].values()) == (3 if mixed else 1)


# ---- refusals


def test_pages_of_operations_are_refused_with_their_reason() -> None:
    one, controller = made()
    written = controller.write(ids(0, 1))
    assert written is not None
    host = written.host["mla"]
    with pytest.raises(ValueError, match=r"mla: host page 0 is being written: use it once pop_acks\(\)"):
        controller.load(host, ids(2, 3))
    with pytest.raises(ValueError, match="mla: page 0 is held by an operation; cancel it or take its ack"):
        controller.free(host)
    controller.start_writing()
    with pytest.raises(ValueError, match="host page 0 is being written"):
        controller.load(host, ids(2, 3))
    settled(one, controller)
    assert controller.load(host, ids(2, 3)) is not None
    with pytest.raises(ValueError, match="device page 3 is to be loaded already: give each load its own"):
        controller.load(host[:P], ids(3))
    with pytest.raises(ValueError, match=r"device page 2 is to be loaded: start_loading\(\) first"):
        controller.write(ids(2))
    assert controller.write(ids(5)) is not None
    with pytest.raises(ValueError, match=r"device page 5 is to be written back: start_writing\(\) first"):
        controller.load(host[:P], ids(5))
    controller.start_loading()
    with pytest.raises(ValueError, match="page 0 is held by an operation"):
        controller.free(host)
    assert {ack.operation.direction for ack in settled(one, controller)} == {"load"}
    controller.free(host)
    with pytest.raises(ValueError, match="mla: host page 0 is not allocated; pass what alloc returned"):
        controller.load(host, ids(2, 3))


@pytest.mark.parametrize("wrong", ["float", "odd", "range", "unit", "twice"])
def test_a_wrong_operation_leaves_everything_as_it_was(wrong: str) -> None:
    one, controller = made()
    unit = "row" if wrong == "unit" else "token"
    given = {
        "float": torch.zeros(P),
        "odd": torch.arange(P + 1),
        "range": ids(99),
        "unit": ids(0),
        "twice": ids(0),
    }[wrong]
    if wrong == "twice":
        source = controller.write(ids(0, 1))
        assert source is not None
        controller.start_writing()
        settled(one, controller)
        with pytest.raises(ValueError, match="stands twice"):
            controller.load(source.host["mla"], ids(2, 2))
        controller.free(source.host["mla"])
    else:
        with pytest.raises(ValueError):
            controller.write(given, unit=unit)
    assert one.pool.available_size() == one.pool.size
    assert not controller.start_writing() and not controller.start_loading()


@pytest.mark.parametrize("wrong", [[0, 1], torch.zeros(2), torch.zeros(1, 2, dtype=torch.int64), None])
@pytest.mark.parametrize("unit", ["token", "page"])
def test_what_is_no_list_of_ids_is_refused_by_name(wrong: Any, unit: str) -> None:
    one, controller = made()
    for call in (controller.write, controller.free):
        with pytest.raises(ValueError, match=r"mla: (write|free): expected .*ids"):
            call(wrong, unit=unit)
    with pytest.raises(ValueError, match=r"mla: .*expected"):
        controller.load(wrong, ids(0))
    with pytest.raises(ValueError, match=r"mla: .*expected"):
        controller.load(ids(0), wrong)
    assert one.pool.available_size() == one.pool.size


def test_host_ids_by_pool_are_told_from_those_of_the_pool() -> None:
    _, controller = made()
    operation = controller.write(ids(0))
    assert operation is not None and controller.cancel(operation)
    with pytest.raises(ValueError, match=r"mla: free: expected a dense tensor .*; take those of one pool$"):
        controller.free(operation.host)  # type: ignore[arg-type]


def test_names_that_are_not_there() -> None:
    controller = HybridCacheController(group_world(DRAFTED, first).group)
    for call in (
        lambda: controller.write({"draft": ids(0)}),
        lambda: controller.load({"draft": (ids(0), ids(0))}),
        lambda: controller.alloc({"draft": P}),
        lambda: controller.free({"draft": ids(0)}),
        lambda: controller.locked("draft"),
    ):
        with pytest.raises(ValueError, match=r"no pool 'draft' with ids of its own; there are target"):
            call()
    with pytest.raises(
        ValueError, match="direction: expected one of write_back, load, store, fetch, got 'out'"
    ):
        controller.pop_acks(1, "out")
    with pytest.raises(ValueError, match="max_n: expected a number from 0, or None for all, got -1"):
        controller.pop_acks(-1)
    with pytest.raises(ValueError, match="limit: expected an integer of at least 1, got 0"):
        HybridCacheController(group_world(DRAFTED, first).group, limit=0)


def test_a_capture_is_refused_and_the_queue_stays() -> None:
    one, controller = made()
    controller.write(ids(0), key="kept")
    one.driver.capturing.add(one.driver.caller)
    with pytest.raises(PoolError, match="cannot be captured into a graph"):
        controller.start_writing()
    one.driver.capturing.clear()
    controller.start_writing()
    assert [ack.key for ack in settled(one, controller)] == ["kept"]


def test_a_fork_is_told() -> None:
    one, controller = made()
    controller.write(ids(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks in processes with threads
        child = os.fork()
    if child == 0:
        calls = [controller.start_writing, controller.pop_acks, controller.reset, controller.statistics]
        calls += [lambda: controller.write(ids(1)), lambda: controller.free(ids(0))]
        told = 0
        for call in calls:
            try:
                call()
            except WrongProcess:
                told += 1
        os._exit(0 if told == len(calls) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    controller.start_writing()
    assert len(settled(one, controller)) == 1


# ---- failures


def test_a_failed_load_is_told_to_whoever_waits_and_to_the_book() -> None:
    one, controller = made()
    written = controller.write(ids(0))
    assert written is not None
    controller.start_writing()
    settled(one, controller)
    controller.load(written.host["mla"], ids(3), key="lost")
    one.driver.fail("launch")
    flight = controller.start_loading()
    for wait in (lambda: flight.wait_layer(0), lambda: flight.wait_all(one.driver.caller)):
        with pytest.raises(TransferError, match="mla: load of 1 pages"):
            wait()
    (ack,) = settled(one, controller)
    assert ack.key == "lost" and isinstance(ack.error, TransferError)
    assert controller.load(written.host["mla"], ids(4)) is not None, "the host page is as it was"


def test_a_failed_write_is_never_reported_as_written() -> None:
    one, controller = made()
    written = controller.write(ids(0), key="lost")
    assert written is not None
    controller.start_writing()
    one.driver.fail_step()
    (ack,) = settled(one, controller)
    assert ack.error is not None and ack.operation is written
    shown: Any = controller.statistics()["mla"]["write_back"]
    assert (shown["failed"], shown["pages"], shown["bytes"]) == (1, 0, 0)
    controller.free(written.host["mla"])
    assert one.pool.available_size() == one.pool.size
    with pytest.raises(PoolError, match="was made to fail"):
        one.pool.destroy()


# ---- taking back


def test_cancel_takes_back_what_is_queued_and_nothing_else() -> None:
    one, controller = made()
    kept, dropped = controller.write(ids(0), key="kept"), controller.write(ids(1))
    assert kept is not None and dropped is not None
    assert controller.cancel(dropped) and not controller.cancel(dropped)
    assert controller.locked() == set(kept.pages["mla"])
    assert one.pool.available_size() == one.pool.size - P
    controller.start_writing()
    assert not controller.cancel(kept)
    assert [ack.key for ack in settled(one, controller)] == ["kept"]


def test_reset_with_work_in_flight_leaves_nothing_running() -> None:
    """The first thing after it may use any page: nothing of before may come later."""
    one, controller = made()
    first_write = controller.write(ids(0, 1))
    assert first_write is not None
    controller.start_writing()
    queued = controller.write(ids(2))
    assert controller.reset() == [first_write, queued]
    assert one.pool.available_size() == one.pool.size and not controller.locked()
    assert controller.ready() == 0
    assert all(not stream.queue for stream in one.driver._streams if stream is not one.driver.caller)
    again = controller.write(ids(4), key="again")
    assert again is not None and again.pages["mla"] == {0}
    controller.start_writing()
    assert [ack.key for ack in settled(one, controller)] == ["again"]


def test_reset_after_a_failure_takes_every_page_back() -> None:
    one, controller = made()
    controller.write(ids(0))
    one.driver.fail_step()
    controller.start_writing()
    assert len(controller.reset()) == 1
    assert one.pool.available_size() == one.pool.size and controller.ready() == 0


# ---- numbers


def test_statistics_are_those_of_what_was_done() -> None:
    now = itertools.count()
    made_group = group_world(DRAFTED, first)
    controller = HybridCacheController(made_group.group, clock=lambda: float(next(now)))
    controller.write({"target": ids(0, 1)})  # asked at 0
    controller.write({"target": ids(2)})  # 1
    controller.start_writing()  # 2
    made_group.driver.run()
    seconds = {ack.seconds for ack in controller.pop_acks()}
    assert len(seconds) == 1, "both went in one submission"
    shown: Any = json.loads(json.dumps(controller.statistics()))
    for name, pool in made_group.group.pools.items():
        moved = 3 * pool.page_bytes
        assert shown[name]["write_back"] == {
            "operations": 2,
            "failed": 0,
            "pages": 3,
            "bytes": moved,
            "gb_per_s": moved / max(seconds) / 1e9,
            "queue_s": 3.0,
            "queue_s_longest": 2.0,
            "paths": {"zero_copy": 1},
        }
        assert shown[name]["load"]["operations"] == 0 and shown[name]["pages"] == 5
    assert (shown["target"]["free"], shown["target"]["locked"]) == (2, 0)
    assert "free" not in shown["draft"], "it has no slots of its own"
