"""Pages of a pool as bytes: where they lie, and copies of them. What storage and transports ask a pool for.

A page is a row of *objects*, its contiguous ranges, in the order in which they lie in the host buffer.
Metadata, flat pages and key suffixes all have this order. Another layout or page size has other objects
and another format tag; capacity and slot change neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, overload

import torch

from poolwright.runtime import arguments, scalars
from poolwright.runtime.description import HostPart, PoolSpec
from poolwright.runtime.indexing import host_view
from poolwright.runtime.program import SizedProgram, Span
from poolwright.runtime.shared import Movable

Index = int | torch.Tensor | Iterable[int]
"""A page: the id of its first token (an integer or 0-dim tensor), or all its ids in order."""


class PageObject(NamedTuple):
    """A contiguous range of one page in host memory."""

    name: str
    address: int
    nbytes: int


class Pages(Movable):
    """The part of `HostPool` that gives and takes pages.

    A page is named by the id of its first token, as `alloc` returns it; what is not the first token of a
    page of the pool raises ValueError. Before an address or a byte is handed out, everything submitted
    that touches the page has run: a call blocks until then, and raises TransferError when a write-back
    into the page failed. Whoever uses addresses keeps the page from later transfers himself.
    """

    spec: ClassVar[PoolSpec]
    program: SizedProgram
    device: torch.device
    dtypes: Mapping[str, torch.dtype]
    kv_buffer: torch.Tensor
    page_size: int
    page_num: int
    page_bytes: int

    def _settle(self, pages: set[int], reads: bool) -> None:
        """Wait for what touches these pages; `reads`: raise TransferError for a failed write-back."""
        self._shared.transfers.settle(self._owner, pages, reads)

    # ---- sizes

    @cached_property
    def _spans(self) -> tuple[Span, ...]:
        return self.program.spans(self.page_num)

    @property
    def page_object_names(self) -> tuple[str, ...]:
        """Names of a page's objects, in their order; none for a pool without bytes."""
        return tuple(span.name for span in self._spans)

    @property
    def size_per_token(self) -> int:
        """Bytes of one token, all components and layers: ``page_bytes / page_size``, rounded up."""
        return -(-self.page_bytes // self.page_size)

    def get_size_per_token(self) -> int:
        """`size_per_token`."""
        return self.size_per_token

    def get_ksize_per_token(self) -> int:
        """`size_per_token`: engines multiply it by the page size to know what a page takes."""
        return self.size_per_token

    def get_page_buffer_element_size(self, split_factor: int = 1) -> int | None:
        """Bytes of a page's first object (of one of `split_factor` parts of it); None without bytes."""
        parts = self._parts("get_page_buffer_element_size", split_factor)
        return self._spans[0].nbytes // parts if self._spans else None

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        """Whether every object of every page starts at, and takes, a multiple of `page_size_bytes`."""
        self._alive()
        wanted = scalars.index(page_size_bytes)
        if wanted is None or wanted < 1:
            raise self._wrong(
                "is_stride_page_aligned", "a number of bytes from 1", page_size_bytes, "pass 4096"
            )
        base = self.kv_buffer.data_ptr()
        sizes = [size for span in self._spans for size in (base + span.start, span.nbytes)]
        return math.gcd(*sizes) % wanted == 0

    # ---- where pages lie

    def page_objects(self, page: int) -> tuple[PageObject, ...]:
        """The objects of page number `page`. Blocks and raises as the class says."""
        return self._objects("page_objects", page)

    def page_ranges(self, page: int) -> list[tuple[int, int]]:
        """(address, bytes) of each object of page number `page`."""
        return [(at.address, at.nbytes) for at in self._objects("page_ranges", page)]

    def _objects(self, call: str, page: int) -> tuple[PageObject, ...]:
        self._alive()
        number = scalars.index(page)
        if number is None or not 0 <= number < self.page_num:
            expected = f"a page of 0 to {self.page_num - 1}"
            raise self._wrong(call, expected, repr(page), "pass a page number: id // page_size")
        self._settle({number}, True)
        base = self.kv_buffer.data_ptr()
        return tuple(
            PageObject(span.name, base + span.start + number * span.nbytes, span.nbytes)
            for span in self._spans
        )

    def get_page_buffer_meta(self, indices: torch.Tensor | Iterable[int]) -> tuple[list[int], list[int]]:
        """Host addresses and bytes of the objects of whole pages of ids, page by page."""
        return self._meta("get_page_buffer_meta", indices, 1)

    def get_split_heads_page_buffer_meta(
        self, indices: torch.Tensor | Iterable[int], split_factor: int
    ) -> tuple[list[int], list[int]]:
        """As `get_page_buffer_meta`, each page in `split_factor` parts of as many heads, part by part.

        Raises ValueError for a layout in which the heads of a page do not lie one behind the other.
        """
        return self._meta("get_split_heads_page_buffer_meta", indices, split_factor)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """The memory to register: the one host buffer, or nothing for a pool without bytes."""
        self._alive()
        return [self.kv_buffer] if self.kv_buffer.numel() else []

    # ---- pages as bytes

    @overload
    def get_data_page(self, index: Index, flat: Literal[True] = True) -> torch.Tensor: ...

    @overload
    def get_data_page(self, index: Index, flat: Literal[False]) -> torch.Tensor | list[torch.Tensor]: ...

    def get_data_page(self, index: Index, flat: bool = True) -> torch.Tensor | list[torch.Tensor]:
        """A copy of a page's bytes: uint8 ``[page_bytes]``; not `flat`: the page as it lies, no copy.

        Then a page that is one component in one range, without padding, comes as a tensor of its dtype, with
        the layout's axes inside a page (``[token, layer, latent]``); every other page as a list of its
        objects, each uint8.
        """
        page = self._page("get_data_page", index)
        flat = arguments.flag(self.spec.name, "get_data_page: flat", flat)
        self._settle({page}, True)
        views = self._views(page)
        if not flat:
            return self._shaped(page) if self._lone is not None else views
        return torch.cat(views) if views else torch.empty(0, dtype=torch.uint8)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Zeros of the size of a flat page, for somebody to fill; pinned when the pool serves a GPU."""
        return torch.zeros(self.page_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def set_from_flat_data_page(self, index: Index, data_page: torch.Tensor) -> None:
        """Fill a page from what `get_data_page` gave, here or in any pool of the same format tag.

        Padding inside a page is not taken over: it stays zero.
        """
        page = self._page("set_from_flat_data_page", index)
        self._check_flat(data_page)
        self._settle({page}, False)
        if self._padded:
            self._set_components(page, data_page)
            return
        end = 0
        for view in self._views(page):
            start, end = end, end + view.numel()
            view.copy_(data_page[start:end])

    # ---- pieces

    @cached_property
    def _padded(self) -> bool:
        """Whether a page has bytes that belong to no component."""
        return self.page_bytes > sum(
            self.program.itemsize(part.ident) * math.prod(extent for _, extent, _ in part.axes)
            for part in self._placed(1)
        )

    @cached_property
    def _lone(self) -> HostPart | None:
        """The component, or record, that is every byte of a page, where the page is one range."""
        there = self._placed(self.page_num)
        return there[0] if len(there) == len(self._spans) == 1 and not self._padded else None

    def _placed(self, pages: int) -> list[HostPart]:
        """The components and records that have bytes, as they lie in a buffer of so many pages."""
        return [part for part in self.program.host(pages).parts if self.program.present(part.ident)]

    def _shaped(self, page: int) -> torch.Tensor:
        """The page with the axes and the dtype of its one component."""
        assert self._lone is not None
        seen = self._component(self.kv_buffer, self._lone, page)
        return seen.view(self.program.dtype(self.dtypes, self._lone.ident)).squeeze(-1)

    def _component(self, buffer: torch.Tensor, part: HostPart, page: int) -> torch.Tensor:
        """One component of a page of a buffer: its other axes, and the bytes of one item last."""
        at = [axis for axis, _, _ in part.axes].index("page")
        return host_view(buffer, part, self.program.itemsize(part.ident)).select(at, page)

    def _set_components(self, page: int, data_page: torch.Tensor) -> None:
        """Copy what belongs to components. A padded page is one range, and so a buffer of one page."""
        for one, ours in zip(self._placed(1), self._placed(self.page_num), strict=True):
            self._component(self.kv_buffer, ours, page).copy_(self._component(data_page, one, 0))

    def _views(self, page: int) -> list[torch.Tensor]:
        return [
            self.kv_buffer.narrow(0, span.start + page * span.nbytes, span.nbytes) for span in self._spans
        ]

    def _meta(
        self, call: str, indices: torch.Tensor | Iterable[int], split_factor: int
    ) -> tuple[list[int], list[int]]:
        pages = self._pages(call, indices)
        parts = self._parts(call, split_factor)
        self._settle(set(pages), True)
        base = self.kv_buffer.data_ptr()
        sizes = [span.nbytes // parts for span in self._spans]
        starts = [
            (base + span.start + part * size, span.nbytes)
            for part in range(parts)
            for span, size in zip(self._spans, sizes, strict=True)
        ]
        return [start + page * nbytes for page in pages for start, nbytes in starts], sizes * parts * len(
            pages
        )

    def _parts(self, call: str, split_factor: int) -> int:
        """`split_factor`, if every object can be cut into so many parts of as many heads."""
        count = scalars.index(split_factor)
        if count is None or count < 1:
            raise self._wrong(call, "a split_factor from 1", split_factor, "pass 1 for whole objects")
        for part in self._placed(1) if count > 1 else ():
            name, extent, whole = self._outermost(part)
            if name in ("token", "layer") or not whole or extent % count:
                got = f"{count} for {extent} of {name}"
                expected = "a split_factor that divides the heads, outermost in a page"
                raise self._wrong(call, expected, got, "use a layout such as page_head")
        return count

    def _outermost(self, part: HostPart) -> tuple[str, int, bool]:
        """The dim outermost in a page, its extent there, whether it fills the page; a split dim's parts
        that lie one behind the other count as one."""
        at = [axis for axis, _, _ in part.axes].index("page")
        _, _, page_step = part.axes[at]
        inside = part.axes[at + 1 :]
        if not inside:
            return "nothing", 1, False
        first = inside[0][0]
        dim, pieces = next(((d, p) for d, p in self.spec.splits.items() if first in p), (first, (first,)))
        extent, step = inside[0][1], inside[0][2]
        whole = extent * step == page_step
        for name, length, inner in inside[1:]:
            if name not in pieces or length * inner != step:
                break
            extent, step = extent * length, inner
        return dim, extent, whole

    def _page(self, call: str, index: Index) -> int:
        """The page that `index` names. Raises ValueError."""
        self._alive()
        if isinstance(index, torch.Tensor):
            ids = self._ids(call, index[None] if index.dim() == 0 else index)
        else:
            lone = scalars.index(index) is not None or not isinstance(index, Iterable)
            ids = self._ids(call, (index,) if lone else index)
        if len(ids) == 1:
            first = ids[0]
            ids = list(range(first, first + self.page_size))
        if len(ids) != self.page_size:
            raise self._wrong(call, "one page", f"{len(ids)} ids", "pass the id of the page's first token")
        return self._whole_pages(call, ids)[0]

    def _pages(self, call: str, indices: torch.Tensor | Iterable[int]) -> list[int]:
        """The pages that these ids make up. Raises ValueError."""
        self._alive()
        return self._whole_pages(call, self._ids(call, indices))

    def _ids(self, call: str, indices: object) -> list[int]:
        if isinstance(indices, torch.Tensor):
            whole = indices.dim() == 1 and indices.layout is torch.strided
            if whole and indices.is_cpu and indices.dtype in (torch.int32, torch.int64):
                found: list[int] = indices.tolist()
                return found
            got = arguments.shown(indices)
            raise self._wrong(call, "int32 or int64 [n] on cpu", got, "pass ids that alloc returned")
        try:
            numbers = [scalars.index(i) for i in indices]  # type: ignore[attr-defined]
        except TypeError:  # nothing that can be walked
            numbers = [None]
        known = [number for number in numbers if number is not None]
        if len(known) < len(numbers):
            raise self._wrong(call, "integers", repr(indices), "pass ids that alloc returned")
        return known

    def _whole_pages(self, call: str, ids: list[int]) -> list[int]:
        size, end = self.page_size, self.page_size * self.page_num
        whole = f"whole pages of ids (page size {size}, ids below {end}), the tokens of each in order"
        if len(ids) % size:
            raise self._wrong(call, whole, f"{len(ids)} ids", "pad the last page or leave it out")
        for at in range(0, len(ids), size):
            page, first = ids[at : at + size], ids[at]
            if first % size or not 0 <= first < end or page != list(range(first, first + size)):
                raise self._wrong(call, whole, f"ids from {first} on", "pass ids that alloc returned")
        return [first // size for first in ids[::size]]

    def _check_flat(self, data_page: torch.Tensor) -> None:
        kind = (torch.uint8, torch.strided, "cpu", (self.page_bytes,))
        t = data_page
        fits = isinstance(t, torch.Tensor) and (t.dtype, t.layout, t.device.type, tuple(t.shape)) == kind
        if not fits or not t.is_contiguous():
            expected, got = f"contiguous torch.uint8 [{self.page_bytes}] on cpu", arguments.shown(data_page)
            raise self._wrong("set_from_flat_data_page", expected, got, "pass what get_data_page gave")

    def _wrong(self, call: str, expected: str, got: object, step: str) -> ValueError:
        return arguments.wrong(self.spec.name, call, expected, got, step)
