"""Copy primitives of the CPU twin against one memcpy of as many bytes on as many threads.

In: the system's C++ compiler and `runtime/include`. Out: a table of GB/s and percent on standard output,
for runs of 64 B to 1 MiB that are gathered into, or scattered from, one packed buffer:

* ``strided``: every second run of one buffer, in order
* ``pages``: pages of 16 tokens at random places in 32 layer tensors, against token-major packed pages
* ``tokens``: the same with pages of one token

Run ``python benchmarks/host_copy.py``; ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

INCLUDE = Path(__file__).resolve().parents[1] / "runtime" / "include"
HEADER = "pattern  direction    run B threads    GB/s  memcpy    % target"
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread")

SOURCE = r"""
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "poolwright/host_copy.h"

namespace {

constexpr u64 kLayers = 32;

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

char* grab(u64 bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) {
    std::perror("mmap");
    std::exit(2);
  }
  std::memset(at, 1, bytes);
  return static_cast<char*>(at);
}

struct Bench {
  char* spread;
  char* packed;
  u64 total;
  u32 threads;
  int repeats;

  // A plain copy stands beside every repetition, so that a busy machine slows both.
  template <class Place>
  void measure(const char* pattern, u64 bytes, u64 runs, Place place) const {
    for (int out = 0; out < 2; ++out) {
      double plain = 1e9, ours = 1e9;
      for (int k = 0; k < repeats; ++k) {
        char* to = out ? packed : spread;
        const char* from = out ? spread : packed;
        double start = seconds();
        pw::parallel(runs * bytes, threads, [=](u64 a, u64 b) { std::memcpy(to + a, from + a, b - a); });
        plain = std::min(plain, seconds() - start);
        start = seconds();
        pw::copy_all(runs, bytes, threads, true, [=](u64 i) {
          char* outer = spread + place(i);
          char* inner = packed + i * bytes;
          return out ? pw::Copy{inner, outer} : pw::Copy{outer, inner};
        });
        ours = std::min(ours, seconds() - start);
      }
      const double size = static_cast<double>(runs * bytes);
      std::printf("%s %s %llu %u %.3f %.3f\n", pattern, out ? "gather" : "scatter", bytes, threads,
                  size / ours / 1e9, size / plain / 1e9);
      std::fflush(stdout);
    }
  }

  // The extents are constants, as they are in generated code.
  template <u64 tokens>
  void paged(const char* pattern, u64 bytes) const {
    const u64 pages = total / (bytes * tokens * kLayers);
    if (pages == 0) return;
    std::vector<u64> ids(2 * pages);
    for (u64 i = 0; i < ids.size(); ++i) ids[i] = i;
    std::shuffle(ids.begin(), ids.end(), std::mt19937_64(1));
    const u64* page = ids.data();
    measure(pattern, bytes, pages * tokens * kLayers, [=](u64 i) {
      const u64 layer = i % kLayers, token = i / kLayers % tokens, at = page[i / kLayers / tokens];
      return ((layer * 2 * pages + at) * tokens + token) * bytes;
    });
  }
};

}  // namespace

int main(int, char** argv) {
  Bench bench{nullptr, nullptr, std::strtoull(argv[1], nullptr, 10) << 20, 1, std::atoi(argv[2])};
  bench.spread = grab(2 * bench.total);
  bench.packed = grab(bench.total);
  for (char** count = argv + 3; *count != nullptr; ++count) {
    bench.threads = static_cast<u32>(std::atoi(*count));
    for (u64 bytes : {64, 256, 1024, 1152, 4096, 65536, 1 << 20}) {
      bench.measure("strided", bytes, bench.total / bytes, [=](u64 i) { return 2 * i * bytes; });
      if (bytes <= 65536) bench.paged<16>("pages", bytes);
      if (bytes <= 65536) bench.paged<1>("tokens", bytes);
    }
  }
}
"""


def target(pattern: str, run_bytes: int) -> int:
    """Percent of a plain memcpy that a cell should reach."""
    if run_bytes < 256:
        return 0
    if pattern == "tokens":
        return 40
    return 70 if run_bytes >= 1024 else 55


def build(folder: Path) -> Path:
    """The compiled harness. Exits with the compiler's message when it does not build."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(shlex.split(compiler)[0]) is None:
        sys.exit(f"no C++ compiler {compiler!r}: install one, or name it in CXX")
    source, program = folder / "host_copy.cpp", folder / "host_copy"
    source.write_text(SOURCE, encoding="utf-8")
    command = [*shlex.split(compiler), *FLAGS, f"-I{INCLUDE}", str(source), "-o", str(program)]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"the harness does not compile: {shlex.join(command)}")
    return program


def row(pattern: str, direction: str, run_bytes: str, threads: str, ours: str, plain: str) -> str:
    """One line of the table."""
    percent, goal = 100 * float(ours) / float(plain), target(pattern, int(run_bytes))
    speeds = f"{float(ours):7.2f} {float(plain):7.2f} {percent:4.0f} {goal or '-':>6}"
    note = "" if percent >= goal else "  below"
    return f"{pattern:8} {direction:9} {run_bytes:>8} {threads:>7} {speeds}{note}"


def main() -> None:
    """Build, run, print."""
    parser = argparse.ArgumentParser(description="copy primitives of the CPU twin against one memcpy")
    parser.add_argument("--mib", type=int, default=256, help="MiB copied: well beyond the last cache")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions; the best counts, for both sides")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [build(Path(folder)), options.mib, options.repeats, *options.threads]
        print(HEADER)
        with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                print(row(*line.split()), flush=True)
    if process.returncode:
        sys.exit(f"the harness ended with {process.returncode}")


if __name__ == "__main__":
    main()
