"""Token ids of a launch, as the compiled primitives read what the launcher packs: pairs, or in place."""

from __future__ import annotations

import ctypes
from array import array

import pytest
import torch

from poolwright.runtime import jit, launch

SOURCE = """
#include "poolwright/lanes.h"
PW_EXPORT void read_ids(const pw::Ids* ids, u32 page_size, u32* host, u32* device) {
  const pw::TokenIds tokens = ids->tokens();
  for (u32 n = 0; n < ids->count; ++n) host[n] = tokens.host(n, page_size), device[n] = tokens.device(n);
}
"""
PAGE = 3
Read = tuple[list[int], list[int]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("token_ids") / "host.cpp"
    path.write_text(SOURCE)
    return jit.load_host(jit.host_libraries([jit.Unit("token_ids", path)])[0])


def read(library: ctypes.CDLL, *packed: int) -> Read:
    ids = launch._IDS.pack(*packed)
    host, device = ((ctypes.c_uint32 * packed[0])() for _ in range(2))
    library.read_ids(ids, PAGE, host, device)
    return list(host), list(device)


def test_pairs_are_read_one_by_one(library: ctypes.CDLL) -> None:
    host, device = array("I", [7, 0, 4_000_000_000, 5]), array("I", [9, 9, 1, 0xFFFFFFFF])
    found = read(library, 4, 0, 1, 0, host.buffer_info()[0], device.buffer_info()[0], 0, 0, 0)
    assert found == (list(host), list(device))


@pytest.mark.parametrize("stride", [1, 2, 5, 0])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_in_place_stand_beside_the_tokens_of_host_pages(
    library: ctypes.CDLL, dtype: torch.dtype, stride: int
) -> None:
    pages = array("I", [4, 0])
    whole = torch.arange(40, dtype=dtype) * 1000
    whole[0] = -1  # what a check on the device puts for a wrong id
    device = whole.as_strided((6,), (stride,))
    where = device.data_ptr(), device.stride(0)
    found = read(library, 6, 0, 1, dtype == torch.int64, pages.buffer_info()[0], 0, *where, 0)
    assert found == ([12, 13, 14, 0, 1, 2], [i & 0xFFFFFFFF for i in device.tolist()])
