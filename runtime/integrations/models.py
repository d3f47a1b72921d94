"""Tiny models of `transformers` with random weights: a dtype in, a model out; nothing is downloaded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from poolwright.runtime.errors import PoolError

SEED = 20240229
# Wide weights: with the library's default of 0.02 attention hardly shows in the logits of so small a model.
COMMON: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=64,
    initializer_range=0.2,
    attn_implementation="eager",
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
HEADS: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
DENSE: dict[str, Any] = dict(intermediate_size=64, max_position_embeddings=256)
MAMBA: dict[str, Any] = dict(
    mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8, mamba_d_conv=4, mamba_chunk_size=16
)
LATENT: dict[str, Any] = dict(
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=32,
    q_lora_rank=24,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
)
EXPERTS: dict[str, Any] = dict(
    first_k_dense_replace=1,
    moe_intermediate_size=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
)


class MissingLibrary(PoolError):
    """`transformers` is not installed."""


@dataclass(frozen=True)
class Tiny:
    """A model to build. `kind`: its names are ``<kind>Config`` and ``<kind>ForCausalLM`` (or `model`).

    `pools`: by role the pool to take where several fit. `group`: the group that takes the cache, `names`: the
    group's pool of a member that is called otherwise there; without a group pools move side by side.
    """

    kind: str
    config: Mapping[str, Any]
    model: str | None = None
    pools: Mapping[str, str] = field(default_factory=dict)
    group: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def build(self, dtype: torch.dtype) -> Any:
        """The model with random weights, always the same ones. Raises MissingLibrary."""
        library = _transformers()
        config = getattr(library, f"{self.kind}Config")(**COMMON, **self.config)
        made = getattr(library, self.model or f"{self.kind}ForCausalLM")
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            return made(config).eval().to(dtype)


MODELS: dict[str, Tiny] = {
    # grouped-query attention: eight query heads share two key/value heads
    "Llama": Tiny(
        "Llama",
        dict(DENSE, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=16),
    ),
    # latent attention (latent 32, rotary part 16), two layers of three with routed experts
    "DeepSeek-V3": Tiny(
        "DeepseekV3", {**DENSE, **LATENT, **EXPERTS, "num_hidden_layers": 3, "num_mtp_layers": 0}
    ),
    "Qwen3-MoE": Tiny(
        "Qwen3Moe",
        {**DENSE, **HEADS, "num_hidden_layers": 2}
        | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    # sliding windows in all but every second (gpt-oss) or sixth (Gemma 3) layer
    "gpt-oss": Tiny(
        "GptOss",
        {**DENSE, **HEADS, "num_hidden_layers": 4, "sliding_window": 8}
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        group="swa_full",
        names={"kv": "full", "window": "swa"},
    ),
    "Gemma-3": Tiny(
        "Gemma3Text",
        {**DENSE, **HEADS, "num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 16},
        model="Gemma3ForCausalLM",
        group="swa_full",
        names={"kv": "full", "window": "swa"},
    ),
    # expanded heads, and keys of an indexer that picks 24 tokens
    "DeepSeek-V3.2": Tiny(
        "DeepseekV32",
        {**DENSE, **LATENT, **EXPERTS, "num_hidden_layers": 3}
        | {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 24},
        group="mha_indexer",
    ),
    # a window in every layer; entries for 4 (with an indexer) or 8 tokens, and their compressors' states
    "DeepSeek-V4": Tiny(
        "DeepseekV4",
        dict(
            max_position_embeddings=256,
            num_hidden_layers=4,
            layer_types=[
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
            moe_intermediate_size=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=32,
            q_lora_rank=24,
            partial_rotary_factor=0.5,
            sliding_window=8,
            o_groups=2,
            o_lora_rank=16,
            index_n_heads=2,
            index_head_dim=16,
            index_topk=4,
        ),
        group="dsv4_plain",
        names={
            "window": "sliding",
            "window_2": "window",
            "compressor_entries": "c4",
            "compressor_state": "c4_state",
            "indexer_entries": "c4_index",
            "indexer_state": "c4_index_state",
            "compressor_entries_2": "c128",
            "compressor_state_2": "c128_state",
        },
    ),
    # three layers of a gated delta rule before each layer of attention
    "Qwen3-Next": Tiny(
        "Qwen3Next",
        {**DENSE, **HEADS, "num_hidden_layers": 4}
        | dict(
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=16,
            linear_conv_kernel_dim=4,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
        ),
        pools={"state": "gated_delta_net"},
        group="qwen3_next",
    ),
    "Kimi-Linear": Tiny(
        "KimiLinear",
        {**DENSE, **LATENT, "num_hidden_layers": 4, "q_lora_rank": None}
        | dict(
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            linear_head_dim=16,
            linear_num_heads=4,
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_token=2,
        ),
        pools={"state": "kda_state"},
        group="kimi_linear",
    ),
    # attention in layers 1 and 3, state spaces in 0 and 2
    "Bamba": Tiny(
        "Bamba",
        {**DENSE, **MAMBA, **HEADS, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
        group="bamba",
    ),
    # attention and a state space side by side in every layer
    "Falcon-H1": Tiny(
        "FalconH1",
        {**DENSE, **MAMBA, **HEADS, "num_hidden_layers": 3, "mamba_d_ssm": 128},
        group="bamba",
    ),
    # convolutions without a recurrent state before and after attention
    "LFM2": Tiny(
        "Lfm2",
        {**DENSE, **HEADS, "num_hidden_layers": 3, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}
        | {"layer_types": ["conv", "full_attention", "conv"]},
        group="bamba",
    ),
    # no attention at all
    "Mamba-2": Tiny(
        "Mamba2",
        dict(
            num_hidden_layers=3,
            num_heads=8,
            head_dim=16,
            state_size=8,
            n_groups=2,
            conv_kernel=4,
            chunk_size=16,
        ),
    ),
}


def fresh_cache(model: Any) -> Any:
    """A cache object for the model that has seen no token."""
    return _transformers().DynamicCache(config=model.config)


def logits(model: Any, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits [sequence, token, word] of new tokens; the cache takes them up."""
    known = inspect.signature(model.forward).parameters
    name = "cache_params" if "cache_params" in known else "past_key_values"
    with torch.inference_mode():
        found: torch.Tensor = model(tokens, use_cache=True, **{name: cache}).logits
    return found


def be_quiet() -> None:
    """Let the library speak of errors only: its notes on missing fast kernels concern no one here."""
    _transformers().logging.set_verbosity_error()


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise MissingLibrary("transformers is not installed; pip install transformers==5.17.0") from error
    return transformers
