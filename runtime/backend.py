"""What carries transfers on a device: driver, compiled code, the report of what can run."""

from __future__ import annotations

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from poolwright.runtime import env, jit, native, testing, toolchain, tuning
from poolwright.runtime.choice import Availability
from poolwright.runtime.costs import DEFAULTS, Costs
from poolwright.runtime.driver import Driver, Kernels
from poolwright.runtime.driver.host import HostDriver, HostKernels
from poolwright.runtime.errors import BackendUnavailable, CompileError, PoolError
from poolwright.runtime.memory import Registrar
from poolwright.runtime.program import GroupProgram, SizedProgram

REQUIREMENTS = ("cuda", "host")


class Code:
    """Compiled code of programs that move together, and the driver that runs it.

    `kernels` None: neither zero_copy nor staged; `libraries`: the CPU twin of each program, None without.
    """

    def __init__(
        self, source: SizedProgram | GroupProgram, device: torch.device, require: str | None
    ) -> None:
        self.name = source.spec.name if isinstance(source, SizedProgram) else source.name
        if require is not None and require not in REQUIREMENTS:
            raise ValueError(f"{self.name}: require: expected cuda or host, got {require!r}")
        if require == "cuda" and device.type != "cuda":
            raise BackendUnavailable(
                f"{self.name} on CUDA", f"the pool's device is {device}", 'pass device="cuda:0"'
            )
        self.source, self.device = source, device
        self._stand_in = testing.driver_in_use() if device.type == "cpu" else None
        self.driver = self._stand_in or driver_for(self.name, device)
        self._at_once = isinstance(self.driver, HostDriver)
        self.costs = _costs_of(device)
        self.threads = env.number("THREADS") or min(os.cpu_count() or 1, 8)
        self.align = 0
        with ThreadPoolExecutor(1) as beside:  # the compilers of this pool's own code
            ours = beside.submit(native.library)
            self.compile(16)
        ours.result()  # no path goes without it
        if require is not None and self._why_not is not None:
            raise self._why_not

    def compile(self, align: int) -> None:
        """Compile for addresses that are multiples of `align`. A failure is kept for the report."""
        if align == self.align:
            return
        self.align = align
        self.kernels: Kernels | None = None
        self.libraries: tuple[ctypes.CDLL | None, ...] = (None,) * len(self.source.programs)
        self._why_not: CompileError | BackendUnavailable | None = None
        try:
            if not any(program.device for program in self.source.programs):
                return  # indices without bytes: there is nothing to move
            if self.device.type == "cuda":
                self.kernels = self._cuda_kernels(align)
            elif self._stand_in is not None:
                lanes = functools.partial(self._lanes, align)
                self.kernels = self._stand_in.kernels(self.source, align, lanes)
            else:
                self.libraries = self._twins(align)
                self.kernels = HostKernels(functools.partial(self._lanes, align))
        except (CompileError, BackendUnavailable) as error:
            self._why_not = error

    def _twins(self, align: int) -> tuple[ctypes.CDLL | None, ...]:
        """The CPU twin of each program that has one, compared with its pool.py."""
        programs = self.source.programs
        units = [program.unit("atoms", align) for program in programs if program.device]
        paths = iter(jit.host_libraries(units))
        found = [jit.load_host(next(paths)) if program.device else None for program in programs]
        for program, library in zip(programs, found, strict=True):
            if library is not None:
                program.check(library, align)
        return tuple(found)

    def _lanes(self, align: int) -> ctypes.CDLL:
        library = jit.load_host(jit.host_libraries([self.source.unit("lanes", align)])[0])
        if isinstance(self.source, SizedProgram):
            self.source.check(library, align)
        return library

    def _cuda_kernels(self, align: int) -> Kernels:
        from poolwright.runtime.driver.cuda import CudaKernels, driver_version

        arch = env.text("CUDA_ARCH") or _arch_of(self.device)
        compiler = toolchain.find_cuda(env.text("CUDA_COMPILER"))
        if isinstance(compiler, toolchain.Compiler):
            toolchain.check_driver(compiler, driver_version())
        cubins = jit.cubins(self.source.unit("kernels", align), arch)
        try:
            with self.driver.guard():
                return CudaKernels(cubins)
        except PoolError as error:
            mend = f"unset POOLWRIGHT_CUDA_ARCH (code for {arch} was loaded)"
            raise BackendUnavailable(f"kernels of {self.name}", str(error), mend) from error

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
        if not any(program.device for program in self.source.programs):
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


def driver_for(pool: str, device: torch.device) -> Driver:
    """The driver of a device. Raises BackendUnavailable."""
    if device.type == "cpu":
        return HostDriver()
    if device.type == "cuda":
        from poolwright.runtime.driver.cuda import cuda_driver

        return cuda_driver(device)
    raise BackendUnavailable(f"{pool} on {device}", "only cpu and cuda have a driver", 'pass device="cpu"')


def _costs_of(device: torch.device) -> Costs:
    """Constants of the cost model; those of an H200 where nothing was measured."""
    if device.type != "cuda":
        return DEFAULTS
    return tuning.load(*identity(device))


def identity(device: torch.device) -> tuple[str, str]:
    """What constants of the cost model are kept by: the GPU, and the CUDA of its driver."""
    from poolwright.runtime.driver.cuda import driver_version

    return torch.cuda.get_device_name(device), ".".join(map(str, driver_version()))


def _arch_of(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
