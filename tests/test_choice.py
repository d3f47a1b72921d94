"""Choice of the path as a table: what is moved, what can run, what is forced."""

from __future__ import annotations

from typing import Any

import pytest

from poolwright.runtime.choice import Availability, choose
from poolwright.runtime.costs import DEFAULTS, Work

MIB = 1 << 20
CUDA = ("zero_copy", "staged", "torch")
CPU = ("zero_copy", "staged", "host", "torch")


def report(*usable: str) -> list[Availability]:
    names = ("zero_copy", "staged", "host", "torch")
    return [
        Availability(name, name in usable, "compiled" if name in usable else "no compiler") for name in names
    ]


def work(range_bytes: int, total: int, direction: str = "write_back", **more: Any) -> Work:
    return Work(direction, range_bytes, max(1, total // range_bytes), total, **more)


@pytest.mark.parametrize(
    ("moved", "usable", "path"),
    [
        (work(4 * MIB, 256 * MIB), CUDA, "staged"),
        (work(4 * MIB, 256 * MIB, "load"), CUDA, "staged"),
        (work(128 << 10, 24 * MIB), CUDA, "staged"),
        (work(64 << 10, 134 * MIB), CUDA, "staged"),
        (work(64 << 10, 134 * MIB, "load"), CUDA, "staged"),
        (work(20 << 10, 40 * MIB), CUDA, "staged"),
        (work(20 << 10, 40 * MIB, "load"), CUDA, "staged"),
        (work(64 << 10, 8 * MIB), CUDA, "zero_copy"),
        (work(64 << 10, 6 * MIB, "load"), CUDA, "zero_copy"),
        (work(4 * MIB, 4 * MIB), CUDA, "zero_copy"),
        (work(4 << 10, 256 * MIB), CUDA, "zero_copy"),
        (work(4 << 10, 256 * MIB, merged=64), CUDA, "staged"),
        (work(20 << 10, 40 * MIB, qos="urgent"), CUDA, "zero_copy"),
        (work(4 * MIB, 256 * MIB, qos="urgent"), CUDA, "staged"),
        (work(4 * MIB, 4 * MIB, qos="background"), CUDA, "staged"),
        (work(4 << 10, 256 * MIB, qos="background"), CUDA, "zero_copy"),
        (work(4 * MIB, 256 * MIB, "load", steps=61, whole_pages=False), CUDA, "zero_copy"),
        (work(4 * MIB, 256 * MIB, "load", steps=40), CUDA, "staged"),
        (work(4 * MIB, 256 * MIB, "load", steps=40, qos="urgent"), CUDA, "zero_copy"),
        (work(4 * MIB, 4 * MIB, "load", steps=2), CUDA, "zero_copy"),
        (
            work(64 << 10, 256 * MIB, "load", steps=40),
            CUDA,
            "zero_copy",
        ),  # many copies a layer
        (work(4 * MIB, 256 * MIB, whole_pages=False), CUDA, "zero_copy"),
        (work(4096, 4096, in_place=True), CUDA, "staged"),
        (work(4096, 4096, "load", in_place=True), CUDA, "zero_copy"),
        (work(4 * MIB, 256 * MIB), CPU, "host"),
        (work(4 * MIB, 256 * MIB), ("torch",), "torch"),
        (work(4 * MIB, 256 * MIB), ("staged", "torch"), "staged"),
        (work(4 * MIB, 256 * MIB, whole_pages=False), ("staged", "torch"), "torch"),
    ],
)
def test_the_path_follows_from_what_is_moved(moved: Work, usable: tuple[str, ...], path: str) -> None:
    assert choose(moved, report(*usable), DEFAULTS) == path


@pytest.mark.parametrize("path", CUDA)
def test_a_forced_path_is_taken(path: str) -> None:
    assert choose(work(64, 64), report(*CUDA), DEFAULTS, path) == path


@pytest.mark.parametrize(
    ("moved", "usable", "forced", "message"),
    [
        (work(64, 64), ("torch",), "staged", "path 'staged' was asked for and cannot be taken: no compiler"),
        (work(64, 64), CUDA, "host", "path 'host' was asked for and cannot be taken: no compiler"),
        (
            work(64, 64, whole_pages=False),
            CUDA,
            "staged",
            "path 'staged' was asked for and cannot be taken: it moves whole pages, and these are scattered "
            "tokens, or pages checked on the device",
        ),
        (
            work(64, 64, whole_pages=False, steps=61),
            CUDA,
            "staged",
            "path 'staged' was asked for and cannot be taken: it moves whole pages, and these are single "
            "layers that are no runs of the host page, scattered tokens, or pages checked on the device",
        ),
        (
            work(64, 64),
            CUDA,
            "sideways",
            "path 'sideways' was asked for and cannot be taken: expected one of zero_copy, staged, host, "
            "torch",
        ),
    ],
)
def test_a_forced_path_that_cannot_run_is_an_error(
    moved: Work, usable: tuple[str, ...], forced: str, message: str
) -> None:
    with pytest.raises(ValueError) as raised:
        choose(moved, report(*usable), DEFAULTS, forced)
    assert str(raised.value) == message


def test_no_path_at_all_says_why() -> None:
    with pytest.raises(ValueError, match="no path can run: zero_copy: no compiler"):
        choose(work(64, 64), report(), DEFAULTS)
