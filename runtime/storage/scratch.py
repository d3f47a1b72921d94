"""Memory that a chunk of objects needs beside the pages, and how an object lies in both.

In: items. Out: addresses for the library. An object is an envelope and the page. A page that is small, or in
many parts, is copied behind its envelope: each part would cost a transfer of its own.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from poolwright.runtime.storage import envelope
from poolwright.runtime.storage.base import Item

PACK_PARTS, PACK_BYTES = 16, 256 << 10  # copied: pages of more parts, or of fewer bytes
_ALIGN = 64


@dataclass(frozen=True)
class Placed:
    """An item, its envelope at `head`, and whether the page is copied behind the envelope (`packed`)."""

    item: Item
    head: int
    packed: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the object."""
        return envelope.SIZE + self.item.nbytes

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(address, bytes) of the whole object, in order."""
        return [(self.head, self.nbytes)] if self.packed else [(self.head, envelope.SIZE), *self.item.parts]

    def pack(self) -> None:
        """Make the object ready to be read from its ranges."""
        for at, (address, nbytes) in self._copies():
            ctypes.memmove(at, address, nbytes)
        ctypes.memmove(self.head, self._envelope(), envelope.SIZE)

    def blank(self) -> None:
        """Before the object is filled: no envelope, so that none of an earlier object can pass for it."""
        ctypes.memset(self.head, 0, envelope.SIZE)

    def whole(self) -> bool:
        """Whether the ranges hold exactly this object."""
        head = envelope.view(self.head, envelope.SIZE)
        return bytes(head) == self._envelope()

    def unpack(self) -> None:
        """Bring the page to its place."""
        for at, (address, nbytes) in self._copies():
            ctypes.memmove(address, at, nbytes)

    def _envelope(self) -> bytes:
        return envelope.envelope(self.item.key, self.item.nbytes, envelope.checksum(self._page()))

    def _page(self) -> list[memoryview]:
        """The page as the library reads or writes it."""
        if not self.packed:
            return envelope.views(self.item)
        return [envelope.view(self.head + envelope.SIZE, self.item.nbytes)]

    def _copies(self) -> list[tuple[int, tuple[int, int]]]:
        """For each part: where its copy is, and the part."""
        if not self.packed:
            return []
        sizes = (nbytes for _, nbytes in self.item.parts)
        starts = itertools.accumulate(sizes, initial=self.head + envelope.SIZE)
        return list(zip(starts, self.item.parts, strict=False))


class Scratch:
    """One block of memory that grows as asked. `register`, `unregister`: told (address, bytes) of it."""

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int, int], None]) -> None:
        self._register, self._unregister = register, unregister
        self._block: ctypes.Array[ctypes.c_char] | None = None

    def place(self, items: Sequence[Item]) -> list[Placed]:
        """A place for each item; it is good until the next call."""
        packed = [len(item.parts) > PACK_PARTS or item.nbytes < PACK_BYTES for item in items]
        sizes = [item.nbytes * pack + envelope.SIZE for item, pack in zip(items, packed, strict=True)]
        starts = [0, *itertools.accumulate(-(-size // _ALIGN) * _ALIGN for size in sizes)]
        base = self._reserve(starts.pop())
        return [Placed(item, base + at, pack) for item, at, pack in zip(items, starts, packed, strict=True)]

    def free(self) -> None:
        """Give the memory back. Idempotent."""
        if self._block is not None:
            self._unregister(ctypes.addressof(self._block), len(self._block))
            self._block = None

    def _reserve(self, nbytes: int) -> int:
        """The address of a block of at least so many bytes."""
        if self._block is None or len(self._block) < nbytes:
            self.free()
            size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            self._block = (ctypes.c_char * size).from_buffer(mmap.mmap(-1, size))
            self._register(ctypes.addressof(self._block), size)
        return ctypes.addressof(self._block)


def arguments(places: Sequence[Placed]) -> tuple[list[str], list[list[int]], list[list[int]]]:
    """Keys, addresses and sizes of these objects, as the library takes them."""
    keys = [placed.item.key for placed in places]
    addresses = [[address for address, _ in placed.ranges] for placed in places]
    sizes = [[nbytes for _, nbytes in placed.ranges] for placed in places]
    return keys, addresses, sizes
