"""Memory that tensors share: two sets of rows meet exactly where a byte is in both; bind refuses them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poolwright.generated import MHATokenToKVPoolHost
from poolwright.runtime.apart import Rows, meet, rows, sharing


def spread(one: Rows) -> set[int]:
    """Every byte, one by one."""
    steps = [range(0, step * extent, step) for step, extent in one.axes]
    starts = [one.start + sum(offsets) for offsets in itertools.product(*steps)]
    return {start + at for start in starts for at in range(one.run)}


@st.composite
def some_rows(draw: st.DrawFn) -> Rows:
    """Rows that do not overlap each other, as bind has checked before: every step passes what is inside."""
    run = draw(st.integers(1, 5))
    inside, axes = run, []
    for _ in range(draw(st.integers(0, 3))):
        step, extent = inside + draw(st.integers(0, 9)), draw(st.integers(1, 4))
        axes.append((step, extent))
        inside = step * (extent - 1) + inside
    return rows("a", draw(st.integers(0, 60)), run, draw(st.permutations(axes)))


@settings(max_examples=400, deadline=None)
@given(st.lists(some_rows(), min_size=2, max_size=4))
def test_rows_meet_where_a_byte_is_in_both(every: list[Rows]) -> None:
    bytes_of = [spread(one) for one in every]
    assert all(max(each) + 1 == one.end for one, each in zip(every, bytes_of, strict=True))
    both = [not a.isdisjoint(b) for a, b in itertools.combinations(bytes_of, 2)]
    assert [meet(a, b) for a, b in itertools.combinations(every, 2)] == both
    found = sharing(every)
    assert (found is not None) == any(both)
    assert found is None or not spread(found[0]).isdisjoint(spread(found[1]))


@settings(max_examples=200, deadline=None)
@given(st.lists(some_rows(), min_size=1, max_size=3), st.lists(some_rows(), min_size=1, max_size=3))
def test_only_rows_of_different_owners_count(one: list[Rows], other: list[Rows]) -> None:
    owned = {"x": one, "y": other}
    found = sharing([replace(each, owner=owner) for owner, some in owned.items() for each in some])
    assert (found is not None) == any(meet(a, b) for a in one for b in other)
    assert found is None or {each.owner for each in found} == {"x", "y"}


def tensors(count: int = 1) -> list[torch.Tensor]:
    return [torch.zeros(12, 2, 3, dtype=torch.bfloat16) for _ in range(count)]


BIG = torch.zeros(40, 2, 3, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        ([BIG[:12], BIG[11:23]], tensors(2), "mha: k: two layers have the same memory"),
        ([BIG[:12], BIG[2:14]], tensors(2), "mha: k: two layers have the same memory"),
        (tensors(2), [BIG[8:20], BIG[:12]], "mha: v: two layers have the same memory"),
        ([BIG[:12], BIG[12:24]], [BIG[24:36], BIG[20:32]], "mha: k and v: a row of each has the same memory"),
        ([BIG[:12], BIG[12:24]], [BIG[12:24], BIG[:12]], "mha: k and v: a row of each has the same memory"),
        ([BIG[:12], BIG[12:24]], [BIG[24:36], *tensors()], None),
        ([BIG[:14], BIG[12:26]], [BIG[26:38], *tensors()], None),  # rows behind the last page are not used
    ],
)
def test_rows_of_two_layers_or_components(
    k: list[torch.Tensor], v: list[torch.Tensor], message: str | None
) -> None:
    pool = MHATokenToKVPoolHost(
        heads=2,
        head_dim=3,
        v_head_dim=3,
        dtype=torch.bfloat16,
        layers=range(2),
        page_size=4,
        capacity_pages=1,
    )
    if message is None:
        pool.bind({"k": k, "v": v})
    else:
        with pytest.raises(ValueError, match=message):
            pool.bind({"k": k, "v": v})
    pool.destroy()
