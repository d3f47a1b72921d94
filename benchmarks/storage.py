"""Storage backends beside the bare means they stand on, page by page size.

In: a folder, and a Mooncake cluster that is started on loopback where the package is installed. Out: a
table, and JSON if asked. Each repetition runs both sides one after the other, in turn first, so that a busy
machine slows both:

* ``file`` beside plain `os.write` and rename, `os.readv`
* ``mooncake`` beside the engine's own client: one `batch_put_from` or `batch_get_into` of all pages
* checksums of the standard library, and what one costs of a put and a get

Bytes are compared after every get. Run ``python benchmarks/storage.py``; ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from poolwright.runtime.errors import PoolError
from poolwright.runtime.storage import FileStorage, Item, MooncakeStorage, Status, Storage, engine
from poolwright.runtime.storage.cluster import Cluster
from poolwright.runtime.storage.envelope import view

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 8 * MIB)
MOST_PAGES = 128


class Side(Protocol):
    """What is measured: calls that move all pages of the given items, and forget them again."""

    def put(self, items: Sequence[Item]) -> None: ...
    def get(self, items: Sequence[Item]) -> None: ...
    def remove(self, items: Sequence[Item]) -> None: ...


@dataclass(frozen=True)
class Ours:
    """A storage of this project."""

    storage: Storage

    def put(self, items: Sequence[Item]) -> None:
        self._check(self.storage.put(items))

    def get(self, items: Sequence[Item]) -> None:
        self._check(self.storage.get(items))

    def remove(self, items: Sequence[Item]) -> None:
        self._check(self.storage.remove([item.key for item in items]))

    def _check(self, statuses: list[Status]) -> None:
        if set(statuses) != {Status.HIT}:
            sys.exit(f"{self.storage.name}: {statuses}")


@dataclass(frozen=True)
class PlainFiles:
    """One file a page, no envelope, no checksum, no bound."""

    folder: Path

    def put(self, items: Sequence[Item]) -> None:
        for item in items:
            handle = os.open(self._path(item, ".tmp"), os.O_WRONLY | os.O_CREAT)
            os.writev(handle, [view(*part) for part in item.parts])
            os.close(handle)
            self._path(item, ".tmp").rename(self._path(item))

    def get(self, items: Sequence[Item]) -> None:
        for item in items:
            handle = os.open(self._path(item), os.O_RDONLY)
            os.readv(handle, [view(*part) for part in item.parts])
            os.close(handle)

    def remove(self, items: Sequence[Item]) -> None:
        for item in items:
            self._path(item).unlink()

    def _path(self, item: Item, end: str = "") -> Path:
        return self.folder / f"{item.key}{end}"


@dataclass(frozen=True)
class PlainMooncake:
    """The engine's own client: one call for all pages, no envelope, no checksum, no second look."""

    client: Any

    def put(self, items: Sequence[Item]) -> None:
        self._check(self.client.batch_put_from(*_arguments(items)), {0})

    def get(self, items: Sequence[Item]) -> None:
        self._check(self.client.batch_get_into(*_arguments(items)), {items[0].nbytes})

    def remove(self, items: Sequence[Item]) -> None:
        self._check(self.client.batch_remove([item.key for item in items], True), {0})

    def _check(self, codes: list[int], expected: set[int]) -> None:
        if set(codes) != expected:
            sys.exit(f"mooncake: expected {expected}, got {codes}")


def _arguments(items: Sequence[Item]) -> tuple[list[str], list[int], list[int]]:
    parts = [item.parts[0] for item in items]
    return [item.key for item in items], [at for at, _ in parts], [nbytes for _, nbytes in parts]


@dataclass(frozen=True)
class Row:
    """Medians over repetitions. GB/s of all pages at once; microseconds of a page fetched alone."""

    backend: str
    page_bytes: int
    pages: int
    put: float
    plain_put: float
    get: float
    plain_get: float
    single_get_us: float
    plain_single_get_us: float

    @property
    def line(self) -> str:
        """As a row of the table."""
        shares = (100 * self.put / self.plain_put, 100 * self.get / self.plain_get)
        return (
            f"| {self.backend} | {self.page_bytes // KIB} KiB | {self.pages} "
            f"| {self.put:.2f} | {self.plain_put:.2f} | {shares[0]:.0f} "
            f"| {self.get:.2f} | {self.plain_get:.2f} | {shares[1]:.0f} "
            f"| {self.single_get_us:.0f} | {self.plain_single_get_us:.0f} |"
        )


HEADER = (
    "| backend | page | pages | put GB/s | plain | % | get GB/s | plain | % | one get us | plain us |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


class Pages:
    """Source pages with random bytes, and destination pages, `total` bytes each."""

    def __init__(self, total: int) -> None:
        self._maps = [mmap.mmap(-1, total) for _ in range(2)]
        self._maps[0][:] = os.urandom(MIB) * (total // MIB)
        self.source, self.target = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in self._maps)

    def items(self, base: int, name: str, nbytes: int, count: int) -> list[Item]:
        return [Item(f"{name}-{at}", ((base + at * nbytes, nbytes),)) for at in range(count)]

    def poison(self) -> None:
        ctypes.memset(self.target, 0xA5, len(self._maps[1]))

    def check(self, nbytes: int) -> None:
        if self._maps[0][:nbytes] != self._maps[1][:nbytes]:
            sys.exit("wrong bytes came back")


def seconds(run: Callable[[Any], object], given: Any) -> float:
    start = time.perf_counter()
    run(given)
    return time.perf_counter() - start


def measure(backend: str, sides: Sequence[Side], pages: Pages, nbytes: int, count: int, repeats: int) -> Row:
    """Both sides (ours, plain), interleaved."""
    times: dict[tuple[int, str], list[float]] = {}
    for turn in range(repeats + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            side, name = sides[which], f"{backend}-{nbytes}-{turn}-{which}"
            source = pages.items(pages.source, name, nbytes, count)
            target = pages.items(pages.target, name, nbytes, count)
            pages.poison()
            found = {"put": seconds(side.put, source), "get": seconds(side.get, target)}
            pages.check(nbytes * count)
            found["single"] = statistics.median(seconds(side.get, [item]) for item in target[:16])
            side.remove(source)
            if turn:  # the first meets cold caches and connections
                for what, took in found.items():
                    times.setdefault((which, what), []).append(took)
    medians = {key: statistics.median(each) for key, each in times.items()}
    speed = {key: nbytes * count / took / 1e9 for key, took in medians.items()}
    return Row(
        backend,
        nbytes,
        count,
        speed[0, "put"],
        speed[1, "put"],
        speed[0, "get"],
        speed[1, "get"],
        medians[0, "single"] * 1e6,
        medians[1, "single"] * 1e6,
    )


@contextmanager
def file_sides(folder: Path) -> Iterator[tuple[Side, Side]]:
    plain = folder / "plain"
    plain.mkdir()
    with FileStorage(folder / "ours", 4 << 30) as storage:
        yield Ours(storage), PlainFiles(plain)


@contextmanager
def mooncake_sides(folder: Path, total: int) -> Iterator[tuple[Side, Side]]:
    with Cluster(folder / "servers") as servers:
        servers.start_master()
        servers.start_node(max(8 * total, 256 * MIB))
        with (
            MooncakeStorage.connect(servers.address) as storage,
            closing(engine.connect(servers.address, "127.0.0.1", "tcp", "")) as client,
        ):
            yield Ours(storage), PlainMooncake(client)


def checksums(repeats: int) -> dict[str, dict[int, float]]:
    """GB/s of the standard library's checksums, by page size; the best of `repeats`."""
    ways: dict[str, Callable[[memoryview], object]] = {
        "zlib.crc32": zlib.crc32,
        "zlib.adler32": zlib.adler32,
        "sha1": lambda data: hashlib.sha1(data, usedforsecurity=False).digest(),
        "sha256": lambda data: hashlib.sha256(data).digest(),
        "blake2b": lambda data: hashlib.blake2b(data).digest(),
    }
    found: dict[str, dict[int, float]] = {name: {} for name in ways}
    for nbytes in SIZES:
        data = memoryview(os.urandom(nbytes))
        for name, way in ways.items():
            best = min(seconds(way, data) for _ in range(3 * repeats))
            found[name][nbytes] = nbytes / best / 1e9
    return found


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description="storage backends beside the bare means they stand on")
    parser.add_argument("--folder", type=Path, help="where files go (default: a temporary folder)")
    parser.add_argument("--mib", type=int, default=64, help="MiB of pages in one call")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    options = parser.parse_args()
    rows: list[Row] = []
    total = options.mib * MIB
    folder = Path(tempfile.mkdtemp(prefix="poolwright-storage-", dir=options.folder))
    pages = Pages(total)
    try:
        print(HEADER)
        for backend, sides in (("file", file_sides(folder)), ("mooncake", mooncake_sides(folder, total))):
            try:
                with sides as pair:
                    for nbytes in SIZES:
                        count = max(1, min(MOST_PAGES, total // nbytes))
                        rows.append(measure(backend, pair, pages, nbytes, count, options.repeats))
                        print(rows[-1].line, flush=True)
            except PoolError as error:
                print(f"{backend}: {error}")
        sums = checksums(options.repeats)
    finally:
        shutil.rmtree(folder)
    print("\n| checksum | " + " | ".join(f"{nbytes // KIB} KiB GB/s" for nbytes in SIZES) + " |")
    print("|---" * (len(SIZES) + 1) + "|")
    for name, speeds in sums.items():
        print(f"| {name} | " + " | ".join(f"{speeds[nbytes]:.2f}" for nbytes in SIZES) + " |")
    if options.json is not None:
        found = {"rows": [asdict(row) for row in rows], "checksums_gb_s": sums}
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
