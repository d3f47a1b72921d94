"""This machine in, what it has and what is missing out: one line each, with the reason and what mends it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from poolwright.runtime import env
from poolwright.runtime.toolchain import Compiler, Missing, find_cxx, find_nvcc, find_nvrtc


@dataclass(frozen=True)
class Finding:
    """One thing looked for. `needed`: pools do not run at full speed on the CPU without it."""

    name: str
    found: bool
    detail: str
    needed: bool = False
    mend: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 when something needed is missing."""
    found = list(findings())
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in found], indent=2))
    else:
        for finding in found:
            mend = f" -> {finding.mend}" if finding.mend else ""
            print(f"{'ok' if finding.found else 'no':3} {finding.name:13} {finding.detail}{mend}")
    return int(any(finding.needed and not finding.found for finding in found))


def findings() -> Iterator[Finding]:
    """Everything that decides which paths run here, in a fixed order."""
    yield Finding("python", True, f"{platform.python_version()} ({sys.executable})", needed=True)
    yield _torch()
    yield _compiler("C++ compiler", find_cxx(), needed=True)
    yield _compiler("NVRTC", find_nvrtc())
    yield _compiler("nvcc", find_nvcc())
    yield _cache(env.cache_dir())
    yield from _devices()


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", False, f"cannot be imported ({error})", True, "pip install 'torch>=2.9'")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return Finding("torch", True, f"{torch.__version__} ({build})", needed=True)


def _compiler(name: str, probe: Compiler | Missing, *, needed: bool = False) -> Finding:
    if isinstance(probe, Missing):
        return Finding(name, False, probe.why, needed, probe.command)
    where = f" ({' '.join(probe.command)})" if probe.command else ""
    return Finding(name, True, f"{probe.version}{where}", needed)


def _cache(folder: Path) -> Finding:
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Finding("cache", True, str(folder), needed=True)
    mend = "set POOLWRIGHT_CACHE_DIR to a folder that can be written"
    return Finding("cache", False, f"{folder} cannot be written", True, mend)


def _devices() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        why = "no usable GPU or driver" if torch.version.cuda else "this torch is built without CUDA"
        yield Finding("device", False, f"{why}; pools run on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = f"{device.total_memory / 2**30:.0f} GiB"
        yield Finding(f"device {index}", True, f"{device.name}, sm_{device.major}{device.minor}, {memory}")
