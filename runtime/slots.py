"""Which pages of a host pool are taken. In: counts to allocate, ids to free. Out: fresh tensors of ids.

Note [Order of pages]: pages that were never used come first, in ascending order; then the pages freed
so far, sorted as one batch; then those freed meanwhile, and so on. Sorting a batch joins neighbours that
were freed apart, so that later copies merge, and it costs a few bytes a page. The order depends on the
sequence of calls alone, so ranks that make the same calls get the same ids.
"""

from __future__ import annotations

import ctypes
import operator
import threading
from array import array
from typing import NoReturn

import torch

_DIGIT = (1 << 64) - 1


class Slots:
    """Allocator of `pages` pages of `page_size` token ids each; page p holds ids p * page_size and on.

    Thread safe. A freed page is available at once. A refused call raises ValueError and changes nothing.
    """

    def __init__(self, pages: int, page_size: int, pool: str) -> None:
        """`pages` >= 0, `page_size` >= 1; `pool` names the pool in messages. Raises ValueError."""
        if pages < 0 or page_size < 1:
            raise ValueError(f"{pool}: expected pages >= 0 and page_size >= 1, got {pages} and {page_size}")
        self.pages = pages
        self.page_size = page_size
        self.pool = pool
        self._lock = threading.Lock()
        # One byte a page, seen by Python (fast for one run) and by torch (fast for many pages).
        self._taken = bytearray(max(pages, 1))
        self._map = torch.frombuffer(self._taken, dtype=torch.uint8)[:pages]
        self._ones = int.from_bytes(array("q", [1] * page_size).tobytes(), "little")
        self._steps = int.from_bytes(array("q", range(page_size)).tobytes(), "little")
        # Beyond so many pages freed in a batch, a scan of the map is cheaper than a list of them.
        self._listed = max(1024, pages // 128)
        self._reset()

    def _reset(self) -> None:
        self._fresh = 0  # pages from here on were never used
        self._ready = torch.empty(0, dtype=torch.int64)  # sorted batch being handed out
        self._next = 0  # first page of it that is left
        self._freed: list[int] | None = []  # next batch; None when it is long
        self._available = self.pages

    @property
    def available_pages(self) -> int:
        """Pages that can be allocated."""
        return self._available

    def available_size(self) -> int:
        """Token ids that can be allocated."""
        return self._available * self.page_size

    def clear(self) -> None:
        """Free everything; ids from before are no longer allocated."""
        with self._lock:
            self._map.zero_()
            self._reset()

    def alloc(self, count: int) -> torch.Tensor | None:
        """`count` ids of whole pages, ascending: int64 ``[count]`` on the CPU; None when the pool is full.

        Raises ValueError unless `count` is a multiple of the page size and not negative.
        """
        count = operator.index(count)
        self._check_count("alloc", count)
        pages = self.alloc_pages(count // self.page_size)
        if pages is None or self.page_size == 1:
            return pages
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()

    def alloc_pages(self, count: int) -> torch.Tensor | None:
        """`count` page ids, ascending: int64 ``[count]`` on the CPU; None when the pool is full."""
        count = operator.index(count)
        if count < 0:
            raise ValueError(f"{self.pool}: alloc_pages: expected a count >= 0, got {count}")
        with self._lock:
            if count > self._available:
                return None
            pages = self._take(count)
            self._available -= count
            return pages

    def pages_of(self, ids: torch.Tensor, call: str = "free") -> torch.Tensor:
        """The pages that `ids` (int64 ``[n]``, CPU, any order) make up: int64 ``[n / page_size]``.

        Raises ValueError, naming `call`, for anything but whole, allocated pages, each named once.
        """
        self._check_ids(call, ids)
        pages = self._whole_pages(call, ids)
        with self._lock:
            self._check_pages(call, pages)
        return pages

    def free(self, ids: torch.Tensor) -> int:
        """Give back the pages that `ids` make up; returns how many ids. Raises as `pages_of` does."""
        self._check_ids("free", ids)
        page = self._single_page(ids)
        if page is None:
            self._release("free", self._whole_pages("free", ids))
            return ids.numel()
        with self._lock:
            if not self._taken[page]:
                self._check_pages("free", torch.tensor([page]))
            self._taken[page] = 0
            self._available += 1
            if self._freed is not None:
                self._freed.append(page)
                if len(self._freed) > self._listed:
                    self._freed = None
        return self.page_size

    def free_pages(self, pages: torch.Tensor) -> int:
        """Give back `pages` (page ids, int64 ``[n]``, CPU, any order); returns n. Raises as `free` does."""
        self._check_tensor("free_pages", pages)
        self._release("free_pages", pages)
        return pages.numel()

    def _take(self, count: int) -> torch.Tensor:
        fresh = min(count, self.pages - self._fresh)
        parts = [torch.arange(self._fresh, self._fresh + fresh)]
        self._taken[self._fresh : self._fresh + fresh] = b"\1" * fresh
        self._fresh += fresh
        left = count - fresh
        while left:
            if self._next == self._ready.numel():
                self._ready, self._next = self._batch(), 0
            # A clone: a view would keep the whole batch alive.
            part = self._ready[self._next : self._next + left].clone()
            self._map[part] = 1
            self._next += part.numel()
            left -= part.numel()
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts).sort().values

    def _batch(self) -> torch.Tensor:
        """All pages freed since the last batch, sorted. Every older one has been handed out by now."""
        freed, self._freed = self._freed, []
        if freed is not None:
            return torch.tensor(sorted(freed), dtype=torch.int64)
        return (self._map[: self._fresh] == 0).nonzero().flatten()

    def _single_page(self, ids: torch.Tensor) -> int | None:
        """The page, if `ids` are one page in order. The common case, kept cheap: no tensor operation."""
        if ids.numel() != self.page_size or not ids.is_contiguous():
            return None
        # All ids as the digits of one number, base 2^64.
        number = int.from_bytes(ctypes.string_at(ids.data_ptr(), 8 * self.page_size), "little")
        page, rest = divmod(number & _DIGIT, self.page_size)
        whole = rest == 0 and page < self.pages and number == page * self.page_size * self._ones + self._steps
        return page if whole else None

    def _whole_pages(self, call: str, ids: torch.Tensor) -> torch.Tensor:
        """The page of each `page_size` ids, whatever their order. Raises ValueError if one is not whole."""
        size = self.page_size
        steps = torch.arange(size)
        rows = ids.reshape(-1, size)
        if not torch.equal(rows, rows[:, :1] + steps):
            rows = ids.sort().values.view(-1, size)
        wrong = ((rows != rows[:, :1] + steps).any(1) | (rows[:, 0] % size != 0)).nonzero()
        if wrong.numel():
            got = f"an id missing or twice in page {int(rows[int(wrong[0]), 0]) // size}"
            self._refuse(
                call, got, f"every page whole (page size {size})", "free the ids that alloc returned"
            )
        return rows[:, 0] // size

    def _release(self, call: str, pages: torch.Tensor) -> None:
        with self._lock:
            self._check_pages(call, pages)
            self._map[pages] = 0
            self._available += len(pages)
            if self._freed is not None and len(self._freed) + len(pages) <= self._listed:
                self._freed.extend(pages.tolist())
            elif len(pages):
                self._freed = None

    def _check_pages(self, call: str, pages: torch.Tensor) -> None:
        outside = pages[(pages < 0) | (pages >= self.pages)]
        if outside.numel():
            self._refuse(call, f"page {int(outside[0])}", f"pages below {self.pages}", "pass allocated ids")
        ordered = pages.sort().values
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if twice.numel():
            self._refuse(call, f"page {int(twice[0])} twice", "each page once", "drop the duplicate")
        idle = pages[self._map[pages] == 0]
        if idle.numel():
            got = f"page {int(idle[0])}, which is not allocated"
            self._refuse(call, got, "allocated pages", "free a page once, and not after clear()")

    def _check_ids(self, call: str, ids: torch.Tensor) -> None:
        self._check_tensor(call, ids)
        self._check_count(call, ids.numel())

    def _check_tensor(self, call: str, ids: torch.Tensor) -> None:
        if not isinstance(ids, torch.Tensor):
            self._refuse(call, type(ids).__name__, "a torch.Tensor", "wrap the ids in torch.tensor")
        if ids.dtype != torch.int64 or not ids.is_cpu or ids.dim() != 1:
            got = f"{ids.dtype} {list(ids.shape)} on {ids.device}"
            self._refuse(call, got, "torch.int64 [n] on cpu", "pass what alloc returned")

    def _check_count(self, call: str, count: int) -> None:
        if count < 0 or count % self.page_size:
            expected = f"a multiple of page size {self.page_size}, not negative"
            self._refuse(call, f"{count} ids", expected, "pad a partial page to a whole one")

    def _refuse(self, call: str, got: str, expected: str, hint: str) -> NoReturn:
        raise ValueError(f"{self.pool}: {call}: expected {expected}, got {got}: {hint}")
