"""What single calls of the CUDA driver cost, through cuda.bindings and through ctypes.

Each cell is the best of several rounds of calls submitted back to back to a stream of their own, in
microseconds of CPU time a call; between rounds the device comes to rest.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import torch

from poolwright.runtime import native
from poolwright.runtime.driver.cuda import CudaDriver, functions

ROUNDS, CALLS = 15, 200
LAUNCHES = (64, 1024, 4000)
BATCHES = (1, 2, 4, 8, 64, 512)
PIECE = 4096

SOURCE = b"""
struct Few { unsigned words[16]; };
struct Some { unsigned words[256]; };
struct Many { unsigned words[1000]; };
extern "C" __global__ void take64(const __grid_constant__ Few) {}
extern "C" __global__ void take1024(const __grid_constant__ Some) {}
extern "C" __global__ void take4000(const __grid_constant__ Many) {}
"""

Call = Callable[[], object]
Row = tuple[str, Call | None, Call | None]
"""What is called, through cuda.bindings, through ctypes."""


def microseconds(call: Call, rest: Call, calls: int = CALLS) -> float:
    """Best of the rounds, of one call."""
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - begin) / calls * 1e6)
        rest()
    return best


def _checked(result: tuple[Any, ...]) -> Any:
    if int(result[0]) != 0:
        raise RuntimeError(f"CUDA: {result[0]}")
    return result[1] if len(result) == 2 else result[1:]


def _module() -> Any:
    """The kernels of SOURCE, loaded."""
    from cuda.bindings import driver, nvrtc

    major, minor = torch.cuda.get_device_capability()
    program = _checked(nvrtc.nvrtcCreateProgram(SOURCE, b"take.cu", 0, [], []))
    _checked(
        (*nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]), None)
    )
    binary = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked((*nvrtc.nvrtcGetCUBIN(program, binary), None))
    return _checked(driver.cuModuleLoadData(bytes(binary)))


def _foreign(library: ctypes.CDLL, name: str, kinds: str) -> Any:
    """A function of the driver; `kinds`: p pointer, u 32-bit, n size."""
    known = {"p": ctypes.c_void_p, "u": ctypes.c_uint, "n": ctypes.c_size_t}
    function = library[name]
    function.argtypes = [known[kind] for kind in kinds]
    return function


def launches(stream: int, library: ctypes.CDLL) -> Iterator[Row]:
    from cuda.bindings import driver

    module = _module()
    foreign = _foreign(library, "cuLaunchKernel", "puuuuuuuppp")
    event = int(_checked(driver.cuEventCreate(2)))
    for nbytes in LAUNCHES:
        block = (ctypes.c_uint8 * nbytes)()
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        function = _checked(driver.cuModuleGetFunction(module, f"take{nbytes}".encode()))
        at = ctypes.addressof(pointers)

        def bound(function: Any = function, at: int = at, kept: object = (block, pointers)) -> object:
            return driver.cuLaunchKernel(function, 4, 1, 1, 512, 1, 1, 0, stream, at, 0)

        def raw(function: int = int(function), at: int = at, kept: object = (block, pointers)) -> object:
            return foreign(function, 4, 1, 1, 512, 1, 1, 0, stream, at, None)

        yield f"launch, {nbytes} bytes of parameters", bound, raw
        kernel, calls = native.Kernel(int(function), 512, at), native.Calls(functions(), 0)

        def told(
            kernel: native.Kernel = kernel, calls: native.Calls = calls, kept: object = (block, pointers)
        ) -> object:
            return calls.launch(kernel.at, stream, 4, event)

        yield f"launch, {nbytes} bytes of parameters, and an event: compiled", None, told


def events(stream: int, library: ctypes.CDLL) -> Iterator[Row]:
    from cuda.bindings import driver

    event = _checked(driver.cuEventCreate(2))
    other = _checked(driver.cuStreamCreate(1))
    number, second = int(event), int(other)
    record = _foreign(library, "cuEventRecord", "pp")
    wait = _foreign(library, "cuStreamWaitEvent", "ppu")
    query = _foreign(library, "cuEventQuery", "p")
    _checked((*driver.cuEventRecord(event, stream), None))
    yield (
        "record an event",
        lambda: driver.cuEventRecord(event, stream),
        lambda: record(number, stream),
    )
    yield (
        "wait for an event of another stream",
        lambda: driver.cuStreamWaitEvent(other, event, 0),
        lambda: wait(second, number, 0),
    )
    yield "ask for an event", lambda: driver.cuEventQuery(event), lambda: query(number)


def values(stream: int, library: ctypes.CDLL, at: int) -> Iterator[Row]:
    """Waiting for, and writing, a number in device memory, alone and together in one call."""
    from cuda.bindings import driver

    wait = _foreign(library, "cuStreamWaitValue32_v2", "ppuu")
    write = _foreign(library, "cuStreamWriteValue32_v2", "ppuu")
    yield (
        "wait for a number that is there",
        lambda: driver.cuStreamWaitValue32(stream, at, 0, 0),
        lambda: wait(stream, at, 0, 0),
    )
    yield (
        "write a number",
        lambda: driver.cuStreamWriteValue32(stream, at, 1, 0),
        lambda: write(stream, at, 1, 0),
    )


def copies(stream: int, library: ctypes.CDLL, host: int, device: int) -> Iterator[Row]:
    """One copy each call, and batches; a batch is shown as the whole call."""
    from cuda.bindings import driver

    out = _foreign(library, "cuMemcpyDtoHAsync_v2", "ppnp")
    inward = _foreign(library, "cuMemcpyHtoDAsync_v2", "ppnp")
    yield (
        "copy to the host",
        lambda: driver.cuMemcpyDtoHAsync(host, device, PIECE, stream),
        lambda: out(host, device, PIECE, stream),
    )
    yield (
        "copy to the device",
        lambda: driver.cuMemcpyHtoDAsync(device, host, PIECE, stream),
        lambda: inward(device, host, PIECE, stream),
    )
    calls = native.Calls(functions(), 0)
    for count in BATCHES:
        lists = (range(host, host + count * PIECE, PIECE), range(device, device + count * PIECE, PIECE))
        words = [array("Q", row) for row in (*lists, [PIECE] * count)]

        def batch(words: list[array[int]] = words, count: int = count) -> object:
            to, source, sizes = (row.buffer_info()[0] for row in words)
            return calls.copies(to, source, sizes, count, stream, inward=False)

        yield f"batch of {count} to the host: compiled", None, batch


def door(driver: CudaDriver) -> Iterator[Row]:
    """Calls of the driver door as the runtime makes them."""
    stream, current = driver.stream(), driver.current_stream()
    event = driver.record(stream)
    yield "door: guard", driver.guard, None
    yield "door: current_stream", driver.current_stream, None
    yield "door: admit the current stream", lambda: driver.admit(current, "x"), None
    yield "door: admit another stream", lambda: driver.admit(stream, "x"), None
    yield "door: enter, behind a stream", lambda: driver.enter(stream, current, None, "x"), None
    yield "door: enter, behind an event, too", lambda: driver.enter(stream, current, event, "x"), None
    yield "door: record", lambda: driver.record(stream), None
    yield "door: wait", lambda: driver.wait(current, event), None
    yield "door: follow", lambda: driver.follow(stream, current), None
    yield "door: done", lambda: driver.done(event), None


def table() -> None:
    """Print what each call costs."""
    driver = CudaDriver(torch.device("cuda", 0))
    library = ctypes.CDLL("libcuda.so.1")
    size = max(BATCHES) * PIECE
    memory = driver.allocate(size)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    stream = driver.stream()
    rows = [*launches(stream, library), *events(stream, library), *values(stream, library, memory.address)]
    rows += [*copies(stream, library, pinned.data_ptr(), memory.address), *door(driver)]
    print("| call | cuda.bindings us | ctypes us |\n|---|---|---|")
    for name, bound, foreign in rows:
        calls = 20 if "batch" in name else CALLS
        cells = [
            "" if call is None else f"{microseconds(call, torch.cuda.synchronize, calls):.2f}"
            for call in (bound, foreign)
        ]
        print(f"| {name} | {cells[0]} | {cells[1]} |", flush=True)
