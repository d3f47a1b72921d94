"""Caches of real models go through the pools, are wiped, come back, and decoding goes on to the same bit."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from poolwright.generated import pool_class
from poolwright.runtime.integrations import demo, models
from poolwright.runtime.integrations.contents import contents
from poolwright.runtime.integrations.transformers import CacheMover, members_of, taken_apart
from poolwright.runtime.transfer import Transfers

LLAMA, DEEPSEEK, QWEN, V4 = "Llama", "DeepSeek-V3", "Qwen3-Next", "DeepSeek-V4"
FLOAT, BFLOAT = torch.float32, torch.bfloat16
PLAIN = [(LLAMA, FLOAT), (LLAMA, BFLOAT), (DEEPSEEK, FLOAT), (DEEPSEEK, BFLOAT)]
EVERY = [(name, dtype) for name in models.MODELS for dtype in (BFLOAT, FLOAT)]
PROGRAMS = [
    (name, dtype, form, layout)
    for name, pool, dtype in (
        (LLAMA, "mha", BFLOAT),
        (DEEPSEEK, "mla", FLOAT),
        (QWEN, "gated_delta_net", BFLOAT),
        ("Kimi-Linear", "kda_state", BFLOAT),
        ("Mamba-2", "mamba", BFLOAT),
        ("DeepSeek-V3.2", "k_only", BFLOAT),
        (V4, "dsv4_state", BFLOAT),
        ("LFM2", "mamba", FLOAT),
    )
    for form in pool_class(pool).spec.forms
    for layout in pool_class(pool).spec.layouts
]

GROUPED = [name for name, tiny in models.MODELS.items() if tiny.group is not None]

MEMBERS = {
    "Llama": "kv: mha of layers 0 1 2 3",
    "DeepSeek-V3": "kv: mla of layers 0 1 2",
    "Qwen3-MoE": "kv: mha of layers 0 1",
    "gpt-oss": "window: mha of layers 0 2; kv: mha of layers 1 3",
    "Gemma-3": "window: mha of layers 0 1 2 3 4; kv: mha of layers 5",
    "DeepSeek-V3.2": "kv: mha of layers 0 1 2; indexer: k_only of layers 0 1 2",
    "DeepSeek-V4": (
        "window: mha of layers 0; window_2: mla of layers 1 2 3; "
        "compressor_entries: qsa_indexer of layers 1 3; compressor_state: dsv4_state of layers 1 3; "
        "indexer_entries: qsa_indexer of layers 1 3; indexer_state: dsv4_state of layers 1 3; "
        "compressor_entries_2: qsa_indexer of layers 2; compressor_state_2: dsv4_state of layers 2"
    ),
    "Qwen3-Next": "state: gated_delta_net of layers 0 1 2; kv: mha of layers 3",
    "Kimi-Linear": "state: kda_state of layers 0 1 2; kv: mla of layers 3",
    "Bamba": "state: mamba of layers 0 2; kv: mha of layers 1 3",
    "Falcon-H1": "state: mamba of layers 0 1 2; kv: mha of layers 0 1 2",
    "LFM2": "state: mamba of layers 0 2; kv: mha of layers 1",
    "Mamba-2": "state: mamba of layers 0 1 2",
}
"""What each cache needs: ids of layers keep their holes."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    models.be_quiet()
    with demo.one_thread():
        yield


@functools.cache
def model_of(name: str, dtype: torch.dtype) -> Any:
    return models.MODELS[name].build(dtype)


@functools.cache
def prefilled(name: str, dtype: torch.dtype, tokens: int = demo.PROMPT, sequences: int = 2) -> demo.Case:
    """A model after its prefill; its two reference runs agree, else this raises."""
    return demo.prefill(name, model_of(name, dtype), tokens=tokens, sequences=sequences)


def members(case: demo.Case) -> Any:
    return members_of(taken_apart(case.cache, case.pools))


def assert_unchanged(row: demo.Row) -> None:
    assert (row.identical, row.kl, row.recomputed) == (True, 0.0, 0)


def assert_same_cache(mine: Any, theirs: Any) -> None:
    """Every tensor, flag and counter of two caches is the same, bit by bit."""
    assert len(mine.layers) == len(theirs.layers)
    for number, layers in enumerate(zip(mine.layers, theirs.layers, strict=True)):
        left, right = (contents(number, layer) for layer in layers)
        assert (left.values, left.aliases) == (right.values, right.aliases)
        assert left.tensors.keys() == right.tensors.keys()
        for path, tensor in left.tensors.items():
            other = right.tensors[path]
            assert (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)
            assert demo.same_bits(tensor, other), path


# ---- decoding goes on -------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["bulk", "layer"])
@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_every_model(name: str, dtype: torch.dtype, order: str) -> None:
    assert_unchanged(demo.move(prefilled(name, dtype), None, None, order=order))


@pytest.mark.parametrize("order", ["bulk", "layer"])
@pytest.mark.parametrize("name", GROUPED)
def test_pools_of_a_group_also_move_side_by_side(name: str, order: str) -> None:
    row = demo.move(prefilled(name, BFLOAT), None, None, order=order, apart=True)
    assert ":" not in row.pools
    assert_unchanged(row)


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_moves_in_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One submission each way, whatever the number of pools; each layer is told over all of them."""
    submitted: list[str] = []
    submit = Transfers.submit

    def counted(self: Transfers, direction: str, *arguments: Any, **options: Any) -> Any:
        submitted.append(direction)
        return submit(self, direction, *arguments, **options)

    monkeypatch.setattr(Transfers, "submit", counted)
    row = demo.move(prefilled(name, BFLOAT), None, None, order="layer")
    assert row.pools.startswith(f"{models.MODELS[name].group}: ")
    assert submitted == ["write_back", "load"]
    assert_unchanged(row)


def test_a_group_that_does_not_fit_the_cache_is_refused() -> None:
    case = prefilled(QWEN, BFLOAT)
    with pytest.raises(
        ValueError,
        match=r"^kimi_linear: state: expected a pool kda_state, got gated_delta_net; "
        r"if its states are the model's, pass pools=\{'state': 'kda_state'\}$",
    ):
        CacheMover(case.cache, page_size=16, pools=case.pools, group="kimi_linear")
    with pytest.raises(
        ValueError, match=r"^swa_full: no pool for state \(gated_delta_net\); pools are full, swa$"
    ):
        CacheMover(case.cache, page_size=16, pools=case.pools, group="swa_full")


def test_every_model_is_named_here() -> None:
    assert MEMBERS.keys() == models.MODELS.keys()


@pytest.mark.parametrize("name", MEMBERS)
def test_the_pools_that_a_cache_needs(name: str) -> None:
    found = [
        f"{m.name}: {m.share.pool} of layers {' '.join(map(str, m.layers))}"
        for m in members(prefilled(name, BFLOAT))
    ]
    assert "; ".join(found) == MEMBERS[name]


@pytest.mark.parametrize(("name", "dtype", "form", "layout"), PROGRAMS)
def test_every_form_and_layout(name: str, dtype: torch.dtype, form: str, layout: str) -> None:
    row = demo.move(prefilled(name, dtype), form, layout)
    assert layout in row.layout.split("/") and form in row.form.split("/")
    assert_unchanged(row)


@pytest.mark.parametrize("tokens", [48, 49, 63], ids=["tail_full", "tail_1", "tail_15"])
@pytest.mark.parametrize(("name", "dtype"), [*PLAIN, (QWEN, BFLOAT), (V4, BFLOAT), ("gpt-oss", BFLOAT)])
def test_partial_tails(name: str, dtype: torch.dtype, tokens: int) -> None:
    assert_unchanged(demo.move(prefilled(name, dtype, tokens), None, "page_first"))


@pytest.mark.parametrize("tokens", [1, 3, 7])
@pytest.mark.parametrize("name", models.MODELS)
def test_prompts_shorter_than_any_window(name: str, tokens: int) -> None:
    """Convolution windows padded, sliding windows open, compressors without an entry or a window before."""
    assert_unchanged(demo.move(prefilled(name, BFLOAT, tokens), None, None))


@pytest.mark.parametrize(
    ("name", "dtype", "page_size"),
    [
        *((LLAMA, FLOAT, size) for size in (1, 64)),
        *((DEEPSEEK, BFLOAT, size) for size in (1, 7)),
        *((QWEN, BFLOAT, size) for size in (1, 64)),
        *((V4, BFLOAT, size) for size in (8, 64)),
    ],
)
def test_page_sizes(name: str, dtype: torch.dtype, page_size: int) -> None:
    assert_unchanged(demo.move(prefilled(name, dtype), None, "page_first", page_size=page_size))


@pytest.mark.parametrize("path", ["host", "zero_copy", "staged", "torch"])
@pytest.mark.parametrize(
    ("name", "dtype"), [(LLAMA, FLOAT), (DEEPSEEK, BFLOAT), (QWEN, BFLOAT), (V4, BFLOAT)]
)
def test_every_path(name: str, dtype: torch.dtype, path: str) -> None:
    row = demo.move(prefilled(name, dtype), None, "page_first", path=path)
    assert row.path == path
    assert_unchanged(row)


@pytest.mark.parametrize("name", models.MODELS)
def test_a_single_sequence(name: str) -> None:
    assert_unchanged(demo.move(prefilled(name, FLOAT, 53, 1), None, "page_first"))


@pytest.mark.parametrize("name", [QWEN, V4, "Mamba-2", "gpt-oss"])
def test_a_cache_moved_between_all_steps(name: str) -> None:
    """States after decoding, windows that close on the way, caches that were filled before."""
    case = prefilled(name, BFLOAT)
    cache, token = copy.deepcopy(case.cache), case.first
    for step in range(9):
        fresh = models.fresh_cache(case.model)
        with CacheMover(cache, page_size=16, pools=case.pools) as mover:
            mover.stage(cache)
            mover.write_back()
            mover.poison(cache)
            mover.load_and_fill(fresh, demo.backwards)
        logits = models.logits(case.model, token, fresh)[:, -1]
        assert demo.same_bits(logits, case.reference[step]), step
        cache, token = fresh, logits.argmax(-1, keepdim=True)


# ---- the check can fail -----------------------------------------------------------------------

SHOWN = [
    *((name, "kv", "k", None) for name in models.MODELS if "kv: mha" in MEMBERS[name]),
    *((name, "kv", "kv", None) for name in models.MODELS if "kv: mla" in MEMBERS[name]),
    *((name, "window", "k", None) for name in ("gpt-oss", "Gemma-3", V4)),
    *((name, "state", "conv[0]", None) for name in ("Bamba", "Falcon-H1", "LFM2", "Mamba-2")),
    (QWEN, "state", "conv", None),
    ("Kimi-Linear", "state", "temporal", None),
    (V4, "window_2", "kv", None),
    (V4, "compressor_entries", "key", None),
    (V4, "compressor_state", "state", (0, 0, 0, 0)),
    (V4, "compressor_state", "state", (4, 1, 1, 0)),
    (V4, "compressor_state_2", "state", (0, 1, 0, 0)),
]


@pytest.mark.parametrize(("name", "member", "component", "item"), SHOWN)
def test_one_flipped_byte_changes_the_logits(
    name: str, member: str, component: str, item: tuple[int, ...] | None
) -> None:
    row = demo.move(prefilled(name, BFLOAT), None, None, flip=demo.Flip(member, component, item=item))
    assert not row.identical
    assert row.kl != 0


@pytest.mark.parametrize(("name", "dtype"), PLAIN)
@pytest.mark.parametrize(("token", "byte"), [(0, -1), (16, 0), (52, 0)], ids=["first", "second_page", "last"])
def test_a_flipped_byte_of_any_page_changes_the_logits(
    name: str, dtype: torch.dtype, token: int, byte: int
) -> None:
    component = "k" if name == LLAMA else "kv"
    row = demo.move(prefilled(name, dtype), None, "page_first", flip=demo.Flip("kv", component, token, byte))
    assert not row.identical
    assert row.kl != 0


@pytest.mark.parametrize("name", models.MODELS)
def test_a_byte_of_each_tensor_comes_from_its_pool(name: str) -> None:
    """One byte flipped on the host is one byte of one tensor of the filled cache, and no other."""
    case = prefilled(name, BFLOAT)
    for member in members(case):
        for claim in member.share.claims:
            first = dict(claim.at)
            cache, fresh = copy.deepcopy(case.cache), models.fresh_cache(case.model)
            with CacheMover(cache, page_size=16, pools=case.pools) as mover:
                mover.stage(cache)
                mover.write_back()
                mover.poison(cache)
                tensors = next(each.tensors for each in mover.movers if each.member == member)
                item = tuple(first.get(dim, 0) for dim in tensors.dims(claim.component))
                demo.flip_byte(mover, demo.Flip(member.name, claim.component, 0, 0, item))
                mover.load()
                mover.fill(fresh)
            changed = {
                (number, path): differing_bytes(
                    tensor, contents(number, case.cache.layers[number]).tensors[path]
                )
                for number, layer in enumerate(fresh.layers)
                for path, tensor in contents(number, layer).tensors.items()
            }
            assert {key: bytes_ for key, bytes_ in changed.items() if bytes_} == {
                (member.layers[0], claim.path): [0]
            }


def differing_bytes(left: torch.Tensor, right: torch.Tensor) -> list[int]:
    """Where two tensors of one look differ, as offsets of bytes."""
    one, two = (t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    return (one != two).nonzero().flatten().tolist()


@pytest.mark.parametrize(("name", "dtype"), PLAIN)
def test_the_padding_of_the_tail_reaches_nothing(name: str, dtype: torch.dtype) -> None:
    component = "k" if name == LLAMA else "kv"
    flip = demo.Flip("kv", component, row=53, byte=0)
    assert_unchanged(demo.move(prefilled(name, dtype), None, "page_first", flip=flip))


@pytest.mark.parametrize("name", models.MODELS)
def test_without_the_load_nothing_is_left(name: str) -> None:
    case = prefilled(name, FLOAT)
    cache, fresh = copy.deepcopy(case.cache), models.fresh_cache(case.model)
    with CacheMover(cache, page_size=16, pools=case.pools) as mover:
        mover.stage(cache)
        mover.write_back()
        poisoned = mover.poison(cache)
        staged = [tensor for each in mover.movers for tensor in each.tensors.all()]
        mover.fill(fresh)
    held = [
        tensor
        for number, layer in enumerate(cache.layers)
        for tensor in contents(number, layer).tensors.values()
        if tensor.numel() > 1
    ]
    assert all(bool(tensor.isnan().all()) for tensor in (*staged, *held))
    assert poisoned == sum(t.numel() * t.element_size() for t in (*staged, *held))
    logits, _ = demo.decode(case.model, fresh, case.first)
    assert bool(logits.isnan().all())


# ---- the demo ---------------------------------------------------------------------------------


def test_demo_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--model", DEEPSEEK]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:6] == ["model", "dtype", "pools", "layout", "order", "path"]
    assert len(lines) == 2 + len(pool_class("mla").spec.layouts)
    assert lines[-1] == (
        f"all {len(lines) - 2} moved caches decode bit-identically: KL exactly 0, no token recomputed"
    )


def test_demo_ends_with_1_when_a_byte_is_flipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--json", "--corrupt", "--model", DEEPSEEK]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["fine"] is False
    assert {row["layout"] for row in printed["rows"]} == {*pool_class("mla").spec.layouts}
    assert not any(row["identical"] for row in printed["rows"])
    # 2 sequences x 4 pages x 16 tokens x 3 layers x (32 + 16) values of 4 or 2 bytes
    assert {row["nbytes"] for row in printed["rows"]} == {73_728, 36_864}


@pytest.mark.parametrize("name", [name for name in models.MODELS if name not in (LLAMA, DEEPSEEK)])
def test_demo_finds_a_flipped_byte_in_every_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--json", "--corrupt", "--model", name]) == 1
    assert [row["identical"] for row in json.loads(capsys.readouterr().out)["rows"]] == [False]


def test_demo_names_a_path_that_cannot_be_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--path", "staged", "--model", "Mamba-2"]) == 0
    assert "staged" in capsys.readouterr().out


# ---- what is staged, what is filled -----------------------------------------------------------


def test_deepseek_stages_latent_and_rope_side_by_side() -> None:
    cache = prefilled(DEEPSEEK, FLOAT).cache
    with CacheMover(cache, page_size=16) as mover:
        mover.stage(cache)
        (part,) = mover.movers
        assert part.member.share.pool == "mla"
        assert dict(part.member.share.params) == {"kv_lora_rank": 32, "qk_rope_head_dim": 16}
        assert (part.paging.pages_each, part.paging.tail) == (4, 5)
        for layer, tensor in zip(cache.layers, part.tensors.bound["kv"], strict=True):
            assert tensor.shape == (9, 16, 48)
            rows = tensor[:8].reshape(2, 64, 48)
            assert torch.equal(rows[:, :53, :32], layer.keys[:, 0])
            assert torch.equal(rows[:, :53, 32:], layer.values[:, 0])
            assert not bool(rows[:, 53:].any())


@pytest.mark.parametrize("form", ["per_layer", "head_major"])
def test_llama_stages_keys_and_values_in_the_order_of_the_form(form: str) -> None:
    cache = prefilled(LLAMA, BFLOAT).cache
    order = [3, 1, 7, 5, 0, 2, 4, 6]
    with CacheMover(cache, page_size=16, form=form) as mover:
        mover.stage(cache, place=lambda pages: order)
        (part,) = mover.movers
        for layer, tensor in zip(cache.layers, part.tensors.bound["k"], strict=True):
            assert tensor.is_contiguous()
            for page, place in enumerate(order):
                sequence, first = page // 4, page % 4 * 16
                want = layer.keys[sequence, :, first : first + 16]
                got = tensor[place] if form == "head_major" else tensor[place].transpose(0, 1)
                assert torch.equal(got[:, : want.shape[1]], want)
                assert not bool(got[:, want.shape[1] :].any())


def test_states_are_staged_beside_the_reserved_slot() -> None:
    """The slot that padded tokens write to holds nothing of a sequence."""
    case = prefilled("Kimi-Linear", BFLOAT)
    with CacheMover(case.cache, page_size=16, pools=case.pools) as mover:
        mover.stage(case.cache)
        part = mover.movers[0]
        temporal, conv = part.tensors.bound["temporal"], part.tensors.bound["conv"]
        assert isinstance(temporal, torch.Tensor) and isinstance(conv, torch.Tensor)
        assert (temporal.dtype, conv.dtype) == (FLOAT, BFLOAT)
        for at, number in enumerate(part.member.layers):
            layer = case.cache.layers[number]
            assert torch.equal(temporal[at, 1:3], layer.recurrent_states[0].transpose(2, 3))
            assert torch.equal(conv[at, 1:3], layer.conv_states[0].transpose(1, 2))
        assert not bool(temporal[:, 0].any()) and not bool(conv[:, 0].any())


def test_a_compressor_is_staged_as_a_ring() -> None:
    """The window before in the first half with its first series, the open window behind it."""
    case = prefilled(V4, BFLOAT)
    with CacheMover(case.cache, page_size=16) as mover:
        mover.stage(case.cache)
        part = next(each for each in mover.movers if each.member.name == "compressor_state")
        layer, ring = case.cache.layers[1], part.tensors.pages_of("state", 0)[:2, 0]
    assert ring.shape == (2, 8, 2, 2, 32)  # sequence, slot, keys and gates, series, dim
    for kind, name in enumerate(("kv", "gate")):
        before, window = (getattr(layer, f"{part}_{name}")["compressor"] for part in ("overlap", "buffer"))
        assert torch.equal(ring[:, :4, kind, 0], before)
        assert torch.equal(ring[:, 4:5, kind].flatten(2), window)
        assert not bool(ring[:, :4, kind, 1].any()) and not bool(ring[:, 5:, kind].any())


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_the_fresh_cache_has_all_that_the_first_had(name: str, dtype: torch.dtype) -> None:
    case = prefilled(name, dtype)
    fresh = models.fresh_cache(case.model)
    with CacheMover(case.cache, page_size=16, pools=case.pools) as mover:
        mover.stage(case.cache)
        mover.write_back()
        mover.load(place=demo.backwards)
        mover.fill(fresh)
    assert_same_cache(fresh, case.cache)
    strides = [
        [tensor.stride() for tensor in contents(0, layer).tensors.values() if tensor.is_contiguous()]
        for layer in case.cache.layers
    ]
    packed = [
        [
            mine.stride()
            for mine, theirs in zip(
                contents(0, layer).tensors.values(), contents(0, other).tensors.values(), strict=True
            )
            if theirs.is_contiguous()
        ]
        for layer, other in zip(fresh.layers, case.cache.layers, strict=True)
    ]
    assert packed == strides
