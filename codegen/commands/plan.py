"""`codegen plan`: a model's config.json in; the pools that hold its cache, their memory and the code out."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poolwright.codegen import resolve
from poolwright.codegen.commands.common import InputError, unknown
from poolwright.codegen.plan.config import PlanError, read_config
from poolwright.codegen.plan.families import CACHES, read_model
from poolwright.codegen.plan.plan import Asked, Plan, Planned, make_plan
from poolwright.codegen.plan.python import program
from poolwright.codegen.plan.staging import staging_bytes

GB = 10**9
HOST_GB = 8.0
NUMBERS = ("layers", "a page", "a token", "to resume", "pages", "host bytes")
COLUMNS = ("member", "pool", *NUMBERS, "ranks", "holds")


def run(
    config: Path,
    *,
    ranks: int,
    page_size: int | None,
    tokens: int | None,
    states: int | None,
    host_gb: float | None,
    cache: str,
    kv_dtype: str | None,
    layout: str,
    json: bool,
) -> int:
    """Print the plan. Raises InputError for options and configs that it cannot be made from."""
    if cache not in CACHES:
        raise InputError(f"--cache: {unknown('form', cache, CACHES)}")
    if tokens is not None and host_gb is not None:
        raise InputError("--tokens and --host-gb: give what is known, and plan says the other")
    default = host_gb is None and tokens is None
    if default:
        host_gb = HOST_GB
    asked = Asked(ranks, page_size, layout, tokens, states, None if host_gb is None else int(host_gb * GB))
    shipped = Path(__file__).resolve().parent.parent.parent
    try:
        read = read_config(config)
        model = read_model(read, cache, kv_dtype)
        specs = resolve.read_specs(shipped / "specs", shipped)
        pools = {pool.name: pool for pool in specs.pools}
        made = make_plan(model, pools, {group.name: group for group in specs.groups}, asked)
    except PlanError as error:
        raise InputError(str(error)) from None
    data = _data(made, str(config), str(read.values["model_type"]), cache)
    if default and (made.tokens is not None or states is None):
        data["notes"].append(f"{HOST_GB:g} GB of host memory a rank; --host-gb or --tokens sets it")
    if json:
        print(json_format.dumps(data, indent=2))
    else:
        _print(data)
    return 0


def _data(plan: Plan, source: str, model_type: str, cache: str) -> dict[str, Any]:
    """The plan as plain data. Bytes and pages are those of one rank."""
    return {
        "config": source,
        "model_type": model_type,
        "cache": cache,
        "ranks": plan.asked.ranks,
        "page_size": plan.page_size,
        "layout": plan.asked.layout,
        "group": None if plan.group is None else plan.group.name,
        "token_bytes": _plain(plan.token_bytes),
        "state_bytes": plan.state_bytes,
        "tokens": plan.tokens,
        "states": plan.states,
        "host_bytes": plan.host_bytes,
        "all_ranks_host_bytes": plan.host_bytes * plan.asked.ranks,
        "staging_bytes": staging_bytes(plan),
        "members": [_member(plan, one) for one in plan.members],
        "notes": list(plan.notes),
        "python": program(plan),
    }


def _member(plan: Plan, one: Planned) -> dict[str, Any]:
    token = one.size.page_bytes / plan.page_size if one.grows else None
    return {
        "name": one.member.name,
        "pool": one.pool.name,
        "class": one.pool.class_name,
        "holds": one.member.holds,
        "layers": list(one.member.layers),
        "params": dict(one.params),
        "dtypes": dict(one.dtypes),
        "variants": dict(one.member.variants),
        "page_bytes": one.size.page_bytes,
        "token_bytes": None if token is None else _plain(token),
        "state_bytes": None if one.grows else one.size.page_bytes * one.state_pages,
        "pages": one.pages,
        "host_bytes": one.host_bytes,
        "copies": _plain(one.copies),
    }


def _plain(number: float) -> int | float:
    """A whole number as an integer."""
    return int(number) if number == int(number) else number


# ---- text -------------------------------------------------------------------------------------


def _print(data: dict[str, Any]) -> None:
    form = "engines keep it" if data["cache"] == "engine" else "transformers keeps it"
    ranks = "1 rank" if data["ranks"] == 1 else f"each of {data['ranks']} ranks"
    print(f"{data['model_type']}: the cache as {form}, {ranks}, pages of {data['page_size']} tokens")
    print(f"group {data['group']}" if data["group"] else "no group")
    print()
    _print_table([_row(data["ranks"], one) for one in data["members"]])
    print()
    if data["tokens"] is not None:
        print(f"one token   {_number(data['token_bytes'])} bytes; room for {data['tokens']:,} tokens")
    if data["states"] is not None:
        print(f"to resume   {data['state_bytes']:,} bytes a place; room for {data['states']:,}")
    print(f"host        {_bytes(data['host_bytes'])} a rank, {_bytes(data['all_ranks_host_bytes'])} in all")
    print(f"staging     {_bytes(data['staging_bytes'])} of device memory a rank")
    for note in data["notes"]:
        print(f"note        {note}")
    print()
    print(data["python"], end="")


def _row(ranks: int, one: dict[str, Any]) -> tuple[str, ...]:
    return (
        one["name"],
        one["pool"],
        str(len(one["layers"])),
        f"{one['page_bytes']:,}",
        _number(one["token_bytes"]),
        _number(one["state_bytes"]),
        f"{one['pages']:,}",
        f"{one['host_bytes']:,}",
        _ranks(ranks, one["copies"]),
        one["holds"],
    )


def _ranks(ranks: int, copies: float) -> str:
    if ranks == 1:
        return "one"
    if copies == 1:
        return "divided"
    return "a copy each" if copies == ranks else f"{copies:.3g} copies"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _bytes(value: int) -> str:
    unit, name = next(((u, n) for u, n in ((GB, "GB"), (10**6, "MB")) if value >= u), (1, "bytes"))
    return f"{value:,} bytes" if unit == 1 else f"{value / unit:,.2f} {name}"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows under their columns. Plain text on a terminal too: a drawn table cuts numbers to fit its width."""
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    for row in (COLUMNS, *rows):
        cells = (
            f"{cell:>{width}}" if name in NUMBERS else f"{cell:{width}}"
            for name, cell, width in zip(COLUMNS, row, widths, strict=True)
        )
        print("  ".join(cells).rstrip())
