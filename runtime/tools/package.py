"""Import name and folder in, the generated package that lies there out."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

DEFAULT_PACKAGE = "poolwright.generated"


class PackageError(Exception):
    """A generated package that cannot be found or loaded; str() says the next step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two arguments every tool has: `package` (import name) and `folder` (Path or None)."""
    parser.add_argument(
        "--package", default=DEFAULT_PACKAGE, metavar="NAME", help="import name of the generated package"
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="its folder, where it cannot be imported by name"
    )


def positive(text: str) -> int:
    """A count of the command line. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def named(form: str | None, layout: str | None) -> str:
    """What was asked for, in words: ``form 'a' with layout 'b'``, or the one that is given."""
    return " with ".join(f"{kind} {name!r}" for kind, name in (("form", form), ("layout", layout)) if name)


def load_package(import_name: str, folder: Path | None) -> ModuleType:
    """The generated package. With a folder it is the one in that folder, whatever is installed.

    A package that Python would not find (or would find elsewhere) is loaded from the folder under
    `import_name`, for this process. Raises PackageError.
    """
    if folder is None:
        return _by_name(import_name)
    init = folder.resolve() / "__init__.py"
    if not init.is_file():
        raise PackageError(f"{folder} holds no generated package (no __init__.py); run `codegen build`")
    loaded = sys.modules.get(import_name)
    if loaded is not None:
        if _file(getattr(loaded, "__file__", None)) == init:
            return loaded
        place = getattr(loaded, "__file__", None)
        raise PackageError(
            f"{import_name} is another package already ({place}), expected {init}; "
            "give import_name another value in poolwright.toml"
        )
    return _by_name(import_name) if _located(import_name) == init else _by_file(import_name, init)


def _by_name(import_name: str) -> ModuleType:
    try:
        return importlib.import_module(import_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{import_name}.".startswith(f"{error.name}."):
            raise
        raise PackageError(
            f"cannot import {import_name}; run `codegen build`, or give its folder with --folder DIR"
        ) from None


def _by_file(import_name: str, init: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        import_name, init, submodule_search_locations=[str(init.parent)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    made = {**_parents(import_name), import_name: module}
    sys.modules.update(made)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for name in made:
            del sys.modules[name]
        raise
    return module


def _parents(import_name: str) -> dict[str, ModuleType]:
    """Empty packages above `import_name`, where there are none: relative imports inside it ask for them."""
    parts = import_name.split(".")
    names = [".".join(parts[:count]) for count in range(1, len(parts))]
    found = {name: ModuleType(name) for name in names if name not in sys.modules}
    for module in found.values():
        module.__path__ = []
    return found


def _located(import_name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(import_name)
    except (ModuleNotFoundError, ValueError):
        return None
    return None if spec is None else _file(spec.origin)


def _file(name: str | None) -> Path | None:
    return None if name is None else Path(name).resolve()
