"""Constants of the cost model for this machine: what `tune` has measured, kept by GPU and driver."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, fields
from pathlib import Path

from poolwright.runtime import env
from poolwright.runtime.costs import DEFAULTS, Costs, Rates
from poolwright.runtime.errors import PoolError

_unread: ContextVar[bool] = ContextVar("poolwright_unread_constants", default=False)


@contextmanager
def unread() -> Iterator[None]:
    """`load` gives the defaults here, whatever is kept: for measuring anew, also after a broken file."""
    token = _unread.set(True)
    try:
        yield
    finally:
        _unread.reset(token)


def file_of(gpu: str, driver: str) -> Path:
    """Where the constants of a GPU and a driver's version are kept."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{gpu} driver {driver}").strip("-")
    return env.cache_dir() / "costs" / f"{name}.json"


def load(gpu: str, driver: str) -> Costs:
    """What was measured, or the defaults. Raises PoolError for a file that is not what `tune` writes."""
    if _unread.get():
        return DEFAULTS
    path = file_of(gpu, driver)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return DEFAULTS
    try:
        kept = json.loads(text)
        return Costs(_rates(kept["write_back"]), _rates(kept["load"]), str(path))
    except (ValueError, TypeError, KeyError) as error:
        raise PoolError(
            f"{path}: expected constants as `tune` writes them, got {error!r}: run tune again, or delete it"
        ) from None


def _rates(kept: object) -> Rates:
    if not isinstance(kept, dict):
        raise TypeError(f"{kept!r} is no table of numbers")
    missing = [field.name for field in fields(Rates) if field.name not in kept]
    if missing:
        raise ValueError(f"no {missing[0]}, as in files of an earlier version")
    values = {field.name: float(kept[field.name]) for field in fields(Rates)}
    wrong = [name for name, value in values.items() if not 0 < value < 1e18]
    if wrong:
        raise ValueError(f"{wrong[0]} is {values[wrong[0]]}")
    return Rates(**values)


def store(gpu: str, driver: str, costs: Costs) -> Path:
    """Keep constants; the file they are in now, whole or not at all."""
    path = file_of(gpu, driver)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"write_back": asdict(costs.write_back), "load": asdict(costs.load)}
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    scratch.replace(path)
    return path
