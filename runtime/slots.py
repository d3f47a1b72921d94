"""Which pages of a host pool are taken. In: counts to allocate, ids to free. Out: fresh tensors of ids.

Note [Order of pages]: pages that were never used come first, in ascending order; then the pages freed
so far, sorted as one batch; then those freed meanwhile, and so on. Sorting a batch joins neighbours that
were freed apart, so that later copies merge. The order depends on the sequence of calls alone, so ranks
that make the same calls get the same ids; while memory is registered in the background it also depends on
how many pages there are yet.
"""

from __future__ import annotations

import itertools
import operator
import threading
from array import array
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from poolwright.runtime import arguments
from poolwright.runtime.registration import Registration


class Slots:
    """Allocator of `pages` pages of `page_size` token ids each; page p holds ids p * page_size and on.

    Thread safe. A freed page is available at once. A refused call raises ValueError and changes nothing.
    `taken`: a byte a page, not 0 where it is allocated; always the same memory. `in_use`: whether a page ever
    was; until then ids are the caller's own. `registrations`: of all memory that has these pages, while some
    of it is not registered; pages that lie there are not handed out.
    """

    def __init__(self, pages: int, page_size: int, pool: str) -> None:
        """`pages` >= 0, `page_size` >= 1; `pool` names the pool in messages. Raises ValueError."""
        if pages < 0 or page_size < 1:
            raise ValueError(f"{pool}: expected pages >= 0 and page_size >= 1, got {pages} and {page_size}")
        self.pages, self.page_size, self.pool = pages, page_size, pool
        self._lock = threading.RLock()
        self.in_use = False
        self.registrations: tuple[Registration, ...] = ()
        self.taken = bytearray(pages)
        self._reset()

    def _reset(self) -> None:
        self.taken[:] = bytes(self.pages)
        self._fresh = 0  # pages from here on were never used
        self._ready = array("q")  # sorted batch being handed out
        self._next = 0  # where what is left of it starts
        self._freed = array("q")  # next batch
        self._available = self.pages

    def held(self) -> AbstractContextManager[object]:
        """Nothing else changes what is allocated while this is open. Several are opened in the order of the
        group's pools, and none while transfers are locked."""
        return self._lock

    def available_size(self) -> int:
        """Token ids that can be allocated."""
        return (self._available - (self.pages - self.ready())) * self.page_size

    def ready(self) -> int:
        """Pages from 0 on that lie in registered memory. It only grows; a page behind them was never used."""
        registrations = self.registrations  # read once: any thread may find that all is registered
        if registrations:
            found = min(each.ready for each in registrations)
            if found < self.pages:
                return found
            self.registrations = ()
        return self.pages

    def clear(self) -> None:
        """Free everything; ids from before are no longer allocated."""
        with self._lock:
            self._reset()

    def alloc(self, count: int) -> torch.Tensor | None:
        """`count` ids of whole pages, ascending: int64 ``[count]`` on the CPU; None when the pool is full.

        Raises ValueError unless `count` is a multiple of the page size and not negative.
        """
        count = operator.index(count)
        self._check_count("alloc", count)
        with self._lock:
            if count > self.available_size():
                return None
            pages = torch.tensor(self._take(count // self.page_size), dtype=torch.int64)
        if self.page_size == 1:
            return pages
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()

    def pages_of(self, ids: torch.Tensor, call: str = "free") -> list[int]:
        """The pages, ascending, that `ids` (int64 ``[n]``, CPU, any order) make up.

        Raises ValueError, naming `call`, for anything but whole, allocated pages, each named once.
        """
        kind = (torch.int64, torch.strided, "cpu", 1)
        if not isinstance(ids, torch.Tensor) or (ids.dtype, ids.layout, ids.device.type, ids.dim()) != kind:
            expected, step = "a dense tensor of torch.int64 [n] on cpu", "pass what alloc returned"
            raise arguments.refusal(self.pool, call, expected, ids, step)
        self._check_count(call, ids.numel())
        size = self.page_size
        values: list[int] = ids.tolist()
        values.sort()
        for at in range(0, len(values), size):
            first = values[at]
            if first % size or values[at : at + size] != list(range(first, first + size)):
                got = f"an id missing or twice in page {first // size}"
                step = "free the ids that alloc returned"
                raise self._wrong(call, f"every page whole (page size {size})", got, step)
        pages = [first // size for first in values[::size]]
        with self._lock:
            self._check_pages(call, pages)
        return pages

    def free(self, ids: torch.Tensor) -> None:
        """Give back the pages that `ids` make up. Raises as `pages_of` does."""
        self.free_pages(self.pages_of(ids))

    def free_pages(self, pages: Sequence[int]) -> None:
        """Give pages back, in any order. Raises ValueError for one that is not allocated, or named twice."""
        with self._lock:
            self._check_pages("free", pages)
            for page in pages:
                self.taken[page] = 0
            self._freed.extend(pages)
            self._available += len(pages)

    def idle(self, pages: Iterable[int]) -> int | None:
        """The least of these pages (all of the pool) that is not allocated, or None."""
        return min((page for page in pages if not self.taken[page]), default=None)

    def _take(self, count: int) -> list[int]:
        fresh = min(count, self.ready() - self._fresh)
        taken = list(range(self._fresh, self._fresh + fresh))
        self._fresh += fresh
        while len(taken) < count:
            if self._next == len(self._ready):  # every older batch has been handed out by now
                self._ready, self._next, self._freed = array("q", sorted(self._freed)), 0, array("q")
            part = self._ready[self._next : self._next + count - len(taken)]
            self._next += len(part)
            taken.extend(part)
        for page in taken:
            self.taken[page] = 1
        self._available -= count
        self.in_use = self.in_use or count > 0
        return sorted(taken)

    def _check_pages(self, call: str, pages: Sequence[int]) -> None:
        outside = next((page for page in pages if not 0 <= page < self.pages), None)
        if outside is not None:
            raise self._wrong(call, f"pages below {self.pages}", f"page {outside}", "pass allocated ids")
        if len(set(pages)) != len(pages):
            twice = next(one for one, other in itertools.pairwise(sorted(pages)) if one == other)
            raise self._wrong(call, "each page once", f"page {twice} twice", "drop the duplicate")
        idle = self.idle(pages)
        if idle is not None:
            got, step = f"page {idle}, which is not allocated", "free a page once, and not after clear()"
            raise self._wrong(call, "allocated pages", got, step)

    def _check_count(self, call: str, count: int) -> None:
        if count < 0 or count % self.page_size:
            expected = f"a multiple of page size {self.page_size}, not negative"
            raise self._wrong(call, expected, f"{count} ids", "pad a partial page to a whole one")

    def _wrong(self, call: str, expected: str, got: str, step: str) -> ValueError:
        return arguments.wrong(self.pool, call, expected, got, step)
