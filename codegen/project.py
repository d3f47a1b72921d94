"""The project around a folder: `poolwright.toml` in, checked folders and the import name out."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_NAME = "poolwright.toml"
DEFAULTS = {"specs": "specs", "output": "generated", "import_name": "generated"}
EXAMPLE = '[poolwright]\nspecs = "specs"\noutput = "generated"\nimport_name = "generated"'


class ProjectError(Exception):
    """A project file that is missing or wrong; str() starts with its place where there is one."""


@dataclass(frozen=True)
class Project:
    """Absolute folders of a project; `import_name` is the package that the output folder is."""

    root: Path
    specs: Path
    output: Path
    import_name: str

    def display(self, path: Path) -> str:
        """The path as messages show it: relative to the project where it lies inside, with ``/``."""
        return (path.relative_to(self.root) if path.is_relative_to(self.root) else path).as_posix()


def find_project(start: Path | None = None) -> Project:
    """The project of the nearest `poolwright.toml` at or above `start` (default: the working directory).

    Raises ProjectError when there is none or when it cannot be used.
    """
    folder = (start or Path.cwd()).resolve()
    for candidate in (folder, *folder.parents):
        if (candidate / FILE_NAME).is_file():
            return read_project(candidate)
    raise ProjectError(
        f"no {FILE_NAME} in {folder} or above; change into a project, "
        f"or create {folder / FILE_NAME} with:\n{EXAMPLE}"
    )


def read_project(root: Path) -> Project:
    """Read `root/poolwright.toml`; `root` is absolute. Raises ProjectError with file, line and column."""
    text, table = _parse(root / FILE_NAME)
    for key in table:
        if key not in DEFAULTS:
            raise _error(text, key, f"unknown key {key!r}; known keys are {', '.join(DEFAULTS)}")
    values = {key: table.get(key, default) for key, default in DEFAULTS.items()}
    for key, value in values.items():
        if not isinstance(value, str) or not value:
            raise _error(text, key, f"{key}: expected a string that is not empty, got {value!r}")
    specs = _inside(root, text, "specs", values["specs"])
    output = _inside(root, text, "output", values["output"])
    if not specs.is_dir():
        raise _error(
            text, "specs", f"specs: no folder {values['specs']!r} in the project; run `mkdir {specs}`"
        )
    if specs == output or specs.is_relative_to(output) or output.is_relative_to(specs):
        raise _error(
            text, "output", "output: must lie outside the specs folder, and specs outside the output"
        )
    return Project(root, specs, output, _import_name(text, values["import_name"]))


def _parse(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except UnicodeDecodeError:
        raise ProjectError(f"{FILE_NAME}:1:1: not UTF-8 text; save the file as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ProjectError(_toml_message(str(error))) from None
    for key in document:
        if key != "poolwright":
            raise _error(text, key, f"unknown table {key!r}; everything stands in [poolwright]")
    table = document.get("poolwright", {})
    if not isinstance(table, dict):
        raise _error(text, "poolwright", f"poolwright: expected a table [poolwright], got {table!r}")
    return text, table


def _toml_message(message: str) -> str:
    found = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    if found is None:
        return f"{FILE_NAME}:1:1: not TOML: {message}"
    return f"{FILE_NAME}:{found[1]}:{found[2]}: not TOML: {message[: found.start()]}"


def _error(text: str, key: str, message: str) -> ProjectError:
    line = next((n for n, row in enumerate(text.splitlines(), 1) if _names_key(row, key)), 1)
    return ProjectError(f"{FILE_NAME}:{line}:1: {message}")


def _names_key(row: str, key: str) -> bool:
    return re.match(rf"""\s*\[?\s*["']?{re.escape(key)}["']?\s*([\]=.]|$)""", row) is not None


def _inside(root: Path, text: str, key: str, value: str) -> Path:
    # resolve() follows symlinks, so a link that leads out of the project counts as leaving it.
    path = (root / value).resolve()
    if path == root or not path.is_relative_to(root):
        raise _error(text, key, f"{key}: expected a folder inside the project, got {value!r}")
    return path


def _import_name(text: str, name: str) -> str:
    if not all(part.isidentifier() and part.isascii() for part in name.split(".")):
        raise _error(text, "import_name", f"import_name: expected a dotted Python name, got {name!r}")
    return name
