"""What `verify` expects of a transfer: runs and words of tables against the tables themselves."""

from __future__ import annotations

import itertools

import pytest
import torch

import poolwright.generated as generated
from poolwright.runtime.tools.cases import Bench, Case
from poolwright.runtime.tools.expected import Contents, Place, equal, places
from poolwright.runtime.tools.oracle import Bytes
from poolwright.runtime.tools.samples import samples, unaligned

POOLS = ("mha", "kda_state", "dsv4_paged", "mha_mxfp8")


@pytest.mark.parametrize("name", POOLS)
def test_runs_cover_exactly_what_the_tables_say(name: str) -> None:
    """Moved in runs, byte by byte the same as through the tables; also where tensors are not aligned."""
    pool_class = generated.pool_class(name)
    spec = pool_class.spec
    form, layout = list(spec.programs)[-1]
    odd, wide, *_ = samples(pool_class)
    for sample in (odd, wide, unaligned(spec, wide)):
        bench = Bench(pool_class, sample, form, layout)
        try:
            host, arena = bench.host, bench.device.arena
            random = torch.Generator().manual_seed(3)
            source = Contents(host.nbytes, random).next()
            target = torch.zeros_like(arena)
            byte_by_byte = torch.zeros_like(arena)
            there = {at.name: at.at[: bench.host_pages] for at in bench.device.bytes}
            for at in host.bytes:
                byte_by_byte[there[at.name]] = source[at.at]
            for place in places(host.bytes, bench.device.bytes):
                place.move(source, place.host, target, place.device[: bench.host_pages])
            assert bool(byte_by_byte.any())
            assert torch.equal(target, byte_by_byte)
        finally:
            bench.close()


def table(name: str, at: list[list[int]]) -> Bytes:
    return Bytes(name, ("page", "byte"), torch.tensor(at))


@pytest.mark.parametrize(
    ("host", "device", "word", "run"),
    [
        ([[0, 1, 2, 3, 4, 5, 6, 7]], [[8, 9, 10, 11, 12, 13, 14, 15]], 8, 1),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], [[4, 5, 6, 7, 8, 9, 10, 11]], 4, 2),
        ([[2, 3, 4, 5]], [[4, 5, 6, 7]], 2, 2),
        ([[0, 1, 2, 3]], [[1, 2, 3, 4]], 1, 4),
        ([[0, 1, 2, 3]], [[3, 2, 1, 0]], 1, 1),
        ([[0, 1, 2], [3, 4, 5]], [[0, 1, 2], [4, 5, 6]], 1, 3),
    ],
)
def test_the_longest_run_and_the_widest_word(
    host: list[list[int]], device: list[list[int]], word: int, run: int
) -> None:
    (place,) = places([table("k", host)], [table("k", device)])
    assert (place.word, place.run) == (word, run)


def test_a_page_without_tokens_is_expected_once_for_all_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """By tokens as many runs are copied as by pages."""
    pool_class = generated.pool_class("dsv4_paged")
    form, layout = next(iter(pool_class.spec.programs))
    bench = Bench(pool_class, samples(pool_class)[0], form, layout)
    moved: dict[str, int] = {"page": 0, "token": 0}
    real = Place.move
    try:
        for unit in moved:

            def move(place: Place, *sides: torch.Tensor, unit: str = unit) -> None:
                moved[unit] += sides[1].numel()
                real(place, *sides)

            monkeypatch.setattr(Place, "move", move)
            case = Case("write_back", "host", unit, torch.arange(5), torch.arange(5) + 1)
            before = bench.begin(case)
            bench.pool.write_back(*before.ids, unit, path="host").wait()
            assert bench.end(case, before) == ""
    finally:
        bench.close()
    assert moved["page"] == moved["token"] > 0


def test_equal_looks_at_every_byte() -> None:
    left = torch.arange(21, dtype=torch.uint8)
    for at in range(21):
        right = left.clone()
        assert equal(left, right)
        right[at] += 1
        assert not equal(left, right)
    assert not equal(left, left[:20])


def test_contents_differ_from_one_transfer_to_the_next_and_keep_padding_zero() -> None:
    padding = torch.zeros(37, dtype=torch.bool)
    padding[5:9] = True
    contents = Contents(37, torch.Generator().manual_seed(1), padding)
    found = [contents.next() for _ in range(4)]
    assert all(not bool(each[5:9].any()) and len(each) == 37 for each in found)
    assert all(not torch.equal(one, two) for one, two in itertools.pairwise(found))
