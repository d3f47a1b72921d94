"""What pools that move together have in common, and what a pool and a group of pools do alike."""

from __future__ import annotations

import functools
import os
import weakref
from contextvars import ContextVar

import torch

from poolwright.runtime import arguments
from poolwright.runtime.backend import Code
from poolwright.runtime.choice import PATHS, Availability
from poolwright.runtime.driver import Stream
from poolwright.runtime.errors import PoolError, WrongProcess
from poolwright.runtime.opaque import opaque
from poolwright.runtime.registration import MODES, Registration
from poolwright.runtime.transfer import Transfers


class Shared:
    """Code, transfers and one end of pools that move together. A lone pool has its own.

    `group`: the name of the group, `member`: that of the pool which is being built.
    """

    def __init__(self, code: Code, group: str | None = None) -> None:
        self.code, self.group, self.owner = code, group, os.getpid()
        self.transfers = Transfers(code, code.name)
        self.member: str | None = None
        self._forks = _forks_counted()
        self._born = self._forks[0]
        self.ended = False
        # Held by the finalizer, the transfers outlive pools that are dropped with work in flight.
        self._end = weakref.finalize(self, _close, self.transfers, self.owner)

    def alive(self, name: str) -> None:
        """Raises PoolError when the pool of this name can no longer be used, or not in this process."""
        if self.ended:
            raise PoolError(f"{name}: the pool is destroyed; build a new one")
        if self._forks[0] != self._born:
            raise WrongProcess(f"pool {name}", self.owner, os.getpid())

    def end(self) -> None:
        """Give everything back, after everything in flight. Again: nothing happens."""
        self.ended = True
        self.transfers.stop_registering()
        self._end()


@functools.cache
def _forks_counted() -> list[int]:
    """One number: how often this process has come out of a fork since its first pool. Every call asks for it,
    and the system takes longer to say which process this is."""
    count = [0]

    def one_more() -> None:
        count[0] += 1

    os.register_at_fork(after_in_child=one_more)
    return count


def _close(transfers: Transfers, owner: int) -> None:
    if os.getpid() == owner:  # in a fork the device is the parent's
        transfers.close()


being_built: ContextVar[Shared | None] = ContextVar("being_built", default=None)
"""Set by a group while it builds its pools: they share what is in it."""


def place(owner: str, device: object, hugepages: object, register: object) -> torch.device:
    """The device; what a pool and a group are both told about host memory is checked. Raises ValueError."""
    arguments.one_of(owner, "register", register, MODES)
    if hugepages is not None:
        arguments.flag(owner, "hugepages", hugepages)
    found = arguments.device(owner, device)
    return torch.device("cpu") if found.type == "cpu" else found


class Movable:
    """Calls that a pool and a group of pools have alike. `_owner`: its name in messages."""

    _shared: Shared
    _owner: str

    def _alive(self) -> None:
        self._shared.alive(self._owner)

    @property
    def _registrations(self) -> tuple[Registration, ...]:
        """Those of all host memory; none where nothing needs to be registered."""
        raise NotImplementedError

    @opaque
    def registered(self) -> bool:
        """Whether all host memory is registered. Before, `alloc` hands out pages that are, and no others are
        moved.

        Raises HostMemoryError when the background gave up; what is registered by then stays in use.
        """
        self._alive()
        return all([each.registered() for each in self._registrations])

    @opaque
    def wait_registered(self) -> None:
        """Block until all host memory is registered. Raises as `registered` does, and PoolError when the pool
        is destroyed meanwhile."""
        self._alive()
        for each in self._registrations:
            each.wait()
        self._alive()

    def path_report(self) -> tuple[Availability, ...]:
        """Every path: whether it can run here; when not, why, and the command that mends it."""
        return self._shared.code.report()

    def _check_call(self, stream: str, given: Stream, path: object, timed: object) -> None:
        """Raises ValueError for what ids have nothing to do with. `stream`: the name of that argument."""
        if given is not None:
            arguments.stream(self._owner, stream, given, self._shared.code.driver)
        if path is not None and not isinstance(path, str):
            raise arguments.refusal(self._owner, "path", f"one of {', '.join(PATHS)}", path)
        if timed is not False:
            arguments.flag(self._owner, "timed", timed)
