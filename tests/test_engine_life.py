"""What an engine does with pools besides moving pages: compile its model, let go of its cache, import."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import ROOT
from simulation import CONFIGS, GROUPS, first, group_world, world

from poolwright.generated.pools.mla.pool import MLATokenToKVPoolHost
from poolwright.runtime.controller import CacheController
from poolwright.runtime.errors import PoolError


def test_the_core_does_not_know_controllers_and_importing_them_does_no_work() -> None:
    core = [path for path in (ROOT / "runtime").glob("*.py") if path.name != "__main__.py"]
    core += (ROOT / "runtime" / "driver").glob("*.py")
    core += (ROOT / "runtime" / "storage").glob("*.py")
    assert not [path.name for path in core if "runtime.controller" in path.read_text(encoding="utf-8")]
    script = (
        "import sys, threading, poolwright.runtime.controller;"
        "assert threading.active_count() == 1 and not torch_compiler() and not torch.cuda.is_initialized()"
    )
    script = f"import torch, sys; torch_compiler = lambda: 'torch._dynamo' in sys.modules; {script}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / ".src"), *sys.path])}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


# ---- torch.compile


@pytest.fixture
def bound() -> Iterator[tuple[Any, list[torch.Tensor]]]:
    sizes: dict[str, Any] = {"kv_lora_rank": 3, "qk_rope_head_dim": 2, "dtype": torch.bfloat16}
    pool = MLATokenToKVPoolHost(**sizes, layers=range(3), page_size=2, capacity_pages=4, device="cpu")
    rows = [torch.randn(12, 5).to(torch.bfloat16) for _ in range(3)]
    pool.bind({"kv": rows})
    yield pool, rows
    pool.destroy()


def test_compiled_functions_call_pools_as_others_do(bound: Any) -> None:
    """Also where the compiler warns of everything that it cannot trace: it never gets to look inside."""
    pool, rows = bound
    controller = CacheController(pool)
    here, there = torch.arange(4), torch.arange(4, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        stored = controller.write(here)
        assert stored is not None
        controller.start_writing().wait_all()
        controller.pop_acks()
        controller.load(stored.host[pool.name], there)
        flight = controller.start_loading()
        for layer in range(3):
            flight.wait_layer(layer)
            x = x * 2 + rows[layer][4:8].float().sum()
        controller.pop_acks()
        ticket = pool.load(stored.host[pool.name], here + 8, order="layer")
        ticket.wait_layer(1)
        ticket.wait_all()
        controller.free(stored.host[pool.name])
        return x + rows[1][8:12].float().sum()

    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(step, backend="eager")
    for _ in range(3):
        for row in rows:
            row[:4].normal_()
        found = compiled(torch.ones(2))
        for row in rows:
            assert torch.equal(row[4:8], row[:4]) and torch.equal(row[8:12], row[:4])
        assert torch.equal(found, step(torch.ones(2)))


def test_a_whole_graph_refuses_what_is_opaque(bound: Any) -> None:
    pool, _ = bound
    ids = torch.arange(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        pool.write_back(ids, ids)
        return x + 1

    with pytest.raises(Exception, match="write_back"):
        torch.compile(step, backend="eager", fullgraph=True)(torch.ones(2))


# ---- sleep and wake


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_unbind_lets_the_tensors_go_and_pages_stay(config: Any) -> None:
    made = world(config, random.Random(1).randrange)
    held = weakref.ref(next(iter(made.tensors.values()))[0])
    ids = made.pool.alloc(2 * config.page_size)
    device = torch.tensor(made.tokens([2, 3]))
    made.produce(made.driver.caller, device.tolist())
    made.pool.write_back(ids, device)  # in flight, and nobody holds its ticket
    made.stored(ids.tolist(), device.tolist())
    made.tensors = {}
    made.driver.run()
    made.pool.unbind()
    gc.collect()
    assert held() is None
    for call in (made.pool.write_back, made.pool.load):
        with pytest.raises(PoolError, match=r"no device tensors; call bind\(\)"):
            call(ids, device)
    made.pool.unbind()
    made.bind(drain=False)
    made.compare_host([0, 1])
    made.pool.load(ids, device).wait(made.driver.caller)
    made.loaded(ids.tolist(), device.tolist(), range(len(config.layers)))
    made.settle()
    made.check()
    made.pool.destroy()


def test_unbind_waits_for_what_is_in_flight() -> None:
    made = world(CONFIGS[0], first)
    ids = made.pool.alloc(2)
    ticket = made.pool.write_back(ids, torch.arange(2))
    made.pool.unbind()
    assert all(not s.queue for s in made.driver._streams if s is not made.driver.caller) and ticket.done()


def test_unbind_after_a_failure_lets_the_tensors_go_all_the_same() -> None:
    made = world(CONFIGS[0], first)
    made.driver.fail_step()
    made.pool.write_back(made.pool.alloc(2), torch.arange(2))
    with pytest.raises(PoolError, match="was made to fail"):
        made.pool.unbind()
    with pytest.raises(PoolError, match="no device tensors"):
        made.pool.load(torch.arange(2), torch.arange(2))


@pytest.mark.parametrize("config", GROUPS, ids=lambda config: config.label)
def test_a_group_unbinds_all_its_pools(config: Any) -> None:
    made = group_world(config, first)
    member = next(iter(made.group.pools.values()))
    with pytest.raises(PoolError, match=r"belongs to the group .*: unbind the group"):
        member.unbind()
    made.group.unbind()
    with pytest.raises(PoolError, match="no device tensors"):
        member.load(torch.arange(member.page_size), torch.arange(member.page_size))
    made.bind()
    for one in made.worlds.values():
        one.settle()
        one.check()
