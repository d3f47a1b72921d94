"""Integer expressions over a pool's parameters: parse, fold, evaluate, print to Python and to C++.

In: the text of an expression in a spec (``kv_lora_rank + qk_rope_head_dim``). Out: an immutable `Expr`
that stays symbolic until it is bound, with one printer per language. Values are integers; division and
remainder round towards minus infinity in both languages (``pw::floor_div`` in C++), so that the two
printed forms agree on every input.
"""

from __future__ import annotations

import ast
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

MAX_TEXT = 300
MAX_LITERAL = 1 << 40

_INFIX: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
_CALLS: dict[str, Callable[[int, int], int]] = {
    "ceil_div": lambda a, b: -(-a // b),
    "min": min,
    "max": max,
    "align_up": lambda a, b: -(-a // b) * b,
    "gcd": math.gcd,
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "//": 2, "%": 2}


class ExprError(ValueError):
    """An expression that cannot be read; `column` counts characters from the start of its text."""

    def __init__(self, message: str, column: int = 0) -> None:
        super().__init__(message)
        self.column = column


class Expr:
    """An integer expression. Build with `integer`, `symbol`, the operators and the functions below."""

    def __add__(self, other: Expr | int) -> Expr:
        return binary("+", self, as_expr(other))

    def __sub__(self, other: Expr | int) -> Expr:
        return binary("-", self, as_expr(other))

    def __mul__(self, other: Expr | int) -> Expr:
        return binary("*", self, as_expr(other))


@dataclass(frozen=True)
class Int(Expr):
    value: int


@dataclass(frozen=True)
class Sym(Expr):
    name: str


@dataclass(frozen=True)
class Op(Expr):
    op: str
    left: Expr
    right: Expr

    def __post_init__(self) -> None:
        # Kept, because long sizes are looked up by value again and again while a program is printed.
        object.__setattr__(self, "_hash", hash((self.op, self.left, self.right)))

    def __hash__(self) -> int:
        return cast(int, self._hash)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Cond:
    """A comparison, or (`op` = ``and``) several of them that must all hold."""

    op: str
    left: Expr | None = None
    right: Expr | None = None
    parts: tuple[Cond, ...] = ()


ZERO = Int(0)
ONE = Int(1)


def integer(value: int) -> Int:
    return Int(value)


def symbol(name: str) -> Sym:
    return Sym(name)


def as_expr(value: Expr | int) -> Expr:
    return Int(value) if isinstance(value, int) else value


def binary(op: str, left: Expr, right: Expr) -> Expr:
    """`left op right` with constants folded and neutral elements dropped."""
    if isinstance(left, Int) and isinstance(right, Int):
        if op in ("//", "%", "ceil_div", "align_up") and right.value == 0:
            raise ExprError("division by zero")
        return Int({**_INFIX, **_CALLS}[op](left.value, right.value))
    if op == "+" and ZERO in (left, right):
        return right if left == ZERO else left
    if op == "-" and right == ZERO:
        return left
    if op == "*":
        if ZERO in (left, right):
            return ZERO
        if ONE in (left, right):
            return right if left == ONE else left
    if op in ("//", "ceil_div", "align_up") and right == ONE:
        return left
    if op == "gcd":
        if ZERO in (left, right):
            return right if left == ZERO else left
        if ONE in (left, right):
            return ONE
        if left == right:
            return left
    return Op(op, left, right)


def product(factors: list[Expr] | tuple[Expr, ...]) -> Expr:
    result: Expr = ONE
    for factor in factors:
        result = result * factor
    return result


def divides(divisor: Expr, value: Expr) -> bool:
    """Whether `value` is a multiple of `divisor` for every binding, as far as its form shows."""
    if isinstance(value, Op) and value.op in ("+", "-"):
        return divides(divisor, value.left) and divides(divisor, value.right)
    if isinstance(divisor, Int):
        numbers = [f.value for f in factors(value) if isinstance(f, Int)]
        return divisor.value > 0 and any(number % divisor.value == 0 for number in numbers)
    return divisor in factors(value)


def align_up(value: Expr, alignment: Expr | int) -> Expr:
    alignment = as_expr(alignment)
    return value if divides(alignment, value) else binary("align_up", value, alignment)


def factors(value: Expr) -> list[Expr]:
    """What the expression is a product of."""
    if isinstance(value, Op) and value.op == "*":
        return factors(value.left) + factors(value.right)
    return [value]


def gcd(values: list[Expr]) -> Expr:
    """Greatest common divisor; values that are multiples of another one are left out."""
    kept: list[tuple[Counter[Expr], Expr]] = []
    for value in values:
        parts = Counter(factors(value))
        if value == ZERO or any(have <= parts for have, _ in kept):
            continue
        kept = [(have, old) for have, old in kept if not parts <= have]
        kept.append((parts, value))
    result: Expr = ZERO
    for _, value in kept:
        result = binary("gcd", result, value)
    return result


def symbols(expr: Expr | Cond | None) -> set[str]:
    """Names of all symbols in the expression."""
    if isinstance(expr, Sym):
        return {expr.name}
    if isinstance(expr, Op):
        return symbols(expr.left) | symbols(expr.right)
    if isinstance(expr, Cond):
        return symbols(expr.left) | symbols(expr.right) | {n for p in expr.parts for n in symbols(p)}
    return set()


def substitute(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """The expression with symbols replaced; folds what becomes constant."""
    if isinstance(expr, Sym):
        return values.get(expr.name, expr)
    if isinstance(expr, Op):
        return binary(expr.op, substitute(expr.left, values), substitute(expr.right, values))
    return expr


def abbreviate(expr: Expr, names: Mapping[Expr, Expr]) -> Expr:
    """The expression with every part that has a name replaced by it, the largest parts first."""
    if expr in names:
        return names[expr]
    if isinstance(expr, Op):
        return Op(expr.op, abbreviate(expr.left, names), abbreviate(expr.right, names))
    return expr


Interval = tuple[int, int | None]
"""The least and the largest value of something; None: there is no largest."""


def interval(expr: Expr, known: Mapping[str, Interval], even: frozenset[Expr] = frozenset()) -> Interval:
    """Bounds of a size whose symbols have these bounds, as far as they can be told; none is below 0.

    `even`: remainders that are known to be 0.
    """
    if isinstance(expr, Int):
        return expr.value, expr.value
    if isinstance(expr, Sym):
        return known.get(expr.name, (0, None))
    assert isinstance(expr, Op)
    low, high = interval(expr.left, known, even)
    less, more = interval(expr.right, known, even)
    if expr.op in ("+", "*"):
        work = _INFIX[expr.op]
        return work(low, less), None if high is None or more is None else work(high, more)
    if expr.op == "-":
        return 0 if more is None else max(0, low - more), None if high is None else max(0, high - less)
    if expr.op in ("min", "max"):
        tops = [top for top in (high, more) if top is not None]
        if expr.op == "min":
            return min(low, less), min(tops, default=None)
        return max(low, less), max(tops) if len(tops) == 2 else None
    if expr.op == "//":
        divides = Op("%", expr.left, expr.right) in even
        return max(low // more if more else 0, min(low, int(divides))), high
    if expr.op == "ceil_div":
        return -(-low // more) if more else min(low, 1), high
    return 0, None


def substitute_cond(cond: Cond, values: Mapping[str, Expr]) -> Cond:
    return Cond(
        cond.op,
        None if cond.left is None else substitute(cond.left, values),
        None if cond.right is None else substitute(cond.right, values),
        tuple(substitute_cond(part, values) for part in cond.parts),
    )


def evaluate(expr: Expr, values: Mapping[str, int]) -> int:
    """The value. Raises KeyError on an unbound symbol and ZeroDivisionError on a zero divisor."""
    if isinstance(expr, Int):
        return expr.value
    if isinstance(expr, Sym):
        return values[expr.name]
    assert isinstance(expr, Op)
    left, right = evaluate(expr.left, values), evaluate(expr.right, values)
    return (_INFIX.get(expr.op) or _CALLS[expr.op])(left, right)


def holds(cond: Cond, values: Mapping[str, int]) -> bool:
    """Whether the condition is true."""
    if cond.op == "and":
        return all(holds(part, values) for part in cond.parts)
    assert cond.left is not None and cond.right is not None
    return _COMPARE[cond.op](evaluate(cond.left, values), evaluate(cond.right, values))


def grain(expr: Expr, unknown: frozenset[str]) -> Expr:
    """An expression without `unknown` symbols whose value divides `expr` whatever their values are.

    Used for vector widths: an address ``pages * row`` is a multiple of ``row`` for any capacity.
    """
    if not symbols(expr) & unknown:
        return expr
    if isinstance(expr, Op):
        left, right = grain(expr.left, unknown), grain(expr.right, unknown)
        if expr.op == "*":
            return left * right
        if expr.op in ("+", "-", "align_up"):
            return gcd([left, right])
    return ONE


# ---- printers ---------------------------------------------------------------------------------


def to_python(expr: Expr, *, name: Callable[[str], str] = str) -> str:
    """Python source; symbols become local names (through `name`)."""
    return _print(expr, name, _python_call, "//", "%")


def to_cpp(expr: Expr, *, name: Callable[[str], str] = str) -> str:
    """C++ source over ``i64`` values; needs ``poolwright/prim.h``."""
    return _print(expr, name, _cpp_call, None, None)


def to_text(expr: Expr) -> str:
    """The expression as a spec writes it."""
    return _print(expr, str, lambda op, left, right: f"{op}({left}, {right})", "//", "%")


def cond_to_text(cond: Cond) -> str:
    """The condition as a spec writes it."""
    if cond.op == "and":
        return " and ".join(cond_to_text(part) for part in cond.parts)
    assert cond.left is not None and cond.right is not None
    return f"{to_text(cond.left)} {cond.op} {to_text(cond.right)}"


def cond_to_python(cond: Cond, *, name: Callable[[str], str] = str) -> str:
    if cond.op == "and":
        return " and ".join(cond_to_python(part, name=name) for part in cond.parts)
    assert cond.left is not None and cond.right is not None
    return f"{to_python(cond.left, name=name)} {cond.op} {to_python(cond.right, name=name)}"


def cond_to_cpp(cond: Cond, *, name: Callable[[str], str] = str) -> str:
    if cond.op == "and":
        return " && ".join(cond_to_cpp(part, name=name) for part in cond.parts)
    assert cond.left is not None and cond.right is not None
    return f"{to_cpp(cond.left, name=name)} {cond.op} {to_cpp(cond.right, name=name)}"


def _python_call(op: str, left: str, right: str) -> str:
    if op == "ceil_div":
        return f"-(-({left}) // ({right}))"
    if op == "align_up":
        return f"align_up({left}, {right})"
    return f"{op}({left}, {right})"


def _cpp_call(op: str, left: str, right: str) -> str:
    names = {"//": "floor_div", "%": "floor_mod", "min": "least", "max": "most"}
    return f"pw::{names.get(op, op)}({left}, {right})"


def _print(
    expr: Expr,
    name: Callable[[str], str],
    call: Callable[[str, str, str], str],
    divide: str | None,
    remainder: str | None,
    outer: int = 0,
    right_side: bool = False,
) -> str:
    if isinstance(expr, Int):
        return str(expr.value) if expr.value >= 0 else f"({expr.value})"
    if isinstance(expr, Sym):
        return name(expr.name)
    assert isinstance(expr, Op)
    infix = {"+": "+", "-": "-", "*": "*", "//": divide, "%": remainder}.get(expr.op)
    if infix is None:
        left = _print(expr.left, name, call, divide, remainder)
        right = _print(expr.right, name, call, divide, remainder)
        return call(expr.op, left, right)
    rank = _PRECEDENCE[expr.op]
    left = _print(expr.left, name, call, divide, remainder, rank)
    right = _print(expr.right, name, call, divide, remainder, rank, True)
    text = f"{left} {infix} {right}"
    needs = outer > rank or (outer == rank and right_side)
    return f"({text})" if needs else text


# ---- parser -----------------------------------------------------------------------------------

_AST_INFIX: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Mod: "%",
}
_AST_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}


def parse(text: str) -> Expr:
    """Read an integer expression: literals, names, ``name.constant``, ``name[i]`` with a literal or ``i``,
    ``+ - * // %``, ``ceil_div``, ``min``, ``max``. Raises ExprError. Nothing is ever executed."""
    return _expr(_tree(text))


def parse_cond(text: str) -> Cond:
    """Read a condition: comparisons of expressions joined by ``and``. Raises ExprError."""
    return _cond(_tree(text))


def _tree(text: str) -> ast.expr:
    if len(text) > MAX_TEXT:
        raise ExprError(f"expression of {len(text)} characters, at most {MAX_TEXT} are read", MAX_TEXT)
    if not text.isascii():
        column = next(i for i, char in enumerate(text) if not char.isascii())
        raise ExprError(f"unexpected character {text[column]!r}", column)
    if "\n" in text:
        raise ExprError("an expression stands on one line", text.index("\n"))
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        column = min(max((error.offset or 1) - 1, 0), len(text))
        raise ExprError(f"not an expression: {text!r}", column) from None
    except (RecursionError, MemoryError, ValueError):
        raise ExprError(f"not an expression: {text!r}") from None


def _expr(node: ast.expr) -> Expr:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        if node.value > MAX_LITERAL:
            raise ExprError(f"literal {node.value} is larger than {MAX_LITERAL}", node.col_offset)
        return Int(node.value)
    if isinstance(node, ast.Name):
        return Sym(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return Sym(f"{node.value.id}.{node.attr}")
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        index = node.slice
        if isinstance(index, ast.Constant) and type(index.value) is int and index.value >= 0:
            return Sym(f"{node.value.id}[{index.value}]")
        if isinstance(index, ast.Name) and index.id == "i":
            return Sym(f"{node.value.id}[i]")
        raise ExprError("only [i] or a literal may stand in brackets", index.col_offset)
    if isinstance(node, ast.BinOp) and type(node.op) in _AST_INFIX:
        return _folded(node, _AST_INFIX[type(node.op)], _expr(node.left), _expr(node.right))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        raise ExprError("sizes are integers: write // for division", node.col_offset)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id not in ("ceil_div", "min", "max"):
            raise ExprError(f"unknown function {node.func.id!r} (ceil_div, min, max)", node.col_offset)
        if len(node.args) != 2 or node.keywords:
            raise ExprError(f"{node.func.id} takes two arguments", node.col_offset)
        return _folded(node, node.func.id, _expr(node.args[0]), _expr(node.args[1]))
    if isinstance(node, ast.Compare | ast.BoolOp):
        raise ExprError("a comparison has no size", node.col_offset)
    raise ExprError(
        "not an integer expression (names, integers, + - * // %, ceil_div, min, max)", node.col_offset
    )


def _folded(node: ast.expr, op: str, left: Expr, right: Expr) -> Expr:
    try:
        result = binary(op, left, right)
    except ExprError as error:
        raise ExprError(str(error), node.col_offset) from None
    if isinstance(result, Int) and abs(result.value) > MAX_LITERAL:
        raise ExprError(f"value {result.value} is larger than {MAX_LITERAL}", node.col_offset)
    return result


def _cond(node: ast.expr) -> Cond:
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        return Cond("and", parts=tuple(_cond(value) for value in node.values))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _AST_COMPARE:
        return Cond(_AST_COMPARE[type(node.ops[0])], _expr(node.left), _expr(node.comparators[0]))
    raise ExprError("not a condition (comparisons joined by `and`)", node.col_offset)
