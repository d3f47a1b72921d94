"""Copies every pool, form and layout by every path and compares whole buffers with an independent oracle."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType

import torch

from poolwright.runtime import jit
from poolwright.runtime.errors import CompileError
from poolwright.runtime.group import HostPoolGroup
from poolwright.runtime.pool import HostPool
from poolwright.runtime.tools import cases, group_cases, package
from poolwright.runtime.tools.group_cases import GroupSample
from poolwright.runtime.tools.samples import Sample, samples, unaligned

KINDS = ("atoms", "lanes")


@dataclass(frozen=True)
class Target:
    """One thing to verify: a pool class with a form, a layout and sizes."""

    pool_class: type[HostPool]
    form: str
    layout: str
    sample: Sample

    @property
    def label(self) -> str:
        return f"{self.pool_class.spec.name:12} {self.form:12} {self.layout:18} {self.sample.label}"


@dataclass(frozen=True)
class GroupTarget:
    """One group to verify, with sizes for all of its pools."""

    kind: type[HostPoolGroup]
    sample: GroupSample

    @property
    def label(self) -> str:
        return f"{self.kind.spec.name:12} {'group':12} {', '.join(self.sample.members):18} {self.sample.name}"


@dataclass(frozen=True)
class Result:
    """What came of a target: how many transfers were compared, and the first difference ("" for none)."""

    pool: str
    form: str
    layout: str
    sample: str
    cases: int
    seconds: float
    difference: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`NAME`, `--device`, `--layout`, `--form`, `--json`, `--quick`."""
    parser.add_argument("pool", nargs="?", metavar="NAME", help="only this pool or group")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where pools run")
    parser.add_argument("--layout", help="only this layout")
    parser.add_argument("--form", help="only this form")
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")
    parser.add_argument("--quick", action="store_true", help="one set of sizes each, compiled without -O2")


def run(args: argparse.Namespace) -> int:
    """Verify what the arguments name; 1 when anything differs."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise package.PackageError("--device cuda needs a CUDA device, and torch sees none: see `doctor`")
    generated = package.load_package(args.package, args.folder)
    wanted = targets(generated, args.pool, args.layout, args.form, args.quick)
    say = _Progress(quiet=args.json)
    with _settings(args.quick):
        results = verify(wanted, args.device, say)
    if args.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        _table(results)
    return int(any(result.difference for result in results))


@contextlib.contextmanager
def _settings(quick: bool) -> Iterator[None]:
    """One thread, since the tensors are small and compilers may still run; `quick` compiles without -O2."""
    threads, level = torch.get_num_threads(), os.environ.get("POOLWRIGHT_OPTIMIZE")
    torch.set_num_threads(1)
    if quick and level is None:
        os.environ["POOLWRIGHT_OPTIMIZE"] = "1"
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if quick and level is None:
            del os.environ["POOLWRIGHT_OPTIMIZE"]


def targets(
    generated: ModuleType, pool: str | None, layout: str | None, form: str | None, quick: bool
) -> list[Target | GroupTarget]:
    """Everything to verify. Raises PackageError for a pool, group, layout or form that there is not."""
    names = [pool] if pool is not None else list(generated.POOLS)
    if pool not in (None, *generated.POOLS, *generated.GROUPS) or not names:
        known = ", ".join((*generated.POOLS, *generated.GROUPS)) or "none"
        wanted = "no pools" if pool is None else f"no pool or group {pool!r}"
        raise package.PackageError(
            f"{wanted} in {generated.__name__}; there are {known} (a new spec needs `codegen build`)"
        )
    if pool is not None and pool in generated.GROUPS:
        if layout is not None or form is not None:
            members = generated.group_class(pool).spec.members.values()
            pools = ", ".join(dict.fromkeys(one.pool.spec.name for one in members))
            asked = package.named(form, layout)
            raise package.PackageError(f"{pool} is a group and takes no {asked}; verify its pools: {pools}")
        return list(_groups(generated, [pool], quick))
    found: list[Target | GroupTarget] = []
    for pool_class in (generated.pool_class(name) for name in names):
        spec = pool_class.spec
        for turn, (a_form, a_layout) in enumerate(spec.programs):
            if form in (None, a_form) and layout in (None, a_layout):
                tried = samples(pool_class, turn)
                if quick:
                    tried = tried[turn % 2 :: 2]
                elif turn == 0:
                    tried = (*tried, unaligned(spec, tried[-1]))
                found += [Target(pool_class, a_form, a_layout, sample) for sample in tried]
    if not found:
        pairs = ", ".join(f"{f}/{y}" for n in names for f, y in generated.pool_class(n).spec.programs)
        raise package.PackageError(f"no {package.named(form, layout)}; form/layout are {pairs}")
    if pool is None and layout is None and form is None:
        found += _groups(generated, list(generated.GROUPS), quick)
    return found


def _groups(generated: ModuleType, names: Sequence[str], quick: bool) -> Iterator[GroupTarget]:
    for turn, name in enumerate(names):
        kind = generated.group_class(name)
        for sample in group_cases.NAMES[turn % 2 :: 2] if quick else group_cases.NAMES:
            yield GroupTarget(kind, group_cases.group_sample(kind, sample))


def verify(wanted: Sequence[Target | GroupTarget], device: str, say: Callable[[str], None]) -> list[Result]:
    """Compile everything side by side, then compare one target after the other. Raises BackendUnavailable."""
    started = time.perf_counter()
    if device == "cpu":
        count = precompile(wanted)
        say(f"compiled {count} libraries in {time.perf_counter() - started:.1f} s")
    results = []
    for target in wanted:
        results.append(check(target, device))
        result = results[-1]
        verdict = "  DIFFERS" if result.difference else ""
        say(f"{target.label:64} {result.cases:4} cases {result.seconds:6.2f} s{verdict}")
    return results


def precompile(wanted: Sequence[Target | GroupTarget]) -> int:
    """Fill the cache for these targets; returns how many libraries that takes.

    What does not compile is left to the target that needs it, whose paths are then missing.
    """
    units = []
    for target in wanted:
        if isinstance(target, GroupTarget):
            group = group_cases.programs(target.kind, target.sample.given)
            units += [group.unit("lanes", 16)]
            units += [program.unit("atoms", 16) for program in group.programs if program.device]
            continue
        program = cases.sized(target.pool_class, target.sample, target.form, target.layout)
        if not program.device:
            continue  # no bytes, no code
        alignments = {16, math.gcd(16, target.sample.shift)}  # a pool is built for 16, then for its tensors
        units += [program.unit(kind, align) for kind in KINDS for align in alignments]
    units = list(dict.fromkeys(units))
    try:
        jit.host_libraries(units)
    except CompileError as error:
        print(error, file=sys.stderr)
    return len(units)


def check(target: Target | GroupTarget, device: str = "cpu") -> Result:
    """Run every case of one target, up to the first difference."""
    started, done, difference = time.perf_counter(), 0, ""
    try:
        for difference in _differences(target, device):
            done += 1
            if difference:
                break
    except Exception as error:  # whatever goes wrong is a difference of this target, not the end of the rest
        difference = f"{type(error).__name__}: {error}"
    if isinstance(target, Target):
        name, sample = target.pool_class.spec.name, target.sample.label
        form, layout = target.form, target.layout
    else:
        name, sample, form, layout = target.kind.spec.name, target.sample.name, "group", "all pools"
    if difference:
        difference = f"{name} {form} {layout} ({sample}): {difference}"
    seconds = round(time.perf_counter() - started, 3)
    return Result(name, form, layout, sample, done, seconds, difference)


def _differences(target: Target | GroupTarget, device: str) -> Iterator[str]:
    """One text a case, empty when nothing differs."""
    if isinstance(target, GroupTarget):
        group = group_cases.GroupBench(target.kind, target.sample, device)
        try:
            for each in group.cases():
                yield group.transfer(each)
        finally:
            group.close()
        return
    bench = cases.Bench(target.pool_class, target.sample, target.form, target.layout, device)
    try:
        yield from bench.sizes()
        for case in bench.cases():
            yield bench.transfer(case)
    finally:
        bench.close()


class _Progress:
    """Plain lines; on a terminal one line that is overwritten."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._live = quiet, sys.stdout.isatty()

    def __call__(self, text: str) -> None:
        if self._quiet:
            return
        print(f"\r\x1b[K{text}" if self._live else text, end="" if self._live else "\n", flush=True)


def _table(results: Sequence[Result]) -> None:
    """One row a pool and layout, then every difference."""
    print("\r\x1b[K" if sys.stdout.isatty() else "", end="")
    rows: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        rows.setdefault((result.pool, result.layout), []).append(result)
    print(f"{'pool':12} {'layout':18} {'forms':24} {'cases':>6} {'seconds':>8}  result")
    for (pool, layout), found in rows.items():
        forms = ", ".join(dict.fromkeys(result.form for result in found))
        failed = sum(bool(result.difference) for result in found)
        verdict = f"{failed} of {len(found)} differ" if failed else "ok"
        count, seconds = sum(r.cases for r in found), sum(r.seconds for r in found)
        print(f"{pool:12} {layout:18} {forms:24} {count:6} {seconds:8.2f}  {verdict}")
    for result in results:
        if result.difference:
            print(result.difference, file=sys.stderr)
