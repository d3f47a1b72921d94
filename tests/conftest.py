"""What all tests share: one compile cache for repeated runs, properties that repeat exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the GPU tests need none of it
    settings = None  # type: ignore[assignment,misc]

ROOT = Path(__file__).resolve().parent.parent

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_configure() -> None:
    # Compiled code is content-addressed, so a cache that outlives the run cannot be stale.
    os.environ.setdefault("POOLWRIGHT_CACHE_DIR", str(ROOT / "build" / "test-cache"))
    if settings is None:
        return
    settings.register_profile(
        "same", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("same")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of its own with no spec in it yet."""
    (tmp_path / "specs").mkdir()
    lines = ["[poolwright]", 'specs = "specs"', 'output = "pools_out"', 'import_name = "pools_out"']
    (tmp_path / "poolwright.toml").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def codegen() -> Run:
    """Runs `codegen ARGUMENTS` in a process of its own: codegen("build", cwd=folder, env={...})."""

    def run(
        *arguments: str, cwd: Path, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "poolwright.codegen.cli", *arguments],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT / ".src"), **(env or {})},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=300,
        )

    return run
