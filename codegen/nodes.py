"""YAML text in, a tree of nodes out, each with its place; whatever a spec does not need is refused.

Built from parser events, so that nothing is constructed, resolved or expanded on the way: no tags,
anchors, aliases, directives, several documents, duplicate keys, empty values or text over several lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from poolwright.codegen.errors import Location, SpecError
from poolwright.codegen.names import shorten

MAX_BYTES = 64 * 1024
MAX_DEPTH = 16
MAX_LINE = 400
"""Characters of a line; the parser's time grows with the square of what may still become a key."""
MAX_ENTRIES = 200
"""Entries of one mapping or list; keeps every check of names against names short."""
NULLS = ("", "~", "null", "Null", "NULL")

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Scalar:
    """One value on one line; `plain`: written without quotes."""

    location: Location
    text: str
    plain: bool = True

    def column(self, offset: int) -> Location:
        """The place of the character at `offset` of the text."""
        return self.location.shifted(offset + (0 if self.plain else 1))


@dataclass(frozen=True)
class Sequence:
    location: Location
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Mapping:
    """Keys and values in the order of the text; `short`: made from a short form, its key is not written."""

    location: Location
    entries: tuple[tuple[Scalar, Node], ...]
    short: bool = False

    def get(self, key: str) -> tuple[Scalar, Node] | None:
        return next(((k, v) for k, v in self.entries if k.text == key), None)


Node = Scalar | Sequence | Mapping


def parse(data: bytes, path: str) -> Mapping:
    """The one document of a file. Raises SpecError with the place of the first thing that is not read."""
    text = _decode(data, path)
    root = _Builder(text, path).document()
    if not isinstance(root, Mapping):
        raise SpecError(root.location, "", "expected `key: value` lines, got a single value or a list")
    return root


def find(root: Node, path: Path, *, key: bool = False) -> tuple[Location, str, Node]:
    """Place, dotted path and node of the deepest existing part of `path`; `key`: the place of its key."""
    node, place, where = root, root.location, ""
    for step in path:
        if isinstance(node, Mapping) and (entry := node.get(str(step))) is not None:
            where = where if node.short else join(where, step)
            place, node = (entry[0] if key else entry[1]).location, entry[1]
        elif isinstance(node, Sequence) and isinstance(step, int) and step < len(node.items):
            node = node.items[step]
            place, where = node.location, join(where, step)
        else:
            break
    return place, where, node


def join(where: str, step: str | int) -> str:
    """The dotted path one step deeper."""
    if isinstance(step, int):
        return f"{where}[{step}]"
    word = step if step.replace("_", "a").isalnum() and len(step) <= 60 else shorten(step)
    return f"{where}.{word}" if where else word


def _decode(data: bytes, path: str) -> str:
    if len(data) > MAX_BYTES:
        raise SpecError(Location(path), "", f"file of {len(data)} bytes, at most {MAX_BYTES} are read")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        raise SpecError(_place(before, path), "", "not UTF-8 text: save the file as UTF-8") from None
    text = text.replace("\r\n", "\n")
    for offset, char in enumerate(text):
        if not char.isprintable() and char != "\n":
            raise SpecError(_place(text[:offset], path), "", _unprintable(char))
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > MAX_LINE:
            place = Location(path, number, MAX_LINE + 1)
            raise SpecError(place, "", f"line of {len(line)} characters, at most {MAX_LINE} are read")
    return text


def _unprintable(char: str) -> str:
    if char == "\t":
        return "a tab: indent and separate with spaces"
    return f"character U+{ord(char):04X}: only printable text is read"


def _place(before: str, path: str) -> Location:
    line = before.count("\n")
    return Location(path, line + 1, len(before) - (before.rfind("\n") + 1) + 1)


class _Builder:
    """Turns the events of one text into nodes."""

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self.last = Location(path)
        self.events = self._read(text)

    def document(self) -> Node:
        next(self.events)
        start = next(self.events)
        if type(start).__name__ == "StreamEndEvent":
            raise SpecError(Location(self.path), "", "the file holds no document")
        if start.version or start.tags:
            raise SpecError(self.last, "", "directives (%YAML, %TAG) are not read: remove the line")
        root = self._node(next(self.events), 0, False, "")
        next(self.events)
        after = next(self.events)
        if type(after).__name__ != "StreamEndEvent":
            raise SpecError(self.last, "", "a second document starts here: one file holds one")
        return root

    def _read(self, text: str) -> Iterator[Any]:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError

        try:
            for event in YAML(typ="safe", pure=True).parse(text):
                mark = event.start_mark
                self.last = Location(self.path, mark.line + 1, mark.column + 1)
                yield event
        except YAMLError as error:
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            place = self.last if mark is None else Location(self.path, mark.line + 1, mark.column + 1)
            problem = getattr(error, "problem", None) or "it cannot be read"
            if "but got '['" in problem:
                problem += '; quote an expression with brackets: "conv_dim[i]"'
            raise SpecError(place, "", f"not YAML: {problem}") from None
        except Exception:
            # The parser is fed text from anywhere and trips over some of it (``"\UFFFFFFFF"``).
            raise SpecError(self.last, "", "not YAML: what follows this place cannot be read") from None

    def _node(self, event: Any, depth: int, flow: bool, where: str) -> Node:
        kind = type(event).__name__
        place = self.last
        if kind == "AliasEvent" or event.anchor is not None:
            raise SpecError(
                place, where, "anchors and aliases (& and *) are not read: repeat the text, or quote it"
            )
        if event.tag is not None:
            raise SpecError(place, where, f"tags are not read: remove {shorten(str(event.tag))}")
        if depth > MAX_DEPTH:
            raise SpecError(place, where, f"nested deeper than {MAX_DEPTH} levels")
        if kind == "ScalarEvent":
            return self._scalar(event, place, where)
        if kind == "SequenceStartEvent":
            return Sequence(place, tuple(self._items(depth, bool(event.flow_style), where)))
        return Mapping(place, tuple(self._entries(depth, bool(event.flow_style), where)))

    def _scalar(self, event: Any, place: Location, where: str) -> Scalar:
        if event.style in ("|", ">") or event.end_mark.line != event.start_mark.line:
            raise SpecError(place, where, "a value stands on one line")
        return Scalar(place, event.value, plain=event.style is None)

    def _items(self, depth: int, flow: bool, where: str) -> Iterator[Node]:
        index = 0
        while type(event := next(self.events)).__name__ != "SequenceEndEvent":
            self._check_count(index, where)
            item = self._node(event, depth + 1, flow, join(where, index))
            self._check(item, flow, join(where, index), "empty list item", item.location)
            yield item
            index += 1

    def _entries(self, depth: int, flow: bool, where: str) -> Iterator[tuple[Scalar, Node]]:
        seen: dict[str, Location] = {}
        while type(event := next(self.events)).__name__ != "MappingEndEvent":
            self._check_count(len(seen), where)
            key = self._node(event, depth + 1, flow, where)
            if not isinstance(key, Scalar) or (key.plain and key.text in NULLS):
                raise SpecError(key.location, where, "a key is one word")
            if key.text in seen:
                first = seen[key.text]
                twice = f"duplicate key {shorten(key.text)}, first at {first.line}:{first.column}"
                raise SpecError(key.location, join(where, key.text), twice)
            seen[key.text] = key.location
            value = self._node(next(self.events), depth + 1, flow, join(where, key.text))
            self._check(value, flow, join(where, key.text), "no value after the key", key.location)
            yield key, value

    def _check_count(self, count: int, where: str) -> None:
        if count == MAX_ENTRIES:
            raise SpecError(self.last, where, f"more than {MAX_ENTRIES} entries")

    def _check(self, node: Node, flow: bool, where: str, empty: str, place: Location) -> None:
        if not isinstance(node, Scalar) or not node.plain:
            return
        if node.text in NULLS:
            raise SpecError(place, where, f"{empty}: write one, or remove the line")
        if flow and node.text.count("(") > node.text.count(")"):
            cut = f"{shorten(node.text)} is cut off at a comma"
            raise SpecError(
                node.location, where, f'{cut}: commas inside flow lists need quotes, as in "min(a, b)"'
            )
