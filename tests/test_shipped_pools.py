"""The pools that ship: their sizes for known models, their tags, and where the parts of a row lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import poolwright.generated as generated
from poolwright.runtime.errors import OutOfMemoryBudget
from poolwright.runtime.tools import oracle

ROOT = Path(__file__).resolve().parent.parent

BF16, FP8, U8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float32

# pool, what it is built with, bytes of one page of one layer
KNOWN: list[tuple[str, dict[str, Any], int]] = [
    ("mha", {"heads": 8, "head_dim": 128, "v_head_dim": 128, "dtype": BF16, "page_size": 1}, 4096),
    ("mha", {"heads": 2, "head_dim": 192, "v_head_dim": 128, "dtype": U8, "page_size": 64}, 64 * 2 * 320),
    ("mla", {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": BF16, "page_size": 1}, 1152),
    ("mla_fp8", {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "page_size": 1}, 656),
    ("mla_fp8", {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "page_size": 64}, 64 * 656),
    ("k_only", {"heads": 1, "head_dim": 128, "dtype": BF16, "page_size": 64}, 64 * 256),
    ("dsa_indexer", {"index_head_dim": 128, "page_size": 64}, 8448),
    ("dsa_indexer", {"index_head_dim": 128, "page_size": 256, "ratio": 4}, 8448),
    ("dsa_indexer", {"index_head_dim": 128, "page_size": 1}, 132),
    ("qsa_indexer", {"head_dim": 128, "ratio": 4, "dtype": BF16, "page_size": 64}, 16 * 256),
    ("dsv4_paged", {"ratio": 1, "format": "v4", "page_size": 64}, 37_440),
    ("dsv4_paged", {"ratio": 4, "format": "v4", "page_size": 256}, 37_440),
    ("dsv4_paged", {"ratio": 1, "format": "v41", "page_size": 64}, 33_792),
    ("dsv4_paged", {"ratio": 1, "format": "v41_new", "page_size": 64}, 33_792),
    ("dsv4_state", {"head_dim": 512, "overlap": 1, "ring": 8, "dtype": F32, "page_size": 256}, 8 * 2048 * 4),
    ("nvfp4", {"heads": 4, "head_dim": 128, "page_size": 128}, 73_728),
    (
        "mha_mxfp8",
        {
            **{"heads": 4, "head_dim": 128, "v_head_dim": 128, "page_size": 128},
            **{"kv_dtype": FP8, "scale_dtype": U8},
        },
        2 * 128 * 4 * (128 + 4),
    ),
    (
        "mamba",
        {
            **{"heads": 64, "head_dim": 64, "state_size": 128, "conv_dim": [4352], "kernel": 4},
            **{"ssm_dtype": F32, "conv_dtype": BF16, "side_dtype": torch.int64},
        },
        64 * 64 * 128 * 4 + 4352 * 3 * 2,
    ),
    (
        "gated_delta_net",
        {
            **{"k_heads": 16, "v_heads": 32, "k_head_dim": 128, "v_head_dim": 128, "kernel": 4},
            **{"ssm_dtype": F32, "conv_dtype": BF16},
        },
        32 * 128 * 128 * 4 + 8192 * 3 * 2,
    ),
    (
        "kda_state",
        {
            **{"heads": 32, "head_dim": 128, "kernel": 4, "ngram": 0},
            **{"ssm_dtype": F32, "conv_dtype": BF16},
        },
        32 * 128 * 128 * 4 + 3 * 3 * 32 * 128 * 2,
    ),
    ("logical", {"page_size": 64}, 0),
]

CLASSES = {
    "mha": "MHATokenToKVPoolHost",
    "mla": "MLATokenToKVPoolHost",
    "mamba": "MambaPoolHost",
    "dsv4_paged": "DeepSeekV4PagedHostPool",
    "dsv4_state": "DeepSeekV4StateHostPool",
    "dsa_indexer": "DSAIndexerPoolHost",
    "logical": "LogicalHostPool",
    "k_only": "MHATokenToKOnlyPoolHost",
    "mha_mxfp8": "MHATokenToKVPoolMXFP8Host",
    "nvfp4": "MiniMaxM3Nvfp4MainKVPoolHost",
    "qsa_indexer": "QSAIndexerPoolHost",
}


def build(name: str, layers: int = 1, **given: Any) -> Any:
    kind = generated.pool_class(name)
    lists = dict.fromkeys(kind.spec.layer_lists, range(layers))
    return kind(**{**lists, "capacity_pages": 2, **given})


@pytest.mark.parametrize(("name", "given", "nbytes"), KNOWN)
def test_bytes_of_a_page(name: str, given: dict[str, Any], nbytes: int) -> None:
    pool_class: Any = generated.pool_class(name)
    for layout in pool_class.spec.layouts:
        for layers in (1, 3):
            lists = dict.fromkeys(pool_class.spec.layer_lists, range(layers))
            required = pool_class.required_bytes(**given, **lists, layout=layout, capacity_pages=5)
            assert (required.page, required.host) == (layers * nbytes, 5 * layers * nbytes), layout


def test_every_pool_has_a_known_size() -> None:
    assert {name for name, _, _ in KNOWN} == set(generated.POOLS)


def test_engines_names() -> None:
    assert {name: generated.POOLS[name] for name in CLASSES} == CLASSES


@pytest.mark.parametrize("file", sorted((ROOT / "specs").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_spec_is_short(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 30


def test_layouts_that_every_kind_of_pool_has() -> None:
    for name in generated.POOLS:
        spec = generated.pool_class(name).spec
        if spec.components:
            assert {"layer_first", "page_first"} <= set(spec.layouts), name
    assert set(generated.pool_class("mha").spec.layouts) == {
        *("layer_first", "page_first", "page_first_direct", "page_head", "page_unified", "page_record")
    }
    assert {"page_first_direct", "page_unified"} <= set(generated.pool_class("mla").spec.layouts)


# ---- rows of several parts ----------------------------------------------------------------------


def starts(pool: Any) -> dict[str, int]:
    """First byte of each component on the host."""
    found = oracle.host(pool.spec, pool.sizes, pool.dtypes, pool.program.variants, pool.layout, 2)
    return {at.name: int(at.at.flatten()[0]) for at in found.bytes if "padding" not in at.name}


def test_a_quantised_latent_row_is_values_scales_rotary() -> None:
    pool = build("mla_fp8", kv_lora_rank=512, qk_rope_head_dim=64, page_size=4)
    assert starts(pool) == {"latent": 0, "scale": 512, "rope": 528}
    rows = torch.arange(3 * 4 * 656).to(torch.uint8).view(12, 656)
    for typed in (rows, rows.view(torch.float8_e4m3fn), rows.view(torch.bfloat16), rows.view(12, 1, 656)):
        pool.rebind({"row": [typed]})  # bytes, whatever the engine calls them
        pool.kv_buffer.zero_()
        pool.write_back(torch.tensor([1]), torch.tensor([2]), "page").wait()
        assert torch.equal(pool.kv_buffer.view(2, 4, 656)[1], rows[8:])
    pool.destroy()


def test_a_page_of_the_indexer_is_all_keys_then_all_scales() -> None:
    pool = build("dsa_indexer", index_head_dim=128, page_size=64)
    assert starts(pool) == {"key": 0, "scale": 64 * 128}
    pool.destroy()


def test_parts_of_a_four_bit_row_start_at_multiples_of_128() -> None:
    pool = build("nvfp4", heads=3, head_dim=48, page_size=5)
    assert list(starts(pool).values()) == [0, 384, 512, 896]  # 3 * 5 * 24 = 360, 3 * 5 * 3 = 45 bytes
    assert pool.page_bytes == 1024
    pool.destroy()


def test_two_formats_of_one_size_have_tags_and_orders_of_their_own() -> None:
    pools = [build("dsv4_paged", ratio=1, format=name, page_size=64) for name in ("v41", "v41_new")]
    assert pools[0].page_bytes == pools[1].page_bytes == 33_792
    assert pools[0].format_tag != pools[1].format_tag
    scales = []
    for pool in pools:
        found = oracle.host(pool.spec, pool.sizes, pool.dtypes, pool.program.variants, pool.layout, 1)
        scale = next(at for at in found.bytes if at.name == "scale")
        scales.append([int(scale.at[0, 0, entry, 0, 0]) for entry in (0, 1)])
        pool.destroy()
    assert scales == [[64 * 512, 64 * 512 + 16], [512, 528 + 512]]


def test_a_ring_of_states_is_seen_as_one_row() -> None:
    """Engines hold (rows, width): `ring` rows are one page; rows that fill no page are left alone."""
    pool = build("dsv4_state", head_dim=3, overlap=1, ring=4, dtype=F32, page_size=16)
    states = torch.randn(3 * 4 + 2, 12)
    pool.bind({"state": [states]})
    pool.write_back(torch.arange(16), torch.arange(32, 48)).wait()
    assert torch.equal(pool.kv_buffer.view(F32).view(2, 4, 12)[0], states[8:12])
    with pytest.raises(ValueError, match="device ids: expected 0 to 2, got 3"):
        pool.write_back(torch.tensor([0]), torch.tensor([3]), "page")
    pool.destroy()


def test_what_a_model_lacks_takes_no_bytes_and_no_tensor() -> None:
    """A model of convolutions alone: no recurrent state, one convolution, one side state."""
    given: dict[str, Any] = {"heads": 2, "head_dim": 3, "state_size": 0, "kernel": 4}
    given |= {"ssm_dtype": F32, "conv_dtype": BF16, "side_dtype": torch.int64}
    pool = build("mamba", 2, **given, conv_dim=[5], side_size=[3], layout="page_record")
    assert pool.page_bytes == 2 * 5 * 3 * 2 + 4 + 3 * 8  # 60 bytes, and the side state starts at 64
    conv, side = torch.randn(2, 4, 5, 3).to(BF16), torch.randint(0, 9, (4, 3))
    pool.bind({"temporal": torch.empty(2, 4, 2, 3, 0), "conv[0]": conv, "side[0]": side})
    pool.write_back(torch.tensor([0]), torch.tensor([3])).wait()
    assert torch.equal(pool.kv_buffer[64:88].view(torch.int64), side[3])
    pool.destroy()
    conv_only = build("mamba", 2, **given, conv_dim=[5], layout="page_record")
    assert conv_only.page_bytes == 60  # the alignment of a side state that is not there leaves no trace
    with pytest.raises(ValueError, match="tensor 'temporal' belongs to no component"):
        conv_only.bind({"temporal": torch.empty(2, 4, 2, 3, 1), "conv[0]": conv})
    conv_only.destroy()


def test_a_logical_pool_hands_out_ids_and_moves_nothing() -> None:
    pool = build("logical", page_size=4, capacity_pages=8)
    ids = pool.alloc(8)
    assert ids.tolist() == list(range(8)) and pool.page_bytes == 0
    pool.bind({})
    ticket = pool.write_back(ids, torch.arange(4000, 4008))
    ticket.wait()
    pool.load(ids, torch.arange(8), order="layer").wait()
    assert ticket.path == "torch" and pool.kv_buffer.numel() == 0
    assert pool.free(ids) == 8
    pool.destroy()


def test_head_groups_of_a_page_are_apart() -> None:
    """page_unified: all layers, keys and values of one group of heads before those of the next."""
    pool = build(
        "mha",
        2,
        **{"heads": 4, "head_dim": 2, "v_head_dim": 2, "head_groups": 2, "dtype": U8},
        **{"page_size": 3, "layout": "page_unified"},
    )
    rows = {name: [torch.randint(0, 255, (6, 4, 2), dtype=U8) for _ in range(2)] for name in ("k", "v")}
    pool.bind(rows)
    pool.write_back(torch.arange(3), torch.arange(3, 6)).wait()
    page = pool.kv_buffer.view(2, 2, 2, 2, 3, 2, 2)[0]  # page, group, layer, component, token, head, dim
    for layer in range(2):
        for at, name in enumerate(("k", "v")):
            for group in range(2):
                wanted = rows[name][layer][3:, 2 * group : 2 * group + 2]
                assert torch.equal(page[group, layer, at], wanted)
    pool.destroy()


@pytest.mark.parametrize("bound", [8 << 20, 128 << 20, 341_442_561, 512 << 20, 1 << 30, 5 << 30])
@pytest.mark.parametrize("layout", ["page_first", "page_record", "layer_first"])
def test_staging_of_large_states_keeps_its_bound(bound: int, layout: str) -> None:
    """States of 4 MiB in 40 layers: what is captured stays within `capture_bytes` and uses it; a bound below
    two layers is refused before anything is allocated."""
    sizes = {"heads": 64, "head_dim": 128, "state_size": 128, "conv_dim": (12288,), "kernel": 4}
    dtypes = {"ssm_dtype": F32, "conv_dtype": BF16, "side_dtype": torch.int64}
    given = {**sizes, **dtypes, "layers": range(40), "layout": layout, "capacity_pages": 4096}
    need = generated.MambaPoolHost.required_bytes(**given, capture_bytes=bound)
    assert need.page == 40 * (4 << 20) + 40 * 12288 * 3 * 2
    assert bound - 2 * need.page < need.staging <= bound
    assert bound >= 2 * need.page or need.staging == bound // 32 * 32
    least = "mamba: staging memory of 2 slots, one layer of a component each needs 8,388,608 bytes"
    with pytest.raises(OutOfMemoryBudget, match=f"{least}, 8,388,607 are available; raise capture_bytes"):
        generated.MambaPoolHost.required_bytes(**given, capture_bytes=(8 << 20) - 1)


def test_a_pool_whose_rows_stay_refuses_a_bound_of_what_is_captured() -> None:
    given: dict[str, Any] = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "dtype": torch.bfloat16}
    given |= {"layers": range(2), "page_size": 4, "capacity_pages": 3, "capture_bytes": 1 << 20}
    message = "^mla: capture_bytes: expected None, got 1048576; .* pass staging_bytes$"
    for build in (generated.MLATokenToKVPoolHost, generated.MLATokenToKVPoolHost.required_bytes):
        with pytest.raises(ValueError, match=message):
            build(**given)
