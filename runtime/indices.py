"""Index lists: what a caller hands over becomes a checked `Batch`; the caller's tensors are left alone.

Host ids live on the CPU. Device ids live on the CPU or on the device, int32 or int64. Both lists have one
unit: tokens (whole pages of them) or pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

LEVELS = ("off", "cheap", "full")
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


@dataclass(frozen=True)
class Batch:
    """Checked ids. `unit` ``pages``: both are page ids. ``tokens``: both are token ids. ``mixed``: host
    page ids, and token ids on the device. `pages`: the host pages touched. `bad`: asked when all is done,
    which of them were skipped.
    """

    unit: str
    host: torch.Tensor
    device: torch.Tensor
    pages: torch.Tensor
    bad: Callable[[], Sequence[int]] | None = None

    @property
    def count(self) -> int:
        """How many ids: pages, or tokens."""
        return self.device.numel()


def batch(
    limits: Limits, host: torch.Tensor, device: torch.Tensor, unit: str, level: str, writes_host: bool
) -> Batch:
    """Check both lists and bring them into one unit. Raises ValueError before anything is submitted."""
    if level not in LEVELS:
        raise ValueError(f"{limits.pool}: validate: expected one of {', '.join(LEVELS)}, got {level!r}")
    if unit not in ("token", "page"):
        raise ValueError(f"{limits.pool}: unit: expected token or page, got {unit!r}")
    for name, ids in (("host ids", host), ("device ids", device)):
        _check_tensor(limits, name, ids)
    if host.device.type != "cpu":
        raise ValueError(
            f"{limits.pool}: host ids: expected a CPU tensor, got {host.device}; keep them on the CPU"
        )
    if host.numel() != device.numel():
        raise ValueError(
            f"{limits.pool}: expected as many host ids as device ids, got {host.numel()} and {device.numel()}"
        )
    per_page = limits.page_size if unit == "token" else 1
    if host.numel() % per_page:
        raise ValueError(
            f"{limits.pool}: expected whole pages of {per_page} ids, got {host.numel()} ids; "
            f"pad the last page or leave it out"
        )
    host = host.to(torch.int64)
    _check_range(limits, "host ids", host, limits.host_pages * per_page)
    if device.device.type != "cpu":
        return _device_batch(limits, host, device, per_page, level, writes_host)
    device = device.to(torch.int64)
    _check_range(limits, "device ids", device, limits.device_pages * per_page)
    made = _cpu_batch(limits, host, device, per_page)
    if level != "off":
        name, ids = ("host ids", made.host) if writes_host else ("device ids", made.device)
        _check_duplicates(limits, name, ids, made.unit)
    if limits.reserved:
        _check_reserved(limits, device // per_page)
    return made


def _check_tensor(limits: Limits, name: str, ids: torch.Tensor) -> None:
    if not isinstance(ids, torch.Tensor):
        raise ValueError(f"{limits.pool}: {name}: expected a tensor, got {type(ids).__name__}")
    if ids.dtype not in _INTEGERS:
        raise ValueError(f"{limits.pool}: {name}: dtype: expected int32 or int64, got {ids.dtype}")
    if ids.dim() != 1:
        raise ValueError(f"{limits.pool}: {name}: expected one dimension, got shape {tuple(ids.shape)}")


def _check_range(limits: Limits, name: str, ids: torch.Tensor, end: int) -> None:
    if ids.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0 or high >= end:
        raise ValueError(f"{limits.pool}: {name}: expected 0 to {end - 1}, got {low if low < 0 else high}")


def _check_duplicates(limits: Limits, name: str, ids: torch.Tensor, unit: str) -> None:
    ordered = ids.sort().values
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.numel():
        raise ValueError(
            f"{limits.pool}: {name}: {unit.removesuffix('s')} {int(twice[0])} stands twice in one list; "
            f"a destination may be written once"
        )


def _check_reserved(limits: Limits, pages: torch.Tensor) -> None:
    for page in limits.reserved:
        if bool((pages == page).any()):
            raise ValueError(f"{limits.pool}: device ids: {page} is reserved and is never moved")


def _whole_pages(ids: torch.Tensor, page_size: int) -> torch.Tensor | None:
    """Page ids when every page's tokens stand together and in order, else None."""
    rows = ids.view(-1, page_size)
    first = rows[:, 0]
    if bool((first % page_size != 0).any()):
        return None
    if not torch.equal(rows, first[:, None] + torch.arange(page_size)):
        return None
    return first // page_size


def _cpu_batch(limits: Limits, host: torch.Tensor, device: torch.Tensor, per_page: int) -> Batch:
    if per_page == 1:
        return Batch("pages", host, device, host)
    host_pages, device_pages = _whole_pages(host, per_page), _whole_pages(device, per_page)
    if host_pages is not None and device_pages is not None:
        return Batch("pages", host_pages, device_pages, host_pages)
    _need_tokens(limits)
    return Batch("tokens", host, device, torch.unique(host // per_page))


def _need_tokens(limits: Limits) -> None:
    if not limits.tokens:
        raise ValueError(
            f"{limits.pool}: the tokens of a page are scattered or out of order, and a component of this "
            f"pool has no token axis; hand over whole pages"
        )


def _device_batch(
    limits: Limits, host: torch.Tensor, device: torch.Tensor, per_page: int, level: str, writes_host: bool
) -> Batch:
    """Ids on the device are never copied back: the kernel reads them in place."""
    pages = host if per_page == 1 else _whole_pages(host, per_page)
    if pages is None:
        raise ValueError(
            f"{limits.pool}: host ids: with device ids on {device.device}, the tokens of each host page must "
            f"stand together and in order"
        )
    _need_tokens(limits)
    if level != "off" and writes_host:
        _check_duplicates(limits, "host ids", pages, "pages")
    return Batch("mixed", pages, device, pages)
