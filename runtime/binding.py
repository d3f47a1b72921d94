"""Binds an engine's tensors to a pool: shapes, dtypes, strides and devices checked, addresses taken.

In: tensors by component (one for each layer, or one), by the pool's name where components share tensors.
Out: `Binding`: the table of addresses and the strides that kernels take, the torch views that the
last-resort path takes.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from poolwright.runtime import apart
from poolwright.runtime.description import DevicePart, PoolSpec
from poolwright.runtime.program import SizedProgram

NO_TENSORS = (1 << 32) - 1
"""Device pages of a pool that has no bytes: every id is right."""


@dataclass(frozen=True)
class Binding:
    """Bound tensors. `views[ident]`: one tensor's bytes for each table entry; axes of the part, then byte.
    `align`: the largest power of two up to 16 that divides every address and stride; `rows`: the bytes that
    are used."""

    tensors: tuple[torch.Tensor, ...]
    table: tuple[int, ...]
    strides: tuple[int, ...]
    pages: int
    align: int
    views: Mapping[str, tuple[torch.Tensor, ...]]
    rows: tuple[apart.Rows, ...]


def bind(
    program: SizedProgram,
    lists: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
    given: Mapping[str, object],
    layer_ids: Sequence[int] | None,
) -> Binding:
    """Check and bind an engine's tensors. `lists`: layer ids of the pool by list; `layer_ids`: those that
    the tensors are of, None for the component's own. Raises ValueError.
    """
    spec = program.spec
    names = {c.ident: c.name for c in spec.components} | {r.ident: r.name for r in spec.records}
    parts = [part for part in program.device if program.present(part.ident)]
    shared = any(part.shared is not None for part in parts)
    groups = [(spec.name, parts)] if shared else [(names[part.ident], [part]) for part in parts]
    claim(spec, [name for name, _ in groups], given)
    bound: dict[str, Bound] = {}
    kept: list[torch.Tensor] = []
    every: list[apart.Rows] = []
    for name, group in groups:
        wanted = lists.get(program.lists[group[0].ident] or "", ())
        where, ids = f"{spec.name}: {name}", wanted if layer_ids is None else layer_ids
        tensors = _tensors(where, group[0], given[name], wanted, ids)
        _check_device(where, tensors, device)
        if tensors:  # else its layer list is empty
            more, used = _bind_group(program, _expected(program, dtypes, where, group), name, group, tensors)
            kept, every, bound = [*kept, *tensors], [*every, *used], bound | more
    _check_shared(spec.name, every)
    _check_rows(program, names, bound)
    table: list[int] = []
    strides: list[int] = []
    for part in program.device:
        found = bound.get(part.ident)
        dynamic = sum(step is None for _, _, step in part.axes)
        table += found.addresses if found else [0] * (1 if part.table is None else part.table)
        strides += found.strides if found else [0] * dynamic
    bases = [address for one in bound.values() for address in one.addresses]
    return Binding(
        tensors=tuple(kept),
        table=tuple(table),
        strides=tuple(strides),
        pages=min((one.pages for one in bound.values()), default=NO_TENSORS),
        align=math.gcd(16, *bases, *strides),
        views={ident: one.views for ident, one in bound.items()},
        rows=tuple(every),
    )


# ---- what is given ----------------------------------------------------------------------------


def claim(spec: PoolSpec, names: Sequence[str], given: Mapping[str, object]) -> None:
    """Every tensor is a component's or named in `not_carried`, and no component is missing."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{spec.name}: bind: expected tensors by component, got {type(given).__name__}")
    for name, tensors in given.items():
        if name in names or any(fnmatch.fnmatchcase(name, p) for p in spec.not_carried):
            continue
        if any(name == component.name for component in spec.components) and _is_empty(tensors):
            continue  # the engine has it, with no bytes in it
        known = ", ".join(names) or "none"
        parts = [other for other in names if other.startswith(f"{name}[")]
        if parts:
            raise ValueError(f"{spec.name}: component {name!r} is repeated: bind {', '.join(parts)}")
        step = f"name it in not_carried of {spec.source} if it must not be kept"
        raise ValueError(f"{spec.name}: tensor {name!r} belongs to no component ({known}); {step}")
    for name in names:
        if name not in given:
            got = ", ".join(given) or "none"
            raise ValueError(f"{spec.name}: no tensor for component {name!r}, got {got}")


def _is_empty(given: object) -> bool:
    if isinstance(given, torch.Tensor):
        return given.numel() == 0
    values = given.values() if isinstance(given, Mapping) else given
    return isinstance(values, Sequence) and all(map(_is_empty, values))


def _tensors(
    where: str, part: DevicePart, given: object, wanted: Sequence[int], ids: Sequence[int]
) -> list[torch.Tensor]:
    """One tensor for each entry of the part's table.

    Layers may come as a sequence in the order of `ids`, a mapping by id, or stacked in one tensor. A form
    whose layers are an axis also takes tensors of single layers that lie evenly in one storage.
    """
    if part.table is not None:
        return _layer_tensors(where, given, wanted, ids)
    axes = [axis for axis, _, _ in part.axes]
    if isinstance(given, Sequence) and len(given) == 1 and ("layer" not in axes or len(wanted) != 1):
        given = given[0]
    if isinstance(given, torch.Tensor) and ("layer" not in axes or tuple(ids) == tuple(wanted)):
        return [given]
    if axes[0] == "layer" and isinstance(given, Mapping | Sequence | torch.Tensor):
        return [_stacked(where, _layer_tensors(where, given, wanted, ids))]
    if isinstance(given, torch.Tensor):
        expected = f"one tensor holds all layers, so layer_ids must be {list(wanted)}"
        raise ValueError(f"{where}: {expected}, got {list(ids)}")
    raise ValueError(f"{where}: expected one tensor, got {type(given).__name__}")


def _layer_tensors(
    where: str, given: object, wanted: Sequence[int], ids: Sequence[int]
) -> list[torch.Tensor]:
    """One tensor for each wanted layer id."""
    if isinstance(given, Mapping):
        by_id = dict(given)
    elif isinstance(given, Sequence) or (isinstance(given, torch.Tensor) and given.dim()):
        rows = [given] if isinstance(given, torch.Tensor) and len(ids) == 1 else list(given)
        if len(rows) != len(ids):
            hint = "name others than the pool's in layer_ids"
            if isinstance(given, torch.Tensor):
                hint = "one tensor has the layers outermost; give a list where each has its own"
            raise ValueError(f"{where}: expected {len(ids)} layers, got {len(rows)}; {hint}")
        if len(set(ids)) != len(ids):
            raise ValueError(f"{where}: layer_ids must differ, got {list(ids)}")
        by_id = dict(zip(ids, rows, strict=True))
    else:
        raise ValueError(f"{where}: expected one tensor a layer, got {type(given).__name__}")
    missing = [layer for layer in wanted if layer not in by_id]
    if missing:
        raise ValueError(f"{where}: no tensor for layer {missing[0]}, got layers {list(by_id)}")
    for layer in wanted:
        if not isinstance(by_id[layer], torch.Tensor):
            got = type(by_id[layer]).__name__
            raise ValueError(f"{where}: layer {layer}: expected a tensor, got {got}")
    return [by_id[layer] for layer in wanted]


def _stacked(where: str, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The layers as one tensor over the same memory."""
    first = rows[0]
    steps = {after.data_ptr() - before.data_ptr() for before, after in pairwise(rows)}
    one_kind = len({(row.shape, row.stride(), row.dtype, row.device) for row in rows}) == 1
    one_storage = len({row.untyped_storage().data_ptr() for row in rows}) == 1
    step = steps.pop() if steps else 0
    if not one_kind or not one_storage or steps or step < 0 or step % first.element_size():
        raise ValueError(
            f"{where}: this form has one tensor with an axis of layers, got {len(rows)} tensors that "
            f"do not lie one after the other, evenly, in one storage; use a form with a tensor for each layer"
        )
    return first.as_strided((len(rows), *first.shape), (step // first.element_size(), *first.stride()))


def _check_device(where: str, rows: Sequence[torch.Tensor], device: torch.device) -> None:
    for row in rows:
        if row.device.type != device.type or device.index not in (None, row.device.index):
            raise ValueError(f"{where}: device: expected {device}, got {row.device}")
        if row.layout is not torch.strided:
            raise ValueError(f"{where}: expected a dense tensor, got {row.layout}; use to_dense()")


# ---- what is expected -------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What a tensor must be: (axis, extent or None, bytes a step or None), outermost first.

    `dtype` None: bytes, of whatever dtype. `where`: pool and component, for messages.
    """

    where: str
    axes: tuple[tuple[str, int | None, int | None], ...]
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Bound:
    """One component bound: addresses for the table, dynamic strides in order, pages, views."""

    addresses: tuple[int, ...]
    strides: tuple[int, ...]
    pages: int
    views: tuple[torch.Tensor, ...]


def _bind_group(
    program: SizedProgram,
    expected: Expected,
    name: str,
    parts: Sequence[DevicePart],
    tensors: Sequence[torch.Tensor],
) -> tuple[dict[str, Bound], list[apart.Rows]]:
    """Check and bind the tensors of one component, or of all that share them; the bytes that they use."""
    form = program.spec.forms[program.form]
    tokens = program.sizes["page_size"] if "token" in form.order else 1
    found = [_match(expected, t, form.first_row(program.sizes), tokens) for t in tensors]
    pages, steps = min(one.pages for one in found), found[0].strides
    for at, one in enumerate(found):
        for axis, _, packed in expected.axes:
            if packed is None and one.strides[axis] != steps[axis]:
                got = f"tensor {at} has {one.strides[axis]} bytes, tensor 0 {steps[axis]}"
                raise ValueError(f"{expected.where}: stride of {axis}: {got}; all layers need one stride")
    if pages < 1:
        got = f"got shape {tuple(tensors[0].shape)}"
        raise ValueError(f"{expected.where}: rows: expected at least one whole page, {got}")
    run = tensors[0].element_size() if expected.dtype is not None else 1
    axes = [(steps[axis], pages if extent is None else extent) for axis, extent, _ in expected.axes]
    _check_apart(expected, axes, run)
    places = [tensor.data_ptr() + one.first for tensor, one in zip(tensors, found, strict=True)]
    bound = {}
    for at, part in enumerate(parts):
        inside = 0
        if part.shared is not None:
            inside = at * steps["component"] if part.shared.base is None else part.shared.base
        size, addresses = program.itemsize(part.ident), tuple(place + inside for place in places)
        pairs = zip(tensors, addresses, strict=True)
        bound[part.ident] = Bound(
            addresses=addresses,
            strides=tuple(steps[axis] for axis, _, packed in part.axes if packed is None),
            pages=pages,
            views=tuple(_as_axes(tensor, address, part, pages, steps, size) for tensor, address in pairs),
        )
    return bound, [apart.rows(name, place, run, axes) for place in places]


def _expected(
    program: SizedProgram, dtypes: Mapping[str, torch.dtype], where: str, parts: Sequence[DevicePart]
) -> Expected:
    """One component's axes; of several in one tensor also an axis of components, or bytes if they differ."""
    first = parts[0]
    kinds = {program.dtype(dtypes, part.ident) for part in parts}
    record = any(record.ident == first.ident for record in program.spec.records)
    dtype = None if record else next(iter(kinds))
    if first.shared is None:
        return Expected(where, first.axes, dtype)
    left = first.axes[: len(first.axes) - first.shared.inner]
    if len(kinds) > 1 or any(part.axes != first.axes for part in parts):
        return Expected(where, (*left, ("block", first.shared.block, 1)), None)
    step = None
    if first.shared.base is not None and len(parts) > 1:
        second = parts[1].shared
        assert second is not None and second.base is not None
        step = second.base - first.shared.base
    inner = first.axes[len(left) :]
    return Expected(where, (*left, ("component", len(parts), step), *inner), dtype)


# ---- matching ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A tensor read as what was expected: whole pages from page 0 on, bytes in front of it, bytes a step."""

    pages: int
    first: int
    strides: Mapping[str, int]


def _match(expected: Expected, tensor: torch.Tensor, first_row: int, tokens: int) -> Found:
    """How the tensor is what was expected. Page 0 starts at row `first_row`, `tokens` rows are a page.

    Neighbouring axes may be merged or one taken apart, axes of extent 1 may be there or not, there may be
    more rows than pages need. Raises ValueError naming the dimension, what was expected and what was got.
    """
    if expected.dtype is not None and tensor.dtype != expected.dtype:
        raise ValueError(f"{expected.where}: dtype: expected {expected.dtype}, got {tensor.dtype}")
    dims = list(_dims(tensor, expected.dtype is None))
    axes = [axis for axis in expected.axes if axis[1] != 1]
    strides = {name: 0 for name, extent, _ in expected.axes if extent == 1}
    pages = 1
    rows: tuple[int, int] | None = None  # dimension and extent of tokens that are one with the pages
    while axes and dims:
        index, extent, step = dims.pop()
        while axes and extent != 1:
            name, want, packed = axes.pop()
            left = extent * math.prod(size for _, size, _ in dims)
            if want is None and left == math.prod(size or 1 for _, size, _ in axes):
                strides[name] = packed or 0  # exactly one page: what is left is of the axes outside
                continue
            if packed is not None and packed != step:
                if tensor.is_contiguous():
                    raise _shape(expected, tensor)
                raise ValueError(
                    f"{expected.where}: stride of {name} (shape#{index}): expected {packed} bytes, "
                    f"got {step}; this form takes packed rows only"
                )
            strides[name] = step
            if want is None:
                pages, extent = extent, 1
                rows = rows if rows is not None and rows[0] == index else None
                continue
            while extent < want and dims and dims[-1][2] == extent * step:
                extent *= dims.pop()[1]  # one axis in several dimensions
                if extent > want:
                    raise _shape(expected, tensor)
            whole_pages_next = bool(axes) and axes[-1][1] is None  # so rows may be left over
            if want == 0 or (extent % want and not whole_pages_next):
                raise _shape(expected, tensor)
            rows = (index, extent) if name == "token" and whole_pages_next else rows
            extent, step = extent // want, step * want
            if extent == 0:
                axes.pop()
                pages, strides["page"], extent = 0, step, 1
        if extent != 1:
            raise _shape(expected, tensor)
    if dims or any(want is not None for _, want, _ in axes):
        raise _shape(expected, tensor)
    strides |= {name: packed or 0 for name, _, packed in axes}
    if rows is not None:
        return Found((rows[1] - first_row) // tokens, first_row * strides["token"], strides)
    if first_row % tokens:
        raise ValueError(
            f"{expected.where}: page 0 starts at row {first_row}, inside a page of {tokens} rows; "
            f"bind a tensor whose rows are one dimension, got shape {tuple(tensor.shape)}"
        )
    return Found(pages - first_row // tokens, first_row // tokens * strides["page"], strides)


def _dims(tensor: torch.Tensor, as_bytes: bool) -> Iterator[tuple[int, int, int]]:
    """(dimension, extent, bytes a step) of every dimension with more than one index."""
    size = tensor.element_size()
    shape = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    yield from ((index, extent, step * size) for index, (extent, step) in shape if extent != 1)
    if as_bytes and size > 1:
        yield tensor.dim(), size, 1


def _shape(expected: Expected, tensor: torch.Tensor) -> ValueError:
    want = ", ".join(f"{name}={'any' if extent is None else extent}" for name, extent, _ in expected.axes)
    unit = " bytes" if expected.dtype is None else ""
    return ValueError(
        f"{expected.where}: shape: expected [{want}]{unit} (neighbours may be merged), "
        f"got {tuple(tensor.shape)}{f' of {tensor.dtype}' if unit else ''}"
    )


def _check_apart(expected: Expected, axes: Sequence[tuple[int, int]], run: int) -> None:
    """No byte may belong to two rows of a tensor. `axes`: (bytes a step, extent) of the expected ones."""
    names = [axis for axis, _, _ in expected.axes]
    for (step, extent), axis in sorted(zip(axes, names, strict=True), key=lambda each: each[0][0]):
        if extent > 1 and step < run:
            what = f"{expected.where}: stride of {axis}: rows overlap"
            raise ValueError(f"{what}: expected at least {run} bytes, got {step}")
        run += step * (extent - 1)


def _check_rows(program: SizedProgram, names: Mapping[str, str], bound: Mapping[str, Bound]) -> None:
    """A component with one row a page has no row for each token: of all but page 0 a wrong one would move."""
    tokens = {part.ident: any(axis == "token" for axis, _, _ in part.axes) for part in program.device}
    size = program.sizes["page_size"]
    pages = min((one.pages for ident, one in bound.items() if tokens[ident]), default=0)
    for ident, one in bound.items():
        if not tokens[ident] and size > 1 and pages and one.pages == pages * size:
            raise ValueError(
                f"{program.spec.name}: {names[ident]}: rows: expected one a page, {pages} or a few more, got "
                f"{one.pages}, one for each token; bind its first {pages} rows if row p is that of page p"
            )


def _check_shared(pool: str, every: Sequence[apart.Rows]) -> None:
    """No byte may belong to two layers, or to two components."""
    found = apart.sharing(every)
    if found is not None:
        one, other = sorted(each.name for each in found)
        what = f"{one}: two layers have" if one == other else f"{one} and {other}: a row of each has"
        raise ValueError(f"{pool}: {what} the same memory; each needs rows of its own")


def check_between(group: str, bindings: Mapping[str, Binding]) -> None:
    """No byte may belong to two pools, by name: transfers of different pools are not ordered by their rows.

    Raises ValueError.
    """
    every = [replace(each, owner=pool) for pool, binding in bindings.items() for each in binding.rows]
    found = apart.sharing(every)
    if found is not None:
        one, other = sorted(f"{each.owner}.{each.name}" for each in found)
        what = f"{one} and {other}: a row of each has the same memory"
        raise ValueError(f"{group}: bind: {what}; pools of a group need tensors of their own")


def _as_axes(
    tensor: torch.Tensor, address: int, part: DevicePart, pages: int, steps: Mapping[str, int], size: int
) -> torch.Tensor:
    """The tensor's bytes seen with exactly the axes of the part, and the bytes of one item last."""
    shape = [pages if extent is None else extent for _, extent, _ in part.axes]
    strides = [steps[axis] if step is None else step for axis, _, step in part.axes]
    seen = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage = tensor.untyped_storage()
    return seen.set_(storage, address - storage.data_ptr(), [*shape, size], [*strides, 1])
