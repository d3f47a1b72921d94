"""A lowered program and values in, plain data of where its bytes lie out (ready for JSON), and its text."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from poolwright.codegen import expr, ir
from poolwright.codegen.commands.bind import resolve
from poolwright.codegen.expr import Expr

WIDTHS = (16, 8, 4, 2, 1)
EXAMPLES = 4
AT_BIND = "read at bind"

Known = Mapping[str, Expr]


def picture(pool: ir.Pool, program: ir.Program, known: Known) -> dict[str, Any]:
    """Where everything of one program lies. Sizes are bytes: integers, or text where they stay symbolic."""
    return {
        "pool": pool.name,
        "variant": dict(program.variant),
        "form": program.form.name,
        "layout": program.layout.name,
        "page_bytes": resolve(program.page_bytes, known),
        "host_bytes": resolve(program.host_bytes, known),
        "ranges": [_range(one, known) for one in program.ranges],
        "components": [_item(item, known) for item in program.items],
    }


def _range(one: ir.Range, known: Known) -> dict[str, Any]:
    left = [
        {"axis": axis.name, "extent": resolve(axis.extent, known), "stride": resolve(stride, known)}
        for axis, stride in one.left
    ]
    base, nbytes = resolve(one.base, known), resolve(one.nbytes, known)
    return {"component": one.item, "base": base, "bytes": nbytes, "repeats": left}


def _item(item: ir.Item, known: Known) -> dict[str, Any]:
    host, device = _side(item.host, known), _side(item.device, known)
    walks = [_walk(walk, known) for walk in item.walks]
    return {
        "name": item.name,
        "itemsize": resolve(item.itemsize, known),
        "when": None if item.present is None else expr.cond_to_text(item.present),
        "absent": _absent(item, known),
        "device": device,
        "host": host,
        "walks": walks,
        "first_copies": [] if _absent(item, known) else _first_copies(walks[0], host, device),
    }


def _absent(item: ir.Item, known: Known) -> bool:
    """Whether these values compile the component out: its `when` is false, or an extent is 0."""
    extents = [resolve(axis.extent, known) for axis in item.host.axes]
    return 0 in extents or known.get(f"present_{item.ident}") == expr.ZERO


def _side(side: ir.Side, known: Known) -> dict[str, Any]:
    axes = [
        {
            "axis": axis.name,
            "extent": resolve(axis.extent, known),
            "stride": AT_BIND if stride.value is None else resolve(stride.value, known),
        }
        for axis, stride in zip(side.axes, side.strides, strict=True)
    ]
    tensors = [{"axis": axis.name, "extent": resolve(axis.extent, known)} for axis in side.table]
    return {"tensors": tensors, "base": resolve(side.base, known), "axes": axes}


def _walk(walk: ir.Walk, known: Known) -> dict[str, Any]:
    grain = resolve(walk.grain, known)
    width = next(w for w in WIDTHS if grain % w == 0) if isinstance(grain, int) else None
    return {
        "name": walk.name,
        "ids": list(walk.outer),
        "loops": [axis.name for axis in walk.loops],
        "atom": [axis.name for axis in walk.atom],
        "atom_bytes": resolve(walk.atom_bytes, known),
        "atoms": resolve(walk.runs, known),
        "grain": grain,
        "vector_width": width,
    }


def _first_copies(walk: dict[str, Any], host: dict[str, Any], device: dict[str, Any]) -> list[dict[str, Any]]:
    """The first atoms of page 0 in host order; empty while any number that they need is symbolic."""
    extents = {axis["axis"]: axis["extent"] for axis in host["axes"]}
    loops = [extents[name] for name in walk["loops"]]
    numbers = [*loops, host["base"], device["base"], walk["atom_bytes"]]
    steps = [_steps(side, walk["loops"]) for side in (host, device)]
    if not all(isinstance(number, int) for number in (*numbers, *steps[0].values(), *steps[1].values())):
        return []
    copies = []
    for index in itertools.islice(itertools.product(*map(range, loops)), EXAMPLES):
        at = dict(zip(walk["loops"], index, strict=True))
        tensor = {axis["axis"]: at[axis["axis"]] for axis in device["tensors"] if axis["axis"] in at}
        copies.append(
            {
                "at": at,
                "host": host["base"] + sum(at[a] * s for a, s in steps[0].items()),
                "tensor": tensor,
                "device": device["base"] + sum(at[a] * s for a, s in steps[1].items()),
            }
        )
    return copies


def _steps(side: dict[str, Any], loops: Sequence[str]) -> dict[str, Any]:
    return {axis["axis"]: axis["stride"] for axis in side["axes"] if axis["axis"] in loops}


# ---- text -------------------------------------------------------------------------------------


def text(data: dict[str, Any], words: Sequence[str], above: Sequence[dict[str, Any]] = ()) -> str:
    """The picture as lines for a terminal; `words` are the values it was drawn with, `above` the pictures
    printed before it, whose device sides are not printed again."""
    variant = "".join(f", {name} {choice}" for name, choice in data["variant"].items())
    lines = [f"{data['pool']}{variant}: form {data['form']}, layout {data['layout']}"]
    lines.append(f"  with {' '.join(words)}" if words else "  symbolic; give numbers with --set name=value")
    kinds = "1 kind" if len(data["ranges"]) == 1 else f"{len(data['ranges'])} kinds"
    lines.append(f"  one page: {data['page_bytes']} bytes on the host, {kinds} of range")
    for one in data["ranges"]:
        times = "".join(f", for each of {r['extent']} {r['axis']} (+{r['stride']})" for r in one["repeats"])
        lines.append(
            f"    {one['component'] or 'all'}: {one['bytes']} bytes at {one['base']} + page * bytes{times}"
        )
    alike = [one for one in above if (one["form"], one["variant"]) == (data["form"], data["variant"])]
    for at, item in enumerate(data["components"]):
        sides = {str(one["components"][at]["device"]): one["layout"] for one in reversed(alike)}
        lines += ["", *_item_lines(item, sides.get(str(item["device"])))]
    return "\n".join(lines) + "\n"


def _item_lines(item: dict[str, Any], same: str | None) -> list[str]:
    """`same`: the layout above whose device side is this one's, too."""
    when = "" if item["when"] is None else f", only when {item['when']}"
    if item["absent"]:
        return [f"  {item['name']}: absent with these values{when}"]
    lines = [f"  {item['name']}: items of {item['itemsize']} bytes{when}"]
    lines += [f"    device: as in layout {same}, above"] if same else _side_lines("device", item["device"])
    lines += _side_lines("host", item["host"])
    lines += [_walk_line(walk) for walk in item["walks"]]
    if item["first_copies"]:
        lines.append("    first copies of page 0 (host byte, device byte):")
        lines += [_copy_line(copy) for copy in item["first_copies"]]
    return lines


def _side_lines(name: str, side: dict[str, Any]) -> list[str]:
    tensors = "".join(f", a tensor for each {t['axis']} ({t['extent']})" for t in side["tensors"])
    lines = [f"    {name}, starts at byte {side['base']}{tensors}"]
    width = max((len(axis["axis"]) + 2 * depth for depth, axis in enumerate(side["axes"])), default=0)
    for depth, axis in enumerate(side["axes"]):
        label = f"{'  ' * depth}{axis['axis']}"
        lines.append(f"      {label:{width}}  x {axis['extent']}, stride {axis['stride']}")
    return lines


def _walk_line(walk: dict[str, Any]) -> str:
    loops = f"loops {' > '.join(walk['loops'])}" if walk["loops"] else "no loop"
    atom = " ".join(walk["atom"]) or "one item"
    width = walk["vector_width"]
    divided = "them" if walk["grain"] == walk["atom_bytes"] else walk["grain"]
    vector = f"vectors of {width}" if width is not None else f"vectors that divide {divided}"
    size = f"atoms {walk['atoms']}, each {walk['atom_bytes']} bytes"
    return f"    by {walk['name']}: {size} ({atom}), {loops}, {vector}"


def _copy_line(copy: dict[str, Any]) -> str:
    at = " ".join(f"{axis}={index}" for axis, index in copy["at"].items()) or "whole page"
    tensor = "".join(f" of {axis} {index}" for axis, index in copy["tensor"].items())
    return f"      {copy['host']:>12}  {copy['device']:>12}{tensor}   {at}"
