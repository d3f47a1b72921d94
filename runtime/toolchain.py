"""Finds compilers: nothing in, a `Compiler` (or `Missing`, which says why not) out; cached per process."""

from __future__ import annotations

import functools
import importlib
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poolwright.runtime import env
from poolwright.runtime.errors import BackendUnavailable

_PROBE_SECONDS = 60


@dataclass(frozen=True)
class Missing:
    """Something this machine lacks: what, why, and the command that mends it."""

    what: str
    why: str
    command: str


@dataclass(frozen=True)
class Compiler:
    """A compiler. `kind`: c++, nvcc or nvrtc; `command` starts it (empty for nvrtc, which is a library).

    `version` and `target` (with the arguments that belong to the command) are its identity: two
    compilers that agree in them make the same binary from the same request.
    """

    kind: str
    command: tuple[str, ...]
    version: str
    target: str

    @property
    def identity(self) -> dict[str, Any]:
        """What goes into the key of a cache entry; no path is part of it."""
        arguments = list(self.command[1:])
        return {"kind": self.kind, "version": self.version, "target": self.target, "arguments": arguments}


def find_cxx() -> Compiler | Missing:
    """The C++ compiler: POOLWRIGHT_CXX, else CXX, else the first of c++, g++, clang++ on the PATH.

    A compiler that was asked for and does not work is an answer, not a reason to take another one.
    """
    return _probe_cxx(env.text("CXX"), os.environ.get("CXX", "").strip(), os.environ.get("PATH", ""))


def find_nvcc() -> Compiler | Missing:
    """nvcc of CUDA_HOME, else on the PATH."""
    return _probe_nvcc(os.environ.get("CUDA_HOME", ""), os.environ.get("PATH", ""))


@functools.cache
def find_nvrtc() -> Compiler | Missing:
    """NVRTC through `cuda.bindings`; needs neither a GPU nor a CUDA toolkit."""
    what, wheels = "NVRTC", "pip install cuda-bindings nvidia-cuda-nvrtc"
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        return Missing(what, f"the Python package cuda-bindings cannot be imported ({error})", wheels)
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as error:
        return Missing(what, f"the library libnvrtc cannot be loaded ({_first_line(str(error))})", wheels)
    if int(status) != 0:
        return Missing(what, f"nvrtcVersion answered {status.name}", wheels)
    return Compiler("nvrtc", (), f"{major}.{minor}", "")


def find_cuda(kind: str) -> Compiler | Missing:
    """NVRTC or nvcc by name; raises ValueError on another name."""
    if kind not in ("nvrtc", "nvcc"):
        raise ValueError(f"CUDA compiler: expected nvrtc or nvcc, got {kind!r}")
    return find_nvrtc() if kind == "nvrtc" else find_nvcc()


@functools.cache
def nvrtc_archs() -> tuple[str, ...]:
    """Architectures that the NVRTC of this machine compiles for, as sm_90; empty without NVRTC."""
    if isinstance(find_nvrtc(), Missing):
        return ()
    _, archs = importlib.import_module("cuda.bindings.nvrtc").nvrtcGetSupportedArchs()
    return tuple(f"sm_{arch}" for arch in archs)


def check_arch(compiler: Compiler, arch: str) -> None:
    """Raises BackendUnavailable if `compiler` cannot compile for `arch`, as far as it can be asked."""
    if compiler.kind == "nvrtc" and arch.rstrip("af") not in nvrtc_archs():
        why = f"NVRTC {compiler.version} compiles for {', '.join(nvrtc_archs())}"
        mend = "set POOLWRIGHT_CUDA_ARCH to one of these, or install another"
        raise BackendUnavailable(f"CUDA code for {arch}", why, mend)


def check_driver(compiler: Compiler, driver: tuple[int, int]) -> None:
    """Raises BackendUnavailable if the driver (its CUDA version) does not load what `compiler` makes.

    Cubins run on every driver of their major version, and on later ones.
    """
    found = re.search(r"(\d+)\.(\d+)", compiler.version)
    if found is not None and int(found[1]) > driver[0]:
        runs = f"{driver[0]}.{driver[1]}"
        why = f"{compiler.kind} {compiler.version} is newer than the driver, which runs CUDA {runs}"
        wheels = f"pip install 'cuda-bindings<{driver[0] + 1}', or update the driver"
        raise BackendUnavailable("CUDA", why, wheels)


@functools.cache
def _probe_cxx(ours: str, usual: str, path: str) -> Compiler | Missing:
    asked = ours or usual
    variable = "POOLWRIGHT_CXX" if ours else "CXX"
    mend = f"correct or unset {variable}" if asked else "apt-get install g++ (or set POOLWRIGHT_CXX)"
    try:
        names = [shlex.split(asked)] if asked else [["c++"], ["g++"], ["clang++"]]
    except ValueError as error:
        return Missing("a C++ compiler", f"{variable}={asked} is no command ({error})", mend)
    for name in names:
        command = _located(name, path)
        if command:
            break
    else:
        why = f"{variable}={asked}: no such command" if asked else "no c++, g++ or clang++ on the PATH"
        return Missing("a C++ compiler", why, mend)
    said, problem = _ask([*command, "-v"])
    version = re.search(r"^.*\bversion .*$", said, re.MULTILINE)
    if problem or version is None:
        why = problem or f"`{shlex.join(command)} -v` names no version"
        return Missing("a C++ compiler", why, mend)
    target = re.search(r"^Target: (.*)$", said, re.MULTILINE)
    # A library built beside a newer C library does not load beside an older one.
    return Compiler("c++", command, version[0].strip(), f"{target[1] if target else ''} {_libc()}".strip())


@functools.cache
def _probe_nvcc(home: str, path: str) -> Compiler | Missing:
    what, mend = "nvcc", "install the CUDA toolkit and set CUDA_HOME, or POOLWRIGHT_CUDA_COMPILER=nvrtc"
    command = _located([str(Path(home) / "bin" / "nvcc") if home else "nvcc"], path)
    if not command:
        return Missing(
            what, f"not in CUDA_HOME={home}" if home else "not on the PATH, CUDA_HOME not set", mend
        )
    said, problem = _ask([*command, "--version"])
    version = re.search(r"release (\d+\.\d+).*?(V[\d.]+)?$", said, re.MULTILINE)
    if problem or version is None:
        return Missing(what, problem or f"`{command[0]} --version` names no release", mend)
    return Compiler("nvcc", command, f"{version[1]} {version[2] or ''}".strip(), "")


def run(
    command: list[str], folder: Path | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a compiler in `folder` for at most `timeout` seconds; all that it prints is in `stdout`.

    Raises OSError, and subprocess.TimeoutExpired.
    """
    return subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
        env={**os.environ, "LC_ALL": "C"},  # compilers translate the word "error"
    )


def _located(command: list[str], path: str) -> tuple[str, ...]:
    found = shutil.which(command[0], path=path) if command else None
    return (found, *command[1:]) if found else ()


def _ask(command: list[str]) -> tuple[str, str]:
    """What the command prints, and what is wrong with it ("" if nothing)."""
    try:
        done = run(command, timeout=_PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"`{shlex.join(command)}` cannot be run ({error})"
    if done.returncode != 0:
        return "", f"`{shlex.join(command)}` failed: {_first_line(done.stdout)}"
    return done.stdout, ""


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")
