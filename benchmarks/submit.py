"""CPU time of a submission, and of compiling a pool.

Without options, on a CUDA device: submissions (in bursts of 32 and alone on an idle device, each ticket
waited for outside the timed part; medians, "burst / alone"), then compiling. ``--stub`` needs no GPU: the
driver's calls do nothing, what is left is Python's share (best of many). ``--compile`` needs none either.
``--calls`` shows what single driver calls cost on a CUDA device. ``--profile`` lists where the time goes.

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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

import driver_calls
import nothing

from poolwright.generated import MHATokenToKVPoolHost, MLATokenToKVPoolHost
from poolwright.runtime import indices, jit
from poolwright.runtime.pool import HostPool
from poolwright.runtime.testing import use_driver

BURST = 32
Ids = tuple[torch.Tensor, torch.Tensor]
Submit = Callable[[], Any]


def build(page_size: int, pages: int, device: str) -> HostPool:
    """An MLA pool of 61 layers of 1152-byte rows, bound."""
    pool = MLATokenToKVPoolHost(
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        dtype=torch.bfloat16,
        layers=range(61),
        page_size=page_size,
        layout="page_first",
        capacity_pages=pages,
        device=device,
        require=None if device == "cpu" else "cuda",
    )
    rows = [torch.empty(pages * page_size, 576, dtype=torch.bfloat16, device=device) for _ in range(61)]
    pool.bind({"kv": rows})
    return pool


def cases(device: str) -> Iterator[tuple[str, str, HostPool, Ids]]:
    """(pages, unit, pool, ids) of every row of the tables."""
    pool = build(1, 1200, device)
    for pages in (1, 64, 128, 1024):
        yield f"{pages} (of one token)", "page", pool, (scattered(1200, pages), scattered(1200, pages))
    pool.destroy()
    pool = build(64, 70, device)
    steps = torch.arange(64)
    for pages in (1, 64):
        host, there = scattered(70, pages), scattered(70, pages)
        yield f"{pages} (of 64 tokens)", "page", pool, (host, there)
        tokens = tuple((ids[:, None] * 64 + steps).reshape(-1) for ids in (host, there))
        yield f"{pages} (of 64 tokens)", "token", pool, (tokens[0], tokens[1])
    pool.destroy()


def scattered(of: int, count: int) -> torch.Tensor:
    return torch.randperm(of)[:count]


def ways(pool: HostPool, ids: Ids, unit: str) -> list[Submit]:
    """zero_copy, staged, and a load in layer order."""
    return [
        lambda: pool.write_back(*ids, unit=unit, path="zero_copy"),
        lambda: pool.write_back(*ids, unit=unit, path="staged"),
        lambda: pool.load(*ids, unit=unit, order="layer", path="zero_copy"),
    ]


# ---- submissions on a device ------------------------------------------------------------------


def microseconds(submit: Submit, repeats: int) -> tuple[float, float]:
    """Median CPU time of a submission: one in a burst, and one alone after a pause of the device."""
    alone, burst = [], []
    for repeat in range(repeats + 10):
        begin = time.perf_counter()
        ticket = submit()
        took = time.perf_counter() - begin
        ticket.wait()
        if repeat >= 10:
            alone.append(took * 1e6)
    for _ in range(max(1, repeats // 10)):
        begin = time.perf_counter()
        tickets = [submit() for _ in range(BURST)]
        burst.append((time.perf_counter() - begin) / BURST * 1e6)
        for ticket in tickets:
            ticket.wait()
    return statistics.median(burst), statistics.median(alone)


def submissions(repeats: int) -> None:
    print("| pages | unit | zero_copy us | staged us | load by layer us |\n|---|---|---|---|---|")
    for pages, unit, pool, ids in cases("cuda:0"):
        cells = [microseconds(submit, repeats) for submit in ways(pool, ids, unit)]
        shown = " | ".join(f"{burst:.0f} / {alone:.0f}" for burst, alone in cells)
        print(f"| {pages} | {unit} | {shown} |", flush=True)


# ---- Python's share ---------------------------------------------------------------------------


def best(call: Submit, done: Callable[[Any], None], repeats: int) -> float:
    """Least CPU time of one call in bursts, in microseconds; `done` is told each result, untimed."""
    least = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        results = [call() for _ in range(BURST)]
        least = min(least, (time.perf_counter() - begin) / BURST * 1e6)
        for result in results:
            done(result)
    return least


def shares(repeats: int) -> None:
    """Python's share of each submission, and that of checking the ids alone."""
    print("| pages | unit | ids us | zero_copy us | staged us | load by layer us |")
    print("|---|---|---|---|---|---|")
    with use_driver(nothing.NoDriver()):
        for pages, unit, pool, ids in cases("cpu"):
            check = partial(indices.batch, limits_of(pool), *ids, unit, "cheap", True)
            cells = [best(check, lambda _: None, repeats)]
            cells += [best(submit, lambda ticket: ticket.wait(), repeats) for submit in ways(pool, ids, unit)]
            shown = " | ".join(f"{cell:.1f}" for cell in cells)
            print(f"| {pages} | {unit} | {shown} |", flush=True)


def limits_of(pool: HostPool) -> indices.Limits:
    return indices.Limits(pool.spec.name, pool.page_size, pool.page_num, pool.page_num)


def profile(repeats: int, device: str, page_size: int, path: str) -> None:
    """Where the time of a submission of 64 pages goes."""
    with use_driver(nothing.NoDriver()):
        pool = build(page_size, 70 if page_size > 1 else 1200, device)
    ids = scattered(pool.page_num, 64), scattered(pool.page_num, 64)
    watch = cProfile.Profile()
    for _ in range(repeats):
        watch.enable()
        ticket = pool.write_back(*ids, unit="page", path=path)
        watch.disable()
        ticket.wait()
    pstats.Stats(watch).sort_stats("tottime").print_stats(28)
    pool.destroy()


# ---- compiling --------------------------------------------------------------------------------


def shapes() -> list[tuple[type[HostPool], dict[str, Any]]]:
    """The pools that are compiled, with the sizes of real models."""
    common: dict[str, Any] = {"dtype": torch.bfloat16, "page_size": 64, "layout": "page_first"}
    mla = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "layers": range(61)}
    mha = {"heads": 8, "head_dim": 128, "v_head_dim": 128, "layers": range(32)}
    return [(MLATokenToKVPoolHost, mla | common), (MHATokenToKVPoolHost, mha | common)]


def constructions() -> None:
    """A pool's construction with an empty cache and with a filled one, the compiler's library loaded."""
    print("\n| pool | cold s | warm ms |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["POOLWRIGHT_CACHE_DIR"] = folder
        for pool_class, sizes in shapes():
            times = []
            for layers in (range(1), sizes["layers"], sizes["layers"]):  # the first loads the library
                given = {**sizes, "layers": layers}
                begin = time.perf_counter()
                pool = pool_class(capacity_pages=1, device="cuda:0", require="cuda", **given)
                times.append(time.perf_counter() - begin)
                pool.destroy()
            print(f"| {pool_class.spec.name} | {times[1]:.2f} | {times[2] * 1e3:.0f} |", flush=True)


def compiling(repeats: int, arch: str = "sm_90") -> None:
    """Compiling alone: each part of the kernels by itself, all side by side, and from the cache."""
    print("\n| pool | slowest part s | one after another s | side by side s | warm ms |")
    print("|---|---|---|---|---|")
    for pool_class, sizes in shapes():
        with use_driver(nothing.NoDriver()):
            pool = pool_class(capacity_pages=1, device="cpu", **sizes)
        unit = pool.program.unit("kernels", 16)
        pool.destroy()
        alone = [cold(part, arch) for part in unit.split().values()]
        together = statistics.median(cold(unit, arch) for _ in range(5))
        with tempfile.TemporaryDirectory() as folder:
            os.environ["POOLWRIGHT_CACHE_DIR"] = folder
            jit.cubins(unit, arch)
            warm = best(partial(jit.cubins, unit, arch), lambda _: None, max(1, repeats // BURST)) / 1e3
        cells = f"{max(alone):.2f} | {sum(alone):.2f} | {together:.2f} | {warm:.2f}"
        print(f"| {pool_class.spec.name} | {cells} |", flush=True)


def cold(unit: jit.Unit, arch: str) -> float:
    """Seconds of compiling with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["POOLWRIGHT_CACHE_DIR"] = folder
        begin = time.perf_counter()
        jit.cubins(unit, arch)
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of submissions and of compiling")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--stub", action="store_true", help="Python's share, without a GPU")
    parser.add_argument("--calls", action="store_true", help="cost of single driver calls")
    parser.add_argument("--compile", action="store_true", help="compiling alone, without a GPU")
    parser.add_argument("--profile", choices=("zero_copy", "staged"), help="profile 64 pages of this path")
    options = parser.parse_args()
    if options.profile:
        profile(
            options.repeats,
            "cpu" if options.stub else "cuda:0",
            64 if options.profile == "staged" else 1,
            options.profile,
        )
    elif options.stub:
        shares(options.repeats)
    elif options.calls:
        driver_calls.table()
    elif options.compile:
        compiling(options.repeats)
    else:
        submissions(options.repeats)
        constructions()
        compiling(options.repeats)


if __name__ == "__main__":
    main()
