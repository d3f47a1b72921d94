"""A device for tests: streams are queues, and operations run in any order that the declared waits permit.

In: the calls of the driver protocol, and `choose(n)`, which picks one of n ways to go on. Nothing runs
when it is submitted; `done` and `synchronize` run the simulation. Every byte that an operation touches is
checked against a happens-before order of vector clocks, so a missing wait is found whatever order was
chosen. Calls and operations can be made to fail.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from poolwright.runtime.driver import Launch, Memory
from poolwright.runtime.driver.relay import relay
from poolwright.runtime.driver.simulated_kernels import SimulatedKernels, merged
from poolwright.runtime.driver.simulated_memory import Arena, Block, Clock, Shadow, SimulationError, join
from poolwright.runtime.errors import NotAdmitted, PoolError
from poolwright.runtime.native import Rows
from poolwright.runtime.program import GroupProgram, SizedProgram

CPU = 0
"""The actor that the caller's thread is in vector clocks; all threads are one."""

CALLS = (
    *("allocate", "register", "stream", "record", "wait", "done", "synchronize"),
    *("copy", "upload", "fill", "wait_value", "launch"),
)
"""Calls of the protocol that can be made to fail."""

Choose = Callable[[int], int]
Step = Callable[["Touch"], None]


@dataclass(eq=False)
class SimulatedEvent:
    """Happens when its stream gets there. `failed`: why what it stands for did not come to its end."""

    name: str
    happened: bool = False
    clock: Clock = field(default_factory=list)
    failed: str = ""
    moment: int = 0  # steps of all streams that had run


@dataclass(eq=False)
class Operation:
    """Steps of one operation. `control`: it moves no bytes, `ready`: whether it may start."""

    name: str
    known: Clock  # what the CPU knew when it submitted this
    steps: deque[Step]
    control: bool = False
    ready: Callable[[], bool] = lambda: True
    event: SimulatedEvent | None = None  # recorded by this operation
    counters: Sequence[int] = ()  # numbers that never come when this fails
    started: bool = False


@dataclass(eq=False)
class SimulatedStream:
    """A queue of operations, and what has happened before its next one."""

    index: int
    name: str
    queue: deque[Operation] = field(default_factory=deque)
    clock: Clock = field(default_factory=list)
    failed: str = ""
    simulated: ClassVar[bool] = True

    def __repr__(self) -> str:
        return self.name


class Touch:
    """One step of an operation: what it reads and writes is checked, then done."""

    def __init__(self, driver: SimulatedDriver, stream: SimulatedStream, name: str) -> None:
        self._driver, self._shadow, self.clock = driver, driver.shadow, stream.clock
        self.name = f"{name} in {stream.name}"
        self._moment = self._shadow.moment(stream.index, stream.clock[stream.index], self.name)

    def read(self, address: int, nbytes: int) -> None:
        self._shadow.read(self._moment, self.clock, address, nbytes)

    def write(self, address: int, nbytes: int) -> None:
        self._shadow.write(self._moment, self.clock, address, nbytes)

    def numbers(self, address: int, count: int, width: int = 4) -> list[int]:
        """Read so many unsigned numbers of `width` bytes."""
        self.read(address, count * width)
        kind = ctypes.c_uint32 if width == 4 else ctypes.c_uint64
        return list((kind * count).from_address(address))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy bytes; those that mean nothing (padding) go on meaning nothing."""
        written = self._shadow.written(source, nbytes, self.name)
        self._shadow.read(self._moment, self.clock, source, nbytes, written=False)
        self._shadow.write(self._moment, self.clock, to, nbytes, written)
        ctypes.memmove(to, source, nbytes)

    def store(self, address: int, values: bytes) -> None:
        self.write(address, len(values))
        ctypes.memmove(address, values, len(values))

    def arrive(self, address: int, count: int) -> None:
        """Advance a counter and let those who wait for it know what this step knows."""
        self.read(address, 4)
        number = ctypes.c_uint32.from_address(address)
        number.value += count
        self._driver.released.setdefault(address, []).append((number.value, list(self.clock)))

    def see(self, address: int, value: int) -> None:
        """Know what those knew who advanced the counter up to `value`."""
        self.read(address, 4)
        for reached, clock in self._driver.released.get(address, []):
            if not value - reached & 0x80000000:  # counters go round
                join(self.clock, clock)


class SimulatedDriver:
    """A device that takes every liberty. `choose(n)`: a number below n. Raises SimulationError for a race,
    a use of memory that is freed, unwritten or nobody's, a deadlock, a call outside `guard` from another
    thread; PoolError for what was made to fail."""

    name = "simulated"

    def __init__(self, choose: Choose) -> None:
        self.shadow = Shadow()
        self.released: dict[int, list[tuple[int, Clock]]] = {}
        self._choose, self._arena = choose, Arena()
        self._lock = threading.RLock()
        self._host: Clock = [0]
        self._streams: list[SimulatedStream] = []
        self._failures: dict[str, list[tuple[int, bool]]] = {}
        self._fail_step = -1
        self._over = False
        self._lost_counters: dict[int, str] = {}
        self._number = self._steps = 0
        self._thread = threading.local()
        self._thread.current = True
        self.capturing: set[SimulatedStream] = set()
        self.callers: list[SimulatedStream] = []
        self.caller = self.new_stream("caller")

    # ---- what tests ask for

    def fail(self, call: str, skip: int = 0, forever: bool = False) -> None:
        """Make a call of the protocol (one of `CALLS`, or ``any``) fail after `skip` that still work;
        ``memory``: `allocate`, as torch fails where no memory is left."""
        self._failures.setdefault(call, []).append((skip, forever))

    def fail_step(self, skip: int = 0) -> None:
        """Make one step of an operation fail when it runs, after `skip` that still work."""
        self._fail_step = skip

    def heal(self) -> None:
        """Forget failures that have not come yet."""
        self._failures.clear()
        self._fail_step = -1

    def new_stream(self, name: str) -> SimulatedStream:
        """A stream of the caller's."""
        self.callers.append(self._make(name))
        return self.callers[-1]

    def _make(self, name: str) -> SimulatedStream:
        index = len(self._streams) + 1
        stream = SimulatedStream(index, name, clock=[0] * (index + 1))
        self._streams.append(stream)
        return stream

    @contextmanager
    def use_stream(self, stream: SimulatedStream) -> Iterator[None]:
        """Makes `stream` this thread's current one."""
        before = self.current_stream()
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in device memory that nobody has written."""
        count = torch.Size(shape).numel()
        with self._lock:
            memory = self._allocate(count * dtype.itemsize)
        whole: torch.Tensor = memory.tensor
        return whole.view(dtype).reshape(tuple(shape))

    def compute(
        self,
        stream: SimulatedStream,
        name: str,
        run: Callable[[], object],
        reads: Sequence[tuple[int, int]] = (),
        writes: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Queue work of the caller's: `run` reads and writes these runs (address, bytes), nothing else."""

        def step(touch: Touch) -> None:
            for address, nbytes in reads:
                touch.read(address, nbytes)
            for address, nbytes in writes:
                touch.write(address, nbytes)
            run()

        with self._lock:
            self._submit(stream, name, [step])

    def cpu(self, what: str, address: int, nbytes: int, writes: bool = False) -> None:
        """The CPU reads (or writes) these bytes now. Raises SimulationError if something may still run."""
        with self._lock:
            self._host[CPU] += 1
            moment = self.shadow.moment(CPU, self._host[CPU], f"{what} on the CPU")
            access = self.shadow.write if writes else self.shadow.read
            access(moment, self._host, address, nbytes)

    def run(self, steps: int | None = None) -> None:
        """Run so many steps, or everything that was submitted. Raises SimulationError for a deadlock."""
        with self._lock:
            while steps is None or steps > 0:
                if not self._step():
                    if steps is None and any(stream.queue for stream in self._streams):
                        raise self._deadlock("everything to run")
                    return
                steps = None if steps is None else steps - 1

    def kernels(
        self, source: SizedProgram | GroupProgram, align: int, build: Callable[[], ctypes.CDLL]
    ) -> SimulatedKernels:
        return SimulatedKernels(self, source.programs, build)

    # ---- the protocol: calls that a driver guards itself are taken from any thread

    @contextmanager
    def guard(self) -> Iterator[None]:
        before = getattr(self._thread, "current", False)
        self._thread.current = True
        try:
            yield
        finally:
            self._thread.current = before

    def admit(self, stream: SimulatedStream, what: str) -> None:
        if stream in self.capturing:
            raise NotAdmitted(f"{what} cannot be captured into a graph; submit it before the replay")

    def enter(
        self, stream: SimulatedStream, other: SimulatedStream, before: SimulatedEvent | None, what: str
    ) -> None:
        self.admit(other, what)
        self.follow(stream, other)
        if before is not None:
            self.wait(stream, before)

    def allocate(self, nbytes: int) -> Memory:
        with self._call("allocate", guarded=False):
            if "memory" in self._failures and self._due("memory"):
                raise torch.OutOfMemoryError("no memory is left: allocate was made to fail")
            return self._allocate(nbytes)

    def _allocate(self, nbytes: int) -> Memory:
        bytes_ = self._arena.take(max(nbytes, 1))
        address = ctypes.addressof(bytes_)
        self._number += 1
        block = Block(address, max(nbytes, 1), "device", f"device memory {self._number} ({nbytes} bytes)")
        self.shadow.add(block)
        weakref.finalize(bytes_, _freed, block).atexit = False
        return Memory(address, nbytes, torch.frombuffer(bytes_, dtype=torch.uint8)[:nbytes])

    def owning(self, stream: SimulatedStream, other: SimulatedStream) -> AbstractContextManager[object]:
        return nullcontext() if other is self.current_stream() else self.use_stream(stream)

    def register(self, address: int, nbytes: int) -> int:
        with self._call("register", guarded=False):
            self.shadow.add(Block(address, nbytes, "host", f"host memory ({nbytes} bytes)"))
            return address

    def unregister(self, address: int) -> None:
        with self._lock:
            self.shadow.find(address, 1, "unregister")[0].gone = "unregistered"

    def numa_node(self) -> int | None:
        return None

    def stream(self) -> SimulatedStream:
        with self._call("stream", guarded=False):
            return self._make(f"stream {len(self._streams)}")

    def torch_stream(self, stream: SimulatedStream) -> AbstractContextManager[object]:
        raise PoolError("torch's own operations cannot be queued on the simulator; take another path")

    def call(self, stream: SimulatedStream, work: Callable[[], None]) -> None:
        def step(touch: Touch) -> None:
            with torch._C.DisableTorchFunctionSubclass():  # tensors that tests watch are plain memory now
                work()

        self.enqueue("launch", "torch", stream, [step])

    def current_stream(self) -> SimulatedStream:
        return getattr(self._thread, "stream", self.caller)

    def launch(self, launch: Launch, stream: SimulatedStream, grid: int) -> SimulatedEvent:
        launch(stream, grid)
        return self.record(stream)

    def launch_behind(
        self,
        launch: Launch,
        stream: SimulatedStream,
        grid: int,
        other: SimulatedStream,
        before: SimulatedEvent | None,
        what: str,
    ) -> SimulatedEvent:
        self.enter(stream, other, before, what)
        return self.launch(launch, stream, grid)

    def relay(
        self,
        launch: Launch,
        kernels: SimulatedStream,
        grid: int,
        copies: SimulatedStream,
        rows: Rows,
        inward: bool,
        free: SimulatedEvent | None,
        told: bool,
    ) -> SimulatedEvent | None:
        return relay(self, launch, kernels, grid, copies, rows, inward, free, told)

    def record(self, stream: SimulatedStream, timed: bool = False) -> SimulatedEvent:
        with self._call("record"):
            self._number += 1
            event = SimulatedEvent(f"event {self._number} of {stream}")

            def step(touch: Touch) -> None:
                event.clock, event.happened, event.moment = list(touch.clock), True, self._steps

            self._submit(stream, "record", [step], control=True, event=event)
            return event

    def elapsed(self, begin: SimulatedEvent, end: SimulatedEvent) -> float:
        """Steps between two events stand for seconds."""
        return float(end.moment - begin.moment)

    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        with self._call("wait", guarded=False):

            def step(touch: Touch) -> None:
                join(touch.clock, event.clock)
                stream.failed = stream.failed or event.failed

            self._submit(stream, f"wait for {event.name}", [step], control=True, ready=lambda: event.happened)

    def follow(self, stream: SimulatedStream, other: SimulatedStream) -> None:
        self.wait(stream, self.record(other))

    def done(self, event: SimulatedEvent) -> bool:
        with self._call("done", guarded=False):
            for _ in range(self._choose(4)):
                self._step()
            self._settle()
            if event.happened:
                self._learn(event)
            return event.happened

    def synchronize(self, event: SimulatedEvent) -> None:
        with self._call("synchronize", guarded=False):
            self._settle()
            while not (event.happened or self._over):
                if not self._step():
                    raise self._deadlock(event.name)
            self._learn(event)

    def copy(
        self,
        to: Sequence[int],
        source: Sequence[int],
        sizes: Sequence[int],
        stream: SimulatedStream,
        inward: bool,
    ) -> None:
        """Queue a batch: runs are cut and shuffled, and go in up to three steps."""
        with self._call("copy"):
            for addresses, kind in (
                (to, "device" if inward else "host"),
                (source, "host" if inward else "device"),
            ):
                for address, nbytes in zip(addresses, sizes, strict=True):
                    found = self.shadow.find(address, nbytes, "copy")[0]
                    if found.kind != kind:
                        raise SimulationError(f"copy: expected {kind} memory, got {found.name}")
            runs = list(zip(to, source, sizes, strict=True))
            self._submit(stream, "copy in" if inward else "copy out", self._pieces(runs))

    def upload(self, address: int, values: array[int], stream: SimulatedStream) -> None:
        taken = values.tobytes()
        self.enqueue("upload", "upload", stream, [lambda touch: touch.store(address, taken)])

    def fill(self, address: int, value: int, count: int, stream: SimulatedStream) -> None:
        taken = array("I", [value] * count).tobytes()

        def step(touch: Touch) -> None:
            touch.store(address, taken)
            for at in range(address, address + 4 * count, 4):
                self.released.pop(at, None)

        self.enqueue("fill", "fill", stream, [step])

    def wait_value(self, stream: SimulatedStream, address: int, value: int) -> None:
        def ready() -> bool:
            self.shadow.find(address, 4, f"wait for a value in {stream}")
            ahead = ctypes.c_uint32.from_address(address).value - value
            return not ahead & 0x80000000 or address in self._lost_counters  # as counters that go round

        def step(touch: Touch) -> None:
            stream.failed = stream.failed or self._lost_counters.get(address, "")
            if not stream.failed:
                touch.see(address, value)

        with self._call("wait_value", guarded=False):
            self._submit(stream, f"wait for {value} at {address:#x}", [step], control=True, ready=ready)

    def enqueue(
        self, call: str, name: str, stream: SimulatedStream, steps: list[Step], counters: Sequence[int] = ()
    ) -> None:
        """Queue steps that move bytes, one after the other."""
        with self._call(call):
            self._submit(stream, name, steps, counters=counters)

    # ---- submission

    @contextmanager
    def _call(self, call: str, guarded: bool = True) -> Iterator[None]:
        with self._lock:
            if guarded and not getattr(self._thread, "current", False):
                raise SimulationError(f"{call} from a thread whose current device is another one, unguarded")
            if self._due(call):
                raise PoolError(f"{call} was made to fail")
            yield

    def _due(self, call: str) -> bool:
        for name in (call, "any"):
            pending = self._failures.get(name)
            if pending:
                skip, forever = pending[0]
                if skip > 0:
                    pending[0] = (skip - 1, forever)
                    continue
                if not forever:
                    pending.pop(0)
                return True
        return False

    def _submit(
        self,
        stream: SimulatedStream,
        name: str,
        steps: Sequence[Step],
        control: bool = False,
        ready: Callable[[], bool] = lambda: True,
        event: SimulatedEvent | None = None,
        counters: Sequence[int] = (),
    ) -> None:
        self._number += 1
        known, label = list(self._host), f"{name} (#{self._number})"
        stream.queue.append(Operation(label, known, deque(steps), control, ready, event, counters))

    def _pieces(self, runs: list[tuple[int, int, int]]) -> list[Step]:
        cut: list[tuple[int, int, int]] = []
        for to, source, nbytes in runs:
            at = 1 + self._choose(nbytes - 1) if nbytes > 1 and self._choose(3) == 0 else nbytes
            cut.append((to, source, at))
            if at < nbytes:
                cut.append((to + at, source + at, nbytes - at))
        shuffled = [cut.pop(self._choose(len(cut))) for _ in range(len(cut))]
        count = 1 + self._choose(min(3, len(shuffled))) if shuffled else 0
        return [_copies(shuffled[n::count]) for n in range(count)]

    # ---- execution

    def _step(self) -> bool:
        """Run one step of one stream; False when nothing can run."""
        self._settle()
        able = [s for s in self._streams if s.queue and not s.queue[0].control]
        if not able:
            return False
        stream = able[self._choose(len(able)) if len(able) > 1 else 0]
        self._advance(stream)
        self._settle()
        return True

    def _settle(self) -> None:
        """Records and waits that can happen do: nobody can tell when they did."""
        moved = True
        while moved:
            moved = False
            for stream in self._streams:
                queue = stream.queue
                while queue and queue[0].control and (stream.failed or queue[0].ready()):
                    self._advance(stream)
                    moved = True

    def _advance(self, stream: SimulatedStream) -> None:
        operation = stream.queue[0]
        if not operation.started:
            operation.started = True
            join(stream.clock, operation.known)
        stream.clock[stream.index] += 1
        self._steps += not operation.control
        if not operation.control:
            self._maybe_fail(stream, operation)
        if stream.failed:
            self._lose(stream, operation)
        elif operation.steps:
            self._play(operation.steps.popleft(), Touch(self, stream, operation.name))
        if not operation.steps:
            stream.queue.popleft()

    def _play(self, step: Step, touch: Touch) -> None:
        """Run a step. What it finds is raised once; nothing runs after that, and nobody waits."""
        try:
            step(touch)
        except SimulationError:
            self._over = True
            for stream in self._streams:
                stream.queue.clear()
            raise

    def _maybe_fail(self, stream: SimulatedStream, operation: Operation) -> None:
        if self._fail_step >= 0 and not stream.failed:
            self._fail_step -= 1
            if self._fail_step < 0:
                stream.failed = f"{operation.name} in {stream.name} was made to fail"

    def _lose(self, stream: SimulatedStream, operation: Operation) -> None:
        """An operation behind a failed one does nothing; what it would have told others fails too."""
        operation.steps.clear()
        for address in operation.counters:
            self._lost_counters[address] = stream.failed
        if operation.event is not None:
            operation.event.failed, operation.event.happened = stream.failed, True
            operation.event.clock = list(stream.clock)

    def _learn(self, event: SimulatedEvent) -> None:
        join(self._host, event.clock)
        if event.failed:
            raise PoolError(event.failed)

    def _deadlock(self, what: str) -> SimulationError:
        heads = [f"{s}: {s.queue[0].name}" for s in self._streams if s.queue]
        return SimulationError(
            f"deadlock: waiting for {what}, but nothing can run; {'; '.join(heads) or 'no work'}"
        )


def _copies(pieces: list[tuple[int, int, int]]) -> Step:
    def step(touch: Touch) -> None:
        for to, source, nbytes in pieces:
            touch.copy(to, source, nbytes)

    return step


def _freed(block: Block) -> None:
    frame = sys._getframe(2) if sys._getframe(1) else None
    block.gone = f"freed at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else "freed"


def runs_of(tensor: torch.Tensor) -> Sequence[tuple[int, int]]:
    """Merged runs (address, bytes) of a tensor."""
    if tensor.is_contiguous():
        return ((tensor.data_ptr(), tensor.numel() * tensor.element_size()),)
    width = tensor.element_size()
    starts = [tensor.data_ptr()]
    for extent, step in zip(tensor.shape, tensor.stride(), strict=True):
        starts = [start + i * step * width for start in starts for i in range(extent)]
    return merged([(start, width) for start in starts])
