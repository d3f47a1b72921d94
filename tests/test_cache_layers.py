"""What cache layers hold: nothing reachable is missed, every class and attribute is known or refused."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import pytest
import torch
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from poolwright.runtime.errors import PoolError
from poolwright.runtime.integrations import books as books_module
from poolwright.runtime.integrations import demo, models
from poolwright.runtime.integrations.contents import contents, put, spelled
from poolwright.runtime.integrations.layers import KINDS, KNOWN
from poolwright.runtime.integrations.transformers import CacheMover, members_of, plans, taken_apart

FLOAT, BFLOAT = torch.float32, torch.bfloat16

LAYERS: dict[str, Callable[[], Any]] = {
    "window_full": lambda: DynamicSlidingWindowLayer(sliding_window=8),
    "window_open": lambda: DynamicSlidingWindowLayer(sliding_window=32),
    "static": lambda: StaticLayer(max_cache_len=24),
    "static_window_full": lambda: StaticSlidingWindowLayer(max_cache_len=24, sliding_window=8),
    "static_window_open": lambda: StaticSlidingWindowLayer(max_cache_len=40, sliding_window=32),
    "indexed": DynamicIndexedLayer,
    "static_indexed": lambda: StaticIndexedLayer(max_cache_len=24),
    "linear": LinearAttentionLayer,
    "linear_and_attention": LinearAttentionAndFullAttentionLayer,
    "linear_and_window": lambda: LinearAttentionAndSlidingWindowAttentionLayer(sliding_window=8),
    "linear_and_static": lambda: LinearAttentionAndStaticFullAttentionLayer(max_cache_len=24),
    "linear_and_static_window": lambda: LinearAttentionAndStaticSlidingWindowAttentionLayer(24, 8),
}


def some(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(1, *shape, generator=generator)


def update(layer: Any, tokens: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Let a layer see tokens, with all that its class takes; what it answers."""
    answers: list[torch.Tensor] = []
    if hasattr(layer, "keys"):
        answers += layer.update(some(generator, 2, tokens, 4), some(generator, 2, tokens, 6))
    if hasattr(layer, "update_indexer"):
        answers.append(layer.update_indexer(some(generator, tokens, 3)))
    if hasattr(layer, "update_conv_state"):
        answers.append(layer.update_conv_state(some(generator, 5, tokens), conv_kernel_size=4))
        answers.append(layer.update_recurrent_state(some(generator, 2, 3, 4)))
    return answers


def filled(*layers: Any, dtype: torch.dtype = FLOAT) -> Any:
    """A cache of five tokens."""
    cache = Cache(layers=list(layers)) if layers else DynamicCache()
    for number in range(max(len(layers), 1)):
        cache.update(torch.ones(1, 2, 5, 4, dtype=dtype), torch.ones(1, 2, 5, 4, dtype=dtype), number)
    return cache


# ---- every kind of layer goes on ----------------------------------------------------------------


@pytest.mark.parametrize("order", ["bulk", "layer"])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_every_kind_go_on_as_if_never_moved(kind: str, order: str) -> None:
    generator = torch.Generator().manual_seed(3)
    first, fresh = (Cache(layers=[DynamicLayer(), LAYERS[kind](), DynamicLayer()]) for _ in range(2))
    for layer in first.layers:
        update(layer, 13, generator)
    kept = copy.deepcopy(first)
    with CacheMover(first, page_size=4) as mover:
        mover.stage(first)
        mover.write_back()
        mover.poison(first)
        if order == "layer":
            mover.load_and_fill(fresh, demo.backwards)
        else:
            mover.load(place=demo.backwards)
            mover.fill(fresh)
    for step in range(3):
        for number, (mine, theirs) in enumerate(zip(fresh.layers, kept.layers, strict=True)):
            one, two = (update(layer, 1, torch.Generator().manual_seed(step)) for layer in (mine, theirs))
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
            left, right = contents(number, mine), contents(number, theirs)
            assert left.values == right.values
            assert all(torch.equal(left.tensors[path], right.tensors[path]) for path in right.tensors)
            if hasattr(theirs, "get_mask_sizes"):
                assert mine.get_mask_sizes(1) == theirs.get_mask_sizes(1)


def test_every_kind_that_the_library_has_is_known() -> None:
    """Its mappings from types of layers to classes name no class that `KINDS` lacks."""
    models.MODELS["DeepSeek-V4"].build(FLOAT)  # its classes of layers are known once the model is loaded
    named = {
        made.__name__
        for mapping in (cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, cache_utils.STATIC_LAYER_TYPE_MAPPING)
        for made in mapping.values()
    }
    assert named <= KINDS.keys()
    assert {type(make()).__name__ for make in LAYERS.values()} | {"DynamicLayer"} == {
        name for name in KINDS if not name.startswith("DeepseekV4")
    }


@pytest.mark.parametrize("kind", ["static", "static_indexed", "linear", "linear_and_static"])
def test_tensors_that_graphs_hold_keep_their_place(kind: str) -> None:
    """A layer that was used and reset keeps its tensors when it is filled: their addresses are in graphs."""
    first, used = (Cache(layers=[LAYERS[kind]()]) for _ in range(2))
    with torch.inference_mode():
        for cache in (first, used):
            update(cache.layers[0], 9, torch.Generator().manual_seed(1))
        used.reset()
    before = dict(contents(0, used.layers[0]).tensors)
    with CacheMover(first, page_size=4) as mover:
        mover.stage(first)
        mover.write_back()
        mover.load()
        mover.fill(used)
    after = contents(0, used.layers[0]).tensors
    assert all(after[path] is tensor for path, tensor in before.items())
    assert all(torch.equal(t, after[path]) for path, t in contents(0, first.layers[0]).tensors.items())


def test_marks_of_the_library_on_tensors_are_put_on_the_new_ones() -> None:
    first, fresh = (Cache(layers=[StaticLayer(max_cache_len=8)]) for _ in range(2))
    update(first.layers[0], 3, torch.Generator())
    assert vars(first.layers[0].keys)
    with CacheMover(first, page_size=4) as mover:
        mover.stage(first)
        mover.write_back()
        mover.load()
        mover.fill(fresh)
    assert vars(fresh.layers[0].keys) == vars(first.layers[0].keys)


# ---- nothing is forgotten -----------------------------------------------------------------------


def reachable(layer: Any) -> set[int]:
    """Ids of all tensors that the garbage collector reaches from an object, past no class and no module."""
    found, seen, todo = set(), set(), [layer]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type | ModuleType | FunctionType | MethodType):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found.add(id(thing))
        else:
            todo += gc.get_referents(thing)
    return found


@pytest.mark.parametrize("name", models.MODELS)
def test_every_reachable_tensor_of_a_model_is_found_and_claimed(name: str) -> None:
    tiny = models.MODELS[name]
    model = tiny.build(BFLOAT)
    cache = models.fresh_cache(model)
    models.logits(model, torch.arange(54).reshape(2, 27), cache)
    for number, held in enumerate(taken_apart(cache, tiny.pools)):
        tensors = held.contents.tensors
        assert reachable(cache.layers[number]) == {id(tensor) for tensor in tensors.values()}
        claimed = [claim.path for share in held.shares for claim in share.claims]
        assert len(claimed) == len(set(claimed))
        assert {path for path, tensor in tensors.items() if tensor.numel() > 1} == set(claimed)


@pytest.mark.parametrize("kind", LAYERS)
def test_every_reachable_tensor_of_a_layer_is_found(kind: str) -> None:
    layer = LAYERS[kind]()
    update(layer, 7, torch.Generator())
    assert reachable(layer) == {id(tensor) for tensor in contents(0, layer).tensors.values()}


@pytest.mark.parametrize("name", ["Qwen3-Next", "Falcon-H1", "DeepSeek-V3.2", "DeepSeek-V4", "gpt-oss"])
def test_a_flag_that_is_not_put_back_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each value or tensor in turn that a fresh layer lacks: leaving it out raises."""
    tiny = models.MODELS[name]
    model = tiny.build(BFLOAT)
    cache = models.fresh_cache(model)
    models.logits(model, torch.arange(54).reshape(2, 27), cache)
    with CacheMover(cache, page_size=16, pools=tiny.pools) as mover:
        mover.stage(cache)
        mover.write_back()
        mover.load()
        left_out = []
        for number, layer in enumerate(cache.layers):
            found, new = contents(number, layer), contents(number, models.fresh_cache(model).layers[number])
            for path in (*found.tensors, *found.aliases, *found.values):
                if path in found.values and new.values.get(path) == found.values[path]:
                    continue
                if path[0] == "_sliding_window_tensor":
                    continue  # a setting as a tensor: a fresh layer has it
                left_out.append(path)

                def all_but_one(into: Any, at: Any, value: Any, skip: Any = (layer, path)) -> None:
                    if (type(into), at) != (type(skip[0]), skip[1]):
                        put(into, at, value)

                monkeypatch.setattr(books_module, "put", all_but_one)
                with pytest.raises((ValueError, KeyError, TypeError)):
                    mover.fill(models.fresh_cache(model))
        monkeypatch.undo()
        mover.fill(models.fresh_cache(model))
    assert left_out


# ---- refusals -----------------------------------------------------------------------------------


class Stateful(DynamicLayer):
    """A layer of a class that nobody described."""


def with_attribute(name: str, value: object, layer: Any = None) -> Any:
    cache = filled(layer or DynamicLayer())
    setattr(cache.layers[0], name, value)
    return cache


class Hidden:
    """Something that may hold tensors."""


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no_tokens": (DynamicCache, "the cache holds no tokens; run the prefill first"),
    "no_cache": (
        tuple,
        r"expected a cache object with `layers` \(as DynamicCache has\), got tuple; of an encoder-decoder "
        r"cache hand over self_attention_cache",
    ),
    "unknown_class": (
        lambda: filled(Stateful()),
        r"layer 0 \(Stateful\): this kind of cache layer is not known, expected one of DynamicLayer, .*; "
        r"describe it in KINDS of poolwright.runtime.integrations.layers",
    ),
    "unknown_tensor": (
        lambda: with_attribute("extra_states", torch.ones(3)),
        r"layer 0 \(DynamicLayer\) also has extra_states, which KINDS of .* does not name",
    ),
    "unknown_flag": (
        lambda: with_attribute("has_extra", True),
        r"layer 0 \(DynamicLayer\) also has has_extra, which KINDS of .* does not name",
    ),
    "hidden_in_an_object": (
        lambda: with_attribute("device", Hidden()),
        r"layer 0 \(DynamicLayer\): device is a Hidden, expected a tensor, a plain value, .*",
    ),
    "hidden_in_a_tuple": (
        lambda: with_attribute("keys", (torch.ones(1),)),
        r"layer 0 \(DynamicLayer\): keys is a tuple, expected a tensor, .*",
    ),
    "grown_counter": (
        lambda: with_attribute("cumulative_length", torch.ones(2), DynamicSlidingWindowLayer(8)),
        r"layer 0 \(DynamicSlidingWindowLayer\): cumulative_length is a tensor of 2 elements, expected a "
        r"counter; only pools carry more than one element",
    ),
    "second_state": (
        lambda: second_state(),
        r"layer 1 \(LinearAttentionLayer\) holds conv_states\[1\], which no pool takes; .* left behind",
    ),
    "one_tensor_twice": (
        lambda: twice(),
        r"layer 0 \(DynamicLayer\): values is the same tensor as keys",
    ),
    "two_dtypes": (
        lambda: with_attribute("values", torch.ones(1, 2, 5, 4, dtype=BFLOAT)),
        r".* one dtype on one device, got torch.float32 on cpu and torch.bfloat16 on cpu",
    ),
    "two_lengths": (
        lambda: with_attribute("values", torch.ones(1, 2, 4, 4)),
        r".* keys and values of \[sequence, head, token, dim\], got \(1, 2, 5, 4\) and \(1, 2, 4, 4\)",
    ),
    "more_seen_than_room": (
        lambda: with_attribute("cumulative_length", torch.tensor(9), StaticLayer(8)),
        r"layer 0 \(StaticLayer\): has seen 9 tokens and holds 8; only a sliding window may hold fewer",
    ),
    "own_offloading": (
        lambda: offloading(),
        r"DynamicCache offloads its layers itself; build it with offloading=False",
    ),
    "more_in_the_cache": (
        lambda: more_in_the_cache(),
        r"DynamicCache also has memory, which may hold state that no pool takes",
    ),
}


def second_state() -> Any:
    cache = filled(DynamicLayer(), LinearAttentionAndFullAttentionLayer())
    cache.layers[1] = LinearAttentionLayer(number_of_states=2)
    for state in range(2):
        cache.layers[1].update_conv_state(torch.ones(1, 3, 4), state)
    return cache


def twice() -> Any:
    cache = filled()
    cache.layers[0].values = cache.layers[0].keys
    return cache


def offloading() -> Any:
    cache = filled()
    cache.offloading = True
    return cache


def more_in_the_cache() -> Any:
    cache = filled()
    cache.memory = torch.ones(1)
    return cache


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"^{message}$"):
        CacheMover(make(), page_size=4)


def test_an_object_with_slots_is_refused() -> None:
    class Slotted:
        __slots__ = ("keys",)

    with pytest.raises(ValueError, match=r"^layer 0 \(Slotted\): .* without __slots__$"):
        CacheMover(Cache(layers=[Slotted()]), page_size=4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pools": {"states": "mamba"}}, "pools: expected roles state, got 'states'"),
        ({"pools": "mamba"}, "pools: expected a mapping from role to pool, got 'mamba'"),
        ({"path": "cuda"}, "path: expected one of zero_copy, staged, host, torch, got 'cuda'"),
        ({"spare": -1}, "spare: expected an integer of at least 0, got -1"),
        (
            {"spare": 2},
            "spare: expected 0 without a group, whose pools alone have spare pages, got 2; name a group",
        ),
        ({"page_size": "4"}, "page_size: expected an integer, got '4'"),
        ({"names": "full"}, "names: expected a mapping from member to pool of the group, got 'full'"),
        ({"names": {"kv": "full"}}, "names: expected none without a group, got {'kv': 'full'}; name a group"),
        (
            {"names": {"kw": "full"}, "group": "swa_full"},
            "names: expected members such as kv, got 'kw'; members are kv, window, indexer, state,"
            " compressor_entries, compressor_state, indexer_entries, indexer_state, or as kv_2",
        ),
        (
            {"names": {"kv": 1}, "group": "swa_full"},
            "names: kv: expected the name of a pool, got 1",
        ),
    ],
)
def test_arguments_that_nothing_would_follow_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^CacheMover: {message}$"):
        CacheMover(filled(), **({"page_size": 4} | given))


def test_names_may_be_those_of_a_longer_prompt() -> None:
    names = {"kv": "full", "window": "swa", "window_2": "swa"}
    with CacheMover(filled(), page_size=4, group="swa_full", names=names) as mover:
        assert [member.name for member in mover.members] == ["kv"]


def test_roles_of_shares_are_known() -> None:
    cache = Cache(layers=[make() for make in LAYERS.values()])
    for layer in cache.layers:
        update(layer, 13, torch.Generator().manual_seed(3))
    roles = {member.share.role for member in members_of(taken_apart(cache, {}))}
    named = {name.removesuffix("_2") for tiny in models.MODELS.values() for name in tiny.names}
    assert roles | named == set(KNOWN)


def test_two_members_of_one_pool_are_refused() -> None:
    cache = filled(DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=8))
    message = "^CacheMover: names: expected a pool of its own for kv, got 'swa'; window has that one$"
    with pytest.raises(ValueError, match=message):
        CacheMover(cache, page_size=4, group="swa_full", names={"kv": "swa", "window": "swa"})
    with CacheMover(cache, page_size=4, group="swa_full", names={"kv": "full", "window": "swa"}) as mover:
        assert [member.name for member in mover.members] == ["kv", "window"]


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        (
            {"state": "mha"},
            r".*pool of states: expected one of mamba, gated_delta_net, kda_state, got 'mha'$",
        ),
        ({"state": "kda_state"}, r"^state: .* of pool kda_state does not fit: .*$"),
        ({"state": "gated_delta_net"}, r"^gated_delta_net: k_heads: expected at least 1, got -1$"),
    ],
)
def test_a_pool_of_states_that_does_not_fit_is_refused(pools: Mapping[str, str], message: str) -> None:
    cache = Cache(layers=[LinearAttentionLayer()])
    cache.layers[0].update_conv_state(torch.ones(1, 30, 4))
    cache.layers[0].update_recurrent_state(torch.ones(1, 2, 3, 16))
    with (
        pytest.raises(ValueError, match=message),
        CacheMover(cache, page_size=4, pools=pools) as mover,
    ):
        mover.stage(cache)


def test_states_of_other_batches_are_refused() -> None:
    cache = Cache(layers=[LinearAttentionLayer()])
    cache.layers[0].update_conv_state(torch.ones(2, 30, 4))
    cache.layers[0].update_recurrent_state(torch.ones(1, 2, 3, 16))
    with (
        CacheMover(cache, page_size=4) as mover,
        pytest.raises(ValueError, match=r"does not fit: expected \(2, 1\)"),
    ):
        mover.stage(cache)


def test_a_dtype_that_the_pool_does_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^mha: dtype: expected one of .*got torch.float64"):
        CacheMover(filled(dtype=torch.float64), page_size=4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"layout": "page_frist"},
            r"^layout: expected one of layer_first, .*, got 'page_frist'$",
        ),
        ({"form": "rows"}, r"^form: expected one of per_layer, head_major, got 'rows'$"),
    ],
)
def test_an_order_that_no_pool_has_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheMover(filled(), page_size=4, **given)


def test_a_page_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^kv: page_size: expected at least 1, got 0$"):
        CacheMover(filled(), page_size=0)


def test_a_page_of_part_of_an_entry_is_refused() -> None:
    model = models.MODELS["DeepSeek-V4"].build(FLOAT)
    cache = models.fresh_cache(model)
    models.logits(model, torch.arange(17)[None], cache)
    found = members_of(taken_apart(cache, {}))
    with pytest.raises(
        ValueError,
        match=r"^compressor_entries: page_size: expected a multiple of 4, the tokens of one entry, got 6$",
    ):
        plans(found, page_size=6)


def test_calls_out_of_turn_are_refused() -> None:
    cache = filled()
    with CacheMover(cache, page_size=4) as mover:
        with pytest.raises(
            PoolError, match=r"^kv: no cache is staged; call stage\(\) before write_back\(\)$"
        ):
            mover.write_back()
        with pytest.raises(PoolError, match=r"^no cache is staged; call stage\(\) before fill\(\)$"):
            mover.fill(DynamicCache())
        mover.stage(cache)
        with pytest.raises(PoolError, match=r"^no page is written back; call write_back\(\) before load"):
            mover.load()
        with pytest.raises(ValueError, match=r"^page order: expected each of 0 to 1 once, got \[0, 0\]$"):
            mover.stage(cache, place=lambda pages: [0] * pages)
        with pytest.raises(ValueError, match=r"^this mover was made for .* make another mover$"):
            mover.stage(filled(dtype=BFLOAT))


@pytest.mark.parametrize(
    ("fresh", "message"),
    [
        (
            filled,
            r"layer 0 \(DynamicLayer\) of the cache to fill already holds keys, values; hand over a new .*",
        ),
        (
            lambda: Cache(layers=[DynamicSlidingWindowLayer(sliding_window=3)]),
            r"layer 0 \(DynamicSlidingWindowLayer\) of the cache to fill is not of the kind of the first .*",
        ),
        (
            lambda: Cache(layers=[DynamicLayer(), DynamicLayer()]),
            r"the cache to fill has 2 layers, expected 1",
        ),
    ],
)
def test_only_a_fresh_cache_of_the_same_kind_is_filled(fresh: Callable[[], Any], message: str) -> None:
    cache = filled()
    with CacheMover(cache, page_size=4) as mover:
        mover.stage(cache)
        with pytest.raises(ValueError, match=f"^{message}$"):
            mover.fill(fresh())
    mover.close()


def test_a_fresh_cache_of_other_settings_is_refused() -> None:
    cache = filled(DynamicSlidingWindowLayer(sliding_window=3))
    with CacheMover(cache, page_size=4) as mover:
        mover.stage(cache)
        with pytest.raises(
            ValueError, match=r".*: sliding_window is 4, expected 3; build the fresh cache as .*"
        ):
            mover.fill(Cache(layers=[DynamicSlidingWindowLayer(sliding_window=4)]))


def test_paths_are_spelled_as_python_writes_them() -> None:
    assert [spelled(path) for path in (("keys",), ("conv_states", 0), ("compressed_kv", "indexer"))] == [
        "keys",
        "conv_states[0]",
        "compressed_kv['indexer']",
    ]
