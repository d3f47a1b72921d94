"""The GPU suite: everything that only a GPU can show, and a table of it.

In: a CUDA device; torch and pytest (transformers for the models, compute-sanitizer for the memory checks;
what is missing is named). Out: a table on standard output, exit code 1 when a row failed.

Run ``python tests/run_gpu.py`` from the repository; it takes less than eight minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUITES = ("tests/test_gpu.py", "tests/test_gpu_pages.py", "tests/test_gpu_controller.py")
CONTRACTS = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *SUITES]
SMALL = "back_to_back or producer_stream or page_ids or layers_arrive or captured"


@dataclass(frozen=True)
class Row:
    """One part of the suite. `needs`: a module or program without which it cannot run."""

    name: str
    command: list[str]
    needs: str | None = None


def rows(pools: list[str], sanitize: bool) -> list[Row]:
    """What is run, in order."""
    python = sys.executable
    found = [Row("orders, ids, tickets, graphs", [python, *CONTRACTS])]
    for pool in pools:
        command = [python, "-m", "poolwright.runtime", "verify", pool, "--device", "cuda"]
        found.append(Row(f"verify {pool}, every path forced", command))
    demo = [python, "-m", "poolwright.runtime.integrations.demo", "--device", "cuda"]
    for path in ("zero_copy", "staged", "torch"):
        found.append(Row(f"models, {path}", [*demo, "--path", path], "transformers"))
    found.append(Row("models, paths chosen", demo, "transformers"))
    for tool in ("memcheck", "initcheck") if sanitize else ():
        checker = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
        small = [python, *CONTRACTS, "-k", SMALL]
        found.append(Row(f"{tool}, small cases", [*checker, *small], "compute-sanitizer"))
    return found


def missing(need: str | None) -> bool:
    if need is None:
        return False
    return shutil.which(need) is None and importlib.util.find_spec(need) is None


def run(row: Row) -> tuple[str, float]:
    """(result, seconds); what a failing row printed goes to standard error."""
    if missing(row.needs):
        return f"not run: no {row.needs}", 0.0
    settings = {**os.environ, "PYTHONPATH": str(ROOT / ".src"), "PYTHONDONTWRITEBYTECODE": "1"}
    begin = time.perf_counter()
    done = subprocess.run(row.command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
    took = time.perf_counter() - begin
    if done.returncode:
        print(f"--- {row.name}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}", file=sys.stderr)
        return f"FAILED ({done.returncode})", took
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "passed", took


def main() -> int:
    parser = argparse.ArgumentParser(description="everything that only a GPU can show")
    parser.add_argument("--pools", nargs="*", help="pools and groups; default: all generated ones")
    parser.add_argument("--no-sanitizer", action="store_true")
    parser.add_argument("--jobs", type=int, default=max(1, min((os.cpu_count() or 1) // 2, 6)), metavar="N")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / ".src"))
    from poolwright.generated import GROUPS, POOLS

    failed = False
    print("| part | seconds | result |\n|---|---|---|", flush=True)
    begin = time.perf_counter()
    with ThreadPoolExecutor(options.jobs) as jobs:  # most of the time is compiling, on one core each
        wanted = rows(options.pools or [*POOLS, *GROUPS], not options.no_sanitizer)
        for row, (result, took) in zip(wanted, jobs.map(run, wanted), strict=True):
            failed |= result.startswith("FAILED")
            print(f"| {row.name} | {took:.0f} | {result[:110]} |", flush=True)
    print(f"{len(wanted)} parts in {time.perf_counter() - begin:.0f} s, {options.jobs} at a time")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
