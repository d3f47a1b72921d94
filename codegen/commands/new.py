"""`codegen new`: a name and a spec to start from in, `specs/NAME.yaml` out."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from poolwright.codegen.commands.common import InputError, unknown
from poolwright.codegen.names import class_problem, name_problem
from poolwright.codegen.project import Project, find_project

NOT_POOLS = ("layouts",)
DEFAULT = "mla"
SHIPPED = Path(__file__).resolve().parent.parent.parent / "specs"


def run(name: str, *, like: str | None) -> int:
    """Write the new spec and say what comes next. Never replaces a file.

    `like` None: the shipped spec of that name where there is one, else `DEFAULT`; a name that is nearly a
    shipped one is refused.
    """
    project = find_project()
    _check_name(name)
    if like is None:
        _check_group(project, name)
        like = name if (SHIPPED / f"{name}.yaml").is_file() else _default(name)
    target = project.specs / f"{name}.yaml"
    if target.exists() or target.is_symlink():
        raise InputError(f"{project.display(target)} exists already; take another name, or edit it")
    source = _find(project, like)
    text = source.read_text(encoding="utf-8")
    if name != like:
        text = adapt(text, name, like)
        _check_class(project, class_name(name))
    with target.open("x", encoding="utf-8", newline="") as file:
        file.write(text)
    told = f"the shipped {name}; run:" if name == like else f"a copy of {like}; edit it, then run:"
    print(f"wrote {project.display(target)}, {told}")
    print(f"  codegen build && codegen verify {name}")
    return 0


def class_name(name: str) -> str:
    """``kda_state`` becomes ``KdaStatePoolHost``, ``my_pool`` becomes ``MyPoolHost``."""
    words = name.split("_")
    words = words[:-1] if words[-1] == "pool" else words
    return "".join(word.capitalize() for word in words) + "PoolHost"


def adapt(text: str, name: str, like: str) -> str:
    """The spec under its new name: `pool`, `class` and `summary` replaced, everything else kept."""
    summary = f"Made after {like}; say here what one row holds."
    for key, value in (("pool", name), ("class", class_name(name)), ("summary", summary)):
        found = list(_top_level(key).finditer(text))
        if len(found) != 1:
            raise InputError(
                f"spec {like} has {len(found)} lines `{key}:` at its left edge, expected 1; mend it"
            )
        line = f"{key}: {value}{found[0]['note'] or ''}"
        text = text[: found[0].start()] + line + text[found[0].end() :]
    return text


def _top_level(key: str) -> re.Pattern[str]:
    # The value may go on in indented lines below; a comment at the end of the line stays.
    return re.compile(rf"^{key}:[^\n#]*?(?P<note>[ \t]+#[^\n]*)?(?:\n[ \t]+[^\n]+)*$", re.MULTILINE)


def _check_name(name: str) -> None:
    problem = name_problem(name)
    if problem is None and name in NOT_POOLS:
        problem = f"{name!r} is the file of the layouts: take another name"
    if problem is None and class_problem(class_name(name)) is not None:
        problem = f"{name!r} is too long for the class {class_name(name)}: take a shorter name"
    if problem is not None:
        raise InputError(problem)


def _check_group(project: Project, name: str) -> None:
    """Who asks for a shipped group by its name does not want a copy of `DEFAULT`."""
    group = SHIPPED / "groups" / f"{name}.yaml"
    if group.is_file():
        pools = dict.fromkeys(re.findall(r"\bpool: *([a-z0-9_]+)", group.read_text(encoding="utf-8")))
        commands = ", ".join(f"`codegen new {pool}`" for pool in pools)
        place = project.display(project.specs / "groups")
        raise InputError(
            f"{name!r} is a shipped group, not a pool: take its pools ({commands}) and copy "
            f"{group} to {place}/; for a pool of that name say --like POOL"
        )


def _default(name: str) -> str:
    """`DEFAULT`, unless the name is nearly that of something shipped: then it is probably misspelt."""
    close = get_close_matches(name, [*_names(SHIPPED), *_names(SHIPPED / "groups")], n=3)
    if close:
        known = " or ".join(map(repr, close))
        raise InputError(
            f"{name!r} is no shipped pool or group (did you mean {known}?); for a new pool of that name say "
            f"--like POOL"
        )
    return DEFAULT


def _find(project: Project, like: str) -> Path:
    """The spec to start from: one of the project's, else one that is shipped."""
    folders = (project.specs, SHIPPED)
    for folder in folders:
        if name_problem(like) is None and like not in NOT_POOLS and (folder / f"{like}.yaml").is_file():
            return folder / f"{like}.yaml"
    names = sorted({name for folder in folders for name in _names(folder)})
    raise InputError(unknown("spec to start from", like, names))


def _names(folder: Path) -> list[str]:
    """The pools whose specs are in this folder."""
    return sorted({path.stem for path in folder.glob("[a-z]*.yaml")} - set(NOT_POOLS))


def _check_class(project: Project, wanted: str) -> None:
    for path in sorted(project.specs.glob("*.yaml")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if re.search(rf"^class:\s*{wanted}\s*(#|$)", text, re.MULTILINE):
            place = project.display(path)
            raise InputError(f"{place} has the class {wanted} already; take another name")
