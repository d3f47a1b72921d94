"""`codegen show`: a pool in, a picture of its device and host orders with byte offsets and strides out."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence

from poolwright.codegen import ir
from poolwright.codegen.commands import group_text
from poolwright.codegen.commands.bind import Bound, bind, values
from poolwright.codegen.commands.common import InputError, find_pool, lower_pools, read_spec, unknown
from poolwright.codegen.commands.picture import picture, text
from poolwright.codegen.project import find_project


def run(name: str, words: Sequence[str], *, layout: str | None, form: str | None, json: bool) -> int:
    """Print one picture for each variant, form and layout that is asked for."""
    specs = read_spec(find_project(), name)
    group = next((one for one in specs.groups if one.name == name), None)
    if group is not None:
        _refuse(group, bool(words or layout or form or json))
        print(*group_text.table(group, specs.pools), sep="\n")
        return 0
    pool = find_pool(specs, name)
    _known("layout", layout, [one.name for one in pool.layouts])
    _known("form", form, [one.name for one in pool.forms])
    bound = bind(pool, words)
    (lowered,) = lower_pools([pool], specs)
    programs = [p for p in lowered.programs if _wanted(p, bound, layout, form)]
    pictures = [picture(pool, p, values(pool, bound, p.variant)) for p in programs]
    if json:
        print(json_format.dumps({"set": list(words), "programs": pictures}, indent=2))
    else:
        print("\n".join(text(one, words, pictures[:n]) for n, one in enumerate(pictures)), end="")
    return 0


def _refuse(group: ir.Group, options: bool) -> None:
    if options:
        pools = ", ".join(dict.fromkeys(ref.pool for ref in group.pools))
        raise InputError(f"{group.name} is a group and takes no options; show its pools: {pools}")


def _known(kind: str, name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        raise InputError(unknown(kind, name, known))


def _wanted(program: ir.Program, bound: Bound, layout: str | None, form: str | None) -> bool:
    chosen = dict(program.variant)
    return (
        layout in (None, program.layout.name)
        and form in (None, program.form.name)
        and all(chosen[name] == choice for name, choice in bound.choices.items())
    )
