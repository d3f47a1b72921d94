"""Ids of operations: tokens and pages, and the lists of several operations as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from poolwright.runtime import arguments
from poolwright.runtime.controller.book import Queued
from poolwright.runtime.controller.operation import Ids, Operation


def listed(name: str, call: str, ids: torch.Tensor) -> torch.Tensor:
    """The ids. Raises ValueError for what is no list of ids."""
    known = isinstance(ids, torch.Tensor) and ids.dtype in (torch.int32, torch.int64)
    if not known or ids.dim() != 1 or ids.layout is not torch.strided or ids.is_meta:
        expected = "a dense tensor of ids, int32 or int64 [n]"
        step = "take those of one pool" if isinstance(ids, Mapping) else "wrap them in torch.tensor"
        raise arguments.refusal(name, call, expected, ids, step)
    return ids


def pages_of(tokens: torch.Tensor, page_size: int) -> set[int]:
    """The pages that token ids lie in."""
    pages = tokens.div(page_size, rounding_mode="floor")
    return set(torch.unique_consecutive(pages).tolist())


def tokens_of(unit: str, page_size: int) -> int:
    """Tokens of one id."""
    return page_size if unit == "page" else 1


def in_unit(tokens: torch.Tensor, unit: str, page_size: int) -> torch.Tensor:
    """Token ids of whole pages as ids of `unit`."""
    step = tokens_of(unit, page_size)
    return tokens if step == 1 else tokens[::step] // step


def in_tokens(ids: torch.Tensor, unit: str, page_size: int) -> torch.Tensor:
    """Ids of `unit` as token ids."""
    step = tokens_of(unit, page_size)
    return ids if step == 1 else (ids[:, None] * step + torch.arange(step)).flatten()


def together(queue: Sequence[Queued]) -> list[Queued]:
    """The first operations that one submission can take: one unit, ids of each pool in one place."""
    places: dict[str, tuple[bool, torch.device]] = {}
    found: list[Queued] = []
    for queued in queue:
        operation = queued.operation
        here = {name: (device.is_cpu, device.device) for name, (_, device) in operation.ids.items()}
        fits = all(places.get(name, place) == place for name, place in here.items())
        if not fits or operation.unit != queue[0].operation.unit:
            break
        places |= here
        found.append(queued)
    return found


def merged(operations: Sequence[Operation]) -> Mapping[str, Ids]:
    """The ids of all operations, by pool."""
    if len(operations) == 1:
        return operations[0].ids
    lists: dict[str, list[Ids]] = {}
    for operation in operations:
        for name, ids in operation.ids.items():
            lists.setdefault(name, []).append(ids)
    return {
        name: (torch.cat([host for host, _ in found]), torch.cat([device for _, device in found]))
        for name, found in lists.items()
    }
