"""Compiled code of a submission against plain readings of it: copies, the order of pages, driver calls."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolwright.runtime import native
from poolwright.runtime.errors import BackendUnavailable
from poolwright.runtime.native import CopyLists, Enter, Functions, LaunchKernel, Run, Runs

Copy = tuple[int, int, int]


def plain(
    origin: int, borders: Sequence[int], runs: Sequence[Run], pages: Sequence[int], first: int, base: int
) -> list[Copy]:
    """One copy for each page and run, then joined where both sides are neighbours and cut at borders."""
    joined: list[Copy] = []
    for start, step, inside, inside_step, nbytes in runs:
        begin = len(joined)
        for at, page in enumerate(pages, first):
            host, slot = origin + start + page * step, base + inside + at * inside_step
            last = joined[-1] if len(joined) > begin else (0, 0, 0)
            if (last[0] + last[2], last[1] + last[2]) == (host, slot):
                joined[-1] = (*last[:2], last[2] + nbytes)
            else:
                joined.append((host, slot, nbytes))
    found = []
    for host, slot, nbytes in joined:
        ends = [*(b for b in borders if host < b < host + nbytes), host + nbytes]
        for at, end in zip([host, *ends], ends, strict=False):
            found.append((at, slot + at - host, end - at))
    return found


@st.composite
def whole_runs(draw: st.DrawFn) -> Run:
    """A run of pages that lie side by side on both sides, or with gaps on one of them."""
    nbytes = draw(st.integers(1, 40))
    gaps = draw(st.sampled_from([(0, 0), (0, 0), (3, 0), (0, 8), (5, 5)]))
    starts = draw(st.tuples(st.integers(0, 500), st.integers(0, 500)))
    return starts[0], nbytes + gaps[0], starts[1], nbytes + gaps[1], nbytes


@settings(derandomize=True, max_examples=400, deadline=None)
@given(
    runs=st.lists(whole_runs(), min_size=1, max_size=3),
    pages=st.lists(st.integers(0, 30), max_size=12),
    borders=st.lists(st.integers(1000, 2500), max_size=4, unique=True).map(sorted),
    first=st.integers(0, 5),
)
def test_copies_are_those_of_every_page_and_run(
    runs: list[Run], pages: list[int], borders: list[int], first: int
) -> None:
    lists = CopyLists(1000, borders)
    listed = Runs(array("Q", [number for run in runs for number in run]))
    room = lists.room(len(pages), listed) * (1 + len(borders)) + 1  # here they cut pages, too
    rows = array("Q", [77]) * (3 * room)
    count = lists.add(rows, 1, listed, array("I", pages), first, 9000)
    found = list(zip(*(rows[row * room + 1 : row * room + count] for row in range(3)), strict=True))
    assert found == plain(1000, borders, runs, pages, first, 9000)
    assert [rows[row * room] for row in range(3)] == [77, 77, 77]


def test_rows_that_are_too_short_are_refused_and_nothing_is_written_behind_them() -> None:
    lists, runs = CopyLists(0, []), Runs(array("Q", (0, 8, 0, 8, 8)))
    rows = array("Q", [77]) * 6
    with pytest.raises(ValueError, match="copies of 3 pages: expected room for 3, got 2"):
        lists.add(rows, 0, runs, array("I", (1, 3, 5)), 0, 0)
    assert list(rows) == [8, 24, 0, 8, 8, 8]


@settings(derandomize=True, max_examples=300, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 200), st.integers(0, (1 << 32) - 1)), max_size=90))
def test_pages_are_brought_into_the_order_of_the_host(pairs: list[tuple[int, int]]) -> None:
    ids = array("I", [host for host, _ in pairs] + [device for _, device in pairs])
    before, count = ids[:], len(pairs)
    found = native.in_host_order(ids, count)
    assert ids == before
    assert list(found[:count]) == sorted(host for host, _ in pairs)
    assert sorted(zip(found[:count], found[count:], strict=True)) == sorted(pairs)


def test_without_a_compiler_and_a_filled_cache_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POOLWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("POOLWRIGHT_CXX", "a-compiler-that-is-not-there")
    missing = r"compiled code of runtime for .* is not available: .*no such command.*runtime compile$"
    with pytest.raises(BackendUnavailable, match=missing):
        native.library.__wrapped__()


class Driver:
    """Functions of a driver that note their calls; `codes`: what each answers, `captured` the first's."""

    def __init__(self, captured: int = 0, codes: Sequence[int] = (0, 0, 0, 0)) -> None:
        self.calls: list[tuple[object, ...]] = []
        pointer = ctypes.c_void_p

        def capturing(stream: int, status: int) -> int:
            self.calls.append(("capturing", stream))
            ctypes.c_int.from_address(status).value = captured
            return codes[0]

        def record(event: int, stream: int) -> int:
            self.calls.append(("record", event, stream))
            return codes[1]

        def wait(stream: int, event: int, flags: int) -> int:
            self.calls.append(("wait", stream, event, flags))
            return codes[2]

        def launch(function: int, *rest: int) -> int:
            self.calls.append(("launch", function, *rest))
            return codes[3]

        two = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer)
        three = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, ctypes.c_uint)
        unsigned = [ctypes.c_uint] * 7
        many = ctypes.CFUNCTYPE(ctypes.c_int, pointer, *unsigned, pointer, pointer, pointer)
        self._kept = two(capturing), two(record), three(wait), many(launch)
        addresses = [ctypes.cast(function, pointer).value for function in self._kept]
        self.enter = Enter(Functions(*addresses), 50)
        self.launch = LaunchKernel(Functions(*addresses), 60, 512, 70)


def test_a_stream_is_put_behind_another_and_behind_an_event() -> None:
    driver = Driver()
    assert driver.enter.call(10, 20, 30) == 0
    assert driver.calls == [("capturing", 20), ("record", 50, 20), ("wait", 10, 50, 0), ("wait", 10, 30, 0)]


def test_without_an_event_there_is_one_wait() -> None:
    driver = Driver()
    assert driver.enter.call(10, 20, 0) == 0
    assert driver.calls[1:] == [("record", 50, 20), ("wait", 10, 50, 0)]


@pytest.mark.parametrize(("captured", "code"), [(1, 0), (2, 0), (0, 906)])
def test_nothing_is_done_for_a_stream_that_may_be_captured(captured: int, code: int) -> None:
    driver = Driver(captured, (code, 0, 0))
    assert native.stopped(driver.enter.call(10, 20, 30)) == (native.REFUSED, code)
    assert driver.calls == [("capturing", 20)]


@pytest.mark.parametrize(("codes", "calls"), [((0, 700, 0), 2), ((0, 0, 701), 3)])
def test_the_first_error_of_the_driver_ends_it(codes: tuple[int, int, int], calls: int) -> None:
    driver = Driver(0, codes)
    stage, code = native.stopped(driver.enter.call(10, 20, 30))
    assert (stage > native.REFUSED, code) == (True, max(codes))
    assert len(driver.calls) == calls


LAUNCHED = ("launch", 60, 3, 1, 1, 512, 1, 1, 0, 10, 70, None)
"""Kernel 60 in stream 10: 3 blocks of 512 threads, parameters at 70."""


def test_a_kernel_is_launched_and_an_event_recorded_behind_it() -> None:
    driver = Driver()
    assert driver.launch.call(10, 3, 30) == 0
    assert driver.calls == [LAUNCHED, ("record", 30, 10)]


def test_a_launch_without_an_event_records_none() -> None:
    driver = Driver()
    assert driver.launch.call(10, 3, 0) == 0
    assert driver.calls == [LAUNCHED]


def test_a_launch_that_fails_is_told_apart_from_an_event_that_does() -> None:
    driver = Driver(0, (0, 0, 0, 700))
    assert native.stopped(driver.launch.call(10, 3, 30)) == (native.REFUSED, 700)
    assert driver.calls == [LAUNCHED]
    stage, code = native.stopped(Driver(0, (0, 701, 0, 0)).launch.call(10, 3, 30))
    assert (stage > native.REFUSED, code) == (True, 701)
