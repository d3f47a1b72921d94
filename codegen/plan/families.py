"""The table of model types: how each config is read, and what published configs leave out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from poolwright.codegen.names import shorten
from poolwright.codegen.plan import attention, linear, sparse
from poolwright.codegen.plan.config import Config, PlanError
from poolwright.codegen.plan.model import Builder, Model

CACHES = ("engine", "transformers")


@dataclass(frozen=True)
class Family:
    """How a model type's config is read. `defaults`: what the model's class gives to fields left out.

    `inside`: the table of a multimodal config that holds the language model's fields.
    """

    build: Builder
    defaults: Mapping[str, Any] = field(default_factory=dict)
    inside: str | None = None


_GEMMA3 = Family(
    attention.attention(attention.full_every),
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window_pattern": 6},
)

FAMILIES: dict[str, Family] = {
    "bamba": Family(linear.bamba),
    "deepseek_v3": Family(attention.latent_attention),
    "deepseek_v32": Family(sparse.deepseek_v32),
    "deepseek_v4": Family(sparse.deepseek_v4),
    "falcon_h1": Family(linear.falcon_h1),
    "gemma3": replace(_GEMMA3, inside="text_config"),
    "gemma3_text": _GEMMA3,
    "gpt_oss": Family(attention.attention(None)),
    "kimi_linear": Family(linear.kimi_linear),
    "llama": Family(attention.attention(attention.all_full)),
    "mamba2": Family(linear.mamba2),
    "mistral": Family(attention.attention(attention.all_sliding)),
    "qwen2": Family(attention.attention(attention.sliding_from)),
    "qwen3": Family(attention.attention(attention.sliding_from)),
    "qwen3_moe": Family(attention.attention(attention.all_sliding_if_asked)),
    "qwen3_next": Family(linear.gated_delta_net),
}


def read_model(config: Config, cache: str, kv_dtype: str | None) -> Model:
    """The cache of the model that a config describes, in the form that `cache` says.

    `kv_dtype`: what keys and values are stored in; None: the model's own dtype. Raises PlanError for a
    model type that the table has not, and for a field that is missing or contradicts another.
    """
    model_type = config.text("model_type")
    if model_type is None:
        raise PlanError(
            f"{config.source}: model_type: missing; it says how the other fields are read: "
            f"take the config.json that is published with the model"
        )
    if model_type not in FAMILIES:
        raise PlanError(_unknown(config, model_type))
    if kv_dtype is not None and cache == "transformers":
        raise PlanError("--kv-dtype: transformers caches in the model's dtype; leave the option out")
    family = FAMILIES[model_type]
    typed = replace(config, model_type=model_type)
    if family.inside is not None:
        inside = typed.table(family.inside)
        if inside is None:
            raise typed.missing(family.inside)
        outer = {name: config.get(name) for name in ("dtype", "torch_dtype")}
        typed = replace(inside, defaults=outer)
    typed = replace(typed, defaults={**family.defaults, **typed.defaults})
    return family.build(typed, cache, kv_dtype)


# ---- what is not known ------------------------------------------------------------------------

_MARKS: dict[str, tuple[str, ...]] = {
    "index_head_dim": ("deepseek_v32", "deepseek_v4"),
    "kv_lora_rank": ("deepseek_v3", "kimi_linear"),
    "linear_attn_config": ("kimi_linear",),
    "linear_num_value_heads": ("qwen3_next",),
    "mamba_d_state": ("bamba", "falcon_h1"),
    "num_key_value_heads": ("llama", "qwen3"),
    "sliding_window": ("gpt_oss", "mistral"),
    "state_size": ("mamba2",),
}
"""A field that says how a cache is made, and model types that have it."""

_ALSO = ("num_hidden_layers", "num_attention_heads", "head_dim", "hidden_size", "layer_types")


def _unknown(config: Config, model_type: str) -> str:
    fields = (*_ALSO, *_MARKS)
    inside = config.table("text_config") or Config(config.source, {})
    there = [name for name in fields if config.has(name) or inside.has(name)]
    near = [name for mark, names in _MARKS.items() if mark in there for name in names]
    like = ", ".join(dict.fromkeys([*get_close_matches(model_type, FAMILIES, n=2), *near])) or "none"
    lines = [
        f"{config.source}: model_type: {shorten(model_type)} is none that plan can read",
        f"  known: {', '.join(FAMILIES)}",
        f"  fields found that shape a cache: {', '.join(there) or 'none'}",
        f"  looked for and not found: {', '.join(name for name in fields if name not in there) or 'none'}",
        f"  nearest by name and fields: {like}",
        "  how its layers combine is not in these fields, so nothing is planned: read in the model's code "
        "what it caches, then take a pool that fits, or write a spec: codegen new NAME --like POOL",
    ]
    if inside.text("model_type") in FAMILIES:
        lines[-1] = (
            f"  its text_config is of model type {inside.text('model_type')!r}, which plan can read: if the "
            f"model caches nothing else, write that table to a file of its own and plan with it"
        )
    return "\n".join(lines)
