"""A plan in, the Python that builds its pools out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from poolwright.codegen import ir, render_cpp, render_group, render_python
from poolwright.codegen.plan import staging
from poolwright.codegen.plan.plan import Plan, Planned

PACKAGE = "poolwright.generated"
Argument = tuple[str, str]
Nested = tuple[str, Sequence[Argument]]
"""An argument that is a dictionary of its own."""

DEVICE = 'device = "cuda:0" if torch.cuda.is_available() else "cpu"'


def program(plan: Plan) -> str:
    """Python text that runs as it stands and leaves one rank's `group`, `pool`, or pools by member name."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    names = sorted({one.pool.class_name for one in plan.members})
    yield "import torch"
    yield from _import(names if plan.group is None else [render_group.class_name(plan.group)])
    yield ""
    yield DEVICE
    if plan.group is not None:
        yield from _group(plan, plan.group)
        return
    for one in plan.members:
        name = "pool" if len(plan.members) == 1 else one.member.name
        yield from _call(name, one.pool.class_name, _pool(plan, one))


def _import(names: Sequence[str]) -> Iterator[str]:
    if len(names) == 1:
        yield f"from {PACKAGE} import {names[0]}"
        return
    yield f"from {PACKAGE} import ("
    yield from (f"    {name}," for name in names)
    yield ")"


def _call(name: str, class_name: str, arguments: Sequence[Argument | Nested]) -> Iterator[str]:
    yield f"{name} = {class_name}("
    for key, value in arguments:
        if isinstance(value, str):
            yield f"    {key}={value},"
            continue
        entries = [f'"{inner}": {each}' for inner, each in value]
        if len(entries) < 3:
            yield f"    {key}={{{', '.join(entries)}}},"
        else:
            yield f"    {key}={{"
            yield from (f"        {entry}," for entry in entries)
            yield "    },"
    yield ")"


def _pool(plan: Plan, one: Planned) -> list[Argument]:
    """Arguments of a pool of its own."""
    found = _sizes(one, one.page_size)
    return [*found, ("capacity_pages", str(one.pages)), *_staging(plan), ("device", "device")]


def _staging(plan: Plan) -> list[Argument]:
    """The bound of staging memory, where the default is too small."""
    bound = staging.bound_of(plan)
    return [] if bound == staging.BOUND else [("staging_bytes", str(bound))]


def _group(plan: Plan, group: ir.Group) -> Iterator[str]:
    """The call of a group: layer lists by name, each pool's sizes as a dict, pages where ids are its own."""
    refs = {ref.name: ref for ref in group.pools}
    lists: dict[str, str] = {}
    members: list[Nested] = []
    pages: list[Argument] = []
    for one in plan.members:
        ref = refs[one.member.name]
        fixed = {"page_size", "layout", *(name for name, _ in ref.params)}
        if ref.layers is not None:
            lists[ref.layers] = _ids(one.member.layers)
            fixed.add("layers")
        members.append((ref.name, [pair for pair in _sizes(one, plan.page_size) if pair[0] not in fixed]))
        if ref.index is None and one.pool.index.space is None:
            pages.append((ref.name, str(one.pages)))
    common = [("page_size", str(plan.page_size)), ("layout", f'"{plan.asked.layout}"')]
    arguments: list[Argument | Nested] = [*lists.items(), *members, *common]
    arguments += [("capacity_pages", pages), *_staging(plan), ("device", "device")]
    yield from _call("group", render_group.class_name(group), arguments)


def _sizes(one: Planned, page_size: int) -> list[Argument]:
    """What the constructor of a member's class takes to know its sizes, in its order."""
    dtypes = render_python.dtype_arguments(one.pool)
    known = {name: repr(list(size) if isinstance(size, tuple) else size) for name, size in one.params.items()}
    known |= {argument: f"torch.{one.dtypes[group]}" for argument, group in dtypes}
    known |= {variant: f'"{choice}"' for variant, choice in one.member.variants.items()}
    known |= {"page_size": str(page_size), "layout": f'"{one.size.program.layout.name}"'}
    known |= dict.fromkeys(render_cpp.layer_lists(one.lowered), _ids(one.member.layers))
    names = [name for name, _, _ in render_python.shape(one.lowered)]
    return [(name, known[name]) for name in names if name in known]


def _ids(layers: Sequence[int]) -> str:
    """Layer ids as a range where they are one."""
    if len(layers) < 2:
        return repr(list(layers))
    first, step = layers[0], layers[1] - layers[0]
    if step < 1 or tuple(range(first, layers[-1] + 1, step)) != tuple(layers):
        return repr(list(layers))
    if step > 1:
        return f"range({first}, {layers[-1] + 1}, {step})"
    return f"range({first}, {layers[-1] + 1})" if first else f"range({layers[-1] + 1})"
