"""CPU time of a submission, and of compiling a pool, on a CUDA device.

In: a CUDA device. Out: two tables on standard output. A submission is timed in bursts of 32 and alone (on an
idle device, each ticket waited for outside the timed part); medians, "burst / alone". ``--profile`` lists
where the time goes.

Run ``python benchmarks/submit.py``.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

from poolwright.generated import MHATokenToKVPoolHost, MLATokenToKVPoolHost
from poolwright.runtime import jit
from poolwright.runtime.pool import HostPool


def build(page_size: int, pages: int) -> HostPool:
    """An MLA pool of 61 layers of 1152-byte rows, bound."""
    pool = MLATokenToKVPoolHost(
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        dtype=torch.bfloat16,
        layers=range(61),
        page_size=page_size,
        layout="page_first",
        capacity_pages=pages,
        device="cuda:0",
        require="cuda",
    )
    rows = [torch.zeros(pages * page_size, 576, dtype=torch.bfloat16, device="cuda") for _ in range(61)]
    pool.bind({"kv": rows})
    return pool


BURST = 32


def microseconds(submit: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median CPU time of a submission: one in a burst, and one alone after a pause of the device."""
    alone, burst = [], []
    for repeat in range(repeats + 10):
        begin = time.perf_counter()
        ticket = submit()
        took = time.perf_counter() - begin
        ticket.wait()
        if repeat >= 10:
            alone.append(took * 1e6)
    for _ in range(repeats // 10):
        begin = time.perf_counter()
        tickets = [submit() for _ in range(BURST)]
        burst.append((time.perf_counter() - begin) / BURST * 1e6)
        for ticket in tickets:
            ticket.wait()
    return statistics.median(burst), statistics.median(alone)


def row(
    pool: HostPool, ids: tuple[torch.Tensor, torch.Tensor], unit: str, repeats: int
) -> list[tuple[float, float]]:
    """Microseconds of zero_copy, staged and a load in layer order."""
    return [
        microseconds(lambda: pool.write_back(*ids, unit=unit, path="zero_copy"), repeats),
        microseconds(lambda: pool.write_back(*ids, unit=unit, path="staged"), repeats),
        microseconds(lambda: pool.load(*ids, unit=unit, order="layer"), repeats),
    ]


def submissions(repeats: int) -> None:
    print(
        "| pages of one token | unit | zero_copy us | staged us | load by layer us |\n|---|---|---|---|---|"
    )
    pool = build(1, 1200)
    for pages in (1, 64, 128, 1024):
        host, device = torch.randperm(1200)[:pages], torch.randperm(1200)[:pages]
        cells = row(pool, (host, device), "page", repeats)
        print(
            f"| {pages} | page | "
            + " | ".join(f"{burst:.0f} / {alone:.0f}" for burst, alone in cells)
            + " |",
            flush=True,
        )
    pool.destroy()
    pool = build(64, 70)
    steps = torch.arange(64)
    for pages in (1, 64):
        host, device = torch.randperm(70)[:pages], torch.randperm(70)[:pages]
        for unit in ("page", "token"):
            ids = (host, device)
            if unit == "token":
                ids = ((host[:, None] * 64 + steps).reshape(-1), (device[:, None] * 64 + steps).reshape(-1))
            cells = row(pool, ids, unit, repeats)
            shown = " | ".join(f"{burst:.0f} / {alone:.0f}" for burst, alone in cells)
            print(f"| {pages} (pages of 64 tokens) | {unit} | {shown} |", flush=True)
    pool.destroy()


def compiling() -> None:
    """Cold and warm compilation of a pool's kernels, the library loaded."""
    print("\n| pool | cold s | warm ms | construction, warm, ms |\n|---|---|---|---|")
    common: dict[str, Any] = {"dtype": torch.bfloat16, "page_size": 64, "layout": "page_first"}
    shapes: list[tuple[type[HostPool], dict[str, Any]]] = [
        (MLATokenToKVPoolHost, {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "layers": range(61)}),
        (MHATokenToKVPoolHost, {"heads": 8, "head_dim": 128, "v_head_dim": 128, "layers": range(32)}),
    ]
    torch.zeros(1, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["POOLWRIGHT_CACHE_DIR"] = folder
        warm_up = MLATokenToKVPoolHost(
            kv_lora_rank=8, qk_rope_head_dim=8, layers=range(1), capacity_pages=1, device="cuda:0", **common
        )
        warm_up.destroy()
        for pool_class, sizes in shapes:
            times = []
            for _ in range(2):
                begin = time.perf_counter()
                pool = pool_class(capacity_pages=1, device="cuda:0", require="cuda", **sizes, **common)
                times.append(time.perf_counter() - begin)
                units = [pool.program.unit(part, 16) for part in pool.program.parts]
                pool.destroy()
            begin = time.perf_counter()
            for unit in units:
                jit.cubin(unit, "sm_90")
            warm = time.perf_counter() - begin
            print(f"| {pool_class.spec.name} | {times[0]:.2f} | {warm * 1e3:.1f} | {times[1] * 1e3:.0f} |")


def profile(repeats: int) -> None:
    pool = build(1, 200)
    host, device = torch.randperm(200)[:64], torch.randperm(200)[:64]
    watch = cProfile.Profile()
    for _ in range(repeats):
        watch.enable()
        ticket = pool.write_back(host, device, unit="page", path="zero_copy")
        watch.disable()
        ticket.wait()
    pstats.Stats(watch).sort_stats("tottime").print_stats(28)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of submissions and of compiling")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.profile:
        profile(options.repeats)
        return
    submissions(options.repeats)
    compiling()


if __name__ == "__main__":
    main()
