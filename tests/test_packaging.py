"""The wheel holds what a user's own project needs, and works outside the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without network."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel was unpacked to."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def tracked(*patterns: str) -> set[str]:
    return {
        f"poolwright/{path.relative_to(ROOT).as_posix()}"
        for pattern in patterns
        for path in ROOT.glob(pattern)
    }


def test_the_wheel_holds_code_and_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    data = tracked(
        "codegen/**/*.py",
        "codegen/templates/**/*.jinja",
        "generated/**/*.py",
        "generated/**/*.h",
        "generated/**/*.cu",
        "generated/**/*.cpp",
        "runtime/**/*.py",
        "runtime/include/poolwright/*.h",
        "specs/**/*.yaml",
        "*/py.typed",
    )
    assert {
        "poolwright/specs/layouts.yaml",
        "poolwright/codegen/py.typed",
        "poolwright/runtime/py.typed",
    } <= data
    assert any(name.endswith(".jinja") for name in data)
    assert data - names == set()


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"poolwright", "poolwright-0.1.0.dist-info"}
    parts = {name.split("/")[1] for name in names if name.startswith("poolwright/")}
    assert parts == {"codegen", "generated", "runtime", "specs"}
    assert not [name for name in names if "__pycache__" in name or name.endswith("-tmp")]


def test_the_wheel_has_command_and_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = "poolwright-0.1.0.dist-info"
    assert "codegen = poolwright.codegen.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()


def run(installed: Path, project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # -P and the working directory keep the repository's own folders out of the import path.
    return subprocess.run(
        [sys.executable, "-P", *words],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )


def test_a_project_outside_the_repository(installed: Path, project: Path) -> None:
    where = run(installed, project, "-c", "import poolwright.codegen.cli as cli; print(cli.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(installed)
    codegen = ("-m", "poolwright.codegen.cli")
    for words in (
        ["new", "my_pool", "--like", "mla"],
        ["build"],
        ["build", "--check"],
        ["explain", "my_pool"],
    ):
        done = run(installed, project, *codegen, *words)
        assert (done.returncode, done.stderr) == (0, ""), words
    loaded = run(
        installed,
        project,
        "-c",
        "from pathlib import Path\n"
        "from poolwright.runtime.tools.package import load_package\n"
        "print(sorted(load_package('pools_out', Path('pools_out')).POOLS))",
    )
    assert (loaded.returncode, loaded.stdout) == (0, "['my_pool']\n"), loaded.stderr


@pytest.mark.slow
def test_a_new_pool_is_verified_outside_the_repository(installed: Path, project: Path) -> None:
    codegen = ("-m", "poolwright.codegen.cli")
    for words in (["new", "my_pool", "--like", "mla"], ["build"], ["verify", "my_pool"]):
        done = run(installed, project, *codegen, *words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
