"""The ranges of a page as SGLang's storage names them: a pool in, `PagePart`s out.

Its backends have two keys a page for keys and values, one for anything else. A pool of keys and values
therefore tells two ranges also where its layout has one: the halves of it.
"""

from __future__ import annotations

from typing import NamedTuple

from poolwright.runtime.pool import HostPool

KEYS_AND_VALUES = {"k", "v"}


class PagePart(NamedTuple):
    """Of page p the `nbytes` bytes from ``start + p * step`` on; `name` as in `Pages.page_object_names`."""

    name: str
    start: int
    step: int
    nbytes: int


def page_parts(pool: HostPool) -> tuple[PagePart, ...]:
    """The ranges of a page, in the order in which they lie."""
    found = [PagePart(at.name, at.start, at.nbytes, at.nbytes) for at in pool.program.spans(pool.page_num)]
    if [part.name for part in found] == ["page"] and set(_components(pool)) == KEYS_AND_VALUES:
        halves = [half for name in _components(pool) if (half := _half(pool, name)) is not None]
        found = halves if len(halves) == 2 else found
    return tuple(found)


def keyed_twice(parts: tuple[PagePart, ...]) -> bool:
    """Whether storage has a key for the keys of a page and another for its values."""
    return [part.name for part in parts] == ["k", "v"]


def _components(pool: HostPool) -> list[str]:
    """Components that have bytes, in the order in which they lie."""
    parts = [part for part in pool.host_layout(1).parts if pool.program.present(part.ident)]
    return [part.ident for part in sorted(parts, key=lambda part: part.base)]


def _half(pool: HostPool, name: str) -> PagePart | None:
    """Where one component lies in a page, if it is one run there."""
    part = pool.host_layout(pool.page_num).part(name)
    page = next(step for axis, _, step in part.axes if axis == "page")
    inner = sorted((step, extent) for axis, extent, step in part.axes if axis != "page" and extent > 1)
    nbytes = pool.program.itemsize(name)
    for step, extent in inner:
        if step != nbytes:
            return None
        nbytes *= extent
    return PagePart(name, part.base, page, nbytes)
