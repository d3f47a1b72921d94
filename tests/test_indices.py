"""Index lists against a plain reference: every width, stride and mistake, and the batch that comes out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poolwright.runtime import indices
from poolwright.runtime.indices import Limits

HOST_PAGES, DEVICE_PAGES = 5, 7


def as_tensor(ids: Sequence[int], wide: bool, stride: int, skip: int) -> torch.Tensor:
    """The ids as a view into a larger tensor: every `stride`-th number from `skip` on."""
    dtype = torch.int64 if wide else torch.int32
    whole = torch.full((skip + stride * len(ids),), -99, dtype=dtype)
    seen = whole[skip::stride]
    seen.copy_(torch.tensor(ids, dtype=dtype))
    return seen


def whole_pages(ids: Sequence[int], size: int) -> list[int] | None:
    starts = ids[::size]
    expected = [start + step for start in starts for step in range(size)]
    return (
        [s // size for s in starts] if list(ids) == expected and all(s % size == 0 for s in starts) else None
    )


def reference(limits: Limits, host: list[int], device: list[int], size: int, writes_host: bool) -> object:
    """What the batch must hold, or None where a ValueError must be raised."""
    here, there, unit = whole_pages(host, size), whole_pages(device, size), "pages"
    if here is None or there is None:
        here, there, unit = host, device, "tokens"
    each = size if unit == "tokens" else 1
    written = here if writes_host else there
    device_pages = {i // each for i in there}
    if (
        any(not 0 <= i < HOST_PAGES * each for i in here)
        or any(not 0 <= i < DEVICE_PAGES * each for i in there)
        or device_pages & set(limits.reserved)
        or len(set(written)) != len(written)
    ):
        return None
    return unit, here, there, {i // each for i in here}, device_pages


@st.composite
def lists(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """A page size and two lists of as many ids: whole pages, most often, with now and then a wrong id."""
    size, pages = draw(st.integers(1, 5)), draw(st.integers(0, 4))
    found = []
    for end in (HOST_PAGES, DEVICE_PAGES):
        starts = draw(st.lists(st.integers(-1, end), min_size=pages, max_size=pages))
        shift = draw(st.sampled_from([0, 0, 0, 1, size // 2]))  # pages that start between two pages
        ids = [start * size + shift + step for start in starts for step in range(size)]
        if ids and draw(st.booleans()):
            at = draw(st.integers(0, len(ids) - 1))
            ids[at] = draw(st.integers(-2, end * size + 1))
        found.append(ids)
    return size, found[0], found[1]


@settings(derandomize=True, max_examples=1500, deadline=None)
@given(
    given_lists=lists(),
    wide=st.tuples(st.booleans(), st.booleans()),
    stride=st.integers(1, 3),
    skip=st.integers(0, 2),
    writes_host=st.booleans(),
    reserved=st.sampled_from([(), (0,), (2, 6)]),
)
def test_lists_become_what_a_plain_reading_of_them_says(
    given_lists: tuple[int, list[int], list[int]],
    wide: tuple[bool, bool],
    stride: int,
    skip: int,
    writes_host: bool,
    reserved: tuple[int, ...],
) -> None:
    size, host, device = given_lists
    limits = Limits("mla", size, HOST_PAGES, DEVICE_PAGES, reserved)
    tensors = (as_tensor(host, wide[0], stride, skip), as_tensor(device, wide[1], stride, skip))
    before = [tensor.clone() for tensor in tensors]
    expected = reference(limits, host, device, size, writes_host)
    if expected is None:
        with pytest.raises(ValueError, match=r"^mla: (host|device) .*; (pass|leave|a destination) "):
            indices.batch(limits, *tensors, "token", "cheap", writes_host)
    else:
        made = indices.batch(limits, *tensors, "token", "cheap", writes_host)
        assert (made.host.typecode, made.device.typecode) == ("I", "I")
        assert (made.unit, list(made.host), list(made.device), made.host_pages, made.device_pages) == expected
        assert made.on_device is None and made.bad is None
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


OUTSIDE, ALLOCATED = "mla: host ids: expected 0 to", "pass what alloc returned"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrong", [-(1 << 31), -1, HOST_PAGES, (1 << 31) - 1])
def test_an_id_far_outside_is_named(dtype: torch.dtype, wrong: int) -> None:
    limits, device = Limits("mla", 4, HOST_PAGES, DEVICE_PAGES), torch.tensor([1, 2])
    with pytest.raises(ValueError, match=rf"^{OUTSIDE} 4, got {wrong}; {ALLOCATED}, divided by 4$"):
        indices.batch(limits, torch.tensor([0, wrong], dtype=dtype), device, "page", "cheap", True)


@pytest.mark.parametrize("wrong", [-(1 << 63), -(1 << 32), 1 << 32, (1 << 63) - 1])
def test_an_id_that_no_32_bits_hold_is_named(wrong: int) -> None:
    limits, device = Limits("mla", 4, HOST_PAGES, DEVICE_PAGES), torch.tensor([1, 2])
    with pytest.raises(ValueError, match=rf"^{OUTSIDE} 4, got {wrong}; {ALLOCATED}, divided by 4$"):
        indices.batch(limits, torch.tensor([0, wrong]), device, "page", "cheap", True)
    tokens = torch.tensor([0, 1, 2, wrong])
    with pytest.raises(ValueError, match=rf"^{OUTSIDE} 19, got {wrong}; {ALLOCATED}$"):
        indices.batch(limits, tokens, torch.arange(4), "token", "cheap", True)


@pytest.mark.parametrize("stride", [1, 3])
def test_page_ids_on_the_device_become_32_bits_or_skipped(stride: int) -> None:
    ids = [0, 5, (1 << 31) - 1, -1, -7, 1 << 32, (1 << 32) + 1, (1 << 63) - 1, -(1 << 63)]
    found = indices._words(as_tensor(ids, True, stride, 1))
    assert found.dtype == torch.int32 and found.is_contiguous()
    assert found.tolist() == [0, 5, (1 << 31) - 1, *[-1] * 6]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("stride", [1, 3])
def test_token_ids_on_the_device_name_pages_where_rows_are_pages(wide: bool, stride: int) -> None:
    pages = [5, 0, 7]
    ids = as_tensor([page * 4 + step for page in pages for step in range(4)], wide, stride, 1)
    rows_are_pages = Limits("indexer", 4, HOST_PAGES, DEVICE_PAGES, tokens=False)
    assert indices._numbers(rows_are_pages, ids, 4).tolist() == pages
    assert indices._numbers(rows_are_pages, torch.full((4,), -1), 4).tolist() == [-1], (
        "a wrong one is skipped"
    )
    rows_are_tokens = Limits("mla", 4, HOST_PAGES, DEVICE_PAGES)
    assert indices._numbers(rows_are_tokens, ids, 4) is ids, "read in place"
