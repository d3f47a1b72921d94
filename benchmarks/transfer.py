"""Write-back and load on a CUDA device, each path beside one plain pinned copy of as many bytes.

In: a CUDA device. Out: a table on standard output (``--json FILE`` for the numbers): pool, page size, pages,
scattered or in runs, direction, path, GB/s, percent of the plain copy, microseconds of submission.
Transfers and plain copies alike are submitted while the device is busy, as in an engine. Every cell is
byte-checked in the same run: what was written back is loaded into zeroed rows again.

Run ``python benchmarks/transfer.py``; ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

from poolwright.generated import MHATokenToKVPoolHost, MLATokenToKVPoolHost
from poolwright.runtime.pool import HostPool


@dataclass(frozen=True)
class Shape:
    """A pool of the grid. `row`: bytes of one token of one layer of one component."""

    name: str
    page_size: int
    layers: int
    row: int
    parts: int


SHAPES = (
    Shape("MHA 32 x 2048 B", 64, 32, 2048, 2),
    Shape("MHA 80 x 256 B", 64, 80, 256, 2),
    Shape("MLA 61 x 1152 B", 64, 61, 1152, 1),
    Shape("MHA 32 x 2048 B", 1, 32, 2048, 2),
    Shape("MLA 61 x 1152 B", 1, 61, 1152, 1),
    Shape("MHA 80 x 256 B", 1, 80, 256, 2),
)


@dataclass(frozen=True)
class Cell:
    """One measurement; `plain` is the plain copy of the same run."""

    shape: str
    page_size: int
    pages: int
    order: str
    direction: str
    path: str
    gbps: float
    plain: float
    submit_us: float
    spread: float
    first_layer_us: float = 0.0

    @property
    def percent(self) -> float:
        return 100 * self.gbps / self.plain


def build(shape: Shape, pages: int, layout: str) -> tuple[HostPool, list[torch.Tensor]]:
    """The pool and its device tensors, all on one list."""
    common: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "layers": range(shape.layers),
        "page_size": shape.page_size,
        "layout": layout,
        "capacity_pages": 2 * pages + 3,
        "device": "cuda:0",
        "require": "cuda",
    }
    rows = (pages + 7) * shape.page_size
    if shape.parts == 1:
        width = shape.row // 2
        pool: HostPool = MLATokenToKVPoolHost(kv_lora_rank=width - 64, qk_rope_head_dim=64, **common)
        tensors = {"kv": [_random(rows, 1, width) for _ in range(shape.layers)]}
    else:
        head = 128
        heads = max(1, shape.row // 2 // head)
        pool = MHATokenToKVPoolHost(heads=heads, head_dim=head, v_head_dim=head, **common)
        tensors = {k: [_random(rows, heads, head) for _ in range(shape.layers)] for k in ("k", "v")}
    pool.bind(tensors)
    return pool, [tensor for each in tensors.values() for tensor in each]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


BUSY = 16_000_000
"""Cycles that the device is kept busy with while a transfer is submitted: about 8 ms."""


def timed(submit: Callable[[], Any], repeats: int) -> tuple[float, float, float]:
    """(median seconds, spread, microseconds of submission) of a transfer that was submitted ahead.

    The device works on something else while the CPU submits, as in an engine; time runs from the end of
    that work to the last byte.
    """
    seconds, cpu = [], []
    stream = torch.cuda.current_stream()
    for repeat in range(repeats + 2):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY)
        start.record()
        begin = time.perf_counter()
        ticket = submit()
        took = time.perf_counter() - begin
        if ticket is not None:
            ticket.wait(stream)
        end.record()
        torch.cuda.synchronize()
        if ticket is not None:
            ticket.wait()
        if repeat >= 2:
            seconds.append(start.elapsed_time(end) / 1e3)
            cpu.append(took * 1e6)
    middle = statistics.median(seconds)
    return middle, (max(seconds) - min(seconds)) / middle, statistics.median(cpu)


def cells(
    shape: Shape, pages: int, order: str, paths: list[str], repeats: int, layout: str
) -> Iterator[Cell]:
    """Every path in both directions for one pool, count of pages and placement."""
    pool, tensors = build(shape, pages, layout)
    total = pages * pool.page_bytes
    device_buffer = torch.empty(total, dtype=torch.uint8, device="cuda")
    host_buffer = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    plain = {
        "write_back": timed(lambda: _plain(host_buffer, device_buffer), repeats)[0],
        "load": timed(lambda: _plain(device_buffer, host_buffer), repeats)[0],
    }
    host = torch.randperm(pool.page_num)[:pages] if order == "scattered" else torch.arange(pages) + 1
    rows = torch.randperm(pages + 7)[:pages]
    reference = [tensor.clone() for tensor in tensors]
    size = shape.page_size
    index = (rows[:, None] * size + torch.arange(size)).reshape(-1).cuda()
    for path in paths:
        took = timed(lambda path=path: pool.write_back(host, rows, unit="page", path=_forced(path)), repeats)
        yield _cell(shape, pages, order, "write_back", path, total, plain, took)
        for tensor in tensors:
            tensor.zero_()
        took = timed(lambda path=path: pool.load(host, rows, unit="page", path=_forced(path)), repeats)
        for tensor, kept in zip(tensors, reference, strict=True):
            if not torch.equal(tensor[index], kept[index]):
                raise SystemExit(f"{shape.name}, {pages} pages, {path}: bytes differ")
            tensor.copy_(kept)
        yield _cell(shape, pages, order, "load", path, total, plain, took)
    took = timed(lambda: pool.load(host, rows, unit="page", order="layer"), repeats)
    first = _first_layer(pool, host, rows, repeats)
    yield _cell(shape, pages, order, "load", "by layer", total, plain, took, first)
    pool.destroy()


def _plain(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source, non_blocking=True)


def _forced(path: str) -> str | None:
    return None if path == "chosen" else path


def _first_layer(pool: HostPool, host: torch.Tensor, rows: torch.Tensor, repeats: int) -> float:
    """Microseconds to the first layer, submitted ahead."""
    found = []
    stream = torch.cuda.current_stream()
    for _ in range(repeats):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY)
        start.record()
        ticket = pool.load(host, rows, unit="page", order="layer")
        ticket.wait_layer(pool.layers[0], stream)
        end.record()
        ticket.wait()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3)
    return statistics.median(found)


def _cell(
    shape: Shape,
    pages: int,
    order: str,
    direction: str,
    path: str,
    total: int,
    plain: dict[str, float],
    took: tuple[float, float, float],
    first: float = 0.0,
) -> Cell:
    seconds, spread, submit = took
    speed = total / seconds / 1e9
    reference = total / plain[direction] / 1e9
    return Cell(
        shape.name, shape.page_size, pages, order, direction, path, speed, reference, submit, spread, first
    )


HEADER = (
    "| pool | page | pages | order | way | path | GB/s | % of plain | spread % | submit us | first layer us |"
)


def row(cell: Cell) -> str:
    first = f"{cell.first_layer_us:.0f}" if cell.first_layer_us else ""
    return (
        f"| {cell.shape} | {cell.page_size} | {cell.pages} | {cell.order} | {cell.direction} | {cell.path} | "
        f"{cell.gbps:.1f} | {cell.percent:.1f} | {100 * cell.spread:.0f} | {cell.submit_us:.0f} | {first} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="write-back and load against a plain copy")
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 8, 64, 129])
    parser.add_argument("--paths", nargs="+", default=["zero_copy", "staged", "chosen"])
    parser.add_argument("--order", nargs="+", default=["scattered", "runs"])
    parser.add_argument("--layout", default="page_first")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--limit-mb", type=int, default=1200, help="skip cells of more bytes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[Cell] = []
    print(HEADER)
    print("|" + "---|" * (HEADER.count("|") - 1))
    for shape in SHAPES:
        for pages in options.pages:
            count = pages if shape.page_size > 1 else pages * 8
            if count * shape.page_size * shape.layers * shape.row * shape.parts > options.limit_mb << 20:
                continue
            for order in options.order:
                for cell in cells(shape, count, order, options.paths, options.repeats, options.layout):
                    found.append(cell)
                    print(row(cell), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(cell) for cell in found], indent=1))


if __name__ == "__main__":
    main()
