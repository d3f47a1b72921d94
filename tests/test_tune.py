"""`tune`: constants recovered from made-up times, measured on a pool, shown; the next step in errors."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from poolwright.runtime import __main__ as tools
from poolwright.runtime import tuning
from poolwright.runtime.costs import DEFAULTS, Costs, Rates, Work, alone, predict
from poolwright.runtime.tools import tune
from poolwright.runtime.tools.fit import Sample, fit
from poolwright.runtime.tools.measure import HostClock

MIB = 1 << 20


def made_up(way: str, rates: Rates, total: int, chunks: int) -> Sample:
    """What a transfer takes by the model itself."""
    costs = Costs(rates, rates, "made up")
    if not chunks:
        seconds = predict("zero_copy", Work(way, 65_536, total // 65_536, total), costs)
        assert seconds is not None
        return Sample(total, 0, 0, seconds, rates.submit_direct)
    copies = total // 65_536
    first = total * alone(chunks) / rates.relayout_rate
    seconds = rates.staged_start + chunks * rates.chunk + first + total / rates.link_rate
    submit = chunks * rates.submit_chunk + copies * rates.submit_copy
    return Sample(total, chunks, copies, seconds, submit)


@pytest.mark.parametrize("way", tune.DIRECTIONS)
def test_the_fit_finds_the_constants_that_made_the_times(way: str) -> None:
    start = DEFAULTS.of(way)
    beside = start.direct_beside * 90e9 / start.direct_rate
    rates = replace(start, link_rate=110e9, direct_rate=90e9, direct_beside=beside, chunk=3e-6)
    samples = [made_up(way, rates, total * MIB, 0) for total in (1, 16, 256)]
    samples += [
        made_up(way, rates, total * MIB, chunks)
        for total, chunks in ((1, 1), (4, 3), (16, 2), (64, 4), (64, 16), (256, 8), (256, 32))
    ]
    assert fit(samples, DEFAULTS.of(way)).__dict__ == pytest.approx(rates.__dict__, rel=1e-4)


def test_too_few_times_are_refused() -> None:
    samples = [made_up("load", DEFAULTS.load, MIB, chunks) for chunks in (0, 1, 2)]
    with pytest.raises(ValueError, match="at least 2 transfers by kernels and 4 staged ones, got 1 and 2"):
        fit(samples, DEFAULTS.load)


def test_a_pool_is_measured_and_the_constants_are_kept_within_bounds() -> None:
    plans = (tune.Plan(2, MIB, (1, 4, 8)), tune.Plan(1, 512 << 10, (1, 6)))
    costs = tune.measure(torch.device("cpu"), HostClock(), plans, repeats=3)
    for way in tune.DIRECTIONS:
        assert all(value > 0 for value in costs.of(way).__dict__.values())
        assert costs.of(way).copy == DEFAULTS.of(way).copy
    assert len(list(tune.table(costs))) == 2 + len(DEFAULTS.load.__dict__) + len(tune.RANGES)


@pytest.mark.parametrize("times", [0.3, 1.0, 8.0])
def test_the_rate_beside_the_other_direction_is_as_much_of_that_alone_on_any_link(times: float) -> None:
    for way in tune.DIRECTIONS:
        start = DEFAULTS.of(way)
        scaled = {
            name: value * times if name.endswith(("_rate", "_beside")) else value / times
            for name, value in start.__dict__.items()
        }
        rates = Rates(**scaled)
        sizes = ((1, 0), (16, 0), (256, 0), (1, 1), (4, 3), (16, 2), (64, 4), (64, 16), (256, 8), (256, 32))
        found = fit([made_up(way, rates, total * MIB, chunks) for total, chunks in sizes], start)
        assert found.direct_beside == pytest.approx(rates.direct_beside, rel=1e-4)


@pytest.mark.parametrize("name", list(DEFAULTS.load.__dict__))
def test_every_constant_is_shown_in_its_unit(name: str) -> None:
    lines = [line for line in tune.table(DEFAULTS) if line.startswith(f"| {name} |")]
    (words,) = (line.split("|")[3].split() for line in lines)
    value = getattr(DEFAULTS.load, name)
    scale = {"GB/s": 1e9, "us": 1e-6}[words[1]]
    assert float(words[0]) * scale == pytest.approx(value, rel=0.01) and float(words[0]) < 10_000


def test_what_is_kept_does_not_hinder_measuring_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POOLWRIGHT_CACHE_DIR", str(tmp_path))
    path = tuning.store("GPU", "13.0", DEFAULTS)
    path.write_text("{}")

    def measured(*_: object) -> Costs:
        return replace(tuning.load("GPU", "13.0"), source="measured just now")  # as the pools of `measure` do

    for name, value in (("is_available", True), ("current_device", 0), ("Stream", None)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(tune, "CudaClock", lambda: None)
    monkeypatch.setattr(tune, "identity", lambda _: ("GPU", "13.0"))
    monkeypatch.setattr(tune, "measure", measured)
    assert tools.main(["tune"]) == 0
    assert str(path) in capsys.readouterr().out
    assert replace(tuning.load("GPU", "13.0"), source="") == replace(DEFAULTS, source="")


@pytest.mark.parametrize("way", tune.DIRECTIONS)
def test_a_crossover_is_where_the_choice_changes(way: str) -> None:
    for range_bytes in tune.RANGES[2:]:
        total = tune.crossover(DEFAULTS, way, range_bytes)
        assert total is not None
        for nbytes, staged_wins in ((total, True), (total // range_bytes * 3 // 4 * range_bytes, False)):
            if nbytes:
                work = Work(way, range_bytes, nbytes // range_bytes, nbytes)
                staged, direct = (predict(path, work, DEFAULTS) for path in ("staged", "zero_copy"))
                assert (staged < direct) == staged_wins  # type: ignore[operator]
    assert tune.crossover(DEFAULTS, way, 4096) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
@pytest.mark.parametrize("words", [[], ["--json"], ["--dry-run"]])
def test_without_a_gpu_the_next_step_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.main(["tune", *words]) == 1
    found = capsys.readouterr()
    assert "tune measures a CUDA device, and torch sees none: see `doctor`" in found.err
    assert not found.out
