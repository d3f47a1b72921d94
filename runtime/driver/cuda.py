"""A CUDA device behind the driver door: the CUDA driver API, from Python.

What a submission asks of the driver goes through compiled code, several calls in one (`native.Calls`); the
rest goes through `cuda.bindings`. The symbol of the batch copy is asked for by version, so that its signature
is the one the driver has, whatever this was built with. ``benchmarks/submit.py --calls`` measures them.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from threading import get_ident
from typing import Any, ClassVar, NoReturn

import torch

from poolwright.runtime import native
from poolwright.runtime.driver import Event, Launch, Memory, Parameters, Stream, Windows, sizes
from poolwright.runtime.errors import BackendUnavailable, NotAdmitted, PoolError

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_NOTHING: AbstractContextManager[None] = nullcontext()


def _check(result: tuple[Any, ...], what: str) -> Any:
    """The values of a call of the driver API. Raises PoolError with the error's name."""
    if int(result[0]) != 0:
        raise _failed(int(result[0]), what)
    return result[1] if len(result) == 2 else result[1:]


def _failed(code: int, what: str) -> PoolError:
    """What an error of the driver says."""
    from cuda.bindings import driver

    try:
        text = driver.cuGetErrorString(driver.CUresult(code))[1]
    except (ValueError, RuntimeError):  # a driver newer than the bindings; none at all
        text = "error"
    return PoolError(f"CUDA: {what}: {text.decode() if isinstance(text, bytes) else text} ({code})")


class CudaEvent:
    """An event that goes back to its driver's store when nobody holds it. `number`: its handle as one."""

    __slots__ = ("handle", "number", "store")

    def __init__(self, handle: Any, number: int, store: list[tuple[Any, int]]) -> None:
        self.handle, self.number, self.store = handle, number, store

    def __del__(self) -> None:
        self.store.append((self.handle, self.number))


class CudaKernels:
    """Functions of loaded cubins. A launch costs about 6 us with 1 KiB of parameters."""

    block: ClassVar[int] = 512
    arrivals: ClassVar[int] = block // 32  # warps

    def __init__(self, cubins: Sequence[bytes]) -> None:
        from cuda.bindings import driver

        self._modules = [_check(driver.cuModuleLoadData(cubin), "load a cubin") for cubin in cubins]
        self._functions: dict[str, Any] = {}
        for module in self._modules:
            count = _check(driver.cuModuleGetFunctionCount(module), "count kernels")
            for function in _check(driver.cuModuleEnumerateFunctions(count, module), "list kernels"):
                name = _check(driver.cuFuncGetName(function), "name of a kernel").decode()
                # A first launch must not load code while another kernel waits for its data.
                _check(driver.cuFuncLoad(function), f"load kernel {name}")
                self._functions[name] = function

    def grid(self, purpose: str, nbytes: int) -> int:
        return sizes.blocks(purpose, nbytes)

    def windows(self, step_bytes: int, steps: int) -> Windows:
        return sizes.windows(step_bytes, steps)

    def prepare(self, name: str, params: Parameters) -> Launch:
        kernel = native.Kernel(int(self._functions[name]), self.block, ctypes.addressof(params.pointers))
        return CudaLaunch(name, kernel, native.Calls(functions(), 0))


class CudaLaunch:
    """Launches a kernel."""

    __slots__ = ("_call", "kernel", "name")

    def __init__(self, name: str, kernel: native.Kernel, calls: native.Calls) -> None:
        self.name, self.kernel, self._call = name, kernel, calls.launch

    def __call__(self, stream: Stream, grid: int, event: int = 0) -> None:
        found = self._call(self.kernel.at, stream, grid, event)
        if found:
            stage, code = native.stopped(found)
            what = "launch" if stage == native.REFUSED else "record an event behind"
            raise _failed(code, f"{what} {self.name}")


class CudaDriver:
    """One CUDA device. Streams are integers (`cudaStream_t`); torch's stream objects are taken too."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        index = torch.cuda.current_device() if device.index is None else device.index
        self._index = int(index)
        self.device = torch.device("cuda", self._index)
        with torch.cuda.device(self.device):
            torch.empty(1, device=self.device)  # makes the primary context
        self._api = driver
        handle = _check(driver.cuDeviceGet(index), "device")
        self._context = _check(driver.cuDevicePrimaryCtxRetain(handle), "primary context")
        self._context_number = int(self._context)
        self._threads: set[int] = set()
        self._ok = driver.CUresult.CUDA_SUCCESS
        self._record, self._wait = driver.cuEventRecord, driver.cuStreamWaitEvent
        self._events: list[tuple[Any, int]] = []
        self._timed: list[tuple[Any, int]] = []
        self._followed: dict[int, Any] = {}
        # Without a function of Python's round the call: every submission asks.
        self.current_stream = functools.partial(torch._C._cuda_getCurrentRawStream, self.device.index)

    @cached_property
    def _calls(self) -> native.Calls:
        return native.Calls(functions(), self._new_event(2)[1])

    def guard(self) -> AbstractContextManager[None]:
        # A thread that has no context yet reports device 0: it counts once its context has been seen.
        if get_ident() in self._threads and torch._C._cuda_getDevice() == self._index:
            return _NOTHING
        code, current = self._api.cuCtxGetCurrent()
        if int(code) == 0 and int(current) == self._context_number:
            self._threads.add(get_ident())
            return _NOTHING
        return self._pushed()

    @contextmanager
    def _pushed(self) -> Iterator[None]:
        api = self._api
        _check((*api.cuCtxPushCurrent(self._context), None), "push context")
        try:
            yield
        finally:
            api.cuCtxPopCurrent()

    def admit(self, stream: Stream, what: str) -> None:
        handle = _handle(stream)
        if handle == torch._C._cuda_getCurrentRawStream(self.device.index):
            captures = torch._C._cuda_isCurrentStreamCapturing()
        else:
            captures = int(_check(self._api.cuStreamIsCapturing(handle), "capture status")) != 0
        if captures:
            raise NotAdmitted(
                f"{what} cannot be captured into a CUDA graph; submit it before the replay, then wait_all()"
            )

    def enter(self, stream: Stream, other: Stream, before: Event | None, what: str) -> None:
        other = other if type(other) is int else other.cuda_stream
        found = self._calls.enter(stream, other, 0 if before is None else before.number)
        if found:
            self._stopped(found, other, what, "wait for earlier work")

    def _stopped(self, found: int, other: Stream, what: str, doing: str) -> NoReturn:
        stage, code = native.stopped(found)
        if stage == native.REFUSED:
            self.admit(other, what)
            raise NotAdmitted(f"{what}: a stream does not say whether it is captured: CUDA error {code}")
        raise _failed(code, doing)

    def allocate(self, nbytes: int) -> Memory:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return Memory(tensor.data_ptr(), nbytes, tensor)

    def owning(self, stream: Stream, other: Stream) -> AbstractContextManager[object]:
        # Torch's allocator goes by its current stream; changing that costs more than most submissions.
        return _NOTHING if _handle(other) == self.current_stream() else self.torch_stream(stream)

    def register(self, address: int, nbytes: int) -> int:
        api = self._api
        with self.guard():
            # 1 | 2: portable to all contexts, mapped for kernels.
            result = api.cuMemHostRegister(address, nbytes, 1 | 2)
            _check((*result, None), f"register {nbytes:,} bytes of host memory")
            try:
                return int(_check(api.cuMemHostGetDevicePointer(address, 0), "device address of host memory"))
            except PoolError:
                api.cuMemHostUnregister(address)
                raise

    def unregister(self, address: int) -> None:
        with self.guard():
            _check((*self._api.cuMemHostUnregister(address), None), "unregister host memory")

    def numa_node(self) -> int | None:
        from cuda.bindings import driver

        kind = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
        handle = _check(driver.cuDeviceGet(self.device.index), "device")
        code, node = driver.cuDeviceGetAttribute(kind, handle)
        return int(node) if int(code) == 0 and int(node) >= 0 else None  # a machine may not tell

    def stream(self) -> Stream:
        with self.guard():
            return int(_check(self._api.cuStreamCreate(1), "create a stream"))  # 1: non-blocking

    def torch_stream(self, stream: Stream) -> AbstractContextManager[object]:
        external: Any = torch.cuda.ExternalStream
        return torch.cuda.stream(external(stream, self.device))

    def call(self, stream: Stream, work: Callable[[], None]) -> None:
        with self.torch_stream(stream):
            work()

    def launch(self, launch: Any, stream: Stream, grid: int) -> Event:
        event = self._event()
        launch(stream, grid, event.number)
        return event

    def launch_behind(
        self, launch: Any, stream: Stream, grid: int, other: Stream, before: Event | None, what: str
    ) -> Event:
        other = other if type(other) is int else other.cuda_stream
        event, ahead = self._event(), 0 if before is None else before.number
        found = self._calls.launch_behind(launch.kernel.at, stream, grid, event.number, other, ahead)
        if found:
            self._stopped(found, other, what, f"wait for earlier work, then launch {launch.name}")
        return event

    def relay(
        self,
        launch: Any,
        kernels: Stream,
        grid: int,
        copies: Stream,
        rows: native.Rows,
        inward: bool,
        free: Event | None,
        told: bool,
    ) -> Event | None:
        event, ahead = self._event() if told else None, 0 if free is None else free.number
        behind = 0 if event is None else event.number
        code = self._calls.relay(launch.kernel.at, grid, kernels, copies, ahead, behind, rows, inward)
        if code:
            raise _failed(code, f"{rows.used} copies and {launch.name}, one behind the other")
        return event

    def _event(self) -> CudaEvent:
        try:
            handle, number = self._events.pop()  # asking first would be a race: any thread may take one
        except IndexError:
            handle, number = self._new_event(2)
        return CudaEvent(handle, number, self._events)

    def record(self, stream: Stream, timed: bool = False) -> Event:
        store = self._timed if timed else self._events
        try:
            handle, number = store.pop()
        except IndexError:
            handle, number = self._new_event(0 if timed else 2)  # 2: no timing
        (code,) = self._record(handle, stream if type(stream) is int else stream.cuda_stream)
        if code is not self._ok:
            _check((code, None), "record an event")
        return CudaEvent(handle, number, store)

    def _new_event(self, flags: int) -> tuple[Any, int]:
        handle = _check(self._api.cuEventCreate(flags), "create an event")
        return handle, int(handle)

    def elapsed(self, begin: Event, end: Event) -> float:
        return float(_check(self._api.cuEventElapsedTime(begin.handle, end.handle), "time of events")) / 1e3

    def wait(self, stream: Stream, event: Event) -> None:
        target = stream if type(stream) is int else stream.cuda_stream
        (code,) = self._wait(target, event.handle, 0)
        if code is not self._ok:
            _check((code, None), "wait for an event")

    def follow(self, stream: Stream, other: Stream) -> None:
        # One event for each stream that is followed: a wait is for what the event stood for when it was put.
        behind = other if type(other) is int else other.cuda_stream
        event = self._followed.get(behind)
        if event is None:
            event = self._followed[behind] = _check(self._api.cuEventCreate(2), "create an event")
        (code,) = self._record(event, behind)
        if code is self._ok:
            (code,) = self._wait(stream if type(stream) is int else stream.cuda_stream, event, 0)
        if code is not self._ok:
            _check((code, None), "order streams")

    def done(self, event: Event) -> bool:
        (code,) = self._api.cuEventQuery(event.handle)
        if code is self._ok:
            return True
        if int(code) != _NOT_READY:
            _check((code, None), "ask for an event")
        return False

    def synchronize(self, event: Event) -> None:
        _check((*self._api.cuEventSynchronize(event.handle), None), "wait for an event")

    def copy(
        self, to: Sequence[int], source: Sequence[int], sizes: Sequence[int], stream: Stream, inward: bool
    ) -> None:
        if not len(to) == len(source) == len(sizes):
            raise ValueError(f"copies: expected equal lengths, got {len(to)}, {len(source)}, {len(sizes)}")
        rows = [_words(row) for row in (to, source, sizes)]
        first, second, third = (row.buffer_info()[0] for row in rows)
        code = self._calls.copies(first, second, third, len(to), _handle(stream), inward)
        if code:
            raise _failed(code, f"{len(to)} copies")

    def upload(self, address: int, values: array[int], stream: Stream) -> None:
        source, size = values.buffer_info()[0], values.itemsize * len(values)
        # From pageable memory: the driver has read the numbers when the call returns.
        result = self._api.cuMemcpyHtoDAsync(address, source, size, _handle(stream))
        if int(result[0]) != 0:
            _check((*result, None), "write device memory")

    def fill(self, address: int, value: int, count: int, stream: Stream) -> None:
        result = self._api.cuMemsetD32Async(address, value, count, _handle(stream))
        if int(result[0]) != 0:
            _check((*result, None), "fill device memory")

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        result = self._api.cuStreamWaitValue32(_handle(stream), address, value, 0)  # 0: at least
        _check((*result, None), "wait for a value")


def _words(row: Sequence[int]) -> array[int]:
    return row if isinstance(row, array) and row.typecode == "Q" else array("Q", row)


@functools.cache
def functions() -> native.Functions:
    """The functions of the driver that compiled code calls."""
    library = ctypes.CDLL("libcuda.so.1")
    names = [
        *("cuStreamIsCapturing", "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel"),
        *("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"),
    ]
    found = [ctypes.cast(library[name], ctypes.c_void_p).value for name in names]
    return native.Functions(*found, *_batch_copy(library))


def _batch_copy(library: ctypes.CDLL) -> tuple[int, int]:
    """Where the driver has its batch copy, and how many arguments it takes; 0, 0 where it has none."""
    for version, arguments in ((13000, 8), (12080, 9)):
        address, status = ctypes.c_void_p(), ctypes.c_int()
        asked = (b"cuMemcpyBatchAsync", ctypes.byref(address), version, ctypes.c_uint64(0))
        if library.cuGetProcAddress_v2(*asked, ctypes.byref(status)) == 0 and address.value:
            return address.value, arguments
    return 0, 0


def _handle(stream: Stream) -> int:
    """The integer of a stream, whoever made it."""
    return stream if type(stream) is int else int(stream.cuda_stream)


def driver_version() -> tuple[int, int]:
    """(major, minor) of the CUDA that the installed driver runs."""
    from cuda.bindings import driver

    number = int(_check(driver.cuDriverGetVersion(), "version of the driver"))
    return number // 1000, number % 1000 // 10


def cuda_driver(device: torch.device) -> CudaDriver:
    """The driver of a CUDA device. Raises BackendUnavailable naming what is missing."""
    if torch.version.cuda is None:
        why, mend = "this torch is built without CUDA", 'install a torch with CUDA, or pass device="cpu"'
        raise BackendUnavailable(f"device {device}", why, mend)
    if not torch.cuda.is_available():
        raise BackendUnavailable(f"device {device}", "torch sees no CUDA device", "nvidia-smi")
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError as error:
        raise BackendUnavailable(
            f"device {device}", f"cuda.bindings does not import ({error})", "pip install cuda-bindings"
        ) from error
    return CudaDriver(device)
