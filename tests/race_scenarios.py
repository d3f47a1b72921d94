"""Short lives of a pool, one for each kind of race that transfers are known for.

Each takes `choose`, which decides what the simulated device does first, and raises when a byte, an order or
a refusal is wrong. The tests run them; the fence mutations must be caught by them.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from simulation import CONFIGS, GROUPS, GroupWorld, World, group_world, world

from poolwright.runtime import transfer
from poolwright.runtime.errors import PoolError, TransferError

Choose = Callable[[int], int]
Scenario = Callable[[Choose], None]

MLA, MHA, LAYER_FIRST, KDA = CONFIGS[0], CONFIGS[3], CONFIGS[4], CONFIGS[6]
HYBRID, WINDOW, DRAFT = GROUPS


def submit(
    made: World,
    stores: bool,
    host: list[int],
    device: list[int],
    path: str | None = "zero_copy",
    **how: object,
) -> object:
    """Move whole pages, in the pool and in the model; returns the ticket."""
    call = made.pool.write_back if stores else made.pool.load
    ids = (torch.tensor(pages, dtype=torch.int64) for pages in (host, device))
    ticket = call(*ids, "page", path=path, **how)
    rows, others = made.tokens(host), made.tokens(device)
    if stores:
        made.stored(rows, others)
    else:
        wanted = how.get("layers", made.config.layers)
        made.loaded(rows, others, [made.config.layers.index(layer) for layer in wanted])  # type: ignore[attr-defined]
    return ticket


def store(made: World, host: list[int], device: list[int], path: str | None = "zero_copy", **how: object):
    return submit(made, True, host, device, path, **how)


def load(made: World, host: list[int], device: list[int], path: str = "zero_copy", **how: object):
    return submit(made, False, host, device, path, **how)


def produce(made: World, *pages: int) -> None:
    made.produce(made.driver.caller, made.tokens(pages))


def read(made: World, *pages: int) -> None:
    made.read(made.driver.caller, made.tokens(pages))


def finish(made: World, *tickets: object) -> None:
    """Wait for everything, compare both sides, give the pool back."""
    for ticket in tickets:
        ticket.wait()  # type: ignore[attr-defined]
    made.pool.clear()
    made.compare_host(range(5))
    made.settle()
    made.check()
    made.pool.destroy()


def poll(made: World, ticket: object) -> None:
    """Ask until it is done."""
    for _ in range(1000):
        if ticket.done():  # type: ignore[attr-defined]
            return
        made.driver.run(1)
    raise AssertionError("a ticket is never done")


# ---- lifetimes


def references_dropped(choose: Choose) -> None:
    """F003, F072: nothing that the caller drops after a submission is missed."""
    made = world(MLA, choose)
    tokens = [3, 0, 2, 1]
    made.pool.write_back(torch.tensor(tokens), torch.tensor([9, 4, 6, 1]), path="zero_copy")
    made.stored(tokens, [9, 4, 6, 1])
    ids = made.device_ids([8, 9], made.driver.caller)
    made.pool.write_back(torch.tensor([4, 5]), ids, path="staged")
    made.stored([4, 5], [8, 9])
    del ids
    made.pool.load(torch.tensor(tokens), torch.tensor([0, 2, 3, 5]), layers=[2, 0])
    made.loaded(tokens, [0, 2, 3, 5], [2, 0])
    gc.collect(0)
    finish(made)


def tensors_replaced(choose: Choose) -> None:
    """F072: device tensors that are bound no longer are held until the last transfer of them has run."""
    made = world(MLA, choose)
    store(made, [0, 1], [2, 3])
    store(made, [2, 3, 4], [4, 5, 6], "staged")
    for drain in (True, True, False, False):
        load(made, [3, 4], [6, 7], "staged")
        load(made, [0, 1], [4, 5], order="layer")
        made.bind(drain)
    load(made, [4, 0, 1], [0, 1, 2], "staged")
    finish(made)


def pool_destroyed(choose: Choose) -> None:
    """Destroying a pool waits for everything in flight; a second time nothing happens."""
    made = world(MHA, choose)
    store(made, [0, 1, 2], [2, 3, 4], "staged")
    load(made, [0, 1, 2], [5, 6, 7], order="layer")
    made.tensors.clear()
    made.pool.destroy()
    made.pool.destroy()
    made.driver.run()
    with pytest.raises(PoolError, match="destroyed"):
        made.pool.alloc(2)


def pool_dropped(choose: Choose) -> None:
    """A pool that is dropped with work in flight gives its memory back after that."""
    made = world(MHA, choose)
    tickets = [store(made, [0, 1, 2], [2, 3, 4], "staged"), load(made, [0, 1], [5, 6], order="layer")]
    made.tensors.clear()
    del made.pool
    gc.collect()
    made.driver.run()
    assert all(ticket.done() for ticket in tickets)


def orders_forgotten(choose: Choose) -> None:
    """The numbers of the steps of a load stay until it has run, also when its order is forgotten."""
    made = world(MLA, choose)
    store(made, [0, 1], [0, 1])
    kept, transfer.ORDERS_KEPT = transfer.ORDERS_KEPT, 1
    try:
        for turn in range(36):  # so many that tickets which nobody asks for are forgotten, too
            load(made, [0, 1], [2, 3], layers=([0, 1], [1, 0], [2], [0, 1, 2])[turn % 4]).detach()
        gc.collect(0)
        finish(made)
    finally:
        transfer.ORDERS_KEPT = kept


def late_layer_wait(choose: Choose) -> None:
    """A stream may come to its wait for a layer when ticket and pool are gone, and later loads have run."""
    made = world(MLA, choose)
    store(made, [0, 1], [0, 1]).wait()
    late, blocker = made.driver.new_stream("late"), made.driver.new_stream("blocker")
    for device in ([2, 3], [4, 5]):
        ticket = load(made, [0, 1], device, order="layer")
        for _ in range(50):
            made.driver.compute(blocker, "long work", lambda: None)
        made.driver.wait(late, made.driver.record(blocker))
        ticket.wait_layer(1, late)
        made.read(late, made.tokens(device), [1])
    kept = made.tensors
    made.pool.destroy()
    del ticket, made.pool
    gc.collect()
    made.driver.run()
    made.check()
    assert kept


def bound_at_once(choose: Choose) -> None:
    """Transfers of both directions come after what a bind has put on the device."""
    made = world(LAYER_FIRST, choose)
    made.bind()
    first = store(made, [0], [1])
    second = load(made, [0], [2], order="layer")
    made.bind()
    finish(made, first, second)


# ---- fences of the caller's work


def producer(choose: Choose) -> None:
    """F062: a write-back reads what was queued to be written before it, whichever stream that is."""
    made = world(MLA, choose)
    produce(made, 1, 2)
    tickets = [store(made, [0, 1], [1, 2])]
    other = made.driver.new_stream("other")
    made.produce(other, made.tokens([3, 4]))
    tickets.append(store(made, [2, 3], [3, 4], "staged", producer=other))
    finish(made, *tickets)


def readers(choose: Choose) -> None:
    """F063, F064: a load comes after the work that still reads or writes its rows."""
    made = world(MHA, choose)
    store(made, [0, 1], [0, 1]).wait()
    read(made, 5, 6)
    produce(made, 4)
    tickets = [load(made, [0, 1], [5, 6], "staged")]
    other = made.driver.new_stream("other")
    made.read(other, made.tokens([2, 3]))
    tickets.append(load(made, [0, 1], [2, 3], readers=other))
    tickets.append(load(made, [0], [4], order="layer"))
    finish(made, *tickets)


def ids_on_device(choose: Choose) -> None:
    """Ids that the current stream still writes are read after that, though the rows are another stream's."""
    made = world(MLA, choose)
    other = made.driver.new_stream("other")
    for path in ("zero_copy", "staged"):
        ids = made.device_ids([6, 7, 2, 3], made.driver.caller)
        made.pool.write_back(torch.arange(4), ids, producer=other, path=path)
        made.stored([0, 1, 2, 3], [6, 7, 2, 3])
        ids = made.device_ids([8, 9, 4, 5], made.driver.caller)
        made.pool.load(torch.arange(4), ids, readers=other, path=path)
        made.loaded([0, 1, 2, 3], [8, 9, 4, 5], range(3))
    del ids
    finish(made)


def memory_handed_out_again(choose: Choose) -> None:
    """Torch hands memory out while work of the current stream is in it: ids, steps, tables and copies for a
    comparison lie there, and the rows are another stream's."""
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        *(("zero_copy", {}), ("zero_copy", {"order": "layer"})),
        ("staged", {"validate": "full"}),
    )
    for path, how in kinds:
        made = world(MLA, choose)
        other = made.driver.new_stream("other")
        host, device = ([0, 3, 1, 2], [5, 4, 8, 7]) if path == "zero_copy" else ([0, 1, 2, 3], [4, 5, 8, 9])
        for stream in (other, made.driver.caller):
            made.driver.give_back(8)
            made.bind()
            produce(made, 2, 4)
            ids, check = (torch.tensor(host), torch.tensor(device)), dict(how)
            check.pop("order", None)
            made.driver.follow(other, made.driver.caller)
            made.driver.give_back(8)
            made.pool.write_back(*ids, path=path, producer=stream, **check)
            made.stored(host, device)
            made.driver.give_back(8)
            made.pool.load(*ids, path=path, readers=stream, **how)
            made.loaded(host, device, range(3))
            made.pool.clear()
        finish(made)


def captured(choose: Choose) -> None:
    """Rows may be overwritten right after `captured`, in a stream or by the CPU."""
    made = world(MLA, choose)
    for path in ("zero_copy", "staged"):
        ticket = store(made, [0, 1, 2], [1, 2, 3], path)
        ticket.captured.wait(made.driver.caller)
        produce(made, 1, 2, 3)
        ticket = store(made, [3, 4], [1, 2], path)
        ticket.captured.wait()
        for at, width in made.rows(made.tokens([1, 2])):
            made.driver.cpu("overwriting", at, width, writes=True)
        ticket.wait()
    finish(made)


def waited_in_a_stream(choose: Choose) -> None:
    """A stream that waits for a ticket sees all of it."""
    made = world(MHA, choose)
    store(made, [0, 1], [0, 1])
    for path in ("zero_copy", "staged"):
        ticket = load(made, [0, 1], [2, 3], path)
        ticket.wait(made.driver.caller)
        read(made, 2, 3)
        produce(made, 2, 3)
    ticket = load(made, [1], [7])
    ticket.wait_all(made.driver.caller)
    read(made, 7)
    finish(made)


def waited_on_the_cpu(choose: Choose) -> None:
    """After `wait`, or once `done` has said so, the CPU may use the bytes."""
    made = world(MLA, choose)
    store(made, [0, 1, 2], [0, 1, 2], "staged").wait()
    made.compare_host([0, 1, 2])
    ticket = store(made, [3, 4], [3, 4], "staged")
    poll(made, ticket)
    made.compare_host([3, 4])
    ticket = load(made, [3, 4], [6, 7], "staged")
    ticket.wait()
    made.compare_device({(layer, token) for layer in range(3) for token in made.tokens([6, 7])})
    finish(made)


# ---- order among transfers


def store_then_load(choose: Choose) -> None:
    """F071: a load waits for a write-back of its page, and the other way round."""
    for one, two in (("zero_copy", "staged"), ("staged", "zero_copy")):
        made = world(MLA, choose)
        store(made, [0, 1], [0, 1], one)
        load(made, [1, 0], [2, 3], two)
        store(made, [2, 3], [2, 3], one)
        store(made, [0], [5], two)
        load(made, [0, 2], [5, 6], one)
        finish(made)


def two_stores(choose: Choose) -> None:
    """The later of two write-backs to one host page stays, whatever their paths."""
    for one, two in (("staged", "zero_copy"), ("zero_copy", "staged"), ("staged", "staged")):
        made = world(LAYER_FIRST, choose)
        store(made, [0, 1, 2], [0, 1, 2], one)
        produce(made, 4, 5)
        store(made, [2, 0], [4, 5], two)
        finish(made)


def nothing_stored(choose: Choose) -> None:
    """A write-back of no pages, which is over at once, does not stand for the copies of those before it."""
    for path in ("staged", "zero_copy"):
        made = world(MLA, choose)
        store(made, [0, 1], [0, 1], "staged")
        nothing = store(made, [], [], path)
        poll(made, nothing)
        load(made, [0, 1], [4, 5])
        finish(made)


def ring_reuse(choose: Choose) -> None:
    """A slot of staging memory is not overwritten before it is empty, in either direction."""
    made = world(MLA, choose)
    store(made, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], "staged")
    made.pool.clear()
    load(made, [0, 1, 2], [5, 6, 7], "staged")
    store(made, [3, 4], [0, 1], "staged")
    load(made, [2, 1, 0], [2, 3, 4], "staged")
    finish(made)


def many_in_flight(choose: Choose) -> None:
    """However many transfers run, a later one is behind each that touches a page of its own."""
    made = world(MLA, choose)
    for page in (0, 1):
        store(made, [page], [page], "staged")
    for turn in range(12):
        store(made, [2 + turn % 3], [2], "staged")
    load(made, [0], [3])
    load(made, [1], [1])
    for turn in range(12):
        load(made, [4], [4 + turn % 4])
    store(made, [0], [5], "staged")
    finish(made)


def free_in_flight(choose: Choose) -> None:
    """F065: a page in flight is given back behind its ticket only, and its next use comes after it."""
    made = world(MLA, choose)
    ids = made.pool.alloc(2)
    ticket = made.pool.write_back(ids, torch.tensor([4, 5]), path="staged")
    with pytest.raises(ValueError, match="page 0 is in flight"):
        made.pool.free(ids)
    made.pool.free(ids, after=ticket)
    again = made.pool.alloc(10)
    assert set(ids.tolist()) <= set(again.tolist())
    made.pool.write_back(again[:2], torch.tensor([8, 9]), path="zero_copy")
    made.stored(again[:2].tolist(), [8, 9])
    other = again[2:4]
    unknown = made.pool.write_back(other, torch.tensor([0, 1]))
    made.stored(other.tolist(), [0, 1])
    with pytest.raises(ValueError, match="in flight"):
        made.pool.free(other, after=ticket)
    unknown.wait()
    made.pool.free(other)
    finish(made)


def cleared(choose: Choose) -> None:
    """`clear` waits for everything: pages and rows are nobody's after it."""
    made = world(MHA, choose)
    made.pool.alloc(3 * made.page_size)
    tickets = [store(made, [0, 1, 2], [0, 1, 2], "staged"), load(made, [1], [5])]
    made.pool.clear()
    assert all(ticket.acknowledged for ticket in tickets)
    assert made.pool.available_size() == 5 * made.page_size
    made.compare_host([0, 1, 2])
    for at, width in made.rows(made.tokens([5])):
        made.driver.cpu("reuse", at, width, writes=True)
    made.bind()
    finish(made)


# ---- progress of layers


def layers_in_turn(choose: Choose) -> None:
    """F066: a layer is told when it is there, also by the second of two loads and by loads of some layers."""
    made = world(MLA, choose)
    store(made, [0, 1], [0, 1])
    for how in ({"order": "layer"}, {"layers": [2, 0]}, {"order": "layer"}, {"layers": [1]}):
        ticket = load(made, [0, 1], [4, 5], **how)
        for layer in how.get("layers", [0, 1, 2]):
            ticket.wait_layer(layer, made.driver.caller)
            made.read(made.driver.caller, made.tokens([4, 5]), [layer])
        produce(made, 0, 1)
        store(made, [0, 1], [0, 1])
        ticket.wait(made.driver.caller)
        produce(made, 4, 5)
    finish(made)


def timed_from_its_start(choose: Choose) -> None:
    """The time that a ticket tells begins when what it waited for is done."""
    made = world(CONFIGS[0], choose)
    before = 40
    for n in range(before):
        made.driver.compute(made.driver.caller, f"earlier work {n}", lambda: None)
    ids = torch.tensor([0]), torch.tensor([1])
    ticket = made.pool.write_back(*ids, "page", path="zero_copy", timed=True)
    assert 1 <= ticket.seconds() < before


def layers_on_the_cpu(choose: Choose) -> None:
    """F066: the CPU is told of a layer when it is there."""
    made = world(MHA, choose)
    store(made, [0, 1], [0, 1])
    for device in ([2, 3], [4, 5]):
        ticket = load(made, [0, 1], device, order="layer")
        for position, layer in enumerate(made.config.layers):
            ticket.wait_layer(layer)
            made.compare_device({(position, token) for token in made.tokens(device)})
    finish(made)


# ---- threads


def other_threads(choose: Choose) -> None:
    """F006: any thread may submit, wait and ask; the pool's device is made current where that is needed."""
    made = world(MLA, choose)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            store(made, [0, 1, 2], [0, 1, 2], "staged").wait()
            ticket = load(made, [0, 1, 2], [4, 5, 6], order="layer")
            for position, layer in enumerate(made.config.layers):
                ticket.wait_layer(layer)
                made.compare_device({(position, token) for token in made.tokens([4, 5, 6])})
            poll(made, ticket)
            made.pool.rebind(made.tensors)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    for error in errors:
        raise error
    finish(made)


def capturing(choose: Choose) -> None:
    """A stream that is being captured into a graph is refused before anything is submitted."""
    made = world(MLA, choose)
    made.driver.capturing.add(made.driver.caller)
    with pytest.raises(PoolError, match="mla cannot be captured"):
        made.pool.write_back(torch.tensor([0]), torch.tensor([1]), "page")
    made.driver.capturing.clear()
    finish(made, store(made, [0], [1]))


def capturing_beside(choose: Choose) -> None:
    """Rows of another stream may move meanwhile, unless the captured one has the ids."""
    made = world(MLA, choose)
    other = made.driver.new_stream("other")
    made.driver.capturing.add(made.driver.caller)
    for path in ("zero_copy", "staged"):
        ids = made.device_ids([2, 3, 4, 5], other)
        before = made.driver._number
        with pytest.raises(PoolError, match="mla cannot be captured"):
            made.pool.load(torch.arange(4), ids, path=path, readers=other)
        with pytest.raises(PoolError, match="mla cannot be captured"):
            made.pool.write_back(torch.arange(4), ids, path=path, producer=other)
        assert made.driver._number == before
    finish(made, store(made, [0], [1], producer=other))


# ---- states that change in place


def state_captured(choose: Choose) -> None:
    """A state may change right after `captured`; what the staging memory cannot hold at once is told."""
    for slots, pages, delayed in ((1, [0, 1], 0), (1, [0, 1, 2, 3], 2), (2, [0, 1, 2, 3], 0)):
        made = world(KDA, choose, slot_pages=slots)
        device = [1 + page for page in pages]
        produce(made, *device)
        ticket = store(made, pages, device, None)
        assert ticket.path == "staged" and ticket.delayed == delayed
        ticket.captured.wait(made.driver.caller)
        produce(made, *device)
        load(made, pages, [7 - page for page in pages], order="layer").wait()
        finish(made, ticket)


def state_in_parts(choose: Choose) -> None:
    """A slot smaller than a state, and one that a state goes through in chunks: `captured` comes after
    the last part, and no part overwrites one that has not left."""
    for slots, chunks, delayed in ((0, 1, 3), (0, 4, 3), (1, 3, 1), (2, 9, 0)):
        made = world(KDA, choose, slots, chunks)
        pages, device = [3, 0, 2], [5, 1, 4]
        produce(made, *device)
        ticket = store(made, pages, device, "staged")
        assert ticket.delayed == delayed
        ticket.captured.wait(made.driver.caller)
        produce(made, *device)
        again = store(made, [3], [4], "staged")
        load(made, pages, [2, 6, 7], "staged")
        read(made, 1)
        again.captured.wait()
        for at, width in made.rows(made.tokens([4])):
            made.driver.cpu("overwriting", at, width, writes=True)
        made.bind()
        load(made, [2], [3], "staged").wait(made.driver.caller)
        read(made, 3)
        finish(made, ticket, again)


def loads_in_layers(choose: Choose) -> None:
    """A load of few pages goes through a slot layer by layer; nothing of its chunks races."""
    for chunks in (2, 6):
        made = world(LAYER_FIRST, choose, 2, chunks)
        store(made, [0, 1, 2], [3, 4, 5], "staged")
        load(made, [1], [6], "staged").wait(made.driver.caller)
        read(made, 6)
        load(made, [0, 1, 2], [5, 6, 7], "staged")
        load(made, [2], [0], "staged")
        finish(made)


def layers_staged(choose: Choose) -> None:
    """Layers that the copy engine brings are told one by one, whatever a slot holds, in loads of all and of
    some; the next load of the same rows comes after the readers of each."""
    for config, slots, chunks in ((KDA, 0, 1), (KDA, 0, 3), (KDA, 2, 2), (LAYER_FIRST, 1, 1)):
        made = world(config, choose, slots, chunks)
        store(made, [0, 1, 2], [3, 4, 5], "staged")
        for how in ({"order": "layer"}, {"layers": config.layers[::-1][:2]}, {"order": "layer"}):
            ticket = load(made, [2, 0], [6, 7], "staged", **how)
            for layer in ticket.layers:  # type: ignore[attr-defined]
                ticket.wait_layer(layer, made.driver.caller)  # type: ignore[attr-defined]
                made.read(made.driver.caller, made.tokens([6, 7]), [config.layers.index(layer)])
            store(made, [1], [2], "staged")
            ticket.wait(made.driver.caller)  # type: ignore[attr-defined]
            produce(made, 6, 7)
        finish(made)


def ids_checked_on_the_device(choose: Choose) -> None:
    """`validate="full"` skips what the device finds wrong, fails the ticket and names the pages."""
    for config, wrong in ((MLA, 17), (KDA, 0), (KDA, -1)):
        made = world(config, choose)
        made.driver.synchronize(made.driver.record(made.driver.caller))
        size, pages = made.page_size, [3, 1]
        good = made.tokens([5])
        ids = made.device_ids([*made.tokens([2])[:-1], wrong, *good], made.driver.caller)
        ticket = made.pool.write_back(
            torch.tensor(made.tokens(pages)), ids, validate="full", path="zero_copy"
        )
        made.stored(made.tokens([1]), good)
        del ids
        with pytest.raises(TransferError, match="out of range or not whole pages") as raised:
            ticket.wait()
        assert raised.value.pages == (3,) and size
        finish(made)


# ---- many layers


def many_layers(choose: Choose) -> None:
    """More layers than a launch has blocks, threads or bytes for: each is told when it is there."""
    made = world(replace(MLA, layers=tuple(range(1, 601, 2))), choose)
    store(made, [0], [0])
    ticket = load(made, [0], [3], order="layer")
    for position in (0, 255, 256, 299):
        ticket.wait_layer(2 * position + 1, made.driver.caller)
        made.read(made.driver.caller, made.tokens([3]), [position])
    finish(made, ticket)


def counters_go_round(choose: Choose) -> None:
    """Progress is told right when the 32-bit counters of layers pass their end."""
    made = world(MLA, choose)
    store(made, [0, 1], [0, 1]).wait()
    transfers, start = made.pool._transfers, (1 << 32) - 3
    made.driver.fill(transfers._counters.address, start, 3, transfers._loads)
    made.driver.synchronize(made.driver.record(transfers._loads))
    transfers._reached[:] = [start] * 3
    for device in ([2, 3], [4, 5], [6, 7]):
        ticket = load(made, [0, 1], device, order="layer")
        for layer in range(3):
            ticket.wait_layer(layer, made.driver.caller)
            made.read(made.driver.caller, made.tokens(device), [layer])
    assert transfers._reached[1] + transfers._ahead & 0xFFFFFFFF < 8  # the others are told by events
    finish(made)


# ---- groups


def move_all(
    made: GroupWorld, stores: bool, ids: dict[str, tuple[list[int], list[int]]], path: object, **how: object
) -> object:
    """Move whole pages of several pools, in the group and in the models; returns the ticket."""
    call = made.group.write_back if stores else made.group.load
    given = {name: (torch.tensor(host), torch.tensor(device)) for name, (host, device) in ids.items()}
    ticket = call(given, "page", path=path, **how)
    for name in ticket.moved:
        one = made.worlds[name]
        host, device = ids[name if name in ids else made.config.follows[name]]
        rows, others = one.tokens(host), one.tokens(device)
        if stores:
            one.stored(rows, others)
        else:
            layers = [n for n, x in enumerate(one.config.layers) if x in how.get("layers", one.config.layers)]  # type: ignore[operator]
            one.loaded(rows, others, layers)
    return ticket


def finish_all(made: GroupWorld, *tickets: object) -> None:
    """Wait for everything, compare both sides of every pool, give the group back."""
    for ticket in tickets:
        ticket.wait()  # type: ignore[attr-defined]
    made.group.clear()
    for one in made.worlds.values():
        one.compare_host(range(5))
        one.settle()
        one.check()
    made.group.destroy()


def produce_all(made: GroupWorld, ids: dict[str, tuple[list[int], list[int]]]) -> None:
    for name, (_, device) in ids.items():
        one = made.worlds[name]
        one.produce(made.driver.caller, one.tokens(device))


def group_captured(choose: Choose) -> None:
    """`captured` stands for the rows of all pools, whatever paths they take."""
    ids = {"kv": ([0, 1, 2], [1, 2, 3]), "state": ([0, 1, 4], [3, 2, 1])}
    for path in ({"kv": "zero_copy", "state": "staged"}, {"kv": "staged", "state": "zero_copy"}, "staged"):
        made = group_world(HYBRID, choose)
        produce_all(made, ids)
        ticket = move_all(made, True, ids, path)
        ticket.captured.wait(made.driver.caller)
        produce_all(made, ids)
        ticket = move_all(made, True, ids, path)
        ticket.captured.wait()
        for name, (_, device) in ids.items():
            for at, width in made.worlds[name].rows(made.worlds[name].tokens(device)):
                made.driver.cpu("overwriting", at, width, writes=True)
        ticket.wait()
        for _ in range(3):
            produce_all(made, ids)
            move_all(made, True, ids, path).wait()
            for name, (host, _) in ids.items():
                made.worlds[name].compare_host(host)
        made.bind()
        finish_all(made)


def group_in_parts(choose: Choose) -> None:
    """States that are cut, beside pages that are not: slots are used in step, rows captured as a whole."""
    for slots, chunks in ((0, 1), (0, 5), (1, 4)):
        made = group_world(HYBRID, choose, slots, chunks)
        ids = {"kv": ([0, 1, 2], [1, 2, 3]), "state": ([0, 1, 4], [3, 2, 1])}
        produce_all(made, ids)
        ticket = move_all(made, True, ids, "staged")
        ticket.captured.wait(made.driver.caller)
        produce_all(made, ids)
        move_all(made, False, {"kv": ([1], [6]), "state": ([4, 0], [5, 6])}, "staged")
        move_all(made, True, {"kv": ([1, 3], [6, 7]), "state": ([4], [6])}, "staged")
        finish_all(made, ticket)


def group_layers_staged(choose: Choose) -> None:
    """A layer is told when every pool that has it has it, also where the copy engine brings that of some."""
    ids = {"kv": ([0, 1], [1, 2]), "state": ([0, 4], [1, 2])}
    for slots, chunks in ((0, 2), (1, 1)):
        made = group_world(HYBRID, choose, slots, chunks)
        produce_all(made, ids)
        move_all(made, True, ids, "staged")
        for how in ({"order": "layer"}, {"layers": [1, 0]}):
            there = {"kv": ([0, 1], [5, 6]), "state": ([4, 0], [5, 6])}
            ticket = move_all(made, False, there, {"kv": "zero_copy", "state": "staged"}, **how)
            for layer in ticket.layers:  # type: ignore[attr-defined]
                ticket.wait_layer(layer, made.driver.caller)  # type: ignore[attr-defined]
                for one in made.worlds.values():
                    if layer in one.config.layers:
                        at = one.config.layers.index(layer)
                        one.read(made.driver.caller, one.tokens([5, 6]), [at])
            ticket.wait(made.driver.caller)  # type: ignore[attr-defined]
            produce_all(made, there)
        finish_all(made)


def group_layers(choose: Choose) -> None:
    """A layer is told when every pool that has it has it, in loads of all layers and of some."""
    for config, names in ((HYBRID, ("kv", "state")), (DRAFT, ("target",))):
        made = group_world(config, choose)
        ids = {name: ([0, 1], [1, 2]) for name in names}
        produce_all(made, ids)
        move_all(made, True, ids, "zero_copy")
        for how in ({"order": "layer"}, {"layers": [1, 0]}, {"order": "layer"}):
            there = {name: ([0, 1], [5, 6]) for name in names}
            ticket = move_all(made, False, there, None, **how)
            for layer in how.get("layers", range(5)):
                if any(layer in one.config.layers for one in made.worlds.values()):
                    ticket.wait_layer(layer, made.driver.caller)
                for one in made.worlds.values():
                    if layer in one.config.layers:
                        at = one.config.layers.index(layer)
                        one.read(made.driver.caller, one.tokens([5, 6]), [at])
            ticket.wait(made.driver.caller)
            produce_all(made, there)
        finish_all(made)


def group_and_pool(choose: Choose) -> None:
    """A pool of a group that is used by itself stays in order with what the group moves."""
    ids = {"full": ([0, 1], [1, 2]), "swa": ([3, 4], [5, 6])}
    for one, two in (("zero_copy", "staged"), ("staged", "zero_copy")):
        made = group_world(WINDOW, choose)
        produce_all(made, ids)
        move_all(made, True, ids, one)
        swa = made.worlds["swa"]
        load(swa, [4, 3], [1, 2], two)
        store(swa, [0], [1], two)
        move_all(made, False, {"full": ([1], [4]), "swa": ([0, 4], [3, 5])}, one)
        store(swa, [3], [5], two)
        finish_all(made)


def group_dropped(choose: Choose) -> None:
    """A group that is dropped with work in flight gives its memory back after that; a pool keeps it."""
    made = group_world(HYBRID, choose)
    ids = {"kv": ([0], [1]), "state": ([0], [1])}
    ticket = move_all(made, True, ids, {"kv": "zero_copy", "state": "staged"})
    kept = made.worlds.pop("kv")
    made.worlds.clear()
    del made.group
    gc.collect()
    made.driver.run()
    assert ticket.done()  # type: ignore[attr-defined]
    store(kept, [2], [2], "staged").wait()
    kept.compare_host([0, 2])
    del kept.pool
    gc.collect()
    made.driver.run()
    kept.check()


# ---- failures

MOVES: tuple[tuple[bool, str, dict[str, object]], ...] = (
    (True, "zero_copy", {}),
    (True, "staged", {}),
    (False, "zero_copy", {}),
    (False, "staged", {}),
    (False, "zero_copy", {"order": "layer"}),
)
SUBMITTING = ("allocate", "memory", "record", "wait", "copy", "upload", "fill", "launch")


def _attempt(made: World, stores: bool, path: str, how: dict[str, object], on_device: bool) -> bool:
    """A transfer of scattered tokens, or of pages by the staged path; whether it was submitted."""
    call = made.pool.write_back if stores else made.pool.load
    host, ids = [5, 4, 3, 2, 1, 0], [3, 6, 8, 9, 1, 5]
    if path == "staged" or on_device:
        host, ids = [0, 1, 2, 3, 4, 5], [8, 9, 2, 3, 4, 5]
    device = made.device_ids(ids, made.driver.caller) if on_device else torch.tensor(ids)
    try:
        call(torch.tensor(host), device, path=path, **how)
    except TransferError as error:
        assert set(error.pages) == {0, 1, 2}
        return False
    return True


def failed_half_way(choose: Choose) -> None:
    """A call that fails in the middle of a submission leaves the pool usable and everything in order."""
    for (stores, path, how), on_device in product(MOVES, (False, True)):
        for call in SUBMITTING:
            for skip in range(6):
                made = world(MLA, choose)
                store(made, [0, 1, 2, 3], [0, 1, 2, 3]).wait()
                made.driver.fail(call, skip)
                submitted = _attempt(made, stores, path, how, on_device)
                made.driver.heal()
                if submitted:
                    break
                elsewhere = made.driver.new_stream("elsewhere")
                later = [load, load, store] if stores else [store, store, load]
                for move in later:  # of other pages, for another stream: only staging memory is shared
                    stream = {"producer" if move is store else "readers": elsewhere}
                    move(made, [3], [6], "staged", **stream)
                produce(made, 0, 1, 2, 3, 4)  # over whatever the failed one still reads or writes
                store(made, [0, 1, 2], [1, 2, 3], "staged")
                load(made, [0, 1, 2], [5, 6, 7], "staged")
                ticket = load(made, [2, 1, 0], [0, 1, 2], order="layer")
                for position in (1, 2):  # told by a counter, and by the end of the load
                    ticket.wait_layer(made.config.layers[position], made.driver.caller)
                    made.read(made.driver.caller, made.tokens([0, 1, 2]), [position])
                finish(made, ticket)


def failed_half_way_in_shared_slots(choose: Choose) -> None:
    """The same for states, where both directions use the same slots of staging memory."""
    for stores in (True, False):
        for call in SUBMITTING:
            for skip in range(6):
                made = world(KDA, choose)
                store(made, [0, 1, 2, 3], [1, 2, 3, 4], "staged").wait()
                made.driver.fail(call, skip)
                move = made.pool.write_back if stores else made.pool.load
                device = torch.tensor([2, 3, 4] if stores else [5, 6, 7])
                try:
                    move(torch.tensor([0, 1, 2]), device, "page", path="staged")
                    break
                except TransferError:
                    made.driver.heal()
                elsewhere = made.driver.new_stream("elsewhere")
                for _ in range(2):  # each slot once
                    if stores:
                        load(made, [3], [1], "staged", readers=elsewhere)
                    else:
                        store(made, [4], [1], "staged", producer=elsewhere)
                produce(made, 2, 3, 4)
                store(made, [0, 1, 2], [2, 3, 4], "staged")
                finish(made, load(made, [0, 1, 2], [5, 6, 7], "staged"))


def device_lost(choose: Choose) -> None:
    """When the device answers nothing any more, what was submitted keeps what it may still touch."""
    for stores, path, how in MOVES:
        for call in ("record", "wait"):
            for skip in range(8):
                made = world(MLA, choose)
                store(made, [0, 1, 2], [0, 1, 2]).wait()
                made.driver.fail(call, skip, forever=True)
                if _attempt(made, stores, path, how, on_device=True):
                    break
                made.driver.run()


def failed_for_good(choose: Choose) -> None:
    """After an operation has failed, everything can still be given back, and who asks is told.

    What had been submitted beside the failed operation has run by then, whichever thread gives back.
    """
    for call, path, step in product(("clear", "destroy"), ("zero_copy", "staged"), range(10)):
        made = world(MLA, choose)
        good = store(made, [3, 4], [3, 4])
        good.wait()
        made.driver.fail_step(step)
        tickets = [store(made, [0, 1, 2], [0, 1, 2], "staged"), load(made, [3, 4], [5, 6], path)]
        errors: list[BaseException] = []

        def end(give: Callable[[], object], errors: list[BaseException] = errors) -> None:
            try:
                give()
            except BaseException as raised:
                errors.append(raised)

        thread = threading.Thread(target=end, args=(getattr(made.pool, call),))
        thread.start()
        thread.join()
        for error in errors:
            if not isinstance(error, PoolError):
                raise error
        if not errors:  # so many steps are none of these
            made.pool.destroy()
            continue
        assert "was made to fail" in str(errors[0])
        outcomes = [ticket.error is None and ticket.done() for ticket in tickets]
        assert False in outcomes and good.done()
        made.pool.destroy()
        made.pool.destroy()
        made.driver.run()


def failed_on_the_device(choose: Choose) -> None:
    """F067: no ticket behind an operation that failed says that it is done."""
    for stores, path, how in MOVES:
        for skip in range(8):
            made = world(MLA, choose)
            store(made, [0, 1, 2], [0, 1, 2]).wait()
            produce(made, 3, 4, 5)
            made.driver.run()
            made.driver.fail_step(skip)
            ticket = submit(made, stores, [0, 1, 2], [3, 4, 5], path, **how)
            try:
                poll(made, ticket)
            except TransferError as error:
                assert set(error.pages) == {0, 1, 2}
                with pytest.raises(TransferError):
                    ticket.wait(made.driver.caller)  # type: ignore[attr-defined]
                with pytest.raises(PoolError, match="was made to fail"):
                    made.pool.destroy()
                continue
            made.compare_host([0, 1, 2])
            made.compare_device({(layer, t) for layer in range(3) for t in made.tokens([3, 4, 5])})
            made.check()
            break


# ---- pages as bytes


def pages_read_and_filled(choose: Choose) -> None:
    """A page is handed out when its write-back has run, and filled when the loads that read it have."""
    made = world(MLA, choose)
    produce(made, 1, 2, 3)
    store(made, [0, 1, 2], [1, 2, 3]).detach()
    made.pool.get_data_page(made.page_size)
    made.compare_host([1])
    store(made, [3], [2], "staged")
    made.pool.page_objects(3)
    made.compare_host([3])
    load(made, [0, 1], [4, 5], "staged")
    load(made, [0], [6], order="layer")
    made.pool.set_from_flat_data_page(0, made.pool.get_dummy_flat_data_page())
    for at, width, *_ in made.host_rows(0):
        made.driver.cpu("filling of host page 0", at, width, writes=True)
    for layer in made.host:
        layer[: made.page_size] = [None] * made.page_size
    finish(made)


def compared(choose: Choose) -> None:
    """`validate="full"` compares what the transfer left, whatever is written as soon as it may be."""
    made = world(MLA, choose)
    produce(made, 1, 2, 3)
    one = store(made, [0, 1, 2], [1, 2, 3], validate="full")
    one.captured.wait(made.driver.caller)
    produce(made, 1, 2, 3)
    two = store(made, [0, 1, 2], [2, 3, 1], "staged", validate="full")
    three = load(made, [2, 1], [6, 7], order="layer", validate="full")
    three.wait_layer(made.config.layers[0], made.driver.caller)
    produce(made, 6, 7)
    made.driver.fail("launch", skip=1)  # the transfer is submitted, its comparison is not
    with pytest.raises(TransferError):
        made.pool.write_back(torch.tensor([4]), torch.tensor([0]), "page", path="zero_copy", validate="full")
    finish(made, one, two, three)


def engines_names(choose: Choose) -> None:
    """What an engine records in its stream behind a call by its own name stands for bytes that are there."""
    made = world(MLA, choose)
    host, device = torch.tensor(made.tokens([0, 1])), torch.tensor(made.tokens([2, 3]))
    produce(made, 2, 3)
    made.pool.backup_from_device_all_layer(None, host, device, "kernel")
    made.stored(host.tolist(), device.tolist())
    produce(made, 2, 3)  # may overwrite the rows
    made.driver.synchronize(made.driver.record(made.driver.caller))
    made.compare_host([0, 1])
    for layer in made.config.layers:
        made.pool.load_to_device_per_layer(None, host, device, layer, "direct")
    made.loaded(host.tolist(), device.tolist(), made.config.layers)
    read(made, 2, 3)
    finish(made)


SCENARIOS: tuple[Scenario, ...] = (
    *(references_dropped, tensors_replaced, pool_destroyed, pool_dropped, orders_forgotten),
    *(late_layer_wait, bound_at_once),
    *(
        producer,
        readers,
        ids_on_device,
        memory_handed_out_again,
        captured,
        waited_in_a_stream,
        waited_on_the_cpu,
    ),
    *(store_then_load, two_stores, nothing_stored, ring_reuse, many_in_flight, free_in_flight, cleared),
    *(timed_from_its_start, layers_in_turn, layers_on_the_cpu, other_threads, failed_for_good),
    *(capturing, capturing_beside),
    *(state_captured, state_in_parts, loads_in_layers, layers_staged),
    *(ids_checked_on_the_device, many_layers, counters_go_round),
    *(group_captured, group_in_parts, group_layers_staged, group_layers, group_and_pool, group_dropped),
    *(pages_read_and_filled, compared, engines_names),
)

FAILURES: tuple[Scenario, ...] = (
    *(device_lost, failed_on_the_device, failed_half_way, failed_half_way_in_shared_slots),
)
"""Scenarios that fail at every call in turn: a hundred lives each."""
