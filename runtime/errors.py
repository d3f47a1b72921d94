"""Errors of the runtime: each says what failed, why, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


class PoolError(Exception):
    """Base of every error that the runtime raises on its own account."""


class NotAdmitted(PoolError):
    """A stream cannot take a transfer (it is being captured into a graph); nothing was submitted."""


class CompileError(PoolError):
    """A source did not compile.

    `source` is the file, `command` repeats the compilation, `first` is the first error line, `log` is
    the file that holds everything the compiler said (None if it could not be kept).
    """

    def __init__(self, source: Path, command: str, first: str, log: Path | None) -> None:
        self.source, self.command, self.first, self.log = source, command, first, log
        kept = f"\n  everything it said: {log}" if log else ""
        super().__init__(f"{source} does not compile: {first}\n  to repeat it: {command}{kept}")


class BackendUnavailable(PoolError):
    """Something that this machine lacks: `what`, `why` it is not there, the `command` that mends it."""

    def __init__(self, what: str, why: str, command: str) -> None:
        self.what, self.why, self.command = what, why, command
        super().__init__(f"{what} is not available: {why}; to mend it: {command}")


class TransferError(PoolError):
    """A transfer failed; its destination pages hold nothing that may be used.

    `direction` is ``write-back`` or ``load``, `moved` are host page ids by pool, `pages` those of all,
    `cause` is what went wrong.
    """

    def __init__(
        self, pool: str, direction: str, moved: Sequence[int] | Mapping[str, Sequence[int]], cause: str
    ) -> None:
        self.moved = dict(moved) if isinstance(moved, Mapping) else {pool: list(moved)}
        self.pages = tuple(page for pages in self.moved.values() for page in pages)
        self.pool, self.direction, self.cause = pool, direction, cause
        shown = " and ".join(
            f"{len(pages)} pages{f' of {name}' if name != pool else ''} ({_few(pages)})"
            for name, pages in self.moved.items()
        )
        super().__init__(f"{pool}: {direction} of {shown} failed: {cause}")


def _few(pages: Sequence[int]) -> str:
    return ", ".join(map(str, pages[:8])) + (", ..." if len(pages) > 8 else "")


class OutOfMemoryBudget(PoolError, MemoryError):
    """A pool needs more bytes than it was given or than the machine has; nothing is held."""

    def __init__(self, what: str, needed: int, available: int, advice: str) -> None:
        self.what, self.needed, self.available = what, needed, available
        super().__init__(f"{what} needs {needed:,} bytes, {available:,} are available; {advice}")


class WrongProcess(PoolError):
    """A pool was used in another process than the one that made it (after a fork)."""

    def __init__(self, what: str, owner: int, here: int) -> None:
        self.what, self.owner, self.here = what, owner, here
        super().__init__(
            f"{what} belongs to process {owner} and was used in process {here}; "
            "make a pool in each process, or start processes with the spawn method"
        )
