"""`codegen verify`, `compile`, `doctor`: the arguments handed to the runtime's tool of that name."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from poolwright.codegen.commands.common import InputError, render_project
from poolwright.codegen.project import Project, find_project
from poolwright.codegen.write import compare

WITHOUT_PROJECT = ("doctor",)
ABOUT_GENERATED_CODE = ("verify", "bench")
HELP = {"--help", "-h"}


def run(tool: str, arguments: Sequence[str]) -> int:
    """The tool's exit code; it gets the project's import name and output folder."""
    from poolwright.runtime.__main__ import main

    if tool in WITHOUT_PROJECT or HELP & set(arguments):
        return main([tool, *arguments], prog="codegen")
    if any(word.split("=")[0] == "--package" for word in arguments):
        return main([tool, *arguments], prog="codegen")  # found by its own name
    project = find_project()
    found = main(
        [tool, "--package", project.import_name, "--folder", str(project.output), *arguments], prog="codegen"
    )
    if tool in ABOUT_GENERATED_CODE:
        _tell_stale(project)
    return found


def _tell_stale(project: Project) -> None:
    """Last, where it is seen: what was said is said of generated code, whatever the specs have become."""
    if not project.specs.is_dir() or not project.output.is_dir():
        return
    try:
        stale = [found.path for found in compare(render_project(project)[1], project.output)]
    except InputError:
        print("note: the specs have mistakes; this was about what was generated before", file=sys.stderr)
        return
    if stale:
        what = f"{stale[0]} and {len(stale) - 1} more" if len(stale) > 1 else stale[0]
        print(f"note: {what} not as the specs say: run `codegen build`, then this again", file=sys.stderr)
