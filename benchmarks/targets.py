"""What the figures of the grid are held against: cells in, those that miss a target out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

KIB, MB = 1 << 10, 1_000_000
OURS = "chosen"
FORCED = ("zero_copy", "staged")
PEER = "sglang"


@dataclass(frozen=True)
class Figure:
    """One way to move a cell: seconds, their spread as a share, submission, first layer (both in seconds).

    `covered`: the submission was hidden behind other work of the device. `path`: what was chosen.
    """

    seconds: float
    spread: float
    submit: float
    first: float | None = None
    covered: bool = True
    path: str = ""


@dataclass(frozen=True)
class Cell:
    """One transfer: what is moved, and a figure for each way. ``ref`` is a plain pinned copy of the bytes."""

    shape: str
    page_size: int
    pages: int
    order: str
    direction: str
    range_bytes: int
    total: int
    layers: int
    figures: Mapping[str, Figure] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.shape} | {self.page_size} | {self.pages} | {self.order} | {self.direction}"

    def percent(self, name: str) -> float:
        """Speed of one way as a percentage of the plain copy."""
        return 100 * self.figures["ref"].seconds / self.figures[name].seconds

    def gbps(self, name: str) -> float:
        return self.total / self.figures[name].seconds / 1e9


@dataclass(frozen=True)
class Miss:
    """A figure beyond its target; both in `unit`."""

    cell: Cell
    what: str
    found: float
    target: float
    unit: str = "% of ref"


def goal(cell: Cell) -> float | None:
    """Percent of the plain copy that a cell should reach; None where only the comparisons count."""
    if cell.direction == "load_layers":
        return 92.0 if cell.total >= 64 * MB else None
    if cell.range_bytes >= 512 * KIB:
        if cell.total >= 256 * MB:
            return 98.5
        return 97.0 if cell.total >= 64 * MB else None
    if 20 * KIB <= cell.range_bytes <= 70 * KIB:
        if cell.order == "runs" and cell.total >= 64 * MB:
            return 97.0
        if cell.total >= 16 * MB:
            return 94.0 if cell.direction == "write_back" else 92.0
        return 90.0 if cell.total >= 4 * MB else None
    return None


def first_goal(cell: Cell, name: str) -> float | None:
    """Seconds until the first layer should be there: one layer's share of the time that `name` takes for all
    of them, and 20 us. The load itself is judged by its own time; by the plain copy's it is stricter."""
    if cell.direction != "load_layers":
        return None
    return cell.figures[name].seconds / cell.layers + 20e-6


def misses(cells: Sequence[Cell]) -> Iterator[Miss]:
    """Every target that a cell misses."""
    for cell in cells:
        if OURS in cell.figures and "ref" in cell.figures:
            yield from _of_ref(cell)
            yield from _of_peer(cell)
            yield from _of_forced(cell)


def _of_ref(cell: Cell) -> Iterator[Miss]:
    wanted = goal(cell)
    if wanted is not None and cell.percent(OURS) < wanted:
        yield Miss(cell, "against ref", cell.percent(OURS), wanted)
    ours = cell.figures[OURS]
    most = first_goal(cell, OURS)
    if most is not None and ours.first is not None and ours.first > most:
        strict = first_goal(cell, "ref")
        assert strict is not None
        unit = f"us (by the plain copy {strict * 1e6:.1f})"
        yield Miss(cell, "first layer", ours.first * 1e6, most * 1e6, unit)


def _of_peer(cell: Cell) -> Iterator[Miss]:
    """Not below the best of the peer's ways by more than 2 % or the spread, whichever is more."""
    name = _fastest(cell, [n for n in cell.figures if n.startswith(PEER)])
    if name is None:
        return
    ours, peer = cell.figures[OURS], cell.figures[name]
    allowed = 1 + max(0.02, ours.spread, peer.spread)
    if ours.seconds > peer.seconds * allowed:
        yield Miss(cell, f"against {name}", cell.percent(OURS), cell.percent(name) / allowed)


def _of_forced(cell: Cell) -> Iterator[Miss]:
    """Within 3 % or 3 us, whichever is more, of the best path that can be forced."""
    name = _fastest(cell, [n for n in FORCED if n in cell.figures])
    if name is None:
        return
    best, ours = cell.figures[name], cell.figures[OURS]
    most = best.seconds + max(0.03 * best.seconds, 3e-6, best.seconds * max(best.spread, ours.spread))
    if ours.seconds > most:
        yield Miss(cell, f"against {name}, forced", ours.seconds * 1e6, most * 1e6, "us")


def _fastest(cell: Cell, names: Sequence[str]) -> str | None:
    return min(names, key=lambda name: cell.figures[name].seconds, default=None)
