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
from collections.abc import Sequence

from poolwright.runtime.storage.base import Item

SIZE = 64
_FORMAT = struct.Struct("<8sQ32sI12x")
_MAGIC = b"pwpage01"


def view(address: int, nbytes: int) -> memoryview:
    """The memory at this address, not copied: writable bytes ``[nbytes]``. The caller keeps it alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def views(item: Item) -> list[memoryview]:
    """`view` of each part."""
    return [view(address, nbytes) for address, nbytes in item.parts]


def envelope(key: str, parts: Sequence[memoryview]) -> bytes:
    """The envelope of an object with these bytes, 64 bytes. Reads all of them once.

    CRC-32 because it is the fastest that the standard library has, and as no checksum without a secret
    protects from a malicious peer anyway, the longer ones would buy little: damage goes unseen once in 4e9.
    """
    crc, nbytes = 0, 0
    for part in parts:
        crc = zlib.crc32(part, crc)
        nbytes += part.nbytes
    return _FORMAT.pack(_MAGIC, nbytes, hashlib.sha256(key.encode()).digest(), crc)
