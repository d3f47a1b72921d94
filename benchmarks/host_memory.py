"""Pinned host memory: how long it takes to get, and how fast it is, ours against torch's.

In: a CUDA device and enough memory. Out: a table on standard output, ``--json FILE`` for the figures: seconds
until the memory is pinned and every page is there, seconds to give it back, GB/s of one plain copy each way.
Ways are alternated; the first round is discarded, since a machine may have to find its memory first.
``--serve``: what a pool does while another one is registered in the background.

Run ``python benchmarks/host_memory.py --gib 16``; ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

from asked import asked
from shapes import SHAPES, Rig

from poolwright.runtime.driver.cuda import cuda_driver
from poolwright.runtime.memory import HostBuffer, HostMemoryError

COPY = 1 << 30
COPIES = 5


@dataclass(frozen=True)
class Round:
    """One allocation of one way: seconds to get and to give back, GB/s to the host and from it."""

    way: str
    get: float
    give_back: float
    to_host: float
    from_host: float
    placement: str


Held = tuple[torch.Tensor, Callable[[], object], str]
"""The memory, what gives it back, where it lies."""


def torch_pinned(nbytes: int) -> Held:
    def give_back() -> None:
        cache: Any = torch._C
        cache._host_emptyCache()

    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), give_back, ""


def ours(nbytes: int, device: torch.device, **more: Any) -> Held:
    driver = cuda_driver(device)
    buffer = HostBuffer(nbytes, registrar=driver, numa_node=driver.numa_node(), **more)
    return buffer.tensor, buffer.destroy, buffer.placement


def ways(nbytes: int, device: torch.device) -> dict[str, Callable[[], Held]]:
    """Everything that is compared."""
    return {
        "torch.empty(pin_memory=True)": lambda: torch_pinned(nbytes),
        "ours": lambda: ours(nbytes, device),
        "ours, 8 threads": lambda: ours(nbytes, device, threads=8),
        "ours, 1 thread": lambda: ours(nbytes, device, threads=1),
        "ours, huge pages": lambda: ours(nbytes, device, hugepages=True),
        "ours, chunks of 4 GiB": lambda: ours(nbytes, device, chunk_bytes=4 << 30),
    }


def speed(to: torch.Tensor, source: torch.Tensor) -> float:
    """GB/s of one plain copy, median."""
    found = []
    for _ in range(COPIES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        to.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        found.append(to.numel() / start.elapsed_time(end) / 1e6)
    return statistics.median(found)


def measure(name: str, get: Callable[[], Held], side: torch.Tensor) -> Round:
    """Get, copy both ways at the far end, give back."""
    begin = time.perf_counter()
    memory, give_back, placement = get()
    got = time.perf_counter() - begin
    part = memory[-side.numel() :]
    speeds = speed(part, side), speed(side, part)
    del memory, part
    gc.collect()
    begin = time.perf_counter()
    give_back()
    return Round(name, got, time.perf_counter() - begin, *speeds, placement)


# ---- beside registration ----------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """What a pool does in a span of time: seconds, submissions, microseconds of one, GB/s of all."""

    seconds: float
    submissions: int
    median: float
    longest: float
    rate: float

    def __str__(self) -> str:
        figures = f"{self.submissions} | {self.median:.0f} | {self.longest:.0f} | {self.rate:.1f}"
        return f"{self.seconds:.2f} | {figures}"


def serve(rig: Rig, host: torch.Tensor, device: torch.Tensor, until: Callable[[], bool]) -> Served:
    """Write back, four under way, once and until it is over."""
    begin, took, tickets = time.perf_counter(), list[float](), list[Any]()
    while not took or not until():
        start = time.perf_counter()
        tickets.append(rig.pool.write_back(host, device, unit="page"))
        took.append((time.perf_counter() - start) * 1e6)
        if len(tickets) > 3:
            tickets.pop(0).wait()
    for ticket in tickets:
        ticket.wait()
    seconds = time.perf_counter() - begin
    moved = len(took) * len(host) * rig.shape.page_bytes
    return Served(seconds, len(took), statistics.median(took), max(took), moved / seconds / 1e9)


def beside_registration(gib: float, device: str) -> None:
    """A pool moves pages alone, then while another one of so many GiB is registered."""
    rig = Rig(SHAPES[2], 16, device)
    host, there = rig.lists(16, "scattered")
    serve(rig, host, there, over_in(1.0))
    print("| | seconds | submissions | median us | longest us | GB/s |\n|---|---|---|---|---|---|")
    print(f"| alone | {serve(rig, host, there, over_in(2.0))} |", flush=True)
    begin = time.perf_counter()
    large = SHAPES[2].make(
        layout="page_first", capacity_bytes=int(gib * (1 << 30)), device=device, register="background"
    )
    first, some = time.perf_counter() - begin, large.available_size() // large.page_size
    print(f"| beside registration | {serve(rig, host, there, large.registered)} |", flush=True)
    print(f"\n{some:,} of {large.page_num:,} pages after {first:.2f} s")
    large.destroy()
    rig.close()


def over_in(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def main() -> int:
    parser = argparse.ArgumentParser(description="pinned host memory, ours against torch's")
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count, after one that does not")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help="transfers while another pool is registered")
    options = asked(parser)
    if options.serve:
        beside_registration(options.gib, "cuda:0")
        return 0
    nbytes, device = int(options.gib * (1 << 30)), torch.device("cuda:0")
    side = torch.empty(min(COPY, nbytes), dtype=torch.uint8, device=device)
    tried, found = ways(nbytes, device), list[Round]()
    for turn in range(options.rounds + 1):
        for name, get in list(tried.items()):
            try:
                one = measure(name, get, side)
            except HostMemoryError as error:
                print(f"left out: {name}: {error}", flush=True)
                del tried[name]
                continue
            print(f"round {turn}: {name}: {one.get:.2f} s", flush=True)
            found += [one] * (turn > 0)
    print(f"\n{options.gib:g} GiB\n| way | s to get | s to give back | GB/s to host | from host | placed |")
    print("|---" * 6 + "|")
    for name in tried:
        rounds = [one for one in found if one.way == name]
        columns = ((r.get, r.give_back, r.to_host, r.from_host) for r in rounds)
        middles = [statistics.median(column) for column in zip(*columns, strict=True)]
        times, speeds = middles[:2], middles[2:]
        shown = [*(f"{t:.2f}" for t in times), *(f"{s:.1f}" for s in speeds), rounds[0].placement]
        print(f"| {name} | {' | '.join(shown)} |")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
