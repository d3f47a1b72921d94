"""Loads in layer order: which run comes when, and which lane goes on, as the compiled primitives say it."""

from __future__ import annotations

import ctypes

import pytest

from poolwright.runtime import jit

SOURCE = """
#include "poolwright/lanes.h"
using namespace pw;
PW_EXPORT void turns(u32 count, u32 inner, u32 runs, u32 steps, Turn* found) {
  for (u32 at = 0; at < count; ++at) found[at] = turn(at, inner, runs, steps);
}
PW_EXPORT u32 next_of(u32 lane, u32 lanes, u32 total) { return next(lane, lanes, total); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("turns") / "host.cpp"
    path.write_text(SOURCE)
    return jit.load_host(jit.host_libraries([jit.Unit("turns", path)])[0])


@pytest.mark.parametrize(
    ("inner", "runs", "steps"), [(1, 1, 1), (1, 1, 3), (1, 4, 3), (2, 4, 3), (4, 4, 3), (3, 6, 1)]
)
def test_runs_are_walked_as_they_lie_on_the_host(
    library: ctypes.CDLL, inner: int, runs: int, steps: int
) -> None:
    ids = 5
    wanted = [
        (n, step, outer * inner + run)
        for n in range(ids)
        for outer in range(runs // inner)
        for step in range(steps)
        for run in range(inner)
    ]
    found = (ctypes.c_uint32 * (3 * len(wanted)))()
    library.turns(len(wanted), inner, runs, steps, found)
    assert list(zip(found[::3], found[1::3], found[2::3], strict=True)) == wanted


@pytest.mark.parametrize("total", [0, 1, 31, 32, 64, 95, 96, 97, 128, 4096])
def test_the_warps_that_had_less_go_first(library: ctypes.CDLL, total: int) -> None:
    lanes = 96
    after = [library.next_of(lane, lanes, total) for lane in range(lanes)]
    assert sorted(after) == list(range(lanes))
    assert all(after[lane] % 32 == lane % 32 for lane in range(lanes))
    full = total % lanes // 32  # warps that had a whole round more
    assert [after[32 * warp] // 32 for warp in range(3)] == [(warp - full) % 3 for warp in range(3)]
