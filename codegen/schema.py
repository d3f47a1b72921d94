"""The grammar of specs, groups and layouts as frozen dataclasses, and as JSON Schema.

There are no unions: a field that may be written short carries a `Short`, and `load` writes it out on nodes
before `validate` fills the classes.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Short:
    """A mapping that may be written short: a scalar as `scalar`, a list as `sequence`."""

    scalar: str | None = None
    sequence: str | None = None


@dataclass(frozen=True)
class OneOrMore:
    """A list that may be written as its one item."""


@dataclass(frozen=True)
class Text:
    """Text that may also be an integer: an expression, an amount."""


Size = Annotated[str, Text()]


# ---- a pool -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Index:
    """What one index addresses; with `space` indices are another pool's, and `row` turns them into rows."""

    unit: Literal["token", "page", "slot", "request"]
    space: str | None = None
    row: Size | None = None


@dataclass(frozen=True)
class Param:
    """A parameter of the constructor; `list`: so many integers; `default`: the value when it is not given."""

    min: int | None = None
    max: int | None = None
    one_of: list[int] | None = None
    equals: Size | None = None
    list_: int | None = None
    default: int | None = None


@dataclass(frozen=True)
class Constant:
    """A constant of a variant: an integer or an axis order."""

    value: int | None = None
    order: list[str] | None = None


@dataclass(frozen=True)
class Storage:
    """`store`: a dtype group or a dtype; `as`: what the engine calls it."""

    store: str
    as_: str | None = None


@dataclass(frozen=True)
class Shard:
    """Which dims an engine splits over which ranks, in how many interleaved blocks."""

    axes: dict[str, str]
    blocks: int = 1


@dataclass(frozen=True)
class Component:
    """One kind of buffer."""

    element: dict[str, Size]
    dtype: Annotated[Storage, Short(scalar="store")]
    layers: str = "layers"
    per: Literal["page"] | None = None
    when: str | None = None
    align: Size | None = None
    shard: Shard | None = None
    repeat: int | None = None


@dataclass(frozen=True)
class Record:
    """Components side by side in one padded row."""

    holds: list[str]
    inner: Annotated[list[str], OneOrMore()]
    pad_to: Size = "1"


@dataclass(frozen=True)
class Form:
    """A device order: what indexes separate tensors, and the axes inside one."""

    tensors: list[str]
    order: list[str]
    stride: dict[str, Literal["any"]] = field(default_factory=dict)
    base: Size | None = None


@dataclass(frozen=True)
class Snapshot:
    """When the rows of an in-place pool are consistent: a hook that the engine binds."""

    valid_if: str


@dataclass(frozen=True)
class Pool:
    """`specs/NAME.yaml`."""

    pool: str
    class_: str
    summary: str
    index: Annotated[Index, Short(scalar="unit")]
    updates: Literal["append", "in_place"]
    components: dict[str, Component]
    device: dict[str, Form] = field(default_factory=dict)
    layouts: list[str] = field(default_factory=list)
    params: dict[str, Param] = field(default_factory=dict)
    dtypes: dict[str, list[str]] = field(default_factory=dict)
    variants: dict[
        str, dict[str, dict[str, Annotated[Constant, Short(scalar="value", sequence="order")]]]
    ] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    split: dict[str, dict[str, Size]] = field(default_factory=dict)
    require: list[str] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    not_carried: list[str] = field(default_factory=list)
    snapshot: Snapshot | None = None
    tag: list[str] = field(default_factory=list)


# ---- a group and the layouts ------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """A pool in a group."""

    pool: str
    layers: str | None = None
    index: str | None = None
    hit: Literal["all_pages", "trailing_pages"] = "all_pages"
    restore_with: str | None = None
    params: dict[str, Size] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """`specs/groups/NAME.yaml`."""

    group: str
    pools: dict[str, Member]
    anchor: str
    summary: str | None = None
    params: dict[str, Param] = field(default_factory=dict)
    budget: dict[str, Size] = field(default_factory=dict)


Layouts = dict[str, list[str]]
"""`specs/layouts.yaml`."""


# ---- fields -----------------------------------------------------------------------------------


@functools.cache
def fields(cls: type) -> Mapping[str, tuple[str, Any, bool]]:
    """Key in the text -> (attribute, type, required). A trailing underscore keeps Python words apart."""
    hints = get_type_hints(cls, include_extras=True)
    result = {}
    for one in dataclasses.fields(cls):
        required = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        result[one.name.rstrip("_")] = (one.name, hints[one.name], required)
    return result


def unwrap(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without `Annotated` and `| None`, and its markers."""
    marks: tuple[Any, ...] = ()
    while True:
        if get_origin(kind) is Annotated:
            marks += kind.__metadata__
            kind = kind.__origin__
        elif isinstance(kind, types.UnionType) or str(get_origin(kind)) == "typing.Union":
            kind = next(one for one in get_args(kind) if one is not type(None))
        else:
            return kind, marks


# ---- JSON Schema ------------------------------------------------------------------------------

ROOTS: dict[str, Any] = {"pool": Pool, "group": Group, "layouts": Layouts}


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a pool spec; ``$defs`` also holds `Group` and `Layouts`, for their files."""
    definitions: dict[str, Any] = {}
    root = _json(Pool, definitions)
    _json(Group, definitions)
    definitions["Layouts"] = _json(Layouts, definitions)
    ordered = {name: definitions[name] for name in sorted(definitions)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pool",
        **root,
        "$defs": ordered,
    }


def _json(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    kind, marks = unwrap(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is str:
        return {"type": ["string", "integer"] if marks else "string"}
    if kind is int:
        return {"type": "integer"}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is list:
        listed = {"type": "array", "items": _json(arguments[0], definitions)}
        return {"anyOf": [listed["items"], listed]} if marks else listed
    if origin is dict:
        return {"type": "object", "additionalProperties": _json(arguments[1], definitions)}
    _define(kind, definitions)
    reference = {"$ref": f"#/$defs/{kind.__name__}"}
    return {"anyOf": [*_short_forms(kind, marks, definitions), reference]} if marks else reference


def _short_forms(cls: type, marks: tuple[Any, ...], definitions: dict[str, Any]) -> list[dict[str, Any]]:
    short = cast(Short, marks[0])
    keys = [key for key in (short.scalar, short.sequence) if key is not None]
    return [_json(fields(cls)[key][1], definitions) for key in keys]


def _define(cls: type, definitions: dict[str, Any]) -> None:
    if cls.__name__ in definitions:
        return
    definitions[cls.__name__] = {}
    properties = {key: _json(kind, definitions) for key, (_, kind, _) in fields(cls).items()}
    definitions[cls.__name__] = {
        "type": "object",
        "description": (cls.__doc__ or "").strip(),
        "properties": properties,
        "required": [key for key, (_, _, required) in fields(cls).items() if required],
        "additionalProperties": False,
    }
