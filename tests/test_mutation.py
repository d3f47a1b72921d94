"""Every number of generated text that decides an address, a count or a bound, changed by one, is caught."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mutants
import pytest
from mutants import Site

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2
EVERY = 32

# What decides none of those: (file, pattern of the label, why).
EXCLUDED = (
    (
        "kernels.cu",
        r"move_\w+ bound: total \+ 1$",
        "the loop over lanes may start one round too many: every access asks `at >= total` itself",
    ),
    (
        "kernels.cu",
        r"move_\w+ step: .* - 1$",
        "lanes step less far than they have moved: some vectors are copied twice, none is left out",
    ),
    (
        "kernels.cu",
        r"part: \d+ \+ 1$",
        "which kernels are compiled together; the CPU twin compiles all of them",
    ),
    (
        "kernels.cu",
        r"move_(kv_layer_tokens|row_layer_pages) constant: u32\(runs_\w+\) \+ 1$",
        "a token (or row) of one layer is one run: its number is not asked for, two copy twice",
    ),
    (
        "host.cpp",
        r"atoms_(kv_layer_tokens|row_layer_pages) (run: |constant: u64\(runs_\w+\) \+ 1$)",
        "the same",
    ),
    (
        "layout.h",
        r"^mha/.* heads: PW_heads \+ 1$",
        "heads enter as heads // head_groups alone: one more makes no group larger",
    ),
    (
        "kernels.cu",
        r"_tokens argument: u32\(page_size\) \+ 1$",
        "asked for ids that lie in GPU memory, which only `verify --device cuda` has",
    ),
    (
        "kernels.cu",
        r"load_layer_\w+ bound: steps \+ 1$",
        "one turn more finds no steps left",
    ),
    (
        "layout.h",
        r" inner_\w+: ",
        "in which order runs are walked: all of them, where it divides their number",
    ),
    (
        "kernels.cu",
        r"(constant|divisor): (pw::divisor\()?inner_\w+\)? [+-] 1$",
        "the same",
    ),
    (
        "host.cpp",
        r"lanes_load_layer_\w+ (constant: .*params\[4\] [+-] 1|position: 4 \+ 1)$",
        "how many small layers are moved together: the bytes are the same",
    ),
    (
        "host.cpp",
        r"lanes_\w+_tokens position: 2 \+ 1$",
        "token ids do not travel in the parameters, which only kernels for pages read",
    ),
    (
        "host.cpp",
        r"threshold: pw::streaming_bytes \+ 1$",
        "from which total on stores bypass the cache: the bytes are the same",
    ),
    (
        "pool.py",
        r"SPEC: \d+ \+ 1$",
        "the least value that the constructor takes; `codegen build --check` compares it",
    ),
)


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the generated package, so that a build meanwhile changes nothing."""
    folder = tmp_path_factory.mktemp("mutation") / "generated"
    shutil.copytree(ROOT / "generated", folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def reason(site: Site) -> str | None:
    """Why a site decides nothing, or None."""
    found = (why for file, label, why in EXCLUDED if file == site.file and re.search(label, site.label))
    return next(found, None)


def run(folder: Path, scratch: Path, numbers: list[int]) -> list[str]:
    """Labels of the sites that verify does not catch, out of those with these numbers."""
    shares = split(folder, numbers)
    compiler = os.environ.get("POOLWRIGHT_CXX") or os.environ.get("CXX") or "c++"
    # One element past an array may be padding, where nobody sees it: let it trap.
    compiler += " -fsanitize=bounds -fsanitize-undefined-trap-on-error"
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".src")}
    env |= {"POOLWRIGHT_OPTIMIZE": "0", "POOLWRIGHT_CXX": compiler}
    started = []
    for worker, share in enumerate(shares):
        (scratch / str(worker)).mkdir()
        words = [sys.executable, str(ROOT / "tests" / "mutants.py"), str(folder), str(scratch / str(worker))]
        words += [",".join(map(str, share)), str(scratch / f"{worker}.json")]
        with (scratch / f"{worker}.log").open("w") as log:
            started.append(subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT))
    for worker, process in enumerate(started):
        assert process.wait() == 0, (scratch / f"{worker}.log").read_text()[-4000:]
    answers = [json.loads((scratch / f"{worker}.json").read_text()) for worker in range(len(shares))]
    assert sum(map(len, answers)) == len(numbers)
    return [label for answer in answers for label, caught in answer if not caught]


def split(folder: Path, numbers: list[int]) -> list[list[int]]:
    """A share for each worker; what is compiled for one program is compiled by one worker."""
    everything, groups = mutants.all_sites(folder), {}
    for number in numbers:
        groups.setdefault((everything[number].pool, everything[number].program), []).append(number)
    shares: list[list[int]] = [[] for _ in range(WORKERS)]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(shares, key=len).extend(group)
    return [share for share in shares if share]


def deciding(folder: Path) -> list[int]:
    return [number for number, site in enumerate(mutants.all_sites(folder)) if reason(site) is None]


def test_the_list_of_what_decides_nothing_is_exact(generated: Path) -> None:
    everything = mutants.all_sites(generated)
    for file, label, _ in EXCLUDED:
        found = [s for s in everything if s.file == file and re.search(label, s.label) and reason(s)]
        assert found, f"nothing in {file} is {label}"
    excluded = [site for site in everything if reason(site)]
    assert len(excluded) < len(everything) // 20


def test_sites_cover_every_file_and_program(generated: Path) -> None:
    everything = mutants.all_sites(generated)
    for pool in mutants.POOLS:
        for file in ("layout.h", "kernels.cu", "host.cpp", "pool.py"):
            assert sum(site.pool == pool and site.file == file for site in everything) > 50
        text = (generated / "pools" / pool / "layout.h").read_text()
        constants = re.findall(r"^(?:PW_CONSTEXPR i64 |PW_CONSTANT\(i64, )(\w+)", text, re.M)
        described = [
            s for s in everything if s.pool == pool and s.file == "layout.h" and s.where in constants
        ]
        assert len(described) == len(constants)


def test_a_sample_is_caught(generated: Path, tmp_path: Path) -> None:
    numbers = deciding(generated)[::EVERY]
    assert run(generated, tmp_path, numbers) == []


@pytest.mark.slow
def test_all_are_caught(generated: Path, tmp_path: Path) -> None:
    assert run(generated, tmp_path, deciding(generated)) == []
