"""SGLang's own transfer kernels, built from its published wheel, for `benchmarks/sglang_peer.py`.

In: pip with a package index (`fetch`), then nvcc (`build`). Out: the ignored folder `build/peer`:
`sglang/` (headers and licence), `site/tvm_ffi/` (how the kernels are called from Python), `lib/*.so`.
Nothing of SGLang becomes part of this repository. The folder may be copied to a machine without network.

Run ``python benchmarks/sglang_build.py fetch build --python 3.12``; ``build`` alone compiles what is there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "build" / "peer"
SGLANG = "sglang==0.5.23"
FFI = "apache-tvm-ffi==0.1.15.post2"
ROWS = (256, 1152, 2048, 8448)
"""Bytes of a row (one layer of one token) that modules are compiled for, as SGLang does."""

_HEADERS = {
    "sglang/kernels/jit/csrc/kvcacheio/": "csrc/",
    "sglang/kernels/jit/include/sgl_kernel/": "include/sgl_kernel/",
    "sglang-0.5.23.dist-info/licenses/": "",
}
_PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux_2_24_x86_64")
_FFI_HEADERS = ("container/tensor.h", "dtype.h", "error.h", "extra/c_env_api.h", "function.h")


@dataclass(frozen=True)
class Module:
    """One library: a header of SGLang's and what it exports, as (name, C++ function)."""

    name: str
    header: str
    exports: tuple[tuple[str, str], ...]

    @property
    def library(self) -> Path:
        return FOLDER / "lib" / f"{self.name}.so"

    @property
    def source(self) -> str:
        lines = [f"#include <tvm/ffi/{header}>" for header in _FFI_HEADERS]
        lines += [f'#include "{self.header}"', "namespace sglang {"]
        lines += [f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({name}, ({function}));" for name, function in self.exports]
        return "\n".join([*lines, "}", ""])


def modules(rows: Sequence[int] = ROWS) -> Iterator[Module]:
    """Every library, with the template arguments that SGLang 0.5.23 chooses on CUDA."""
    for row in rows:
        unroll = 4 if row <= 512 else 2 if row <= 1024 else 1
        arguments = f"{row}, {unroll}, 2, 1024"
        kernel = f"HiCacheKernel<{arguments}>"
        four = ("run_one", "run_all", "run_one_mla", "run_all_mla")
        exports = tuple((f"launch{name[3:]}", f"&{kernel}::{name}") for name in four)
        yield Module(f"register_{row}", "hicache.cuh", exports)
        kernel = f"HiCacheStagedWriteBackKernel<{arguments}>"
        two = ("all_lf_pf_staged", "all_mla_lf_pf_staged")
        exports = tuple((f"launch_{name}", f"&{kernel}::run_{name}") for name in two)
        yield Module(f"staged_{row}", "staged_write_back.cuh", exports)
    kernel = f"HiCacheTmaKernel<{32 * 1024}, 6, 4, 4>"
    exports = tuple((f"launch{name[3:]}", f"&{kernel}::{name}") for name in four)
    yield Module("tma", "hicache_tma.cuh", (*exports, ("fits_device", f"&{kernel}::fits_device")))
    kernel = "TransferMambaKernel"
    exports = (("load", f"&{kernel}::run_pf_lf"), ("write_back", f"&{kernel}::run_lf_pf"))
    yield Module("mamba", "transfer_mamba.cuh", exports)


def fetch(python: str) -> None:
    """Download both wheels and unpack what is needed, for an interpreter of version `python`."""
    with tempfile.TemporaryDirectory() as folder:
        # Headers are the same in SGLang's wheels of all versions; tvm-ffi has a compiled module.
        for requirement, version in ((SGLANG, "3.11"), (FFI, python)):
            if not download(requirement, version, Path(folder)):
                sys.exit(f"pip cannot download {requirement}: give it a package index, or copy {FOLDER} here")
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                _unpack(archive, sglang=wheel.name.startswith("sglang"))


def download(requirement: str, python: str, folder: Path) -> bool:
    """Download a wheel for an interpreter of version `python`, without what it needs; whether pip did."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    command += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    return subprocess.run([*command, requirement], check=False).returncode == 0


def _unpack(archive: zipfile.ZipFile, *, sglang: bool) -> None:
    for name in archive.namelist():
        if name.endswith("/"):
            continue
        if sglang:
            prefix = next((p for p in _HEADERS if name.startswith(p)), None)
            if prefix is None:
                continue
            target = FOLDER / "sglang" / (_HEADERS[prefix] + name.removeprefix(prefix))
        elif "/src/" in name:
            continue
        else:
            target = FOLDER / "site" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(archive.read(name))


def build(arch: str) -> None:
    """Compile every library that is not there yet. Exits with the compiler's first message."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        sys.exit("nvcc not found: put it on the path, or copy build/peer/lib from a machine that has it")
    if not (FOLDER / "sglang" / "csrc").is_dir():
        sys.exit(f"{FOLDER} holds no sources: run `python benchmarks/sglang_build.py fetch` first")
    wanted = [module for module in modules() if not module.library.exists()]
    (FOLDER / "lib").mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        for module, message in zip(
            wanted, pool.map(lambda module: _compile(nvcc, arch, module), wanted), strict=True
        ):
            if message:
                sys.exit(f"{module.name} does not compile: {message}")
            print(f"built {module.library.name}", flush=True)


def _compile(nvcc: str, arch: str, module: Module) -> str:
    """Compile one library; the compiler's message when it fails, else ""."""
    site = FOLDER / "site" / "tvm_ffi"
    source = module.library.with_suffix(".cu")
    source.write_text(module.source, encoding="utf-8")
    includes = [FOLDER / "sglang" / "include", FOLDER / "sglang" / "csrc", site / "include"]
    command = [nvcc, f"-gencode=arch=compute_{arch},code=sm_{arch}", "-std=c++20", "-O3", "-shared"]
    command += [
        "--expt-relaxed-constexpr",
        f"-DSGL_CUDA_ARCH={arch.rstrip('af')}0",
        "-Xcompiler",
        "-fPIC",
        *(f"-I{path}" for path in includes),
    ]
    command += [str(source), "-o", str(module.library), f"-L{site / 'lib'}", "-ltvm_ffi", "-cudart", "shared"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stderr or done.stdout or "no message") if done.returncode else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="SGLang's transfer kernels as a peer to measure")
    parser.add_argument("steps", nargs="+", choices=("fetch", "build"))
    parser.add_argument("--python", default="3.12", help="the interpreter that will call them")
    parser.add_argument("--arch", default="90a", help="the GPU's architecture, as nvcc writes it")
    options = parser.parse_args()
    if "fetch" in options.steps:
        fetch(options.python)
    if "build" in options.steps:
        build(options.arch)


if __name__ == "__main__":
    main()
