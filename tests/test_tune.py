"""`tune`: constants recovered from made-up times, measured on a pool, shown; the next step in errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from poolwright.runtime import __main__ as tools
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
    rates = replace(DEFAULTS.of(way), link_rate=110e9, direct_rate=90e9, chunk=3e-6)
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
