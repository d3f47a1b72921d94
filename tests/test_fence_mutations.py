"""Every fence of the transfer code is needed: without it a scenario on the simulator fails.

Fences are found in the source: waits, what an event stands for, what is kept alive, when a slot is free,
whose device is current. Each is taken out of a module's text in turn, the rest stays as it is.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from race_scenarios import FAILURES, SCENARIOS
from simulation import first

from poolwright.runtime import backend, checks, hazards, launch, pool, shared, staging, ticket, transfer
from poolwright.runtime.driver import relay, simulated
from poolwright.runtime.driver.simulated_memory import SimulationError

MODULES = (transfer, staging, launch, ticket, hazards, checks, relay)
USERS = (*MODULES, pool, shared, backend, simulated)
CALLS = {"wait", "follow", "wait_value", "synchronize"}
KEPT = {"keep.append", "_counters_of_all_pools.append", "self._lost.append"}
DRIVERS = {"driver", "self._driver"}


@dataclass(frozen=True)
class Fence:
    """One site: where it is, what it says, which of several equal ones, the module without it."""

    module: ModuleType
    function: str
    text: str
    number: int
    mutant: str

    @property
    def label(self) -> str:
        again = f" ({self.number + 1})" if self.number else ""
        return f"{self.module.__name__.rpartition('.')[2]}.{self.function}: {self.text}{again}"


def _call(node: ast.AST) -> str:
    """`driver.wait` for a call of it, whatever its arguments."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _on_driver(node: ast.AST) -> str:
    """`wait` for a call of a driver's method."""
    owner, _, name = _call(node).rpartition(".")
    return name if owner in DRIVERS else ""


def _elsewhere(node: ast.Call) -> ast.AST:
    """What is called is done, the event behind it is one of a stream that has nothing."""
    owner = node.func.value  # type: ignore[attr-defined]
    nothing = ast.Call(ast.Attribute(owner, "stream", ast.Load()), [], [])
    event = ast.Call(ast.Attribute(owner, "record", ast.Load()), [nothing], [])
    return ast.Subscript(ast.Tuple([node, event], ast.Load()), ast.Constant(1), ast.Load())


class Sites(ast.NodeTransformer):
    """Finds fences in a fixed order; takes out the one at `wanted`."""

    def __init__(self, wanted: int = -1) -> None:
        self.wanted, self.found = wanted, list[tuple[str, str]]()
        self._functions: list[str] = []

    def _here(self, text: str) -> bool:
        self.found.append((".".join(self._functions), text))
        return len(self.found) - 1 == self.wanted

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._functions.append(node.name)
        self.generic_visit(node)
        self._functions.pop()
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if (_on_driver(node.value) in CALLS or _call(node.value) in KEPT) and self._here(ast.unparse(node)):
            return ast.Pass()
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        target = node.targets[0]
        freed = isinstance(target, ast.Subscript) and ast.unparse(target.value) == "self._free"
        if freed and not isinstance(node.value, ast.Constant):  # None: the slot has been waited for
            if self._here(ast.unparse(node)):
                return ast.Pass()
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if ast.unparse(node.target) == "keep" and isinstance(node.value, ast.List):
            for at, each in enumerate(node.value.elts):
                if self._here(f"keep {ast.unparse(each)}"):
                    node.value.elts[at] = ast.Constant(None)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = _on_driver(node)
        if name == "record" and self._here(f"event of {ast.unparse(node.args[0])}"):
            nothing = ast.Call(ast.Attribute(node.func.value, "stream", ast.Load()), [], [])  # type: ignore[attr-defined]
            node.args = [nothing]
        if name in ("launch", "launch_behind", "relay") and self._here(f"event of {name}"):
            return _elsewhere(node)
        if name == "launch_behind":  # two fences of `enter`
            if self._here(f"launch behind {ast.unparse(node.args[3])}"):
                node.args[3] = node.args[1]
            if self._here(f"launch behind {ast.unparse(node.args[4])}"):
                node.args[4] = ast.Constant(None)
        if name == "relay" and self._here(f"relay behind {ast.unparse(node.args[6])}"):
            node.args[6] = ast.Constant(None)
        if name == "enter":  # one call for two fences: behind a stream, and behind an event
            if self._here(f"enter behind {ast.unparse(node.args[1])}"):
                node.args[1] = node.args[0]
            if self._here(f"enter behind {ast.unparse(node.args[2])}"):
                node.args[2] = ast.Constant(None)
        if name == "done" and self._here(f"ask {ast.unparse(node)}"):
            return ast.Constant(True)
        if _call(node) == "Submission" and self._here(f"keep in {ast.unparse(node)}"):
            node.args[3] = ast.Constant(None)
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        for item in node.items:
            if _on_driver(item.context_expr) == "guard" and self._here("guard"):
                node.items = [other for other in node.items if other is not item]
                return node if node.items else ast.If(ast.Constant(True), node.body, [])
        return node


def fences() -> Iterator[Fence]:
    for module in MODULES:
        text = Path(str(module.__file__)).read_text(encoding="utf-8")
        sites = Sites()
        sites.visit(ast.parse(text))
        for at, site in enumerate(sites.found):
            tree = Sites(at).visit(ast.parse(text))
            mutant = ast.unparse(ast.fix_missing_locations(tree))
            yield Fence(module, *site, sites.found[:at].count(site), mutant)


FENCES = tuple(fences())

IMPLIED: dict[str, str] = {}
"""Fences that another one implies in every case that can be built today, with the reason they stay."""


def _use(fence: Fence, patch: pytest.MonkeyPatch) -> None:
    """Let the mutant's definitions take the place of the module's, wherever they are used."""
    made = ModuleType(fence.module.__name__)
    exec(compile(fence.mutant, str(fence.module.__file__), "exec"), made.__dict__)
    for name, value in vars(fence.module).items():
        if getattr(value, "__module__", None) == fence.module.__name__:
            for user in USERS:
                if getattr(user, name, None) is value:
                    patch.setattr(user, name, getattr(made, name))


def caught() -> str:
    """What the scenarios say first, or nothing."""
    chance = random.Random(1).randrange
    runs = [(scenario, chance) for scenario in (*SCENARIOS, *FAILURES)]
    for scenario, choose in [*runs, *((scenario, first) for scenario in SCENARIOS)]:
        try:
            scenario(choose)
        except (SimulationError, AssertionError, pytest.fail.Exception) as error:
            return f"{scenario.__name__}: {error}"
    return ""


def test_fences_are_found() -> None:
    labels = [fence.label for fence in FENCES]
    assert len(set(labels)) == len(labels) > 30
    assert set(IMPLIED) <= set(labels)


@pytest.mark.parametrize("fence", [f for f in FENCES if f.label not in IMPLIED], ids=lambda f: f.label)
def test_no_fence_can_go(fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(fence, monkeypatch)
    assert caught(), f"without `{fence.text}` in {fence.label} every scenario passes"
