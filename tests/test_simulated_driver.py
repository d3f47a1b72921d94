"""The simulated driver: what it permits, and what it reports."""

from __future__ import annotations

import ctypes
import random
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from simulation import CONFIGS, first, last, world

from poolwright.generated.pools.mha.pool import MHATokenToKVPoolHost
from poolwright.generated.pools.mla.pool import MLATokenToKVPoolHost
from poolwright.runtime import env
from poolwright.runtime import pool as pools
from poolwright.runtime.driver import Memory
from poolwright.runtime.driver.host import HostDriver
from poolwright.runtime.driver.simulated import CALLS, SimulatedDriver, SimulatedStream, runs_of
from poolwright.runtime.driver.simulated_memory import SimulationError
from poolwright.runtime.errors import PoolError
from poolwright.runtime.memory import PAGE
from poolwright.runtime.testing import driver_in_use, use_driver

SIX_LAYERS = replace(CONFIGS[0], layers=tuple(range(6)))


def numbers(memory: Memory) -> list[int]:
    return list((ctypes.c_uint32 * (memory.nbytes // 4)).from_address(memory.address))


def put(driver: SimulatedDriver, stream: SimulatedStream, memory: Memory, value: int) -> None:
    driver.fill(memory.address, value, memory.nbytes // 4, stream)


@pytest.fixture
def driver() -> SimulatedDriver:
    return SimulatedDriver(random.Random(3).randrange)


class HostBytes:
    """Registered host memory."""

    def __init__(self, driver: SimulatedDriver, nbytes: int) -> None:
        self.held = (ctypes.c_uint8 * nbytes)()
        self.address = driver.register(ctypes.addressof(self.held), nbytes)


# ---- order


def test_nothing_runs_when_it_is_submitted(driver: SimulatedDriver) -> None:
    memory = driver.allocate(8)
    before = numbers(memory)
    put(driver, driver.stream(), memory, 7)
    assert numbers(memory) == before
    driver.run()
    assert numbers(memory) == [7, 7]


def test_a_stream_keeps_its_order(driver: SimulatedDriver) -> None:
    stream, seen = driver.new_stream("s"), list[int]()
    for turn in range(5):
        driver.compute(stream, "work", lambda turn=turn: seen.append(turn))
    driver.run()
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("choose", "expected"), [(first, ["a", "b"]), (last, ["b", "a"])])
def test_streams_run_in_the_chosen_order(choose: Callable[[int], int], expected: list[str]) -> None:
    driver, seen = SimulatedDriver(choose), list[str]()
    for name in ("a", "b"):
        driver.compute(driver.new_stream(name), name, lambda name=name: seen.append(name))
    driver.run()
    assert seen == expected


@pytest.mark.parametrize("choose", [first, last])
def test_a_wait_orders_two_streams(choose: Callable[[int], int]) -> None:
    driver = SimulatedDriver(choose)
    memory, one, two = driver.allocate(4), driver.stream(), driver.stream()
    put(driver, one, memory, 1)
    driver.wait(two, driver.record(one))
    put(driver, two, memory, 2)
    driver.run()
    assert numbers(memory) == [2]


@pytest.mark.parametrize("choose", [first, last])
def test_without_a_wait_two_writers_race(choose: Callable[[int], int]) -> None:
    driver = SimulatedDriver(choose)
    memory = driver.allocate(4)
    put(driver, driver.stream(), memory, 1)
    put(driver, driver.stream(), memory, 2)
    with pytest.raises(SimulationError, match=r"race: fill .* overwrites .* is written by fill"):
        driver.run()


@pytest.mark.parametrize("choose", [first, last])
def test_a_reader_and_a_writer_race_in_either_order(choose: Callable[[int], int]) -> None:
    driver = SimulatedDriver(choose)
    memory, writer = driver.allocate(16), driver.stream()
    put(driver, writer, memory, 1)
    driver.synchronize(driver.record(writer))
    place = [(memory.address + 4, 4)]
    driver.compute(driver.new_stream("r"), "reader", lambda: None, reads=place)
    put(driver, writer, memory, 2)
    with pytest.raises(SimulationError, match=r"race: .*reader"):
        driver.run()


def test_neighbouring_bytes_do_not_race(driver: SimulatedDriver) -> None:
    memory = driver.allocate(8)
    driver.fill(memory.address, 1, 1, driver.stream())
    driver.fill(memory.address + 4, 2, 1, driver.stream())
    driver.run()
    assert numbers(memory) == [1, 2]


def test_what_the_cpu_waited_for_is_behind_it(driver: SimulatedDriver) -> None:
    memory, one, two = driver.allocate(4), driver.stream(), driver.stream()
    put(driver, one, memory, 1)
    event = driver.record(one)
    with pytest.raises(SimulationError, match=r"race: look on the CPU|nobody has written"):
        driver.cpu("look", memory.address, 4)
    while not driver.done(event):
        driver.run(1)
    driver.cpu("look", memory.address, 4)
    put(driver, two, memory, 2)
    driver.run()
    assert numbers(memory) == [2]


def test_a_value_wait_sees_the_steps_up_to_its_value() -> None:
    made = world(SIX_LAYERS, random.Random(1).randrange)
    made.pool.write_back(torch.tensor([0]), torch.tensor([1]), "page").wait()
    ticket = made.pool.load(torch.tensor([0]), torch.tensor([2]), "page", order="layer")
    reader = made.driver.new_stream("reader")
    ticket.wait_layer(1, reader)
    place = made.rows(made.tokens([2]), [3])  # layers 1 and 2 are small enough to come together
    made.driver.compute(reader, "reader of layer 3", lambda: None, reads=place)
    with pytest.raises(SimulationError, match="race"):
        made.driver.run()


def test_layers_are_told_in_turn_and_small_ones_together() -> None:
    made = world(SIX_LAYERS, first)
    made.pool.write_back(torch.tensor([0]), torch.tensor([1]), "page").wait()
    ticket = made.pool.load(torch.tensor([0]), torch.tensor([2]), "page", order="layer")
    streams = [made.driver.new_stream(f"layer {layer}") for layer in SIX_LAYERS.layers]
    events = []
    for layer, stream in enumerate(streams):
        ticket.wait_layer(layer, stream)
        events.append(made.driver.record(stream))
    told = []
    for _ in range(10):  # the first step writes the numbers of the steps
        told.append(sum(made.driver.done(event) for event in events))
        made.driver.run(1)
    # Layer 0 in a launch of its own, the others by two: blocks that are early count and have moved nothing.
    assert told == [0, 0, 1, 1, 3, 3, 5, 5, 6, 6]
    ticket.wait()


def test_a_deadlock_names_who_waits(driver: SimulatedDriver) -> None:
    memory, stream = driver.allocate(4), driver.new_stream("stuck")
    put(driver, driver.caller, memory, 1)
    driver.synchronize(driver.record(driver.caller))
    driver.wait_value(stream, memory.address, 2)
    event = driver.record(stream)
    assert not driver.done(event)
    with pytest.raises(SimulationError, match=r"deadlock: .*event .* of stuck.*stuck: wait for 2 at 0x"):
        driver.synchronize(event)
    with pytest.raises(SimulationError, match="deadlock"):
        driver.run()


# ---- memory


def test_bytes_that_nobody_wrote_are_not_read(driver: SimulatedDriver) -> None:
    memory = driver.allocate(8)
    driver.fill(memory.address, 1, 1, driver.caller)
    driver.compute(driver.caller, "reader", lambda: None, reads=[(memory.address, 8)])
    with pytest.raises(
        SimulationError, match=r"reader .* reads byte 4 of device memory .* nobody has written"
    ):
        driver.run()


def test_freed_memory_is_not_used(driver: SimulatedDriver) -> None:
    memory = driver.allocate(8)
    put(driver, driver.caller, memory, 1)
    del memory
    with pytest.raises(SimulationError, match=r"fill .* uses memory of device memory .* was freed at .*:\d+"):
        driver.run()


def test_a_view_keeps_memory(driver: SimulatedDriver) -> None:
    tensor = driver.tensor((4, 2), torch.float32)[1:3]
    driver.compute(driver.caller, "writer", lambda: tensor.fill_(1), writes=runs_of(tensor))
    driver.run()
    assert tensor.eq(1).all()


def test_memory_of_nobody_is_not_used(driver: SimulatedDriver) -> None:
    memory = driver.allocate(8)
    driver.fill(memory.address, 1, 3, driver.caller)
    with pytest.raises(SimulationError, match="which belong to nothing"):
        driver.run()


def test_unregistered_memory_is_not_used(driver: SimulatedDriver) -> None:
    memory, host = driver.allocate(8), HostBytes(driver, 8)
    put(driver, driver.caller, memory, 1)
    driver.copy([host.address], [memory.address], [8], driver.caller, inward=False)
    driver.unregister(host.address)
    with pytest.raises(SimulationError, match=r"host memory .* was unregistered"):
        driver.run()
    assert driver.register(host.address, 8) == host.address


def test_kernels_cross_registrations_side_by_side_and_copies_do_not(driver: SimulatedDriver) -> None:
    held, memory = (ctypes.c_uint8 * 12)(), driver.allocate(8)
    address = ctypes.addressof(held)
    for start in (0, 4):
        driver.register(address + start, 4)
    driver.cpu("first contents", address + 2, 4, writes=True)
    driver.compute(driver.caller, "kernel", lambda: None, reads=[(address + 2, 4)], writes=[(address, 8)])
    driver.run()
    driver.synchronize(driver.record(driver.caller))
    driver.cpu("comparison", address, 8)
    with pytest.raises(SimulationError, match=r"copy touches 4 bytes at .*, which belong to nothing"):
        driver.copy([memory.address], [address + 2], [4], driver.caller, inward=True)
    driver.compute(driver.caller, "kernel", lambda: None, reads=[(address + 2, 8)])
    with pytest.raises(SimulationError, match=r"kernel .* which belong to nothing"):
        driver.run()


def test_uploads_take_the_numbers_at_once(driver: SimulatedDriver) -> None:
    memory, values = driver.allocate(8), array("I", [5, 6])
    driver.upload(memory.address, values, driver.caller)
    values[0] = 9
    driver.run()
    assert numbers(memory) == [5, 6]


def test_runs_of_a_strided_tensor(driver: SimulatedDriver) -> None:
    tensor = driver.tensor((4, 3), torch.int16)
    base = tensor.data_ptr()
    assert list(runs_of(tensor)) == [(base, 24)]
    assert list(runs_of(tensor[::2, :2])) == [(base, 4), (base + 12, 4)]


# ---- copies


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_arrives_whole_however_it_is_cut(seed: int) -> None:
    driver = SimulatedDriver(random.Random(seed).randrange)
    memory, host = driver.allocate(64), HostBytes(driver, 64)
    driver.upload(memory.address, array("B", range(64)), driver.caller)
    starts, sizes = [0, 10, 30, 31], [10, 20, 1, 33]
    driver.copy(
        *([host.address + at for at in starts], [memory.address + at for at in starts], sizes),
        *(driver.caller, False),
    )
    driver.run()
    assert bytes(host.held) == bytes(range(64))


def test_a_batch_is_seen_half_done() -> None:
    seen = set()
    for seed in range(20):
        driver = SimulatedDriver(random.Random(seed).randrange)
        memory, host = driver.allocate(8), HostBytes(driver, 8)
        driver.upload(memory.address, array("B", range(1, 9)), driver.caller)
        driver.run()
        driver.copy([host.address], [memory.address], [4], driver.caller, False)
        driver.copy([host.address + 4], [memory.address + 4], [4], driver.caller, False)
        driver.run(1)
        seen.add(sum(value > 0 for value in host.held))
    assert seen > {4} and max(seen) < 8


def test_copied_padding_stays_unwritten(driver: SimulatedDriver) -> None:
    memory, host = driver.allocate(8), HostBytes(driver, 8)
    driver.fill(memory.address, 1, 1, driver.caller)
    driver.copy([host.address], [memory.address], [8], driver.caller, False)
    driver.synchronize(driver.record(driver.caller))
    driver.cpu("look", host.address, 4)
    with pytest.raises(SimulationError, match="reads byte 4 of host memory"):
        driver.cpu("look", host.address, 8)


def test_a_copy_of_the_wrong_direction_is_reported(driver: SimulatedDriver) -> None:
    memory, host = driver.allocate(8), HostBytes(driver, 8)
    with pytest.raises(SimulationError, match="expected device memory, got host memory"):
        driver.copy([host.address], [memory.address], [8], driver.caller, inward=True)


# ---- failures


def _every_call(driver: SimulatedDriver) -> dict[str, Callable[[], object]]:
    memory, host = driver.allocate(8), HostBytes(driver, 8)
    event, stream = driver.record(driver.caller), driver.caller
    more = (ctypes.c_uint8 * 8)()
    return {
        "allocate": lambda: driver.allocate(8),
        "register": lambda: driver.register(ctypes.addressof(more), 8),
        "stream": driver.stream,
        "record": lambda: driver.record(stream),
        "wait": lambda: driver.wait(stream, event),
        "done": lambda: driver.done(event),
        "synchronize": lambda: driver.synchronize(event),
        "copy": lambda: driver.copy([memory.address], [host.address], [8], stream, True),
        "upload": lambda: driver.upload(memory.address, array("I", [1]), stream),
        "fill": lambda: driver.fill(memory.address, 1, 1, stream),
        "wait_value": lambda: driver.wait_value(stream, memory.address, 1),
        "launch": lambda: driver.enqueue("launch", "kernel", stream, []),
    }


@pytest.mark.parametrize("name", [*CALLS, "any"])
def test_any_call_can_fail(driver: SimulatedDriver, name: str) -> None:
    calls = _every_call(driver)
    call = calls["allocate" if name == "any" else name]
    driver.fail(name)
    with pytest.raises(PoolError, match="was made to fail"):
        call()
    driver.fail(name, skip=1, forever=True)
    call()
    for _ in range(3):
        with pytest.raises(PoolError, match="was made to fail"):
            call()
    driver.heal()
    assert name == "register" or call() is not NotImplemented


def test_what_is_behind_a_failed_operation_fails(driver: SimulatedDriver) -> None:
    memory, one, two = driver.allocate(4), driver.stream(), driver.stream()
    put(driver, one, memory, 1)
    before = driver.record(one)
    driver.synchronize(before)
    driver.fail_step()
    put(driver, one, memory, 2)
    driver.wait(two, driver.record(one))
    event = driver.record(two)
    for ask in (driver.synchronize, driver.done):
        with pytest.raises(PoolError, match=r"fill .* was made to fail"):
            ask(event)
    driver.synchronize(before)
    assert numbers(memory) == [1]


def test_a_counter_that_never_comes_fails_who_waits_for_it() -> None:
    made = world(SIX_LAYERS, first)
    made.pool.write_back(torch.tensor([0]), torch.tensor([1]), "page").wait()
    ticket = made.pool.load(torch.tensor([0]), torch.tensor([2]), "page", order="layer")
    made.driver.fail_step(2)  # of the launch that counts
    with pytest.raises(PoolError, match=r"load of 1 pages .*was made to fail"):
        ticket.wait_layer(2)
    with pytest.raises(PoolError, match="was made to fail"):
        ticket.done()
    with pytest.raises(PoolError, match="was made to fail"):
        made.pool.destroy()


def test_another_thread_needs_the_guard(driver: SimulatedDriver) -> None:
    found: list[object] = []

    def work() -> None:
        memory, stream = driver.allocate(4), driver.stream()  # these see to it themselves
        try:
            driver.fill(memory.address, 0, 1, stream)
        except SimulationError as error:
            found.append(str(error))
        with driver.guard():
            driver.fill(memory.address, 0, 1, stream)
            found.append(memory.nbytes)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == ["fill from a thread whose current device is another one, unguarded", 4]


def test_torch_operations_are_refused(driver: SimulatedDriver) -> None:
    with pytest.raises(PoolError, match="take another path"):
        driver.torch_stream(driver.caller)


# ---- pools


def test_pools_take_the_driver_that_is_in_use(driver: SimulatedDriver) -> None:
    sizes = {"kv_lora_rank": 3, "qk_rope_head_dim": 2, "dtype": torch.bfloat16, "layers": range(2)}
    with use_driver(driver):
        assert driver_in_use() is driver
        pool = MLATokenToKVPoolHost(**sizes, page_size=2, capacity_pages=2)
    assert driver_in_use() is None
    report = {path.path: path.available for path in pool.path_report()}
    assert report == {"zero_copy": True, "staged": True, "host": False, "torch": True}
    assert pool._shared.code.driver is driver
    pool.destroy()
    plain = MLATokenToKVPoolHost(**sizes, page_size=2, capacity_pages=2)
    assert isinstance(plain._shared.code.driver, HostDriver)
    plain.destroy()


@pytest.mark.parametrize("component_pages", [(PAGE, PAGE), (PAGE, 3 * PAGE), (PAGE // 2, 3 * PAGE // 2)])
def test_no_copy_crosses_two_registrations(
    driver: SimulatedDriver, component_pages: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbouring pages are copied together, except where the registration of host memory ends between them;
    the driver refuses a range that lies in two registrations."""
    monkeypatch.setattr(env, "number", lambda name: 5 * PAGE if name == "REGISTER_CHUNK_GB" else 0)
    monkeypatch.setattr(pools, "GIB", 1)
    copied: list[int] = []
    copy = driver.copy

    def watched(
        to: Sequence[int], source: Sequence[int], sizes: Sequence[int], *rest: Any, **more: Any
    ) -> None:
        copied.extend(sizes)
        copy(to, source, sizes, *rest, **more)

    monkeypatch.setattr(driver, "copy", watched)
    pages, sizes = 8, [nbytes // 4 for nbytes in component_pages]
    widths = dict(zip(("head_dim", "v_head_dim"), sizes, strict=True))
    with use_driver(driver):
        pool = MHATokenToKVPoolHost(
            heads=1, **widths, dtype=torch.bfloat16, layers=[0], page_size=2, capacity_pages=pages
        )
    assert len(pool._transfers.members[0].buffer.borders) >= 2
    tensors = {
        name: [driver.tensor((pages * 2, 1, width), torch.bfloat16)]
        for name, width in zip(("k", "v"), sizes, strict=True)
    }
    for (tensor,) in tensors.values():
        driver.cpu("first contents", tensor.data_ptr(), tensor.nbytes, writes=True)
        tensor.view(torch.uint8).copy_(torch.randint(0, 256, tensor.view(torch.uint8).shape))
    kept = [tensor.clone() for (tensor,) in tensors.values()]
    pool.bind(tensors)
    ids = torch.arange(pages)
    pool.write_back(ids, ids, unit="page", path="staged").wait()
    assert sum(copied) == pages * sum(component_pages)
    assert max(copied) > max(component_pages)
    for (tensor,) in tensors.values():
        driver.cpu("clear", tensor.data_ptr(), tensor.nbytes, writes=True)
        tensor.zero_()
    pool.load(ids, ids, unit="page", path="staged").wait()
    for (tensor,), before in zip(tensors.values(), kept, strict=True):
        assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))
    pool.destroy()


@pytest.mark.parametrize("path", ["zero_copy", "staged"])
@pytest.mark.parametrize("wrong", [-1, -(1 << 40), (1 << 32) + 3, (1 << 63) - 1])
def test_page_ids_on_the_device_that_no_32_bits_hold_move_nothing(path: str, wrong: int) -> None:
    """Cut to 32 bits, `wrong` would be another page, which the model finds changed."""
    made = world(CONFIGS[0], first)
    host, given = torch.arange(2), [wrong, 6]
    mine, theirs = made.tokens([1]), made.tokens([6])
    made.pool.write_back(host, made.device_ids(given, made.driver.caller), "page", path=path).wait()
    made.stored(mine, theirs)
    made.produce(made.driver.caller, made.tokens(range(8)))
    made.pool.load(host, made.device_ids(given, made.driver.caller), "page", path=path).wait()
    made.loaded(mine, theirs, range(3))
    made.compare_host(range(5))
    made.settle()
    made.check()
