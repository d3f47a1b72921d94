"""Lowering as properties: random pools against an oracle that knows only permutations and padding.

The formulas of the generated pool.py are compared with the oracle for every byte; the compiled constants
with the formulas; and the compiled transfers with what the oracle says they must do, byte for byte.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from compiled_pools import Built, Compiled, build, compile_pools
from hypothesis import given, settings
from hypothesis import strategies as st
from moved_pools import Arena, Devices, differences, dynamic_axes, place_devices, step
from random_pools import Chance, Drawn, Sample, Seeded, random_sample, sound_sample

from poolwright.codegen import lower
from poolwright.codegen.ir import Program
from poolwright.runtime.description import HostLayout, numbers

BATCHES, IN_BATCH = 20, 50
QUICK = 8
"""Batches that every run compiles; the others are slow cases."""

ALIGNS = (16, 16, 8, 1, 4, 16, 2)
WHOLE_EVERY = 20


# ---- formulas against the oracle --------------------------------------------------------------


class Formulas:
    """The numbers that a generated pool.py gives for one sample, so many pages."""

    def __init__(self, built: Built, pages: int) -> None:
        self.built, self.pages = built, pages
        module = built.python()
        sizes = built.sizes(module)
        spec = module.SPEC
        self.host: HostLayout = spec.layouts["host"].numbers(pages, **sizes)
        self.device = spec.forms["device"].numbers(**sizes)
        self.walks = spec.programs["device", "host"].walks(**sizes)

    def constants(self, align: int) -> list[int]:
        return numbers(self.host, self.device, self.walks, align)


def solid(sample: Sample, pages: int) -> list[oracle.Part]:
    """The parts that have bytes."""
    return [part for part in sample.placed(pages) if part.nbytes]


def computed(axes: Mapping[str, int], base: int, strides: Mapping[str, int], itemsize: int) -> torch.Tensor:
    """Offsets of every byte of a part from its strides, axes in the part's order."""
    result = torch.full((), base)
    for axis, extent in axes.items():
        result = result[..., None] + torch.arange(extent) * strides[axis]
    return result[..., None] + torch.arange(itemsize)


def check_host(formulas: Formulas, placed: oracle.Placed) -> None:
    """Every byte of every part is where the oracle has it."""
    assert formulas.host.nbytes == placed.nbytes
    for part in solid(formulas.built.sample, formulas.pages):
        side = formulas.host.part(part.name)
        assert {axis: extent for axis, extent, _ in side.axes} == dict(part.axes)
        strides = {axis: stride for axis, _, stride in side.axes}
        assert torch.equal(
            computed(part.axes, side.base, strides, part.itemsize), placed.offsets[part.name]
        ), part.name


def check_device(formulas: Formulas, devices: Devices) -> None:
    """Constant strides are the tensors' strides; exactly the others are left to bind."""
    sample = formulas.built.sample
    sides = {side.ident: side for side in formulas.device}
    for part in sample.parts:
        side, axes = sides[part.name], list(part.axes)
        free = {axis for axis, _, stride in side.axes if stride is None}
        assert free == dynamic_axes(sample, [part.only([axis for axis, _, _ in side.axes])]), part.name
        for axis, extent, stride in side.axes:
            assert extent == (None if axis == "page" else part.axes[axis])
            found = step(devices.offsets[part.name], axes.index(axis)) if part.present else None
            assert stride is None or found is None or stride == found, f"{part.name} {axis}"


def check_ranges(host: HostLayout, sample: Sample, placed: oracle.Placed, pages: int) -> None:
    """The ranges of a page hold its bytes, nobody else's, each once, and as many as it is said to have."""
    owner = torch.full((placed.nbytes,), -1)
    for part in solid(sample, pages):
        for page in range(pages):
            owner[placed.offsets[part.name][page].flatten()] = page
    there = {part.name for part in solid(sample, pages)}
    covered = torch.zeros(placed.nbytes, dtype=torch.bool)
    for page in range(pages):
        total = 0
        for one in host.ranges:
            if one.ident is not None and one.ident not in there:
                continue
            for left in product(*(range(extent) for extent, _ in one.left)):
                first = one.base + page * one.nbytes
                first += sum(i * stride for i, (_, stride) in zip(left, one.left, strict=True))
                total += one.nbytes
                assert 0 <= first and first + one.nbytes <= placed.nbytes
                inside = slice(first, first + one.nbytes)
                assert not covered[inside].any()
                assert set(owner[inside].unique().tolist()) <= {-1, page}
                covered[inside] = True
        assert total == host.page_bytes
    assert bool(covered[owner >= 0].all())


def longest_atom(sample: Sample, part: oracle.Part, outer: Sequence[str]) -> list[str]:
    """The longest common suffix of both orders, by the words of the spec."""
    inside = part.only([axis for axis in part.axes if axis not in sample.form.tensors])
    there = oracle.words(sample.form.order, inside, sample.splits)
    here = oracle.words(sample.layout.order, part, sample.splits)
    stop = {"component", "page", *outer, *dynamic_axes(sample, [inside])}
    found: list[str] = []
    while here and there and here[-1] == there[-1] and here[-1] not in stop:
        found.insert(0, here.pop())
        there.pop()
    return found


def check_walks(formulas: Formulas, placed: oracle.Placed, devices: Devices) -> None:
    """Runs are contiguous on both sides, as long as they can be, together everything, and aligned."""
    sample, program = formulas.built.sample, formulas.built.program
    parts = {part.name: part for part in sample.placed(formulas.pages)}
    numbers_of = {(walk.ident, walk.name): walk for walk in formulas.walks}
    for item in program.items:
        part = parts[item.ident]
        for walk in item.walks:
            atom = [axis.name for axis in walk.atom]
            loops = [axis.name for axis in walk.loops]
            assert sorted([*walk.outer, *loops, *atom]) == sorted(part.axes)
            assert atom == longest_atom(sample, part, walk.outer), f"{item.ident} {walk.name}"
            here = numbers_of.pop((item.ident, walk.name))
            ids = math.prod(part.axes[axis] for axis in walk.outer)
            assert here.atom * here.runs * ids == part.nbytes
            if part.nbytes:
                axes = [*(axis for axis in part.axes if axis not in atom), *atom]
                order = [list(part.axes).index(axis) for axis in axes]
                vector = here.vector(16)
                assert here.atom % vector == 0
                for offsets in (placed.offsets[item.ident], devices.offsets[item.ident]):
                    runs = offsets.permute([*order, -1]).reshape(-1, here.atom)
                    assert bool((runs == runs[:, :1] + torch.arange(here.atom)).all())
                    assert not bool((runs[:, 0] % vector).any())
    assert not numbers_of


def check_cuts(program: Program, sample: Sample, placed: oracle.Placed, pages: int) -> None:
    """Where a page can be cut, what a layer of it holds of a part is one run of bytes, wherever it lies."""
    for part in solid(sample, pages) if program.cuts else ():
        offsets, axes = placed.offsets[part.name], list(part.axes)
        outer = [axis for axis in ("page", "layer") if axis in axes]
        order = [axes.index(axis) for axis in (*outer, *(axis for axis in axes if axis not in outer))]
        held = offsets.permute([*order, -1]).flatten(0, len(outer) - 1)
        runs = held.reshape(held.shape[0], -1).sort(1).values
        assert bool((runs.diff(dim=1) == 1).all()), part.name
    if not any("layer" in part.axes for part in sample.parts):
        assert not program.cuts


def check_program(program: Program) -> None:
    """Invariants of the intermediate representation."""
    for item in program.items:
        for side in (item.host, item.device):
            names = [axis.name for axis in side.axes]
            assert len(set(names)) == len(names) and "page" in names
        assert all(stride.value is not None for stride in item.host.strides)
        both = sorted(axis.name for axis in (*item.device.axes, *item.device.table))
        assert both == sorted(axis.name for axis in item.host.axes)
        assert len({walk.name for walk in item.walks}) == len(item.walks)
    assert program.token_walk == all(item.token for item in program.items)


def check_formulas(sample: Sample, chance: Chance) -> None:
    """Everything that can be said of a sample without compiling it."""
    pages = chance.integer(1, 4)
    formulas = Formulas(build(sample), pages)
    placed = oracle.place(sample.placed(pages), sample.layout.order, sample.splits)
    # With guards of 64 bytes and tensors on multiples of 16, offsets are as aligned as addresses.
    devices = place_devices(sample, pages, 16, chance)
    check_program(formulas.built.program)
    check_host(formulas, placed)
    check_cuts(formulas.built.program, sample, placed, pages)
    check_device(formulas, devices)
    check_ranges(formulas.host, sample, placed, pages)
    check_walks(formulas, placed, devices)


@given(st.data())
@settings(max_examples=60)
def test_formulas_place_every_byte_as_the_oracle_does(data: st.DataObject) -> None:
    chance = Drawn(data.draw)
    sample = random_sample(chance)
    if sample.refused is None:
        check_formulas(sample, chance)
        return
    with pytest.raises(lower.LowerError) as refused:
        lower.lower(sample.pool)
    assert refused.value.where == sample.refused[0]
    assert sample.refused[1] in str(refused.value)


def test_unsound_pools_and_only_those_are_refused_for_the_right_reason() -> None:
    refusals = 0
    for seed in range(300):
        sample = random_sample(Seeded(seed))
        try:
            lower.lower(sample.pool)
            found = None
        except lower.LowerError as error:
            found = error
        assert (found is None) == (sample.refused is None), f"seed {seed}: {found}"
        if found is not None and sample.refused is not None:
            assert found.where == sample.refused[0] and sample.refused[1] in str(found), f"seed {seed}"
            refusals += 1
    assert refusals > 30


# ---- compiled pools against the oracle --------------------------------------------------------


def batch_of(number: int) -> list[Built]:
    seeds = range(number * IN_BATCH, (number + 1) * IN_BATCH)
    return [build(sound_sample(seed), whole=seed % WHOLE_EVERY == 0) for seed in seeds]


class Libraries:
    """Compiled batches; the next one is compiled while one is used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads = ThreadPoolExecutor(2)
        self._found: dict[int, Future[list[Compiled]]] = {}

    def get(self, number: int) -> list[Compiled]:
        for one in range(number, min(number + 3, QUICK if number < QUICK else BATCHES)):
            if one not in self._found:
                self._found[one] = self._threads.submit(self._compile, one)
        return self._found[number].result()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _compile(self, number: int) -> list[Compiled]:
        folder = self._folder / str(number)
        folder.mkdir()
        return compile_pools(batch_of(number), folder, ALIGNS[number % len(ALIGNS)])


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Libraries]:
    made = Libraries(tmp_path_factory.mktemp("pools"))
    yield made
    made.close()


def check_compiled(compiled: Compiled, align: int, chance: Chance) -> None:
    """Constants and transfers of one compiled pool."""
    pages = (chance.integer(2, 5), chance.integer(1, 4))
    formulas = Formulas(compiled.built, pages[0])
    expected = formulas.constants(align)
    out = (ctypes.c_int64 * len(expected))()
    compiled.call("describe", ctypes.c_int64(pages[0]), out)
    assert list(out) == expected
    arena = Arena(compiled, pages, align, chance)
    arena.describe(formulas.device, align)
    tokens = "atoms_tokens" in compiled.entries
    layered = any("layer" in part.axes for part in compiled.built.sample.parts)
    for transfer in arena.transfers(tokens, layered):
        ways: list[Any] = [arena.atoms]
        way = "load" if transfer.load else "write_back"
        if compiled.built.whole and (transfer.layers is None or way in compiled.built.lowered.by_layer):
            ways.append(arena.lanes)
            if tokens and transfer.unit == "pages":
                ways.append(arena.lanes_in_place)
        for run in ways:
            host, device = arena.expected(transfer)
            run(transfer)
            for side, got, want in (("host", arena.host, host), ("device", arena.device, device)):
                wrong = differences(got, want)
                assert not wrong, f"{side} after {run.__name__} of {transfer}: {wrong}"


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.slow] * (n >= QUICK)) for n in range(BATCHES)]
)
def test_compiled_transfers_move_exactly_the_bytes_of_the_oracle(libraries: Libraries, number: int) -> None:
    align = ALIGNS[number % len(ALIGNS)]
    for at, compiled in enumerate(libraries.get(number)):
        seed = number * IN_BATCH + at
        sample = compiled.built.sample
        try:
            check_compiled(compiled, align, Seeded(seed))
        except AssertionError as error:
            said = f"sound_sample({seed}): form {sample.form}, layout {sample.layout}, values {sample.values}"
            raise AssertionError(f"{said}\n{sample.parts}\n{error}") from error


def test_many_pools_can_be_cut_and_change_in_place() -> None:
    built = [build(sound_sample(seed)) for seed in range(100)]
    assert 10 < sum(one.program.cuts for one in built) < 80
    assert 20 < sum("write_back" in one.lowered.by_layer for one in built) < 80


def test_half_of_the_pools_have_components_of_unequal_rows() -> None:
    unequal = 0
    for seed in range(BATCHES * IN_BATCH):
        sample = sound_sample(seed)
        members = [part for record in sample.records for part in record.members] or list(sample.parts)
        rows = {math.prod(p.only([a for a in p.axes if a not in oracle.OUTER]).shape) for p in members}
        unequal += len(rows) > 1
    assert unequal * 2 >= BATCHES * IN_BATCH
