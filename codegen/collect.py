"""Checks that go on after a mistake, so that one run names them all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from poolwright.codegen.errors import SpecError, SpecErrors
from poolwright.codegen.load import Document
from poolwright.codegen.nodes import Path


@dataclass
class Checks:
    """The mistakes found in one document so far."""

    document: Document[Any]
    errors: list[SpecError] = field(default_factory=list)

    @contextmanager
    def part(self) -> Iterator[None]:
        """Keep a SpecError raised inside and go on behind the block."""
        try:
            yield
        except SpecError as error:
            self.errors.append(error)

    def name(self, path: Path, problem: str | None, *, key: bool = True) -> None:
        """Keep what is wrong with a name, if anything is."""
        if problem is not None:
            self.errors.append(self.document.error(path, problem, key=key))

    def fail(self, path: Path, message: str, *, key: bool = False) -> NoReturn:
        raise self.document.error(path, message, key=key)

    def finish(self) -> None:
        """Raise SpecErrors when there was any mistake."""
        if self.errors:
            raise SpecErrors(self.errors)


def check_params(checks: Checks, params: Mapping[str, Any], at: Path = ("params",)) -> None:
    """Keep what is inconsistent in parameter declarations (`schema.Param` by name)."""
    for name, param in params.items():
        with checks.part():
            _check_param(checks, param, (*at, name))


def _check_param(checks: Checks, param: Any, at: Path) -> None:
    bounds = [
        key
        for key in ("min", "max", "one_of", "list", "default")
        if getattr(param, "list_" if key == "list" else key) is not None
    ]
    if param.equals is not None and bounds:
        checks.fail(
            (*at, bounds[0]), f"a parameter with `equals` is computed and takes no `{bounds[0]}`", key=True
        )
    if param.one_of is not None and {"min", "max"} & set(bounds):
        checks.fail(
            (*at, bounds[0]), f"`one_of` lists the values, `{bounds[0]}` adds nothing: remove it", key=True
        )
    for key in ("min", "max"):
        value = getattr(param, key)
        if value is not None and value < 0:
            checks.fail((*at, key), f"sizes are not negative, got {value}")
    if param.min is not None and param.max is not None and param.min > param.max:
        checks.fail((*at, "max"), f"max {param.max} is smaller than min {param.min}")
    if param.list_ is not None and not 1 <= param.list_ <= 64:
        checks.fail((*at, "list"), f"a list parameter has 1 to 64 elements, got {param.list_}")
    _check_default(checks, param, at)
    if param.one_of is not None:
        check_list(checks, param.one_of, (*at, "one_of"))
        for index, value in enumerate(param.one_of):
            if value < 0:
                checks.fail((*at, "one_of", index), f"sizes are not negative, got {value}")


def _check_default(checks: Checks, param: Any, at: Path) -> None:
    if param.default is None:
        return
    least = 0 if param.min is None else param.min
    if param.one_of is not None and param.default not in param.one_of:
        checks.fail(
            (*at, "default"), f"expected one of {', '.join(map(str, param.one_of))}, got {param.default}"
        )
    if param.one_of is None and param.default < least:
        checks.fail((*at, "default"), f"expected at least {least}, got {param.default}")
    if param.max is not None and param.default > param.max:
        checks.fail((*at, "default"), f"expected at most {param.max}, got {param.default}")


def check_list(checks: Checks, values: list[Any], at: Path) -> None:
    """Raise SpecError for an empty list or a value that stands twice."""
    if not values:
        checks.fail(at, "expected at least one entry, got an empty list")
    check_distinct(checks, values, at)


def check_distinct(checks: Checks, values: list[Any], at: Path) -> None:
    """Raise SpecError for a value that stands twice."""
    for index, value in enumerate(values):
        if value in values[:index]:
            checks.fail((*at, index), f"{value!r} stands here twice")
