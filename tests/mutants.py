"""Generated text in, every number in it that can be changed by one out; and a runner that has verify look.

Three ways to run a mutant, all with the same meaning. `described`: a constant of layout.h that `describe`
reports; the mutated headers of many mutants are compiled together and compared with pool.py as verify does
first. `switched`: an expression that is evaluated while a kernel runs; it is compiled once as ``E +
(pw_mutant == K)`` and K is set before verify runs. `text`: the mutated file is written and used.
Crashes happen in a forked child.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from poolwright.runtime import jit
from poolwright.runtime.errors import CompileError
from poolwright.runtime.tools import cases, package, verify

POOLS = ("mha", "mla", "dsa_indexer")
SECONDS = 60
BATCH = 40
COUNTS = ("total", "vectors", "runs", "bytes", "count")


@dataclass(frozen=True)
class Site:
    """One number in one file: `text[start:end]` changes by `step`. `program`: form/layout, "" for all."""

    pool: str
    file: str
    start: int
    end: int
    text: str
    step: int
    how: str
    program: str
    where: str

    @property
    def label(self) -> str:
        sign = "+" if self.step > 0 else "-"
        return f"{self.pool}/{self.file} {self.program} {self.where}: {self.text} {sign} 1"

    @property
    def mutated(self) -> str:
        return f"({self.text} {'+' if self.step > 0 else '-'} 1)"


# ---- sites ------------------------------------------------------------------------------------


def sites(folder: Path) -> list[Site]:
    """Every site of a pool's four files, in a fixed order."""
    found = [*_header(folder), *_sources(folder, "kernels.cu"), *_sources(folder, "host.cpp")]
    return [*found, *_python(folder)]


def _header(folder: Path) -> Iterator[Site]:
    """layout.h: constants, formulas of the capacity, divisors and strides of the address functions."""
    text = (folder / "layout.h").read_text()
    described = set(re.findall(r"out\[\d+\] = (\w+)", (folder / "host.cpp").read_text()))
    spaces = _namespaces(text)

    def site(match: re.Match[str], group: int, where: str, how: str, step: int = 1) -> Site:
        start, end = match.span(group)
        program = next((name for name, low, high in spaces if low <= start < high), "")
        return Site(folder.name, "layout.h", start, end, match[group], step, how, program, where)

    for match in re.finditer(r"^PW_CONSTANT\(i64, (\w+), (.+)\);$", text, re.M):
        shared = not any(low <= match.start() < high for _, low, high in spaces)
        how = "described" if match[1] in described or shared else "switched"
        yield site(match, 2, match[1], how)
    for match in re.finditer(r"^PW_CONSTEXPR i64 (\w+)\(i64 pages\) \{ return (.+); \}$", text, re.M):
        yield site(match, 2, match[1], "described" if match[1] in described else "switched")
    for body in re.finditer(r"^PW_FN Run (\w+)\(.*?^\}$", text, re.M | re.S):
        for match in _in(body, text, r"pw::divisor\(([^()]+)\)|(u32\(page_size\))"):
            yield site(match, match.lastindex or 0, body[1], "switched")
        returned = text.index("return {", body.start())
        for match in re.compile(r"\b((?:host|device|table)_\w+(?:\([^()]*\))?)").finditer(
            text, returned, body.end()
        ):
            if match[1] not in ("host_page", "host_token", "device_page", "device_token"):
                yield site(match, 1, body[1], "switched")


def _in(body: re.Match[str], text: str, pattern: str) -> Iterator[re.Match[str]]:
    return re.compile(pattern).finditer(text, body.start(), body.end())


def _namespaces(text: str) -> list[tuple[str, int, int]]:
    """(form/layout, start, end) of each program's namespace."""
    found = []
    for match in re.finditer(r"^// ---- form (\w+), layout (\w+)\nnamespace (\w+) \{", text, re.M):
        end = text.index(f"}}  // namespace {match[3]}\n", match.end())
        found.append((f"{match[1]}/{match[2]}", match.start(), end))
    return found


SWITCHED = ((1, -1), "switched")

_SOURCE_SITES = (
    # what, pattern (group 1 is the number), by how much, how
    ("constant", r"const(?:expr)? u(?:32|64) (?:\w+ = [^,;]+, )?(?!columns)\w+ = ([^;]+?)(?=;)", *SWITCHED),
    ("constant", r"PW_CONSTANT\(u32, columns, (\d+)\);", (1, -1), "text"),
    ("constant", r"const(?:expr)? u(?:32|64) \w+ = ([^,;]+?)(?=, \w+ = )", (1, -1), "switched"),
    ("start", r"for \(u(?:32|64) \w+ = ([^;]+);", (1,), "switched"),
    ("bound", r"for \([^;]+; \w+ < ([^;]+);", (1, -1), "switched"),
    ("step", r"first \+= ([^)]+\) \* [\w:]+)\)", (1, -1), "switched"),
    ("guard", r"if \(at >= (\w+)\)", (1, -1), "switched"),
    ("run", r"at / pw::divisor\((\w+)\) % ", (1,), "switched"),
    ("run", r"at / pw::divisor\(\w+\) % pw::divisor\((\w+)\)", (1,), "switched"),
    ("run", r"u32\(at % pw::divisor\((i64\(runs\))\)\)", (1,), "switched"),
    ("divisor", r"pw::divisor\(((?:[^()]|\([^()]*\))+)\)", (1,), "switched"),
    ("count", r"pw::copy_all\(([^,]+),", (1, -1), "switched"),
    ("count", r"pw::copy_all\([^,]+, ([^,]+),", (1, -1), "switched"),
    ("threshold", r">= (pw::streaming_bytes)", (1,), "switched"),
    ("position", r"\b(?:params|out)\[(\d+)\]", (1,), "switched"),
    ("argument", r"(sizeof\(Vector\))", (1,), "switched"),
    ("argument", r"(u32\(page_size\))", (1,), "switched"),
    ("capacity", r"<(\d+)>", (1,), "text"),
    ("part", r"PW_PART == (\d+)", (1,), "text"),
)


def _sources(folder: Path, file: str) -> Iterator[Site]:
    """kernels.cu and host.cpp: counts, bounds, steps, divisors, positions, capacities."""
    text = re.sub(r"//[^\n]*", lambda m: " " * len(m[0]), (folder / file).read_text())
    programs = {f"{f}_{y}": f"{f}/{y}" for f, y in _programs(folder)}
    seen: set[tuple[int, int, int]] = set()
    for what, pattern, steps, how in _SOURCE_SITES:
        for match in re.finditer(pattern, text):
            start, end = match.span(1)
            before = text[: match.start()]
            function = re.findall(
                r"^(?:PW_\w+ )?(?:inline )?(?:void|Run|u32) (\w+)\(|^PW_KERNEL (\w+)\(", before, re.M
            )
            name = next((n for n in function[-1] if n), "") if function else ""
            space = re.findall(r"^namespace \w+::(\w+) \{", before, re.M)
            program = programs[space[-1]] if name == "describe_program" else ""
            for step in steps:
                if (start, end, step) not in seen:
                    seen.add((start, end, step))
                    yield Site(folder.name, file, start, end, match[1], step, how, program, f"{name} {what}")


def _programs(folder: Path) -> list[tuple[str, str]]:
    text = (folder / "layout.h").read_text()
    return re.findall(r"^// ---- form (\w+), layout (\w+)$", text, re.M)


def _python(folder: Path) -> Iterator[Site]:
    """pool.py: every integer of the formulas, and the bounds of parameters."""
    text = (folder / "pool.py").read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def site(node: ast.expr, where: str, program: str, step: int = 1) -> Site:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        return Site(folder.name, "pool.py", start, end, text[start:end], step, "text", program, where)

    pairs = _programs(folder)
    for item in ast.parse(text).body:
        if isinstance(item, ast.FunctionDef):
            name = item.name
            program = next(
                (f"{f}/{y}" for f, y in pairs if name in (f"walks_{f}_{y}", f"host_{y}", f"device_{f}")), ""
            )
            for node in _numbers(item):
                yield site(node, name, program)
        elif isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "SPEC":
            for node in ast.walk(item.value):
                if isinstance(node, ast.Constant) and type(node.value) is int:
                    yield site(node, "SPEC", "")


def _numbers(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """Integer expressions: values of keywords, of tuples, of names that are computed."""
    for node in (node for statement in function.body for node in ast.walk(statement)):
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Subscript):
            # Strides are there for the grain alone in walks: one that stays a multiple of 16 says the same.
            if not function.name.startswith("walks_") or ast.unparse(node.targets[0]).startswith("atom_"):
                yield node.value
        elif isinstance(node, ast.keyword) and not isinstance(node.value, ast.Tuple):
            yield node.value
        elif isinstance(node, ast.Tuple):
            yield from (e for e in node.elts if isinstance(e, ast.BinOp | ast.Name) or _is_integer(e))
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.BinOp | ast.Name):
            yield node.value


def _is_integer(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


# ---- running ----------------------------------------------------------------------------------


class Runner:
    """Runs sites of the package at `folder` against verify; everything it writes goes below `scratch`."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self.scratch = folder, scratch
        self.plain = self._package("plain", lambda _: None)
        self._switches: dict[Site, int] = {}
        self._loaded: dict[tuple[object, ...], list[ctypes.CDLL]] = {}

    def run(self, wanted: Sequence[Site], say: Callable[[str], None]) -> dict[Site, str]:
        """How each site was caught: ``""`` when it was not."""
        results: dict[Site, str] = {}
        described = [site for site in wanted if site.how == "described"]
        for group in _groups(described):
            results |= self._described(group)
        say(f"{len(described)} described")
        switched = [site for site in wanted if site.how == "switched"]
        self._switches = {site: number for number, site in enumerate(switched, 1)}
        package_ = self._package("switched", self._switch)
        formulas = [
            site for site in wanted if site.file == "pool.py"
        ]  # beside the switched text, switched off
        self._precompile(package_, {(site.pool, site.program) for site in (*switched, *formulas)})
        for done, site in enumerate(switched):
            self._libraries(self._targets(package_, site)[0])
            results[site] = self._child(lambda site=site: self._switched(package_, site))
            if done % 50 == 0:
                say(f"{done} of {len(switched)} switched")
        texts = [site for site in wanted if site.how == "text"]
        for done, site in enumerate(texts):
            results[site] = self._child(lambda site=site, done=done: self._text(site, done))
            if done % 50 == 0:
                say(f"{done} of {len(texts)} written")
        return results

    # ---- the three ways

    def _described(self, group: Sequence[Site]) -> dict[Site, str]:
        """Compile the mutated header of each site into one library and compare what it describes."""
        first = group[0]
        target = self._targets(self.plain, first)[0]
        program = cases.sized(target.pool_class, target.sample, target.form, target.layout)
        folder = self.scratch / f"described-{first.pool}-{first.program.replace('/', '-')}-{first.start}"
        folder.mkdir()
        main = folder / "host.cpp"
        main.write_text(self._describing(group, f"{target.form}/{target.layout}"))
        unit = replace(program.unit("atoms", 16), main=main, name="described")
        library = jit.load_host(jit.host_libraries([unit])[0])
        program.check(SimpleNamespace(describe=library.describe_0), 16)  # type: ignore[arg-type]
        results = {}
        for number, site in enumerate(group, 1):
            try:
                describe = getattr(library, f"describe_{number}")
                program.check(SimpleNamespace(describe=describe), 16)  # type: ignore[arg-type]
                results[site] = ""
            except RuntimeError as error:
                results[site] = str(error)
        return results

    def _describing(self, group: Sequence[Site], program: str) -> str:
        source = self.folder / "pools" / group[0].pool
        header, host = (source / "layout.h").read_text(), (source / "host.cpp").read_text()
        name = program.replace("/", "_")
        pattern = rf"^namespace \w+::{name} \{{.*?^\}}  // namespace \w+::{name}$"
        describe = re.search(pattern, host, re.M | re.S)
        assert describe is not None
        others = [(low, high) for other, low, high in _namespaces(header) if other != program]
        pieces = ['#include "poolwright/lanes.h"\n']
        for number, site in enumerate([None, *group]):
            text = header if site is None else header[: site.start] + site.mutated + header[site.end :]
            grown = len(text) - len(header)
            for low, high in reversed(others):
                shift = grown if site is not None and site.start < low else 0
                end = text.index("\n", high + shift) + 1
                text = text[: low + shift] + text[end:]
            text = re.sub(r"^#.*$", "", text, flags=re.M)
            call = f"m{number}::{group[0].pool}::{name}::describe_program(pages, out);"
            pieces.append(f"namespace m{number} {{\n{text}\n{describe[0]}\n}}\n")
            pieces.append(f"PW_EXPORT void describe_{number}(i64 pages, i64* out) {{ {call} }}\n")
        return "".join(pieces)

    def _switch(self, folder: Path) -> None:
        """Rewrite a copied pool so that every switched site asks for its number."""
        if not any(site.pool == folder.name for site in self._switches):
            return
        for file in ("layout.h", "kernels.cu", "host.cpp"):
            text = (folder / file).read_text()
            mine = [(s, n) for s, n in self._switches.items() if (s.pool, s.file) == (folder.name, file)]
            tables = {s: n for s, n in mine if s.where.startswith("table_")}
            inserts: dict[int, str] = {}
            # The outer of two sites that end together comes first: what follows is put in front of it.
            for site, number in sorted(mine, key=lambda pair: pair[0].start - pair[0].end):
                if site not in tables:
                    inserts.setdefault(site.start, "")
                    inserts[site.start] += "("
                    inserts.setdefault(site.end, "")
                    sign = "+" if site.step > 0 else "-"
                    inserts[site.end] = f" {sign} int(pw_mutant == {number}))" + inserts[site.end]
            for site, number in tables.items():
                inside = next((low, high) for name, low, high in _namespaces(text) if name == site.program)
                for use in re.compile(rf"(?<!\(i64, )\b{site.where}\b").finditer(text, *inside):
                    inserts[use.end()] = f" + int(pw_mutant == {number})" + inserts.get(use.end(), "")
            for at in sorted(inserts, reverse=True):
                text = text[:at] + inserts[at] + text[at:]
            if file == "layout.h":
                declared = (
                    'extern "C" __attribute__((visibility("default"))) int pw_mutant;\nint pw_mutant = 0;\n'
                )
                text = text.replace(
                    '#include "poolwright/prim.h"\n', f'#include "poolwright/prim.h"\n{declared}', 1
                )
            else:
                text = text.replace("constexpr u", "const u")
            (folder / file).write_text(text)

    def _switched(self, package_: ModuleType, site: Site) -> str:
        for target in self._targets(package_, site):
            for library in self._libraries(target):
                ctypes.c_int.in_dll(library, "pw_mutant").value = self._switches[site]
            difference = verify.check(target).difference
            if difference:
                return difference
        return ""

    def _libraries(self, target: verify.Target) -> list[ctypes.CDLL]:
        """Both libraries of a target; those asked for before a fork are found at once in it."""
        key = (target.pool_class, target.form, target.layout, target.sample.label)
        if key not in self._loaded:
            program = cases.sized(target.pool_class, target.sample, target.form, target.layout)
            paths = jit.host_libraries([program.unit(kind, 16) for kind in verify.KINDS])
            self._loaded[key] = [jit.load_host(path) for path in paths]
        return self._loaded[key]

    def _text(self, site: Site, number: int) -> str:
        def change(folder: Path) -> None:
            if folder.name == site.pool:
                text = (folder / site.file).read_text()
                assert text[site.start : site.end] == site.text
                (folder / site.file).write_text(text[: site.start] + site.mutated + text[site.end :])

        base = self.scratch / "switched" if site.file == "pool.py" else self.folder
        package_ = self._package(f"text{os.getpid()}_{number}", change, base)
        try:
            for target in self._targets(package_, site):
                difference = verify.check(target).difference
                if difference:
                    return difference
        except CompileError as error:
            return str(error)
        finally:
            shutil.rmtree(self.scratch / f"text{os.getpid()}_{number}", ignore_errors=True)
        return ""

    # ---- pieces

    def _package(self, name: str, change: Callable[[Path], None], base: Path | None = None) -> ModuleType:
        """A changed copy of the package (or of `base`), under another import name."""
        folder = self.scratch / name
        shutil.copytree(base or self.folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
        for pool in sorted((folder / "pools").iterdir()):
            if pool.is_dir():
                change(pool)
        return package.load_package(f"mutant_{name}", folder)

    def _targets(self, package_: ModuleType, site: Site) -> list[verify.Target]:
        """What verify looks at: the programs that the site is part of, one that says most first."""
        form, layout = site.program.split("/") if site.program else (None, None)
        if site.where.startswith("host_") and site.file == "pool.py":
            form = None
        if site.where.startswith("device_") and site.file == "pool.py":
            layout = None
        found = verify.targets(package_, site.pool, layout, form, quick=False)
        found = [target for target in found if not target.sample.shift]
        return sorted(found, key=lambda target: (target.sample.name != "odd", "page_first" != target.layout))

    def _precompile(self, package_: ModuleType, programs: set[tuple[str, str]]) -> None:
        """Compile and load what most sites need: their programs with odd sizes."""
        everything = [t for pool in package_.POOLS for t in verify.targets(package_, pool, None, None, False)]
        wanted = [
            target
            for target in everything
            if target.sample.name == "odd"
            and (
                (target.pool_class.spec.name, f"{target.form}/{target.layout}") in programs
                or ((target.pool_class.spec.name, "") in programs and target.layout == "page_first")
            )
        ]
        verify.precompile(wanted)

    def _child(self, work: Callable[[], str]) -> str:
        """The answer of `work`, run in a fork; a crash is an answer, running for too long is none."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            with Path(os.devnull).open("w") as null:
                os.dup2(null.fileno(), 2)
            try:
                answer = work()
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(writer, answer.encode()[:4000])
            os._exit(0)
        os.close(writer)
        deadline = time.monotonic() + SECONDS
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                os.close(reader)
                return ""
            time.sleep(0.002)
        with os.fdopen(reader, "rb") as stream:
            answer = stream.read().decode(errors="replace")
        return answer if os.WIFEXITED(status) else f"died of signal {os.WTERMSIG(status)}"


def _groups(described: Sequence[Site]) -> Iterator[list[Site]]:
    """Sites of one program, not too many at once."""
    by_program: dict[tuple[str, str], list[Site]] = {}
    for site in described:
        by_program.setdefault((site.pool, site.program), []).append(site)
    for group in by_program.values():
        for start in range(0, len(group), BATCH):
            yield group[start : start + BATCH]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a share of the sites and write the results as JSON: [label, caught by]."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("numbers", help="numbers of the sites, comma separated, in the order of `all_sites`")
    parser.add_argument("output", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a fork of a process with a thread pool would wait for its threads
    everything = all_sites(args.folder)
    wanted = [everything[int(number)] for number in args.numbers.split(",")]
    results = Runner(args.folder, args.scratch).run(wanted, lambda text: print(text, flush=True))
    answer: list[Any] = [[site.label, results[site]] for site in wanted]
    args.output.write_text(json.dumps(answer))
    return 0


def all_sites(folder: Path) -> list[Site]:
    """The sites of the pools at `folder`/pools that are looked at."""
    return [site for pool in POOLS for site in sites(folder / "pools" / pool)]


if __name__ == "__main__":
    sys.exit(main())
