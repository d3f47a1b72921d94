"""On a CUDA device: pages as bytes beside transfers in flight, and full validation.

Needs torch and a GPU. Run ``pytest -m gpu tests/test_gpu_pages.py``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from poolwright.generated import MHATokenToKVPoolHost
from poolwright.runtime.checks import Checks
from poolwright.runtime.errors import TransferError

pytestmark = pytest.mark.gpu

PATHS = ("zero_copy", "staged", "torch")
P, L, PAGES = 4, 3, 40
SPIN = 200_000_000  # cycles: about 0.1 s, longer than any transfer here


@pytest.fixture(params=["page_first", "layer_first", "page_record"])
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    made: Any = MHATokenToKVPoolHost(
        heads=2,
        head_dim=8,
        v_head_dim=12,
        dtype=torch.bfloat16,
        layers=range(L),
        page_size=P,
        layout=request.param,
        capacity_pages=PAGES,
        staging_bytes=4 * L * P * 80,
        device="cuda:0",
        require="cuda",
    )
    rows = {
        name: [torch.randn(50 * P, 2, d).bfloat16().cuda() for _ in range(L)]
        for name, d in (("k", 8), ("v", 12))
    }
    made.bind(rows)
    made.rows = rows
    yield made
    made.destroy()


def expected(pool: Any, device_page: int) -> list[int]:
    """The bytes of a page, in no order."""
    found = [row[device_page * P : (device_page + 1) * P] for rows in pool.rows.values() for row in rows]
    return sorted(b for row in found for b in row.cpu().contiguous().view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("path", PATHS)
def test_a_page_is_whole_when_it_is_handed_out(pool: Any, path: str) -> None:
    host, device = torch.arange(20), torch.arange(20) + 7
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN)
    for rows in pool.rows.values():
        for row in rows:
            row.add_(1)
    pool.write_back(host, device, "page", path=path)
    flat = pool.get_data_page(13 * P)
    assert sorted(flat.tolist()) == expected(pool, 20)
    read = b"".join(ctypes.string_at(*place) for place in pool.page_ranges(13))
    assert read == bytes(flat.tolist())
    pool.set_from_flat_data_page(14 * P, flat)
    pool.load(torch.tensor([14]), torch.tensor([2]), "page", path=path).wait()
    assert expected(pool, 2) == expected(pool, 20)


def test_the_dummy_is_pinned(pool: Any) -> None:
    dummy = pool.get_dummy_flat_data_page()
    assert dummy.is_pinned() and dummy.numel() == pool.page_bytes


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("on_device", [False, True])
def test_full_validation_lets_good_transfers_pass(pool: Any, path: str, on_device: bool) -> None:
    """Also when rows change as soon as they may, and ids lie on the device."""
    host, device = torch.randperm(PAGES)[:21], torch.randperm(50)[:21]
    device = device.cuda() if on_device else device
    path = "zero_copy" if on_device and path == "staged" else path
    tickets = []
    for _ in range(3):
        tickets.append(pool.write_back(host, device, "page", path=path, validate="full"))
        tickets[-1].captured.wait(torch.cuda.current_stream())
        for rows in pool.rows.values():
            for row in rows:
                row.add_(1)
        tickets.append(pool.load(host, device, "page", path=path, validate="full"))
        tickets[-1].wait(torch.cuda.current_stream())
        if path != "staged":
            tickets.append(pool.load(host, device, "page", order="layer", path=path, validate="full"))
            tickets[-1].wait_layer(0, torch.cuda.current_stream())
            pool.rows["k"][0].zero_()
            tickets[-1].wait(torch.cuda.current_stream())
    for ticket in tickets:
        ticket.wait()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stores", [True, False])
def test_full_validation_sees_a_byte(
    pool: Any, path: str, stores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, device = torch.arange(9), torch.arange(9) + 20
    pool.write_back(host, device, "page", path=path).wait()
    compare = Checks.compare

    def patched(self: Checks, *given: Any) -> Any:
        torch.cuda.synchronize()
        if stores:
            ctypes.c_uint8.from_address(pool.page_ranges(5)[-1][0]).value ^= 1
        else:
            pool.rows["v"][2].view(torch.uint8).flatten()[25 * P * 48] ^= 1
            torch.cuda.synchronize()
        return compare(self, *given)

    monkeypatch.setattr(Checks, "compare", patched)
    move = pool.write_back if stores else pool.load
    ticket = move(host, device, "page", path=path, validate="full")
    with pytest.raises(TransferError, match=r"of 1 pages \(5\) failed: the bytes on both sides differ"):
        ticket.wait()


@pytest.mark.parametrize("where", ["before host memory", "behind host memory", "behind staging memory"])
def test_full_validation_sees_a_guard(pool: Any, where: str) -> None:
    assert pool.overwritten_guard() == ""
    pool._checks._guards[where][3] = 0
    ticket = pool.load(torch.tensor([0]), torch.tensor([1]), "page", validate="full")
    with pytest.raises(TransferError, match=f"1 of 256 guard bytes {where} were overwritten"):
        ticket.wait()
