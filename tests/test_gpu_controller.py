"""On a CUDA device: controllers, and the life of pools in an engine: threads, forks, captures, sleep.

Needs torch and a GPU. Run ``pytest -m gpu tests/test_gpu_controller.py``.
"""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from poolwright.generated.groups.qwen3_next import Qwen3NextHostPoolGroup
from poolwright.runtime.controller import HybridCacheController
from poolwright.runtime.errors import PoolError, WrongProcess

pytestmark = pytest.mark.gpu

P, PAGES, DEVICE_PAGES = 16, 40, 64
FULL, LINEAR = (3, 7), (0, 1, 2, 4, 5, 6)
SPIN = 200_000_000  # cycles: about 0.1 s, longer than any transfer here


def build() -> Any:
    return Qwen3NextHostPoolGroup(
        full_attention_layers=FULL,
        linear_attention_layers=LINEAR,
        page_size=P,
        kv={"heads": 2, "head_dim": 32, "v_head_dim": 24, "dtype": torch.bfloat16},
        state={
            **{"k_heads": 2, "v_heads": 4, "k_head_dim": 16, "v_head_dim": 16, "kernel": 4},
            **{"ssm_dtype": torch.float32, "conv_dtype": torch.bfloat16},
        },
        capacity_pages={"kv": PAGES, "state": PAGES},
        staging_bytes=1 << 20,
        device="cuda:0",
        require="cuda",
    )


def tensors() -> dict[str, dict[str, Any]]:
    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    kv = {n: [random(DEVICE_PAGES * P, 2, d) for _ in FULL] for n, d in (("k", 32), ("v", 24))}
    state = {"temporal": random(len(LINEAR), DEVICE_PAGES, 4, 16, 16, dtype=torch.float32)}
    return {"kv": kv, "state": state | {"conv": random(len(LINEAR), DEVICE_PAGES, 128, 3)}}


@pytest.fixture
def bound() -> Iterator[tuple[Any, dict[str, dict[str, Any]]]]:
    group, given = build(), tensors()
    group.bind(given)
    yield group, given
    group.destroy()


def tokens(*pages: int) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * P + torch.arange(P)).flatten()


def rows_of(given: dict[str, dict[str, Any]], pages: list[int], slot: int) -> list[torch.Tensor]:
    """What lies in these pages and this slot, by layer id."""
    where = tokens(*pages).cuda()
    by_layer: dict[int, list[torch.Tensor]] = {}
    for at, layer in enumerate(FULL):
        by_layer[layer] = [given["kv"][name][at][where].clone() for name in ("k", "v")]
    for at, layer in enumerate(LINEAR):
        by_layer[layer] = [given["state"][name][at, slot].clone() for name in ("temporal", "conv")]
    return [torch.cat([each.flatten().float() for each in by_layer[layer]]) for layer in sorted(by_layer)]


def wait(controller: HybridCacheController, count: int, direction: str | None = None) -> list[Any]:
    while controller.ready(direction) < count:
        pass
    return controller.pop_acks(count, direction)


@pytest.mark.parametrize("places", list(itertools.product("cd", repeat=2)), ids="".join)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_merged_operations_arrive_layer_by_layer(
    bound: Any, places: tuple[str, str], dtype: torch.dtype
) -> None:
    """Ids on the CPU or the device in one batch; the rows change as soon as they are captured."""
    group, given = bound
    controller = HybridCacheController(group)
    pages = [[4, 9], [30, 31, 2]]
    before = [rows_of(given, each, slot) for each, slot in zip(pages, (5, 6), strict=True)]

    def ids(of: torch.Tensor, place: str) -> torch.Tensor:
        return of.to(dtype).cuda() if place == "d" else of.to(dtype)

    made = [
        controller.write({"kv": ids(tokens(*each), place), "state": ids(torch.tensor([slot]), place)})
        for each, slot, place in zip(pages, (5, 6), places, strict=True)
    ]
    torch.cuda._sleep(SPIN)
    stream = torch.cuda.current_stream()
    controller.start_writing(producer=stream).wait_captured(stream)
    for name, parts in given.items():
        for part in parts.values():
            for each in part if name == "kv" else [part]:
                each.zero_()
    assert [ack.error for ack in wait(controller, 2)] == [None, None]
    targets = [[11, 12], [40, 20, 21]]
    for operation, each, slot, place in zip(made, targets, (8, 9), places, strict=True):
        assert operation is not None
        moves = {"kv": (operation.host["kv"], ids(tokens(*each), place))}
        controller.load(moves | {"state": (operation.host["state"], ids(torch.tensor([slot]), place))})
    flight = controller.start_loading(readers=stream)
    seen: list[list[torch.Tensor]] = [[], []]
    for layer in range(8):
        flight.wait_layer(layer, stream)
        for found, each, slot in zip(seen, targets, (8, 9), strict=True):
            found.append(rows_of(given, each, slot)[layer])
    for found, expected in zip(seen, before, strict=True):
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs)
    wait(controller, 2)
    shown: Any = controller.statistics()
    assert all(shown[name][way]["gb_per_s"] > 0 for name in group.pools for way in ("write_back", "load"))


def test_captures_are_refused_and_a_wait_stands_before_a_replay(bound: Any) -> None:
    group, given = bound
    controller = HybridCacheController(group)
    before = given["kv"]["k"][0][: 2 * P].clone()
    operation = controller.write({"kv": tokens(0, 1)})
    assert operation is not None
    rows, out = given["kv"]["k"][0][20 * P : 22 * P], torch.empty_like(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(rows)
        with pytest.raises(PoolError, match="cannot be captured"):
            controller.start_writing()
    controller.start_writing()
    wait(controller, 1)
    controller.load({"kv": (operation.host["kv"], tokens(20, 21))})
    controller.start_loading(order="bulk").wait_all(torch.cuda.current_stream())
    graph.replay()
    assert torch.equal(out, before)
    wait(controller, 1)


def test_a_group_is_built_and_bound_in_another_thread() -> None:
    made: list[Any] = []
    given = tensors()

    def work() -> None:
        group = build()
        group.bind(given)
        made.append(group)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (group,) = made
    host, before = group.alloc({"kv": P}), given["kv"]["v"][1][:P].clone()
    group.write_back({"kv": (host["kv"], tokens(0))}).wait()
    group.load({"kv": (host["kv"], tokens(3))}).wait()
    assert torch.equal(given["kv"]["v"][1][3 * P : 4 * P], before)
    group.destroy()


def test_sleep_gives_the_memory_back_and_waking_finds_the_pages(bound: Any) -> None:
    group, given = bound
    controller = HybridCacheController(group)
    before = rows_of(given, [1, 2], 3)
    operation = controller.write({"kv": tokens(1, 2), "state": torch.tensor([3])})
    assert operation is not None
    controller.start_writing()
    wait(controller, 1)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    size = sum(each.numel() * each.element_size() for part in given["kv"].values() for each in part)
    group.unbind()
    given.clear()
    assert torch.cuda.memory_allocated() <= held - size
    given |= tensors()
    group.bind(given)
    moves = {
        "kv": (operation.host["kv"], tokens(7, 8)),
        "state": (operation.host["state"], torch.tensor([0])),
    }
    controller.load(moves)
    controller.start_loading().wait_all()
    for mine, theirs in zip(rows_of(given, [7, 8], 0), before, strict=True):
        assert torch.equal(mine, theirs)


def test_a_fork_is_told(bound: Any) -> None:
    controller = HybridCacheController(bound[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks in processes with threads
        child = os.fork()
    if child == 0:
        calls: list[Callable[[], object]] = [controller.start_writing, controller.pop_acks, controller.reset]
        told = 0
        for call in calls:
            try:
                call()
            except WrongProcess:
                told += 1
        os._exit(0 if told == len(calls) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_reset_with_work_in_flight(bound: Any) -> None:
    group, _ = bound
    controller = HybridCacheController(group)
    torch.cuda._sleep(SPIN)
    for page in range(8):
        controller.write({"kv": tokens(page)})
        controller.start_writing()
    assert len(controller.reset()) == 8
    assert group.available_size() == {"kv": PAGES * P, "state": PAGES} and controller.ready() == 0


def test_compiled_functions_wait_for_layers(bound: Any) -> None:
    group, given = bound
    controller = HybridCacheController(group)
    before = given["kv"]["k"][0][:P].float().sum()
    operation = controller.write({"kv": tokens(0)})
    assert operation is not None
    controller.start_writing()
    wait(controller, 1)
    controller.load({"kv": (operation.host["kv"], tokens(9))})
    flight, stream = controller.start_loading(), torch.cuda.current_stream()

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        flight.wait_layer(3, stream)
        return x + given["kv"]["k"][0][9 * P : 10 * P].float().sum()

    assert torch.equal(step(torch.zeros((), device="cuda")), before + 1)
    wait(controller, 1)
