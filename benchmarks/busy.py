"""Transfers beside a saturating GEMM, and in both directions at once.

In: a CUDA device; `build/peer` for SGLang's kernels. Out: a table on standard output, ``--json FILE`` for the
figures. The GEMM is bf16, 8192 x 8192 x 8192, back to back. Every window with transfers is paired with one
without, right before it; ways are interleaved. Only GEMMs that ran while transfers ran are counted, and only
transfers that ran while the GEMM did. Both directions at once have no GEMM beside them: one thread submits a
write-back and a load in turn, as an engine's does, and the clock is that of the CPU.

Run ``python benchmarks/busy.py --json busy.json``; ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

import sglang_peer
from asked import asked
from grid import machine, peers
from shapes import SHAPES, Rig, Shape
from timeline import Lane, rate, slowdown

SIDE = 8192
GEMMS = 120
COVER = 40_000_000
"""Device cycles in which everything of a window is submitted: about 20 ms."""

FAST = 48e9
"""Bytes a second that windows are sized for."""

DEPTH = 4
"""Transfers of a direction that an engine has under way."""

GOAL_SPEED, GOAL_SLOWDOWN, GOAL_SUM = 50.0, 3.0, 98.0
CELLS = (
    (0, "write_back", 64),
    (1, "write_back", 200),
    (2, "write_back", 120),
    (4, "write_back", 6),
    (5, "write_back", 1024),
    (7, "write_back", 1024),
    (0, "load", 64),
    (2, "load", 120),
)
"""Eight cells: position in SHAPES, direction, pages."""

BOTH = ((0, 32), (2, 64), (5, 1024), (6, 1024), (7, 1024))
"""Cells of both directions at once: position in SHAPES, pages."""


@dataclass(frozen=True)
class Figure:
    """Medians of one way in one cell; `speed` in GB/s, `slowed` in percent; `cpu_us`: of submitting a
    write-back and a load, where both directions are in use."""

    shape: str
    page_size: int
    pages: int
    direction: str
    way: str
    speed: float
    slowed: float
    speeds: tuple[float, ...]
    slowdowns: tuple[float, ...]
    cpu_us: float = 0.0


ONE_BY_ONE = "staged, one by one"

Way = Callable[[Any], Any]
"""Submits one transfer behind a stream and makes that stream wait for it."""


def ways(
    rig: Rig, direction: str, host: torch.Tensor, device: torch.Tensor, front: Any = None
) -> Iterator[tuple[str, Way]]:
    """Everything that is compared: a plain copy, our paths, SGLang's kernels.

    Transfers begin behind stream `front`, which has no more work once all may start; None: one by one.
    """
    total = len(host) * rig.shape.page_bytes
    there = torch.empty(total, dtype=torch.uint8, device="cuda")
    here = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    to, source = (here, there) if direction == "write_back" else (there, here)
    yield "ref", lambda stream: to.copy_(source, non_blocking=True)
    given = {"write_back": "producer", "load": "readers"}[direction]
    tries: dict[str, dict[str, str]] = {
        "chosen": {},
        "background": {"qos": "background"},
        "zero_copy": {"path": "zero_copy"},
        "staged": {"path": "staged"},
        ONE_BY_ONE: {"path": "staged"},
    }
    for name, more in tries.items():

        def submit(stream: Any, name: str = name, more: dict[str, str] = more) -> None:
            move = getattr(rig.pool, direction)
            behind = stream if front is None or name == ONE_BY_ONE else front
            move(host, device, unit="page", **{given: behind}, **more).wait(stream)

        yield name, submit
    if sglang_peer.available():
        return
    found = [(peer, peer.ids(host, device)) for peer in peers(rig)]
    for name in found[0][0].write_backs if direction == "write_back" else found[0][0].loads:

        def call(stream: Any, name: str = name) -> None:
            for peer, ids in found:
                if direction == "write_back":
                    peer.write_back(name, ids)
                else:
                    peer.load(name, ids, layered=False)

        yield f"sglang {name}", call


class Window:
    """Runs things side by side and reads the clock of the device."""

    def __init__(self) -> None:
        self.busy, self.side, self.other, self.front = (torch.cuda.Stream() for _ in range(4))
        self._a = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
        self._b = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
        self._c = torch.empty(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)

    def gemm(self, stream: Any) -> None:
        torch.matmul(self._a, self._b, out=self._c)

    def run(self, *lanes: tuple[Any, Way, int]) -> list[Lane]:
        """(stream, what, how often) each; all begin together once everything is submitted."""
        torch.cuda.synchronize()
        start = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.busy):
            torch.cuda._sleep(COVER)
            start.record()
        self.front.wait_event(start)
        marks: list[list[torch.cuda.Event]] = []
        for stream, _, _ in lanes:
            stream.wait_event(start)
            with sglang_peer.on_stream(stream):
                marks.append([_mark()])
        # In turns: the driver's queue is not endless, and a lane that is submitted last would begin late.
        turns = [((turn + 1) / lane[2], at) for at, lane in enumerate(lanes) for turn in range(lane[2])]
        for _, at in sorted(turns):
            stream, way, _ = lanes[at]
            with sglang_peer.on_stream(stream):
                way(stream)
                marks[at].append(_mark())
        torch.cuda.synchronize()
        return [Lane([start.elapsed_time(event) / 1e3 for event in events]) for events in marks]

    def pairs(self, out: Way, inward: Way, times: int) -> tuple[float, float]:
        """Seconds of so many of both, from the first call to the last byte, and those of the calls alone."""
        torch.cuda.synchronize()
        under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        begin, calls = time.perf_counter(), 0.0
        for _ in range(times):
            called = time.perf_counter()
            marks = []
            for stream, way in ((self.side, out), (self.other, inward)):
                with sglang_peer.on_stream(stream):
                    way(stream)
                    marks.append(_mark())
            calls += time.perf_counter() - called
            under_way.append((marks[0], marks[1]))
            if len(under_way) > DEPTH:
                for mark in under_way.popleft():
                    mark.synchronize()
        torch.cuda.synchronize()
        return time.perf_counter() - begin, calls


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def beside(
    window: Window, shape: Shape, direction: str, pages: int, repeats: int, staging: int | None
) -> Iterator[Figure]:
    """Every way of one cell beside the GEMM. `staging`: bytes of staging memory (None: the default)."""
    rig = Rig(shape, pages, "cuda:0", staging)
    host, device = rig.lists(pages, "scattered")
    total = pages * shape.page_bytes
    quiet = window.run((window.busy, window.gemm, GEMMS))[0]
    length = quiet.marks[-1] - quiet.marks[0]
    times = max(3, round(0.8 * length * FAST / total))
    tried = dict(ways(rig, direction, host, device, window.front))
    speeds: dict[str, list[float]] = {name: [] for name in tried}
    slowed: dict[str, list[float]] = {name: [] for name in tried}
    for turn in range(repeats + 1):
        for name, way in tried.items():
            alone = window.run((window.busy, window.gemm, GEMMS))[0]
            gemms, moves = window.run((window.busy, window.gemm, GEMMS), (window.side, way, times))
            speed, slower = rate(moves, gemms, skip=0), slowdown(alone, gemms, moves)
            if turn and speed is not None and slower is not None:
                speeds[name].append(speed * total / 1e9)
                slowed[name].append(slower * 100)
    rig.close()
    for name in tried:
        if speeds[name]:
            middles = statistics.median(speeds[name]), statistics.median(slowed[name])
            found = (tuple(speeds[name]), tuple(slowed[name]))
            yield Figure(shape.name, shape.page_size, pages, direction, name, *middles, *found)
        else:
            print(f"left out: {shape.label}, {direction}, {name}: too slow for the window", flush=True)


def both_ways(
    window: Window, shape: Shape, pages: int, repeats: int, staging: int | None
) -> Iterator[Figure]:
    """Write-back and load at once, of different pages, by one thread that has `DEPTH` of each under way."""
    rig = Rig(shape, 2 * pages, "cuda:0", staging)
    host, device = rig.lists(2 * pages, "scattered")
    out = dict(ways(rig, "write_back", host[:pages], device[:pages], window.front))
    inward = dict(ways(rig, "load", host[pages:], device[pages:], window.front))
    total = pages * shape.page_bytes
    times = max(2 * DEPTH, round(0.1 * FAST / total))
    names = [name for name in out if name in inward and not name.startswith("sglang") and name != ONE_BY_ONE]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        for name in names:
            seconds, cpu = window.pairs(out[name], inward[name], times)
            if turn:
                found[name].append((2 * total * times / seconds / 1e9, cpu / times * 1e6))
    rig.close()
    for name, each in found.items():
        speeds, cpu_us = zip(*each, strict=True)
        middle = statistics.median(speeds), 0.0
        made = Figure(shape.name, shape.page_size, pages, "both", name, *middle, speeds, ())
        yield replace(made, cpu_us=statistics.median(cpu_us))


def show(figure: Figure) -> str:
    low, high = min(figure.speeds), max(figure.speeds)
    where = f"| {figure.shape} | {figure.page_size} | {figure.pages} | {figure.direction} | {figure.way} "
    last = f"{figure.cpu_us:.0f} us" if figure.direction == "both" else f"{figure.slowed:.1f}"
    return f"{where}| {figure.speed:.1f} ({low:.1f} to {high:.1f}) | {last} |"


def missed(figures: list[Figure]) -> Iterator[Figure]:
    """What we choose and what misses its target."""
    for figure in figures:
        if figure.direction == "both" and figure.way == "chosen" and figure.speed < GOAL_SUM:
            yield figure
        elif figure.direction == "write_back" and figure.way == "background":
            if figure.speed < GOAL_SPEED or figure.slowed > GOAL_SLOWDOWN:
                yield figure


def main() -> int:
    parser = argparse.ArgumentParser(description="transfers beside a GEMM, and in both directions at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every figure there")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each way (5)")
    numbers = list(range(len(CELLS)))
    parser.add_argument(
        "--cells",
        type=int,
        nargs="*",
        default=numbers,
        choices=numbers,
        metavar="N",
        help="which cells stand beside the GEMM, from 0: rows in the order of the table (default: all)",
    )
    parser.add_argument("--no-both", action="store_true", help="leave both directions at once out")
    parser.add_argument("--staging-mib", type=int, metavar="MIB", help="staging_bytes of every pool")
    options = asked(parser)
    staging = None if options.staging_mib is None else options.staging_mib << 20
    window = Window()
    found: list[Figure] = []
    print(
        "| pool | page | pages | direction | way | GB/s (least to most) "
        "| GEMM slower %, CPU time of a pair |\n" + "|---" * 7 + "|"
    )
    groups: list[Iterator[Figure]] = []
    for at in options.cells:
        shape, direction, pages = CELLS[at]
        groups.append(beside(window, SHAPES[shape], direction, pages, options.repeats, staging))
    if not options.no_both:
        groups += [both_ways(window, SHAPES[at], pages, options.repeats, staging) for at, pages in BOTH]
    for group in groups:
        for figure in group:
            found.append(figure)
            print(show(figure), flush=True)
        torch.cuda.empty_cache()
        if options.json:
            kept = {"machine": machine(), "figures": [asdict(figure) for figure in found]}
            options.json.write_text(json.dumps(kept), encoding="utf-8")
    print("\nmissed:")
    for figure in missed(found):
        print(show(figure))
    return 0


if __name__ == "__main__":
    sys.exit(main())
