"""Tables and a picture of the headline grid: figures kept by `grid.py` in, Markdown out.

``python benchmarks/report.py grid.json [--order scattered] [--plot grid.png]`` prints a table a direction:
speed of a plain copy, and of every way as a percentage of it. The picture has a panel for each pool and
direction, bandwidth over bytes, with the plain copy as a line; it needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from targets import OURS, PEER, Cell, Figure

WAYS = ("zero_copy", "staged", OURS, f"{PEER} staged", f"{PEER} register", f"{PEER} tma", f"{PEER} mamba")
TITLES = {"write_back": "Write-back", "load": "Load", "load_layers": "Load in layer order"}


def read(path: Path) -> list[Cell]:
    """The cells of a file that `grid.py` wrote."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [
        Cell(**cell | {"figures": {n: Figure(**f) for n, f in cell["figures"].items()}}) for cell in cells
    ]


def best_peer(cell: Cell) -> str | None:
    """The peer's fastest way of a cell; None where it has none."""
    names = [name for name in cell.figures if name.startswith(PEER)]
    return min(names, key=lambda name: cell.figures[name].seconds, default=None)


def table(cells: Sequence[Cell], direction: str) -> str:
    """One direction as Markdown: percent of the plain copy for every way that any cell has."""
    mine = [cell for cell in cells if cell.direction == direction]
    ways = [way for way in WAYS if any(way in cell.figures for cell in mine)]
    first = direction == "load_layers"
    head = ["pool", "page", "pages", "MB", "plain GB/s", *(f"{way} %" for way in ways), "submit us"]
    lines = [head + ["first layer us"] * first, ["---"] * (len(head) + first)]
    for cell in mine:
        speeds = [f"{cell.percent(way):.1f}" if way in cell.figures else "" for way in ways]
        ours = cell.figures[OURS]
        chosen = ways.index(OURS)
        speeds[chosen] += f" ({ours.path})" if ours.path and not first else ""
        row = [
            cell.shape,
            str(cell.page_size),
            str(cell.pages),
            f"{cell.total / 1e6:.1f}",
            f"{cell.gbps('ref'):.1f}",
        ]
        row += [*speeds, f"{ours.submit * 1e6:.0f}"]
        lines.append(row + ([f"{ours.first * 1e6:.0f}" if ours.first else ""] if first else []))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def can_plot() -> bool:
    """Whether matplotlib is there, which then draws into files only."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("agg")
    return True


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Bandwidth over bytes: a row of panels for each direction, a column for each pool."""
    from matplotlib import pyplot

    pools = list(dict.fromkeys((cell.shape, cell.page_size) for cell in cells))
    figure, axes = pyplot.subplots(
        len(TITLES), len(pools), figsize=(2.6 * len(pools), 7.5), sharex=True, sharey=True, squeeze=False
    )
    for line, (direction, title) in enumerate(TITLES.items()):
        for column, (shape, page_size) in enumerate(pools):
            panel = axes[line][column]
            mine = [c for c in cells if (c.shape, c.page_size, c.direction) == (shape, page_size, direction)]
            mine.sort(key=lambda cell: cell.total)
            sizes = [cell.total for cell in mine]
            panel.plot(sizes, [cell.gbps("ref") for cell in mine], "k--", lw=1, label="plain copy")
            panel.plot(sizes, [cell.gbps(OURS) for cell in mine], "o-", ms=3, label="Poolwright")
            peers = [(cell.total, cell.gbps(name)) for cell in mine if (name := best_peer(cell)) is not None]
            panel.plot(
                *zip(*peers, strict=True), "s-", ms=3, label="SGLang, its best kernel"
            ) if peers else None
            panel.set_xscale("log")
            panel.grid(alpha=0.3)
            if line == 0:
                panel.set_title(f"{shape}\npages of {page_size}", fontsize=8)
            if column == 0:
                panel.set_ylabel(f"{title}, GB/s", fontsize=8)
            if line == len(TITLES) - 1:
                panel.set_xlabel("bytes", fontsize=8)
    axes[0][0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="tables and a picture of the headline grid")
    parser.add_argument("grid", type=Path)
    parser.add_argument("--order", default="scattered", help="order of the host pages: scattered or runs")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.plot is not None and not can_plot():
        print("--plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    cells = [cell for cell in read(options.grid) if cell.order == options.order]
    if not cells:
        print(f"{options.grid} has no cells with {options.order} pages", file=sys.stderr)
        return 1
    for direction, title in TITLES.items():
        print(f"### {title}\n\n{table(cells, direction)}\n")
    if options.plot is not None:
        plot(cells, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
