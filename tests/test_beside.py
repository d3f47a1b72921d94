"""Transfers of both directions at once: which path each takes, and in how many blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from simulation import CONFIGS, World, world

from poolwright.runtime.choice import Availability, choose
from poolwright.runtime.costs import DEFAULTS, Costs, Rates, Work, predict
from poolwright.runtime.driver.sizes import blocks

CUDA = [Availability(name, True, "compiled") for name in ("zero_copy", "staged", "torch")]


@pytest.mark.parametrize(
    ("what", "range_bytes", "ranges", "alone", "beside"),
    [
        # pages of what; paths of (write-back, load) alone, and while the other direction runs
        (
            "MHA 80 x 256 B, 1,024 of one token",
            20_480,
            2048,
            ("staged", "staged"),
            ("zero_copy", "zero_copy"),
        ),
        ("MLA 61 x 1152 B, 64 of one", 70_272, 64, ("zero_copy", "zero_copy"), ("zero_copy", "zero_copy")),
        ("MLA 61 x 1152 B, 256 of one", 70_272, 256, ("staged", "staged"), ("zero_copy", "staged")),
        ("indexer 61 x 8448 B, 8", 515_328, 8, ("zero_copy", "zero_copy"), ("zero_copy", "staged")),
        ("MHA 32 x 2048 B, 1,024 of one", 65_536, 2048, ("staged", "staged"), ("zero_copy", "staged")),
        ("MHA 32 x 2048 B, 32 of 64", 4 << 20, 64, ("staged", "staged"), ("staged", "staged")),
    ],
)
def test_both_directions_share_the_cpu(
    what: str, range_bytes: int, ranges: int, alone: tuple[str, str], beside: tuple[str, str]
) -> None:
    for at, direction in enumerate(("write_back", "load")):
        moved = Work(direction, range_bytes, ranges, ranges * range_bytes)
        assert choose(moved, CUDA, DEFAULTS) == alone[at], what
        assert choose(replace(moved, beside=True), CUDA, DEFAULTS) == beside[at], what


def test_a_prediction_beside_counts_the_other_direction_s_share() -> None:
    moved = Work("load", 1 << 20, 4, 4 << 20, beside=True)
    rates = replace(DEFAULTS.load, submit_chunk=1.0, submit_copy=1e-9, direct_beside=1 << 20)
    costs = Costs(DEFAULTS.write_back, rates, "a test")
    chunks = rates.chunks(moved.total)
    assert predict("staged", moved, costs) == pytest.approx(2 * chunks, rel=1e-6)
    assert predict("zero_copy", moved, costs) == pytest.approx(4 + rates.direct_start)


def test_a_write_back_beside_loads_takes_fewer_blocks() -> None:
    assert blocks("write_back_beside", 1 << 30) < blocks("write_back", 1 << 30)


def rates_of(rates: Rates) -> Rates:
    """Copies by which `staged` is the faster path of all, and takes a second of the CPU."""
    return replace(rates, staged_start=1e-9, chunk=1e-9, copy=1e-12, link_rate=1e15, submit_chunk=1.0)


def watched(made: World) -> list[str]:
    """What kernels are launched for from now on."""
    launcher, found = made.pool._transfers._launcher, []
    grid = launcher._kernels.grid

    def noted(purpose: str, nbytes: int) -> Any:
        found.append(purpose)
        return grid(purpose, nbytes)

    launcher._kernels.grid = noted
    return found


def test_the_path_follows_from_whether_the_other_direction_runs() -> None:
    made = world(CONFIGS[0], lambda n: 0)
    pool, code = made.pool, made.pool._shared.code
    code.costs = Costs(rates_of(DEFAULTS.write_back), rates_of(DEFAULTS.load), "a test")
    first, second = (torch.tensor([0]), torch.tensor([1])), (torch.tensor([2]), torch.tensor([3]))
    purposes = watched(made)
    made.produce(made.driver.caller, range(8 * made.page_size))
    pool.write_back(*second, "page").wait()
    purposes.clear()
    assert pool.write_back(*first, "page").path == "staged"
    assert pool.load(*second, "page").path == "zero_copy"
    again = pool.write_back(*first, "page")
    assert again.path == "zero_copy"
    assert pool.write_back(*first, "page", path="staged").path == "staged"  # forced ones are taken
    assert purposes == ["gather", "load", "write_back_beside", "gather"]
    pool._transfers.drain()
    assert pool.write_back(*first, "page").path == "staged"
    pool._transfers.drain()
    purposes.clear()
    pool.write_back(*first, "page", path="zero_copy")
    assert purposes == ["write_back"]
