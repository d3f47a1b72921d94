"""A built pool in, device tensors of any size that it can be bound to out."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from poolwright.runtime.description import DevicePart, Form
from poolwright.runtime.pool import HostPool

MARKERS = {"component", "record"}


def tensors(pool: HostPool, pages: int) -> Mapping[str, object]:
    """What `bind` takes: packed tensors of so many pages beyond the rows in front of page 0, zeroed."""
    form = pool.spec.forms[pool.form]
    names = {c.ident: c.name for c in pool.spec.components} | {r.ident: r.name for r in pool.spec.records}
    parts = [part for part in pool.program.device if pool.program.present(part.ident)]
    if MARKERS & set(form.tensors) or not parts:
        return {names[part.ident]: _of(pool, form, part, pages, 0) for part in parts}
    return {pool.spec.name: _of(pool, form, parts[0], pages, len(parts))}


def _of(pool: HostPool, form: Form, part: DevicePart, pages: int, together: int) -> object:
    """One tensor, or one a layer; with `together` it holds that many components along an axis of its own."""
    rows = pages + form.first_row(pool.sizes)
    shape = [rows if extent is None else extent for _, extent, _ in part.axes]
    if together:
        shape.insert(next(at for at, axis in enumerate(form.order) if axis in MARKERS), together)
    dtype = pool.program.dtype(pool.dtypes, part.ident)
    made = [torch.zeros(shape, dtype=dtype, device=pool.device) for _ in range(part.table or 1)]
    return made[0] if part.table is None else made
