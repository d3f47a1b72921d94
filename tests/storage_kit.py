"""What the storage tests share: pages in plain memory with known content, and items that point at them."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from poolwright.runtime.storage import Item, Storage


class Memory:
    """`count` pages of `nbytes` in one block."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count, self.nbytes = count, nbytes
        self._map = mmap.mmap(-1, count * nbytes)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def __getitem__(self, page: int) -> bytes:
        return self._map[page * self.nbytes : (page + 1) * self.nbytes]

    def __setitem__(self, page: int, content: bytes) -> None:
        self._map[page * self.nbytes : (page + 1) * self.nbytes] = content

    def item(self, key: str, page: int, parts: int = 1) -> Item:
        """The page as an item, cut in `parts` as equal as can be."""
        start = self.base + page * self.nbytes
        cuts = [start + self.nbytes * k // parts for k in range(parts + 1)]
        return Item(key, tuple((a, b - a) for a, b in itertools.pairwise(cuts)))

    def items(self, keys: list[str], first: int = 0, parts: int = 1) -> list[Item]:
        """Items of consecutive pages."""
        return [self.item(key, first + at, parts) for at, key in enumerate(keys)]


def content(key: str, nbytes: int) -> bytes:
    """The bytes that belong to a key: random, the same every time."""
    return random.Random(key).randbytes(nbytes)


@dataclass
class Traffic:
    """A writer's pages filled by key, and a reader's pages that hold something else."""

    keys: list[str]
    written: Memory
    read: Memory

    @classmethod
    def of(cls, names: str, count: int, nbytes: int) -> Traffic:
        keys = [f"{names}/{at}" for at in range(count)]
        made = cls(keys, Memory(count, nbytes), Memory(count, nbytes))
        for at, key in enumerate(keys):
            made.written[at] = content(key, nbytes)
        return made

    def outgoing(self, parts: int = 1) -> list[Item]:
        return self.written.items(self.keys, parts=parts)

    def incoming(self, parts: int = 1) -> list[Item]:
        """The reader's pages, poisoned."""
        for at in range(self.read.count):
            self.read[at] = b"\xa5" * self.read.nbytes
        return self.read.items(self.keys, parts=parts)

    def right(self, at: int) -> bool:
        """Whether the reader has the bytes of this key."""
        return self.read[at] == content(self.keys[at], self.read.nbytes)

    def unharmed(self) -> bool:
        """Whether the writer still has every byte."""
        return all(self.written[at] == content(key, self.written.nbytes) for at, key in enumerate(self.keys))


@contextmanager
def bounded(storage: Storage) -> Iterator[None]:
    """What happens inside ends within the bound that the storage states for a call."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start <= storage.bound_s
