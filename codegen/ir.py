"""Intermediate representation: a resolved pool, and the programs it is lowered to.

`Pool` and its parts are what `resolve` makes of a spec: names checked, expressions parsed, short forms
gone. `Program` and its parts are what `lower` makes of a pool for one (variant, form, layout): every
stride, run and range decided. Everything is frozen; invariants are checked where an object is made, so
no later stage checks again. Sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from poolwright.codegen.expr import Cond, Expr

RESERVED_AXES = ("component", "record", "page", "token", "layer", "element", "inner")


# ---- what a spec says -------------------------------------------------------------------------


@dataclass(frozen=True)
class Param:
    """A parameter of the pool's constructor. `length`: a list of so many integers.

    `default`: the value when it is not given; a list that is given short is filled up with it.
    """

    name: str
    min: int | None = None
    max: int | None = None
    one_of: tuple[int, ...] = ()
    equals: Expr | None = None
    length: int | None = None
    default: int | None = None


@dataclass(frozen=True)
class Storage:
    """Where an itemsize comes from: a dtype group that the constructor chooses, or one fixed dtype.

    `logical` is what the engine calls a dtype stored as another (``float4_e2m1`` in ``uint8``).
    """

    group: str | None = None
    dtype: str | None = None
    logical: str | None = None

    def __post_init__(self) -> None:
        if (self.group is None) == (self.dtype is None):
            raise ValueError("a storage is either a dtype group or a dtype")


@dataclass(frozen=True)
class Dim:
    name: str
    size: Expr


@dataclass(frozen=True)
class Shard:
    """How an engine splits a component over ranks; enters keys and `plan`, never a size or an address."""

    axes: tuple[tuple[str, str], ...]
    blocks: int = 1


@dataclass(frozen=True)
class Component:
    """One kind of buffer. `layers`: name of its layer list, or None without a layer axis."""

    name: str
    ident: str
    dims: tuple[Dim, ...]
    storage: Storage
    layers: str | None = "layers"
    token: bool = True
    when: Cond | None = None
    align: Expr | None = None
    shard: Shard | None = None


@dataclass(frozen=True)
class Record:
    """Components side by side in one padded row. `inner`: axis order, or (``variant.constant``,)."""

    name: str
    ident: str
    holds: tuple[str, ...]
    inner: tuple[str, ...]
    pad_to: Expr


@dataclass(frozen=True)
class Form:
    """A device order. `tensors` index separate tensors, `order` the axes inside one."""

    name: str
    tensors: tuple[str, ...]
    order: tuple[str, ...]
    any_stride: tuple[str, ...] = ()
    base: Expr | None = None


@dataclass(frozen=True)
class Layout:
    """A host order."""

    name: str
    order: tuple[str, ...]


@dataclass(frozen=True)
class Variant:
    """A closed table of constants; a constant is an integer or an axis order."""

    name: str
    choices: tuple[tuple[str, tuple[tuple[str, int | tuple[str, ...]], ...]], ...]


@dataclass(frozen=True)
class Index:
    """What one index addresses. `space`: another pool's indices, turned into rows by `row` (over ``i``)."""

    unit: str
    space: str | None = None
    row: Expr | None = None


@dataclass(frozen=True)
class Pool:
    """A pool as its spec says it, names and expressions resolved."""

    name: str
    class_name: str
    summary: str
    index: Index
    updates: str
    params: tuple[Param, ...]
    dtypes: tuple[tuple[str, tuple[str, ...]], ...]
    components: tuple[Component, ...]
    records: tuple[Record, ...]
    forms: tuple[Form, ...]
    layouts: tuple[Layout, ...]
    variants: tuple[Variant, ...] = ()
    splits: tuple[tuple[str, tuple[Dim, ...]], ...] = ()
    require: tuple[Cond, ...] = ()
    reserved: tuple[int, ...] = ()
    not_carried: tuple[str, ...] = ()
    valid_if: str | None = None
    tag: tuple[str, ...] = ()
    source: str = ""

    @property
    def has_tokens(self) -> bool:
        """Whether pages consist of tokens (else one page is one row: a page row, state slot, request)."""
        return self.index.unit == "token" and self.index.row is None

    @property
    def layer_list(self) -> str | None:
        """The list that `layers` of a group's pool stands for: the only one, or `layers`; None: unclear."""
        named = {c.layers for c in self.components if c.layers is not None} or {"layers"}
        return next(iter(named)) if len(named) == 1 else "layers" if "layers" in named else None


@dataclass(frozen=True)
class PoolRef:
    """A pool in a group: which spec, which layers, what restores with what."""

    name: str
    pool: str
    layers: str | None = None
    index: str | None = None
    hit: str = "all_pages"
    restore_with: str | None = None
    params: tuple[tuple[str, Expr], ...] = ()


@dataclass(frozen=True)
class Group:
    """Pools that move together; `anchor` is the pool whose indices the others derive from."""

    name: str
    summary: str
    pools: tuple[PoolRef, ...]
    anchor: str
    budget: tuple[tuple[str, str], ...] = ()
    params: tuple[Param, ...] = ()
    source: str = ""


# ---- what lowering decides --------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    name: str
    extent: Expr


@dataclass(frozen=True)
class Stride:
    """Bytes from one index of `axis` to the next; `value` None: read from the tensor at bind."""

    axis: str
    value: Expr | None


@dataclass(frozen=True)
class Side:
    """One placed component on one side: its axes in order (outermost first), where it starts, its strides.

    `base`: bytes in front of the component inside its block. The device side only: `table`: axes that index
    a table of tensors; `inner`: how many of the last axes lie in the component's block of a tensor that all
    share; `block`: bytes of all their blocks, None when the tensor has the step from one to the next.
    """

    axes: tuple[Axis, ...]
    base: Expr
    strides: tuple[Stride, ...]
    table: tuple[Axis, ...] = ()
    inner: int | None = None
    block: Expr | None = None

    def __post_init__(self) -> None:
        if tuple(a.name for a in self.axes) != tuple(s.axis for s in self.strides):
            raise ValueError("a side has one stride for every axis")

    def stride(self, axis: str) -> Expr | None:
        return next(s.value for s in self.strides if s.axis == axis)


@dataclass(frozen=True)
class Walk:
    """One way through a component: `outer` axes come from ids, `loops` are walked, `atom` is one copy."""

    name: str
    outer: tuple[str, ...]
    loops: tuple[Axis, ...]
    atom: tuple[Axis, ...]
    atom_bytes: Expr
    runs: Expr
    grain: Expr


@dataclass(frozen=True)
class Item:
    """A placed component or record."""

    name: str
    ident: str
    itemsize: Expr
    layers: str | None
    token: bool
    present: Cond | None
    host: Side
    device: Side
    walks: tuple[Walk, ...]


@dataclass(frozen=True)
class Range:
    """Host bytes of one page that are contiguous: range r of page p starts at ``base + p * nbytes``.

    `left` are the axes outside `page` with their strides: one range for each combination.
    """

    item: str | None
    base: Expr
    left: tuple[tuple[Axis, Expr], ...]
    nbytes: Expr


@dataclass(frozen=True)
class Program:
    """One (variant, form, layout) of a pool, with every address decided.

    `steps`: names and values of all host bases and strides, each made of those before it. `cuts`: whether the
    bytes of a layer of a component are one run of the host page, so that a page can be moved layer by layer.
    """

    ident: str
    variant: tuple[tuple[str, str], ...]
    form: Form
    layout: Layout
    items: tuple[Item, ...]
    host_bytes: Expr
    page_bytes: Expr
    ranges: tuple[Range, ...]
    steps: tuple[tuple[str, Expr], ...] = ()
    page_walk: bool = True
    token_walk: bool = True
    cuts: bool = False


@dataclass(frozen=True)
class Lowered:
    """A pool and its programs. `by_layer`: directions that have kernels which move some layers of a page."""

    pool: Pool
    programs: tuple[Program, ...]
    by_layer: tuple[str, ...] = ("load",)
