"""Groups: sizes and budgets, allocation all or nothing, one call for all pools, whatever paths they take.

Races of groups are in test_races; here bytes, contracts and counts are checked, on the CPU and on the
simulated driver.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import GROUPS, first, group_world

import poolwright.generated as generated
from poolwright.generated import MLATokenToKVPoolHost
from poolwright.runtime import jit, memory, toolchain
from poolwright.runtime.driver.simulated import SimulatedDriver
from poolwright.runtime.errors import OutOfMemoryBudget, PoolError, WrongProcess
from poolwright.runtime.group import HostPoolGroup
from poolwright.runtime.pool import HostPool
from poolwright.runtime.testing import use_driver
from poolwright.runtime.tools import group_cases, verify

PATHS = ("host", "zero_copy", "staged", "torch")
P = 4
KV = {"heads": 2, "head_dim": 3, "v_head_dim": 5, "dtype": torch.bfloat16}
LATENT = {"kv_lora_rank": 5, "qk_rope_head_dim": 3, "dtype": torch.bfloat16}
STATE = {"heads": 2, "head_dim": 3, "kernel": 4, "ngram": 2}
STATE |= {"ssm_dtype": torch.float32, "conv_dtype": torch.bfloat16}
FULL, LINEAR = (1, 5), (0, 2, 3, 4, 7)
HYBRID: dict[str, Any] = {"full_attention_layers": FULL, "linear_attention_layers": LINEAR, "page_size": P}
HYBRID |= {"kv": LATENT, "state": STATE}
DRAFT: dict[str, Any] = {"target_layers": (0, 1, 2), "draft_layers": (3,), "page_size": P}
DRAFT |= {"target": KV, "draft": {**KV, "heads": 1}}


def hybrid(**more: Any) -> HostPoolGroup:
    return generated.group_class("kimi_linear")(
        **HYBRID, **({"capacity_pages": {"kv": 9, "state": 5}} | more)
    )


def drafted(**more: Any) -> HostPoolGroup:
    return generated.group_class("target_draft")(**DRAFT, **({"capacity_pages": {"target": 9}} | more))


def random_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randint(-99, 99, shape).to(dtype)


def rows(layers: int, heads: int, dim: int, pages: int = 11) -> list[torch.Tensor]:
    return [random_tensor(pages * P, heads, dim) for _ in range(layers)]


def hybrid_tensors() -> dict[str, dict[str, Any]]:
    state = {
        "temporal": random_tensor(len(LINEAR), 7, 2, 3, 3, dtype=torch.float32),
        "conv": random_tensor(len(LINEAR), 7, 3, 18),
        "ngram": random_tensor(7, 2, dtype=torch.int64),
    }
    return {"kv": {"kv": rows(2, 1, 8)}, "state": state}


def flat(tensors: Mapping[str, Mapping[str, Any]]) -> list[torch.Tensor]:
    """Every device tensor, each layer by itself."""
    found: list[torch.Tensor] = []
    for each in (value for one in tensors.values() for value in one.values()):
        found += list(each) if isinstance(each, list) else [each]
    return found


@pytest.fixture
def bound() -> Iterator[tuple[HostPoolGroup, dict[str, dict[str, Any]]]]:
    group, tensors = hybrid(), hybrid_tensors()
    group.bind(tensors)
    yield group, tensors
    group.destroy()


TOKENS = torch.cat([torch.arange(20, 24), torch.arange(8, 12)])
SLOTS = torch.tensor([6, 2])


def moves() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {
        "kv": (torch.tensor([4, 5, 6, 7, 32, 33, 34, 35]), TOKENS),
        "state": (torch.tensor([4, 0]), SLOTS),
    }


def expected(before: list[torch.Tensor], now: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the tensors hold after a load into tensors `now` of what was stored from `before`."""
    wanted = [tensor.clone() for tensor in now]
    for tensor, old in zip(wanted[:2], before[:2], strict=True):
        tensor[TOKENS] = old[TOKENS]
    for tensor, old in zip(wanted[2:4], before[2:4], strict=True):
        tensor[:, SLOTS] = old[:, SLOTS]
    wanted[4][SLOTS] = before[4][SLOTS]
    return wanted


# ---- bytes


@pytest.mark.parametrize(("kv", "state"), list(itertools.product(PATHS, PATHS)))
def test_one_call_moves_all_pools_by_any_mix_of_paths(bound: Any, kv: str, state: str) -> None:
    group, tensors = bound
    before = [tensor.clone() for tensor in flat(tensors)]
    host = {name: pool.kv_buffer.fill_(7).clone() for name, pool in group.pools.items()}
    paths = {"kv": kv, "state": state}
    ticket = group.write_back(moves(), path=paths)
    ticket.captured.wait()
    ticket.wait()
    assert ticket.paths == paths
    assert ticket.path == (kv if kv == state else f"{kv}+{state}")
    assert ticket.moved == {"kv": {1, 8}, "state": {4, 0}}
    assert all(torch.equal(a, b) for a, b in zip(flat(tensors), before, strict=True))
    assert all(not torch.equal(pool.kv_buffer, host[name]) for name, pool in group.pools.items())
    for tensor in flat(tensors):
        tensor.fill_(-1)
    wanted = expected(before, flat(tensors))
    group.load(moves(), path=paths).wait()
    assert all(torch.equal(a, b) for a, b in zip(flat(tensors), wanted, strict=True))


HEAVY = {"dsv4"}  # pages of 128 tokens


@pytest.mark.parametrize(
    ("turn", "name"),
    [
        pytest.param(turn, name, marks=[pytest.mark.slow] * (name in HEAVY))
        for turn, name in enumerate(generated.GROUPS)
    ],
)
def test_groups_against_the_oracle(turn: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mix of paths, layer orders, some of the pools: whole buffers compared."""
    monkeypatch.setenv("POOLWRIGHT_OPTIMIZE", "1")
    kind = generated.group_class(name)
    sample = group_cases.group_sample(kind, group_cases.NAMES[turn % 2])
    result = verify.check(verify.GroupTarget(kind, sample))
    assert result.difference == "" and result.cases > 40


def test_three_pools_take_three_paths_in_one_call() -> None:
    """An anchor without bytes, pools that take its ids, a pool with ids of its own; three paths at once."""
    group = generated.group_class("dsv4")(
        window_layers=(0, 1),
        c4_layers=(0,),
        c128_layers=(1,),
        page_size=128,
        layout="page_first",  # of the pools that have bytes
        swa={"format": "v4"},
        c4={"format": "v4"},
        c4_indexer={"index_head_dim": 8},
        c128={"format": "v41"},
        c4_state={"head_dim": 4, "ring": 8, "dtype": torch.float32},
        indexer_state={"head_dim": 2, "ring": 8, "dtype": torch.float32},
        capacity_pages={"kv": 4, "window": 3},
    )
    page = {name: pool.page_bytes for name, pool in group.pools.items()}
    assert page["kv"] == 0 and page["c4"] == 32 * 584 - 32 * 584 % -576 and group.c4.page_num == 4
    tensors: dict[str, Any] = {}
    for name in ("swa", "c4", "c4_indexer", "c128"):
        layers = len(group.pools[name].layers)
        row = page[name] // layers
        tensors[name] = {
            "row": [torch.randint(0, 255, (9, row), dtype=torch.uint8) for _ in range(layers)],
        }
    for name, dim in (("c4_state", 4), ("indexer_state", 2)):
        tensors[name] = {"state": [random_tensor(9, 8, 2, 2, dim, dtype=torch.float32)]}
    group.bind(tensors)
    before = [tensor.clone() for tensor in flat(tensors)]
    ids = group.alloc({"kv": 256, "window": 128})
    assert group.available_size() == {"kv": 256, "window": 256}
    device = {"kv": torch.cat([torch.arange(256, 384), torch.arange(640, 768)]), "window": torch.arange(128)}
    moves = {name: (ids[name], device[name]) for name in ids}
    paths = {"swa": "staged", "c4": "zero_copy", "c4_indexer": "host", "c128": "torch", "c4_state": "host"}
    ticket = group.write_back(moves, path=paths)
    assert {ticket.paths[name] for name in paths} == {"staged", "zero_copy", "host", "torch"}
    ticket.wait()
    for tensor in flat(tensors):
        tensor.zero_()
    group.load(moves, path=paths).wait()
    for index, (tensor, old) in enumerate(zip(flat(tensors), before, strict=True)):
        pages = [0] if index < 2 or tensor.dim() == 5 else [2, 5]
        rows, olds = tensor.reshape(9, -1), old.reshape(9, -1)
        assert torch.equal(rows[pages], olds[pages])
    assert group.free(ids) == {"kv": 256, "window": 128}
    group.destroy()


def test_two_pools_of_one_spec_in_one_call() -> None:
    sizes = {"page_size": P, "capacity_pages": {"full": 6, "swa": 5}, "full": KV, "swa": KV}
    group = generated.group_class("swa_full")(
        full_attention_layers=(0,), sliding_attention_layers=(1, 2), **sizes
    )
    group.bind(
        {"full": {"k": rows(1, 2, 3), "v": rows(1, 2, 5)}, "swa": {"k": rows(2, 2, 3), "v": rows(2, 2, 5)}}
    )
    ids = torch.arange(2)
    ticket = group.write_back(
        {"full": (ids, ids), "swa": (ids, ids)}, "page", path={"full": "zero_copy", "swa": "staged"}
    )
    ticket.wait()
    assert ticket.path == "zero_copy+staged"
    group.destroy()


@pytest.mark.parametrize("path", [path for path in PATHS if path != "staged"])
@pytest.mark.parametrize("layers", [None, (5, 0, 3), (1,), ()])
def test_layers_of_all_pools_come_in_one_order(bound: Any, path: str, layers: tuple[int, ...] | None) -> None:
    group, tensors = bound
    before = [tensor.clone() for tensor in flat(tensors)]
    group.write_back(moves()).wait()
    for tensor in flat(tensors):
        tensor.fill_(-1)
    full = expected(before, flat(tensors))
    wanted = [tensor.clone() for tensor in flat(tensors)]
    chosen = sorted((*FULL, *LINEAR)) if layers is None else layers
    for at, layer in enumerate(FULL):
        if layer in chosen:
            wanted[at] = full[at]
    for at, layer in enumerate(LINEAR):
        if layer in chosen:
            wanted[2][at], wanted[3][at] = full[2][at], full[3][at]
    if LINEAR[0] in chosen:  # what has no layers comes with the first one of its pool
        wanted[4] = full[4]
    ticket = group.load(moves(), order="layer", layers=layers, path=path)
    for layer in chosen:
        ticket.wait_layer(layer)
    for wrong in (6, 100, *(set() if layers is None else set(FULL) - set(layers))):
        with pytest.raises(ValueError, match=f"layer {wrong} is not told"):
            ticket.wait_layer(wrong)
    ticket.wait()
    assert all(torch.equal(a, b) for a, b in zip(flat(tensors), wanted, strict=True))


def test_layers_of_pools_that_have_nothing_to_load_are_there_at_once(bound: Any) -> None:
    group, _ = bound
    group.write_back(moves()).wait()
    ticket = group.load({"kv": moves()["kv"]}, order="layer")
    for layer in sorted((*FULL, *LINEAR)):
        ticket.wait_layer(layer)
    with pytest.raises(ValueError, match="layer 6 is not told"):
        ticket.wait_layer(6)
    ticket.wait()


def test_a_pool_without_layers_moves_with_the_first_step_of_all(bound: Any) -> None:
    group, _ = bound
    transfers = group._shared.transfers
    state = transfers.members[1]
    kept, state.layers = state.layers, ()
    try:
        order = transfers._make_order((0, 1), None)
        assert order.layers == FULL
        assert list(order.steps[1].numbers)[2::3] == [0, 0xFFFFFFFF]  # ngram, which has no layers
    finally:
        state.layers = kept


@pytest.mark.parametrize("path", [path for path in PATHS if path != "staged"])
def test_every_layer_waits_for_a_pool_without_layers(bound: Any, path: str) -> None:
    """A state of no layer keeps its side bytes: they come first, whichever layer is waited for."""
    group, tensors = bound
    state = group._shared.transfers.members[1]
    kept, state.layers = state.layers, ()  # its other components are of layers that are not asked for
    side = tensors["state"]["ngram"]
    stored = side.clone()
    group.write_back(moves()).wait()
    try:
        for names in (("state",), ("kv", "state")):
            side.fill_(-1)
            ticket = group.load({name: moves()[name] for name in names}, order="layer", path=path)
            for layer in FULL:
                ticket.wait_layer(layer)
            with pytest.raises(ValueError, match="layer 6 is not told"):
                ticket.wait_layer(6)
            ticket.wait()
            assert torch.equal(side[SLOTS], stored[SLOTS])
            assert bool((side[[0, 1, 3, 4, 5]] == -1).all())
    finally:
        state.layers = kept


def test_a_pool_without_layers_is_waited_for_in_the_step_that_moves_it(bound: Any) -> None:
    """Also by layers of pools that are not moved; where that step is left out, nothing of it moves."""
    group, _ = bound
    transfers = group._shared.transfers
    kv, state = transfers.members
    kept, kv.layers = kv.layers, ()
    try:
        assert transfers._make_order((0,), None)[:1] == ((LINEAR[0],),)
        assert transfers._make_order((0,), None).rest == 0
        assert transfers._make_order((0,), None).others == set(LINEAR[1:])
        assert transfers._make_order((0, 1), (0, 2)).rest == 0
        assert transfers._make_order((0, 1), (2, 0)).rest == 1
        assert transfers._make_order((0, 1), (2,)).rest is None
        assert transfers._make_order((1,), None).rest is None
    finally:
        kv.layers = kept
    assert state.layers == LINEAR


# ---- pools that take the ids of another


def test_a_pool_that_takes_ids_moves_with_its_source_always() -> None:
    group = drafted()
    tensors = {
        "target": {"k": rows(3, 2, 3), "v": rows(3, 2, 5)},
        "draft": {"k": rows(1, 1, 3), "v": rows(1, 1, 5)},
    }
    group.bind(tensors)
    target, draft = group.pools["target"], group.draft
    assert draft.page_num == target.page_num == 9
    before = [tensor.clone() for tensor in flat(tensors)]
    for mover, ids in (
        (group, ({"target": (torch.tensor([3, 1]), torch.tensor([2, 4]))}, "page")),
        (target, (torch.tensor([3, 1]), torch.tensor([2, 4]), "page")),
    ):
        ticket = mover.write_back(*ids)
        assert set(ticket.moved) == {"target", "draft"} and ticket.moved["draft"] == {3, 1}
        ticket.wait()
        for tensor in flat(tensors):
            tensor.zero_()
        mover.load(*ids, order="layer").wait()
        index = torch.cat([torch.arange(8, 12), torch.arange(16, 20)])
        assert all(torch.equal(a[index], b[index]) for a, b in zip(flat(tensors), before, strict=True))
    for call in (
        lambda: draft.write_back(torch.tensor([1]), torch.tensor([1]), "page"),
        lambda: draft.load(torch.tensor([1]), torch.tensor([1]), "page"),
    ):
        with pytest.raises(ValueError, match="draft is moved with target"):
            call()
    with pytest.raises(ValueError, match="draft takes the ids of target"):
        group.load({"draft": (torch.tensor([1]), torch.tensor([1]))})
    for name in ("alloc", "free", "clear"):
        with pytest.raises(ValueError, match=f"no slots of its own: {name} those of target"):
            getattr(draft, name)(*([] if name == "clear" else [torch.arange(P) if name == "free" else P]))
    assert group.available_size() == {"target": 36}
    group.destroy()


def test_pages_of_a_pool_that_takes_ids_are_those_allocated_of_its_source() -> None:
    group = drafted()
    both = {
        "target": {"k": rows(3, 2, 3), "v": rows(3, 2, 5)},
        "draft": {"k": rows(1, 1, 3), "v": rows(1, 1, 5)},
    }
    group.bind(both)
    group.alloc({"target": 2 * P})
    ids = torch.tensor([1, 0])
    group.write_back({"target": (ids, ids)}, "page").wait()
    with pytest.raises(ValueError, match="target: host page 2 is not allocated"):
        group.load({"target": (ids + 1, ids)}, "page")
    group.destroy()


def test_device_rows_of_every_pool_are_checked_before_anything_moves() -> None:
    group = drafted()
    small = {"k": rows(1, 1, 3, pages=3), "v": rows(1, 1, 5, pages=3)}
    group.bind({"target": {"k": rows(3, 2, 3), "v": rows(3, 2, 5)}, "draft": small})
    with pytest.raises(ValueError, match="draft: device ids: expected 0 to 2, got 4"):
        group.write_back({"target": (torch.tensor([3, 1]), torch.tensor([2, 4]))}, "page")
    group.write_back({"target": (torch.tensor([3, 1]), torch.tensor([2, 0]))}, "page").wait()
    group.destroy()


def test_a_page_in_flight_of_any_pool_keeps_the_ids_it_takes() -> None:
    made = group_world(GROUPS[2], first)
    ids = made.group.alloc({"target": 4})
    ticket = made.group.write_back({"target": (ids["target"], torch.arange(4))})
    with pytest.raises(ValueError, match="page 0 is in flight"):
        made.group.free(ids)
    assert made.group.free(ids, after=ticket) == {"target": 4}
    ticket.wait()
    made.group.destroy()


# ---- slots


def test_alloc_takes_all_or_nothing() -> None:
    group = hybrid()
    taken = group.alloc({"state": 2, "kv": 3 * P})
    assert taken is not None and list(taken) == ["kv", "state"]
    free = group.available_size()
    assert free == {"kv": 6 * P, "state": 3}
    assert group.alloc({"kv": P, "state": 4}) is None
    assert group.alloc({"kv": 7 * P, "state": 1}) is None
    with pytest.raises(ValueError, match="state: alloc"):
        group.alloc({"kv": P, "state": -1})
    assert repr(group) == "<KimiLinearHostPoolGroup kv: 9 pages, state: 5 pages>"
    with pytest.raises(ValueError, match=r"alloc: expected a mapping by pool \(kv, state\), got int$"):
        group.alloc(64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no pool 'stat'; pools are kv, state"):
        group.alloc({"stat": 1})
    with pytest.raises(ValueError, match=r"alloc: state: expected an integer, got 'two'$"):
        group.alloc({"kv": P, "state": "two"})  # type: ignore[dict-item]
    assert group.available_size() == free
    with pytest.raises(ValueError, match="state: free"):
        group.free({"kv": taken["kv"], "state": torch.tensor([4])})
    assert group.available_size() == free
    assert group.free(taken) == {"kv": 3 * P, "state": 2}
    group.destroy()


class Told:
    """A lock that tells when another thread than the first one asks for it."""

    def __init__(self, lock: Any) -> None:
        self.lock, self.first, self.asked = lock, threading.get_ident(), threading.Event()

    def __enter__(self) -> None:
        if threading.get_ident() != self.first:
            self.asked.set()
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


class Meanwhile:
    """Runs `call` in a thread of its own, once, in the middle of what this thread does: until it is done, or
    waits for slots of `pool`."""

    def __init__(self, pool: HostPool, call: Callable[[], object]) -> None:
        self._told = pool._slots._lock = Told(pool._slots._lock)  # type: ignore[assignment]
        self._thread = threading.Thread(target=self._run, args=(call,))
        self.outcome: object = None

    def _run(self, call: Callable[[], object]) -> None:
        try:
            self.outcome = call()
        except ValueError as error:
            self.outcome = str(error)

    def __call__(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
            assert self._told.asked.wait(30)
            self._thread.join(0.3)  # let through at once, it would be over by then

    def end(self) -> object:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.outcome


@pytest.mark.parametrize("name", ["kv", "state"])
def test_a_pool_frees_the_same_pages_in_the_middle_of_a_call_of_the_group(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page is freed once: by the group, all of them; the other call is refused."""
    group = hybrid()
    ids = group.alloc({"kv": 2 * P, "state": 1})
    assert ids is not None
    pool = group.pools[name]
    meanwhile = Meanwhile(pool, lambda: pool.free(ids[name]))
    real, calls = HostPool._freeable, []

    def freeable(one: HostPool, *given: Any) -> list[int]:
        pages = real(one, *given)
        calls.append(one.name)
        if calls == ["kv", "state"]:  # all are checked, none is free
            meanwhile()
        return pages

    monkeypatch.setattr(HostPool, "_freeable", freeable)
    assert group.free(ids) == {"kv": 2 * P, "state": 1}
    assert "is not allocated" in str(meanwhile.end())
    assert group.available_size() == {"kv": 9 * P, "state": 5}
    again = group.alloc({"kv": 9 * P, "state": 5})
    assert again is not None and all(len(set(each.tolist())) == len(each) for each in again.values())
    group.destroy()


def test_a_pool_allocates_in_the_middle_of_a_call_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the group takes and gives back, since another pool is full, nobody else sees as taken."""
    group = hybrid()
    kv = group.pools["kv"]
    meanwhile = Meanwhile(kv, lambda: kv.alloc(9 * P))
    real = HostPool.alloc

    def alloc(one: HostPool, count: int) -> torch.Tensor | None:
        if one.name == "state":  # kv is taken by now
            meanwhile()
        return real(one, count)

    monkeypatch.setattr(HostPool, "alloc", alloc)
    assert group.alloc({"kv": P, "state": 6}) is None
    taken = meanwhile.end()
    assert isinstance(taken, torch.Tensor) and taken.numel() == 9 * P
    group.destroy()


def test_clear_takes_the_pages_of_all_pools_at_one_moment() -> None:
    """A pool that allocates in the middle gets pages of after it."""
    group = hybrid()
    group.alloc({"kv": 9 * P, "state": 5})
    state = group.pools["state"]
    meanwhile = Meanwhile(state, lambda: state.alloc(5))
    kv = group.pools["kv"]._slots
    real = kv.clear

    def clear() -> None:
        real()
        meanwhile()

    kv.clear = clear  # type: ignore[method-assign]
    group.clear()
    taken = meanwhile.end()
    assert isinstance(taken, torch.Tensor) and taken.tolist() == list(range(5))
    assert group.available_size() == {"kv": 9 * P, "state": 0}
    group.destroy()


def test_an_error_in_the_middle_of_an_allocation_leaves_nothing_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = hybrid()

    def broken(count: int) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(group.pools["state"], "alloc", broken)
    with pytest.raises(RuntimeError, match="no more"):
        group.alloc({"kv": P, "state": 1})
    assert group.available_size() == {"kv": 9 * P, "state": 5}
    group.destroy()


CALLS = st.lists(st.tuples(st.sampled_from("afp"), st.integers(0, 4), st.integers(0, 3)), max_size=25)


@settings(max_examples=60)
@given(CALLS, st.integers(0, 1 << 16))
def test_ranks_that_make_the_same_calls_get_the_same_ids(calls: list[Any], seed: int) -> None:
    """Whatever transfers do meanwhile, which differ between the ranks."""
    answers = []
    for rank in range(2):
        chance = random.Random(seed + rank)
        made = group_world(GROUPS[1], chance.randrange)
        held: list[dict[str, torch.Tensor]] = []
        told: list[object] = []
        for kind, one, two in calls:
            if kind == "a":
                found = made.group.alloc({"full": 2 * one, "swa": 2 * two})
                told.append(None if found is None else {name: ids.tolist() for name, ids in found.items()})
                held += [] if found is None else [found]
            elif kind == "f" and held:
                made.group.free(held.pop(one % len(held)))
            elif kind == "p" and rank == 0 and held:
                ids = held[-1]["full"]
                made.group.write_back({"full": (ids, torch.arange(len(ids)))}).detach()
            told.append(made.group.available_size())
        answers.append(told)
        made.group.destroy()
    assert answers[0] == answers[1]


# ---- budgets


def test_a_budget_is_for_all_pools_together() -> None:
    kind = generated.group_class("kimi_linear")
    for capacity in (10_000, 54_321, 99_999):
        need = kind.required_bytes(**HYBRID, capacity_bytes=capacity)
        assert capacity - 2 * sum(pool.page for pool in need.pools.values()) < need.host <= capacity
        assert max(pool.host for pool in need.pools.values()) <= 0.5 * capacity
    group = hybrid(capacity_pages=None, capacity_bytes=54_321, staging_bytes=3_000)
    need = kind.required_bytes(**HYBRID, capacity_bytes=54_321, staging_bytes=3_000)
    for name, pool in group.pools.items():
        assert pool.kv_buffer.numel() == need.pools[name].host and pool.page_num == need.pools[name].pages
        assert pool.staging is not None and pool.staging.nbytes == need.pools[name].staging
    group.destroy()


def test_pools_that_take_ids_count_into_the_page_of_their_source() -> None:
    kind = generated.group_class("target_draft")
    need = kind.required_bytes(**DRAFT, capacity_bytes=50_000)
    assert need.pools["target"].pages == need.pools["draft"].pages
    page = sum(pool.page for pool in need.pools.values())
    assert need.pools["target"].pages == 50_000 // page


def test_bytes_pages_and_off_by_pool() -> None:
    kind = generated.group_class("kimi_linear")
    need = kind.required_bytes(**HYBRID, budget={"kv": 20_000, "state": 30_000})
    assert need.pools["kv"].host <= 20_000 and need.pools["state"].host <= 30_000
    off = kind.required_bytes(**{**HYBRID, "state": None}, capacity_pages={"kv": 3, "state": "off"})
    assert list(off.pools) == ["kv"]
    group = hybrid(capacity_pages={"kv": 3, "state": "off"})
    tensors = hybrid_tensors()
    group.bind(tensors)
    before = [tensor.clone() for tensor in flat(tensors)]
    assert group.alloc({"kv": P, "state": 1}).keys() == {"kv"}  # type: ignore[union-attr]
    page = torch.arange(P)
    group.write_back({"kv": (page, page), "state": moves()["state"]}, path="zero_copy").wait()
    for tensor in flat(tensors):
        tensor.zero_()
    group.load({"kv": (page, page), "state": moves()["state"]}, order="layer", path="zero_copy").wait()
    assert torch.equal(tensors["kv"]["kv"][0][:P], before[0][:P])
    with pytest.raises(AttributeError, match="pool 'state' is switched off"):
        _ = group.state
    group.destroy()


WRONG = (
    ({"capacity_bytes": 1000}, OutOfMemoryBudget, r"one page of state needs \d+ bytes, 500 are available"),
    ({}, ValueError, "give capacity_bytes, of which the budget"),
    (
        {"capacity_bytes": 9999, "capacity_pages": {"kv": 1, "state": 1}},
        ValueError,
        "give either capacity_pages or capacity_bytes, got both",
    ),
    ({"capacity_pages": {"kv": 1}}, ValueError, "expected at least 1 page or 'off' for state, got None"),
    ({"capacity_pages": {"kv": "off", "state": 1}}, ValueError, "the anchor kv cannot be off"),
    ({"capacity_pages": {"kv": 1, "state": 1, "x": 1}}, ValueError, "capacity_pages: no pool 'x'"),
    (
        {"budget": {"kv": 0.9}, "capacity_bytes": 99_999},
        ValueError,
        "budget: 139,998 bytes in all, more than",
    ),
    ({"budget": {"kv": 1.5}, "capacity_bytes": 9}, ValueError, "budget of kv: expected a fraction, bytes or"),
    ({"capacity_pages": 3}, ValueError, "capacity_pages: expected a mapping by name of the pool, got 3"),
    ({"budget": ["kv"]}, ValueError, "budget: expected a mapping by name of the pool, got"),
    (
        {"capacity_bytes": 99_999, "full_attention_layers": 3},
        ValueError,
        "full_attention_layers: expected layer",
    ),
    ({"capacity_bytes": 99_999, "staging_bytes": -1}, ValueError, "kimi_linear: staging_bytes: expected an"),
    (
        {"capacity_bytes": 99_999, "staging_bytes": None},
        ValueError,
        "kimi_linear: staging_bytes: expected an",
    ),
    ({"capacity_bytes": 99_999, "capture_bytes": -1}, ValueError, "kimi_linear: capture_bytes: expected an"),
    ({"capacity_bytes": -1}, ValueError, "capacity_bytes: expected an integer of at least 0, got -1"),
    (
        {"capacity_bytes": 99_999, "kv": {**LATENT, "head": 1}},
        ValueError,
        "kv: unknown argument 'head'; it takes",
    ),
    (
        {"capacity_bytes": 99_999, "kv": {**LATENT, "page_size": 1}},
        ValueError,
        "kv: unknown argument 'page_size'",
    ),
    ({"capacity_bytes": 99_999, "state": None}, ValueError, "state: argument 'heads' is missing"),
    ({"capacity_bytes": 99_999, "layout": "page_head"}, ValueError, "kv: .*layout: expected one of"),
    (
        {"capacity_bytes": 99_999, "kv": {**LATENT, "kv_lora_rank": 0}},
        ValueError,
        "kv: mla: kv_lora_rank: exp",
    ),
)


@pytest.mark.parametrize(("given", "kind", "message"), WRONG, ids=[case[2][:40] for case in WRONG])
def test_what_cannot_be_sized_is_refused(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    group_class = generated.group_class("kimi_linear")
    with pytest.raises(kind, match=message):
        group_class.required_bytes(**{**HYBRID, **given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (-1, "expected an integer of at least 0, got -1"),
        (1 << 20, "expected None, got 1048576; no pool that"),
    ],
)
def test_a_bound_that_no_pool_takes_is_refused(given: int, message: str) -> None:
    """No pool of this group changes in place, so none would look at capture_bytes."""
    with pytest.raises(ValueError, match=f"^target_draft: capture_bytes: {message}"):
        drafted(capture_bytes=given)


def test_the_budget_of_the_machine_is_asked_for_all_pools_together(monkeypatch: pytest.MonkeyPatch) -> None:
    need = generated.group_class("kimi_linear").required_bytes(**HYBRID, capacity_pages={"kv": 9, "state": 5})
    monkeypatch.setattr(memory, "available_host_bytes", lambda: need.host - 1)
    driver = Counted()
    with (
        use_driver(driver),
        pytest.raises(OutOfMemoryBudget, match=f"kimi_linear: host memory needs {need.host:,}"),
    ):
        hybrid()
    assert driver.calls["register"] == driver.calls["allocate"] == 0


class Counted(SimulatedDriver):
    """Counts calls of the protocol; memory that is registered now."""

    def __init__(self) -> None:
        super().__init__(first)
        self.calls: Counter[str] = Counter()
        self.held: set[int] = set()

    def register(self, address: int, nbytes: int) -> int:
        self.calls["register"] += 1
        found = super().register(address, nbytes)
        self.held.add(address)
        return found

    def unregister(self, address: int) -> None:
        super().unregister(address)
        self.held.discard(address)

    def allocate(self, nbytes: int) -> Any:
        self.calls["allocate"] += 1
        return super().allocate(nbytes)

    def enqueue(self, call: str, *rest: Any, **more: Any) -> None:
        self.calls[call] += 1
        super().enqueue(call, *rest, **more)

    def copy(self, *rest: Any, **more: Any) -> None:
        self.calls["copy"] += 1
        super().copy(*rest, **more)


@pytest.mark.parametrize("call", ["register", "allocate"])
@pytest.mark.parametrize("skip", [0, 1])
def test_a_pool_that_cannot_be_built_takes_all_others_with_it(call: str, skip: int) -> None:
    driver = Counted()
    driver.fail(call, skip)
    with use_driver(driver), pytest.raises(PoolError, match="made to fail"):
        hybrid()
    assert driver.calls["register"] == 1 + skip and not driver.held
    with use_driver(driver):
        made = hybrid()
    assert len(driver.held) == 2
    made.destroy()
    made.destroy()
    assert not driver.held
    with pytest.raises(PoolError, match="kv: the pool is destroyed"):
        made.alloc({"kv": P})


# ---- one launch, one batch


def simulated() -> tuple[Counted, HostPoolGroup]:
    driver = Counted()
    with use_driver(driver):
        group = hybrid(staging_bytes=1 << 20)
    tensors = hybrid_tensors()
    on_device: dict[str, dict[str, Any]] = {}
    for pool, each in tensors.items():
        on_device[pool] = {}
        for component, value in each.items():
            made = [driver.tensor(t.shape, t.dtype) for t in (value if isinstance(value, list) else [value])]
            for tensor in made:
                driver.cpu("contents", tensor.data_ptr(), tensor.nbytes, writes=True)
            on_device[pool][component] = made if isinstance(value, list) else made[0]
    group.bind(on_device)
    return driver, group


@pytest.mark.parametrize("direction", ["write_back", "load"])
def test_pools_on_one_path_take_one_launch_and_one_batch(direction: str) -> None:
    driver, group = simulated()
    group.write_back(moves(), path="zero_copy").wait()
    for path, launches, batches in (("zero_copy", 1, 0), ("staged", 1, 1)):
        driver.calls.clear()
        getattr(group, direction)(moves(), path=path).wait()
        assert (driver.calls["launch"], driver.calls["copy"], driver.calls["upload"]) == (
            launches,
            batches,
            0,
        )
    driver.calls.clear()
    getattr(group, direction)(moves(), path={"kv": "zero_copy", "state": "staged"}).wait()
    assert (driver.calls["launch"], driver.calls["copy"]) == (2, 1)
    group.destroy()


@pytest.mark.parametrize("direction", ["write_back", "load"])
def test_many_ids_go_to_the_device_once_however_many_chunks_they_are_moved_in(direction: str) -> None:
    pages, driver = 1500, Counted()
    with use_driver(driver):
        pool = MLATokenToKVPoolHost(
            kv_lora_rank=3,
            qk_rope_head_dim=2,
            dtype=torch.bfloat16,
            layers=[0, 1],
            page_size=1,
            layout="page_first",
            capacity_pages=pages,
            staging_bytes=4 * 16 * 700,
        )
    rows = [driver.tensor((pages, 5), torch.bfloat16) for _ in range(2)]
    for tensor in rows:
        driver.cpu("contents", tensor.data_ptr(), tensor.nbytes, writes=True)
    pool.bind({"kv": rows})
    ids = torch.randperm(pages, generator=torch.Generator().manual_seed(1)), torch.arange(pages)
    pool.write_back(*ids, "page", path="zero_copy").wait()
    driver.calls.clear()
    getattr(pool, direction)(*ids, "page", path="staged").wait()
    assert driver.calls["launch"] >= 2 and driver.calls["upload"] == 1
    pool.destroy()


def test_a_load_in_layer_order_is_two_launches_whatever_its_layers_and_one_if_it_is_short() -> None:
    driver, group = simulated()
    group.write_back(moves(), path="zero_copy").wait()
    for how, launches in (({"order": "layer"}, 2), ({"layers": [5, 0]}, 2), ({"layers": [5]}, 1)) * 2:
        driver.calls.clear()
        ticket = group.load(moves(), **how)
        ticket.wait()
        assert driver.calls["launch"] == launches and ticket.path == "zero_copy"
    assert driver.calls["upload"] == 0  # the numbers of its steps are there already
    group.destroy()


def test_mixed_units_take_one_launch() -> None:
    """Scattered tokens of one pool beside pages of another."""
    driver, group = simulated()
    scattered = moves()["kv"][0].flip(0), TOKENS
    driver.calls.clear()
    group.write_back({"kv": scattered, "state": moves()["state"]}, path="zero_copy").wait()
    assert driver.calls["launch"] == 1
    group.load(
        {"kv": scattered, "state": moves()["state"]}, {"kv": "token", "state": "page"}, order="layer"
    ).wait()
    group.destroy()


def test_a_failed_transfer_names_the_pages_of_every_pool() -> None:
    driver, group = simulated()
    driver.fail("launch")
    with pytest.raises(PoolError) as raised:
        group.write_back(moves(), path="zero_copy")
    assert raised.value.moved == {"kv": [1, 8], "state": [0, 4]}  # type: ignore[attr-defined]
    assert "write_back of 2 pages of kv (1, 8) and 2 pages of state (0, 4) failed" in str(raised.value)
    driver.fail_step()
    ticket = group.write_back(moves(), path="zero_copy")
    with pytest.raises(PoolError, match="2 pages of kv"):
        ticket.captured.wait()
    with pytest.raises(PoolError, match="made to fail"):
        group.destroy()


def test_states_stay_within_their_capture_capacity() -> None:
    """A state of 4 MiB in 40 layers: staging memory is bounded, and holds a layer at least."""
    state = {**STATE, "heads": 64, "head_dim": 128, "ngram": 0}
    sizes = {**HYBRID, "linear_attention_layers": range(40), "full_attention_layers": (40,), "state": state}
    kind = generated.group_class("kimi_linear")
    need = kind.required_bytes(**sizes, capacity_pages={"kv": 2, "state": 3}, capture_bytes=512 << 20)
    page = need.pools["state"].page
    assert page > 160 << 20 and need.pools["state"].staging <= 512 << 20
    for bound in (8 << 20, 100 << 20, 2 * page, 2 * page - 1):
        tight = kind.required_bytes(**sizes, capacity_pages={"kv": 2, "state": 3}, capture_bytes=bound)
        assert bound - 32 <= tight.pools["state"].staging <= bound
    message = (
        r"staging memory \(state 8,388,608\) needs 8,388,608 bytes, 8,388,607 are available; raise capture"
    )
    with pytest.raises(OutOfMemoryBudget, match=message):
        kind.required_bytes(**sizes, capacity_pages={"kv": 2, "state": 3}, capture_bytes=(8 << 20) - 1)


# ---- contracts


def test_wrong_ids_are_refused_before_anything_is_submitted(bound: Any) -> None:
    group, _ = bound
    host = {name: pool.kv_buffer.clone() for name, pool in group.pools.items()}
    good = moves()["kv"]
    for wrong, message in (
        ((torch.tensor([5]), torch.tensor([1])), "state: host ids: expected 0 to 4, got 5"),
        ((torch.tensor([1]), torch.tensor([0])), "state: device ids: 0 is reserved"),
        ((torch.tensor([1, 1]), torch.tensor([1, 2])), "state: host ids: page 1 stands twice"),
        ((torch.tensor([1.0]), torch.tensor([1])), "state: host ids: dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            group.write_back({"kv": good, "state": wrong})
    with pytest.raises(ValueError, match="no pool 'stat'"):
        group.write_back({"kv": good, "stat": good})
    with pytest.raises(ValueError, match="state: path 'kernel' was asked for"):
        group.write_back(moves(), path={"state": "kernel"})
    with pytest.raises(ValueError, match="no pool 'stat'"):
        group.write_back(moves(), path={"stat": "host"})
    for wrong, message in (
        ({"kv": good[0]}, r"write_back: kv: expected \(host, device\) ids, got Tensor"),
        ({"kv": (*good, good[0])}, r"write_back: kv: expected \(host, device\) ids, got tuple"),
        ([("kv", good)], r"write_back: expected a mapping by pool \(kv, state\), got list"),
    ):
        with pytest.raises(ValueError, match=message):
            group.write_back(wrong)
    with pytest.raises(ValueError, match=r"layers: expected layer ids such as range\(3\), got 3"):
        group.load(moves(), layers=3)
    with pytest.raises(ValueError, match=r"alloc: expected a mapping by pool \(kv, state\), got int"):
        group.alloc(P)
    with pytest.raises(ValueError, match="mla: bind: expected tensors by component, got list"):
        group.bind({"kv": [], "state": {}})
    assert all(torch.equal(pool.kv_buffer, host[name]) for name, pool in group.pools.items())


@pytest.mark.parametrize("how", [{"order": "layer"}, {"layers": [1, 0]}, {"layers": []}, {}])
def test_nothing_to_load_has_nothing_to_wait_for(bound: Any, how: dict[str, Any]) -> None:
    """No pool is named at all: as with empty lists, no layer is waited for."""
    group, _ = bound
    ticket = group.load({}, **how)
    for layer in (*FULL, *LINEAR) if how else ():
        ticket.wait_layer(layer)
    assert ticket.done()


def test_nothing_goes_through_a_group_that_is_gone(bound: Any) -> None:
    """Refused before anything is waited for, also where there is nothing to move."""
    group, tensors = bound
    pid = os.fork()
    if pid == 0:  # the device is the parent's: not even a wait for it may be tried
        group._shared.transfers.drain = group.kv._transfers.drain = lambda: os._exit(1)
        calls = (
            lambda: group.load({}),
            lambda: group.rebind(tensors),
            lambda: group.kv.rebind(tensors["kv"]),
        )
        os._exit(sum(10 for call in calls if not refused(call, WrongProcess)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    group.destroy()
    for call in (lambda: group.load({}), lambda: group.write_back({}), lambda: group.rebind(tensors)):
        with pytest.raises(PoolError, match="kimi_linear: the pool is destroyed"):
            call()


def refused(call: Callable[[], object], kind: type[Exception]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


def test_nothing_to_move_is_a_finished_ticket(bound: Any) -> None:
    group, _ = bound
    empty = torch.empty(0, dtype=torch.int64)
    for ticket in (group.write_back({}), group.load({"kv": (empty, empty)}, order="layer"), group.load({})):
        ticket.wait()
        assert ticket.done() and not ticket.pages


def test_bind_checks_every_pool_before_it_uses_any(bound: Any) -> None:
    group, tensors = bound
    before = group.kv._bound
    wrong = {**tensors["state"], "conv": tensors["state"]["conv"].float()}
    with pytest.raises(ValueError, match="conv: dtype"):
        group.bind({"kv": hybrid_tensors()["kv"], "state": wrong})
    with pytest.raises(ValueError, match="no tensors for pool 'state'"):
        group.bind({"kv": tensors["kv"]})
    assert group.kv._bound is before


def test_pools_of_a_group_have_no_byte_in_common() -> None:
    """Refused for the group and for one pool by itself; nothing that was bound changes."""
    group = drafted()
    one = torch.zeros(4 * P, 2, 3, dtype=torch.bfloat16)
    target = {"k": rows(3, 2, 3), "v": rows(3, 2, 5)}
    draft = {"k": [one.view(-1)[: 4 * P * 3].view(-1, 1, 3)], "v": rows(1, 1, 5)}
    refused = (
        "target_draft: bind: draft.k and target.k: a row of each has the same memory; pools of a group need "
        "tensors of their own"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(refused)}$"):
        group.bind({"target": {**target, "k": [*rows(2, 2, 3), one]}, "draft": draft})
    assert group.target._bound is None
    draft["k"] = rows(1, 1, 3)
    group.bind({"target": target, "draft": draft})
    before = group.draft._bound
    with pytest.raises(ValueError, match=r"draft.v and target.k: a row of each"):
        group.draft.rebind({**draft, "v": [target["k"][2].view(-1)[: 3 * P * 5].view(-1, 1, 5)]})
    assert group.draft._bound is before
    group.rebind({"target": target, "draft": draft})
    group.draft.rebind(draft)
    group.destroy()


def test_less_aligned_tensors_of_one_pool_are_moved_right() -> None:
    group, tensors = hybrid(), hybrid_tensors()
    odd = torch.empty(tensors["state"]["conv"].numel() + 1, dtype=torch.bfloat16)[1:]
    tensors["state"]["conv"] = odd.view(tensors["state"]["conv"].shape).copy_(tensors["state"]["conv"])
    group.bind(tensors)
    before = [tensor.clone() for tensor in flat(tensors)]
    for path in ("host", "zero_copy", "staged"):
        group.write_back(moves(), path=path).wait()
        for tensor in flat(tensors):
            tensor.fill_(3)
        wanted = expected(before, flat(tensors))
        group.load(moves(), path=path).wait()
        assert all(torch.equal(a, b) for a, b in zip(flat(tensors), wanted, strict=True))
    group.destroy()


def test_a_pool_of_a_group_is_given_back_with_the_group(bound: Any) -> None:
    group, _ = bound
    with pytest.raises(PoolError, match="kv belongs to the group kimi_linear: destroy the group"):
        group.kv.destroy()
    group.kv.clear()


# ---- generated text


def test_the_registry_has_groups() -> None:
    assert set(generated.GROUPS) >= {"qwen3_next", "swa_full", "target_draft"}
    assert generated.group_class("swa_full") is generated.SwaFullHostPoolGroup
    with pytest.raises(KeyError, match="no group 'swa'"):
        generated.group_class("swa")


def test_group_specs_stay_short() -> None:
    root = Path(__file__).resolve().parents[1]
    for file in (root / "specs" / "groups").glob("*.yaml"):
        assert len(file.read_text().splitlines()) <= 30


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("show", "qwen3_next"), "state  gated_delta_net  its own  linear_attention_layers  0.3"),
        (
            ("explain", "target_draft"),
            "takes the ids of target, has as many pages, and is moved in every call",
        ),
        (("build", "qwen3_next", "--check"), "up to date: "),
        (("verify", "target_draft", "--quick"), "target_draft all pools"),
        (("compile", "swa_full"), "swa_full-lanes"),
    ],
)
def test_commands_know_groups(codegen: Any, words: tuple[str, ...], expected: str) -> None:
    done = codegen(*words, cwd=Path(__file__).resolve().parents[1])
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_a_group_is_compiled_for_the_sizes_of_a_file(codegen: Any, tmp_path: Path) -> None:
    sizes = {**DRAFT, "target": {**KV, "dtype": "bfloat16"}, "draft": {**KV, "dtype": "float16"}}
    file = tmp_path / "sizes.json"
    file.write_text(json.dumps(sizes))
    root = Path(__file__).resolve().parents[1]
    done = codegen("compile", "target_draft", "--sizes", str(file), cwd=root)
    assert done.returncode == 0 and "target_draft-lanes" in done.stdout, done.stderr
    file.write_text(json.dumps({**sizes, "target": {**KV, "dtype": "bf16"}}))
    done = codegen("compile", "target_draft", "--sizes", str(file), cwd=root)
    assert done.returncode == 1 and "dtype: expected a dtype such as bfloat16, got 'bf16'" in done.stderr


ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")


@pytest.mark.parametrize(("turn", "name"), list(enumerate(generated.GROUPS)))
def test_kernels_of_groups_compile(turn: int, name: str) -> None:
    """Each group for one architecture here, with all pools and with those that cannot be off alone."""
    assert not isinstance(toolchain.find_nvrtc(), toolchain.Missing), (
        "NVRTC is missing: pip install '.[test]'"
    )
    kind, arch = generated.group_class(name), ARCHS[turn % len(ARCHS)]
    every = group_cases.programs(kind, group_cases.group_sample(kind, group_cases.NAMES[turn % 2]).given)
    anchor = {kind.spec.anchor: every.members[kind.spec.anchor]}
    for members in (every.members, anchor):
        made = replace(every, members=members)
        cubins = jit.cubins(made.unit("kernels", 16), arch, "nvrtc")
        assert len(cubins) == len(made.parts) and all(binary[:4] == b"\x7fELF" for binary in cubins)
        assert not any(b".nv.global" in binary for binary in cubins)  # variables are slow to load
