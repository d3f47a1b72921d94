"""A circuit breaker: after a failure that cost time, calls fail at once for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Breaker:
    """Open for `rest_s` seconds after a failure; then one caller tries for all.

    Whoever got True from `enter` has to call `leave`.
    """

    def __init__(self, rest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rest_s, self._clock = rest_s, clock
        self._lock = threading.Lock()
        self._until: float | None = None
        self._trying: int | None = None  # the thread that tries

    def enter(self) -> bool:
        """Whether to call now."""
        with self._lock:
            if self._until is None:
                return True
            if self._trying is not None or self._clock() < self._until:
                return False
            self._trying = threading.get_ident()
            return True

    def leave(self, failed: bool) -> None:
        """What became of the call, told by its thread. Only the one that tries closes the breaker."""
        with self._lock:
            tried = self._trying == threading.get_ident()
            if failed:
                self._until = self._clock() + self._rest_s
            elif tried:
                self._until = None
            if tried:
                self._trying = None
