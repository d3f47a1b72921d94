"""Sizes of a launch as tables: blocks by what is moved, steps of a load in layer order by their bytes."""

from __future__ import annotations

import pytest

from poolwright.runtime.driver.cuda import blocks
from poolwright.runtime.launch import window

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("purpose", "nbytes", "wanted"),
    [
        ("load", 0, 8),
        ("load", 512 * KIB, 8),
        ("load", 512 * KIB + 1, 9),
        ("load", MIB, 16),
        ("load", 2 * MIB, 32),
        ("load", 4 * MIB, 32),
        ("load", 4 * MIB + 1, 8),
        ("load", 1 << 40, 8),
        ("write_back", 64, 4),
        ("write_back", 1 << 40, 4),
        ("gather", 2 * MIB, 264),
        ("scatter", 2 * MIB, 264),
    ],
)
def test_short_loads_take_more_blocks_than_long_ones(purpose: str, nbytes: int, wanted: int) -> None:
    assert blocks(purpose, nbytes) == wanted


@pytest.mark.parametrize(
    ("step_bytes", "most", "wanted"),
    [
        (512, 512 * KIB, 1024),
        (512 * KIB, 512 * KIB, 1),
        (256 * KIB, 512 * KIB, 2),
        (256 * KIB + 1, 512 * KIB, 1),
        (1 << 40, 512 * KIB, 1),
        (0, 512 * KIB, 512 * KIB),
    ],
)
def test_small_layers_are_moved_together(step_bytes: int, most: int, wanted: int) -> None:
    assert window(step_bytes, most) == wanted
