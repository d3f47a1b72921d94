"""What once went through in silence: wrong devices, overlapping rows, names that meet in generated code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from poolwright.codegen import resolve
from poolwright.codegen.errors import SpecError, SpecErrors
from poolwright.codegen.lower import LowerError, lower
from poolwright.codegen.render import render
from poolwright.generated import KdaStatePoolHost, MLATokenToKVPoolHost
from poolwright.runtime.pool import HostPool
from poolwright.runtime.tools.package import load_package

SPEC = """pool: sample
class: SamplePoolHost
summary: A pool for tests.
index: {index}
updates: append
params: {{ {param}: {{min: 1}} }}
components:
  {component}: {{element: {{ {dim}: {param} }}, dtype: uint8}}
device:
  one: {{tensors: [component, layer], order: [{order}]}}
layouts: [page_first]
"""


def built(**changed: str) -> None:
    values = {
        "index": "token",
        "param": "w",
        "component": "a",
        "dim": "x",
        "order": "page, token, element",
    } | changed
    lower(resolve.read_spec_text(SPEC.format(**values), "specs/sample.yaml", resolve.built_in_layouts()))


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = MLATokenToKVPoolHost(
        kv_lora_rank=4,
        qk_rope_head_dim=2,
        dtype=torch.float16,
        layers=range(2),
        page_size=2,
        capacity_pages=4,
    )
    yield made
    made.destroy()


def rows(count: int = 12) -> torch.Tensor:
    return torch.zeros(count, 6, dtype=torch.float16)


def test_the_sample_itself_is_fine() -> None:
    built()


@pytest.mark.parametrize("dim", ["view", "run", "base", "byte", "host_id", "device_page", "u32"])
def test_dims_that_meet_names_of_generated_code(dim: str) -> None:
    with pytest.raises((SpecError, SpecErrors), match="take another name"):
        built(dim=dim)


@pytest.mark.parametrize(
    "param", ["hugepages", "page_bytes", "i64", "free", "table_a", "vector_a_pages", "run_a_pages"]
)
def test_parameters_that_meet_names_of_generated_code(param: str) -> None:
    with pytest.raises((SpecError, SpecErrors), match="take another name"):
        built(param=param)


@pytest.mark.parametrize("component", ["bytes", "pages"])
def test_components_that_meet_attributes_of_a_pool(component: str) -> None:
    with pytest.raises((SpecError, SpecErrors), match="take another name"):
        built(component=component)


def test_a_row_that_no_transfer_converts_is_refused() -> None:
    with pytest.raises(LowerError, match="whole pages"):
        built(index="{space: kv, unit: token, row: i // 2}", order="page, element")


@pytest.mark.parametrize("path", [None, "host", "torch", "zero_copy"])
def test_ids_on_a_device_that_is_not_the_pools(pool: HostPool, path: str | None) -> None:
    pool.bind({"kv": [rows(), rows()]})
    with pytest.raises(ValueError, match="device ids: expected a tensor on cpu, got meta; move it there"):
        pool.write_back(torch.arange(4), torch.arange(4).to("meta"), path=path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda: [rows(), rows()[:1].expand(12, 6)], "stride of token"),
        (lambda: [rows()] * 2, "two layers have the same memory"),
        (lambda: [rows(), None], "layer 1: expected a tensor, got NoneType"),
        (lambda: [rows(1), rows(1)], "shape: expected [page=any, token=2, latent=6]"),
    ],
)
def test_tensors_that_cannot_be_right_as_a_target(pool: HostPool, tensors: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        pool.bind({"kv": tensors()})


def test_a_layer_given_twice(pool: HostPool) -> None:
    with pytest.raises(ValueError, match="layer_ids must differ"):
        pool.bind({"kv": [rows(), rows(), rows()]}, layer_ids=[0, 1, 1])


def test_states_whose_slots_overlap() -> None:
    pool = KdaStatePoolHost(
        heads=1,
        head_dim=2,
        kernel=2,
        ngram=0,
        ssm_dtype=torch.float32,
        conv_dtype=torch.float32,
        layers=range(1),
        capacity_pages=2,
    )
    assert pool.staging_ngram is None, "an absent component has no staging"
    temporal = torch.zeros(1, 1, 1, 2, 2).expand(1, 6, 1, 2, 2)
    with pytest.raises(ValueError, match="temporal: stride of page: rows overlap"):
        pool.bind({"temporal": temporal, "conv": torch.zeros(1, 6, 1, 6)})
    pool.destroy()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"page_size": True}, "page_size: expected an integer of at least 1, got True"),
        ({"capacity_pages": 2.5}, "capacity_pages: expected an integer of at least 1, got 2.5"),
        ({"staging_bytes": -1}, "staging_bytes: expected an integer of at least 0, got -1"),
        ({"layers": 3}, "layers: expected layer ids such as range(3), got 3"),
    ],
)
def test_sizes_that_are_no_sizes(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"layers": range(2), "page_size": 2, "capacity_pages": 4} | changed
    with pytest.raises(ValueError, match=re.escape(message)):
        MLATokenToKVPoolHost(kv_lora_rank=4, qk_rope_head_dim=2, dtype=torch.float16, **given)


def test_layers_from_a_generator_are_counted_once() -> None:
    pool = MLATokenToKVPoolHost(
        kv_lora_rank=4,
        qk_rope_head_dim=2,
        dtype=torch.float16,
        layers=(layer for layer in (3, 5)),
        page_size=2,
        capacity_pages=4,
    )
    assert pool.layers == (3, 5) and pool.page_bytes == 2 * 2 * 6 * 2
    pool.destroy()


def test_padding_of_a_staged_page_holds_nothing_old(pool: HostPool) -> None:
    pool.bind({"kv": [rows(), rows()]})
    assert pool.staging is not None
    assert not pool.staging.tensor.any()


def test_a_path_of_the_environment_that_cannot_be_taken_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOLWRIGHT_PATH", "staged")
    sizes = {"kv_lora_rank": 4, "qk_rope_head_dim": 2, "dtype": torch.float16, "layers": range(2)}
    pool = MLATokenToKVPoolHost(**sizes, page_size=2, layout="page_first", capacity_pages=4)
    pool.bind({"kv": [rows(), rows()]})
    message = r"these are single layers that are no runs of the host page, .* \(POOLWRIGHT_PATH is set\)"
    with pytest.raises(ValueError, match=message):
        pool.load(torch.arange(4), torch.arange(4), order="layer")
    assert pool.load(torch.arange(4), torch.arange(4)).path == "staged"
    pool.destroy()


def test_the_twin_asked_for_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOLWRIGHT_TWIN", "lanes")
    pool = MLATokenToKVPoolHost(
        kv_lora_rank=4,
        qk_rope_head_dim=2,
        dtype=torch.float16,
        layers=range(2),
        page_size=2,
        capacity_pages=4,
    )
    pool.bind({"kv": [rows(), rows()]})
    assert pool.write_back(torch.arange(4), torch.arange(4)).path == "zero_copy"
    pool.destroy()


def made(text: str, folder: Path) -> Any:
    """The class of a spec, generated into `folder`."""
    lowered = lower(resolve.read_spec_text(text, "specs/sample.yaml", resolve.built_in_layouts()))
    for name, content in render([lowered]).items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return load_package(f"made_{folder.name}", folder).SamplePoolHost


def test_a_pool_without_layers_loads_all_in_layer_order_and_refuses_single_ones(tmp_path: Path) -> None:
    text = SPEC.format(index="token", param="w", component="a", dim="x", order="page, token, element")
    text = text.replace("dtype: uint8}", "dtype: uint8, layers: none}").replace(
        "[component, layer]", "[component]"
    )
    pool = made(text, tmp_path)(w=3, layers=[], page_size=2, capacity_pages=4)
    tensor = torch.arange(24, dtype=torch.uint8).reshape(8, 3)
    before = tensor.clone()
    pool.bind({"a": tensor})
    for path in ("host", "zero_copy", "torch"):
        pool.write_back(torch.arange(4), torch.arange(4), path=path).wait()
        tensor[:4] = 0
        pool.load(torch.arange(4), torch.arange(4), order="layer", path=path).wait()
        assert torch.equal(tensor, before), path
    with pytest.raises(ValueError, match="no component has layers"):
        pool.load(torch.arange(4), torch.arange(4), layers=[0])
    pool.destroy()


def test_padding_and_alignment_are_in_the_format_tag(tmp_path: Path) -> None:
    text = SPEC.format(index="token", param="al", component="a", dim="x", order="page, token, element")
    pool_class = made(
        text.replace("dtype: uint8}", "dtype: uint8, align: al}").replace("x: al", "x: 4"), tmp_path
    )
    given: dict[str, Any] = {"layers": range(1), "page_size": 2, "capacity_pages": 2}
    pools = [pool_class(al=al, **given) for al in (4, 16)]
    assert pools[0].format_tag != pools[1].format_tag
    for pool in pools:
        pool.destroy()
