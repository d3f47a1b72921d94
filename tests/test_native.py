"""Compiled code of a submission against plain readings of it: copies, the order of pages, driver calls."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolwright.runtime import native
from poolwright.runtime.driver.relay import relay
from poolwright.runtime.errors import BackendUnavailable
from poolwright.runtime.native import Calls, CopyLists, Functions, Kernel, Rows, Run, Runs

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
    """Functions of a driver that note their calls; `codes`: what each answers (default 0), by name.

    `captured`: what it says of a stream. `batch_arguments`: how many its batch copy takes, 0: it has none.
    """

    def __init__(self, captured: int = 0, batch_arguments: int = 8, **codes: int) -> None:
        self.calls: list[tuple[object, ...]] = []
        pointer, word = ctypes.c_void_p, ctypes.c_uint64

        def answer(name: str, *arguments: object) -> int:
            self.calls.append((name, *arguments))
            return codes.get(name, 0)

        def capturing(stream: int, status: int) -> int:
            ctypes.c_int.from_address(status).value = captured
            return answer("capturing", stream)

        def batch(to: int, source: int, sizes: int, count: int, *rest: int) -> int:
            rows = [list((word * count).from_address(at)) for at in (to, source, sizes)]
            attributes, first, sets, *place, stream = rest
            given = ctypes.string_at(attributes, 64), word.from_address(first).value, sets
            assert given == ((1).to_bytes(4, "little") + bytes(60), 0, 1), (
                "in stream order, from the first on"
            )
            assert [word.from_address(at).value for at in place] == [0] * (batch_arguments - 8)
            return answer("batch", *rows, stream)

        kinds = {
            "capturing": [pointer, pointer],
            "record": [pointer, pointer],
            "wait": [pointer, pointer, ctypes.c_uint],
            "launch": [pointer, *[ctypes.c_uint] * 7, pointer, pointer, pointer],
            "copy_in": [word, pointer, word, pointer],
            "copy_out": [pointer, word, word, pointer],
            "batch": [
                pointer,
                pointer,
                pointer,
                word,
                pointer,
                pointer,
                word,
                *[pointer] * (batch_arguments - 7),
            ],
        }
        done = {name: functools.partial(answer, name) for name in kinds} | {
            "capturing": capturing,
            "batch": batch,
        }
        self._kept = [ctypes.CFUNCTYPE(ctypes.c_int, *kinds[name])(done[name]) for name in kinds]
        addresses = [ctypes.cast(function, pointer).value for function in self._kept]
        if not batch_arguments:
            addresses[-1] = None
        self.on = Calls(Functions(*addresses, batch_arguments), 50)


KERNEL = Kernel(60, 512, 70)
LAUNCHED = ("launch", 60, 3, 1, 1, 512, 1, 1, 0, 10, 70, None)
"""It in stream 10: 3 blocks of 512 threads, parameters at 70."""

ENTERED = [("capturing", 20), ("record", 50, 20), ("wait", 10, 50, 0)]
"""Stream 10 is put behind stream 20."""


def test_a_stream_is_put_behind_another_and_behind_an_event() -> None:
    driver = Driver()
    assert driver.on.enter(10, 20, 30) == 0
    assert driver.calls == [*ENTERED, ("wait", 10, 30, 0)]


def test_without_an_event_there_is_one_wait() -> None:
    driver = Driver()
    assert driver.on.enter(10, 20, 0) == 0
    assert driver.calls == ENTERED


@pytest.mark.parametrize(("captured", "code"), [(1, 0), (2, 0), (0, 906)])
def test_nothing_is_done_for_a_stream_that_may_be_captured(captured: int, code: int) -> None:
    driver = Driver(captured, capturing=code)
    assert native.stopped(driver.on.enter(10, 20, 30)) == (native.REFUSED, code)
    assert native.stopped(driver.on.launch_behind(KERNEL.at, 10, 3, 40, 20, 30)) == (native.REFUSED, code)
    assert driver.calls == [("capturing", 20)] * 2


@pytest.mark.parametrize(("failing", "calls"), [("record", 2), ("wait", 3)])
def test_the_first_error_of_the_driver_ends_it(failing: str, calls: int) -> None:
    driver = Driver(**{failing: 700})
    stage, code = native.stopped(driver.on.enter(10, 20, 30))
    assert (stage > native.REFUSED, code) == (True, 700)
    assert len(driver.calls) == calls


def test_a_kernel_is_launched_and_an_event_recorded_behind_it() -> None:
    driver = Driver()
    assert driver.on.launch(KERNEL.at, 10, 3, 30) == 0
    assert driver.calls == [LAUNCHED, ("record", 30, 10)]


def test_a_launch_without_an_event_records_none() -> None:
    driver = Driver()
    assert driver.on.launch(KERNEL.at, 10, 3, 0) == 0
    assert driver.calls == [LAUNCHED]


def test_a_launch_that_fails_is_told_apart_from_an_event_that_does() -> None:
    driver = Driver(launch=700)
    assert native.stopped(driver.on.launch(KERNEL.at, 10, 3, 30)) == (native.REFUSED, 700)
    assert driver.calls == [LAUNCHED]
    stage, code = native.stopped(Driver(record=701).on.launch(KERNEL.at, 10, 3, 30))
    assert (stage > native.REFUSED, code) == (True, 701)


def test_a_submission_of_one_launch_is_one_call() -> None:
    driver = Driver()
    assert driver.on.launch_behind(KERNEL.at, 10, 3, 40, 20, 30) == 0
    assert driver.calls == [*ENTERED, ("wait", 10, 30, 0), LAUNCHED, ("record", 40, 10)]


def test_a_submission_that_fails_behind_its_begin_is_not_refused() -> None:
    """Something was done: whoever hears that it was refused would think that nothing was."""
    stage, code = native.stopped(Driver(launch=700).on.launch_behind(KERNEL.at, 10, 3, 40, 20, 30))
    assert (stage > native.REFUSED, code) == (True, 700)


# ---- copies ---------------------------------------------------------------------------------------

TO, SOURCE, SIZES = (1 << 40, 2 << 40, (1 << 64) - 1), (3, 4, 5), (64, 128, 1)


def copied(driver: Driver, inward: bool, count: int = 3) -> int:
    words = [array("Q", row[:count]) for row in (TO, SOURCE, SIZES)]
    to, source, sizes = (row.buffer_info()[0] for row in words)
    return driver.on.copies(to, source, sizes, count, 77, inward)


@pytest.mark.parametrize("inward", [False, True])
@pytest.mark.parametrize("arguments", [8, 9], ids=["newer signature", "older signature"])
def test_more_than_two_copies_are_a_batch(inward: bool, arguments: int) -> None:
    driver = Driver(batch_arguments=arguments)
    assert copied(driver, inward) == 0
    assert driver.calls == [("batch", [*TO], [*SOURCE], [*SIZES], 77)]


@pytest.mark.parametrize("inward", [False, True])
def test_few_copies_go_one_by_one(inward: bool) -> None:
    driver, name = Driver(), "copy_in" if inward else "copy_out"
    assert copied(driver, inward, 2) == 0
    assert driver.calls == [(name, *each, 77) for each in zip(TO[:2], SOURCE, SIZES, strict=False)]


def test_so_do_all_where_the_driver_has_no_batch() -> None:
    driver = Driver(batch_arguments=0)
    assert copied(driver, True) == 0
    assert [call[0] for call in driver.calls] == ["copy_in"] * 3


def test_a_long_list_is_several_batches() -> None:
    count = 2 * 4096 + 1
    words = [array("Q", range(first, first + count)) for first in (10_000, 50_000, 1)]
    to, source, sizes = (row.buffer_info()[0] for row in words)
    driver = Driver()
    assert driver.on.copies(to, source, sizes, count, 77, False) == 0
    assert [len(call[1]) for call in driver.calls] == [4096, 4096, 1]  # type: ignore[arg-type]
    for at, row in enumerate(words, 1):
        assert [number for call in driver.calls for number in call[at]] == list(row)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("failing", "count"), [("batch", 3), ("copy_out", 2)])
def test_an_error_of_a_copy_is_told(failing: str, count: int) -> None:
    driver = Driver(**{failing: 700})
    assert copied(driver, False, count) == 700
    assert len(driver.calls) == 1


# ---- a launch and copies, one behind the other ------------------------------------------------------

HOST, SLOT = [100, 200, 300], [5, 6, 7]
ROWS = Rows(array("Q", [*HOST, 0, *SLOT, 0, 64, 65, 66, 0]), 3)
OUT = [("batch", HOST, SLOT, [64, 65, 66], 11)]
IN = [("batch", SLOT, HOST, [64, 65, 66], 11)]


def relayed(driver: Driver, inward: bool, free: int = 30, event: int = 40) -> int:
    """Kernels in stream 10, copies in stream 11."""
    return driver.on.relay(KERNEL.at, 3, 10, 11, free, event, ROWS, inward)


def test_what_a_kernel_gathers_is_copied_behind_it() -> None:
    driver = Driver()
    assert relayed(driver, False) == 0
    behind = [("record", 50, 10), ("wait", 11, 50, 0)]
    assert driver.calls == [("wait", 10, 30, 0), LAUNCHED, *behind, *OUT, ("record", 40, 11)]


def test_what_is_copied_in_a_kernel_scatters_behind_it() -> None:
    driver = Driver()
    assert relayed(driver, True) == 0
    behind = [("record", 50, 11), ("wait", 10, 50, 0)]
    assert driver.calls == [("wait", 11, 30, 0), *IN, *behind, LAUNCHED, ("record", 40, 10)]


@pytest.mark.parametrize("inward", [False, True])
def test_a_free_slot_is_not_waited_for_and_an_event_that_nobody_needs_not_recorded(inward: bool) -> None:
    driver = Driver()
    assert relayed(driver, inward, 0, 0) == 0
    assert [call[0] for call in driver.calls if call[0] in ("wait", "record")] == ["record", "wait"]


@pytest.mark.parametrize("inward", [False, True])
@pytest.mark.parametrize("failing", ["wait", "launch", "record", "batch"])
def test_the_first_error_ends_a_relay(failing: str, inward: bool) -> None:
    driver = Driver(**{failing: 700})
    assert relayed(driver, inward) == 700
    assert [call[0] for call in driver.calls].count(failing) == 1
    assert driver.calls[-1][0] == failing


def test_the_plain_reading_of_a_relay_makes_the_same_calls() -> None:
    """`relay` of the simulated driver, in whose place compiled code runs on a device."""
    for inward in (False, True):
        for free, event in ((30, 40), (0, 0), (30, 0), (0, 40)):
            driver, plain = Driver(), Plain()
            assert relayed(driver, inward, free, event) == 0
            relay(plain, plain.launch, 10, 3, 11, ROWS, inward, free or None, bool(event))  # type: ignore[arg-type]
            assert plain.calls == [each for each in driver.calls if each[0] != "capturing"]


class Plain:
    """The calls of a driver's door as those of the driver behind it."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def launch(self, stream: int, grid: int) -> None:
        self.calls.append(("launch", 60, grid, 1, 1, 512, 1, 1, 0, stream, 70, None))

    def wait(self, stream: int, event: int) -> None:
        self.calls.append(("wait", stream, event, 0))

    def follow(self, stream: int, other: int) -> None:
        self.calls += [("record", 50, other), ("wait", stream, 50, 0)]

    def record(self, stream: int) -> None:
        self.calls.append(("record", 40, stream))

    def copy(
        self, to: Sequence[int], source: Sequence[int], sizes: Sequence[int], stream: int, inward: bool
    ) -> None:
        self.calls.append(("batch", list(to), list(source), list(sizes), stream))
