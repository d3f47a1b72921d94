"""On a CUDA device: every path under every order that streams allow, ids on either side, broken ids, graphs.

Needs torch and a GPU; neither pydantic nor a network. Run ``pytest -m gpu tests/test_gpu.py``.
"""

from __future__ import annotations

import gc
import threading
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from poolwright.generated import (
    DSAIndexerPoolHost,
    KdaStatePoolHost,
    KimiLinearHostPoolGroup,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
)
from poolwright.runtime.errors import PoolError, TransferError
from poolwright.runtime.indices import Batch
from poolwright.runtime.pool import HostPool
from poolwright.runtime.ticket import Ticket

pytestmark = pytest.mark.gpu

PATHS = ("zero_copy", "staged", "torch")
P, L = 4, 3
SPIN = 200_000_000  # cycles: about 0.1 s, longer than any transfer here
PAGES = 40


def spin() -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(SPIN)


def tensors(seed: int, rows: int = (PAGES + 2) * P) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-30000, 30000, (rows, 1, 24), generator=generator, dtype=torch.int16)
        .view(torch.bfloat16)
        .cuda()
        for _ in range(L)
    ]


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = MLATokenToKVPoolHost(
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        dtype=torch.bfloat16,
        layers=range(L),
        page_size=P,
        layout="page_first",
        capacity_pages=PAGES,
        staging_bytes=8 * L * P * 48,  # two slots of two pages a direction: every ring wraps
        device="cuda:0",
        require="cuda",
    )
    made.bind({"kv": tensors(1)})
    yield made
    made.destroy()


def rows_of(pool: HostPool) -> list[torch.Tensor]:
    assert pool._bound is not None
    return list(pool._bound.tensors)


def same(left: list[torch.Tensor], right: list[torch.Tensor], index: torch.Tensor) -> bool:
    index = index.to(left[0].device)
    return all(
        torch.equal(a.view(torch.int16)[index], b.view(torch.int16)[index])
        for a, b in zip(left, right, strict=True)
    )


def tokens(pages: torch.Tensor) -> torch.Tensor:
    return (pages[:, None] * P + torch.arange(P)).reshape(-1)


def restore(pool: HostPool, host: torch.Tensor, pages: torch.Tensor) -> list[torch.Tensor]:
    """What the host pages hold, loaded into tensors of their own."""
    into = [torch.full_like(t, 3) for t in rows_of(pool)]
    pool.rebind({"kv": into})
    pool.load(host, pages, unit="page", path="zero_copy").wait()
    return into


@pytest.mark.parametrize("path", PATHS)
def test_a_write_back_waits_for_the_work_that_fills_its_rows(pool: HostPool, path: str) -> None:
    rows, pages = rows_of(pool), torch.randperm(PAGES)[:17]
    filled = tensors(2)
    torch.cuda.synchronize()
    spin()
    for row, new in zip(rows, filled, strict=True):
        row.copy_(new)
    pool.write_back(torch.arange(17), pages, unit="page", path=path).wait()
    assert same(restore(pool, torch.arange(17), pages), filled, tokens(pages))


@pytest.mark.parametrize("path", PATHS)
def test_a_write_back_waits_for_another_producer_stream(pool: HostPool, path: str) -> None:
    rows, pages, filled = rows_of(pool), torch.arange(9), tensors(3)
    producer = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(producer):
        spin()
        for row, new in zip(rows, filled, strict=True):
            row.copy_(new)
    pool.write_back(torch.arange(9), pages, unit="page", path=path, producer=producer).wait()
    assert same(restore(pool, torch.arange(9), pages), filled, tokens(pages))


@pytest.mark.parametrize("path", PATHS)
def test_a_load_waits_for_the_work_that_still_reads_its_rows(pool: HostPool, path: str) -> None:
    rows, pages = rows_of(pool), torch.arange(11)
    pool.write_back(torch.arange(11), pages, unit="page", path="zero_copy").wait()
    later = tensors(4)
    for row, new in zip(rows, later, strict=True):
        row.copy_(new)
    torch.cuda.synchronize()
    spin()
    seen = [row.clone() for row in rows]
    pool.load(torch.arange(11), pages, unit="page", path=path).wait()
    torch.cuda.synchronize()
    assert same(seen, later, tokens(pages))


@pytest.mark.parametrize("path", PATHS)
def test_rows_may_change_once_captured(pool: HostPool, path: str) -> None:
    rows, pages = rows_of(pool), torch.randperm(PAGES)[:31]
    old = [row.clone() for row in rows]
    ticket = pool.write_back(torch.arange(31), pages, unit="page", path=path)
    ticket.captured.wait(torch.cuda.current_stream())
    for row in rows:
        row.fill_(-1)
    ticket.wait()
    assert same(restore(pool, torch.arange(31), pages), old, tokens(pages))


@pytest.mark.parametrize("path", PATHS)
def test_a_load_waits_for_the_write_back_of_its_page(pool: HostPool, path: str) -> None:
    rows, pages = rows_of(pool), torch.arange(12)
    old = [row.clone() for row in rows]
    torch.cuda.synchronize()
    spin()
    first = pool.write_back(torch.arange(12), pages, unit="page", path=path)
    second = pool.load(torch.arange(12), pages + 20, unit="page", path=path)
    second.wait()
    first.wait()
    moved = [torch.cat([row[80:128], row[48:]]) for row in rows]
    assert same(moved, old, torch.arange(48))


@pytest.mark.parametrize("path", PATHS)
def test_two_write_backs_to_one_page_are_ordered(pool: HostPool, path: str) -> None:
    rows, host = rows_of(pool), torch.arange(10)
    old = [row.clone() for row in rows]
    spin()
    tickets = [pool.write_back(host, torch.arange(10) + k * 10, unit="page", path=path) for k in range(3)]
    for ticket in tickets:
        ticket.wait()
    into = restore(pool, host, torch.arange(10) + 20)
    assert same(into, old, tokens(torch.arange(10) + 20))


@pytest.mark.parametrize("path", PATHS)
def test_nothing_of_the_caller_is_needed_after_submission(pool: HostPool, path: str) -> None:
    rows = rows_of(pool)
    old = [row.clone() for row in rows]
    pages = torch.randperm(PAGES)[:25]
    torch.cuda.synchronize()
    spin()
    host, device = torch.arange(25), tokens(pages).cuda()
    hosts = tokens(host)
    ticket = pool.write_back(hosts, device, path=path)
    del device, host
    hosts.fill_(0)
    del hosts
    gc.collect()
    junk = [torch.full((25 * P,), -7, dtype=torch.int64, device="cuda") for _ in range(50)]
    ticket.wait()
    del junk
    assert same(restore(pool, torch.arange(25), pages), old, tokens(pages))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("path", PATHS)
def test_ids_on_the_device_are_read_in_place_even_scattered(
    pool: HostPool, path: str, dtype: torch.dtype
) -> None:
    rows = rows_of(pool)
    old = [row.clone() for row in rows]
    scattered = torch.randperm(PAGES * P)[: 6 * P]
    wide = torch.stack([scattered, scattered], 1).to(dtype).cuda()[:, 0]  # not contiguous
    assert not wide.is_contiguous()
    pool.write_back(tokens(torch.arange(6)), wide, path=path).wait()
    into = restore(pool, torch.arange(6), torch.arange(6))
    gathered = [row[scattered.cuda()] for row in old]
    assert same(into, gathered, torch.arange(6 * P))


@pytest.mark.parametrize("path", PATHS)
def test_page_ids_on_the_device(pool: HostPool, path: str) -> None:
    rows, pages = rows_of(pool), torch.randperm(PAGES)[:9]
    old = [row.clone() for row in rows]
    pool.write_back(torch.arange(9), pages.cuda(), unit="page", path=path).wait()
    assert same(restore(pool, torch.arange(9), pages), old, tokens(pages))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("level", ["cheap", "full"])
def test_token_ids_on_the_device_of_rows_that_are_pages(path: str, level: str) -> None:
    """An engine that keeps token ids on the device hands them to every pool of a group."""
    made = DSAIndexerPoolHost(
        index_head_dim=128,
        layers=range(L),
        page_size=P,
        layout="page_first",
        capacity_pages=PAGES,
        device="cuda:0",
    )
    rows = [torch.randint(0, 255, (PAGES, P * 132), dtype=torch.uint8, device="cuda") for _ in range(L)]
    old = [row.clone() for row in rows]
    made.bind({"row": rows})
    pages = torch.randperm(PAGES)[:9]
    ids = tokens(pages).cuda()
    if level == "full" and path == "staged":
        path = "zero_copy"  # pages that are checked on the device
    made.write_back(tokens(torch.arange(9)), ids, path=path, validate=level).wait()
    for row in rows:
        row.zero_()
    made.load(tokens(torch.arange(9)), ids, path=path, validate=level).wait()
    assert all(
        torch.equal(row[pages.cuda()], kept[pages.cuda()]) for row, kept in zip(rows, old, strict=True)
    )
    made.destroy()


@pytest.mark.parametrize("path", ("zero_copy", "torch"))
@pytest.mark.parametrize("wrong", [-1, (PAGES + 2) * P, 1 << 40])
def test_full_validation_skips_wrong_pages_and_fails_the_ticket(
    pool: HostPool, path: str, wrong: int
) -> None:
    rows = rows_of(pool)
    old = [row.clone() for row in rows]
    ids = tokens(torch.tensor([5, 6, 7]))
    ids[P + 1] = wrong
    pool.kv_buffer.fill_(17)
    ticket = pool.write_back(tokens(torch.arange(3)), ids.cuda(), path=path, validate="full")
    with pytest.raises(TransferError, match="out of range") as raised:
        ticket.wait()
    assert raised.value.pages == (1,)
    good = torch.tensor([5, 7])
    size = pool.page_bytes
    assert bool((pool.kv_buffer[size : 2 * size] == 17).all()), "the wrong page was written"
    into = restore(pool, torch.tensor([0, 2]), good)
    assert same(into, old, tokens(good))


def test_layers_arrive_in_order_and_a_stream_can_wait_for_each(pool: HostPool) -> None:
    rows, pages = rows_of(pool), torch.randperm(PAGES)
    old = [row.clone() for row in rows]
    pool.write_back(torch.arange(PAGES), pages, unit="page").wait()
    for row in rows:
        row.zero_()
    reader = torch.cuda.Stream()
    torch.cuda.synchronize()
    spin()
    ticket = pool.load(torch.arange(PAGES), pages, unit="page", order="layer")
    seen = []
    with torch.cuda.stream(reader):
        for layer in range(L):
            ticket.wait_layer(layer, reader)
            seen.append(rows[layer].clone())
    torch.cuda.synchronize()
    assert same(seen, old, tokens(pages))
    ticket.wait_layer(1)
    ticket.wait()


def test_only_the_layers_asked_for_are_loaded(pool: HostPool) -> None:
    rows, pages = rows_of(pool), torch.arange(PAGES)
    old = [row.clone() for row in rows]
    pool.write_back(pages, pages, unit="page").wait()
    for row in rows:
        row.fill_(5)
    pool.load(pages, pages, unit="page", layers=[2, 0]).wait()
    assert same([rows[0], rows[2]], [old[0], old[2]], tokens(pages))
    assert bool((rows[1] == 5).all())


def test_submission_from_another_thread_and_device_context(pool: HostPool) -> None:
    rows, pages = rows_of(pool), torch.randperm(PAGES)[:13]
    old = [row.clone() for row in rows]
    torch.cuda.synchronize()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            pool.write_back(torch.arange(13), pages, unit="page").wait()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    assert same(restore(pool, torch.arange(13), pages), old, tokens(pages))


def test_submission_under_graph_capture_is_refused_and_capture_goes_on(pool: HostPool) -> None:
    graph = torch.cuda.CUDAGraph()
    value = torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        value.add_(1)
        with pytest.raises(PoolError, match="cannot be captured"):
            pool.write_back(torch.arange(2), torch.arange(2), unit="page")
    graph.replay()
    torch.cuda.synchronize()
    assert value.tolist() == [1.0] * 4
    pool.write_back(torch.arange(2), torch.arange(2), unit="page").wait()


def test_submission_never_waits_for_the_device(pool: HostPool) -> None:
    on_device = tokens(torch.arange(9)).cuda()

    def submit() -> list[Ticket]:
        tickets = [
            pool.write_back(torch.arange(9), torch.arange(9), unit="page", path=path)
            for path in ("zero_copy", "staged")
        ]
        tickets.append(pool.load(torch.arange(9), torch.arange(9), unit="page", order="layer"))
        tickets.append(pool.write_back(tokens(torch.arange(9)), on_device, validate="full"))
        tickets.append(pool.load(torch.arange(9), torch.arange(9), unit="page", validate="full"))
        return tickets

    for ticket in submit():  # torch loads what validate="full" takes when it is first used
        ticket.wait()
    torch.cuda.synchronize()
    before = torch.cuda.Event()
    spin()
    before.record()
    tickets = submit()
    assert not before.query(), "a submission waited for work of the caller's stream"
    for ticket in tickets:
        ticket.wait()


def test_many_pages_take_one_launch_and_arrive_whole() -> None:
    count = 3000
    pool = MHATokenToKVPoolHost(
        heads=2,
        head_dim=8,
        v_head_dim=24,
        dtype=torch.bfloat16,
        layers=range(2),
        page_size=1,
        layout="page_first",
        capacity_pages=count,
        device="cuda:0",
    )
    made: dict[str, Any] = {}
    for name, width in (("k", 8), ("v", 24)):
        made[name] = [torch.randn(count, 2, width, device="cuda").to(torch.bfloat16) for _ in range(2)]
    pool.bind(made)
    old = {name: [t.clone() for t in each] for name, each in made.items()}
    host, device = torch.randperm(count), torch.randperm(count)
    for path in PATHS:
        pool.write_back(host, device, path=path).wait()
        for each in made.values():
            for tensor in each:
                tensor.zero_()
        pool.load(host, device, path=path).wait()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for n in made for a, b in zip(made[n], old[n], strict=True)), path
    for each in made.values():
        for tensor in each:
            tensor.zero_()
    pool.load(host, device, order="layer").wait()
    assert all(torch.equal(a, b) for n in made for a, b in zip(made[n], old[n], strict=True))
    pool.destroy()


def test_rebind_and_destroy_wait_for_what_runs(pool: HostPool) -> None:
    rows, pages = rows_of(pool), torch.arange(15)
    old = [row.clone() for row in rows]
    torch.cuda.synchronize()
    spin()
    pool.write_back(pages, pages, unit="page", path="staged")
    del rows
    pool.rebind({"kv": tensors(9)})
    gc.collect()
    into = restore(pool, pages, pages)
    assert same(into, old, tokens(pages))


def test_free_page_in_flight_needs_its_ticket(pool: HostPool) -> None:
    ids = pool.alloc(2 * P)
    assert ids is not None
    ticket = pool.write_back(ids, tokens(torch.arange(2)))
    with pytest.raises(ValueError, match="in flight"):
        pool.free(ids)
    assert pool.free(ids, after=ticket) == 2 * P
    again = pool.alloc(PAGES * P)
    assert again is not None
    ticket.wait()


# ---- pools that move together --------------------------------------------------------------------

FULL, LINEAR = (1, 5), (0, 2, 3, 4)
MIXES = [{"kv": one, "state": two} for one in PATHS for two in PATHS]


def hybrid_tensors(seed: int) -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randint(-99, 99, shape, generator=generator).to(dtype).cuda()

    kv = {"kv": [made(160, 1, 24) for _ in FULL]}
    state = {"temporal": made(4, 24, 2, 16, 16, dtype=torch.float32), "conv": made(4, 24, 3, 96)}
    return {"kv": kv, "state": {**state, "ngram": made(24, 2, dtype=torch.int64)}}


def flat(tensors: dict[str, dict[str, Any]]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in (value for one in tensors.values() for value in one.values()):
        found += list(value) if isinstance(value, list) else [value]
    return found


@pytest.fixture
def group() -> Iterator[Any]:
    made = KimiLinearHostPoolGroup(
        full_attention_layers=FULL,
        linear_attention_layers=LINEAR,
        page_size=P,
        kv={"kv_lora_rank": 16, "qk_rope_head_dim": 8, "dtype": torch.bfloat16},
        state={
            **{"heads": 2, "head_dim": 16, "kernel": 4, "ngram": 2},
            **{"ssm_dtype": torch.float32, "conv_dtype": torch.bfloat16},
        },
        capacity_pages={"kv": 38, "state": 20},
        staging_bytes=64 << 10,
        device="cuda:0",
        require="cuda",
    )
    yield made
    made.destroy()


def hybrid_ids() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {
        "kv": (torch.randperm(38)[:21], torch.randperm(40)[:21]),
        "state": (torch.randperm(20)[:9], 1 + torch.randperm(23)[:9]),
    }


def holds(
    tensors: dict[str, dict[str, Any]],
    old: list[torch.Tensor],
    ids: dict[str, tuple[torch.Tensor, torch.Tensor]],
) -> bool:
    """Whether the rows of these device pages are what they were."""
    rows, slots = tokens(ids["kv"][1]).cuda(), ids["state"][1].cuda()
    now = flat(tensors)
    same = [torch.equal(a[rows], b[rows]) for a, b in zip(now[:2], old[:2], strict=True)]
    same += [torch.equal(a[:, slots], b[:, slots]) for a, b in zip(now[2:4], old[2:4], strict=True)]
    return all(same) and torch.equal(now[4][slots], old[4][slots])


@pytest.mark.parametrize("path", MIXES, ids=lambda mix: "-".join(mix.values()))
def test_a_group_moves_behind_the_work_before_it_and_is_captured_as_a_whole(group: Any, path: Any) -> None:
    tensors, filled, ids = hybrid_tensors(1), flat(hybrid_tensors(2)), hybrid_ids()
    group.bind(tensors)
    torch.cuda.synchronize()
    spin()
    for tensor, new in zip(flat(tensors), filled, strict=True):
        tensor.copy_(new)
    ticket = group.write_back(ids, "page", path=path)
    ticket.captured.wait(torch.cuda.current_stream())
    for tensor in flat(tensors):
        tensor.fill_(-1)
    assert dict(ticket.paths) == path
    spin()
    loaded = group.load(ids, "page", path=path)
    loaded.wait(torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert holds(tensors, filled, ids)
    ticket.wait()
    loaded.wait()


def test_layers_of_a_group_come_in_one_order_and_are_told_one_by_one(group: Any) -> None:
    tensors, ids = hybrid_tensors(3), hybrid_ids()
    old = [tensor.clone() for tensor in flat(tensors)]
    group.bind(tensors)
    group.write_back(ids, "page").wait()
    for tensor in flat(tensors):
        tensor.zero_()
    reader, seen = torch.cuda.Stream(), {}
    torch.cuda.synchronize()
    spin()
    ticket = group.load(ids, "page", order="layer")
    with torch.cuda.stream(reader):
        for layer in range(6):
            ticket.wait_layer(layer, reader)
            where = tensors["kv"]["kv"][FULL.index(layer)] if layer in FULL else tensors["state"]["temporal"]
            seen[layer] = (where if layer in FULL else where[LINEAR.index(layer)]).clone()
    torch.cuda.synchronize()
    assert holds(tensors, old, ids)
    rows, slots = tokens(ids["kv"][1]).cuda(), ids["state"][1].cuda()
    assert all(torch.equal(seen[layer][rows], old[at][rows]) for at, layer in enumerate(FULL))
    assert all(torch.equal(seen[layer][slots], old[2][at][slots]) for at, layer in enumerate(LINEAR))
    for tensor in flat(tensors):
        tensor.fill_(5)
    group.load(ids, "page", layers=[5, 0]).wait()
    assert torch.equal(tensors["kv"]["kv"][1][rows], old[1][rows])
    assert bool((tensors["kv"]["kv"][0] == 5).all()) and bool((tensors["state"]["conv"][1] == 5).all())


def test_ids_of_a_group_may_lie_on_the_device(group: Any) -> None:
    tensors, ids = hybrid_tensors(4), hybrid_ids()
    old = [tensor.clone() for tensor in flat(tensors)]
    group.bind(tensors)
    given = {
        "kv": (tokens(ids["kv"][0]), tokens(ids["kv"][1]).cuda()),
        "state": (ids["state"][0], ids["state"][1].cuda()),
    }
    for path in PATHS:
        group.write_back(given, path=path).wait()
        for tensor in flat(tensors):
            tensor.zero_()
        torch.cuda.synchronize()
        group.load(given, path=path).wait()
        assert holds(tensors, old, ids), path
    group.load(given, order="layer").wait()
    assert holds(tensors, old, ids)


def test_submitting_a_group_never_waits_for_the_device(group: Any) -> None:
    group.bind(hybrid_tensors(5))
    ids = hybrid_ids()
    group.write_back(ids, "page").wait()
    group.load(ids, "page", order="layer").wait()
    before = torch.cuda.Event()
    torch.cuda.synchronize()
    spin()
    before.record()
    tickets = [group.write_back(ids, "page", path=path) for path in MIXES[:4] if "torch" not in path.values()]
    tickets.append(group.load(ids, "page", order="layer"))
    assert not before.query(), "a submission waited for work of the caller's stream"
    for ticket in tickets:
        ticket.wait()


# ---- a recurrent state that changes all the time -----------------------------------------------

STEPS, SLOTS, STATE_LAYERS = 10_000, 4, 4
AHEAD = 12_000_000
"""Cycles in which the steps and write-backs of a round are queued, so that the device runs them in one go."""


def state_pool() -> tuple[HostPool, torch.Tensor]:
    """A pool of recurrent states of 1 MiB, and its device tensor ``[layer, slot, head, v, k]``."""
    pool = KdaStatePoolHost(
        heads=4,
        head_dim=128,
        kernel=2,
        ngram=0,
        ssm_dtype=torch.float32,
        conv_dtype=torch.bfloat16,
        layers=range(STATE_LAYERS),
        layout="page_first",
        capacity_pages=64,
        staging_bytes=16 << 20,
        device="cuda:0",
        require="cuda",
    )
    temporal = torch.zeros(STATE_LAYERS, SLOTS, 4, 128, 128, device="cuda")
    conv = torch.zeros(STATE_LAYERS, SLOTS, 1, 3 * 4 * 128, dtype=torch.bfloat16, device="cuda")
    pool.bind({"temporal": temporal, "conv": conv})
    return pool, temporal


def torn(pool: HostPool, first_step: int, count: int) -> int:
    """Host pages 0 .. count - 1 that do not hold exactly the state of their step, whole."""
    part = pool.host_layout(pool.page_num).part("temporal")
    size = STATE_LAYERS * 4 * 128 * 128 * 4
    pages = pool.kv_buffer[part.base : part.base + pool.page_num * size].view(torch.float32)
    pages = pages.view(pool.page_num, -1)[:count]
    expected = torch.arange(first_step, first_step + count, dtype=torch.float32)
    return int((pages != expected[:, None]).any(1).sum())


def test_a_state_that_changes_every_step_is_never_torn() -> None:
    pool, temporal = state_pool()
    compute = torch.cuda.Stream()
    found = 0
    slot, step = torch.tensor([1]), 0
    while step < STEPS:
        count = min(pool.page_num, STEPS - step)
        tickets = []
        with torch.cuda.stream(compute):
            torch.cuda._sleep(AHEAD)
            for page in range(count):
                temporal[:, 1].fill_(step + page)
                ticket = pool.write_back(torch.tensor([page]), slot, unit="page", producer=compute)
                ticket.captured.wait(compute)
                tickets.append(ticket)
        for ticket in tickets:
            ticket.wait()
        found += torn(pool, step, count)
        step += count
    pool.destroy()
    assert found == 0


def test_the_same_kernels_without_fences_do_tear_the_state() -> None:
    """What the test above would find: the launches of a write-back, with nothing ordering them."""
    pool, temporal = state_pool()
    compute, copies = torch.cuda.Stream(), torch.cuda.Stream()
    transfers = pool._transfers
    launcher, place = transfers._launcher, transfers.members[0].place
    assert launcher is not None
    found, step = 0, 0
    while step < 2_000 and found == 0:
        for stream in (compute, copies):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(AHEAD)
        for page in range(pool.page_num):
            with torch.cuda.stream(compute):
                temporal[:, 1].fill_(step + page)
            batch = Batch("pages", array("I", [page, 1]), 1)
            launcher.launch("write_back", "gather", [(0, place, batch, None)], copies.cuda_stream, [])
        torch.cuda.synchronize()
        found += torn(pool, step, pool.page_num)
        step += pool.page_num
    pool.destroy()
    assert found > 0


# ---- pages in parts


def whole_state_pool(bound: int, layout: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Recurrent states of 4 layers, 1 MiB a state, with staging memory of so many bytes."""
    pool = KdaStatePoolHost(
        **{"heads": 4, "head_dim": 128, "kernel": 2, "ngram": 3, "layers": range(STATE_LAYERS)},
        **{"ssm_dtype": torch.float32, "conv_dtype": torch.bfloat16, "capacity_pages": 8},
        layout=layout,
        staging_bytes=bound,
        device="cuda:0",
        require="cuda",
    )
    generator = torch.Generator().manual_seed(bound)

    def made(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(-99, 99, shape, generator=generator).to(dtype).cuda()

    tensors = {
        "temporal": made(STATE_LAYERS, 9, 4, 128, 128, dtype=torch.float32),
        "conv": made(STATE_LAYERS, 9, 1, 3 * 4 * 128, dtype=torch.bfloat16),
        "ngram": made(9, 3, dtype=torch.int64),
    }
    pool.bind(tensors)
    return pool, tensors


@pytest.mark.parametrize("order", ["bulk", "layer"])
@pytest.mark.parametrize("layout", ["page_first", "page_record", "layer_first"])
@pytest.mark.parametrize("bound", [512 << 10, 1_500_000, 16 << 20])
def test_states_in_parts_arrive_whole_and_in_order(bound: int, layout: str, order: str) -> None:
    """Slots of one layer, of part of a state, of several states: both directions, behind busy streams."""
    pool, tensors = whole_state_pool(bound, layout)
    assert pool.staging is not None and pool.staging.nbytes <= bound
    assert (pool.staging_pages == 0) == (bound < 2 << 20)
    old = {name: tensor.clone() for name, tensor in tensors.items()}
    host, device, there = torch.tensor([6, 1, 3]), torch.tensor([2, 5, 7]), torch.tensor([4, 1, 8])
    torch.cuda.synchronize()
    spin()
    ticket = pool.write_back(host, device, "page", path="staged")
    ticket.captured.wait(torch.cuda.current_stream())
    for tensor in tensors.values():
        tensor.fill_(5)
    spin()
    loaded = pool.load(host, there, "page", path="staged", order=order)
    for layer in loaded.layers:
        loaded.wait_layer(layer, torch.cuda.current_stream())
        seen = tensors["temporal"][layer, there.cuda()].clone()
        assert torch.equal(seen, old["temporal"][layer, device.cuda()]), layer
    loaded.wait()
    ticket.wait()
    for name in ("temporal", "conv"):
        assert torch.equal(tensors[name][:, there.cuda()], old[name][:, device.cuda()])
        assert bool((tensors[name][:, [0, 2, 3]] == 5).all())
    assert torch.equal(tensors["ngram"][there.cuda()], old["ngram"][device.cuda()])
    assert not pool.overwritten_guard()
    pool.destroy()
