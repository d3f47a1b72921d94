"""Prepares the Python side of a pool for its template: pool.py.

In: `ir.Lowered`. Out: dictionaries of finished lines. The formulas are those of layout.h through the
other printer; a pool compares both when it is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from poolwright.codegen import expr, lower, render_cpp
from poolwright.codegen.expr import Expr
from poolwright.codegen.ir import Form, Item, Layout, Lowered, Param, Pool, Program, Variant
from poolwright.codegen.render_cpp import name_of

DESCRIPTION = (
    *("Component", "DevicePart", "Form", "HostLayout", "HostPart", "Layout", "PageRanges", "Param"),
    *("PoolSpec", "Program", "Record", "Shared", "Walk", "align_up", "gcd"),
)
ALWAYS = ("DevicePart", "HostLayout", "PoolSpec", "Walk")
"""Names that every pool.py takes from the runtime; of DESCRIPTION it imports only those it uses."""


def py(value: Expr) -> str:
    return expr.to_python(value, name=name_of)


def pool_view(lowered: Lowered) -> dict[str, Any]:
    """What pool.py.jinja prints."""
    pool = lowered.pool
    view = {
        "pool": pool,
        "families": [_family(lowered, choice) for choice in lower.choices(pool)],
        "layouts": [_layout(lowered, layout) for layout in pool.layouts],
        "forms": [_form(lowered, form) for form in pool.forms],
        "programs": [_program(program) for program in _symbolic(lowered)],
        "spec": _spec(lowered),
        "doc": _doc(pool),
        "init": _init(lowered),
        "required": _required(lowered),
        "staging": _staging(lowered),
    }
    text = str(view)
    view["iterable"] = "Iterable[" in text
    view["imports"] = [name for name in DESCRIPTION if f"{name}(" in text or name in ALWAYS]
    return view


def _symbolic(lowered: Lowered) -> list[Program]:
    """One program per form and layout: their formulas are the same for every variant."""
    first = lowered.programs[0].variant
    return [program for program in lowered.programs if program.variant == first]


# ---- formulas ---------------------------------------------------------------------------------


class _Formulas:
    """The lines of one function: sizes it takes, names it gives to sizes it uses often, what it returns.

    `steps`: names that may be given, each made of sizes and of names before it.
    """

    def __init__(self, steps: Sequence[tuple[str, Expr]]) -> None:
        self._names: dict[Expr, Expr] = {}
        self._values: dict[str, Expr] = {}
        for name, value in steps:
            if isinstance(value, expr.Op) and value not in self._names:
                self._values[name] = expr.abbreviate(value, self._names)
                self._names[value] = expr.symbol(name)
        self._used: set[str] = set()

    def text(self, value: Expr) -> str:
        """The value in names and sizes."""
        short = expr.abbreviate(value, self._names)
        self._use(short)
        return py(short)

    def _use(self, value: Expr) -> None:
        for name in expr.symbols(value) - self._used:
            self._used.add(name)
            if name in self._values:
                self._use(self._values[name])

    def lines(self) -> list[str]:
        """Assignments of the names that were used."""
        return [f"{name} = {py(value)}" for name, value in self._values.items() if name in self._used]

    def sizes(self) -> list[str]:
        """The sizes that all of it is made of."""
        return sorted(name_of(name) for name in self._used - set(self._values) - {"pages"})


def _parameters(sizes: Sequence[str], *first: str) -> str:
    """Parameters of a function of sizes; it is called with all sizes there are."""
    star = ["*"] if sizes else []
    return ", ".join([*first, *star, *(f"{name}: int" for name in sizes), "**_: int"])


def family_function(choice: Sequence[tuple[str, str]]) -> str:
    return "_".join(filter(None, ["extents", render_cpp.family_name(choice)]))


def _family(lowered: Lowered, choice: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    filled = lower.specialise(lowered.pool, choice)
    values = lower.extents(filled)
    conditions = [(f"present_{c.ident}", c.when) for c in filled.components if c.when is not None]
    named = {name for name, _ in (*values, *conditions)}
    used = {s for _, v in values for s in expr.symbols(v)} | {
        s for _, c in conditions for s in expr.symbols(c)
    }
    lines = [f"{name} = int({expr.cond_to_python(c, name=name_of)})" for name, c in conditions]
    lines += [f"{name} = {py(value)}" for name, value in values if name in used]
    entries = [
        f'"{name}": {name if name in used else py(value)},'
        for name, value in (*((n, expr.symbol(n)) for n, _ in conditions), *values)
    ]
    lines += ["return {", *(f"    {entry}" for entry in entries), "}"] if entries else ["return {}"]
    of = f" in variant {', '.join(value for _, value in choice)}" if choice else ""
    sizes = sorted(name_of(name) for name in used - named)
    return {
        "function": family_function(choice),
        "of": of,
        "parameters": _parameters(sizes),
        "lines": lines,
    }


def _layout(lowered: Lowered, layout: Layout) -> dict[str, Any]:
    program = next(p for p in lowered.programs if p.layout is layout)
    said = _Formulas(program.steps)
    lines = [
        "return HostLayout(",
        f"    nbytes={said.text(program.host_bytes)},",
        f"    page_bytes={said.text(program.page_bytes)},",
        "    parts=(",
        *(line for item in program.items for line in _host_part(said, item)),
        "    ),",
        "    ranges=(",
    ]
    for item_range in program.ranges:
        left = ", ".join(f"({said.text(axis.extent)}, {said.text(step)})" for axis, step in item_range.left)
        name = "None" if item_range.item is None else f'"{item_range.item}"'
        comma = "," if len(item_range.left) == 1 else ""
        lines.append(
            f"        PageRanges({name}, base={said.text(item_range.base)}, left=({left}{comma}), "
            f"nbytes={said.text(item_range.nbytes)}),"
        )
    lines += ["    ),", ")"]
    return {
        "function": f"host_{layout.name}",
        "name": layout.name,
        "order": f"[{', '.join(layout.order)}]",
        "parameters": _parameters(said.sizes(), "pages: int"),
        "lines": [*said.lines(), *lines],
    }


def _host_part(said: _Formulas, item: Item) -> list[str]:
    lines = [f'        HostPart("{item.ident}", base={said.text(item.host.base)}, axes=(']
    for axis, stride in zip(item.host.axes, item.host.strides, strict=True):
        assert stride.value is not None
        extent = "pages" if axis.name == "page" else said.text(axis.extent)
        lines.append(f'            ("{axis.name}", {extent}, {said.text(stride.value)}),')
    return [*lines, "        )),"]


def device_steps(item: Item) -> list[tuple[str, Expr]]:
    """Names of an item's constant strides on the device, innermost first."""
    strides = reversed(item.device.strides)
    return [(f"device_{item.ident}_{s.axis}", s.value) for s in strides if s.value is not None]


def _form(lowered: Lowered, form: Form) -> dict[str, Any]:
    program = next(p for p in lowered.programs if p.form is form)
    said = _Formulas([step for item in program.items for step in device_steps(item)])
    lines = ["return ("]
    for item in program.items:
        side = item.device
        table = f", table={said.text(side.table[0].extent)}" if side.table else ""
        if side.inner is not None:
            block = [] if side.block is None else [said.text(side.base), said.text(side.block)]
            table += f", shared=Shared({', '.join([str(side.inner), *block])})"
        lines.append(f'    DevicePart("{item.ident}"{table}, axes=(')
        for axis, stride in zip(side.axes, side.strides, strict=True):
            extent = "None" if axis.name == "page" else said.text(axis.extent)
            step = "None" if stride.value is None else said.text(stride.value)
            lines.append(f'        ("{axis.name}", {extent}, {step}),')
        lines.append("    )),")
    lines.append(")")
    return {
        "function": f"device_{form.name}",
        "name": form.name,
        "order": f"tensors [{', '.join(form.tensors)}], each [{', '.join(form.order)}]",
        "parameters": _parameters(said.sizes()),
        "lines": [*said.lines(), *lines],
    }


def _program(program: Program) -> dict[str, Any]:
    atoms = [(f"atom_{i.ident}_{w.name}", w.atom_bytes) for i in program.items for w in i.walks]
    said = _Formulas([*atoms, *program.steps, *(s for item in program.items for s in device_steps(item))])
    lines = ["return ("]
    for item in program.items:
        for walk in item.walks:
            lines.append(
                f'    Walk("{item.ident}", "{walk.name}", atom={said.text(walk.atom_bytes)}, '
                f"runs={said.text(walk.runs)}, grain={said.text(walk.grain)}),"
            )
    lines.append(")")
    return {
        "function": f"walks_{program.form.name}_{program.layout.name}",
        "form": program.form.name,
        "layout": program.layout.name,
        "parameters": _parameters(said.sizes()),
        "lines": [*said.lines(), *lines],
    }


# ---- the spec as data -------------------------------------------------------------------------


def strings(values: Iterable[str]) -> str:
    items = [f'"{value}"' for value in values]
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _spec(lowered: Lowered) -> list[str]:
    pool = lowered.pool
    held = {name for record in pool.records for name in record.holds}
    lines = [
        f'name="{pool.name}",',
        f'source="{pool.source}",',
        f'unit="{pool.index.unit}",',
        f'updates="{pool.updates}",',
    ]
    lines += ["params=(", *(f"    {param(p)}," for p in pool.params), "),"]
    lines += ["dtypes={", *(f'    "{name}": {strings(allowed)},' for name, allowed in pool.dtypes), "},"]
    lines.append("components=(")
    for c in pool.components:
        size = f'group="{c.storage.group}"' if c.storage.group else f'dtype="{c.storage.dtype}"'
        dims = strings(dim.name for dim in _split(pool, c.dims))
        extra = "" if c.layers == "layers" else f", layers={c.layers!r}".replace("'", '"')
        extra += "" if c.token else ", token=False"
        extra += "" if c.when is None else f', present="present_{c.ident}"'
        extra += "" if c.align is None else f", align={function(c.align)}"
        extra += ", held=True" if c.name in held else ""
        lines.append(f'    Component("{c.name}", "{c.ident}", dims={dims}, {size}{extra}),')
    lines += ["),", "records=("]
    lines += [f"    {_record(pool, i)}," for i in range(len(pool.records))]
    lines += ["),", "forms={"]
    for f in pool.forms:
        extra = f", any_stride={strings(f.any_stride)}" if f.any_stride else ""
        extra += f", base={function(f.base)}" if f.base is not None else ""
        lines.append(
            f'    "{f.name}": Form({strings(f.tensors)}, {strings(f.order)}, device_{f.name}{extra}),'
        )
    lines += ["},", "layouts={"]
    lines += [f'    "{y.name}": Layout({strings(y.order)}, host_{y.name}),' for y in pool.layouts]
    lines += ["},", "programs={"]
    lines += [
        f'    ("{p.form.name}", "{p.layout.name}"): Program("{render_cpp.local_name(p)}", '
        f"walks_{p.form.name}_{p.layout.name}, tokens={p.token_walk}, cuts={p.cuts}),"
        for p in _symbolic(lowered)
    ]
    lines += ["},", "extents={"]
    for choice in lower.choices(pool):
        lines.append(f"    {strings(value for _, value in choice)}: {family_function(choice)},")
    lines.append("},")
    kernels = render_cpp.parts(render_cpp.walks(lowered), lowered.by_layer) if pool.components else []
    lines.append(f"parts={strings(kernels)},")
    lines.append(f"layer_lists={strings(render_cpp.layer_lists(lowered))},")
    lines += _rest(pool)
    return lines


def _split(pool: Pool, dims: Any) -> Any:
    from poolwright.codegen.algebra import split_dims

    return split_dims(pool, dims)


def _rest(pool: Pool) -> list[str]:
    lines = []
    if pool.variants:
        lines += ["variants={", *(f"    {line}" for v in pool.variants for line in _variant(v)), "},"]
    if pool.splits:
        pairs = ", ".join(f'"{name}": {strings(d.name for d in parts)}' for name, parts in pool.splits)
        lines.append(f"splits={{{pairs}}},")
    if pool.require:
        names = sorted({n for c in pool.require for n in expr.symbols(c)})
        arguments = ", ".join(name_of(n) for n in names)
        lines.append("require=(")
        for cond in pool.require:
            text = expr.cond_to_python(cond, name=name_of)
            lines.append(f'    ("{text}", {strings(name_of(n) for n in names)}, lambda {arguments}: {text}),')
        lines.append("),")
    for name, values in (("reserved", pool.reserved), ("not_carried", pool.not_carried), ("tag", pool.tag)):
        if values:
            shown = ", ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in values)
            lines.append(f"{name}=({shown}{',' if len(values) == 1 else ''}),")
    if pool.valid_if is not None:
        lines.append(f'valid_if="{pool.valid_if}",')
    return lines


def _variant(variant: Variant) -> list[str]:
    lines = [f'"{variant.name}": {{']
    for choice, constants in variant.choices:
        sizes = ", ".join(f'"{name}": {value}' for name, value in constants if isinstance(value, int))
        lines.append(f'    "{choice}": {{{sizes}}},')
    return [*lines, "},"]


def function(value: Expr) -> str:
    """Names of sizes and a function of them."""
    names = [name_of(name) for name in sorted(expr.symbols(value))]
    return f"({strings(names)}, lambda {', '.join(names)}: {py(value)})".replace("lambda :", "lambda:")


def param(param: Param) -> str:
    parts = [f'"{param.name}"']
    parts += [f"min={param.min}"] if param.min is not None else []
    parts += [f"max={param.max}"] if param.max is not None else []
    parts += [f"one_of=({', '.join(map(str, param.one_of))},)"] if param.one_of else []
    parts += [f"length={param.length}"] if param.length is not None else []
    parts += [f"default={param.default}"] if param.default is not None else []
    if param.equals is not None:
        parts.append(f"equals={function(param.equals)}")
    return f"Param({', '.join(parts)})"


def _record(pool: Pool, index: int) -> str:
    record = pool.records[index]
    inner = record.inner
    orders = []
    for choice in lower.choices(pool):
        filled = lower.specialise(pool, choice).records[index]
        inner = filled.inner
        orders.append(f"{strings(value for _, value in choice)}: {strings(inner)}")
    named = f'"{record.name}", "{record.ident}", holds={strings(record.holds)}'
    pads = {choice: lower.specialise(pool, choice).records[index].pad_to for choice in lower.choices(pool)}
    entries = [f"{strings(v for _, v in choice)}: {function(pad)}" for choice, pad in pads.items()]
    named += f", pad_to={{{', '.join(entries)}}}"
    return f"Record({named}, inner={{{', '.join(orders)}}})"


# ---- the class --------------------------------------------------------------------------------


def _doc(pool: Pool) -> dict[str, Any]:
    unit = {"token": "a token; `page_size` tokens are a page"}.get(pool.index.unit, f"a {pool.index.unit}")
    lines = []
    for c in pool.components:
        size = c.storage.group or c.storage.dtype
        dims = ", ".join(f"{dim.name}={expr.to_text(dim.size)}" for dim in c.dims)
        page = pool.index.unit if pool.index.unit in ("slot", "request") else "page"
        row = "token" if pool.has_tokens and c.token else page
        where = f"{row} and layer" if c.layers else row
        lines.append(f"`{c.name}`: ({dims}) of dtype {size} for each {where}.")
    return {"index": f"An index is {unit}.", "components": lines}


def dtype_arguments(pool: Pool) -> list[tuple[str, str]]:
    """(argument, dtype group): one group is simply `dtype`."""
    if len(pool.dtypes) == 1:
        return [("dtype", pool.dtypes[0][0])]
    return [(f"{name}_dtype", name) for name, _ in pool.dtypes]


def shape(lowered: Lowered) -> list[tuple[str, str, str | None]]:
    """Constructor parameters that decide sizes: name, type, default; None: it must be given."""
    pool = lowered.pool
    found = [_argument(p) for p in pool.params if p.equals is None]
    found += [(argument, "torch.dtype", None) for argument, _ in dtype_arguments(pool)]
    found += [(name, "Iterable[int]", None) for name in render_cpp.layer_lists(lowered)]
    found += [(v.name, "str", None) for v in pool.variants]
    if pool.has_tokens or pool.index.space is not None:
        found.append(("page_size", "int", None))
    return [
        *found,
        ("layout", "str", f'"{pool.layouts[0].name}"'),
        ("form", "str", f'"{pool.forms[0].name}"'),
    ]


def _shape(lowered: Lowered) -> tuple[list[str], list[str]]:
    """Constructor parameters that decide sizes, and how they are handed on."""
    pool = lowered.pool
    names = [name for name, _, _ in shape(lowered)]
    parameters = [
        f"{name}: {kind}," if default is None else f"{name}: {kind} = {default},"
        for name, kind, default in shape(lowered)
    ]
    given = [p for p in pool.params if p.equals is None]
    lists = render_cpp.layer_lists(lowered)
    arguments = ["params={" + ", ".join(f'"{p.name}": {p.name}' for p in given) + "},"]
    arguments.append(
        "dtypes={" + ", ".join(f'"{group}": {argument}' for argument, group in dtype_arguments(pool)) + "},"
    )
    arguments.append("layers={" + ", ".join(f'"{name}": {name}' for name in lists) + "},")
    arguments.append("variants={" + ", ".join(f'"{v.name}": {v.name}' for v in pool.variants) + "},")
    arguments.append("page_size=" + ("page_size," if "page_size" in names else "1,"))
    return parameters, [*arguments, "layout=layout,", "form=form,"]


def _argument(param: Param) -> tuple[str, str, str | None]:
    if param.length is not None:
        return param.name, "Iterable[int]", None if param.default is None else "()"
    return param.name, "int", None if param.default is None else str(param.default)


CAPACITY = ["capacity_pages: int | None = None,", "capacity_bytes: int | None = None,"]
STAGING = ["staging_bytes: int = HostPool.STAGING_BYTES,", "capture_bytes: int | None = None,"]
RUNTIME = [
    'device: str | torch.device = "cpu",',
    "require: str | None = None,",
    "hugepages: bool | None = None,",
    'register: str = "now",',
]


def _hand(parameters: Sequence[str]) -> list[str]:
    return [f"{p.split(':')[0]}={p.split(':')[0]}," for p in parameters]


def _init(lowered: Lowered) -> dict[str, Any]:
    parameters, arguments = _shape(lowered)
    more = [*CAPACITY, *STAGING, *RUNTIME]
    return {"parameters": parameters + more, "arguments": arguments + _hand(more)}


def _required(lowered: Lowered) -> dict[str, Any]:
    parameters, arguments = _shape(lowered)
    more = [*CAPACITY, *STAGING]
    return {"parameters": parameters + more, "arguments": arguments + _hand(more)}


def _staging(lowered: Lowered) -> list[str]:
    """The body of `_init_write_back_staging_buffers`: the buffer, then one view a component."""
    lines = ["self.staging = None", "self.staging_pages = 0"]
    items = lowered.programs[0].items
    lines += [f"self.staging_{item.ident}: torch.Tensor | None = None" for item in items]
    lines += [
        "self.can_use_write_back_jit = self.can_use_write_back_jit_kernel()",
        "if not self.can_use_write_back_jit:",
        "    return",
        "slot = self._staging_slot()",
        "self.staging_pages = slot.pages",
        "self.staging = self._allocate_staging(slot)",
    ]
    lines += [f'self.staging_{item.ident} = self._view(self.staging, "{item.ident}")' for item in items]
    return lines
