"""A generated pool class in, sets of sizes to try it with out: odd primes, and widths that fill vectors."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from poolwright.runtime.description import Param, PoolSpec, bind_sizes, dtype_named
from poolwright.runtime.pool import HostPool

LAYERS = (1, 4, 6)
ODD_PAGES = (5, 3, 7, 4, 8, 16, 32, 64, 128, 256)
WIDE_PAGES = (4, 8, 2, 16, 32, 64, 128, 256)
ODD = (3, 5, 7, 9, 4, 2, 11, 13, 16, 32, 1)
WIDE = (2, 8, 16, 9, 4, 32, 64, 1, 128)
MOST_TRIES, MORE_TRIES = 50_000, 1_000


@dataclass(frozen=True)
class Sample:
    """One set of sizes. `layers`: ids of each layer list; `shift`: bytes that tensors start off 16."""

    name: str
    params: Mapping[str, int | tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    layers: Mapping[str, tuple[int, ...]]
    page_size: int
    variants: Mapping[str, str]
    shift: int = 0

    @property
    def label(self) -> str:
        """The sample in a few words."""
        words = [*self.variants.values(), self.name]
        words += sorted({str(dtype).removeprefix("torch.") for dtype in self.dtypes.values()})
        return " ".join(words)


def samples(pool_class: type[HostPool], turn: int = 0) -> tuple[Sample, ...]:
    """An odd and a wide sample for every combination of variants; dtypes change with `turn`.

    Raises ValueError when no sizes that the pool takes are found.
    """
    spec = pool_class.spec
    tables = [[(name, choice) for choice in choices] for name, choices in spec.variants.items()]
    found: list[Sample] = []
    for chosen in itertools.product(*tables):
        found.append(_search(pool_class, "odd", dict(chosen), _dtypes(spec, turn)))
        found.append(_search(pool_class, "wide", dict(chosen), _dtypes(spec, turn + 1)))
    return tuple(found)


def unaligned(spec: PoolSpec, sample: Sample) -> Sample:
    """The sample with device tensors that start at odd multiples of the largest itemsize."""
    fixed = [dtype_named(c.dtype) for c in spec.components if c.dtype is not None and not c.held]
    shift = max((dtype.itemsize for dtype in (*sample.dtypes.values(), *fixed)), default=1)
    return replace(sample, name="unaligned", shift=shift)


def arguments(pool_class: type[HostPool], sample: Sample) -> dict[str, object]:
    """What the constructor and `required_bytes` take for these sizes, without form, layout and capacity."""
    given: dict[str, object] = {**sample.params, **sample.layers, **sample.variants}
    for group, dtype in sample.dtypes.items():
        given["dtype" if len(sample.dtypes) == 1 else f"{group}_dtype"] = dtype
    if takes_page_size(pool_class):
        given["page_size"] = sample.page_size
    return given


def takes_page_size(pool_class: type[HostPool]) -> bool:
    """Whether the class is built with a page size (else one page is one id)."""
    return "page_size" in inspect.signature(pool_class).parameters


def _dtypes(spec: PoolSpec, turn: int) -> dict[str, torch.dtype]:
    """One dtype of each itemsize in turn, then the other ones of eight bits."""
    chosen = {}
    for at, (group, names) in enumerate(spec.dtypes.items()):
        known = [dtype_named(name) for name in names]
        sizes = sorted({dtype.itemsize for dtype in known})
        order = [next(d for d in known if d.itemsize == size) for size in sizes]
        order += [d for d in known if d.itemsize == 1 and d not in order]
        chosen[group] = order[(turn + at) % len(order)]
    return chosen


def sample_of(
    pool_class: type[HostPool], name: str, layers: tuple[int, ...], page_size: int, fixed: Mapping[str, int]
) -> Sample:
    """An ``odd`` or ``wide`` sample with this page size, these parameters and these layers in every list, the
    first choice of every variant. Raises ValueError when the pool takes no such sizes."""
    spec = pool_class.spec
    variants = {variant: next(iter(choices)) for variant, choices in spec.variants.items()}
    found = _search(pool_class, name, variants, _dtypes(spec, int(name == "wide")), (page_size,), fixed)
    return replace(found, layers=dict.fromkeys(spec.layer_lists, layers))


def _search(
    pool_class: type[HostPool],
    name: str,
    variants: dict[str, str],
    dtypes: dict[str, torch.dtype],
    pages: Sequence[int] = (),
    fixed: Mapping[str, int] | None = None,
) -> Sample:
    """The first sizes, in order of preference, that the pool takes and that are what `name` says; with only
    these page sizes and parameters.

    A pool that has no such sizes (every row of it is even, or none can be a multiple of 16 bytes) gets the
    first ones that it takes at all. Where every dim is one item or none, its stride says nothing: sizes
    with a dim of one item are taken only when there are no others soon.
    """
    spec, layers = pool_class.spec, LAYERS if name == "odd" else LAYERS[:2]
    listed = {ids: layers for ids in spec.layer_lists}
    refusal, spare, good, tries = "none was tried", None, None, 0
    for params, page_size in itertools.islice(_candidates(pool_class, name, pages, fixed or {}), MOST_TRIES):
        itemsizes = {group: dtype.itemsize for group, dtype in dtypes.items()}
        counts = {ids: len(layers) for ids in listed}
        tries += good is not None
        if tries > MORE_TRIES:
            break
        try:
            sizes = bind_sizes(spec, params, itemsizes, counts, page_size, variants)
        except ValueError as error:
            refusal = str(error)
            continue
        rows = [row for row in _rows(spec, sizes, dtypes) if math.prod(row)]
        if (spec.components and not rows) or not _whole_pages(spec, sizes, page_size):
            continue
        found = Sample(name, params, dtypes, listed, page_size, variants)
        ends = [row[-2:] for row in rows if len(row) > 1]
        if all(end[0] % 2 if name == "odd" else math.prod(end) % 16 == 0 for end in ends):
            if not any(extent == 1 for row in rows for extent in row[:-1]):
                return found
            good = good or found
        spare = spare or found
    if spare is None:
        raise ValueError(f"{spec.name}: found no sizes that the pool takes; the last refusal: {refusal}")
    return good or spare


def _whole_pages(spec: PoolSpec, sizes: Mapping[str, int], page_size: int) -> bool:
    """Whether page 0 of every form starts at a whole page, as it must where pages and tokens lie apart."""
    return not any(form.first_row(sizes) % page_size for form in spec.forms.values())


def _candidates(
    pool_class: type[HostPool], name: str, only: Sequence[int], fixed: Mapping[str, int]
) -> Iterator[tuple[dict[str, int | tuple[int, ...]], int]]:
    """Parameters and page sizes to try; those with every zero that is allowed come first for wide ones."""
    given = [param for param in pool_class.spec.params if param.equals is None]
    values = [
        [fixed[param.name]] if param.name in fixed else list(values_of(param, at, name))
        for at, param in enumerate(given)
    ]
    zeros = [each[:1] if each[0] == 0 else each for each in values]
    pages: Sequence[int] = (1,)
    if takes_page_size(pool_class):
        pages = only or (ODD_PAGES if name == "odd" else WIDE_PAGES)
    for tried in (zeros, values) if name == "wide" else (values,):
        for page_size, *chosen in _nearest([pages, *tried]):
            yield {param.name: value for param, value in zip(given, chosen, strict=True)}, page_size


def _nearest(tried: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """One value of each list, the first ones first: ordered by how far all of them stand from the front."""
    for far in range(sum(len(values) - 1 for values in tried) + 1):
        yield from _this_far(tried, far)


def _this_far(tried: Sequence[Sequence[Any]], far: int) -> Iterator[tuple[Any, ...]]:
    if not tried:
        yield from [()] * (far == 0)
        return
    for at in range(min(far, len(tried[0]) - 1) + 1):
        for rest in _this_far(tried[1:], far - at):
            yield (tried[0][at], *rest)


def values_of(param: Param, at: int, name: str) -> Iterator[int | tuple[int, ...]]:
    """Values to try, the best first: others for each parameter, zero where it is allowed."""
    known: tuple[int, ...] = ODD if name == "odd" else WIDE
    known = known[at % 3 :] + known[: at % 3]
    if param.min is not None:
        known += tuple(param.min + step for step in range(3))
        if param.min == 0 and name == "wide":
            known = (0, *known)
    low = 1 if param.min is None else param.min
    allowed = [v for v in known if v >= low and (param.max is None or v <= param.max)]
    if param.one_of:
        allowed = [*param.one_of[1:], param.one_of[0]] if name == "odd" else list(param.one_of)
    if param.default is not None and param.length is None:
        allowed.insert(0, param.default)
    allowed = list(dict.fromkeys(allowed))
    if param.length is None:
        yield from allowed
    else:
        allowed = [v for v in allowed if v % 2] or allowed if name == "odd" else allowed
        for first in range(len(allowed)):
            yield tuple(allowed[(first + i) % len(allowed)] for i in range(param.length))


def _rows(spec: PoolSpec, sizes: Mapping[str, int], dtypes: Mapping[str, torch.dtype]) -> Iterator[list[int]]:
    """The extents of every component that is there, its itemsize last."""
    for component in spec.components:
        if component.present is None or sizes[component.present]:
            extents = [sizes[f"extent_{component.ident}_{dim}"] for dim in component.dims]
            dtype = dtypes[component.group] if component.group else dtype_named(str(component.dtype))
            yield [*extents, dtype.itemsize]
