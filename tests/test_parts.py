"""Pages in parts: how slots keep their bound, how pages are cut, and that cut pages arrive whole."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import poolwright.generated as generated
from poolwright.runtime.errors import OutOfMemoryBudget
from poolwright.runtime.moves import ABSENT
from poolwright.runtime.parts import SLOT_ALIGN, Cutter, Slot, least_bytes, slot_of, slots_of, units
from poolwright.runtime.program import SizedProgram
from poolwright.runtime.tools import cases
from poolwright.runtime.tools.samples import Sample, samples

STATES = ("mamba", "kda_state", "gated_delta_net", "dsv4_state")
PROGRAMS = [
    (name, form, layout)
    for name in sorted(generated.POOLS)
    for form, layout in generated.pool_class(name).spec.programs
    if generated.pool_class(name).spec.components
]
IN_PLACE = [(name, form, layout) for name, form, layout in PROGRAMS if name in STATES]


@functools.cache
def odd(name: str) -> Sample:
    return samples(generated.pool_class(name))[0]


def sized(name: str, form: str, layout: str) -> SizedProgram:
    return cases.sized(generated.pool_class(name), odd(name), form, layout)


# ---- the size of a slot


@pytest.mark.parametrize(("name", "form", "layout"), PROGRAMS)
def test_slots_keep_every_bound_or_refuse_it(name: str, form: str, layout: str) -> None:
    program = sized(name, form, layout)
    slots, page = slots_of(program.spec.updates == "in_place"), program.host(1).nbytes
    least = least_bytes(program)
    for bound in (0, least - 1, least, least + 1, slots * page, 3 * slots * page + 5, 99 * slots * page):
        if bound < least:
            with pytest.raises(OutOfMemoryBudget, match=rf"{name}: staging memory of {slots} slots, one "):
                slot_of(program, 9, bound, "staging_bytes")
            continue
        slot = slot_of(program, 9, bound, "staging_bytes")
        assert slots * slot.nbytes <= bound and slot.pages <= 9
        assert slot.nbytes % SLOT_ALIGN == 0
        if slot.pages:
            assert program.host(slot.pages).nbytes <= slot.nbytes
            more = program.host(slot.pages + 1).nbytes
            assert slot.pages == 9 or more > bound // slots // SLOT_ALIGN * SLOT_ALIGN
        else:
            assert name in STATES and slot.nbytes < page


def test_pages_of_these_pools_can_be_cut() -> None:
    """Layers outermost in a page, or outside it; tokens outside the layers leave nothing to cut."""
    cut = {(name, layout) for name, form, layout in PROGRAMS if sized(name, form, layout).cuts("load")}
    every = {(name, layout) for name, _, layout in PROGRAMS}
    tokens = {"mha", "mla", "mla_fp8", "k_only", "mha_mxfp8"}
    assert every - cut == {
        *((name, "page_first") for name in tokens),
        *((name, "page_record") for name in ("mha", "mla", "mha_mxfp8")),
        *(("mha", layout) for layout in ("page_head", "page_unified")),
    }
    both = {
        (name, form, layout)
        for name, form, layout in PROGRAMS
        if sized(name, form, layout).cuts("write_back")
    }
    assert both == set(IN_PLACE)


# ---- cutting


@pytest.mark.parametrize(("name", "form", "layout"), IN_PLACE)
def test_units_are_all_bytes_of_a_page_and_none_twice(name: str, form: str, layout: str) -> None:
    program = sized(name, form, layout)
    found = units(program)
    assert all(a.start + a.nbytes <= b.start for a, b in pairwise(found))
    assert sum(unit.nbytes for unit in found) == program.host(1).page_bytes - _padding(program)
    assert len({(unit.column, unit.position) for unit in found}) == len(found)


def _padding(program: SizedProgram) -> int:
    walks = [walk for walk in program.walks if walk.name == "pages"]
    return program.host(1).page_bytes - sum(walk.runs * walk.atom for walk in walks)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(IN_PLACE), st.integers(0, 400), st.integers(1, 12), st.integers(0, 3))
def test_parts_are_all_units_in_turn_and_each_fits_its_slot(
    of: tuple[str, str, str], more: int, count: int, pages: int
) -> None:
    program = sized(*of)
    least = least_bytes(program) // 2
    slot = Slot(pages, 0) if pages else Slot(0, least + more // SLOT_ALIGN * SLOT_ALIGN)
    cutter = Cutter(program, 5, slot)
    parts = cutter.parts or ((0, len(cutter.units)),)
    assert [first for first, _ in parts[1:]] == [end for _, end in parts[:-1]]
    assert (parts[0][0], parts[-1][1]) == (0, len(cutter.units))
    for part in parts:
        pieces = cutter.pieces(*part, count)
        assert len(pieces) <= count and (pieces[0][0], pieces[-1][1]) == part
        assert all(a[1] == b[0] and a[0] < a[1] for a, b in pairwise(pieces))
        cuts = [cutter.cut("load", part[0], *piece) for piece in pieces]
        taken = sorted((run.inside, run.inside + run.nbytes) for cut in cuts for run in cut.runs)
        assert all(a[1] <= b[0] for a, b in pairwise(taken))  # pieces lie side by side in the slot
        assert pages or (taken[0][0] >= 0 and taken[-1][1] <= slot.nbytes)
        for piece, cut in zip(pieces, cuts, strict=True):
            numbers = cut.steps.numbers
            width = len(program.columns)
            said = {(n % width, number) for n, number in enumerate(numbers) if number != ABSENT}
            assert said == {(u.column, u.position) for u in cutter.units[slice(*piece)]}


def test_directions_have_steps_of_their_own() -> None:
    """Each is written to the device in the stream of its direction, which the other does not wait for."""
    cutter = Cutter(sized("kda_state", "stacked", "page_first"), 5, Slot(2, 0))
    one, two = cutter.cut("load", 0, 0, 2), cutter.cut("write_back", 0, 0, 2)
    assert one.steps is not two.steps and one.steps.numbers == two.steps.numbers
    assert cutter.cut("load", 0, 0, 2) is one


# ---- bytes


class Chunks:
    """Costs by which every staged transfer is best cut into so many chunks."""

    def __init__(self, count: int) -> None:
        self.count = count

    def of(self, direction: str) -> Chunks:
        return self

    def chunks(self, nbytes: int) -> int:
        return self.count

    equal_chunks = chunks


@pytest.mark.parametrize("chunks", [1, 3, 50])
@pytest.mark.parametrize("share", ["least", "half a page", "two pages"])
@pytest.mark.parametrize(("name", "form", "layout"), IN_PLACE)
def test_pages_in_parts_arrive_whole(name: str, form: str, layout: str, share: str, chunks: int) -> None:
    """Both directions, in any order of pages; padding stays zero, guards hold, other pages are untouched."""
    kind: Any = generated.pool_class(name)
    program = sized(name, form, layout)
    page = program.host(1).nbytes
    bounds = {"least": least_bytes(program), "half a page": max(least_bytes(program), page)}
    bound = bounds.get(share, 2 * slots_of(True) * (page + SLOT_ALIGN))
    bench = cases.Bench(kind, odd(name), form, layout, staging_bytes=bound)
    pool: Any = bench.pool
    assert (pool.staging_pages == 0) == (bound < 2 * page)
    pool._transfers._staging._costs = Chunks(chunks)
    pages = torch.tensor([4, 0, 5, 2]), torch.tensor([6, 1, 3, 2])
    pool.write_back(*pages, "page", path="torch").wait()
    wanted = pool.kv_buffer.clone()
    pool.kv_buffer.zero_()
    ticket = pool.write_back(*pages, "page", path="staged", validate="full")
    ticket.wait()
    assert ticket.path == "staged" and torch.equal(pool.kv_buffer, wanted)
    rows = [tensor for view in pool._bound.views.values() for tensor in view]
    kept = [tensor.clone() for tensor in rows]
    for tensor in rows:
        tensor.fill_(7)
    other = pages[0], pages[1].flip(0)
    pool.load(*other, "page", path="torch").wait()
    expected = [tensor.clone() for tensor in rows]
    for tensor in rows:
        tensor.fill_(7)
    pool.load(*other, "page", path="staged", validate="full").wait()
    assert all(torch.equal(a, b) for a, b in zip(rows, expected, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(kept, expected, strict=True))
    for tensor in rows:
        tensor.fill_(7)
    layered = pool.load(*other, "page", path="staged", order="layer")
    for layer in layered.layers:
        layered.wait_layer(layer)
    layered.wait()
    assert all(torch.equal(a, b) for a, b in zip(rows, expected, strict=True))
    assert not pool.overwritten_guard()
    bench.close()


@pytest.mark.parametrize(
    ("slots", "pages", "staged"), [(1, 2, True), (1, 3, False), (0, 1, True), (0, 2, False)]
)
def test_layers_are_staged_only_where_no_slot_is_used_twice_for_one(
    slots: int, pages: int, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each page takes launches of its own in every window; who asks for it gets it."""
    name, form, layout = IN_PLACE[0]
    program = sized(name, form, layout)
    bound = 2 * (program.host(1).nbytes + SLOT_ALIGN) if slots else least_bytes(program)
    kind: Any = generated.pool_class(name)
    pool: Any = cases.Bench(kind, odd(name), form, layout, staging_bytes=bound).pool
    assert pool.staging_pages == slots
    whole: list[bool] = []

    def decide(*key: Any) -> tuple[str, None]:
        whole.append(key[3])
        return "torch", None

    monkeypatch.setattr(pool, "_decide", decide)
    ids = torch.arange(pages), 1 + torch.arange(pages)
    pool.load(*ids, "page", order="layer").wait()
    pool.load(*ids, "page", order="layer", path="torch").wait()
    pool.load(*ids, "page").wait()
    assert whole == [staged, True, True]
