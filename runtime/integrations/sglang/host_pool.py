"""A generated pool under the names and signatures of SGLang 0.5.23's host pools."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import torch

from poolwright.runtime.group import HostPoolGroup
from poolwright.runtime.integrations.sglang.objects import PagePart, keyed_twice, page_parts
from poolwright.runtime.integrations.sglang.submissions import Submissions
from poolwright.runtime.pages import Index
from poolwright.runtime.pool import HostPool

Layers = Mapping[int, int]
"""The engine's layer number (what its layer mapper gives) to the pool's layer id."""

IO_BACKENDS = ("kernel", "direct")


def host_pool(
    pool: HostPool, *, layers: Layers | None = None, draft_layers: int = 0, device_pool: object = None
) -> HiCachePool:
    """One bound pool as a host pool of the engine.

    `layers`: where the engine's numbers are not positions in the pool's own list; numbers that are left out
    are layers that the pool does not have. `draft_layers`: how many at the end of the list are those of draft
    models. `device_pool`: the engine's own, for whoever asks. Raises ValueError.
    """
    (made,) = _made(pool, {pool.name: pool}, {pool.name: layers}, {pool.name: draft_layers}, device_pool)
    return made


def host_pools(
    group: HostPoolGroup,
    *,
    layers: Mapping[str, Layers] | None = None,
    draft_layers: Mapping[str, int] | None = None,
    device_pools: Mapping[str, object] | None = None,
) -> dict[str, HiCachePool]:
    """Every pool of a bound group as a host pool of the engine, by name; what it moves together is one
    submission. The arguments are those of `host_pool`, by pool. Raises ValueError."""
    for given in (layers, draft_layers, device_pools):
        for name in given or {}:
            if name not in group.pools:
                known = ", ".join(group.pools)
                raise ValueError(f"{group.spec.name}: no pool {name!r}; pools are {known}")
    made = _made(group, group.pools, layers or {}, draft_layers or {}, None)
    for pool in made:
        pool.device_pool = (device_pools or {}).get(pool.pool_label)
    return {pool.pool_label: pool for pool in made}


def _made(
    owner: HostPool | HostPoolGroup,
    pools: Mapping[str, HostPool],
    layers: Mapping[str, Layers | None],
    drafts: Mapping[str, int],
    device_pool: object,
) -> list[HiCachePool]:
    numbered = {name: _numbered(pool, layers.get(name)) for name, pool in pools.items()}
    submissions = Submissions(owner, {name: found.values() for name, found in numbered.items()})
    tag = _tag(pools)
    made = []
    for name, pool in pools.items():
        one = _kind(page_parts(pool))(owner, pool, submissions, tag, drafts.get(name, 0))
        one._layers, one._mapped = numbered[name], layers.get(name) is not None
        one.device_pool = device_pool
        made.append(one)
    return made


def _numbered(pool: HostPool, layers: Layers | None) -> dict[int, int]:
    """The engine's layer numbers to layer ids of the pool. Raises ValueError."""
    if layers is None:
        return dict(enumerate(pool.layers))
    unknown = sorted(set(layers.values()) - set(pool.layers))
    if unknown:
        raise ValueError(f"{pool.name}: layers: expected ids of {list(pool.layers)}, got {unknown}")
    return dict(layers)


def _tag(pools: Mapping[str, HostPool]) -> str:
    """Names the bytes of a page of all these pools: the engine puts that of the anchor into every key."""
    tags = [f"{name}={pool.format_tag}" for name, pool in pools.items()]
    return "poolwright-" + hashlib.sha256("|".join(tags).encode()).hexdigest()[:16]


def _kind(parts: tuple[PagePart, ...]) -> type[HiCachePool]:
    if keyed_twice(parts):
        return KeyValuePool
    states = any(_is_state(part) for part in parts)
    return StatePool if states and len(parts) > 1 else HiCachePool


def _is_state(part: PagePart) -> bool:
    return part.name == "temporal" or part.name.split("_")[0] == "conv"


class HiCachePool:
    """What the engine's groups, transfers and storage classes call on a host pool.

    Ids are those of the pool (tokens, or slots), on the CPU or on the device. Transfers go through the cost
    model; `io_backend` says only where the engine leaves ids. They make the caller's stream wait, so whatever
    the engine records there stands for bytes that have arrived. Raises what the pool raises.
    """

    dcp_size: ClassVar[int] = 1
    dcp_rank: ClassVar[int] = 0
    shared_allocation_domain: ClassVar[None] = None
    stores_page_envelope: ClassVar[bool] = False
    can_use_write_back_jit: ClassVar[bool] = True
    """For the engine: host ids of write-backs stay on the CPU."""

    dtype: ClassVar[torch.dtype] = torch.uint8
    """Of flat pages, which are bytes."""

    device: ClassVar[str] = "cpu"

    def __init__(
        self,
        owner: HostPool | HostPoolGroup,
        pool: HostPool,
        submissions: Submissions,
        tag: str,
        draft_layers: int,
    ) -> None:
        if type(draft_layers) is not int or not 0 <= draft_layers <= len(pool.layers):
            raise ValueError(
                f"{pool.name}: draft_layers: expected 0 to {len(pool.layers)}, got {draft_layers!r}"
            )
        self._owner, self._pool, self._submissions = owner, pool, submissions
        self._layers, self._mapped = dict(enumerate(pool.layers)), False
        self.device_pool: object = None
        self.storage_format_tag = tag
        self.pool_label, self.layout = pool.name, pool.layout
        self.page_size, self.page_num, self.size = pool.page_size, pool.page_num, pool.size
        self.logical_size, self.logical_page_size = pool.size, pool.page_size
        self.layer_num = len(pool.layers)
        self.target_layer_num = self.layer_num - draft_layers
        self.start_layer, self.end_layer = 0, self.layer_num
        self.size_per_token = pool.size_per_token
        self.pin_memory = pool.device.type == "cuda"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._pool!r}>"

    @cached_property
    def _parts(self) -> tuple[PagePart, ...]:
        return page_parts(self._pool)

    @property
    def kv_buffer(self) -> torch.Tensor | None:
        """All host bytes, uint8; None for a pool without bytes, and after `destroy`."""
        buffer: torch.Tensor | None = self._pool.__dict__.get("kv_buffer")
        return buffer if buffer is not None and buffer.numel() else None

    # ---- slots

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Ids of free pages, or None when the pool is full."""
        return self._pool.alloc(need_size)

    def free(self, indices: torch.Tensor) -> int:
        """Give whole pages back; how many ids. What runs on them is ordered in front of later work."""
        return self._pool.free(indices.cpu())

    def available_size(self) -> int:
        """Free ids, of the pool whose ids this one takes where it has none of its own."""
        pool = self._pool
        while pool._source is not None and isinstance(self._owner, HostPoolGroup):
            pool = self._owner.pools[pool._source]
        return pool.available_size()

    def clear(self) -> None:
        """Take every page back, after everything in flight; nothing where ids are another pool's."""
        if self._pool._source is None:
            self._pool.clear()

    def destroy(self) -> None:
        """Give everything back, with all pools of the group. Again: nothing happens."""
        self._owner.destroy()

    # ---- transfers

    def prepare_transfer_indices(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Announce the ids of a submission; the copies that follow take what this returns. Pools of a group
        that one call of the engine's announces are moved together."""
        self._check_backend(io_backend)
        caller = sys._getframe(1)
        return self._submissions.prepare(self.pool_label, host_indices, device_indices, caller)

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        """Copy device pages to host pages, with all that was announced beside them."""
        self._check_backend(io_backend)
        self._submissions.write_back(self.pool_label, host_indices, device_indices)

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        """Copy one layer of host pages to the device; the layers behind it are on their way then.

        `layer_id`: the engine's number; those of draft models follow the others, `is_draft` adds nothing.
        """
        self._check_backend(io_backend)
        layer = self._layer(layer_id)
        if layer is not None:
            self._submissions.load(self.pool_label, host_indices, device_indices, layer)

    def backup_from_device_all_layer_physical(
        self, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        """`backup_from_device_all_layer`: ids are physical ones."""
        self.backup_from_device_all_layer(device_pool, host_indices, device_indices, io_backend)

    def load_to_device_per_layer_physical(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        """`load_to_device_per_layer`: ids are physical ones."""
        self.load_to_device_per_layer(device_pool, host_indices, device_indices, layer_id, io_backend)

    def _check_backend(self, io_backend: str) -> None:
        if io_backend not in IO_BACKENDS:
            known = " or ".join(IO_BACKENDS)
            raise ValueError(f"{self.pool_label}: io_backend: expected {known}, got {io_backend!r}")

    def _layer(self, number: int) -> int | None:
        """The pool's layer of this number; None where the pool has none of it. Raises ValueError."""
        found = self._layers.get(number)
        if found is None and self.layer_num and not self._mapped:
            raise ValueError(
                f"{self.pool_label}: expected a layer of 0 to {self.layer_num - 1}, got {number}:"
                " give layers= where the engine counts others"
            )
        return found

    # ---- pages as bytes

    def get_size_per_token(self) -> int:
        """Bytes of one token, all components and layers."""
        return self.size_per_token

    def get_ksize_per_token(self) -> int:
        """Bytes of one token under one key of storage: half where keys and values have keys of their own."""
        return (
            -(-self._parts[0].nbytes // self.page_size) if keyed_twice(self._parts) else self.size_per_token
        )

    def get_page_buffer_element_size(self, split_factor: int = 1) -> int | None:
        """Bytes of a page's first range (of one of `split_factor` parts of it); None without bytes."""
        whole = self._pool.get_page_buffer_element_size(split_factor)
        return self._parts[0].nbytes if split_factor == 1 and self._parts else whole

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        """Whether every range of every page starts at, and takes, a multiple of `page_size_bytes`."""
        base = 0 if self.kv_buffer is None else self.kv_buffer.data_ptr()
        sizes = [size for part in self._parts for size in (base + part.start, part.step, part.nbytes)]
        return self._pool.is_stride_page_aligned(page_size_bytes) and math.gcd(*sizes) % page_size_bytes == 0

    def get_page_buffer_meta(self, indices: torch.Tensor | Iterable[int]) -> tuple[list[int], list[int]]:
        """Host addresses and bytes of the ranges of whole pages of ids, page by page."""
        addresses, sizes = self._pool.get_page_buffer_meta(_on_cpu(indices))
        if len(self._parts) == len(self._pool.page_object_names):
            return addresses, sizes
        starts = [part.start - self._parts[0].start for part in self._parts]
        return (
            [address + start for address in addresses for start in starts],
            [part.nbytes for part in self._parts] * len(addresses),
        )

    def get_split_heads_page_buffer_meta(
        self, indices: torch.Tensor | Iterable[int], split_factor: int
    ) -> tuple[list[int], list[int]]:
        """As `get_page_buffer_meta`, each page in `split_factor` parts of as many heads."""
        return self._pool.get_split_heads_page_buffer_meta(_on_cpu(indices), split_factor)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """The memory to register: the one host buffer, or nothing."""
        return self._pool.get_hybrid_pool_buffer()

    def get_data_page(self, index: Index, flat: bool = True) -> torch.Tensor:
        """The bytes of a page: a copy ``[page_bytes]``; not `flat`: a view ``[bytes]`` of its one range, or
        ``[ranges, bytes]`` of several of one size. Raises ValueError where they differ."""
        if flat:
            return self._pool.get_data_page(index)
        views = self._pool.get_data_page(index, flat=False)
        first, parts = views[0], self._parts
        gaps = {b.start - a.start for a, b in pairwise(parts)} or {0}
        if len({part.nbytes for part in parts}) != 1 or len(gaps) != 1:
            sizes = ", ".join(f"{part.name}: {part.nbytes:,}" for part in parts)
            raise ValueError(
                f"{self.pool_label}: get_data_page: ranges of different size are no tensor ({sizes} bytes):"
                " pass flat=True, or take get_page_buffer_meta"
            )
        shape, (gap,) = (len(parts), parts[0].nbytes), gaps
        seen = first.as_strided(shape, (gap, 1), first.storage_offset())
        return seen[0] if len(parts) == 1 else seen

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Zeros of the size of a flat page, for somebody to fill."""
        return self._pool.get_dummy_flat_data_page()

    def set_from_flat_data_page(self, index: Index, data_page: torch.Tensor) -> None:
        """Fill a page from the bytes of a flat one, of whatever dtype and shape."""
        self._pool.set_from_flat_data_page(index, data_page.contiguous().view(-1).view(torch.uint8))

    def _buffer(self, part: PagePart) -> torch.Tensor:
        """One range of every page: uint8 ``[pages, bytes]``, a view."""
        whole = self._pool.kv_buffer
        shape, steps = (self.page_num, part.nbytes), (part.step, 1)
        return whole.as_strided(shape, steps, whole.storage_offset() + part.start)


class KeyValuePool(HiCachePool):
    """A pool that storage has two keys a page for, which it sees by these names."""

    @property
    def k_buffer(self) -> torch.Tensor:
        """The keys of every page: uint8 ``[pages, bytes]``."""
        return self._buffer(self._parts[0])

    @property
    def v_buffer(self) -> torch.Tensor:
        """The values of every page: uint8 ``[pages, bytes]``."""
        return self._buffer(self._parts[1])


class StatePool(HiCachePool):
    """A pool of states, for which storage has a key for each of these."""

    @property
    def temporal_state_elem_size(self) -> int:
        """Bytes of the recurrent state of a slot; 0 where there is none."""
        return sum(part.nbytes for part in self._parts if part.name == "temporal")

    @property
    def conv_buffer(self) -> list[torch.Tensor]:
        """Every convolution window of every slot: uint8 ``[slots, bytes]``."""
        return [self._buffer(part) for part in self._parts if part.name.split("_")[0] == "conv"]


def _on_cpu(indices: torch.Tensor | Iterable[int]) -> torch.Tensor | Iterable[int]:
    return indices.cpu() if isinstance(indices, torch.Tensor) else indices
