"""The content-addressed cache of compiled code: requests in, verified binaries out.

An entry is a folder ``<root>/<kind>/<name>-<request>-<compiler>/`` with one or more binaries and
`manifest.json`, which holds everything that decided their bytes. Entries appear whole, by one rename, and
never change afterwards; readers take no lock. Nothing is forced to disk: an entry that a crash of the
machine has torn fails its checksums and is built again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from poolwright.runtime.errors import BackendUnavailable, PoolError
from poolwright.runtime.toolchain import Compiler

FORMAT = 2
STALE_SECONDS = 24 * 3600
_log = logging.getLogger("poolwright")


@dataclass(frozen=True)
class Request:
    """What is asked of any compiler. `sources`, `headers`: (name, sha256); `arch`: what it runs on.

    `parts`: names of the binaries when there are several.
    """

    kind: str
    name: str
    sources: tuple[tuple[str, str], ...]
    headers: tuple[tuple[str, str], ...]
    defines: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]
    arch: str
    parts: tuple[str, ...] = ()

    @cached_property
    def text(self) -> str:
        """The request as JSON; the manifest holds it."""
        return json.dumps({"format": FORMAT, **{name: getattr(self, name) for name in _FIELDS}})

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


_FIELDS = sorted(field.name for field in dataclasses.fields(Request))


@dataclass(frozen=True)
class Key:
    """A request to one compiler: the name of one entry."""

    request: Request
    compiler: Compiler

    @property
    def digest(self) -> str:
        return _digest([self.request.digest, self.compiler.identity])

    @property
    def folder(self) -> str:
        return f"{_stem(self.request)}{_digest(self.compiler.identity)[:8]}"


class Binary(NamedTuple):
    """A file of an entry, and its bytes: those whose checksum was compared."""

    path: Path
    data: bytes


Build = Callable[[Sequence[Key], Path], Iterable[tuple[Key, Mapping[str, Path]]]]
"""Builds what is missing below a scratch folder; yields the files of each key by the names they get."""


class Corrupt(PoolError):
    """An entry whose binary is not what its manifest says."""

    def __init__(self, entry: Path, why: str) -> None:
        self.entry, self.why = entry, why
        super().__init__(f"cache entry {entry} is corrupt: {why}; delete the folder to build it again")


class Cache:
    """The cache below `root`; making the object touches nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, key: Key) -> tuple[Binary, ...] | None:
        """The binaries of `key`, or None. Raises Corrupt."""
        return self._read(self._entry(key), key.request)

    def find_any(self, request: Request) -> tuple[Binary, ...] | None:
        """Binaries made for `request` by any compiler, or None. Raises Corrupt if it finds no whole ones."""
        broken: Corrupt | None = None
        for entry in sorted((self.root / request.kind).glob(f"{_stem(request)}*")):
            try:
                found = self._read(entry, request)
            except Corrupt as error:
                broken = error
                continue
            if found:
                return found
        if broken:
            raise broken
        return None

    def obtain(self, keys: Sequence[Key], build: Build) -> list[tuple[Binary, ...]]:
        """The binaries of `keys`, in order; calls `build` once for those that are missing.

        `build(missing, scratch)` yields (key, built files) as they come; what it yielded before it raised
        is kept. One process builds a key, others wait for it. A corrupt entry is moved aside and built
        again. Raises BackendUnavailable if something has to be built and the cache cannot be written.
        """
        found = {key: self._whole(key) for key in keys}
        missing = [key for key, binary in found.items() if binary is None]
        if missing:
            with self._locked(sorted(key.digest for key in missing)):
                # Somebody else may have built them while this process waited.
                absent = [key for key in missing if self._whole(key, move_aside=True) is None]
                if absent:
                    with self._scratch() as scratch:
                        for key, built in build(absent, scratch):
                            self._publish(key, built, scratch)
        return [found[key] or self._published(key) for key in keys]

    def log_start(self, key: Key) -> None:
        """Appends a line to `builds.log`: a compiler is about to start."""
        line = f"{int(time.time())} {os.getpid()} {key.compiler.kind} {key.request.name} {key.digest}\n"
        # One unbuffered write in append mode: lines of several processes never mix.
        with self._writing(), (self.root / "builds.log").open("ab", buffering=0) as log:
            log.write(line.encode())

    def keep_log(self, key: Key, text: str) -> Path | None:
        """Keeps what a compiler said; None if it cannot be kept (the error it belongs to matters more)."""
        path = self.root / "logs" / f"{key.folder}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError:
            return None
        return path

    def _entry(self, key: Key) -> Path:
        return self.root / key.request.kind / key.folder

    def _published(self, key: Key) -> tuple[Binary, ...]:
        found = self.find(key)
        if found is None:
            raise PoolError(f"cache entry {self._entry(key)} disappeared while it was in use; run again")
        return found

    def _whole(self, key: Key, *, move_aside: bool = False) -> tuple[Binary, ...] | None:
        try:
            return self.find(key)
        except Corrupt as error:
            if move_aside:
                self._move_aside(error.entry)
            else:
                _log.warning("%s", error)
            return None

    def _read(self, entry: Path, request: Request) -> tuple[Binary, ...] | None:
        try:
            manifest = json.loads((entry / "manifest.json").read_bytes())
            asked, files = json.dumps(manifest["request"]), list(manifest["binaries"].items())
            paths = [entry / Path(name).name for name, _ in files]
            found = tuple(Binary(path, path.read_bytes()) for path in paths)
        except OSError as error:
            if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not entry.is_dir():
                return None
            name = Path(str(error.filename)).name
            raise Corrupt(entry, f"{name} cannot be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Corrupt(entry, f"manifest.json cannot be read ({error})") from error
        if asked != request.text or len(found) != max(1, len(request.parts)):
            raise Corrupt(entry, "manifest.json belongs to another request")
        for binary, (name, wanted) in zip(found, files, strict=True):
            got = hashlib.sha256(binary.data).hexdigest()
            if got != wanted:
                raise Corrupt(entry, f"{name} has sha256 {got[:16]}, its manifest says {str(wanted)[:16]}")
        return found

    def _move_aside(self, entry: Path) -> None:
        target = self.root / "corrupt" / f"{entry.name}-{uuid.uuid4().hex[:8]}"
        with self._writing():
            target.parent.mkdir(exist_ok=True)
            entry.rename(target)
        _log.warning("moved %s to %s, building it again", entry.name, target)

    def _publish(self, key: Key, built: Mapping[str, Path], scratch: Path) -> None:
        with self._writing():
            staged = scratch / f"entry-{key.digest}"
            staged.mkdir()
            for name, path in built.items():
                path.rename(staged / name)
            digests = {name: hashlib.sha256((staged / name).read_bytes()).hexdigest() for name in built}
            request, compiler = json.loads(key.request.text), key.compiler.identity
            manifest = {"request": request, "compiler": compiler, "binaries": digests}
            (staged / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            entry = self._entry(key)
            entry.parent.mkdir(exist_ok=True)
            try:
                staged.rename(entry)
            except OSError as error:
                # Somebody was faster, on a file system where locks do not reach: theirs is as good.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    @contextlib.contextmanager
    def _locked(self, digests: Sequence[str]) -> Iterator[None]:
        """Holds the locks of `digests`, taken in the order given; the kernel drops them if we die."""
        with contextlib.ExitStack() as stack:
            with self._writing():
                folder = self.root / "locks"
                folder.mkdir(parents=True, exist_ok=True)
                for digest in digests:
                    handle = stack.enter_context((folder / digest).open("ab"))
                    fcntl.flock(handle, fcntl.LOCK_EX)
                    # Not left to close(): a process forked meanwhile holds the same open file.
                    stack.callback(fcntl.flock, handle, fcntl.LOCK_UN)
            yield

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A folder of this build alone, on the cache's file system; gone afterwards."""
        scratch = self.root / "tmp" / f"{os.getpid()}-{uuid.uuid4().hex}"
        with self._writing():
            scratch.mkdir(parents=True)
        try:
            self._sweep()
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _sweep(self) -> None:
        """Removes what builders that died more than a day ago left behind."""
        for folder in (self.root / "tmp").iterdir():
            with contextlib.suppress(OSError):
                old = time.time() - folder.stat().st_mtime > STALE_SECONDS
                pid = folder.name.partition("-")[0]
                if old and not (pid.isdigit() and Path("/proc", pid).exists()):
                    shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BackendUnavailable(
                f"the cache folder {self.root}",
                f"something has to be built and it cannot be written ({error})",
                "set POOLWRIGHT_CACHE_DIR to a folder that can be written and has room",
            ) from error


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _stem(request: Request) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", request.name):
        raise ValueError(
            f"unit name: expected letters, digits, '_', '.' and '-' (at most 100), got {request.name!r}"
        )
    return f"{request.name}-{request.digest[:24]}-"
