"""A CUDA device behind the driver door: the CUDA driver API, from Python.

What begins a submission, and launches with the event behind them, are calls of compiled code. Other events
go through `cuda.bindings`, which adds 0.2 to 0.3 us to a call, less than ctypes does.
The batch copy goes through ctypes, which takes arrays of addresses as they lie where the binding wants
lists of objects. Its symbol is asked for by version, so that its signature is the one the driver has,
whatever this was built with. ``benchmarks/submit.py --calls`` measures both ways.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from threading import get_ident
from typing import Any, ClassVar

import torch

from poolwright.runtime import native
from poolwright.runtime.driver import Event, Launch, Memory, Parameters, Stream, Windows, sizes
from poolwright.runtime.errors import BackendUnavailable, NotAdmitted, PoolError

BATCH_LIMIT = 4096
"""Descriptors of one batch call: very long ones have crashed drivers."""

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_NOTHING: AbstractContextManager[None] = nullcontext()
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read after earlier work of the stream
_ATTRIBUTES = 64  # more than sizeof(CUmemcpyAttributes) of any version; the rest stays zero


def _check(result: tuple[Any, ...], what: str) -> Any:
    """The values of a call of the driver API. Raises PoolError with the error's name."""
    from cuda.bindings import driver

    if int(result[0]) != 0:
        name = driver.cuGetErrorString(result[0])[1]
        text = name.decode() if isinstance(name, bytes) else str(name)
        raise PoolError(f"CUDA: {what}: {text} ({int(result[0])})")
    return result[1] if len(result) == 2 else result[1:]


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
        self._result = driver.CUresult
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
        function, pointers = int(self._functions[name]), ctypes.addressof(params.pointers)
        kernel = native.LaunchKernel(_functions(), function, self.block, pointers)
        result = self._result

        def launch(stream: Stream, grid: int, event: int = 0) -> None:
            found = kernel.call(stream, grid, event)
            if found:
                stage, code = native.stopped(found)
                what = f"launch {name}" if stage == native.REFUSED else f"record an event behind {name}"
                _check((result(code), None), what)

        return launch


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
        self._batch = _batch_copy()

    @cached_property
    def _enter(self) -> native.Enter:
        return native.Enter(_functions(), self._new_event(2)[1])

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
        found = self._enter.call(stream, other, 0 if before is None else before.number)
        if not found:
            return
        stage, code = native.stopped(found)
        if stage == native.REFUSED:
            self.admit(other, what)
            raise NotAdmitted(f"{what}: a stream does not say whether it is captured: CUDA error {code}")
        _check((self._api.CUresult(code), None), "wait for earlier work")

    def allocate(self, nbytes: int) -> Memory:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return Memory(tensor.data_ptr(), nbytes, tensor)

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
        try:
            handle, number = self._events.pop()  # asking first would be a race: any thread may take one
        except IndexError:
            handle, number = self._new_event(2)
        event = CudaEvent(handle, number, self._events)
        launch(stream, grid, number)
        return event

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
        handle, count = _handle(stream), len(to)
        if count <= 2 or self._batch is None:
            call = self._api.cuMemcpyHtoDAsync if inward else self._api.cuMemcpyDtoHAsync
            for target, origin, size in zip(to, source, sizes, strict=True):
                (code,) = call(target, origin, size, handle)
                if code is not self._ok:
                    _check((code, None), f"copy {size:,} bytes")
            return
        if count <= BATCH_LIMIT:
            self._batch(to, source, sizes, handle)
            return
        for start in range(0, count, BATCH_LIMIT):
            stop = start + BATCH_LIMIT
            self._batch(to[start:stop], source[start:stop], sizes[start:stop], handle)

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


class BatchCopy:
    """``cuMemcpyBatchAsync``, with all that does not change between calls prepared.

    `positions`: how many arguments `function` takes; 9 with the place for the index of a failed copy.
    """

    def __init__(self, function: Callable[..., int], positions: int) -> None:
        attributes, first, failed = (ctypes.c_char * _ATTRIBUTES)(), ctypes.c_size_t(0), ctypes.c_size_t(0)
        ctypes.c_int.from_buffer(attributes).value = _STREAM_ORDER
        self._kept = attributes, first, failed
        self._function = function
        # One set of attributes, in force from the first copy on.
        self._middle = (ctypes.addressof(attributes), ctypes.addressof(first), 1)
        self._tail = (ctypes.addressof(failed),) if positions == 9 else ()

    def __call__(self, to: Sequence[int], source: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        """Copy all; ``array("Q")`` is taken as it is. Raises PoolError, ValueError for unequal lengths."""
        if not len(to) == len(source) == len(sizes):
            raise ValueError(f"copies: expected equal lengths, got {len(to)}, {len(source)}, {len(sizes)}")
        rows = [_words(row) for row in (to, source, sizes)]
        addresses = [row.buffer_info()[0] for row in rows]
        code = self._function(*addresses, len(to), *self._middle, *self._tail, stream)
        if code != 0:
            raise PoolError(f"CUDA: batch of {len(to)} copies: error {code}")


def _words(row: Sequence[int]) -> array[int]:
    return row if isinstance(row, array) and row.typecode == "Q" else array("Q", row)


@functools.cache
def _functions() -> native.Functions:
    """The functions of the driver that compiled code calls."""
    library = ctypes.CDLL("libcuda.so.1")
    names = ("cuStreamIsCapturing", "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel")
    return native.Functions(*(ctypes.cast(library[name], ctypes.c_void_p).value for name in names))


def _batch_copy() -> BatchCopy | None:
    """The batch copy in the signature that this driver has; None where it has none."""
    library = ctypes.CDLL("libcuda.so.1")
    for version, positions in ((13000, 8), (12080, 9)):
        address, status = ctypes.c_void_p(), ctypes.c_int()
        arguments = (b"cuMemcpyBatchAsync", ctypes.byref(address), version, ctypes.c_uint64(0))
        if library.cuGetProcAddress_v2(*arguments, ctypes.byref(status)) == 0 and address.value:
            pointer, size = ctypes.c_void_p, ctypes.c_size_t
            kinds = [pointer, pointer, pointer, size, pointer, pointer, size]
            kinds += [pointer] * (positions - 7)
            return BatchCopy(ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(address.value), positions)
    return None


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
