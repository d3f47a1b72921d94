"""CPU time of a controller's operations: asking, starting, taking the ack, freeing; beside the pool's calls.

On a CUDA device; ``--stub`` needs none: the driver's calls do nothing, what is left is Python's share. Best
of many rounds; a round has so many write-backs and as many loads, started together, all by zero_copy.

Run ``python benchmarks/controller.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

import nothing
import submit

from poolwright.runtime.controller import CacheController
from poolwright.runtime.pool import HostPool
from poolwright.runtime.testing import use_driver

PAGE = 64
STEPS = ("ask", "start", "ack", "free")


class Round:
    """Seconds of each step, the least of all rounds, an operation."""

    def __init__(self, operations: int) -> None:
        self.operations, self.least = operations, dict.fromkeys(STEPS, float("inf"))

    def timed(self, step: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        found = call()
        self.least[step] = min(self.least[step], (time.perf_counter() - begin) / self.operations)
        return found

    def cells(self) -> str:
        return " | ".join(f"{self.least[step] * 1e6:.1f}" for step in STEPS)


def wait(controller: CacheController) -> None:
    while not controller.ready():
        pass


def controlled(pool: HostPool, lists: list[torch.Tensor], unit: str, rounds: int) -> tuple[Round, Round]:
    """Write-backs and loads through a controller."""
    controller = CacheController(pool)
    writes, loads = Round(len(lists)), Round(len(lists))
    for _ in range(rounds):
        made = writes.timed("ask", lambda: [controller.write(ids, unit=unit) for ids in lists])
        writes.timed("start", partial(controller.start_writing, path="zero_copy")).wait_all()
        wait(controller)
        writes.timed("ack", controller.pop_acks)
        hosts = [operation.host[pool.name] for operation in made]
        loads.timed(
            "ask",
            lambda hosts=hosts: [
                controller.load(host, ids, unit=unit) for host, ids in zip(hosts, lists, strict=True)
            ],
        )
        loads.timed("start", partial(controller.start_loading, path="zero_copy")).wait_all()
        wait(controller)
        loads.timed("ack", controller.pop_acks)
        writes.timed("free", lambda hosts=hosts: [controller.free(host, unit=unit) for host in hosts])
    loads.least["free"] = 0.0
    return writes, loads


def plain(pool: HostPool, lists: list[torch.Tensor], unit: str, rounds: int) -> tuple[float, float]:
    """Seconds of the pool's own calls for one operation, nothing merged: alloc, write-back, free; a load."""
    stores = loads = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        hosts = [pool.alloc(ids.numel() * (PAGE if unit == "page" else 1)) for ids in lists]
        given = [host[::PAGE] // PAGE if unit == "page" else host for host in hosts if host is not None]
        pairs = list(zip(given, lists, strict=True))
        tickets = [pool.write_back(*pair, unit=unit, path="zero_copy") for pair in pairs]
        took = time.perf_counter() - begin
        for ticket in tickets:
            ticket.wait()
        begin = time.perf_counter()
        tickets = [pool.load(*pair, unit=unit, order="layer", path="zero_copy") for pair in pairs]
        loads = min(loads, (time.perf_counter() - begin) / len(lists))
        for ticket in tickets:
            ticket.wait()
        begin = time.perf_counter()
        for host in hosts:
            pool.free(host)
        stores = min(stores, (took + time.perf_counter() - begin) / len(lists))
    return stores, loads


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of a controller's operations")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--stub", action="store_true", help="Python's share, without a GPU")
    options = parser.parse_args()
    device = "cpu" if options.stub else "cuda:0"
    print("| operations | pages each | unit | direction | ask us | start us | ack us | free us | pool us |")
    print("|---|---|---|---|---|---|---|---|---|")
    with use_driver(nothing.NoDriver()) if options.stub else contextlib.nullcontext():
        pool = submit.build(PAGE, 70, device)
        for operations, pages in ((1, 1), (16, 1), (1, 64), (16, 4)):
            for unit in ("page", "token"):
                order = torch.randperm(pool.page_num)[: operations * pages].split(pages)
                lists = [ids if unit == "page" else _tokens(ids) for ids in order]
                stores, loads = plain(pool, lists, unit, options.rounds)
                for name, found, alone in zip(
                    ("write-back", "load"),
                    controlled(pool, lists, unit, options.rounds),
                    (stores, loads),
                    strict=True,
                ):
                    cells = f"{operations} | {pages} | {unit} | {name} | {found.cells()} | {alone * 1e6:.1f}"
                    print(f"| {cells} |", flush=True)
        pool.destroy()


def _tokens(pages: torch.Tensor) -> torch.Tensor:
    return (pages[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)


if __name__ == "__main__":
    main()
