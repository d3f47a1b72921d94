"""Which pages operations hold: host pages until their ack is taken, device pages until they are started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from poolwright.runtime.controller.operation import Operation
from poolwright.runtime.driver import Event

FILLING = ("write_back", "fetch")
"""Directions that write host pages; the others read them."""

DevicePages = Mapping[str, frozenset[int]]
"""By pool; empty where only the device knows them."""


@dataclass(frozen=True)
class Queued:
    """An operation that waits to be started. `ready`: an event behind the work that made ids on a device."""

    operation: Operation
    device: DevicePages
    ready: Event = None


@dataclass
class Pages:
    """Pages of one pool. Host: destinations of write-backs, sources of loads. Device: of what is queued."""

    written: set[int] = field(default_factory=set)
    read: Counter[int] = field(default_factory=Counter)
    sources: Counter[int] = field(default_factory=Counter)
    targets: set[int] = field(default_factory=set)


class Book:
    """The pages of every pool that has ids of its own."""

    def __init__(self, names: Iterable[str]) -> None:
        self._pools = {name: Pages() for name in names}

    def check(self, direction: str, name: str, host: Iterable[int], device: Iterable[int]) -> None:
        """Raises ValueError for pages that an operation before this one still needs as they are."""
        pages, there = self._pools[name], set(device)
        if direction in FILLING:
            _refuse(name, there & pages.targets, "device", "to be loaded", "start_loading() first")
            return
        _refuse(name, pages.written & set(host), "host", "being written", "use it once pop_acks() tells")
        _refuse(name, there & pages.sources.keys(), "device", "to be written back", "start_writing() first")
        _refuse(name, there & pages.targets, "device", "to be loaded already", "give each load its own pages")

    def add(self, queued: Queued) -> None:
        operation = queued.operation
        for name in operation.ids:
            pages, host = self._pools[name], operation.pages[name]
            if operation.direction in FILLING:
                pages.written |= host
                pages.sources.update(queued.device[name])
            else:
                pages.read.update(host)
                pages.targets |= queued.device[name]

    def started(self, queued: Queued) -> None:
        """From now on the pool itself keeps order on the device."""
        for name, device in queued.device.items():
            pages = self._pools[name]
            if queued.operation.direction in FILLING:
                _give_up(pages.sources, device)
            else:
                pages.targets -= device

    def release(self, operation: Operation) -> None:
        """The operation is over and its caller knows."""
        for name in operation.ids:
            host = operation.pages[name]
            if operation.direction in FILLING:
                self._pools[name].written -= host
            else:
                _give_up(self._pools[name].read, host)

    def locked(self, name: str) -> set[int]:
        """Host pages of a pool that may not be freed."""
        pages = self._pools[name]
        return pages.written | pages.read.keys()

    def clear(self) -> None:
        self._pools = {name: Pages() for name in self._pools}


def _refuse(name: str, clash: Iterable[int], side: str, state: str, hint: str) -> None:
    page = min(clash, default=None)
    if page is not None:
        raise ValueError(f"{name}: {side} page {page} is {state}: {hint}")


def _give_up(held: Counter[int], pages: Iterable[int]) -> None:
    """One holder fewer of each page. As subtraction does, which looks at all pages for that."""
    for page in pages:
        if held[page] == 1:
            del held[page]
        else:
            held[page] -= 1
