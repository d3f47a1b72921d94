"""Caches of real models go through the pools, are wiped, come back, and decoding goes on to the same bit."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from poolwright.generated import pool_class
from poolwright.runtime.errors import PoolError
from poolwright.runtime.integrations import demo, models
from poolwright.runtime.integrations.transformers import CacheMover, layer_groups, pools_for

LLAMA, DEEPSEEK = "Llama", "DeepSeek-V3"
FLOAT, BFLOAT = torch.float32, torch.bfloat16
EVERY = [(LLAMA, FLOAT), (LLAMA, BFLOAT), (DEEPSEEK, FLOAT), (DEEPSEEK, BFLOAT)]
PROGRAMS = [
    (name, dtype, form, layout)
    for name, pool, dtype in ((LLAMA, "mha", BFLOAT), (DEEPSEEK, "mla", FLOAT))
    for form in pool_class(pool).spec.forms
    for layout in pool_class(pool).spec.layouts
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with demo.one_thread():
        yield


@functools.cache
def model_of(name: str, dtype: torch.dtype) -> Any:
    return models.MODELS[name](dtype)


@functools.cache
def prefilled(name: str, dtype: torch.dtype, tokens: int = demo.PROMPT, sequences: int = 2) -> demo.Case:
    """A model after its prefill; its two reference runs agree, else this raises."""
    return demo.prefill(name, model_of(name, dtype), tokens=tokens, sequences=sequences)


def assert_unchanged(row: demo.Row) -> None:
    assert (row.identical, row.kl, row.recomputed) == (True, 0.0, 0)


# ---- decoding goes on -------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype", "form", "layout"), PROGRAMS)
def test_every_form_and_layout(name: str, dtype: torch.dtype, form: str, layout: str) -> None:
    assert_unchanged(demo.move(prefilled(name, dtype), form, layout))


@pytest.mark.parametrize(("name", "dtype"), EVERY)
@pytest.mark.parametrize("tokens", [48, 49, 63], ids=["tail_full", "tail_1", "tail_15"])
def test_partial_tails(name: str, dtype: torch.dtype, tokens: int) -> None:
    assert_unchanged(demo.move(prefilled(name, dtype, tokens), "per_layer", "page_first"))


@pytest.mark.parametrize(
    ("name", "dtype", "page_size"),
    [(LLAMA, FLOAT, 1), (LLAMA, FLOAT, 64), (DEEPSEEK, BFLOAT, 1), (DEEPSEEK, BFLOAT, 7)],
)
def test_page_sizes(name: str, dtype: torch.dtype, page_size: int) -> None:
    assert_unchanged(demo.move(prefilled(name, dtype), "per_layer", "page_first", page_size=page_size))


@pytest.mark.parametrize("path", ["host", "zero_copy", "staged", "torch"])
@pytest.mark.parametrize(("name", "dtype"), [(LLAMA, FLOAT), (DEEPSEEK, BFLOAT)])
def test_every_path(name: str, dtype: torch.dtype, path: str) -> None:
    row = demo.move(prefilled(name, dtype), "per_layer", "page_first", path=path)
    assert row.path == path
    assert_unchanged(row)


@pytest.mark.parametrize(("name", "dtype"), [(LLAMA, BFLOAT), (DEEPSEEK, FLOAT)])
def test_a_single_sequence(name: str, dtype: torch.dtype) -> None:
    assert_unchanged(demo.move(prefilled(name, dtype, 53, 1), "per_layer", "page_first"))


# ---- the check can fail -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), EVERY)
@pytest.mark.parametrize(("token", "byte"), [(0, -1), (16, 0), (52, 0)], ids=["first", "second_page", "last"])
def test_one_flipped_byte_changes_the_logits(name: str, dtype: torch.dtype, token: int, byte: int) -> None:
    case = prefilled(name, dtype)
    row = demo.move(case, "per_layer", "page_first", flip=(token, byte % dtype.itemsize))
    assert not row.identical
    assert row.kl != 0


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_the_padding_of_the_tail_reaches_nothing(name: str, dtype: torch.dtype) -> None:
    assert_unchanged(demo.move(prefilled(name, dtype), "per_layer", "page_first", flip=(53, 0)))


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_without_the_load_nothing_is_left(name: str, dtype: torch.dtype) -> None:
    case = prefilled(name, dtype)
    cache, fresh = copy.deepcopy(case.cache), models.fresh_cache(case.model)
    with CacheMover(cache, page_size=16) as mover:
        mover.stage(cache)
        mover.write_back()
        poisoned = mover.poison(cache)
        staged = [t for part in mover.movers for ts in part.tensors.values() for t in ts]
        mover.fill(fresh)
    held = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    assert all(bool(t.isnan().all()) for t in (*staged, *held))
    assert poisoned == sum(t.numel() * t.element_size() for t in (*staged, *held))
    logits, _ = demo.decode(case.model, fresh, case.first)
    assert bool(logits.isnan().all())


@pytest.fixture
def one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the demo run one model in one dtype."""
    monkeypatch.setattr(models, "MODELS", {DEEPSEEK: models.deepseek_v3})
    monkeypatch.setattr(demo, "DTYPES", (FLOAT,))


@pytest.mark.usefixtures("one_model")
def test_demo_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:6] == ["model", "dtype", "pool", "form", "layout", "path"]
    assert len(lines) == 7
    assert lines[-1] == "all 5 moved caches decode bit-identically: KL exactly 0, no token recomputed"


@pytest.mark.usefixtures("one_model")
def test_demo_ends_with_1_when_a_byte_is_flipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--json", "--corrupt"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["fine"] is False
    assert [row["layout"] for row in printed["rows"]] == [*pool_class("mla").spec.layouts]
    assert not any(row["identical"] for row in printed["rows"])
    # 2 sequences x 4 pages x 16 tokens x 3 layers x (32 + 16) values of 4 bytes
    assert {row["nbytes"] for row in printed["rows"]} == {73_728}


# ---- what is staged, what is filled -----------------------------------------------------------


def test_deepseek_stages_latent_and_rope_side_by_side() -> None:
    cache = prefilled(DEEPSEEK, FLOAT).cache
    with CacheMover(cache, page_size=16) as mover:
        mover.stage(cache)
        (part,) = mover.movers
        assert (part.group.pool, part.group.params) == ("mla", {"kv_lora_rank": 32, "qk_rope_head_dim": 16})
        assert (part.paging.pages_each, part.paging.tail) == (4, 5)
        for layer, tensor in zip(cache.layers, part.tensors["kv"], strict=True):
            assert tensor.shape == (8, 16, 48)
            rows = tensor.reshape(2, 64, 48)
            assert torch.equal(rows[:, :53, :32], layer.keys[:, 0])
            assert torch.equal(rows[:, :53, 32:], layer.values[:, 0])
            assert not bool(rows[:, 53:].any())


@pytest.mark.parametrize("form", ["per_layer", "head_major"])
def test_llama_stages_keys_and_values_in_the_order_of_the_form(form: str) -> None:
    cache = prefilled(LLAMA, BFLOAT).cache
    order = [3, 1, 7, 5, 0, 2, 4, 6]
    with CacheMover(cache, page_size=16, form=form) as mover:
        mover.stage(cache, order=order)
        (part,) = mover.movers
        for layer, tensor in zip(cache.layers, part.tensors["k"], strict=True):
            assert tensor.is_contiguous()
            for page, place in enumerate(order):
                sequence, first = page // 4, page % 4 * 16
                want = layer.keys[sequence, :, first : first + 16]
                got = tensor[place] if form == "head_major" else tensor[place].transpose(0, 1)
                assert torch.equal(got[:, : want.shape[1]], want)
                assert not bool(got[:, want.shape[1] :].any())


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_the_fresh_cache_has_the_bookkeeping_of_the_first(name: str, dtype: torch.dtype) -> None:
    case = prefilled(name, dtype)
    fresh = models.fresh_cache(case.model)
    with CacheMover(case.cache, page_size=16) as mover:
        mover.stage(case.cache)
        mover.write_back()
        mover.load(order=[7, 6, 5, 4, 3, 2, 1, 0])
        mover.fill(fresh)
    assert fresh.get_seq_length() == 53
    for mine, theirs in zip(fresh.layers, case.cache.layers, strict=True):
        assert (mine.is_initialized, mine.dtype, mine.device) == (True, theirs.dtype, theirs.device)
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
        assert mine.keys.stride() == theirs.keys.stride()


KINDS: dict[str, Any] = {
    "window_full": lambda: DynamicSlidingWindowLayer(sliding_window=8),
    "window_open": lambda: DynamicSlidingWindowLayer(sliding_window=32),
    "static": lambda: StaticLayer(max_cache_len=24),
    "static_window_full": lambda: StaticSlidingWindowLayer(max_cache_len=24, sliding_window=8),
    "static_window_open": lambda: StaticSlidingWindowLayer(max_cache_len=40, sliding_window=32),
}


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_other_kinds_go_on_as_if_never_moved(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)

    def some(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (torch.randn(1, 2, tokens, width, generator=generator) for width in (4, 6))
        return keys, values

    first, fresh = (Cache(layers=[DynamicLayer(), KINDS[kind](), DynamicLayer()]) for _ in range(2))
    for layer in range(3):
        first.update(*some(13), layer)
    kept = copy.deepcopy(first)
    with CacheMover(first, page_size=4) as mover:
        groups = [part.group.layers for part in mover.movers]
        assert groups == ([(0, 2), (1,)] if kind.endswith("full") else [(0, 1, 2)])
        mover.stage(first)
        mover.write_back()
        mover.poison(first)
        mover.load()
        mover.fill(fresh)
    for _ in range(3):
        for layer in range(3):
            step = some(1)
            for mine, theirs in zip(fresh.update(*step, layer), kept.update(*step, layer), strict=True):
                assert torch.equal(mine, theirs)
            assert int(fresh.get_seq_length(layer)) == int(kept.get_seq_length(layer))
            assert fresh.layers[layer].get_mask_sizes(1) == kept.layers[layer].get_mask_sizes(1)


# ---- refusals ---------------------------------------------------------------------------------


def filled(*layers: Any, dtype: torch.dtype = FLOAT) -> Any:
    cache = Cache(layers=list(layers)) if layers else DynamicCache()
    for number in range(max(len(layers), 1)):
        cache.update(torch.ones(1, 2, 5, 4, dtype=dtype), torch.ones(1, 2, 5, 4, dtype=dtype), number)
    return cache


def test_a_cache_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^DynamicCache holds no tokens; run the prefill first$"):
        layer_groups(DynamicCache())


def test_something_else_than_a_cache_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^expected a cache object with `layers` .*got tuple; "):
        layer_groups(())  # type: ignore[arg-type]


def test_state_that_would_be_left_behind_is_refused() -> None:
    cache = filled(DynamicIndexedLayer())
    cache.update_indexer(torch.ones(1, 5, 4), 0)
    with pytest.raises(ValueError, match=r"^layer 0 \(DynamicIndexedLayer\) also holds indexer_keys, "):
        layer_groups(cache)


def test_keys_and_values_of_two_dtypes_are_refused() -> None:
    cache = filled()
    cache.layers[0].values = cache.layers[0].values.to(BFLOAT)
    with pytest.raises(
        ValueError, match=r"one dtype on one device, got torch.float32 on cpu and torch.bfloat16"
    ):
        layer_groups(cache)


def test_a_dtype_that_the_pool_does_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^mha: kv dtype: expected one of .*got torch.float64"):
        pools_for(filled(dtype=torch.float64), page_size=4)


def test_a_page_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^mha: page_size: expected at least 1, got 0$"):
        pools_for(filled(), page_size=0)


def test_calls_out_of_turn_are_refused() -> None:
    cache = filled()
    with CacheMover(cache, page_size=4) as mover:
        with pytest.raises(
            PoolError, match=r"^mha: no cache is staged; call stage\(\) before write_back\(\)$"
        ):
            mover.write_back()
        with pytest.raises(PoolError, match=r"^mha: no cache is staged; call stage\(\) before fill\(\)$"):
            mover.fill(DynamicCache())
        mover.stage(cache)
        with pytest.raises(
            PoolError, match=r"^mha: no page is written back; call write_back\(\) before load"
        ):
            mover.load()
        with pytest.raises(ValueError, match=r"^page order: expected each of 0 to 1 once, got \[0, 0\]$"):
            mover.stage(cache, order=[0, 0])
        with pytest.raises(ValueError, match=r"^this mover was made for .* make another mover$"):
            mover.stage(filled(dtype=BFLOAT))


def test_only_a_fresh_cache_of_the_same_kind_is_filled() -> None:
    cache = filled()
    with CacheMover(cache, page_size=4) as mover:
        mover.stage(cache)
        with pytest.raises(
            ValueError, match=r"^layer 0 of the cache to fill has seen 5 tokens, expected none"
        ):
            mover.fill(cache)
        with pytest.raises(
            ValueError, match=r"^layer 0 of the filled cache \(DynamicSlidingWindowLayer\) is "
        ):
            mover.fill(Cache(layers=[DynamicSlidingWindowLayer(sliding_window=3)]))
    mover.close()
