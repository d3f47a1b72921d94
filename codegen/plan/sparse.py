"""Sparse attention: a config in, the members of DeepSeek-V3.2 and DeepSeek-V4 out."""

from __future__ import annotations

from dataclasses import replace

from poolwright.codegen.plan.attention import (
    draft_notes,
    heads_of,
    ids,
    kv_dtype,
    latent,
    latent_params,
    model_dtype,
)
from poolwright.codegen.plan.config import Config, PlanError
from poolwright.codegen.plan.model import TOKEN, Heads, Member, Model, Rows, Size, split

WINDOW, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
RATIOS = {0: WINDOW, 1: WINDOW, 4: SPARSE, 128: HEAVY}
RING = 8
"""States that a page of the window has for its last compressed entries, without speculation."""

SHARED = split(Heads(1, "the one head of shared keys", copies=True))


def deepseek_v32(config: Config, cache: str, kv: str | None) -> Model:
    """DeepSeek-V3.2: latent attention with an indexer in every layer.

    Engines keep latent rows, and the indexer's keys as bytes with scales. `transformers` keeps expanded
    keys and values of all heads, and the indexer's keys as they are.
    """
    layers = tuple(range(config.layers()))
    query, _ = heads_of(config)
    width, notes = config.size("index_head_dim"), draft_notes(config)
    if cache == "transformers":
        rope, nope = config.size("qk_rope_head_dim"), config.size("qk_nope_head_dim")
        params: dict[str, Size] = {
            "heads": split(query),
            "head_dim": nope + rope,
            "v_head_dim": config.size("v_head_dim"),
        }
        dtype = model_dtype(config)
        expanded = Member("kv", "mha", "expanded keys and values", layers, params, {"kv": dtype})
        keys = _keys("indexer", "indexer keys", layers, width, dtype)
        return Model((expanded, keys), "mha_indexer", (query,), notes=notes)
    indexer = _indexer("indexer", layers, width)
    if kv == "float8_e4m3fn":
        # Sparse attention reads quantised latents as rows with their scales and a rotary part of 16 bits.
        packed = Member("kv", "mla_fp8", "quantised latents", layers, latent_params(config), {})
        return Model((packed, indexer), "dsv32_fp8", (query,), notes=notes)
    rows = latent(config, "kv", layers, kv_dtype(config, kv))
    return Model((rows, indexer), "dsv32", (query,), notes=notes)


def deepseek_v4(config: Config, cache: str, kv: str | None) -> Model:
    """DeepSeek-V4: a window in every layer, compressed entries and open compressor windows in most.

    Engines keep page rows of bytes with scales, and the states of overlapping compressors in float32 rings,
    one ring a page of the window; a page ends where a heavy entry does, so heavy layers need no state there.
    `transformers` keeps plain rows of the model's dtype.
    """
    kinds = _v4_kinds(config)
    query, cached = heads_of(config)
    if cached.count != 1:
        raise config.wrong("num_key_value_heads", f"expected 1, got {cached.count}")
    window = config.size("sliding_window", least=2)
    if kv is not None:
        raise PlanError(
            "--kv-dtype: page rows of DeepSeek-V4 have a format of their own; leave the option out"
        )
    build = _v4_plain if cache == "transformers" else _v4_rows
    return replace(build(config, kinds, window), divided=(query,), page_size=256, notes=draft_notes(config))


def _v4_kinds(config: Config) -> tuple[str, ...]:
    """The kind of every layer, from layer_types or from the published compress_ratios.

    Ratios behind the last layer belong to draft layers.
    """
    kinds = config.words("layer_types", (WINDOW, SPARSE, HEAVY))
    layers = config.layers()
    if kinds is None:
        ratios = config.numbers("compress_ratios")
        if ratios is None:
            raise config.missing("layer_types", "compress_ratios")
        if len(ratios) < layers:
            raise config.wrong("compress_ratios", f"expected at least {layers} entries, got {len(ratios)}")
        wrong = next((ratio for ratio in ratios[:layers] if ratio not in RATIOS), None)
        if wrong is not None:
            raise config.wrong("compress_ratios", f"expected 0, 1, 4 or 128 for each layer, got {wrong}")
        kinds = tuple(RATIOS[ratio] for ratio in ratios[:layers])
    if len(kinds) != layers:
        raise config.wrong("layer_types", f"expected {layers} entries (num_hidden_layers), got {len(kinds)}")
    return kinds


def _v4_rates(config: Config) -> tuple[int, int]:
    """Tokens behind one entry of sparse and of heavy layers."""
    rates = config.table("compress_rates")
    if rates is None:
        return 4, 128
    return rates.size(SPARSE), rates.size(HEAVY)


def _v4_rows(config: Config, kinds: tuple[str, ...], window: int) -> Model:
    width, rope, rates = config.size("head_dim"), config.size("qk_rope_head_dim"), _v4_rates(config)
    if (width, rope, rates) != (512, 64, (4, 128)):
        raise config.wrong(
            "head_dim",
            f"page rows of engines are known for heads of 512 with 64 rotary values, compressed 4 and 128 to "
            f"one, got {width}, {rope}, {rates[0]} and {rates[1]}; plan with --cache transformers",
        )
    index, every = config.size("index_head_dim"), tuple(range(len(kinds)))
    sparse, heavy = ids(kinds, SPARSE), ids(kinds, HEAVY)
    rows = Rows("window", window)
    members = (
        Member("kv", "logical", "ids of the history, no bytes", (), {}, {}),
        Member("window", "logical", "ids of the window, no bytes", (), {}, {}, rows),
        _v4_paged("swa", f"a window of {window:,} tokens", every, 1, rows),
        _v4_paged("c4", "one entry for 4 tokens", sparse, 4, Rows("token", 4)),
        _indexer("c4_indexer", sparse, index, 4),
        _v4_paged("c128", "one entry for 128 tokens", heavy, 128, Rows("token", 128)),
        _v4_state("c4_state", sparse, width, rows),
        _v4_state("indexer_state", sparse, index, rows),
    )
    return Model(members, "dsv4")


def _v4_paged(name: str, holds: str, layers: tuple[int, ...], ratio: int, rows: Rows) -> Member:
    return Member(name, "dsv4_paged", holds, layers, {"ratio": ratio}, {}, rows, {"format": "v4"})


def _v4_state(name: str, layers: tuple[int, ...], width: int, rows: Rows) -> Member:
    params: dict[str, Size] = {"head_dim": width, "overlap": 1, "ring": RING}
    return Member(name, "dsv4_state", "compressor states", layers, params, {"state": "float32"}, rows)


def _v4_plain(config: Config, kinds: tuple[str, ...], window: int) -> Model:
    """The cache object's own tensors; layers that compress have keys and values of the window in one.

    A compressor keeps the inputs and gates of tokens that are no entry yet, beside the window that they are
    in: one ring of states a page. Sparse compressors overlap: their rings hold the window before as well.
    """
    width, index, dtype = config.size("head_dim"), config.size("index_head_dim"), model_dtype(config)
    sparse_rate, heavy_rate = _v4_rates(config)
    sparse, heavy = ids(kinds, SPARSE), ids(kinds, HEAVY)
    rows, holds = Rows("window", window - 1), f"a window of {window - 1:,} tokens"
    latents: dict[str, Size] = {"kv_lora_rank": width, "qk_rope_head_dim": 0}
    members = (
        Member("kv", "logical", "ids of the history, no bytes", (), {}, {}),
        _pairs("sliding", holds, ids(kinds, WINDOW), width, dtype, rows),
        Member("window", "mla", holds, ids(kinds, SPARSE, HEAVY), latents, {"kv": dtype}, rows),
        _v4_entries("c4", sparse, sparse_rate, width, dtype),
        _v4_open("c4_state", sparse, sparse_rate, width, 1, dtype, rows),
        _v4_entries("c4_index", sparse, sparse_rate, index, dtype),
        _v4_open("c4_index_state", sparse, sparse_rate, index, 1, dtype, rows),
        _v4_entries("c128", heavy, heavy_rate, width, dtype),
        _v4_open("c128_state", heavy, heavy_rate, width, 0, dtype, rows),
    )
    return Model(members, "dsv4_plain")


def _v4_entries(name: str, layers: tuple[int, ...], rate: int, width: int, dtype: str) -> Member:
    params: dict[str, Size] = {"head_dim": width, "ratio": rate}
    rows, holds = Rows("token", rate), f"one entry for {rate} tokens"
    return Member(name, "qsa_indexer", holds, layers, params, {"key": dtype}, rows)


def _v4_open(
    name: str, layers: tuple[int, ...], rate: int, width: int, overlap: int, dtype: str, rows: Rows
) -> Member:
    params: dict[str, Size] = {"head_dim": width, "overlap": overlap, "ring": rate * (1 + overlap)}
    return Member(name, "dsv4_state", "tokens that are no entry yet", layers, params, {"state": dtype}, rows)


# ---- shapes -----------------------------------------------------------------------------------


def _keys(
    name: str, holds: str, layers: tuple[int, ...], width: int, dtype: str, rows: Rows = TOKEN
) -> Member:
    """Rows of one tensor; every rank keeps them whole."""
    return Member(name, "k_only", holds, layers, {"heads": SHARED, "head_dim": width}, {"kv": dtype}, rows)


def _pairs(name: str, holds: str, layers: tuple[int, ...], width: int, dtype: str, rows: Rows) -> Member:
    """Rows of two tensors of one width."""
    params: dict[str, Size] = {"heads": SHARED, "head_dim": width, "v_head_dim": width}
    return Member(name, "mha", holds, layers, params, {"kv": dtype}, rows)


def _indexer(name: str, layers: tuple[int, ...], width: int, ratio: int = 1) -> Member:
    params: dict[str, Size] = {"index_head_dim": width, "ratio": ratio}
    return Member(name, "dsa_indexer", "indexer keys and scales", layers, params, {})
