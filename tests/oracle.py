"""What bytes a pool has, said by torch alone: components permuted, concatenated, padded.

In: parts with extents, itemsizes and alignments, and an order of axis names. Out: where each byte of each
part lies. Imports nothing of the code under test, and knows no strides: a part is permuted and laid end
to end, and its bytes are then looked for in the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

OUTER = ("page", "token", "layer")


@dataclass(frozen=True)
class Part:
    """A component or a record's row. `axes`: extents by name; `sizes`: what the extents are called.

    Two axes of one name are the same axis only if their sizes are called the same.
    """

    name: str
    axes: Mapping[str, int]
    sizes: Mapping[str, str]
    itemsize: int
    align: int
    present: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents, and the bytes of one item."""
        return (*self.axes.values(), self.itemsize)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) if self.present else 0

    def only(self, names: Sequence[str]) -> Part:
        """The part with some of its axes."""
        return replace(self, axes={a: n for a, n in self.axes.items() if a in names})


@dataclass(frozen=True)
class Padding:
    """Bytes after one index of an axis: up to a multiple of `align`, then `extra` more."""

    align: int
    extra: int


@dataclass(frozen=True)
class Record:
    """Parts side by side in one row, whose bytes are rounded up to a multiple of `pad_to`."""

    name: str
    members: tuple[Part, ...]
    inner: tuple[str, ...]
    pad_to: int


@dataclass(frozen=True)
class Placed:
    """Bytes in all, and by part the offset of each of its bytes: axes of the part, then bytes of an item."""

    nbytes: int
    offsets: Mapping[str, torch.Tensor]


def size(text: str, values: Mapping[str, int]) -> int:
    """The value of an expression of a test's own making."""
    names = {"ceil_div": lambda a, b: -(-a // b), "min": min, "max": max}
    return int(eval(text, {"__builtins__": {}}, {**names, **values}))


def words(order: Sequence[str], part: Part, splits: Mapping[str, Sequence[str]]) -> list[str]:
    """The order as axes of one part: split dims by their pieces, `element` as the dims not named."""
    split = [piece for word in order for piece in splits.get(word, (word,))]
    rest = [axis for axis in part.axes if axis not in OUTER and axis not in split]
    found = [axis for word in split for axis in (rest if word in ("element", "inner") else [word])]
    return [axis for axis in found if axis == "component" or axis in part.axes]


def left_of_component(order: Sequence[str], part: Part, splits: Mapping[str, Sequence[str]]) -> list[str]:
    found = words(order, part, splits)
    return found[: found.index("component")] if "component" in found else []


def differing_axis(
    order: Sequence[str], parts: Sequence[Part], splits: Mapping[str, Sequence[str]]
) -> str | None:
    """An axis left of `component` that is not the same for all parts: they cannot stand side by side."""
    first = left_of_component(order, parts[0], splits)
    for part in parts[1:]:
        left = left_of_component(order, part, splits)
        for axis in (*first, *left):
            if axis not in left or axis not in first or part.sizes[axis] != parts[0].sizes[axis]:
                return axis
    return None


def arrange(
    parts: Sequence[Part],
    tensors: Mapping[str, torch.Tensor],
    order: Sequence[str],
    splits: Mapping[str, Sequence[str]],
    padding: Mapping[str, Padding],
) -> torch.Tensor:
    """One flat tensor of all parts in this order; -1 where nothing lies."""
    blocks = []
    left: list[str] = []
    for part in parts:
        axes = words(order, part, splits)
        at = axes.index("component") if "component" in axes else 0
        left, right = axes[:at], [axis for axis in axes[at:] if axis != "component"]
        tensor = tensors[part.name].permute([list(part.axes).index(a) for a in (*left, *right)] + [-1])
        block = _flatten(tensor, right, padding)
        blocks.append(block if part.present else block[..., :0])
    row = _side_by_side(blocks, [1 if _leaves_no_trace(part) else part.align for part in parts])
    return _flatten(row, left, padding)


def _leaves_no_trace(part: Part) -> bool:
    """A part that is not there, or whose element is empty, aligns nothing."""
    return not part.present or any(not n for axis, n in part.axes.items() if axis not in OUTER)


def _flatten(tensor: torch.Tensor, axes: Sequence[str], padding: Mapping[str, Padding]) -> torch.Tensor:
    """The tensor with its last axes, named outermost first, and its bytes as one axis."""
    for axis in reversed(axes):
        if axis in padding:
            rule = padding[axis]
            tensor = _pad(tensor, -(-tensor.shape[-1] // rule.align) * rule.align + rule.extra)
        *lead, extent, inner = tensor.shape
        tensor = tensor.reshape(*lead, extent * inner)
    return tensor


def _side_by_side(blocks: Sequence[torch.Tensor], aligns: Sequence[int]) -> torch.Tensor:
    row = blocks[0]
    for block, align in zip(blocks[1:], aligns[1:], strict=True):
        row = torch.cat([_pad(row, -(-row.shape[-1] // align) * align), block], dim=-1)
    largest = max(aligns)
    return _pad(row, -(-row.shape[-1] // largest) * largest) if len(blocks) > 1 else row


def _pad(tensor: torch.Tensor, length: int) -> torch.Tensor:
    empty = torch.full((*tensor.shape[:-1], length - tensor.shape[-1]), -1, dtype=tensor.dtype)
    return torch.cat([tensor, empty], dim=-1)


def place(
    parts: Sequence[Part],
    order: Sequence[str],
    splits: Mapping[str, Sequence[str]],
    padding: Mapping[str, Padding] | None = None,
) -> Placed:
    """Where each byte of each part lies when the parts stand in this order."""
    numbered, first = {}, 0
    for part in parts:
        count = math.prod(part.shape)
        numbered[part.name] = torch.arange(first, first + count).reshape(part.shape)
        first += count
    flat = arrange(parts, numbered, order, splits, padding or {})
    there = torch.nonzero(flat >= 0).flatten()
    at = torch.full((first,), -1)
    at[flat[there]] = there
    return Placed(flat.numel(), {name: at[number] for name, number in numbered.items()})


def row_of(record: Record, splits: Mapping[str, Sequence[str]]) -> tuple[int, Placed]:
    """Bytes of a record's padded row, and where its members lie in it."""
    inside = [m.only([axis for axis in m.axes if axis not in OUTER]) for m in record.members]
    placed = place(inside, record.inner, splits)
    return -(-placed.nbytes // record.pad_to) * record.pad_to, placed
