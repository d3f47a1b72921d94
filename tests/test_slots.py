"""Slots against a set model, and the fault kinds known from host pool allocators."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from poolwright.runtime.slots import Slots


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def tokens(pages: list[int], size: int) -> list[int]:
    return [page * size + step for page in pages for step in range(size)]


def free(slots: Slots, values: torch.Tensor) -> int:
    """As a pool frees ids."""
    slots.free(values)
    return values.numel()


def free_pages_left(slots: Slots) -> int:
    return slots.available_size() // slots.page_size


class Model(RuleBasedStateMachine):
    """Any sequence of calls: what is handed out is free, whole, ascending, and stays as it was."""

    @initialize(pages=st.integers(0, 40), size=st.sampled_from([1, 2, 3, 16]))
    def start(self, pages: int, size: int) -> None:
        self.slots, self.twin = Slots(pages, size, "p"), Slots(pages, size, "p")
        self.size, self.pages = size, pages
        self.taken: set[int] = set()
        self.kept: list[tuple[torch.Tensor, list[int]]] = []

    @rule(count=st.integers(0, 12))
    def alloc(self, count: int) -> None:
        got, again = self.slots.alloc(count * self.size), self.twin.alloc(count * self.size)
        if count > self.pages - len(self.taken):
            assert got is None and again is None
            return
        assert got is not None and again is not None and torch.equal(got, again)
        assert got.dtype == torch.int64 and got.untyped_storage().nbytes() == 8 * count * self.size
        pages = sorted(set((got // self.size).tolist()))
        assert got.tolist() == tokens(pages, self.size)
        assert len(pages) == count and not self.taken & set(pages) and all(p < self.pages for p in pages)
        self.taken |= set(pages)
        self.kept.append((got, got.tolist()))

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), whole=st.booleans())
    def free(self, data: st.DataObject, whole: bool) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.taken)), unique=True, max_size=10))
        for slots in (self.slots, self.twin):
            if whole:
                slots.free_pages(pages)
            else:
                values = data.draw(st.permutations(tokens(pages, self.size)))
                assert free(slots, torch.tensor(values, dtype=torch.int64)) == len(values)
        self.taken -= set(pages)

    @rule(page=st.integers(-2, 42), extra=st.integers(0, 2))
    def bad_free(self, page: int, extra: int) -> None:
        taken = sorted(self.taken)[:extra]
        bad = [*taken, page, page] if page in self.taken else [*taken, page]
        with pytest.raises(ValueError, match=r"^p: free: "):
            free(self.slots, torch.tensor(tokens(bad, self.size), dtype=torch.int64))
        with pytest.raises(ValueError, match=r"^p: free: "):
            self.slots.free_pages(bad)

    @rule()
    def clear(self) -> None:
        self.slots.clear()
        self.twin.clear()
        self.taken.clear()

    @invariant()
    def counts_agree_and_results_keep_their_values(self) -> None:
        if not hasattr(self, "slots"):
            return
        assert self.slots.available_size() == (self.pages - len(self.taken)) * self.size
        assert all(tensor.tolist() == values for tensor, values in self.kept)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


def test_fresh_pages_first_then_freed_ones_joined() -> None:
    slots = Slots(6, 1, "p")
    assert slots.alloc(4) is not None
    for page in (2, 0, 1):
        free(slots, ids(page))
    assert slots.alloc(2).tolist() == [4, 5]
    assert slots.alloc(3).tolist() == [0, 1, 2]


def test_a_freed_page_is_available_at_once() -> None:
    slots = Slots(1, 16, "p")
    first = slots.alloc(16)
    assert slots.alloc(16) is None
    free(slots, first)
    assert torch.equal(slots.alloc(16), first)


def test_a_full_pool_gives_none_and_keeps_its_state() -> None:
    slots = Slots(3, 2, "p")
    slots.alloc(4)
    assert slots.alloc(4) is None
    assert slots.available_size() == 2 and slots.alloc(2).tolist() == [4, 5]


def test_an_empty_pool_and_empty_lists() -> None:
    slots = Slots(0, 64, "p")
    assert slots.alloc(64) is None
    empty = slots.alloc(0)
    assert empty.shape == (0,) and empty.dtype == torch.int64
    slots.free_pages([])
    assert free(slots, empty) == 0 and slots.available_size() == 0


@pytest.mark.parametrize("count", [-64, -1, 1, 63, 65])
def test_unaligned_counts_are_refused_with_the_numbers(count: int) -> None:
    slots = Slots(4, 64, "mla")
    message = (
        f"mla: alloc: expected a multiple of page size 64, not negative, got {count} ids;"
        " pad a partial page to a whole one"
    )
    with pytest.raises(ValueError) as error:
        slots.alloc(count)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (ids(0, 1, 2), "expected a multiple of page size 4, not negative, got 3 ids"),
        (ids(0, 1, 2, 4), "id missing or twice in page 0"),
        (ids(0, 1, 2, 2), "id missing or twice in page 0"),
        (ids(1, 2, 3, 4), "id missing or twice in page 0"),
        (ids(*range(4), *range(4)), "id missing or twice in page 0"),
        (ids(0, 0, 1, 1, 2, 2, 3, 3), "id missing or twice in page 0"),
        (ids(-4, -3, -2, -1), "expected pages below 4, got page -1"),
        (ids(16, 17, 18, 19), "expected pages below 4, got page 4"),
        (ids(*range(12, 20)), "expected pages below 4, got page 4"),
        (ids(*range(4, 12)), "got page 2, which is not allocated"),
        (torch.arange(4, dtype=torch.int32), "[n] on cpu, got a tensor of torch.int32 [4] on cpu"),
        (torch.arange(4).view(2, 2), "got a tensor of torch.int64 [2, 2] on cpu"),
        (torch.arange(4, device="meta"), "got a tensor of torch.int64 [4] on meta"),
        ([0, 1, 2, 3], "expected a dense tensor of torch.int64 [n] on cpu, got [0, 1, 2, 3]"),
    ],
)
def test_bad_frees_are_refused_and_change_nothing(bad: torch.Tensor, message: str) -> None:
    slots = Slots(4, 4, "p")
    slots.alloc(8)
    with pytest.raises(ValueError) as error:
        free(slots, bad)
    assert message in str(error.value)
    assert slots.available_size() == 8
    assert slots.alloc(8).tolist() == list(range(8, 16))
    assert free(slots, torch.arange(16)) == 16


@pytest.mark.parametrize("size", [1, 64])
def test_double_free_free_after_clear_and_never_allocated(size: int) -> None:
    """F075, F076, F110: also for single tokens, and with the duplicate inside one list."""
    slots = Slots(8, size, "p")
    page = slots.alloc(size)
    other = slots.alloc(size)
    free(slots, page)
    for bad in (page, torch.cat([other, page]), torch.cat([other, other]), page + 5 * size):
        with pytest.raises(ValueError):
            free(slots, bad)
        assert free_pages_left(slots) == 7
    slots.clear()
    with pytest.raises(ValueError, match="not allocated; free a page once, and not after clear"):
        free(slots, other)
    assert free_pages_left(slots) == 8


def test_results_share_nothing_with_the_free_list() -> None:
    """F073: what alloc returned keeps its values, whatever happens later, and may be overwritten."""
    slots = Slots(8, 2, "p")
    free(slots, slots.alloc(16))
    first = slots.alloc(6)
    kept = first.tolist()
    free(slots, slots.alloc(4))
    slots.alloc(2)
    slots.clear()
    assert first.tolist() == kept
    slots.alloc(16).fill_(-1)
    slots.clear()
    assert slots.alloc(16).tolist() == list(range(16))


def test_memory_of_results_is_their_own_size() -> None:
    """F074: small results do not keep a large free list alive."""
    slots = Slots(1_000_000, 1, "p")
    free(slots, slots.alloc(1_000_000))
    for _ in range(100):
        got = slots.alloc(10)
        assert got.untyped_storage().nbytes() == 80
        free(slots, slots.alloc(1000))


def test_rollback_of_a_failed_group_restores_every_pool() -> None:
    """F080: one pool of several is full; giving back the others leaves all as before."""
    pools = [Slots(8, 4, "kv"), Slots(1, 1, "state")]
    results = [pools[0].alloc(8), pools[1].alloc(2)]
    assert results[1] is None
    free(pools[0], results[0])
    assert [free_pages_left(pool) for pool in pools] == [8, 1]


def test_many_single_frees_in_a_large_pool() -> None:
    """F079: 10^5 frees; one pass over the free list for each would make this test take minutes."""
    slots = Slots(10_000_000, 4, "p")
    for page in slots.alloc(400_000).split(4):
        free(slots, page)
    assert free_pages_left(slots) == 10_000_000


def test_long_lists_are_freed_in_any_order() -> None:
    slots = Slots(3000, 4, "p")
    taken = slots.alloc(12_000)
    order = torch.randperm(12_000, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="id missing or twice in page 7"):
        free(slots, torch.cat([taken[:28], taken[29:], taken[-1:]])[order])
    assert slots.pages_of(taken[order]) == list(range(3000))
    assert free(slots, taken[order]) == 12_000
    with pytest.raises(ValueError, match=r"p: give back: .* page 0, which is not allocated"):
        slots.pages_of(taken[order], "give back")
    assert torch.equal(slots.alloc(12_000), taken)


def test_threads_never_get_the_same_page() -> None:
    slots = Slots(512, 2, "p")
    got: list[list[int]] = [[] for _ in range(4)]

    def work(mine: list[int]) -> None:
        for k in range(200):
            got = slots.alloc(2 + 2 * (k % 3))
            if got is not None and k % 2:
                free(slots, got)
            elif got is not None:
                mine.extend(slots.pages_of(got))

    workers = [threading.Thread(target=work, args=(mine,)) for mine in got]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    held = [page for mine in got for page in mine]
    assert len(held) == len(set(held)) and free_pages_left(slots) == 512 - len(held)


def test_another_thread_may_find_that_all_is_registered() -> None:
    """It does so behind every look at what is not."""

    class Registered:
        ready = 2

    class Watched(Slots):
        found: tuple[Registered, ...] = ()

        @property
        def registrations(self) -> tuple[Registered, ...]:  # type: ignore[override]
            found, self.found = self.found, ()
            return found

        @registrations.setter
        def registrations(self, found: tuple[Registered, ...]) -> None:
            self.found = found

    slots = Watched(4, 1, "p")
    slots.registrations = (Registered(),)
    assert slots.available_size() == 2
    assert slots.available_size() == 4


@pytest.mark.parametrize(("pages", "size"), [(-1, 1), (1, 0), (1, -64)])
def test_impossible_pools_are_refused(pages: int, size: int) -> None:
    message = f"p: expected pages >= 0 and page_size >= 1, got {pages} and {size}"
    with pytest.raises(ValueError, match=message):
        Slots(pages, size, "p")
