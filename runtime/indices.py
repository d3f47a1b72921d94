"""Index lists: what a caller hands over becomes a checked `Batch`; the caller's tensors are left alone.

Host ids live on the CPU. Device ids live on the CPU or on the device, int32 or int64. Both lists have one
unit: tokens (whole pages of them) or pages. Page ids are checked as Python lists: for the few hundred of a
usual transfer every operation on a tensor costs more than a whole loop. Token ids, which are `page_size`
times as many, are checked by torch.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

LEVELS = ("off", "cheap", "full")
UNITS = ("token", "page")
CPU = torch.device("cpu")
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Limits:
    """What ids may be: pages on both sides, tokens a page, device pages that no transfer may touch."""

    pool: str
    page_size: int
    host_pages: int
    device_pages: int
    reserved: tuple[int, ...] = ()
    tokens: bool = True
    device: torch.device = CPU


class Batch:
    """Checked ids, as the 32-bit numbers that kernels read. `unit` ``pages`` or ``tokens``: what both lists
    hold. With `on_device` the device ids lie there, in that unit, and `host` holds page ids.

    `bad`: asked when all is done, which host pages were skipped. Sets of pages that are not given are made
    when they are asked for: few are.
    """

    __slots__ = ("_device_pages", "_host_pages", "bad", "device", "host", "on_device", "unit")

    def __init__(
        self,
        unit: str,
        host: array[int],
        device: array[int],
        host_pages: set[int] | None = None,
        device_pages: set[int] | None = None,
        on_device: torch.Tensor | None = None,
        bad: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self.unit, self.host, self.device = unit, host, device
        self._host_pages, self._device_pages = host_pages, device_pages
        self.on_device, self.bad = on_device, bad

    @property
    def host_pages(self) -> set[int]:
        """The host pages touched."""
        if self._host_pages is None:
            self._host_pages = set(self.host)
        return self._host_pages

    @property
    def device_pages(self) -> set[int] | None:
        """The device pages touched; None: only the device knows."""
        if self._device_pages is None and self.on_device is None:
            self._device_pages = set(self.device)
        return self._device_pages


def batch(
    limits: Limits, host: torch.Tensor, device: torch.Tensor, unit: str, level: str, writes_host: bool
) -> Batch:
    """Check both lists and bring them into one unit. Raises ValueError before anything is submitted."""
    if level not in LEVELS:
        raise ValueError(f"{limits.pool}: validate: expected one of {', '.join(LEVELS)}, got {level!r}")
    if unit not in UNITS:
        raise ValueError(f"{limits.pool}: unit: expected token or page, got {unit!r}")
    for name, ids in (("host ids", host), ("device ids", device)):
        if not isinstance(ids, torch.Tensor) or ids.dtype not in _INTEGERS or ids.dim() != 1:
            raise _not_a_list(limits, name, ids)
    if not host.is_cpu:
        raise ValueError(
            f"{limits.pool}: host ids: expected a CPU tensor, got {host.device}; keep them on the CPU"
        )
    count, others = host.numel(), device.numel()
    if count != others:
        raise ValueError(f"{limits.pool}: expected as many host ids as device ids, got {count} and {others}")
    per_page = limits.page_size if unit == "token" else 1
    if count % per_page:
        raise ValueError(
            f"{limits.pool}: expected whole pages of {per_page} ids, got {count} ids; "
            f"pad the last page or leave it out"
        )
    if not device.is_cpu:
        if device.device.type != limits.device.type:
            raise ValueError(
                f"{limits.pool}: device ids: expected a tensor on cpu or {limits.device}, got {device.device}"
            )
        return _device_batch(limits, host, device, per_page, level, writes_host)
    if per_page == 1:
        return _page_batch(limits, "ids", host.tolist(), device.tolist(), level, writes_host)
    here, there = _whole_pages(host, per_page), _whole_pages(device, per_page)
    if here is None or there is None:
        return _token_batch(limits, host, device, level, writes_host)
    return _page_batch(limits, "pages", here, there, level, writes_host)


def _not_a_list(limits: Limits, name: str, ids: object) -> ValueError:
    if not isinstance(ids, torch.Tensor):
        return ValueError(f"{limits.pool}: {name}: expected a tensor, got {type(ids).__name__}")
    if ids.dtype not in _INTEGERS:
        return ValueError(f"{limits.pool}: {name}: dtype: expected int32 or int64, got {ids.dtype}")
    return ValueError(f"{limits.pool}: {name}: expected one dimension, got shape {tuple(ids.shape)}")


def _out_of_range(limits: Limits, name: str, ids: Sequence[int], end: int) -> ValueError:
    wrong = next(i for i in ids if i < 0 or i >= end)
    return ValueError(f"{limits.pool}: {name}: expected 0 to {end - 1}, got {wrong}")


def _twice(limits: Limits, name: str, unit: str, ids: Sequence[int]) -> ValueError:
    seen: set[int] = set()
    twice = next(i for i in ids if i in seen or seen.add(i))  # type: ignore[func-returns-value]
    return ValueError(
        f"{limits.pool}: {name}: {unit} {twice} stands twice in one list; a destination may be written once"
    )


def _check_reserved(limits: Limits, pages: Collection[int]) -> None:
    for page in limits.reserved:
        if page in pages:
            raise ValueError(f"{limits.pool}: device ids: {page} is reserved and is never moved")


def _page_batch(
    limits: Limits, word: str, host: list[int], device: list[int], level: str, writes_host: bool
) -> Batch:
    """Whole pages on both sides; `word`: what the caller's lists hold, for messages."""
    here = _numbers(limits, "host", word, host, limits.host_pages)
    there = _numbers(limits, "device", word, device, limits.device_pages)
    if limits.reserved:
        _check_reserved(limits, device)
    if level == "off":
        return Batch("pages", here, there)
    if writes_host:
        pages = set(host)
        if len(pages) != len(host):
            raise _twice(limits, "host ids", "page", host)
        return Batch("pages", here, there, pages)
    pages = set(device)
    if len(pages) != len(device):
        raise _twice(limits, "device ids", "page", device)
    return Batch("pages", here, there, None, pages)


def _numbers(limits: Limits, side: str, word: str, ids: list[int], end: int) -> array[int]:
    """The ids as 32-bit numbers. Raises ValueError for one that is not from 0 to `end` - 1."""
    try:
        numbers = array("I", ids)  # refuses negative ones: half the check of the range
    except OverflowError:
        raise _out_of_range(limits, f"{side} {word}", ids, end) from None
    if ids and max(ids) >= end:
        raise _out_of_range(limits, f"{side} {word}", ids, end)
    return numbers


def _whole_pages(ids: torch.Tensor, page_size: int) -> list[int] | None:
    """Page ids when every page's tokens stand together and in order, else None."""
    if page_size == 1:
        found: list[int] = ids.tolist()
        return found
    ids = ids.contiguous()
    first = ids.as_strided((ids.numel() // page_size,), (page_size,))
    expected = first.unsqueeze(1) + _steps(page_size, ids.dtype)
    size = ids.numel() * ids.element_size()
    if _memcmp()(ids.data_ptr(), expected.data_ptr(), size):  # a third of what torch.equal takes
        return None
    starts: list[int] = first.tolist()
    pages = [start // page_size for start in starts]
    return pages if sum(starts) == sum(pages) * page_size else None  # no start has a remainder


@functools.cache
def _steps(page_size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(page_size, dtype=dtype)


@functools.cache
def _memcmp() -> Callable[[int, int, int], int]:
    """Compares bytes at two addresses; 0: they are the same."""
    function: Any = ctypes.CDLL(None).memcmp
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return function  # type: ignore[no-any-return]


def _token_batch(
    limits: Limits, host: torch.Tensor, device: torch.Tensor, level: str, writes_host: bool
) -> Batch:
    """Tokens of pages that are not whole or not in order, on either side."""
    _need_tokens(limits, level)
    here = _token_numbers(limits, "host ids", host, limits.host_pages * limits.page_size)
    there = _token_numbers(limits, "device ids", device, limits.device_pages * limits.page_size)
    device_pages = _pages_of(device, limits.page_size)
    _check_reserved(limits, device_pages)
    if level != "off":
        name, written = ("host ids", host) if writes_host else ("device ids", device)
        if torch.unique(written).numel() != written.numel():
            raise _twice(limits, name, "token", written.tolist())
    return Batch("tokens", here, there, _pages_of(host, limits.page_size), device_pages)


def _token_numbers(limits: Limits, name: str, ids: torch.Tensor, end: int) -> array[int]:
    """As `_numbers`, of a list that is not empty."""
    low, high = ids.aminmax()
    if int(low) < 0 or int(high) >= end:
        raise _out_of_range(limits, name, ids.tolist(), end)
    words = ids.to(torch.int32).contiguous()
    return array("I", ctypes.string_at(words.data_ptr(), 4 * words.numel()))


def _pages_of(ids: torch.Tensor, page_size: int) -> set[int]:
    pages = torch.unique_consecutive(ids.div(page_size, rounding_mode="floor"))
    return set(pages.tolist())


def _need_tokens(limits: Limits, level: str) -> None:
    if not limits.tokens:
        raise ValueError(
            f"{limits.pool}: the tokens of a page are scattered or out of order, and a component of this "
            f"pool has no token axis; hand over whole pages"
        )
    if level == "full":
        raise ValueError(
            f"{limits.pool}: the tokens of a page are scattered or out of order; validate='full' refuses that"
        )


def _device_batch(
    limits: Limits, host: torch.Tensor, device: torch.Tensor, per_page: int, level: str, writes_host: bool
) -> Batch:
    """Ids on the device are never copied back: the kernel reads them in place."""
    rows = _whole_pages(host, per_page)
    if rows is None:
        raise ValueError(
            f"{limits.pool}: host ids: with device ids on {device.device}, the tokens of each host page must "
            f"stand together and in order"
        )
    if not limits.tokens and per_page > 1:
        raise ValueError(
            f"{limits.pool}: device ids: a component of this pool has no token axis; hand over page ids "
            f"(unit='page') or keep them on the CPU"
        )
    pages, numbers = set(rows), _numbers(limits, "host", "ids", rows, limits.host_pages)
    if level != "off" and writes_host and len(pages) != len(rows):
        raise _twice(limits, "host ids", "page", rows)
    named = "tokens" if per_page > 1 else "pages"
    if level != "full":
        return Batch(named, numbers, array("I"), pages, None, device if per_page > 1 else _words(device))
    clean, skipped = _cleaned(limits, device, per_page)

    def bad() -> Sequence[int]:
        return [row for row, skip in zip(rows, skipped.tolist(), strict=True) if skip]

    return Batch(named, numbers, array("I"), pages, None, clean if per_page > 1 else _words(clean), bad)


def _words(ids: torch.Tensor) -> torch.Tensor:
    """Page ids as the 32-bit numbers that kernels read."""
    return ids.to(torch.int32).contiguous()


def _cleaned(limits: Limits, device: torch.Tensor, per_page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with -1 (skipped by kernels) for every page that is out of range or not whole; which those are."""
    ids = device.to(torch.int64).reshape(-1, per_page)
    first = ids[:, :1]
    steps = torch.arange(per_page, device=device.device)
    wrong = (ids != first + steps).any(1) | (first[:, 0] % per_page != 0)
    wrong |= (ids < 0).any(1) | (ids >= limits.device_pages * per_page).any(1)
    for page in limits.reserved:
        wrong |= first[:, 0] == page * per_page
    return torch.where(wrong[:, None], -1, ids).reshape(-1), wrong
