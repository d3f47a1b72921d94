"""Names in a spec: which are allowed, what is wrong with the others, which one was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_NAME = 60
MAX_SUMMARY = 100

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_CLASS = re.compile(r"[A-Z][A-Za-z0-9]*")
_PATTERN = re.compile(r"[A-Za-z0-9_.*?]+")

KEYWORDS = frozenset(
    # Python
    "and as assert async await break class continue def del elif else except finally for from global if "
    "import in is lambda nonlocal not or pass raise return try while with yield match case type "
    "true false none null "
    # C++ and CUDA, and what a C++ compiler may define as a macro
    "alignas alignof and_eq asm auto bitand bitor bool catch char char8_t char16_t char32_t compl concept "
    "const consteval constexpr constinit const_cast co_await co_return co_yield decltype default delete do "
    "double dynamic_cast enum explicit export extern float friend goto inline int long mutable namespace new "
    "noexcept not_eq nullptr operator or_eq private protected public register reinterpret_cast requires "
    "short signed sizeof static static_assert static_cast struct switch template this thread_local throw "
    "typedef typeid typename union unsigned using virtual void volatile wchar_t xor xor_eq "
    "linux unix errno main std stdin stdout stderr dim3 u8 u16 u32 u64 i32 i64 size_t free malloc calloc "
    "realloc memcpy memmove memset exit abort "
    # names inside generated functions
    "view run base byte bytes pages describe describe_program host_id device_id host_page device_page "
    "host_token device_token super pw".split()
)

CLASSES = frozenset(
    "None True False Component DevicePart Form HostLayout HostPart Iterable Layout Mapping PageRanges Param "
    "PoolSpec Program Record Walk HostPool RequiredBytes SPEC "
    "GroupBytes GroupSpec MemberSpec NotRequired TypedDict GROUPS POOLS TYPE_CHECKING".split()
)
"""Names that generated modules have beside the class of a pool."""

GROUP_CLASSES = ("HostPoolGroup", "Arguments")
"""Ends of the names of classes that a group has."""

ARGUMENTS = frozenset(
    # what a pool's constructor and its methods take beside the spec's own parameters
    "self cls dtype device layers page_size layout form capacity_pages capacity_bytes staging_bytes "
    "capture_bytes require validate pin numa threads name label allocator hugepages page_bytes "
    "stream producer readers unit order "
    # symbols with a meaning of their own
    "pages i record component page token layer element inner "
    # functions of expressions and names that generated code uses
    "min max ceil_div align_up gcd len range sum sizes torch math".split()
)

PREFIXES = (
    *("host_", "device_", "atom_", "atoms_", "runs_", "run_", "grain_", "extent_", "itemsize_"),
    *("align_", "present_", "table_", "vector_", "stride_", "move_", "copy_", "lanes_", "staging_"),
)
"""Beginnings of the constants that generated code defines beside the parameters."""


def name_problem(text: str) -> str | None:
    """Why `text` is no name for a parameter, component, dimension, form, layout or choice; None if it is."""
    if not _NAME.fullmatch(text):
        return f"{shorten(text)} is no name: use lower-case letters, digits and underscores, a letter first"
    if "__" in text:
        return f"{shorten(text)} has a double underscore, which C++ keeps for itself"
    if len(text) > MAX_NAME:
        return f"{shorten(text)} has {len(text)} characters, at most {MAX_NAME} are allowed"
    if text in KEYWORDS:
        return f"{text!r} is a word of Python, C++, YAML or generated code: take another name"
    return None


def argument_problem(text: str) -> str | None:
    """Why `text` cannot be an argument of the generated constructor; None if it can."""
    problem = name_problem(text)
    if problem is None and text in ARGUMENTS:
        return f"{text!r} is an argument of every pool or a word of expressions: take another name"
    prefix = next((p for p in PREFIXES if text.startswith(p)), None)
    if problem is None and prefix is not None:
        return f"names that start with {prefix!r} belong to generated code: take another name"
    return problem


def class_problem(text: str) -> str | None:
    """Why `text` is no class name; None if it is one."""
    if not _CLASS.fullmatch(text) or len(text) > MAX_NAME or text in CLASSES:
        return f"{shorten(text)} is no class name: use letters and digits, an upper-case letter first"
    end = next((end for end in GROUP_CLASSES if text.endswith(end)), None)
    if end is not None:
        return f"names that end in {end!r} belong to classes of groups: take another name"
    return None


def camel(name: str) -> str:
    """The name as the beginning of a class: ``kv_state`` is ``KvState``."""
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


def text_problem(text: str, longest: int = MAX_SUMMARY) -> str | None:
    """Why `text` is no line of prose; it ends up in docstrings and comments and must not end them."""
    if not text.strip():
        return "expected one line of text, got nothing"
    if len(text) > longest:
        return f"expected one line of at most {longest} characters, got {len(text)}"
    if not text.isprintable():
        return "expected one line of printable text, got a control or formatting character"
    bad = next((part for part in ('"', "\\", "*/", "/*", "??") if part in text), None)
    return None if bad is None else f"text must not contain {bad} (it becomes a docstring and a comment)"


def pattern_problem(text: str) -> str | None:
    """Why `text` is no pattern of tensor names; None if it is one."""
    if not _PATTERN.fullmatch(text) or len(text) > MAX_NAME:
        return f"{shorten(text)} is no pattern of tensor names: use letters, digits, _ . * ?"
    return None


def suggest(text: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest of `known`, or the list of them when none is close."""
    from difflib import get_close_matches

    names = list(dict.fromkeys(known))
    close = get_close_matches(text[:MAX_NAME], names, n=1)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (known: {', '.join(names)})" if 0 < len(names) <= 24 else ""


def shorten(text: str, longest: int = 40) -> str:
    """The text in quotes, control characters escaped, its tail dropped when it is long."""
    return repr(text) if len(text) <= longest else repr(text[:longest]) + "..."
