"""What loading a pool's compiled kernels costs the driver, and the JIT of every shipped pool and group.

In: a CUDA device and NVRTC. Out: two tables.

1. Loading, milliseconds: the first time, the median of later ones, and the first one, two, ... modules alone.
   The kernels as they are (`names`), and with the named numbers of layout.h kept as variables of the module
   (`variables`), which is what a `constexpr` of a namespace becomes; each with the modules loaded one after
   another, in a thread each, and as libraries, by CUDA's default and eagerly.
2. Every pool and group, its slowest program: compiled with an empty cache (cold), from the cache (warm), and
   the driver's share of that.

Run ``python benchmarks/module_load.py``; ``--quick`` leaves out the second table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

import nothing
import submit
from asked import asked

from poolwright import generated
from poolwright.runtime import jit
from poolwright.runtime.backend import Code
from poolwright.runtime.driver.cuda import CudaDriver, CudaKernels
from poolwright.runtime.program import GroupProgram, SizedProgram
from poolwright.runtime.testing import use_driver
from poolwright.runtime.tools import cases, group_cases
from poolwright.runtime.tools.samples import samples

REPEATS = 9
MODES = ("default", "EAGER")
FORMS = ("variables", "names")
VARIABLES = ("PW_CONSTANT(type, name, value)", "[[maybe_unused]] constexpr type name = value")
"""A macro that keeps named numbers as variables."""

Programs = dict[str, SizedProgram | GroupProgram]


def shapes() -> Programs:
    """Programs whose loading is taken apart: two pools with sizes of real models, the largest group."""
    found: Programs = {}
    for pool_class, sizes in submit.shapes():
        found[pool_class.spec.name] = sized(pool_class, sizes)
    found["dsv4"] = group("dsv4", "wide")
    return found


def sized(pool_class: Any, sizes: dict[str, Any]) -> SizedProgram:
    """The program that a pool of these sizes would have."""
    with use_driver(nothing.NoDriver()):
        pool = pool_class(capacity_pages=1, device="cpu", **sizes)
    pool.destroy()
    program: SizedProgram = pool.program
    return program


def group(name: str, sample: str) -> GroupProgram:
    kind = generated.group_class(name)
    return group_cases.programs(kind, group_cases.group_sample(kind, sample).given)


def unit(program: SizedProgram | GroupProgram, form: str) -> jit.Unit:
    found = program.unit("kernels", 16)
    more = (VARIABLES,) if form == "variables" else ()
    return jit.Unit(found.name, found.main, (*found.defines, *more), found.parts)


def arch() -> str:
    return "sm_" + "".join(map(str, torch.cuda.get_device_capability()))


# ---- ways to load -----------------------------------------------------------------------------


def check(result: tuple[Any, ...]) -> Any:
    """The value of a call of the driver API."""
    if int(result[0]) != 0:
        raise RuntimeError(f"CUDA: {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]


def one_after_another(cubins: Sequence[bytes]) -> Callable[[], None]:
    from cuda.bindings import driver

    kernels = CudaKernels(cubins)
    return lambda: [driver.cuModuleUnload(module) for module in kernels._modules] and None


def in_threads(cubins: Sequence[bytes]) -> Callable[[], None]:
    context = CudaDriver(torch.device("cuda"))

    def load(cubin: bytes) -> Callable[[], None]:
        with context.guard():
            return one_after_another([cubin])

    with ThreadPoolExecutor(len(cubins)) as threads:
        unload = list(threads.map(load, cubins))
    return lambda: [undo() for undo in unload] and None


def as_libraries(cubins: Sequence[bytes]) -> Callable[[], None]:
    from cuda.bindings import driver

    held = []
    for cubin in cubins:
        library = check(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
        held.append(library)
        count = check(driver.cuLibraryGetKernelCount(library))
        for kernel in check(driver.cuLibraryEnumerateKernels(count, library)):
            check((*driver.cuFuncLoad(check(driver.cuKernelGetFunction(kernel))), None))
    return lambda: [driver.cuLibraryUnload(library) for library in held] and None


WAYS = {"one after another": one_after_another, "in threads": in_threads, "as libraries": as_libraries}


def loaded(way: Callable[[Sequence[bytes]], Callable[[], None]], cubins: Sequence[bytes]) -> float:
    """Milliseconds until every kernel can be launched; unloaded afterwards."""
    begin = time.perf_counter()
    unload = way(cubins)
    taken = (time.perf_counter() - begin) * 1e3
    unload()
    return taken


# ---- tables -----------------------------------------------------------------------------------


def measure(mode: str, repeats: int) -> None:
    """The rows of one CUDA_MODULE_LOADING, which counts from the start of a process."""
    for name, program in shapes().items():
        for form in FORMS:
            cubins = jit.cubins(unit(program, form), arch())
            for label, way in WAYS.items():
                each = [loaded(way, cubins) for _ in range(repeats)]
                growing = [
                    statistics.median(loaded(way, cubins[:n]) for _ in range(3))
                    for n in range(1, len(cubins) + 1)
                ]
                later = ", ".join(f"{taken:.2f}" for taken in growing)
                nbytes, usual = sum(map(len, cubins)), statistics.median(each[1:])
                where = f"| {name} | {form} | {label} | {mode}"
                print(f"{where} | {nbytes:,} | {each[0]:.2f} | {usual:.2f} | {later} |", flush=True)


def loading(repeats: int) -> None:
    """The first table: a process for each CUDA_MODULE_LOADING."""
    print(
        "| program | named numbers | modules | loading | bytes | first ms | later ms | 1, 2, ... modules ms |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for mode in MODES:
        settings = {**os.environ} if mode == "default" else {**os.environ, "CUDA_MODULE_LOADING": mode}
        command = [sys.executable, __file__, "--mode", mode, "--repeats", str(repeats)]
        subprocess.run(command, env=settings, check=True)


def shipped() -> Iterator[tuple[str, SizedProgram | GroupProgram]]:
    """Every program of every pool, of every group, with samples of wide sizes."""
    for name in generated.POOLS:
        pool_class = generated.pool_class(name)
        for form, layout in pool_class.spec.programs:
            program = cases.sized(pool_class, samples(pool_class)[-1], form, layout)
            if program.device:
                yield name, program
    for name in generated.GROUPS:
        yield f"group {name}", group(name, "wide")


def everything() -> None:
    """The second table: the slowest program of each."""
    device = torch.device("cuda", 0)
    taken: dict[str, list[tuple[float, float, float, int]]] = {}
    for name, program in shipped():
        with tempfile.TemporaryDirectory() as folder:
            os.environ["POOLWRIGHT_CACHE_DIR"] = folder
            cold = timed(partial(Code, program, device, "cuda"))
            warm = statistics.median(timed(partial(Code, program, device, "cuda")) for _ in range(3))
            cubins = jit.cubins(program.unit("kernels", 16), arch())
            load = statistics.median(loaded(one_after_another, cubins) for _ in range(3))
        taken.setdefault(name, []).append((cold, warm * 1e3, load, len(cubins)))
    print("\n| pool or group | programs | modules | cold s | warm ms | of it the driver ms |")
    print("|---|---|---|---|---|---|")
    for name, found in taken.items():
        cold, warm, load, modules = (max(numbers) for numbers in zip(*found, strict=True))
        print(f"| {name} | {len(found)} | {modules} | {cold:.2f} | {warm:.1f} | {load:.1f} |")
    cold, warm = (max(row[at] for found in taken.values() for row in found) for at in (0, 1))
    print(f"\nslowest: cold {cold:.2f} s (target 0.5), warm {warm:.1f} ms (target 10)")


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="loading of compiled kernels")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--quick", action="store_true", help="without the table of every pool")
    parser.add_argument("--mode", choices=MODES, help="the rows of one CUDA_MODULE_LOADING, in this process")
    options = asked(parser)
    torch.zeros(1, device="cuda")
    if options.mode:
        measure(options.mode, options.repeats)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["POOLWRIGHT_CACHE_DIR"] = folder
        loading(options.repeats)
    if not options.quick:
        everything()


if __name__ == "__main__":
    main()
