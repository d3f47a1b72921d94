"""Prepares the C++ side of a pool for its templates: layout.h, kernels.cu, host.cpp.

In: `ir.Lowered`. Out: plain dictionaries of names and finished lines of text; a template only loops over
them. All addresses are ``i64`` bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from poolwright.codegen import expr, lower
from poolwright.codegen.expr import Expr
from poolwright.codegen.ir import Axis, Item, Lowered, Program, Walk

WALK_WORDS = {
    "pages": "one page an id",
    "tokens": "one token an id",
    "layer_pages": "one layer, one page an id",
    "layer_tokens": "one layer, one token an id",
}


def name_of(symbol: str) -> str:
    """The C++ name of a symbol."""
    return symbol.replace(".", "_").replace("[", "_").replace("]", "")


def cpp(value: Expr) -> str:
    return expr.to_cpp(value, name=name_of)


def order_text(tables: Sequence[Axis], axes: Sequence[Axis], ident: str | None = None) -> str:
    head = ident or ""
    head += "".join(f"[{axis.name}]" for axis in tables)
    return (head + " " if head else "") + "[" + ", ".join(axis.name for axis in axes) + "]"


def inputs(lowered: Lowered) -> list[str]:
    """Names of everything that a program is compiled for, in the order of the spec."""
    pool = lowered.pool
    names = [name for param in pool.params for name in param_names(param.name, param.length)]
    names += ["page_size", *layer_lists(lowered)]
    names += [f"itemsize_{group}" for group, _ in pool.dtypes]
    return names


def param_names(name: str, length: int | None) -> list[str]:
    return [name] if length is None else [f"{name}_{i}" for i in range(length)]


def layer_lists(lowered: Lowered) -> list[str]:
    """Layer lists that the constructor takes: those of components; `layers` also when only an expression
    counts it, and when no component has another."""
    pool = lowered.pool
    named = {c.layers for c in pool.components if c.layers is not None}
    sizes: list[Expr] = []
    for choice in lower.choices(pool):
        sizes += [size for _, size in lower.extents(lower.specialise(pool, choice))]
    sizes += [param.equals for param in pool.params if param.equals is not None]
    sizes += [form.base for form in pool.forms if form.base is not None]
    sizes += [c.align for c in pool.components if c.align is not None]
    conditions = [*pool.require, *(c.when for c in pool.components if c.when is not None)]
    counted = {name for value in sizes for name in expr.symbols(value)}
    counted |= {name for condition in conditions for name in expr.symbols(condition)}
    if (pool.components and not named) or "layers" in counted:
        named.add("layers")
    return sorted(named, key=lambda name: (name != "layers", name))


def columns(lowered: Lowered) -> tuple[Item, ...]:
    """What a step says of the pool, a number for each: the position of a layer in the component's list, or
    whether a component without layers moves."""
    return lowered.programs[0].items


# ---- layout.h ---------------------------------------------------------------------------------


def layout_view(lowered: Lowered) -> dict[str, Any]:
    """What layout.h.jinja prints."""
    return {
        "pool": lowered.pool,
        "inputs": [{"name": n, "value": f"PW_{n}"} for n in inputs(lowered)],
        "families": [_family(lowered, choice) for choice in lower.choices(lowered.pool)],
    }


def family_name(choice: Sequence[tuple[str, str]]) -> str:
    return "_".join(value for _, value in choice)


def qualified(lowered: Lowered, program: Program) -> str:
    """The namespace of a program, seen from outside."""
    return "::".join(filter(None, [lowered.pool.name, family_name(program.variant), local_name(program)]))


def local_name(program: Program) -> str:
    return f"{program.form.name}_{program.layout.name}"


def _family(lowered: Lowered, choice: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    filled = lower.specialise(lowered.pool, choice)
    # Conditions first: the row of a record is as long as what is there.
    constants = [
        {
            "name": f"present_{c.ident}",
            "value": f"{expr.cond_to_cpp(c.when, name=name_of)} ? 1 : 0",
            "comment": "",
        }
        for c in filled.components
        if c.when is not None
    ]
    constants += [{"name": n, "value": cpp(v), "comment": ""} for n, v in lower.extents(filled)]
    return {
        "namespace": family_name(choice),
        "constants": constants,
        "programs": [_program(lowered, p) for p in lowered.programs if p.variant == choice],
    }


def chosen(lowered: Lowered, program: Program) -> str:
    """The guard of text that belongs to one program. Programs are counted from 1, in the order of the pool.

    A compiler is given the number of the one that it compiles and reads no other: parsing all of them would
    take longer than everything else. Without a number all are read.
    """
    number = next(n for n, other in enumerate(lowered.programs, 1) if other is program)
    return f"#if !defined(PW_CHOSEN) || PW_CHOSEN == {number}"


def _program(lowered: Lowered, program: Program) -> dict[str, Any]:
    names: dict[Expr, Expr] = {}
    host = [_named(names, name, value) for name, value in program.steps]
    return {
        "name": local_name(program),
        "chosen": chosen(lowered, program),
        "title": f"form {program.form.name}, layout {program.layout.name}",
        "dynamic": dynamic(program),
        "host": host,
        "host_bytes": _short(names, program.host_bytes),
        "page_bytes": _short(names, program.page_bytes),
        "parts": [_item(program, item, dict(names)) for item in program.items],
    }


def _named(names: dict[Expr, Expr], name: str, value: Expr) -> dict[str, str]:
    """A constant, or a function of the host's pages, made of those before it; later ones may use its name."""
    over_pages = "pages" in expr.symbols(value)
    text = _short(names, value)
    if isinstance(value, expr.Op):
        names.setdefault(value, expr.symbol(f"{name}(pages)" if over_pages else name))
    return {"name": name, "value": text, "pages": "(i64 pages)" if over_pages else ""}


def _short(names: Mapping[Expr, Expr], value: Expr) -> str:
    return cpp(expr.abbreviate(value, names))


def dynamic(program: Program) -> list[str]:
    """Names of the strides that are read from tensors at bind, in the order of the View."""
    return [
        f"stride_{item.ident}_{stride.axis}"
        for item in program.items
        for stride in item.device.strides
        if stride.value is None
    ]


def _item(program: Program, item: Item, names: dict[Expr, Expr]) -> dict[str, Any]:
    inside: dict[Expr, Expr] = {}
    strides = [(f"device_{item.ident}_{s.axis}", s.value) for s in reversed(item.device.strides)]
    device = [_named(inside, name, value) for name, value in strides if value is not None]
    names |= {value: name for value, name in inside.items() if value not in names}
    return {
        "name": item.name,
        "host_order": order_text((), item.host.axes),
        "device_order": order_text(item.device.table, item.device.axes),
        "table": {"name": f"table_{item.ident}", "value": cpp(table_at(program, item))},
        "device": device,
        "walks": [_walk(item, walk, names) for walk in item.walks],
    }


def _host_steps(item: Item) -> list[tuple[str, Expr]]:
    steps = [(f"host_{item.ident}_base", item.host.base)]
    for stride in item.host.strides:
        assert stride.value is not None
        steps.append((f"host_{item.ident}_{stride.axis}", stride.value))
    return steps


def table_at(program: Program, item: Item) -> Expr:
    """Where the item's tensors start in the table of tensor addresses."""
    at: Expr = expr.ZERO
    for other in program.items:
        if other is item:
            return at
        at = at + (other.device.table[0].extent if other.device.table else 1)
    raise AssertionError("item of another program")


def walk_name(prefix: str, item: Item, walk: Walk) -> str:
    return f"{prefix}_{item.ident}_{walk.name}"


def _walk(item: Item, walk: Walk, names: Mapping[Expr, Expr]) -> dict[str, Any]:
    known = {**names, walk.atom_bytes: expr.symbol(walk_name("atom", item, walk))}
    layer = ", u32 layer" if "layer" in walk.outer else ""
    run = ", u32 run" if walk.loops else ", u32"
    return {
        "comment": walk_comment(item, walk),
        "atom_name": walk_name("atom", item, walk),
        "atom": cpp(walk.atom_bytes),
        "runs_name": walk_name("runs", item, walk),
        "runs": cpp(walk.runs),
        "inner_name": walk_name("inner", item, walk) if layer else "",
        "inner": cpp(lower.runs_inside_layer(item, walk)) if layer else "",
        "vector_name": walk_name("vector", item, walk),
        "grain": _short(known, walk.grain),
        "run_name": walk_name("run", item, walk),
        "parameters": f"const View& view, u32 host_id, u32 device_id{layer}{run}",
        "lines": [
            *_split_ids(walk),
            *_decode(walk),
            f"return {{{device_address(item, walk)},",
            f"        {host_address(item, walk)}}};",
        ],
    }


def walk_comment(item: Item, walk: Walk) -> str:
    loops = " x ".join(axis.name for axis in walk.loops) or "1"
    atom = " x ".join(axis.name for axis in walk.atom) or "one item"
    inner = "; on the host `inner` of one layer, then of the next" if "layer" in walk.outer else ""
    return f"{item.name}, {WALK_WORDS[walk.name]}: {loops} runs of {atom}{inner}"


def _split_ids(walk: Walk) -> list[str]:
    if "token" not in walk.outer:
        return ["const u32 host_page = host_id, device_page = device_id;"]
    return [
        "const u32 host_page = host_id / u32(page_size), host_token = host_id % u32(page_size);",
        "const u32 device_page = device_id / u32(page_size), device_token = device_id % u32(page_size);",
    ]


def _decode(walk: Walk) -> list[str]:
    lines = []
    for axis in reversed(walk.loops[1:]):
        lines.append(f"const u32 {axis.name} = run % pw::divisor({cpp(axis.extent)});")
        lines.append(f"run /= pw::divisor({cpp(axis.extent)});")
    if walk.loops:
        lines.append(f"const u32 {walk.loops[0].name} = run;")
    return lines


def _index(axis: str, side: str, walk: Walk) -> str | None:
    """The variable that holds an axis' index, or None inside the atom."""
    if any(a.name == axis for a in walk.atom):
        return None
    return f"{side}_{axis}" if axis in ("page", "token") and axis in walk.outer else axis


def host_address(item: Item, walk: Walk) -> str:
    terms = ["view.host"]
    for name, value in _host_steps(item):
        axis = name.removeprefix(f"host_{item.ident}_")
        step = f"{name}(view.pages)" if "pages" in expr.symbols(value) else name
        if axis == "base":
            terms += [step] if value != expr.ZERO else []
            continue
        index = _index(axis, "host", walk)
        terms += [f"{index} * {step}"] if index else []
    return " + ".join(terms)


def device_address(item: Item, walk: Walk) -> str:
    at = f"table_{item.ident}" + (" + layer" if item.device.table else "")
    terms = [f"(char*)view.tensors[{at}]"]
    for stride in item.device.strides:
        index = _index(stride.axis, "device", walk)
        if index:
            side = "view.stride" if stride.value is None else "device"
            terms.append(f"{index} * {side}_{item.ident}_{stride.axis}")
    return " + ".join(terms)


# ---- kernels.cu -------------------------------------------------------------------------------


def walks(lowered: Lowered) -> list[str]:
    """Walks that every placed component of the pool has (`layer_` ones: every one with layers)."""
    items = lowered.programs[0].items
    names = ["pages"]
    if lowered.programs[0].token_walk:
        names.append("tokens")
    if any(item.layers is not None for item in items):
        names += [f"layer_{name}" for name in names]
    return names


def _has(item: Item, walk: str) -> bool:
    return any(w.name == walk for w in item.walks)


def kernels_view(lowered: Lowered) -> dict[str, Any]:
    """What kernels.cu.jinja prints."""
    items = lowered.programs[0].items
    names = walks(lowered)
    moves = [_move(item, name) for name in names for item in items if _has(item, name)]
    bulk = [name for name in names if not name.startswith("layer_")]
    return {
        "pool": lowered.pool,
        "items": [item.name for item in items],
        "moves": moves,
        "wholes": [*(_whole(items, name) for name in bulk), *(_layer_whole(lowered, name) for name in bulk)],
        "columns": len(columns(lowered)),
        "column_names": columns_text(columns(lowered)),
        "parts": [_part(part) for part in parts(names, lowered.by_layer)],
    }


def columns_text(found: Sequence[Item]) -> str:
    """The columns of a step in words."""
    words = [f"{item.name} " + (f"in {item.layers}" if item.layers else "or not") for item in found]
    return ", ".join(words) or "nothing"


def _move(item: Item, walk: str) -> dict[str, Any]:
    layered = walk.startswith("layer_")
    layer = ", layer" if layered else ""
    end = f"{item.ident}_{walk}"
    run = "at / pw::divisor(vectors) % pw::divisor(runs)"
    place = [
        "const u32 id = at / pw::divisor(i64(runs) * vectors);",
        "if (ids.device(id) == pw::skipped) continue;",
    ]
    if layered:
        run = "turn.run"
        place = [
            f"constexpr u32 inner = pw::divisor(inner_{end});",
            "const pw::Turn turn = pw::turn(at / pw::divisor(vectors), inner, runs, steps.count);",
            "const u32 id = turn.id, layer = steps.number(turn.step);",
            "if (layer == pw::skipped || ids.device(id) == pw::skipped) continue;",
        ]
    words = WALK_WORDS[walk].replace("one layer", "one layer a step")
    return {
        "comment": f"{item.name}, {words}.",
        "name": f"move_{end}",
        "parameter": ", const pw::Column& steps, const u32 lane" if layered else "",
        "result": "u32" if layered else "void",
        "lane": "lane" if layered else "pw::lane()",
        "flight": "pw::in_flight_by_layer" if layered else "pw::in_flight",
        "end": ["return pw::next(lane, pw::lanes(), total);"] if layered else [],
        "total": ("steps.count * " if layered else "") + "count * runs * vectors",
        "place": place,
        "vector": f"vector_{end}",
        "atom": f"atom_{end}",
        "runs": f"runs_{end}",
        "ids": f"pw::{ids_struct(walk)}",
        "run": f"run_{end}(view, {host_id(walk)}, ids.device(id){layer}, {run})",
    }


def _whole(items: Sequence[Item], walk: str) -> dict[str, Any]:
    return {
        "comment": f"Every component, {WALK_WORDS[walk]}.",
        "name": f"move_{walk}",
        "ids": f"pw::{ids_struct(walk)}",
        "parameters": "",
        "result": "void",
        "lines": [f"move_{item.ident}_{walk}<Way>(view, ids, count);" for item in items],
    }


def _layer_whole(lowered: Lowered, walk: str) -> dict[str, Any]:
    """Steps in layer order: each component where its column says so."""
    lines = []
    for at, item in enumerate(columns(lowered)):
        if item.layers:
            move = f"move_{item.ident}_layer_{walk}<Way>(view, ids, count, steps.column({at}), lane)"
            lines.append(f"lane = {move};")
        else:
            lines.append(f"if (steps.column({at}).any()) move_{item.ident}_{walk}<Way>(view, ids, count);")
    return {
        "comment": f"Steps in layer order, {WALK_WORDS[walk]}; columns: {columns_text(columns(lowered))}.",
        "name": f"move_steps_{walk}",
        "ids": f"pw::{ids_struct(walk)}",
        "parameters": ", const pw::Steps& steps, u32 lane",
        "result": "u32",
        "lines": [*lines, "return lane;"],
    }


def _step(lowered: Lowered, call: Callable[[Item, str], str]) -> list[str]:
    """The lines of one step on the CPU: each component where its column says so."""
    lines = []
    for at, item in enumerate(columns(lowered)):
        here = f"const u32 layer = pw::number(at + {at}); layer != pw::skipped"
        lines.append(f"if ({here}) {call(item, 'layer' if item.layers else '')}")
    return lines


def ids_struct(walk: str) -> str:
    """What a walk reads ids from."""
    return "TokenIds" if walk.endswith("tokens") else "PageIds"


def host_id(walk: str) -> str:
    return "ids.host(id, u32(page_size))" if walk.endswith("tokens") else "ids.host(id)"


def parts(names: Sequence[str], by_layer: Sequence[str]) -> list[str]:
    """Kernels, compiled side by side; kernel k of a program is compiled with PW_PART=k.

    Those that take tokens come first: they take longest, and the compiler parses one part after the other.
    """
    ways = {name: by_layer if name.startswith("layer_") else ("write_back", "load") for name in names}
    names = sorted(names, key=lambda name: not name.endswith("tokens"))
    return [f"{way}_{name}" for name in names for way in ways[name]]


def _part(part: str) -> dict[str, Any]:
    unit = "tokens" if part.endswith("tokens") else "pages"
    ids, few = ("ids.tokens()", "") if unit == "tokens" else ("ids.pages(few)", " few")
    way = "WriteBack" if part.startswith("write_back") else "Load"
    if "_layer_" not in part:
        return {
            "name": part,
            "parameters": few,
            "lines": [f"move_{unit}<pw::{way}>(view, {ids}, ids.count);"],
        }
    window = "ids.window(n, columns, now)"
    return {
        "name": part,
        "parameters": f"{few}, {STEPS}",
        "lines": in_windows(
            [f"lane = move_steps_{unit}<pw::{way}>(view, {ids}, ids.count, {window}, lane);"]
        ),
    }


STEPS = "u32 steps, u32 window, u32* done"
"""The last parameters of a kernel in layer order."""


def in_windows(lines: Sequence[str]) -> list[str]:
    """All steps, `now` of them at a time from step `n` on."""
    return [
        "[[maybe_unused]] u32 lane = pw::lane();",
        "for (u32 n = 0; n < steps; n += window) {",
        "  const u32 now = pw::fewer(window, steps - n);",
        *(f"  {line}" for line in lines),
        "  pw::arrive(done, n, now);",
        "}",
    ]


# ---- host.cpp ---------------------------------------------------------------------------------


def host_view(lowered: Lowered) -> dict[str, Any]:
    """What host.cpp.jinja prints."""
    items = lowered.programs[0].items
    names = walks(lowered)
    bulk = [name for name in names if not name.startswith("layer_")]
    return {
        "pool": lowered.pool,
        "copies": [_copy(item, name) for name in names for item in items if _has(item, name)],
        "programs": [
            {
                "qualified": qualified(lowered, program),
                "chosen": chosen(lowered, program),
                "described": described(program),
            }
            for program in lowered.programs
        ],
        "wholes": [
            *(_host_whole(items, name) for name in bulk),
            *(_host_step(lowered, name) for name in bulk),
        ],
        "entries": [_entry(name) for name in bulk],
        "lanes": [_lanes(part) for part in parts(names, lowered.by_layer)],
    }


def _copy(item: Item, walk: str) -> dict[str, str]:
    layered = walk.startswith("layer_")
    end = f"{item.ident}_{walk}"
    layer = ", layer" if layered else ""
    return {
        "comment": f"{item.name}, {WALK_WORDS[walk]}.",
        "name": f"atoms_{end}",
        "layer_parameter": ", u32 layer" if layered else "",
        "runs": f"runs_{end}",
        "atom": f"atom_{end}",
        "run": f"run_{end}(view, u32(host_ids[id]), u32(device_ids[id]){layer}, "
        "u32(at % pw::divisor(i64(runs))))",
    }


def described(program: Program) -> list[str]:
    """Constants of a program, in the order of `description.numbers`."""
    values = ["host_bytes(pages)", "page_bytes"]
    for item in program.items:
        for name, value in _host_steps(item):
            values.append(f"{name}(pages)" if "pages" in expr.symbols(value) else name)
        values += [f"device_{item.ident}_{s.axis}" for s in item.device.strides if s.value is not None]
        for walk in item.walks:
            values += [walk_name(kind, item, walk) for kind in ("atom", "runs", "vector")]
    return values


def _host_whole(items: Sequence[Item], walk: str) -> dict[str, Any]:
    lines = [f"atoms_{item.ident}_{walk}<Way>(view, host_ids, device_ids, count, threads);" for item in items]
    return {"name": f"atoms_{walk}_all", "parameters": "", "lines": lines}


def _host_step(lowered: Lowered, walk: str) -> dict[str, Any]:
    def call(item: Item, layer: str) -> str:
        name, argument = (f"layer_{walk}", ", layer") if layer else (walk, "")
        return f"atoms_{item.ident}_{name}<Way>(view, host_ids, device_ids, count{argument}, threads);"

    return {"name": f"atoms_step_{walk}_all", "parameters": ", const u32* at", "lines": _step(lowered, call)}


def _entry(walk: str) -> dict[str, Any]:
    def both(name: str, extra: str) -> list[str]:
        return [
            f"  if (load) {name}<pw::Load>(*view, host_ids, device_ids, count{extra}, threads);",
            f"  else {name}<pw::WriteBack>(*view, host_ids, device_ids, count{extra}, threads);",
        ]

    lines = ["if (steps == nullptr) {", *both(f"atoms_{walk}_all", ""), "  return;", "}"]
    lines += ["for (u64 n = 0; n < step_count; ++n) {"]
    lines += [*both(f"atoms_step_{walk}_all", ", steps + n * columns"), "}"]
    what = WALK_WORDS[walk].replace("one", "every").replace(" an id", " named by the ids")
    return {
        "name": f"atoms_{walk}",
        "comment": f"Moves {what}; with `steps`, one after the other.",
        "lines": lines,
    }


def steps_read(at: int) -> list[str]:
    """Lines that take the last parameters of a kernel in layer order."""
    return [
        f"const u32 steps = *(const u32*)params[{at}], window = *(const u32*)params[{at + 1}];",
        f"u32* const done = *(u32**)params[{at + 2}];",
    ]


def _lanes(part: str) -> dict[str, Any]:
    """Plays a kernel; one that counts its steps has one lane after the other go through all of them."""
    lines = [
        "const View& view = *(const View*)params[0];",
        "const pw::Ids& ids = *(const pw::Ids*)params[1];",
    ]
    lines += ["const pw::Few& few = *(const pw::Few*)params[2];"]
    more = ""
    if "_layer_" in part:
        lines += steps_read(3)
        more = ", steps, window, done"
    lines.append(f"pw::each_lane(grid, block, [&] {{ {part}(view, ids, few{more}); }});")
    return {"name": f"lanes_{part}", "lines": lines}
