"""Lets tests put a driver of their own in the place of the CPU's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from poolwright.runtime.driver import Driver, Kernels
from poolwright.runtime.program import GroupProgram, SizedProgram


class StandIn(Driver, Protocol):
    """A driver for device ``cpu`` that plays compiled lanes in its own way."""

    def kernels(
        self, source: SizedProgram | GroupProgram, align: int, build: Callable[[], ctypes.CDLL]
    ) -> Kernels:
        """Kernels for addresses that are multiples of `align`; `build` gives their lanes."""
        ...


_in_use: ContextVar[StandIn | None] = ContextVar("stand_in", default=None)


@contextmanager
def use_driver(driver: StandIn) -> Iterator[None]:
    """Pools for device ``cpu`` that are built inside take this driver, for as long as they live."""
    token = _in_use.set(driver)
    try:
        yield
    finally:
        _in_use.reset(token)


def driver_in_use() -> StandIn | None:
    return _in_use.get()
