"""The table of environment variables: defaults, parsing, refusals, and the Markdown table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from poolwright.runtime import env


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(env.PREFIX + variable.name, raising=False)


def test_defaults() -> None:
    assert {v.name: env.text(v.name) for v in env.VARIABLES} == {
        "CACHE_DIR": "",
        "VERBOSE": "0",
        "CXX": "",
        "CUDA_ARCH": "",
        "CUDA_COMPILER": "nvrtc",
        "PATH": "auto",
        "TWIN": "atoms",
        "OPTIMIZE": "2",
        "THREADS": "0",
        "HUGEPAGES": "0",
        "REGISTER_CHUNK_GB": "16",
    }


@pytest.mark.parametrize(
    ("read", "name", "text", "value"),
    [
        (env.flag, "VERBOSE", "1", True),
        (env.flag, "VERBOSE", "0", False),
        (env.flag, "VERBOSE", "", False),
        (env.text, "CXX", "ccache g++", "ccache g++"),
        (env.text, "CUDA_ARCH", "sm_100", "sm_100"),
        (env.text, "CUDA_ARCH", "sm_90a", "sm_90a"),
        (env.text, "CUDA_COMPILER", "nvcc", "nvcc"),
        (env.text, "PATH", "zero_copy", "zero_copy"),
        (env.text, "TWIN", "lanes", "lanes"),
        (env.number, "THREADS", "12", 12),
        (env.number, "THREADS", "00", 0),
        (env.number, "REGISTER_CHUNK_GB", " 4 ", 4),
        (env.number, "REGISTER_CHUNK_GB", "", 16),
    ],
)
def test_values(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[str], object], name: str, text: str, value: object
) -> None:
    monkeypatch.setenv(env.PREFIX + name, text)
    assert read(name) == value
    assert type(read(name)) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("VERBOSE", "yes", "POOLWRIGHT_VERBOSE: expected 0 or 1, got 'yes'; change it or unset it"),
        ("TWIN", "Atoms", "POOLWRIGHT_TWIN: expected atoms or lanes, got 'Atoms'; change it or unset it"),
        (
            "PATH",
            "fast",
            "POOLWRIGHT_PATH: expected one of auto, zero_copy, staged, host, torch, got 'fast'; "
            "change it or unset it",
        ),
        (
            "THREADS",
            "-1",
            "POOLWRIGHT_THREADS: expected an integer of at least 0, got '-1'; change it or unset it",
        ),
        (
            "REGISTER_CHUNK_GB",
            "0",
            "POOLWRIGHT_REGISTER_CHUNK_GB: expected an integer of at least 1, got '0'; change it or unset it",
        ),
        (
            "CUDA_ARCH",
            "9.0",
            "POOLWRIGHT_CUDA_ARCH: expected a compute capability such as sm_90, got '9.0'; "
            "change it or unset it",
        ),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str) -> None:
    monkeypatch.setenv(env.PREFIX + name, text)
    with pytest.raises(ValueError) as caught:
        env.text(name)
    assert str(caught.value) == message


def test_cache_dir_follows_the_desktop_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert env.cache_dir() == tmp_path / ".cache" / "poolwright"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert env.cache_dir() == tmp_path / ".cache" / "poolwright"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert env.cache_dir() == tmp_path / "xdg" / "poolwright"
    monkeypatch.setenv("POOLWRIGHT_CACHE_DIR", "~/mine")
    assert env.cache_dir() == tmp_path / "mine"


def test_a_name_that_is_not_in_the_table() -> None:
    with pytest.raises(KeyError):
        env.text("SPEED")
