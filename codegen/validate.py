"""Plain data (mappings, lists, text, integers) in, an instance of a `schema` class out.

Pydantic's validator core is driven directly: importing pydantic's model layer alone takes a third of the
time that `codegen build --check` has.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, get_args, get_origin

from pydantic_core import SchemaValidator, core_schema
from pydantic_core.core_schema import CoreSchema

from poolwright.codegen import schema


def validate(kind: Any, data: object) -> Any:
    """An instance of `kind` made of plain data. Raises pydantic_core.ValidationError."""
    return _validator(kind).validate_python(data)


@functools.cache
def _validator(kind: Any) -> SchemaValidator:
    return SchemaValidator(_core(kind))


def _core(kind: Any) -> CoreSchema:
    kind, marks = schema.unwrap(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is str:
        return core_schema.str_schema(strict=not marks, coerce_numbers_to_str=bool(marks))
    if kind is int:
        return core_schema.int_schema(strict=True)
    if origin is Literal:
        return core_schema.literal_schema(list(arguments))
    if origin is list:
        return core_schema.list_schema(_core(arguments[0]), strict=True)
    if origin is dict:
        return core_schema.dict_schema(core_schema.str_schema(), _core(arguments[1]), strict=True)
    return _core_of_class(kind)


@functools.cache
def _core_of_class(cls: type) -> CoreSchema:
    parts = []
    for key, (name, kind, required) in schema.fields(cls).items():
        part = _core(kind)
        if not required:
            one = next(f for f in dataclasses.fields(cls) if f.name == name)
            part = (
                core_schema.with_default_schema(part, default=one.default)
                if one.default_factory is dataclasses.MISSING
                else core_schema.with_default_schema(part, default_factory=one.default_factory)
            )
        parts.append(core_schema.dataclass_field(name, part, kw_only=True, validation_alias=key))
    arguments = core_schema.dataclass_args_schema(cls.__name__, parts, extra_behavior="forbid")
    return core_schema.dataclass_schema(
        cls, arguments, [name for name, _, _ in schema.fields(cls).values()], frozen=True
    )
