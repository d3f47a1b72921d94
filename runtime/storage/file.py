"""Storage in a folder: one file an object, written beside its place and renamed. Needs nothing running.

Several processes may use a folder, also one on a shared file system. Nothing is synced to disk: after a
power loss a file may be short or hold zeros, which its size and checksum tell.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from poolwright.runtime.errors import BackendUnavailable
from poolwright.runtime.storage import envelope
from poolwright.runtime.storage.base import Item, Status, Storage, positive
from poolwright.runtime.storage.folder import Folder

_log = logging.getLogger("poolwright")
_T = TypeVar("_T", Item, str)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileStorage(Storage):
    """Objects as files of `folder`, of at most `capacity_bytes` in all; those not used for longest go first.

    Raises ValueError for a capacity below 1, BackendUnavailable for a folder that cannot be used.
    """

    def __init__(self, folder: str | Path, capacity_bytes: int, *, chunk: int = 8, workers: int = 2) -> None:
        capacity_bytes = positive("capacity_bytes", capacity_bytes)
        super().__init__(f"file:{folder}", chunk, workers)
        try:
            self._folder = Folder(Path(folder).expanduser(), capacity_bytes)
        except OSError as error:
            command = f"mkdir -p {folder}, or name a folder that can be written"
            raise BackendUnavailable(f"storage folder {folder}", str(error), command) from error

    def _put(self, items: Sequence[Item]) -> list[Status]:
        return [self._attempt(self._write, item, Status.REFUSED) for item in items]

    def _get(self, items: Sequence[Item]) -> list[Status]:
        return [self._attempt(self._read, item) for item in items]

    def _exists(self, keys: Sequence[str]) -> list[Status]:
        return [self._attempt(self._look, key) for key in keys]

    def _remove(self, keys: Sequence[str]) -> list[Status]:
        return [self._attempt(self._drop, key) for key in keys]

    def _close(self) -> None:
        self._folder.close()

    # ---- one object

    def _write(self, item: Item) -> Status:
        digest, nbytes = _digest(item.key), envelope.SIZE + item.nbytes
        path = self._folder.path(digest)
        if _touch(path, nbytes):
            return Status.HIT
        made = self._folder.create(nbytes)
        if made is None:
            return Status.REFUSED
        handle, temporary = made
        try:
            try:
                _fill(handle, item)
            finally:
                os.close(handle)
            self._folder.publish(temporary, digest)
        except OSError:
            self._folder.drop(temporary)
            raise
        return Status.HIT

    def _read(self, item: Item) -> Status:
        path = self._folder.path(_digest(item.key))
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(handle).st_size == envelope.SIZE + item.nbytes and _take(handle, item):
                with contextlib.suppress(OSError):  # a folder that may only be read has no order of use
                    os.utime(handle)
                return Status.HIT
        finally:
            os.close(handle)
        _log.warning("storage %s: %s is damaged and is dropped", self.name, path)
        self._folder.drop(path)
        return Status.MISS

    def _look(self, key: str) -> Status:
        return Status.HIT if self._folder.path(_digest(key)).exists() else Status.MISS

    def _drop(self, key: str) -> Status:
        return Status.HIT if self._folder.drop(self._folder.path(_digest(key))) else Status.MISS

    def _attempt(self, run: Callable[[_T], Status], what: _T, gone: Status = Status.MISS) -> Status:
        """The status of one key; `gone`: where another process removed the file meanwhile."""
        try:
            return run(what)
        except FileNotFoundError:
            return gone
        except OSError as error:
            if error.errno in _NO_ROOM:
                return Status.REFUSED
            _log.warning("storage %s: %s", self.name, error)
            return Status.ERROR


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _touch(path: Path, nbytes: int) -> bool:
    """Whether a file of this size is there; it counts as used now."""
    try:
        if path.stat().st_size != nbytes:
            return False
        os.utime(path)
    except FileNotFoundError:
        return False
    except PermissionError:
        pass  # another user's, and there all the same
    return True


def _fill(handle: int, item: Item) -> None:
    """Write an object into an empty file: the page, then the envelope in front of it."""
    os.lseek(handle, envelope.SIZE, os.SEEK_SET)
    crc = 0
    for block in envelope.blocks(envelope.views(item)):
        crc = envelope.checksum(block, crc)
        _all(os.writev, handle, block)
    os.lseek(handle, 0, os.SEEK_SET)
    _all(os.writev, handle, [memoryview(envelope.envelope(item.key, item.nbytes, crc))])


def _take(handle: int, item: Item) -> bool:
    """Read an object into the item's memory; whether it is this one, and whole."""
    head, crc = bytearray(envelope.SIZE), 0
    if not _all(os.readv, handle, [memoryview(head)]):
        return False
    for block in envelope.blocks(envelope.views(item)):
        if not _all(os.readv, handle, block):
            return False
        crc = envelope.checksum(block, crc)
    return head == envelope.envelope(item.key, item.nbytes, crc)


def _all(call: Callable[[int, list[memoryview]], int], handle: int, buffers: list[memoryview]) -> bool:
    """`os.readv` or `os.writev` until every buffer is done; False at an early end of the file."""
    at, left = 0, list(buffers)
    while at < len(left):
        done = call(handle, left[at:])
        if done == 0:
            return False
        while at < len(left) and done >= left[at].nbytes:
            done -= left[at].nbytes
            at += 1
        if done:
            left[at] = left[at][done:]
    return True
