"""Fits the constants of the cost model to the figures of the headline grid.

In: the file that ``grid.py --json`` has written. Out: both sets of constants as they stand in
`runtime/costs.py`, and how far the model is from every cell that it misses by more than 5 %.

Run ``python benchmarks/fit_costs.py grid.json``; the defaults come from a run that cut every transfer into
8 chunks of at least 2 MiB (``--chunks 8 --least-mb 2``).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

from poolwright.runtime.costs import DEFAULTS, Costs, Work, predict
from poolwright.runtime.staging import fill_sizes
from poolwright.runtime.tools.fit import Sample, fit

PATHS = ("zero_copy", "staged")
MISSED = 0.05


def sample(cell: dict[str, Any], path: str, chunks: int) -> Sample:
    figure = cell["figures"][path]
    ranges = cell["total"] // cell["range_bytes"]
    copies = 0 if path == "zero_copy" else ranges
    return Sample(cell["total"], chunks if copies else 0, copies, figure["seconds"], figure["submit"])


def chunks_of(cell: dict[str, Any], chunks: int, least: int, slot_bytes: int) -> int:
    """Chunks of a staged cell: about so many of at least `least` bytes, of whole pages that fit a slot."""
    pages, page = cell["pages"], cell["total"] // cell["pages"]
    chunks = max(1, min(chunks, pages * page // max(least, 1)))
    return sum(map(len, fill_sizes(pages, chunks, max(1, slot_bytes // page), cell["direction"])))


def main() -> int:
    parser = argparse.ArgumentParser(description="fit the cost model to the headline grid")
    parser.add_argument("grid", type=Path)
    parser.add_argument("--chunks", type=int, help="chunks of a staged cell (default: what the model says)")
    parser.add_argument("--least-mb", type=int, default=0, help="bytes of the smallest chunk")
    parser.add_argument("--slot-mb", type=int, default=32)
    options = parser.parse_args()
    cells = json.loads(options.grid.read_text(encoding="utf-8"))["cells"]
    found, slot = {}, options.slot_mb << 20
    for direction in ("write_back", "load"):
        start = DEFAULTS.of(direction)
        here = [cell for cell in cells if cell["direction"] == direction]
        counts = [
            chunks_of(c, options.chunks or start.chunks(c["total"]), options.least_mb << 20, slot)
            for c in here
        ]
        pairs = [
            sample(cell, path, count) for cell, count in zip(here, counts, strict=True) for path in PATHS
        ]
        found[direction] = fit(pairs, start)
        print(direction)
        for name, value in asdict(found[direction]).items():
            print(f"    {name}={value:.3g},")
    costs = Costs(found["write_back"], found["load"], str(options.grid))
    for cell in cells:
        if cell["direction"] in found:
            report(cell, costs)
    return 0


def report(cell: dict[str, Any], costs: Costs) -> None:
    """The paths of a cell that the model misses."""
    ranges = cell["total"] // cell["range_bytes"]
    work = Work(cell["direction"], cell["range_bytes"], ranges, cell["total"])
    for path in PATHS:
        expected, took = predict(path, work, costs), cell["figures"][path]["seconds"]
        if expected is not None and abs(expected / took - 1) > MISSED:
            name = f"{cell['shape']} page {cell['page_size']} x {cell['pages']} {cell['order']}"
            print(f"{name} {cell['direction']} {path}: {expected * 1e6:.1f} us, measured {took * 1e6:.1f}")


if __name__ == "__main__":
    sys.exit(main())
