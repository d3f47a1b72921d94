"""What the README shows is true: the spec, the excerpt, the program, the commands, the table."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from poolwright.runtime import env

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(mark: str) -> str:
    """The text of the code block behind ``<!-- mark -->``."""
    found = re.search(rf"<!-- {re.escape(mark)} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found is not None, f"no block marked {mark!r} in README.md"
    return found.group(1)


def test_the_spec_shown_is_the_spec_shipped() -> None:
    assert block("spec: specs/mla.yaml") == (ROOT / "specs" / "mla.yaml").read_text(encoding="utf-8")


def test_the_excerpt_shown_is_generated() -> None:
    generated = (ROOT / "generated" / "pools" / "mla" / "layout.h").read_text(encoding="utf-8")
    assert block("excerpt: generated/pools/mla/layout.h") in generated


def test_the_program_shown_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block("run"), "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("host ")


def test_the_environment_table_is_the_code_s() -> None:
    assert README.endswith("<!-- table: environment -->\n" + env.markdown_table())


def test_the_four_steps_to_a_pool_work(tmp_path: Path) -> None:
    (tmp_path / "poolwright.toml").write_text('[poolwright]\nspecs = "specs"\noutput = "generated"\n')
    (tmp_path / "specs").mkdir()
    (tmp_path / "generated").mkdir()
    commands = [line.split("#")[0].split() for line in block("shell").splitlines()]
    assert [command[:2] for command in commands] == [
        ["codegen", word] for word in ("new", "show", "build", "verify")
    ]
    for command in commands:
        arguments = command[1:] + (["--quick"] if command[1] == "verify" else [])
        done = subprocess.run(
            [sys.executable, "-m", "poolwright.codegen.cli", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def test_every_pool_is_listed() -> None:
    rows = []
    for file in sorted((ROOT / "specs").glob("*.yaml")):
        lines = file.read_text(encoding="utf-8").splitlines()
        summary = next(
            (line.removeprefix("summary: ") for line in lines if line.startswith("summary: ")), None
        )
        rows += [] if summary is None else [f"| [`{file.stem}`](specs/{file.name}) | {summary} |"]
    table = README.split("<!-- table: pools -->")[1].split("\n\n")[0].splitlines()
    assert table[3:] == rows


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), f"README.md links to {target}, which is not there"
