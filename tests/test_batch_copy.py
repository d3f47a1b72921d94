"""The batch copy of the CUDA driver with a function in the place of the device's: what it is called with."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import pytest

from poolwright.runtime.driver.cuda import BatchCopy
from poolwright.runtime.errors import PoolError

TO, SOURCE, SIZES = [1 << 40, 2 << 40, (1 << 64) - 1], [3, 4, 5], [64, 128, 1]
STREAM = 77


class Function:
    """Notes what it is called with, as the device would read it; answers `code`."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.rows, self.rest = code, list[list[int]](), tuple[int, ...]()
        self.attributes, self.first = b"", -1

    def __call__(self, *arguments: int) -> int:
        count = arguments[3]
        self.rows = [list((ctypes.c_uint64 * count).from_address(at)) for at in arguments[:3]]
        self.attributes = ctypes.string_at(arguments[4], 64)
        self.first = ctypes.c_size_t.from_address(arguments[5]).value
        self.rest = arguments[6:]
        return self.code


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
def test_every_kind_of_sequence_reaches_the_device_as_64_bit_words(
    rows: tuple[Sequence[int], Sequence[int], Sequence[int]],
) -> None:
    function = Function()
    for _ in range(2):  # what was prepared is used again
        BatchCopy(function, 8)(*rows, STREAM)
        assert function.rows == [TO, SOURCE, SIZES]


def test_copies_are_in_stream_order_with_one_set_of_attributes() -> None:
    function = Function()
    BatchCopy(function, 8)(TO, SOURCE, SIZES, STREAM)
    assert function.attributes == (1).to_bytes(4, "little") + bytes(60)
    assert function.first == 0
    assert function.rest == (1, STREAM)


def test_the_older_signature_has_a_place_for_the_copy_that_failed() -> None:
    function = Function()
    copy = BatchCopy(function, 9)
    copy(TO, SOURCE, SIZES, STREAM)
    one, failed, stream = function.rest
    assert (one, stream) == (1, STREAM)
    assert ctypes.c_size_t.from_address(failed).value == 0


def test_an_error_of_the_device_is_raised_with_its_number() -> None:
    with pytest.raises(PoolError, match="batch of 3 copies: error 700"):
        BatchCopy(Function(700), 8)(TO, SOURCE, SIZES, STREAM)


@pytest.mark.parametrize("short", [0, 1, 2])
def test_rows_of_unequal_length_never_reach_the_device(short: int) -> None:
    function, rows = Function(), [TO, SOURCE, SIZES]
    rows[short] = rows[short][:2]
    with pytest.raises(ValueError, match="expected equal lengths"):
        BatchCopy(function, 8)(rows[0], rows[1], rows[2], STREAM)
    assert function.rows == []


def test_a_number_that_is_no_address_is_refused() -> None:
    with pytest.raises(OverflowError):
        BatchCopy(Function(), 8)([-1, 2, 3], SOURCE, SIZES, STREAM)
