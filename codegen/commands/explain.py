"""`codegen explain`: a pool or a group in, its spec in words out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from poolwright.codegen import expr, ir
from poolwright.codegen.commands import group_text
from poolwright.codegen.commands.common import find_pool, lower_pools, read_spec
from poolwright.codegen.project import find_project

_INDEX = {
    "token": "One index addresses one token; page_size consecutive tokens are a page.",
    "page": "One index addresses one page row.",
    "slot": "One index addresses one slot; a slot is a page.",
    "request": "One index addresses one request; a request is a page.",
}
_UPDATES = {
    "append": "Rows are written once and then stay as they are.",
    "in_place": "Rows change in place, so a write-back has to read them before the next step writes.",
}


def run(name: str) -> int:
    """Print the explanation."""
    specs = read_spec(find_project(), name)
    group = next((one for one in specs.groups if one.name == name), None)
    if group is not None:
        print(*group_text.words(group, specs.pools), sep="\n")
        return 0
    pool = find_pool(specs, name)
    (lowered,) = lower_pools([pool], specs)
    for line in (*_head(pool), *_params(pool)):
        print(line)
    if pool.components:
        for line in (*_components(pool), *_forms(pool), *_layouts(lowered)):
            print(line)
    return 0


def _head(pool: ir.Pool) -> Iterator[str]:
    yield f"{pool.name} becomes the class {pool.class_name}. {pool.summary}"
    yield _INDEX[pool.index.unit]
    if pool.index.space is not None:
        row = "i" if pool.index.row is None else expr.to_text(pool.index.row)
        yield f"Indices i come from the index space {pool.index.space}; the row is {row}."
    yield _UPDATES[pool.updates] if pool.components else "It has no components: ids, and nothing to move."
    if pool.reserved:
        rows = ", ".join(map(str, pool.reserved))
        yield f"Device rows {rows} are reserved: never copied in either direction."
    if pool.valid_if is not None:
        yield f"A snapshot is valid if {pool.valid_if}."
    if pool.not_carried:
        yield f"Left in the engine's pool, not carried: {', '.join(pool.not_carried)}."
    if pool.tag:
        yield f"Part of the format tag beside the sizes: {', '.join(pool.tag)}."


def _params(pool: ir.Pool) -> Iterator[str]:
    yield ""
    yield "Parameters"
    for param in pool.params:
        yield f"  {param.name}: {_bounds(param)}"
    if pool.has_tokens:
        yield "  page_size: tokens of a page"
    for group, names in pool.dtypes:
        yield f"  dtype of {group}: {', '.join(names)}"
    for variant in pool.variants:
        yield f"  {variant.name}: one of {', '.join(choice for choice, _ in variant.choices)}"
    for cond in pool.require:
        yield f"  required: {expr.cond_to_text(cond)}"


def _bounds(param: ir.Param) -> str:
    if param.equals is not None:
        return f"computed, {expr.to_text(param.equals)}"
    what = "an integer" if param.length is None else f"{param.length} integers"
    default = "" if param.default is None else f", {param.default} when not given"
    least = "" if param.min is None else f", at least {param.min}"
    most = "" if param.max is None else f", at most {param.max}"
    choices = f", one of {', '.join(map(str, param.one_of))}" if param.one_of else ""
    return f"{what}{least}{most}{choices}{default}"


def _components(pool: ir.Pool) -> Iterator[str]:
    yield ""
    yield "Components"
    for component in pool.components:
        shape = " x ".join(f"{dim.name} ({expr.to_text(dim.size)})" for dim in component.dims) or "one item"
        yield f"  {component.name}: {shape} of {_storage(component.storage)}, {_rows(pool, component)}"
        if component.when is not None:
            yield f"    only when {expr.cond_to_text(component.when)}"
        if component.shard is not None:
            axes = ", ".join(f"{axis} over {ranks}" for axis, ranks in component.shard.axes)
            yield f"    split over ranks: {axes}; sizes are those of one rank"
    for record in pool.records:
        pad = expr.to_text(record.pad_to)
        yield f"  {record.name}: {', '.join(record.holds)} in one row, in multiples of {pad} bytes"


def _storage(storage: ir.Storage) -> str:
    name = f"the dtype chosen as {storage.group}" if storage.group is not None else str(storage.dtype)
    return name if storage.logical is None else f"{name} (holds {storage.logical})"


def _rows(pool: ir.Pool, component: ir.Component) -> str:
    row = "token" if pool.has_tokens and component.token else "page"
    layers = "no layers" if component.layers is None else f"each of {component.layers}"
    return f"one row a {row}, {layers}"


def _forms(pool: ir.Pool) -> Iterator[str]:
    yield ""
    yield "Device forms (the first is the default)"
    for form in pool.forms:
        tensors = f"a tensor for each {' and '.join(form.tensors)}" if form.tensors else "one tensor"
        yield f"  {form.name}: {tensors}, inside it {' > '.join(form.order)}"
        for axis in form.any_stride:
            yield f"    the stride of {axis} is read from the tensor at bind"
        if form.base is not None:
            yield f"    page 0 starts at row {expr.to_text(form.base)}"


def _layouts(lowered: ir.Lowered) -> Iterator[str]:
    yield ""
    yield "Host layouts, and what one page costs in each"
    for layout in lowered.pool.layouts:
        yield f"  {layout.name}: {' > '.join(layout.order)}"
        for program in lowered.programs:
            if program.layout == layout:
                yield f"    {_cost(program)}"


def _cost(program: ir.Program) -> str:
    name = " ".join([*(choice for _, choice in program.variant), program.form.name])
    atoms = "; ".join(_atoms(item) for item in program.items)
    return f"from {name}: {atoms}; storage and the copy engine see {_range_count(program)}"


def _atoms(item: ir.Item) -> str:
    walk = item.walks[0]
    if not walk.loops:
        return f"{item.name} is one copy"
    return f"{item.name} is a copy for each {' x '.join(axis.name for axis in walk.loops)}"


def _range_count(program: ir.Program) -> str:
    """Those with the same axes outside are told together; a side state has no layers, for one."""
    found = Counter(tuple(sorted({axis.name for axis, _ in one.left})) for one in program.ranges)
    texts = []
    for left, count in found.items():
        kinds = "one range" if count == 1 else f"{count} ranges"
        texts.append(f"{kinds} for each {' x '.join(left)}" if left else kinds)
    return " and ".join(texts)
