"""Which submission of the other direction is waited for, against a plain reading of all that run."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poolwright.runtime import hazards as hazards_module
from poolwright.runtime.hazards import KEPT, Hazards, Submission, Touched
from poolwright.runtime.indices import Batch
from poolwright.runtime.moves import Move
from poolwright.runtime.native import Stamps

PAGES, SIZE = 12, 4
WAYS = ("write_back", "load")


class Events:
    """A driver whose events happen when the test says so."""

    def __init__(self) -> None:
        self.over: set[int] = set()

    def done(self, event: int) -> bool:
        return event in self.over


page_sets = st.lists(st.integers(0, PAGES - 1), min_size=0, max_size=3, unique=True)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Whole pages, whole pages whose device ids lie on the device, or scattered tokens."""
    host, device = draw(page_sets), draw(page_sets)
    count = min(len(host), len(device))
    host, device = host[:count], device[:count]
    kind = draw(st.sampled_from(["pages", "pages", "tokens", "on the device"]))
    if kind == "tokens":
        ids = array("I", [page * SIZE + 1 for page in (*host, *device)])
        return Batch("tokens", ids, count, 0, set(host), set(device))
    if kind == "on the device":
        unit = draw(st.sampled_from(["pages", "tokens"]))
        return Batch(unit, array("I", host), count, on_device=torch.empty(count))
    return Batch("pages", array("I", host + device), count)


move_lists = st.lists(st.tuples(st.integers(0, 2), batches()), min_size=1, max_size=2)


def meet(one: Batch, other: Batch) -> bool:
    """Whether both touch a page, on either side; pages that only the device knows may be any."""
    if one.host_pages & other.host_pages:
        return True
    here, there = one.device_pages, other.device_pages
    return here is None or there is None or bool(here & there)


@settings(derandomize=True, max_examples=400, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "add", "ask", "forget", "happen"]), st.integers(0, 1), move_lists),
        max_size=60,
    )
)
def test_the_last_that_touches_a_page_is_waited_for(
    actions: list[tuple[str, int, list[tuple[int, Batch]]]],
) -> None:
    driver = Events()
    hazards, event = Hazards(driver), 0  # type: ignore[arg-type]
    for action, way, given_moves in actions:
        direction, running = WAYS[way], hazards._running[WAYS[1 - way]]
        moves = [Move(member, str(member), batch, "zero_copy") for member, batch in given_moves]
        if action == "add":
            event += 1
            hazards.add(Submission(direction, event, moves, None), None)
        elif action == "happen":  # in their order: it is one stream
            mine = hazards._running[direction].entries
            driver.over |= {entry.event for entry in list(mine)[: len(mine) // 2 + 1]}
        elif action == "forget":
            hazards.forget(direction)
        else:
            entries = list(running.entries)
            met = [
                entry.event
                for entry in entries
                if any(m.member == n.member and meet(m.batch, n.batch) for m in entry.moves for n in moves)
            ]
            past = not entries or entries[-1].event in driver.over
            assert hazards.before(direction, moves) == (met[-1] if met and not past else None)


def test_what_is_over_is_dropped_and_never_waited_for() -> None:
    driver = Events()
    hazards = Hazards(driver)  # type: ignore[arg-type]
    ids = array("I", (1, 1))
    for event in range(1, 3 * KEPT + 2):
        hazards.add(Submission("load", event, [Move(0, "kv", Batch("pages", ids, 1), "staged")], None), None)
    wanted = [Move(0, "kv", Batch("pages", ids, 1), "staged")]
    assert hazards.before("write_back", wanted) == 3 * KEPT + 1
    driver.over = set(range(1, 2 * KEPT + 1))
    hazards.forget("load")
    assert len(hazards._running["load"].entries) == KEPT + 1
    assert hazards.before("write_back", wanted) == 3 * KEPT + 1
    driver.over.add(3 * KEPT + 1)
    assert hazards.before("write_back", wanted) is None and not hazards._running["load"].entries


def test_numbers_of_pages() -> None:
    stamps = Stamps()
    assert stamps.latest(array("I", (0, 5, (1 << 32) - 1))) == 0
    stamps.give(array("I", (5, 2)), 1)
    stamps.give(array("I", (900, 5)), 2)
    stamps.give(array("I"), 3)
    assert [stamps.latest(array("I", (page,))) for page in (0, 2, 5, 899, 900, 901)] == [0, 1, 2, 0, 2, 0]
    assert stamps.latest(array("I", (2, 900))) == 2 and stamps.latest(array("I")) == 0


def test_what_was_touched_is_set_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking pages up takes microseconds; setting up what they are looked up in, tens of them."""
    made = []

    class Counted(Touched):
        def __init__(self) -> None:
            made.append(self)
            super().__init__()

    monkeypatch.setattr(hazards_module, "Touched", Counted)
    hazards = Hazards(Events())  # type: ignore[arg-type]
    for event in range(1, 9):
        batch = Batch("pages", array("I", (event, event)), 1)
        moves = [Move(member, "kv", batch, "staged") for member in (0, 1)]
        hazards.add(Submission("load", event, moves, None), None)
        assert hazards.before("write_back", moves) == event
    assert len(made) == 2
