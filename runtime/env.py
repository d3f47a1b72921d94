"""The one table of environment variables: name in, checked value out."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

PREFIX = "POOLWRIGHT_"
DEFAULT_CACHE = "$XDG_CACHE_HOME/poolwright or ~/.cache/poolwright"


@dataclass(frozen=True)
class Variable:
    """One variable. A value matches `pattern`, in words `expected`; `shown`: the default in words."""

    name: str
    pattern: str
    default: str
    summary: str
    expected: str
    shown: str


def _choice(name: str, summary: str, *allowed: str) -> Variable:
    words = " or ".join(allowed) if len(allowed) < 3 else f"one of {', '.join(allowed)}"
    return Variable(name, "|".join(allowed), allowed[0], summary, words, allowed[0])


def _number(name: str, summary: str, default: str, low: int) -> Variable:
    digits = "0*[1-9][0-9]{0,8}" if low else "[0-9]{1,9}"
    return Variable(name, digits, default, summary, f"an integer of at least {low}", default)


VARIABLES: tuple[Variable, ...] = (
    Variable("CACHE_DIR", ".+", "", "Where compiled code is kept.", "a folder", DEFAULT_CACHE),
    _choice("VERBOSE", "Print every compiler command to stderr.", "0", "1"),
    Variable("CXX", ".+", "", "The C++ compiler.", "a command", "$CXX, else c++, g++, clang++"),
    Variable(
        *("CUDA_ARCH", "sm_[0-9]{2,3}[af]?", "", "The GPU architecture to compile for."),
        *("a compute capability such as sm_90", "that of the device"),
    ),
    _choice("CUDA_COMPILER", "What compiles CUDA kernels.", "nvrtc", "nvcc"),
    _choice("OPTIMIZE", "Optimisation level of the CPU twin (-O).", "2", "0", "1", "3"),
    _choice("PATH", "Forces a transfer path.", "auto", "zero_copy", "staged", "host", "torch"),
    _choice("TWIN", "Which entry of the CPU twin runs.", "atoms", "lanes"),
    _number("THREADS", "Threads of the CPU twin; 0: chosen by the machine.", "0", 0),
    _choice("HUGEPAGES", "Ask for huge pages for host memory.", "0", "1"),
    _number("REGISTER_CHUNK_GB", "GiB of host memory registered in one call.", "16", 1),
)
_BY_NAME = {variable.name: variable for variable in VARIABLES}


def text(name: str) -> str:
    """The value of ``POOLWRIGHT_<name>``; "" where it is unset and has no fixed default.

    An empty value counts as unset. Raises ValueError naming the variable, what was expected and got, and
    KeyError for a name that is not in the table.
    """
    variable = _BY_NAME[name]
    value = os.environ.get(PREFIX + name, "").strip()
    if value and re.fullmatch(variable.pattern, value) is None:
        raise ValueError(
            f"{PREFIX}{name}: expected {variable.expected}, got {value!r}; change it or unset it"
        )
    return value or variable.default


def flag(name: str) -> bool:
    """`text` of a variable that is 0 or 1."""
    return text(name) == "1"


def number(name: str) -> int:
    """`text` of an integer."""
    return int(text(name))


def cache_dir() -> Path:
    """The folder of the cache, absolute; it may not exist yet."""
    given = text("CACHE_DIR")
    if given:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative XDG_CACHE_HOME is to be ignored, says the XDG base directory specification.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "poolwright"
