"""How much of a prefix a group of pools can restore. In: statuses by pool. Out: a number of pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from poolwright.runtime.storage.base import Status


def usable_prefix(
    all_pages: Mapping[str, Sequence[Status]], trailing_pages: Mapping[str, Sequence[Status]] | None = None
) -> int:
    """The most leading pages n that can be restored: page 0 to n - 1 of every pool of `all_pages`, and page
    n - 1 of every pool of `trailing_pages` (whose state at a page stands for all before it).

    Statuses are those of `exists` or `get`, page by page. Raises ValueError for lists of unequal length.
    """
    states = trailing_pages or {}
    lengths = {name: len(found) for name, found in (*all_pages.items(), *states.items())}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"statuses: expected one a page for every pool, got {lengths}")
    usable = 0
    for pages in range(1, min(lengths.values(), default=0) + 1):
        if any(found[pages - 1] is not Status.HIT for found in all_pages.values()):
            break
        if all(found[pages - 1] is Status.HIT for found in states.values()):
            usable = pages
    return usable
