"""Which submissions still run and what they touch, so that later ones can be put behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from poolwright.runtime.driver import Driver, Event
from poolwright.runtime.errors import PoolError
from poolwright.runtime.moves import Move
from poolwright.runtime.ticket import Ticket


class Submission(NamedTuple):
    """A submission that may still run. `keep`: what must stay alive until `event`."""

    direction: str
    event: Event
    moves: Sequence[Move]
    keep: object

    def meets(self, moves: Sequence[Move]) -> bool:
        """Whether both touch a page, on either side; pages that only the device knows may be any."""
        for mine in self.moves:
            for move in moves:
                if mine.member == move.member:
                    if not mine.batch.host_pages.isdisjoint(move.batch.host_pages):
                        return True
                    here, there = mine.batch.device_pages, move.batch.device_pages
                    if here is None or there is None or not here.isdisjoint(there):
                        return True
        return False


KEPT = 8
"""So many submissions are not asked for, and so many are dropped at once: to ask costs more than to keep what
they hold."""


class Hazards:
    """Running submissions of either direction, and tickets whose end the caller does not know yet."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._running: dict[str, deque[Submission]] = {"write_back": deque(), "load": deque()}
        self._tickets: list[Ticket] = []
        self._swept = 32

    def add(self, submission: Submission, ticket: Ticket | None) -> None:
        self._running[submission.direction].append(submission)
        if ticket is not None:
            self._tickets.append(ticket)

    def forget(self, direction: str) -> None:
        """Drop what is over of one direction. What the pool hands out does not depend on it."""
        running = self._running[direction]
        some = KEPT or 1
        while len(running) >= KEPT + some and self._over(running[some - 1]):
            for _ in range(some):  # one stream: those before it are over, too
                running.popleft()
        if len(self._tickets) > self._swept:  # now and then: there may be many that nobody asks for
            self._tickets = [ticket for ticket in self._tickets if not ticket.acknowledged]
            self._swept = 2 * len(self._tickets) + 32

    def before(self, direction: str, moves: Sequence[Move]) -> Event | None:
        """The event of the other direction's last submission that touches one of the same pages.

        Its stream has everything before it behind it. Those of the same direction are ordered by theirs.
        """
        running = self._running["load" if direction == "write_back" else "write_back"]
        if running and self._over(running[-1]):
            running.clear()
        for entry in reversed(running):
            if entry.meets(moves):
                return entry.event
        return None

    def _over(self, entry: Submission) -> bool:
        """Whether it has run. One that failed never has: whoever asks its ticket is told."""
        try:
            return self._driver.done(entry.event)
        except PoolError:
            return False

    def in_flight(self, names: Sequence[str], pages: set[int], after: Ticket | None) -> int | None:
        """A page of these pools whose transfer the caller does not know to be done, or None."""
        for ticket in self._tickets:
            if ticket is after or ticket.acknowledged:
                continue
            for name in names:
                busy = ticket.moved.get(name, set()) & pages
                if busy:
                    return min(busy)
        return None

    def touching(self, name: str, pages: set[int]) -> tuple[list[Submission], list[Ticket]]:
        """Submissions that may still touch these pages of a pool, and write-backs of them not known to be
        done."""
        running = [entry for entries in self._running.values() for entry in entries]
        tickets = [ticket for ticket in self._tickets if ticket.direction == "write_back"]
        return (
            [
                entry
                for entry in running
                if any(m.name == name and not m.batch.host_pages.isdisjoint(pages) for m in entry.moves)
            ],
            [t for t in tickets if not t.acknowledged and not pages.isdisjoint(t.moved.get(name, ()))],
        )

    def drain(self) -> None:
        """Block until everything has run; no ticket keeps its pages after that.

        Raises PoolError when something failed, after all the rest; the tickets it concerns have failed.
        """
        failed: PoolError | None = None
        for running in self._running.values():
            for entry in running:
                try:
                    self._driver.synchronize(entry.event)
                except PoolError as error:
                    failed = error
            running.clear()
        for ticket in self._tickets:
            ticket.detach() if failed is None else ticket.settle()
        self._tickets.clear()
        if failed is not None:
            raise failed
