"""What is moved: pools as transfers see them, and one pool's part of a submission."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from poolwright.runtime.binding import Binding
from poolwright.runtime.checks import Checks
from poolwright.runtime.driver import Memory
from poolwright.runtime.indices import Batch
from poolwright.runtime.memory import HostBuffer
from poolwright.runtime.program import SizedProgram

ABSENT = 0xFFFFFFFF
"""Stands in a step of a load in layer order for a list that does not have the layer."""


class Move:
    """One pool's part of a submission: its number among the members, its name, checked ids, their path.

    `predicted`: seconds that the cost model expects; None where it knows nothing. `checks`: compare its pages
    when they have arrived.
    """

    __slots__ = ("batch", "checks", "member", "name", "path", "predicted")

    def __init__(
        self,
        member: int,
        name: str,
        batch: Batch,
        path: str,
        predicted: float | None = None,
        checks: Checks | None = None,
    ) -> None:
        self.member, self.name, self.batch, self.path = member, name, batch, path
        self.predicted, self.checks = predicted, checks


class Steps:
    """Numbers of the steps of a load in layer order for one pool; `memory`: where the device has them;
    `cuts`: what staging makes of them, by how they are cut."""

    __slots__ = ("cuts", "memory", "numbers")

    def __init__(self, numbers: array[int]) -> None:
        self.numbers = numbers
        self.memory: Memory | None = None
        self.cuts: dict[tuple[int, int], list[Any]] = {}


class Order(NamedTuple):
    """The steps of a load in layer order: layer ids, and for each member that moves its numbers.

    `others`: layers of members that do not move. `rest`: the step in which members move that have no layers;
    None where none does.
    """

    layers: tuple[int, ...]
    steps: dict[int, Steps]
    others: frozenset[int]
    rest: int | None


class Place(NamedTuple):
    """Where host pages lie for a launch: pinned host memory, or a slot of staging memory."""

    address: int
    pages: int


@dataclass(frozen=True)
class Ring:
    """Staging memory of one pool: equal slots, used in turn, of so many pages each (0: of a part of a page).

    `shared`: both directions use the same slots, else each has its own half of them.
    """

    memory: Memory
    slot_pages: int
    slot_bytes: int
    shared: bool

    def slot(self, number: int) -> Place:
        return Place(self.memory.address + number * self.slot_bytes, max(self.slot_pages, 1))


class Member:
    """A pool as transfers see it: its program, its host memory, and the tensors it is bound to.

    `address`: what the device calls the first byte of `buffer`; `lists`: layer ids by list, `layers`: those
    of all lists; `ring` None: it has no staging memory.
    """

    def __init__(
        self,
        name: str,
        program: SizedProgram,
        buffer: HostBuffer,
        address: int,
        pages: int,
        lists: Mapping[str, tuple[int, ...]],
        layers: tuple[int, ...],
        ring: Ring | None,
    ) -> None:
        self.name, self.program, self.buffer = name, program, buffer
        self.place = Place(address, pages)
        self.layout = program.host(pages)
        self.empty = self.layout.page_bytes == 0
        self.in_place = program.spec.updates == "in_place"
        self.layers, self.ring = layers, ring
        self.binding: Binding | None = None
        self.table: Memory | None = None
        self._at = [
            None if name is None else {layer: position for position, layer in enumerate(lists[name])}
            for name in program.lists.values()
        ]

    @property
    def tensor(self) -> torch.Tensor:
        """The host bytes."""
        return self.buffer.tensor

    def step(self, layer: int, first: bool) -> list[int]:
        """The numbers of one step: the layer's position in each component's list; what has no layers moves
        with the `first`."""
        return [(0 if first else ABSENT) if at is None else at.get(layer, ABSENT) for at in self._at]

    def positions(self, numbers: Sequence[int]) -> dict[str | None, list[int]]:
        """What the steps of a load in layer order say: positions in each layer list; None: [0] if what has
        no layers moves."""
        lists = self.program.lists
        return {
            name: [number for number in numbers[at :: len(lists)] if number != ABSENT]
            for at, name in enumerate(lists.values())
        }
