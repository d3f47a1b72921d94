"""`codegen verify`, `compile`, `doctor`: the arguments handed to the runtime's tool of that name."""

from __future__ import annotations

from collections.abc import Sequence

from poolwright.codegen.project import find_project

WITHOUT_PROJECT = ("doctor",)
HELP = {"--help", "-h"}


def run(tool: str, arguments: Sequence[str]) -> int:
    """The tool's exit code; it gets the project's import name and output folder."""
    from poolwright.runtime.__main__ import main

    if tool in WITHOUT_PROJECT or HELP & set(arguments):
        return main([tool, *arguments], prog="codegen")
    return main([tool, *_package(arguments), *arguments], prog="codegen")


def _package(arguments: Sequence[str]) -> list[str]:
    """The project's package, unless another is named: that one is found by its own name."""
    if any(word.split("=")[0] == "--package" for word in arguments):
        return []
    project = find_project()
    return ["--package", project.import_name, "--folder", str(project.output)]
