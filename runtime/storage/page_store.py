"""Pages of one pool in a storage: page hashes and page numbers in, statuses out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from poolwright.runtime.errors import TransferError
from poolwright.runtime.storage.base import Item, Status, Storage
from poolwright.runtime.storage.keys import Namespace


class PageSource(Protocol):
    """What is asked of a pool. Every generated pool has it."""

    @property
    def format_tag(self) -> str:
        """Names the bytes of a page."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Ids of its layers, in order."""
        ...

    def page_objects(self, page: int) -> Sequence[tuple[str, int, int]]:
        """(name, host address, bytes) of each contiguous range of a page, in the order that the format tag
        stands for, once no transfer touches the page. Raises TransferError where a transfer failed."""
        ...


class PageStore:
    """The pages of one pool, each stored as one object: its ranges one behind the other.

    `name`: the pool's name in keys; in a group its name there, since two pools of a group may be of one
    kind. `model` and `shard` as in `Namespace`. A page must stay allocated, and no transfer may write it,
    until a call returns; after `get` only pages with status HIT may be used.
    """

    def __init__(self, storage: Storage, pool: PageSource, *, model: str, name: str, shard: str) -> None:
        if not isinstance(storage, Storage):
            raise ValueError(f"PageStore: storage: expected a storage such as FileStorage, got {storage!r}")
        if not hasattr(pool, "page_objects"):
            raise ValueError(f"PageStore: pool: expected a generated pool, got {pool!r}")
        self.storage, self.pool = storage, pool
        self.namespace = Namespace(model, name, pool.format_tag, tuple(pool.layers), shard)

    def put(self, hashes: Sequence[str], pages: Sequence[int]) -> list[Status]:
        """Store pages under these hashes. HIT: a page of this hash is there now."""
        return self._move(self.storage.put, hashes, pages)

    def get(self, hashes: Sequence[str], pages: Sequence[int]) -> list[Status]:
        """Fill pages with what is stored under these hashes. Raises ValueError for a page named twice."""
        self._check(pages)
        if len(set(pages)) != len(pages):
            raise ValueError(
                f"{self.namespace.pool}: get: a page stands twice in the list; each holds one hash"
            )
        return self._move(self.storage.get, hashes, pages)

    def exists(self, hashes: Sequence[str]) -> list[Status]:
        """HIT or MISS for each hash: a guess (see `Storage.exists`)."""
        return self.storage.exists([self.namespace.key(each) for each in hashes])

    def remove(self, hashes: Sequence[str]) -> list[Status]:
        """Forget each hash. HIT: it was there."""
        return self.storage.remove([self.namespace.key(each) for each in hashes])

    def _move(
        self, call: Callable[[Sequence[Item]], list[Status]], hashes: Sequence[str], pages: Sequence[int]
    ) -> list[Status]:
        self._check(pages)
        if len(hashes) != len(pages):
            counts = f"{len(hashes)} hashes and {len(pages)} pages"
            raise ValueError(f"{self.namespace.pool}: expected a page for each hash, got {counts}")
        items = [self._item(each, page) for each, page in zip(hashes, pages, strict=True)]
        done = iter(call([item for item in items if item is not None]))
        return [Status.ERROR if item is None else next(done) for item in items]

    def _check(self, pages: Sequence[int]) -> None:
        """Raises ValueError for what is no list of page numbers, as a tensor of ids is none."""
        if not isinstance(pages, Sequence) or isinstance(pages, str):
            step = "give page numbers, such as (ids[::page_size] // page_size).tolist()"
            got = type(pages).__name__
            raise ValueError(
                f"{self.namespace.pool}: pages: expected a list of page numbers, got {got}; {step}"
            )

    def _item(self, page_hash: str, page: int) -> Item | None:
        """None: a transfer into this page failed, so it has no bytes to store."""
        key = self.namespace.key(page_hash)
        try:
            objects = self.pool.page_objects(page)
        except TransferError:
            return None
        return Item(key, tuple((address, nbytes) for _, address, nbytes in objects))
