"""Loads in layer order by how they are cut: windows, blocks, huge pages, vectors in flight, order of runs.

In: a CUDA device. Out: for each cell, with and without huge pages and for each way to compile the kernels,
the rate in % of one plain copy of as many bytes, for every window and count of blocks; when the first layer
was there; and how far each setting stays below the target, all long loads together. Ways: `usual`, the
kernels as they are; `flight 8`, eight vectors in flight a thread instead of four; `by layer`, all ids of a
layer before the next layer; `still`, every step begins with the same warps. Bytes are compared for each.

The constants in `runtime/driver/sizes.py` come from here. Run ``python benchmarks/layer_order.py``;
``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

import shapes
from asked import asked

from poolwright.runtime import jit
from poolwright.runtime.driver import Windows, sizes
from poolwright.runtime.driver.cuda import CudaKernels
from poolwright.runtime.launch import Launcher
from poolwright.runtime.tools.measure import CudaClock, Run, Timing, interleaved

CELLS = ((5, 1024), (7, 1024), (6, 1024), (4, 1), (3, 130), (6, 130), (5, 130), (4, 4), (0, 8), (2, 8))
"""Position in SHAPES, pages; what matters most comes first."""

WINDOWS, BLOCKS = (256 << 10, 512 << 10, 2 << 20, 8 << 20), (8, 12, 16, 24)
GOAL = 92.0
LONG = 32 << 20
"""Bytes from which on a load is held to the goal here."""


# ---- kernels

PRIM = "include/poolwright/prim.h"

LAYER_BY_LAYER = """
namespace pw {
PW_FN Turn turn_by_layer(u32 at, u32, u32 runs, u32, u32 count) {
  return {at / runs % count, at / runs / count, at % runs};
}
}  // namespace pw
#define turn(at, inner, runs, steps) turn_by_layer(at, inner, pw::divisor(runs), steps, count)
"""
"""Takes the place of `turn` where kernels call it; `count` is in sight there."""


def layer_by_layer(text: str) -> str:
    return text + LAYER_BY_LAYER


def still(text: str) -> str:
    found, count = re.subn(
        r"PW_FN u32 next\([^}]*\}", "PW_FN u32 next(u32 lane, u32, u32) { return lane; }", text
    )
    assert count == 1
    return found


WAYS: dict[str, tuple[tuple[tuple[str, str], ...], Callable[[str], str] | None]] = {
    "usual": ((), None),
    "flight 8": ((("PW_IN_FLIGHT", "8"),), None),
    "by layer": ((), layer_by_layer),
    "still": ((), still),
}
"""Macros, and what is done to the primitives."""


@contextmanager
def primitives(change: Callable[[str], str] | None) -> Iterator[None]:
    """Compile with a changed copy of the runtime's headers."""
    usual = jit.include_dir
    if change is None:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(usual(), Path(folder) / "include")
        prim = Path(folder) / PRIM
        prim.write_text(change(prim.read_text()))
        jit.include_dir = lambda: Path(folder).resolve() / "include"
        try:
            yield
        finally:
            jit.include_dir = usual


def compiled(program: Any, align: int, arch: str, way: str) -> list[bytes]:
    """The kernels of a pool, compiled in one of WAYS."""
    macros, change = WAYS[way]
    unit = program.unit("kernels", align)
    with primitives(change):
        return jit.cubins(jit.Unit(unit.name, unit.main, (*unit.defines, *macros), unit.parts), arch)


class Tried(CudaKernels):
    """Kernels that take windows and blocks as they are told."""

    window, count = WINDOWS[0], BLOCKS[0]

    def windows(self, step_bytes: int, steps: int) -> Windows:
        first, _ = sizes.windows(step_bytes, steps)
        return Windows(first, max(1, self.window // step_bytes)) if first else Windows(0, steps)

    def grid(self, purpose: str, nbytes: int) -> int:
        if purpose == "load_layers" and nbytes > sizes.SHORT_BYTES:
            return self.count
        return sizes.blocks(purpose, nbytes)


# ---- cells


@dataclass(frozen=True)
class Row:
    """One setting of one cell: % of the plain copy, microseconds until the first layer was there."""

    cell: str
    nbytes: int
    share_us: float
    huge: bool
    way: str
    window: int
    blocks: int
    percent: float
    first_us: float


class Bench:
    """One pool, and a launcher for each way to compile its kernels."""

    def __init__(self, shape: shapes.Shape, pages: int, ways: Sequence[str]) -> None:
        self.rig, self.pages = shapes.Rig(shape, pages, "cuda:0"), pages
        self.host, self.device = self.rig.lists(pages, "scattered")
        transfers = self._transfers = self.rig.pool._transfers
        code = transfers.code
        major, minor = torch.cuda.get_device_capability()
        program = transfers.members[0].program
        self.ways: dict[str, tuple[Tried, Launcher]] = {}
        for way in ways:
            kernels = Tried(compiled(program, code.align, f"sm_{major}{minor}", way))
            self.ways[way] = kernels, Launcher(code.driver, kernels, transfers.members, code.align)
        most = pages * shape.page_bytes
        self._to = torch.empty(most, dtype=torch.uint8, device="cuda:0")
        self._from = torch.empty(most, dtype=torch.uint8, pin_memory=True)

    def run(self, way: str, window: int, blocks: int) -> Run:
        pool, (kernels, launcher) = self.rig.pool, self.ways[way]
        layer = pool.layers[0]

        def submit() -> Any:
            kernels.window, kernels.count = window, blocks
            self._transfers._launcher = launcher
            launcher._cuts.clear()  # made for other settings
            return pool.load(self.host, self.device, unit="page", order="layer")

        def early(ticket: Any, stream: Any) -> None:
            ticket.wait_layer(layer, stream)

        return Run(f"{way}|{window}|{blocks}", submit, _wait, early)

    def check(self, settings: Sequence[tuple[str, int, int]]) -> None:
        """Compare bytes for every way and window. Raises SystemExit."""
        expected = self.rig.packed_device(self.device)
        self.rig.fill_host(self.host, expected)
        for way, window in dict.fromkeys((way, window) for way, window, _ in settings):
            self.rig.poison_device(self.device)
            self.run(way, window, BLOCKS[-1]).submit().wait()
            if not shapes.same(self.rig.packed_device(self.device), expected):
                sys.exit(f"{self.rig.shape.label}, {self.pages} pages: {way}, window {window}: bytes differ")

    def rows(self, settings: Sequence[tuple[str, int, int]], huge: bool, repeats: int) -> list[Row]:
        shape, total = self.rig.shape, self.pages * self.rig.shape.page_bytes
        self.check(settings)
        ref = Run("ref", lambda: self._to.copy_(self._from, non_blocking=True))
        runs = [ref, *(self.run(*setting) for setting in settings)]
        timed: dict[str, Timing] = interleaved(runs, CudaClock(), repeats, warm_ups=1)
        plain = timed["ref"].seconds
        found = []
        for run, setting in zip(runs[1:], settings, strict=True):
            timing = timed[run.name]
            assert timing.first is not None
            share = timing.seconds / shape.layers * 1e6
            percent = 100 * plain / timing.seconds
            cell = f"{shape.name} p{shape.page_size} x {self.pages}"
            found.append(Row(cell, total, share, huge, *setting, percent, timing.first * 1e6))
        return found

    def close(self) -> None:
        self.rig.close()


def _wait(ticket: Any, stream: Any) -> None:
    ticket.wait(stream)


def huge_mib() -> int:
    """MiB of this process that lie in huge pages now."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return (
        sum(int(n) for n in re.findall(r"(?:AnonHuge|ShmemPmdMapped|FilePmdMapped)\w*: +(\d+)", text)) >> 10
    )


def settings_of(huge: bool) -> list[tuple[str, int, int]]:
    """Every window and count of blocks as usual and with more vectors; of the other ways those that tell."""
    full = [(way, w, b) for way in ("usual", "flight 8") for w in WINDOWS for b in BLOCKS]
    if huge:
        return full
    return full + [(way, w, b) for way in ("by layer", "still") for w in WINDOWS[1:] for b in (8, 16)]


# ---- tables


def size(nbytes: int) -> str:
    return f"{nbytes >> 10}K" if nbytes < 1 << 20 else f"{nbytes >> 20}M"


def label(way: str, huge: bool) -> str:
    return f"{way}, huge" if huge else way


def tables(rows: Sequence[Row], value: Callable[[Row], float], ways: Sequence[str]) -> Iterator[str]:
    """A line for each cell, pages and way; a column for each window and count of blocks."""
    heads = [size(w) if b == BLOCKS[0] else f"/{b}" for w in WINDOWS for b in BLOCKS]
    yield f"{'':26} {'':14} " + " ".join(f"{head:>5}" for head in heads)
    for cell in dict.fromkeys(row.cell for row in rows):
        for huge in (False, True):
            for way in ways:
                mine = {
                    (r.window, r.blocks): value(r)
                    for r in rows
                    if (r.cell, r.huge, r.way) == (cell, huge, way)
                }
                if mine:
                    columns = [mine.get((w, b)) for w in WINDOWS for b in BLOCKS]
                    shown = " ".join("    -" if c is None else f"{c:5.1f}" for c in columns)
                    yield f"{cell:26} {label(way, huge):14} {shown}"


def shortfalls(rows: Sequence[Row]) -> Iterator[str]:
    """Settings by how far loads held to the goal stay below it, all of them together."""
    found: dict[tuple[bool, str, int, int], list[float]] = {}
    for row in rows:
        if row.nbytes >= LONG:
            key = (row.huge, row.way, row.window, row.blocks)
            found.setdefault(key, []).append(max(0.0, GOAL - row.percent))
    most = max(map(len, found.values()), default=0)
    ranked = sorted((sum(lost), key) for key, lost in found.items() if len(lost) == most)
    for lost, (huge, way, window, blocks) in ranked[:8]:
        yield f"{lost:6.1f} points below: {label(way, huge)}, window {size(window)}, blocks {blocks}"


def measure(options: argparse.Namespace) -> list[Row]:
    """All cells without huge pages, then all with; ends when the budget does."""
    begin, rows = time.perf_counter(), list[Row]()
    for huge in (False, True):
        os.environ["POOLWRIGHT_HUGEPAGES"] = str(int(huge))
        settings = settings_of(huge)
        for position, pages in CELLS:
            if time.perf_counter() - begin > options.budget_s:
                return rows
            before = huge_mib()
            bench = Bench(shapes.SHAPES[position], pages, list(dict.fromkeys(s[0] for s in settings)))
            got = huge_mib() - before
            rows += (new := bench.rows(settings, huge, options.repeats))
            best = max(new, key=lambda row: row.percent)
            print(
                f"{time.perf_counter() - begin:6.1f} s  {best.cell}: {best.percent:.1f} % by "
                f"{label(best.way, huge)}, window {size(best.window)}, blocks {best.blocks}; "
                f"{got} MiB in huge pages",
                flush=True,
            )
            bench.close()
            del bench
            torch.cuda.empty_cache()
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in rows]))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="how loads in layer order are best cut")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=130, help="begin no further cell after so long")
    parser.add_argument("--json", type=Path, help="where all figures are kept, after every cell")
    options = asked(parser)
    make: Callable[[], Any] = torch.cuda.Stream
    with torch.cuda.stream(make()):  # not the default stream: batch copies are not taken there
        rows = measure(options)
    print(f"\nfirst layer, us after its share of the load; a window, then /blocks ({BLOCKS[0]} first)")
    near = [row for row in rows if not row.huge]
    print(*tables(near, lambda row: row.first_us - row.share_us, ["usual"]), sep="\n")
    print("\n% of the plain copy")
    print(*tables(rows, lambda row: row.percent, list(WAYS)), sep="\n")
    print(f"\nloads of {LONG >> 20} MiB and more against {GOAL} %", *shortfalls(rows), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
