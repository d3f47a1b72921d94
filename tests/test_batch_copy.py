"""Copies through the door of the CUDA driver: every kind of list reaches compiled code as 64-bit words."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import pytest

from poolwright.runtime.driver.cuda import CudaDriver
from poolwright.runtime.errors import PoolError

TO, SOURCE, SIZES = [1 << 40, 2 << 40, (1 << 64) - 1], [3, 4, 5], [64, 128, 1]
STREAM = 77


class Calls:
    """Notes what it is called with, as compiled code would read it; answers `code`."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.rows, self.rest = code, list[list[int]](), tuple[int, ...]()

    def copies(self, to: int, source: int, sizes: int, count: int, *rest: int) -> int:
        self.rows = [list((ctypes.c_uint64 * count).from_address(at)) for at in (to, source, sizes)]
        self.rest = rest
        return self.code


def door(calls: Calls) -> CudaDriver:
    """The driver of a device that is not there."""
    driver = object.__new__(CudaDriver)
    driver.__dict__["_calls"] = calls
    return driver


@pytest.mark.parametrize(
    "rows",
    [
        (TO, SOURCE, SIZES),
        tuple(array("Q", row) for row in (TO, SOURCE, SIZES)),
        (TO, array("I", SOURCE), tuple(SIZES)),
        (array("Q", TO), range(3, 6), array("L", SIZES)),
    ],
    ids=["lists", "words", "narrow words", "mixed"],
)
def test_every_kind_of_sequence_is_taken(
    rows: tuple[Sequence[int], Sequence[int], Sequence[int]],
) -> None:
    calls = Calls()
    door(calls).copy(*rows, STREAM, inward=True)
    assert (calls.rows, calls.rest) == ([TO, SOURCE, SIZES], (STREAM, True))


def test_an_error_of_the_device_is_raised_with_its_number() -> None:
    with pytest.raises(PoolError, match=r"CUDA: 3 copies: .*\(700\)"):
        door(Calls(700)).copy(TO, SOURCE, SIZES, STREAM, inward=False)


@pytest.mark.parametrize("short", [0, 1, 2])
def test_rows_of_unequal_length_never_reach_the_device(short: int) -> None:
    calls, rows = Calls(), [TO, SOURCE, SIZES]
    rows[short] = rows[short][:2]
    with pytest.raises(ValueError, match="expected equal lengths"):
        door(calls).copy(rows[0], rows[1], rows[2], STREAM, inward=False)
    assert calls.rows == []


def test_a_number_that_is_no_address_is_refused() -> None:
    with pytest.raises(OverflowError):
        door(Calls()).copy([-1, 2, 3], SOURCE, SIZES, STREAM, inward=False)
