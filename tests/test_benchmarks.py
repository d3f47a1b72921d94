"""The benchmarks' own logic: targets, timelines, going on where a run ended, and the peer's calls."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import poolwright.generated as generated
from poolwright.runtime import jit
from poolwright.runtime.testing import use_driver
from poolwright.runtime.tools import cases
from poolwright.runtime.tools.measure import Run, Sample
from poolwright.runtime.tools.samples import samples

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
MB = 1_000_000


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of the folder can be imported, for one test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def module(name: str) -> Any:
    return importlib.import_module(name)


def cell(direction: str, range_bytes: int, total: int, order: str = "scattered", **seconds: float) -> Any:
    """A cell of which ``ref`` takes one second; a number is what a way takes."""
    targets = module("targets")
    figures = {"ref": targets.Figure(1.0, 0.0, 0.0)}
    figures |= {name.replace("_at_", " "): targets.Figure(s, 0.0, 0.0) for name, s in seconds.items()}
    return targets.Cell("pool", 64, 1, order, direction, range_bytes, total, 10, figures)


@pytest.mark.parametrize(
    ("direction", "range_bytes", "total", "order", "goal"),
    [
        ("write_back", 4 << 20, 256 * MB, "scattered", 98.5),
        ("load", 512 << 10, 256 * MB, "runs", 98.5),
        ("load", 512 << 10, 64 * MB, "scattered", 97.0),
        ("load", 512 << 10, 63 * MB, "scattered", None),
        ("load", (512 << 10) - 1, 256 * MB, "scattered", None),
        ("load_layers", 20 << 10, 64 * MB, "scattered", 92.0),
        ("load_layers", 4 << 20, 63 * MB, "scattered", None),
        ("write_back", 20 << 10, 16 * MB, "scattered", 94.0),
        ("load", 70 << 10, 16 * MB, "scattered", 92.0),
        ("load", 70 << 10, 4 * MB, "scattered", 90.0),
        ("load", 70 << 10, 3 * MB, "scattered", None),
        ("write_back", 64 << 10, 64 * MB, "runs", 97.0),
        ("write_back", 64 << 10, 63 * MB, "runs", 94.0),
    ],
)
def test_the_goal_of_a_cell_follows_from_what_it_moves(
    direction: str, range_bytes: int, total: int, order: str, goal: float | None
) -> None:
    assert module("targets").goal(cell(direction, range_bytes, total, order)) == goal


@pytest.mark.parametrize(
    ("seconds", "missed"),
    [
        ({"chosen": 1.01}, []),
        ({"chosen": 1.02}, ["against ref"]),
        ({"chosen": 1.01, "sglang_at_staged": 1.0}, []),
        ({"chosen": 1.01, "sglang_at_staged": 0.98}, ["against sglang staged"]),
        ({"chosen": 1.0, "sglang_at_register": 0.97, "sglang_at_tma": 0.9}, ["against sglang tma"]),
        ({"chosen": 1.01, "zero_copy": 0.99, "staged": 1.2}, []),
        ({"chosen": 1.01, "zero_copy": 0.97}, ["against zero_copy, forced"]),
        ({"zero_copy": 0.97}, []),
    ],
)
def test_misses_name_what_a_cell_falls_behind(seconds: dict[str, float], missed: list[str]) -> None:
    found = module("targets").misses([cell("write_back", 4 << 20, 256 * MB, **seconds)])
    assert [miss.what for miss in found] == missed


def test_a_spread_excuses_as_much_as_it_is() -> None:
    targets = module("targets")
    one = cell("write_back", 4096, MB, chosen=1.05, sglang=1.0)
    assert [miss.what for miss in targets.misses([one])] == ["against sglang"]
    figures = {**one.figures, "sglang": targets.Figure(1.0, 0.06, 0.0)}
    assert not list(targets.misses([targets.Cell(**{**vars(one), "figures": figures})]))


def test_the_first_layer_has_its_share_of_the_whole_and_20_us() -> None:
    targets = module("targets")
    one = cell("load_layers", 4096, MB)
    for whole, first, count in ((1.0, 0.1 + 19e-6, 0), (1.0, 0.1 + 21e-6, 1), (2.0, 0.2 + 19e-6, 0)):
        figures = {**one.figures, "chosen": targets.Figure(whole, 0.0, 0.0, first)}
        found = list(targets.misses([targets.Cell(**{**vars(one), "figures": figures})]))
        assert [miss.what for miss in found] == ["first layer"] * count


def test_only_what_ran_side_by_side_is_counted() -> None:
    timeline = module("timeline")
    alone = timeline.Lane([float(i) for i in range(20)])
    # Ten things of one second, then ten of two seconds while the other lane runs.
    beside = timeline.Lane([*(float(i) for i in range(10)), *(10.0 + 2 * i for i in range(10))])
    moves = timeline.Lane([11.0, 15.0, 19.0, 40.0])
    assert timeline.slowdown(alone, beside, moves, skip=0) == pytest.approx(1.0)
    assert timeline.rate(moves, beside, skip=0) == pytest.approx(1 / 4)
    assert timeline.rate(moves, timeline.Lane([100.0, 101.0]), skip=0) is None


def options(**more: Any) -> argparse.Namespace:
    given = dict(device="cpu", budget_s=1e9, repeats=3, limit_mb=1, order=["scattered"], only=None)
    given |= dict(pages=(1, 2), torch=True)
    return argparse.Namespace(**{**given, **more})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The grid over two small pools of one or two pages."""
    shapes, grid = module("shapes"), module("grid")
    monkeypatch.setattr(grid, "SHAPES", (shapes.mla("MLA", 2, 32, 4), shapes.mha(2, 256, 1)))
    return grid


def test_the_grid_goes_on_where_it_ended(small: Any, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "grid.json"
    assert not small.measure(options(budget_s=-1.0), small.Results(file))
    assert small.measure(options(only=["MLA"]), small.Results(file))
    begun = small.Results(file)
    assert len(begun.cells) == 2 * 3
    assert small.measure(options(), begun)
    kept = small.Results(file)
    assert kept.cells == begun.cells
    assert len(kept.cells) == 2 * 2 * 3
    capsys.readouterr()
    assert small.measure(options(), kept)
    assert capsys.readouterr().out == ""
    small.summary(kept)
    assert "12 cells" in capsys.readouterr().out


class Counting:
    """A clock that counts; a plain copy takes `seconds`, but for the first time, everything else an hour."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.times: Counter[str] = Counter()

    def time(self, run: Run) -> Sample:
        self.times[run.name] += 1
        first = self.times[run.name] == 1
        return Sample(self.seconds if run.name == "ref" and not first else 3600.0, 0.0, None, True)


@pytest.mark.parametrize(("seconds", "repeats"), [(99e-6, 20), (100e-6, 5), (1.0, 5)])
def test_short_cells_are_repeated_four_times_as_often(small: Any, seconds: float, repeats: int) -> None:
    clock = Counting(seconds)
    rig = module("shapes").Rig(small.SHAPES[0], 1, "cpu")
    for _ in small.Grid(rig, clock, repeats=5).cells(1, "scattered"):
        pass
    rig.close()
    warm_ups, directions = 3, {"ref": 3, "host": 2, "chosen": 3}
    counted = {name: clock.times[name] - n * warm_ups for name, n in directions.items()}
    assert counted == {"ref": 3 * (repeats + small.PROBES), "host": 2 * repeats, "chosen": 3 * repeats}


def test_a_rig_hands_the_bound_of_staging_memory_on() -> None:
    shapes = module("shapes")
    with pytest.raises(ValueError, match="staging_bytes: expected an integer of at least 0, got -1"):
        shapes.Rig(shapes.SHAPES[7], 1, "cpu", staging_bytes=-1)


NEED_A_GPU = ("beside", "busy", "submit", "grid", "host_memory", "layer_order", "first_layer", "module_load")
NEED_A_GPU += ("sglang_engine",)


@pytest.mark.parametrize("name", NEED_A_GPU)
def test_what_needs_a_gpu_says_so_first(name: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with pytest.raises(SystemExit):
        module(name).main()
    assert f"{name} needs a CUDA device, and torch sees none: " in capsys.readouterr().err


@pytest.mark.parametrize("name", NEED_A_GPU)
def test_nothing_is_measured_no_times(name: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    count = "--rounds" if name in ("host_memory", "sglang_engine") else "--repeats"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", count, "0"])
    with pytest.raises(SystemExit):
        module(name).main()
    assert f"error: {count}: expected at least 1, got 0" in capsys.readouterr().err


def test_pairs_of_paths_are_submitted_in_turn_and_blocks_are_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside, nothing, shapes = module("beside"), module("nothing"), module("shapes")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with use_driver(nothing.NoDriver()):
        rig = shapes.Rig(shapes.SHAPES[6], 8, "cpu")
    moved: list[tuple[str, str]] = []
    for way in ("write_back", "load"):
        call = getattr(rig.pool, way)

        def noted(*ids: Any, way: str = way, call: Any = call, **more: Any) -> Any:
            ticket = call(*ids, **more)
            moved.append((way, ticket.path))
            return ticket

        monkeypatch.setattr(rig.pool, way, noted, raising=False)
    with beside.writing(2):
        assert {beside.sizes.blocks(f"write_back{more}", 1 << 30) for more in ("", "_beside")} == {2}
        seconds, calls = beside.pair(rig, 4, "zero_copy", "staged", 7)
    assert 0 < calls < seconds
    assert moved == [("write_back", "zero_copy"), ("load", "staged")] * 7
    assert beside.sizes.blocks("write_back", 1 << 30) == 4
    rig.close()


def test_a_way_that_moves_other_bytes_ends_the_grid(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = small.Grid._ours

    def lying(self: Any, direction: str, host: torch.Tensor, device: torch.Tensor, path: str | None) -> Any:
        if path is None:
            host = host.flip(0)
        return honest(self, direction, host, device, path)

    monkeypatch.setattr(small.Grid, "_ours", lying)
    with pytest.raises(SystemExit, match=r"MLA 2 x 32 B, page 4: chosen: bytes differ"):
        small.measure(options(), small.Results(None))


class Library:
    """Stands for a library of the peer: copies with torch what the kernel of that name copies."""

    def __init__(self, rig: Any) -> None:
        self.rig = rig

    def rows(self, table: torch.Tensor) -> list[torch.Tensor]:
        """What the addresses in a pointer table point to."""
        known = {rows.data_ptr(): rows for component in self.rig.device for rows in component}
        for side in self.rig.host:
            known |= {side[:, at].data_ptr(): side[:, at] for at in range(side.shape[1])}
        return [known[int(address)] for address in table]

    def launch_one(self, k: Any, v: Any, to: Any, k_from: Any, v_from: Any, source: Any) -> None:
        k[to], v[to] = k_from[source], v_from[source]

    def launch_one_mla(self, rows: Any, to: Any, source_rows: Any, source: Any) -> None:
        rows[to] = source_rows[source]

    def launch_all(
        self, k: Any, v: Any, to: Any, k_from: Any, v_from: Any, source: Any, *strides: int
    ) -> None:
        self.launch_all_mla(k, to, k_from, source, *strides)
        self.launch_all_mla(v, to, v_from, source, *strides)

    def launch_all_mla(self, table: Any, to: Any, table_from: Any, source: Any, *strides: int) -> None:
        pairs = list(zip(self.rows(table), self.rows(table_from), strict=True))
        row = pairs[0][0].shape[1]
        assert strides in [(row * len(pairs), row), (row * len(pairs), row, row)]
        for rows, source_rows in pairs:
            rows[to] = source_rows[source]

    def launch_all_mla_lf_pf_staged(
        self, host: Any, to: Any, staging: Any, pages: Any, table: Any, size: int
    ) -> None:
        assert len(to) == len(staging) == len(pages) * size
        tokens = (pages[:, None] + torch.arange(size)).reshape(-1)
        for layer, rows in enumerate(self.rows(table)):
            staging[:, layer] = rows[tokens]
        host[to] = staging

    def launch_all_lf_pf_staged(
        self, k: Any, v: Any, to: Any, stage_k: Any, stage_v: Any, *rest: Any
    ) -> None:
        pages, table_k, table_v, size = rest
        self.launch_all_mla_lf_pf_staged(k, to, stage_k, pages, table_k, size)
        self.launch_all_mla_lf_pf_staged(v, to, stage_v, pages, table_v, size)

    def write_back(
        self, table: Any, host: Any, source: Any, to: Any, row: int, dim: int, layers: int
    ) -> None:
        assert (row, dim) == (host.shape[2], row * layers)
        for layer, rows in enumerate(self.rows(table)):
            host[to, layer] = rows[source]

    def load(self, host: Any, rows: Any, source: Any, to: Any, layer: int, row: int, dim: int) -> None:
        assert (row, dim) == (host.shape[2], row * host.shape[1])
        rows[to] = host[source, layer]


@pytest.mark.parametrize("kind", ["mla", "mha", "states"])
def test_the_peer_moves_the_bytes_that_we_move(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, peer, grid = module("shapes"), module("sglang_peer"), module("grid")
    made = {
        "mla": lambda: shapes.mla("MLA", 3, 256, 4),
        "mha": lambda: shapes.mha(3, 256, 4),
        "states": lambda: shapes.states(3, 1),
    }
    rig = shapes.Rig(made[kind](), 70, "cpu")  # more pages than the peer stages at once
    monkeypatch.setattr(peer, "available", lambda: "")
    monkeypatch.setattr(peer, "_recorded", lambda: None)
    monkeypatch.setattr(peer.Peer, "_module", lambda self, name: Library(rig))
    peers = grid.peers(rig)
    host, device = rig.lists(70, "scattered")
    expected = rig.packed_device(device)
    for name in peers[0].write_backs:
        rig.poison_host(host)
        for one in peers:
            one.write_back(name, one.ids(host, device))
        assert shapes.same(rig.packed_host(host), expected)
    for name in peers[0].loads:
        for layered in (False, True):
            rig.poison_device(device)
            for one in peers:
                one.load(name, one.ids(host, device), layered=layered)
            assert shapes.same(rig.packed_device(device), expected)
    assert peers[0].write_backs == (("mamba",) if kind == "states" else ("staged",))
    assert peers[0].loads == (("mamba",) if kind == "states" else ("register", "tma"))
    rig.close()


def test_the_clocks_of_a_first_layer_compile() -> None:
    (cubin,) = jit.cubins(jit.Unit("first_layer", FOLDER / "first_layer.cu"), "sm_90")
    assert all(name in cubin for name in (b"stamp", b"watch", b"spin"))


def test_kernels_to_load_are_compiled_with_and_without_variables() -> None:
    loads, pool_class = module("module_load"), generated.pool_class("mla")
    program = cases.sized(pool_class, samples(pool_class)[0], "per_layer", "page_first")
    found = {form: jit.cubins(loads.unit(program, form), "sm_90") for form in loads.FORMS}
    has = {form: {b".nv.global" in cubin for cubin in cubins} for form, cubins in found.items()}
    assert has == {"variables": {True}, "names": {False}}


def test_the_report_has_a_row_a_cell_and_a_column_a_way() -> None:
    report = module("report")
    cells = [
        cell(
            "load", 4 << 20, 256 * MB, zero_copy=1.25, chosen=1.0, sglang_at_tma=2.0, sglang_at_register=4.0
        ),
        cell("load", 4 << 20, 512 * MB, chosen=0.5),
        cell("write_back", 4 << 20, 512 * MB, chosen=0.5),
    ]
    head, _, first, second = report.table(cells, "load").splitlines()
    ways = ["zero_copy %", "chosen %", "sglang register %", "sglang tma %"]
    assert [part.strip() for part in head.split("|")[6:10]] == ways
    assert [part.strip() for part in first.split("|")[6:10]] == ["80.0", "100.0", "25.0", "50.0"]
    assert [part.strip() for part in second.split("|")[6:10]] == ["", "200.0", "", ""]
    assert report.best_peer(cells[0]) == "sglang tma" and report.best_peer(cells[1]) is None


def test_a_picture_of_the_report_needs_matplotlib_and_says_so_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert module("report").main([str(tmp_path / "grid.json"), "--plot", str(tmp_path / "grid.png")]) == 1
    assert capsys.readouterr() == ("", "--plot needs matplotlib: pip install matplotlib\n")


def test_every_way_of_a_load_in_layer_order_compiles_to_code_of_its_own() -> None:
    layer_order, include = module("layer_order"), jit.include_dir()
    pool_class = generated.pool_class("mla")
    program = cases.sized(pool_class, samples(pool_class)[0], "per_layer", "page_first")
    found = {way: tuple(layer_order.compiled(program, 16, "sm_90", way)) for way in layer_order.WAYS}
    assert len(set(found.values())) == len(layer_order.WAYS)
    assert jit.include_dir() == include


def test_settings_are_ranked_by_what_all_long_loads_lose() -> None:
    layer_order = module("layer_order")
    measured = {8: (90.0, 92.0), 16: (91.0, 93.0), 24: (95.0, 85.0)}
    rows = [
        layer_order.Row(f"cell {n}", 64 * MB, 10.0, False, "usual", 2 << 20, blocks, percent, 30.0)
        for blocks, percents in measured.items()
        for n, percent in enumerate(percents)
    ]
    rows.append(layer_order.Row("cell 0", 64 * MB, 10.0, True, "usual", 2 << 20, 8, 99.0, 30.0))
    rows.append(layer_order.Row("short", 8 * MB, 10.0, False, "usual", 2 << 20, 16, 50.0, 30.0))
    told = [(float(line.split()[0]), int(line.split()[-1])) for line in layer_order.shortfalls(rows)]
    assert told == [(1.0, 16), (2.0, 8), (7.0, 24)]


def test_a_group_stands_beside_its_pools_for_every_count_and_way(capsys: Any) -> None:
    submit, nothing = module("submit"), module("nothing")
    with use_driver(nothing.NoDriver()):
        group = submit.build_group("cpu")
    paths, took = [], iter(range(1, 100))

    def measure(submits: Any) -> list[tuple[float, ...]]:
        for made in submits:
            ticket = made()
            ticket.wait()
            paths.append(ticket.path)
        return [(float(next(took)), 0.5) for _ in submits]

    submit.group_table(group, measure)
    group.destroy()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[3:]]
    counts = [f"| {pages}" for pages in (1, 64, 1024)]
    assert [row[:2] for row in rows] == [[count, way] for count in counts for way in submit.WAYS]
    assert paths == [path for path in ("zero_copy", "staged", "zero_copy") for _ in range(3)] * 3
    # kv, state, both of the second row take 4, 5 and 6.
    assert rows[1][2:] == ["4.0 / 0.5", "5.0 / 0.5", "6.0 / 0.5", "1.20 |"]


def test_the_shares_of_python_have_a_column_a_way(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = module("submit")
    monkeypatch.setattr(submit, "BURST", 1)
    submit.shares(1)
    submit.group_shares(1)
    out = capsys.readouterr().out
    head, _, *rows = out.split("\n\n")[0].splitlines()
    ways = [f"{way} us" for way in submit.WAYS]
    assert [part.strip() for part in head.split("|")[3:-1]] == ["ids us", *ways]
    assert {len(row.split("|")) for row in rows} == {len(head.split("|"))}
    assert all(float(part) > 0 for row in rows for part in row.split("|")[3:-1])
    assert len(out.split("\n\n")[1].splitlines()) == 2 + 3 * len(submit.WAYS)


def test_submissions_are_timed_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    submit, now, log = module("submit"), 0.0, []

    class Ticket:
        def wait(self) -> None:
            log.append("wait")

    def made(name: str, seconds: float) -> Any:
        def call() -> Ticket:
            nonlocal now
            now += seconds
            log.append(name)
            return Ticket()

        return call

    monkeypatch.setattr(submit.time, "perf_counter", lambda: now)
    found = submit.microseconds([made("a", 1e-6), made("b", 3e-6)], rounds=2)
    assert found == [pytest.approx((1.0, 1.0, 1.0)), pytest.approx((3.0, 3.0, 3.0))]
    turn = [step for name in "ab" for step in [name] * submit.DEPTH + ["wait"] * submit.DEPTH]
    bursts = [step for name in "ab" for step in [name] * submit.BURST + ["wait"] * submit.BURST]
    assert log == turn * (3 + 2) + bursts * 3
