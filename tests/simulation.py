"""Small pools on the simulated driver, and a model of what every row of them must hold.

A row (one token of one layer) is stamped with a number; its bytes follow from the stamp, the component
and the layer. The model says which stamp each row holds on the device and on the host, None: anything.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from poolwright.generated.groups.kimi_linear import KimiLinearHostPoolGroup
from poolwright.generated.groups.swa_full import SwaFullHostPoolGroup
from poolwright.generated.groups.target_draft import TargetDraftHostPoolGroup
from poolwright.generated.pools.kda_state.pool import KdaStatePoolHost
from poolwright.generated.pools.mha.pool import MHATokenToKVPoolHost
from poolwright.generated.pools.mla.pool import MLATokenToKVPoolHost
from poolwright.runtime import pool as pools
from poolwright.runtime.driver import Kernels, Memory
from poolwright.runtime.driver.simulated import SimulatedDriver, SimulatedStream, runs_of
from poolwright.runtime.group import HostPoolGroup
from poolwright.runtime.parts import slot_align, slots_of
from poolwright.runtime.program import GroupProgram, SizedProgram
from poolwright.runtime.testing import use_driver
from poolwright.runtime.tools.samples import takes_page_size

HOST_PAGES, DEVICE_PAGES = 5, 8


class DeviceIds(torch.Tensor):
    """Ids in the memory of the simulated device: the CPU must not look at them.

    What torch makes of them is queued in the current stream, and lies in memory of the device, too.
    """

    driver: Driver

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        inputs = [each for each in flat if isinstance(each, DeviceIds)]
        call = functools.partial(func, *args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.tolist:
                inputs[0].driver.cpu("tolist", *runs_of(inputs[0])[0])
            found = call()  # of bytes that may not be there yet: only its shape counts
            if not isinstance(found, torch.Tensor):
                return found
            driver = inputs[0].driver
            if found.untyped_storage().data_ptr() in {e.untyped_storage().data_ptr() for e in inputs}:
                if func.__name__.startswith("__i"):
                    driver.queue(call, inputs, found)
                return device_ids(found, driver)
            made = driver.tensor(found.shape, found.dtype)

        def run() -> None:
            made.copy_(call())

        driver.queue(run, inputs, made)
        return device_ids(made, driver)


def device_ids(memory: torch.Tensor, driver: Driver) -> DeviceIds:
    """Memory of the device, seen as ids."""
    made: DeviceIds = torch.Tensor._make_subclass(DeviceIds, memory)
    made.driver = driver
    return made


_libraries: dict[object, ctypes.CDLL] = {}


class Driver(SimulatedDriver):
    """The simulated driver; it looks for a compiled library once in a process.

    `given_back`: memory that work of the caller's stream is still in; allocated first, for that stream.
    """

    def __init__(self, choose: Callable[[int], int]) -> None:
        super().__init__(choose)
        self.given_back: list[Memory] = []

    def allocate(self, nbytes: int) -> Memory:
        found = super().allocate(nbytes)
        if not self.given_back or self.current_stream() is not self.caller:
            return found
        used = self.given_back.pop()
        return Memory(used.address, nbytes, used.tensor[:nbytes])

    def give_back(self, count: int) -> None:
        """Have so many pieces of memory that the caller's stream still writes to."""
        self.given_back = [self.allocate(1 << 14) for _ in range(count)]
        places = [(each.address, each.nbytes) for each in self.given_back]
        self.compute(self.caller, "what had the memory before", lambda: None, writes=places)

    def kernels(
        self, source: SizedProgram | GroupProgram, align: int, build: Callable[[], ctypes.CDLL]
    ) -> Kernels:
        unit = source.unit("lanes", align)
        key = (unit.main, unit.defines)

        def find() -> ctypes.CDLL:
            if key not in _libraries:
                _libraries[key] = build()
            return _libraries[key]

        return super().kernels(source, align, find)

    def queue(self, run: Callable[[], object], inputs: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """An operation of torch's in the current stream."""

        def apart() -> None:
            with torch._C.DisableTorchFunctionSubclass():
                run()

        reads = [place for each in inputs for place in runs_of(each)]
        self.compute(self.current_stream(), "torch", apart, reads=reads, writes=runs_of(into))


@dataclass(frozen=True)
class Config:
    """A pool to build. `widths`: bytes of a row of each component."""

    kind: type[pools.HostPool]
    sizes: tuple[tuple[str, Any], ...]
    widths: tuple[tuple[str, int], ...]
    layout: str
    page_size: int
    layers: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.bfloat16)
    stacked: bool = False  # a component's layers are one tensor

    @property
    def label(self) -> str:
        return f"{self.kind.spec.name}-{self.layout}-{self.page_size}"

    @property
    def page_bytes(self) -> int:
        return self.page_size * len(self.layers) * sum(width for _, width in self.widths)

    def staging(self, slot_pages: int) -> int:
        """Bytes of staging memory whose slots hold so many pages; 0: a part of one, a layer or more of it."""
        in_place = self.kind.spec.updates == "in_place"
        part = self.page_bytes // len(self.layers)
        if not slot_pages and not in_place:
            slot_pages = 1  # pages of these are not cut
        return slots_of(in_place) * slot_align(slot_pages * self.page_bytes or part)


def _mla(layout: str, page_size: int, layers: tuple[int, ...]) -> Config:
    sizes = (("kv_lora_rank", 3), ("qk_rope_head_dim", 2), ("dtype", torch.bfloat16))
    return Config(MLATokenToKVPoolHost, sizes, (("kv", 10),), layout, page_size, layers)


def _mha(layout: str, page_size: int, layers: tuple[int, ...]) -> Config:
    sizes = (("heads", 2), ("head_dim", 3), ("v_head_dim", 5), ("dtype", torch.bfloat16))
    return Config(MHATokenToKVPoolHost, sizes, (("k", 12), ("v", 20)), layout, page_size, layers)


def _kda(layout: str, layers: tuple[int, ...]) -> Config:
    """A recurrent state, which changes in place: pages are slots, slot 0 is reserved."""
    sizes = (("heads", 1), ("head_dim", 2), ("kernel", 2), ("ngram", 0))
    sizes += (("ssm_dtype", torch.float32), ("conv_dtype", torch.bfloat16))
    widths = (("temporal", 16), ("conv", 12))
    return Config(KdaStatePoolHost, sizes, widths, layout, 1, layers, (torch.float32, torch.bfloat16), True)


CONFIGS = (
    _mla("page_first", 2, (0, 1, 2)),
    _mla("layer_first", 3, (1, 4)),
    _mla("page_record", 4, (0, 2)),
    _mha("page_first", 3, (0, 1)),
    _mha("layer_first", 2, (0, 3)),
    _mha("page_record", 2, (5, 7, 8)),
    _kda("page_first", (0, 2, 3)),
)


@dataclass(frozen=True)
class GroupConfig:
    """A group to build: its pools by name, their layer lists, which pools take the ids of another."""

    kind: type[HostPoolGroup]
    members: Mapping[str, Config]
    lists: Mapping[str, str]
    follows: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.kind.spec.name


GROUPS = (
    GroupConfig(
        KimiLinearHostPoolGroup,
        {"kv": _mla("page_first", 3, (1, 4)), "state": _kda("page_record", (0, 2, 3))},
        {"kv": "full_attention_layers", "state": "linear_attention_layers"},
    ),
    GroupConfig(
        SwaFullHostPoolGroup,
        {"full": _mha("layer_first", 2, (0, 2)), "swa": _mha("page_first", 2, (1, 3, 4))},
        {"full": "full_attention_layers", "swa": "sliding_attention_layers"},
    ),
    GroupConfig(
        TargetDraftHostPoolGroup,
        {"target": _mha("page_first", 2, (0, 1, 2)), "draft": _mha("page_record", 2, (1, 7))},
        {"target": "target_layers", "draft": "draft_layers"},
        {"draft": "target"},
    ),
)


@functools.cache
def row_bytes(stamp: int, component: int, layer: int, width: int) -> bytes:
    """What a row with this stamp holds."""
    head = stamp.to_bytes(2, "little")
    return head + bytes(
        (stamp * (i + 3) + 89 * component + 53 * layer + i * i) & 255 for i in range(width - 2)
    )


@dataclass
class World:
    """A pool, its device tensors, and the model of both sides: ``[layer][token] -> stamp``."""

    config: Config
    driver: Driver
    pool: Any
    tensors: dict[str, list[torch.Tensor]]
    device: list[list[int | None]]
    host: list[list[int | None]]
    stamp: int = 0
    seen: list[str] = field(default_factory=list)

    @property
    def page_size(self) -> int:
        return self.config.page_size

    def tokens(self, pages: Iterable[int]) -> list[int]:
        return [page * self.page_size + n for page in pages for n in range(self.page_size)]

    # ---- bytes

    def rows(self, tokens: Sequence[int], layers: Sequence[int] | None = None) -> list[tuple[int, int]]:
        """(address, bytes) of the device rows of these tokens, at these positions of layers."""
        return [(at, width) for at, width, _, _, _ in self._rows(tokens, layers)]

    def _rows(
        self, tokens: Sequence[int], layers: Sequence[int] | None
    ) -> Iterable[tuple[int, int, int, int, int]]:
        chosen = range(len(self.config.layers)) if layers is None else layers
        for at, (name, width) in enumerate(self.config.widths):
            for layer in chosen:
                base = self.tensors[name][layer].data_ptr()
                for token in tokens:
                    yield base + token * width, width, at, layer, token

    def host_rows(self, page: int) -> Iterable[tuple[int, int, int, int, int]]:
        """(address, bytes, component, layer, token) of every row of a host page."""
        layout = self.pool.host_layout(self.pool.page_num)
        base = self.pool.kv_buffer.data_ptr()
        for at, (name, width) in enumerate(self.config.widths):
            part = layout.part(name)
            step = {axis: nbytes for axis, _, nbytes in part.axes}
            for layer in range(len(self.config.layers)):
                for n in range(self.page_size):
                    where = base + part.base + page * step["page"] + layer * step["layer"]
                    where += n * step.get("token", 0)
                    yield where, width, at, layer, page * self.page_size + n

    # ---- what the caller's own work does

    def produce(self, stream: SimulatedStream, tokens: Sequence[int]) -> int:
        """Queue work that writes new rows; returns their stamp."""
        self.stamp += 1
        stamp, places = self.stamp, list(self._rows(tokens, None))

        def run() -> None:
            for at, width, component, layer, _ in places:
                ctypes.memmove(at, row_bytes(stamp, component, layer, width), width)

        run.held = self.tensors  # type: ignore[attr-defined]
        self.driver.compute(stream, f"producer of {stamp}", run, writes=self.rows(tokens))
        for layer in range(len(self.device)):
            for token in tokens:
                self.device[layer][token] = stamp
        return stamp

    def read(
        self, stream: SimulatedStream, tokens: Sequence[int], layers: Sequence[int] | None = None
    ) -> None:
        """Queue work that reads rows and compares them with what the model says now."""
        wanted = [
            (at, row_bytes(stamp, component, layer, width), f"layer {layer}, token {token}")
            for at, width, component, layer, token in self._rows(tokens, layers)
            if (stamp := self.device[layer][token]) is not None
        ]

        def run() -> None:
            self.seen += [
                f"device, {where}: expected {rows[:2].hex()}, got {ctypes.string_at(at, len(rows))[:2].hex()}"
                for at, rows, where in wanted
                if ctypes.string_at(at, len(rows)) != rows
            ]

        run.held = self.tensors  # type: ignore[attr-defined]
        self.driver.compute(stream, "reader", run, reads=[(at, len(rows)) for at, rows, _ in wanted])

    def device_ids(self, ids: Sequence[int], stream: SimulatedStream) -> DeviceIds:
        """Ids in device memory that work in `stream` will have written."""
        memory = self.driver.tensor((len(ids),), torch.int64)
        wanted, place = torch.tensor(ids), runs_of(memory)

        def run() -> None:
            memory.copy_(wanted)

        self.driver.compute(stream, "ids", run, writes=place)
        return device_ids(memory, self.driver)

    # ---- comparing

    def compare_host(self, pages: Iterable[int]) -> None:
        """The CPU reads host pages and compares them with the model."""
        for page in pages:
            for at, width, component, layer, token in self.host_rows(page):
                stamp = self.host[layer][token]
                if stamp is None:
                    continue
                self.driver.cpu(f"comparison of host page {page}", at, width)
                if ctypes.string_at(at, width) != row_bytes(stamp, component, layer, width):
                    self.seen.append(f"host page {page}, layer {layer}, token {token} is not {stamp}")

    def settle(self) -> None:
        """Wait for the caller's streams, then compare every device row."""
        self.driver.run()
        for stream in self.driver.callers:
            self.driver.synchronize(self.driver.record(stream))
        rows = range(len(self.device[0]))
        self.compare_device({(layer, token) for layer in range(len(self.device)) for token in rows})

    def compare_device(self, places: set[tuple[int, int]]) -> None:
        """The CPU reads rows (layer, token) of the device and compares them with the model."""
        for at, width, component, layer, token in self._rows(range(len(self.device[0])), None):
            stamp = self.device[layer][token]
            if stamp is not None and (layer, token) in places:
                self.driver.cpu("comparison of device rows", at, width)
                if ctypes.string_at(at, width) != row_bytes(stamp, component, layer, width):
                    self.seen.append(f"device, layer {layer}, token {token} is not {stamp}")

    def check(self) -> None:
        assert not self.seen, "; ".join(self.seen[:5])

    # ---- transfers, in the model

    def stored(self, host: Sequence[int], device: Sequence[int]) -> None:
        """A write-back of these tokens was submitted."""
        for layer in range(len(self.host)):
            moved = [self.device[layer][token] for token in device]
            for token, stamp in zip(host, moved, strict=True):
                self.host[layer][token] = stamp

    def loaded(self, host: Sequence[int], device: Sequence[int], layers: Sequence[int]) -> None:
        """A load of these tokens and positions of layers was submitted."""
        for layer in layers:
            for token, source in zip(device, host, strict=True):
                self.device[layer][token] = self.host[layer][source]

    def bind(self, drain: bool = True) -> None:
        """New device tensors, written by the CPU; with `drain` after everything in flight."""
        given = self.new_tensors()
        (self.pool.rebind if drain else self.pool.bind)(given)

    def new_tensors(self) -> dict[str, Any]:
        """New device tensors, written by the CPU, as a bind takes them."""
        rows, given = DEVICE_PAGES * self.page_size, {}
        self.tensors = {}  # what runs still holds the old ones
        for (name, width), dtype in zip(self.config.widths, self.config.dtypes, strict=False):
            shape, layers = (rows, width // dtype.itemsize), len(self.config.layers)
            if self.config.stacked:
                given[name] = self.driver.tensor((layers, *shape), dtype)
                self.tensors[name] = list(given[name])
            else:
                given[name] = [self.driver.tensor(shape, dtype) for _ in range(layers)]
                self.tensors[name] = list(given[name])
        self.stamp += 1
        for at, width, component, layer, _ in self._rows(range(rows), None):
            self.driver.cpu("first contents", at, width, writes=True)
            ctypes.memmove(at, row_bytes(self.stamp, component, layer, width), width)
        self.device = [[self.stamp] * rows for _ in self.config.layers]
        return given


class Cutting:
    """Costs by which every staged transfer is best cut into so many chunks."""

    def __init__(self, count: int) -> None:
        self.count = count

    def of(self, direction: str) -> Cutting:
        return self

    def chunks(self, nbytes: int) -> int:
        return self.count

    equal_chunks = chunks


def world(config: Config, choose: Callable[[int], int], slot_pages: int = 1, chunks: int = 1) -> World:
    """A new pool of `config` on a new driver, bound. `slot_pages`: pages of a staging slot, or 0; `chunks`:
    into how many a staged transfer is cut."""
    driver = Driver(choose)
    sizes: dict[str, Any] = {**dict(config.sizes), "layers": config.layers}
    sizes |= {"page_size": config.page_size} if takes_page_size(config.kind) else {}
    sizes |= {"layout": config.layout, "capacity_pages": HOST_PAGES}
    with use_driver(driver):
        pool = config.kind(**sizes, staging_bytes=config.staging(slot_pages))
    pool._transfers._staging._costs = Cutting(chunks)
    made = _world(config, driver, pool)
    made.bind()
    return made


def _world(config: Config, driver: Driver, pool: pools.HostPool) -> World:
    rows = HOST_PAGES * config.page_size
    return World(config, driver, pool, {}, [], [[None] * rows for _ in config.layers])


@dataclass
class GroupWorld:
    """A group, and a world for each of its pools."""

    config: GroupConfig
    driver: Driver
    group: Any
    worlds: dict[str, World]

    def bind(self) -> None:
        self.group.rebind({name: made.new_tensors() for name, made in self.worlds.items()})


def group_world(
    config: GroupConfig, choose: Callable[[int], int], slot_pages: int = 1, chunks: int = 1
) -> GroupWorld:
    """A new group of `config` on a new driver, bound; otherwise as `world`."""
    driver = Driver(choose)
    given: dict[str, Any] = {config.lists[name]: one.layers for name, one in config.members.items()}
    given |= {name: {**dict(one.sizes), "layout": one.layout} for name, one in config.members.items()}
    size = max(one.page_size for one in config.members.values())
    own = [name for name in config.members if name not in config.follows]
    staging = sum(one.staging(slot_pages) for one in config.members.values())
    with use_driver(driver):
        group = config.kind(
            **given,
            page_size=size,
            capacity_pages=dict.fromkeys(own, HOST_PAGES),
            staging_bytes=staging,
        )
    group._shared.transfers._staging._costs = Cutting(chunks)
    worlds = {name: _world(one, driver, group.pools[name]) for name, one in config.members.items()}
    made = GroupWorld(config, driver, group, worlds)
    made.bind()
    return made


def first(n: int) -> int:
    """Always the first way to go on."""
    return 0


def last(n: int) -> int:
    """Always the last way to go on."""
    return n - 1
