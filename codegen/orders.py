"""Checks of axis orders: every axis of everything that is placed stands exactly once in each order.

In: the things a pool places and the words of an order with their paths. Out: the words, `record` read as
`component`; or SpecError at the offending word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poolwright.codegen.load import Document
from poolwright.codegen.names import shorten, suggest
from poolwright.codegen.nodes import Path

TABLE_AXES = ("component", "layer")
FORM_STEP = "add it; `element` stands for all dims that are not named"
_LAYOUT_STEP = "name the dims as the layout does, or take another layout"


@dataclass(frozen=True)
class Thing:
    """A component or record as orders see it. `dims`: its element dims (``inner`` alone for a record)."""

    kind: str
    name: str
    dims: tuple[str, ...]
    layer: bool
    token: bool

    @property
    def axes(self) -> tuple[str, ...]:
        outer = (
            "component",
            *(("layer",) if self.layer else ()),
            "page",
            *(("token",) if self.token else ()),
        )
        return (*outer, *self.dims)


@dataclass(frozen=True)
class Word:
    """A word of an order and where it stands."""

    text: str
    path: Path


@dataclass(frozen=True)
class Placement:
    """Everything that one pool places, and the split dims with their parts."""

    document: Document[Any]
    things: tuple[Thing, ...]
    splits: Mapping[str, tuple[str, ...]]
    unit: str

    def form(
        self, name: str, tensors: Sequence[str], order: Sequence[str]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The form's `tensors` and `order`, checked."""
        at: Path = ("device", name)
        tables = self._words(tensors, (*at, "tensors"))
        for word in tables:
            if word.text not in TABLE_AXES:
                message = f"only component, record and layer index tensors, got {shorten(word.text)}"
                raise self.document.error(word.path, message)
        axes = self._words(order, (*at, "order"))
        for word in axes:
            self._check_word(word)
        self._check_once([*tables, *axes])
        self._check_page_outside_token(axes)
        self._check_places([word.text for word in (*tables, *axes)], (*at, "order"), "order", FORM_STEP)
        return tuple(word.text for word in tables), tuple(word.text for word in axes)

    def layout(self, name: str, order: Sequence[str], path: Path) -> None:
        """Check that a host layout places everything once; axes that nothing has drop out."""
        for dim, parts in self.splits.items():
            if dim in order and set(parts) & set(order):
                raise self.document.error(path, f"layout {name!r} places {dim!r} whole and by its parts")
        self._check_places(order, path, f"layout {name!r}", _LAYOUT_STEP)

    def _words(self, texts: Sequence[str], path: Path) -> list[Word]:
        records = any(thing.kind == "record" for thing in self.things)
        read = ["component" if text == "record" and records else text for text in texts]
        return [Word(text, (*path, index)) for index, text in enumerate(read)]

    def _check_word(self, word: Word) -> None:
        parts = {part for dim, pieces in self.splits.items() if self._has(dim) for part in pieces}
        if self._has(word.text) or word.text == "element" or word.text in parts:
            return
        if word.text == "token":
            message = f"no component has tokens inside its pages (index unit: {self.unit})"
        elif word.text == "layer":
            message = "no component has layers"
        elif word.text == "record":
            message = "the pool has no records: write component"
        elif word.text == "inner":
            message = "`inner` is the row of a record, and the pool has none: write element"
        else:
            known = dict.fromkeys(axis for thing in self.things for axis in thing.axes)
            hint = suggest(word.text, [*known, *sorted(parts), "element"])
            message = f"no component has an axis {shorten(word.text)}{hint}"
        raise self.document.error(word.path, message)

    def _has(self, axis: str) -> bool:
        return any(axis in thing.axes for thing in self.things)

    def _check_once(self, words: Sequence[Word]) -> None:
        seen: set[str] = set()
        rest = {thing.dims[0] for thing in self.things if thing.kind == "record"}
        for word in words:
            named = {"element", *rest} if word.text in ("element", *rest) else {word.text}
            named |= set(self.splits.get(word.text, ()))
            if named & seen:
                raise self.document.error(word.path, f"axis {shorten(word.text)} is placed twice")
            seen |= named

    def _check_page_outside_token(self, words: Sequence[Word]) -> None:
        order = [word.text for word in words]
        if "token" in order and "page" in order and order.index("token") < order.index("page"):
            raise self.document.error(
                words[order.index("token")].path, "`token` stands left of `page`: page is outside"
            )

    def _check_places(self, order: Sequence[str], path: Path, what: str, step: str) -> None:
        for thing in self.things:
            missing = [axis for axis in thing.axes if not self._places(order, axis, thing)]
            if missing:
                names = ", ".join(repr(axis) for axis in missing)
                owner = f"{thing.kind} {thing.name!r}"
                raise self.document.error(path, f"{what} has no place for {names} of {owner}: {step}")

    def _places(self, order: Sequence[str], axis: str, thing: Thing) -> bool:
        parts = self.splits.get(axis, ())
        if axis in order or (parts and all(part in order for part in parts)):
            return True
        return axis in thing.dims and "element" in order


def check_layout(document: Document[Any], name: str, order: Sequence[str]) -> None:
    """Check one entry of layouts.yaml on its own. Raises SpecError."""
    for index, axis in enumerate(order):
        if axis in order[:index]:
            raise document.error((name, index), f"axis {shorten(axis)} is placed twice")
        if axis in ("record", "inner"):
            raise document.error((name, index), f"layouts say component and element, not {axis!r}")
    for axis in ("component", "page"):
        if axis not in order:
            raise document.error((name,), f"a layout places {axis!r}, this one does not")
    if "token" in order and order.index("token") < order.index("page"):
        raise document.error((name, order.index("token")), "`token` stands left of `page`: page is outside")
