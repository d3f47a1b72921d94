"""Every pool and layout on the CPU against the oracle, and what a pool does with wrong or odd requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import poolwright.generated as generated
from poolwright.runtime import native
from poolwright.runtime.errors import BackendUnavailable, CompileError, OutOfMemoryBudget, PoolError
from poolwright.runtime.tools import verify

PAIRS = [(name, layout) for name in generated.POOLS for layout in generated.pool_class(name).spec.layouts]
LAYERS = (2, 5)
PAGE = 4
PAGES = 6
DEVICE_PAGES = 9


def pool_has_bytes(name: str) -> bool:
    return bool(generated.pool_class(name).spec.components)


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_pool_against_the_oracle(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOLWRIGHT_OPTIMIZE", "1")
    wanted = verify.targets(generated, name, layout, None, quick=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = verify.verify(wanted, "cpu", lambda _: None)
    finally:
        torch.set_num_threads(threads)
    assert [result.difference for result in results if result.difference] == []
    least = 100 if pool_has_bytes(name) else 10
    assert all(result.cases > least for result in results)


# ---- one small pool ---------------------------------------------------------------------------


def build(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "kv_lora_rank": 3,
        "qk_rope_head_dim": 2,
        "dtype": torch.bfloat16,
        "layers": LAYERS,
        "page_size": PAGE,
        "layout": "page_first",
        "capacity_pages": PAGES,
    }
    return generated.pool_class("mla")(**{**given, **changes})


def tensors(rows: int = DEVICE_PAGES * PAGE) -> list[torch.Tensor]:
    return [torch.randn(rows, 5).to(torch.bfloat16) for _ in LAYERS]


@pytest.fixture
def pool() -> Iterator[Any]:
    made = build()
    made.bind({"kv": tensors()})
    yield made
    made.destroy()


def ids(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def refused(call: Any, message: str) -> None:
    """The call raises ValueError with exactly this message."""
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == message


def test_a_pool_says_what_it_is(pool: Any) -> None:
    assert repr(pool) == ("<MLATokenToKVPoolHost mla: 6 pages of 80 bytes, layout page_first, device cpu>")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mha", "`k`: (head=heads, dim=head_dim) of dtype kv for each token and layer."),
        ("mha_mxfp8", "dim=v_head_dim) of dtype kv for each token and layer."),
        ("mha_mxfp8", "block=head_dim // 32) of dtype scale for each page and layer."),
        (
            "mla_fp8",
            "`scale`: (block=ceil_div(kv_lora_rank, block)) of dtype float32 for each token and layer.",
        ),
        ("nvfp4", "pair=head_dim // 2) of dtype uint8 for each page and layer."),
        ("mamba", "`side[1]`: (item=side_size_1) of dtype side for each slot."),
    ],
)
def test_a_class_says_what_a_row_belongs_to(name: str, line: str) -> None:
    assert line in str(generated.pool_class(name).__doc__)


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BackendUnavailable, match="this torch is built without CUDA; to mend it: install"):
        build(device="cuda:0")


# ---- slots ------------------------------------------------------------------------------------


def test_alloc_and_free(pool: Any) -> None:
    first = pool.alloc(2 * PAGE)
    assert first.tolist() == list(range(2 * PAGE))
    assert pool.available_size() == (PAGES - 2) * PAGE
    assert pool.free(first) == 2 * PAGE
    assert pool.available_size() == PAGES * PAGE


def test_a_full_pool_says_none(pool: Any) -> None:
    assert pool.alloc((PAGES + 1) * PAGE) is None
    assert pool.available_size() == PAGES * PAGE
    assert pool.alloc(PAGES * PAGE) is not None
    assert pool.alloc(PAGE) is None
    assert pool.alloc(0).numel() == 0


def test_unaligned_counts(pool: Any) -> None:
    taken = pool.alloc(PAGE)
    expected = "expected a multiple of page size 4, not negative"
    pad = "pad a partial page to a whole one"
    refused(lambda: pool.alloc(PAGE + 1), f"mla: alloc: {expected}, got 5 ids; {pad}")
    refused(lambda: pool.free(taken[:3]), f"mla: free: {expected}, got 3 ids; {pad}")
    for move in (pool.write_back, pool.load):
        refused(
            lambda move=move: move(taken[:3], taken[:3]),
            "mla: expected whole pages of 4 ids, got 3 ids; pad the last page or leave it out",
        )
    assert pool.available_size() == (PAGES - 1) * PAGE


def test_double_free(pool: Any) -> None:
    taken = pool.alloc(PAGE)
    pool.free(taken)
    message = (
        "mla: free: expected allocated pages, got page 0, which is not allocated; "
        "free a page once, and not after clear()"
    )
    refused(lambda: pool.free(taken), message)
    again = pool.alloc(2 * PAGE)
    pool.clear()
    assert pool.available_size() == PAGES * PAGE
    with pytest.raises(ValueError, match="which is not allocated"):
        pool.free(again)
    assert pool.available_size() == PAGES * PAGE


def test_a_page_in_flight_is_not_freed(pool: Any) -> None:
    taken = pool.alloc(2 * PAGE)
    ticket = pool.write_back(taken, ids(3, 1))
    refused(
        lambda: pool.free(taken[:PAGE]),
        "mla: page 0 is in flight; wait for its ticket, detach() it, or pass after=ticket; of a ticket that "
        "was dropped only unbind() or clear() lets pages go",
    )
    assert pool.available_size() == (PAGES - 2) * PAGE
    assert pool.free(taken[:PAGE], after=ticket) == PAGE
    ticket.wait()
    assert pool.free(taken[PAGE:]) == PAGE


@pytest.mark.parametrize("remedy", ["unbind", "clear"])
def test_pages_of_a_dropped_ticket_are_let_go_as_the_message_says(pool: Any, remedy: str) -> None:
    taken = pool.alloc(PAGE)
    pool.write_back(taken, ids(3))
    with pytest.raises(ValueError, match=rf"dropped only .*{remedy}\(\)"):
        pool.free(taken)
    getattr(pool, remedy)()
    if remedy == "unbind":  # the page is still taken
        assert pool.free(taken) == PAGE
    assert pool.available_size() == PAGES * PAGE


def test_done_tells_the_caller(pool: Any) -> None:
    taken = pool.alloc(PAGE)
    ticket = pool.write_back(taken, ids(0))
    assert ticket.done()
    ticket.captured.wait()
    pool.free(taken)


# ---- ids --------------------------------------------------------------------------------------


def test_no_ids_is_a_finished_ticket(pool: Any) -> None:
    before = pool.kv_buffer.clone()
    none = torch.tensor([], dtype=torch.int64)
    for ticket in (pool.write_back(none, none), pool.load(none, none), pool.load(none, none, order="layer")):
        assert ticket.done()
        ticket.wait()
    assert torch.equal(pool.kv_buffer, before)


ALLOCATED, BOUND = "pass what alloc returned, divided by 4", "pass rows of the bound tensors, divided by 4"


@pytest.mark.parametrize(
    ("host", "device", "unit", "message"),
    [
        ([PAGES], [0], "page", f"mla: host ids: expected 0 to 5, got 6; {ALLOCATED}"),
        ([-1], [0], "page", f"mla: host ids: expected 0 to 5, got -1; {ALLOCATED}"),
        ([0], [DEVICE_PAGES], "page", f"mla: device ids: expected 0 to 8, got 9; {BOUND}"),
        ([0], [-2], "page", f"mla: device ids: expected 0 to 8, got -2; {BOUND}"),
        (
            [0, 1],
            [0],
            "page",
            "mla: expected as many host ids as device ids, got 2 and 1; pair each host id with its device id",
        ),
        ([0], [0], "row", "mla: unit: expected token or page, got 'row'"),
    ],
)
def test_wrong_ids(pool: Any, host: list[int], device: list[int], unit: str, message: str) -> None:
    before = pool.kv_buffer.clone()
    for move in (pool.write_back, pool.load):
        refused(lambda move=move: move(torch.tensor(host), torch.tensor(device), unit), message)
    assert torch.equal(pool.kv_buffer, before)


def test_duplicates(pool: Any) -> None:
    refused(
        lambda: pool.write_back(torch.tensor([2, 2]), torch.tensor([0, 1]), "page"),
        "mla: host ids: page 2 stands twice in one list; a destination may be written once: leave one out",
    )
    refused(
        lambda: pool.load(torch.tensor([2, 3]), torch.tensor([1, 1]), "page"),
        "mla: device ids: page 1 stands twice in one list; a destination may be written once: leave one out",
    )
    pool.load(torch.tensor([2, 2]), torch.tensor([0, 1]), "page").wait()


@pytest.mark.parametrize(
    ("level", "unit", "host"),
    [
        ("cheap", "page", [0, 2]),
        ("full", "page", [0, 2]),
        ("cheap", "token", ids(0, 2).tolist()),
        ("full", "token", ids(0, 2).tolist()),
        ("cheap", "token", [*ids(0).tolist(), *ids(2).tolist()[::-1]]),
    ],
)
def test_host_pages_that_are_not_allocated(pool: Any, level: str, unit: str, host: list[int]) -> None:
    """Refused in both directions, before anything moves, after `free` and after `clear`."""
    device = torch.arange(len(host))
    taken = pool.alloc(3 * PAGE)
    pool.write_back(torch.tensor(host), device, unit, validate=level).wait()
    pool.free(taken[2 * PAGE :])
    before = pool.kv_buffer.clone()
    message = "mla: host page {} is not allocated; pass what alloc returned"
    for move in (pool.write_back, pool.load):
        refused(lambda move=move: move(torch.tensor(host), device, unit, validate=level), message.format(2))
    pool.clear()
    for move in (pool.write_back, pool.load):
        refused(lambda move=move: move(torch.tensor(host), device, unit, validate=level), message.format(0))
    assert torch.equal(pool.kv_buffer, before)
    pool.load(torch.tensor(host), device, unit, validate="off").wait()


def test_ids_of_the_caller_are_not_looked_up(pool: Any) -> None:
    """A pool whose slots nobody asks for takes every id; from the first allocation on, its own."""
    pool.write_back(torch.tensor([5]), torch.tensor([0]), "page").wait()
    assert pool.alloc(0).numel() == 0
    pool.load(torch.tensor([5]), torch.tensor([0]), "page").wait()
    pool.alloc(PAGE)
    with pytest.raises(ValueError, match="page 5 is not allocated"):
        pool.load(torch.tensor([5]), torch.tensor([0]), "page")
    pool.load(torch.tensor([0]), torch.tensor([0]), "page").wait()


def test_wrong_id_tensors(pool: Any) -> None:
    good = torch.tensor([0])
    refused(
        lambda: pool.load(good.float(), good, "page"),
        "mla: host ids: dtype: expected int32 or int64, got torch.float32; use .to(torch.int64)",
    )
    refused(
        lambda: pool.load(good, good[None], "page"),
        "mla: device ids: expected one dimension, got shape (1, 1); use reshape(-1)",
    )
    refused(
        lambda: pool.load([0], good, "page"),
        "mla: host ids: expected a tensor, got list; wrap them in torch.tensor",
    )
    refused(
        lambda: pool.load(good, good, "page", validate="most"),
        "mla: validate: expected one of off, cheap, full, got 'most'",
    )


def test_the_callers_tensors_stay_as_they_are(pool: Any) -> None:
    host, device = ids(4, 2).int(), ids(7, 0).int()
    kept = host.clone(), device.clone()
    pool.write_back(host, device).wait()
    pool.load(host, device).wait()
    assert torch.equal(host, kept[0]) and torch.equal(device, kept[1])


# ---- binding ----------------------------------------------------------------------------------


def bound(pool: Any, rows: Any, message: str, **more: Any) -> None:
    refused(lambda: pool.bind(rows, **more), message)


def test_bind_names_what_is_wrong() -> None:
    pool = build()
    good = tensors()
    bound(
        pool,
        {"kv": [good[0], good[1][:, :4].contiguous()]},
        "mla: kv: shape: expected [page=any, token=4, latent=5] (neighbours may be merged), got (36, 4)",
    )
    bound(
        pool,
        {"kv": [good[0], good[1].float()]},
        "mla: kv: dtype: expected torch.bfloat16, got torch.float32",
    )
    bound(
        pool,
        {"kv": [good[0], torch.zeros(36, 6, dtype=torch.bfloat16)]},
        "mla: kv: shape: expected [page=any, token=4, latent=5] (neighbours may be merged), got (36, 6)",
    )
    wide = torch.zeros(36, 8, dtype=torch.bfloat16)[:, :5]
    bound(
        pool,
        {"kv": [good[0], wide]},
        "mla: kv: stride of token (shape#0): expected 10 bytes, got 16; this form takes packed rows only",
    )
    bound(pool, {"kv": [g.to("meta") for g in good]}, "mla: kv: device: expected cpu, got meta")
    bound(
        pool, {"kv": good[:1]}, "mla: kv: expected 2 layers, got 1; name others than the pool's in layer_ids"
    )
    bound(
        pool,
        {"kv": good[0]},
        f"mla: kv: expected 2 layers, got {len(good[0])}; one tensor has the layers outermost; "
        "give a list where each has its own",
    )
    bound(pool, {"kv": good}, "mla: kv: no tensor for layer 5, got layers [2, 4]", layer_ids=[2, 4])
    bound(pool, {}, "mla: no tensor for component 'kv', got none")
    bound(
        pool,
        {"kv": good, "scale": good},
        "mla: tensor 'scale' belongs to no component (kv); name it in not_carried of specs/mla.yaml "
        "if it must not be kept",
    )
    with pytest.raises(PoolError, match="call bind"):
        pool.load(ids(0), ids(0))
    pool.destroy()


def test_bind_takes_the_shapes_of_engines() -> None:
    """Merged or not, with rows to spare, with an axis of one head, more layers than the pool keeps."""
    pool = build()
    for shape in ((36, 5), (9, 4, 5), (36, 1, 5), (39, 5)):
        rows = [torch.randn(shape).to(torch.bfloat16) for _ in range(4)]
        pool.rebind({"kv": rows}, layer_ids=[1, 2, 4, 5])
        pool.kv_buffer.zero_()
        pool.write_back(ids(1), ids(8)).wait()
        seen = pool.kv_buffer.view(torch.bfloat16).view(PAGES, PAGE, 2, 5)[1]
        for at, row in enumerate((rows[1], rows[3])):
            assert torch.equal(seen[:, at], row.view(-1, 5)[32:36])
    pool.destroy()


def test_rebind_uses_the_new_tensors(pool: Any) -> None:
    new = tensors()
    pool.write_back(ids(0), ids(0)).wait()
    pool.rebind({"kv": new})
    pool.load(ids(0), ids(5)).wait()
    pool.write_back(ids(1), ids(5)).wait()
    buffer = pool.kv_buffer.view(PAGES, -1)
    assert torch.equal(buffer[0], buffer[1])
    assert torch.equal(new[0][20:24], buffer[0].view(torch.bfloat16).view(PAGE, 2, 5)[:, 0])


# ---- layers and tickets -----------------------------------------------------------------------


def test_layers_of_a_load(pool: Any) -> None:
    ticket = pool.load(ids(0), ids(1), order="layer")
    for layer in LAYERS:
        ticket.wait_layer(layer)
    with pytest.raises(ValueError, match=r"layer 3 is not told on its own by this load \(layers 2, 5\)"):
        ticket.wait_layer(3)
    ticket.wait_all()
    refused(lambda: pool.load(ids(0), ids(1), layers=[3]), "mla: layer 3 is not one of [2, 5]")
    refused(lambda: pool.load(ids(0), ids(1), order="up"), "mla: order: expected layer or bulk, got 'up'")


def test_launches_one_after_the_other_move_what_each_says() -> None:
    """Parameters of a launch are filled where they differ from those of the last one: many follow many."""
    layers, width = (2, 5, 7), 1024  # wide rows: a load in layer order is cut into two launches
    pool = build(kv_lora_rank=width - 2, layers=layers)
    rows = [torch.randn(DEVICE_PAGES * PAGE, width).to(torch.bfloat16) for _ in layers]
    pool.bind({"kv": rows})
    host = pool.kv_buffer.view(torch.bfloat16).view(PAGES, PAGE, len(layers), width)
    host.copy_(torch.randn(host.shape))
    seen, device = host.clone(), torch.stack(rows, 1).view(DEVICE_PAGES, PAGE, len(layers), width)
    ways: list[dict[str, Any]] = [{}, {"order": "layer"}, {"layers": [7, 2]}, {"layers": [5]}]
    random = torch.Generator().manual_seed(5)
    for turn in range(60):
        count = 1 + int(torch.randint(2, (), generator=random))
        here = torch.randperm(PAGES, generator=random)[:count]
        there = torch.randperm(DEVICE_PAGES, generator=random)[:count]
        way = int(torch.randint(len(ways) + 1, (), generator=random))
        if way == len(ways):
            pool.write_back(here, there, "page", path="zero_copy").wait()
            seen[here] = device[there]
        else:
            pool.load(here, there, "page", path="zero_copy", **ways[way]).wait()
            for layer in ways[way].get("layers", layers):
                at = layers.index(layer)
                device[there, :, at] = seen[here, :, at]
        assert torch.equal(host, seen), turn
        assert torch.equal(torch.stack(rows, 1).view(device.shape), device), turn
    pool.destroy()


def test_more_ids_than_one_launch_takes() -> None:
    """Thousands of pages and tokens: several launches, several staging rounds."""
    pages = 2500
    pool = build(capacity_pages=pages, layers=(0,), staging_bytes=4 * 300 * 40)
    rows = torch.randn(pages * PAGE, 5).to(torch.bfloat16)
    pool.bind({"kv": [rows.clone()]})
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(3))
    tokens = torch.randperm(pages * PAGE, generator=torch.Generator().manual_seed(4))
    for path in ("zero_copy", "staged", "host", "torch"):
        pool.kv_buffer.zero_()
        pool.write_back(torch.arange(pages), order, "page", path=path).wait()
        seen = pool.kv_buffer.view(torch.bfloat16).view(pages, PAGE, 5)
        assert torch.equal(seen, rows.view(pages, PAGE, 5)[order])
    for path in ("zero_copy", "host", "torch"):
        pool.kv_buffer.zero_()
        pool.write_back(torch.arange(pages * PAGE), tokens, path=path).wait()
        assert torch.equal(pool.kv_buffer.view(torch.bfloat16).view(-1, 5), rows[tokens])
    pool.destroy()


def test_scattered_tokens_by_the_staged_path_are_refused_by_name(pool: Any) -> None:
    shuffled = ids(0, 1)[torch.tensor([3, 5, 1, 0, 7, 6, 2, 4])]
    with pytest.raises(
        ValueError, match=r"mla: path 'staged' was asked for and cannot be taken: .*scattered tokens"
    ):
        pool.load(ids(0, 1), shuffled, path="staged")
    with pytest.raises(ValueError, match="path 'fast' was asked for and cannot be taken: expected one of "):
        pool.load(ids(0), ids(0), path="fast")


# ---- engines' names ---------------------------------------------------------------------------


def test_names_that_engines_know() -> None:
    pool = build()
    rows = tensors()
    kept = [row.clone() for row in rows]
    pool.bind({"kv": rows})
    for backend in ("kernel", "direct"):
        pool.backup_from_device_all_layer(None, ids(2, 0), ids(6, 3), backend)
        for row in rows:
            row.zero_()
        for layer in LAYERS:
            pool.load_to_device_per_layer(None, ids(2, 0), ids(6, 3), layer, backend)
        for row, old in zip(rows, kept, strict=True):
            assert torch.equal(row[24:28], old[24:28]) and torch.equal(row[12:16], old[12:16])
            assert int(row.count_nonzero()) == int(old[24:28].count_nonzero() + old[12:16].count_nonzero())
            row.copy_(old)
    assert pool.free(pool.alloc(PAGE)) == PAGE
    assert pool.can_use_write_back_jit is True
    assert pool.can_use_write_back_jit_kernel(element_size=10)
    refused(
        lambda: pool.backup_from_device_all_layer(None, ids(0), ids(0), "rdma"),
        "mla: io_backend: expected one of kernel, direct, got 'rdma'",
    )
    pool.destroy()


def test_staging_is_bounded_in_bytes() -> None:
    page = build().page_bytes
    for wanted, pages in ((4 * page, 1), (4 * 3 * page + 1, 3), (1 << 20, PAGES)):
        pool = build(staging_bytes=wanted)
        assert pool.staging_pages == pages
        assert pool.staging_kv.shape == (pages, PAGE, 2, 5, 2)
        pool.destroy()
    message = (
        "mla: staging memory of 4 slots, one page each needs 320 bytes, 319 are available; raise staging_b"
    )
    with pytest.raises(OutOfMemoryBudget, match=message):
        build(staging_bytes=4 * page - 1)


# ---- construction -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layout": "rows"},
            "mla: layout: expected one of layer_first, page_first, page_first_direct, page_unified, "
            "page_record, got 'rows'",
        ),
        ({"form": "rows"}, "mla: form: expected one of per_layer, got 'rows'"),
        ({"kv_lora_rank": 0}, "mla: kv_lora_rank: expected at least 1, got 0"),
        ({"kv_lora_rank": 2.0}, "mla: kv_lora_rank: expected an integer, got 2.0"),
        ({"page_size": 0}, "mla: page_size: expected an integer of at least 1, got 0"),
        ({"layers": (1, 1)}, "mla: layers: layer ids must differ, got [1, 1]"),
        ({"layers": (-1,)}, "mla: layers: expected layer ids from 0, got [-1]"),
        ({"capacity_pages": 0}, "mla: capacity_pages: expected an integer of at least 1, got 0"),
        ({"capacity_pages": None}, "mla: give either capacity_pages or capacity_bytes, got neither"),
        ({"capacity_bytes": 9}, "mla: give either capacity_pages or capacity_bytes, got both"),
        ({"require": "gpu"}, "mla: require: expected cuda or host, got 'gpu'"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    refused(lambda: build(**changes), message)


def test_wrong_dtype() -> None:
    with pytest.raises(ValueError, match=r"mla: dtype: expected one of \[.*\], got torch.int8"):
        build(dtype=torch.int8)


def test_over_budget() -> None:
    with pytest.raises(
        OutOfMemoryBudget, match=r"mla: host memory needs [\d,]+ bytes, [\d,]+ are available; lower"
    ):
        build(capacity_pages=1 << 40)
    with pytest.raises(OutOfMemoryBudget, match=r"mla: one page needs 80 bytes, 79 are available; raise"):
        build(capacity_pages=None, capacity_bytes=79)


def test_capacity_in_bytes_and_required_bytes() -> None:
    pool_class = generated.pool_class("mla")
    given: dict[str, Any] = {"kv_lora_rank": 3, "qk_rope_head_dim": 2, "dtype": torch.bfloat16}
    given |= {"layers": LAYERS, "page_size": PAGE, "staging_bytes": 400}
    for layout in pool_class.spec.layouts:
        required = pool_class.required_bytes(**given, layout=layout, capacity_bytes=811)  # type: ignore[attr-defined]
        assert (required.pages, required.host, required.page) == (10, 800, 80)
        pool = pool_class(**given, layout=layout, capacity_bytes=811)  # type: ignore[call-arg]
        assert (pool.page_num, pool.size, pool.kv_buffer.numel()) == (10, 40, 800)
        assert pool.staging is not None and pool.staging.nbytes == required.staging
        pool.destroy()


def test_require_cuda_fails_without_it() -> None:
    with pytest.raises(BackendUnavailable, match="mla on CUDA is not available: the pool's device is cpu"):
        build(require="cuda")


def test_destroy_twice() -> None:
    pool = build()
    pool.bind({"kv": tensors()})
    pool.destroy()
    pool.destroy()
    with pytest.raises(PoolError, match="mla: the pool is destroyed; build a new one"):
        pool.alloc(PAGE)


# ---- a compiler that fails --------------------------------------------------------------------


@pytest.fixture
def broken_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "c++"
    script.write_text(
        '#!/bin/sh\ncase "$*" in -v|*--version*|*-dumpmachine*) exec c++ "$@";; esac\n'
        'echo "host.cpp:1:1: error: out of luck" >&2; exit 1\n'
    )
    script.chmod(0o755)
    native.library()  # what no pool can do without is there
    monkeypatch.setenv("POOLWRIGHT_CXX", str(script))
    monkeypatch.setenv("POOLWRIGHT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.usefixtures("broken_compiler")
def test_a_failed_compile_falls_back_and_says_so() -> None:
    pool = build()
    report = {path.path: path for path in pool.path_report()}
    assert [path for path, found in report.items() if found.available] == ["torch"]
    for path in ("zero_copy", "staged", "host"):
        assert "host.cpp does not compile: host.cpp:1:1: error: out of luck" in report[path].reason
        assert "-shared" in report[path].mend
    assert pool.staging is None and not pool.can_use_write_back_jit
    rows = tensors()
    pool.bind({"kv": rows})
    ticket = pool.write_back(ids(3), ids(2))
    ticket.wait()
    assert ticket.path == "torch"
    seen = pool.kv_buffer.view(torch.bfloat16).view(PAGES, PAGE, 2, 5)[3]
    assert torch.equal(seen[:, 1], rows[1][8:12])
    with pytest.raises(ValueError, match=r"path 'host' was asked for and cannot be taken: .*out of luck"):
        pool.load(ids(3), ids(2), path="host")
    pool.destroy()


@pytest.mark.usefixtures("broken_compiler")
def test_a_failed_compile_with_require_raises() -> None:
    with pytest.raises(CompileError, match="out of luck"):
        build(require="host")
