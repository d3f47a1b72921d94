"""Keys: everything that decides the bytes of a page, as one string.

    pw1/<model>/<pool>/<format tag>/<layers>/<shard>/<page hash>

Each field is percent-encoded, so none can pass for two. `page hash` chains the tokens: it stands for all
tokens from the first to the page's last, and for the seed.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from urllib.parse import quote

from poolwright.runtime.storage.base import positive

VERSION = "pw1"


@dataclass(frozen=True)
class Namespace:
    """What the pages of one pool have in common.

    `model`: name and revision of the weights. `pool`: its name, in a group its name there. `format_tag`:
    the pool's. `layers`: the ids of its layers. `shard`: which part of the model's rows, ``all`` where
    every rank holds the same, else for instance ``tp3of8`` or ``pp0of2.tp3of8``.
    Raises ValueError for an empty field.
    """

    model: str
    pool: str
    format_tag: str
    layers: tuple[int, ...]
    shard: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "layers" and (not isinstance(value, str) or not value):
                raise ValueError(f"{field.name}: expected text that is not empty, got {value!r}")

    def key(self, page_hash: str) -> str:
        """The key of a page. Raises ValueError for a hash that is not 16 to 128 characters of hex."""
        if not isinstance(page_hash, str) or not re.fullmatch("[0-9a-f]{16,128}", page_hash):
            raise ValueError(
                f"page hash: expected 16 to 128 characters of 0-9a-f, got {page_hash!r}; see token_hashes"
            )
        names = (VERSION, self.model, self.pool, self.format_tag, ranges(self.layers), self.shard, page_hash)
        return "/".join(quote(name, safe="") for name in names)


def ranges(ids: Sequence[int]) -> str:
    """Layer ids in their order, neighbours joined: ``0-2.5`` for 0, 1, 2, 5; ``none`` without any."""
    runs: list[list[int]] = []
    for id in ids:
        if runs and id == runs[-1][1] + 1:
            runs[-1][1] = id
        else:
            runs.append([id, id])
    return ".".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs) or "none"


def token_hashes(tokens: Sequence[int], page_size: int, seed: str = "") -> list[str]:
    """The hash of each full page of `tokens`, 64 hex characters; a tail that fills no page has none.

    `seed`: what else the rows depend on besides tokens and weights: an adapter, a cache salt, images.
    Raises ValueError for tokens that are not integers of 0 to 2^63 - 1.
    """
    page_size = positive("page_size", page_size)
    try:
        packed = array("q", tokens)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"tokens: expected integers of 0 to 2^63 - 1: {error}") from None
    if packed and min(packed) < 0:
        raise ValueError(f"tokens: expected integers of 0 to 2^63 - 1, got {min(packed)}")
    if sys.byteorder == "big":
        packed.byteswap()
    digest = hashlib.sha256(f"{VERSION} {seed}".encode()).digest()
    hashes = []
    for start, end in itertools.pairwise(range(0, len(packed) + 1, page_size)):
        digest = hashlib.sha256(digest + packed[start:end].tobytes()).digest()
        hashes.append(digest.hex())
    return hashes
