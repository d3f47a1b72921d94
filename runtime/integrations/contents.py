"""Everything that a layer of a cache object holds: a layer in, its tensors and plain values by path out.

A path is the name of an attribute and the keys that lead on: ``("keys",)``, ``("conv_states", 0)``. What
is neither a tensor nor a plain value is refused, so that no tensor can hide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Path = tuple[str | int, ...]
Plain = bool | int | float | str | torch.dtype | torch.device | None

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))


@dataclass(frozen=True)
class Contents:
    """What a layer holds. `aliases`: paths of tensors that another path names already, and that path."""

    name: str
    tensors: Mapping[Path, torch.Tensor]
    values: Mapping[Path, Plain]
    aliases: Mapping[Path, Path]

    @property
    def attributes(self) -> set[str]:
        """Names of all attributes."""
        return {str(path[0]) for found in (self.tensors, self.values, self.aliases) for path in found}

    def filled(self, *path: str | int) -> torch.Tensor | None:
        """The tensor at a path; None when there is none or it has no elements."""
        found = self.tensors.get(path)
        return None if found is None or found.numel() == 0 else found

    def number(self, name: str) -> int:
        """A plain integer attribute. Raises ValueError for anything else."""
        value = self.values.get((name,))
        if not isinstance(value, int):
            raise ValueError(f"{self.name}: {name}: expected an integer, got {value!r}")
        return value


def contents(number: int, layer: object) -> Contents:
    """All of layer `number`. Raises ValueError naming an attribute that is no tensor and no plain value."""
    name = f"layer {number} ({type(layer).__name__})"
    if not hasattr(layer, "__dict__") or any(vars(kind).get("__slots__") for kind in type(layer).__mro__):
        raise ValueError(f"{name}: expected an object that keeps all it has in attributes, without __slots__")
    tensors: dict[Path, torch.Tensor] = {}
    values: dict[Path, Plain] = {}
    aliases: dict[Path, Path] = {}
    first: dict[int, Path] = {}
    for path, value in _walk(name, (), vars(layer)):
        if not isinstance(value, torch.Tensor):
            values[path] = value
        elif id(value) in first:
            aliases[path] = first[id(value)]
        else:
            first[id(value)] = path
            tensors[path] = value
    return Contents(name, tensors, values, aliases)


def spelled(path: Path) -> str:
    """A path as Python writes it: ``conv_states[0]``."""
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])


def put(layer: object, path: Path, value: object) -> None:
    """Set what `path` names in a layer whose containers are there."""
    if len(path) == 1:
        setattr(layer, str(path[0]), value)
        return
    place: Any = getattr(layer, str(path[0]))
    for key in path[1:-1]:
        place = place[key]
    place[path[-1]] = value


def _walk(name: str, path: Path, holder: Mapping[Any, Any]) -> Iterator[tuple[Path, torch.Tensor | Plain]]:
    for key, value in holder.items():
        here = (*path, key)
        if isinstance(value, dict):
            yield from _walk(name, here, value)
        elif isinstance(value, list):
            yield from _walk(name, here, dict(enumerate(value)))
        elif isinstance(value, (torch.Tensor, *_PLAIN)):
            yield here, value
        else:
            raise ValueError(
                f"{name}: {spelled(here)} is a {type(value).__name__}, expected a tensor, a plain value, "
                f"or a dict or list of them; this kind of layer cannot be moved"
            )
