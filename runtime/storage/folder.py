"""A bounded folder of files that several processes fill. In: sizes. Out: files that appear whole.

<root>/usage           bytes taken; whoever changes it holds its lock
<root>/tmp/...         files being written; counted from the moment they are made
<root>/<aa>/<digest>   files that are whole; the time of their last use is their mtime
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LOCK_S = 2.0
STALE_S = 600.0
KEEP = 15 / 16  # of the capacity, after an eviction: so that not every put has to look for the oldest


class Found(NamedTuple):
    """A file of the folder: when it was used last, its bytes, whether it is one being written."""

    used: float
    nbytes: int
    path: str
    temporary: bool


class Folder:
    """Files of at most `capacity_bytes` in all, temporary ones included; the oldest go first.

    The count of bytes may be too high after a crash, never too low while the machine stays up; each
    opening and each eviction counts anew. Raises OSError where the folder cannot be made or read.
    """

    def __init__(self, root: Path, capacity_bytes: int) -> None:
        self.root, self.capacity_bytes = root.absolute(), capacity_bytes
        self._tmp = self.root / "tmp"
        self._tmp.mkdir(parents=True, exist_ok=True)
        self._mutex = threading.Lock()  # locks of one process do not exclude each other's threads
        self._usage = os.open(self.root / "usage", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with self._locked(60 * LOCK_S):
            self._evict(0)

    def path(self, digest: str) -> Path:
        """Where the file of this hex digest is."""
        return self.root / digest[:2] / digest

    def create(self, nbytes: int) -> tuple[int, Path] | None:
        """A new temporary file of this size, open for writing; None when there is no room for it, or
        others keep the folder locked for too long."""
        if nbytes > self.capacity_bytes * KEEP:
            return None
        try:
            with self._locked(LOCK_S):
                if self._count() + nbytes > self.capacity_bytes:
                    self._evict(nbytes)
                self._count(nbytes)
                path = self._tmp / uuid.uuid4().hex
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                os.truncate(handle, nbytes)
                return handle, path
        except TimeoutError:
            return None

    def publish(self, temporary: Path, digest: str) -> None:
        """Give a file that is whole its name; readers see it, or the one before it, and nothing between."""
        target = self.path(digest)
        try:
            temporary.rename(target)
        except FileNotFoundError:
            target.parent.mkdir(exist_ok=True)
            temporary.rename(target)

    def drop(self, path: Path) -> bool:
        """Delete a file; whether it was there."""
        try:
            nbytes = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return False
        with contextlib.suppress(TimeoutError), self._locked(LOCK_S):
            self._count(-nbytes)
        return True

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._usage)

    def _count(self, more: int = 0) -> int:
        """Bytes taken, after adding `more`. Under the lock."""
        count = int.from_bytes(os.pread(self._usage, 8, 0), "little")
        if more:
            count = max(0, count + more)
            os.pwrite(self._usage, count.to_bytes(8, "little"), 0)
        return count

    def _evict(self, incoming: int) -> None:
        """Count anew, and delete the oldest where `incoming` bytes do not fit. Under the lock."""
        files = list(self._files())
        total = sum(found.nbytes for found in files)
        full = total + incoming > self.capacity_bytes
        if full:
            files.sort(key=lambda found: found.used)
        now = time.time()
        for found in files:
            old = found.temporary and found.used < now - STALE_S
            spare = full and not found.temporary and total + incoming > self.capacity_bytes * KEEP
            if old or spare:
                Path(found.path).unlink(missing_ok=True)
                total -= found.nbytes
        os.pwrite(self._usage, total.to_bytes(8, "little"), 0)

    def _files(self) -> Iterator[Found]:
        """Files of this folder; whatever else lies here is not looked at."""
        for folder in (self._tmp, *self.root.glob("[0-9a-f][0-9a-f]")):
            name = re.compile("[0-9a-f]{32}" if folder == self._tmp else f"{folder.name}[0-9a-f]{{62}}")
            with os.scandir(folder) as entries:
                for entry in entries:
                    if not name.fullmatch(entry.name):
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        stat = entry.stat(follow_symlinks=False)
                        yield Found(stat.st_mtime, stat.st_size, entry.path, folder == self._tmp)

    @contextlib.contextmanager
    def _locked(self, seconds: float) -> Iterator[None]:
        """Hold the folder's lock. Raises TimeoutError: a process may have been stopped while it held it."""
        end = time.monotonic() + seconds
        if not self._mutex.acquire(timeout=seconds):
            raise TimeoutError(f"{self.root}: locked for {seconds:.0f} s")
        try:
            while True:
                try:
                    fcntl.flock(self._usage, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise TimeoutError(f"{self.root}: locked for {seconds:.0f} s") from None
                    time.sleep(0.001)
            try:
                yield
            finally:
                fcntl.flock(self._usage, fcntl.LOCK_UN)
        finally:
            self._mutex.release()
