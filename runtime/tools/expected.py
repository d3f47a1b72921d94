"""Where the oracle places every byte on both sides in; what a transfer has to do to them out.

Copying byte by byte through tables of offsets took most of the time of `verify`. So a component's bytes are
moved in the longest runs that both tables show to lie side by side, and in the largest words in which both
can be counted; nothing but the tables is asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from poolwright.runtime.tools.oracle import Bytes

OUTER = ("page", "token", "layer")
"""Axes that transfers choose from; always the first ones."""
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
SHIFTS = 61


@dataclass(frozen=True)
class Place:
    """One component on both sides. `host`, `device`: the first word of each run, shaped as the leading `axes`
    say. `run`: words of `word` bytes each. `layers`: its layer list."""

    name: str
    axes: tuple[str, ...]
    layers: str | None
    word: int
    run: int
    host: torch.Tensor
    device: torch.Tensor

    def move(
        self, source: torch.Tensor, here: torch.Tensor, target: torch.Tensor, there: torch.Tensor
    ) -> None:
        """Copy the runs that start at words `here` of `source` (uint8) to words `there` of `target`."""
        self._runs(target)[there] = self._runs(source)[here]

    def _runs(self, memory: torch.Tensor) -> torch.Tensor:
        """A view: the run that starts at each word."""
        return in_words(memory, self.word).unfold(0, self.run, 1)


def places(host: Sequence[Bytes], device: Sequence[Bytes]) -> tuple[Place, ...]:
    """Every component of `host`, whose bytes both sides hold in the same logical order."""
    there = {at.name: at for at in device}
    return tuple(_place(at, there[at.name]) for at in host)


def _place(host: Bytes, device: Bytes) -> Place:
    sides = host.at, device.at
    outer = sum(axis in OUTER for axis in host.axes)
    inner = host.at.dim()
    while inner > outer and all(_side_by_side(at.flatten(inner - 1)) for at in sides):
        inner -= 1
    run = math.prod(host.at.shape[inner:])
    if inner < host.at.dim():
        sides = host.at.flatten(inner)[..., 0], device.at.flatten(inner)[..., 0]
    word = next(word for word in WORDS if not run % word and all(not (at % word).any() for at in sides))
    starts = [(at // word).contiguous() for at in sides]
    return Place(host.name, host.axes[:inner], host.layers, word, run // word, *starts)


def _side_by_side(at: torch.Tensor) -> bool:
    """Whether every entry of the last axis is one more than the one before it."""
    return bool((at[..., 1:] - at[..., :-1] == 1).all())


def in_words(memory: torch.Tensor, word: int = 8) -> torch.Tensor:
    """A view of uint8 memory as whole words; a rest behind the last one is left out."""
    return memory[: len(memory) // word * word].view(WORDS[word])


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two uint8 tensors hold the same bytes (`torch.equal` takes several times as long)."""
    rest = len(left) // 8 * 8
    return (
        len(left) == len(right)
        and torch.equal(in_words(left), in_words(right))
        and torch.equal(left[rest:], right[rest:])
    )


class Contents:
    """Random bytes for one side, others for every transfer: one random stretch, each time from another place
    on. `padding`: which of the bytes are zero."""

    def __init__(self, nbytes: int, generator: torch.Generator, padding: torch.Tensor | None = None) -> None:
        self._nbytes, words = nbytes, nbytes // 8 + 1
        self._stretch = torch.empty(words + SHIFTS, dtype=torch.int64).random_(generator=generator)
        self._kept = None
        if padding is not None and bool(padding.any()):
            kept = torch.zeros(words * 8, dtype=torch.uint8)
            kept[:nbytes].masked_fill_(~padding, 0xFF)
            self._kept = kept.view(torch.int64)
        self._turns = self._places()

    def _places(self) -> Iterator[int]:
        while True:
            yield from range(SHIFTS)

    def next(self) -> torch.Tensor:
        """The bytes of the next transfer: uint8, a tensor of its own."""
        first = next(self._turns)
        words = self._stretch[first : first + self._nbytes // 8 + 1]
        filled = words.clone() if self._kept is None else words & self._kept
        return filled.view(torch.uint8)[: self._nbytes]
