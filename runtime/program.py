"""A pool with its sizes filled in: the program to compile, its numbers, the arguments of its kernels."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from poolwright.runtime import jit
from poolwright.runtime.description import DevicePart, HostLayout, PoolSpec, Walk, dtype_named, numbers

MAX_LANES_WORK = (1 << 32) - (1 << 24)
"""Vectors one launch may count: its index has 32 bits, and the last lanes step past the end."""


class Span(NamedTuple):
    """A contiguous range of every page: of page p the `nbytes` bytes from ``start + p * nbytes`` on.

    `name`: the component, or ``page`` for a range that holds all of them; then, where the layout has axes
    outside the page, the position on each (``k.3``: layer 3 in layer_first).
    """

    name: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class SizedProgram:
    """One form and layout of a pool with every size known. `folder`: where its sources lie."""

    spec: PoolSpec
    folder: Path
    sizes: Mapping[str, int]
    variants: Mapping[str, str]
    form: str
    layout: str

    @property
    def number(self) -> int:
        """Its number in layout.h, counted from 1: by variant, then by form and layout."""
        of_variant = list(self.spec.programs)
        choice = tuple(self.variants[name] for name in self.spec.variants)
        before = list(self.spec.extents).index(choice) * len(of_variant)
        return 1 + before + of_variant.index((self.form, self.layout))

    @cached_property
    def device(self) -> tuple[DevicePart, ...]:
        return self.spec.forms[self.form].numbers(**self.sizes)

    @cached_property
    def walks(self) -> tuple[Walk, ...]:
        return self.spec.programs[self.form, self.layout].walks(**self.sizes)

    @property
    def tokens(self) -> bool:
        """Whether ids may address single tokens."""
        return self.spec.programs[self.form, self.layout].tokens

    @cached_property
    def has_layers(self) -> bool:
        """Whether any component that is there has a layer axis."""
        return any(walk.name == "layer_pages" and walk.runs * walk.atom for walk in self.walks)

    def host(self, pages: int) -> HostLayout:
        return self.spec.layouts[self.layout].numbers(pages, **self.sizes)

    def spans(self, pages: int) -> tuple[Span, ...]:
        """The ranges of a page in a buffer of so many pages; what has no bytes has none."""
        found = []
        for of in self.host(pages).ranges:
            if of.nbytes == 0 or (of.ident is not None and not self.present(of.ident)):
                continue
            for place in itertools.product(*(range(extent) for extent, _ in of.left)):
                start = of.base + sum(at * step for at, (_, step) in zip(place, of.left, strict=True))
                found.append(Span(".".join([of.ident or "page", *map(str, place)]), start, of.nbytes))
        return tuple(sorted(found, key=lambda span: span.start))

    def present(self, ident: str) -> bool:
        """Whether a component is there and has bytes."""
        return any(walk.runs * walk.atom for walk in self.walks if walk.ident == ident)

    def dtype(self, dtypes: Mapping[str, torch.dtype], ident: str) -> torch.dtype:
        """The dtype of a component's tensors; a record's are bytes."""
        found = next((c for c in self.spec.components if c.ident == ident), None)
        if found is None:
            return torch.uint8
        return dtypes[found.group] if found.group else dtype_named(str(found.dtype))

    def itemsize(self, ident: str) -> int:
        """Bytes of one item of a component; 1 for a record."""
        found = next((c for c in self.spec.components if c.ident == ident), None)
        if found is None:
            return 1
        return self.sizes[f"itemsize_{found.group}"] if found.group else self.dtype({}, ident).itemsize

    @property
    def programs(self) -> tuple[SizedProgram, ...]:
        """What is compiled together: this program alone."""
        return (self,)

    def cuts(self, direction: str) -> bool:
        """Whether a transfer in this direction can be cut inside a page, into layers."""
        program = self.spec.programs[self.form, self.layout]
        return program.cuts and f"{direction}_layer_pages" in self.spec.parts

    @cached_property
    def lists(self) -> Mapping[str, str | None]:
        """The layer list of each placed component by its ident, in order; None: it has no layers."""
        held = {name: record for record in self.spec.records for name in record.holds}
        named = {held[c.name].ident if c.name in held else c.ident: c.layers for c in self.spec.components}
        return {part.ident: named[part.ident] for part in self.device}

    @property
    def columns(self) -> tuple[str, ...]:
        """Components that a step has a number for: see `columns` in kernels.cu."""
        return tuple(self.lists)

    def defines(self, align: int) -> tuple[tuple[str, str], ...]:
        """Macros that make a program of the generated sources."""
        return (("PW_ALIGN", str(align)), *self.constants())

    def constants(self, of: str = "") -> tuple[tuple[str, str], ...]:
        """The macros of this pool; `of`: what their names end with in a group."""
        names = [name for param in self.spec.params for name in param.names]
        names += ["page_size", *self.spec.layer_lists]
        names += [f"itemsize_{group}" for group in self.spec.dtypes]
        family = "_".join(self.variants[name] for name in self.spec.variants)
        program = self.spec.programs[self.form, self.layout].name
        qualified = f"{family}::{program}" if family else program
        return (
            (f"PW_PROGRAM{of}", qualified),
            (f"PW_CHOSEN{of}", str(self.number)),
            *((f"PW_{name}{of}", str(self.sizes[name])) for name in names),
        )

    def unit(self, kind: str, align: int) -> jit.Unit:
        """What to compile: ``atoms`` or ``lanes`` of host.cpp, or ``kernels`` of kernels.cu in its parts."""
        name = f"{self.spec.name}-{self.form}-{self.layout}-{kind}"
        return _unit(kind, name, self.folder, self.defines(align), self.spec.parts)

    def check(self, library: ctypes.CDLL, align: int) -> None:
        """Compare every constant of the compiled program with pool.py. Raises RuntimeError."""
        for pages in (1, 7):
            here = numbers(self.host(pages), self.device, self.walks, align)
            out = (ctypes.c_int64 * len(here))(*[-1] * len(here))  # no constant is -1: all must be written
            library.describe(ctypes.c_int64(pages), out)
            if list(out) != here:
                at = next(i for i, (a, b) in enumerate(zip(out, here, strict=True)) if a != b)
                raise RuntimeError(
                    f"{self.spec.name}: compiled constant {at} of {self.form}/{self.layout} is {out[at]}, "
                    f"pool.py says {here[at]}; the generated files do not belong together (`codegen build`)"
                )

    def ids_per_launch(self, unit: str, layered: bool, align: int) -> int:
        """How many ids one launch may take, by its work counters alone; in layer order it counts a step."""
        most = MAX_LANES_WORK
        for ident in self.lists:
            found = {w.name: w for w in self.walks if w.ident == ident}
            walk = found.get(f"layer_{unit}" if layered else unit) or found.get(unit)
            if walk is not None and walk.runs * walk.atom:
                most = min(most, MAX_LANES_WORK // (walk.runs * walk.atom // walk.vector(align)))
        return most

    def bytes_per_id(self, unit: str, layered: bool) -> int:
        """Bytes of one page or token; in layer order those of one step that has every layer list."""
        name = f"layer_{unit}" if layered else unit
        return sum(walk.runs * walk.atom for walk in self.walks if walk.name == name)


def pages_within(programs: Sequence[SizedProgram], nbytes: int) -> int:
    """How many pages of each of these pools fit `nbytes` of host memory. One page of all has bytes."""
    count = nbytes // sum(program.host(1).page_bytes for program in programs)
    while count > 0 and sum(program.host(count).nbytes for program in programs) > nbytes:
        count -= 1
    return count


@dataclass(frozen=True)
class GroupProgram:
    """Programs of a group's pools by member, compiled together. `folder`: where the group's sources lie."""

    name: str
    folder: Path
    parts: tuple[str, ...]
    members: Mapping[str, SizedProgram]

    @property
    def programs(self) -> tuple[SizedProgram, ...]:
        return tuple(self.members.values())

    def unit(self, kind: str, align: int) -> jit.Unit:
        """What to compile: ``lanes`` of host.cpp, or ``kernels`` of kernels.cu in its parts."""
        constants = [c for name, program in self.members.items() for c in program.constants(f"_OF_{name}")]
        defines = (("PW_ALIGN", str(align)), *constants)
        return _unit(kind, f"{self.name}-{kind}", self.folder, defines, self.parts)


def _unit(
    kind: str, name: str, folder: Path, defines: tuple[tuple[str, str], ...], parts: tuple[str, ...]
) -> jit.Unit:
    if kind == "kernels":
        return jit.Unit(name, folder / "kernels.cu", defines, parts)
    extra = (("PW_LANES", "1"),) if kind == "lanes" else ()
    return jit.Unit(name, folder / "host.cpp", defines + extra)


def folder_of(pool_class: type) -> Path:
    """The folder of a generated pool's sources."""
    file = sys.modules[pool_class.__module__].__file__
    assert file is not None
    return Path(file).resolve().parent


# ---- arguments of kernels ---------------------------------------------------------------------


def view(table: int, host: int, pages: int, strides: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """The View that every kernel takes first."""
    values = (table, host, pages, *strides)
    return (ctypes.c_int64 * len(values))(*values)  # of an address from 1 << 63 on it keeps the bits
