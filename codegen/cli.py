"""`codegen`: arguments in, an exit code out: 0 fine, 1 input or difference, 2 usage, 70 our fault."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

OUR_FAULT = 70


def main(arguments: list[str] | None = None) -> int:
    """Run one command line (default: the process's) and return its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has gone; point stdout elsewhere so that the interpreter's own flush stays quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def plain_build(words: Sequence[str]) -> tuple[tuple[str, ...], bool, bool] | None:
    """(specs, check, diff) of a `build` with at most those two flags; None for any other command line.

    typer, which brings pydantic to convert arguments, takes longer to import than a check of all specs
    takes; so the command that runs on every commit is read without it.
    """
    specs = tuple(word for word in words[1:] if not word.startswith("-"))
    flags = [word for word in words[1:] if word.startswith("-")]
    if words[:1] != ["build"] or not set(flags) <= {"--check", "--diff"}:
        return None
    return specs, "--check" in flags, "--diff" in flags


def _run(words: list[str]) -> int:
    try:
        plain = plain_build(words)
        if plain is None:
            return _run_app(words)
        from poolwright.codegen.commands import build

        specs, check, diff = plain
        return build.run(specs, check=check, diff=diff, out=None)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        return _report(words, error)


def _run_app(words: list[str]) -> int:
    import typer

    from poolwright.codegen.commands.app import make_app

    typer.main.get_command(make_app()).main(args=words, prog_name="codegen")
    return 0


def _report(words: list[str], error: Exception) -> int:
    from poolwright.codegen.commands.common import user_message

    message = user_message(error)
    if message is not None:
        print(message, file=sys.stderr)
        return 1
    if os.environ.get("POOLWRIGHT_VERBOSE") == "1":
        import traceback

        traceback.print_exception(error)
    command = " ".join(["codegen", *words])
    text = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"{command}: {text}; this is a fault of poolwright, not of your spec", file=sys.stderr)
    return OUR_FAULT


if __name__ == "__main__":
    sys.exit(main())
