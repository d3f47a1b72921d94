"""Copy primitives of the CPU twin: every alignment, length and split, with guard bytes around each copy."""

from __future__ import annotations

import ctypes
import os
import random
import shlex
import subprocess
from pathlib import Path

import pytest

INCLUDE = Path(__file__).resolve().parents[1] / "runtime" / "include"
SOURCE = r"""
#include "poolwright/host_copy.h"

extern "C" void run(char* to, const char* from, u64 bytes, int streaming) {
  pw::copy_run(to, from, bytes, streaming != 0);
  pw::copy_fence();
}

extern "C" void all(char* to, const char* from, const u64* to_at, const u64* from_at, u64 runs, u64 bytes,
                    u32 threads, int streaming) {
  pw::copy_all(runs, bytes, threads, streaming != 0,
               [=](u64 i) { return pw::Copy{to + to_at[i], from + from_at[i]}; });
}

extern "C" void count(u32* seen, u64 units, u32 threads) {
  pw::parallel(units, threads, [=](u64 first, u64 last) {
    for (u64 i = first; i < last; ++i) seen[i] += 1;
  });
}
"""


@pytest.fixture(scope="module", params=["sse2", "portable"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("host_copy")
    source, binary = folder / "probe.cpp", folder / "probe.so"
    source.write_text(SOURCE, encoding="utf-8")
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-shared", "-fPIC"]
    flags.append(f"-I{INCLUDE}")
    if request.param == "portable":
        flags.append("-U__SSE2__")
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    subprocess.run([*compiler, *flags, str(source), "-o", str(binary)], check=True)
    return ctypes.CDLL(str(binary))


def aligned(size: int, seed: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """A buffer of random bytes, and the offset of its first byte on a cache line."""
    buffer = ctypes.create_string_buffer(random.Random(seed).randbytes(size + 64), size + 64)
    return buffer, -ctypes.addressof(buffer) % 64


@pytest.mark.parametrize("streaming", [0, 1])
def test_one_run_is_copied_exactly_at_any_alignment(library: ctypes.CDLL, streaming: int) -> None:
    source, s = aligned(8192, 1)
    target, t = aligned(8192, 2)
    for length in (0, 1, 15, 16, 63, 64, 65, 127, 129, 576, 2047, 2048, 2049, 2111, 4161):
        for to_offset, from_offset in ((0, 0), (1, 0), (0, 1), (16, 48), (63, 62), (33, 7)):
            before = target.raw
            to, start = t + to_offset, s + from_offset
            library.run(
                ctypes.byref(target, to), ctypes.byref(source, start), ctypes.c_uint64(length), streaming
            )
            expected = before[:to] + source.raw[start : start + length] + before[to + length :]
            assert target.raw == expected


@pytest.mark.parametrize("streaming", [0, 1])
@pytest.mark.parametrize("threads", [0, 1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("runs", "length"), [(0, 64), (5, 0), (1, 1), (700, 3), (301, 1000), (40, 70_001), (3, 600_000)]
)
def test_scattered_runs_arrive_whole_and_nothing_else_changes(
    library: ctypes.CDLL, runs: int, length: int, threads: int, streaming: int
) -> None:
    pitch = length + 5
    size = max(runs * pitch, 1)
    source, target = (ctypes.create_string_buffer(random.Random(k).randbytes(size), size) for k in (3, 4))
    order = list(range(runs))
    random.Random(5).shuffle(order)
    expected = bytearray(target.raw)
    for i, place in enumerate(order):
        expected[i * pitch : i * pitch + length] = source.raw[place * pitch : place * pitch + length]
    offsets = ctypes.c_uint64 * max(runs, 1)
    to_at = offsets(*(i * pitch for i in range(runs)))
    from_at = offsets(*(place * pitch for place in order))
    library.all(
        target, source, to_at, from_at, ctypes.c_uint64(runs), ctypes.c_uint64(length), threads, streaming
    )
    assert target.raw == bytes(expected)


@pytest.mark.parametrize("units", [0, 1, 2, 255, 256, 257, 1001])
@pytest.mark.parametrize("threads", [0, 1, 2, 3, 256, 5000])
def test_every_unit_of_work_is_done_once(library: ctypes.CDLL, units: int, threads: int) -> None:
    seen = (ctypes.c_uint32 * (units + 1))()
    library.count(seen, ctypes.c_uint64(units), threads)
    assert list(seen) == [1] * units + [0]
