"""What stands in front of an object's bytes, and the checksum in it. In: a key and parts. Out: 64 bytes.

The envelope names everything a reader knows beforehand (format, key, size) beside the checksum, so a reader
builds the envelope that he expects and compares: an object cut short, of another key or with a changed bit
anywhere is not equal. It is kept apart from the page, whose memory holds nothing but the page.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator

from poolwright.runtime.storage.base import Item

SIZE = 64
BLOCK = 256 << 10
IOV_MAX = 1024  # buffers of one readv or writev on Linux
_FORMAT = struct.Struct("<8sQ32sI12x")
_MAGIC = b"pwpage01"


def view(address: int, nbytes: int) -> memoryview:
    """The memory at this address, not copied: writable bytes ``[nbytes]``. The caller keeps it alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def views(item: Item) -> list[memoryview]:
    """`view` of each part."""
    return [view(address, nbytes) for address, nbytes in item.parts]


def checksum(parts: Iterable[memoryview], start: int = 0) -> int:
    """CRC-32 of these bytes, after those that gave `start`.

    It is the fastest that the standard library has; and as no checksum without a secret protects from
    malicious peers, longer ones would buy little: damage goes unseen once in 4e9.
    """
    for part in parts:
        start = zlib.crc32(part, start)
    return start


def envelope(key: str, nbytes: int, crc: int) -> bytes:
    """The envelope of an object of so many bytes with this checksum: 64 bytes."""
    return _FORMAT.pack(_MAGIC, nbytes, hashlib.sha256(key.encode()).digest(), crc)


def blocks(parts: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The parts in order, in blocks so small that they are still in a core's cache when they are summed."""
    block: list[memoryview] = []
    room = BLOCK
    for part in parts:
        while part.nbytes:
            piece, part = part[:room], part[room:]
            block.append(piece)
            room -= piece.nbytes
            if room == 0 or len(block) == IOV_MAX:
                yield block
                block, room = [], BLOCK
    if block:
        yield block
