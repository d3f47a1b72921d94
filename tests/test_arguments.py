"""Values of a wrong type, in every public call: refused by the name of the pool and of the argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

import poolwright.generated as generated
from poolwright.generated import KimiLinearHostPoolGroup, MLATokenToKVPoolHost
from poolwright.runtime import arguments
from poolwright.runtime.controller import CacheController, HybridCacheController, Tier
from poolwright.runtime.driver.host import HostDriver
from poolwright.runtime.integrations.sglang import host_pool, host_pools
from poolwright.runtime.storage import FileStorage
from poolwright.runtime.tools import samples

VALUES: dict[str, Any] = {
    "None": None,
    "a fraction": 3.5,
    "text": "x",
    "no items": [],
    "nested": [[0]],
    "texts": ["x"],
    "a mapping": {"x": 1},
    "an object": object(),
    "True": True,
    "numpy's True": numpy.True_,
    "negative": -1,
    "sparse": torch.tensor([0, 1, 2, 3]).to_sparse(),
    "meta": torch.arange(4, device="meta"),
    "requires grad": torch.ones(4, requires_grad=True),
    "truths": torch.tensor([True, False, True, False]),
    "no dimension": torch.tensor(1),
}
PAGE, PAGES, ROWS = 4, 6, 9
MLA: dict[str, Any] = {"kv_lora_rank": 3, "qk_rope_head_dim": 2, "dtype": torch.bfloat16}
STATE: dict[str, Any] = {"heads": 1, "head_dim": 2, "kernel": 2, "ngram": 0}
STATE |= {"ssm_dtype": torch.float32, "conv_dtype": torch.bfloat16}
MLA_POOL: dict[str, Any] = {**MLA, "layers": (0, 1, 2), "page_size": PAGE, "capacity_pages": PAGES}
HYBRID: dict[str, Any] = {
    "full_attention_layers": (1, 4),
    "linear_attention_layers": (0, 2, 3),
    "kv": MLA,
    "state": STATE,
    "page_size": PAGE,
    "capacity_pages": {"kv": PAGES, "state": PAGES},
}
IDS, FLAT = torch.arange(PAGE), torch.zeros(PAGE * 3 * 10, dtype=torch.uint8)


def latents(layers: int) -> list[torch.Tensor]:
    return [torch.zeros(ROWS * PAGE, 5, dtype=torch.bfloat16) for _ in range(layers)]


def tensors() -> dict[str, Any]:
    return {"kv": {"kv": latents(2)}, "state": states()}


def states() -> dict[str, torch.Tensor]:
    conv = torch.zeros(3, ROWS, 1, 6, dtype=torch.bfloat16)
    return {"temporal": torch.zeros(3, ROWS, 1, 2, 2), "conv": conv}


@dataclass(frozen=True)
class World:
    """A pool, a group, and what stands on them. Nothing in it changes: every call is refused."""

    pool: Any
    group: Any
    lone: CacheController
    hybrid: HybridCacheController
    tier: Tier
    engine: Any
    storage: FileStorage
    ticket: Any

    def state(self) -> object:
        """What calls with effects would change."""
        free = self.pool.available_size(), self.group.available_size(), self.lone.locked()
        return *free, self.lone.statistics(), self.hybrid.statistics(), self.pool.kv_buffer.sum().item()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    pool, group = MLATokenToKVPoolHost(**MLA_POOL, layout="page_first"), KimiLinearHostPoolGroup(**HYBRID)
    pool.bind({"kv": latents(3)})
    group.bind(tensors())
    assert pool.alloc(PAGE).tolist() == IDS.tolist()
    ticket = pool.load(IDS, IDS, order="layer")
    ticket.wait()
    lone, hybrid = CacheController(pool), HybridCacheController(group)
    storage = FileStorage(tmp_path_factory.mktemp("pages"), 1 << 20)
    tier = Tier(lone, storage, model="m", shard="all")
    yield World(pool, group, lone, hybrid, tier, host_pool(pool), storage, ticket)
    tier.close()
    storage.close()
    group.destroy()
    pool.destroy()


@dataclass(frozen=True)
class Case:
    """A call with one argument left open. `name`: the words for it in a refusal, a pattern; `owner`: how one
    begins; `fine`: values that are taken."""

    name: str
    call: Callable[[World, Any], object]
    fine: tuple[str, ...]
    owner: str


EMPTY = ("no items",)
"""No ids: nothing to do, and no mistake."""
INTEGER = ("no dimension",)
"""Stands for an integer."""
TRUTH = ("True", "numpy's True")
"""A flag."""
GROUPED = "kimi_linear|kv"
"""The group, or the pool of it that refuses."""


def case(name: str, call: Callable[[World, Any], object], *fine: str, owner: str = "mla") -> Case:
    return Case(name, call, fine, owner)


def moves(call: str) -> Iterator[Case]:
    """Every argument of `write_back` or `load`, of a pool and of a group."""
    stream = "producer" if call == "write_back" else "readers"
    words: dict[str, tuple[str, ...]] = {"unit": (), "validate": (), "path": ("None",), "qos": ("None",)}
    words |= {stream: ("None",), "timed": TRUTH}
    words |= {"order": (), "layers": ("None", "no items", "sparse")} if call == "load" else {}

    def of(owner: str, word: str) -> Callable[[World, Any], object]:
        given = (IDS, IDS) if owner == "pool" else ({"kv": (IDS, IDS)},)
        return lambda w, v: getattr(getattr(w, owner), call)(*given, **{word: v})

    for word, fine in words.items():
        yield case(word, of("pool", word), *fine)
        yield case(word, of("group", word), *fine, owner=GROUPED)
    kv = {"kv": (IDS, IDS)}
    yield case("unit", lambda w, v: getattr(w.group, call)(kv, unit={"kv": v}), owner="kv")
    yield case("path", lambda w, v: getattr(w.group, call)(kv, path={"kv": v}), "None", owner=GROUPED)
    yield case("host ids", lambda w, v: getattr(w.pool, call)(v, IDS))
    yield case("device ids", lambda w, v: getattr(w.pool, call)(IDS, v))
    yield case(call, lambda w, v: getattr(w.group, call)(v), owner="kimi_linear")
    yield case(f"{call}: kv", lambda w, v: getattr(w.group, call)({"kv": v}), owner="kimi_linear")
    yield case("host ids", lambda w, v: getattr(w.group, call)({"kv": (v, IDS)}), owner="kv")
    yield case("device ids", lambda w, v: getattr(w.group, call)({"kv": (IDS, v)}), owner="kv")


POOL = [
    case("alloc", lambda w, v: w.pool.alloc(v)),
    case("free", lambda w, v: w.pool.free(v)),
    case("after", lambda w, v: w.pool.free(IDS, after=v), "None"),
    case("host_layout", lambda w, v: w.pool.host_layout(v), *INTEGER),
    case("bind|component", lambda w, v: w.pool.bind(v)),
    case("kv", lambda w, v: w.pool.bind({"kv": v})),
    case("kv", lambda w, v: w.pool.bind({"kv": [v, *latents(2)]})),
    case("layer_ids", lambda w, v: w.pool.bind({"kv": latents(3)}, layer_ids=v), "None"),
    case("page_objects", lambda w, v: w.pool.page_objects(v), *INTEGER),
    case("page_ranges", lambda w, v: w.pool.page_ranges(v), *INTEGER),
    case("get_page_buffer_meta", lambda w, v: w.pool.get_page_buffer_meta(v), *EMPTY),
    case("get_split_heads", lambda w, v: w.pool.get_split_heads_page_buffer_meta(v, 1), *EMPTY),
    case("split_factor", lambda w, v: w.pool.get_split_heads_page_buffer_meta(IDS, v), *INTEGER),
    case("split_factor", lambda w, v: w.pool.get_page_buffer_element_size(v), *INTEGER),
    case("is_stride_page_aligned", lambda w, v: w.pool.is_stride_page_aligned(v), *INTEGER),
    case("get_data_page", lambda w, v: w.pool.get_data_page(v)),
    case("flat", lambda w, v: w.pool.get_data_page(0, flat=v), *TRUTH),
    case("set_from_flat_data_page", lambda w, v: w.pool.set_from_flat_data_page(v, FLAT)),
    case("set_from_flat_data_page", lambda w, v: w.pool.set_from_flat_data_page(0, v)),
    case("host ids", lambda w, v: w.pool.backup_from_device_all_layer(None, v, IDS, "kernel")),
    case("device ids", lambda w, v: w.pool.load_to_device_per_layer(None, IDS, v, 1, "kernel")),
    case("layer", lambda w, v: w.pool.load_to_device_per_layer(None, IDS, IDS, v, "kernel"), *INTEGER),
    case("io_backend", lambda w, v: w.pool.backup_from_device_all_layer(None, IDS, IDS, v)),
    case("io_backend", lambda w, v: w.pool.load_to_device_per_layer(None, IDS, IDS, 1, v)),
]
TICKET = [
    case("layer", lambda w, v: w.ticket.wait_layer(v), *INTEGER),
    case("stream", lambda w, v: w.ticket.wait(v), "None"),
    case("stream", lambda w, v: w.ticket.wait_layer(1, v), "None"),
    case("stream", lambda w, v: w.ticket.captured.wait(v), "None"),
]
GROUP = [
    case("alloc", lambda w, v: w.group.alloc(v), owner="kimi_linear"),
    case("alloc", lambda w, v: w.group.alloc({"kv": v}), owner=GROUPED),
    case("free", lambda w, v: w.group.free(v), owner="kimi_linear"),
    case("free", lambda w, v: w.group.free({"kv": v}), *EMPTY, owner="kv"),
    case("after", lambda w, v: w.group.free({"kv": IDS}, after=v), owner="kv"),
    case("bind", lambda w, v: w.group.bind(v), owner="kimi_linear"),
    case("kv", lambda w, v: w.group.bind({"kv": v, "state": states()}), owner="kimi_linear"),
    case("kv", lambda w, v: w.group.bind({"kv": {"kv": v}, "state": states()}), owner="kimi_linear"),
    case("layer_ids", lambda w, v: w.group.bind(tensors(), layer_ids=v), "None", owner="kimi_linear"),
    case("layer", lambda w, v: w.group.bind(tensors(), layer_ids={"kv": v}), owner="kimi_linear"),
]
CONTROLLERS = [
    case("pool", lambda w, v: CacheController(v), owner="CacheController"),
    case("group", lambda w, v: HybridCacheController(v), owner="HybridCacheController"),
    case("limit", lambda w, v: CacheController(w.pool, limit=v), *INTEGER),
    case("reclaim", lambda w, v: CacheController(w.pool, reclaim=v), "None"),
    case("clock", lambda w, v: HybridCacheController(w.group, clock=v), owner="kimi_linear"),
    case("write", lambda w, v: w.lone.write(v)),
    case("unit", lambda w, v: w.lone.write(IDS, unit=v)),
    case("host ids", lambda w, v: w.lone.load(v, IDS)),
    case("device ids", lambda w, v: w.lone.load(IDS, v)),
    case("unit", lambda w, v: w.lone.load(IDS, IDS, unit=v)),
    case("alloc", lambda w, v: w.lone.alloc(v)),
    case("free", lambda w, v: w.lone.free(v)),
    case("unit", lambda w, v: w.lone.free(IDS, unit=v)),
    case("cancel", lambda w, v: w.lone.cancel(v)),
    case("layers", lambda w, v: w.lone.start_loading(layers=v), "None", "no items", "sparse"),
    case("direction", lambda w, v: w.lone.ready(v), "None"),
    case("direction", lambda w, v: w.lone.pop_acks(None, v), "None"),
    case("max_n", lambda w, v: w.lone.pop_acks(v), "None", *INTEGER),
    case("write", lambda w, v: w.hybrid.write(v), owner="kimi_linear"),
    case("write", lambda w, v: w.hybrid.write({"kv": v}), owner="kv"),
    case("unit", lambda w, v: w.hybrid.write({"kv": IDS}, unit=v), owner="kimi_linear"),
    case("load", lambda w, v: w.hybrid.load(v), owner="kimi_linear"),
    case("load: kv", lambda w, v: w.hybrid.load({"kv": v}), owner="kimi_linear"),
    case("alloc", lambda w, v: w.hybrid.alloc(v), owner="kimi_linear"),
    case("alloc", lambda w, v: w.hybrid.alloc({"kv": v}), owner=GROUPED),
    case("free", lambda w, v: w.hybrid.free(v), owner="kimi_linear"),
    case("free", lambda w, v: w.hybrid.free({"kv": v}), owner="kv"),
    case("unit", lambda w, v: w.hybrid.free({"kv": IDS}, unit=v), owner="kimi_linear"),
    case("locked", lambda w, v: w.hybrid.locked(v), owner="kimi_linear"),
]
HASH = "0123456789abcdef"
TIER = [
    case("controller", lambda w, v: Tier(v, w.storage, model="m", shard="all"), owner="Tier"),
    case("storage", lambda w, v: Tier(w.lone, v, model="m", shard="all")),
    case("model", lambda w, v: Tier(w.lone, w.storage, model=v, shard="all"), "text"),
    case("shard", lambda w, v: Tier(w.lone, w.storage, model="m", shard=v), "text"),
    case("trailing", lambda w, v: Tier(w.lone, w.storage, model="m", shard="all", trailing=v), "None"),
    case("step", lambda w, v: Tier(w.lone, w.storage, model="m", shard="all", step=v), *INTEGER),
    case("workers", lambda w, v: Tier(w.lone, w.storage, model="m", shard="all", workers=v), *INTEGER),
    case("hash", lambda w, v: w.tier.fetch(v), *EMPTY),
    case("hash", lambda w, v: w.tier.fetch([v])),
    case("store", lambda w, v: w.tier.store(v)),
    case("store: mla", lambda w, v: w.tier.store({"mla": v})),
    case("hash|pages", lambda w, v: w.tier.store({"mla": (v, IDS)})),
    case("store", lambda w, v: w.tier.store({"mla": ([HASH], v)})),
    case("hash", lambda w, v: w.tier.keys(v)),
    case("cancel", lambda w, v: w.tier.cancel(v)),
    case("keep", lambda w, v: w.tier.keep(v, 1)),
]
SGLANG = [
    case("pool", lambda w, v: host_pool(v), owner="host_pool"),
    case("group", lambda w, v: host_pools(v), owner="host_pools"),
    case("layers", lambda w, v: host_pool(w.pool, layers=v), "None"),
    case("layers", lambda w, v: host_pool(w.pool, layers={0: v}), *INTEGER),
    case("draft_layers", lambda w, v: host_pool(w.pool, draft_layers=v), *INTEGER),
    case("layers", lambda w, v: host_pools(w.group, layers=v), "None", owner="kimi_linear"),
    case("layers", lambda w, v: host_pools(w.group, layers={"kv": v}), "None", owner="kv"),
    case("draft_layers", lambda w, v: host_pools(w.group, draft_layers={"kv": v}), *INTEGER, owner="kv"),
    case("alloc", lambda w, v: w.engine.alloc(v)),
    case("free", lambda w, v: w.engine.free(v)),
    case("host_indices", lambda w, v: w.engine.prepare_transfer_indices(v, IDS, "kernel")),
    case("device_indices", lambda w, v: w.engine.prepare_transfer_indices(IDS, v, "kernel")),
    case("io_backend", lambda w, v: w.engine.prepare_transfer_indices(IDS, IDS, v)),
    case("host ids", lambda w, v: w.engine.backup_from_device_all_layer(None, v, IDS, "kernel")),
    case("device ids", lambda w, v: w.engine.backup_from_device_all_layer(None, IDS, v, "kernel")),
    case("host ids", lambda w, v: w.engine.load_to_device_per_layer(None, v, IDS, 0, "kernel")),
    case("layer", lambda w, v: w.engine.load_to_device_per_layer(None, IDS, IDS, v, "kernel"), *INTEGER),
    case("io_backend", lambda w, v: w.engine.load_to_device_per_layer(None, IDS, IDS, 0, v)),
    case("get_page_buffer_meta", lambda w, v: w.engine.get_page_buffer_meta(v), *EMPTY),
    case("get_data_page", lambda w, v: w.engine.get_data_page(v)),
    case("flat", lambda w, v: w.engine.get_data_page(0, flat=v), *TRUTH),
    case("set_from_flat_data_page", lambda w, v: w.engine.set_from_flat_data_page(0, v)),
]
CASES = [*POOL, *moves("write_back"), *moves("load"), *TICKET, *GROUP, *CONTROLLERS, *TIER, *SGLANG]


def wrong(case: Case, world: Any, values: Mapping[str, Any] = VALUES) -> list[str]:
    """The values of which this call does not say, by both names, that they are wrong."""
    found = []
    for what, value in values.items():
        if what in case.fine:
            continue
        try:
            case.call(world, value)
        except (ValueError, TypeError) as error:
            if not re.match(rf"({case.owner}): .*({case.name})", str(error)):
                found.append(f"{what}: {type(error).__name__}: {error}")
        except Exception as error:
            found.append(f"{what}: {type(error).__name__}: {error}")
        else:
            found.append(f"{what}: was taken")
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_value_of_a_wrong_type_is_refused_by_name(world: World, case: Case) -> None:
    before = world.state()
    assert wrong(case, world) == []
    assert world.state() == before


# ---- constructors ------------------------------------------------------------------------------

TAKEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("layers", "full_attention_layers", "linear_attention_layers"), ("no items", "sparse")),
    **dict.fromkeys(("conv_dim", "side_size"), ("no items", *INTEGER)),
    **dict.fromkeys(("budget", "require"), ("None",)),
    **dict.fromkeys(("page_size", "capacity_pages", "capacity_bytes", "staging_bytes"), INTEGER),
    "capture_bytes": ("None", *INTEGER),
    "hugepages": ("None", *TRUTH),
}
"""Values that an argument of a constructor takes: its default, or what can be walked and has integers."""


def of_sizes(kind: Any, others: Mapping[str, Any], name: str, *fine: str) -> Case:
    taken = (*TAKEN.get(name, ()), *fine)
    return Case(name, lambda _, value: kind.required_bytes(**others, **{name: value}), taken, kind.spec.name)


@pytest.mark.parametrize("pool", generated.POOLS)
def test_sizes_of_a_wrong_type_are_refused_by_name(pool: str) -> None:
    kind: Any = generated.pool_class(pool)
    given = {**samples.arguments(kind, samples.samples(kind)[0]), "capacity_pages": PAGES}
    for name in inspect.signature(kind.required_bytes).parameters:
        others = {other: value for other, value in given.items() if other != name}
        if name == "capacity_bytes":
            others.pop("capacity_pages")
        fine = INTEGER if type(given.get(name)) is int else ()
        assert wrong(of_sizes(kind, others, name, *fine), None) == [], name


@pytest.mark.parametrize("name", [*HYBRID, "layout", "staging_bytes", "capture_bytes", "budget"])
def test_sizes_of_a_group_are_refused_by_name(name: str) -> None:
    others = {other: value for other, value in HYBRID.items() if other != name}
    fine = ("None",) if name in ("layout", "capacity_pages") else ()  # then each pool's own; then the budget
    assert wrong(of_sizes(KimiLinearHostPoolGroup, others, name, *fine), None) == []


@pytest.mark.parametrize("name", ["device", "require", "hugepages", "register"])
@pytest.mark.parametrize("kind", [MLATokenToKVPoolHost, KimiLinearHostPoolGroup])
def test_what_a_machine_decides_is_refused_by_name(kind: Any, name: str) -> None:
    given = MLA_POOL if kind is MLATokenToKVPoolHost else HYBRID
    built = Case(name, lambda _, value: kind(**given, **{name: value}), TAKEN.get(name, ()), kind.spec.name)
    assert wrong(built, None) == []


# ---- the checks themselves ---------------------------------------------------------------------


def test_what_stands_for_an_integer_is_one() -> None:
    assert arguments.integer("mla", "alloc", torch.tensor(4)) == 4
    assert arguments.layer_ids("mla", "layers", (n for n in (5, 2))) == (5, 2)
    assert arguments.layer_ids("mla", "layers", torch.tensor([2, 0])) == (2, 0)


def test_a_message_does_not_print_what_is_long_or_on_a_device() -> None:
    with pytest.raises(ValueError) as caught:
        arguments.integer("mla", "alloc", torch.empty(3, 2, device="meta"))
    assert str(caught.value) == (
        "mla: alloc: expected an integer, got a tensor of torch.float32 [3, 2] on meta"
    )
    assert arguments.shown("y" * 200) == "'" + 79 * "y" + "..."


@pytest.mark.parametrize("name", ["cuda", "host"])
def test_streams_are_numbers_or_objects_of_torch(name: str) -> None:
    driver = HostDriver()
    driver.name = name
    of_torch = type("Stream", (), {"cuda_stream": 7})()
    for stream in (None, 0, 1 << 63, of_torch):
        arguments.stream("mla", "producer", stream, driver)
    of_cpu = torch.cpu.current_stream()
    if name == "host":
        arguments.stream("mla", "producer", of_cpu, driver)
        return
    with pytest.raises(ValueError, match=r"^mla: producer: expected a stream, got .*; pass torch"):
        arguments.stream("mla", "producer", of_cpu, driver)
