"""Rows of sequences in pages of device tensors in a pool's form: tails padded, pages where a table says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from poolwright.runtime.description import Component
from poolwright.runtime.pool import HostPool


@dataclass(frozen=True)
class Paging:
    """How sequences lie in pages: `sequences` of `rows` rows each, every one in pages of its own.

    `least`: pages of a sequence at the least, where pages belong to tokens and the last have no row yet.
    """

    sequences: int
    rows: int
    page_size: int
    least: int = 1

    @property
    def pages_each(self) -> int:
        """Pages of one sequence; the last ones may be partly filled, or not at all."""
        return max(self.least, math.ceil(self.rows / self.page_size))

    @property
    def pages(self) -> int:
        """Pages of all sequences."""
        return self.sequences * self.pages_each

    @property
    def tail(self) -> int:
        """Valid rows of a sequence's last page that has any: 1 to `page_size`."""
        return (self.rows - 1) % self.page_size + 1

    def paged(self, rows: torch.Tensor) -> torch.Tensor:
        """[page, row, ...] of [sequence, row, ...]; the tail of each sequence is padded with zeros."""
        padded = rows.new_zeros(self.sequences, self.pages_each * self.page_size, *rows.shape[2:])
        padded[:, : self.rows] = rows
        return padded.reshape(self.pages, self.page_size, *rows.shape[2:])

    def unpaged(self, pages: torch.Tensor) -> torch.Tensor:
        """The valid rows [sequence, row, ...] of what `paged` made."""
        rows = pages.reshape(self.sequences, self.pages_each * self.page_size, *pages.shape[2:])
        return rows[:, : self.rows]

    def table(self, pages: Sequence[int], order: Sequence[int] | None) -> torch.Tensor:
        """Device page (int64) of each page in turn: those of `pages` in `order` (default: as they come).

        Raises ValueError for anything but a permutation.
        """
        found = list(range(self.pages) if order is None else order)
        if sorted(found) != list(range(self.pages)):
            raise ValueError(f"page order: expected each of 0 to {self.pages - 1} once, got {found}")
        return torch.tensor([pages[place] for place in found], dtype=torch.int64)


class DeviceTensors:
    """Device tensors for a pool, zeros, in its form; seen page by page whatever the form is.

    `bound`: what `HostPool.bind` takes. `pages`: ids of device pages that may be moved. `parts`: components
    that are there, `extents` of their element dims.
    """

    def __init__(self, pool: HostPool, pages: int, row_axis: str) -> None:
        spec, sizes = pool.spec, pool.sizes
        form = spec.forms[pool.form]
        if form.base is not None or spec.records or "component" in form.order:
            raise ValueError(f"{spec.name}: form {pool.form} cannot be staged; take one of plain components")
        taken = [page for page in range(pages + len(spec.reserved)) if page not in spec.reserved]
        self.pages, self.row_axis = tuple(taken[:pages]), row_axis
        self.parts = {c.name: c for c in spec.components if pool.program.present(c.ident)}
        self._orders = {n: _expanded(form.order, part, spec.splits) for n, part in self.parts.items()}
        self._layers = "layer" in form.tensors
        # One row more than is moved, as engines have for the writes of padded tokens.
        extents = {"page": max(self.pages) + 2, "token": pool.page_size, "layer": len(pool.layers)}
        self.extents: dict[str, dict[str, int]] = {}
        self.bound: dict[str, list[torch.Tensor] | torch.Tensor] = {}
        for name, part in self.parts.items():
            self.extents[name] = {dim: sizes[f"extent_{part.ident}_{dim}"] for dim in part.dims}
            known = extents | self.extents[name]
            shape = [math.prod(known[piece] for piece in axis.split()) for axis in self._orders[name]]
            dtype = pool.program.dtype(pool.dtypes, part.ident)
            made = [
                torch.zeros(shape, dtype=dtype, device=pool.device)
                for _ in range(len(pool.layers) if self._layers else 1)
            ]
            self.bound[name] = made if self._layers else made[0]

    def pages_of(self, name: str, at: int) -> torch.Tensor:
        """A view [page, row, `dims`] of a component's layer `at` in turn."""
        bound, order = self.bound[name], self._orders[name]
        tensor, axes = (bound[at], order) if self._layers else (bound, order)
        assert isinstance(tensor, torch.Tensor)
        if "layer" in order:
            tensor, axes = tensor.select(order.index("layer"), at), tuple(a for a in order if a != "layer")
        return in_order(tensor, axes, ("page", self.row_axis, *self.dims(name)), self.extents[name])

    def dims(self, name: str) -> tuple[str, ...]:
        """The element dims of one row of a component, as declared."""
        return tuple(dim for dim in self.parts[name].dims if dim != self.row_axis)

    def all(self) -> list[torch.Tensor]:
        """Every tensor."""
        return [t for bound in self.bound.values() for t in (bound if isinstance(bound, list) else [bound])]


def in_order(
    tensor: torch.Tensor, axes: Sequence[str], wanted: Sequence[str], extents: Mapping[str, int]
) -> torch.Tensor:
    """A view of the tensor with its `axes` as `wanted`; axes that one side lacks have extent 1.

    An axis ``"a b"`` is two of them in one, inner extents from `extents`. Raises ValueError for
    other numbers of axes, an axis that does not split and one that is not wanted and not of extent 1.
    """
    if tensor.dim() != len(axes):
        raise ValueError(f"expected axes [{', '.join(axes)}], got shape {tuple(tensor.shape)}")
    left: list[str] = []
    for axis in axes:
        place, names = len(left), axis.split()
        inner = [extents[name] for name in names[1:]]
        if inner:
            if tensor.shape[place] % math.prod(inner):
                raise ValueError(f"{axis}: {tensor.shape[place]} is no multiple of {math.prod(inner)}")
            tensor = torch.unflatten(tensor, place, (-1, *inner))
        elif axis not in wanted:
            if tensor.shape[place] != 1:
                raise ValueError(f"{axis}: expected extent 1, got {tensor.shape[place]}")
            tensor, names = tensor.select(place, 0), []
        left += names
    view = tensor.permute([left.index(axis) for axis in wanted if axis in left])
    for place, axis in enumerate(wanted):
        if axis not in left:
            view = view.unsqueeze(place)
    return view


def box(rows: torch.Tensor, dims: Sequence[str], at: Mapping[str, int], shape: Sequence[int]) -> torch.Tensor:
    """The part of [sequence, row, dims] that starts at `at` and has `shape`. Raises ValueError outside."""
    for place, (dim, extent) in enumerate(zip(dims, shape, strict=True), start=2):
        first = at.get(dim, 0)
        if first + extent > rows.shape[place]:
            raise ValueError(f"{dim}: {first} to {first + extent - 1} is outside of {rows.shape[place]}")
        rows = rows.narrow(place, first, extent)
    return rows


def poison(tensor: torch.Tensor) -> int:
    """Overwrite every byte of the tensor's elements with 0xFF (NaN in float dtypes); returns how many."""
    pattern = torch.full((tensor.element_size(),), 0xFF, dtype=torch.uint8, device=tensor.device)
    with torch.inference_mode():  # what was made in this mode may not be changed outside of it
        tensor.copy_(pattern.view(tensor.dtype).expand_as(tensor))
    return tensor.numel() * tensor.element_size()


def _expanded(order: Sequence[str], part: Component, splits: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The axes of a component's tensors: ``element`` spelled out, what is split as ``"a b"``."""
    merged = {axis: " ".join(splits.get(axis, (axis,))) for axis in order}
    named = {piece for axis in merged.values() for piece in axis.split()}
    rest = tuple(dim for dim in part.dims if dim not in named)
    return tuple(axis for name in order for axis in (rest if name == "element" else (merged[name],)))
