"""Random pools: choices in (a seed, or what hypothesis draws), a pool with all its sizes known out.

Each `Sample` says the same pool twice: as `ir.Pool` for the code under test, and as plain numbers for the
oracle, computed here from the same texts without the code under test.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import oracle
from hypothesis import strategies as st

from poolwright.codegen import expr, ir

T = TypeVar("T")

FIXED = {"uint8": 1, "int16": 2, "float32": 4, "int64": 8}
GROUP = ("uint8", "bfloat16", "float32", "float64")
DIMS = ("head", "dim", "entry", "tap")
SIZES = (
    *("a", "b", "c", "a", "b", "c", "a + b", "2 * a", "a * b", "ceil_div(b, 2)", "max(a - b, 0)", "3", "1"),
    *("b // 2 + 1", "c % 3 + 1", "min(a, 4)", "page_size", "wide_0", "wide_0 + wide_1"),
)
CONDITIONS = ("a > 1", "b >= 1 and c < 4", "a == b", "c != 2", "a <= 3 and b > 0 and c > 0")
ALIGNS = ("2", "4", "6", "16", "32", "a + 1")
MAX_ITEMS = 48


class Chance(ABC):
    """Where a random pool gets its choices from."""

    @abstractmethod
    def integer(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""

    def pick(self, values: Sequence[T]) -> T:
        return values[self.integer(0, len(values) - 1)]

    def percent(self, chance: int) -> bool:
        return self.integer(1, 100) > 100 - chance

    def some(self, values: Sequence[T], chance: int = 50) -> list[T]:
        return [value for value in values if self.percent(chance)]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        rest = list(values)
        return [rest.pop(self.integer(0, len(rest) - 1)) for _ in values]


class Seeded(Chance):
    """Choices that follow from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


class Drawn(Chance):
    """Choices that hypothesis draws, and shrinks when a property fails."""

    def __init__(self, draw: Callable[[st.SearchStrategy[int]], int]) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))


@dataclass(frozen=True)
class Sample:
    """A pool of one form and one layout, with sizes. `parts`: what is placed, as pages of one row.

    `values`: every input of its programs by its name in generated code. `refused`: which path of the
    spec lowering must refuse, and the axis that is to blame; None when the pool is sound.
    """

    pool: ir.Pool
    values: Mapping[str, int]
    choice: tuple[tuple[str, str], ...]
    parts: tuple[oracle.Part, ...]
    records: tuple[oracle.Record, ...]
    splits: Mapping[str, tuple[str, ...]]
    refused: tuple[str, str] | None = None

    @property
    def form(self) -> ir.Form:
        return self.pool.forms[0]

    @property
    def layout(self) -> ir.Layout:
        return self.pool.layouts[0]

    def placed(self, pages: int) -> list[oracle.Part]:
        """The parts with so many pages."""
        return [replace(part, axes={**part.axes, "page": pages}) for part in self.parts]


@st.composite
def samples(draw: Callable[[st.SearchStrategy[int]], int]) -> Sample:
    """Random pools, sound and unsound ones."""
    return random_sample(Drawn(draw))


def sound_sample(seed: int) -> Sample:
    """The first sound pool that follows from a seed."""
    chance = Seeded(seed)
    while True:
        sample = random_sample(chance)
        if sample.refused is None:
            return sample


def random_sample(chance: Chance) -> Sample:
    """One random pool."""
    return _Maker(chance).sample()


@dataclass(frozen=True)
class _Index:
    """What an index addresses; `tokens`: pages consist of tokens."""

    index: ir.Index
    tokens: bool


INDICES = (
    *(_Index(ir.Index("token"), True),) * 5,
    *(_Index(ir.Index("page"), False),) * 2,
    *(_Index(ir.Index("slot"), False),) * 2,
    _Index(ir.Index("token", "other", expr.parse("i // page_size")), False),
)


class _Maker:
    """Draws the parts of one pool one after the other; later ones depend on earlier ones."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self.kind = chance.pick(INDICES)
        self.split = chance.percent(20)
        self.variant = chance.percent(12)
        self.choice = (("format", chance.pick(("older", "newer"))),) if self.variant else ()
        self.values = self._values()
        self.shared = {dim: self._text() for dim in DIMS}
        if self.split:
            self.shared["head"] = "heads"
        self.splits = {"head": ("head_group", "head_in_group")} if self.split else {}

    def sample(self) -> Sample:
        chance = self.chance
        count = chance.pick((1, 2, 2, 3, 3, 4))
        recorded = count > 1 and chance.percent(25)
        shape = self._outer() if recorded else None
        components = tuple(self._component(i, shape) for i in range(count))
        records = self._records(components) if recorded else ()
        plain = {c.name: self._part(c) for c in components}
        rows = tuple(self._oracle_record(record, plain) for record in records)
        parts = tuple(self._row(row) for row in rows) if records else tuple(plain.values())
        form, layout = self._form(parts), self._layout(parts)
        pool = self._pool(components, records, form, layout)
        sample = Sample(pool, self.values, self.choice, parts, rows, self.splits)
        return replace(sample, refused=refusal(sample))

    # ---- sizes

    def _values(self) -> dict[str, int]:
        chance, few = self.chance, (1, 2, 3, 4, 5, 2, 3, 1, 6, 0)
        values = {name: chance.pick(few) for name in ("a", "b", "c", "wide_0", "wide_1")}
        if self.split:
            values["groups"] = chance.integer(1, 3)
            values["heads"] = values["groups"] * chance.integer(1, 3)
        values["page_size"] = chance.integer(1, 4) if self.kind.index.unit != "slot" else 1
        values |= {"layers": chance.integer(1, 3), "tail_layers": chance.integer(1, 2)}
        values |= {"itemsize_kv": chance.pick((1, 2, 4, 8)), "itemsize_state": chance.pick((1, 2, 4, 8))}
        return values

    def _constants(self, choice: str) -> dict[str, int]:
        return {"n": 5, "pad": 16} if choice == "older" else {"n": 2, "pad": 12}

    def _text(self) -> str:
        return self.chance.pick((*SIZES, *(("format.n",) * 4 if self.variant else ())))

    def _filled(self, text: str) -> str:
        """The text with the constants of the chosen variant written out."""
        for _, choice in self.choice:
            for name, value in self._constants(choice).items():
                text = text.replace(f"format.{name}", str(value))
        return text

    def _size(self, text: str) -> int:
        return oracle.size(self._filled(text), self.values)

    # ---- components

    def _outer(self) -> tuple[str | None, bool, str | None]:
        """Layer list, whether there are tokens, condition."""
        chance = self.chance
        layers = chance.pick(("layers", "layers", "layers", None))
        token = self.kind.tokens and chance.percent(80)
        return layers, token, chance.pick(CONDITIONS) if chance.percent(20) else None

    def _component(self, at: int, shape: tuple[str | None, bool, str | None] | None) -> ir.Component:
        chance = self.chance
        layers, token, when = self._outer() if shape is None else shape
        dims: dict[str, str] = {}
        items = 1
        for dim in chance.shuffled(DIMS)[: chance.integer(0, 3)]:
            text = self.shared[dim] if chance.percent(75) or dim == "head" else self._text()
            items *= max(1, self._size(text))
            if items <= MAX_ITEMS:
                dims[dim] = text
        group = chance.pick(("kv", "kv", "state", None))
        return ir.Component(
            name=f"part[{at}]",
            ident=f"part_{at}",
            dims=tuple(ir.Dim(dim, expr.parse(text)) for dim, text in dims.items()),
            storage=ir.Storage(group=group, dtype=None if group else chance.pick(tuple(FIXED))),
            layers=layers,
            token=token,
            when=None if when is None else expr.parse_cond(when),
            align=expr.parse(chance.pick(ALIGNS)) if chance.percent(25) else None,
        )

    def _part(self, component: ir.Component) -> oracle.Part:
        """The component in numbers."""
        sizes = {"page": "pages"}
        sizes |= {"token": "page_size"} if component.token else {}
        sizes |= {"layer": component.layers} if component.layers else {}
        for dim in component.dims:
            if dim.name in self.splits:
                sizes |= {"head_group": "groups", "head_in_group": "heads // groups"}
            else:
                sizes[dim.name] = self._filled(expr.to_python(dim.size))
        storage = component.storage
        itemsize = FIXED[storage.dtype] if storage.dtype else self.values[f"itemsize_{storage.group}"]
        when = component.when
        return oracle.Part(
            name=component.ident,
            axes={axis: 1 if axis == "page" else self._size(text) for axis, text in sizes.items()},
            sizes=sizes,
            itemsize=itemsize,
            align=itemsize if component.align is None else self._size(expr.to_python(component.align)),
            present=when is None or bool(self._size(expr.cond_to_python(when))),
        )

    # ---- records

    def _records(self, components: Sequence[ir.Component]) -> tuple[ir.Record, ...]:
        cut = self.chance.pick((len(components), self.chance.integer(1, len(components))))
        held = [group for group in (components[:cut], components[cut:]) if group]
        return tuple(
            ir.Record(
                name=f"row{at}",
                ident=f"row{at}",
                holds=tuple(c.name for c in group),
                inner=("format.inner",) if self.variant else self._inner(group),
                pad_to=expr.parse("format.pad" if self.variant else self.chance.pick(("1", "8", "16", "7"))),
            )
            for at, group in enumerate(held)
        )

    def _inner(self, members: Sequence[ir.Component]) -> tuple[str, ...]:
        dims = list(dict.fromkeys(dim.name for member in members for dim in member.dims))
        return self._order(dims, [self._part(member) for member in members])

    def _oracle_record(self, record: ir.Record, parts: Mapping[str, oracle.Part]) -> oracle.Record:
        inner = ("component", "element") if self.variant else record.inner
        pad_to = self._size(expr.to_python(record.pad_to))
        return oracle.Record(record.ident, tuple(parts[name] for name in record.holds), inner, pad_to)

    def _row(self, record: oracle.Record) -> oracle.Part:
        """A record as what is placed: bytes of its padded row for each page, token and layer."""
        first = record.members[0]
        broken = oracle.differing_axis(record.inner, record.members, self.splits) is not None
        nbytes = 1 if broken else oracle.row_of(record, self.splits)[0]
        outer = first.only(oracle.OUTER)
        sizes = {axis: first.sizes[axis] for axis in outer.axes}
        return oracle.Part(
            record.name, {**outer.axes, "row": nbytes}, {**sizes, "row": f"row of {record.name}"}, 1, 1
        )

    # ---- orders

    def _words(self, parts: Sequence[oracle.Part]) -> list[str]:
        """Axis words of an order without `component`; some dims stay unnamed behind `element`."""
        axes = list(dict.fromkeys(axis for part in parts for axis in part.axes))
        if "row" in axes:
            return [axis for axis in axes if axis != "row"] + ["element"]
        dims = [axis for axis in axes if axis not in oracle.OUTER]
        if self.chance.percent(50):
            dims = [*self.chance.some(dims), "element"]
        whole = {piece for pieces in self.splits.values() for piece in pieces}
        if whole and whole <= set(dims) and self.chance.percent(50):
            dims = [*(dim for dim in dims if dim not in whole), "head"]
        return [axis for axis in axes if axis in oracle.OUTER] + dims

    def _order(self, names: Sequence[str], parts: Sequence[oracle.Part]) -> tuple[str, ...]:
        """The words shuffled with `component` among them, mostly where the parts can stand side by side."""
        mixed = self.chance.shuffled(names)
        if "token" in mixed and mixed.index("token") < mixed.index("page"):
            one, other = mixed.index("token"), mixed.index("page")
            mixed[one], mixed[other] = mixed[other], mixed[one]
        orders = [(*mixed[:at], "component", *mixed[at:]) for at in range(len(mixed) + 1)]
        if self.chance.percent(85):
            orders = [o for o in orders if oracle.differing_axis(o, parts, self.splits) is None]
        return self.chance.pick(orders)

    def _layout(self, parts: Sequence[oracle.Part]) -> ir.Layout:
        names = self._words(parts)
        if self.chance.percent(20):  # axes that nothing has drop out of layouts
            names += [axis for axis in ("token", "layer", "nothing") if axis not in names]
        return ir.Layout("host", self._order(names, parts))

    def _form(self, parts: Sequence[oracle.Part]) -> ir.Form:
        chance = self.chance
        tables = [("component",), ("component",)]
        if all("layer" in part.axes for part in parts):
            tables += [(), (), ("layer",)]
        elif not any("layer" in part.axes for part in parts):
            tables.append(())
        if any("layer" in part.axes for part in parts):
            tables += [("component", "layer")] * 3
        tensors = chance.pick(tables)
        names = [word for word in self._words(parts) if word not in tensors]
        if "row" in parts[0].axes:
            names = ["inner" if name == "element" else name for name in names]
        order = self._order(names, [replace_axes(part, tensors) for part in parts])
        if "component" in tensors:
            order = tuple(word for word in order if word != "component")
        # Behind components that stand beside each other nothing may move: their places are constants.
        free = order[: order.index("component")] if "component" in order else order
        known = {axis for part in parts for axis in part.axes}
        strided = chance.some([axis for axis in free if axis in known], 40) if chance.percent(40) else []
        return ir.Form("device", tensors, order, tuple(strided))

    # ---- the pool

    def _pool(
        self,
        components: tuple[ir.Component, ...],
        records: tuple[ir.Record, ...],
        form: ir.Form,
        layout: ir.Layout,
    ) -> ir.Pool:
        params = [ir.Param(name, 0) for name in ("a", "b", "c")] + [ir.Param("wide", 0, length=2)]
        params += [ir.Param("groups", 1), ir.Param("heads", 1)] if self.split else []
        pieces = (
            ir.Dim("head_group", expr.parse("groups")),
            ir.Dim("head_in_group", expr.parse("heads // groups")),
        )
        return ir.Pool(
            name="random",
            class_name="RandomPoolHost",
            summary="A pool of random parts.",
            index=self.kind.index,
            updates="in_place" if len(components) % 2 else "append",
            params=tuple(params),
            dtypes=(("kv", GROUP), ("state", GROUP)),
            components=components,
            records=records,
            forms=(form,),
            layouts=(layout,),
            variants=(self._variant(),) if self.variant else (),
            splits=(("head", pieces),) if self.split else (),
            require=(expr.parse_cond("heads // groups * groups == heads"),) if self.split else (),
            source="specs/random.yaml",
        )

    def _variant(self) -> ir.Variant:
        inner = ("component", "element")
        choices = [
            (choice, (*self._constants(choice).items(), ("inner", inner))) for choice in ("older", "newer")
        ]
        return ir.Variant("format", tuple(choices))


def replace_axes(part: oracle.Part, without: Sequence[str]) -> oracle.Part:
    """The part without axes that index tensors."""
    return part.only([axis for axis in part.axes if axis not in without])


def refusal(sample: Sample) -> tuple[str, str] | None:
    """What lowering must refuse the pool for: a path in its spec, and the axis or word to blame."""
    for record, said in zip(sample.records, sample.pool.records, strict=True):
        axis = oracle.differing_axis(record.inner, record.members, sample.splits)
        if axis is not None:
            return f"records.{said.name}.inner", f"axis {axis} "
    axis = oracle.differing_axis(sample.layout.order, sample.parts, sample.splits)
    if axis is not None:
        return "layouts[0]", f"axis {axis} "
    form = sample.form
    if "component" in form.tensors:
        return None
    inside = [replace_axes(part, form.tensors) for part in sample.parts]
    axis = oracle.differing_axis(form.order, inside, sample.splits)
    if axis is not None:
        return "device.device.order", f"axis {axis} "
    if form.order.index("component") < form.order.index("page"):
        first = sample.parts[0]
        for part in sample.parts[1:]:
            if part.itemsize != first.itemsize or list(part.sizes.items()) != list(first.sizes.items()):
                return "device.device.order", "same shape and dtype"
    return None
