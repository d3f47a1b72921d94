"""What SGLang's sources say of host pools: methods as defined, calls and attributes as used, read from text.

`drift` compares them with a pool that is offered in their place and says every difference in words.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

POOL_NAMES = {
    *("host_pool", "mem_pool_host", "memory_pool_host", "storage_host_pool", "anchor_pool"),
    *("_swa_kv_pool_host", "_mamba_pool_host", "target_host_pool", "draft_host_pool"),
}
"""What variables and attributes that hold a host pool are called."""

GROUPS = {"mem_pool_host"}
"""Those that may hold a group of pools as well."""

CLASSES = (("pool_host/base.py", "HostKVCache"), ("pool_host/mha.py", "MHATokenToKVPoolHost"))
"""Where methods are defined that several kinds of pool have; the first that has one decides."""

ELSEWHERE = {
    "alloc_paged_token_slots": "host tables of sparse attention, which grow token by token",
    "allocated_host_indices": "host tables of sparse attention",
    "backup_tokens_from_device_all_layer": "host tables of sparse attention",
    "token_stride_size": "host tables of sparse attention",
    "owned_rows": "KV sharded over ranks",
    "placement": "KV sharded over ranks",
    "shard_rank": "KV sharded over ranks",
    "index_k_buffer": "another vendor's device",
    "index_k_scale_buffer": "another vendor's device",
    "slot_page_size": "drafts of DeepSeek-V4, of the target's class",
    "num_host_pages": "drafts of DeepSeek-V4, of the target's class",
    "packed": "device pools that are linked to storage directly",
}
"""Names of other kinds of pool, by what needs them."""


@dataclass(frozen=True)
class Use:
    """A call of a method, or (`positional` None) a look at an attribute."""

    name: str
    place: str
    owner: str
    positional: int | None = None
    keywords: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.positional is None:
            return f"{self.place} reads {self.name}"
        given = [f"argument {n + 1}" for n in range(self.positional)]
        return f"{self.place} calls {self.name}({', '.join([*given, *(f'{k}=' for k in self.keywords)])})"


@cache
def uses(folder: Path) -> tuple[Use, ...]:
    """Every use of a host pool in these sources, host pools' own apart. They do not change meanwhile."""
    found: list[Use] = []
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if "pool_host" in inside.parts or path.name == "memory_pool_host.py" or "test" in path.name:
            continue
        text = path.read_text(encoding="utf-8")
        if any(name in text for name in POOL_NAMES):
            found += _uses(ast.parse(text), str(inside))
    return tuple(found)


def _uses(tree: ast.Module, place: str) -> Iterator[Use]:
    found: dict[tuple[int, int], Use] = {}
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for scope in (tree, *scopes):
        nodes = list(ast.walk(scope))
        names = POOL_NAMES if scope is tree else POOL_NAMES | _aliases(nodes)
        for node in nodes:
            if isinstance(node, ast.Attribute) and (owner := _owner(node, names)):
                at = (node.end_lineno or 0, node.end_col_offset or 0)
                found[at] = Use(node.attr, f"{place}:{node.end_lineno}", owner)
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                at = (node.func.end_lineno or 0, node.func.end_col_offset or 0)
                if at in found:
                    keywords = tuple(word.arg for word in node.keywords if word.arg is not None)
                    found[at] = replace(found[at], positional=len(node.args), keywords=keywords)
    return iter(found.values())


def _aliases(nodes: Sequence[ast.AST]) -> set[str]:
    """Variables of a function that are set to a host pool: ``anchor = group.anchor_entry.host_pool``."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = node.value
            if isinstance(value, ast.Attribute) and value.attr in POOL_NAMES - GROUPS:
                found.add(node.targets[0].id)
    return found


def _owner(node: ast.Attribute, names: set[str]) -> str:
    """The host pool's name in ``a.name.attribute``, else empty."""
    value = node.value
    name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
    return name if name in names else ""


def defined(folder: Path) -> dict[str, str]:
    """Parameters of every public method of host pools, by name: ``(host_indices, *, is_draft=)``."""
    found: dict[str, str] = {}
    for file, name in CLASSES:
        for method in _class(folder / "mem_cache" / file, name).body:
            marks = {mark.id for mark in getattr(method, "decorator_list", ()) if isinstance(mark, ast.Name)}
            if isinstance(method, ast.FunctionDef) and method.name[0] != "_" and "property" not in marks:
                found.setdefault(method.name, _parameters(method.args))
    return found


def of_groups(folder: Path) -> set[str]:
    """Names that a group of pools has."""
    group = _class(folder / "mem_cache" / "pool_host" / "group.py", "HostPoolGroup")
    found = {node.name for node in group.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(group):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def _class(path: Path, name: str) -> ast.ClassDef:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise AssertionError(f"{path} has no class {name}: host pools have moved; see CLASSES")


def _parameters(given: ast.arguments) -> str:
    plain = [each.arg for each in [*given.posonlyargs, *given.args]][1:]
    optional = len(given.defaults)
    shown = [name if at < len(plain) - optional else f"{name}=" for at, name in enumerate(plain)]
    if given.kwonlyargs:
        shown.append("*")
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        shown.append(each.arg if default is None else f"{each.arg}=")
    return f"({', '.join(shown)})"


def offered(pool: object, name: str) -> str:
    """As `defined`, of a pool that is there."""
    shown, keywords = [], False
    for each in inspect.signature(getattr(pool, name)).parameters.values():
        if each.kind is inspect.Parameter.KEYWORD_ONLY and not keywords:
            keywords = True
            shown.append("*")
        shown.append(each.name if each.default is inspect.Parameter.empty else f"{each.name}=")
    return f"({', '.join(shown)})"


def drift(folder: Path, pool: object) -> list[str]:
    """Where the sources under `folder` and this pool differ, in words; empty when they agree."""
    signatures, grouped, found = defined(folder), of_groups(folder), uses(folder)
    wrong = []
    for name, expected in sorted(signatures.items()):
        if hasattr(pool, name) and (got := offered(pool, name)) != expected:
            wrong.append(f"{name}: expected {expected}, got {got}")
    for use in found:
        wrong += _misuse(use, pool, grouped)
    return wrong


def _misuse(use: Use, pool: object, grouped: set[str]) -> Sequence[str]:
    of_group = use.owner in GROUPS and use.name in grouped
    if use.name in ELSEWHERE or (of_group and not hasattr(pool, use.name)):
        return []
    if of_group and {"pool", "reclaim"} & set(use.keywords):
        return []  # a call that only a group takes
    if not hasattr(pool, use.name):
        return [f"{use}: expected {use.name}, got no such name"]
    if use.positional is None:
        return []
    try:
        arguments: list[Any] = [None] * use.positional
        inspect.signature(getattr(pool, use.name)).bind(*arguments, **dict.fromkeys(use.keywords))
    except TypeError as error:
        return [f"{use}: expected a call of {use.name}{offered(pool, use.name)}, got: {error}"]
    return []
