"""`bench`: sizes read, every path of every size measured, tables, pictures, errors with the next step."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from poolwright.generated import POOLS, pool_class
from poolwright.runtime import __main__ as tools
from poolwright.runtime.tools import bench, rows
from poolwright.runtime.tools.samples import arguments, samples

SMALL = ["--set", "layers=2", "--limit-mb", "1", "--repeats", "3", "--device", "cpu"]
MLA = ["mla", *SMALL, "--set", "kv_lora_rank=500", "--set", "qk_rope_head_dim=12", "--set", "page_size=128"]


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_size_direction_and_path_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.main(["bench", *MLA, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)
    page = 128 * 2 * 512 * 2
    ways = [(w, n) for n in (1, 2, 4) for w in ("write_back", "load", "load_layers")]
    assert [(p["direction"], p["pages"]) for p in points if p["path"] == "chosen"] == ways
    assert {p["nbytes"] // p["pages"] for p in points} == {page}
    assert {p["taken"] for p in points} == {"host"}
    assert {p["path"] for p in points if p["direction"] != "load_layers"} == {"host", "chosen"}
    assert all(p["gbps"] > 0 and p["plain"] > 0 for p in points)


def test_the_table_has_a_row_for_each_size_and_direction(capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.main(["bench", *MLA, "--layout", "page_record", "--order", "runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == bench.HEADER
    assert len(lines) == 2 + 9
    assert all(line.count("|") == bench.HEADER.count("|") for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope"], "no pool 'nope' in poolwright.generated; pools are "),
        (["logical"], "logical has no bytes to move; name another pool"),
        ([*MLA, "--set", "layers=0"], "mla has no bytes to move with these sizes; give it others"),
        (
            ["mla"],
            "sizes of mla are missing: give --set kv_lora_rank=... --set qk_rope_head_dim=... --set layers=",
        ),
        (["mla", "--set", "rank"], "--set rank: expected name=value, for example --set page_size=64"),
        (
            ["mla", "--set", "rank=3"],
            "--set rank: mla has kv_lora_rank, qk_rope_head_dim, layers, page_size, kv",
        ),
        (["mla", "--set", "kv=int7", "--set", "layers=1"], "sizes of mla are missing"),
        ([*MLA, "--set", "kv=int7"], "--set kv=int7: expected one of bfloat16, "),
        ([*MLA, "--set", "layers=two"], "--set layers=two: expected an integer"),
        ([*MLA, "--set", "kv_lora_rank=0"], "mla: kv_lora_rank: expected at least 1, got 0"),
        ([*MLA, "--layout", "rows"], "no layout 'rows' in mla: layer_first, "),
        ([*MLA, "--form", "rows"], "no form 'rows' in mla: per_layer"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.main(["bench", *words]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == "" or captured.out.count("\n") == 2


@pytest.mark.parametrize(
    "tool", [["bench", "mla", "--repeats"], ["bench", "mla", "--limit-mb"], ["tune", "--repeats"]]
)
@pytest.mark.parametrize("given", ["0", "-1", "many"])
def test_a_count_is_at_least_one(tool: list[str], given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.main([*tool, given]) == 2
    message = f"argument {tool[-1]}: expected an integer of at least 1, got {given!r}"
    assert message in capsys.readouterr().err


def test_a_picture_needs_matplotlib_and_says_so_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert tools.main(["bench", *MLA, "--plot", str(tmp_path / "a.png")]) == 1
    captured = capsys.readouterr()
    assert "--plot needs matplotlib: pip install matplotlib" in captured.err
    assert captured.out == ""


class Axis:
    def __init__(self) -> None:
        self.lines: dict[str, tuple[list[float], list[float]]] = {}
        self.title = ""

    def plot(self, x: list[float], y: list[float], *style: str, label: str, **more: str) -> None:
        self.lines[label] = (x, y)

    def set(self, title: str, **more: str) -> None:
        self.title = title

    def legend(self) -> None: ...
    def set_ylabel(self, text: str) -> None: ...


def test_the_picture_has_a_line_a_path_and_the_plain_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    axes, saved = [Axis(), Axis()], list[Path]()
    figure = types.SimpleNamespace(tight_layout=lambda: None, savefig=saved.append)
    pyplot = types.SimpleNamespace(subplots=lambda *a, **k: (figure, axes), close=lambda figure: None)
    library = types.SimpleNamespace(use=lambda name: None, pyplot=pyplot)
    monkeypatch.setitem(sys.modules, "matplotlib", library)
    points = [
        bench.Point(way, pages, pages * 10**6, path, path, speed * pages, 50.0, 0.0, 1.0)
        for way in ("write_back", "load")
        for pages in (1, 2)
        for path, speed in (("staged", 10.0), ("chosen", 20.0))
    ]
    bench.plot(points, "mla", tmp_path / "a.png")
    assert [axis.title for axis in axes] == ["mla: write_back", "mla: load"]
    lines = {"staged": ([1, 2], [10, 20]), "chosen": ([1, 2], [20, 40]), "one plain copy": ([1, 2], [50, 50])}
    assert axes[0].lines == axes[1].lines == lines
    assert saved == [tmp_path / "a.png"]


@pytest.mark.parametrize("name", [name for name in POOLS if pool_class(name).spec.components])
def test_rows_for_any_pool_and_form_can_be_bound(name: str) -> None:
    kind = pool_class(name)
    for sample in samples(kind):
        for form in kind.spec.forms:
            pool = kind(**arguments(kind, sample), form=form, capacity_pages=1, device="cpu")
            pool.bind(rows.tensors(pool, 5))
            assert pool._bound.pages == 5
            pool.destroy()
