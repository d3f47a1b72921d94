"""Prepares a group for its templates: group.py, kernels.cu, host.cpp.

In: `ir.Group` and the lowered pools it names. Out: dictionaries of names and finished lines of text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poolwright.codegen import render_cpp, render_python
from poolwright.codegen.ir import Group, Lowered, Param, PoolRef
from poolwright.codegen.names import camel


@dataclass(frozen=True)
class Member:
    """A pool of the group, lowered. `index`: the member whose ids it takes."""

    ref: PoolRef
    lowered: Lowered
    index: str | None

    @property
    def name(self) -> str:
        return self.ref.name

    @property
    def moves(self) -> bool:
        """Whether the pool has bytes that kernels could move."""
        return bool(self.lowered.programs[0].items)

    @property
    def walks(self) -> list[str]:
        return render_cpp.walks(self.lowered)

    @property
    def parts(self) -> list[str]:
        """Its kernels."""
        return render_cpp.parts(self.walks, self.lowered.by_layer)

    @property
    def arguments(self) -> str:
        """Name of the class of its constructor's arguments."""
        return f"{camel(self.name)}Arguments"


def members(group: Group, pools: Mapping[str, Lowered]) -> list[Member]:
    return [
        Member(ref, pools[ref.pool], ref.index or pools[ref.pool].pool.index.space) for ref in group.pools
    ]


def class_name(group: Group) -> str:
    """The Python class of a group."""
    return f"{camel(group.name)}HostPoolGroup"


# ---- kernels.cu and host.cpp ------------------------------------------------------------------


def kernels_view(group: Group, pools: Mapping[str, Lowered]) -> dict[str, Any]:
    """What group_kernels.cu.jinja and group_host.cpp.jinja print."""
    moved = [member for member in members(group, pools) if member.moves]
    return {
        "group": group,
        "members": [_included(member) for member in moved],
        "kernels": [_kernel(part, moved) for part in parts(moved)],
    }


def parts(moved: Sequence[Member]) -> list[str]:
    """Kernels of the group: those of its pools. One for tokens takes members by page, too."""
    found = {part for member in moved for part in member.parts}
    order = ("pages", "tokens", "layer_pages", "layer_tokens")
    return [part for part in render_cpp.parts(order, ("write_back", "load")) if part in found]


def _included(member: Member) -> dict[str, Any]:
    names = ["PROGRAM", "CHOSEN", *render_cpp.inputs(member.lowered)]
    return {
        "name": member.name,
        "pool": member.ref.pool,
        "macros": [{"inside": f"PW_{name}", "outside": f"PW_{name}_OF_{member.name}"} for name in names],
        "present": f"PW_PROGRAM_OF_{member.name}",
        "only": f"ONLY_{member.name}",
    }


def _kernel(part: str, moved: Sequence[Member]) -> dict[str, Any]:
    layered = "_layer_" in part
    way = "WriteBack" if part.startswith("write_back") else "Load"
    # A pool's page that is cut on its way out is alone in its launch: others have no part in that kernel.
    only = [member for member in moved if way == "Load" or not layered or part in member.parts]
    lines = [_only(member, f"{_call(part, way, member)};") for member in only]
    lines = render_cpp.in_windows(lines) if layered else lines
    if only != moved:  # all of them may be switched off
        lines.insert(0, "(void)few;")
    tail = ["pw::Few few", *(render_cpp.STEPS.split(", ") if layered else [])]
    taken = []
    for m in moved:
        view, ids = (f" {m.name}_view", f" {m.name}_ids") if m in only else ("", "")
        taken.append(_only(m, f"PW_PARAM {m.name}::View{view}, PW_PARAM pw::Ids{ids},"))
    given = [_only(m, f"{m.name}_view, {m.name}_ids,") for m in moved]
    return {
        "name": part,
        "parameters": [*taken, "PW_PARAM " + ", ".join(tail)],
        "lines": lines,
        "read": [line for member in moved for line in _reads(member)] + _reads_rest(layered),
        "call": " ".join([*given, ", ".join(word.split()[-1] for word in tail)]),
    }


def _call(part: str, way: str, member: Member) -> str:
    """One member's moves in a kernel, by page or by token as its ids say."""
    step = "steps_" if "_layer_" in part else ""
    at = f", {member.name}_ids.window(n, {member.name}::columns, now), lane" if step else ""

    def move(unit: str, ids: str) -> str:
        name = ("lane = " if step else "") + f"{member.name}::move_{step}{unit}<pw::{way}>"
        return f"{name}({member.name}_view, {member.name}_ids.{ids}, {member.name}_ids.count{at})"

    pages = move("pages", "pages(few)")
    if step:  # a pool that has nothing in the launch has no steps either
        pages = f"if ({member.name}_ids.count != 0) {pages}"
    if not part.endswith("tokens") or "tokens" not in member.walks:
        return pages
    return f"if ({member.name}_ids.by_token) {move('tokens', 'tokens()')}; else {pages}"


def _only(member: Member, text: str) -> str:
    return f"ONLY_{member.name}({text})"


def _reads(member: Member) -> list[str]:
    """Lines that take a member's parameters from a launch that is played on the CPU."""
    name = member.name
    return [
        _only(member, f"const {name}::View& {name}_view = *(const {name}::View*)*params++;"),
        _only(member, f"const pw::Ids& {name}_ids = *(const pw::Ids*)*params++;"),
    ]


def _reads_rest(layered: bool) -> list[str]:
    few = "const pw::Few& few = *(const pw::Few*)params[0];"
    return [few, *(render_cpp.steps_read(1) if layered else [])]


# ---- group.py ---------------------------------------------------------------------------------


def group_view(group: Group, pools: Mapping[str, Lowered]) -> dict[str, Any]:
    """What group.py.jinja prints."""
    found = members(group, pools)
    classes = sorted({(member.ref.pool, member.lowered.pool.class_name) for member in found})
    parameters, arguments = _shape(group, found)
    fields = [_member(member) for member in found]
    lists = "Iterable" in str((fields, parameters))
    return {
        "group": group,
        "class_name": class_name(group),
        "summary": group.summary or f"The pools of {group.name}.",
        "classes": classes,
        "members": fields,
        "collections": ["Iterable", "Mapping"] if lists else ["Mapping"],
        "spec": _spec(group, found),
        "parameters": parameters,
        "arguments": arguments,
        "params": bool(group.params),
    }


def _member(member: Member) -> dict[str, Any]:
    pool = member.lowered.pool
    takes = f" Takes the ids of {member.index}." if member.index else ""
    return {
        "name": member.name,
        "class_name": pool.class_name,
        "arguments": member.arguments,
        "doc": f"What {member.name}, a pool {pool.name}, is built with.{takes}",
        "fields": _fields(member),
    }


def _fields(member: Member) -> list[str]:
    """The constructor's arguments of a pool that its group does not decide."""
    pool = member.lowered.pool
    fields = []
    for name, kind, default in render_python.shape(member.lowered):
        if name in dict(member.ref.params) or name == "page_size":
            continue
        if name == pool.layer_list and member.ref.layers is not None:
            continue
        fields.append(f"{name}: {kind}" if default is None else f"{name}: NotRequired[{kind}]")
    return fields


def _spec(group: Group, found: Sequence[Member]) -> list[str]:
    lines = [
        f'name="{group.name}",',
        f'source="{group.source}",',
        f'anchor="{group.anchor}",',
        "members={",
        *(f'    "{member.name}": {_member_spec(member)},' for member in found),
        "},",
    ]
    if group.budget:
        lines += ["budget={", *(f'    "{name}": {_amount(text)},' for name, text in group.budget), "},"]
    if group.params:
        lines += ["params=(", *(f"    {render_python.param(param)}," for param in group.params), "),"]
    kernels = parts([member for member in found if member.moves])
    return [*lines, f"parts={render_python.strings(kernels)},"]


def _member_spec(member: Member) -> str:
    ref = member.ref
    words = [member.lowered.pool.class_name]
    if ref.layers is not None:
        words.append(f'layers={{"{member.lowered.pool.layer_list}": "{ref.layers}"}}')
    words += [f'index="{member.index}"'] if member.index else []
    words += [f'hit="{ref.hit}"'] if ref.hit != "all_pages" else []
    words += [f'restore_with="{ref.restore_with}"'] if ref.restore_with else []
    if ref.params:
        entries = ", ".join(f'"{name}": {render_python.function(size)}' for name, size in ref.params)
        words.append(f"params={{{entries}}}")
    return f"MemberSpec({', '.join(words)})"


def _amount(text: str) -> str:
    return '"off"' if text == "off" else text


def _shape(group: Group, found: Sequence[Member]) -> tuple[list[str], list[str]]:
    """Parameters of the constructor that decide sizes, and how they are handed on."""
    lists = list(dict.fromkeys(member.ref.layers for member in found if member.ref.layers))
    by_token = [m for m in found if any(name == "page_size" for name, _, _ in render_python.shape(m.lowered))]
    parameters = [f"{p.name}: {_kind(p)}," for p in group.params]
    parameters += [f"{name}: Iterable[int]," for name in lists]
    needed = [m.name for m in found if m.name == group.anchor and any("NotReq" not in f for f in _fields(m))]
    parameters += [f"{member.name}: {member.arguments}," for member in found if member.name in needed]
    parameters += [
        f"{member.name}: {member.arguments} | None = None," for member in found if member.name not in needed
    ]
    parameters += ["page_size: int,"] if by_token else []
    arguments = [
        "sizes={" + ", ".join(f'"{p.name}": {p.name}' for p in group.params) + "},",
        "layers={" + ", ".join(f'"{name}": {name}' for name in lists) + "},",
        "members={" + ", ".join(f'"{member.name}": {member.name}' for member in found) + "},",
        "page_size=" + ("page_size," if by_token else "1,"),
    ]
    return parameters, arguments


def _kind(param: Param) -> str:
    return "int" if param.length is None else "Iterable[int]"
