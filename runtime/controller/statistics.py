"""What operations moved, by pool and direction. In: submissions that ended. Out: numbers for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from poolwright.runtime.controller.flight import Leg
from poolwright.runtime.controller.operation import DIRECTIONS


@dataclass
class Moved:
    """Transfers of one pool in one direction. `busy`: seconds of submissions; `waited`,
    `longest`: seconds of operations in the queue."""

    operations: int = 0
    failed: int = 0
    pages: int = 0
    bytes: int = 0
    busy: float = 0.0
    waited: float = 0.0
    longest: float = 0.0
    paths: Counter[str] = field(default_factory=Counter)


class Statistics:
    """Counts of every pool; `page_bytes` by pool."""

    def __init__(self, page_bytes: Mapping[str, int]) -> None:
        self._page_bytes = page_bytes
        self._moved = {name: {way: Moved() for way in DIRECTIONS} for name in page_bytes}

    def add(self, leg: Leg) -> None:
        """Count a leg that ended."""
        direction = leg.operations[0].direction
        for operation in leg.operations:
            waited, moved = leg.started - operation.asked, leg.moved(operation)
            for name in operation.pages:
                one = self._moved[name][direction]
                one.operations += 1
                one.failed += leg.error is not None
                one.waited += waited
                one.longest = max(one.longest, waited)
                one.pages += moved.get(name, 0)
                one.bytes += moved.get(name, 0) * self._page_bytes[name]
        for name, path in leg.paths.items():
            self._moved[name][direction].busy += leg.seconds or 0.0
            self._moved[name][direction].paths[path] += 1

    def of(self, name: str) -> dict[str, dict[str, object]]:
        """The counts of one pool by direction."""
        return {
            way: {
                "operations": one.operations,
                "failed": one.failed,
                "pages": one.pages,
                "bytes": one.bytes,
                "gb_per_s": one.bytes / one.busy / 1e9 if one.busy > 0 else 0.0,
                "queue_s": one.waited,
                "queue_s_longest": one.longest,
                "paths": dict(one.paths),
            }
            for way, one in self._moved[name].items()
        }
