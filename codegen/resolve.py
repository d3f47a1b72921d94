"""A specs folder in, its pools, groups and layouts out; or every mistake in them, with its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from poolwright.codegen import ir, load, schema
from poolwright.codegen.collect import Checks
from poolwright.codegen.errors import Location, SpecError, SpecErrors
from poolwright.codegen.load import Document
from poolwright.codegen.names import camel, name_problem
from poolwright.codegen.orders import check_layout
from poolwright.codegen.resolve_group import resolve_group
from poolwright.codegen.resolve_pool import resolve_pool

T = TypeVar("T")

LAYOUTS = "layouts.yaml"
GROUPS = "groups"


@dataclass(frozen=True)
class Specs:
    """What a specs folder says, each sorted by name. `documents`: the files behind it, by path."""

    pools: tuple[ir.Pool, ...]
    groups: tuple[ir.Group, ...]
    layouts: tuple[ir.Layout, ...]
    documents: Mapping[str, Document[Any]] = field(default_factory=dict, repr=False, compare=False)

    def locate(self, source: str, where: str) -> Location:
        """The place of a dotted path (``layouts[1]``) in a spec, or of the deepest part of it that exists."""
        document = self.documents.get(source)
        return Location(source) if document is None else document.locate(where)


def read_specs(folder: Path, root: Path) -> Specs:
    """All specs of `folder`; paths in messages are relative to `root`. Raises the first SpecError."""
    reader = _Reader(folder, root)
    specs = reader.read()
    if reader.errors:
        raise reader.errors_in_order()[0]
    return specs


def read_some(folder: Path, root: Path) -> tuple[Specs, tuple[SpecError, ...]]:
    """The specs of `folder` that can be read, and every mistake in the others. A group whose pools cannot be
    read is left out without a mistake of its own."""
    reader = _Reader(folder, root)
    return reader.read(), reader.errors_in_order()


def check_specs(folder: Path, root: Path) -> tuple[SpecError, ...]:
    """Every mistake in the specs of `folder`, by file and place; empty when there is none."""
    reader = _Reader(folder, root)
    reader.read()
    return reader.errors_in_order()


def read_spec_text(text: str, path: str, layouts: Mapping[str, ir.Layout]) -> ir.Pool:
    """The pool of a text that stands in for the file `path`. Raises the first SpecError."""
    return _first(lambda: resolve_pool(load.load(text.encode(), path, schema.Pool), layouts, Path(path).stem))


def read_group_text(text: str, path: str, pools: Mapping[str, ir.Pool]) -> ir.Group:
    """The group of a text that stands in for the file `path`. Raises the first SpecError."""
    return _first(lambda: resolve_group(load.load(text.encode(), path, schema.Group), pools, Path(path).stem))


def read_layouts_text(text: str, path: str) -> dict[str, ir.Layout]:
    """The layouts of a text that stands in for a layouts.yaml. Raises the first SpecError."""
    return _first(lambda: resolve_layouts(load.load(text.encode(), path, schema.Layouts), {}))


def built_in_layouts() -> dict[str, ir.Layout]:
    """The layouts that ship with the generator, by name."""
    file = _built_in_file()
    return read_layouts_text(file.read_text(encoding="utf-8"), f"specs/{LAYOUTS}")


def resolve_layouts(document: Document[Any], known: Mapping[str, ir.Layout]) -> dict[str, ir.Layout]:
    """The layouts of a document; one that `known` has must be the same there. Raises SpecErrors."""
    checks = Checks(document)
    result = {}
    for name, order in document.value.items():
        checks.name((name,), name_problem(name))
        with checks.part():
            if name in known and known[name].order != tuple(order):
                checks.fail(
                    (name,),
                    f"layout {name!r} is built in as [{', '.join(known[name].order)}]: take another name",
                    key=True,
                )
            for index, axis in enumerate(order):
                checks.name((name, index), name_problem(axis), key=False)
            check_layout(document, name, order)
        result[name] = ir.Layout(name, tuple(order))
    checks.finish()
    return result


def _first(make: Callable[[], T]) -> T:
    try:
        return make()
    except SpecErrors as errors:
        raise errors.errors[0] from None


def _built_in_file() -> Path:
    return Path(__file__).resolve().parent.parent / "specs" / LAYOUTS


class _Reader:
    """Reads one folder and keeps the mistakes."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root = folder, root
        self.errors: list[SpecError] = []
        self.documents: dict[str, Document[Any]] = {}

    def errors_in_order(self) -> tuple[SpecError, ...]:
        return tuple(sorted(self.errors, key=lambda error: error.location))

    def read(self) -> Specs:
        if not self.folder.is_dir():
            place = Location(self._name(self.folder))
            self.errors.append(
                SpecError(place, "", "no such folder: create it, or set `specs` in poolwright.toml")
            )
            return Specs((), (), ())
        layouts = self._layouts()
        pools = {pool.name: pool for pool in self._pools(layouts)}
        errors = tuple(self.errors)
        groups = self._groups(pools)
        if errors:
            self.errors = list(errors)  # mistakes in groups may be nothing but pools that are missing
        return Specs(
            tuple(pools[name] for name in sorted(pools)),
            tuple(sorted(groups, key=lambda group: group.name)),
            tuple(layouts[name] for name in sorted(layouts)),
            self.documents,
        )

    def _name(self, file: Path) -> str:
        return (file.relative_to(self.root) if file.is_relative_to(self.root) else file).as_posix()

    def _files(self, folder: Path) -> list[Path]:
        if not folder.is_dir():
            return []
        files = [file for file in sorted(folder.iterdir()) if not file.name.startswith(".")]
        for file in files:
            if file.suffix == ".yml":
                self.errors.append(
                    SpecError(Location(self._name(file)), "", "specs end in .yaml: rename the file")
                )
        return [file for file in files if file.suffix == ".yaml"]

    def _document(self, file: Path, kind: Any) -> Document[Any] | None:
        path = self._name(file)
        try:
            self.documents[path] = load.read(file, path, kind)
        except SpecError as error:
            self.errors.append(error)
        except SpecErrors as errors:
            self.errors += errors.errors
        return self.documents.get(path)

    def _resolved(self, make: Callable[[], T]) -> T | None:
        try:
            return make()
        except SpecErrors as errors:
            self.errors += errors.errors
            return None

    def _layouts(self) -> dict[str, ir.Layout]:
        result = {} if self._is_built_in() else built_in_layouts()
        file = self.folder / LAYOUTS
        document = self._document(file, schema.Layouts) if file.exists() else None
        if document is not None:
            own = self._resolved(lambda: resolve_layouts(document, result))
            result = result | (own or {})
        return result

    def _is_built_in(self) -> bool:
        return (self.folder / LAYOUTS).resolve() == _built_in_file()

    def _pools(self, layouts: Mapping[str, ir.Layout]) -> list[ir.Pool]:
        result: list[ir.Pool] = []
        for file in self._files(self.folder):
            document = None if file.name == LAYOUTS else self._document(file, schema.Pool)
            pool = None if document is None else self._pool(document, layouts, file.stem)
            if document is not None and pool is not None:
                self._check_class(document, pool, result)
                result.append(pool)
        return result

    def _pool(self, document: Document[Any], layouts: Mapping[str, ir.Layout], stem: str) -> ir.Pool | None:
        return self._resolved(lambda: resolve_pool(document, layouts, stem))

    def _check_class(self, document: Document[Any], pool: ir.Pool, others: list[ir.Pool]) -> None:
        other = next((one for one in others if one.class_name == pool.class_name), None)
        if other is not None:
            message = f"{pool.class_name!r} is the class of {other.source} already: take another name"
            self.errors.append(document.error(("class",), message))

    def _groups(self, pools: Mapping[str, ir.Pool]) -> list[ir.Group]:
        result: list[ir.Group] = []
        for file in self._files(self.folder / GROUPS):
            document = self._document(file, schema.Group)
            group = None if document is None else self._group(document, pools, file.stem)
            if document is not None and group is not None:
                self._check_group_class(document, group, result)
                result.append(group)
        return result

    def _check_group_class(self, document: Document[Any], group: ir.Group, others: list[ir.Group]) -> None:
        other = next((one for one in others if camel(one.name) == camel(group.name)), None)
        if other is not None:
            message = f"its class is that of {other.source} already: take another name"
            self.errors.append(document.error(("group",), message))

    def _group(self, document: Document[Any], pools: Mapping[str, ir.Pool], stem: str) -> ir.Group | None:
        return self._resolved(lambda: resolve_group(document, pools, stem))
