"""Recurrent states: a config in, the members of linear attention and state-space layers out.

Engines keep the last `kernel - 1` columns of a convolution's input, which is what the next token needs;
`transformers` keeps `kernel`. A spec's parameter is the kernel of the first, so the second is one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from poolwright.codegen.plan.attention import (
    FULL,
    LINEAR,
    heads_of,
    ids,
    keys_and_values,
    kinds_of,
    kv_dtype,
    latent,
    model_dtype,
)
from poolwright.codegen.plan.config import Config, PlanError
from poolwright.codegen.plan.model import SLOT, Heads, Member, Model, Size, Split, split

STATE = "recurrent state and convolution window"
SSM_DTYPES = ("float32", "bfloat16")


def _kernel(config: Config, name: str, cache: str) -> int:
    return config.size(name, least=2) + (cache == "transformers")


def _state(
    config: Config, pool: str, layers: tuple[int, ...], params: dict[str, Size], ssm: str = "float32"
) -> Member:
    dtypes = {"ssm": ssm, "conv": model_dtype(config)}
    return Member("state", pool, STATE, layers, params, dtypes, SLOT)


# ---- gated delta net (Qwen3-Next) -------------------------------------------------------------


def gated_delta_net(config: Config, cache: str, kv: str | None) -> Model:
    """Qwen3-Next: gated delta nets, and full attention every full_attention_interval layers."""
    kinds = kinds_of(config, (FULL, LINEAR), _full_every_interval)
    _check_interval(config, kinds)
    keys, values = (
        Heads(config.size(name), name) for name in ("linear_num_key_heads", "linear_num_value_heads")
    )
    if values.count % keys.count:
        raise config.wrong(
            "linear_num_value_heads",
            f"expected a multiple of linear_num_key_heads {keys.count}, got {values.count}",
        )
    params: dict[str, Size] = {
        "k_heads": split(keys),
        "v_heads": split(values),
        "k_head_dim": config.size("linear_key_head_dim"),
        "v_head_dim": config.size("linear_value_head_dim"),
        "kernel": _kernel(config, "linear_conv_kernel_dim", cache),
    }
    ssm = "float32" if cache == "transformers" else _ssm_dtype(config)
    state = _state(config, "gated_delta_net", ids(kinds, LINEAR), params, ssm)
    return _hybrid(config, "qwen3_next", state, ids(kinds, FULL), kv)


def _full_every_interval(config: Config, layers: int) -> tuple[str, ...]:
    interval = config.size("full_attention_interval")
    return tuple(LINEAR if (layer + 1) % interval else FULL for layer in range(layers))


def _check_interval(config: Config, kinds: Sequence[str]) -> None:
    """Some readers of a config go by the list, others by the interval: both have to say the same."""
    if not config.has("full_attention_interval"):
        return
    others = _full_every_interval(config, len(kinds))
    for layer, (kind, other) in enumerate(zip(kinds, others, strict=True)):
        if kind != other:
            interval = config.size("full_attention_interval")
            raise config.wrong(
                "layer_types",
                f"layer {layer} is {kind}, but full_attention_interval {interval} makes it {other}; "
                f"mend the one that is wrong",
            )


def _ssm_dtype(config: Config) -> str:
    text = config.text("mamba_ssm_dtype") or "float32"
    if text not in SSM_DTYPES:
        raise config.wrong("mamba_ssm_dtype", f"expected one of {', '.join(SSM_DTYPES)}, got {text!r}")
    return text


def _hybrid(config: Config, group: str, state: Member, full: tuple[int, ...], kv: str | None) -> Model:
    if not full:
        return _states_alone(state, kv)
    rows = keys_and_values(config, "kv", full, kv_dtype(config, kv))
    divided = (heads_of(config)[0],)
    return Model((rows, state), group, divided) if state.layers else Model((rows,), divided=divided)


def _states_alone(state: Member, kv: str | None) -> Model:
    if kv is not None:
        raise PlanError("--kv-dtype: this model caches no keys or values; leave the option out")
    return Model((state,))


# ---- Kimi delta attention ---------------------------------------------------------------------


def kimi_linear(config: Config, cache: str, kv: str | None) -> Model:
    """Kimi-Linear: delta attention, and latent attention in the layers that are full."""
    inner = config.table("linear_attn_config")
    if inner is None and not config.has("layer_types"):
        raise config.missing("linear_attn_config", "layer_types")
    kinds = kinds_of(config, (FULL, LINEAR), _listed_kinds)
    source, names = config, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if inner is not None:
        source, names = inner, ("num_heads", "head_dim", "short_conv_kernel_size")
    heads, width, kernel = names
    params: dict[str, Size] = {
        "heads": split(Heads(source.size(heads), source.at + heads)),
        "head_dim": source.size(width),
        "kernel": _kernel(source, kernel, cache),
        "ngram": 0,
    }
    state = _state(config, "kda_state", ids(kinds, LINEAR), params)
    full, divided = ids(kinds, FULL), (heads_of(config)[0],)
    if not full:
        return replace(_states_alone(state, kv), divided=divided)
    rows = latent(config, "kv", full, kv_dtype(config, kv))
    return Model((rows, state), "kimi_linear", divided) if state.layers else Model((rows,), None, divided)


def _listed_kinds(config: Config, layers: int) -> tuple[str, ...]:
    """Layers by the two lists of linear_attn_config, which count from 1."""
    inner = config.table("linear_attn_config")
    assert inner is not None
    kinds: dict[int, str] = {}
    for name, kind in (("full_attn_layers", FULL), ("kda_layers", LINEAR)):
        numbers = inner.numbers(name, least=1)
        if numbers is None:
            raise inner.missing(name)
        for number in numbers:
            if number > layers or number in kinds:
                what = "listed twice" if number in kinds else f"there are {layers} layers, counted from 1"
                raise inner.wrong(name, f"layer {number}: {what}")
            kinds[number] = kind
    left = [number for number in range(1, layers + 1) if number not in kinds]
    if left:
        raise inner.wrong("kda_layers", f"layer {left[0]} stands neither here nor in full_attn_layers")
    return tuple(kinds[number] for number in range(1, layers + 1))


# ---- Mamba-2 ----------------------------------------------------------------------------------


def bamba(config: Config, cache: str, kv: str | None) -> Model:
    """Bamba: Mamba-2 layers, and attention in attn_layer_indices."""
    layers = config.layers()
    full = config.numbers("attn_layer_indices")
    if full is None:
        raise config.missing("attn_layer_indices")
    if full and max(full) >= layers:
        raise config.wrong("attn_layer_indices", f"layer {max(full)}: there are {layers} layers")
    linear = tuple(layer for layer in range(layers) if layer not in full)
    width = config.size("mamba_expand") * config.size("hidden_size")
    state = _mamba_layers(config, cache, linear, width)
    return _hybrid(config, "bamba", state, tuple(sorted(set(full))), kv)


def falcon_h1(config: Config, cache: str, kv: str | None) -> Model:
    """Falcon-H1: every layer has both an attention and a Mamba-2 mixer."""
    layers = tuple(range(config.layers()))
    if config.has("mamba_d_ssm"):
        width = config.size("mamba_d_ssm")
    else:
        width = config.size("mamba_expand") * config.size("hidden_size")
    return _hybrid(config, "bamba", _mamba_layers(config, cache, layers, width), layers, kv)


def mamba2(config: Config, cache: str, kv: str | None) -> Model:
    """Mamba-2: states in every layer and nothing else."""
    layers = tuple(range(config.layers()))
    heads, groups = _groups(config, "num_heads", "n_groups")
    width = config.size("head_dim")
    if heads.count * width != config.size("expand") * config.size("hidden_size"):
        raise config.wrong(
            "num_heads", f"num_heads {heads.count} times head_dim {width} is not expand times hidden_size"
        )
    params = _mamba(heads, width, groups, config.size("state_size"), _kernel(config, "conv_kernel", cache))
    return _states_alone(_state(config, "mamba", layers, params), kv)


def _mamba_layers(config: Config, cache: str, layers: tuple[int, ...], inner: int) -> Member:
    heads, groups = _groups(config, "mamba_n_heads", "mamba_n_groups")
    given = config.get("mamba_d_head")
    width = inner // heads.count if given == "auto" else config.size("mamba_d_head")
    if heads.count * width != inner:
        raise config.wrong(
            "mamba_d_head", f"{width} times mamba_n_heads {heads.count} is not the inner width {inner}"
        )
    kernel = _kernel(config, "mamba_d_conv", cache)
    params = _mamba(heads, width, groups, config.size("mamba_d_state"), kernel)
    return _state(config, "mamba", layers, params)


def _groups(config: Config, heads: str, groups: str) -> tuple[Heads, Heads]:
    made = Heads(config.size(heads), heads), Heads(config.size(groups), groups, copies=True)
    if made[0].count % made[1].count:
        raise config.wrong(groups, f"expected a divisor of {heads} {made[0].count}, got {made[1].count}")
    return made


def _mamba(heads: Heads, width: int, groups: Heads, state: int, kernel: int) -> dict[str, Size]:
    # The convolution runs over the inputs x of all heads, then over B and over C of all groups.
    channels = Split(((heads, width), (groups, state), (groups, state)))
    return {
        "heads": split(heads),
        "head_dim": width,
        "state_size": state,
        "kernel": kernel,
        "conv_dim": (channels,),
    }
