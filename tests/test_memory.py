"""Host memory: placement, registration in chunks with rollback, lifetime, and what is left for it."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from poolwright.runtime import memory
from poolwright.runtime.budget import RESERVE_BYTES
from poolwright.runtime.errors import OutOfMemoryBudget, PoolError
from poolwright.runtime.memory import (
    GUARD,
    HUGE_PAGE,
    PAGE,
    PATTERN,
    HostBuffer,
    HostMemoryError,
    Units,
    available_host_bytes,
)

LONG = 60.0
"""Seconds that no test takes."""


class Pins:
    """A registrar that keeps count; device addresses are host addresses plus `shift`."""

    def __init__(self, shift: int = 1 << 40) -> None:
        self.shift = shift
        self.live: dict[int, int] = {}
        self.calls: list[str] = []
        self.fail_at: int | None = None
        self.largest: int | None = None
        self.gap_at: int | None = None
        self.stuck: set[int] = set()

    def register(self, address: int, nbytes: int) -> int:
        number = len(self.live)
        if number == self.fail_at or (self.largest is not None and nbytes > self.largest):
            raise RuntimeError("rc=2 out of memory")
        first, last = address // PAGE, (address + nbytes - 1) // PAGE
        for start, size in self.live.items():
            if first <= (start + size - 1) // PAGE and start // PAGE <= last:
                raise RuntimeError("rc=712 already registered")
        self.live[address] = nbytes
        self.calls.append(f"+{number}")
        return address + self.shift + (PAGE if number == self.gap_at else 0)

    def unregister(self, address: int) -> None:
        number = list(self.live).index(address)
        if number in self.stuck:
            raise RuntimeError("rc=4 stuck")
        # Reading the memory shows that it is still mapped.
        ctypes.string_at(address, 1)
        del self.live[address]
        self.calls.append(f"-{number}")


def mapped(address: int) -> bool:
    """Whether this process has memory at `address`."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


def resident(address: int, nbytes: int) -> int:
    """Bytes of this range that are in memory, by whole pages."""
    pages = -(-nbytes // PAGE)
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None)
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), found) != 0:
        return 0  # not mapped any more
    return sum(page & 1 for page in found) * PAGE


@pytest.mark.parametrize(("hugepages", "alignment"), [(False, PAGE), (True, HUGE_PAGE)])
@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, 3 * HUGE_PAGE + 5])
def test_a_buffer_is_zeroed_aligned_and_of_its_size(nbytes: int, hugepages: bool, alignment: int) -> None:
    with HostBuffer(nbytes, hugepages=hugepages) as buffer:
        assert buffer.address % alignment == 0
        tensor = buffer.tensor
        assert (tensor.shape, tensor.dtype, tensor.data_ptr()) == ((nbytes,), torch.uint8, buffer.address)
        assert not tensor.any()
        tensor.fill_(7)
        assert buffer.device_address == buffer.address


def test_no_bytes_need_no_memory() -> None:
    """F098."""
    pins = Pins()
    with HostBuffer(0, registrar=pins, hugepages=True, numa_node=0) as buffer:
        assert (buffer.nbytes, buffer.address, buffer.tensor.numel(), buffer.device_address) == (0, 0, 0, 0)
    assert pins.calls == []


def test_pageable_memory_is_lazy_and_registered_memory_is_there() -> None:
    nbytes = 4 * HUGE_PAGE
    with HostBuffer(nbytes) as lazy:
        assert resident(lazy.address, nbytes) < nbytes
    for threads in (0, 1, 3):
        with HostBuffer(nbytes + 1, threads=threads, registrar=Pins()) as buffer:
            assert resident(buffer.address, nbytes) >= nbytes and not buffer.tensor.any()


@pytest.mark.parametrize("unit", [1, 100, 576, PAGE, 3 * PAGE, 5000])
@pytest.mark.parametrize("extra", [0, 1, PAGE + 1])
def test_chunks_cover_all_bytes_and_split_no_unit(unit: int, extra: int) -> None:
    """F052, F053: no call is larger than the chunk; every chunk starts on a unit and on a memory page."""
    pins = Pins()
    chunk = 2 * math.lcm(unit, PAGE) + PAGE - 1
    nbytes = 3 * chunk + extra
    units = [Units(0, unit, nbytes // unit)]
    with HostBuffer(nbytes, registrar=pins, units=units, chunk_bytes=chunk) as buffer:
        at = buffer.address
        for start, size in pins.live.items():
            assert start == at and 0 < size <= chunk
            assert (start - buffer.address) % unit == 0 and start % PAGE == 0
            at += size
        assert at == buffer.address + nbytes and len(pins.live) >= 3
    assert not pins.live


def test_one_chunk_takes_units_of_any_size() -> None:
    pins = Pins()
    with HostBuffer(3 * 5001, registrar=pins, units=[Units(0, 5001, 3)], chunk_bytes=16_000) as buffer:
        assert pins.live == {buffer.address: 3 * 5001}


@pytest.mark.parametrize(
    "sizes", [(3 * PAGE, 2 * PAGE), (PAGE // 2, 3 * PAGE // 2), (576, 1152), (5 * PAGE, 1)]
)
def test_chunks_split_no_unit_of_any_component(sizes: tuple[int, int]) -> None:
    """Components of unequal pages, one behind the other: the pages of neither are split."""
    pins, count = Pins(), 64
    first = Units(0, sizes[0], count)
    units = [first, Units(first.end, sizes[1], count)]
    nbytes = units[-1].end
    chunk = 2 * max(math.lcm(size, PAGE) for size in sizes)
    with HostBuffer(nbytes, registrar=pins, units=units[::-1], chunk_bytes=chunk) as buffer:
        assert len(pins.live) >= 2 or nbytes <= chunk
        assert buffer.borders == tuple(start + pins.shift for start in sorted(pins.live)[1:])
        for start, size in pins.live.items():
            at = start - buffer.address
            assert start % PAGE == 0 and 0 < size <= chunk
            for unit in units:
                assert not unit.start < at < unit.end or (at - unit.start) % unit.nbytes == 0
        assert sum(pins.live.values()) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "units", "message"),
    [
        (-1, [], "expected nbytes >= 0 and units of at least a byte in them, got -1, "),
        (1, [Units(0, 0, 1)], "expected nbytes >= 0 and units of at least a byte in them, got 1, "),
        (1, [Units(0, 1, 2)], "expected nbytes >= 0 and units of at least a byte in them, got 1, "),
        (
            90_000,
            [Units(0, 5001, 17)],
            "a chunk of 16,000 bytes from byte 0 of a host buffer can end nowhere: no copy unit of 5,001"
            " bytes ends on a memory page there; raise POOLWRIGHT_REGISTER_CHUNK_GB",
        ),
    ],
)
def test_impossible_sizes_are_refused(nbytes: int, units: list[Units], message: str) -> None:
    pins = Pins()
    with pytest.raises(ValueError) as error:
        HostBuffer(nbytes, registrar=pins, units=units, chunk_bytes=16_000)
    assert str(error.value).startswith(message) and pins.calls == []


def test_the_device_address_is_the_alias_and_the_tensor_is_the_host_address() -> None:
    """F048, F049: an alias far away from the host address."""
    pins = Pins(shift=1 << 40)
    with HostBuffer(5 * PAGE, registrar=pins, chunk_bytes=2 * PAGE) as buffer:
        assert buffer.tensor.data_ptr() == buffer.address
        assert buffer.device_address == buffer.address + (1 << 40)


def test_aliases_that_are_not_one_range_are_refused() -> None:
    """F048: kernels have one base; chunks that the device sees elsewhere cannot be reached from it."""
    pins = Pins()
    pins.gap_at = 2
    with pytest.raises(
        HostMemoryError, match=r"the device sees chunk 3 of 4 at 0x[0-9a-f]+, not at"
    ) as error:
        HostBuffer(4 * PAGE, registrar=pins, chunk_bytes=PAGE)
    assert "raise chunk_bytes to 16,384 for a single chunk" in str(error.value)
    assert pins.calls == ["+0", "+1", "+2", "-2", "-1", "-0"] and not pins.live


def test_a_failed_registration_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """F050, F054: chunk 3 of 5 fails: undone in reverse, unmapped, and the error has the numbers."""
    made: list[int] = []
    touch = memory._touch
    monkeypatch.setattr(
        memory,
        "_touch",
        lambda part, *rest, **more: (made.append(part.data_ptr()), touch(part, *rest, **more)),
    )
    pins = Pins()
    pins.fail_at = 2
    nbytes = 5 * 64 * PAGE
    with pytest.raises(HostMemoryError) as error:
        HostBuffer(nbytes, registrar=pins, chunk_bytes=64 * PAGE)
    assert str(error.value) == (
        "registering chunk 3 of 5 (262,144 of 1,310,720 bytes) failed: rc=2 out of memory:"
        " raise the limit of locked memory or lower the capacity"
    )
    assert pins.calls == ["+0", "+1", "-1", "-0"] and not pins.live
    assert resident(made[0], nbytes) < nbytes


def test_a_smaller_chunk_gets_past_a_limit_of_one_call() -> None:
    """F052, F053."""
    pins = Pins()
    pins.largest = 8 * PAGE
    with pytest.raises(HostMemoryError, match="chunk 1 of 1"):
        HostBuffer(32 * PAGE, registrar=pins)
    with HostBuffer(32 * PAGE, registrar=pins, chunk_bytes=8 * PAGE):
        assert len(pins.live) == 4


def test_build_destroy_build_registers_nothing_twice() -> None:
    """F051: also two buffers at once, and the same memory again."""
    pins = Pins()
    for _ in range(3):
        with HostBuffer(3 * PAGE, registrar=pins), HostBuffer(5, registrar=pins):
            assert len(pins.live) == 2
        assert not pins.live


def test_destroy_is_idempotent_and_ends_use() -> None:
    pins = Pins()
    buffer = HostBuffer(3 * PAGE, registrar=pins, chunk_bytes=PAGE)
    address = buffer.address
    buffer.destroy()
    buffer.destroy()
    assert pins.calls == ["+0", "+1", "+2", "-2", "-1", "-0"]
    with pytest.raises(HostMemoryError, match="the host buffer was destroyed: make a new one"):
        buffer.tensor  # noqa: B018
    assert buffer.address == address and buffer.nbytes == 3 * PAGE


def test_a_tensor_outlives_the_registration_and_keeps_the_memory() -> None:
    pins = Pins()
    buffer = HostBuffer(16 * HUGE_PAGE, registrar=pins)
    tail = buffer.tensor[-8:].view(torch.int64)
    tail.fill_(42)
    buffer.destroy()
    assert not pins.live and tail.item() == 42
    del tail
    gc.collect()
    assert not mapped(buffer.address + 8 * HUGE_PAGE)


def test_a_forgotten_buffer_is_unregistered_before_it_is_unmapped() -> None:
    pins = Pins()
    buffer = HostBuffer(2 * PAGE, registrar=pins, chunk_bytes=PAGE)
    del buffer
    gc.collect()
    assert pins.calls == ["+0", "+1", "-1", "-0"]


def test_a_failing_unregister_is_reported_after_all_others_are_undone() -> None:
    pins = Pins()
    buffer = HostBuffer(3 * PAGE, registrar=pins, chunk_bytes=PAGE)
    pins.stuck = {1}
    with pytest.raises(HostMemoryError, match=r"unregistering failed for 1 chunks: 0x[0-9a-f]+: rc=4 stuck"):
        buffer.destroy()
    assert list(pins.live) == [buffer.address + PAGE]
    buffer.destroy()


def test_a_failing_rollback_tells_both_errors() -> None:
    pins = Pins()
    pins.fail_at, pins.stuck = 2, {0}
    with pytest.raises(HostMemoryError, match=r"chunk 3 of 3 .*out of memory: .*; .*failed for 1 .*stuck"):
        HostBuffer(3 * PAGE, registrar=pins, chunk_bytes=PAGE)


def test_a_fork_leaves_the_registration_to_its_parent() -> None:
    pins = Pins()
    buffer = HostBuffer(PAGE, registrar=pins)
    assert buffer.registration is not None
    owner, buffer.registration.owner = buffer.registration.owner, -1
    buffer.registration.end()
    assert len(pins.live) == 1
    buffer.registration.owner = owner
    buffer.destroy()


def test_more_than_there_is_names_the_numbers() -> None:
    with pytest.raises(OutOfMemoryBudget) as error:
        HostBuffer(1 << 60)
    assert str(error.value).startswith("a host buffer needs 1,152,921,504,606,846,976 bytes, ")
    assert str(error.value).endswith(" are available; lower the capacity")


def test_numa_binding_names_node_and_range(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, list[int], int]] = []

    def mbind(address: int, nbytes: int, mask: ctypes.Array[ctypes.c_ulong], bits: int) -> str:
        calls.append((address, nbytes, list(mask), bits))
        return ""

    monkeypatch.setattr(memory, "_mbind", mbind)
    with HostBuffer(PAGE, numa_node=65) as buffer:
        assert calls == [(buffer.address, PAGE, [0, 2], 129)]
        assert buffer.placement == "NUMA node 65"


def test_a_numa_node_that_is_refused_is_told_and_memory_comes_from_anywhere() -> None:
    """Containers often forbid the call: a pool must not fail for that."""
    with HostBuffer(PAGE, numa_node=900, registrar=Pins()) as buffer:
        assert re.fullmatch(r"any NUMA node; node 900 was refused: .+", buffer.placement)
        assert not buffer.tensor.any()
    with pytest.raises(ValueError, match="expected a NUMA node >= 0, got -1"):
        HostBuffer(PAGE, numa_node=-1)


@pytest.mark.parametrize("old", [False, True])
def test_a_thread_that_is_left_behind_holds_the_memory_it_touches(
    old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted while it waits for its threads, a constructor gives up what they still write to."""
    entered, gate, ends = threading.Event(), threading.Event(), []
    populate = memory._populate

    def late(*given: Any) -> None:
        entered.set()
        gate.wait(LONG)
        ends.append(populate(*given))

    class Impatient(ThreadPoolExecutor):
        def __exit__(self, *_: object) -> None:
            left.append(self)

        def map(self, *given: Any, **how: Any) -> Any:
            super().map(*given, **how)
            assert entered.wait(LONG)
            raise KeyboardInterrupt

    left: list[Impatient] = []
    if old:
        monkeypatch.setattr(memory, "_POPULATE_WRITE", 99)  # it is written to then
    monkeypatch.setattr(memory, "_populate", late)
    monkeypatch.setattr(memory, "ThreadPoolExecutor", Impatient)
    with pytest.raises(KeyboardInterrupt):
        HostBuffer(PAGE, registrar=Pins(), threads=1)
    gc.collect()
    gate.set()
    left[0].shutdown()
    assert ends == [None]


@pytest.mark.parametrize("offset", [0, 1, PAGE - 1])
@pytest.mark.parametrize("old", [False, True])
def test_memory_is_touched_by_old_kernels_too(
    offset: int, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old:
        monkeypatch.setattr(memory, "_POPULATE_WRITE", 99)  # no advice that any kernel knows
    nbytes = 8 * HUGE_PAGE + 1
    with HostBuffer(nbytes) as buffer:
        memory._touch(buffer.tensor[offset:], True, 3)
        assert resident(buffer.address, nbytes) >= nbytes
        assert not buffer.tensor.any()


@pytest.mark.parametrize("nbytes", [1, PAGE, 3 * PAGE + 7])
@pytest.mark.parametrize("hugepages", [False, True])
def test_guards_lie_on_both_sides_and_hold_their_pattern(nbytes: int, hugepages: bool) -> None:
    with HostBuffer(nbytes, hugepages=hugepages, registrar=Pins()) as buffer:
        before, behind = buffer.guards.values()
        assert before.data_ptr() + GUARD == buffer.address and behind.data_ptr() == buffer.address + nbytes
        for guard in (before, behind):
            assert guard.numel() == GUARD and bool((guard == PATTERN).all())
        buffer.tensor.zero_()
        assert all(bool((guard == PATTERN).all()) for guard in (before, behind))
    assert HostBuffer(0).guards == {}


# ---- what is left -----------------------------------------------------------------------------


def system(root: Path, membership: str, files: dict[str, str], available_kib: int = 100 << 20) -> Path:
    """A file tree that looks like ``/proc`` and ``/sys``."""
    meminfo = f"MemTotal: 1 kB\nMemFree: 2 kB\nMemAvailable: {available_kib} kB\n"
    for name, text in {"proc/meminfo": meminfo, "proc/self/cgroup": membership, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


GIB = 1 << 30


def v2(folder: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{base}/memory.max": f"{limit}\n",
        f"{base}/memory.current": f"{used}\n",
        f"{base}/memory.stat": f"anon 5\ninactive_file {cache}\n",
    }


def test_without_a_cgroup_the_kernel_decides(tmp_path: Path) -> None:
    root = system(tmp_path, "", {})
    assert available_host_bytes(root, 0) == 100 * GIB
    assert available_host_bytes(root) == 100 * GIB - RESERVE_BYTES
    (root / "proc/self/cgroup").unlink()
    assert available_host_bytes(root, 0) == 100 * GIB


def test_the_tightest_cgroup_v2_counts(tmp_path: Path) -> None:
    """F041: 100 available, 60 allowed around, of which 10 are used; cache that can be dropped is no use."""
    files = v2("a/b", "max", 5 * GIB) | v2("a", str(60 * GIB), 12 * GIB, cache=2 * GIB)
    root = system(tmp_path, "0::/a/b\n", files)
    assert available_host_bytes(root, 0) == 50 * GIB


def test_a_container_that_sees_only_its_own_cgroup(tmp_path: Path) -> None:
    root = system(tmp_path, "0::/kubepods/pod7/x\n", v2("", str(8 * GIB), 3 * GIB))
    assert available_host_bytes(root, 0) == 5 * GIB


def test_cgroup_v1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory/job"
    files = {
        f"{base}/memory.limit_in_bytes": str(20 * GIB),
        f"{base}/memory.usage_in_bytes": str(9 * GIB),
        f"{base}/memory.stat": f"cache 1\ntotal_inactive_file {GIB}\n",
    }
    root = system(tmp_path, "4:cpu,cpuacct:/x\n3:memory:/job\n0::/\n", files)
    assert available_host_bytes(root, 0) == 12 * GIB


def test_nothing_left_is_zero_and_no_account_is_an_error(tmp_path: Path) -> None:
    root = system(tmp_path, "0::/a\n", v2("a", str(GIB), 2 * GIB))
    assert available_host_bytes(root) == 0
    (root / "proc/meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(PoolError, match="names no MemAvailable: use Linux"):
        available_host_bytes(root)


def test_this_machine_has_an_account() -> None:
    assert 0 <= available_host_bytes() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
