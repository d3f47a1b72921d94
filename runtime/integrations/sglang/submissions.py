"""What SGLang asks for pool by pool and layer by layer, moved in one submission.

Its engine announces the ids of every pool, then copies pool by pool (device to host), or layer by layer and
in each layer pool by pool (host to device). The first copy submits all that was announced: one write-back, or
one load in layer order. Every call has the caller's stream wait for what it asked for, so that events which
the engine records there mean what they say.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from types import FrameType

import torch

from poolwright.runtime.controller.lone import Lone
from poolwright.runtime.errors import PoolError
from poolwright.runtime.group import HostPoolGroup
from poolwright.runtime.pool import HostPool
from poolwright.runtime.ticket import Ticket

logger = logging.getLogger(__name__)


class Submission:
    """A transfer that runs. `left`: (pool, layer) that the engine has yet to ask for."""

    def __init__(self, direction: str, ticket: Ticket, left: set[tuple[str, int]]) -> None:
        self.direction, self.ticket, self.left = direction, ticket, left


class Part:
    """The ids of one pool, announced for a submission. It goes with the tensor that the engine is handed."""

    def __init__(self, name: str, host: torch.Tensor, device: torch.Tensor) -> None:
        self.name, self.host, self.device = name, host, device
        self.submission: Submission | None = None

    def same_ids(self, other: Part) -> bool:
        return _same(self.host, other.host) and _same(self.device, other.device)


class Announced(threading.local):
    """What belongs together: parts that one call of the engine's announced, told by its frame.

    A submission that the engine gives up ends without a word. Its frame is held, so that no later call can
    be taken for it, until something else is announced.
    """

    def __init__(self) -> None:
        self.frame: FrameType | None = None
        self.parts: list[Part] = []

    def add(self, frame: FrameType, part: Part) -> None:
        if frame is not self.frame:
            self.frame, self.parts = frame, []
        self.parts.append(part)

    def take(self, part: Part) -> list[Part]:
        """`part` and what was announced with it; nothing is left."""
        found = self.parts if part in self.parts else [part]
        self.frame, self.parts = None, []
        return found


class Submissions:
    """The submissions of a pool or group. `asked`: by pool the layer ids that the engine will ask for.

    Threads do not meet: what one has announced is submitted by its own calls alone.
    """

    def __init__(self, pools: HostPool | HostPoolGroup, asked: Mapping[str, Collection[int]]) -> None:
        self._calls = Lone(pools) if isinstance(pools, HostPool) else pools
        self._asked = {name: frozenset(layers) for name, layers in asked.items()}
        self._announced = Announced()
        self._told = False

    # ---- what the engine does

    def prepare(
        self, name: str, host: torch.Tensor, device: torch.Tensor, frame: FrameType
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids to give to the copies of this submission: host ids on the CPU, device ids as they are.

        `frame`: of the engine's call that announces pool after pool.
        """
        part = Part(name, host if host.is_cpu else self._read(name, host), device)
        self._announced.add(frame, part)
        handed = part.host.view(-1)  # of its own, so that the part goes with it and with nothing else
        handed._part = part  # type: ignore[attr-defined]
        return handed, device

    def write_back(self, name: str, host: torch.Tensor, device: torch.Tensor) -> None:
        """Copy these pages to the host, with all that was announced; the caller's stream waits for it."""
        part = _part(host)
        if part is None:
            self._submitted("write_back", {name: (host, device)}).wait_current()
        elif part.submission is None:
            self._begin("write_back", part).ticket.wait_current()
        else:
            _check_direction(part, "write_back")

    def load(self, name: str, host: torch.Tensor, device: torch.Tensor, layer: int) -> None:
        """Copy this layer to the device; the first call brings all layers on their way."""
        part = _part(host)
        if part is None:
            self._submitted("load", {name: (host, device)}, layers=[layer]).wait_current()
            return
        running = part.submission or self._begin("load", part)
        _check_direction(part, "load")
        running.ticket.wait_current(layer)
        running.left.discard((name, layer))
        if not running.left:  # the engine's last event stands for components without layers, too
            running.ticket.wait_current()

    # ---- pieces

    def _begin(self, direction: str, asked: Part) -> Submission:
        """Submit this part and all that belong with it. Raises ValueError when one has no ids of its own and
        their owner is not there."""
        parts = self._announced.take(asked)
        first = {part.name: part for part in reversed(parts)}
        owners = {name: first.get(self._owner(name)) for name in first}
        for name, owner in owners.items():
            if owner is None or not owner.same_ids(first[name]):
                raise ValueError(
                    f"{name} takes the ids of {self._owner(name)} and is moved with it: expected the same ids"
                    f" of both in one submission, got {'others' if owner else 'none'} of"
                    f" {self._owner(name)}; give its transfer indices_from_pool"
                )
        moves = {name: (part.host, part.device) for name, part in first.items() if owners[name] is part}
        how = {} if direction == "write_back" else {"order": "layer"}
        left = {(name, layer) for name in first for layer in self._asked[name]}
        submission = Submission(direction, self._submitted(direction, moves, **how), left)
        for part in parts:
            if part.same_ids(first[part.name]):  # a draft model's layers are layers of the same pool
                part.submission = submission
        return submission

    def _submitted(
        self, direction: str, moves: Mapping[str, tuple[torch.Tensor, torch.Tensor]], **how: object
    ) -> Ticket:
        call = self._calls.write_back if direction == "write_back" else self._calls.load
        ticket = call(moves, "token", **how)  # type: ignore[arg-type]
        ticket.detach()  # the engine keeps its own book of what is in flight
        return ticket

    def _owner(self, name: str) -> str:
        """The pool whose ids this one takes, or itself."""
        while (source := self._calls.pools[name]._source) is not None:
            name = source
        return name

    def _read(self, name: str, host: torch.Tensor) -> torch.Tensor:
        if not self._told:
            self._told = True
            logger.warning(
                "%s: host ids lie on %s and are read back, which waits for the stream of the transfer; with"
                " --hicache-io-backend direct and layout page_first_direct they stay on the CPU",
                *(name, host.device),
            )
        return host.cpu()


def _part(host: torch.Tensor) -> Part | None:
    found: Part | None = getattr(host, "_part", None)
    return found


def _check_direction(part: Part, direction: str) -> None:
    if part.submission is not None and part.submission.direction != direction:
        raise PoolError(
            f"{part.name}: ids announced for a {part.submission.direction} are given to a {direction}:"
            " call prepare_transfer_indices for each submission"
        )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two lists are known to hold the same ids, without waiting for a device."""
    if one.is_cpu and other.is_cpu:
        return torch.equal(one, other)
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel() and one.dtype == other.dtype
