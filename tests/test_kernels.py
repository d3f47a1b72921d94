"""Every kernel of every pool compiles with NVRTC for every architecture, warnings as errors."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

import poolwright.generated as generated
from poolwright.runtime import jit, toolchain
from poolwright.runtime.errors import CompileError
from poolwright.runtime.jit import Unit
from poolwright.runtime.program import SizedProgram, folder_of
from poolwright.runtime.tools import cases
from poolwright.runtime.tools.samples import samples

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
SPECS = {name: generated.pool_class(name).spec for name in generated.POOLS}
PROGRAMS = [(name, *pair) for name, spec in SPECS.items() if spec.parts for pair in spec.programs]
# Each program once, architectures and sizes in turn: this is what every run compiles.
SPREAD = [(*program, ARCHS[turn % len(ARCHS)], turn % 2) for turn, program in enumerate(PROGRAMS)]
ALL = [(*program, arch, sizes) for program in PROGRAMS for arch in ARCHS for sizes in (0, 1)]


def units(pool: str, form: str, layout: str, sizes: int) -> list[Unit]:
    pool_class = generated.pool_class(pool)
    found = []
    for sample in samples(pool_class)[sizes::2]:
        program = cases.sized(pool_class, sample, form, layout)
        found.append(program.unit("kernels", 16))
    return found


def compile_all(pool: str, form: str, layout: str, arch: str, sizes: int) -> None:
    assert not isinstance(toolchain.find_nvrtc(), toolchain.Missing), (
        "NVRTC is missing: pip install '.[test]'"
    )
    wanted = units(pool, form, layout, sizes)
    assert wanted
    for unit in wanted:
        binaries = jit.cubins(unit, arch, "nvrtc")
        assert len(binaries) == len(unit.parts)
        assert all(binary[:4] == b"\x7fELF" for binary in binaries)
        # Loading takes the driver 5 us a variable, used or not.
        assert not any(b".nv.global" in binary for binary in binaries), f"{unit.name} has variables"


@pytest.mark.parametrize(("pool", "form", "layout", "arch", "sizes"), SPREAD)
def test_each_program_compiles(pool: str, form: str, layout: str, arch: str, sizes: int) -> None:
    compile_all(pool, form, layout, arch, sizes)


@pytest.mark.slow
@pytest.mark.parametrize(("pool", "form", "layout", "arch", "sizes"), [c for c in ALL if c not in SPREAD])
def test_every_program_compiles_everywhere(pool: str, form: str, layout: str, arch: str, sizes: int) -> None:
    compile_all(pool, form, layout, arch, sizes)


def test_a_warning_is_an_error(tmp_path: Path) -> None:
    name, form, layout = PROGRAMS[0]
    pool_class = generated.pool_class(name)
    program = cases.sized(pool_class, samples(pool_class)[0], form, layout)
    for file in program.folder.iterdir():
        if file.suffix in (".h", ".cu"):
            (tmp_path / file.name).write_text(file.read_text())
    with (tmp_path / "kernels.cu").open("a") as kernels:
        kernels.write("__device__ int warned() { int unused; return 1; }\n")
    unit = replace(program.unit("kernels", 16), main=tmp_path / "kernels.cu")
    with pytest.raises(CompileError, match="never referenced"):
        jit.cubins(unit, "sm_90", "nvrtc")


def guarded(text: str) -> dict[int, list[str]]:
    """The namespaces that are opened under each number of PW_CHOSEN, as seen from inside the pool's."""
    found: dict[int, list[str]] = defaultdict(list)
    outside: list[str] = []
    number = 0
    for line in text.splitlines():
        if chosen := re.fullmatch(r"#if !defined\(PW_CHOSEN\) \|\| PW_CHOSEN == (\d+)", line):
            number = int(chosen[1])
        elif line == "#endif":
            number = 0
        elif opened := re.fullmatch(r"namespace ([\w:]+) \{", line):
            if number:
                found[number].append("::".join([*outside, opened[1]]).split("::", 1)[1])
            else:
                outside.append(opened[1])
        elif not number and line.startswith("}  // namespace "):
            outside.pop()
    return found


@pytest.mark.parametrize("pool", [name for name, spec in SPECS.items() if spec.parts])
def test_the_number_that_a_program_is_compiled_with_lets_its_text_in_and_no_other(pool: str) -> None:
    spec, folder = SPECS[pool], folder_of(generated.pool_class(pool))
    expected: dict[int, list[str]] = {}
    for choice in itertools.product(*spec.variants.values()):
        variants = dict(zip(spec.variants, choice, strict=True))
        for form, layout in spec.programs:
            program = SizedProgram(spec, folder, defaultdict(int), variants, form, layout)
            given = dict(program.constants())
            expected[int(given["PW_CHOSEN"])] = [given["PW_PROGRAM"]]
    assert len(expected) == len(spec.programs) * len(spec.extents)
    assert guarded((folder / "layout.h").read_text()) == expected
    host = (folder / "host.cpp").read_text()
    assert guarded(host[host.index("#endif  // PW_LANES") :]) == expected


def test_a_unit_without_the_number_of_its_program_reads_all(tmp_path: Path) -> None:
    """As tools outside the runtime compile the files: the name alone chooses."""
    pool_class = generated.pool_class("mla")
    program = cases.sized(pool_class, samples(pool_class)[0], "per_layer", "page_first")
    unit = program.unit("kernels", 16)
    named = tuple(pair for pair in unit.defines if pair[0] != "PW_CHOSEN")
    assert len(named) == len(unit.defines) - 1
    whole = jit.cubins(replace(unit, defines=named, parts=unit.parts[:1]), "sm_90", "nvrtc")
    assert whole == jit.cubins(replace(unit, parts=unit.parts[:1]), "sm_90", "nvrtc")
