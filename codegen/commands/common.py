"""What commands share: a project in, its specs lowered and rendered out; errors turned into messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from poolwright.codegen.names import shorten, suggest
from poolwright.codegen.project import Project, ProjectError
from poolwright.codegen.write import WriteError

if TYPE_CHECKING:
    from poolwright.codegen import ir
    from poolwright.codegen.errors import SpecError
    from poolwright.codegen.resolve import Specs


class InputError(Exception):
    """A mistake of the user; str() is the whole message, one or more lines."""


def user_message(error: Exception) -> str | None:
    """The message of an error that the user can mend, None for any other."""
    # Not imported here: an error that was raised has its module loaded, and a broken one must not hide it.
    errors = sys.modules.get("poolwright.codegen.errors")
    ours = (InputError, ProjectError, WriteError, *([errors.SpecError] if errors is not None else []))
    if isinstance(error, ours):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; check the path and its permissions"
    return None


def read_specs(project: Project) -> Specs:
    """All specs of the project. Raises InputError with every mistake found, one a line."""
    from poolwright.codegen import resolve
    from poolwright.codegen.errors import SpecError

    try:
        return resolve.read_specs(project.specs, project.root)
    except SpecError as error:
        errors = resolve.check_specs(project.specs, project.root) or (error,)
        raise InputError(_lines(errors)) from None


def read_spec(project: Project, name: str) -> Specs:
    """The specs that can be read; files that cannot are named on stderr.

    Raises InputError with every mistake found when the spec of that name has one, or a pool of that group.
    """
    from poolwright.codegen import resolve

    specs, errors = resolve.read_some(project.specs, project.root)
    broken = list(dict.fromkeys(error.location.path for error in errors))
    sources = {pool.name: pool.source for pool in specs.pools}
    sources |= {group.name: group.source for group in specs.groups}
    unread = name not in sources and name in {PurePath(path).stem for path in (*specs.documents, *broken)}
    if errors and (unread or sources.get(name) in broken or not sources):
        raise InputError(_lines(errors))
    if errors:
        told = f"left out for mistakes that `codegen build --check` names: {', '.join(broken)}"
        print(told, file=sys.stderr)
    return specs


def lower_pools(pools: Iterable[ir.Pool], specs: Specs) -> tuple[ir.Lowered, ...]:
    """The pools lowered. Raises InputError with the place of every one that has no lowering."""
    from poolwright.codegen import lower
    from poolwright.codegen.errors import SpecError

    lowered, errors = [], []
    for pool in pools:
        try:
            lowered.append(lower.lower(pool))
        except lower.LowerError as error:
            place = specs.locate(error.pool.source, error.where)
            errors.append(SpecError(place, error.where, error.message))
    if errors:
        raise InputError(_lines(errors))
    return tuple(lowered)


def render_project(project: Project) -> tuple[Specs, dict[str, str]]:
    """The specs and every file they render to: posix path relative to the output folder, and its text."""
    from poolwright.codegen import render
    from poolwright.runtime import env

    render.keep_compiled(env.cache_dir() / "templates")
    specs = read_specs(project)
    return specs, render.render(lower_pools(specs.pools, specs), specs.groups)


def find_pool(specs: Specs, name: str) -> ir.Pool:
    """The pool of that name. Raises InputError that names the pools and groups that are close."""
    names = [pool.name for pool in specs.pools]
    if name not in names:
        groups = (group.name for group in specs.groups)
        raise InputError(unknown("pool or group", name, [*names, *groups]))
    return specs.pools[names.index(name)]


def unknown(kind: str, name: str, known: Sequence[str]) -> str:
    """The message for a name that is none of `known`."""
    return f"unknown {kind} {shorten(name)}{suggest(name, known)}"


def paint_diff(diff: str) -> str:
    """The diff with colours when stdout is a terminal that wants them."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return diff
    colours = {"+": "\033[32m", "-": "\033[31m", "@": "\033[36m"}
    lines = (
        f"{colours[line[0]]}{line}\033[0m" if line[:1] in colours else line for line in diff.splitlines()
    )
    return "".join(f"{line}\n" for line in lines)


def _lines(errors: Iterable[SpecError]) -> str:
    return "\n".join(str(error) for error in errors)
