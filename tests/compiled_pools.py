"""Many generated pools in one shared library: samples in, callable entries of each out.

Compiling a library for each of a thousand pools would take minutes, nearly all of it the same headers. So
their texts are concatenated, each in a namespace of its own. Most of the rest is spent on instances of
small templates, so only the pools marked `whole` are compiled as they are, kernels and all. In the others
the loop of a copy stands in its function, and both directions share one instance of it.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from random_pools import Sample

from poolwright.codegen import lower, render, render_cpp
from poolwright.codegen.ir import Program

INCLUDE = Path(__file__).resolve().parents[1] / "runtime" / "include"

HEAD = """\
#define PW_ALIGN {align}
#define PW_EXPORT inline
#include "poolwright/lanes.h"
#include "poolwright/host_copy.h"

namespace pw {{
static bool loading = false;
struct Either {{
  static const char* from(const Run& run) {{ return loading ? Load::from(run) : WriteBack::from(run); }}
  static char* to(const Run& run) {{ return loading ? Load::to(run) : WriteBack::to(run); }}
}};
}}  // namespace pw
"""

FLAGS = (
    *("-std=c++17", "-O0", "-w", "-shared", "-fPIC", f"-I{INCLUDE}"),
    *("-fno-exceptions", "-fno-asynchronous-unwind-tables", "-fvisibility=hidden"),
)


@dataclass(frozen=True)
class Built:
    """One pool, lowered and rendered. `whole`: compiled as it is, kernels too."""

    sample: Sample
    lowered: lower.Lowered
    program: Program
    files: Mapping[str, str]
    whole: bool

    def python(self) -> SimpleNamespace:
        """What the generated pool.py defines in front of its class."""
        text = self.files["pools/random/pool.py"].split("\n\n\nclass ")[0]
        names: dict[str, object] = {}
        exec(compile(text, "pool.py", "exec"), names)
        return SimpleNamespace(**names)

    def sizes(self, module: SimpleNamespace) -> dict[str, int]:
        """Every size of the pool: inputs, then what its own formulas make of them."""
        return dict(self.sample.values) | module.SPEC.extents[tuple(c for _, c in self.sample.choice)](
            **self.sample.values
        )


@dataclass(frozen=True)
class Compiled:
    """A pool in a library: its C entries by name."""

    built: Built
    entries: Mapping[str, int]

    def call(self, name: str, *arguments: object) -> None:
        ctypes.CFUNCTYPE(None)(self.entries[name])(*arguments)


def build(sample: Sample, whole: bool = False) -> Built:
    """Lower and render one sample."""
    lowered = lower.lower(sample.pool)
    program = next(p for p in lowered.programs if p.variant == sample.choice)
    return Built(sample, lowered, program, render.render_pool(lowered), whole)


def compile_pools(pools: Sequence[Built], folder: Path, align: int) -> list[Compiled]:
    """Compile the pools for addresses that are multiples of `align`."""
    source, library = folder / "pools.cpp", folder / "pools.so"
    pieces = [HEAD.format(align=align)]
    names = []
    for at, pool in enumerate(pools):
        text, entries = _namespaces(pool, at)
        pieces.append(text)
        names.append(entries)
    source.write_text("".join(pieces), encoding="utf-8")
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    done = subprocess.run(
        [*compiler, *FLAGS, str(source), "-o", str(library)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{source}:\n{done.stderr[:4000]}"
    loaded = ctypes.CDLL(str(library))
    return [
        Compiled(
            pool,
            dict(zip(entries, (ctypes.c_void_p * len(entries)).in_dll(loaded, f"entries_{at}"), strict=True)),
        )
        for at, (pool, entries) in enumerate(zip(pools, names, strict=True))
    ]


def _namespaces(pool: Built, at: int) -> tuple[str, list[str]]:
    """The pool's text, `atoms` and perhaps `lanes` in a namespace each, and the names of its entries."""
    values = pool.sample.values
    defines = {"PROGRAM": render_cpp.qualified(pool.lowered, pool.program).split("::", 1)[1]}
    defines |= {name: str(values[name]) for name in render_cpp.inputs(pool.lowered)}
    kinds = {"atoms": {"PART": "0"}}  # no kernels
    kinds |= {"lanes": {"LANES": "1"}} if pool.whole else {}
    lines: list[str] = []
    found: dict[str, str] = {}
    for kind, extra in kinds.items():
        macros = defines | extra
        lines += [f"#define PW_{name} {value}" for name, value in macros.items()]
        lines += [f"namespace {kind}_{at} {{", *_body(pool), f"}}  // namespace {kind}_{at}"]
        lines += [f"#undef PW_{name}" for name in macros]
        found |= {name: f"{kind}_{at}::{name}" for name in _entries(pool.files, kind)}
    table = ", ".join(f"(void*)&{name}" for name in found.values())
    visible = '__attribute__((visibility("default")))'
    lines.append(f'extern "C" {{ {visible} void* entries_{at}[] = {{{table}}}; }}\n')
    return "\n".join(lines), list(found)


def _body(pool: Built) -> list[str]:
    texts = [pool.files[f"pools/random/{name}"] for name in ("layout.h", "kernels.cu", "host.cpp")]
    lines = "".join(texts).splitlines()
    text = "\n".join(line for line in lines if not line.startswith(("#include", "#pragma once")))
    return [text if pool.whole else _shortened(text)]


_WAY = re.compile(r"(\w+)<pw::(Load|WriteBack)>\(")
_LOOP = re.compile(r"pw::copy_all\(count \* runs, bytes, threads, streaming, \[=\]\(u64 at\) {")
_END = re.compile(r"return pw::Copy{(.*)};\n  }\);")


def _shortened(text: str) -> str:
    """The same copies with fewer functions: see the top of this module."""
    text, loops = _LOOP.subn("for (u64 at = 0; at < count * runs && bytes != 0; ++at) {", text)
    text, ends = _END.subn(r"std::memcpy(\1, bytes);\n  }", text)
    assert loops == ends > 0, "host.cpp.jinja has changed: mend _LOOP and _END"
    return _WAY.sub(lambda way: f"pw::loading = {int(way[2] == 'Load')}, {way[1]}<pw::Either>(", text)


def _entries(files: Mapping[str, str], kind: str) -> list[str]:
    atoms, lanes = files["pools/random/host.cpp"].split("#else  // PW_LANES")
    lanes, common = lanes.split("#endif  // PW_LANES")
    text = lanes if kind == "lanes" else atoms + common
    return re.findall(r"^PW_EXPORT void (\w+)\(", text, re.MULTILINE)
