"""A plan in, the Python that builds its pools out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from poolwright.codegen.plan.plan import Plan, Planned

PACKAGE = "poolwright.generated"
DEVICE = 'device = "cuda:0" if torch.cuda.is_available() else "cpu"'


def program(plan: Plan) -> str:
    """Python text that runs as it stands and leaves the pools of one rank in `pool`, `group` or `pools`."""
    lines = list(_body(plan))
    return "\n".join(lines) + "\n"


def _body(plan: Plan) -> Iterator[str]:
    classes = sorted({one.pool.class_name for one in plan.members})
    yield "import torch"
    yield from _import(classes)
    yield ""
    yield DEVICE
    if len(plan.members) == 1:
        yield from _pool("pool", plan.members[0], plan.asked.layout)
        return
    for one in plan.members:
        yield from _pool(one.member.name, one, plan.asked.layout)


def _import(names: Sequence[str]) -> Iterator[str]:
    if len(names) == 1:
        yield f"from {PACKAGE} import {names[0]}"
        return
    yield f"from {PACKAGE} import ("
    yield from (f"    {name}," for name in names)
    yield ")"


def _pool(name: str, one: Planned, layout: str) -> Iterator[str]:
    yield f"{name} = {one.pool.class_name}("
    yield from (f"    {key}={value}," for key, value in _arguments(one))
    if one.pool.has_tokens or one.pool.index.unit == "token":
        yield f"    page_size={one.page_size},"
    if one.pool.components:
        yield f'    layout="{layout}",'
    yield f"    capacity_pages={max(one.pages, 1)},"
    yield "    device=device,"
    yield ")"


def _arguments(one: Planned) -> Iterator[tuple[str, str]]:
    """What a member's sizes are, as keyword arguments."""
    for name, size in one.params.items():
        yield name, repr(list(size) if isinstance(size, tuple) else size)
    for group, dtype in one.dtypes.items():
        yield ("dtype" if len(one.dtypes) == 1 else f"{group}_dtype"), f"torch.{dtype}"
    for variant, choice in one.member.variants.items():
        yield variant, f'"{choice}"'
    lists = {c.layers for c in one.pool.components if c.layers is not None}
    yield from ((name, _ids(one.member.layers)) for name in sorted(lists))


def _ids(layers: Sequence[int]) -> str:
    """Layer ids as a range where they are one."""
    if len(layers) > 1:
        step = layers[1] - layers[0]
        found = range(layers[0], layers[-1] + 1, step) if step > 0 else range(0)
        if tuple(found) == tuple(layers):
            if step > 1:
                return f"range({layers[0]}, {layers[-1] + 1}, {step})"
            return f"range({layers[-1] + 1})" if layers[0] == 0 else f"range({layers[0]}, {layers[-1] + 1})"
    return repr(list(layers))
