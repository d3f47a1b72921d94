"""The engine's numbers of layers, and the layer ids of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from poolwright.runtime import arguments
from poolwright.runtime.pool import HostPool
from poolwright.runtime.scalars import index


@dataclass(frozen=True)
class Layers:
    """The layers of one pool as the engine counts them: `ids` by its numbers, of so many (`count`), the last
    `drafts` of them those of draft models. `some`: numbers that are left out are layers the pool lacks."""

    pool: str
    ids: Mapping[int, int]
    count: int
    drafts: int
    some: bool

    def layer(self, number: int) -> int | None:
        """The pool's layer id of this number; None where the pool lacks it. Raises ValueError."""
        if type(number) is not int:
            number = arguments.integer(self.pool, "layer_id", number)
        found = self.ids.get(number)
        if found is None and self.count and not self.some:
            raise ValueError(
                f"{self.pool}: expected a layer of 0 to {self.count - 1}, got {number}:"
                " give layers= where the engine counts others"
            )
        return found


def numbered(pool: HostPool, given: Mapping[int, int] | None, drafts: int) -> Layers:
    """`given`, or positions in the pool's own list. Raises ValueError."""
    count = len(pool.layers)
    last = index(drafts)
    if last is None or not 0 <= last <= count:
        raise ValueError(f"{pool.name}: draft_layers: expected 0 to {count}, got {drafts!r}")
    if given is None:
        return Layers(pool.name, dict(enumerate(pool.layers)), count, last, some=False)
    if not isinstance(given, Mapping):
        raise arguments.refusal(pool.name, "layers", "the pool's layer ids by the engine's numbers", given)
    numbers = arguments.layer_ids(pool.name, "layers", given)
    ids = arguments.layer_ids(pool.name, "layers", given.values())
    unknown = sorted(set(ids) - set(pool.layers))
    if unknown:
        raise ValueError(f"{pool.name}: layers: expected ids of {list(pool.layers)}, got {unknown}")
    return Layers(pool.name, dict(zip(numbers, ids, strict=True)), count, last, some=True)
