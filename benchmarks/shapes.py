"""The pools that benchmarks compare: a shape in, a bound pool with its device rows and host rows out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from poolwright.generated import KdaStatePoolHost, MHATokenToKVPoolHost, MLATokenToKVPoolHost
from poolwright.runtime.pool import HostPool

SPARE_PAGES = 7
"""Device pages, and host pages, beyond those moved."""

HEAD = 128


@dataclass(frozen=True)
class Shape:
    """A pool to measure. `rows`: bytes of one layer of one token (or slot) of each component."""

    name: str
    page_size: int
    layers: int
    rows: tuple[int, ...]
    make: Callable[..., HostPool]
    components: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    stacked: bool = False

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.layers * sum(self.rows)

    @property
    def label(self) -> str:
        return f"{self.name}, page {self.page_size}"


def mha(layers: int, row: int, page_size: int) -> Shape:
    """Keys and values of `row` bytes each."""
    make = functools.partial(
        MHATokenToKVPoolHost,
        heads=row // 2 // HEAD,
        head_dim=HEAD,
        v_head_dim=HEAD,
        dtype=torch.bfloat16,
        layers=range(layers),
        page_size=page_size,
    )
    kinds = (torch.bfloat16,) * 2
    return Shape(f"MHA {layers} x {row} B", page_size, layers, (row, row), make, ("k", "v"), kinds)


def mla(name: str, layers: int, row: int, page_size: int) -> Shape:
    """One component with rows of `row` bytes."""
    make = functools.partial(
        MLATokenToKVPoolHost,
        kv_lora_rank=row,
        qk_rope_head_dim=0,
        dtype=torch.uint8,
        layers=range(layers),
        page_size=page_size,
    )
    return Shape(f"{name} {layers} x {row} B", page_size, layers, (row,), make, ("kv",), (torch.uint8,))


def states(layers: int, heads: int) -> Shape:
    """Recurrent states of float32 with a convolution window of one step."""
    make = functools.partial(
        KdaStatePoolHost,
        heads=heads,
        head_dim=HEAD,
        kernel=2,
        ngram=0,
        ssm_dtype=torch.float32,
        conv_dtype=torch.bfloat16,
        layers=range(layers),
    )
    rows = (4 * heads * HEAD * HEAD, 2 * 3 * heads * HEAD)
    name = f"state {layers} x {rows[0] >> 10} KiB"
    kinds = (torch.float32, torch.bfloat16)
    return Shape(name, 1, layers, rows, make, ("temporal", "conv"), kinds, stacked=True)


SHAPES = (
    mha(32, 2048, 64),
    mha(80, 256, 64),
    mla("MLA", 61, 1152, 64),
    mla("indexer", 61, 8448, 1),
    states(36, 32),
    mha(32, 2048, 1),
    mha(80, 256, 1),
    mla("MLA", 61, 1152, 1),
)


class Rig:
    """A bound pool with room for `pages` at once, in layout page_first, and its rows as bytes.

    `device`: for each component one uint8 ``[tokens, row]`` a layer; `host`: for each component uint8
    ``[tokens, layers, row]``. `staging_bytes`: of the pool, if not what it takes by itself.
    """

    def __init__(self, shape: Shape, pages: int, device: str, staging_bytes: int | None = None) -> None:
        self.shape, self.pages = shape, pages
        self.host_pages, self.device_pages = pages + pages // 2 + SPARE_PAGES, pages + SPARE_PAGES
        where = torch.device(device)
        require = "cuda" if where.type == "cuda" else None
        more = {} if staging_bytes is None else {"staging_bytes": staging_bytes}
        self.pool = shape.make(
            layout="page_first", capacity_pages=self.host_pages, device=device, require=require, **more
        )
        tokens = self.device_pages * shape.page_size
        blocks = [_random((shape.layers, tokens, row), where) for row in shape.rows]
        self.device = [[block[layer] for layer in range(shape.layers)] for block in blocks]
        typed = [block.view(kind) for block, kind in zip(blocks, shape.dtypes, strict=True)]
        self.pool.bind(dict(zip(shape.components, map(self._bound, typed), strict=True)))
        layout = self.pool.host_layout(self.host_pages)
        self.host = []
        for component, row in zip(shape.components, shape.rows, strict=True):
            start = layout.part(component).base
            view = self.pool.kv_buffer[start : start + self.host_pages * shape.page_size * shape.layers * row]
            self.host.append(view.view(-1, shape.layers, row))

    def _bound(self, block: torch.Tensor) -> Any:
        """What the pool's form takes: one tensor of all layers, or one a layer with its dims apart."""
        if self.shape.stacked:
            return _with_dims(block, self.shape)
        return [_with_dims(layer, self.shape) for layer in block]

    def close(self) -> None:
        self.pool.destroy()

    def lists(self, pages: int, order: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(host pages, device pages): device pages at random, host pages at random or neighbours (`runs`)."""
        random = torch.Generator().manual_seed(pages)
        host = torch.randperm(self.host_pages, generator=random)[:pages]
        if order == "runs":
            host = torch.arange(pages) + 1
        device = 1 + torch.randperm(self.device_pages - 1, generator=random)[:pages]
        return host, device

    # ---- bytes

    def packed_device(self, pages: torch.Tensor) -> list[torch.Tensor]:
        """These device pages of each component in host order, ``[pages, page_size, layers, row]``."""
        size = self.shape.page_size
        at = pages.to(self.device[0][0].device)
        found = []
        for component in self.device:
            rows = [layer.view(-1, size, layer.shape[-1])[at] for layer in component]
            found.append(torch.stack(rows, dim=2))
        return found

    def packed_host(self, pages: torch.Tensor) -> list[torch.Tensor]:
        """These host pages of each component, on the device; same shape."""
        size, where = self.shape.page_size, self.device[0][0].device
        found = []
        for side in self.host:
            paged = side.view(-1, size, *side.shape[1:])
            packed = torch.empty(len(pages), *paged.shape[1:], dtype=torch.uint8, device=where)
            for at, page in enumerate(pages.tolist()):
                packed[at].copy_(paged[page], non_blocking=True)
            found.append(packed)
        if where.type == "cuda":
            torch.cuda.synchronize()
        return found

    def fill_host(self, pages: torch.Tensor, packed: Sequence[torch.Tensor]) -> None:
        """Write packed pages to these host pages, without the pool."""
        size = self.shape.page_size
        for side, values in zip(self.host, packed, strict=True):
            paged = side.view(-1, size, *side.shape[1:])
            for at, page in enumerate(pages.tolist()):
                paged[page].copy_(values[at], non_blocking=True)
        if self.device[0][0].device.type == "cuda":
            torch.cuda.synchronize()

    def poison_host(self, pages: torch.Tensor) -> None:
        """Overwrite these host pages with bytes that no page holds for long."""
        for side in self.host:
            paged = side.view(-1, self.shape.page_size, *side.shape[1:])
            for page in pages.tolist():
                paged[page].fill_(0xA5)

    def poison_device(self, pages: torch.Tensor) -> None:
        """Overwrite these device pages."""
        at = pages.to(self.device[0][0].device)
        for component in self.device:
            for layer in component:
                layer.view(-1, self.shape.page_size, layer.shape[-1])[at] = 0x5A


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether all bytes are equal."""
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _random(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def _with_dims(block: torch.Tensor, shape: Shape) -> torch.Tensor:
    """The last axis taken apart where the pool has heads."""
    if shape.components == ("k", "v"):
        return block.view(*block.shape[:-1], -1, HEAD)
    if shape.stacked and block.dtype == torch.float32:
        return block.view(*block.shape[:-1], -1, HEAD, HEAD)
    if shape.stacked:
        return block.view(*block.shape[:-1], 1, -1)
    return block
