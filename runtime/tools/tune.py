"""Measure the constants of the cost model on this machine's GPU and keep them for its pools (under a minute).

Pools built from then on choose their paths by them. Without it they use those of an H200.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from poolwright.runtime import tuning
from poolwright.runtime.backend import identity
from poolwright.runtime.costs import Costs, Work, predict
from poolwright.runtime.pool import HostPool
from poolwright.runtime.staging import fill_sizes
from poolwright.runtime.tools import package, rows
from poolwright.runtime.tools.fit import Sample, fit
from poolwright.runtime.tools.measure import Clock, CudaClock, Run, interleaved

SPARE_PAGES = 3
DIRECTIONS = ("write_back", "load")
RANGES = tuple(4 << 10 + 2 * n for n in range(6))
"""Bytes of a range for which the crossover is shown."""

LARGEST_TOTAL = 1 << 30


@dataclass(frozen=True)
class Plan:
    """Transfers of one pool: tokens of a page (64 KiB each), bytes of staging memory, pages of each."""

    page_size: int
    staging_bytes: int
    counts: tuple[int, ...]


PLANS = (
    Plan(64, 128 << 20, (1, 4, 16, 64)),
    Plan(1, 16 << 20, (1, 16, 128, 1024)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--dry-run`, `--repeats`, `--json`."""
    parser.add_argument("--dry-run", action="store_true", help="keep nothing")
    parser.add_argument(
        "--repeats", type=package.positive, default=7, metavar="N", help="of each transfer (7)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")


def run(args: argparse.Namespace) -> int:
    """Measure, keep, show."""
    if not torch.cuda.is_available():
        raise package.PackageError("tune measures a CUDA device, and torch sees none: see `doctor`")
    device = torch.device("cuda", torch.cuda.current_device())
    # Not the default stream: batch copies are not taken there.
    make: Callable[[], Any] = torch.cuda.Stream
    with torch.cuda.stream(make()), tuning.unread():
        costs = measure(device, CudaClock(), PLANS, args.repeats)
    if args.json:
        print(json.dumps({way: asdict(costs.of(way)) for way in DIRECTIONS}, indent=2))
    else:
        print("\n".join(table(costs)))
    if not args.dry_run:
        path = tuning.store(*identity(device), costs)
        if not args.json:
            print(f"kept in {path}")
    return 0


def measure(device: torch.device, clock: Clock, plans: Sequence[Plan], repeats: int) -> Costs:
    """The constants of this device."""
    samples: dict[str, list[Sample]] = {way: [] for way in DIRECTIONS}
    start: Costs | None = None
    for plan in plans:
        pool = build(plan, device)
        start = pool._shared.code.costs
        for way in DIRECTIONS:
            samples[way] += of_pool(pool, way, plan, clock, repeats)
        pool.destroy()
    assert start is not None
    found = {way: fit(samples[way], start.of(way)) for way in DIRECTIONS}
    return Costs(found["write_back"], found["load"], "measured just now")


def build(plan: Plan, device: torch.device) -> HostPool:
    """A bound pool for the plan's transfers: 64 layers of rows of 1 KiB."""
    from poolwright.generated import MLATokenToKVPoolHost

    most = max(plan.counts) + SPARE_PAGES
    pool = MLATokenToKVPoolHost(
        kv_lora_rank=1024,
        qk_rope_head_dim=0,
        dtype=torch.uint8,
        layers=range(64),
        page_size=plan.page_size,
        layout="page_first",
        capacity_pages=most,
        staging_bytes=plan.staging_bytes,
        device=device,
    )
    pool.bind(rows.tensors(pool, most))
    return pool


def of_pool(pool: HostPool, way: str, plan: Plan, clock: Clock, repeats: int) -> Iterator[Sample]:
    """Each count of pages by kernels and staged."""
    for pages in plan.counts:
        random = torch.Generator().manual_seed(pages)
        host, device = (torch.randperm(pool.page_num, generator=random)[:pages] for _ in range(2))
        runs = [_run(pool, way, host, device, path) for path in ("zero_copy", "staged")]
        timed = interleaved(runs, clock, repeats)
        wanted = pool._shared.code.costs.of(way).chunks(pages * pool.page_bytes)
        chunks = sum(map(len, fill_sizes(pages, wanted, pool.staging_pages, way)))
        for path, count, copies in (("zero_copy", 0, 0), ("staged", chunks, pages)):
            timing = timed[path]
            yield Sample(pages * pool.page_bytes, count, copies, timing.seconds, timing.submit)


def _run(pool: HostPool, way: str, host: torch.Tensor, device: torch.Tensor, path: str) -> Run:
    def submit() -> Any:
        return getattr(pool, way)(host, device, unit="page", path=path)

    return Run(path, submit, lambda ticket, stream: ticket.wait(stream))


# ---- showing ----------------------------------------------------------------------------------


def table(costs: Costs) -> Iterator[str]:
    """The constants, and the total from which on `staged` is the faster path for ranges of each size."""
    yield "| | write_back | load |"
    yield "|---|---|---|"
    pairs = zip(asdict(costs.write_back).items(), asdict(costs.load).values(), strict=True)
    for (name, write_back), load in pairs:
        shown = (_shown(name, value) for value in (write_back, load))
        yield f"| {name} | {' | '.join(shown)} |"
    for nbytes in RANGES:
        found = (crossover(costs, way, nbytes) for way in DIRECTIONS)
        words = (f"{total / 1e6:.1f} MB" if total else "never" for total in found)
        yield f"| staged wins, ranges of {nbytes >> 10} KiB | {' | '.join(words)} |"


def _shown(name: str, value: float) -> str:
    return f"{value / 1e9:.1f} GB/s" if name.endswith(("_rate", "_beside")) else f"{value * 1e6:.2f} us"


def crossover(costs: Costs, way: str, range_bytes: int) -> int | None:
    """Bytes in all from which on `staged` is predicted to be faster; None up to 1 GiB."""
    total = range_bytes
    while total <= LARGEST_TOTAL:
        work = Work(way, range_bytes, total // range_bytes, total)
        staged, direct = predict("staged", work, costs), predict("zero_copy", work, costs)
        if staged is not None and direct is not None and staged < direct:
            return total
        total += max(range_bytes, total // 16 // range_bytes * range_bytes)
    return None
