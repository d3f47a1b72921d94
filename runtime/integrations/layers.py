"""What a model's cache object holds: layers in, groups that look alike and rows of tokens out, and back.

Duck-typed: a cache has `layers` and `update(keys, values, layer)`, a layer `keys` and `values` of
[sequence, head, token, dim], `is_initialized` and `get_seq_length()`, as in transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_BOOKKEEPING = ("keys", "values", "cumulative_length", "_sliding_window_tensor")
_COUNTERS = ("cumulative_length_int", "cumulative_length")


class CacheLike(Protocol):
    """What is asked of a cache object."""

    @property
    def layers(self) -> Sequence[Any]: ...

    @property
    def update(self) -> Callable[..., Any]: ...


@dataclass(frozen=True)
class LayerGroup:
    """Layers of a cache that look alike and share a pool.

    `pool`: ``mha``, or ``mla`` where a layer caches one latent row (`key_dim`) and one rotary row
    (`value_dim`) a token. `tokens` are held for each of `sequences`; `seen` went through the layer (a
    sliding window holds fewer than it has seen).
    """

    pool: str
    layers: tuple[int, ...]
    sequences: int
    heads: int
    tokens: int
    seen: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def params(self) -> dict[str, int]:
        """Sizes that the pool's constructor takes."""
        if self.pool == "mla":
            return {"kv_lora_rank": self.key_dim, "qk_rope_head_dim": self.value_dim}
        return {"heads": self.heads, "head_dim": self.key_dim, "v_head_dim": self.value_dim}


def layer_groups(cache: CacheLike) -> tuple[LayerGroup, ...]:
    """The layers that hold tokens, grouped by what their tensors look like, in the order of first layers.

    One head with keys and values of unequal width is a latent with its rotary part (DeepSeek-V3): pool
    ``mla``; everything else is ``mha``. Raises ValueError for a cache without tokens and for a layer
    that holds more state than keys and values.
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise ValueError(
            f"expected a cache object with `layers` (as DynamicCache has), got {type(cache).__name__}; "
            f"of an encoder-decoder cache hand over self_attention_cache"
        )
    found: dict[tuple[Any, ...], list[int]] = {}
    for number, layer in enumerate(layers):
        if _holds_tokens(number, layer):
            found.setdefault(_looks(number, layer), []).append(number)
    if not found:
        raise ValueError(f"{type(cache).__name__} holds no tokens; run the prefill first")
    return tuple(LayerGroup(looks[0], tuple(numbers), *looks[1:]) for looks, numbers in found.items())


def rows_of(group: LayerGroup, layer: Any) -> dict[str, torch.Tensor]:
    """Valid rows by component: [sequence, token, element dims]."""
    keys = layer.keys.detach()[:, :, : group.tokens].transpose(1, 2)
    values = layer.values.detach()[:, :, : group.tokens].transpose(1, 2)
    if group.pool == "mla":
        return {"kv": torch.cat([keys, values], dim=-1)[:, :, 0]}
    return {"k": keys, "v": values}


def keys_and_values(group: LayerGroup, rows: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rows_of` took apart, as packed [sequence, head, token, dim] tensors."""
    if group.pool == "mla":
        row = rows["kv"][:, None]
        return row[..., : group.key_dim].contiguous(), row[..., group.key_dim :].contiguous()
    return rows["k"].transpose(1, 2).contiguous(), rows["v"].transpose(1, 2).contiguous()


def keep_books(group: LayerGroup, number: int, layer: Any) -> None:
    """Let a filled layer count what was seen; a sliding window was given only what it holds."""
    for name in _COUNTERS:
        if int(layer.get_seq_length()) != group.seen and isinstance(getattr(layer, name, None), int):
            setattr(layer, name, group.seen)
    filled = (_looks(number, layer), bool(layer.is_initialized))
    expected = LayerGroup(filled[0][0], group.layers, *filled[0][1:])
    if expected != group or not filled[1]:
        raise ValueError(
            f"layer {number} of the filled cache ({type(layer).__name__}) is {expected}, expected {group}; "
            f"build the fresh cache as the first one was built"
        )


def _holds_tokens(number: int, layer: Any) -> bool:
    """Whether there is anything to carry. Raises ValueError for state that would be left behind."""
    extra = [name for name, value in vars(layer).items() if name not in _BOOKKEEPING and _has_tensor(value)]
    if extra:
        raise ValueError(
            f"layer {number} ({type(layer).__name__}) also holds {', '.join(extra)}, which no pool of this "
            f"integration carries; only keys and values can be moved"
        )
    return bool(getattr(layer, "is_initialized", False)) and int(layer.get_seq_length()) > 0


def _has_tensor(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(_has_tensor(each) for each in value.values())
    if isinstance(value, list | tuple):
        return any(_has_tensor(each) for each in value)
    return isinstance(value, torch.Tensor)


def _looks(number: int, layer: Any) -> tuple[Any, ...]:
    """The fields of a `LayerGroup`, without its layers."""
    keys, values, seen = layer.keys, layer.values, int(layer.get_seq_length())
    name = f"layer {number} ({type(layer).__name__})"
    if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"{name}: expected keys and values of [sequence, head, token, dim], "
            f"got {tuple(keys.shape)} and {tuple(values.shape)}"
        )
    if (keys.dtype, keys.device) != (values.dtype, values.device):
        raise ValueError(
            f"{name}: expected keys and values of one dtype on one device, "
            f"got {keys.dtype} on {keys.device} and {values.dtype} on {values.device}"
        )
    sequences, heads, room, key_dim = keys.shape
    if seen > room and not getattr(layer, "is_sliding", False):
        raise ValueError(
            f"{name}: has seen {seen} tokens and holds {room}; only a sliding window may hold fewer"
        )
    pool = "mla" if heads == 1 and key_dim != values.shape[3] else "mha"
    looks = (sequences, heads, min(seen, room), seen, key_dim, values.shape[3], keys.dtype, keys.device)
    return (pool, *looks)
