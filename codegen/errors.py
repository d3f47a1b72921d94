"""What a spec can be refused with: a place in a file, the dotted path in the document, the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Location:
    """A place in a file; `line` and `column` count from 1, `path` is relative to the project, with ``/``."""

    path: str
    line: int = 1
    column: int = 1

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"

    def shifted(self, columns: int) -> Location:
        """The place so many characters further right in the same line."""
        return Location(self.path, self.line, self.column + columns)


class SpecError(Exception):
    """A spec that cannot be used.

    `location` points at the offending token, `where` is its dotted path in the document (empty for the
    document itself), `message` says what was expected, what was got, and what to do.
    """

    def __init__(self, location: Location, where: str, message: str) -> None:
        super().__init__(location, where, message)
        self.location, self.where, self.message = location, where, message

    def __str__(self) -> str:
        return (
            f"{self.location}: {self.where}: {self.message}"
            if self.where
            else f"{self.location}: {self.message}"
        )


class SpecErrors(Exception):
    """All mistakes found in one document, by place; at least one."""

    def __init__(self, errors: Iterable[SpecError]) -> None:
        self.errors = tuple(sorted(errors, key=lambda error: error.location))
        super().__init__(self.errors)
