"""Sizes of a launch as tables: blocks by what is moved, steps of a load in layer order by their bytes."""

from __future__ import annotations

import pytest

from poolwright.runtime.driver.sizes import blocks, windows

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("purpose", "nbytes", "wanted"),
    [
        ("load", 0, 8),
        ("load", 128 * KIB, 8),
        ("load", 128 * KIB + 1, 9),
        ("load", 512 * KIB, 32),
        ("load", MIB, 64),
        ("load", 4 * MIB, 64),
        ("load", 4 * MIB + 1, 8),
        ("load", 1 << 40, 8),
        ("load_layers", MIB, 64),
        ("load_layers", 1 << 40, 12),
        ("write_back", 64, 4),
        ("write_back", 1 << 40, 4),
        ("gather", 2 * MIB, 264),
        ("scatter", 2 * MIB, 264),
    ],
)
def test_short_loads_take_more_blocks_than_long_ones(purpose: str, nbytes: int, wanted: int) -> None:
    assert blocks(purpose, nbytes) == wanted


@pytest.mark.parametrize(
    ("step_bytes", "steps", "wanted"),
    [
        (8448, 61, (0, 61)),  # all of it is short
        (16 * KIB, 32, (0, 32)),
        (16 * KIB, 33, (16, 32)),
        (256 * KIB, 80, (1, 10)),  # an eighth of it
        (MIB, 61, (1, 7)),
        (4 * MIB, 32, (1, 2)),  # 8 MiB at most
        (64 * MIB, 4, (1, 1)),
        (1 << 40, 1, (0, 1)),
        (0, 7, (0, 7)),
    ],
)
def test_small_layers_are_moved_together(step_bytes: int, steps: int, wanted: tuple[int, int]) -> None:
    assert windows(step_bytes, steps) == wanted


def test_a_first_launch_leaves_steps_for_another() -> None:
    for step_bytes in (0, 1, 511, 8448, 256 * KIB, 256 * KIB + 1, MIB, 1 << 40):
        for steps in (1, 2, 3, 32, 61, 600):
            first, each = windows(step_bytes, steps)
            assert 0 <= first < steps and each >= 1
