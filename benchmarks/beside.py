"""Transfers of both directions at once, by every pair of paths; and what kernels that write leave of reads.

In: a CUDA device. Out: two tables on standard output. Pairs: one thread submits a write-back and a load in
turn and has a few of each under way; GB/s of both by the clock of the CPU, and the CPU's time of a pair.
Writers: a write-back by kernels of so many threads and blocks, alone and beside a plain copy to the device.

Run ``python benchmarks/beside.py``; ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

from asked import asked
from busy import DEPTH, FAST, Window, ways
from shapes import SHAPES, Rig
from timeline import rate

from poolwright.runtime.driver import sizes
from poolwright.runtime.driver.cuda import CudaKernels

CELLS = ((5, 64), (5, 1024), (6, 1024), (7, 256), (7, 1024), (0, 1), (0, 32), (2, 64))
"""Position in SHAPES, pages."""

PAIRS = (
    *(("staged", "staged", 4), ("staged", "zero_copy", 4), ("zero_copy", "staged", 4)),
    *(("zero_copy", "staged", 2), ("zero_copy", "zero_copy", 4), ("zero_copy", "zero_copy", 2)),
)
"""Paths of write-back and load, blocks of a write-back by kernels."""

WRITERS = ((512, 1), (512, 2), (512, 3), (512, 4), (256, 3), (256, 8), (128, 6))
"""Threads of a block, blocks."""

WRITTEN = (0, 32)
SECONDS = 0.12


@contextmanager
def writing(blocks: int, threads: int = CudaKernels.block) -> Iterator[None]:
    """Write-backs by kernels of so many blocks, beside loads or not; `threads`: of pools built meanwhile."""
    before = dict(sizes.BLOCKS), CudaKernels.block
    sizes.BLOCKS.update(write_back=blocks, write_back_beside=blocks)
    CudaKernels.block = threads
    try:
        yield
    finally:
        sizes.BLOCKS.update(before[0])
        CudaKernels.block = before[1]


def pair(rig: Rig, pages: int, out: str, inward: str, times: int) -> tuple[float, float]:
    """Seconds of so many pairs, and those of their submissions alone."""
    host, device = rig.lists(2 * pages, "scattered")
    under_way: deque[tuple[Any, Any]] = deque()
    torch.cuda.synchronize()
    begin, calls = time.perf_counter(), 0.0
    for _ in range(times):
        called = time.perf_counter()
        wrote = rig.pool.write_back(host[:pages], device[:pages], unit="page", path=out)
        loaded = rig.pool.load(host[pages:], device[pages:], unit="page", path=inward)
        calls += time.perf_counter() - called
        under_way.append((wrote, loaded))
        if len(under_way) > DEPTH:
            for ticket in under_way.popleft():
                ticket.wait()
    for tickets in under_way:
        for ticket in tickets:
            ticket.wait()
    return time.perf_counter() - begin, calls


def pairs(repeats: int) -> None:
    heads = [
        f"{out} of {blocks}, {inward}" if out == "zero_copy" else f"{out}, {inward}"
        for out, inward, blocks in PAIRS
    ]
    print(f"GB/s of both (CPU us of a pair), write-back and load by\n\n| pool, pages | {' | '.join(heads)} |")
    print("|---" * (len(PAIRS) + 1) + "|")
    for at, pages in CELLS:
        shape = SHAPES[at]
        rig, total = Rig(shape, 2 * pages, "cuda:0"), pages * shape.page_bytes
        times, cells = max(2 * DEPTH, round(SECONDS * FAST / total)), []
        for out, inward, blocks in PAIRS:
            with writing(blocks):
                found = [pair(rig, pages, out, inward, times) for _ in range(repeats + 1)][1:]
            seconds, cpu = (statistics.median(each) for each in zip(*found, strict=True))
            cells.append(f"{2 * times * total / seconds / 1e9:.1f} ({cpu / times * 1e6:.0f})")
        print(f"| {shape.label}, {pages} | {' | '.join(cells)} |", flush=True)
        rig.close()
        torch.cuda.empty_cache()


def writers(repeats: int) -> None:
    window, (at, pages) = Window(), WRITTEN
    shape, total = SHAPES[at], pages * SHAPES[at].page_bytes
    times = max(2 * DEPTH, round(SECONDS * FAST / total))
    print("\nGB/s of a write-back by kernels, beside a plain copy to the device\n")
    print("| threads x blocks | alone | out and in together |\n|---|---|---|")
    for threads, blocks in WRITERS:
        with writing(blocks, threads):
            rig = Rig(shape, 2 * pages, "cuda:0")
            host, device = rig.lists(2 * pages, "scattered")
            out = dict(ways(rig, "write_back", host[:pages], device[:pages]))["zero_copy"]
            inward = dict(ways(rig, "load", host[pages:], device[pages:]))["ref"]
            marks = window.run((window.side, out, times))[0].marks
            both = []
            for _ in range(repeats + 1):
                lanes = window.run((window.side, out, times), (window.other, inward, times))
                speeds = rate(lanes[0], lanes[1], skip=0), rate(lanes[1], lanes[0], skip=0)
                if None not in speeds:
                    both.append([(speed or 0.0) * total / 1e9 for speed in speeds])
            rig.close()
        together = ", ".join(f"{statistics.median(each):.1f}" for each in zip(*both[1:], strict=True))
        alone = times * total / (marks[-1] - marks[0]) / 1e9
        print(f"| {threads} x {blocks} | {alone:.1f} | {together} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="both directions at once, by every pair of paths")
    parser.add_argument("--repeats", type=int, default=3, help="of which the median counts (at least 1)")
    options = asked(parser)
    pairs(options.repeats)
    writers(options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
