"""A stand-in for Mooncake's client library. Told so, it does what the real one was seen doing, and worse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from poolwright.runtime.storage.envelope import view


@dataclass
class LyingEngine:
    """`objects` by key. `lie`: what the next calls do wrong. `now`: its clock; `seconds`: what a call takes.

    `seen`: the ranges of each object that moved, in order.
    """

    lie: str = ""
    now: float = 0.0
    objects: dict[str, bytes] = field(default_factory=dict)
    calls: list[tuple[str, list[str]]] = field(default_factory=list)
    seen: list[list[tuple[int, int]]] = field(default_factory=list)
    registered: list[tuple[int, int]] = field(default_factory=list)
    closed: int = 0
    seconds: float = 0.0

    def _all(self, call: str, keys: list[str], answer: Callable[[str, int], int]) -> list[int]:
        self.calls.append((call, keys))
        self.now += self.seconds
        if self.lie == "raises":
            raise RuntimeError("a failure of the library")
        if self.lie == "too few codes":
            return [0] * (len(keys) - 1)
        if self.lie.startswith("-"):
            return [int(self.lie)] * len(keys)
        return [answer(key, at) for at, key in enumerate(keys)]

    def batch_put_from_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        def put(key: str, at: int) -> int:
            if self.lie == "stores nothing":
                return 0
            ranges = list(zip(addresses[at], sizes[at], strict=True))
            self.seen.append(ranges)
            content = b"".join(bytes(view(address, nbytes)) for address, nbytes in ranges)
            self.objects.setdefault(key, content)  # what is stored first stays
            return 0

        return self._all("put", keys, put)

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        def get(key: str, at: int) -> int:
            if key not in self.objects:
                return -704
            content = self._content(key)
            ranges = list(zip(addresses[at], sizes[at], strict=True))
            self.seen.append(ranges)
            if sum(sizes[at]) < len(content):
                return -600
            if key in keys[at + 1 :]:  # of equal keys only the last buffer is filled
                return len(content)
            if self.lie == "leaves the buffers":
                return len(content)
            if self.lie == "stops half way":
                content = content[: len(content) // 2]
            for address, nbytes in ranges:
                part, content = content[:nbytes], content[nbytes:]
                if part:
                    view(address, len(part))[:] = part
            if self.lie == "fails when half is written":
                return -707
            return len(self._content(key))

        return self._all("get", keys, get)

    def _content(self, key: str) -> bytes:
        """What is delivered for a key."""
        content = self.objects[key]
        if self.lie == "delivers another object":
            return next(other for name, other in self.objects.items() if name != key)
        if self.lie == "cuts":
            return content[:-1]
        if self.lie.startswith("flips "):
            at = int(self.lie.removeprefix("flips ")) % len(content)
            return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        return content

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return self._all("exists", keys, lambda key, _: int(key in self.objects))

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        def remove(key: str, _: int) -> int:
            if not force:
                return -706
            return -704 if self.objects.pop(key, None) is None else 0

        return self._all("remove", keys, remove)

    def register_buffer(self, address: int, nbytes: int) -> int:
        if any(start == address for start, _ in self.registered):
            return -600
        self.registered.append((address, nbytes))
        return 0

    def unregister_buffer(self, address: int) -> int:
        self.registered = [each for each in self.registered if each[0] != address]
        return 0

    def close(self) -> int:
        self.closed += 1
        return 0
