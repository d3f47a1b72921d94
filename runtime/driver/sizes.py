"""Sizes of launches on a GPU: bytes in; blocks, and how a load in layer order is cut, out.

The constants were measured on an H200 (docs/benchmarks.md, ``benchmarks/layer_order.py``).
"""

from __future__ import annotations

from poolwright.runtime.driver import Windows

BLOCKS = {
    "write_back": 4,
    "write_back_beside": 2,
    "load": 8,
    "load_layers": 12,
    "gather": 264,
    "scatter": 264,
}
"""Blocks of a long launch: over the link no more than it needs (docs/benchmarks.md). Beside loads a
write-back has fewer: with more of its stores on the way reads come at half their rate."""

SHORT_BYTES, SHORT_BLOCKS, BLOCK_BYTES = 4 << 20, 64, 16 << 10
"""A load of so few bytes gets up to so many blocks; what one moves at least (a quarter of what it can have in
flight)."""

WHOLE_BYTES = 512 << 10
"""A load of so few bytes is not cut: it is over before a counter would be seen."""

FIRST_BYTES = 256 << 10
"""What goes in front of such a load, or one layer: an event tells it about 8 us after its last byte."""

WINDOW_SHARE, LEAST_WINDOW, MOST_WINDOW = 8, 512 << 10, 8 << 20
"""Layers that are moved together: a part of the load within bounds, or one layer."""


def blocks(purpose: str, nbytes: int) -> int:
    """Blocks of a launch that moves so many bytes.

    A short load is over before it disturbs anybody, and takes less time when all of it is in flight at once.
    """
    if purpose in ("load", "load_layers") and nbytes <= SHORT_BYTES:
        return min(max(-(-nbytes // BLOCK_BYTES), BLOCKS[purpose]), SHORT_BLOCKS)
    return BLOCKS[purpose]


def windows(step_bytes: int, steps: int) -> Windows:
    """How a load in layer order of so many steps, of so many bytes each, is cut.

    Small layers alone would leave the link idle between them; too many at once are told late.
    """
    total, size = step_bytes * steps, max(step_bytes, 1)
    if total <= WHOLE_BYTES or steps == 1:
        return Windows(0, steps)
    window = min(max(total // WINDOW_SHARE, LEAST_WINDOW), MOST_WINDOW)
    return Windows(max(1, FIRST_BYTES // size), max(1, window // size))
