"""The headline grid: every pool, page size, count and placement, in both directions, on an idle device.

In: a CUDA device (``--device cpu`` tries the script itself); `build/peer` for SGLang's kernels, else the peer
is left out and the table says so. Out: a line a cell, then the targets that are missed; ``--json FILE`` keeps
the figures, and a second run with the same file goes on where the first ended.

Every cell stands beside ``ref``, one plain pinned copy of as many bytes. Bytes are compared for every way in
the same run, before it is timed. Repetitions of all ways of a cell are interleaved; short cells have more.

Run ``python benchmarks/grid.py --json grid.json --budget-s 540``; ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

import sglang_peer
from asked import asked
from shapes import SHAPES, Rig, Shape, same
from targets import PEER, Cell, Figure, Miss, first_goal, misses

from poolwright.runtime.tools.measure import Clock, CudaClock, HostClock, Run, Timing, interleaved

PAGES = (1, 8, 64, 1024)
LIMIT = 1 << 30
"""Bytes of the largest cell: a count of pages that would move more is lowered."""

SHORT, MORE = 100e-6, 4
"""A cell whose plain copy takes less than so many seconds is repeated so many times as often: medians of
seven repetitions of one and the same path differ by up to 4 % there. The spread that targets allow for is
that of single repetitions: more do not narrow it, but of seven it is less than half of itself once in six."""
PROBES = 3
"""Plain copies that tell whether a cell is short; the fastest counts."""

SLOW_REPEATS, SLOW_LIMIT = 3, 256 << 20
"""Repetitions of indexing by torch, and bytes from which on it is left out: it takes seconds there."""


class Grid:
    """Cells of one shape. The peer is None where it cannot run."""

    def __init__(self, rig: Rig, clock: Clock, repeats: int, slow_limit: int = SLOW_LIMIT) -> None:
        self.rig, self._clock, self._repeats, self._slow_limit = rig, clock, repeats, slow_limit
        self._cuda = isinstance(clock, CudaClock)
        most = rig.pages * rig.shape.page_bytes
        where = rig.device[0][0].device
        self._device_side = torch.empty(most, dtype=torch.uint8, device=where)
        self._host_side = torch.empty(most, dtype=torch.uint8, pin_memory=self._cuda)
        self._peers = peers(rig) if self._cuda and not sglang_peer.available() else []

    def cells(self, pages: int, order: str) -> Iterator[Cell]:
        """A cell for each direction. Raises SystemExit when bytes differ."""
        host, device = self.rig.lists(pages, order)
        total = pages * self.rig.shape.page_bytes
        expected = self.rig.packed_device(device)
        runs = self._write_backs(host, device)
        slow = self._slow("write_back", host, device)
        check = self._wrote(host, expected)
        yield self._cell(pages, order, "write_back", [self._ref(total, inward=False), *runs], slow, check)
        self.rig.fill_host(host, expected)
        runs = self._loads(host, device)
        slow = self._slow("load", host, device)
        check = self._loaded(device, expected)
        yield self._cell(pages, order, "load", [self._ref(total, inward=True), *runs], slow, check)
        runs = self._layered(host, device)
        yield self._cell(pages, order, "load_layers", [self._ref(total, inward=True), *runs], [], check)

    def _cell(
        self,
        pages: int,
        order: str,
        direction: str,
        runs: list[Run],
        slow: list[Run],
        check: Callable[[Run], str],
    ) -> Cell:
        shape = self.rig.shape
        runs, paths = _checked([*runs], check)
        slow, slow_paths = _checked(slow if pages * shape.page_bytes <= self._slow_limit else [], check)
        paths |= slow_paths
        timed: dict[str, Timing] = interleaved(runs, self._clock, self._repeats_of(runs[0]))
        if slow:
            timed |= interleaved(slow, self._clock, SLOW_REPEATS, warm_ups=1)
        figures = {name: _figure(timing, paths.get(name, "")) for name, timing in timed.items()}
        return Cell(
            *(shape.name, shape.page_size, pages, order, direction),
            *(shape.page_bytes // len(shape.rows), pages * shape.page_bytes, shape.layers, figures),
        )

    def _repeats_of(self, ref: Run) -> int:
        """Repetitions of a cell by what its plain copy takes."""
        took = min(self._clock.time(ref).seconds for _ in range(PROBES))
        return self._repeats * (MORE if took < SHORT else 1)

    # ---- ways to move

    def _ref(self, total: int, *, inward: bool) -> Run:
        to, source = self._host_side[:total], self._device_side[:total]
        if inward:
            to, source = source, to
        return Run("ref", lambda: to.copy_(source, non_blocking=True))

    def _ours(self, direction: str, host: torch.Tensor, device: torch.Tensor, path: str | None) -> Run:
        move = getattr(self.rig.pool, direction)
        name = path or "chosen"
        return Run(name, lambda: move(host, device, unit="page", path=path), _wait)

    def _write_backs(self, host: torch.Tensor, device: torch.Tensor) -> list[Run]:
        runs = [self._ours("write_back", host, device, path) for path in self._paths()]
        for name, ids, chosen in self._peer_ids(host, device, "write_backs"):

            def submit(name: str = name, ids: Any = ids, chosen: Any = chosen) -> None:
                for peer, own in zip(chosen, ids, strict=True):
                    peer.write_back(name, own)

            runs.append(Run(f"sglang {name}", submit))
        return runs

    def _loads(self, host: torch.Tensor, device: torch.Tensor) -> list[Run]:
        runs = [self._ours("load", host, device, path) for path in self._paths()]
        return [*runs, *self._peer_loads(host, device, layered=False)]

    def _layered(self, host: torch.Tensor, device: torch.Tensor) -> list[Run]:
        load, first = self.rig.pool.load, self.rig.pool.layers[0]

        def early(ticket: Any, stream: Any) -> None:
            ticket.wait_layer(first, stream)

        ours = Run("chosen", lambda: load(host, device, unit="page", order="layer"), _wait, early)
        return [ours, *self._peer_loads(host, device, layered=True)]

    def _peer_loads(self, host: torch.Tensor, device: torch.Tensor, *, layered: bool) -> Iterator[Run]:
        for name, ids, chosen in self._peer_ids(host, device, "loads"):

            def submit(name: str = name, ids: Any = ids, chosen: Any = chosen) -> list[Any]:
                events = [
                    peer.load(name, own, layered=layered) for peer, own in zip(chosen, ids, strict=True)
                ]
                return events[-1]

            yield Run(f"sglang {name}", submit, first=_first_event if layered else None)

    def _peer_ids(
        self, host: torch.Tensor, device: torch.Tensor, kind: str
    ) -> Iterator[tuple[str, list[Any], list[Any]]]:
        if self._peers:
            ids = [peer.ids(host, device) for peer in self._peers]
            for name in getattr(self._peers[0], kind):
                yield name, ids, self._peers

    def _slow(self, direction: str, host: torch.Tensor, device: torch.Tensor) -> list[Run]:
        """Indexing by torch: many times slower, so it is timed apart and less often."""
        return [self._ours(direction, host, device, "torch")]

    def _paths(self) -> tuple[str | None, ...]:
        return ("zero_copy", "staged", None) if self._cuda else ("host", None)

    # ---- bytes

    def _wrote(self, host: torch.Tensor, expected: list[torch.Tensor]) -> Callable[[Run], str]:
        def check(run: Run) -> str:
            self.rig.poison_host(host)
            path = _once(run, self._cuda)
            self._compare(run, self.rig.packed_host(host), expected)
            return path

        return check

    def _loaded(self, device: torch.Tensor, expected: list[torch.Tensor]) -> Callable[[Run], str]:
        def check(run: Run) -> str:
            self.rig.poison_device(device)
            path = _once(run, self._cuda)
            self._compare(run, self.rig.packed_device(device), expected)
            return path

        return check

    def _compare(self, run: Run, found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        if not same(found, expected):
            raise SystemExit(f"{self.rig.shape.label}: {run.name}: bytes differ")


def peers(rig: Rig) -> list[sglang_peer.Peer]:
    """SGLang's kernels over the same rows: one call for components of one width, else one for each."""
    shape = rig.shape
    if len(set(shape.rows)) == 1:
        return [sglang_peer.Peer(rig.device, rig.host, shape.page_size)]
    alone = zip(rig.device, rig.host, strict=True)
    return [sglang_peer.Peer([rows], [side], 1, states=True) for rows, side in alone]


def _checked(runs: list[Run], check: Callable[[Run], str]) -> tuple[list[Run], dict[str, str]]:
    """The runs that can be carried out, their bytes compared, and the path that each took.

    What the peer refuses is named and left out; ours has to run.
    """
    kept, paths = [], {}
    for run in runs:
        try:
            paths[run.name] = check(run) if run.name != "ref" else ""
        except RuntimeError as error:
            if not run.name.startswith(PEER):
                raise
            print(f"left out: {run.name}: {str(error).splitlines()[0]}", flush=True)
            continue
        kept.append(run)
    return kept, paths


def _wait(ticket: Any, stream: Any) -> None:
    ticket.wait(stream)


def _first_event(events: Any, stream: Any) -> None:
    stream.wait_event(events[0])


def _once(run: Run, cuda: bool) -> str:
    """Carry a run out, alone; the path that it took."""
    if cuda:
        torch.cuda.synchronize()
    handle = run.submit()
    run.finish(handle, None)
    if cuda:
        torch.cuda.synchronize()
    return getattr(handle, "path", "")


def _figure(timing: Timing, path: str) -> Figure:
    return Figure(timing.seconds, timing.spread, timing.submit, timing.first, timing.covered, path)


def counts(shape: Shape, limit: int, wanted: Sequence[int] = PAGES) -> list[int]:
    """Pages of the cells of a shape: the largest count is lowered to the limit."""
    most = max(1, limit // shape.page_bytes)
    return sorted({min(pages, most) for pages in wanted})


# ---- results


def row(cell: Cell) -> str:
    """One line: the plain copy's speed, then every way as a percentage of it."""
    parts = [f"{cell.shape:22} {cell.page_size:3} {cell.pages:5} {cell.order:9} {cell.direction:11}"]
    parts.append(f"ref {cell.gbps('ref'):5.1f}")
    for name, figure in cell.figures.items():
        if name != "ref":
            shown = f"{name}>{figure.path}" if name == "chosen" else name
            mark = "" if figure.covered else "!"
            parts.append(f"{shown} {cell.percent(name):.1f}{mark}")
    ours = cell.figures["chosen"]
    parts.append(f"submit {ours.submit * 1e6:.0f} us")
    if ours.first is not None:
        goals = [first_goal(cell, name) for name in ("chosen", "ref")]
        shown = "/".join("-" if goal is None else f"{goal * 1e6:.0f}" for goal in goals)
        parts.append(f"first {ours.first * 1e6:.0f} us of {shown}")
    return "  ".join(parts)


def miss_row(miss: Miss) -> str:
    cell = miss.cell
    return (
        f"| {cell.shape} | {cell.page_size} | {cell.pages} | {cell.order} | {cell.direction} "
        f"| {miss.what} | {miss.found:.1f} | {miss.target:.1f} {miss.unit} |"
    )


class Results:
    """Cells by key, kept in a file after every group."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.cells: dict[str, Cell] = {}
        if path is not None and path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            for one in kept["cells"]:
                figures = {name: Figure(**figure) for name, figure in one.pop("figures").items()}
                cell = Cell(**one, figures=figures)
                self.cells[cell.key] = cell

    def add(self, cells: list[Cell]) -> None:
        self.cells |= {cell.key: cell for cell in cells}
        if self.path is not None:
            text = json.dumps({"machine": machine(), "cells": [asdict(c) for c in self.cells.values()]})
            self.path.write_text(text, encoding="utf-8")


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def measure(options: argparse.Namespace, results: Results) -> bool:
    """Measure what is not there yet; False when the budget ended first."""
    cuda = options.device != "cpu"
    clock: Clock = CudaClock() if cuda else HostClock()
    begin = time.perf_counter()
    for shape in SHAPES:
        if options.only and not any(word in shape.label for word in options.only):
            continue
        pages = counts(shape, options.limit_mb << 20, options.pages)
        wanted = [(p, o) for p in pages for o in options.order]
        ways = ("write_back", "load", "load_layers")
        keys = {
            w: [f"{shape.name} | {shape.page_size} | {w[0]} | {w[1]} | {d}" for d in ways] for w in wanted
        }
        open_ones = [w for w in wanted if not set(keys[w]) <= set(results.cells)]
        if not open_ones:
            continue
        rig = Rig(shape, max(count for count, _ in open_ones), options.device)
        grid = Grid(rig, clock, options.repeats, SLOW_LIMIT if options.torch else 0)
        for count, order in open_ones:
            if time.perf_counter() - begin > options.budget_s:
                rig.close()
                return False
            cells = list(grid.cells(count, order))
            results.add(cells)
            for cell in cells:
                print(row(cell), flush=True)
        rig.close()
        del grid, rig
        if cuda:
            torch.cuda.empty_cache()
    return True


def summary(results: Results) -> None:
    """The targets that are missed, and how many cells were held against them."""
    found = list(misses(list(results.cells.values())))
    print(f"\n{len(results.cells)} cells, {len(found)} targets missed")
    if found:
        print("| pool | page | pages | order | way | what | found | target |\n" + "|---" * 8 + "|")
        for miss in found:
            print(miss_row(miss))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="the headline grid against plain copies and SGLang's kernels"
    )
    parser.add_argument("--json", type=Path, help="where results are kept, and read from to go on")
    parser.add_argument("--budget-s", type=float, default=1e9, help="begin no further group after so long")
    parser.add_argument("--repeats", type=int, default=7, help=f"{MORE} times as many for short cells")
    parser.add_argument("--limit-mb", type=int, default=LIMIT >> 20, help="bytes of the largest cell")
    parser.add_argument("--order", nargs="+", default=["scattered", "runs"])
    parser.add_argument("--pages", type=int, nargs="+", default=PAGES)
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave indexing by torch out")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="shapes with this in their name")
    parser.add_argument("--device", default="cuda:0")
    options = asked(parser, lambda given: given.device != "cpu", "--device cpu needs none")
    results = Results(options.json)
    cuda, why = options.device != "cpu", sglang_peer.available()
    if cuda and why:
        print(f"without SGLang: {why}", flush=True)
    # Not the default stream: batch copies are not taken there.
    with sglang_peer.on_stream(torch.cuda.Stream()) if cuda else contextlib.nullcontext():
        done = measure(options, results)
    summary(results)
    if not done:
        print("the budget ended first: run the same command again to go on")
    return 0 if done else 3


if __name__ == "__main__":
    sys.exit(main())
