"""Which component of which pool each tensor of a cache layer is: layers in, shares of pools out.

`KINDS` says for every known class of layer (by its name, nothing is imported) which of its attributes go
to pools, which are settings and which are bookkeeping. What is in none of them is refused, as are classes
that are not named: a tensor cannot be forgotten. Layers are those of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from poolwright.runtime.integrations.contents import Contents, Path, contents, spelled

KNOWN = (
    *("kv", "window", "indexer", "state"),
    *("compressor_entries", "compressor_state", "indexer_entries", "indexer_state"),
)
"""Roles of shares."""

ROLES = ("state",)
"""What several pools fit, so that a caller says which."""

STATE_POOLS = ("mamba", "gated_delta_net", "kda_state")
"""Pools that take the states of linear attention; which one fits, the model says (default: the first)."""


Size = int | tuple[int, ...]


@dataclass(frozen=True)
class Claim:
    """One tensor of a layer as a box of a component: what its axes are and where the box starts.

    `axes`: ``sequence``, ``row`` in pools with rows, and element dims of the component, ``"a b"`` where the
    tensor holds two of them as one; dims that are not named have extent 1. `at`: (dim, first index) of dims
    that the box does not start at 0.
    """

    path: Path
    component: str
    axes: tuple[str, ...]
    at: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Share:
    """What a layer gives to one pool: the pool, its parameters, dtypes by group, and what goes where.

    `rows` of each of `sequences` (0: room, but none seen yet), or None where a sequence has one slot. A row
    stands for `tokens_a_row` tokens of the model, pages for `tokens` of them, if given, some of which have no
    row yet; `row_axis` is what the pool calls a row.
    """

    role: str
    pool: str
    params: tuple[tuple[str, Size], ...]
    dtypes: tuple[tuple[str, torch.dtype], ...]
    sequences: int
    rows: int | None
    device: torch.device
    claims: tuple[Claim, ...]
    tokens_a_row: int = 1
    tokens: int = 0
    row_axis: str = "token"


Taking = Callable[[Contents, Mapping[str, str]], "Share | None"]


@dataclass(frozen=True)
class Kind:
    """Attributes of a class of layer. `held` go to pools by way of `shares`; `settings` must be the same in
    a layer that is filled; `books` are values and counters that a filled layer takes over."""

    shares: tuple[Taking, ...] = ()
    held: frozenset[str] = frozenset()
    settings: frozenset[str] = frozenset()
    books: frozenset[str] = frozenset()

    def __add__(self, other: Kind) -> Kind:
        return Kind(
            self.shares + other.shares,
            self.held | other.held,
            self.settings | other.settings,
            self.books | other.books,
        )


@dataclass(frozen=True)
class Holding:
    """A layer taken apart: its kind, all it holds, and the shares that go to pools."""

    kind: Kind
    contents: Contents
    shares: tuple[Share, ...] = field(default=())


def holding(number: int, layer: Any, pools: Mapping[str, str]) -> Holding:
    """Layer `number` taken apart. `pools`: by role a pool to take where several fit (``state``).

    Raises ValueError for a class of layer that is not known and for an attribute or tensor that no pool
    takes and nothing says may stay behind.
    """
    found = contents(number, layer)
    kind = KINDS.get(type(layer).__name__)
    if kind is None:
        raise ValueError(
            f"{found.name}: this kind of cache layer is not known, expected one of {', '.join(KINDS)}; "
            f"describe it in KINDS of {__name__}"
        )
    extra = sorted(found.attributes - kind.held - kind.settings - kind.books)
    if extra:
        raise ValueError(f"{found.name} also has {', '.join(extra)}, which KINDS of {__name__} does not name")
    shares = [share for take in kind.shares if (share := take(found, pools)) is not None]
    claimed = {claim.path for share in shares for claim in share.claims}
    _all_claimed(found, kind, claimed)
    return Holding(kind, found, tuple(shares))


def _all_claimed(found: Contents, kind: Kind, claimed: set[Path]) -> None:
    """Raises ValueError for a tensor that would be left behind."""
    for path, other in found.aliases.items():
        if path[0] not in kind.held or other not in claimed:
            raise ValueError(f"{found.name}: {spelled(path)} is the same tensor as {spelled(other)}")
    for path, tensor in found.tensors.items():
        if path in claimed or tensor.numel() == 0:
            continue
        if path[0] in kind.held:
            raise ValueError(
                f"{found.name} holds {spelled(path)}, which no pool takes; it would be left behind"
            )
        if tensor.numel() > 1:
            raise ValueError(
                f"{found.name}: {spelled(path)} is a tensor of {tensor.numel()} elements, expected a "
                f"counter; only pools carry more than one element"
            )


# ---- shares -----------------------------------------------------------------------------------


def attention(found: Contents, pools: Mapping[str, str]) -> Share | None:
    """Keys and values [sequence, head, row, dim]; one head of two widths is a latent and its rotary part."""
    keys, values = found.filled("keys"), found.filled("values")
    if keys is None or values is None:
        return None
    if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"{found.name}: expected keys and values of [sequence, head, token, dim], "
            f"got {tuple(keys.shape)} and {tuple(values.shape)}"
        )
    if (keys.dtype, keys.device) != (values.dtype, values.device):
        raise ValueError(
            f"{found.name}: expected keys and values of one dtype on one device, "
            f"got {keys.dtype} on {keys.device} and {values.dtype} on {values.device}"
        )
    heads, key_dim = keys.shape[1], keys.shape[3]
    rows = _rows_seen(found, keys.shape[2])
    axes = ("sequence", "head", "row", "dim")
    role = "window" if ("sliding_window",) in found.values or _wraps(found) else "kv"
    if heads == 1 and key_dim != values.shape[3]:
        axes = ("sequence", "head", "row", "latent")
        params = (("kv_lora_rank", key_dim), ("qk_rope_head_dim", values.shape[3]))
        claims = (
            Claim(("keys",), "kv", axes),
            Claim(("values",), "kv", axes, (("latent", key_dim),)),
        )
        return _rows(role, "mla", params, claims, keys, rows)
    sizes = {"heads": heads, "head_dim": key_dim, "v_head_dim": values.shape[3], "head_groups": 1}
    claims = (Claim(("keys",), "k", axes), Claim(("values",), "v", axes))
    return _rows(role, "mha", tuple(sizes.items()), claims, keys, rows)


def indexer(found: Contents, pools: Mapping[str, str]) -> Share | None:
    """Keys of an indexer [sequence, row, dim]."""
    keys = found.filled("indexer_keys")
    if keys is None:
        return None
    counter = found.tensors.get(("indexer_cumulative_length",))
    rows = keys.shape[1] if counter is None else min(int(counter), keys.shape[1])
    claims = (Claim(("indexer_keys",), "k", ("sequence", "row", "dim")),)
    return _rows("indexer", "k_only", (("heads", 1), ("head_dim", keys.shape[2])), claims, keys, rows)


def states(found: Contents, pools: Mapping[str, str]) -> Share | None:
    """A recurrent state [sequence, head, dim, dim] and a convolution window [sequence, channel, tap]."""
    recurrent, conv = found.filled("recurrent_states", 0), found.filled("conv_states", 0)
    if conv is None:
        return None
    pool = pools.get("state", STATE_POOLS[0])
    if pool not in STATE_POOLS:
        raise ValueError(
            f"{found.name}: pool of states: expected one of {', '.join(STATE_POOLS)}, got {pool!r}"
        )
    if conv.dim() != 3 or (recurrent is not None and recurrent.dim() != 4):
        raise ValueError(
            f"{found.name}: expected states of [sequence, head, dim, dim] and [sequence, channel, tap], "
            f"got {None if recurrent is None else tuple(recurrent.shape)} and {tuple(conv.shape)}"
        )
    return _state_share(pool, recurrent, conv)


def shared_window(found: Contents, pools: Mapping[str, str]) -> Share | None:
    """Keys [sequence, 1, row, dim] that are the values too."""
    keys = found.filled("keys")
    if keys is None:
        return None
    claims = (Claim(("keys",), "kv", ("sequence", "head", "row", "latent")),)
    params = (("kv_lora_rank", keys.shape[3]), ("qk_rope_head_dim", 0))
    return _rows("window", "mla", params, claims, keys, keys.shape[2])


def compressed(name: str) -> Taking:
    """Entries [sequence, row, dim] of a compressor, each for `compress_rate` tokens."""

    def take(found: Contents, pools: Mapping[str, str]) -> Share | None:
        entries = found.filled("compressed_kv", name)
        if entries is None:
            return None
        sequences, rows, wide = entries.shape
        rate = found.number("compress_rate")
        return Share(
            role=f"{name}_entries",
            pool="qsa_indexer",
            params=(("head_dim", wide), ("ratio", rate)),
            dtypes=(("key", entries.dtype),),
            sequences=sequences,
            rows=rows,
            device=entries.device,
            claims=(Claim(("compressed_kv", name), "key", ("sequence", "row", "dim")),),
            tokens_a_row=rate,
            tokens=found.number("cumulative_length"),
            row_axis="entry",
        )

    return take


def compressor(name: str) -> Taking:
    """The open window of a compressor, and the window before it where windows overlap, as one ring.

    A slot of the ring is keys, then gates; with overlap each has two series. The window before is the first
    half of the ring and has the first series only.
    """

    def take(found: Contents, pools: Mapping[str, str]) -> Share | None:
        rate = found.number("compress_rate")
        overlap = int(("overlap_kv", name) in {*found.values, *found.tensors})
        before, like = found.filled("overlap_kv", name), found.filled("buffer_kv", name)
        if before is not None:
            like, width = before, before.shape[2]
        elif like is not None:
            width = like.shape[2] // (1 + overlap)
        else:
            return None
        claims = []
        for kind, part in enumerate(("kv", "gate")):
            for holder, slot, last in (("overlap", 0, "dim"), ("buffer", rate * overlap, "window dim")):
                if found.filled(f"{holder}_{part}", name) is not None:
                    axes = ("sequence", "slot", last)
                    at = (("slot", slot), ("kind", kind))
                    claims.append(Claim((f"{holder}_{part}", name), "state", axes, at))
        sizes = (("head_dim", width), ("overlap", overlap), ("ring", rate * (1 + overlap)))
        dtypes, role = (("state", like.dtype),), f"{name}_state"
        return Share(role, "dsv4_state", sizes, dtypes, like.shape[0], None, like.device, tuple(claims))

    return take


def _rows(
    role: str,
    pool: str,
    params: tuple[tuple[str, Size], ...],
    claims: tuple[Claim, ...],
    like: torch.Tensor,
    rows: int,
) -> Share:
    dtypes = (("kv", like.dtype),)
    return Share(role, pool, params, dtypes, like.shape[0], rows, like.device, claims)


def _rows_seen(found: Contents, room: int) -> int:
    """Valid rows of a layer with room for so many: a preallocated one counts them."""
    if ("max_cache_len",) not in found.values:
        return room
    if _wraps(found):
        return min(found.number("cumulative_length_int"), room)
    seen = int(found.tensors["cumulative_length",])
    if seen > room:
        raise ValueError(
            f"{found.name}: has seen {seen} tokens and holds {room}; only a sliding window may hold fewer"
        )
    return seen


def _wraps(found: Contents) -> bool:
    return ("cumulative_length_int",) in found.values


def _state_share(pool: str, recurrent: torch.Tensor | None, conv: torch.Tensor) -> Share:
    """What the states are in one of `STATE_POOLS`: their axes and the pool's sizes."""
    sequences, channels, taps = conv.shape
    heads, left, right = (1, 1, 0) if recurrent is None else recurrent.shape[1:]
    dtypes = {"ssm": torch.float32 if recurrent is None else recurrent.dtype, "conv": conv.dtype}
    params: dict[str, Size] = {"kernel": taps + 1}
    name, dims = "conv", ("head", "k", "v")
    if pool == "mamba":
        name, dims, dtypes["side"] = "conv[0]", ("head", "dim", "state"), torch.int64
        params |= {"heads": heads, "head_dim": left, "state_size": right}
        params["conv_dim"] = (channels, 0, 0)
    elif pool == "gated_delta_net":
        k_heads = (channels - heads * right) // max(2 * left, 1)
        params |= {"k_heads": k_heads, "v_heads": heads, "k_head_dim": left, "v_head_dim": right}
    else:
        params |= {"heads": heads, "head_dim": left, "ngram": 0}
    claims = [Claim(("conv_states", 0), name, ("sequence", "channel", "tap"))]
    if recurrent is not None:
        claims.append(Claim(("recurrent_states", 0), "temporal", ("sequence", *dims)))
    given, kept = tuple(params.items()), tuple(dtypes.items())
    return Share("state", pool, given, kept, sequences, None, conv.device, tuple(claims))


# ---- kinds of layers --------------------------------------------------------------------------


def _kind(shares: tuple[Taking, ...], held: str, settings: str, books: str) -> Kind:
    return Kind(shares, frozenset(held.split()), frozenset(settings.split()), frozenset(books.split()))


_PLACE = _kind((), "", "", "is_initialized dtype device")
_WINDOW = _kind((), "", "sliding_window record_past", "cumulative_length _sliding_window_tensor")
_STATIC = _kind((), "", "max_cache_len", "cumulative_length batch_size num_heads k_head_dim v_head_dim")
_STATIC_WINDOW = _STATIC + _kind((), "", "", "cumulative_length_int")
_ATTENTION = _PLACE + _kind((attention,), "keys values", "", "")
_INDEXER = _kind((indexer,), "indexer_keys", "", "is_indexer_initialized indexer_dtype indexer_device")
_LINEAR = _kind(
    (states,),
    "conv_states recurrent_states",
    "number_of_states record_past",
    "is_conv_states_initialized is_recurrent_states_initialized has_previous_state conv_kernel_size "
    "dtype device",
)
_COMPRESSED = (
    _PLACE
    + _WINDOW
    + _kind(
        (shared_window, compressed("compressor"), compressor("compressor")),
        "keys values buffer_kv buffer_gate compressed_kv",
        "compress_rate",
        "entry_count",
    )
)
_COMPRESSED_INDEXER = _kind((compressed("indexer"), compressor("indexer")), "overlap_kv overlap_gate", "", "")

KINDS: dict[str, Kind] = {
    "DynamicLayer": _ATTENTION,
    "DynamicSlidingWindowLayer": _ATTENTION + _WINDOW,
    "DynamicIndexedLayer": _ATTENTION + _INDEXER,
    "StaticLayer": _ATTENTION + _STATIC,
    "StaticSlidingWindowLayer": _ATTENTION + _STATIC_WINDOW,
    "StaticIndexedLayer": _ATTENTION + _STATIC + _INDEXER + _kind((), "", "", "indexer_cumulative_length"),
    "LinearAttentionLayer": _LINEAR,
    "LinearAttentionAndFullAttentionLayer": _LINEAR + _ATTENTION,
    "LinearAttentionAndSlidingWindowAttentionLayer": _LINEAR + _ATTENTION + _WINDOW,
    "LinearAttentionAndStaticFullAttentionLayer": _LINEAR + _ATTENTION + _STATIC,
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": _LINEAR + _ATTENTION + _STATIC_WINDOW,
    "DeepseekV4HCACache": _COMPRESSED,
    "DeepseekV4CSACache": _COMPRESSED + _COMPRESSED_INDEXER,
}
