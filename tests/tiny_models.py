"""Tiny models of `transformers` with random weights, one for each model type that `codegen plan` reads."""

from __future__ import annotations

from typing import Any

import torch

COMMON: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
HEADS: dict[str, Any] = dict(num_attention_heads=8, num_key_value_heads=2)
EXPERTS: dict[str, Any] = dict(moe_intermediate_size=32, num_experts_per_tok=2)
LATENT: dict[str, Any] = dict(
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=32,
    q_lora_rank=24,
    qk_rope_head_dim=16,
    qk_nope_head_dim=24,
    v_head_dim=20,
)
DEEPSEEK: dict[str, Any] = dict(
    **LATENT,
    **EXPERTS,
    n_routed_experts=8,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
)
MAMBA: dict[str, Any] = dict(mamba_d_conv=5, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=12)
WINDOWS: dict[str, Any] = dict(**HEADS, num_hidden_layers=4, head_dim=24, sliding_window=16)

# Sizes differ wherever they may, so that no two of them can be mistaken for each other.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": (
        "Bamba",
        dict(**HEADS, **MAMBA, num_hidden_layers=4, attn_layer_indices=[1, 3], mamba_n_heads=16),
    ),
    "deepseek_v3": ("DeepseekV3", dict(**DEEPSEEK, num_hidden_layers=3, num_mtp_layers=0)),
    "deepseek_v32": (
        "DeepseekV32",
        dict(**DEEPSEEK, num_hidden_layers=3, index_topk=16, index_head_dim=36, index_n_heads=4),
    ),
    "deepseek_v4": (
        "DeepseekV4",
        dict(
            **EXPERTS,
            num_hidden_layers=5,
            num_attention_heads=4,
            head_dim=32,
            qk_rope_head_dim=8,
            q_lora_rank=24,
            o_groups=2,
            o_lora_rank=8,
            n_routed_experts=8,
            sliding_window=16,
            index_n_heads=2,
            index_head_dim=20,
            index_topk=4,
            layer_types=[
                "sliding_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 12},
            num_nextn_predict_layers=0,
        ),
    ),
    "falcon_h1": ("FalconH1", dict(**HEADS, **MAMBA, num_hidden_layers=3, mamba_d_ssm=96, mamba_n_heads=12)),
    "gemma3_text": ("Gemma3", dict(**WINDOWS, sliding_window_pattern=2)),
    "gpt_oss": ("GptOss", dict(**WINDOWS, num_local_experts=4, num_experts_per_tok=2)),
    "kimi_linear": (
        "KimiLinear",
        dict(
            **LATENT,
            **EXPERTS,
            num_hidden_layers=6,
            num_local_experts=8,
            linear_attn_config=dict(
                full_attn_layers=[3, 6],
                kda_layers=[1, 2, 4, 5],
                head_dim=18,
                num_heads=3,
                short_conv_kernel_size=5,
            ),
        ),
    ),
    "llama": ("Llama", dict(**HEADS, num_hidden_layers=3)),
    "mamba2": (
        "Mamba2",
        dict(num_hidden_layers=3, num_heads=16, head_dim=8, state_size=12, n_groups=2, conv_kernel=5),
    ),
    "mistral": ("Mistral", dict(**HEADS, num_hidden_layers=3, sliding_window=16)),
    "qwen2": (
        "Qwen2",
        dict(**HEADS, num_hidden_layers=3, use_sliding_window=True, max_window_layers=1, sliding_window=16),
    ),
    "qwen3": ("Qwen3", dict(**HEADS, num_hidden_layers=3, head_dim=24)),
    "qwen3_moe": ("Qwen3Moe", dict(**HEADS, **EXPERTS, num_hidden_layers=3, head_dim=24, num_experts=4)),
    "qwen3_next": (
        "Qwen3Next",
        dict(
            **HEADS,
            **EXPERTS,
            num_hidden_layers=5,
            head_dim=24,
            linear_conv_kernel_dim=5,
            linear_key_head_dim=12,
            linear_value_head_dim=20,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            num_experts=4,
            shared_expert_intermediate_size=32,
        ),
    ),
}
"""By model type: the name that the library's classes begin with, and the fields of the config."""


def config_of(model_type: str, dtype: torch.dtype) -> Any:
    """The library's config object of a tiny model."""
    import transformers

    name, fields = TINY[model_type]
    kind = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    config = kind(**{**COMMON, **fields})
    config.dtype = dtype
    return config


def cache_of(config: Any, tokens: int) -> Any:
    """The cache object after a prefill of so many tokens."""
    import transformers

    name = TINY[config.model_type][0]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(config.dtype)
        ids = torch.randint(0, COMMON["vocab_size"], (1, tokens))
        with torch.no_grad():
            out = model(ids, use_cache=True)
    return out.get("past_key_values", out.get("cache_params"))


def tensor_bytes(layer: Any) -> int:
    """Bytes of everything that a layer of a cache object holds. Scalars of its bookkeeping do not count."""
    found: dict[int, torch.Tensor] = {}

    def walk(value: object) -> None:
        if isinstance(value, torch.Tensor):
            # Keys and values may be one tensor under two names.
            found[id(value)] = value
        elif isinstance(value, dict):
            for each in value.values():
                walk(each)
        elif isinstance(value, list | tuple):
            for each in value:
                walk(each)

    walk(vars(layer))
    return sum(tensor.nbytes for tensor in found.values() if tensor.dim() > 0)
