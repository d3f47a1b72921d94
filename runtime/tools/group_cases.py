"""A group in; sizes to try it with, and every transfer of all its pools worth comparing, out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poolwright.runtime.description import bind_params, size_of
from poolwright.runtime.group import HostPoolGroup
from poolwright.runtime.parts import slot_align, slots_of
from poolwright.runtime.program import GroupProgram, SizedProgram, folder_of
from poolwright.runtime.tools.cases import Bench, Case
from poolwright.runtime.tools.samples import (
    LAYERS,
    ODD_PAGES,
    WIDE_PAGES,
    Sample,
    arguments,
    sample_of,
    takes_page_size,
    values_of,
)

NAMES = ("odd", "wide")
HOST_PAGES, STAGING_PAGES = 13, 2
COUNTS = (1, 11)


@dataclass(frozen=True)
class GroupSample:
    """One set of sizes: what the group's constructor takes, and the sizes of each pool."""

    name: str
    given: Mapping[str, Any]
    members: Mapping[str, Sample]


def group_sample(kind: type[HostPoolGroup], name: str) -> GroupSample:
    """An ``odd`` or ``wide`` sample of all pools, with one page size. Raises ValueError."""
    spec, refusal = kind.spec, "none was tried"
    params = [list(values_of(param, at, name)) for at, param in enumerate(spec.params)]
    for page_size, chosen in itertools.product(
        ODD_PAGES if name == "odd" else WIDE_PAGES, itertools.product(*params)
    ):
        sizes = {param.name: value for param, value in zip(spec.params, chosen, strict=True)}
        try:
            return _sample(kind, name, page_size, sizes)
        except ValueError as error:
            refusal = str(error)
    raise ValueError(f"{spec.name}: found no sizes that all pools take; the last refusal: {refusal}")


def _sample(kind: type[HostPoolGroup], name: str, page_size: int, sizes: Mapping[str, Any]) -> GroupSample:
    spec, given = kind.spec, dict(sizes)
    known = bind_params(spec.name, spec.params, sizes)
    members = {}
    count = len(spec.members)
    for at, (member, one) in enumerate(spec.members.items()):
        fixed = {param: size_of(formula, known) for param, formula in one.params.items()}
        layers = tuple(count * layer + at for layer in (LAYERS if name == "odd" else LAYERS[:2]))
        layers = next((given[ids] for ids in one.layers.values() if ids in given), layers)
        found = members[member] = sample_of(one.pool, name, layers, page_size, fixed)
        given |= dict.fromkeys(one.layers.values(), layers)
        own = arguments(one.pool, found)
        given[member] = {
            key: value
            for key, value in own.items()
            if key not in fixed and key not in one.layers and key != "page_size"
        }
        if takes_page_size(one.pool):
            given["page_size"] = page_size
    return GroupSample(name, given, members)


def pages(kind: type[HostPoolGroup], count: int) -> dict[str, int]:
    """So many pages for every pool that has ids of its own."""
    return {name: count for name, one in kind.spec.members.items() if one.index is None}


def programs(kind: type[HostPoolGroup], given: Mapping[str, Any]) -> GroupProgram:
    """What is compiled for these arguments of the constructor; without a capacity all pools are on."""
    capacity = ("capacity_pages", "capacity_bytes", "budget")
    sizes = dict(given) if set(capacity) & set(given) else {**given, "capacity_pages": pages(kind, 1)}
    for name in ("device", "require", "hugepages", "register"):
        sizes.pop(name, None)
    need = kind.required_bytes(**sizes)  # type: ignore[attr-defined]
    found: dict[str, SizedProgram] = {name: pool.program for name, pool in need.pools.items()}
    return GroupProgram(kind.spec.name, folder_of(kind), kind.spec.parts, found)


@dataclass(frozen=True)
class GroupCase:
    """One transfer: a case for each pool that is moved, and what they have in common."""

    direction: str
    members: Mapping[str, Case]
    order: str = "bulk"
    layers: tuple[int, ...] | None = None

    @property
    def label(self) -> str:
        words = [self.direction, *(f"{name} by {case.path}" for name, case in self.members.items())]
        return ", ".join([*words, *([f"layers {list(self.layers)}"] if self.layers is not None else [])])


class GroupBench:
    """A built and bound group, and a bench for each of its pools."""

    def __init__(self, kind: type[HostPoolGroup], sample: GroupSample, device: str = "cpu") -> None:
        self.spec = kind.spec
        need = kind.required_bytes(**sample.given, capacity_pages=pages(kind, 1))  # type: ignore[attr-defined]
        self.group: HostPoolGroup = kind(
            **sample.given,
            capacity_pages=pages(kind, HOST_PAGES),
            staging_bytes=sum(
                slots_of(pool.program.spec.updates == "in_place") * slot_align(STAGING_PAGES * pool.host)
                for pool in need.pools.values()
            ),
            device=device,
        )
        self.benches = {name: Bench.of(pool, sample.members[name]) for name, pool in self.group.pools.items()}
        self.group.bind(
            {name: bench.device.tensors for name, bench in self.benches.items()},
            {
                name: bench.device.layer_ids
                for name, bench in self.benches.items()
                if bench.device.layer_ids is not None
            },
        )

    def close(self) -> None:
        """Give the group's memory back."""
        self.group.destroy()

    def cases(self) -> Iterator[GroupCase]:
        """All pools by one path, then by different ones; some pools; layers of all and of some."""
        paths = [path.path for path in self.group.path_report() if path.available]
        own = [name for name, one in self.spec.members.items() if one.index is None]
        turns = [[path] * len(own) for path in paths]
        turns += [[paths[(turn + at) % len(paths)] for at in range(len(own))] for turn in range(len(paths))]
        units = itertools.cycle(("token", "page"))
        for chosen, count, direction in itertools.product(turns, COUNTS, ("write_back", "load")):
            yield self._case(direction, own, chosen, count, next(units))
        for name in own:
            yield self._case("load", [name], paths[:1], 5, "page")
        single = [path for path in paths if path != "staged"]
        layers = sorted({layer for bench in self.benches.values() for layer in bench.pool.layers})
        for path in single:
            for some in (None, tuple(layers[::-2]), tuple(layers[1:2])):
                yield self._case("load", own, [path] * len(own), 7, next(units), "layer", some)

    def _case(
        self,
        direction: str,
        names: Sequence[str],
        paths: Sequence[str],
        count: int,
        unit: str,
        order: str = "bulk",
        layers: tuple[int, ...] | None = None,
    ) -> GroupCase:
        members = {}
        for name, path in zip(names, paths, strict=True):
            mine = self.benches[name].pool.layers
            some = None if layers is None else tuple(layer for layer in layers if layer in mine)
            ids = self.benches[name].ids(count)
            members[name] = Case(direction, path, unit, *ids, layers=some, order=order)
        return GroupCase(direction, members, order, layers)

    def transfer(self, case: GroupCase) -> str:
        """Submit one transfer of all pools and compare every side, whole; the first difference, or ""."""
        whole = dict(case.members)
        for name, one in self.spec.members.items():
            if one.index in whole:
                mine = self.benches[name].pool.layers
                source = whole[one.index]
                some = None if case.layers is None else tuple(x for x in case.layers if x in mine)
                whole[name] = Case(
                    source.direction, source.path, source.unit, source.host, source.device, layers=some
                )
        before = {name: self.benches[name].begin(each) for name, each in whole.items()}
        moves = {name: before[name].ids for name in case.members}
        how: dict[str, Any] = {
            "unit": {name: each.unit for name, each in case.members.items()},
            "path": {name: each.path for name, each in whole.items()},
        }
        if case.direction == "write_back":
            ticket = self.group.write_back(moves, **how)
        else:
            ticket = self.group.load(moves, order=case.order, layers=case.layers, **how)
        ticket.wait()
        if dict(ticket.paths) != how["path"]:
            return f"{case.label}: the ticket says {dict(ticket.paths)}"
        found = (self.benches[name].end(each, before[name]) for name, each in whole.items())
        return next((f"{case.label}: {text}" for text in found if text), "")
