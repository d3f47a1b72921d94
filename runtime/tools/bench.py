"""Bandwidth of one pool over the size of a transfer, each path beside one plain copy of as many bytes.

Sizes of the pool are given with --set, as for `codegen show`; bytes are not compared here (`verify` does).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from poolwright.runtime.description import PoolSpec, dtype_named
from poolwright.runtime.pool import HostPool
from poolwright.runtime.tools import package, rows
from poolwright.runtime.tools.measure import Clock, CudaClock, HostClock, Run, Timing, interleaved
from poolwright.runtime.tools.samples import Sample, arguments, takes_page_size

LIMIT_MB = {"cuda": 512, "cpu": 64}
SPARE_PAGES = 3


@dataclass(frozen=True)
class Point:
    """One size, direction and path: GB/s, the plain copy's GB/s in the same run, microseconds to submit.

    `path`: what was forced, or ``chosen``; `taken`: what it came to.
    """

    direction: str
    pages: int
    nbytes: int
    path: str
    taken: str
    gbps: float
    plain: float
    spread: float
    submit_us: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`POOL`, sizes, `--device`, `--layout`, `--form`, `--json`, `--plot`."""
    parser.add_argument("pool", metavar="POOL", help="name of a pool")
    names = "a parameter, page_size, layers, a dtype group's dtype or a variant; repeatable"
    parser.add_argument("--set", dest="words", metavar="NAME=VALUE", action="append", default=[], help=names)
    parser.add_argument("--layout", help="host order (default: the first)")
    parser.add_argument("--form", help="device order (default: the first)")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=("cpu", "cuda"), help=f"default: {default}")
    parser.add_argument(
        "--limit-mb", type=package.positive, metavar="MB", help="bytes of the largest transfer"
    )
    parser.add_argument("--repeats", type=package.positive, default=7, metavar="N", help="of each way (7)")
    parser.add_argument("--order", default="scattered", choices=("scattered", "runs"), help="host pages")
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Measure one pool."""
    generated = package.load_package(args.package, args.folder)
    if args.pool not in generated.POOLS:
        known = ", ".join(generated.POOLS)
        raise package.PackageError(f"no pool {args.pool!r} in {generated.__name__}; pools are {known}")
    pool_class = generated.pool_class(args.pool)
    if not pool_class.spec.components:
        raise package.PackageError(f"{args.pool} has no bytes to move; name another pool")
    given = {**arguments(pool_class, sizes(pool_class, args.words)), **_orders(pool_class.spec, args)}
    if args.plot is not None:
        _pyplot()  # what is missing is named before the work
    limit = (args.limit_mb or LIMIT_MB[args.device]) << 20
    found: list[Point] = []
    if not args.json:
        print(HEADER + "\n" + "|---" * (HEADER.count("|") - 1) + "|")
    for group in measure(pool_class, given, args.device, limit, args.order, args.repeats):
        found += group
        if not args.json:
            print(row(group), flush=True)
    if args.json:
        print(json.dumps([asdict(point) for point in found], indent=2))
    if args.plot is not None:
        plot(found, args.pool, args.plot)
    return 0


def sizes(pool_class: type[HostPool], words: Sequence[str]) -> Sample:
    """The sizes that the words give. Raises PackageError naming what is missing or unknown."""
    spec = pool_class.spec
    pairs = [word.partition("=") for word in words]
    wrong = next((word for word, pair in zip(words, pairs, strict=True) if not all(pair)), None)
    if wrong is not None:
        raise package.PackageError(f"--set {wrong}: expected name=value, for example --set page_size=64")
    given = {name: value for name, _, value in pairs}
    params = {p.name: p for p in spec.params if p.equals is None}
    lists = tuple(dict.fromkeys(("layers", *spec.layer_lists)))
    paged = ("page_size",) if takes_page_size(pool_class) else ()
    known = [*params, *lists, *paged, *spec.dtypes, *spec.variants]
    for name in given:
        if name not in known:
            raise package.PackageError(f"--set {name}: {spec.name} has {', '.join(known)}")
    defaults = {p.name: str(p.default) for p in spec.params if p.default is not None}
    given = defaults | given
    missing = [name for name in (*params, "layers") if name not in given]
    if missing:
        needed = " ".join(f"--set {name}=..." for name in missing)
        raise package.PackageError(f"sizes of {spec.name} are missing: give {needed}")
    numbers = {name: _number(name, given[name]) for name in params}
    layers = {name: tuple(range(_one(name, given.get(name, given["layers"])))) for name in lists}
    page_size = _one("page_size", given.get("page_size", "64" if paged else "1"))
    dtypes = {group: dtype_named(_choice(group, given, allowed)) for group, allowed in spec.dtypes.items()}
    variants = {name: _choice(name, given, choices) for name, choices in spec.variants.items()}
    return Sample("bench", numbers, dtypes, layers, page_size, variants)


def _number(name: str, text: str) -> int | tuple[int, ...]:
    found = tuple(_one(name, each) for each in text.split(","))
    return found if len(found) > 1 else found[0]


def _one(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise package.PackageError(f"--set {name}={text}: expected an integer") from None


def _choice(name: str, given: Mapping[str, str], allowed: Collection[str]) -> str:
    found = given.get(name, next(iter(allowed)))
    if found not in allowed:
        raise package.PackageError(f"--set {name}={found}: expected one of {', '.join(allowed)}")
    return found


def _orders(spec: PoolSpec, args: argparse.Namespace) -> dict[str, str]:
    known = {"layout": list(spec.layouts), "form": list(spec.forms)}
    asked = {"layout": args.layout, "form": args.form}
    for kind, names in known.items():
        if asked[kind] not in (None, *names):
            raise package.PackageError(f"no {kind} {asked[kind]!r} in {spec.name}: {', '.join(names)}")
    return {kind: name for kind, name in asked.items() if name is not None}


# ---- measuring --------------------------------------------------------------------------------


def measure(
    pool_class: type[HostPool],
    given: Mapping[str, Any],
    device: str,
    limit: int,
    order: str,
    repeats: int,
) -> Iterator[list[Point]]:
    """Every path of one size and direction at a time; sizes double up to `limit` bytes."""
    try:
        page = pool_class.required_bytes(**given, capacity_pages=1).page  # type: ignore[attr-defined]
        if not page:
            raise ValueError(f"{pool_class.spec.name} has no bytes to move with these sizes; give it others")
        most = max(1, limit // page)
        pool = pool_class(**given, capacity_pages=2 * most + SPARE_PAGES, device=device)
    except ValueError as error:
        raise package.PackageError(str(error)) from None
    reserved = len(pool.spec.reserved)
    pool.bind(rows.tensors(pool, most + reserved + SPARE_PAGES))
    clock: Clock = CudaClock() if device == "cuda" else HostClock()
    pages = 1
    try:
        while pages <= most:
            yield from _of_size(pool, pages, order, clock, repeats, most + reserved + SPARE_PAGES)
            pages *= 2
    finally:
        pool.destroy()


def _of_size(
    pool: HostPool, pages: int, order: str, clock: Clock, repeats: int, device_pages: int
) -> Iterator[list[Point]]:
    random = torch.Generator().manual_seed(pages)
    host = torch.randperm(pool.page_num, generator=random)[:pages]
    host = torch.arange(pages) if order == "runs" else host
    free = torch.tensor([page for page in range(device_pages) if page not in pool.spec.reserved])
    device = free[torch.randperm(len(free), generator=random)[:pages]]
    total = pages * pool.page_bytes
    cuda = pool.device.type == "cuda"
    if not cuda:
        torch.set_num_threads(1)  # the plain copy: idle threads of a pool wake up late
    here = torch.empty(total, dtype=torch.uint8, pin_memory=cuda)
    there = torch.empty(total, dtype=torch.uint8, device=pool.device)
    paths = [p.path for p in pool.path_report() if p.available]
    paths = [p for p in paths if p in (("zero_copy", "staged") if cuda else ("host",))]
    for direction in ("write_back", "load", "load_layers"):
        to, source = (here, there) if direction == "write_back" else (there, here)
        runs = [_plain(to, source)]
        forced = () if direction == "load_layers" else paths
        taken: dict[str, str] = {}
        runs += [_run(pool, direction, host, device, path, taken) for path in (*forced, None)]
        timed = interleaved(runs, clock, repeats)
        plain = total / timed.pop("plain").seconds / 1e9
        yield [
            _point(direction, pages, total, name, taken[name], timing, plain)
            for name, timing in timed.items()
        ]


def _plain(to: torch.Tensor, source: torch.Tensor) -> Run:
    return Run("plain", lambda: to.copy_(source, non_blocking=True))


def _run(
    pool: HostPool,
    direction: str,
    host: torch.Tensor,
    device: torch.Tensor,
    path: str | None,
    taken: dict[str, str],
) -> Run:
    name = path or "chosen"

    def submit() -> Any:
        if direction == "write_back":
            ticket = pool.write_back(host, device, unit="page", path=path)
        else:
            order = "layer" if direction == "load_layers" else "bulk"
            ticket = pool.load(host, device, unit="page", order=order, path=path)
        taken[name] = ticket.path
        return ticket

    return Run(name, submit, lambda ticket, stream: ticket.wait(stream))


def _point(
    direction: str, pages: int, total: int, name: str, taken: str, timing: Timing, plain: float
) -> Point:
    speed = total / timing.seconds / 1e9
    return Point(direction, pages, total, name, taken, speed, plain, timing.spread, timing.submit * 1e6)


# ---- showing ----------------------------------------------------------------------------------

HEADER = "| way | pages | MB | plain GB/s | chosen | GB/s | % of plain | submit us | other paths, % |"


def row(points: Sequence[Point]) -> str:
    """One line of the table: the path that was chosen, then the forced ones."""
    chosen = next(point for point in points if point.path == "chosen")
    others = ", ".join(f"{p.path} {100 * p.gbps / p.plain:.0f}" for p in points if p is not chosen)
    return (
        f"| {chosen.direction} | {chosen.pages} | {chosen.nbytes / 1e6:.2f} | {chosen.plain:.1f} "
        f"| {chosen.taken} | {chosen.gbps:.1f} | {100 * chosen.gbps / chosen.plain:.0f} "
        f"| {chosen.submit_us:.0f} | {others} |"
    )


def _pyplot() -> Any:
    """What draws, into files only. Raises PackageError."""
    try:
        import matplotlib
    except ImportError:
        raise package.PackageError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def plot(points: Sequence[Point], title: str, file: Path) -> None:
    """Bandwidth over size, one picture a direction, the plain copy as a line. Raises PackageError."""
    pyplot = _pyplot()
    directions = list(dict.fromkeys(point.direction for point in points))
    figure, axes = pyplot.subplots(1, len(directions), figsize=(5 * len(directions), 4), sharey=True)
    for axis, direction in zip(axes, directions, strict=True):
        here = [point for point in points if point.direction == direction]
        for path in dict.fromkeys(point.path for point in here):
            line = [point for point in here if point.path == path]
            axis.plot([p.nbytes / 1e6 for p in line], [p.gbps for p in line], marker="o", label=path)
        line = [point for point in here if point.path == "chosen"]
        axis.plot([p.nbytes / 1e6 for p in line], [p.plain for p in line], "k--", label="one plain copy")
        axis.set(title=f"{title}: {direction}", xlabel="MB", xscale="log")
        axis.legend()
    axes[0].set_ylabel("GB/s")
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)
