"""Compiles generated sources: units in; libraries (host) and cubins (CUDA) out, through the cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from poolwright.runtime import env, toolchain
from poolwright.runtime.cache import Binary, Cache, Corrupt, Key, Request
from poolwright.runtime.errors import BackendUnavailable, CompileError, PoolError
from poolwright.runtime.toolchain import Compiler, Missing

HOST_FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-pthread"),
    *("-Wall", "-Wextra", "-Werror"),
)
# Two options of NVRTC (from 12.4 on) save time and change no instruction. `minimal`: it does not parse its
# declarations of the CUDA runtime; threads parse one after the other. `split-compile`: the assembler takes
# the functions of a kernel side by side.
NVRTC_FLAGS = ("--std=c++17", "--minimal", "--ptxas-options=--split-compile=8")
NVCC_FLAGS = ("-std=c++17", "-cubin", "-Werror", "all-warnings")

# Not tied to the start of a line, which takes ten times as long: one in a comment only adds to the key.
_INCLUDE = re.compile(rb'#[ \t]*include[ \t]*(["<])([^">\r\n]+)[">]')
_SUFFIX = {"host": "so", "cubin": "cubin"}
_ERROR = re.compile(r"\berror(?: #[\w-]+)?:")


@dataclass(frozen=True)
class Unit:
    """One source to compile. `main`: a `host.cpp` or `kernels.cu`; `defines`: the constants it is built with.

    `parts`: names of the parts that a `kernels.cu` is compiled in, side by side, with PW_PART counted from
    1; all of them are one entry of the cache. `arguments`: those of the `compile` command that make this
    unit, for messages.
    """

    name: str
    main: Path
    defines: tuple[tuple[str, str], ...] = ()
    parts: tuple[str, ...] = ()
    arguments: str = field(default="", compare=False)

    def split(self) -> dict[str, Unit]:
        """What one run of a compiler takes, by name: each part, or the unit itself."""
        if not self.parts:
            return {self.name: self}
        numbered = enumerate(self.parts, 1)
        return {p: replace(self, defines=(*self.defines, ("PW_PART", str(n))), parts=()) for n, p in numbered}


def include_dir() -> Path:
    """The folder of the runtime's own headers."""
    return Path(__file__).resolve().parent / "include"


def request(unit: Unit, kind: str, flags: Sequence[str], arch: str) -> Request:
    """What the key of `unit` is made of: its source, every header it reaches, defines, flags, arch."""
    main = unit.main.resolve()
    source = ((main.name, hashlib.sha256(_contents(main)).hexdigest()),)
    return Request(kind, unit.name, source, _headers(main), unit.defines, tuple(flags), arch, unit.parts)


def host_flags() -> tuple[str, ...]:
    """The flags of a `host.cpp`; POOLWRIGHT_OPTIMIZE sets another level, for tests that compile a lot."""
    level = env.text("OPTIMIZE")
    return tuple(f"-O{level}" if flag == "-O2" else flag for flag in HOST_FLAGS)


def host_libraries(units: Sequence[Unit]) -> list[Path]:
    """The shared library of each unit, in order; builds the missing ones side by side.

    Without a C++ compiler, libraries that any compiler made from the same request are taken. Raises
    CompileError (the libraries that did compile are kept), and BackendUnavailable for what is missing.
    """
    return [binaries[0].path for binaries in _obtain(units, None)]


@functools.cache
def load_host(path: Path) -> ctypes.CDLL:
    """The library at `path`, loaded once. Raises BackendUnavailable if this machine cannot load it."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        mend = f"delete {path.parent}, so that it is built on this machine"
        raise BackendUnavailable(f"compiled code {path}", f"it does not load ({error})", mend) from error


def cubins(unit: Unit, arch: str, compiler: str | None = None) -> list[bytes]:
    """The CUDA binary of each part of `unit` (one without parts) for `arch` (sm_90), by nvrtc or nvcc.

    `compiler` None: as POOLWRIGHT_CUDA_COMPILER says. Needs no GPU. A warning is an error. Without the
    compiler, binaries that it made elsewhere from the same request are taken. Raises as `host_libraries`.
    """
    (binaries,) = _obtain([unit], arch, compiler)
    return [binary.data for binary in binaries]


def is_cached(unit: Unit, arch: str | None = None) -> bool:
    """Whether `host_libraries` (`arch` None) or `cubins` would find the unit compiled, and whole."""
    compiler, (wanted,) = _asked([unit], arch)
    cache = Cache(env.cache_dir())
    try:
        if isinstance(compiler, Missing):
            return cache.find_any(wanted) is not None
        return cache.find(Key(wanted, compiler)) is not None
    except Corrupt:
        return False  # it is built again when it is asked for, and said then


def _obtain(units: Sequence[Unit], arch: str | None, kind: str | None = None) -> list[tuple[Binary, ...]]:
    cache, (compiler, requests) = Cache(env.cache_dir()), _asked(units, arch, kind)
    if isinstance(compiler, Missing):
        return [_prebuilt(cache, *pair, compiler) for pair in zip(units, requests, strict=True)]
    keys = [Key(wanted, compiler) for wanted in requests]
    return cache.obtain(keys, partial(_build, cache, dict(zip(keys, units, strict=True))))


def _asked(
    units: Sequence[Unit], arch: str | None, kind: str | None = None
) -> tuple[Compiler | Missing, list[Request]]:
    """What compiles for this architecture, None for this machine's CPU, and what is asked of it."""
    if arch is None:
        here, flags = f"{sys.platform}-{platform.machine()}", host_flags()
        return toolchain.find_cxx(), [request(unit, "host", flags, here) for unit in units]
    kind = kind or env.text("CUDA_COMPILER")
    options = NVRTC_FLAGS if kind == "nvrtc" else NVCC_FLAGS
    return toolchain.find_cuda(kind), [request(unit, "cubin", options, arch) for unit in units]


# ---- what a unit consists of ------------------------------------------------------------------


def _options(unit: Unit) -> list[str]:
    folders = (unit.main.resolve().parent, include_dir())
    return [*(f"-D{name}={value}" for name, value in unit.defines), *(f"-I{folder}" for folder in folders)]


def _headers(main: Path) -> tuple[tuple[str, str], ...]:
    """(name, sha256) of every header that `main` reaches, sorted.

    Headers of the system are the compiler's, whose version is in the key. A quoted name that is found
    nowhere is kept with no hash: the key changes once the file appears.
    """
    found: dict[str, str] = {}
    seen, waiting = {main}, [main]
    while waiting:
        file = waiting.pop()
        for quote, raw in _INCLUDE.findall(_contents(file)):
            name = raw.decode(errors="replace")
            folders = [*([file.parent] if quote == b'"' else []), main.parent, include_dir()]
            header = next((folder / name for folder in folders if (folder / name).is_file()), None)
            if header is None:
                if quote == b'"':
                    found[f"absent/{name}"] = ""
                continue
            header = header.resolve()
            if header not in seen:
                seen.add(header)
                waiting.append(header)
                found[_label(header, main)] = hashlib.sha256(_contents(header)).hexdigest()
    return tuple(sorted(found.items()))


def _label(header: Path, main: Path) -> str:
    """The name of a header that is the same wherever the package is installed."""
    if header.is_relative_to(include_dir()):
        return f"include/{header.relative_to(include_dir()).as_posix()}"
    return f"beside/{Path(os.path.relpath(header, main.parent)).as_posix()}"


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PoolError(f"source {path} cannot be read ({error.strerror}); run `codegen build`") from error


# ---- builders ---------------------------------------------------------------------------------


def _command(key: Key, unit: Unit, output: str) -> list[str]:
    """The command that compiles a `host.cpp` into a shared library, or a `kernels.cu` into a cubin."""
    flags = host_flags() if key.request.kind == "host" else (*NVCC_FLAGS, f"-arch={key.request.arch}")
    return [*key.compiler.command, *flags, *_options(unit), str(unit.main.resolve()), "-o", output]


def _prebuilt(cache: Cache, unit: Unit, wanted: Request, missing: Missing) -> tuple[Binary, ...]:
    fill = f"python -m poolwright.runtime compile {unit.arguments}".strip()
    fill = f"fill the cache where there is one: {fill}"
    try:
        found = cache.find_any(wanted)
    except Corrupt as error:
        state = f"its entry in the cache, {error.entry}, is damaged ({error.why})"
        fill = f"delete that folder and {fill}"
    else:
        if found:
            return found
        state = f"it is not in the cache {cache.root}"
    why = f"{state}, and {missing.what} is not available ({missing.why})"
    mend = f"{missing.command}; or {fill}"
    raise BackendUnavailable(f"compiled code of {unit.name} for {wanted.arch}", why, mend)


def _build(
    cache: Cache, units: Mapping[Key, Unit], absent: Sequence[Key], scratch: Path
) -> Iterator[tuple[Key, dict[str, Path]]]:
    """Compiles all parts of all units side by side: compilers run outside the interpreter's lock."""
    jobs: list[tuple[Key, Unit, Path]] = []
    built: dict[Key, dict[str, Path]] = {key: {} for key in absent}
    for number, key in enumerate(absent):
        toolchain.check_arch(key.compiler, key.request.arch)
        cache.log_start(key)
        for name, part in units[key].split().items():
            output = scratch / f"{number}-{name}"
            built[key][f"{name}.{_SUFFIX[key.request.kind]}"] = output
            jobs.append((key, part, output))
    with ThreadPoolExecutor(min(len(jobs), (os.cpu_count() or 1) + 2)) as threads:
        said = list(threads.map(_compile, *zip(*jobs, strict=True)))
    failed = [(key, part, *why) for (key, part, _), why in zip(jobs, said, strict=True) if why is not None]
    for key, *_ in failed:
        built.pop(key, None)
    yield from built.items()
    for key, part, command, text in failed:
        raise _failure(cache, key, part, command, text)


def _compile(key: Key, unit: Unit, output: Path) -> tuple[str, str] | None:
    """None, or the command that failed and what the compiler said."""
    if key.compiler.kind == "nvrtc":
        return _compile_nvrtc(key.request.arch, unit, output)
    command = _command(key, unit, str(output))
    _announce(shlex.join(command))
    try:
        done = toolchain.run(command, output.parent)
    except OSError as error:
        return shlex.join(command), f"error: it cannot be run ({error})"
    if done.returncode == 0 and output.is_file():
        return None
    again = _command(key, unit, f"{unit.name}.{_SUFFIX[key.request.kind]}")
    return shlex.join(again), done.stdout


def _compile_nvrtc(arch: str, unit: Unit, output: Path) -> tuple[str, str] | None:
    """As `_compile`."""
    main = unit.main.resolve()
    options = [*NVRTC_FLAGS, f"--gpu-architecture={arch}", *_options(unit)]
    _announce(f"nvrtc {shlex.join(options)} {main}")
    binary, text = _nvrtc(main, options)
    # NVRTC has no option that makes its warnings errors.
    if binary is not None and not re.search(r"\bwarning\b", text):
        output.write_bytes(binary)
        return None
    code = f"jit.cubins(jit.Unit({unit.name!r}, Path({str(main)!r}), {unit.defines!r}), {arch!r}, 'nvrtc')"
    lines = f"from pathlib import Path; from poolwright.runtime import jit; {code}"
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(lines)}", text


def _nvrtc(main: Path, options: Sequence[str]) -> tuple[bytes | None, str]:
    """The binary (None: it does not compile) and everything NVRTC said."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    status, program = nvrtc.nvrtcCreateProgram(_contents(main), os.fsencode(main), 0, [], [])
    if int(status) != 0:
        return None, f"nvrtc: error: nvrtcCreateProgram answered {status.name}"
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [os.fsencode(o) for o in options])
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        text = log.rstrip(b"\0").decode(errors="replace").strip()
        if int(status) != 0:
            return None, text or f"nvrtc: error: nvrtcCompileProgram answered {status.name}"
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        binary = bytearray(size)
        nvrtc.nvrtcGetCUBIN(program, binary)
        return bytes(binary), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _announce(command: str) -> None:
    if env.flag("VERBOSE"):
        print(command, file=sys.stderr)


def _failure(cache: Cache, key: Key, unit: Unit, command: str, text: str) -> CompileError:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    silent = ["the compiler said nothing (it was killed, or ran out of memory)"]
    first = next((line for line in lines if _ERROR.search(line)), (lines or silent)[0])
    return CompileError(unit.main, command, first, cache.keep_log(key, text) if lines else None)
