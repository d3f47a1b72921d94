"""The cost model: predicted seconds against measured ones, chunks, constants kept by machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from simulation import CONFIGS, world

from poolwright.runtime import tuning
from poolwright.runtime.costs import DEFAULTS, Costs, Work, alone, predict
from poolwright.runtime.errors import PoolError

US = 1e-6


def work(direction: str, range_bytes: int, total: int) -> Work:
    return Work(direction, range_bytes, max(1, total // range_bytes), total)


@pytest.mark.parametrize(
    ("path", "moved", "measured_us"),
    [
        ("zero_copy", work("write_back", 4 << 20, 536_870_912), 10_243),
        ("zero_copy", work("write_back", 65_536, 134_217_728), 2_571),
        ("zero_copy", work("write_back", 65_536, 131_072), 6.8),
        ("zero_copy", work("load", 4 << 20, 536_870_912), 10_509),
        ("zero_copy", work("load", 20_480, 41_943_040), 826),
        ("staged", work("write_back", 4 << 20, 67_108_864), 1_259),
        ("staged", work("write_back", 65_536, 131_072), 18.2),
        ("staged", work("load", 4 << 20, 536_870_912), 9_787),
        ("staged", work("load", 65_536, 134_217_728), 2_462),
    ],
)
def test_a_prediction_is_near_what_an_h200_took(path: str, moved: Work, measured_us: float) -> None:
    found = predict(path, moved, DEFAULTS)
    assert found is not None
    assert found == pytest.approx(measured_us * US, rel=0.05)


@pytest.mark.parametrize("path", ["host", "torch"])
def test_of_other_paths_nothing_is_known(path: str) -> None:
    assert predict(path, work("load", 64, 64), DEFAULTS) is None


@pytest.mark.parametrize("direction", ["write_back", "load"])
def test_the_count_of_chunks_is_the_cheapest(direction: str) -> None:
    """One more or one less costs as much or more: what chunks add, and the one that nothing overlaps."""
    rates = DEFAULTS.of(direction)
    assert rates.chunks(1) == 1
    for nbytes in (1 << 20, 64 << 20, 1 << 30):
        count = rates.chunks(nbytes)

        def cost(chunks: int, nbytes: int = nbytes) -> float:
            return chunks * rates.chunk + nbytes * alone(chunks) / rates.relayout_rate

        assert cost(count) <= min(cost(count + 1), cost(max(count - 1, 1))) * 1.05


def test_small_slots_make_more_chunks_and_merged_ranges_fewer_copies() -> None:
    moved = work("write_back", 2048, 64 << 20)
    staged = predict("staged", moved, DEFAULTS)
    assert predict("staged", replace(moved, slot_bytes=1 << 20), DEFAULTS) > staged  # type: ignore[operator]
    assert predict("staged", replace(moved, merged=64), DEFAULTS) < staged  # type: ignore[operator]


def test_only_what_is_urgent_counts_the_submission() -> None:
    moved = work("write_back", 20_480, 41_943_040)
    urgent = replace(moved, qos="urgent")
    assert predict("staged", urgent, DEFAULTS) > predict("staged", moved, DEFAULTS)  # type: ignore[operator]
    later = replace(moved, qos="background")
    assert predict("staged", later, DEFAULTS) == predict("staged", moved, DEFAULTS)


# ---- constants of a machine


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POOLWRIGHT_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_what_is_stored_is_loaded_for_this_machine_only(cache: Path) -> None:
    faster = replace(DEFAULTS.load, link_rate=110e9)
    path = tuning.store("GPU X/1", "13.0", Costs(DEFAULTS.write_back, faster, "measured"))
    assert path == cache / "costs" / "GPU-X-1-driver-13.0.json"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert tuning.load("GPU X/1", "13.0") == Costs(DEFAULTS.write_back, faster, str(path))
    assert tuning.load("GPU X/1", "13.1") == DEFAULTS
    assert tuning.load("GPU Y", "13.0") == DEFAULTS


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"write_back": 1, "load": 2}', '{"write_back": {"chunk": -1}, "load": {}}']
)
def test_a_broken_file_is_named_with_the_next_step(cache: Path, text: str) -> None:
    path = tuning.store("GPU", "13.0", DEFAULTS)
    path.write_text(text)
    with pytest.raises(PoolError, match=r"GPU-driver-13\.0\.json: expected constants.*run tune again"):
        tuning.load("GPU", "13.0")


@pytest.mark.parametrize("name", list(DEFAULTS.load.__dict__))
def test_a_file_of_a_version_with_fewer_constants_is_told_as_that(cache: Path, name: str) -> None:
    path = tuning.store("GPU", "13.0", DEFAULTS)
    kept = json.loads(path.read_text())
    del kept["load"][name]
    path.write_text(json.dumps(kept))
    with pytest.raises(PoolError, match=rf"no {name}, as in files of an earlier version.*run tune again"):
        tuning.load("GPU", "13.0")
    with tuning.unread():
        assert tuning.load("GPU", "13.0") == DEFAULTS
    with pytest.raises(PoolError, match=f"no {name}"):
        tuning.load("GPU", "13.0")


def test_constants_that_cannot_be_are_refused(cache: Path) -> None:
    tuning.store("GPU", "13.0", replace(DEFAULTS, load=replace(DEFAULTS.load, chunk=-1.0)))
    with pytest.raises(PoolError, match=r"chunk is -1\.0"):
        tuning.load("GPU", "13.0")


# ---- tickets


def test_a_ticket_tells_what_was_predicted_and_on_request_what_it_took() -> None:
    made = world(CONFIGS[0], lambda n: 0)
    ids = torch.tensor([0, 1]), torch.tensor([1, 2])
    plain = made.pool.write_back(*ids, "page", path="zero_copy")
    assert plain.predicted == pytest.approx(DEFAULTS.write_back.direct_start, rel=0.01)
    with pytest.raises(ValueError, match="this write_back was not timed: submit it with timed=True"):
        plain.seconds()
    for path in ("zero_copy", "staged"):
        timed = made.pool.load(*ids, "page", path=path, timed=True)
        assert timed.seconds() >= 1
        assert timed.done()
