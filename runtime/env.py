"""The one table of environment variables: name in, checked value out; also as a Markdown table."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "POOLWRIGHT_"


@dataclass(frozen=True)
class Variable:
    """One variable. `kind`: flag, integer, choice, arch, path or text; `shown` is its default in words."""

    name: str
    kind: str
    default: bool | int | str
    summary: str
    allowed: tuple[str, ...] = ()
    low: int = 0
    shown: str = ""

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        if self.kind in ("flag", "choice"):
            return " or ".join(self.allowed) if len(self.allowed) < 3 else f"one of {', '.join(self.allowed)}"
        return {
            "integer": f"an integer of at least {self.low}",
            "arch": "a compute capability such as sm_90",
            "path": "a folder",
            "text": "a command",
        }[self.kind]


def _flag(name: str, summary: str) -> Variable:
    return Variable(name, "flag", False, summary, ("0", "1"), shown="0")


def _choice(name: str, summary: str, *allowed: str) -> Variable:
    return Variable(name, "choice", allowed[0], summary, allowed, shown=allowed[0])


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "CACHE_DIR",
        "path",
        "",
        "Where compiled code is kept.",
        shown="$XDG_CACHE_HOME/poolwright or ~/.cache/poolwright",
    ),
    _flag("VERBOSE", "Print every compiler command to stderr."),
    Variable("CXX", "text", "", "The C++ compiler.", shown="$CXX, else c++, g++, clang++"),
    Variable("CUDA_ARCH", "arch", "", "The GPU architecture to compile for.", shown="that of the device"),
    _choice("CUDA_COMPILER", "What compiles CUDA kernels.", "nvrtc", "nvcc"),
    _choice("OPTIMIZE", "Optimisation level of the CPU twin (-O).", "2", "0", "1", "3"),
    _choice("PATH", "Forces a transfer path.", "auto", "zero_copy", "staged", "host", "torch"),
    _choice("TWIN", "Which entry of the CPU twin runs.", "atoms", "lanes"),
    Variable("THREADS", "integer", 0, "Threads of the CPU twin; 0: chosen by the machine.", shown="0"),
    _flag("HUGEPAGES", "Ask for huge pages for host memory."),
    Variable(
        "REGISTER_CHUNK_GB", "integer", 16, "GiB of host memory registered in one call.", low=1, shown="16"
    ),
)
_BY_NAME = {variable.name: variable for variable in VARIABLES}


def get(name: str) -> Any:
    """The value of ``POOLWRIGHT_<name>``: bool, int or str ("" where unset means "find it").

    An empty value counts as unset. Raises ValueError naming the variable, what was expected and got, and
    KeyError for a name that is not in the table.
    """
    variable = _BY_NAME[name]
    text = os.environ.get(PREFIX + name, "").strip()
    if not text:
        return str(_default_cache()) if name == "CACHE_DIR" else variable.default
    if variable.kind in ("flag", "choice") and text in variable.allowed:
        return text == "1" if variable.kind == "flag" else text
    if variable.kind == "integer" and re.fullmatch(r"[0-9]{1,9}", text) and int(text) >= variable.low:
        return int(text)
    if variable.kind == "arch" and re.fullmatch(r"sm_[0-9]{2,3}[af]?", text):
        return text
    if variable.kind == "path":
        return str(Path(text).expanduser().absolute())
    if variable.kind == "text":
        return text
    raise ValueError(f"{PREFIX}{name}: expected {variable.expected}, got {text!r}; change it or unset it")


def flag(name: str) -> bool:
    """`get` of a flag."""
    return bool(get(name))


def number(name: str) -> int:
    """`get` of an integer."""
    return int(get(name))


def text(name: str) -> str:
    """`get` of anything that is text; "" where it is unset and has no fixed default."""
    return str(get(name))


def cache_dir() -> Path:
    """The folder of the cache, absolute; it may not exist yet."""
    return Path(text("CACHE_DIR"))


def markdown_table() -> str:
    """The table for the README, one row for each variable."""
    rows = ["| variable | value | default | what it does |", "|---|---|---|---|"]
    rows += [f"| `{PREFIX}{v.name}` | {v.expected} | {v.shown} | {v.summary} |" for v in VARIABLES]
    return "\n".join(rows) + "\n"


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative XDG_CACHE_HOME is to be ignored, says the XDG base directory specification.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "poolwright"
