"""The one table of dtypes: what a spec may name, how many bytes it takes, what torch calls it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """A dtype with storage of its own. `itemsize` in bytes; `torch`: the attribute of the torch module."""

    name: str
    itemsize: int
    torch: str


DTYPES: dict[str, Dtype] = {
    name: Dtype(name, itemsize, name)
    for name, itemsize in (
        ("bfloat16", 2),
        ("float16", 2),
        ("float32", 4),
        ("float64", 8),
        ("float8_e4m3fn", 1),
        ("float8_e4m3fnuz", 1),
        ("float8_e5m2", 1),
        ("float8_e5m2fnuz", 1),
        ("float8_e8m0fnu", 1),
        ("uint8", 1),
        ("int8", 1),
        ("int16", 2),
        ("int32", 4),
        ("int64", 8),
        ("bool", 1),
    )
}
"""Dtypes that a component can be stored in, by name."""

LOGICAL: tuple[str, ...] = ("float4_e2m1", "float6_e2m3", "float6_e3m2", "int4", "uint4")
"""What packed values are called; they are stored in another dtype: ``{store: uint8, as: float4_e2m1}``."""
