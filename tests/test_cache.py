"""The cache: what a key depends on, publication, corruption, no half entries, read-only use."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from poolwright.runtime.cache import STALE_SECONDS, Binary, Build, Cache, Corrupt, Key, Request
from poolwright.runtime.errors import BackendUnavailable
from poolwright.runtime.toolchain import Compiler

REQUEST = Request(
    kind="host",
    name="mla",
    sources=(("host.cpp", "aa"),),
    headers=(("include/prim.h", "bb"),),
    defines=(("ROWS", "4"),),
    flags=("-O2",),
    arch="linux-x86_64",
)
GCC = Compiler("c++", ("/usr/bin/c++",), "gcc version 12", "x86_64-linux-gnu")
CLANG = Compiler("c++", ("/usr/bin/clang++",), "clang version 18", "x86_64-linux-gnu")
KEY = Key(REQUEST, GCC)


def builder(content: bytes = b"binary", log: list[Key] | None = None) -> Build:
    """A build that makes the same bytes for every key and notes what it was asked for."""

    def build(keys: Sequence[Key], scratch: Path) -> Iterator[tuple[Key, dict[str, Path]]]:
        for i, key in enumerate(keys):
            if log is not None:
                log.append(key)
            names = key.request.parts or (key.request.name,)
            paths = {f"{name}.so": scratch / f"{i}-{name}" for name in names}
            for path in paths.values():
                path.write_bytes(content)
            yield key, paths

    return build


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    "change",
    [
        {"sources": (("host.cpp", "ab"),)},
        {"headers": (("include/prim.h", "bc"),)},
        {"headers": ()},
        {"defines": (("ROWS", "5"),)},
        {"flags": ("-O3",)},
        {"arch": "linux-aarch64"},
        {"kind": "cubin"},
        {"name": "mha"},
        {"parts": ("first",)},
    ],
)
def test_every_part_of_a_request_is_part_of_the_key(change: dict[str, object]) -> None:
    other = Key(dataclasses.replace(REQUEST, **change), GCC)  # type: ignore[arg-type]
    assert other.digest != KEY.digest
    assert other.folder != KEY.folder


def test_the_compiler_is_part_of_the_key_and_its_path_is_not() -> None:
    elsewhere = dataclasses.replace(GCC, command=("/opt/bin/c++",))
    with_argument = dataclasses.replace(GCC, command=("/usr/bin/c++", "-m32"))
    assert Key(REQUEST, elsewhere).digest == KEY.digest
    for compiler in (CLANG, with_argument, dataclasses.replace(GCC, target="aarch64-linux-gnu")):
        assert Key(REQUEST, compiler).digest != KEY.digest
        assert Key(REQUEST, compiler).folder[:-8] == KEY.folder[:-8]


def test_an_entry_holds_the_binary_and_all_that_went_into_its_key(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    assert cache.find(KEY) is None
    assert not cache.root.exists()
    (found,) = cache.obtain([KEY], builder())
    binary = cache.root / "host" / KEY.folder / "mla.so"
    assert found == (Binary(binary, b"binary"),)
    assert cache.find(KEY) == found
    manifest = json.loads((binary.parent / "manifest.json").read_text())
    fields = [field.name for field in dataclasses.fields(REQUEST)]
    assert manifest["request"].keys() == {"format", *fields}
    assert manifest["request"]["defines"] == [["ROWS", "4"]]
    assert manifest["compiler"]["version"] == "gcc version 12"
    assert list(manifest["binaries"]) == ["mla.so"]
    assert list((cache.root / "tmp").iterdir()) == []


def test_only_missing_keys_are_built_and_the_order_is_kept(tmp_path: Path) -> None:
    cache, asked = Cache(tmp_path), list[Key]()
    second = Key(dataclasses.replace(REQUEST, name="mha"), GCC)
    (first,) = cache.obtain([KEY], builder(log=asked))
    found = cache.obtain([second, KEY, second], builder(log=asked))
    assert asked == [KEY, second]
    assert [binary.path.name for (binary,) in found] == ["mha.so", "mla.so", "mha.so"]
    assert found[1] == first


def test_the_parts_of_an_entry_keep_their_order(tmp_path: Path) -> None:
    key = Key(dataclasses.replace(REQUEST, parts=("z", "a", "m")), GCC)
    for _ in range(2):
        (found,) = Cache(tmp_path).obtain([key], builder())
        assert [binary.path.name for binary in found] == ["z.so", "a.so", "m.so"]


def test_a_build_that_raises_leaves_nothing_of_itself_and_keeps_what_was_ready(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    second = Key(dataclasses.replace(REQUEST, name="mha"), GCC)

    def build(keys: Sequence[Key], scratch: Path) -> Iterator[tuple[Key, dict[str, Path]]]:
        (scratch / "half.so").write_bytes(b"ha")
        yield from builder()(keys[:1], scratch)
        raise RuntimeError("the second does not compile")

    with pytest.raises(RuntimeError, match="the second does not compile"):
        cache.obtain([KEY, second], build)
    assert cache.find(KEY) is not None
    assert cache.find(second) is None
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    ["flip", "truncate", "no binary", "no manifest", "manifest", "no dict", "fewer", "other"],
)
def test_a_corrupt_entry_is_named_moved_aside_and_rebuilt(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tmp_path)
    (found,) = cache.obtain([KEY], builder())
    binary = found[0].path
    manifest = binary.parent / "manifest.json"
    if damage == "flip":
        binary.write_bytes(b"binarz")
    elif damage == "truncate":
        binary.write_bytes(b"")
    elif damage == "no binary":
        binary.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    elif damage == "no dict":
        manifest.write_text('{"request": {}, "binaries": []}')
    elif damage == "fewer":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "binaries": {}}))
    else:
        manifest.write_text(manifest.read_text().replace("-O2", "-O3"))

    with pytest.raises(Corrupt, match=KEY.folder):
        cache.find(KEY)
    with pytest.raises(Corrupt, match=KEY.folder):
        cache.find_any(REQUEST)
    assert cache.obtain([KEY], builder()) == [found]
    assert binary.read_bytes() == b"binary"
    assert KEY.folder in caplog.text
    assert [p.name.startswith(KEY.folder) for p in (tmp_path / "corrupt").iterdir()] == [True]


def test_find_any_takes_a_binary_of_any_compiler_and_of_no_other_request(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.find_any(REQUEST) is None
    (found,) = cache.obtain([Key(REQUEST, CLANG)], builder())
    assert cache.find(KEY) is None
    assert cache.find_any(REQUEST) == found
    assert cache.find_any(dataclasses.replace(REQUEST, defines=(("ROWS", "5"),))) is None


def test_find_any_passes_over_a_corrupt_entry_to_a_whole_one(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    both = cache.obtain([Key(REQUEST, CLANG), KEY], builder())
    for broken, whole in (both, both[::-1]):
        broken[0].path.write_bytes(b"")
        assert cache.find_any(REQUEST) == whole
        broken[0].path.write_bytes(b"binary")


def test_reading_a_filled_cache_writes_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.obtain([KEY], builder())
    before = files(tmp_path)
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        cache.obtain([KEY], builder())
        cache.find_any(REQUEST)
        assert files(tmp_path) == before
    finally:
        for path in [tmp_path, *tmp_path.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_cache_that_cannot_be_written_says_which_variable_moves_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = Cache(tmp_path / "file" / "cache")
    assert cache.find(KEY) is None
    assert cache.find_any(REQUEST) is None
    with pytest.raises(BackendUnavailable) as caught:
        cache.obtain([KEY], builder())
    assert str(cache.root) in str(caught.value)
    assert "set POOLWRIGHT_CACHE_DIR to a folder that can be written" in str(caught.value)


def test_what_a_dead_builder_left_is_swept_after_a_day(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    nobody = 2**22 + 1  # larger than any process id that Linux gives
    ages = {
        f"{nobody}-old": STALE_SECONDS + 60,
        f"{nobody}-young": 60,
        f"{os.getpid()}-old": STALE_SECONDS + 60,
    }
    for name, age in ages.items():
        folder = tmp_path / "tmp" / name
        folder.mkdir(parents=True)
        (folder / "0.so").write_bytes(b"half")
        os.utime(folder, (time.time() - age,) * 2)
    cache.obtain([KEY], builder())
    assert sorted(p.name for p in (tmp_path / "tmp").iterdir()) == sorted([*ages][1:])


def test_a_name_that_could_leave_the_cache_is_refused(tmp_path: Path) -> None:
    for name in ("../mla", "", "a b", "*", ".hidden", "x" * 101):
        with pytest.raises(ValueError, match="unit name: expected"):
            Cache(tmp_path).obtain([Key(dataclasses.replace(REQUEST, name=name), GCC)], builder())
