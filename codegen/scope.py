"""What an expression of a spec may refer to: expression text in, `Expr` or `Cond` with known symbols out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass, field
from typing import Any

from poolwright.codegen import expr
from poolwright.codegen.expr import Cond, Expr, ExprError, Int, Op, symbol
from poolwright.codegen.ir import Variant
from poolwright.codegen.load import Document
from poolwright.codegen.names import suggest
from poolwright.codegen.nodes import Path

_READ = re.compile(r"[A-Za-z0-9_+\-*/%().,<>=!\[\] ]*")
_STUCK = re.compile(r"(?<![\w.])[0-9]+[A-Za-z_]")
_WORD = re.compile(
    r"(?P<name>[A-Za-z_]\w*)(?:\s*\.\s*(?P<constant>\w+)|\s*\[\s*(?P<index>\w+)\s*\])?(?P<call>\s*\()?"
)


@dataclass
class Scope:
    """The symbols of one document. `used` collects which of them expressions refer to."""

    document: Document[Any]
    scalars: frozenset[str]
    lists: MappingOf[str, int] = field(default_factory=dict)
    variants: MappingOf[str, Variant] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def size(self, path: Path, text: str, *, instance: int | None = None, row: bool = False) -> Expr:
        """Read an expression; `instance`: the number of a repeated component, `row`: `i` is a symbol too.

        Raises SpecError at the column of what is wrong.
        """
        result = expr.substitute(
            self._read(path, text, expr.parse), self._elements(path, text, instance, row)
        )
        if isinstance(result, Int) and result.value < 0:
            raise self.document.error(path, f"expected a size, got {result.value}")
        self._check_division(path, text, result)
        return result

    def condition(self, path: Path, text: str, *, instance: int | None = None) -> Cond:
        """Read a condition. Raises SpecError at the column of what is wrong."""
        cond = self._read(path, text, expr.parse_cond)
        elements = self._elements(path, text, instance, False)
        for side in _sides(cond):
            self._check_division(path, text, side)
        return expr.substitute_cond(cond, elements)

    def _read(self, path: Path, text: str, parse: Any) -> Any:
        good = _READ.match(text)
        assert good is not None
        if good.end() < len(text):
            raise self.document.error(path, f"unexpected character {text[good.end()]!r}", offset=good.end())
        stuck = _STUCK.search(text)
        if stuck is not None:
            raise self.document.error(path, f"not an integer: {stuck.group()!r}", offset=stuck.start())
        try:
            return parse(text)
        except ExprError as error:
            raise self.document.error(path, str(error), offset=error.column) from None

    def _elements(self, path: Path, text: str, instance: int | None, row: bool) -> dict[str, Expr]:
        """What `name[i]` and `name[0]` stand for; checks every symbol of the text on the way."""
        result: dict[str, Expr] = {}
        for found in _words(text):
            name, constant, index = found["name"], found["constant"], found["index"]
            offset = found.start()
            if constant is not None:
                self._check_constant(path, name, constant, offset, found.start("constant"))
            elif index is not None:
                number = self._element(path, name, index, offset, found.start("index"), instance)
                result[f"{name}[{index}]"] = symbol(f"{name}_{number}")
            else:
                self._check_scalar(path, name, offset, row)
            self.used.add(name)
        return result

    def _check_scalar(self, path: Path, name: str, offset: int, row: bool) -> None:
        if name in self.scalars or (row and name == "i"):
            return
        if name in self.lists:
            message = f"{name!r} is a list of {self.lists[name]}: write {name}[i] or {name}[0]"
        elif name in self.variants:
            message = f"{name!r} is a variant: write {name}.CONSTANT"
        elif name == "i":
            message = "`i` stands for an index only in index.row, and in brackets inside a repeated component"
        else:
            message = f"unknown symbol {name!r}{suggest(name, self._known())}"
        raise self.document.error(path, message, offset=offset)

    def _check_constant(self, path: Path, name: str, constant: str, offset: int, at: int) -> None:
        if name not in self.variants:
            known = name in self.scalars or name in self.lists
            problem = f"{name!r} has no constants" if known else f"unknown variant {name!r}"
            message = f"{problem}{suggest(name, self.variants)}"
            raise self.document.error(path, message, offset=offset)
        constants = dict(self.variants[name].choices[0][1])
        if constant not in constants:
            message = f"variant {name!r} has no constant {constant!r}{suggest(constant, constants)}"
            raise self.document.error(path, message, offset=at)
        if not isinstance(constants[constant], int):
            raise self.document.error(path, f"{name}.{constant} is an axis order, not an integer", offset=at)

    def _element(self, path: Path, name: str, index: str, offset: int, at: int, instance: int | None) -> int:
        if name not in self.lists:
            known = name in self.scalars
            message = f"{name!r} is no list" if known else f"unknown list {name!r}{suggest(name, self.lists)}"
            raise self.document.error(path, message, offset=offset)
        if index == "i" and instance is None:
            raise self.document.error(path, "[i] stands only inside a component with `repeat`", offset=at)
        number = instance if index == "i" and instance is not None else int(index)
        if number >= self.lists[name]:
            message = f"{name!r} has {self.lists[name]} elements, there is no {name}[{number}]"
            raise self.document.error(path, message, offset=at)
        return number

    def _check_division(self, path: Path, text: str, value: Expr) -> None:
        if isinstance(value, Op):
            if value.op in ("//", "%", "ceil_div") and value.right == Int(0):
                raise self.document.error(path, f"division by zero in {text!r}")
            self._check_division(path, text, value.left)
            self._check_division(path, text, value.right)

    def _known(self) -> Iterable[str]:
        return [*sorted(self.scalars), *self.lists, *self.variants]


def _words(text: str) -> Iterator[re.Match[str]]:
    """The symbols of an expression that has been parsed already, from left to right."""
    for found in _WORD.finditer(text):
        if found["call"] is None and found.group().strip() != "and":
            yield found


def _sides(cond: Cond) -> Iterator[Expr]:
    for side in (cond.left, cond.right):
        if side is not None:
            yield side
    for part in cond.parts:
        yield from _sides(part)
