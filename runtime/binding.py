"""Binds an engine's tensors to a pool: shapes, dtypes, strides and devices checked, addresses taken.

In: tensors by component (a list over layers, or one tensor). Out: `Binding`: the table of addresses and
the strides that kernels take, the torch views that the last-resort path takes.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from poolwright.runtime.description import DevicePart, PoolSpec


@dataclass(frozen=True)
class Binding:
    """Bound tensors. `views[ident]`: one tensor's bytes for each table entry; axes of the part, then byte."""

    tensors: tuple[torch.Tensor, ...]
    table: tuple[int, ...]
    strides: tuple[int, ...]
    pages: int
    align: int
    views: Mapping[str, tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Expected:
    """What a tensor must be: (axis, extent or None, bytes a step or None), outermost first."""

    name: str
    axes: tuple[tuple[str, int | None, int | None], ...]
    dtype: torch.dtype


def match(pool: str, expected: Expected, tensor: torch.Tensor) -> tuple[int, dict[str, int]]:
    """Pages that the tensor holds, and bytes a step of every axis.

    Neighbouring axes may be merged, axes of extent 1 may be there or not, there may be more rows than
    pages need. Raises ValueError naming the dimension, what was expected and what was got.
    """
    if tensor.dtype != expected.dtype:
        raise ValueError(f"{pool}: {expected.name}: dtype: expected {expected.dtype}, got {tensor.dtype}")
    size = tensor.element_size()
    shape = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    dims = [(index, extent, step * size) for index, (extent, step) in shape if extent != 1]
    axes = [axis for axis in expected.axes if axis[1] != 1]
    strides = {name: 0 for name, extent, _ in expected.axes if extent == 1}
    pages = 1
    while axes and dims:
        index, extent, step = dims.pop()
        while axes and extent != 1:
            name, want, packed = axes.pop()
            if packed is not None and packed != step:
                raise ValueError(
                    f"{pool}: {expected.name}: stride of {name} (shape#{index}): expected {packed} bytes, "
                    f"got {step}; this form takes packed rows only"
                )
            strides[name] = step
            if want is None:
                pages, extent = extent, 1
                continue
            rows_left_over = bool(axes) and axes[-1][1] is None  # rows that fill no whole page
            if want == 0 or (extent % want and not rows_left_over):
                raise _shape(pool, expected, tensor)
            extent, step = extent // want, step * want
            if extent == 0:
                axes.pop()
                pages, strides["page"], extent = 0, step, 1
        if extent != 1:
            raise _shape(pool, expected, tensor)
    if dims or any(want is not None for _, want, _ in axes):
        raise _shape(pool, expected, tensor)
    strides |= {name: packed or 0 for name, _, packed in axes}
    return pages, strides


def _shape(pool: str, expected: Expected, tensor: torch.Tensor) -> ValueError:
    want = ", ".join(f"{name}={'any' if extent is None else extent}" for name, extent, _ in expected.axes)
    return ValueError(
        f"{pool}: {expected.name}: shape: expected [{want}] (neighbours may be merged), "
        f"got {tuple(tensor.shape)}"
    )


def alignment(values: Sequence[int]) -> int:
    """Largest power of two up to 16 that divides all values."""
    return math.gcd(16, *values)


def claim(spec: PoolSpec, names: Sequence[str], given: Mapping[str, object]) -> None:
    """Every tensor is a component's or named in `not_carried`, and no component is missing."""
    for name in given:
        if name not in names and not any(fnmatch.fnmatchcase(name, p) for p in spec.not_carried):
            known = ", ".join(names)
            parts = [other for other in names if other.startswith(f"{name}[")]
            if parts:
                raise ValueError(f"{spec.name}: component {name!r} is repeated: bind {', '.join(parts)}")
            raise ValueError(
                f"{spec.name}: tensor {name!r} belongs to no component ({known}); name it in not_carried of "
                f"{spec.source} if it must not be kept"
            )
    for name in names:
        if name not in given:
            raise ValueError(
                f"{spec.name}: no tensor for component {name!r}, got {', '.join(given) or 'none'}"
            )


def layer_tensors(
    pool: str, name: str, given: object, wanted: Sequence[int], ids: Sequence[int]
) -> list[torch.Tensor]:
    """One tensor for each wanted layer id. `given`: a sequence in the order of `ids`, or a mapping by id."""
    if isinstance(given, Mapping):
        by_id = dict(given)
    elif isinstance(given, Sequence) or isinstance(given, torch.Tensor):
        rows = list(given)
        if len(rows) != len(ids):
            raise ValueError(f"{pool}: {name}: expected {len(ids)} layers, got {len(rows)}")
        if len(set(ids)) != len(ids):
            raise ValueError(f"{pool}: layer_ids must differ, got {list(ids)}")
        by_id = dict(zip(ids, rows, strict=True))
    else:
        raise ValueError(f"{pool}: {name}: expected one tensor a layer, got {type(given).__name__}")
    missing = [layer for layer in wanted if layer not in by_id]
    if missing:
        raise ValueError(f"{pool}: {name}: no tensor for layer {missing[0]}, got layers {list(by_id)}")
    for layer in wanted:
        if not isinstance(by_id[layer], torch.Tensor):
            got = type(by_id[layer]).__name__
            raise ValueError(f"{pool}: {name}: layer {layer}: expected a tensor, got {got}")
    return [by_id[layer] for layer in wanted]


@dataclass(frozen=True)
class Bound:
    """One component bound: addresses for the table, dynamic strides in order, pages, views."""

    addresses: tuple[int, ...]
    strides: tuple[int, ...]
    pages: int
    views: tuple[torch.Tensor, ...]


def bind_part(
    pool: str,
    name: str,
    part: DevicePart,
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype,
    first_row: int,
) -> Bound:
    """Check and bind the tensors of one component (one for each entry of its table)."""
    expected = Expected(name, part.axes, dtype)
    if first_row:
        tensors = [_from_row(pool, expected, tensor, first_row) for tensor in tensors]
    found = [match(pool, expected, tensor) for tensor in tensors]
    pages = min((count for count, _ in found), default=0)
    steps = found[0][1] if found else {axis: 0 for axis, _, _ in part.axes}
    for at, (_, other) in enumerate(found):
        for axis, _, packed in part.axes:
            if packed is None and other[axis] != steps[axis]:
                raise ValueError(
                    f"{pool}: {name}: stride of {axis}: tensor {at} has {other[axis]} bytes, tensor 0 "
                    f"{steps[axis]}; all layers need one stride"
                )
    if found and pages < 1:
        raise ValueError(
            f"{pool}: {name}: rows: expected at least one whole page, got shape {tuple(tensors[0].shape)}"
        )
    _check_apart(pool, name, part, tensors, steps, pages)
    return Bound(
        addresses=tuple(t.data_ptr() for t in tensors),
        strides=tuple(steps[axis] for axis, _, packed in part.axes if packed is None),
        pages=pages,
        views=tuple(_as_axes(t, part, pages, steps) for t in tensors),
    )


def _check_apart(
    pool: str,
    name: str,
    part: DevicePart,
    tensors: Sequence[torch.Tensor],
    steps: Mapping[str, int],
    pages: int,
) -> None:
    """No byte may belong to two rows or two layers: a load would overwrite what it has just written."""
    extents = {axis: pages if extent is None else extent for axis, extent, _ in part.axes}
    span = tensors[0].element_size() if tensors else 0
    for axis in sorted((a for a in extents if extents[a] > 1), key=lambda a: steps[a]):
        if steps[axis] < span:
            raise ValueError(
                f"{pool}: {name}: stride of {axis}: rows overlap: expected at least {span} bytes, "
                f"got {steps[axis]}"
            )
        span += steps[axis] * (extents[axis] - 1)
    starts = [tensor.data_ptr() for tensor in tensors]
    if len(set(starts)) != len(starts):
        raise ValueError(f"{pool}: {name}: two layers have the same memory; each needs rows of its own")


def _from_row(pool: str, expected: Expected, tensor: torch.Tensor, first_row: int) -> torch.Tensor:
    """The tensor without the rows in front of page 0: rows of the dimension that holds its pages."""
    _, steps = match(pool, expected, tensor)
    size = tensor.element_size()
    merged = steps.get("token", 0) // size  # a dimension of tokens holds the pages when it steps by them
    wanted = [merged, steps["page"] // size]
    at = next((d for w in wanted for d, s in enumerate(tensor.stride()) if s == w and tensor.shape[d] > 1), 0)
    whole = next((extent for axis, extent, _ in expected.axes if axis == "token" and extent), 1)
    if tensor.stride(at) == merged and tensor.shape[at] > whole:
        return tensor.narrow(at, first_row, tensor.shape[at] - first_row)
    at = next((d for d, s in enumerate(tensor.stride()) if s == steps["page"] // size), at)
    return tensor.narrow(at, first_row, tensor.shape[at] - first_row)


def _as_axes(tensor: torch.Tensor, part: DevicePart, pages: int, steps: Mapping[str, int]) -> torch.Tensor:
    """The tensor's bytes seen with exactly the axes of the part, and the bytes of one item last."""
    size = tensor.element_size()
    shape = [pages if extent is None else extent for _, extent, _ in part.axes]
    strides = [steps[axis] for axis, _, _ in part.axes]
    seen = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    offset = tensor.storage_offset() * size
    return seen.set_(tensor.untyped_storage(), offset, [*shape, size], [*strides, 1])
