"""A CUDA device behind the driver door: the CUDA driver API, from Python.

Launches and events go through `cuda.bindings`; the batch copy goes through ctypes, which takes raw arrays
of addresses where the binding wants lists of objects (docs/benchmarks.md has both costs). Its symbol is
asked for by version, so that its signature is the one the driver has, whatever this was built with.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch

from poolwright.runtime.driver import Event, Memory, Stream
from poolwright.runtime.errors import BackendUnavailable, PoolError

BATCH_LIMIT = 4096
"""Descriptors of one batch call: very long ones have crashed drivers."""

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
    """An event that goes back to its driver's store when nobody holds it."""

    __slots__ = ("handle", "store")

    def __init__(self, handle: Any, store: list[Any]) -> None:
        self.handle, self.store = handle, store

    def __del__(self) -> None:
        self.store.append(self.handle)


class CudaKernels:
    """Functions of loaded cubins. A launch costs about 6 us with 1 KiB of parameters."""

    grid: ClassVar[Mapping[str, int]] = {"write_back": 4, "load": 8, "gather": 264, "scatter": 264}
    block = 512

    def __init__(self, cubins: Sequence[bytes]) -> None:
        from cuda.bindings import driver

        self._modules = [_check(driver.cuModuleLoadData(cubin), "load a cubin") for cubin in cubins]
        self._functions: dict[str, Any] = {}
        self._launch = driver.cuLaunchKernel
        for module in self._modules:
            count = _check(driver.cuModuleGetFunctionCount(module), "count kernels")
            for function in _check(driver.cuModuleEnumerateFunctions(count, module), "list kernels"):
                name = _check(driver.cuFuncGetName(function), "name of a kernel").decode()
                # A first launch must not load code while another kernel waits for its data.
                _check(driver.cuFuncLoad(function), f"load kernel {name}")
                self._functions[name] = function

    def launch(
        self, name: str, grid: int, block: int, params: Sequence[ctypes._CData], stream: Stream
    ) -> None:
        pointers = (ctypes.c_void_p * len(params))(*[ctypes.addressof(param) for param in params])
        function = self._functions[name]
        result = self._launch(function, grid, 1, 1, block, 1, 1, 0, stream, ctypes.addressof(pointers), 0)
        if int(result[0]) != 0:
            _check(result, f"launch {name}")


class CudaDriver:
    """One CUDA device. Streams are integers (`cudaStream_t`); torch's stream objects are taken too."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", int(index))
        with torch.cuda.device(self.device):
            torch.empty(1, device=self.device)  # makes the primary context
        self._api = driver
        handle = _check(driver.cuDeviceGet(index), "device")
        self._context = _check(driver.cuDevicePrimaryCtxRetain(handle), "primary context")
        self._events: list[Any] = []
        self._lock = threading.Lock()
        self._batch = _BatchCopy()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Make this device's context current: a caller's thread may have another device."""
        api = self._api
        current = _check(api.cuCtxGetCurrent(), "current context")
        if int(current) == int(self._context):
            yield
            return
        _check((*api.cuCtxPushCurrent(self._context), None), "push context")
        try:
            yield
        finally:
            api.cuCtxPopCurrent()

    def admit(self, stream: Stream, what: str) -> None:
        status = _check(self._api.cuStreamIsCapturing(_handle(stream)), "capture status")
        if int(status) != 0:
            raise PoolError(
                f"{what} cannot be captured into a CUDA graph; submit it before the replay, then wait_all()"
            )

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

    def stream(self) -> Stream:
        with self.guard():
            return int(_check(self._api.cuStreamCreate(1), "create a stream"))  # 1: non-blocking

    def torch_stream(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, self.device))

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream(self.device).cuda_stream

    def record(self, stream: Stream) -> Event:
        try:
            handle = self._events.pop()
        except IndexError:
            handle = _check(self._api.cuEventCreate(2), "create an event")  # 2: no timing
        event = CudaEvent(handle, self._events)
        result = self._api.cuEventRecord(handle, _handle(stream))
        if int(result[0]) != 0:
            _check((*result, None), "record an event")
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        result = self._api.cuStreamWaitEvent(_handle(stream), event.handle, 0)
        if int(result[0]) != 0:
            _check((*result, None), "wait for an event")

    def done(self, event: Event) -> bool:
        result = self._api.cuEventQuery(event.handle)
        if int(result[0]) == 600:  # CUDA_ERROR_NOT_READY
            return False
        _check((*result, None), "ask for an event")
        return True

    def synchronize(self, event: Event) -> None:
        _check((*self._api.cuEventSynchronize(event.handle), None), "wait for an event")

    def copy(
        self, to: Sequence[int], source: Sequence[int], sizes: Sequence[int], stream: Stream, inward: bool
    ) -> None:
        for start in range(0, len(to), BATCH_LIMIT):
            stop = start + BATCH_LIMIT
            part = (to[start:stop], source[start:stop], sizes[start:stop])
            if len(part[0]) > 2 and self._batch.function is not None:
                self._batch(*part, stream=_handle(stream))
                continue
            call = self._api.cuMemcpyHtoDAsync if inward else self._api.cuMemcpyDtoHAsync
            for target, origin, size in zip(*part, strict=True):
                _check((*call(target, origin, size, _handle(stream)), None), f"copy {size:,} bytes")

    def write(self, address: int, values: Sequence[int], stream: Stream) -> None:
        if len(set(values)) == 1:
            result = self._api.cuMemsetD32Async(address, values[0], len(values), _handle(stream))
            _check((*result, None), "fill device memory")
            return
        block = (ctypes.c_uint32 * len(values))(*values)
        size = ctypes.sizeof(block)
        # From pageable memory: the driver has read `block` when the call returns.
        result = self._api.cuMemcpyHtoDAsync(address, ctypes.addressof(block), size, _handle(stream))
        _check((*result, None), "write device memory")
        self.synchronize(self.record(stream))

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        result = self._api.cuStreamWaitValue32(_handle(stream), address, value, 0)  # 0: at least
        _check((*result, None), "wait for a value")


class _BatchCopy:
    """``cuMemcpyBatchAsync`` in the signature that this driver has; `function` None where it has none."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self.function: Any = None
        for version, positions in ((13000, 8), (12080, 9)):
            address, status = ctypes.c_void_p(), ctypes.c_int()
            arguments = (b"cuMemcpyBatchAsync", ctypes.byref(address), version, ctypes.c_uint64(0))
            if library.cuGetProcAddress_v2(*arguments, ctypes.byref(status)) == 0 and address.value:
                pointer, size = ctypes.c_void_p, ctypes.c_size_t
                kinds = [pointer, pointer, pointer, size, pointer, pointer, size]
                kinds += [pointer] * (positions - 7)
                self.function = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(address.value)
                self.positions = positions
                return

    def __call__(
        self, to: Sequence[int], source: Sequence[int], sizes: Sequence[int], stream: Stream
    ) -> None:
        count = len(to)
        rows = [(ctypes.c_uint64 * count)(*values) for values in (to, source, sizes)]
        attributes = (ctypes.c_char * _ATTRIBUTES)()
        ctypes.c_int.from_buffer(attributes, 0).value = _STREAM_ORDER
        first = (ctypes.c_size_t * 1)(0)
        failed = ctypes.c_size_t(0)
        head = [*(ctypes.addressof(row) for row in rows), count]
        head += [ctypes.addressof(attributes), ctypes.addressof(first), 1]
        tail = [ctypes.addressof(failed), stream] if self.positions == 9 else [stream]
        code = self.function(*head, *tail)
        if code != 0:
            raise PoolError(f"CUDA: batch of {count} copies: error {code}")


def _handle(stream: Stream) -> int:
    """The integer of a stream, whoever made it."""
    return int(getattr(stream, "cuda_stream", stream))


def cuda_driver(device: torch.device) -> CudaDriver:
    """The driver of a CUDA device. Raises BackendUnavailable naming what is missing."""
    if not torch.cuda.is_available():
        raise BackendUnavailable(f"device {device}", "torch sees no CUDA device", "nvidia-smi")
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError as error:
        raise BackendUnavailable(
            f"device {device}", f"cuda.bindings does not import ({error})", "pip install cuda-bindings"
        ) from error
    return CudaDriver(device)
