"""A file of a specs folder in, a `Document` out: nodes with places, and the schema object they make."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Generic, TypeVar, get_args, get_origin

from poolwright.codegen import nodes, schema
from poolwright.codegen.errors import Location, SpecError, SpecErrors
from poolwright.codegen.names import shorten, suggest
from poolwright.codegen.nodes import Mapping, Node, Path, Scalar, Sequence
from poolwright.codegen.schema import OneOrMore, Short
from poolwright.codegen.validate import validate

T = TypeVar("T")

_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_LONGEST_INTEGER = 15


@dataclass(frozen=True)
class Document(Generic[T]):
    """One file, read. `path` is relative to the project; `root` has short forms written out."""

    path: str
    root: Mapping
    value: T

    def error(self, path: Path, message: str, *, key: bool = False, offset: int = 0) -> SpecError:
        """An error at a node (or at its key), `offset` characters into its text."""
        place, where, node = nodes.find(self.root, path, key=key)
        if isinstance(node, Scalar) and not key:
            place = node.column(offset) if offset else place
        return SpecError(place, where, message)

    def locate(self, where: str) -> Location:
        """The place of a dotted path (``device.per_layer.order[2]``), or of what exists of it."""
        steps = re.findall(r"\[(\d+)\]|([^.\[\]]+)", where)
        path = tuple(int(number) if number else word for number, word in steps)
        return nodes.find(self.root, path)[0]


def read(file: FilePath, path: str, kind: Any) -> Document[Any]:
    """Read one file as a `kind` of schema. Raises SpecError or, for mistakes of schema, SpecErrors."""
    if file.exists() and not file.is_file():
        raise SpecError(Location(path), "", "expected a file: remove it, or give it another ending")
    try:
        with file.open("rb") as stream:
            data = stream.read(nodes.MAX_BYTES + 1)
    except OSError as error:
        raise SpecError(Location(path), "", f"cannot be read: {error.strerror}") from None
    return load(data, path, kind)


def load(data: bytes, path: str, kind: Any) -> Document[Any]:
    """Make a `kind` of schema of the text of a file.

    Raises SpecError for the first thing that is not read, SpecErrors for everything that has no place in
    the schema.
    """
    from pydantic_core import ValidationError

    root = write_out(nodes.parse(data, path), kind)
    assert isinstance(root, Mapping)
    document = Document(path, root, None)
    try:
        value = validate(kind, _plain(root, document, ()))
    except ValidationError as error:
        raise SpecErrors(_explain(document, kind, one) for one in _telling(error)) from None
    return Document(path, root, value)


def write_out(node: Node, kind: Any) -> Node:
    """The node with the short forms that its schema allows written out."""
    kind, marks = schema.unwrap(kind)
    for mark in marks:
        node = _long_form(node, mark)
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(node, Sequence) and origin is list:
        return Sequence(node.location, tuple(write_out(item, arguments[0]) for item in node.items))
    if isinstance(node, Mapping) and (origin is dict or isinstance(kind, type)):
        return Mapping(node.location, tuple((k, _entry(k, v, kind)) for k, v in node.entries), node.short)
    return node


def _entry(key: Scalar, value: Node, kind: Any) -> Node:
    if get_origin(kind) is dict:
        return write_out(value, get_args(kind)[1])
    known = schema.fields(kind) if _is_schema(kind) else {}
    return write_out(value, known[key.text][1]) if key.text in known else value


def _is_schema(kind: Any) -> bool:
    return isinstance(kind, type) and kind.__module__ == schema.__name__


def _long_form(node: Node, mark: object) -> Node:
    if isinstance(mark, OneOrMore) and isinstance(node, Scalar):
        return Sequence(node.location, (node,))
    if isinstance(mark, Short):
        key = (
            mark.scalar if isinstance(node, Scalar) else mark.sequence if isinstance(node, Sequence) else None
        )
        if key is not None:
            return Mapping(node.location, ((Scalar(node.location, key), node),), short=True)
    return node


def _plain(node: Node, document: Document[None], path: Path) -> object:
    if isinstance(node, Mapping):
        return {key.text: _plain(value, document, (*path, key.text)) for key, value in node.entries}
    if isinstance(node, Sequence):
        return [_plain(item, document, (*path, index)) for index, item in enumerate(node.items)]
    if not node.plain or not _INTEGER.fullmatch(node.text):
        return node.text
    if len(node.text) > _LONGEST_INTEGER:
        raise document.error(path, f"number of {len(node.text)} digits, at most {_LONGEST_INTEGER} are read")
    return int(node.text, 0) if node.text[:2] in ("0o", "0x") else int(node.text)


_EXPECTED = {
    "string_type": "text",
    "int_type": "an integer",
    "list_type": "a list",
    "dict_type": "`key: value` entries",
    "dataclass_type": "`key: value` entries",
}


def _telling(error: Any) -> list[Any]:
    """The errors without missing keys where an unknown key stands: that one is the missing one, misspelt."""
    found = error.errors(include_url=False)
    unknown = {one["loc"][:-1] for one in found if one["type"] == "unexpected_keyword_argument"}
    return [one for one in found if one["type"] != "missing" or one["loc"][:-1] not in unknown]


def _explain(document: Document[None], kind: Any, error: Any) -> SpecError:
    """One of pydantic's errors as ours, at its node."""
    path: Path = tuple(error["loc"])
    if error["type"] == "unexpected_keyword_argument":
        known = schema.fields(_kind_at(kind, path[:-1]))
        message = f"unknown key {shorten(str(path[-1]))}{suggest(str(path[-1]), known)}"
        return document.error(path, message, key=True)
    if error["type"] == "missing":
        return document.error(path[:-1], f"missing key {path[-1]!r}")
    if error["type"] == "literal_error":
        choices = get_args(schema.unwrap(_kind_at(kind, path))[0])
        got = _describe(error["input"])
        return document.error(path, f"expected one of {', '.join(choices)}, got {got}")
    expected = _EXPECTED.get(error["type"])
    if expected is None:
        return document.error(path, str(error["msg"]))
    return document.error(path, f"expected {expected}, got {_describe(error['input'])}")


def _kind_at(kind: Any, path: Path) -> Any:
    for step in path:
        kind = schema.unwrap(kind)[0]
        kind = schema.fields(kind)[str(step)][1] if _is_schema(kind) else get_args(kind)[-1]
    return schema.unwrap(kind)[0]


def _describe(value: object) -> str:
    if isinstance(value, dict):
        return "`key: value` entries"
    return (
        "a list" if isinstance(value, list) else shorten(str(value)) if isinstance(value, str) else str(value)
    )
