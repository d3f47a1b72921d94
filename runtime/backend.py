"""What carries a pool's transfers on its device: driver, compiled code, and the report of what can run."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from poolwright.runtime import binding, env, jit, testing, toolchain
from poolwright.runtime.binding import Binding
from poolwright.runtime.choice import Availability
from poolwright.runtime.driver import Driver, Kernels
from poolwright.runtime.driver.host import HostDriver, HostKernels
from poolwright.runtime.errors import BackendUnavailable, CompileError, PoolError
from poolwright.runtime.memory import Registrar
from poolwright.runtime.program import SizedProgram
from poolwright.runtime.transfer import Engine

if TYPE_CHECKING:
    from poolwright.runtime.pool import HostPool

REQUIREMENTS = ("cuda", "host")


class Backend:
    """Compiles a program for a device and says which paths can run."""

    def __init__(self, program: SizedProgram, device: torch.device, require: str | None) -> None:
        if require is not None and require not in REQUIREMENTS:
            raise ValueError(f"{program.spec.name}: require: expected cuda or host, got {require!r}")
        self.program, self.device = program, device
        if require == "cuda" and device.type != "cuda":
            raise BackendUnavailable(
                f"{program.spec.name} on CUDA", f"the pool's device is {device}", 'pass device="cuda:0"'
            )
        self._stand_in = testing.driver_in_use() if device.type == "cpu" else None
        self.driver = self._stand_in or driver_for(program.spec.name, device)
        self._at_once = isinstance(self.driver, HostDriver)
        self._align: int | None = None
        self._kernels: Kernels | None = None
        self._library: ctypes.CDLL | None = None
        self._why_not: CompileError | BackendUnavailable | None = None
        self.compile(16)
        if require is not None and self._why_not is not None:
            raise self._why_not
        self.range_count = sum(math.prod(extent for extent, _ in r.left) for r in program.host(1).ranges)

    def compile(self, align: int) -> None:
        """Compile for addresses that are multiples of `align`. A failure is kept for the report."""
        if align == self._align:
            return
        self._align, self._kernels, self._library, self._why_not = align, None, None, None
        try:
            if not self.program.device:
                return  # a pool without components: there is nothing to compile
            if self.device.type == "cuda":
                self._kernels = self._cuda_kernels(align)
            elif self._stand_in is not None:
                lanes = functools.partial(self._host_library, "lanes", align)
                self._kernels = self._stand_in.kernels(self.program, align, lanes)
            else:
                self._library = self._host_library("atoms", align)
                self._kernels = HostKernels(lambda: self._host_library("lanes", align))
        except (CompileError, BackendUnavailable) as error:
            self._why_not = error

    def _host_library(self, kind: str, align: int) -> ctypes.CDLL:
        library = jit.load_host(jit.host_libraries([self.program.unit(kind, align)])[0])
        self.program.check(library, align)
        return library

    def _cuda_kernels(self, align: int) -> Kernels:
        from poolwright.runtime.driver.cuda import CudaKernels, driver_version

        arch = env.text("CUDA_ARCH") or _arch_of(self.device)
        compiler = toolchain.find_cuda(env.text("CUDA_COMPILER"))
        if isinstance(compiler, toolchain.Compiler):
            newer = toolchain.check_driver(compiler, driver_version())
            if newer is not None:
                raise newer.error()
        cubins = jit.cubins(self.program.unit("kernels", align), arch)
        try:
            with self.driver.guard():
                return CudaKernels(cubins)
        except PoolError as error:
            mend = f"unset POOLWRIGHT_CUDA_ARCH (code for {arch} was loaded)"
            raise BackendUnavailable(f"kernels of {self.program.spec.name}", str(error), mend) from error

    def engine(self) -> Engine:
        """What transfers run on, as compiled now."""
        threads = env.number("THREADS") or min(os.cpu_count() or 1, 8)
        return Engine(self.driver, self._kernels, self._library, threads)

    def registrar(self) -> Registrar | None:
        """What pins host memory; None where nothing needs to be pinned."""
        return None if self._at_once else self.driver

    def numa_node(self) -> int | None:
        """The NUMA node that host memory should come from; None where it makes no difference."""
        return None if self._at_once else self.driver.numa_node()

    def report(self) -> tuple[Availability, ...]:
        """Every path and whether it can run."""
        cuda = self.device.type == "cuda"
        last = Availability("torch", True, "indexing, the last resort")
        if not self.program.device:
            nothing = "the pool has no bytes to move"
            return (*(Availability(p, False, nothing) for p in ("zero_copy", "staged", "host")), last)
        if self._why_not is not None:
            why, mend = str(self._why_not), self._why_not.command
            return (*(Availability(p, False, why, mend) for p in ("zero_copy", "staged", "host")), last)
        built = "kernels compiled" if cuda else "kernels are played on the CPU"
        twin = Availability("host", True, "CPU twin compiled")
        if not self._at_once:
            twin = Availability("host", False, "the CPU cannot reach device tensors")
        return (Availability("zero_copy", True, built), Availability("staged", True, built), twin, last)

    def bind(self, pool: HostPool, tensors: Mapping[str, object], layer_ids: Sequence[int] | None) -> Binding:
        """Check and bind an engine's tensors; `layer_ids` None: those of each component's list.

        Raises ValueError.
        """
        return binding.bind(self.program, pool.lists, pool.dtypes, self.device, tensors, layer_ids)


def driver_for(pool: str, device: torch.device) -> Driver:
    """The driver of a device. Raises BackendUnavailable."""
    if device.type == "cpu":
        return HostDriver()
    if device.type == "cuda":
        from poolwright.runtime.driver.cuda import cuda_driver

        return cuda_driver(device)
    raise BackendUnavailable(f"{pool} on {device}", "only cpu and cuda have a driver", 'pass device="cpu"')


def _arch_of(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
