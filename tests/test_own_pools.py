"""Pools that nobody prepared, from YAML alone through all of verify: every form, layout and path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from own_pools import generate

from poolwright.runtime.tools import verify

ODD = """
    pool: odd_state
    class: OddStatePoolHost
    summary: Three components of odd sizes in place; one of them is nowhere to be seen.
    index: slot
    updates: in_place
    reserved: [0, 3]
    params: {taps: {min: 3}, width: {min: 1}, gone: {min: 0, max: 0}}
    dtypes: {state: [float32, int16, uint8]}
    components:
      left:  {element: {tap: taps, item: 3 * width + 1}, dtype: state}
      empty: {element: {tap: taps, item: gone}, dtype: float64, align: 512}
      right: {element: {item: 2 * width + 3}, dtype: uint8, layers: none}
    device:
      apart: {tensors: [component, layer], order: [page, element], stride: {page: any}}
      stacked: {tensors: [component], order: [layer, page, element]}
      inside_out: {tensors: [component], order: [page, layer, element], base: 2}
    not_carried: [scratch]
    layouts: [page_record, layer_first, page_first]
"""
SCALES = """
    pool: page_scales
    class: PageScalesPoolHost
    summary: Values by token, one scale for each head and page, tags without layers.
    index: token
    updates: append
    params: {heads: {min: 1}, dim: {min: 1}, first: {min: 0}}
    dtypes: {kv: [int8, float8_e4m3fn]}
    components:
      kv:    {element: {head: heads, dim: dim}, dtype: kv}
      scale: {element: {head: heads}, dtype: float32, per: page, align: 16}
      tag:   {element: {}, dtype: int64, per: page, layers: none}
    device:
      per_layer: {tensors: [component, layer], order: [page, token, element], base: first * page_size}
      stacked: {tensors: [component], order: [layer, page, token, element], stride: {page: any}}
    layouts: [page_first, page_record, mixed]
"""
HEADS = """
    pool: head_major
    class: HeadMajorPoolHost
    summary: Keys and values with heads outermost, in one tensor or two, and an order of layers from the back.
    index: token
    updates: append
    params: {heads: {min: 1}, dim: {min: 1}}
    dtypes: {kv: [bfloat16, float32, uint8]}
    components:
      k: {element: {head: heads, dim: dim}, dtype: kv}
      v: {element: {head: heads, dim: dim}, dtype: kv}
    device:
      head_major: {tensors: [component, layer], order: [page, head, token, dim]}
      one: {tensors: [layer], order: [page, component, head, token, dim]}
      halves: {tensors: [], order: [component, layer, page, token, element]}
    layouts: [unusual, page_record]
"""
UNEQUAL = """
    pool: unequal
    class: UnequalPoolHost
    summary: Unequal components side by side in every page of one tensor.
    index: token
    updates: append
    params: {dim: {min: 1}, extra: {min: 0}}
    dtypes: {kv: [bfloat16, uint8]}
    components:
      k: {element: {dim: dim}, dtype: kv}
      x: {element: {dim: extra}, dtype: float32, align: 8}
      s: {element: {item: dim + 2}, dtype: uint8, per: page}
    device:
      paged: {tensors: [layer], order: [page, component, token, element]}
      slab: {tensors: [], order: [layer, page, component, element, token], stride: {page: any}}
    layouts: [page_first, page_record]
"""
RECORDS = """
    pool: rows
    class: RowsPoolHost
    summary: Rows of parts that some models lack, in two records.
    index: {space: kv, unit: token, row: i // page_size}
    updates: append
    params: {entries: {min: 0}, flag: {min: 0, max: 1}}
    components:
      a: {element: {entry: entries, dim: 3}, dtype: uint8, when: flag > 0}
      b: {element: {entry: entries, dim: 1}, dtype: float32, when: flag > 0}
      c: {element: {dim: 5}, dtype: uint8}
    records:
      maybe: {holds: [a, b], inner: [component, entry, dim], pad_to: 32}
      always: {holds: [c], inner: [component, dim]}
    device:
      per_layer: {tensors: [record, layer], order: [page, inner]}
    layouts: [page_record, page_first]
"""
LAYOUTS = """
    mixed: [component, element, page, layer, token]
    unusual: [component, dim, page, layer, head, token]
"""
SPECS = {"odd_state": ODD, "page_scales": SCALES, "head_major": HEADS, "unequal": UNEQUAL, "rows": RECORDS}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return generate(tmp_path_factory.mktemp("own"), "own_pools_out", *SPECS.values(), layouts=LAYOUTS)


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("POOLWRIGHT_OPTIMIZE", "0")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SPECS)
def test_all_of_verify(package: Any, name: str, quick: bool) -> None:
    wanted = verify.targets(package, name, None, None, quick)
    spec = package.pool_class(name).spec
    assert {(target.form, target.layout) for target in wanted} == set(spec.programs)
    results = verify.verify(wanted, "cpu", lambda _: None)
    assert [result.difference for result in results if result.difference] == []
    assert all(result.cases > 100 for result in results)
