"""`codegen build`: specs in, the output folder brought up to date or compared with them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from poolwright.codegen.commands.common import InputError, paint_diff, render_project, unknown
from poolwright.codegen.project import Project, find_project
from poolwright.codegen.write import Difference, Report, compare, write

SHORT_DIFF = 40


def run(chosen: Sequence[str], *, check: bool, diff: bool, out: Path | None) -> int:
    """Write what changed, or with `check` only name it; 1 when `check` finds a difference."""
    project = find_project()
    specs, files = render_project(project)
    files = _select(files, chosen, [pool.name for pool in specs.pools], [one.name for one in specs.groups])
    folder = project.output if out is None else out.resolve()
    if folder == project.specs or project.specs in folder.parents or folder in project.specs.parents:
        raise InputError(f"--out {folder}: the output folder and the specs folder must stand apart")
    prune = not chosen
    mend = " ".join(["codegen build", *chosen, *([] if out is None else ["--out", str(out)])])
    if check:
        return _check(project, folder, compare(files, folder, prune=prune), diff, mend, len(files))
    if diff:
        _print_diffs(project, folder, compare(files, folder, prune=prune), whole=True)
    _tell(project, folder, write(files, folder, prune=prune))
    return 0


def _select(
    files: Mapping[str, str], chosen: Sequence[str], pools: Sequence[str], groups: Sequence[str]
) -> dict[str, str]:
    """The files of the chosen pools and groups and those that belong to neither; all when none is chosen."""
    names = {PurePosixPath(word).stem if word.endswith((".yaml", ".yml")) else word for word in chosen}
    wrong = sorted(names - {*pools, *groups})
    if wrong:
        raise InputError("\n".join(unknown("pool or group", name, [*pools, *groups]) for name in wrong))
    if not names:
        return dict(files)
    others = {f"pools/{name}/" for name in pools if name not in names}
    others |= {f"groups/{name}/" for name in groups if name not in names}
    return {path: text for path, text in files.items() if not path.startswith(tuple(others))}


def _check(
    project: Project, folder: Path, found: tuple[Difference, ...], whole: bool, mend: str, count: int
) -> int:
    if not found:
        print(f"up to date: {count} files")
        return 0
    for difference in found:
        print(f"{project.display(folder / difference.path)}: {difference.kind}")
    _print_diffs(project, folder, found, whole=whole)
    sys.stdout.flush()
    noun = "difference" if len(found) == 1 else "differences"
    print(f"{len(found)} {noun}; run `{mend}` and review the diff", file=sys.stderr)
    foreign = [difference.path for difference in found if difference.kind == "orphan" and not difference.ours]
    _tell_foreign(project, folder, foreign)
    return 1


def _print_diffs(project: Project, folder: Path, found: tuple[Difference, ...], *, whole: bool) -> None:
    for difference in found:
        lines = difference.diff.splitlines(keepends=True)
        shown = lines if whole else lines[:SHORT_DIFF]
        print(paint_diff("".join(shown)), end="")
        if len(lines) > len(shown):
            path = project.display(folder / difference.path)
            more = len(lines) - len(shown)
            print(f"... {more} more lines of {path}: `codegen build --check --diff` shows them")


def _tell(project: Project, folder: Path, report: Report) -> None:
    for path in report.written:
        print(f"wrote {project.display(folder / path)}")
    for path in report.removed:
        print(f"removed {project.display(folder / path)}")
    _tell_foreign(project, folder, report.kept)
    total = len(report.written) + report.unchanged
    if report.written or report.removed:
        counts = f"{len(report.written)} written, {len(report.removed)} removed, {report.unchanged} unchanged"
        print(f"built: {counts}")
    else:
        print(f"up to date: {total} files")


def _tell_foreign(project: Project, folder: Path, paths: Sequence[str]) -> None:
    for path in paths:
        place = project.display(folder / path)
        print(f"{place}: not generated, so left alone; move it, or run `rm {place}`", file=sys.stderr)
