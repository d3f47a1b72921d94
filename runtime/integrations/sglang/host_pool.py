"""A generated pool under the names and signatures of SGLang 0.5.23's host pools."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch

from poolwright.runtime import arguments
from poolwright.runtime.controller.ids import listed
from poolwright.runtime.group import HostPoolGroup
from poolwright.runtime.integrations.sglang.layers import Layers
from poolwright.runtime.integrations.sglang.objects import PagePart, keyed_twice
from poolwright.runtime.integrations.sglang.pages import StoredPages, on_cpu
from poolwright.runtime.integrations.sglang.submissions import Submissions
from poolwright.runtime.pool import HostPool

IO_BACKENDS = ("kernel", "direct")


class HiCachePool(StoredPages):
    """What the engine's groups, transfers and storage classes call on a host pool.

    Ids are those of the pool (tokens, or slots), on the CPU or on the device. Transfers go through the cost
    model; `io_backend` says only where the engine leaves ids. They make the caller's stream wait, so whatever
    the engine records there stands for bytes that have arrived. Raises what the pool raises.
    """

    dcp_size: ClassVar[int] = 1
    dcp_rank: ClassVar[int] = 0
    shared_allocation_domain: ClassVar[None] = None
    device: ClassVar[str] = "cpu"
    can_use_write_back_jit: ClassVar[bool] = True
    """For the engine: host ids of write-backs stay on the CPU."""

    def __init__(
        self,
        owner: HostPool | HostPoolGroup,
        pool: HostPool,
        submissions: Submissions,
        layers: Layers,
        tag: str,
    ) -> None:
        super().__init__(pool, tag)
        self._owner, self._submissions, self._layers = owner, submissions, layers
        self.size = self.logical_size = pool.size
        self.layer_num, self.target_layer_num = layers.count, layers.count - layers.drafts

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._pool!r}>"

    # ---- slots

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Ids of free pages, or None when the pool is full."""
        return self._pool.alloc(need_size)

    def free(self, indices: torch.Tensor) -> int:
        """Give whole pages back; how many ids. What runs on them is ordered in front of later work."""
        return self._pool.free(on_cpu(indices))

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
        host = listed(self.pool_label, "host_indices", host_indices)
        device = listed(self.pool_label, "device_indices", device_indices)
        caller = sys._getframe(1)
        return self._submissions.prepare(self.pool_label, host, device, caller)

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
        layer = self._layers.layer(layer_id)
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
        arguments.one_of(self.pool_label, "io_backend", io_backend, IO_BACKENDS)


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
        return [self._buffer(part) for part in self._parts if _is_window(part)]


def kind_of(parts: tuple[PagePart, ...]) -> type[HiCachePool]:
    """The class for a pool whose pages have these ranges."""
    if keyed_twice(parts):
        return KeyValuePool
    states = any(_is_state(part) for part in parts)
    return StatePool if states and len(parts) > 1 else HiCachePool


def _is_state(part: PagePart) -> bool:
    return part.name == "temporal" or _is_window(part)


def _is_window(part: PagePart) -> bool:
    return part.name.split("_")[0] == "conv"
