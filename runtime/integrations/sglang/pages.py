"""Pages of a pool as SGLang's storage classes ask for them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import torch

from poolwright.runtime import arguments
from poolwright.runtime.integrations.sglang.objects import PagePart, keyed_twice, page_parts
from poolwright.runtime.pages import Index
from poolwright.runtime.pool import HostPool


class StoredPages:
    """The part of `HiCachePool` that storage calls. Raises what `Pages` raises."""

    stores_page_envelope: ClassVar[bool] = False
    dtype: ClassVar[torch.dtype] = torch.uint8
    """Of flat pages, which are bytes."""

    def __init__(self, pool: HostPool, tag: str) -> None:
        self._pool = pool
        self.storage_format_tag = tag
        self.pool_label, self.layout = pool.name, pool.layout
        self.page_size, self.page_num = pool.page_size, pool.page_num
        self.size_per_token = pool.size_per_token
        self.pin_memory = pool.device.type == "cuda"

    @cached_property
    def _parts(self) -> tuple[PagePart, ...]:
        return page_parts(self._pool)

    @property
    def kv_buffer(self) -> torch.Tensor | None:
        """All host bytes, uint8; None for a pool without bytes, and after `destroy`."""
        buffer: torch.Tensor | None = self._pool.__dict__.get("kv_buffer")
        return buffer if buffer is not None and buffer.numel() else None

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
        addresses, sizes = self._pool.get_page_buffer_meta(on_cpu(indices))
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
        return self._pool.get_split_heads_page_buffer_meta(on_cpu(indices), split_factor)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """The memory to register: the one host buffer, or nothing."""
        return self._pool.get_hybrid_pool_buffer()

    def get_data_page(self, index: Index, flat: bool = True) -> torch.Tensor:
        """The bytes of a page: a copy ``[page_bytes]``; not `flat`: a view ``[bytes]`` of its one range, or
        ``[ranges, bytes]`` of several of one size. Raises ValueError where they differ."""
        if arguments.flag(self.pool_label, "get_data_page: flat", flat) or not self._parts:
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
        if isinstance(data_page, torch.Tensor) and data_page.is_cpu and data_page.layout is torch.strided:
            data_page = data_page.contiguous().view(-1).view(torch.uint8)
        self._pool.set_from_flat_data_page(index, data_page)

    def _buffer(self, part: PagePart) -> torch.Tensor:
        """One range of every page: uint8 ``[pages, bytes]``, a view."""
        whole = self._pool.kv_buffer
        shape, steps = (self.page_num, part.nbytes), (part.step, 1)
        return whole.as_strided(shape, steps, whole.storage_offset() + part.start)


def on_cpu(indices: Any) -> Any:
    """Ids that lie on a device, read back; anything else as it is, for the pool to take or refuse."""
    return indices.cpu() if isinstance(indices, torch.Tensor) and not indices.is_meta else indices
