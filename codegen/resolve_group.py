"""One group document in, `ir.Group` out: members checked against the pools that they name."""

from __future__ import annotations

import re
from collections.abc import Mapping

from poolwright.codegen import ir, schema
from poolwright.codegen.collect import Checks, check_params
from poolwright.codegen.expr import Expr
from poolwright.codegen.load import Document
from poolwright.codegen.names import argument_problem, camel, name_problem, shorten, suggest, text_problem
from poolwright.codegen.nodes import Path
from poolwright.codegen.scope import Scope

_WORDS = frozenset(
    # what a group's constructor takes and its class has beside its pools
    "sizes members device layout page_size capacity_bytes capacity_pages budget staging_bytes capture_bytes "
    "require hugepages pools spec alloc free available_size clear bind rebind write_back load "
    "path_report registered wait_registered destroy required_bytes "
    # names inside its kernels
    "few steps done params grid block".split()
)

_FRACTION = re.compile(r"0?\.[0-9]{1,9}|1\.0{1,9}")
_BYTES = re.compile(r"([0-9]{1,15}) ?(KiB|MiB|GiB|TiB|kB|MB|GB|TB|B)?")
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def resolve_group(document: Document[schema.Group], pools: Mapping[str, ir.Pool], stem: str) -> ir.Group:
    """The group of a document; `pools`: all pools of the project by name. Raises SpecErrors.

    A budget comes out as ``off``, a fraction (``0.7``) or bytes (``8589934592``).
    """
    spec, checks = document.value, Checks(document)
    _check_head(checks, spec, stem)
    check_params(checks, spec.params)
    lists = {name: param.list_ for name, param in spec.params.items() if param.list_ is not None}
    scope = Scope(document, frozenset(spec.params) - set(lists), lists)
    members = tuple(_member(checks, scope, name, member, pools) for name, member in spec.pools.items())
    _check_names(checks, spec)
    _check_links(checks, spec, pools)
    budget = _budget(checks, spec)
    params = tuple(_param(checks, scope, name, param) for name, param in spec.params.items())
    checks.finish()
    return ir.Group(spec.group, spec.summary or "", members, spec.anchor, budget, params, document.path)


def _check_head(checks: Checks, spec: schema.Group, stem: str) -> None:
    checks.name(("group",), name_problem(spec.group), key=False)
    if spec.group != stem:
        message = f"expected {stem!r}, the name of the file, got {shorten(spec.group)}: rename one of them"
        checks.name(("group",), message, key=False)
    if spec.summary is not None:
        checks.name(("summary",), text_problem(spec.summary), key=False)
    for name in spec.params:
        checks.name(("params", name), argument_problem(name))
    if not spec.pools:
        checks.name(("pools",), "expected at least one pool", key=False)
    elif spec.anchor not in spec.pools:
        message = (
            f"expected a pool of this group, got {shorten(spec.anchor)}{suggest(spec.anchor, spec.pools)}"
        )
        checks.name(("anchor",), message, key=False)


def _check_names(checks: Checks, spec: schema.Group) -> None:
    """Pools, parameters and layer lists are arguments of one constructor, pools attributes of one class."""
    lists = [member.layers for member in spec.pools.values()]
    classes: dict[str, str] = {}
    for name in spec.pools:
        _check_word(checks, ("pools", name), name)
        if name in spec.params or name in lists:
            checks.name(("pools", name), f"{name!r} is also a parameter or a layer list: take another name")
        other = classes.setdefault(camel(name), name)
        if other != name:
            message = f"{name!r} and {other!r} are both {camel(name)} in generated code: rename one"
            checks.name(("pools", name), message)
    for name, member in spec.pools.items():
        if member.layers is not None:
            _check_word(checks, ("pools", name, "layers"), member.layers, key=False)
    for name in spec.params:
        _check_word(checks, ("params", name), name)
        if name in lists:
            checks.name(("params", name), f"{name!r} is also a layer list: take another name")


def _check_word(checks: Checks, path: Path, name: str, *, key: bool = True) -> None:
    if name in _WORDS:
        checks.name(path, f"{name!r} is a word of every group: take another name", key=key)


def _param(checks: Checks, scope: Scope, name: str, param: schema.Param) -> ir.Param:
    equals: Expr | None = None
    if param.equals is not None:
        with checks.part():
            checks.fail(("params", name, "equals"), "parameters of a group are given, not computed", key=True)
    if param.default is not None:
        with checks.part():
            checks.fail(("params", name, "default"), "parameters of a group are given: remove it", key=True)
    free = param.min is None and param.one_of is None
    return ir.Param(name, 0 if free else param.min, param.max, tuple(param.one_of or ()), equals, param.list_)


def _member(
    checks: Checks, scope: Scope, name: str, member: schema.Member, pools: Mapping[str, ir.Pool]
) -> ir.PoolRef:
    at: Path = ("pools", name)
    checks.name(at, name_problem(name))
    params: list[tuple[str, Expr]] = []
    with checks.part():
        if member.layers is not None and (problem := argument_problem(member.layers)) is not None:
            checks.fail((*at, "layers"), problem)
        if member.pool not in pools:
            checks.fail((*at, "pool"), f"unknown pool {shorten(member.pool)}{suggest(member.pool, pools)}")
        params = _member_params(checks, scope, at, member, pools[member.pool])
        _check_layers(checks, at, member, pools[member.pool])
    return ir.PoolRef(
        name, member.pool, member.layers, member.index, member.hit, member.restore_with, tuple(params)
    )


def _check_layers(checks: Checks, at: Path, member: schema.Member, pool: ir.Pool) -> None:
    if member.layers is not None and pool.layer_list is None:
        known = ", ".join(sorted({c.layers for c in pool.components if c.layers is not None}))
        message = (
            f"pool {pool.name!r} has several layer lists ({known}): leave `layers` out, give them at run time"
        )
        checks.fail((*at, "layers"), message)


def _member_params(
    checks: Checks, scope: Scope, at: Path, member: schema.Member, pool: ir.Pool
) -> list[tuple[str, Expr]]:
    known = {param.name: param for param in pool.params}
    result = []
    for name, text in member.params.items():
        path: Path = (*at, "params", name)
        if name not in known:
            checks.fail(
                path, f"pool {pool.name!r} has no parameter {shorten(name)}{suggest(name, known)}", key=True
            )
        if known[name].equals is not None:
            checks.fail(
                path, f"parameter {name!r} of pool {pool.name!r} is computed and cannot be given", key=True
            )
        if known[name].length is not None:
            checks.fail(
                path, f"parameter {name!r} of pool {pool.name!r} is a list and is given at run time", key=True
            )
        result.append((name, scope.size(path, text)))
    return result


def _check_links(checks: Checks, spec: schema.Group, pools: Mapping[str, ir.Pool]) -> None:
    for name, member in spec.pools.items():
        at: Path = ("pools", name)
        for key, target in (("index", member.index), ("restore_with", member.restore_with)):
            if target is not None and (target not in spec.pools or target == name):
                others = [other for other in spec.pools if other != name]
                message = (
                    f"expected another pool of this group, got {shorten(target)}{suggest(target, others)}"
                )
                checks.name((*at, key), message, key=False)
        space = pools[member.pool].index.space if member.pool in pools else None
        if space is not None and member.index is None and space not in spec.pools:
            message = (
                f"pool {member.pool!r} takes the indices of {space!r}: name a pool so, or write index: NAME"
            )
            checks.name(at, message)
        source = spec.pools.get(member.index or space or "")
        if source is not None and {member.pool, source.pool} <= set(pools):
            if _has_pages(pools[member.pool]) != _has_pages(pools[source.pool]):
                message = (
                    "one of the two has pages of tokens, the other has not: their ids mean different things"
                )
                checks.name(at, message)
        if (space is not None or member.index is not None) and name == spec.anchor:
            checks.name(at, "the anchor has indices of its own, this pool takes them from another")
    if not checks.errors:
        _check_cycles(checks, spec, pools, "index")
        _check_cycles(checks, spec, pools, "restore_with")


def _has_pages(pool: ir.Pool) -> bool:
    """Whether the ids of a pool are tokens, of which `page_size` make a page."""
    return pool.has_tokens or pool.index.space is not None


def _check_cycles(checks: Checks, spec: schema.Group, pools: Mapping[str, ir.Pool], key: str) -> None:
    def following(name: str) -> str | None:
        member = spec.pools[name]
        if key == "restore_with":
            return member.restore_with
        return member.index or pools[member.pool].index.space

    for name in spec.pools:
        seen, at = [name], following(name)
        while at is not None and at not in seen:
            seen.append(at)
            at = following(at)
        if at is not None:
            path: Path = ("pools", name)
            chain = " -> ".join([*seen, at])
            checks.name(
                (*path, key) if getattr(spec.pools[name], key) else path, f"a circle: {chain}", key=False
            )
            return


def _budget(checks: Checks, spec: schema.Group) -> tuple[tuple[str, str], ...]:
    result: list[tuple[str, str]] = []
    with checks.part():
        for name, text in spec.budget.items():
            if name not in spec.pools:
                message = f"expected a pool of this group, got {shorten(name)}{suggest(name, spec.pools)}"
                checks.fail(("budget", name), message, key=True)
            result.append((name, _amount(checks, ("budget", name), text)))
        if result:
            _check_budget(checks, spec, dict(result))
    return tuple(result)


def _amount(checks: Checks, path: Path, text: str) -> str:
    if text == "off" or (_FRACTION.fullmatch(text) and float(text) > 0):
        return text if text == "off" else str(float(text))
    found = _BYTES.fullmatch(text)
    if found is None or int(found[1]) == 0:
        message = f"expected a fraction such as 0.7, bytes such as 8 GiB, or off, got {shorten(text)}"
        checks.fail(path, message)
    return str(int(found[1]) * _UNITS[found[2] or "B"])


def _check_budget(checks: Checks, spec: schema.Group, budget: Mapping[str, str]) -> None:
    left = [name for name in spec.pools if name not in budget]
    if left:
        checks.fail(
            ("budget",), f"no budget for pool {left[0]!r}: a budget names every pool (off switches one off)"
        )
    fractions = {name for name, text in budget.items() if "." in text or "e" in text}
    amounts = {name for name, text in budget.items() if text != "off"} - fractions
    if fractions and amounts:
        checks.fail(("budget", min(amounts)), "fractions and bytes are mixed: write all of them one way")
    if not fractions | amounts:
        checks.fail(("budget",), "every pool is off: at least one needs a budget")
    if sum(float(budget[name]) for name in fractions) > 1 + 1e-9:
        checks.fail(("budget",), "the fractions add up to more than 1")
    if budget[spec.anchor] == "off" if spec.anchor in budget else False:
        checks.fail(
            ("budget", spec.anchor), "the anchor cannot be off: the indices of the others derive from it"
        )
