"""Which submissions still run and what they touch, so that later ones can be put behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from poolwright.runtime.driver import Driver, Event
from poolwright.runtime.errors import PoolError
from poolwright.runtime.indices import Batch
from poolwright.runtime.moves import Move
from poolwright.runtime.native import Stamps
from poolwright.runtime.ticket import Ticket


class Submission(NamedTuple):
    """A submission that may still run. `keep`: what must stay alive until `event`."""

    direction: str
    event: Event
    moves: Sequence[Move]
    keep: object


class Touched:
    """Which of a direction's submissions touched each page of one pool last, by number.

    `any`: the last one; `unknown`: the last one whose device pages only the device knows: they may be any.
    """

    __slots__ = ("_device", "_host", "any", "unknown")

    def __init__(self) -> None:
        self._host, self._device = Stamps(), Stamps()
        self.any = self.unknown = 0

    def note(self, batch: Batch, number: int) -> None:
        """A submission with these ids has this number."""
        self.any = number
        self._host.give(batch.numbered_host_pages, number)
        device = batch.numbered_device_pages
        if device is None:
            self.unknown = number
        else:
            self._device.give(device, number)

    def latest(self, batch: Batch) -> int:
        """The last submission that touched one of these pages, on either side; 0: none did."""
        device = batch.numbered_device_pages
        if device is None:
            return self.any
        return max(self.unknown, self._device.latest(device), self._host.latest(batch.numbered_host_pages))


class Running:
    """Submissions of one direction that may still run, in order. `passed`: so many before them do not."""

    def __init__(self) -> None:
        self.entries: deque[Submission] = deque()
        self.passed = 0
        self._noted = 0
        self._touched: dict[int, Touched] = {}

    def drop(self, count: int) -> None:
        """The first ones are over."""
        for _ in range(count):
            self.entries.popleft()
        self.passed += count

    def clear(self) -> None:
        self.drop(len(self.entries))

    def latest(self, moves: Sequence[Move]) -> Event | None:
        """The event of the last one that touches a page of these moves."""
        self._note()
        found = 0
        for move in moves:
            touched = self._touched.get(move.member)
            if touched is not None:
                found = max(found, touched.latest(move.batch))
        return self.entries[found - self.passed - 1].event if found > self.passed else None

    def _note(self) -> None:
        """What the entries touch, once for each, when it is first asked for: most never are."""
        end = self.passed + len(self.entries)
        for number in range(max(self._noted, self.passed) + 1, end + 1):
            for move in self.entries[number - self.passed - 1].moves:
                touched = self._touched.get(move.member)
                if touched is None:
                    touched = self._touched[move.member] = Touched()
                touched.note(move.batch, number)
        self._noted = end


KEPT = 8
"""So many submissions are not asked for, and so many are dropped at once: to ask costs more than to keep what
they hold."""


class Hazards:
    """Running submissions of either direction, and tickets whose end the caller does not know yet."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._running = {"write_back": Running(), "load": Running()}
        self._tickets: list[Ticket] = []
        self._swept = 32

    def add(self, submission: Submission, ticket: Ticket | None) -> None:
        self._running[submission.direction].entries.append(submission)
        if ticket is not None:
            self._tickets.append(ticket)

    def forget(self, direction: str) -> None:
        """Drop what is over of one direction. What the pool hands out does not depend on it."""
        running = self._running[direction]
        some = KEPT or 1
        while len(running.entries) >= KEPT + some and self._over(running.entries[some - 1]):
            running.drop(some)  # one stream: those before it are over, too
        if len(self._tickets) > self._swept:  # now and then: there may be many that nobody asks for
            self._tickets = [ticket for ticket in self._tickets if not ticket.acknowledged]
            self._swept = 2 * len(self._tickets) + 32

    def before(self, direction: str, moves: Sequence[Move]) -> Event | None:
        """The event of the other direction's last submission that touches one of the same pages.

        Its stream has everything before it behind it. Those of the same direction are ordered by theirs.
        """
        running = self._others(direction)
        return running.latest(moves) if running.entries else None

    def beside(self, direction: str) -> bool:
        """Whether a submission of the other direction runs."""
        return bool(self._others(direction).entries)

    def _others(self, direction: str) -> Running:
        """Those of the other direction, none of them if the last one is over."""
        running = self._running["load" if direction == "write_back" else "write_back"]
        if running.entries and self._over(running.entries[-1]):
            running.clear()
        return running

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
        running = [entry for each in self._running.values() for entry in each.entries]
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
            for entry in running.entries:
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
