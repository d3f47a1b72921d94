"""Keys and values: a config in, the members of full, sliding-window and latent attention out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from poolwright.codegen.plan.config import Config
from poolwright.codegen.plan.model import TOKEN, Builder, Heads, Member, Model, Rows, Size, split

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
DTYPES = ("bfloat16", "float16", "float32")

Kinds = Callable[[Config, int], tuple[str, ...]]


def model_dtype(config: Config) -> str:
    """The dtype that the model computes, and so caches, in."""
    name = "dtype" if config.has("dtype") else "torch_dtype"
    text = config.text(name)
    if text is None:
        raise config.wrong(
            "dtype", "missing, and so is torch_dtype; say what the cache is kept in: --kv-dtype bfloat16"
        )
    if text not in DTYPES:
        raise config.wrong(name, f"expected one of {', '.join(DTYPES)}, got {text!r}")
    return text


def kv_dtype(config: Config, given: str | None) -> str:
    """What keys and values are stored in: the dtype that is given, else the model's."""
    return model_dtype(config) if given is None else given


def heads_of(config: Config) -> tuple[Heads, Heads]:
    """Query heads, and heads that are cached: as many where a config does not tell them apart."""
    query = config.size("num_attention_heads")
    cached = config.size_or("num_key_value_heads", query)
    if query % cached:
        raise config.wrong(
            "num_key_value_heads", f"expected a divisor of num_attention_heads {query}, got {cached}"
        )
    return Heads(query, "num_attention_heads"), Heads(cached, "num_key_value_heads", copies=True)


def head_dim(config: Config) -> int:
    """Width of a head; hidden_size over num_attention_heads where a config does not say it."""
    if config.has("head_dim"):
        return config.size("head_dim")
    if not config.has("hidden_size"):
        raise config.missing("head_dim", "hidden_size")
    width, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if width % heads:
        raise config.wrong(
            "head_dim", f"missing, and hidden_size {width} is no multiple of num_attention_heads {heads}"
        )
    return width // heads


def keys_and_values(
    config: Config, name: str, layers: tuple[int, ...], dtype: str, rows: Rows = TOKEN
) -> Member:
    """Keys and values of multi-head or grouped-query attention."""
    width = head_dim(config)
    params: dict[str, Size] = {
        "heads": split(heads_of(config)[1]),
        "head_dim": width,
        "v_head_dim": width,
    }
    window = f", a window of {rows.number:,} tokens" if rows.kind == "window" else ""
    return Member(name, "mha", f"keys and values{window}", layers, params, {"kv": dtype}, rows)


def latent(config: Config, name: str, layers: tuple[int, ...], dtype: str) -> Member:
    """Latent rows of multi-head latent attention; every rank keeps them whole."""
    params = latent_params(config)
    return Member(name, "mla", "latent keys and values", layers, params, {"kv": dtype})


def latent_params(config: Config) -> dict[str, Size]:
    return {name: config.size(name) for name in ("kv_lora_rank", "qk_rope_head_dim")}


def draft_notes(config: Config) -> tuple[str, ...]:
    """What is said of layers behind the last one, which predict tokens ahead."""
    drafts = config.size_or("num_nextn_predict_layers", 0, least=0)
    return (f"draft layers are not planned (num_nextn_predict_layers is {drafts})",) if drafts else ()


# ---- which layers are which -------------------------------------------------------------------


def kinds_of(config: Config, known: Sequence[str], otherwise: Kinds | None) -> tuple[str, ...]:
    """The kind of every layer: `layer_types`, else what the model's class derives (`otherwise`)."""
    layers = config.layers()
    kinds = config.words("layer_types", known)
    if kinds is None:
        if otherwise is None:
            raise config.missing("layer_types")
        return otherwise(config, layers)
    if len(kinds) != layers:
        raise config.wrong("layer_types", f"expected {layers} entries (num_hidden_layers), got {len(kinds)}")
    return kinds


def ids(kinds: Sequence[str], *wanted: str) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(kinds) if kind in wanted)


def all_full(config: Config, layers: int) -> tuple[str, ...]:
    return (FULL,) * layers


def all_sliding(config: Config, layers: int) -> tuple[str, ...]:
    """Every layer has the window when there is one (Mistral)."""
    return (SLIDING if config.has("sliding_window") else FULL,) * layers


def all_sliding_if_asked(config: Config, layers: int) -> tuple[str, ...]:
    """As `all_sliding`, but a window counts only where use_sliding_window says so (Qwen3-MoE)."""
    return all_sliding(config, layers) if config.flag("use_sliding_window") else all_full(config, layers)


def sliding_from(config: Config, layers: int) -> tuple[str, ...]:
    """Layers from max_window_layers on have the window, where it is used at all (Qwen2, Qwen3)."""
    if not (config.flag("use_sliding_window") and config.has("sliding_window")):
        return all_full(config, layers)
    first = config.size("max_window_layers", least=0)
    return tuple(SLIDING if layer >= first else FULL for layer in range(layers))


def full_every(config: Config, layers: int) -> tuple[str, ...]:
    """One full layer behind each run of windows, by sliding_window_pattern (Gemma 3)."""
    pattern = config.size("sliding_window_pattern")
    return tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(layers))


# ---- models with nothing but keys and values --------------------------------------------------


def attention(otherwise: Kinds | None) -> Builder:
    """A builder for models of full and sliding-window layers; `otherwise` as in `kinds_of`."""

    def build(config: Config, cache: str, kv: str | None) -> Model:
        dtype = kv_dtype(config, kv)
        kinds = kinds_of(config, (FULL, SLIDING), otherwise)
        full, sliding = ids(kinds, FULL), ids(kinds, SLIDING)
        divided = (heads_of(config)[0],)
        if not sliding:
            return Model((keys_and_values(config, "kv", full, dtype),), divided=divided)
        window = config.size("sliding_window", least=2)
        if cache == "transformers":
            # The token at hand brings its own keys, so that library keeps one row less than the window.
            window -= 1
        elif not full:
            note = f"every layer has a window of {window:,} tokens: only so many behind a prefix are needed"
            member = keys_and_values(config, "kv", sliding, dtype)
            return Model((member,), divided=divided, notes=(note,))
        swa = keys_and_values(config, "swa", sliding, dtype, Rows("window", window))
        members = (keys_and_values(config, "full", full, dtype), swa) if full else (swa,)
        return Model(members, "swa_full" if full else None, divided)

    return build


def latent_attention(config: Config, cache: str, kv: str | None) -> Model:
    """DeepSeek-V3: latent rows; `transformers` caches the same, as two tensors."""
    layers = tuple(range(config.layers()))
    rows = latent(config, "kv", layers, kv_dtype(config, kv))
    return Model((rows,), divided=(heads_of(config)[0],), notes=draft_notes(config))
