"""How much of a prefix a group can restore. In: what is there by pool. Out: a number of pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from poolwright.runtime import arguments
from poolwright.runtime.group import HostPoolGroup
from poolwright.runtime.pool import HostPool


@dataclass(frozen=True)
class Rule:
    """What a pool needs for a prefix of n pages: all of them, or (`trailing`) the last so many, or all when
    there are fewer. A state that stands for everything before it is one trailing page."""

    trailing: int | None = None

    def needs(self, pages: int) -> range:
        """Which pages a prefix of so many needs."""
        return range(0 if self.trailing is None else max(0, pages - self.trailing), pages)


def rules_of(
    owner: str, pools: Mapping[str, HostPool], group: HostPoolGroup | None, trailing: Mapping[str, int]
) -> dict[str, Rule]:
    """The rule of every pool as the group's spec says it; `trailing`: of how many pages, 1 if not named.

    Raises ValueError, naming `owner`, for a name in `trailing` whose pool needs all pages.
    """
    ends = {n for n in pools if group is not None and group.spec.members[n].hit == "trailing_pages"}
    last: dict[str, int | None] = dict.fromkeys(ends, 1)
    for name, pages in trailing.items():
        if name not in ends:
            raise ValueError(f"{owner}: trailing: {name!r} is no pool that hits by its trailing pages")
        last[name] = arguments.whole(owner, f"trailing: {name}", pages, 1)
    return {name: Rule(last.get(name)) for name in pools}


def boundaries(rules: Mapping[str, Rule], found: Mapping[str, Sequence[bool]]) -> Iterator[int]:
    """Every number of leading pages that can be restored, the most first: what each pool's rule needs for it
    is there, all of it for the same boundary. `found`: page by page, as many for every pool."""
    whole = [leading(found[name]) for name, rule in rules.items() if rule.trailing is None]
    ends = [name for name, rule in rules.items() if rule.trailing is not None]
    most = min((*whole, *(len(found[name]) for name in ends)), default=0)
    for boundary in range(most, 0, -1):
        if all(found[name][page] for name in ends for page in rules[name].needs(boundary)):
            yield boundary


def leading(found: Sequence[bool]) -> int:
    """How many are true before the first that is not."""
    return next((at for at, each in enumerate(found) if not each), len(found))


def usable(rules: Mapping[str, Rule], found: Mapping[str, Sequence[bool]]) -> int:
    """The most leading pages that can be restored."""
    return next(boundaries(rules, found), 0)
