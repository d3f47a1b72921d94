"""Pages as bytes: what storage reads and writes, for every pool and layout, against the oracle."""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import itertools
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled_pools import build as built
from random_pools import Seeded, random_sample

import poolwright.generated as generated
from poolwright.codegen import lower, render
from poolwright.codegen.resolve import read_layouts_text, read_spec_text
from poolwright.runtime import native
from poolwright.runtime.pool import HostPool
from poolwright.runtime.tools import oracle
from poolwright.runtime.tools.samples import arguments, samples

DEVICE_PAGES = 7
STORED, SLOTS, OTHERS, BACK = (3, 6, 2), (4, 1, 2), (7, 0, 3), (5, 2, 4)
"""Device pages that are stored, their pages in a pool of 5; pages in a pool of 8, device pages filled."""

SPECS = Path(__file__).resolve().parents[1] / "specs"
FOLDER = tempfile.TemporaryDirectory()
DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class Kind:
    """A pool class with arguments. `dtypes`, `variants`: what the oracle wants to know besides."""

    pool_class: type[HostPool]
    given: Mapping[str, Any]
    dtypes: Mapping[str, torch.dtype]
    variants: Mapping[str, str]
    layout: str

    def make(self, pages: int) -> Any:
        return self.pool_class(**self.given, layout=self.layout, capacity_pages=pages)  # type: ignore[call-arg]

    def facts(self, pool: HostPool) -> Any:
        return self.pool_class.spec, pool.sizes, self.dtypes, self.variants


def generated_kinds() -> Iterator[Any]:
    for name in generated.POOLS:
        pool_class = generated.pool_class(name)
        for layout, (turn, sample) in itertools.product(
            pool_class.spec.layouts, enumerate(samples(pool_class, turn=1))
        ):
            given = arguments(pool_class, sample)
            kind = Kind(pool_class, given, sample.dtypes, sample.variants, layout)
            yield pytest.param(kind, id=f"{name}-{layout}-{turn}")


def imported(files: Mapping[str, str], name: str) -> Any:
    """The pool.py among generated files, as a module of this name."""
    folder = Path(FOLDER.name) / name
    folder.mkdir()
    for path, text in files.items():
        (folder / Path(path).name).write_text(text)
    spec = importlib.util.spec_from_file_location(name, folder / "pool.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_kind(seed: int) -> Kind | None:
    """The class that is generated for a random pool; None for one that must be refused."""
    sample = random_sample(Seeded(seed))
    if sample.refused is not None:
        return None
    pool_class = imported(built(sample).files, f"random_{seed}").RandomPoolHost
    values = sample.values
    given: dict[str, Any] = {**values, "wide": (values["wide_0"], values["wide_1"]), **dict(sample.choice)}
    given |= {name: range(1, 1 + values[name]) for name in ("layers", "tail_layers")}
    dtypes = {group: DTYPES[values[f"itemsize_{group}"]] for group in pool_class.spec.dtypes}
    given |= {"dtype": next(iter(dtypes.values()), None)} | {f"{g}_dtype": d for g, d in dtypes.items()}
    known = inspect.signature(pool_class).parameters
    taken = {name: value for name, value in given.items() if name in known}
    return Kind(pool_class, taken, dtypes, dict(sample.choice), sample.layout.name)


def random_kinds() -> Iterator[Any]:
    for seed in range(60):
        kind = random_kind(seed)
        if kind is not None:
            yield pytest.param(kind, id=f"random-{seed}")


KINDS = [*generated_kinds(), *random_kinds()]


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are moved by torch: what is compiled for a pool is tested elsewhere."""
    native.library()
    monkeypatch.setenv("POOLWRIGHT_CXX", "a-compiler-that-is-not-there")


class Side:
    """A pool with device tensors that hold random bytes, and the oracle's view of both."""

    def __init__(self, kind: Kind, pages: int, seed: int) -> None:
        self.pool = kind.make(pages)
        self.facts = kind.facts(self.pool)
        form = self.pool.form
        self.device = oracle.device(*self.facts, form, DEVICE_PAGES, self.pool.lists)
        self.device.arena.random_(generator=torch.Generator().manual_seed(seed))
        self.pool.bind(self.device.tensors, layer_ids=self.device.layer_ids)
        self.order = self.pool.spec.layouts[self.pool.layout].order

    def flat(self, device_page: int) -> torch.Tensor:
        """What the flat page of a device page must be: a buffer of one page, without the gaps around it."""
        one = oracle.host(*self.facts, self.pool.layout, 1)
        page = torch.zeros(one.nbytes, dtype=torch.uint8)
        held = torch.zeros(one.nbytes, dtype=torch.bool)
        source = {at.name: at for at in self.device.bytes}
        for at in one.bytes:
            page[at.at[0]] = self.device.arena[source[at.name].at[device_page]]
            held[at.at[0]] = True
        whole = not self.order or self.order.index("page") < self.order.index("component")
        return page if whole else page[held]

    def ids(self, page: int) -> range:
        return range(page * self.pool.page_size, (page + 1) * self.pool.page_size)


def moved(kind: Kind) -> Side:
    """A pool of five pages, three of which hold device pages."""
    side = Side(kind, 5, 1)
    if side.pool.page_bytes:
        side.pool.write_back(torch.tensor(SLOTS), torch.tensor(STORED), "page").wait()
    return side


def peek(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(ctypes.string_at(address, nbytes)), dtype=torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_flat_pages_go_through_another_pool(kind: Kind) -> None:
    here, there = moved(kind), Side(kind, 8, 2)
    flats = [here.pool.get_data_page(here.ids(page)[0]) for page in SLOTS]
    for flat, device in zip(flats, STORED, strict=True):
        assert torch.equal(flat, here.flat(device))
    for flat, page in zip(flats, OTHERS, strict=True):
        there.pool.set_from_flat_data_page(there.ids(page)[0], flat)
    if there.pool.page_bytes:
        there.pool.load(torch.tensor(OTHERS), torch.tensor(BACK), "page").wait()
    expected = Side(kind, 8, 2).device.arena
    source = {at.name: at for at in here.device.bytes}
    for at in there.device.bytes:
        for old, new in zip(STORED, BACK, strict=True):
            expected[at.at[new]] = here.device.arena[source[at.name].at[old]]
    assert torch.equal(there.device.arena, expected)
    assert here.pool.format_tag == there.pool.format_tag


@pytest.mark.parametrize("kind", KINDS)
def test_meta_names_and_flat_pages_are_the_same_bytes_in_one_order(kind: Kind) -> None:
    side = moved(kind)
    pool = side.pool
    ids = [i for page in SLOTS for i in side.ids(page)]
    addresses, sizes = pool.get_page_buffer_meta(torch.tensor(ids))
    each = len(pool.page_object_names)
    assert len(addresses) == len(sizes) == each * len(SLOTS)
    for at, page in enumerate(SLOTS):
        mine = slice(at * each, (at + 1) * each)
        assert pool.page_ranges(page) == list(zip(addresses[mine], sizes[mine], strict=True))
        objects = pool.page_objects(page)
        assert tuple(part.name for part in objects) == pool.page_object_names
        assert [(part.address, part.nbytes) for part in objects] == pool.page_ranges(page)
        read = [peek(address, nbytes) for address, nbytes in pool.page_ranges(page)]
        flat = pool.get_data_page(torch.tensor(side.ids(page)[0]))
        assert torch.equal(torch.cat(read) if read else flat[:0], flat)
        shaped = pool.get_data_page(side.ids(page), flat=False)
        views = [as_bytes(shaped)] if isinstance(shaped, torch.Tensor) else shaped
        assert [view.data_ptr() for view in views] == addresses[mine]
        assert all(torch.equal(view, part) for view, part in zip(views, read, strict=True))
    assert len(set(pool.page_object_names)) == each


def as_bytes(page: torch.Tensor) -> torch.Tensor:
    """The bytes of a page that is one component, which leaves no gaps."""
    assert page.is_contiguous()
    return page.view(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("page_first", (4, 2, 5)),
        ("page_first_direct", (2, 4, 5)),
        ("page_record", (4, 2, 5)),
        ("layer_first", None),
    ],
)
def test_a_page_of_one_component_in_one_range_is_shaped(layout: str, shape: tuple[int, ...] | None) -> None:
    """The axes of the layout, the dtype of the component, and the memory of the pool."""
    pool = small("mla", layout, layers=(0, 1))
    flat = torch.arange(pool.page_bytes).to(torch.uint8)
    pool.set_from_flat_data_page(4, flat)
    page = pool.get_data_page(4, flat=False)
    if shape is None:  # a range for each layer
        assert [view.dtype for view in page] == [torch.uint8] * 2
        return
    assert (tuple(page.shape), page.dtype) == (shape, torch.bfloat16)
    assert torch.equal(as_bytes(page), flat)
    page.fill_(1)
    assert torch.equal(
        pool.get_data_page(4), torch.ones(shape, dtype=torch.bfloat16).view(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_objects_of_all_pages_are_apart_and_inside_the_buffer(kind: Kind) -> None:
    pool = kind.make(5)
    start, end = pool.kv_buffer.data_ptr(), pool.kv_buffer.data_ptr() + pool.kv_buffer.numel()
    ranges = sorted(at for page in range(5) for at in pool.page_ranges(page))
    assert all(nbytes > 0 for _, nbytes in ranges)
    assert all(start <= address and address + nbytes <= end for address, nbytes in ranges)
    assert all(one[0] + one[1] <= other[0] for one, other in itertools.pairwise(ranges))


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_agree(kind: Kind) -> None:
    pool = kind.make(5)
    required = kind.pool_class.required_bytes(  # type: ignore[attr-defined]
        **kind.given, layout=kind.layout, capacity_pages=5
    )
    nbytes = sum(size for _, size in pool.page_ranges(4))
    payload = sum(at.at.numel() for at in oracle.host(*kind.facts(pool), kind.layout, 1).bytes)
    assert payload <= nbytes == pool.page_bytes == required.page
    assert pool.get_data_page(0).numel() == pool.get_dummy_flat_data_page().numel() == nbytes
    per_token = -(-nbytes // pool.page_size)
    assert pool.size_per_token == pool.get_size_per_token() == pool.get_ksize_per_token() == per_token
    first = pool.page_ranges(0)[0][1] if nbytes else None
    assert pool.get_page_buffer_element_size() == first
    whole = [pool.kv_buffer] if pool.kv_buffer.numel() else []
    assert [t.data_ptr() for t in pool.get_hybrid_pool_buffer()] == [t.data_ptr() for t in whole]
    dummy = pool.get_dummy_flat_data_page()
    assert not dummy.any() and dummy.dtype == torch.uint8 and not dummy.is_pinned()


@pytest.mark.parametrize("kind", KINDS)
def test_objects_stored_one_by_one_at_their_addresses(kind: Kind) -> None:
    """What a zero-copy backend does: objects by name, through numpy, into a pool of another capacity."""
    here, there = moved(kind), Side(kind, 8, 2)
    store: dict[tuple[int, str], Any] = {}
    for at, page in enumerate(SLOTS):
        for part in here.pool.page_objects(page):
            seen = np.ctypeslib.as_array((ctypes.c_uint8 * part.nbytes).from_address(part.address))
            store[at, part.name] = seen.copy()
    for at, page in enumerate(OTHERS):
        for part in there.pool.page_objects(page):
            target = np.ctypeslib.as_array((ctypes.c_uint8 * part.nbytes).from_address(part.address))
            target[:] = store.pop((at, part.name))
        flat = there.pool.get_data_page(there.ids(page)[0])
        assert torch.equal(flat, here.flat(STORED[at]))
    assert not store


@pytest.mark.parametrize("kind", KINDS)
def test_alignment_covers_base_starts_and_sizes(kind: Kind) -> None:
    pool = kind.make(5)
    numbers = [number for page in range(5) for place in pool.page_ranges(page) for number in place]
    for alignment in (1, 2, 3, 8, 64, 512, 4096):
        expected = all(number % alignment == 0 for number in numbers)
        assert pool.is_stride_page_aligned(alignment) is expected


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_zero_whatever_is_set(kind: Kind) -> None:
    """Bytes that belong to nothing never leave a pool with what lay there before."""
    pool = kind.make(5)
    one = oracle.host(*kind.facts(pool), kind.layout, 1)
    held = sum(at.at.numel() for at in one.bytes)
    pool.set_from_flat_data_page(0, torch.full((pool.page_bytes,), 255, dtype=torch.uint8))
    assert int((pool.get_data_page(0) == 255).sum()) == held
    assert int((pool.get_data_page(0) == 0).sum()) == pool.page_bytes - held
    assert not pool.kv_buffer.sum() - 255 * held  # and nothing else was touched


def test_the_random_pools_have_padding_objects_by_layer_and_pages_without_bytes() -> None:
    pools = [param.values[0].make(3) for param in KINDS if param.id.startswith("random")]
    assert len(pools) > 20
    assert any(pool._padded for pool in pools) and any(not pool.page_bytes for pool in pools)
    assert any("." in name for pool in pools for name in pool.page_object_names)


# ---- names ------------------------------------------------------------------------------------


def small(name: str, layout: str, pages: int = 6, **changes: Any) -> Any:
    given: dict[str, dict[str, Any]] = {
        "mla": {"kv_lora_rank": 3, "qk_rope_head_dim": 2},
        "mha": {"heads": 4, "head_dim": 3, "v_head_dim": 5},
    }
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "layers": (2, 5), "page_size": 4, "layout": layout}
    return generated.pool_class(name)(**{**given[name], **sizes, "capacity_pages": pages, **changes})


@pytest.mark.parametrize(
    ("name", "layout", "names"),
    [
        ("mla", "page_first", ("kv",)),
        ("mla", "page_record", ("page",)),
        ("mla", "layer_first", ("kv.0", "kv.1")),
        ("mha", "page_first", ("k", "v")),
        ("mha", "layer_first", ("k.0", "k.1", "v.0", "v.1")),
        ("mha", "page_record", ("page",)),
    ],
)
def test_names_follow_the_layout(name: str, layout: str, names: tuple[str, ...]) -> None:
    assert small(name, layout).page_object_names == names


def test_layouts_differ_in_bytes_and_in_format_tag() -> None:
    pools = {layout: small("mla", layout) for layout in ("page_first", "page_first_direct")}
    tags = {pool.format_tag for pool in pools.values()}
    rows = [torch.arange(9 * 4 * 5).view(36, 5).to(torch.bfloat16) + layer for layer in range(2)]
    flats = []
    for pool in pools.values():
        pool.bind({"kv": rows})
        pool.write_back(torch.tensor([0]), torch.tensor([3]), "page").wait()
        flats.append(pool.get_data_page(0))
    assert len(tags) == 2 and not torch.equal(*flats)
    assert torch.equal(flats[0].sort().values, flats[1].sort().values)


def test_a_component_without_bytes_has_no_object() -> None:
    given: dict[str, Any] = {"heads": 2, "head_dim": 3, "kernel": 2, "layers": (0, 1)}
    given |= {"ssm_dtype": torch.float32, "conv_dtype": torch.bfloat16, "capacity_pages": 3}
    with_it = generated.pool_class("kda_state")(**given, ngram=2)
    without = generated.pool_class("kda_state")(**given, ngram=0)
    assert with_it.page_object_names == ("temporal", "conv", "ngram")
    assert without.page_object_names == ("temporal", "conv")
    assert with_it.page_bytes - without.page_bytes == 16


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_record"])
def test_a_pool_without_bytes_has_empty_pages(layout: str) -> None:
    pool = small("mla", layout, layers=())
    assert pool.get_data_page(8).numel() == pool.get_dummy_flat_data_page().numel() == 0
    assert pool.get_data_page(8, flat=False) == []
    pool.set_from_flat_data_page(8, pool.get_dummy_flat_data_page())
    assert pool.get_page_buffer_meta(range(8)) == ([], [])
    assert pool.get_hybrid_pool_buffer() == [] and pool.page_ranges(5) == []
    assert (pool.size_per_token, pool.get_page_buffer_element_size()) == (0, None)
    assert pool.is_stride_page_aligned()


# ---- heads ------------------------------------------------------------------------------------


def test_pages_split_by_heads_are_the_pages_of_pools_with_fewer_heads() -> None:
    """Two ranks with half the heads each find what a rank with all of them has stored."""
    pool = small("mha", "page_head")
    rows = {
        name: [torch.randn(36, 4, d).to(torch.bfloat16) for _ in range(2)] for name, d in (("k", 3), ("v", 5))
    }
    pool.bind(rows)
    pool.write_back(torch.tensor([1, 3]), torch.tensor([2, 8]), "page").wait()
    ids = [*range(4, 8), *range(12, 16)]
    addresses, sizes = pool.get_split_heads_page_buffer_meta(ids, 2)
    assert len(addresses) == len(sizes) == 2 * 2 * 2
    read = [peek(*place) for place in zip(addresses, sizes, strict=True)]
    for half in range(2):
        part = small("mha", "page_head", heads=2)
        part.bind(
            {
                name: [row[:, 2 * half : 2 * half + 2].clone() for row in row_list]
                for name, row_list in rows.items()
            }
        )
        part.write_back(torch.tensor([1, 3]), torch.tensor([2, 8]), "page").wait()
        for at, page in enumerate((1, 3)):
            both = read[4 * at + 2 * half : 4 * at + 2 * half + 2]
            assert torch.equal(torch.cat(both), part.get_data_page(4 * page))
    assert pool.get_page_buffer_element_size(2) == sizes[0]
    assert pool.get_split_heads_page_buffer_meta(ids, 1) == pool.get_page_buffer_meta(ids)


def test_heads_inside_a_page_that_do_not_lie_one_behind_the_other() -> None:
    """K and V of a head side by side can be cut by heads; all K, then all V, cannot."""
    orders = "between: [page, head, component, token, layer, dim]\n"
    orders += "beside: [page, component, head, token, layer, dim]"
    text = (SPECS / "mha.yaml").read_text()
    text = re.sub("layouts: .*", "layouts: [between, beside]", text)
    pool = read_spec_text(text, "specs/mha.yaml", read_layouts_text(orders, "specs/layouts.yaml"))
    files = render.render_pool(lower.lower(pool))
    made = {
        layout: imported(files, f"mha_{layout}").MHATokenToKVPoolHost(
            **{"heads": 4, "head_dim": 3, "v_head_dim": 5, "dtype": torch.bfloat16, "layers": (2, 5)},
            **{"page_size": 4, "layout": layout, "capacity_pages": 6},
        )
        for layout in ("between", "beside")
    }
    start, nbytes = made["between"].page_ranges(2)[0]
    expected = [start + part * nbytes // 4 for part in range(4)], [nbytes // 4] * 4
    assert made["between"].get_split_heads_page_buffer_meta(range(8, 12), 4) == expected
    with pytest.raises(ValueError, match="outermost in a page, got 2 for 4 of head"):
        made["beside"].get_split_heads_page_buffer_meta(range(8, 12), 2)


# ---- refusals ---------------------------------------------------------------------------------

WHOLE = "expected whole pages of ids (page size 4, ids below 24), the tokens of each in order"
CPU = "expected int32 or int64 [n] on cpu"
GIVEN = "pass ids that alloc returned"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.get_data_page(2), f"get_data_page: {WHOLE}, got ids from 2 on; {GIVEN}"),
        (lambda p: p.get_data_page(24), f"get_data_page: {WHOLE}, got ids from 24 on; {GIVEN}"),
        (lambda p: p.get_data_page(-4), f"get_data_page: {WHOLE}, got ids from -4 on; {GIVEN}"),
        (lambda p: p.get_data_page([4, 5, 7, 6]), f"get_data_page: {WHOLE}, got ids from 4 on; {GIVEN}"),
        (
            lambda p: p.get_data_page(torch.arange(8)),
            "get_data_page: expected one page, got 8 ids; pass the id of the page's first token",
        ),
        (
            lambda p: p.get_data_page([]),
            "get_data_page: expected one page, got 0 ids; pass the id of the page's first token",
        ),
        (lambda p: p.get_data_page("4"), f"get_data_page: expected integers, got '4'; {GIVEN}"),
        (lambda p: p.get_data_page(4.0), f"get_data_page: expected integers, got (4.0,); {GIVEN}"),
        (
            lambda p: p.get_data_page(torch.tensor(4.0)),
            f"get_data_page: {CPU}, got a tensor of torch.float32 [1] on cpu; {GIVEN}",
        ),
        (
            lambda p: p.get_page_buffer_meta(torch.arange(7)),
            f"get_page_buffer_meta: {WHOLE}, got 7 ids; pad the last page or leave it out",
        ),
        (
            lambda p: p.get_page_buffer_meta([0, 1, 2, 3, 9, 10, 11, 12]),
            f"get_page_buffer_meta: {WHOLE}, got ids from 9 on; {GIVEN}",
        ),
        (
            lambda p: p.get_page_buffer_meta(torch.arange(8).view(2, 4)),
            f"get_page_buffer_meta: {CPU}, got a tensor of torch.int64 [2, 4] on cpu; {GIVEN}",
        ),
        (
            lambda p: p.get_page_buffer_meta(torch.arange(4, device="meta")),
            f"get_page_buffer_meta: {CPU}, got a tensor of torch.int64 [4] on meta; {GIVEN}",
        ),
        (
            lambda p: p.set_from_flat_data_page(1, p.get_dummy_flat_data_page()),
            f"set_from_flat_data_page: {WHOLE}, got ids from 1 on; {GIVEN}",
        ),
        (
            lambda p: p.page_objects(6),
            "page_objects: expected a page of 0 to 5, got 6; pass a page number: id // page_size",
        ),
        (
            lambda p: p.page_ranges(-1),
            "page_ranges: expected a page of 0 to 5, got -1; pass a page number: id // page_size",
        ),
        (
            lambda p: p.page_objects("6"),
            "page_objects: expected a page of 0 to 5, got '6'; pass a page number: id // page_size",
        ),
        (
            lambda p: p.is_stride_page_aligned(0),
            "is_stride_page_aligned: expected a number of bytes from 1, got 0; pass 4096",
        ),
        (
            lambda p: p.get_page_buffer_element_size(0),
            "get_page_buffer_element_size: expected a split_factor from 1, got 0; pass 1 for whole objects",
        ),
        (
            lambda p: p.get_split_heads_page_buffer_meta(range(4), 2),
            "get_split_heads_page_buffer_meta: expected a split_factor that divides the heads, outermost in "
            "a page, got 2 for 4 of token; use a layout such as page_head",
        ),
    ],
)
def test_refusals(call: Callable[[Any], object], message: str) -> None:
    pool = small("mla", "page_first")
    before = pool.kv_buffer.clone()
    with pytest.raises(ValueError) as caught:
        call(pool)
    assert str(caught.value) == f"mla: {message}"
    assert torch.equal(pool.kv_buffer, before)


def test_a_split_that_does_not_divide_the_heads() -> None:
    for layout, got in (("page_head", "3 for 4 of head"), ("page_record", "3 for 4 of token")):
        with pytest.raises(ValueError, match=f"divides the heads, outermost in a page, got {got}"):
            small("mha", layout).get_page_buffer_element_size(3)


@pytest.mark.parametrize(
    ("page", "got"),
    [
        (torch.zeros(79, dtype=torch.uint8), "a tensor of torch.uint8 [79] on cpu"),
        (torch.zeros(81, dtype=torch.uint8), "a tensor of torch.uint8 [81] on cpu"),
        (torch.zeros(2, 40, dtype=torch.uint8), "a tensor of torch.uint8 [2, 40] on cpu"),
        (torch.zeros(80, dtype=torch.int8), "a tensor of torch.int8 [80] on cpu"),
        (torch.zeros(40, dtype=torch.bfloat16), "a tensor of torch.bfloat16 [40] on cpu"),
        (torch.zeros(80, dtype=torch.uint8, device="meta"), "a tensor of torch.uint8 [80] on meta"),
        (torch.zeros(160, dtype=torch.uint8)[::2], "a strided tensor of torch.uint8 [80] on cpu"),
        (bytes(80), f"{bytes(80)!r:.80}..."),
    ],
)
def test_a_page_that_is_no_flat_page_is_refused(page: Any, got: str) -> None:
    pool = small("mla", "page_first")
    pool.kv_buffer.fill_(7)
    with pytest.raises(ValueError) as caught:
        pool.set_from_flat_data_page(4, page)
    assert str(caught.value) == (
        f"mla: set_from_flat_data_page: expected contiguous torch.uint8 [80] on cpu, got {got}; "
        "pass what get_data_page gave"
    )
    assert bool((pool.kv_buffer == 7).all())
