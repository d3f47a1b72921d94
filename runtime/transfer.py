"""Carries out transfers over the driver door: checked batches of one or more pools in, tickets out.

Pools that move together share one `Transfers`; a pool of its own is the case of one member. Order is kept
by streams and by pages. Write-backs follow each other in one stream, loads in another; staged copies run
in streams of their own. A load joins them at its end. A write-back does not, so that the next one gathers
while it still copies: all copies are in order, and kernels that write host pages wait for them. A submission
waits for the caller's stream, whose work filled or still reads the device rows, and for running transfers
of the other direction that touch a page of its own, on either side.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

from poolwright.runtime import indexing
from poolwright.runtime.binding import Binding
from poolwright.runtime.checks import Verdict
from poolwright.runtime.driver import Event, Memory, Stream
from poolwright.runtime.errors import NotAdmitted, PoolError, TransferError
from poolwright.runtime.hazards import Hazards, Submission
from poolwright.runtime.launch import FEW, Launcher, Part
from poolwright.runtime.moves import Member, Move, Order, Steps
from poolwright.runtime.program import view
from poolwright.runtime.staging import Staging
from poolwright.runtime.ticket import LayerEvents, LayerMarks, Ticket, failure

if TYPE_CHECKING:
    from poolwright.runtime.backend import Code

_counters_of_all_pools: list[Memory] = []
"""Never given back: a caller's stream may come to its wait for a layer when the pool is long gone."""

ORDERS = ("layer", "bulk")

ORDERS_KEPT = 512

Question = Callable[[], TransferError | None]
"""What is asked when all is done: what is wrong all the same."""


class Transfers:
    """The transfers of `members`, in the order in which their kernels take them. Any thread may submit."""

    def __init__(self, code: Code, name: str) -> None:
        self.code, self.name = code, name
        self.members: list[Member] = []
        self._driver = driver = code.driver
        self._lock = threading.RLock()
        self._writes, self._loads = driver.stream(), driver.stream()
        self._out, self._in, self._side = driver.stream(), driver.stream(), driver.stream()
        self._bound: tuple[object, ...] = ()
        self._launcher: Launcher | None = None
        self._staging = Staging(driver, code.costs)
        self._hazards = Hazards(driver)
        self._lost: list[object] = []
        self._copying: Event = None  # after the last copies of write-backs, unless `_writes` is behind them
        self._counters: Memory | None = None
        self._reached: list[int] = []  # what counters will say, but for those of `_counting`
        self._counting, self._ahead = (0, 0), 0  # first of them and how many; they will say so much more
        self._orders: dict[tuple[object, ...], Order] = {}

    # ---- state

    def add(self, member: Member) -> int:
        """Take a pool in; its number. All are there before the first is bound."""
        with self._lock:
            if member.ring is not None:
                self._staging.add(len(self.members), member)
            self.members.append(member)
            return len(self.members) - 1

    def bind(self, bindings: dict[int, Binding]) -> None:
        """Use these tensors of these members, and code compiled for them, from now on."""
        with self._lock, self._driver.guard():
            stream = self._writes
            # Memory of the pool's, staging memory too, may still be in use by whatever had it before.
            self._driver.follow(stream, self._driver.current_stream())
            for number, binding in bindings.items():
                member = self.members[number]
                member.binding = binding
                member.table = self._driver.allocate(8 * max(len(binding.table), 1))
                self._driver.upload(member.table.address, array("Q", binding.table), stream)
            if not self._bound:
                self._staging.clear(stream)
            if self._counters is None:
                self._counters = self._new_counters(stream)
            # Nothing else keeps the tables until then, and the other streams do not wait for this one.
            self._driver.synchronize(self._driver.record(stream))
            self._bound = tuple((member.binding, member.table) for member in self.members)
            if self.code.kernels is not None:
                self._launcher = Launcher(self._driver, self.code.kernels, self.members, self.code.align)

    def unbind(self) -> None:
        """Let go of all device tensors, after everything in flight. Raises PoolError when something failed,
        after all."""
        with self._lock:
            try:
                self.drain()
            finally:
                for member in self.members:
                    member.binding = member.table = None
                self._bound, self._launcher = (), None

    def in_flight(self, numbers: Iterable[int], pages: set[int], after: Ticket | None) -> int | None:
        """A page of these members whose transfer the caller does not know to be done, or None."""
        with self._lock:
            return self._hazards.in_flight([self.members[n].name for n in numbers], pages, after)

    def beside(self, direction: str) -> bool:
        """Whether a submission of the other direction runs."""
        with self._lock:
            return self._hazards.beside(direction)

    def settle(self, name: str, pages: set[int], reads: bool) -> None:
        """Block until nothing submitted touches these host pages of a pool.

        Tickets of write-backs count as waited for. `reads`: raises TransferError when one failed.
        """
        with self._lock:
            running, tickets = self._hazards.touching(name, pages)
        for entry in running:
            try:
                self._driver.synchronize(entry.event)
            except PoolError as error:
                if reads and entry.direction == "write_back":
                    raise failure(self.name, entry.direction, entry.moves, str(error)) from error
        for ticket in tickets:
            ticket.wait() if reads else ticket.settle()

    def drain(self) -> None:
        """Block until everything submitted has run. Raises PoolError when something failed, after all."""
        with self._lock:
            try:
                self._hazards.drain()
            except PoolError:
                # What failed waits for nothing any more: the other streams may still be at work for it.
                with self._driver.guard():
                    for stream in (self._writes, self._loads, self._out, self._in):
                        with suppress(PoolError):
                            self._driver.synchronize(self._driver.record(stream))
                raise

    def close(self) -> None:
        """Give the host memory of all members back, after everything in flight. Raises PoolError when
        something failed, after all."""
        with ExitStack() as ends:  # each is called, whatever another raises
            for member in reversed(self.members):
                ends.callback(member.buffer.release)
            self.drain()

    def stop_registering(self) -> None:
        """Have threads that register host memory end after the chunks at hand, and wait for them."""
        found = [m.buffer.registration for m in self.members if m.buffer.registration is not None]
        for each in found:
            each.ask_to_stop()
        for each in found:
            each.stop()

    # ---- layers

    def ordered(self, numbers: Sequence[int], order: str, layers: Iterable[int] | None) -> Order | None:
        """The steps of a load of these members in `order` ``layer``, or of only these `layers`; None: all at
        once, also where nothing has layers. Raises ValueError."""
        if order not in ORDERS:
            raise ValueError(f"{self.name}: order: expected layer or bulk, got {order!r}")
        if layers is not None and not isinstance(layers, Iterable):
            raise ValueError(f"{self.name}: layers: expected layer ids such as range(3), got {layers!r}")
        if not numbers:  # nothing to move: no layer is waited for
            return None if layers is None and order == "bulk" else self._order((), None)
        if layers is None:
            found = self._orders.get((*numbers, None)) if order == "layer" else None
            if found is not None:
                return found
            known = order == "layer" and any(member.layers for member in self.members)
            return self._order(numbers, None) if known else None
        wanted = tuple(layers)
        return self._orders.get((*numbers, wanted)) or self._order(numbers, self._known(numbers, wanted))

    def _known(self, numbers: Sequence[int], layers: tuple[int, ...]) -> tuple[int, ...]:
        every = together([self.members[n].layers for n in numbers])
        if not every:
            raise ValueError(f"{self.name}: no component has layers here; load without layers=")
        for at, layer in enumerate(layers):
            if layer not in every:
                raise ValueError(f"{self.name}: layer {layer} is not one of {list(every)}")
            if layer in layers[:at]:
                raise ValueError(f"{self.name}: layer {layer} stands twice in one list")
        return layers

    def _order(self, numbers: Sequence[int], layers: tuple[int, ...] | None) -> Order:
        """Steps: the layers of these members ascending (those of a single list as they are given), or
        `layers` in this order.

        Components without layers move with the first layer of their pool; of a pool that has none, with
        the first layer of all that move; where none of these has any, with the first one of the group.
        """
        key = (*numbers, layers)
        with self._lock:
            found = self._orders.get(key)
            if found is None:
                if len(self._orders) >= ORDERS_KEPT:
                    self._orders.clear()  # what runs keeps its own
                found = self._orders[key] = self._make_order(numbers, layers)
            return found

    def _make_order(self, numbers: Sequence[int], layers: tuple[int, ...] | None) -> Order:
        members = {n: self.members[n] for n in numbers}
        every = together([member.layers for member in members.values()])
        if members and not every:
            every = together([member.layers for member in self.members])[:1]
        first = {n: (member.layers or every)[:1] for n, member in members.items()}
        wanted = every if layers is None else layers
        steps = {
            n: Steps(array("I", [at for layer in wanted for at in member.step(layer, layer in first[n])]))
            for n, member in members.items()
        }
        others = {layer for n, m in enumerate(self.members) if n not in members for layer in m.layers}
        bare = any(not member.layers and not member.empty for member in members.values())
        rest = wanted.index(every[0]) if bare and every and every[0] in wanted else None
        return Order(wanted, steps, frozenset(others - set(every)), rest)

    # ---- submission

    def submit(
        self,
        direction: str,
        moves: Sequence[Move],
        other: Stream,
        order: Order | None = None,
        timed: bool = False,
    ) -> Ticket:
        """Submit a ``write_back`` or ``load``. `other`: the stream that filled, or still reads, the rows;
        None: the caller's current one.

        Raises TransferError; none of the pages may be used then. Raises NotAdmitted with nothing done.
        """
        driver = self._driver
        stream = self._writes if direction == "write_back" else self._loads
        with self._lock, driver.guard():
            if other is None:
                other = driver.current_stream()
            keep: list[object] = [moves, self._bound]
            try:
                self._hazards.forget(direction)
                before = self._hazards.before(direction, moves)
                parts = self._lone(direction, moves) if order is None and not timed else None
                if parts is None:
                    given = (direction, moves, stream, other, before, order, timed, keep)
                    event, captured, marks, verdict, began = self._in_turn(*given)
                else:
                    self._staging.delayed, behind = 0, (other, before, self.name)
                    launch = self._launcher_in_use().launch
                    event = launch(direction, self._purpose(direction), parts, stream, keep, behind=behind)
                    captured = marks = verdict = began = None
            except NotAdmitted:
                raise
            except BaseException as error:  # whatever it is, what was submitted before it still runs
                self._abandon(direction, moves, stream, other, keep)
                if isinstance(error, (PoolError, RuntimeError)):  # torch's: no memory is left for ids
                    raise failure(self.name, direction, moves, str(error)) from error
                raise
            read, late = event if captured is None else captured, self._staging.delayed
            ticket = Ticket(
                driver, self.name, direction, moves, event, read, marks, order, late, verdict, began
            )
            self._hazards.add(Submission(direction, event, moves, keep), ticket)
            return ticket

    def _lone(self, direction: str, moves: Sequence[Move]) -> list[Part] | None:
        """What one launch moves, if it is all that a submission asks of the device; else None."""
        if self._copying is not None and direction == "write_back":
            return None
        parts: list[Part] = []
        numbers = 0
        for move in moves:
            batch, member = move.batch, self.members[move.member]
            if move.path != "zero_copy" or move.checks is not None or not batch.inside:
                return None
            if batch.count and not member.empty:
                numbers += 2 * batch.count
                parts.append((move.member, member.place, batch, None))
        return parts if 0 < numbers <= FEW else None

    def _in_turn(
        self,
        direction: str,
        moves: Sequence[Move],
        stream: Stream,
        other: Stream,
        before: Event | None,
        order: Order | None,
        timed: bool,
        keep: list[object],
    ) -> tuple[Event, Event, LayerMarks | LayerEvents | None, Question | None, Event]:
        """Begin, move, compare: the event after all, that after which rows are captured (None: after all),
        progress by layer, what was wrong, the event before all if it is `timed`."""
        driver = self._driver
        on_device = checked = False
        for move in moves:
            on_device = on_device or move.batch.on_device is not None
            checked = checked or move.checks is not None
        if on_device:  # whoever follows a stream that is being captured is captured with it
            driver.admit(driver.current_stream(), self.name)
        driver.enter(stream, other, before, self.name)
        if self._copying is not None and direction == "write_back" and not self._copied(moves):
            driver.wait(stream, self._copying)
            self._copying = None
        if on_device:  # ids may come from another stream than the rows
            driver.follow(stream, driver.current_stream())
        began = driver.record(stream, timed=True) if timed else None
        told = not (checked or timed)  # nothing comes behind the last launch but its event
        verdict = None
        with driver.owning(stream, other):
            captured, marks, end, event = self._run(direction, moves, stream, order, keep, told)
            if checked:
                captured = marks = None  # see Note [Comparing in order]
                if end != stream:
                    driver.follow(stream, end)
                    end = stream
                verdict = self._compare(direction, moves, stream, order, keep)
        if event is None:
            event = driver.record(end, timed=timed)
        if end != stream:
            self._copying = event
        return event, captured, marks, verdict, began

    def _compare(
        self, direction: str, moves: Sequence[Move], stream: Stream, order: Order | None, keep: list[object]
    ) -> Question:
        """Queue the comparison of all pages that moved; what is asked when it is done."""
        asked = []
        for move in moves:
            member = self.members[move.member]
            if move.checks is not None and member.binding is not None and not member.empty:
                steps = None if order is None else member.positions(order.steps[move.member].numbers)
                given = (move.batch, steps, member.binding.views, stream, keep)
                asked.append((move, move.checks.compare(*given)))
        return partial(_wrong, self.name, direction, asked)

    def _abandon(
        self, direction: str, moves: Sequence[Move], stream: Stream, other: Stream, keep: list[object]
    ) -> None:
        """A submission failed half-way: what had been submitted still runs. Later transfers wait for it, and
        so does the caller's stream, since there is no ticket to wait for."""
        try:
            for each in (self._writes, self._loads, self._out, self._in):
                self._driver.follow(stream, each)
            event = self._driver.record(stream)
            self._driver.wait(other, event)
            self._staging.hold(event)
            self._hazards.add(Submission(direction, event, moves, keep), None)
        except PoolError:
            self._lost.append(keep)  # the device answers nothing any more: never reuse what it may touch

    # ---- paths

    def _run(
        self,
        direction: str,
        moves: Sequence[Move],
        stream: Stream,
        order: Order | None,
        keep: list[object],
        told: bool,
    ) -> tuple[Event, LayerMarks | LayerEvents | None, Stream, Event]:
        """Each path once for all members that take it; the event after which rows are captured (None: all
        of it), progress by layer, the stream at whose end everything is done, and the event there if it is to
        be `told` and a launch is the last.

        The launch that counts layers comes after everything else of its stream but staged members, whose
        events come last: a layer that is told is there whatever path a member took. Rows are gathered before
        a slower kernel reads others.
        """
        self._staging.delayed = 0
        direct: list[Part] = []
        staged: list[Move] = []
        for move in moves if order is None or order.layers else ():
            number, batch, path = move.member, move.batch, move.path
            member = self.members[number]
            if member.empty or not batch.count:
                continue
            if path == "zero_copy":
                steps = None if order is None else order.steps[number]
                direct.append((number, member.place, batch, steps))
            elif path == "staged":
                staged.append(move)
            elif path == "host":
                self._atoms(direction, move, order)
            else:
                self._indexing(direction, move, stream, order)
        if direct and not staged and order is None:
            launch, purpose = self._launcher_in_use().launch, self._purpose(direction)
            return None, None, stream, launch(direction, purpose, direct, stream, keep, told)
        captured: Event = None
        event: Event = None
        marks: LayerMarks | LayerEvents | None = None
        gathers = bool(staged) and direction == "write_back"
        if gathers:
            captured = self._staging.write_back(self._launcher_in_use(), staged, stream, self._out, keep)
        if direct and order is None:
            self._launcher_in_use().launch(direction, self._purpose(direction), direct, stream, keep)
        elif direct and order is not None:
            told = told and not staged
            marks, event = self._in_layer_order(direct, stream, len(order.layers), keep, told)
        if gathers:
            if direct:
                captured = self._driver.record(stream)
                self._driver.wait(self._out, captured)
            return captured, None, self._out, None
        if staged:
            # In layer order they come last, so that their events stand for what others moved, too.
            marks = self._staging.load(self._launcher_in_use(), staged, stream, self._in, keep, order)
        return captured, marks, stream, event

    def _purpose(self, direction: str) -> str:
        """What kernels over the link are launched for: a write-back beside loads leaves them their rate."""
        beside = direction == "write_back" and self._hazards.beside(direction)
        return "write_back_beside" if beside else direction

    def _copied(self, moves: Sequence[Move]) -> bool:
        """Whether the copy engine writes all that a write-back moves, and there is some: it ends behind the
        copies of earlier ones then."""
        paths = {m.path for m in moves if m.batch.count and not self.members[m.member].empty}
        return paths == {"staged"}

    def _launcher_in_use(self) -> Launcher:
        assert self._launcher is not None
        return self._launcher

    def _in_layer_order(
        self, parts: Sequence[Part], stream: Stream, steps: int, keep: list[object], told: bool
    ) -> tuple[LayerMarks, Event]:
        """Load so many steps; when each of them is there, and the event behind them if it is to be `told`."""
        counters, self._counters = self._counters, None  # an unknown part of a failed launch may still count
        if counters is None:
            counters = self._new_counters(stream)
            self._driver.synchronize(self._driver.record(stream))
        given = (parts, stream, keep, steps, counters.address, told)
        cut, first, end = self._launcher_in_use().load_layers(*given)
        self._counters = counters
        if self._counting != (cut.first, cut.counting):
            self._count_others(cut.first, cut.counting)
        ahead = self._ahead = self._ahead + cut.arrivals
        told_by = (self._side, counters.address, self._reached, ahead)
        return LayerMarks(first, cut.first, cut.counted, *told_by), end

    def _count_others(self, first: int, counting: int) -> None:
        """Other counters go on from now on, which is seldom: most loads are cut as the one before. Tickets
        hold the old list."""
        begin, count = self._counting
        ahead = [0] * begin + [self._ahead] * count + [0] * (len(self._reached) - begin - count)
        self._reached = [value + more & 0xFFFFFFFF for value, more in zip(self._reached, ahead, strict=True)]
        self._counting, self._ahead = (first, counting), 0

    def _new_counters(self, stream: Stream) -> Memory:
        """A counter for each place in the order of layers. They only ever grow, so that nobody who waits
        for an earlier load waits for a later one. Nobody may wait for them before they are filled."""
        count = max(len({layer for member in self.members for layer in member.layers}), 1)
        counters = self._driver.allocate(4 * count)
        _counters_of_all_pools.append(counters)
        self._driver.fill(counters.address, 0, count, stream)
        self._reached, self._counting, self._ahead = [0] * count, (0, 0), 0
        return counters

    def _atoms(self, direction: str, move: Move, order: Order | None) -> None:
        """The CPU twin moves whole runs."""
        member, batch = self.members[move.member], move.batch
        library = self.code.libraries[move.member]
        assert library is not None and member.binding is not None and member.table is not None
        host, device = array("q", batch.host), array("q", batch.device)
        steps = None if order is None else order.steps[move.member].numbers
        getattr(library, f"atoms_{batch.unit}")(
            view(member.table.address, *member.place, member.binding.strides),
            ctypes.c_void_p(host.buffer_info()[0]),
            ctypes.c_void_p(device.buffer_info()[0]),
            ctypes.c_uint64(len(host)),
            ctypes.c_uint32(direction == "load"),
            None if steps is None else ctypes.c_void_p(steps.buffer_info()[0]),
            ctypes.c_uint64(0 if order is None else len(order.layers)),
            ctypes.c_uint32(self.code.threads),
        )

    def _indexing(self, direction: str, move: Move, stream: Stream, order: Order | None) -> None:
        """Indexing by torch, the last resort: right everywhere, fast nowhere."""
        member = self.members[move.member]
        assert member.binding is not None
        positions = None if order is None else member.positions(order.steps[move.member].numbers)
        with self._driver.torch_stream(stream):
            indexing.move(
                *(member.program, member.layout, member.tensor, member.binding.views),
                *(direction, move.batch, positions),
            )


def _wrong(pool: str, direction: str, asked: Sequence[tuple[Move, Verdict]]) -> TransferError | None:
    """What comparisons found: the first cause, and all pages that it concerns."""
    found = [(move, finding) for move, verdict in asked if (finding := verdict()) is not None]
    if not found:
        return None
    cause = found[0][1][0]
    pages = {move.name: sorted(wrong) for move, (said, wrong) in found if said == cause}
    return TransferError(pool, direction, pages, cause)


def together(lists: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The layers of several lists: ascending; those of a single one in the order in which it is given."""
    different = {tuple(ids) for ids in lists if ids}
    if len(different) == 1:
        return different.pop()
    return tuple(sorted({layer for ids in different for layer in ids}))
