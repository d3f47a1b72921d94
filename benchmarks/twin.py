"""The CPU twin, the host JIT and the generator: figures that need no GPU.

In: the system's C++ compiler. Out: three tables on standard output: `atoms` of real pools against one memcpy
of as many bytes on as many threads; compile time of host.cpp, cold and warm; time of ``codegen build`` and
``codegen build --check``. Both sides of a comparison alternate; the best of each counts.

Run ``python benchmarks/twin.py``.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

from poolwright.generated import MHATokenToKVPoolHost, MLATokenToKVPoolHost
from poolwright.runtime import jit
from poolwright.runtime.pool import HostPool

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Shape:
    """A pool to time: `atom` bytes stand together on both sides; `goal`: percent of memcpy."""

    name: str
    atom: int
    page_size: int
    layers: int
    goal: int


SHAPES = (
    Shape("MHA", 2048, 64, 16, 70),
    Shape("MHA", 256, 64, 40, 55),
    Shape("MHA", 256, 16, 40, 55),
    Shape("MLA", 1152, 64, 30, 70),
    Shape("MLA", 1152, 16, 30, 70),
    Shape("MHA", 2048, 1, 16, 40),
    Shape("MLA", 1152, 1, 30, 40),
)


def build(shape: Shape, total: int) -> tuple[HostPool, int]:
    """A bound pool of about `total` bytes, and its pages."""
    parts = 1 if shape.name == "MLA" else 2
    pages = total // (shape.atom * shape.page_size * shape.layers * parts)
    common: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "layers": range(shape.layers),
        "page_size": shape.page_size,
        "layout": "page_first",
        "capacity_pages": pages,
    }
    width = shape.atom // 2
    rows = pages * shape.page_size
    if parts == 1:
        pool: HostPool = MLATokenToKVPoolHost(kv_lora_rank=width, qk_rope_head_dim=0, **common)
        names = ["kv"]
    else:
        pool = MHATokenToKVPoolHost(heads=1, head_dim=width, v_head_dim=width, **common)
        names = ["k", "v"]
    pool.bind({n: [torch.ones(rows, width, dtype=torch.bfloat16) for _ in pool.layers] for n in names})
    return pool, pages


def memcpy(to: torch.Tensor, source: torch.Tensor, threads: int) -> None:
    """One copy, cut into `threads` parts."""
    step = -(-to.numel() // threads)
    with ThreadPoolExecutor(threads) as workers:
        for start in range(0, to.numel(), step):
            size = min(step, to.numel() - start)
            workers.submit(ctypes.memmove, to.data_ptr() + start, source.data_ptr() + start, size)


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def atoms(total: int, repeats: int, threads: int) -> None:
    print(f"\n`atoms` against memcpy, {total >> 20} MiB, {threads} threads\n")
    print("| pool | atom B | page | write-back | load | memcpy GB/s | write-back % | load % | goal % |")
    print("|---|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        speeds = measure(shape, total, repeats, threads)
        cells = [f"{speed:.2f}" for speed in speeds] + [f"{100 * s / speeds[2]:.0f}" for s in speeds[:2]]
        row = [shape.name, str(shape.atom), str(shape.page_size), *cells, str(shape.goal)]
        print(f"| {' | '.join(row)} |", flush=True)


def measure(shape: Shape, total: int, repeats: int, threads: int) -> list[float]:
    """GB/s of write-back, load and memcpy."""
    pool, pages = build(shape, total)
    size = pages * pool.page_bytes
    host, device = torch.randperm(pages), torch.randperm(pages)
    spare = torch.ones(size, dtype=torch.uint8)
    works: tuple[Callable[[], Any], ...] = (
        lambda: pool.write_back(host, device, unit="page").wait(),
        lambda: pool.load(host, device, unit="page").wait(),
        lambda: memcpy(spare, pool.kv_buffer, threads),
    )
    best = [1e9, 1e9, 1e9]
    for _ in range(repeats):
        best = [min(old, seconds(work)) for old, work in zip(best, works, strict=True)]
    pool.destroy()
    return [size / took / 1e9 for took in best]


def compiling() -> None:
    print("\n| host.cpp | cold s | warm ms |\n|---|---|---|")
    for name, pool_class, sizes in (
        ("mla", MLATokenToKVPoolHost, {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
        ("mha", MHATokenToKVPoolHost, {"heads": 8, "head_dim": 128, "v_head_dim": 128}),
    ):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["POOLWRIGHT_CACHE_DIR"] = folder
            group = {"kv": torch.bfloat16}
            program = pool_class.sized(sizes, group, {"layers": range(32)}, {}, 64, "page_first", "per_layer")
            unit = program.unit("atoms", 16)
            cold, *warm = [seconds(partial(jit.host_libraries, [unit])) for _ in range(6)]
            print(f"| {name} | {cold:.2f} | {min(warm) * 1e3:.1f} |", flush=True)


def generating(repeats: int) -> None:
    print("\n| command | best s |\n|---|---|")
    codegen = Path(sys.executable).with_name("codegen")
    settings = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    for words in (["build"], ["build", "--check"]):
        run = [str(codegen), *words]
        best = min(
            seconds(partial(subprocess.run, run, cwd=ROOT, env=settings, check=True, capture_output=True))
            for _ in range(repeats)
        )
        print(f"| codegen {' '.join(words)} | {best:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="the CPU twin, the host JIT and the generator")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    for threads in options.threads:
        os.environ["POOLWRIGHT_THREADS"] = str(threads)
        atoms(options.mib << 20, options.repeats, threads)
    compiling()
    generating(options.repeats)


if __name__ == "__main__":
    main()
