"""Numbers and truth values of other libraries: taken wherever Python's own are, and Python's from then on."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import poolwright.generated as generated
from poolwright.generated import KimiLinearHostPoolGroup, MHATokenToKVPoolHost, MLATokenToKVPoolHost
from poolwright.runtime import scalars
from poolwright.runtime.controller import CacheController, Tier
from poolwright.runtime.integrations.sglang import host_pool
from poolwright.runtime.pool import RequiredBytes
from poolwright.runtime.storage import FileStorage, token_hashes
from poolwright.runtime.tools import samples

PAGE = 4
MLA: dict[str, Any] = {"kv_lora_rank": 3, "qk_rope_head_dim": 2, "dtype": torch.bfloat16}
STATE: dict[str, Any] = {"heads": 1, "head_dim": 2, "kernel": 2, "ngram": 0}
STATE |= {"ssm_dtype": torch.float32, "conv_dtype": torch.bfloat16}


class Number:
    """An integer that nothing can be done with but to ask for it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def numbers(value: Any) -> Any:
    """The same arguments with every integer as a `Number`, in tuples and mappings, too."""
    if isinstance(value, dict):
        return {name: numbers(each) for name, each in value.items()}
    if isinstance(value, (tuple, range)):
        return tuple(map(numbers, value))
    return Number(value) if type(value) is int else value


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (7, 7),
        (Number(7), 7),
        (numpy.int64(7), 7),
        (numpy.uint8(7), 7),
        (numpy.array(7), 7),
        (torch.tensor(7), 7),
        (True, None),
        (numpy.True_, None),
        (numpy.array(True), None),
        (torch.tensor(True), None),
        (7.0, None),
        (numpy.float64(7), None),
        (torch.tensor(7.0), None),
        ("7", None),
        (None, None),
    ],
)
def test_an_integer_is_whatever_stands_for_one_but_no_truth_value(value: object, found: int | None) -> None:
    assert scalars.index(value) == found
    assert type(scalars.index(value)) is type(found)


@pytest.mark.parametrize("value", [False, True])
def test_a_truth_value_is_pythons_or_numpys(value: bool) -> None:
    assert scalars.truth(value) is value
    assert scalars.truth(numpy.bool_(value)) is value
    for other in (int(value), numpy.int64(value), torch.tensor(value), None, "True"):
        assert scalars.truth(other) is None


def test_neither_library_is_imported_for_it() -> None:
    code = (
        "import sys\n"
        "from poolwright.runtime.storage.keys import token_hashes\n"
        "assert len(token_hashes([1, 2, 3], 2)) == 1\n"
        "print({'numpy', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# ---- every place that takes one ----------------------------------------------------------------


def counts(found: RequiredBytes) -> tuple[int, ...]:
    return found.pages, found.host, found.staging, found.page


@pytest.mark.parametrize("name", generated.POOLS)
def test_sizes_of_every_pool(name: str) -> None:
    kind: Any = generated.pool_class(name)
    given = samples.arguments(kind, samples.samples(kind)[0])
    given |= {"capacity_pages": 5, "staging_bytes": 1 << 20}
    if kind.spec.updates == "in_place":
        given |= {"capture_bytes": 1 << 20}
    taken = inspect.signature(kind.required_bytes).parameters
    given = {argument: value for argument, value in given.items() if argument in taken}
    assert sum(type(value) is int for value in given.values()) >= 2
    expected, found = kind.required_bytes(**given), kind.required_bytes(**numbers(given))
    assert counts(found) == counts(expected)
    assert {type(value) for value in (*counts(found), *found.program.sizes.values())} == {int}


def test_the_capacity_of_a_pool_in_bytes() -> None:
    sizes: dict[str, Any] = {**MLA, "layers": (0, 1), "page_size": PAGE}
    found = MLATokenToKVPoolHost.required_bytes(**sizes, capacity_bytes=numpy.int64(1000))
    assert counts(found) == counts(MLATokenToKVPoolHost.required_bytes(**sizes, capacity_bytes=1000))


def test_flags_and_numbers_of_a_constructor() -> None:
    sizes: dict[str, Any] = {**MLA, "layers": (0, 1), "page_size": PAGE, "capacity_pages": 3}
    pool = MLATokenToKVPoolHost(**numbers(sizes), hugepages=numpy.False_)
    assert [(type(each), each) for each in (pool.page_size, pool.size, pool.page_num)] == [
        (int, PAGE),
        (int, 3 * PAGE),
        (int, 3),
    ]
    pool.destroy()


@pytest.mark.parametrize("capacity", ["pages", "bytes", "budget"])
def test_sizes_of_a_group(capacity: str) -> None:
    given: dict[str, Any] = {
        "full_attention_layers": (1, 4),
        "linear_attention_layers": (0, 2, 3),
        "kv": MLA,
        "state": STATE,
        "page_size": PAGE,
        "staging_bytes": 1 << 20,
        "capture_bytes": 1 << 20,
    }
    given |= {
        "pages": {"capacity_pages": {"kv": 3, "state": 2}},
        "bytes": {"capacity_bytes": 10_000, "budget": {"kv": 0.5, "state": 0.5}},
        "budget": {"budget": {"kv": 5000, "state": 5000}},
    }[capacity]
    kind = KimiLinearHostPoolGroup
    expected, found = kind.required_bytes(**given), kind.required_bytes(**numbers(given))
    assert list(map(counts, found.pools.values())) == list(map(counts, expected.pools.values()))
    fractions = {"kv": numpy.float64(0.5), "state": numpy.float64(0.5)}
    if capacity == "bytes":
        assert kind.required_bytes(**given | {"budget": fractions}).host == expected.host


@pytest.fixture
def pool() -> Iterator[Any]:
    made = MHATokenToKVPoolHost(
        heads=2,
        head_dim=3,
        v_head_dim=3,
        dtype=torch.float32,
        layers=range(2),
        page_size=PAGE,
        layout="page_head",
        capacity_pages=6,
    )
    rows = [torch.zeros(9 * PAGE, 2, 3) for _ in range(2)]
    made.bind({"k": rows, "v": [row.clone() for row in rows]})
    yield made
    made.destroy()


IDS = torch.arange(PAGE)
CALLS: dict[str, Callable[[Any, Any], object]] = {
    "host_layout": lambda pool, n: pool.host_layout(n(3)).nbytes,
    "page_objects": lambda pool, n: pool.page_objects(n(2)),
    "page_ranges": lambda pool, n: pool.page_ranges(n(2)),
    "get_page_buffer_meta": lambda pool, n: pool.get_page_buffer_meta([n(4), n(5), n(6), n(7)]),
    "split heads": lambda pool, n: pool.get_split_heads_page_buffer_meta(IDS, n(2)),
    "get_page_buffer_element_size": lambda pool, n: pool.get_page_buffer_element_size(n(2)),
    "is_stride_page_aligned": lambda pool, n: pool.is_stride_page_aligned(n(4)),
    "get_data_page": lambda pool, n: pool.get_data_page(n(4)).tolist(),
    "load": lambda pool, n: pool.load(IDS, IDS, layers=[n(1)], timed=numpy.True_).seconds() >= 0,
    "wait_layer": lambda pool, n: pool.load(IDS, IDS, order="layer").wait_layer(n(1)),
    "backup": lambda pool, n: pool.load_to_device_per_layer(None, IDS, IDS, n(1), "kernel"),
    "flat": lambda pool, n: [page.shape for page in pool.get_data_page(0, flat=numpy.False_)],
    "draft_layers": lambda pool, n: host_pool(pool, draft_layers=n(1)).target_layer_num,
    "token_hashes": lambda pool, n: token_hashes([1, 2, 3], n(2)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", [Number, numpy.int64, numpy.array, torch.tensor])
def test_numbers_in_calls_of_a_pool(pool: Any, call: str, kind: Callable[[int], Any]) -> None:
    assert CALLS[call](pool, kind) == CALLS[call](pool, int)


def test_numbers_of_controllers_and_storage(pool: Any, tmp_path: Path) -> None:
    controller = CacheController(pool, limit=Number(2))  # type: ignore[arg-type]
    counts: dict[str, Any] = {"chunk": Number(3), "workers": Number(1)}
    storage = FileStorage(tmp_path, Number(1 << 20), **counts)  # type: ignore[arg-type]
    assert storage.chunk == 3
    how: dict[str, Any] = {"step": Number(2), "workers": Number(1)}
    tier = Tier(controller, storage, model="m", shard="all", **how)
    host = controller.alloc(2 * PAGE)
    assert host is not None
    first, second = token_hashes(range(2 * PAGE), PAGE)
    assert tier.store({pool.name: ([first, second], host)}) is not None
    controller._running["store"][0].leg._future.exception(30)  # type: ignore[attr-defined]
    acks = controller.pop_acks(Number(4))  # type: ignore[arg-type]
    assert [ack.error for ack in acks] == [None]
    controller.free(host)
    fetch = tier.fetch([first, second])
    assert fetch is not None
    controller._running["fetch"][0].leg._future.exception(30)  # type: ignore[attr-defined]
    (ack,) = controller.pop_acks()
    kept = tier.keep(ack, Number(1))  # type: ignore[arg-type]
    assert kept[pool.name].numel() == PAGE
    controller.free(kept[pool.name])
    tier.close()
    storage.close()
