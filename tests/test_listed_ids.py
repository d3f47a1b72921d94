"""Ids that no launch has room for: uploaded once for a submission, each launch of it reads its part of them.

Pools of the simulator have a few pages, so room for one pair of ids, or two, makes long lists of theirs.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import race_scenarios as scenarios
from simulation import CONFIGS, first, last, world

from poolwright.runtime import launch, transfer
from poolwright.runtime.costs import DEFAULTS
from poolwright.runtime.indices import Batch
from poolwright.runtime.staging import LONGEST_KEPT, SHAPES_KEPT

STAGED = (
    *(scenarios.ring_reuse, scenarios.two_stores, scenarios.many_in_flight, scenarios.ids_on_device),
    *(scenarios.state_captured, scenarios.state_in_parts, scenarios.layers_staged),
    *(scenarios.group_captured, scenarios.group_in_parts, scenarios.group_layers_staged),
)


@pytest.fixture(params=[2, 4], ids=["one pair", "two pairs"])
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Launches have room for so many numbers; batches whose ids they find among those of a submission."""
    found: list[Batch] = []
    listed = launch.Launcher._listed

    def noted(self: launch.Launcher, block: Any, batch: Batch, *others: Any) -> int:
        if batch.listed is not None:
            found.append(batch)
        return listed(self, block, batch, *others)

    make, room = launch.Launcher.__init__, request.param

    def made(*given: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(launch, "FEW", 256)  # kernels have as many in their parameters, used or not
            make(*given)

    monkeypatch.setattr(launch.Launcher, "__init__", made)
    monkeypatch.setattr(launch.Launcher, "_listed", noted)
    for module in (launch, transfer):
        monkeypatch.setattr(module, "FEW", room)
    return found


@pytest.mark.parametrize("choose", [first, last, random.Random(3).randrange], ids=["first", "last", "random"])
@pytest.mark.parametrize("scenario", STAGED, ids=lambda scenario: scenario.__name__)
def test_every_order_of_staged_transfers(
    shared: list[Batch], scenario: scenarios.Scenario, choose: Callable[[int], int]
) -> None:
    scenario(choose)


@pytest.mark.parametrize("slot_pages", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_every_fill_and_chunk(shared: list[Batch], config: Any, slot_pages: int, chunks: int) -> None:
    made = world(config, first, slot_pages, chunks)
    scenarios.produce(made, *range(1, 8))
    scenarios.store(made, [4, 0, 3, 1, 2], [1, 2, 3, 4, 5], "staged")
    scenarios.load(made, [2, 4, 1, 0, 3], [7, 1, 6, 2, 3], "staged")
    numbers = {id(batch.listed[0]): batch.listed[0] for batch in shared if batch.listed is not None}
    for batch in shared:
        assert batch.listed is not None
        one, host, device = batch.listed
        ids = one.numbers[host : host + batch.count] + one.numbers[device : device + batch.count]
        assert ids == array("I", batch.ids)
    assert len(numbers) <= 2  # one for each submission
    assert len({one.memory.address for one in numbers.values() if one.memory}) == len(numbers)
    scenarios.finish(made)


def test_pools_of_the_simulator_have_lists_that_are_long_then(shared: list[Batch]) -> None:
    scenarios.ring_reuse(first)
    made = world(CONFIGS[0], first, 3, 1)
    scenarios.store(made, [0, 1, 2], [0, 1, 2], "staged")
    assert [batch.count for batch in shared][-1] == 3
    scenarios.finish(made)


def test_what_is_kept_of_past_sizes_is_bounded() -> None:
    """An engine moves any number of pages at once: neither many sizes nor long ones may pile up."""
    pool = world(CONFIGS[0], lambda n: 0, slot_pages=1).pool
    stage = next(iter(pool._transfers._staging._stages.values()))
    for count in range(1, LONGEST_KEPT + 10):
        batch = Batch("pages", array("I", range(count)) * 2, count)
        for nbytes in range(10):
            list(stage.fills(batch, "load", DEFAULTS.load, nbytes))
    assert 0 < len(stage._shapes) <= SHAPES_KEPT
    assert max(len(shape) for shape in stage._shapes.values()) <= LONGEST_KEPT
