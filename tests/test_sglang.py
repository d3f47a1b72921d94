"""Generated pools under SGLang's own classes: groups, transfers, controllers, storage; from its wheel."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_calls
import sglang_wheel
import torch
from conftest import ROOT
from simulation import CONFIGS, GROUPS, Config, GroupConfig, World, first, group_world, last, world

from poolwright.generated.groups.dsv32 import Dsv32HostPoolGroup
from poolwright.generated.pools.logical.pool import LogicalHostPool
from poolwright.generated.pools.mamba.pool import MambaPoolHost
from poolwright.generated.pools.mha.pool import MHATokenToKVPoolHost
from poolwright.generated.pools.mla.pool import MLATokenToKVPoolHost
from poolwright.runtime.driver.host import HostDriver
from poolwright.runtime.errors import PoolError
from poolwright.runtime.integrations.sglang import HiCachePool, host_pool, host_pools

PAGE = 4
CHOICES = {"first": first, "last": last, "random": random.Random(7).randrange}


class Cpu(HostDriver):
    """The CPU for the engine's module of a device: everything has run when a call returns."""

    def new_stream(self, name: str) -> None:
        return None

    def use_stream(self, stream: object) -> Any:
        return nullcontext()


@pytest.fixture(scope="module")
def wheel() -> Path:
    return sglang_wheel.wheel_folder()


@pytest.fixture(scope="module")
def modules(wheel: Path) -> Iterator[sglang_wheel.Engine]:
    with sglang_wheel.engine(wheel) as made:
        yield made


@pytest.fixture
def engine(modules: sglang_wheel.Engine) -> sglang_wheel.Engine:
    modules.devices.driver = Cpu()
    return modules


def mla(layout: str = "page_first", pages: int = 8) -> MLATokenToKVPoolHost:
    sizes = {"kv_lora_rank": 6, "qk_rope_head_dim": 2, "dtype": torch.bfloat16, "layers": range(3)}
    return MLATokenToKVPoolHost(**sizes, page_size=PAGE, layout=layout, capacity_pages=pages)


def mha(layout: str = "page_first", v_head_dim: int = 4, pages: int = 8) -> MHATokenToKVPoolHost:
    sizes = {"heads": 2, "head_dim": 4, "v_head_dim": v_head_dim, "dtype": torch.bfloat16, "layers": range(3)}
    return MHATokenToKVPoolHost(**sizes, page_size=PAGE, layout=layout, capacity_pages=pages)


def bound(pool: Any, pages: int = 8) -> dict[str, list[torch.Tensor]]:
    """Random device rows, bound."""
    wide = pool.sizes
    widths = {"kv": (8,)} if pool.name == "mla" else {"k": (2, 4), "v": (2, wide["v_head_dim"])}
    rows = {
        name: [torch.randn(pages * PAGE, *width).bfloat16() for _ in range(3)]
        for name, width in widths.items()
    }
    pool.bind(rows)
    return rows


def ids(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


# ---- the wheel --------------------------------------------------------------------------------


def test_a_wheel_that_is_not_there_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sglang_wheel.VARIABLE, str(tmp_path))
    asked = r"have POOLWRIGHT_SGLANG name a folder with the unpacked wheel \(pip download --no-deps sglang=="
    with pytest.raises(RuntimeError, match=asked):
        sglang_wheel.wheel_folder()
    monkeypatch.delenv(sglang_wheel.VARIABLE)
    monkeypatch.setattr(sglang_wheel, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(sglang_wheel, "_download", lambda folder: False)
    with pytest.raises(RuntimeError, match=rf"pip cannot download sglang==0.5.23: .*{asked}"):
        sglang_wheel.wheel_folder()
    assert not (tmp_path / "kept").exists()


# ---- signatures -------------------------------------------------------------------------------


def test_every_call_of_the_engine_on_a_host_pool_fits(wheel: Path) -> None:
    pool = mha()
    assert sglang_calls.drift(wheel / "sglang" / "srt", host_pool(pool)) == []
    pool.destroy()


def test_what_is_left_to_other_kinds_of_pool_is_used_by_the_engine(wheel: Path) -> None:
    used = {use.name for use in sglang_calls.uses(wheel / "sglang" / "srt")}
    assert set(sglang_calls.ELSEWHERE) <= used
    assert {"prepare_transfer_indices", "get_page_buffer_meta", "set_from_flat_data_page"} <= used


DRIFTS = {  # file, what is put in the place of what there, what is said of it
    "a parameter gets another name": (
        *("mem_cache/pool_host/base.py", "data_page: ", "page: "),
        r"set_from_flat_data_page: expected \(index, page\), got \(index, data_page\)",
    ),
    "a method takes more": (
        *("mem_cache/pool_host/base.py", "io_backend\n    )", "io_backend, *, priority=0\n    )"),
        r"backup_from_device_all_layer: expected \(device_pool, host_indices, device_indices, "
        r"io_backend, \*, priority=\), got \(device_pool, host_indices, device_indices, io_backend\)",
    ),
    "a call passes more": (
        *("mem_cache/l2_transfer.py", "is_draft=", "chunk=1, is_draft="),
        r"mem_cache/l2_transfer.py:\d+ calls load_to_device_per_layer_physical\(argument 1, .*argument 5, "
        r"chunk=, is_draft=\): expected a call of load_to_device_per_layer_physical\(device_pool, .*"
        r"\), got: got an unexpected keyword argument 'chunk'",
    ),
    "a call is new": (
        *("mem_cache/hicache_storage.py", "host_pool.set_from_flat_data_page(", "host_pool.publish("),
        r"mem_cache/hicache_storage.py:\d+ calls publish\(argument 1, argument 2\): expected publish, "
        r"got no such name",
    ),
    "an attribute is new": (
        *("mem_cache/l2_transfer.py", "host_pool.layer_num", "host_pool.layer_count"),
        r"mem_cache/l2_transfer.py:\d+ reads layer_count: expected layer_count, got no such name",
    ),
}


@pytest.mark.parametrize("change", DRIFTS.values(), ids=DRIFTS)
def test_a_drift_is_named(change: tuple[str, str, str, str], wheel: Path, tmp_path: Path) -> None:
    file, old, new, message = change
    for name in ("l2_transfer.py", "hicache_storage.py", "pool_host"):
        source, copy = wheel / "sglang" / "srt" / "mem_cache" / name, tmp_path / "mem_cache" / name
        copy.parent.mkdir(exist_ok=True)
        shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new, 1))
    pool = mha()
    (found,) = sglang_calls.drift(tmp_path, host_pool(pool))
    assert re.fullmatch(message, found), found
    pool.destroy()


# ---- transfers, on a device that takes every liberty with order --------------------------------


@dataclass
class Life:
    """Pools in the engine's group, their worlds, and the engine's transfers between them."""

    engine: sglang_wheel.Engine
    worlds: Mapping[str, World]
    pools: Mapping[str, HiCachePool]
    numbers: int  # layers that the engine counts
    follows: Mapping[str, str] = field(default_factory=dict)
    on_device: bool = False  # where the ids of device rows lie

    def __post_init__(self) -> None:
        self.driver = next(iter(self.worlds.values())).driver
        self.engine.devices.driver = self.driver
        names = self.engine("mem_cache.hicache_storage").PoolName
        group = self.engine("mem_cache.pool_host")
        roles = dict(zip(self.pools, (names.KV, names.MAMBA), strict=False))
        self.roles = roles
        self.owners = {name: self.follows.get(name, name) for name in self.pools}
        self.group = group.HostPoolGroup(
            [
                group.PoolEntry(roles[name], pool, SimpleNamespace(), self.mapper(name))
                for name, pool in self.pools.items()
            ]
        )
        self.l2 = self.engine("mem_cache.l2_transfer").L2TransferEngine("kernel")

    def mapper(self, name: str) -> Callable[[int], int | None]:
        """The engine's layer to the position in this pool's list."""
        layers = self.worlds[name].config.layers
        return {layer: at for at, layer in enumerate(layers)}.get

    def transfers(
        self, moves: Mapping[str, tuple[Sequence[int], Sequence[int]]], host: Mapping[str, torch.Tensor]
    ) -> list[Any]:
        made = self.engine("mem_cache.l2_transfer").L2Transfer
        rows: dict[str, torch.Tensor] = {}
        for name, (_, pages) in moves.items():
            owner, tokens = self.owners[name], self.worlds[name].tokens(pages)
            if owner in rows and pages == moves[owner][1]:  # the engine hands the same list on
                rows[name] = rows[owner]
            elif self.on_device:
                rows[name] = self.worlds[name].device_ids(tokens, self.driver.caller)
            else:
                rows[name] = torch.tensor(tokens)
        return [
            made(self.pools[name], SimpleNamespace(), host[name], rows[name], self.mapper(name))
            for name in moves
        ]

    def stream(self) -> Any:
        return self.engine.devices.Stream(self.driver.caller)

    def run(self, moves: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> None:
        """Device pages (first of each pair) go to the host and come back at others (second)."""
        for name, (pages, _) in moves.items():
            self.worlds[name].produce(self.driver.caller, self.worlds[name].tokens(pages))
        host = self.allocated(moves)
        out = {name: (pages, pages) for name, (pages, _) in moves.items()}
        done = self.l2.submit_device_to_host(self.transfers(out, host))
        for name, (pages, _) in moves.items():
            made = self.worlds[name]
            made.stored(host[name].tolist(), made.tokens(pages))
        done.finish_event.wait(self.stream())
        for name, (pages, _) in moves.items():  # what comes behind the engine's event may overwrite the rows
            self.worlds[name].produce(self.driver.caller, self.worlds[name].tokens(pages))
        done.finish_event.synchronize()
        for name in moves:
            made = self.worlds[name]
            made.compare_host({token // made.page_size for token in host[name].tolist()})
        self.load(moves, host)
        for name, owner in self.owners.items():
            if name == owner and name in moves:
                assert self.group.free(host[name], pool=self.roles[name]) == len(host[name])

    def allocated(self, moves: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Host ids for the pages of each pool, from the pool whose ids it takes."""
        found: dict[str, torch.Tensor] = {}
        for name, (pages, _) in moves.items():
            owner = self.owners[name]
            count = len(pages) * self.worlds[name].page_size
            found[name] = found[owner] if owner in found else self.group.alloc(count, pool=self.roles[owner])
        return found

    def load(
        self, moves: Mapping[str, tuple[Sequence[int], Sequence[int]]], host: Mapping[str, torch.Tensor]
    ) -> None:
        events = [self.engine.devices.Event() for _ in range(self.numbers)]
        self.l2.submit_host_to_device(
            self.transfers(moves, host),
            transfer_layer_id_max=self.numbers,
            on_layer_done=lambda layer: events[layer].record(),
        )
        for name, (_, pages) in moves.items():
            made = self.worlds[name]
            made.loaded(host[name].tolist(), made.tokens(pages), range(len(made.config.layers)))
        for layer, event in enumerate(events):
            event.wait(self.stream())
            for name, (_, pages) in moves.items():
                made = self.worlds[name]
                if layer in made.config.layers:
                    at = made.config.layers.index(layer)
                    made.read(self.driver.caller, made.tokens(pages), [at])

    def check(self) -> None:
        for made in self.worlds.values():
            made.settle()
            made.check()


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("on_device", [False, True], ids=["ids on the CPU", "ids on the device"])
@pytest.mark.parametrize("config", CONFIGS, ids=[config.label for config in CONFIGS])
def test_pages_go_out_and_come_back_layer_by_layer(
    config: Config, on_device: bool, choose: Callable[[int], int], engine: sglang_wheel.Engine
) -> None:
    made = world(config, choose)
    pools, layers = {"kv": host_pool(made.pool)}, max(config.layers) + 1
    life = Life(engine, {"kv": made}, pools, layers, on_device=on_device)
    life.run({"kv": ((1, 6, 2), (7, 3, 4))})
    life.run({"kv": ((7,), (5,))})
    life.check()
    made.pool.destroy()


MOVES: dict[str, list[dict[str, tuple[Sequence[int], Sequence[int]]]]] = {
    "kimi_linear": [
        {"kv": ((1, 6), (7, 3)), "state": ((2,), (5,))},
        {"kv": ((7,), (4,))},
        {"state": ((3, 4), (1, 6))},
    ],
    "swa_full": [{"full": ((1, 6), (7, 3)), "swa": ((2,), (5,))}, {"swa": ((2,), (4,))}],
    "target_draft": [{"target": ((1, 6), (7, 3)), "draft": ((1, 6), (7, 3))}],
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("on_device", [False, True], ids=["ids on the CPU", "ids on the device"])
@pytest.mark.parametrize("config", GROUPS, ids=[config.label for config in GROUPS])
def test_pools_of_a_group_go_out_and_come_back(
    config: GroupConfig,
    on_device: bool,
    choose: Callable[[int], int],
    engine: sglang_wheel.Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = group_world(config, choose)
    calls = {"write_back": 0, "load": 0}
    for call in calls:
        counted(made.group, call, calls, monkeypatch)
    layers = {layer for each in made.worlds.values() for layer in each.config.layers}
    pools = host_pools(made.group)
    life = Life(engine, made.worlds, pools, max(layers) + 1, config.follows, on_device)
    for moves in MOVES[config.label]:
        life.run(moves)
    life.check()
    assert calls == dict.fromkeys(calls, len(MOVES[config.label])), "one submission for all pools"
    made.group.destroy()


def counted(group: Any, call: str, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(group, call)

    def count(*given: Any, **named: Any) -> Any:
        calls[call] += 1
        return real(*given, **named)

    monkeypatch.setattr(group, call, count)


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_the_last_event_stands_for_layers_that_nobody_asks_for(
    choose: Callable[[int], int], engine: sglang_wheel.Engine
) -> None:
    config = CONFIGS[0]
    made = world(config, choose)
    adapted = host_pool(made.pool, layers={0: 0})  # of three
    life = Life(engine, {"kv": made}, {"kv": adapted}, 3)
    life.l2.submit_device_to_host(life.transfers({"kv": ((), (1,))}, {"kv": adapted.alloc(config.page_size)}))
    done = life.l2.submit_host_to_device(
        life.transfers({"kv": ((), (4,))}, {"kv": torch.arange(config.page_size)}), transfer_layer_id_max=3
    )
    done.finish_event.wait(life.stream())
    made.produce(made.driver.caller, made.tokens([4]))  # the simulator tells a race
    life.check()
    made.pool.destroy()


@pytest.mark.parametrize("direction", ["write_back", "load"])
def test_a_submission_that_was_given_up_leaves_nothing_to_the_next(
    direction: str, engine: sglang_wheel.Engine
) -> None:
    """The engine announced a pool and failed; the traceback keeps all it held. The next one is of another."""
    config = next(each for each in GROUPS if each.label == "kimi_linear")
    made = group_world(config, first)
    pools = host_pools(made.group)
    life = Life(engine, made.worlds, pools, 5)
    out = {"kv": ((1,), (1,)), "state": ((2,), (2,))}
    host = life.allocated(out)
    for name, (pages, _) in out.items():
        made.worlds[name].produce(made.driver.caller, made.worlds[name].tokens(pages))
    life.l2.submit_device_to_host(life.transfers(out, host))
    for name, (pages, _) in out.items():
        made.worlds[name].stored(host[name].tolist(), made.worlds[name].tokens(pages))
    broken = life.transfers({"kv": ((7,), (7,))}, host)
    broken.append(broken[0]._replace(host_pool=pools["state"], device_pool=Unreadable()))
    with pytest.raises(PoolError, match="no table") as held:
        life.l2.submit_device_to_host(broken)
    if direction == "load":
        life.load({"state": ((2,), (5,))}, host)
    else:
        life.l2.submit_device_to_host(life.transfers({"state": ((2,), (2,))}, host))
    life.check()
    for name, each in made.worlds.items():
        each.compare_host(token // each.page_size for token in host[name].tolist())
        each.check()
    assert held.tb is not None, "its frames were there all the time"
    made.group.destroy()


class Unreadable:
    """A device pool that cannot say where its rows lie."""

    def host_transfer_translate(self, ids: torch.Tensor) -> torch.Tensor:
        raise PoolError("no table")


def test_an_owner_that_was_not_announced_is_asked_for(engine: sglang_wheel.Engine) -> None:
    config = next(each for each in GROUPS if each.label == "target_draft")
    made = group_world(config, first)
    life = Life(engine, made.worlds, host_pools(made.group), 8, config.follows)
    host = life.allocated({"target": ((1,), ()), "draft": ((1,), ())})
    alone = life.transfers({"draft": ((1,), (1,))}, host)
    with pytest.raises(ValueError, match=r"draft takes the ids of target and is moved with it: .* none of"):
        life.l2.submit_device_to_host(alone)
    with pytest.raises(ValueError, match="expected the same ids of both in one submission, got others of"):
        life.l2.submit_device_to_host(life.transfers({"target": ((1,), (1,)), "draft": ((2,), (2,))}, host))
    made.group.destroy()


# ---- the CPU twin -----------------------------------------------------------------------------


def test_latents_and_indexer_in_one_group(engine: sglang_wheel.Engine, tmp_path: Path) -> None:
    """Index keys lie at the ids of the latents: one submission moves both, storage keeps both."""
    latents = [torch.randn(8 * PAGE, 8).bfloat16() for _ in range(3)]
    keys = [torch.randint(0, 255, (8, PAGE * 132), dtype=torch.uint8) for _ in range(2)]
    group = Dsv32HostPoolGroup(
        kv={"kv_lora_rank": 6, "qk_rope_head_dim": 2, "dtype": torch.bfloat16, "layers": range(3)},
        indexer={"index_head_dim": 128, "layers": (0, 2)},
        page_size=PAGE,
        layout="page_first",
        capacity_pages={"kv": 6},
    )
    group.bind({"kv": {"kv": latents}, "indexer": {"row": keys}})
    with pytest.raises(ValueError, match=r"dsv32: layers: no pool 'keys'; pools are kv, indexer"):
        host_pools(group, layers={"keys": {}})
    pools = host_pools(group, layers={"indexer": {0: 0, 2: 2}})
    names = engine("mem_cache.hicache_storage").PoolName
    entry = engine("mem_cache.pool_host").PoolEntry
    both = engine("mem_cache.pool_host").HostPoolGroup(
        [
            entry(names.KV, pools["kv"], None, lambda layer: layer, is_primary_index_anchor=True),
            entry(names.INDEXER, pools["indexer"], None, lambda layer: layer),
        ]
    )
    assert both.can_use_write_back_jit and both.size == 6 * PAGE and both.page_size == PAGE
    assert both.size_per_token == 3 * 8 * 2 and not both.stores_page_envelope
    kept = [[row.clone() for row in rows] for rows in (latents, keys)]
    l2 = engine("mem_cache.l2_transfer").L2TransferEngine("direct")
    host = both.alloc(2 * PAGE)

    def transfers(host: torch.Tensor, device: torch.Tensor) -> list[Any]:
        made = engine("mem_cache.l2_transfer").L2Transfer
        return [
            made(each.host_pool, None, host.clone(), device.clone(), each.layer_mapper)
            for each in both.entries
        ]

    l2.submit_device_to_host(transfers(host, ids(5, 2)))
    storage = file_storage(engine, tmp_path, mla=True)
    for each in both.entries:
        storage.register_mem_host_pool_v2(each.host_pool, each.name)
    moved = engine("mem_cache.hicache_storage").PoolTransfer
    hashes = ["one", "two"]

    def stored(host: torch.Tensor) -> list[Any]:
        return [moved(each.name, host_indices=host, keys=hashes) for each in both.entries]

    assert storage.batch_set_v2(stored(host)) == {names.KV: [True] * 2, names.INDEXER: [True] * 2}
    found = storage.batch_exists_v2(hashes, [moved(names.INDEXER, keys=hashes)])
    assert found.kv_hit_pages == 2 and found.extra_pool_hit_pages[names.INDEXER] == 2
    for pool in group.pools.values():
        pool.kv_buffer.zero_()
    for rows in (*latents, *keys):
        rows.zero_()
    other = both.alloc(2 * PAGE)
    assert storage.batch_get_v2(stored(other)) == {names.KV: [True] * 2, names.INDEXER: [True] * 2}
    layers: list[int] = []
    l2.submit_host_to_device(
        transfers(other, ids(1, 7)), transfer_layer_id_max=3, on_layer_done=layers.append
    )
    assert layers == [0, 1, 2]
    for rows, old in zip(latents, kept[0], strict=True):
        assert torch.equal(rows[ids(1, 7)], old[ids(5, 2)]) and int(rows[ids(5, 2)].count_nonzero()) == 0
    for rows, old in zip(keys, kept[1], strict=True):
        assert torch.equal(rows[[1, 7]], old[[5, 2]]) and int(rows[[5, 2]].count_nonzero()) == 0
    both.clear()
    assert both.available_size() == both.available_size(names.INDEXER) == 6 * PAGE
    both.destroy()
    both.destroy()
    assert both.kv_buffer is None


def file_storage(engine: sglang_wheel.Engine, folder: Path, mla: bool) -> Any:
    """The engine's own file storage of one rank."""
    module = engine("mem_cache.hicache_storage")
    config = module.HiCacheStorageConfig(
        **dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0),
        **dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1),
        is_mla_model=mla,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="org/model",
        extra_config={"file_storage_path": str(folder)},
    )
    return module.HiCacheFile(config)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_record", "layer_first"])
@pytest.mark.parametrize("make", [mla, mha])
def test_pages_through_the_generic_calls_of_storage(
    make: Callable[..., Any], layout: str, engine: sglang_wheel.Engine, tmp_path: Path
) -> None:
    if make is mla and layout == "page_record":
        layout = "page_first"  # the same bytes
    pool = make(layout)
    rows = bound(pool)
    adapted = host_pool(pool)
    pool.write_back(ids(1, 0), ids(6, 3)).wait()
    storage = file_storage(engine, tmp_path, mla=make is mla)
    storage.register_mem_pool_host(adapted)
    hashes = ["one", "two"]
    assert storage.batch_set(hashes, [adapted.get_data_page(torch.tensor(page * PAGE)) for page in (1, 0)])
    targets = storage.batch_get(hashes, [adapted.get_dummy_flat_data_page() for _ in hashes])
    for page, target in zip((5, 7), targets, strict=True):
        adapted.set_from_flat_data_page(torch.tensor(page * PAGE), target)
    kept = {name: [row.clone() for row in each] for name, each in rows.items()}
    pool.load(ids(5, 7), ids(0, 1)).wait()
    for name, each in rows.items():
        for row, old in zip(each, kept[name], strict=True):
            assert torch.equal(row[ids(0, 1)], old[ids(6, 3)])
    assert storage.batch_get(["three"], [adapted.get_dummy_flat_data_page()]) == [None]
    pool.destroy()


HALVES = ("page_first", "page_first_direct", "page_head", "page_record")


@pytest.mark.parametrize("layout", HALVES)
@pytest.mark.parametrize("v_head_dim", [4, 2])
def test_keys_and_values_have_a_range_each(
    layout: str, v_head_dim: int, engine: sglang_wheel.Engine, tmp_path: Path
) -> None:
    """What backends without a copy do: two keys a page, the memory of the halves in and out."""
    pool = mha(layout, v_head_dim)
    rows = bound(pool)
    adapted = host_pool(pool)
    pool.write_back(ids(1, 0), ids(6, 3)).wait()
    storage = file_storage(engine, tmp_path, mla=False)
    keys = [f"{name}-{half}" for name in ("one", "two") for half in ("k", "v")]
    assert storage.batch_set(keys, memory(*adapted.get_page_buffer_meta(ids(1, 0))))
    halves = memory(*adapted.get_page_buffer_meta(ids(5, 7)))
    assert [half is not None for half in storage.batch_get(keys, halves)] == [True] * 4
    for at, (source, target) in enumerate(((1, 5), (0, 7))):
        assert torch.equal(adapted.get_data_page(source * PAGE), adapted.get_data_page(target * PAGE)), at
    row = 3 * 2 * 4 * 2 * PAGE
    assert [half.numel() for half in halves] == [row, row * v_head_dim // 4] * 2
    assert adapted.get_ksize_per_token() * PAGE == adapted.get_page_buffer_element_size() == row
    assert hasattr(adapted, "v_buffer") and adapted.v_buffer.shape == (8, row * v_head_dim // 4)
    assert torch.equal(adapted.k_buffer[5], halves[0]) and torch.equal(adapted.v_buffer[7], halves[3])
    if v_head_dim == 4:
        page = adapted.get_data_page(5 * PAGE, flat=False)
        assert page.shape == (2, row) and page.data_ptr() == halves[0].data_ptr()
        assert torch.equal(page[0], halves[0]) and torch.equal(page[1], halves[1])
    else:
        with pytest.raises(ValueError, match=r"mha: get_data_page: ranges of different size are no tensor"):
            adapted.get_data_page(5 * PAGE, flat=False)
    kept = {name: [each.clone() for each in layers] for name, layers in rows.items()}
    pool.load(ids(5, 7), ids(0, 1)).wait()
    for name, layers in rows.items():
        for now, old in zip(layers, kept[name], strict=True):
            assert torch.equal(now[ids(0, 1)], old[ids(6, 3)])
    pool.destroy()


def memory(addresses: list[int], sizes: list[int]) -> list[torch.Tensor]:
    """Bytes at addresses, as a backend that is given them sees them."""
    kind = ctypes.c_uint8
    return [
        torch.frombuffer((kind * size).from_address(at), dtype=torch.uint8)
        for at, size in zip(addresses, sizes, strict=True)
    ]


def test_other_pools_have_one_range_a_page() -> None:
    pool = mla()
    adapted = host_pool(pool)
    addresses, sizes = adapted.get_page_buffer_meta(ids(2, 3))
    whole = 3 * 8 * 2 * PAGE
    assert sizes == [whole] * 2 and addresses[1] - addresses[0] == whole
    assert adapted.get_ksize_per_token() == adapted.get_size_per_token() == whole // PAGE
    assert not hasattr(adapted, "v_buffer") and not hasattr(adapted, "conv_buffer")
    page = adapted.get_data_page(2 * PAGE, flat=False)
    assert page.shape == (whole,) and page.data_ptr() == addresses[0]
    assert [buffer.data_ptr() for buffer in adapted.get_hybrid_pool_buffer()] == [pool.kv_buffer.data_ptr()]
    pool.destroy()


def test_states_have_a_range_for_each_key_of_storage() -> None:
    sizes = {"heads": 1, "head_dim": 2, "kernel": 2, "ssm_dtype": torch.float32, "conv_dtype": torch.bfloat16}
    for state_size, count in ((4, 3), (0, 2)):
        pool = MambaPoolHost(
            **sizes,
            side_dtype=torch.int64,
            state_size=state_size,
            conv_dim=(4, 2),
            layers=(0, 1),
            capacity_pages=3,
        )
        adapted = host_pool(pool)
        assert len(adapted.conv_buffer) == 2 and (adapted.temporal_state_elem_size > 0) is (state_size > 0)
        addresses, found = adapted.get_page_buffer_meta([1])
        assert len(found) == count and found[-2:] == [16, 8]
        assert addresses[-1] == adapted.conv_buffer[1][1].data_ptr()
        pool.destroy()


def test_a_pool_without_bytes_is_an_anchor(engine: sglang_wheel.Engine) -> None:
    pool = LogicalHostPool(page_size=PAGE, capacity_pages=3)
    adapted = host_pool(pool)
    assert adapted.kv_buffer is None and adapted.get_page_buffer_element_size() is None
    assert adapted.layer_num == adapted.get_ksize_per_token() == adapted.size_per_token == 0
    assert adapted.get_data_page(0, flat=False).numel() == 0 and adapted.get_hybrid_pool_buffer() == []
    assert adapted.alloc(2 * PAGE).tolist() == list(range(2 * PAGE)) and adapted.alloc(2 * PAGE) is None
    pool.destroy()


# ---- controllers ------------------------------------------------------------------------------


class DeviceCache:
    """The engine's device side: a cache of some layers, and an allocator of its token slots."""

    device = "cpu"

    def __init__(self, layers: int, free: Sequence[int]) -> None:
        self.layer_num, self.free = layers, list(free)
        self.kv_buffer: list[torch.Tensor] = []
        self.index_k_buffer: list[torch.Tensor] = []

    def get_kvcache(self) -> DeviceCache:
        return self

    def register_layer_transfer_counter(self, counter: object) -> None:
        self.counter = counter

    def set_hicache_transfer_done_event(self, key: object, event: object) -> None:
        self.last = (key, event)

    def alloc(self, count: int) -> torch.Tensor:
        taken, self.free = self.free[:count], self.free[count:]
        return torch.tensor(taken)


@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
def test_a_controller_keeps_a_prompt_in_storage_and_restores_it(
    io_backend: str, engine: sglang_wheel.Engine, tmp_path: Path
) -> None:
    pool = mha("page_first_direct" if io_backend == "direct" else "page_first")
    rows = bound(pool)
    kept = {name: [row.clone() for row in each] for name, each in rows.items()}
    cache = DeviceCache(3, ids(1, 4).tolist())
    controller = engine("managers.cache_controller").HiCacheController(
        *(cache, host_pool(pool), PAGE, None, threading.Event()),
        io_backend=io_backend,
        storage_backend="file",
        prefetch_threshold=PAGE,
        model_name="org/model",
        storage_backend_extra_config={"file_storage_path": str(tmp_path)},
    )
    try:
        host = controller.write(ids(6, 3))
        assert controller.ack_write_queue[0].num_bytes == 2 * pool.page_bytes
        tokens = list(range(2 * PAGE))
        controller.write_storage(host, tokens, sglang_wheel.page_hashes(tokens, page_size=PAGE))
        assert controller.ack_backup_queue.get(timeout=30).completed_tokens == 2 * PAGE
        tag = controller.storage_config.model_name
        assert tag.startswith("org/model-poolwright-") and len(list(tmp_path.glob("*.bin"))) == 2
        assert controller.evict_host(host) == 2 * PAGE
        for buffer in (pool.kv_buffer, *rows["k"], *rows["v"]):
            buffer.zero_()
        pool.alloc(3 * PAGE)
        operation = controller.prefetch("request", [*tokens, 99])
        assert controller.prefetch_hit_queue.get(timeout=30).storage_hit_count == 2 * PAGE
        operation.host_indices = controller.mem_pool_host.alloc(2 * PAGE)
        controller.prefetch_buffer.put(operation)
        acks = [controller.ack_prefetch_queue.get(timeout=30) for _ in range(2)]
        assert acks[0].completed_tokens == 2 * PAGE and acks[1].completed_req
        device = controller.load(operation.host_indices)
        controller.layer_done_counter.set_consumer(controller.start_loading())
        for layer in range(3):
            controller.layer_done_counter.wait_until(layer)
            for name, each in rows.items():
                assert torch.equal(each[layer][device], kept[name][layer][ids(6, 3)])
    finally:
        controller.detach_storage_backend()
    pool.destroy()


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_a_hybrid_controller_moves_latents_and_states(
    choose: Callable[[int], int], engine: sglang_wheel.Engine
) -> None:
    config = next(each for each in GROUPS if each.label == "kimi_linear")
    made = group_world(config, choose)
    life = Life(engine, made.worlds, host_pools(made.group), 5)
    kv, state = made.worlds["kv"], made.worlds["state"]
    kind = engine("mem_cache.hybrid_cache.hybrid_cache_controller").HybridCacheController
    arguments = (DeviceCache(5, kv.tokens([7, 4])), life.group, kv.page_size, None, threading.Event())
    controller = kind(*arguments, io_backend="kernel", transfer_layer_id_max=5)
    entry = life.group.entry_map["mamba"]
    entry.device_alloc_fn, entry.device_free_fn = (lambda count: torch.tensor([5])), len
    names, transfer = (
        getattr(engine("mem_cache.hicache_storage"), name) for name in ("PoolName", "PoolTransfer")
    )
    kv.produce(made.driver.caller, kv.tokens([1, 6]))
    state.produce(made.driver.caller, [2])
    side = [transfer(names.MAMBA, device_indices=torch.tensor([2]))]
    host = controller.write(torch.tensor(kv.tokens([1, 6])), extra_pools=side)
    kv.stored(host.tolist(), kv.tokens([1, 6]))
    state.stored(side[0].host_indices.tolist(), [2])
    back = [transfer(names.MAMBA, host_indices=side[0].host_indices)]
    device = controller.load(host, extra_pools=back)
    controller.layer_done_counter.set_consumer(controller.start_loading())
    kv.loaded(host.tolist(), device.tolist(), range(2))
    state.loaded(back[0].host_indices.tolist(), [5], range(3))
    for layer in range(5):
        controller.layer_done_counter.wait_until(layer)
        for each, slots in ((kv, device.tolist()), (state, [5])):
            if layer in each.config.layers:
                each.read(made.driver.caller, slots, [each.config.layers.index(layer)])
    life.check()
    for (ack,) in (controller.ack_write_queue, controller.ack_load_queue):
        assert ack.num_tokens_by_pool == {"kv": 2 * kv.page_size, "mamba": 1}
        assert ack.num_bytes == 2 * made.group.kv.page_bytes + made.group.state.page_bytes
    made.group.destroy()


def test_what_the_documentation_shows(engine: sglang_wheel.Engine) -> None:
    text = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- sglang -->\n```python\n(.*?)```", text, re.DOTALL)
    cache = DeviceCache(3, ids(1, 7).tolist())
    cache.kv_buffer = [torch.randn(8 * PAGE, 8).bfloat16() for _ in range(3)]
    cache.index_k_buffer = [torch.randint(1, 255, (8, PAGE * 132), dtype=torch.uint8) for _ in range(2)]
    seen: list[int] = []

    def forward_layer(layer: int, tokens: torch.Tensor) -> None:
        assert tokens.tolist() == ids(1, 7).tolist()
        assert torch.equal(cache.kv_buffer[layer][tokens], cache.kv_buffer[layer][ids(2, 3)])
        if layer in (0, 2):
            rows = cache.index_k_buffer[layer // 2]
            assert torch.equal(rows[[1, 7]], rows[[2, 3]])
        seen.append(layer)

    names = {"cache": cache, "allocator": cache, "device": "cpu", "forward_layer": forward_layer}
    names |= {"tp_group": None, "load_event": threading.Event()}
    exec(compile(block, "docs/embedding.md, under SGLang", "exec"), names)
    assert seen == [0, 1, 2]
    names["pools"].destroy()


# ---- contracts --------------------------------------------------------------------------------


class Elsewhere(torch.Tensor):
    """Ids that say they lie on a device."""

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


def test_host_ids_on_a_device_are_read_back_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    pool = mla()
    rows = bound(pool)
    adapted = host_pool(pool)
    for _ in range(2):
        given = ids(1).as_subclass(Elsewhere)
        host, device = adapted.prepare_transfer_indices(given, ids(6), "kernel")
        adapted.backup_from_device_all_layer_physical(None, host, device, "kernel")
    (told,) = caplog.messages
    assert "host ids lie on cpu and are read back" in told and "page_first_direct" in told
    pool.load(ids(1), ids(0)).wait()
    assert torch.equal(rows["kv"][2][ids(0)], rows["kv"][2][ids(6)])
    pool.destroy()


def test_calls_without_an_announcement() -> None:
    pool = mla()
    rows = bound(pool)
    adapted = host_pool(pool)
    adapted.backup_from_device_all_layer(None, ids(1), ids(6), "kernel")
    before = [row.clone() for row in rows["kv"]]
    adapted.load_to_device_per_layer(None, ids(1), ids(0), 1, "direct")
    assert torch.equal(rows["kv"][1][ids(0)], before[1][ids(6)])
    assert torch.equal(rows["kv"][0], before[0]) and torch.equal(rows["kv"][2], before[2])
    pool.destroy()


def test_layers_of_a_draft_model_are_the_last_of_the_pool(engine: sglang_wheel.Engine) -> None:
    pool = mla()
    rows = bound(pool)
    adapted = host_pool(pool, draft_layers=1)
    assert (adapted.layer_num, adapted.target_layer_num) == (3, 2)
    transfer = engine("mem_cache.l2_transfer").L2Transfer
    l2 = engine("mem_cache.l2_transfer").L2TransferEngine("kernel")
    l2.submit_device_to_host([transfer(adapted, None, ids(1), ids(6))])
    kept = [row.clone() for row in rows["kv"]]
    target = transfer(adapted, None, ids(1), ids(0), lambda layer: layer)
    draft = target._replace(layer_mapper=lambda layer: 2 if layer == 1 else None, is_draft=True)
    l2.submit_host_to_device([target, draft], transfer_layer_id_max=2)
    for row, old in zip(rows["kv"], kept, strict=True):
        assert torch.equal(row[ids(0)], old[ids(6)])
    pool.destroy()


def test_what_is_refused(engine: sglang_wheel.Engine) -> None:
    pool, other = mla(), mha("layer_first")
    adapted = host_pool(pool)
    bound(pool)
    with pytest.raises(
        ValueError, match="mla: io_backend: expected one of kernel, direct, got 'kernel_ascend'"
    ):
        adapted.prepare_transfer_indices(ids(1), ids(6), "kernel_ascend")
    with pytest.raises(
        ValueError, match="mla: expected a layer of 0 to 2, got 3: give layers= where the eng"
    ):
        adapted.load_to_device_per_layer(None, ids(1), ids(6), 3, "kernel")
    with pytest.raises(ValueError, match=r"mla: layers: expected ids of \[0, 1, 2\], got \[7\]"):
        host_pool(pool, layers={0: 7})
    with pytest.raises(ValueError, match="mla: draft_layers: expected 0 to 3, got 4"):
        host_pool(pool, draft_layers=4)
    host, device = adapted.prepare_transfer_indices(ids(1), ids(6), "kernel")
    adapted.backup_from_device_all_layer_physical(None, host, device, "kernel")
    with pytest.raises(PoolError, match="mla: ids announced for a write_back are given to a load"):
        adapted.load_to_device_per_layer_physical(None, host, device, 0, "kernel")
    unlike = host_pool(other)
    assert unlike.get_page_buffer_meta(ids(1))[1] == [2 * 4 * 2 * PAGE] * 6 and not hasattr(
        unlike, "v_buffer"
    )
    assert unlike.storage_format_tag != adapted.storage_format_tag
    assert host_pool(pool).storage_format_tag == adapted.storage_format_tag
    pool.destroy()
    other.destroy()
