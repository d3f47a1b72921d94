"""validate="full": pages are compared on both sides when they have arrived, and guards looked at."""

from __future__ import annotations

import gc
import random
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from race_scenarios import finish, load, produce, store
from simulation import CONFIGS, World, first, last, world
from test_memory import mapped

import poolwright.generated as generated
from poolwright.runtime import checks
from poolwright.runtime.checks import Checks
from poolwright.runtime.errors import TransferError
from poolwright.runtime.indices import Batch
from poolwright.runtime.moves import Move

LAYERS, PAGE, PAGES, DEVICE_PAGES = (2, 5), 4, 6, 9
PATHS = ("host", "zero_copy", "staged", "torch")
ORDERS = [first, last, random.Random(3).randrange, random.Random(4).randrange]


@pytest.fixture
def pool() -> Iterator[Any]:
    made = generated.pool_class("mla")(
        kv_lora_rank=3,
        qk_rope_head_dim=2,
        dtype=torch.bfloat16,
        layers=LAYERS,
        page_size=PAGE,
        layout="page_first",
        capacity_pages=PAGES,
    )
    rows = [torch.randn(DEVICE_PAGES * PAGE, 5).to(torch.bfloat16) for _ in LAYERS]
    made.bind({"kv": rows})
    made.rows = [row.view(torch.uint8) for row in rows]
    yield made
    made.destroy()


def ids(*pages: int) -> torch.Tensor:
    return torch.tensor(pages)


def after_the_transfer(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Does something to memory when bytes have arrived and are not yet compared."""
    compare = Checks.compare

    def patched(self: Checks, *given: Any) -> Any:
        act()
        return compare(self, *given)

    monkeypatch.setattr(Checks, "compare", patched)


def flip(tensor: torch.Tensor, byte: int) -> None:
    tensor.flatten()[byte] ^= 0x10


def in_parts(pool: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> Checks:
    """Checks that compare so many bytes at once."""
    monkeypatch.setattr(checks, "MOST_BYTES", most)
    return Checks(pool._shared.code.driver, pool.program, PAGES, pool.kv_buffer.data_ptr(), {})


def fails(ticket: Any, message: str) -> None:
    """The ticket says so whenever it is asked."""
    for ask in (ticket.wait, ticket.done, ticket.wait_all):
        with pytest.raises(TransferError) as caught:
            ask()
        assert str(caught.value) == message


# ---- comparing --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("unit", ["page", "token"])
def test_what_arrives_passes(pool: Any, path: str, unit: str) -> None:
    host, device = ids(4, 0, 3), ids(1, 8, 2)
    if unit == "token":
        host, device = ((x[:, None] * PAGE + torch.arange(PAGE)).flatten() for x in (host, device))
    pool.write_back(host, device, unit, path=path, validate="full").wait()
    pool.load(host, device.flip(0) if unit == "page" else device, unit, path=path, validate="full").wait()
    if path != "staged":
        pool.load(host, device, unit, path=path, layers=[5], validate="full").wait()
        ticket = pool.load(host, device, unit, path=path, order="layer", validate="full")
        ticket.wait_layer(5)
        ticket.wait()
    none = torch.tensor([], dtype=torch.int64)
    assert pool.write_back(none, none, unit, path=path, validate="full").done()


@pytest.mark.parametrize("path", PATHS)
def test_a_byte_that_differs_fails_the_ticket_and_names_its_page(
    pool: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, device, page = ids(4, 0, 3), ids(1, 8, 2), pool.page_bytes
    after_the_transfer(monkeypatch, lambda: flip(pool.kv_buffer, 3 * page + 17))
    ticket = pool.write_back(host, device, "page", path=path, validate="full")
    fails(ticket, "mla: write_back of 1 pages (3) failed: the bytes on both sides differ")
    assert pool.write_back(host, device, "page", path=path).done()
    monkeypatch.undo()
    after_the_transfer(monkeypatch, lambda: (flip(pool.rows[1], 8 * PAGE * 10), flip(pool.rows[0], 15)))
    pool.write_back(host, device, "page", path=path).wait()
    ticket = pool.load(host, device, "page", path=path, validate="full")
    fails(ticket, "mla: load of 1 pages (0) failed: the bytes on both sides differ")


def test_every_byte_counts(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = pool.page_bytes
    host_bytes = [(pool.kv_buffer, 2 * page + i) for i in range(page)]
    device_bytes = [(row, 5 * PAGE * 10 + i) for row in pool.rows for i in range(PAGE * 10)]
    at = iter(host_bytes + device_bytes)
    after_the_transfer(monkeypatch, lambda: flip(*next(at)))
    for _ in host_bytes + device_bytes:
        with pytest.raises(TransferError, match=r"\(2\) failed: the bytes on both sides differ"):
            pool.write_back(ids(1, 2), ids(3, 5), "page", validate="full").wait()


def test_bytes_that_are_not_moved_do_not_count(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other pages, and layers that a load leaves alone."""
    pool.write_back(ids(1), ids(3), "page").wait()
    pool.rows[0][3 * PAGE] ^= 1
    after_the_transfer(monkeypatch, lambda: (flip(pool.rows[0], 3 * PAGE * 10), flip(pool.kv_buffer, 0)))
    pool.load(ids(1), ids(3), "page", layers=[5], validate="full").wait()
    with pytest.raises(TransferError):
        pool.load(ids(1), ids(3), "page", layers=[2], validate="full").wait()


@pytest.mark.parametrize("most", [1, 160, 240])
def test_pages_are_compared_in_parts(pool: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_checks", in_parts(pool, most, monkeypatch))
    host, device = ids(4, 0, 3, 1, 5), ids(1, 8, 2, 0, 4)
    pool.write_back(host, device, "page", validate="full").wait()
    after_the_transfer(monkeypatch, lambda: [flip(pool.kv_buffer, at * pool.page_bytes) for at in (5, 0)])
    ticket = pool.write_back(host, device, "page", validate="full")
    fails(ticket, "mla: write_back of 2 pages (0, 5) failed: the bytes on both sides differ")


@pytest.mark.parametrize("most", [1, 160, 1 << 20])
@pytest.mark.parametrize(
    ("unit", "device"), [("pages", [2, -1, 7]), ("tokens", [8, 9, 10, 11, -1, -1, -1, -1, 28, 29, 30, 31])]
)
def test_ids_that_only_the_device_knows(
    pool: Any, unit: str, device: list[int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that the device skipped are named first; the others are compared by its ids."""
    parts = in_parts(pool, most, monkeypatch)

    def submit(host: list[int], bad: list[int]) -> Any:
        rows, there = array("I", host), torch.tensor(device)
        given = Batch(unit, rows, len(host), on_device=there, bad=lambda: bad)
        return pool._transfers.submit("write_back", [Move(0, "mla", given, "torch", checks=parts)], None)

    cause = "their device ids are out of range or not whole pages"
    fails(submit([0, 1, 4], [1]), f"mla: write_back of 1 pages (1) failed: {cause}")
    submit([0, 1, 4], []).wait()
    after_the_transfer(monkeypatch, lambda: (flip(pool.rows[0], 7 * PAGE * 10), flip(pool.rows[0], 0)))
    fails(submit([0, 1, 4], []), "mla: write_back of 1 pages (4) failed: the bytes on both sides differ")


@pytest.mark.parametrize("end", ["clear", "destroy"])
def test_a_ticket_still_fails_when_the_pool_has_waited_for_everything(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world(CONFIGS[0], first)
    compare = Checks.compare

    def patched(self: Checks, batch: Any, layers: Any, views: Any, stream: Any, keep: Any) -> Any:
        flips = [lambda touch: flip(made.tensors["kv"][0].view(torch.uint8), 30)]
        made.driver.enqueue("launch", "a bit flips", stream, flips)
        return compare(self, batch, layers, views, stream, keep)

    monkeypatch.setattr(Checks, "compare", patched)
    ticket = made.pool.write_back(
        torch.tensor([0]), torch.tensor([1]), "page", path="zero_copy", validate="full"
    )
    getattr(made.pool, end)()
    with pytest.raises(TransferError, match=r"1 pages \(0\) failed: the bytes on both sides differ"):
        ticket.wait()


def test_a_failed_page_is_not_read_for_storage(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    after_the_transfer(monkeypatch, lambda: flip(pool.kv_buffer, 0))
    pool.write_back(ids(0), ids(3), "page", validate="full")
    with pytest.raises(TransferError, match="the bytes on both sides differ"):
        pool.get_data_page(0)
    pool.set_from_flat_data_page(0, pool.get_dummy_flat_data_page())
    assert not pool.get_data_page(0).any()  # whoever was told may fill the page anew


def test_other_levels_compare_nothing(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_: Any) -> Any:
        raise AssertionError("compared")

    monkeypatch.setattr(Checks, "compare", compare)
    for level in ("off", "cheap"):
        pool.write_back(ids(0), ids(3), "page", validate=level).wait()
        pool.load(ids(0), ids(3), "page", validate=level).wait()
    with pytest.raises(AssertionError, match="compared"):
        pool.write_back(ids(0), ids(3), "page", validate="full")


# ---- guards -----------------------------------------------------------------------------------

GUARDS = ["before host memory", "behind host memory", "behind staging memory"]


@pytest.mark.parametrize("where", GUARDS)
@pytest.mark.parametrize("byte", [0, 255])
def test_a_guard_that_is_overwritten_fails_the_ticket(pool: Any, where: str, byte: int) -> None:
    assert pool.overwritten_guard() == ""
    flip(pool._checks._guards[where], byte)
    said = f"1 of 256 guard bytes {where} were overwritten"
    ticket = pool.write_back(ids(4, 1), ids(1, 0), "page", validate="full")
    cause = f"{said}, by this transfer or an earlier one"
    fails(ticket, f"mla: write_back of 2 pages (1, 4) failed: {cause}")
    pool.load(ids(4), ids(1), "page").wait()
    assert pool.overwritten_guard() == said


def test_guards_lie_right_beside_what_they_guard(pool: Any) -> None:
    guards, host, staging = pool._checks._guards, pool.kv_buffer, pool.staging
    assert list(guards) == GUARDS
    assert guards[GUARDS[0]].data_ptr() + 256 == host.data_ptr()
    assert guards[GUARDS[1]].data_ptr() == host.data_ptr() + host.numel()
    assert guards[GUARDS[2]].data_ptr() == staging.address + staging.nbytes


def test_a_destroyed_pool_keeps_no_memory() -> None:
    """Neither guards nor finished tickets hold what is gone."""
    made = generated.pool_class("mla")(
        kv_lora_rank=3,
        qk_rope_head_dim=2,
        dtype=torch.bfloat16,
        layers=LAYERS,
        page_size=PAGE,
        capacity_pages=1 << 19,
    )
    made.bind({"kv": [torch.zeros(DEVICE_PAGES * PAGE, 5, dtype=torch.bfloat16) for _ in LAYERS]})
    ticket = made.write_back(ids(4), ids(1), "page", validate="full")
    ticket.wait()
    inside = made.kv_buffer.data_ptr() + made.kv_buffer.numel() // 2
    assert mapped(inside)
    made.destroy()
    gc.collect()
    assert not mapped(inside)


# ---- on the simulator -------------------------------------------------------------------------


def overwrite_after(made: World, mark: Any, *pages: int) -> None:
    """Let the caller's stream write new rows as soon as it may."""
    mark.wait(made.driver.caller)
    produce(made, *pages)


@pytest.mark.parametrize("choose", ORDERS)
@pytest.mark.parametrize("path", ["zero_copy", "staged"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_later_work_does_not_disturb_the_comparison(
    config: Any, path: str, choose: Callable[[int], int]
) -> None:
    """Rows change right after they are captured or loaded, host pages are written again: no false alarm."""
    made = world(config, choose, slot_pages=2)
    produce(made, 1, 2, 3)
    tickets = [store(made, [0, 2, 4], [1, 2, 3], path, validate="full")]
    overwrite_after(made, tickets[0].captured, 1, 2, 3)
    tickets.append(store(made, [2, 4, 1], [2, 1, 3], path, validate="full"))
    tickets.append(load(made, [0, 1, 2], [5, 6, 7], path, validate="full"))
    tickets[-1].wait(made.driver.caller)
    produce(made, 5, 6)
    layered = load(made, [1, 4], [4, 3], order="layer", validate="full")
    layered.wait_layer(config.layers[0], made.driver.caller)
    produce(made, 4, 3)
    tickets += [layered, load(made, [2], [2], layers=config.layers[-1:], validate="full")]
    finish(made, *tickets)


@pytest.mark.parametrize("stores", [True, False])
def test_a_byte_that_changes_on_the_device(stores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(CONFIGS[0], last)
    store(made, [0, 1], [2, 3]).wait()
    compare = Checks.compare

    def patched(self: Checks, batch: Any, layers: Any, views: Any, stream: Any, keep: Any) -> Any:
        row = made.tensors["kv"][1].view(torch.uint8)
        flips = [lambda touch: flip(row, (3 if stores else 5) * made.page_size * 10)]
        made.driver.enqueue("launch", "a bit flips", stream, flips)
        return compare(self, batch, layers, views, stream, keep)

    monkeypatch.setattr(Checks, "compare", patched)
    ticket = (store if stores else load)(made, [0, 1], [2, 3] if stores else [4, 5], validate="full")
    word = "write_back" if stores else "load"
    fails(ticket, f"mla: {word} of 1 pages (1) failed: the bytes on both sides differ")
    made.pool.destroy()


@pytest.mark.parametrize("call", ["allocate", "copy", "launch"])
def test_a_comparison_that_cannot_be_queued(call: str) -> None:
    made = world(CONFIGS[0], first)
    made.driver.fail(call, skip=call == "launch")
    with pytest.raises(TransferError, match=rf"mla: write_back of 1 pages \(0\) failed: {call} was made"):
        made.pool.write_back(torch.tensor([0]), torch.tensor([1]), "page", path="zero_copy", validate="full")
    finish(made)
