"""What ``validate="full"`` does beyond checking ids: pages compared on both sides, guards looked at.

Note [Comparing in order]: both sides are read in the stream of the transfer, right behind it, so the
comparison sees what the transfer left even where later work overwrites it. Until then nobody may change
the device rows: such a ticket tells `captured` and its layers only when all of it is done. Rows are read
by torch indexing, which shares no address with kernels, twin or copies.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Mapping, Sequence

import torch

from poolwright.runtime import indexing
from poolwright.runtime.driver import Driver, Memory, Stream
from poolwright.runtime.errors import PoolError
from poolwright.runtime.indexing import Positions, Views
from poolwright.runtime.indices import Batch
from poolwright.runtime.memory import GUARD, PATTERN
from poolwright.runtime.program import SizedProgram

MOST_BYTES = 64 << 20
"""Pages are compared in parts of so many bytes, or one by one."""

Finding = tuple[str, Sequence[int]]
"""What is wrong, and the host pages that it concerns."""

Verdict = Callable[[], Finding | None]
"""Asked once, when the transfer is done."""


class Checks:
    """Compares transfers of one pool. `guards`: memory that must hold `PATTERN`, by where it lies."""

    def __init__(
        self,
        driver: Driver,
        program: SizedProgram,
        pages: int,
        host_address: int,
        guards: Mapping[str, torch.Tensor],
    ) -> None:
        self._driver, self._program, self._host_address = driver, program, host_address
        self._guards = guards
        page_bytes = program.host(1).page_bytes
        self._most = min(pages, max(1, MOST_BYTES // max(page_bytes, 1)))
        self._inside = program.spans(self._most)
        self._spans = tuple(zip(program.spans(pages), self._inside, strict=True))

    def compare(
        self, batch: Batch, layers: Positions | None, views: Views, stream: Stream, keep: list[object]
    ) -> Verdict:
        """Queue the comparison of a batch in `stream`. `keep` takes what must live until it has run.

        Raises PoolError when it cannot be queued.
        """
        memory = self._driver.allocate(self._program.host(self._most).nbytes)
        keep.append(memory)
        differ: list[torch.Tensor] = []
        for first in range(0, batch.count if self._spans else 0, self._most):
            part = _part(batch, first, self._most)
            self._fetch(memory, batch.host[first : first + self._most], stream)
            work = functools.partial(self._look, memory.tensor, part, layers, views, differ)
            self._driver.call(stream, work)
        return functools.partial(self._verdict, batch, differ)

    def _fetch(self, memory: Memory, pages: Sequence[int], stream: Stream) -> None:
        """Bring host pages to the device, one behind the other."""
        pairs = [(at, page, *pair) for pair in self._spans for at, page in enumerate(pages)]
        to = [memory.address + inside.start + at * inside.nbytes for at, _, _, inside in pairs]
        source = [self._host_address + here.start + page * here.nbytes for _, page, here, _ in pairs]
        sizes = [here.nbytes for _, _, here, _ in pairs]
        self._driver.copy(to, source, sizes, stream, inward=True)

    def _look(
        self,
        fetched: torch.Tensor,
        part: Batch,
        layers: Positions | None,
        views: Views,
        differ: list[torch.Tensor],
    ) -> None:
        """Write the device rows over a copy of the host pages: nothing may change."""
        try:
            expected = fetched.clone()
            layout = self._program.host(self._most)
            indexing.move(self._program, layout, expected, views, "write_back", part, layers)
            other = expected != fetched
            count = len(part.host)
            found = [
                other.narrow(0, span.start, count * span.nbytes).view(count, -1).any(1)
                for span in self._inside
            ]
            differ.append(torch.stack(found).any(0))
        except RuntimeError as error:
            raise PoolError(f"pages cannot be compared: {error}") from error

    def _verdict(self, batch: Batch, differ: Sequence[torch.Tensor]) -> Finding | None:
        skipped = batch.bad() if batch.bad is not None else ()
        if skipped:
            return "their device ids are out of range or not whole pages", skipped
        wrong = [bad for part in differ for bad in part.tolist()]
        pages = sorted({page for page, bad in zip(batch.host, wrong, strict=False) if bad})
        if pages:
            return "the bytes on both sides differ", pages
        broken = self.overwritten()
        return (f"{broken}, by this transfer or an earlier one", sorted(batch.host_pages)) if broken else None

    def release(self) -> None:
        """Let go of the guards, and so of the memory that they are part of."""
        self._guards = {}

    def overwritten(self) -> str:
        """Which guard was written to, in words; empty when none was."""
        for where, guard in self._guards.items():
            broken = int((guard != PATTERN).sum())
            if broken:
                return f"{broken} of {guard.numel()} guard bytes {where} were overwritten"
        return ""


def behind(memory: Memory) -> torch.Tensor:
    """The guard behind device memory that was allocated with `GUARD` bytes more than it says."""
    tensor: torch.Tensor = memory.tensor
    return tensor.as_strided((GUARD,), (1,), tensor.storage_offset() + memory.nbytes)


def _part(batch: Batch, first: int, most: int) -> Batch:
    """Pages `first` and on of a batch, for host pages that lie one behind the other."""
    count = min(most, batch.count - first)
    ids = batch.on_device
    if ids is not None:
        each = len(ids) // batch.count
        ids = ids[first * each : (first + count) * each]
    both = array("I", range(count)) + batch.device[first : first + most]
    return Batch(batch.unit, both, count, on_device=ids)
