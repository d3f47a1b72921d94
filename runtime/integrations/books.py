"""What a filled cache layer needs beside the bytes of pools: shapes, flags, counters, noted and put back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from poolwright.runtime.integrations.contents import Contents, Path, Plain, contents, put, spelled
from poolwright.runtime.integrations.layers import Holding, Kind, holding


@dataclass(frozen=True)
class Template:
    """What a tensor looks like, and the marks that its library has put on it."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    marks: Mapping[str, object]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Template:
        """A view into a wider tensor is noted as a packed one with its axes in the same order."""
        packed = torch.empty_like(tensor.detach(), device="meta")
        return cls(tensor.shape, packed.stride(), tensor.dtype, tensor.device, dict(vars(tensor)))

    def blank(self) -> torch.Tensor:
        """Zeros that look like this."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()
        vars(made).update(self.marks)
        return made


@dataclass(frozen=True)
class Books:
    """One layer's notes. `carried`: tensors whose bytes pools hold; `counters`: small ones kept here."""

    kind: Kind
    carried: Mapping[Path, Template]
    counters: Mapping[Path, torch.Tensor]
    values: Mapping[Path, Plain]
    aliases: Mapping[Path, Path]

    @classmethod
    def of(cls, held: Holding) -> Books:
        found, kind = held.contents, held.kind
        carried = {p: Template.of(t) for p, t in found.tensors.items() if p[0] in kind.held}
        counters = {p: _copied(t) for p, t in found.tensors.items() if p not in carried}
        return cls(kind, carried, counters, found.values, found.aliases)

    def blank(self) -> dict[Path, torch.Tensor]:
        """Tensors for all that pools carry, zeros."""
        return {path: template.blank() for path, template in self.carried.items()}

    def check_fresh(self, held: Holding) -> None:
        """Raises ValueError unless the layer is of the same kind and settings and has seen no token."""
        found = held.contents
        for path, value in self.values.items():
            if path[0] in self.kind.settings and found.values.get(path) != value:
                raise ValueError(
                    f"{found.name} of the cache to fill: {spelled(path)} is {found.values.get(path)!r}, "
                    f"expected {value!r}; build the fresh cache as the first one was built"
                )
        if held.kind != self.kind:
            raise ValueError(
                f"{found.name} of the cache to fill is not of the kind of the first cache's layer"
            )
        seen = [spelled(path) for path in self.carried if _seen(found, path)]
        if seen:
            raise ValueError(
                f"{found.name} of the cache to fill already holds {', '.join(seen)}; "
                f"hand over a new cache object"
            )

    def into(
        self, number: int, layer: object, tensors: Mapping[Path, torch.Tensor], pools: Mapping[str, str]
    ) -> None:
        """Put tensors and everything noted into a fresh layer. Raises ValueError if it then differs."""
        for path, value in self.values.items():
            if path[0] not in self.kind.settings:
                put(layer, path, value)
        there, placed = contents(number, layer).tensors, {}
        counters = {path: _copied(tensor) for path, tensor in self.counters.items()}
        for path, tensor in {**tensors, **counters}.items():
            placed[path] = _in_place(there.get(path), tensor)
            put(layer, path, placed[path])
        for path, other in self.aliases.items():
            put(layer, path, placed[other])
        self._check_filled(holding(number, layer, pools))

    def _check_filled(self, held: Holding) -> None:
        """Raises ValueError unless a layer is noted just as the first one was."""
        now, name = Books.of(held), held.contents.name
        for path, counter in self.counters.items():
            other = now.counters.get(path)
            if other is None or not torch.equal(other, counter):
                raise ValueError(
                    f"{name} of the filled cache: {spelled(path)} is {other}, expected {counter}"
                )
        for what in ("carried", "values", "aliases"):
            mine, theirs = getattr(self, what), getattr(now, what)
            for path in {**mine, **theirs}:
                if path not in mine or path not in theirs or mine[path] != theirs[path]:
                    raise ValueError(
                        f"{name} of the filled cache: {spelled(path)} is {theirs.get(path)}, "
                        f"expected {mine.get(path)}; build the fresh cache as the first one was built"
                    )


def _seen(found: Contents, path: Path) -> bool:
    """Whether a fresh layer has anything at a path but zeros that it was made with."""
    tensor = found.filled(*path)
    return tensor is not None and bool(tensor.count_nonzero())


def _in_place(there: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor to put: one that is there already and looks alike keeps its address, as graphs need it."""
    if there is None or _looks(there) != _looks(tensor):
        return tensor
    with torch.inference_mode():  # what was made in this mode may not be changed outside of it
        there.copy_(tensor)
    return there


def _looks(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, with the marks of its library."""
    made = tensor.detach().clone()
    vars(made).update(vars(tensor))
    return made
