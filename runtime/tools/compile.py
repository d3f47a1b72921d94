"""Sizes of a pool in, its compiled code in the cache out, for machines without a compiler."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from poolwright.runtime import env, jit, native
from poolwright.runtime.description import PoolSpec, dtype_named
from poolwright.runtime.errors import PoolError
from poolwright.runtime.group import HostPoolGroup
from poolwright.runtime.jit import Unit
from poolwright.runtime.pool import HostPool
from poolwright.runtime.tools import cases, group_cases, package
from poolwright.runtime.tools.samples import Sample, samples, takes_page_size

HOST_KINDS = ("atoms", "lanes")
ALIGNMENTS = (1, 2, 4, 8, 16)
WORKERS = 4


@dataclass(frozen=True)
class Row:
    """One compiled unit. `arch`: ``host`` or a GPU's; `state`: ``compiled``, ``cached``, or what failed."""

    unit: str
    arch: str
    bytes: int
    seconds: float
    state: str

    @property
    def failed(self) -> bool:
        return self.state not in ("compiled", "cached")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`NAME`; sizes: `--set`, `--dtype`, `--sizes`; what for: `--layout`, `--form`, `--device`, `--arch`."""
    parser.add_argument("pool", nargs="?", metavar="NAME", help="only this pool or group")
    parser.add_argument(
        "--sizes", type=Path, metavar="FILE", help="a group's constructor arguments as JSON (dtypes by name)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter, page_size or layers (count)",
    )
    parser.add_argument(
        "--dtype", action="append", default=[], metavar="[GROUP=]NAME", help="a dtype group's dtype"
    )
    parser.add_argument("--layout", help="only this layout")
    parser.add_argument("--form", help="only this form")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="what to compile for")
    parser.add_argument(
        "--arch", action="append", default=[], metavar="sm_90", help="GPU architectures (cuda)"
    )
    parser.add_argument(
        "--align",
        type=int,
        default=16,
        choices=ALIGNMENTS,
        help="what addresses of device tensors are multiples of",
    )
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")


def run(args: argparse.Namespace) -> int:
    """Compile what the arguments name; 1 when something does not compile."""
    generated = package.load_package(args.package, args.folder)
    if args.pool is not None and args.pool not in (*generated.POOLS, *generated.GROUPS):
        known = ", ".join((*generated.POOLS, *generated.GROUPS))
        raise package.PackageError(f"no pool or group {args.pool!r}; there are {known}")
    if args.set and args.pool not in generated.POOLS:
        raise package.PackageError("--set names parameters of one pool; name the pool too")
    if args.sizes and args.pool not in generated.GROUPS:
        raise package.PackageError("--sizes gives the sizes of one group; name the group too")
    archs = _archs(args)
    units: list[Unit] = []
    for name in generated.POOLS:
        units += _units(generated.pool_class(name), args) if args.pool in (None, name) else []
    for name in generated.GROUPS:
        units += _group_units(generated.group_class(name), args) if args.pool in (None, name) else []
    if not units and (args.form or args.layout):
        raise package.PackageError(f"no pool has {package.named(args.form, args.layout)}")
    say: Callable[[str], None] = (lambda _: None) if args.json else (lambda text: print(text, flush=True))
    cuda = args.device == "cuda"
    rows = list(host_rows([native.UNIT, *([] if cuda else units)], say))  # no pool runs without the first
    rows += cuda_rows(units, archs, say) if cuda else ()
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        _table(rows)
    return int(any(row.failed for row in rows))


# ---- what to compile --------------------------------------------------------------------------


def _archs(args: argparse.Namespace) -> list[str]:
    if args.device == "cpu":
        if args.arch:
            raise package.PackageError("--arch is for --device cuda")
        return []
    wanted = args.arch or [env.text("CUDA_ARCH")] * bool(env.text("CUDA_ARCH"))
    if not wanted and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        wanted = [f"sm_{major}{minor}"]
    if not wanted:
        raise package.PackageError("this machine has no GPU to compile for; name one, such as --arch sm_90")
    for arch in wanted:
        if not re.fullmatch(r"sm_[0-9]{2,3}[af]?", arch):
            raise package.PackageError(f"--arch: expected a compute capability such as sm_90, got {arch!r}")
    return list(dict.fromkeys(wanted))


def _units(pool_class: type[HostPool], args: argparse.Namespace) -> list[Unit]:
    """The units of one pool, each with the arguments that make it."""
    found: list[Unit] = []
    spec = pool_class.spec
    for form, layout in spec.programs:
        if args.form not in (None, form) or args.layout not in (None, layout):
            continue
        for sample in _sized(pool_class, args):
            program = cases.sized(pool_class, sample, form, layout)
            if not program.device:
                continue  # no bytes, no code
            kinds = HOST_KINDS if args.device == "cpu" else ("kernels",)
            words = command(spec, sample, form, layout, args)
            found += [replace(program.unit(kind, args.align), arguments=words) for kind in kinds]
    return list(dict.fromkeys(found))


def _group_units(kind: type[HostPoolGroup], args: argparse.Namespace) -> list[Unit]:
    """The units of one group: of its sample sizes, or of those in the file that `--sizes` names.

    On the CPU every pool has a twin of its own, and the kernels of all are played together.
    """
    found: list[Unit] = []
    for given in [_sizes(args.sizes)] if args.sizes else _samples(kind):
        try:
            program = group_cases.programs(kind, given)
        except (TypeError, ValueError) as error:
            raise package.PackageError(f"{args.sizes or kind.spec.name}: {error}") from None
        if args.device == "cuda":
            found.append(program.unit("kernels", args.align))
        else:
            found += [program.unit("lanes", args.align)]
            found += [one.unit("atoms", args.align) for one in program.programs if one.device]
    return list(dict.fromkeys(found))


def _samples(kind: type[HostPoolGroup]) -> list[Mapping[str, Any]]:
    return [group_cases.group_sample(kind, name).given for name in group_cases.NAMES]


def _sizes(file: Path) -> dict[str, Any]:
    """A group's constructor arguments as JSON has them, dtypes by name."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"), object_hook=_with_dtypes)
    except (OSError, ValueError) as error:
        raise package.PackageError(f"--sizes {file}: {error}") from None
    if not isinstance(found, dict):
        raise package.PackageError(f"--sizes {file}: expected an object of arguments")
    return found


def _with_dtypes(given: dict[str, Any]) -> dict[str, Any]:
    for name, value in given.items():
        if name.endswith("dtype"):
            if not isinstance(getattr(torch, str(value), None), torch.dtype):
                raise ValueError(f"{name}: expected a dtype such as bfloat16, got {value!r}")
            given[name] = getattr(torch, value)
    return given


def _sized(pool_class: type[HostPool], args: argparse.Namespace) -> Sequence[Sample]:
    """The sample sizes, or with `--set` those that are given. Raises PackageError."""
    spec, tried = pool_class.spec, samples(pool_class)
    dtypes = _dtypes(spec, args.dtype)
    if not args.set:
        return tuple(replace(sample, dtypes={**sample.dtypes, **dtypes}) for sample in tried)
    given = dict(_pair(text) for text in args.set)
    params = {p.name: p.length for p in spec.params if p.equals is None}
    counts = [*spec.layer_lists]
    known = [*params, *counts, *spec.variants, *["page_size"] * takes_page_size(pool_class)]
    for name in given:
        if name not in known:
            raise package.PackageError(f"--set: {spec.name} has no {name!r}; known are {', '.join(known)}")
    defaults = {p.name: (p.default,) * (p.length or 1) for p in spec.params if p.default is not None}
    missing = [name for name in known if name not in given and name not in defaults]
    if missing:
        raise package.PackageError(f"--set: {spec.name} also needs {', '.join(missing)}")
    numbers: dict[str, tuple[int, ...]] = dict(defaults)
    numbers |= {name: _integers(name, text) for name, text in given.items() if name not in spec.variants}
    sample = Sample(
        name="given",
        params={n: numbers[n] if length else _one(n, numbers[n]) for n, length in params.items()},
        dtypes={**tried[0].dtypes, **dtypes},
        layers={name: tuple(range(_one(name, numbers[name]))) for name in counts},
        page_size=_one("page_size", numbers.get("page_size", (1,))),
        variants={name: given[name] for name in spec.variants},
    )
    try:
        cases.sized(pool_class, sample, next(iter(spec.forms)), next(iter(spec.layouts)))
    except ValueError as error:
        raise package.PackageError(str(error)) from None
    return (sample,)


def _dtypes(spec: PoolSpec, given: Sequence[str]) -> dict[str, torch.dtype]:
    found = {}
    for text in given:
        group, name = _pair(text) if "=" in text else (next(iter(spec.dtypes), ""), text)
        if group not in spec.dtypes:
            known = ", ".join(spec.dtypes)
            raise package.PackageError(
                f"--dtype: {spec.name} has no dtype group {group!r}; known are {known}"
            )
        if name not in spec.dtypes[group]:
            known = ", ".join(spec.dtypes[group])
            raise package.PackageError(f"--dtype: {group}: expected one of {known}, got {name!r}")
        found[group] = dtype_named(name)
    return found


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise package.PackageError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def _integers(name: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"-?[0-9]{1,12}(,-?[0-9]{1,12})*", text):
        raise package.PackageError(f"--set: {name}: expected an integer, got {text!r}")
    return tuple(int(piece) for piece in text.split(","))


def _one(name: str, values: tuple[int, ...]) -> int:
    if len(values) != 1 or (name == "layers" and not 0 <= values[0] <= 4096):
        raise package.PackageError(f"--set: {name}: expected one integer, got {','.join(map(str, values))}")
    return values[0]


def command(spec: PoolSpec, sample: Sample, form: str, layout: str, args: argparse.Namespace) -> str:
    """The arguments of `compile` that make these units, for messages."""
    given: dict[str, object] = {**sample.params, **sample.variants}
    given |= {name: len(ids) for name, ids in sample.layers.items()}
    given |= {} if sample.page_size == 1 else {"page_size": sample.page_size}
    words = [spec.name]
    for name, value in given.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += ["--set", f"{name}={text}"]
    for group, dtype in sample.dtypes.items():
        words += ["--dtype", f"{group}={str(dtype).removeprefix('torch.')}"]
    words += ["--form", form, "--layout", layout]
    words += ["--device", "cuda"] if args.device == "cuda" else []
    words += [] if args.align == 16 else ["--align", str(args.align)]
    return shlex.join(words)


# ---- compiling --------------------------------------------------------------------------------


def host_rows(units: Sequence[Unit], say: Callable[[str], None]) -> Iterator[Row]:
    """Compile for the CPU, all side by side; `seconds` is the mean of those compiled now."""
    there = {unit for unit in units if jit.is_cached(unit)}
    say(f"{len(units)} libraries for the CPU, {len(there)} of them cached")
    started, failure = time.perf_counter(), ""
    try:
        jit.host_libraries(units)
    except PoolError as error:
        failure = str(error)
    seconds = round((time.perf_counter() - started) / max(1, len(units) - len(there)), 2)
    for unit in units:
        if failure and not jit.is_cached(unit):
            yield Row(unit.name, "host", 0, 0.0, failure)
            continue
        size = jit.host_libraries([unit])[0].stat().st_size
        yield Row(unit.name, "host", size, *((0.0, "cached") if unit in there else (seconds, "compiled")))


def cuda_rows(units: Sequence[Unit], archs: Sequence[str], say: Callable[[str], None]) -> Iterator[Row]:
    """Compile every unit for every architecture on a few threads, in order of their names."""
    pairs = [(unit, arch) for unit in units for arch in archs]
    say(f"kernels of {len(pairs)} programs for {', '.join(archs)}")
    with ThreadPoolExecutor(WORKERS) as pool:
        for done, row in enumerate(pool.map(lambda pair: _cubins(*pair), pairs), 1):
            if done % 20 == 0 or row.failed:
                say(f"{done} of {len(pairs)}: {row.unit} {row.arch}")
            yield row


def _cubins(unit: Unit, arch: str) -> Row:
    started = time.perf_counter()
    try:
        cached = jit.is_cached(unit, arch)
        binaries = jit.cubins(unit, arch)
    except PoolError as error:
        return Row(unit.name, arch, 0, 0.0, str(error))
    seconds = round(time.perf_counter() - started, 2)
    return Row(unit.name, arch, sum(map(len, binaries)), seconds, "cached" if cached else "compiled")


def _table(rows: Sequence[Row]) -> None:
    width = max((len(row.unit) for row in rows), default=4)
    print(f"{'unit':{width}} {'arch':8} {'bytes':>9} {'seconds':>8}  state")
    for row in rows:
        state = row.state if not row.failed else "failed"
        print(f"{row.unit:{width}} {row.arch:8} {row.bytes:9,} {row.seconds:8.2f}  {state}")
    for text in dict.fromkeys(row.state for row in rows if row.failed):
        print(text, file=sys.stderr)
