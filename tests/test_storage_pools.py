"""Pages of every pool and layout go through storage into another pool, byte for byte."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from storage_pools import goes_through, kinds

import poolwright.generated as generated
from poolwright.runtime.pool import HostPool
from poolwright.runtime.storage import FileStorage, PageStore, Status, token_hashes

HIT = Status.HIT


@pytest.mark.parametrize("kind", [pytest.param(kind, id=kind[0]) for kind in kinds()])
def test_pages_of_every_pool_go_through_files(
    kind: tuple[str, type[HostPool], dict[str, Any]], tmp_path: Path
) -> None:
    with FileStorage(tmp_path, 1 << 28) as storage:
        goes_through(storage, *kind)


def test_what_is_no_storage_no_pool_and_no_list_of_pages_is_refused_by_name(tmp_path: Path) -> None:
    named = {"model": "m", "name": "kv", "shard": "all"}
    pool = generated.MLATokenToKVPoolHost(  # type: ignore[attr-defined]
        kv_lora_rank=4,
        qk_rope_head_dim=2,
        dtype=torch.float16,
        layers=range(2),
        page_size=2,
        capacity_pages=4,
    )
    with FileStorage(tmp_path, 1 << 20) as storage:
        with pytest.raises(ValueError, match=r"PageStore: storage: expected a storage .*, got <MLA"):
            PageStore(pool, storage, **named)
        with pytest.raises(ValueError, match="PageStore: pool: expected a generated pool, got None"):
            PageStore(storage, None, **named)  # type: ignore[arg-type]
        store = PageStore(storage, pool, **named)
        for call in (store.put, store.get):
            for pages in (torch.arange(2), 1, "01"):
                with pytest.raises(ValueError, match=r"kv: pages: expected a list of page numbers, .*tolist"):
                    call(token_hashes(range(4), 2), pages)  # type: ignore[arg-type]


def test_pages_come_back_to_the_device_after_the_process_lost_them(tmp_path: Path) -> None:
    """Device to host, host to storage; another pool: storage to host, host to device."""

    def build() -> tuple[Any, list[torch.Tensor]]:
        pool = generated.MLATokenToKVPoolHost(  # type: ignore[attr-defined]
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            dtype=torch.bfloat16,
            layers=range(4),
            page_size=16,
            layout="page_first",
            capacity_pages=8,
            device="cpu",
        )
        rows = [torch.zeros(20 * 16, 48, dtype=torch.bfloat16) for _ in pool.layers]
        pool.bind({"kv": rows})
        return pool, rows

    hashes = token_hashes(range(48), 16)
    here, rows = build()
    random = torch.Generator().manual_seed(0)
    for row in rows:
        row.copy_(torch.randn(row.shape, generator=random))
    host = here.alloc(48)
    here.write_back(host, torch.arange(64, 112))  # put waits for it
    with FileStorage(tmp_path, 1 << 24) as storage:
        store = PageStore(storage, here, model="m", name="kv", shard="all")
        assert store.put(hashes, [int(ids) // 16 for ids in host[::16]]) == [HIT] * 3
    there, other_rows = build()
    there.alloc(16)
    host = there.alloc(48)
    with FileStorage(tmp_path, 1 << 24) as storage:
        store = PageStore(storage, there, model="m", name="kv", shard="all")
        assert store.get(hashes, [int(ids) // 16 for ids in host[::16]]) == [HIT] * 3
    there.load(host, torch.arange(112, 160)).wait()
    for row, other in zip(rows, other_rows, strict=True):
        assert torch.equal(other[112:160], row[64:112])


def test_what_decides_the_bytes_decides_the_key(tmp_path: Path) -> None:
    given = dict(kv_lora_rank=32, qk_rope_head_dim=16, dtype=torch.bfloat16, page_size=4, capacity_pages=1)
    changes: list[dict[str, Any]] = [
        {"layers": range(2), "layout": "page_first"},
        {"layers": range(2), "layout": "page_first_direct"},
        {"layers": range(2), "layout": "layer_first"},
        {"layers": range(2, 4), "layout": "page_first"},
        {"layers": range(2), "layout": "page_first", "dtype": torch.float16},
        {"layers": range(2), "layout": "page_first", "page_size": 8},
        {"layers": range(2), "layout": "page_first", "kv_lora_rank": 48},
    ]
    (page_hash,) = token_hashes([1], 1)
    keys = []
    with FileStorage(tmp_path, 1 << 24) as storage:
        for change in changes:
            pool = generated.MLATokenToKVPoolHost(**{**given, **change})  # type: ignore[attr-defined]
            for model, name, shard in itertools.product("mn", ("kv", "swa"), ("all", "tp0of2", "tp1of2")):
                store = PageStore(storage, pool, model=model, name=name, shard=shard)
                keys.append(store.namespace.key(page_hash))
    assert len(set(keys)) == len(keys)


def test_the_program_in_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- run -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    monkeypatch.chdir(tmp_path)
    exec(compile(found[1], "docs/scaling.md", "exec"), {})
    assert len(list(tmp_path.glob("pages/??/*"))) == 2
