"""What the README and docs show is true: spec, excerpt, programs, commands, tables, links."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from poolwright.runtime import env

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(mark: str, text: str = README) -> str:
    """The text of the code block behind ``<!-- mark -->``."""
    found = re.search(rf"<!-- {re.escape(mark)} -->\n```\w+\n(.*?)```", text, re.DOTALL)
    assert found is not None, f"no block marked {mark!r} in {text[:40]!r}"
    return found.group(1)


def test_the_spec_shown_is_the_spec_shipped() -> None:
    assert block("spec: specs/mla.yaml") == (ROOT / "specs" / "mla.yaml").read_text(encoding="utf-8")


def test_the_excerpt_shown_is_generated() -> None:
    generated = (ROOT / "generated" / "pools" / "mla" / "layout.h").read_text(encoding="utf-8")
    assert block("excerpt: generated/pools/mla/layout.h") in generated


def test_the_program_shown_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block("run"), "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("host ")


def test_the_moved_cache_shown_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    program = block("run", (ROOT / "docs" / "groups.md").read_text(encoding="utf-8"))
    exec(compile(program, "docs/groups.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["gated_delta_net", "mha"]


def test_the_environment_table_is_the_code_s() -> None:
    rows = ["| variable | value | default | what it does |", "|---|---|---|---|"]
    rows += [f"| `{env.PREFIX}{v.name}` | {v.expected} | {v.shown} | {v.summary} |" for v in env.VARIABLES]
    assert README.endswith("<!-- table: environment -->\n" + "\n".join(rows) + "\n")


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


@pytest.mark.parametrize(
    "name", ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target, place in re.findall(
        r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")
    ):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{name} links to {target}, which is not there"
        heads = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE) if place else []
        assert not place or place in [
            re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads
        ]
