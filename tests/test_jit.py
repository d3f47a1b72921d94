"""The JIT with small sources of its own: keys, C++ and CUDA builds, many processes, no compiler, errors."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from poolwright.generated import POOLS, pool_class
from poolwright.runtime import jit, native, toolchain
from poolwright.runtime.cache import Key
from poolwright.runtime.errors import BackendUnavailable, CompileError
from poolwright.runtime.jit import Unit
from poolwright.runtime.toolchain import Compiler, Missing
from poolwright.runtime.tools import cases, samples

HOST = '#include "size.h"\nextern "C" int rows() { return ROWS * size; }\n'
KERNELS = '#include "size.h"\nextern "C" __global__ void fill(int* out) { out[threadIdx.x] = ROWS * size; }\n'
PARTS = """
#if PW_PART == 1
extern "C" __global__ void first(int* out) { out[threadIdx.x] = ROWS + 1; }
#elif PW_PART == 2
extern "C" __global__ void second(int* out) { out[threadIdx.x] = ROWS + 2; }
#endif
"""
ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")

# What a process of its own runs: builds the unit and prints where the library is.
BUILD = """
import sys
from pathlib import Path
from poolwright.runtime import jit
units = [jit.Unit(f"u{n}", Path(sys.argv[1]), (("ROWS", str(n)),)) for n in range(int(sys.argv[2]))]
print(*jit.host_libraries(units), sep="\\n")
"""

# Compiles the parts of a kernels.cu and prints what came out.
CUBINS = """
import hashlib, sys
from pathlib import Path
from poolwright.runtime import jit
unit = jit.Unit("mla", Path(sys.argv[1]), (("ROWS", "4"),), ("first", "second"))
print(*[hashlib.sha256(binary).hexdigest() for binary in jit.cubins(unit, "sm_90")])
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, set for this process and its children."""
    for name in ("CXX", "CUDA_COMPILER", "CUDA_ARCH", "VERBOSE"):
        monkeypatch.delenv(f"POOLWRIGHT_{name}", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("POOLWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """A folder with a host.cpp, a kernels.cu and the header both include."""
    folder = tmp_path / "a pool $x"
    folder.mkdir()
    (folder / "host.cpp").write_text(HOST)
    (folder / "kernels.cu").write_text(KERNELS)
    (folder / "size.h").write_text('#pragma once\n#include "deep/unit.h"\nconstexpr int size = 10 * unit;\n')
    (folder / "deep").mkdir()
    (folder / "deep" / "unit.h").write_text("#pragma once\nconstexpr int unit = 1;\n")
    return folder


def host(pool: Path, rows: int = 4) -> Unit:
    return Unit("mla", pool / "host.cpp", (("ROWS", str(rows)),))


def kernels(pool: Path, rows: int = 4) -> Unit:
    return Unit("mla", pool / "kernels.cu", (("ROWS", str(rows)),))


def parted(pool: Path) -> Unit:
    """A unit of two parts; writes its source if the pool has none."""
    if "PW_PART" not in (pool / "kernels.cu").read_text():
        (pool / "kernels.cu").write_text(PARTS)
    return replace(kernels(pool), parts=("first", "second"))


def rows_of(library: Path) -> int:
    function = ctypes.CDLL(str(library)).rows
    function.restype = ctypes.c_int
    return int(function())


def starts(root: Path) -> int:
    """How many times a compiler was started for this cache."""
    log = root / "builds.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def entries(root: Path, kind: str = "host") -> list[str]:
    return sorted(p.name for p in (root / kind).iterdir()) if (root / kind).exists() else []


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


def build_elsewhere(pool: Path, units: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILD, str(pool / "host.cpp"), str(units)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, what: str) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.01)


# ---- keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["host.cpp", "size.h", "deep/unit.h"])
def test_a_changed_file_changes_the_key_and_a_touched_one_does_not(pool: Path, file: str) -> None:
    def digest() -> str:
        return jit.request(host(pool), "host", jit.HOST_FLAGS, "linux").digest

    before = digest()
    os.utime(pool / file, (1, 1))
    assert digest() == before
    (pool / file).write_text((pool / file).read_text() + "// more\n")
    assert digest() != before


def test_the_same_sources_in_another_folder_have_the_same_key(pool: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(pool, tmp_path / "copy")
    first, second = (jit.request(host(p), "host", jit.HOST_FLAGS, "linux") for p in (pool, copy))
    assert first == second
    assert dict(first.headers).keys() == {"beside/size.h", "beside/deep/unit.h"}


def test_the_runtime_headers_are_in_the_key_however_they_are_quoted(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    include = tmp_path / "include"
    (include / "poolwright").mkdir(parents=True)
    (include / "poolwright" / "a.h").write_text('#include "b.h"\n')
    (include / "poolwright" / "b.h").write_text("")
    monkeypatch.setattr(jit, "include_dir", lambda: include)
    for line in ('#include "poolwright/a.h"', "  #  include <poolwright/a.h>"):
        (pool / "host.cpp").write_text(f"{line}\n#include <cstdint>\n")
        found = jit.request(host(pool), "host", jit.HOST_FLAGS, "linux").headers
        assert [name for name, _ in found] == ["include/poolwright/a.h", "include/poolwright/b.h"]


def test_a_header_that_appears_changes_the_key(pool: Path) -> None:
    (pool / "host.cpp").write_text('#include "later.h"\n')
    before = jit.request(host(pool), "host", jit.HOST_FLAGS, "linux")
    (pool / "later.h").write_text("")
    assert jit.request(host(pool), "host", jit.HOST_FLAGS, "linux").digest != before.digest


# ---- C++ --------------------------------------------------------------------------------------


def test_libraries_are_built_once_and_carry_their_defines(root: Path, pool: Path) -> None:
    first = jit.host_libraries([host(pool, 4), host(pool, 5)])
    assert [rows_of(path) for path in first] == [40, 50]
    assert starts(root) == 2
    assert jit.host_libraries([host(pool, 5), host(pool, 4)]) == first[::-1]
    assert starts(root) == 2
    assert jit.load_host(first[0]) is jit.load_host(first[0])


def test_another_compiler_builds_its_own(
    root: Path, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = jit.host_libraries([host(pool)])
    body = 'case "$1" in -v) echo "other version 99" >&2;; *) exec c++ "$@";; esac'
    monkeypatch.setenv("POOLWRIGHT_CXX", str(script(tmp_path / "other-c++", body)))
    (second,) = jit.host_libraries([host(pool)])
    assert first != second
    assert rows_of(second) == 40
    assert starts(root) == 2


def test_verbose_prints_the_command(
    root: Path, pool: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POOLWRIGHT_VERBOSE", "1")
    jit.host_libraries([host(pool)])
    assert "-DROWS=4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ('extern "C" int rows() { return nothing; }\n', "nothing"),
        ('extern "C" int rows(int unused) { return 1; }\n', "unused parameter"),
        ('#include "nowhere.h"\n', "nowhere.h"),
    ],
)
def test_a_compile_error_names_file_and_first_error_and_can_be_repeated(
    root: Path, pool: Path, tmp_path: Path, text: str, first: str
) -> None:
    (pool / "host.cpp").write_text(text)
    with pytest.raises(CompileError) as caught:
        jit.host_libraries([host(pool)])
    error = caught.value
    assert error.source == pool / "host.cpp"
    assert "error:" in error.first and first in error.first and "host.cpp:1:" in error.first
    assert error.log is not None and first in error.log.read_text()
    again = subprocess.run(error.command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode != 0 and first in again.stderr
    for part in (str(error.source), error.first, error.command, str(error.log)):
        assert part in str(error)
    assert entries(root) == []
    assert list((root / "tmp").iterdir()) == []


def test_one_bad_unit_does_not_lose_the_good_ones(root: Path, pool: Path) -> None:
    bad = Unit("bad", pool / "host.cpp", (("ROWS", "nothing"),))
    with pytest.raises(CompileError, match="nothing"):
        jit.host_libraries([bad, host(pool)])
    assert [name.split("-")[0] for name in entries(root)] == ["mla"]
    jit.host_libraries([host(pool)])
    assert starts(root) == 2


def test_a_compiler_that_dies_without_a_word(
    root: Path, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Leaves a partial output behind, as a killed linker does.
    body = 'case "$1" in -v) exec c++ -v;; esac; for last; do :; done; echo half > "$last"; kill -9 $$'
    monkeypatch.setenv("POOLWRIGHT_CXX", str(script(tmp_path / "dies", body)))
    with pytest.raises(CompileError, match=r"does not compile: (Killed|the compiler said nothing)"):
        jit.host_libraries([host(pool)])
    assert entries(root) == []


def test_a_library_of_another_machine_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mla.so"
    path.write_bytes(b"not a library")
    with pytest.raises(BackendUnavailable, match=r"mla\.so is not available: it does not load"):
        jit.load_host(path)


# ---- many processes ---------------------------------------------------------------------------


def test_eight_processes_start_one_compiler_for_each_unit(root: Path, pool: Path) -> None:
    processes = [build_elsewhere(pool, units=3) for _ in range(8)]
    said = [process.communicate(timeout=120) for process in processes]
    assert [(p.returncode, err) for p, (_, err) in zip(processes, said, strict=True)] == [(0, "")] * 8
    assert len({out for out, _ in said}) == 1
    assert [rows_of(Path(line)) for line in said[0][0].splitlines()] == [0, 10, 20]
    assert starts(root) == 3
    assert list((root / "tmp").iterdir()) == []


def test_a_killed_builder_holds_nobody_up_and_leaves_no_half_entry(
    root: Path, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, first = tmp_path / "gate", tmp_path / "first"
    os.mkfifo(gate)
    # The first compilation waits at the gate, later ones pass.
    body = f"""
case "$1" in -v) exec c++ -v;; esac
for last; do :; done
if mkdir {shlex.quote(str(first))} 2> /dev/null; then read line < {shlex.quote(str(gate))}; fi
c++ "$@" && : > "$last.ok"
"""
    monkeypatch.setenv("POOLWRIGHT_CXX", str(script(tmp_path / "waits", body)))
    victim = build_elsewhere(pool)
    wait_for(first, "the start of the compiler")
    others = [build_elsewhere(pool) for _ in range(2)]
    try:
        assert entries(root) == []
        os.kill(victim.pid, signal.SIGKILL)
        said = [process.communicate(timeout=120) for process in others]
        assert [process.returncode for process in others] == [0, 0], said
        (library,) = {out.strip() for out, _ in said}
        before = Path(library).read_bytes()
        assert rows_of(Path(library)) == 0
    finally:
        with gate.open("w") as handle:
            handle.write("go\n")
    # The orphaned compiler comes to its end in a folder that nobody publishes.
    (left,) = (root / "tmp").iterdir()
    wait_for(left / "0-u0.ok", "the end of the orphaned compiler")
    victim.communicate(timeout=60)
    assert Path(library).read_bytes() == before
    assert entries(root) == [Path(library).parent.name]
    assert starts(root) == 2


# ---- another compiler --------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("clang++") is None, reason="no clang++ on the PATH: apt-get install clang")
@pytest.mark.parametrize(
    "names", [("mla",), pytest.param(POOLS, marks=pytest.mark.slow)], ids=["one pool", "every pool"]
)
def test_clang_alone_compiles_the_runtime_and_the_twins(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: Sequence[str]
) -> None:
    (tmp_path / "bin").mkdir()
    for tool in ("clang++", "ld"):
        found = shutil.which(tool)
        assert found is not None, tool
        (tmp_path / "bin" / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("POOLWRIGHT_OPTIMIZE", "0")
    compiler = toolchain.find_cxx()
    assert isinstance(compiler, Compiler)
    assert "clang version" in compiler.version and compiler.target
    kinds = [kind for name in names if (kind := pool_class(name)).spec.components]
    programs = [
        cases.sized(
            kind, samples.samples(kind)[0], next(iter(kind.spec.forms)), next(iter(kind.spec.layouts))
        )
        for kind in kinds
    ]
    units = [program.unit(entry, 16) for program in programs for entry in ("atoms", "lanes")]
    runtime, *twins = map(jit.load_host, jit.host_libraries([native.UNIT, *units]))
    monkeypatch.setattr(native, "library", lambda: runtime)
    monkeypatch.setattr(native, "_in_host_order", native._in_host_order.__wrapped__)
    assert list(native.in_host_order(array("I", [7, 3, 10, 20]), 2)) == [3, 7, 20, 10]
    for program, twin in zip([program for program in programs for _ in range(2)], twins, strict=True):
        program.check(twin, 16)


# ---- no compiler ------------------------------------------------------------------------------


def test_a_filled_cache_works_without_a_compiler_and_is_not_written(
    root: Path, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = jit.host_libraries([host(pool)])
    before = sorted(root.rglob("*"))
    for path in [root, *before]:
        path.chmod(0o555)
    without_compiler(monkeypatch, tmp_path)
    try:
        assert isinstance(toolchain.find_cxx(), Missing)
        assert jit.host_libraries([host(pool)]) == built
        assert sorted(root.rglob("*")) == before
    finally:
        for path in [root, *before]:
            path.chmod(0o755)


def test_without_a_compiler_the_error_names_the_command_that_fills_the_cache(
    root: Path, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jit.host_libraries([host(pool)])
    without_compiler(monkeypatch, tmp_path)
    unit = Unit("mla", pool / "host.cpp", (("ROWS", "5"),), arguments="mla --set rows=5")
    with pytest.raises(BackendUnavailable) as caught:
        jit.host_libraries([unit])
    assert "no c++, g++ or clang++ on the PATH" in str(caught.value)
    assert "python -m poolwright.runtime compile mla --set rows=5" in str(caught.value)
    assert str(root) in str(caught.value)


@pytest.mark.parametrize("kind", ["host", "cubin"])
def test_without_a_compiler_a_damaged_entry_is_said_to_be_damaged(
    kind: str, root: Path, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Missing("NVRTC", "the library libnvrtc cannot be loaded", "pip install nvidia-cuda-nvrtc")

    def build() -> object:
        unit = replace(host(pool) if kind == "host" else kernels(pool), arguments="mla --set rows=4")
        return jit.host_libraries([unit]) if kind == "host" else jit.cubins(unit, "sm_90")

    build()
    (entry,) = (root / kind).iterdir()
    binary = next(path for path in entry.iterdir() if path.name != "manifest.json")
    binary.write_bytes(b"torn")
    without_compiler(monkeypatch, tmp_path)
    monkeypatch.setattr(toolchain, "find_nvrtc", lambda: gone)
    with pytest.raises(BackendUnavailable) as caught:
        build()
    found = str(caught.value)
    assert f"its entry in the cache, {entry}, is damaged ({binary.name} has sha256 " in found
    assert caught.value.command.endswith(
        "; or delete that folder and fill the cache where there is one: "
        "python -m poolwright.runtime compile mla --set rows=4"
    )


@pytest.mark.parametrize("variable", ["POOLWRIGHT_CXX", "CXX"])
def test_a_compiler_that_was_asked_for_is_not_replaced(
    root: Path, pool: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "no-such-compiler")
    with pytest.raises(BackendUnavailable, match=f"{variable}=no-such-compiler: no such command"):
        jit.host_libraries([host(pool)])


@pytest.mark.parametrize("variable", ["POOLWRIGHT_CXX", "CXX"])
def test_a_compiler_that_is_no_command_is_missing_and_named(
    root: Path, pool: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "c++ 'unclosed")
    with pytest.raises(
        BackendUnavailable, match=f"{variable}=c.. 'unclosed is no command .*unset {variable}"
    ):
        jit.host_libraries([host(pool)])


# ---- CUDA -------------------------------------------------------------------------------------


def test_nvrtc_compiles_for_every_architecture_without_a_gpu(root: Path, pool: Path) -> None:
    binaries = {arch: jit.cubins(kernels(pool), arch) for arch in ARCHS}
    alone = {binary for (binary,) in binaries.values()}
    assert all(binary.startswith(b"\x7fELF") and b"fill" in binary for binary in alone)
    assert len(alone) == len(ARCHS)
    assert starts(root) == len(ARCHS)
    assert {arch: jit.cubins(kernels(pool), arch) for arch in ARCHS} == binaries
    assert starts(root) == len(ARCHS)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("__global__ void k(int* a) { a[0] = nothing; }\n", 'error: identifier "nothing" is undefined'),
        ("__global__ void k(int* a) { int unused = 3; a[0] = 1; }\n", "warning #177-D"),
    ],
)
def test_a_cuda_error_or_warning_is_a_compile_error(root: Path, pool: Path, text: str, first: str) -> None:
    (pool / "kernels.cu").write_text(text)
    with pytest.raises(CompileError) as caught:
        jit.cubins(kernels(pool), "sm_90")
    assert first in caught.value.first
    assert str(pool / "kernels.cu") in caught.value.first
    assert entries(root, "cubin") == []
    again = subprocess.run(caught.value.command, shell=True, capture_output=True, text=True)
    assert again.returncode != 0 and first in again.stderr


def test_the_parts_of_a_unit_are_compiled_on_their_own_and_are_one_entry(root: Path, pool: Path) -> None:
    unit = parted(pool)
    first, second = jit.cubins(unit, "sm_90")
    assert (b"first" in first, b"second" in first) == (True, False)
    assert (b"first" in second, b"second" in second) == (False, True)
    assert starts(root) == 1
    (entry,) = entries(root, "cubin")
    names = sorted(path.name for path in (root / "cubin" / entry).iterdir())
    assert names == ["first.cubin", "manifest.json", "second.cubin"]
    assert jit.cubins(unit, "sm_90") == [first, second]
    assert jit.is_cached(unit, "sm_90")
    assert starts(root) == 1


def test_a_corrupt_entry_counts_as_missing_and_is_built_again_with_a_warning(
    root: Path, pool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unit = parted(pool)
    built = jit.cubins(unit, "sm_90")
    (entry,) = entries(root, "cubin")
    (root / "cubin" / entry / "second.cubin").write_bytes(b"torn")
    assert not jit.is_cached(unit, "sm_90")
    assert caplog.records == []
    assert jit.cubins(unit, "sm_90") == built
    said = [record.getMessage() for record in caplog.records]
    assert [entry in text for text in said] == [True, True]
    assert "is corrupt: second.cubin has sha256" in said[0] and "building it again" in said[1]
    assert jit.is_cached(unit, "sm_90")
    assert starts(root) == 2


def test_units_that_differ_in_their_parts_have_different_keys(pool: Path) -> None:
    asked = [replace(parted(pool), parts=parts) for parts in ((), ("first",), ("first", "second"))]
    assert len({jit.request(unit, "cubin", jit.NVRTC_FLAGS, "sm_90").digest for unit in asked}) == 3


def test_an_entry_that_lost_a_part_is_built_again(root: Path, pool: Path) -> None:
    built = jit.cubins(parted(pool), "sm_90")
    (entry,) = entries(root, "cubin")
    (root / "cubin" / entry / "second.cubin").unlink()
    assert jit.cubins(parted(pool), "sm_90") == built
    assert starts(root) == 2


def test_the_command_of_a_part_that_does_not_compile_repeats_that_part(root: Path, pool: Path) -> None:
    (pool / "kernels.cu").write_text(PARTS.replace("ROWS + 2", "nothing"))
    with pytest.raises(CompileError, match='identifier "nothing" is undefined') as caught:
        jit.cubins(parted(pool), "sm_90")
    assert entries(root, "cubin") == []
    assert "('PW_PART', '2')" in shlex.split(caught.value.command)[-1]
    again = subprocess.run(caught.value.command, shell=True, capture_output=True, text=True)
    assert again.returncode != 0 and 'identifier "nothing" is undefined' in again.stderr


def test_eight_processes_compile_the_parts_of_a_unit_once(root: Path, pool: Path) -> None:
    parted(pool)
    command = [sys.executable, "-c", CUBINS, str(pool / "kernels.cu")]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(8)
    ]
    said = [process.communicate(timeout=120) for process in processes]
    assert [(p.returncode, err) for p, (_, err) in zip(processes, said, strict=True)] == [(0, "")] * 8
    assert len({out for out, _ in said}) == 1
    assert starts(root) == 1
    assert list((root / "tmp").iterdir()) == []


def test_an_architecture_that_nvrtc_does_not_know(root: Path, pool: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"CUDA code for sm_77 .* NVRTC .* compiles for sm_"):
        jit.cubins(kernels(pool), "sm_77")


def test_a_filled_cache_works_without_nvrtc(root: Path, pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = jit.cubins(kernels(pool), "sm_90")
    gone = Missing("NVRTC", "the library libnvrtc cannot be loaded", "pip install nvidia-cuda-nvrtc")
    monkeypatch.setattr(toolchain, "find_nvrtc", lambda: gone)
    assert jit.cubins(kernels(pool), "sm_90") == built
    with pytest.raises(BackendUnavailable, match=r"python -m poolwright\.runtime compile"):
        jit.cubins(kernels(pool), "sm_80")


def test_nvcc_is_called_when_asked(
    root: Path, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"""
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0; fi
for argument; do echo "$argument" >> {shlex.quote(str(tmp_path / "arguments"))}; last=$argument; done
printf cubin > "$last"
"""
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    script(tmp_path / "cuda" / "bin" / "nvcc", body)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    found = toolchain.find_nvcc()
    assert isinstance(found, Compiler) and found.version == "13.0 V13.0.88"
    assert jit.cubins(kernels(pool), "sm_90", "nvcc") == [b"cubin"]
    monkeypatch.setenv("POOLWRIGHT_CUDA_COMPILER", "nvcc")
    assert jit.cubins(kernels(pool), "sm_90") == [b"cubin"]
    assert starts(root) == 1
    *arguments, output = (tmp_path / "arguments").read_text().splitlines()
    assert arguments == [
        *("-std=c++17", "-cubin", "-Werror", "all-warnings", "-arch=sm_90", "-DROWS=4"),
        *(f"-I{pool}", f"-I{jit.include_dir()}", str(pool / "kernels.cu"), "-o"),
    ]
    assert output.startswith(str(root / "tmp"))


def test_an_nvcc_error_is_a_compile_error(
    root: Path, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
if [ "$1" = --version ]; then echo "release 13.0, V13.0.88"; exit 0; fi
echo "k.cu(1): error: no"; exit 2"""
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "nvcc", body)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(CompileError, match=r"kernels\.cu does not compile: k\.cu\(1\): error: no"):
        jit.cubins(kernels(pool), "sm_90", "nvcc")


def test_without_nvcc_the_error_says_where_it_was_looked_for(
    root: Path, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BackendUnavailable, match=f"not in CUDA_HOME={tmp_path}"):
        jit.cubins(kernels(pool), "sm_90", "nvcc")


def test_the_two_cuda_compilers_have_entries_of_their_own(pool: Path) -> None:
    nvrtc = jit.request(kernels(pool), "cubin", jit.NVRTC_FLAGS, "sm_90")
    nvcc = jit.request(kernels(pool), "cubin", jit.NVCC_FLAGS, "sm_90")
    assert (
        Key(nvrtc, Compiler("nvrtc", (), "13.0", "")).folder
        != Key(nvcc, Compiler("nvcc", (), "13.0", "")).folder
    )


@pytest.mark.parametrize(
    ("driver", "refused"), [((13, 0), False), ((13, 2), False), ((14, 0), False), ((12, 9), True)]
)
def test_a_toolkit_of_a_later_major_version_than_the_driver_is_named(
    driver: tuple[int, int], refused: bool
) -> None:
    message = "nvrtc 13.0 is newer than the driver, which runs CUDA 12.9"
    with pytest.raises(BackendUnavailable, match=message) if refused else nullcontext():
        toolchain.check_driver(Compiler("nvrtc", (), "13.0", ""), driver)
