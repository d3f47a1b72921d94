"""Two tiny models of `transformers` with random weights: a dtype in, a model out; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from poolwright.runtime.errors import PoolError

SEED = 20240229
# Wide weights: with the library's default of 0.02 attention hardly shows in the logits of so small a model.
COMMON: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    max_position_embeddings=256,
    initializer_range=0.2,
    attn_implementation="eager",
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


class MissingLibrary(PoolError):
    """`transformers` is not installed."""


def llama(dtype: torch.dtype) -> Any:
    """Four layers of grouped-query attention: eight query heads share two key/value heads of width 16."""
    library = _transformers()
    config = library.LlamaConfig(
        **COMMON, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=16
    )
    return _seeded(library.LlamaForCausalLM, config, dtype)


def deepseek_v3(dtype: torch.dtype) -> Any:
    """Three layers of latent attention (latent 32, rotary part 16), two of them with routed experts."""
    library = _transformers()
    config = library.DeepseekV3Config(
        **COMMON,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        num_mtp_layers=0,
    )
    return _seeded(library.DeepseekV3ForCausalLM, config, dtype)


MODELS: dict[str, Callable[[torch.dtype], Any]] = {"Llama": llama, "DeepSeek-V3": deepseek_v3}


def fresh_cache(model: Any) -> Any:
    """A cache object for the model that has seen no token."""
    return _transformers().DynamicCache(config=model.config)


def _seeded(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return kind(config).eval().to(dtype)


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise MissingLibrary("transformers is not installed; pip install transformers==5.17.0") from error
    return transformers
