"""CPU time of a submission, of one pool and of a group, and of compiling a pool.

Without options, on a CUDA device: every submission is timed by itself while fewer than `DEPTH` are under way,
and in bursts of 32, whose queue the device may not have emptied; waiting is never timed. ``--stub`` needs no
GPU: the driver's calls do nothing, what is left is Python's share (best of many). ``--compile`` needs none
either. ``--calls`` shows what single driver calls cost on a CUDA device. ``--profile`` lists where the time
goes.

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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

import driver_calls
import nothing
from asked import asked

from poolwright.generated import KimiLinearHostPoolGroup, MHATokenToKVPoolHost, MLATokenToKVPoolHost
from poolwright.runtime import indices, jit
from poolwright.runtime.backend import Code
from poolwright.runtime.driver.cuda import CudaKernels
from poolwright.runtime.group import HostPoolGroup
from poolwright.runtime.pool import HostPool
from poolwright.runtime.testing import use_driver

BURST, DEPTH = 32, 4
LEAST, SECONDS = 10, 0.7
"""Rounds of a cell at least, and how long it may take with more."""
WAYS = ("zero_copy", "staged", "load by layer")
GROUP_PAGES = (1, 64, 1024)
"""Pages of latents that a group moves beside one state."""
Ids = tuple[torch.Tensor, torch.Tensor]
Submit = Callable[[], Any]
Figures = tuple[float, ...]
"""CPU time of a submission in microseconds; the first is the one to compare."""


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
    for pages in (1, 8, 64, 128, 1024):
        yield f"{pages} (of one token)", "page", pool, (scattered(1200, pages), scattered(1200, pages))
    pool.destroy()
    pool = build(64, 140, device)
    steps = torch.arange(64)
    for pages in (1, 8, 64):
        host, there = scattered(70, pages) * 2, scattered(140, pages)  # no two host pages are neighbours
        yield f"{pages} (of 64 tokens)", "page", pool, (host, there)
        tokens = tuple((ids[:, None] * 64 + steps).reshape(-1) for ids in (host, there))
        yield f"{pages} (of 64 tokens)", "token", pool, (tokens[0], tokens[1])
    host = torch.randperm(64) + 3
    yield "64 (of 64 tokens, one run)", "page", pool, (host, scattered(140, 64))
    pool.destroy()


def scattered(of: int, count: int) -> torch.Tensor:
    return torch.randperm(of)[:count]


def ways(moved: HostPool | HostPoolGroup, given: tuple[Any, ...], unit: str) -> list[Submit]:
    """A submission for each of `WAYS`. `given`: (host ids, device ids) of a pool, (moves,) of a group."""
    return [
        lambda: moved.write_back(*given, unit=unit, path="zero_copy"),
        lambda: moved.write_back(*given, unit=unit, path="staged"),
        lambda: moved.load(*given, unit=unit, order="layer", path="zero_copy"),
    ]


# ---- submissions on a device ------------------------------------------------------------------


def microseconds(submits: Sequence[Submit], rounds: int) -> list[Figures]:
    """CPU time of each submission: the median and the best tenth with room in the queue, one of a burst.

    They take turns, so that a slow moment of the machine touches all alike.
    """
    single: list[list[float]] = [[] for _ in submits]
    burst: list[list[float]] = [[] for _ in submits]
    end = time.perf_counter() + SECONDS * len(submits)
    for repeat in range(-3, rounds):
        if repeat >= LEAST and time.perf_counter() > end:
            break
        for submit, found in zip(submits, single, strict=True):
            took = one_by_one(submit)
            found += took if repeat >= 0 else []
    for _ in range(3):
        for submit, found in zip(submits, burst, strict=True):
            found.append(best(submit, lambda ticket: ticket.wait(), 1))
    return [
        (statistics.median(took), statistics.quantiles(took, n=10)[0], statistics.median(bursts))
        for took, bursts in zip(single, burst, strict=True)
    ]


def one_by_one(submit: Submit) -> list[float]:
    """Microseconds of each of `DEPTH` submissions, which are then waited for."""
    tickets, took = [], []
    for _ in range(DEPTH):
        begin = time.perf_counter()
        tickets.append(submit())
        took.append((time.perf_counter() - begin) * 1e6)
    for ticket in tickets:
        ticket.wait()
    return took


def submissions(rounds: int) -> None:
    print(
        f"CPU time in us: median / best tenth of single ones (under {DEPTH} under way) / burst of {BURST}\n"
    )
    print(f"| pages | unit | {' | '.join(WAYS)} |\n|---|---|---|---|---|")
    for pages, unit, pool, ids in cases("cuda:0"):
        cells = [shown(*microseconds([submit], rounds)) for submit in ways(pool, ids, unit)]
        print(f"| {pages} | {unit} | {' | '.join(cells)} |", flush=True)
    group = build_group("cuda:0")
    group_table(group, partial(microseconds, rounds=rounds))
    group.destroy()


def shown(figures: Figures) -> str:
    return " / ".join(f"{figure:.1f}" for figure in figures)


# ---- a group ----------------------------------------------------------------------------------


def build_group(device: str) -> HostPoolGroup:
    """Latents of 7 layers and states of 21 (Kimi-Linear's kinds), bound."""
    group = KimiLinearHostPoolGroup(
        full_attention_layers=range(3, 28, 4),
        linear_attention_layers=[layer for layer in range(27) if layer % 4 != 3],
        page_size=1,
        kv={"kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": torch.bfloat16, "layout": "page_first"},
        state={
            **{"heads": 8, "head_dim": 128, "kernel": 4, "ngram": 0},
            **{"ssm_dtype": torch.float32, "conv_dtype": torch.bfloat16},
        },
        capacity_pages={"kv": 1200, "state": 2},
        device=device,
        require=None if device == "cpu" else "cuda",
    )
    rows = [torch.empty(1200, 576, dtype=torch.bfloat16, device=device) for _ in range(7)]
    temporal = torch.empty(21, 3, 8, 128, 128, device=device)
    conv = torch.empty(21, 3, 3, 3072, dtype=torch.bfloat16, device=device)
    group.bind({"kv": {"kv": rows}, "state": {"temporal": temporal, "conv": conv}})
    return group


def group_table(group: HostPoolGroup, measure: Callable[[Sequence[Submit]], list[Figures]]) -> None:
    """Each pool of the group by itself, and both in one submission beside the one that takes longer."""
    print("\n| pages of kv, one state | way | kv alone | state alone | kv and state | ratio to the larger |")
    print("|---|---|---|---|---|---|")
    kv, state = group.pools["kv"], group.pools["state"]
    one = torch.tensor([0]), torch.tensor([1])
    for pages in GROUP_PAGES:
        ids = scattered(1200, pages), scattered(1200, pages)
        both = ways(group, ({"kv": ids, "state": one},), "page")
        for way, *submits in zip(WAYS, ways(kv, ids, "page"), ways(state, one, "page"), both, strict=True):
            *alone, together = found = measure(submits)
            ratio = together[0] / max(figures[0] for figures in alone)
            print(f"| {pages} | {way} | {' | '.join(map(shown, found))} | {ratio:.2f} |", flush=True)


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
    print(f"| pages | unit | ids us | {' | '.join(f'{way} us' for way in WAYS)} |")
    print("|---|---|---|---|---|---|")
    with use_driver(nothing.NoDriver()):
        for pages, unit, pool, ids in cases("cpu"):
            check = partial(indices.batch, limits_of(pool), *ids, unit, "cheap", True)
            cells = [best(check, lambda _: None, repeats)]
            cells += [best(submit, lambda ticket: ticket.wait(), repeats) for submit in ways(pool, ids, unit)]
            print(f"| {pages} | {unit} | {' | '.join(f'{cell:.1f}' for cell in cells)} |", flush=True)


def group_shares(repeats: int) -> None:
    """Python's share of a group's submissions."""

    def measure(submits: Sequence[Submit]) -> list[Figures]:
        turns = ([best(one, lambda ticket: ticket.wait(), 1) for one in submits] for _ in range(repeats))
        return [(min(found),) for found in zip(*turns, strict=True)]

    with use_driver(nothing.NoDriver()):
        group = build_group("cpu")
    group_table(group, measure)
    group.destroy()


def limits_of(pool: HostPool) -> indices.Limits:
    return indices.Limits(pool.spec.name, pool.page_size, pool.page_num, pool.page_num)


def profile(repeats: int, device: str, page_size: int, path: str) -> None:
    """Where the time of a submission of 64 pages goes."""
    with use_driver(nothing.NoDriver()):
        pool = build(page_size, 140 if page_size > 1 else 1200, device)
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


def loading(repeats: int = 7) -> None:
    """All code of a pool ready to be launched, with an empty cache and with a filled one; the compiler's
    library is loaded. Beside it what a whole pool takes then: host memory, staging memory, streams."""
    print("\n| pool | cold s | warm ms | of it: read ms | load ms | construction, warm, ms |")
    print("|---|---|---|---|---|---|")
    device = torch.device("cuda", 0)
    for pool_class, sizes in shapes():
        pool = pool_class(capacity_pages=1, device=device, require="cuda", **sizes)
        program, arch = pool.program, f"sm_{''.join(map(str, torch.cuda.get_device_capability(device)))}"
        pool.destroy()
        taken: dict[str, list[float]] = {}

        def timed(what: str, call: Callable[[], Any], taken: dict[str, list[float]] = taken) -> Any:
            begin = time.perf_counter()
            found = call()
            taken.setdefault(what, []).append(time.perf_counter() - begin)
            return found

        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                os.environ["POOLWRIGHT_CACHE_DIR"] = folder
                timed("cold", partial(Code, program, device, "cuda"))
                timed("warm", partial(Code, program, device, "cuda"))
                cubins = timed("read", partial(jit.cubins, program.unit("kernels", 16), arch))
                timed("load", partial(CudaKernels, cubins))
                build = partial(pool_class, capacity_pages=1, device=device, require="cuda", **sizes)
                timed("all", build).destroy()
        cold, *others = (statistics.median(taken[what]) for what in ("cold", "warm", "read", "load", "all"))
        shown = " | ".join(f"{seconds * 1e3:.1f}" for seconds in others)
        print(f"| {pool_class.spec.name} | {cold:.2f} | {shown} |", flush=True)


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
    parser.add_argument(
        "--repeats", type=int, default=300, metavar="N", help="rounds of a cell, at most (300)"
    )
    parser.add_argument("--stub", action="store_true", help="Python's share, without a GPU")
    parser.add_argument("--calls", action="store_true", help="cost of single driver calls")
    parser.add_argument("--compile", action="store_true", help="compiling alone, without a GPU")
    parser.add_argument("--profile", choices=("zero_copy", "staged"), help="profile 64 pages of this path")
    options = asked(parser, lambda given: not (given.stub or given.compile), "--stub and --compile need none")
    if options.profile:
        profile(
            options.repeats,
            "cpu" if options.stub else "cuda:0",
            64 if options.profile == "staged" else 1,
            options.profile,
        )
    elif options.stub:
        shares(options.repeats)
        group_shares(options.repeats)
    elif options.calls:
        driver_calls.table()
    elif options.compile:
        compiling(options.repeats)
    else:
        submissions(options.repeats)
        loading()
        compiling(options.repeats)


if __name__ == "__main__":
    main()
