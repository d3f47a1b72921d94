"""Storage in a folder: nothing but whole, right bytes comes back, whatever happens to files and processes."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import storage_kit as kit
from conftest import ROOT

from poolwright.runtime.errors import BackendUnavailable
from poolwright.runtime.storage import FileStorage, Item, Status
from poolwright.runtime.storage import folder as folders
from poolwright.runtime.storage.envelope import SIZE

HIT, MISS, REFUSED, ERROR = Status.HIT, Status.MISS, Status.REFUSED, Status.ERROR
PAGE = 4096 + 7


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FileStorage]:
    with FileStorage(tmp_path / "pages", 1 << 25) as made:
        yield made


def files(root: Path) -> list[Path]:
    """Every file that is whole."""
    return sorted(path for path in root.glob("??/*"))


def leftovers(root: Path) -> list[Path]:
    return sorted((root / "tmp").iterdir())


@pytest.mark.parametrize(
    ("parts", "nbytes"), [(1, PAGE), (2, PAGE), (1500, PAGE), (1, 1 << 20), (61, 1 << 20)]
)
def test_what_was_put_is_got(storage: FileStorage, tmp_path: Path, parts: int, nbytes: int) -> None:
    traffic = kit.Traffic.of("k", 20, nbytes)
    assert storage.exists(traffic.keys) == [MISS] * 20
    assert storage.get(traffic.incoming(parts)) == [MISS] * 20
    assert storage.put(traffic.outgoing(parts)) == [HIT] * 20
    assert storage.put(traffic.outgoing(parts)) == [HIT] * 20
    assert storage.exists(traffic.keys) == [HIT] * 20
    assert storage.get(traffic.incoming(parts)) == [HIT] * 20
    assert all(traffic.right(at) for at in range(20)) and traffic.unharmed()
    assert storage.remove(traffic.keys[:5]) == [HIT] * 5
    assert storage.remove(traffic.keys[:5]) == [MISS] * 5
    assert storage.get(traffic.incoming(parts)) == [MISS] * 5 + [HIT] * 15
    assert leftovers(tmp_path / "pages") == []


def test_reads_and_writes_that_do_only_a_part_go_on(
    storage: FileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def little(call: Callable[[int, list[memoryview]], int]) -> Callable[[int, list[memoryview]], int]:
        return lambda handle, buffers: call(handle, [buffers[0][: 1 + buffers[0].nbytes // 2]])

    monkeypatch.setattr(os, "readv", little(os.readv))
    monkeypatch.setattr(os, "writev", little(os.writev))
    traffic = kit.Traffic.of("k", 3, PAGE)
    assert storage.put(traffic.outgoing(3)) == [HIT] * 3
    assert storage.get(traffic.incoming(3)) == [HIT] * 3
    assert all(traffic.right(at) for at in range(3))


def test_parts_may_be_cut_otherwise_when_read(storage: FileStorage) -> None:
    traffic = kit.Traffic.of("k", 3, PAGE)
    assert storage.put(traffic.outgoing(7)) == [HIT] * 3
    assert storage.get(traffic.incoming(2)) == [HIT] * 3
    assert all(traffic.right(at) for at in range(3))


def test_a_page_without_bytes_is_there_or_not(storage: FileStorage) -> None:
    empty = Item("empty", ())
    assert storage.get([empty]) == [MISS]
    assert storage.put([empty]) == [HIT]
    assert storage.get([empty]) == [HIT]


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _flip(at: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return flip


DAMAGE = [_cut, _empty, _zeros, _longer, *(_flip(at) for at in (0, 8, 16, 48, 60, SIZE, SIZE + 1000, -1))]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_and_makes_room(
    storage: FileStorage, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    traffic = kit.Traffic.of("k", 1, PAGE)
    storage.put(traffic.outgoing())
    (path,) = files(tmp_path / "pages")
    damage(path)
    assert storage.get(traffic.incoming()) == [MISS]
    assert not path.exists(), "what is damaged must not be in the way of the next put"
    assert storage.put(traffic.outgoing()) == [HIT]
    assert storage.get(traffic.incoming()) == [HIT] and traffic.right(0)


def test_another_key_s_file_is_a_miss(storage: FileStorage, tmp_path: Path) -> None:
    traffic = kit.Traffic.of("k", 2, PAGE)
    storage.put(traffic.outgoing()[:1])
    (first,) = files(tmp_path / "pages")
    storage.put(traffic.outgoing()[1:])
    (second,) = (path for path in files(tmp_path / "pages") if path != first)
    second.write_bytes(first.read_bytes())
    assert storage.get(traffic.incoming()) == [HIT, MISS]


def test_a_page_of_another_size_is_a_miss(storage: FileStorage) -> None:
    small, large = kit.Traffic.of("k", 1, 64), kit.Traffic.of("k", 1, 128)
    storage.put(small.outgoing())
    assert storage.get(large.incoming()) == [MISS]
    storage.put(large.outgoing())
    assert storage.get(small.incoming()) == [MISS]


def test_a_put_over_a_file_cut_short_writes_it_anew(storage: FileStorage, tmp_path: Path) -> None:
    traffic = kit.Traffic.of("k", 1, PAGE)
    storage.put(traffic.outgoing())
    _cut(*files(tmp_path / "pages"))
    assert storage.put(traffic.outgoing()) == [HIT]
    assert storage.get(traffic.incoming()) == [HIT] and traffic.right(0)


# ---- bounds


def usage(root: Path) -> int:
    return sum(path.stat().st_size for path in (*files(root), *leftovers(root)))


def test_the_folder_stays_within_its_bound_and_the_oldest_go(tmp_path: Path) -> None:
    each = PAGE + SIZE
    capacity = 32 * each
    with FileStorage(tmp_path, capacity, chunk=1, workers=1) as storage:
        traffic = kit.Traffic.of("k", 100, PAGE)
        for at, item in enumerate(traffic.outgoing()):
            assert storage.put([item]) == [HIT]
            for path in files(tmp_path):  # what was used first is oldest, whatever the clock's grain
                os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 1))
            assert usage(tmp_path) <= capacity, f"after {at + 1} pages"
        there = [status is HIT for status in storage.exists(traffic.keys)]
        assert there[-28:] == [True] * 28
        assert sum(there) <= 32 and not any(there[:40])


def test_files_of_others_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    others = [
        tmp_path / name for name in ("mine.txt", "ab/mine.txt", f"ab/{'0' * 64}", "tmp/x", "music/song")
    ]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(1000))
        os.utime(path, (0, 0))
    traffic = kit.Traffic.of("k", 20, PAGE)
    with FileStorage(tmp_path, 4 * PAGE + 999, chunk=1) as storage:
        assert int.from_bytes((tmp_path / "usage").read_bytes(), "little") == 0
        assert storage.put(traffic.outgoing()) == [HIT] * 20
        assert HIT in storage.get(traffic.incoming())
    assert all(path.read_bytes() == bytes(1000) for path in others)


def test_a_used_page_outlives_unused_ones(tmp_path: Path) -> None:
    with FileStorage(tmp_path, 32 * (PAGE + SIZE), chunk=1, workers=1) as storage:
        traffic = kit.Traffic.of("k", 64, PAGE)
        for at, item in enumerate(traffic.outgoing()):
            assert storage.put([item]) == [HIT]
            for path in files(tmp_path):
                os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 1))
            kept = traffic.incoming()[:1] if at % 2 else traffic.outgoing()[:1]
            assert (storage.get if at % 2 else storage.put)(kept) == [HIT], "both are a use"
        assert storage.exists(traffic.keys[:2]) == [HIT, MISS]


def test_a_page_larger_than_the_folder_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    small, large = kit.Traffic.of("s", 4, 64), kit.Traffic.of("l", 1, 2048)
    with FileStorage(tmp_path, 2048) as storage:
        assert storage.put(small.outgoing()) == [HIT] * 4
        assert storage.put(large.outgoing()) == [REFUSED]
        assert storage.get(small.incoming()) == [HIT] * 4
        assert large.unharmed() and leftovers(tmp_path) == []


def test_bytes_of_removed_and_damaged_pages_are_free_again(tmp_path: Path) -> None:
    traffic = kit.Traffic.of("k", 1, PAGE)
    with FileStorage(tmp_path, 1 << 20) as storage:
        for _ in range(3):
            storage.put(traffic.outgoing())
            storage.remove(traffic.keys)
            storage.put(traffic.outgoing())
            _zeros(*files(tmp_path))
            storage.get(traffic.incoming())
        assert int.from_bytes((tmp_path / "usage").read_bytes(), "little") == 0


def test_a_full_disk_is_a_refusal(
    storage: FileStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    traffic = kit.Traffic.of("k", 2, PAGE)
    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", full)
        assert storage.put(traffic.outgoing()) == [REFUSED] * 2
    assert leftovers(tmp_path / "pages") == [] and traffic.unharmed()
    assert storage.put(traffic.outgoing()) == [HIT] * 2


def test_an_unreadable_disk_is_an_error_of_each_page(
    storage: FileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    traffic = kit.Traffic.of("k", 2, PAGE)
    storage.put(traffic.outgoing())
    monkeypatch.setattr(os, "readv", broken)
    assert storage.get(traffic.incoming()) == [ERROR] * 2
    assert storage.exists(traffic.keys) == [HIT] * 2


# ---- several processes

CHILD = """
import sys
from pathlib import Path
import storage_kit as kit
from poolwright.runtime.storage import FileStorage
root, names, count, nbytes, rounds = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
traffic = kit.Traffic.of(names, count, nbytes)
print("ready", flush=True)
sys.stdin.readline()
with FileStorage(root, 1 << 24) as storage:
    for _ in range(rounds):
        print(*(status.value for status in storage.put(traffic.outgoing())), flush=True)
        storage.remove(traffic.keys[::2])
"""


def child(root: Path, *arguments: object) -> subprocess.Popen[str]:
    """A writer in a process of its own, which starts when a line is written to it."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / '.src'}:{ROOT / 'tests'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_two_writers_of_one_key_and_readers_never_see_anything_else(tmp_path: Path) -> None:
    writers = [child(tmp_path, "k", 16, PAGE, 20) for _ in range(2)]
    traffic = kit.Traffic.of("k", 16, PAGE)
    with FileStorage(tmp_path, 1 << 24) as storage:
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        while any(writer.poll() is None for writer in writers):
            statuses = storage.get(traffic.incoming())
            assert all(status in (HIT, MISS) for status in statuses)
            assert all(traffic.right(at) for at, status in enumerate(statuses) if status is HIT)
        for writer in writers:
            out, _ = writer.communicate()
            assert writer.returncode == 0 and set(out.split()) == {"hit"}
        assert storage.get(traffic.incoming())[1::2] == [HIT] * 8
    assert leftovers(tmp_path) == []


def test_a_writer_killed_in_a_put_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    writer = child(tmp_path, "k", 64, 1 << 20, 1000)
    traffic = kit.Traffic.of("k", 64, 1 << 20)
    with FileStorage(tmp_path, 1 << 24) as storage:
        assert writer.stdin is not None and writer.stdout is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
        while not leftovers(tmp_path):
            pass
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        statuses = storage.get(traffic.incoming())
        assert all(status in (HIT, MISS) for status in statuses)
        assert all(traffic.right(at) for at, status in enumerate(statuses) if status is HIT)
        assert storage.put(traffic.outgoing()[:4]) == [HIT] * 4
        assert storage.get(traffic.incoming()[:4]) == [HIT] * 4


def test_what_a_killed_writer_left_is_counted_then_swept(tmp_path: Path) -> None:
    with FileStorage(tmp_path, 1 << 20):
        pass
    left = tmp_path / "tmp" / ("0123" * 8)
    left.write_bytes(bytes(1000))
    with FileStorage(tmp_path, 1 << 20):
        assert left.exists(), "its writer may be alive"
    assert int.from_bytes((tmp_path / "usage").read_bytes(), "little") == 1000
    old = left.stat().st_mtime - folders.STALE_S - 1
    os.utime(left, (old, old))
    with FileStorage(tmp_path, 1 << 20):
        assert not left.exists()
    assert int.from_bytes((tmp_path / "usage").read_bytes(), "little") == 0


def test_a_folder_that_another_process_keeps_locked_refuses(
    storage: FileStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "LOCK_S", 0.01)
    traffic = kit.Traffic.of("k", 1, PAGE)
    with (tmp_path / "pages" / "usage").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert storage.put(traffic.outgoing()) == [REFUSED]
    assert storage.put(traffic.outgoing()) == [HIT]


# ---- wrong arguments


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None])
def test_impossible_capacities_are_refused(tmp_path: Path, bad: object) -> None:
    with pytest.raises(ValueError, match="capacity_bytes: expected an integer of at least 1"):
        FileStorage(tmp_path, bad)  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        BackendUnavailable, match=r"storage folder .*file is not available: .*; to mend it: mkdir"
    ):
        FileStorage(tmp_path / "file", 1 << 20)


def test_files_are_shared_with_other_users_as_the_umask_says(storage: FileStorage, tmp_path: Path) -> None:
    traffic = kit.Traffic.of("k", 1, PAGE)
    before = os.umask(0o027)
    try:
        storage.put(traffic.outgoing())
    finally:
        os.umask(before)
    (path,) = files(tmp_path / "pages")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
