"""Storage behind controllers: what counts as a hit, which pages are held meanwhile, how it ends."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from poolwright.generated.groups.qwen3_next import Qwen3NextHostPoolGroup
from poolwright.generated.groups.target_draft import TargetDraftHostPoolGroup
from poolwright.generated.pools.mla.pool import MLATokenToKVPoolHost
from poolwright.runtime.controller import Ack, CacheController, HybridCacheController, Operation, Tier
from poolwright.runtime.controller.hits import Rule, usable
from poolwright.runtime.storage import FileStorage, Item, Status, token_hashes
from poolwright.runtime.storage.file import _digest

P = 4
HASHES = token_hashes(range(6 * P), P)


def hybrid(pages: Mapping[str, int]) -> Any:
    """A group of keys, values and states on the CPU, with random tensors."""
    group = Qwen3NextHostPoolGroup(
        full_attention_layers=(1, 4), linear_attention_layers=(0, 2), page_size=P, capacity_pages=pages,
        kv={"heads": 2, "head_dim": 3, "v_head_dim": 5, "dtype": torch.bfloat16},
        state={"k_heads": 1, "v_heads": 1, "k_head_dim": 3, "v_head_dim": 5, "kernel": 2,
               "ssm_dtype": torch.float32, "conv_dtype": torch.bfloat16},
        device="cpu",
    )  # fmt: skip
    rows = {name: [torch.randn(9 * P, 2, n).to(torch.bfloat16) for _ in range(2)] for name, n in KV.items()}
    state = {"temporal": torch.randn(2, 9, 1, 3, 5), "conv": torch.randn(2, 9, 11, 1).to(torch.bfloat16)}
    group.bind({"kv": rows, "state": state})
    return group, rows["k"] + rows["v"], [state["temporal"], state["conv"]]


KV = {"k": 3, "v": 5}


class Gate(FileStorage):
    """Lets calls in one by one. `fail`: keys whose bytes do not come."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 30, chunk=100)
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Semaphore(0)
        self.fail: set[str] = set()

    def _get(self, items: Sequence[Item]) -> list[Status]:
        self.entered.release()
        assert self.open.wait(30)
        found = super()._get(items)
        return [Status.MISS if i.key in self.fail else s for i, s in zip(items, found, strict=True)]


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "pages")
    yield made
    made.open.set()
    made.close()


class Side:
    """A group with a controller and a tier."""

    def __init__(self, storage: Gate, pages: Mapping[str, int], **how: Any) -> None:
        self.group, self.rows, self.states = hybrid(pages)
        self.controller = HybridCacheController(self.group, limit=4)
        self.tier = Tier(self.controller, storage, model="m", shard="all", **how)

    def ack(self, direction: str) -> Ack:
        """The next ack, once it is there."""
        running = self.controller._running[direction][0]
        future = getattr(running.leg, "_future", None)
        if future is not None:
            future.exception(30)
        (found,) = self.controller.pop_acks(1, direction)
        return found

    def fill(self, pages: int, states: Sequence[int]) -> None:
        """Store so many pages of keys and values, and the states at these boundaries."""
        operation = self.controller.write({"kv": torch.arange(pages * P)})
        assert operation is not None
        self.controller.start_writing()
        self.ack("write_back")
        self.tier.store({"kv": (HASHES[:pages], operation.host["kv"])})
        self.ack("store")
        for boundary in states:
            state = self.controller.write({"state": torch.tensor([boundary])})
            assert state is not None
            self.controller.start_writing()
            self.ack("write_back")
            self.tier.store({"state": ([HASHES[boundary - 1]], state.host["state"])})
            assert self.ack("store").statuses == {"state": [Status.HIT]}

    def fetch(self, pages: int) -> Ack:
        assert self.tier.fetch(HASHES[:pages]) is not None
        return self.ack("fetch")

    def close(self) -> None:
        self.tier.close()
        self.group.destroy()


@pytest.fixture
def sides(storage: Gate) -> Iterator[tuple[Side, Side]]:
    """Two of other capacity, so that their pages lie elsewhere."""
    one, other = Side(storage, {"kv": 7, "state": 7}, step=2), Side(storage, {"kv": 12, "state": 3}, step=2)
    other.group.alloc({"kv": 3 * P, "state": 1})
    yield one, other
    one.close()
    other.close()


# ---- hits


@pytest.mark.parametrize("states", [*itertools.combinations(range(1, 6), 2), ()])
@pytest.mark.parametrize("pages", [5, 3])
def test_a_prefix_is_a_hit_only_where_every_pool_has_the_same_boundary(
    sides: tuple[Side, Side], states: tuple[int, ...], pages: int
) -> None:
    one, other = sides
    one.fill(pages, states)
    ack = other.fetch(5)
    best = max((boundary for boundary in states if boundary <= pages), default=0)
    assert ack.hit == best and ack.error is None
    kept = other.tier.keep(ack, best)
    assert sum(other.group.available_size().values()) == 9 * P + 2 - best * P - (best > 0)
    if best == 0:
        assert kept == {}
        return
    rows, slot = torch.arange(20, 20 + best * P) % (9 * P), torch.tensor([8])
    other.controller.load({"kv": (kept["kv"], rows), "state": (kept["state"], slot)})
    other.controller.start_loading().wait_all()
    for mine, theirs in zip(other.rows, one.rows, strict=True):
        assert torch.equal(mine[rows], theirs[: best * P])
    for mine, theirs in zip(other.states, one.states, strict=True):
        assert torch.equal(mine[:, 8], theirs[:, best])


@given(st.data())
@settings(max_examples=300)
def test_rules_of_hits_are_what_they_say(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 6))
    rules = {name: Rule(data.draw(st.sampled_from([None, 1, 2, 3]))) for name in "abc"}
    found = {name: data.draw(st.lists(st.booleans(), min_size=length, max_size=length)) for name in rules}

    def holds(pages: int) -> bool:
        needed = {
            n: found[n][:pages] if r.trailing is None else found[n][:pages][-r.trailing :]
            for n, r in rules.items()
        }
        return all(all(each) for each in needed.values())

    assert usable(rules, found) == max(n for n in range(length + 1) if holds(n))


def test_a_state_that_does_not_come_gives_way_to_an_earlier_one(
    storage: Gate, sides: tuple[Side, Side]
) -> None:
    """It was there when storage was asked, and is not when it is needed."""
    one, other = sides
    one.fill(5, [2, 5])
    storage.fail = {other.tier._stores["state"].namespace.key(HASHES[4])}
    assert other.fetch(5).hit == 2


def test_a_window_needs_its_last_pages(storage: Gate) -> None:
    side = Side(storage, {"kv": 12, "state": 9}, trailing={"state": 2})
    side.fill(5, [1, 2, 4])
    ack = side.fetch(5)
    assert ack.hit == 2 and len(ack.operation.host["state"]) == 2
    side.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "wiped"])
def test_damage_is_a_miss_and_never_a_wrong_page(
    storage: Gate, sides: tuple[Side, Side], damage: str
) -> None:
    one, other = sides
    one.fill(5, [2, 5])
    path = storage._folder.path(_digest(other.tier._stores["kv"].namespace.key(HASHES[3])))
    if damage == "flip":
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        for each in [path] if damage == "gone" else path.parents[1].rglob("*"):
            if each.is_file():
                each.unlink()
    ack = other.fetch(5)
    assert ack.hit == (0 if damage == "wiped" else 2) and ack.error is None


def test_pools_that_take_ids_are_stored_and_needed_with_their_source(storage: Gate) -> None:
    sizes: Any = {"heads": 1, "head_dim": 3, "v_head_dim": 3, "dtype": torch.bfloat16}
    group = TargetDraftHostPoolGroup(
        target_layers=(0, 1), draft_layers=(2,), page_size=P, capacity_pages={"target": 6},
        target=sizes, draft=sizes, device="cpu",
    )  # fmt: skip
    rows = {name: [torch.randn(9 * P, 1, 3).to(torch.bfloat16) for _ in range(3)] for name in KV}
    group.bind({"target": {n: r[:2] for n, r in rows.items()}, "draft": {n: r[2:] for n, r in rows.items()}})
    controller = HybridCacheController(group)
    tier = Tier(controller, storage, model="m", shard="all")
    operation = controller.write({"target": torch.arange(3 * P)})
    assert operation is not None
    controller.start_writing()
    controller.pop_acks()
    tier.store({"target": (HASHES[:3], operation.host["target"])})
    controller._running["store"][0].leg.end()
    (ack,) = controller.pop_acks()
    assert ack.statuses == {"target": [Status.HIT] * 3, "draft": [Status.HIT] * 3}
    controller.free(operation.host)
    assert tier._stores["draft"].remove(HASHES[2:3]) == [Status.HIT]
    assert tier.fetch(HASHES[:3]) is not None
    controller._running["fetch"][0].leg._future.exception(30)  # type: ignore[attr-defined]
    (ack,) = controller.pop_acks()
    assert ack.hit == 2
    kept = tier.keep(ack, 1)
    before = [row.clone() for each in rows.values() for row in each]
    controller.load({"target": (kept["target"], torch.arange(20, 20 + P))})
    controller.start_loading().wait_all()
    for row, old in zip((row for each in rows.values() for row in each), before, strict=True):
        assert torch.equal(row[20 : 20 + P], old[:P])
    tier.close()
    group.destroy()


# ---- pages meanwhile


def test_pages_are_held_until_the_ack_is_taken(storage: Gate, sides: tuple[Side, Side]) -> None:
    one, _ = sides
    operation = one.controller.write({"kv": torch.arange(2 * P)})
    assert operation is not None
    with pytest.raises(ValueError, match="host page 0 is being written: use it once"):
        one.tier.store({"kv": (HASHES[:2], operation.host["kv"])})
    one.controller.start_writing()
    one.ack("write_back")
    one.tier.store({"kv": (HASHES[:2], operation.host["kv"])})
    with pytest.raises(ValueError, match="page 0 is held by an operation"):
        one.controller.free(operation.host)
    assert one.controller.load({"kv": (operation.host["kv"], torch.arange(20, 20 + 2 * P))}) is not None
    one.ack("store")
    assert one.controller.locked("kv") == {0, 1}, "the load holds them still"
    one.controller.start_loading()
    one.ack("load")
    one.controller.free(operation.host)


def test_a_fetch_reserves_and_a_cancel_gives_what_came(storage: Gate, sides: tuple[Side, Side]) -> None:
    one, other = sides
    one.fill(5, [2, 5])
    storage.open.clear()
    operation = other.tier.fetch(HASHES[:5])
    assert operation is not None
    assert storage.entered.acquire(timeout=30)
    assert other.controller.locked("kv") == set(operation.pages["kv"]) and len(operation.pages["kv"]) == 5
    assert other.controller.ready("fetch") == 0
    assert other.tier.cancel(operation) and not other.controller.cancel(operation)
    storage.open.set()
    ack = other.ack("fetch")
    assert ack.hit == 0, "the state of no boundary came"
    assert other.tier.keep(ack, 0) == {} and not other.tier.cancel(operation)
    assert other.group.available_size()["kv"] == 9 * P


def test_a_cancelled_fetch_of_whole_pages_keeps_what_came(tmp_path: Path) -> None:
    pool = MLATokenToKVPoolHost(
        kv_lora_rank=3, qk_rope_head_dim=2, dtype=torch.bfloat16, layers=(0,), page_size=P,
        capacity_pages=6, device="cpu",
    )  # fmt: skip
    pool.bind({"kv": [torch.randn(6 * P, 5).to(torch.bfloat16)]})
    with Gate(tmp_path / "pages") as gate:
        controller = CacheController(pool)
        tier = Tier(controller, gate, model="m", shard="all", step=2)
        written = controller.write(torch.arange(6 * P))
        assert written is not None
        controller.start_writing()
        controller.pop_acks()
        tier.store({pool.name: (HASHES, written.host[pool.name])})
        controller._running["store"][0].leg.end()
        assert [s for (ack,) in [controller.pop_acks()] for s in ack.statuses[pool.name]] == [Status.HIT] * 6
        controller.free(written.host[pool.name])
        gate.open.clear()
        operation = tier.fetch(HASHES)
        assert operation is not None and gate.entered.acquire(timeout=30)
        assert tier.cancel(operation)
        gate.open.set()
        controller._running["fetch"][0].leg._future.exception(30)  # type: ignore[attr-defined]
        (ack,) = controller.pop_acks()
        assert ack.hit == 2, "the step that was under way"
        kept = tier.keep(ack, 1)
        assert kept[pool.name].tolist() == operation.host[pool.name][:P].tolist()
        assert pool.available_size() == 5 * P
        shown: Any = controller.statistics()[pool.name]["fetch"]
        assert (shown["operations"], shown["pages"], shown["paths"]) == (1, 2, {gate.name: 1})
        tier.close()
    pool.destroy()


def test_a_reset_waits_for_the_worker_before_pages_are_free(storage: Gate, sides: tuple[Side, Side]) -> None:
    """A late worker would write into pages that somebody else has by then."""
    one, other = sides
    one.fill(5, [5])
    storage.open.clear()
    operation = other.tier.fetch(HASHES[:5])
    assert storage.entered.acquire(timeout=30)
    done: list[list[Operation]] = []
    resetting = threading.Thread(target=lambda: done.append(other.controller.reset()))
    resetting.start()
    resetting.join(0.05)
    assert resetting.is_alive() and other.group.available_size()["kv"] < 12 * P
    storage.open.set()
    resetting.join(30)
    assert done == [[operation]] and other.group.available_size() == {"kv": 12 * P, "state": 3}


def test_no_room_takes_nothing(sides: tuple[Side, Side]) -> None:
    _, other = sides
    free = other.group.available_size()
    other.group.alloc({"state": free["state"]})
    assert other.tier.fetch(HASHES[:5]) is None
    assert other.group.available_size() == {"kv": 9 * P, "state": 0}


# ---- failures, wrong calls


def test_a_storage_that_is_closed_is_told_by_the_ack(storage: Gate, sides: tuple[Side, Side]) -> None:
    _, other = sides
    storage.close()
    ack = other.fetch(3)
    assert ack.error is not None and "closed" in str(ack.error) and ack.hit == 0
    other.tier.keep(ack, 0)
    assert other.group.available_size() == {"kv": 9 * P, "state": 2}


def test_wrong_calls(storage: Gate, sides: tuple[Side, Side]) -> None:
    one, other = sides
    with pytest.raises(ValueError, match="kv: store: expected 8 ids for 2 pages, got 4"):
        one.tier.store({"kv": (HASHES[:2], torch.arange(4))})
    with pytest.raises(ValueError, match="page hash: expected 16 to 128 characters"):
        one.tier.store({"kv": (["no hash"], torch.arange(4))})
    with pytest.raises(ValueError, match="page hash: expected 16 to 128 characters"):
        one.tier.fetch(["no hash"])
    with pytest.raises(ValueError, match="which is not allocated"):
        one.tier.store({"kv": (HASHES[:1], torch.arange(4))})
    with pytest.raises(ValueError, match="trailing: 'kv' is no pool that hits by its trailing pages"):
        Tier(one.controller, storage, model="m", shard="all", trailing={"kv": 2})
    with pytest.raises(ValueError, match="step: expected an integer of at least 1, got 0"):
        Tier(one.controller, storage, model="m", shard="all", step=0)
    one.fill(3, [3])
    ack = other.fetch(3)
    with pytest.raises(ValueError, match="keep: expected 0 to 3 pages of a fetch, got 4"):
        other.tier.keep(ack, 4)
    assert other.tier.keep(ack, 2) == {}, "the state is that of another boundary"
    assert other.group.available_size() == {"kv": 9 * P, "state": 2}


# ---- another process


def test_pages_outlive_the_process_that_stored_them(tmp_path: Path) -> None:
    """A process spills and is killed; another one, of another capacity, fetches every page."""
    script = f"""
import os, signal, sys, torch
sys.path.insert(0, {str(ROOT / "tests")!r})
from pathlib import Path
import test_tiers
torch.manual_seed(0)
side = test_tiers.Side(test_tiers.Gate(Path({str(tmp_path)!r}) / "pages"), {{"kv": 7, "state": 7}})
side.fill(5, [2, 5])
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / ".src"), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=environment)
    assert done.returncode == -signal.SIGKILL
    torch.manual_seed(0)
    _, rows, states = hybrid({"kv": 7, "state": 7})
    with Gate(tmp_path / "pages") as gate:
        other = Side(gate, {"kv": 12, "state": 3})
        other.group.alloc({"kv": 2 * P, "state": 2})
        ack = other.fetch(5)
        assert ack.hit == 5
        kept = other.tier.keep(ack, 5)
        tokens = torch.arange(5 * P)
        other.controller.load({"kv": (kept["kv"], tokens), "state": (kept["state"], torch.tensor([0]))})
        other.controller.start_loading().wait_all()
        for mine, row in zip(other.rows, rows, strict=True):
            assert torch.equal(mine[tokens], row[tokens])
        for mine, state in zip(other.states, states, strict=True):
            assert torch.equal(mine[:, 0], state[:, 5])
        other.close()
