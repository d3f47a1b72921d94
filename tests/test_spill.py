"""A prompt's cache outlives its process: spilled, killed, fetched, damaged, gone."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from poolwright.runtime.integrations import demo, models, spill
from poolwright.runtime.storage import FileStorage, Item, Status, envelope
from poolwright.runtime.storage.cluster import Cluster

FAST = "Qwen3-Next"
SLOW = [name for name in spill.MODELS if name != FAST]


@pytest.mark.parametrize("name", [FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_killed_process_leaves_every_page(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = ["--store", str(tmp_path / "pages"), "--model", name]
    assert spill.main(["spill", *store]) == 0
    assert spill.main(["fetch", *store]) == 0
    shown = capfd.readouterr()
    assert shown.out.splitlines() == [
        f"{name}: stored 9 pages and states, then killed",
        f"{name}, as spilled: hit=3 miss=0 restored=3 recomputed=0 wrong=0 KL=0",
        f"{name}, one byte changed: hit=2 miss=1 restored=1 recomputed=32 wrong=0 KL=0",
        f"{name}, wiped: hit=0 miss=3 restored=0 recomputed=48 wrong=0 KL=0",
    ]


@pytest.mark.slow
def test_so_does_it_in_mooncake(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reason = "needs poolwright[mooncake] and libibverbs1"
    pytest.importorskip("mooncake.store", reason=reason, exc_type=ImportError)
    with Cluster(tmp_path / "servers") as cluster:
        cluster.start_master()
        cluster.start_node(64 << 20)
        store = ["--store", f"mooncake:{cluster.address}"]
        assert spill.main(["spill", *store]) == 0
        assert spill.main(["fetch", *store]) == 0
    shown = [line for line in capfd.readouterr().out.splitlines() if line.startswith(FAST)]
    assert shown == [
        f"{FAST}: stored 9 pages and states, then killed",
        f"{FAST}, as spilled: hit=3 miss=0 restored=3 recomputed=0 wrong=0 KL=0",
        f"{FAST}, one byte changed: hit=2 miss=1 restored=1 recomputed=32 wrong=0 KL=0",
        f"{FAST}, wiped: hit=0 miss=3 restored=0 recomputed=48 wrong=0 KL=0",
    ]


def test_a_wrong_page_that_storage_takes_for_right_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The demo compares: with checksums that agree with damage it must fail, or it shows nothing."""
    caplog.set_level(logging.CRITICAL)
    with demo.one_thread(), FileStorage(tmp_path / "pages", 1 << 30) as storage:
        prompt = spill.Prompt(FAST)
        spill.spill(prompt, storage)
        spill.damage(prompt, storage)
        monkeypatch.setattr("poolwright.runtime.storage.file._take", _trusting)
        result = spill.fetch(prompt, storage)
    assert result.restored == 3 and result.wrong == 1 and not result.identical


def _trusting(handle: int, item: Item) -> bool:
    """Reads an object and believes it."""
    os.lseek(handle, envelope.SIZE, os.SEEK_SET)
    os.readv(handle, envelope.views(item))
    return True


def test_a_storage_that_takes_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileStorage, "_put", lambda self, items: [Status.REFUSED] * len(items))
    store = ["--store", str(tmp_path / "pages")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", None)
        assert spill.main(["child", *store]) == 1


def test_models_feed_their_states_token_by_token() -> None:
    """What `spill` rests on: going on from a copied cache is going on."""
    prompt = spill.Prompt(FAST)
    with demo.one_thread():
        whole = prompt.cache(prompt.tokens[:, :20])
        part = prompt.cache(prompt.tokens[:, :12])
        prompt.feed(part, prompt.tokens[:, 12:20])
        one, two = (models.logits(prompt.model, prompt.tokens[:, 20:21], each) for each in (whole, part))
    assert torch.equal(one, two)
