"""Memory of the simulator: blocks, and for every byte whether it was written, by whom, and who reads it.

In: accesses of operations, each at a moment of a vector clock. Out: `SimulationError` for bytes outside
any block, in a freed one, never written, or touched by two operations that no declared wait orders.
"""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

POISON = 0x5A
"""What fresh memory holds; as a counter it is beyond any number a wait asks for."""

Clock = list[int]
"""For each actor, the last of its moments that is known to have happened."""


class SimulationError(AssertionError):
    """Something that on a device would be a race, a use of memory that is not there, or a hang."""


def join(clock: Clock, other: Sequence[int]) -> None:
    """Take over everything that `other` knows."""
    clock.extend([0] * (len(other) - len(clock)))
    for actor, time in enumerate(other):
        if time > clock[actor]:
            clock[actor] = time


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of one actor (a stream, or the CPU)."""

    actor: int
    time: int
    name: str

    def before(self, clock: Clock) -> bool:
        return self.actor < len(clock) and self.time <= clock[self.actor]


@dataclass(eq=False)
class Block:
    """Bytes from `address` on. `kind` ``device`` or ``host``; `gone`: what became of it, once it has."""

    address: int
    nbytes: int
    kind: str
    name: str
    gone: str = ""
    written: bytearray = field(default_factory=bytearray)
    writers: array[int] = field(default_factory=lambda: array("I"))
    readers: array[int] = field(default_factory=lambda: array("I"))

    def __post_init__(self) -> None:
        self.written = bytearray(self.nbytes)
        self.writers = array("I", bytes(4 * self.nbytes))
        self.readers = array("I", bytes(4 * self.nbytes))


class Shadow:
    """Every block that there is or was, and the history of its bytes."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._blocks: list[Block] = []
        self._moments = [Moment(0, 0, "nothing")]
        self._sets: list[frozenset[int]] = [frozenset()]
        self._numbers: dict[frozenset[int], int] = {frozenset(): 0}

    def add(self, block: Block) -> Block:
        """Know a block from now on; blocks that are gone make way."""
        end = block.address + block.nbytes
        for old in [b for b in self._blocks if b.address < end and block.address < b.address + b.nbytes]:
            if not old.gone:
                raise SimulationError(f"{block.name} lies over {old.name}")
            self._blocks.remove(old)
        at = bisect_right([b.address for b in self._blocks], block.address)
        self._blocks.insert(at, block)
        self._starts = [b.address for b in self._blocks]
        return block

    def find(self, address: int, nbytes: int, who: str) -> tuple[Block, int]:
        """The block that holds these bytes, and where in it they start."""
        at = bisect_right(self._starts, address) - 1
        block = self._blocks[at] if at >= 0 else None
        if block is None or address + nbytes > block.address + block.nbytes:
            raise SimulationError(f"{who} touches {nbytes} bytes at {address:#x}, which belong to nothing")
        if block.gone:
            raise SimulationError(f"{who} uses memory of {block.name}, which was {block.gone}")
        return block, address - block.address

    def _beginning(self, address: int, nbytes: int, who: str) -> tuple[Block, int, int]:
        """As `find`, and where the access ends in this block. Kernels and the CPU, unlike copies, go from one
        registration to the next that lies right behind."""
        at = bisect_right(self._starts, address) - 1
        block = self._blocks[at] if at >= 0 else None
        if block is not None and block.kind == "host" and address < block.address + block.nbytes:
            nbytes = min(nbytes, block.address + block.nbytes - address)
        found, start = self.find(address, nbytes, who)
        return found, start, start + nbytes

    def moment(self, actor: int, time: int, name: str) -> int:
        """The number of a new moment."""
        self._moments.append(Moment(actor, time, name))
        return len(self._moments) - 1

    # ---- accesses

    def read(self, moment: int, clock: Clock, address: int, nbytes: int, written: bool = True) -> None:
        """`moment` reads these bytes; with `written` all of them must have been written."""
        if nbytes == 0:
            return
        here = self._moments[moment]
        block, start, end = self._beginning(address, nbytes, here.name)
        self.read(moment, clock, address + end - start, nbytes - (end - start), written)
        nbytes = end - start
        if written and 0 in block.written[start:end]:
            at = start + block.written[start:end].index(0)
            raise SimulationError(f"{here.name} reads byte {at} of {block.name}, which nobody has written")
        self._check_writers(here, "reads", block, start, end, clock)
        known = set(block.readers[start:end])
        if len(known) == 1:
            number = self._joined(known.pop(), moment, clock)
            block.readers[start:end] = array("I", [number]) * nbytes
            return
        numbers = {number: self._joined(number, moment, clock) for number in known}
        block.readers[start:end] = array("I", [numbers[n] for n in block.readers[start:end]])

    def write(self, moment: int, clock: Clock, address: int, nbytes: int, written: bytes = b"") -> None:
        """`moment` overwrites these bytes. `written`: a 1 for each that means something (default: all)."""
        if nbytes == 0:
            return
        here = self._moments[moment]
        block, start, end = self._beginning(address, nbytes, here.name)
        rest = nbytes - (end - start)
        self.write(moment, clock, address + end - start, rest, written[-rest:] if rest else b"")
        nbytes, written = end - start, written[: end - start]
        self._check_writers(here, "overwrites", block, start, end, clock)
        for number in set(block.readers[start:end]):
            for reader in self._sets[number]:
                self._check(here, "overwrites", "is read", block, start, self._moments[reader], clock)
        block.written[start:end] = written or b"\1" * nbytes
        block.writers[start:end] = array("I", [moment]) * nbytes
        block.readers[start:end] = array("I", bytes(4 * nbytes))

    def written(self, address: int, nbytes: int, who: str) -> bytes:
        """A 1 for each byte that was written."""
        block, start = self.find(address, nbytes, who)
        return bytes(block.written[start : start + nbytes])

    def _check_writers(
        self, here: Moment, verb: str, block: Block, start: int, end: int, clock: Clock
    ) -> None:
        for number in set(block.writers[start:end]):
            self._check(here, verb, "is written", block, start, self._moments[number], clock)

    def _check(
        self, here: Moment, verb: str, what: str, block: Block, start: int, there: Moment, clock: Clock
    ) -> None:
        if not there.before(clock):
            raise SimulationError(
                f"race: {here.name} {verb} bytes near {start} of {block.name}, which {what} by {there.name}, "
                f"and no wait puts one behind the other"
            )

    def _joined(self, number: int, moment: int, clock: Clock) -> int:
        """The number of a set of readers with this one; those that it knows to be over drop out."""
        later = {r for r in self._sets[number] if not self._moments[r].before(clock)}
        readers = frozenset(later | {moment})
        found = self._numbers.get(readers)
        if found is None:
            found = self._numbers[readers] = len(self._sets)
            self._sets.append(readers)
        return found


class Arena:
    """Device memory: fresh bytes for every request, poisoned, with a guard between blocks; never reused."""

    CHUNK = 1 << 18
    GUARD = 256

    def __init__(self) -> None:
        self._chunk: ctypes.Array[ctypes.c_char] = (ctypes.c_char * 0)()
        self._used = 0
        self._kept: list[ctypes.Array[ctypes.c_char]] = []

    def take(self, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """Bytes that start at a multiple of 256; they outlive whoever drops them."""
        start = self._aligned()
        if start + nbytes > len(self._chunk):
            self._chunk = (ctypes.c_char * max(self.CHUNK, nbytes + 256))()
            ctypes.memset(self._chunk, POISON, len(self._chunk))
            self._kept.append(self._chunk)
            self._used = 0
            start = self._aligned()
        self._used = start + nbytes + self.GUARD
        return (ctypes.c_uint8 * nbytes).from_buffer(self._chunk, start)

    def _aligned(self) -> int:
        return self._used + -(ctypes.addressof(self._chunk) + self._used) % 256
