"""`python -m poolwright.runtime TOOL ...`: arguments in, the tool's exit code out (standard library only)."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

TOOLS = {
    "verify": "copy every pool in every layout and compare with an independent oracle",
    "bench": "measure bandwidth over size, beside a plain copy",
    "tune": "measure the constants by which pools choose their paths",
    "compile": "compile generated sources ahead of time into the cache",
    "doctor": "say what this machine has and what is missing",
}
PROGRAM = "python -m poolwright.runtime"
USAGE = 2
OUR_FAULT = 70


def main(arguments: Sequence[str] | None = None, *, prog: str = PROGRAM) -> int:
    """Run one tool and return its exit code: 0 fine, 1 input or difference, 2 usage, 70 our fault."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_help(prog), file=sys.stdout if words else sys.stderr)
        return 0 if words else USAGE
    if words[0] not in TOOLS:
        print(f"{prog}: unknown tool {words[0]!r}; tools are {', '.join(TOOLS)}", file=sys.stderr)
        return USAGE
    try:
        return _run(words[0], words[1:], prog)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BrokenPipeError:
        raise
    except Exception as error:
        return _report(f"{prog} {words[0]}", error)


def _run(tool: str, words: list[str], prog: str) -> int:
    from poolwright.runtime import env
    from poolwright.runtime.tools import package

    module = importlib.import_module(f"poolwright.runtime.tools.{tool}")
    # A tool may describe the two common arguments in its own words, hence "resolve".
    parser = argparse.ArgumentParser(
        prog=f"{prog} {tool}", description=module.__doc__, allow_abbrev=False, conflict_handler="resolve"
    )
    package.add_arguments(parser)
    module.add_arguments(parser)
    args = parser.parse_args(words)
    for variable in env.VARIABLES:
        try:
            env.text(variable.name)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
    code: int = module.run(args)
    return code


def _report(command: str, error: Exception) -> int:
    from poolwright.runtime.errors import PoolError
    from poolwright.runtime.tools.package import PackageError

    if isinstance(error, PoolError | PackageError):
        print(f"{command}: {error}", file=sys.stderr)
        return 1
    if os.environ.get("POOLWRIGHT_VERBOSE") == "1":
        import traceback

        traceback.print_exception(error)
    text = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"{command}: {text}; this is a fault of poolwright, not of your spec", file=sys.stderr)
    return OUR_FAULT


def _help(prog: str) -> str:
    tools = "\n".join(f"  {name:9} {text}" for name, text in TOOLS.items())
    return f"usage: {prog} TOOL [--help] ...\n\ntools:\n{tools}"


def _entry() -> int:
    try:
        code = main()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has gone; point stdout elsewhere so that the interpreter's own flush stays quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(_entry())
