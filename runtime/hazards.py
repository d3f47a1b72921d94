"""Which submissions still run and what they touch, so that later ones can be put behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from poolwright.runtime.driver import Driver, Event
from poolwright.runtime.errors import PoolError
from poolwright.runtime.indices import Batch
from poolwright.runtime.ticket import Ticket


class Submission(NamedTuple):
    """A submission that may still run. `keep`: what must stay alive until `event`."""

    direction: str
    event: Event
    batch: Batch
    keep: object

    def meets(self, batch: Batch) -> bool:
        """Whether both touch a page, on either side; pages that only the device knows may be any."""
        if not self.batch.host_pages.isdisjoint(batch.host_pages):
            return True
        mine, theirs = self.batch.device_pages, batch.device_pages
        return mine is None or theirs is None or not mine.isdisjoint(theirs)


KEPT = 8
"""So many submissions are not asked for: it costs more than waiting for an event that has passed."""


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

    def forget(self) -> None:
        """Drop what is over. What the pool hands out does not depend on it."""
        for running in self._running.values():  # one stream each: the oldest is over first
            while len(running) > KEPT and self._driver.done(running[0].event):
                running.popleft()
        if len(self._tickets) > self._swept:  # now and then: there may be many that nobody asks for
            self._tickets = [ticket for ticket in self._tickets if not ticket.acknowledged]
            self._swept = 2 * len(self._tickets) + 32

    def before(self, direction: str, batch: Batch) -> Iterator[Event]:
        """Events of the other direction's submissions that touch the same pages.

        Those of the same direction are ordered by their stream.
        """
        for entry in self._running["load" if direction == "write_back" else "write_back"]:
            if entry.meets(batch):
                yield entry.event

    def in_flight(self, pages: set[int], after: Ticket | None) -> int | None:
        """A page among these whose transfer the caller does not know to be done, or None."""
        for ticket in self._tickets:
            if ticket is not after and not ticket.acknowledged and not ticket.pages.isdisjoint(pages):
                return min(ticket.pages & pages)
        return None

    def touching(self, pages: set[int]) -> tuple[list[Submission], list[Ticket]]:
        """Submissions that may still touch these host pages, and write-backs of them not known to be done."""
        running = [entry for entries in self._running.values() for entry in entries]
        tickets = [ticket for ticket in self._tickets if ticket.direction == "write_back"]
        return (
            [entry for entry in running if not entry.batch.host_pages.isdisjoint(pages)],
            [t for t in tickets if not t.acknowledged and not t.pages.isdisjoint(pages)],
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
