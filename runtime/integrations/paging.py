"""Rows of tokens to paged device tensors and back: the tail padded, axes put into a form's order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Paging:
    """How sequences lie in pages: `sequences` of `tokens` tokens each, every one in pages of its own."""

    sequences: int
    tokens: int
    page_size: int

    @property
    def pages_each(self) -> int:
        """Pages of one sequence; the last one may be partly filled."""
        return math.ceil(self.tokens / self.page_size)

    @property
    def pages(self) -> int:
        """Pages of all sequences."""
        return self.sequences * self.pages_each

    @property
    def tail(self) -> int:
        """Valid tokens of a sequence's last page: 1 to `page_size`."""
        return self.tokens - (self.pages_each - 1) * self.page_size

    def token_ids(self, table: torch.Tensor) -> torch.Tensor:
        """Ids of every token, padding included, of the pages in `table` (int64, one dimension)."""
        return (table[:, None] * self.page_size + torch.arange(self.page_size)).reshape(-1)

    def table(self, order: Sequence[int] | None) -> torch.Tensor:
        """Device page of each page in turn. `order`: a permutation of all pages (default: as they come).

        Raises ValueError for anything else.
        """
        found = list(range(self.pages) if order is None else order)
        if sorted(found) != list(range(self.pages)):
            raise ValueError(f"page order: expected each of 0 to {self.pages - 1} once, got {found}")
        return torch.tensor(found, dtype=torch.int64)


@dataclass(frozen=True)
class Axes:
    """A component's element `dims` as declared, and the `order` of all axes of its device tensors."""

    dims: tuple[str, ...]
    order: tuple[str, ...]

    @property
    def rows_first(self) -> list[int]:
        """Where page, token and each of `dims` stand in `order`."""
        return [self.order.index(axis) for axis in ("page", "token", *self.dims)]

    @property
    def in_order(self) -> list[int]:
        """Where each axis of `order` stands in page, token, `dims`."""
        return [("page", "token", *self.dims).index(axis) for axis in self.order]


def to_pages(rows: torch.Tensor, paging: Paging, table: torch.Tensor, axes: Axes) -> torch.Tensor:
    """A paged tensor of its own, packed in the order `axes`; the tail of each sequence is padded with zeros.

    `rows`: [sequence, token, element dims as declared]. `table`: which page of the tensor each page becomes.
    """
    dims = rows.shape[2:]
    padded = rows.new_zeros(paging.sequences, paging.pages_each * paging.page_size, *dims)
    padded[:, : paging.tokens] = rows
    pages = padded.reshape(paging.pages, paging.page_size, *dims)
    placed = torch.empty_like(pages)
    placed[table.to(placed.device)] = pages
    return placed.permute(axes.in_order).contiguous()


def from_pages(tensor: torch.Tensor, paging: Paging, table: torch.Tensor, axes: Axes) -> torch.Tensor:
    """What `to_pages` was given, as a new tensor: the valid rows only."""
    pages = tensor.permute(axes.rows_first)[table.to(tensor.device)]
    rows = pages.reshape(paging.sequences, paging.pages_each * paging.page_size, *pages.shape[2:])
    return rows[:, : paging.tokens]


def poison(tensor: torch.Tensor) -> int:
    """Overwrite every byte of the tensor's elements with 0xFF (NaN in float dtypes); returns how many."""
    pattern = torch.full((tensor.element_size(),), 0xFF, dtype=torch.uint8, device=tensor.device)
    tensor.copy_(pattern.view(tensor.dtype).expand_as(tensor))
    return tensor.numel() * tensor.element_size()
