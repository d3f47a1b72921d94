"""Pages of every generated pool, through a storage and back: what the storage tests share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import poolwright.generated as generated
from poolwright.runtime.pool import HostPool
from poolwright.runtime.storage import PageStore, Status, Storage, token_hashes
from poolwright.runtime.tools.samples import arguments, samples

HIT, MISS = Status.HIT, Status.MISS
HERE, THERE = (3, 0, 4), (6, 1, 2)
"""Pages that are stored, of a pool of 5, and pages that they are read into, of a pool of 8."""


def kinds() -> Iterator[tuple[str, type[HostPool], dict[str, Any]]]:
    """Every generated pool in every layout: a name, the class, arguments without a capacity."""
    for name in generated.POOLS:
        pool_class = generated.pool_class(name)
        for layout, sample in itertools.product(pool_class.spec.layouts, samples(pool_class, turn=1)[::2]):
            label = f"{name} {layout} {sample.label}"
            yield label, pool_class, {**arguments(pool_class, sample), "layout": layout}


def filled(pool: Any, seed: int) -> None:
    """Random bytes in every page, zeros where a page has padding."""
    random = torch.Generator().manual_seed(seed)
    for page in range(pool.page_num):
        content = torch.randint(256, (pool.page_bytes,), dtype=torch.uint8, generator=random)
        pool.set_from_flat_data_page(page * pool.page_size, content)


def pages(pool: Any, chosen: Sequence[int]) -> list[bytes]:
    return [bytes(pool.get_data_page(page * pool.page_size).numpy()) for page in chosen]


def goes_through(storage: Storage, label: str, pool_class: Any, given: dict[str, Any]) -> None:
    """Store pages of one pool, read them into another of other capacity, at other places."""
    here, there = pool_class(**given, capacity_pages=5), pool_class(**given, capacity_pages=8)
    filled(here, 1)
    filled(there, 2)
    source, target = (
        PageStore(storage, pool, model=label, name=pool.spec.name, shard="all") for pool in (here, there)
    )
    others = [page for page in range(8) if page not in THERE]
    expected, untouched = pages(here, range(5)), pages(there, others)
    hashes = token_hashes(range(3), 1)
    assert target.exists(hashes) == target.get(hashes, THERE) == [MISS] * 3
    assert pages(there, others) == untouched
    assert source.put(hashes, HERE) == [HIT] * 3
    assert target.get(hashes, THERE) == [HIT] * 3
    assert pages(there, THERE) == [expected[page] for page in HERE], label
    assert pages(there, others) == untouched and pages(here, range(5)) == expected, label
    assert target.remove(hashes) == [HIT] * 3
