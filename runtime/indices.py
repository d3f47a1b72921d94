"""Index lists: what a caller hands over becomes a checked `Batch`; the caller's tensors are left alone.

Host ids live on the CPU. Device ids live on the CPU or on the device, int32 or int64. Both lists have one
unit: tokens (whole pages of them) or pages. Whole pages are checked by one call of compiled code, where
every operation of torch would cost more than the whole list; scattered tokens are checked by torch.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from poolwright.runtime import native
from poolwright.runtime.arguments import refusal, wrong
from poolwright.runtime.driver import Memory
from poolwright.runtime.native import (
    ALLOCATED,
    BY_TOKEN,
    DEVICE_ONCE,
    DEVICE_WIDE,
    HOST_ONCE,
    HOST_WIDE,
    PageCheck,
)
from poolwright.runtime.slots import Slots

LEVELS = ("off", "cheap", "full")
UNITS = ("token", "page")
CPU, DENSE = torch.device("cpu"), torch.strided
_WIDE = {torch.int32: False, torch.int64: True}
_NONE = array("I", (0,))


@dataclass(frozen=True)
class Limits:
    """What ids may be: pages on both sides, tokens a page, device pages that no transfer may touch.

    `slots`: which host pages are allocated; None where that is not asked.
    """

    pool: str
    page_size: int
    host_pages: int
    device_pages: int
    reserved: tuple[int, ...] = ()
    tokens: bool = True
    device: torch.device = CPU
    slots: Slots | None = None

    @cached_property
    def pages(self) -> PageCheck:
        """Checks lists of whole pages."""
        taken = None if self.slots is None else self.slots.taken
        return PageCheck(self.page_size, self.host_pages, self.device_pages, self.reserved, taken)


class Listed:
    """Numbers that launches of a submission share; `memory`: where the device has them, if one needs it."""

    __slots__ = ("memory", "numbers")

    def __init__(self, numbers: array[int]) -> None:
        self.numbers = numbers
        self.memory: Memory | None = None


class Batch:
    """Checked ids: `count` of the host's, then those of the device, as the 32-bit numbers that kernels read.

    `unit` ``pages`` or ``tokens``: what both lists hold. With `on_device` the device ids lie there, in that
    unit, and `ids` holds page ids of the host alone. `runs`: of neighbouring host pages, 0 where pages are
    not whole. `bad`: asked when all is done, which host pages were skipped. `listed`: numbers among which
    the ids stand, and where the host's and the device's begin. Sets of pages are made when they are asked
    for: few are.
    """

    __slots__ = ("_device_pages", "_host_pages", "bad", "count", "ids", "listed", "on_device", "runs", "unit")

    def __init__(
        self,
        unit: str,
        ids: array[int],
        count: int,
        runs: int = 0,
        host_pages: set[int] | None = None,
        device_pages: set[int] | None = None,
        on_device: torch.Tensor | None = None,
        bad: Callable[[], Sequence[int]] | None = None,
        listed: tuple[Listed, int, int] | None = None,
    ) -> None:
        self.unit, self.ids, self.count, self.runs = unit, ids, count, runs
        self._host_pages, self._device_pages = host_pages, device_pages
        self.on_device, self.bad, self.listed = on_device, bad, listed

    @property
    def inside(self) -> bool:
        """Whether parameters of a launch may hold the ids, if they are few."""
        return self.on_device is None and self.unit == "pages"

    @property
    def host(self) -> array[int]:
        """The host's ids."""
        return self.ids[: self.count]

    @property
    def device(self) -> array[int]:
        """The device's ids; none when they lie there."""
        return self.ids[self.count :]

    @property
    def host_pages(self) -> set[int]:
        """The host pages touched."""
        if self._host_pages is None:
            self._host_pages = set(self.host)
        return self._host_pages

    @property
    def numbered_host_pages(self) -> array[int]:
        """The host pages touched, as 32-bit numbers."""
        if self.unit == "tokens" and self.on_device is None:
            return array("I", self.host_pages)
        return self.host

    @property
    def numbered_device_pages(self) -> array[int] | None:
        """As `device_pages`, as 32-bit numbers."""
        if self.on_device is not None:
            return None
        return self.device if self.unit == "pages" else array("I", self.device_pages or ())

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
        raise refusal(limits.pool, "validate", f"one of {', '.join(LEVELS)}", level)
    if unit not in UNITS:
        raise refusal(limits.pool, "unit", "token or page", unit)
    host_wide = _WIDE.get(host.dtype) if isinstance(host, torch.Tensor) else None
    device_wide = _WIDE.get(device.dtype) if isinstance(device, torch.Tensor) else None
    if host_wide is None or host.dim() != 1 or host.layout is not DENSE:
        raise _not_a_list(limits, "host ids", host)
    if device_wide is None or device.dim() != 1 or device.layout is not DENSE:
        raise _not_a_list(limits, "device ids", device)
    if not host.is_cpu:
        raise wrong(limits.pool, "host ids", "a CPU tensor", host.device, "keep them on the CPU")
    count, others = host.numel(), device.numel()
    if count != others:
        expected = f"expected as many host ids as device ids, got {count} and {others}"
        raise ValueError(f"{limits.pool}: {expected}; pair each host id with its device id")
    asked = (host_wide and HOST_WIDE) + (device_wide and DEVICE_WIDE)
    if level != "off":
        asked += HOST_ONCE if writes_host else DEVICE_ONCE
        if limits.slots is not None and limits.slots.in_use:
            asked += ALLOCATED
    if unit == "token":
        count, left = divmod(count, limits.page_size)
        if left:
            expected = f"expected whole pages of {limits.page_size} ids, got {others} ids"
            raise ValueError(f"{limits.pool}: {expected}; pad the last page or leave it out")
        asked += BY_TOKEN
    if not device.is_cpu:
        if device.device.type != limits.device.type:
            places = "cpu" if limits.device.type == "cpu" else f"cpu or {limits.device}"
            raise wrong(limits.pool, "device ids", f"a tensor on {places}", device.device, "move it there")
        return _device_batch(limits, host, device, count, asked, level)
    here = host if host.is_contiguous() else host.contiguous()
    there = device if device.is_contiguous() else device.contiguous()
    ids, check = _NONE * (2 * count), limits.pages
    runs = check.runs(here.data_ptr(), there.data_ptr(), count, asked, ids)
    if runs >= 0:
        return Batch("pages", ids, count, runs)
    if runs == native.NOT_WHOLE:
        return _token_batch(limits, host, device, level, writes_host)
    raise _refused(limits, host, device, runs, unit)


def _not_a_list(limits: Limits, name: str, ids: object) -> ValueError:
    """Why `ids` are no list of ids."""
    pool = limits.pool
    if not isinstance(ids, torch.Tensor):
        return wrong(pool, name, "a tensor", type(ids).__name__, "wrap them in torch.tensor")
    if ids.layout is not DENSE:
        return wrong(pool, name, "a dense tensor", ids.layout, "use to_dense()")
    if ids.dtype not in _WIDE:
        return wrong(pool, f"{name}: dtype", "int32 or int64", ids.dtype, "use .to(torch.int64)")
    return wrong(pool, name, "one dimension", f"shape {tuple(ids.shape)}", "use reshape(-1)")


def _refused(limits: Limits, host: torch.Tensor, device: torch.Tensor, found: int, unit: str) -> ValueError:
    """Why whole pages are refused, as the check tells it."""
    per_page = limits.page_size if unit == "token" else 1
    here, there = ([i // per_page for i in ids.tolist()[::per_page]] for ids in (host, device))
    word = "ids" if per_page == 1 else "pages"
    if found == native.HOST_OUTSIDE:
        return _out_of_range(limits, f"host {word}", here, limits.host_pages, unit)
    if found == native.DEVICE_OUTSIDE:
        return _out_of_range(limits, f"device {word}", there, limits.device_pages, unit)
    if found == native.RESERVED:
        return _reserved(limits, there)
    if found == native.HOST_IDLE:
        return _idle(limits, here)
    if found == native.HOST_TWICE:
        return _twice(limits, "host ids", "page", here)
    return _twice(limits, "device ids", "page", there)


def _out_of_range(limits: Limits, name: str, ids: Sequence[int], end: int, unit: str) -> ValueError:
    got = next(i for i in ids if i < 0 or i >= end)
    step = "pass what alloc returned" if name.startswith("host") else "pass rows of the bound tensors"
    step += f", divided by {limits.page_size}" if unit == "page" and limits.page_size > 1 else ""
    return wrong(limits.pool, name, f"0 to {end - 1}", got, step)


def _twice(limits: Limits, name: str, unit: str, ids: Sequence[int]) -> ValueError:
    seen: set[int] = set()
    twice = next(i for i in ids if i in seen or seen.add(i))  # type: ignore[func-returns-value]
    what = f"{limits.pool}: {name}: {unit} {twice} stands twice in one list"
    return ValueError(f"{what}; a destination may be written once: leave one out")


def _idle(limits: Limits, pages: Iterable[int]) -> ValueError:
    assert limits.slots is not None
    page = limits.slots.idle(pages)
    return ValueError(f"{limits.pool}: host page {page} is not allocated; pass what alloc returned")


def _reserved(limits: Limits, pages: Collection[int]) -> ValueError:
    page = next(page for page in limits.reserved if page in pages)
    return ValueError(f"{limits.pool}: device ids: {page} is reserved and is never moved; leave it out")


def _token_batch(
    limits: Limits, host: torch.Tensor, device: torch.Tensor, level: str, writes_host: bool
) -> Batch:
    """Tokens of pages that are not whole or not in order, on either side."""
    state = f"{limits.pool}: the tokens of a page are scattered or out of order"
    if not limits.tokens:
        raise ValueError(f"{state}, and a component of this pool has no token axis; hand over whole pages")
    if level == "full":
        step = "hand over whole pages, or leave it 'cheap'"
        raise ValueError(f"{state}, which validate='full' refuses; {step}")
    here = _token_numbers(limits, "host ids", host, limits.host_pages * limits.page_size)
    there = _token_numbers(limits, "device ids", device, limits.device_pages * limits.page_size)
    device_pages = _pages_of(device, limits.page_size)
    if not device_pages.isdisjoint(limits.reserved):
        raise _reserved(limits, device_pages)
    if level != "off":
        name, written = ("host ids", host) if writes_host else ("device ids", device)
        if torch.unique(written).numel() != written.numel():
            raise _twice(limits, name, "token", written.tolist())
    pages, slots = _pages_of(host, limits.page_size), limits.slots
    if level != "off" and slots is not None and slots.in_use and slots.idle(pages) is not None:
        raise _idle(limits, pages)
    return Batch("tokens", here + there, len(here), 0, pages, device_pages)


def _token_numbers(limits: Limits, name: str, ids: torch.Tensor, end: int) -> array[int]:
    """The ids of a list that is not empty as 32-bit numbers. Raises ValueError for one out of range."""
    low, high = ids.aminmax()
    if int(low) < 0 or int(high) >= end:
        raise _out_of_range(limits, name, ids.tolist(), end, "token")
    words = ids.to(torch.int32).contiguous()
    return array("I", ctypes.string_at(words.data_ptr(), 4 * words.numel()))


def _pages_of(ids: torch.Tensor, page_size: int) -> set[int]:
    pages = torch.unique_consecutive(ids.div(page_size, rounding_mode="floor"))
    return set(pages.tolist())


def _device_batch(
    limits: Limits, host: torch.Tensor, device: torch.Tensor, count: int, asked: int, level: str
) -> Batch:
    """Ids on the device are never copied back: the kernel reads them in place."""
    per_page = limits.page_size if asked & BY_TOKEN else 1
    ids, check, here = _NONE * count, limits.pages, host.contiguous()
    runs = check.runs(here.data_ptr(), 0, count, asked & ~DEVICE_ONCE, ids)
    if runs == native.NOT_WHOLE:
        raise ValueError(
            f"{limits.pool}: host ids: with device ids on {device.device}, the tokens of each host page must "
            f"stand together and in order; order them so, or keep both lists on the CPU"
        )
    if runs < 0:
        raise _refused(limits, host, host, runs, "token" if per_page > 1 else "page")
    named = "tokens" if per_page > 1 and limits.tokens else "pages"
    if level != "full":
        return Batch(named, ids, count, runs, on_device=_numbers(limits, device, per_page))
    clean, skipped = _cleaned(limits, device, per_page)

    def bad() -> Sequence[int]:
        return [page for page, skip in zip(ids, skipped.tolist(), strict=True) if skip]

    return Batch(named, ids, count, runs, on_device=_numbers(limits, clean, per_page), bad=bad)


def _numbers(limits: Limits, ids: torch.Tensor, per_page: int) -> torch.Tensor:
    """Ids on the device as kernels read them: tokens as they are; the pages of whole ones where a component
    of the pool has no token axis."""
    if per_page == 1:
        return _words(ids)
    if limits.tokens:
        return ids
    return _words(ids[::per_page].div(per_page, rounding_mode="floor"))


def _words(ids: torch.Tensor) -> torch.Tensor:
    """Page ids as the 32-bit numbers that kernels read; -1 (skipped) for one that no 32 bits hold."""
    if ids.dtype == torch.int32:
        return ids.contiguous()
    halves = ids.contiguous().view(torch.int32).view(-1, 2)
    return torch.where(halves[:, 1] == 0, halves[:, 0], -1)


def _cleaned(limits: Limits, device: torch.Tensor, per_page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with -1 (skipped by kernels) for every page that is out of range or not whole; which those are."""
    ids = device.to(torch.int64).reshape(-1, per_page)
    first = ids[:, :1]
    steps = torch.arange(per_page, device=device.device)
    bad = (ids != first + steps).any(1) | (first[:, 0] % per_page != 0)
    bad |= (ids < 0).any(1) | (ids >= limits.device_pages * per_page).any(1)
    for page in limits.reserved:
        bad |= first[:, 0] == page * per_page
    return torch.where(bad[:, None], -1, ids).reshape(-1), bad
