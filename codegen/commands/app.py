"""The typer application of `codegen`: commands and options; command modules are imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_FORWARDED = {
    "verify": "Copy every pool in every layout, and every group, and compare with an independent oracle.",
    "bench": "Measure bandwidth over size, beside a plain copy.",
    "tune": "Measure the constants by which pools choose their paths.",
    "compile": "Compile generated sources ahead of time into the cache.",
    "doctor": "Say what this machine has and what is missing.",
}

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A parameter, page_size, layers, pages, a dtype group's dtype or a variant; repeatable.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
PoolName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a pool or a group.")]


def build(
    specs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SPEC]...", help="Only these pools and groups."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; name what differs, exit 1.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Print the whole diff of what changes.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Another output folder.")] = None,
) -> None:
    """Render the specs into the output folder."""
    from poolwright.codegen.commands import build as command

    raise typer.Exit(command.run(tuple(specs or ()), check=check, diff=diff, out=out))


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new pool.")],
    like: Annotated[
        str | None,
        typer.Option(
            "--like", metavar="POOL", help="The spec to start from; else the one of that name, else mla."
        ),
    ] = None,
) -> None:
    """Write the spec of a new pool: a copy of another, or of a shipped one under its own name."""
    from poolwright.codegen.commands import new as command

    raise typer.Exit(command.run(name, like=like))


def show(
    pool: PoolName,
    set_: Set = None,
    layout: Annotated[str | None, typer.Option("--layout", metavar="L", help="Only this host order.")] = None,
    form: Annotated[str | None, typer.Option("--form", metavar="F", help="Only this device order.")] = None,
    json: Json = False,
) -> None:
    """Show where each component lies on the device and on the host, with byte offsets and strides."""
    from poolwright.codegen.commands import show as command

    raise typer.Exit(command.run(pool, tuple(set_ or ()), layout=layout, form=form, json=json))


def explain(pool: PoolName) -> None:
    """Say in words what a spec means."""
    from poolwright.codegen.commands import explain as command

    raise typer.Exit(command.run(pool))


def plan(
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="A model's config.json.")],
    tp: Annotated[int, typer.Option("--tp", min=1, metavar="N", help="Tensor-parallel ranks.")] = 1,
    page_size: Annotated[
        int | None,
        typer.Option(
            "--page-size", min=1, metavar="P", help="Tokens of a page; else 64, or what the model needs."
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, metavar="T", help="Say what memory so many tokens need.")
    ] = None,
    states: Annotated[
        int | None,
        typer.Option("--states", min=1, metavar="S", help="Places to resume at: state slots, windows."),
    ] = None,
    host_gb: Annotated[
        float | None,
        typer.Option(
            "--host-gb", min=0.001, max=1e6, metavar="G", help="Say what fits into G * 10^9 bytes a rank."
        ),
    ] = None,
    cache: Annotated[
        str, typer.Option("--cache", metavar="FORM", help="As `engine` or `transformers` keeps it.")
    ] = "engine",
    kv_dtype: Annotated[
        str | None, typer.Option("--kv-dtype", metavar="DTYPE", help="What keys and values are stored in.")
    ] = None,
    layout: Annotated[
        str, typer.Option("--layout", metavar="L", help="Host order of all pools.")
    ] = "page_first",
    json: Json = False,
) -> None:
    """Say which pools hold a model's cache, what they take, and the Python that builds them."""
    from poolwright.codegen.commands import plan as command

    code = command.run(
        config,
        ranks=tp,
        page_size=page_size,
        tokens=tokens,
        states=states,
        host_gb=host_gb,
        cache=cache,
        kv_dtype=kv_dtype,
        layout=layout,
        json=json,
    )
    raise typer.Exit(code)


def schema() -> None:
    """Print the JSON Schema of a spec."""
    from poolwright.codegen.commands import schema as command

    raise typer.Exit(command.run())


def forward(context: typer.Context) -> None:
    """Run a tool of the runtime on the project's output folder."""
    from poolwright.codegen.commands import forward as command

    raise typer.Exit(command.run(str(context.info_name), tuple(context.args)))


def make_app() -> typer.Typer:
    """The command line with all its commands; their modules are imported when they run."""
    # Rich help and rich tracebacks would import rich for every run, which costs more than a small build.
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="From pool specs to generated kernels and host pools.",
    )
    for command in (build, new, show, explain, plan, schema):
        app.command()(command)
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    for name, text in _FORWARDED.items():
        app.command(name, help=text, context_settings=settings, add_help_option=False)(forward)
    return app
