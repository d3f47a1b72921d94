"""What generated code says of a pool: names, axes and orders as data, sizes as numbers.

The first half is filled in by a generated pool.py (`PoolSpec` and its parts). The second half is what
its formulas return for one set of sizes (`HostLayout`, `DevicePart`, `Walk`). Sizes are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from poolwright.runtime import arguments

Sizes = Mapping[str, int]
SizeOf = tuple[tuple[str, ...], Callable[..., int]]
"""Names of sizes, and a function of them."""

Order = tuple[str, ...]


def align_up(value: int, alignment: int) -> int:
    """The next multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


def gcd(left: int, right: int) -> int:
    return math.gcd(left, right)


def size_of(value: SizeOf, sizes: Sizes) -> int:
    """The value of a formula for these sizes."""
    names, formula = value
    return formula(*(sizes[name] for name in names))


# ---- the spec as data -------------------------------------------------------------------------


@dataclass(frozen=True)
class Param:
    """A constructor parameter and its bounds; `equals`: derived from the named sizes, not given.

    `length`: a list of so many; what is missing at its end is `default`.
    """

    name: str
    min: int | None = None
    max: int | None = None
    one_of: tuple[int, ...] = ()
    equals: SizeOf | None = None
    length: int | None = None
    default: int | None = None

    @property
    def names(self) -> list[str]:
        """The sizes that it becomes: one for each value of a list."""
        return [self.name] if self.length is None else [f"{self.name}_{i}" for i in range(self.length)]


@dataclass(frozen=True)
class Component:
    """One kind of buffer: element `dims`, a dtype `group` or fixed `dtype`, its layer list."""

    name: str
    ident: str
    dims: tuple[str, ...]
    group: str | None = None
    dtype: str | None = None
    layers: str | None = "layers"
    token: bool = True
    present: str | None = None
    align: SizeOf | None = None
    held: bool = False


@dataclass(frozen=True)
class Record:
    """Components in one padded row; `inner`: their axis order for each combination of variants."""

    name: str
    ident: str
    holds: tuple[str, ...]
    pad_to: Mapping[tuple[str, ...], SizeOf]
    inner: Mapping[tuple[str, ...], Order]


@dataclass(frozen=True)
class Form:
    """A device order: axes that index tensors, axes inside one, the numbers of sizes given by name."""

    tensors: Order
    order: Order
    numbers: Callable[..., tuple[DevicePart, ...]]
    any_stride: Order = ()
    base: SizeOf | None = None

    def first_row(self, sizes: Sizes) -> int:
        """The row of a tensor at which page 0 starts."""
        return 0 if self.base is None else size_of(self.base, sizes)


@dataclass(frozen=True)
class Layout:
    """A host order and the numbers of so many pages and of sizes given by name."""

    order: Order
    numbers: Callable[..., HostLayout]


@dataclass(frozen=True)
class Program:
    """One form and layout: its name in C++, its runs, whether ids may address single tokens, whether each
    layer of a component is one run of a host page."""

    name: str
    walks: Callable[..., tuple[Walk, ...]]
    tokens: bool
    cuts: bool = False


@dataclass(frozen=True)
class PoolSpec:
    """A pool as its spec says it. `variants`: by choice the constants that are sizes."""

    name: str
    source: str
    unit: str
    updates: str
    params: tuple[Param, ...]
    dtypes: Mapping[str, tuple[str, ...]]
    components: tuple[Component, ...]
    records: tuple[Record, ...]
    forms: Mapping[str, Form]
    layouts: Mapping[str, Layout]
    programs: Mapping[tuple[str, str], Program]
    extents: Mapping[tuple[str, ...], Callable[..., dict[str, int]]]
    parts: tuple[str, ...]
    variants: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    require: tuple[tuple[str, tuple[str, ...], Callable[..., bool]], ...] = ()
    reserved: tuple[int, ...] = ()
    not_carried: tuple[str, ...] = ()
    tag: tuple[str, ...] = ()
    valid_if: str | None = None
    layer_lists: tuple[str, ...] = ("layers",)


# ---- numbers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostPart:
    """A component on the host: first byte, then (axis, extent, bytes a step), outermost first."""

    ident: str
    base: int
    axes: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class PageRanges:
    """Contiguous bytes of a page: range of page p starts at ``base + sum(left) + p * nbytes``.

    `left`: (extent, bytes a step) of the axes outside `page`; one range for each combination. `ident`
    None: the range holds every component.
    """

    ident: str | None
    base: int
    left: tuple[tuple[int, int], ...]
    nbytes: int


@dataclass(frozen=True)
class HostLayout:
    """All host bytes of a pool of so many pages."""

    nbytes: int
    page_bytes: int
    parts: tuple[HostPart, ...]
    ranges: tuple[PageRanges, ...]

    def part(self, ident: str) -> HostPart:
        return next(part for part in self.parts if part.ident == ident)


@dataclass(frozen=True)
class Shared:
    """Where a component lies in tensors that hold all of them side by side.

    `inner`: how many of its last axes lie in its block; `base`: bytes in front of that block, `block`: bytes
    of all blocks; None when the tensor has the step from one block to the next.
    """

    inner: int
    base: int | None = None
    block: int | None = None


@dataclass(frozen=True)
class DevicePart:
    """A component on the device: (axis, extent, bytes a step); None where the tensor decides.

    `table`: how many tensors its layers are, None when they are an axis. `shared`: with other components.
    """

    ident: str
    axes: tuple[tuple[str, int | None, int | None], ...]
    table: int | None = None
    shared: Shared | None = None


@dataclass(frozen=True)
class Walk:
    """Runs of one component: `runs` an id, each `atom` bytes; `grain` divides every address."""

    ident: str
    name: str
    atom: int
    runs: int
    grain: int

    def vector(self, align: int) -> int:
        """Bytes one lane moves at a time when addresses are multiples of `align`."""
        return math.gcd(16, math.gcd(self.grain, align))


def numbers(host: HostLayout, device: Sequence[DevicePart], walks: Sequence[Walk], align: int) -> list[int]:
    """Every constant of a program, in the order of `describe` in the generated host.cpp."""
    found = [host.nbytes, host.page_bytes]
    for part, side in zip(host.parts, device, strict=True):
        found += [part.base, *(step for _, _, step in part.axes)]
        found += [*(step for _, _, step in side.axes if step is not None)]
        for walk in (w for w in walks if w.ident == part.ident):
            found += [walk.atom, walk.runs, walk.vector(align)]
    return found


def bind_sizes(
    spec: PoolSpec,
    params: Mapping[str, object],
    itemsizes: Mapping[str, int],
    layers: Mapping[str, int],
    page_size: int,
    variants: Mapping[str, str],
) -> dict[str, int]:
    """Every size of a pool by name. Raises ValueError naming the parameter, its bounds and its value."""
    sizes = {"page_size": page_size, **layers}
    sizes |= {f"itemsize_{group}": size for group, size in itemsizes.items()}
    arguments.whole(spec.name, "page_size", page_size, 1)
    sizes |= bind_params(spec.name, spec.params, params)
    for name, choice in variants.items():
        arguments.one_of(spec.name, name, choice, spec.variants[name])
        sizes |= {f"{name}_{constant}": value for constant, value in spec.variants[name][choice].items()}
    for param in spec.params:
        if param.equals is not None:
            sizes[param.name] = _check(spec.name, param, size_of(param.equals, sizes))
    extents = spec.extents[tuple(variants[name] for name in spec.variants)](**sizes)
    for name, size in extents.items():
        if size < 0:
            raise ValueError(f"{spec.name}: {name.removeprefix('extent_')} is {size} with these parameters")
    sizes |= extents
    for text, names, holds in spec.require:
        if not holds(*(sizes[name] for name in names)):
            values = ", ".join(f"{name}={sizes[name]}" for name in names)
            raise ValueError(f"{spec.name}: required: {text}, got {values}")
    return sizes


def bind_params(owner: str, params: Sequence[Param], values: Mapping[str, object]) -> dict[str, int]:
    """Every parameter that is given, by name. Raises ValueError naming the parameter and its bounds."""
    found: dict[str, int] = {}
    for param in params:
        if param.equals is None:
            found |= _given(owner, param, values.get(param.name, () if param.length else param.default))
    return found


def _given(owner: str, param: Param, value: object) -> dict[str, int]:
    if param.length is None:
        return {param.name: _check(owner, param, value)}
    many = isinstance(value, Iterable) and not isinstance(value, torch.Tensor)
    try:
        values = list(value) if many else [value]  # type: ignore[call-overload]
    except TypeError:  # an array of numpy's without dimensions, which says that it can be walked
        values = [value]
    if param.default is not None:
        values += [param.default] * (param.length - len(values))
    if len(values) != param.length:
        most = "" if param.default is None else "at most "
        raise arguments.refusal(owner, param.name, f"{most}{param.length} integers", value)
    return {name: _check(owner, param, each) for name, each in zip(param.names, values, strict=True)}


def _check(owner: str, param: Param, value: object) -> int:
    found = arguments.integer(owner, param.name, value)
    if param.min is not None and found < param.min:
        raise arguments.refusal(owner, param.name, f"at least {param.min}", found)
    if param.max is not None and found > param.max:
        raise arguments.refusal(owner, param.name, f"at most {param.max}", found)
    if param.one_of and found not in param.one_of:
        raise arguments.refusal(owner, param.name, f"one of {', '.join(map(str, param.one_of))}", found)
    return found


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a spec's dtype name."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
