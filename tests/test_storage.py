"""Storage without a server: keys, envelopes, what all backends do alike, pools of every kind, prefixes."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import storage_kit as kit
from conftest import ROOT

from poolwright.runtime.errors import PoolError, TransferError, WrongProcess
from poolwright.runtime.storage import (
    FileStorage,
    Item,
    Namespace,
    PageStore,
    Status,
    Storage,
    token_hashes,
    usable_prefix,
)
from poolwright.runtime.storage.base import KEYS
from poolwright.runtime.storage.breaker import Breaker
from poolwright.runtime.storage.envelope import BLOCK, IOV_MAX, SIZE, blocks, checksum, envelope

HIT, MISS, REFUSED, ERROR = Status.HIT, Status.MISS, Status.REFUSED, Status.ERROR
SPACE = Namespace("org/model@rev", "kv", "00ff", (0, 1, 2, 5), "tp3of8")
HASH = "ab" * 32


def test_importing_storage_loads_no_backend_and_the_core_does_not_know_it() -> None:
    script = (
        "import sys, poolwright.runtime.storage; before = set(sys.modules);"
        "assert not [name for name in before if name.startswith(('mooncake', 'torch'))];"
        "import threading; assert threading.active_count() == 1"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / ".src"), *sys.path])}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    core = [path for path in (ROOT / "runtime").glob("*.py") if path.name != "__main__.py"]
    core += (ROOT / "runtime" / "driver").glob("*.py")
    assert len(core) > 20
    assert not [path.name for path in core if "runtime.storage" in path.read_text(encoding="utf-8")]


# ---- keys


def test_a_key_says_everything_that_decides_the_bytes() -> None:
    assert SPACE.key(HASH) == f"pw1/org%2Fmodel%40rev/kv/00ff/0-2.5/tp3of8/{HASH}"


@pytest.mark.parametrize(
    "change",
    [
        {"model": "org/model@rev2"},
        {"pool": "state"},
        {"format_tag": "00fe"},
        {"layers": (0, 1, 2, 6)},
        {"layers": (0, 2, 1, 5)},
        {"layers": ()},
        {"shard": "tp2of8"},
        {"shard": "all"},
    ],
)
def test_each_fact_changes_the_key(change: dict[str, object]) -> None:
    assert dataclasses.replace(SPACE, **change).key(HASH) != SPACE.key(HASH)


def test_fields_cannot_pass_for_each_other() -> None:
    left = dataclasses.replace(SPACE, model="a/b", pool="c")
    right = dataclasses.replace(SPACE, model="a", pool="b/c")
    assert left.key(HASH) != right.key(HASH)
    assert "/".join(["a%2Fb", "c"]) in left.key(HASH)


@pytest.mark.parametrize("field", ["model", "pool", "format_tag", "shard"])
@pytest.mark.parametrize("value", ["", None, 3])
def test_an_empty_field_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field}: expected text that is not empty, got {value!r}"):
        dataclasses.replace(SPACE, **{field: value})


@pytest.mark.parametrize("bad", ["", "ab", "AB" * 32, "ab" * 65, "../" * 12, "g" * 64])
def test_what_is_no_hash_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="page hash: expected 16 to 128 characters of 0-9a-f"):
        SPACE.key(bad)


def test_hashes_chain_the_tokens() -> None:
    tokens = list(range(100, 164))
    whole = token_hashes(tokens, 16)
    assert len(whole) == len(set(whole)) == 4
    assert token_hashes(tokens[:47], 16) == whole[:2], "a tail that fills no page has no hash"
    for changed in range(64):
        other = token_hashes([*tokens[:changed], 7, *tokens[changed + 1 :]], 16)
        same = [a == b for a, b in zip(whole, other, strict=True)]
        assert same == [page < changed // 16 for page in range(4)], (
            "a token changes its page and all after it"
        )
    assert not set(token_hashes(tokens, 16, seed="adapter")) & set(whole)
    assert not set(token_hashes(tokens, 8)[:3]) & set(whole)
    assert token_hashes([], 16) == []


def test_hashes_are_the_same_in_every_release() -> None:
    """Pages in storage are found again only while this holds."""
    assert token_hashes([1, 2, 3, 4], 2) == [
        "5efdc1592c8f693fc40fbb355881695b8b77676722c65048a233af3fc4231b1c",
        "caa5254629542b94dd4e47b19ed8e6efb5671a0fc4cab9c8a9337b21f134a885",
    ]


@pytest.mark.parametrize("bad", [[-1], [2**63], [1.5], ["a"], [None]])
def test_tokens_that_are_none_are_refused(bad: list[object]) -> None:
    with pytest.raises(ValueError, match="tokens: expected integers of 0 to 2"):
        token_hashes(bad, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0, -1, 1.0, True, None])
def test_page_sizes_that_are_none_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="page_size: expected an integer of at least 1"):
        token_hashes([1, 2], bad)  # type: ignore[arg-type]


# ---- envelopes


def test_an_envelope_tells_key_size_and_bytes() -> None:
    def of(key: str, *parts: bytes) -> bytes:
        crc = checksum(map(memoryview, parts))
        return envelope(key, sum(map(len, parts)), crc)

    whole = of("k", b"abc", b"defg")
    assert len(whole) == SIZE
    assert whole == of("k", b"abcdefg"), "how the bytes are cut does not matter"
    assert checksum([memoryview(b"defg")], checksum([memoryview(b"abc")])) == checksum(
        [memoryview(b"abcdefg")]
    )
    others = [of("l", b"abcdefg"), of("k", b"abc"), of("k"), of("k", b"defg", b"abc"), of("k", b"abcdefg\0")]
    for at, bit in itertools.product(range(7), range(8)):
        flipped = bytearray(b"abcdefg")
        flipped[at] ^= 1 << bit
        others.append(of("k", bytes(flipped)))
    assert whole not in others and len(set(others)) == len(others)


@pytest.mark.parametrize(
    "sizes", [[], [1], [BLOCK], [BLOCK + 1], [3 * BLOCK - 1, 2], [7] * 3000, [BLOCK, 1] * 3]
)
def test_blocks_are_the_parts_in_order_and_small_enough(sizes: list[int]) -> None:
    content = kit.content("blocks", sum(sizes))
    ends = list(itertools.accumulate(sizes, initial=0))
    found = list(blocks(memoryview(content)[a:b] for a, b in itertools.pairwise(ends)))
    assert b"".join(piece for block in found for piece in block) == content
    assert all(0 < sum(piece.nbytes for piece in block) <= BLOCK for block in found)
    assert all(len(block) <= IOV_MAX and all(piece.nbytes for piece in block) for block in found)


# ---- what all backends do alike


class Recording(Storage):
    """A backend that remembers which chunks it was asked for; a get copies nothing."""

    def __init__(self, answer: Status = HIT, fails: bool = False, **options: int) -> None:
        super().__init__("recording", options.get("chunk", 3), options.get("workers", 1))
        self.chunks: list[list[str]] = []
        self.answer, self.fails, self.closed = answer, fails, 0

    def _note(self, keys: Sequence[str]) -> list[Status]:
        self.chunks.append(list(keys))
        if self.fails and len(self.chunks) == 2:
            raise RuntimeError("the second chunk")
        return [self.answer] * len(keys)

    def _put(self, items: Sequence[Item]) -> list[Status]:
        return self._note([item.key for item in items])

    _get = _put

    def _exists(self, keys: Sequence[str]) -> list[Status]:
        return self._note(keys)

    _remove = _exists

    def _close(self) -> None:
        self.closed += 1


def calls(storage: Storage, keys: list[str], memory: kit.Memory) -> list[list[Status]]:
    items = memory.items(keys)
    return [storage.put(items), storage.get(items), storage.exists(keys), storage.remove(keys)]


def test_batches_come_in_chunks_and_statuses_in_order() -> None:
    storage, memory = Recording(), kit.Memory(8, 16)
    keys = list("abcdefgh")
    assert calls(storage, keys, memory) == [[HIT] * 8] * 4
    assert storage.chunks == [list("abc"), list("def"), list("gh")] * 2 + [keys] * 2
    storage.chunks.clear()
    many = [str(at) for at in range(2 * KEYS + 1)]
    assert storage.exists(many) == [HIT] * len(many)
    assert [len(chunk) for chunk in storage.chunks] == [KEYS, KEYS, 1]


def test_a_chunk_that_raises_costs_only_its_own_keys() -> None:
    storage, memory = Recording(fails=True), kit.Memory(8, 16)
    assert storage.put(memory.items(list("abcdefgh"))) == [HIT] * 3 + [ERROR] * 3 + [HIT] * 2


def test_an_empty_batch_asks_nobody() -> None:
    storage = Recording()
    assert calls(storage, [], kit.Memory(1, 16)) == [[]] * 4
    assert storage.chunks == []


def test_equal_keys_are_asked_once_and_answered_each() -> None:
    storage, memory = Recording(), kit.Memory(4, 16)
    assert calls(storage, ["a", "b", "a", "a"], memory) == [[HIT] * 4] * 4
    assert storage.chunks == [["a", "b"]] * 4


@pytest.mark.parametrize("answer", list(Status))
def test_equal_keys_of_a_get_all_get_the_bytes_if_there_are_any(answer: Status) -> None:
    storage, memory = Recording(answer), kit.Memory(3, 16)
    for page in range(3):
        memory[page] = bytes([page]) * 16
    assert (
        storage.get([memory.item("a", 0, 3), memory.item("b", 1, 3), memory.item("a", 2, 3)]) == [answer] * 3
    )
    assert memory[2] == (b"\0" * 16 if answer is HIT else b"\2" * 16)


def test_one_destination_for_two_keys_is_refused() -> None:
    storage, memory = Recording(), kit.Memory(2, 16)
    with pytest.raises(ValueError, match="two items have the same destination"):
        storage.get([memory.item("a", 0), memory.item("b", 0)])
    assert storage.put([memory.item("a", 0), memory.item("b", 0)]) == [HIT, HIT]


def test_equal_keys_of_unequal_sizes_are_refused() -> None:
    storage, memory = Recording(), kit.Memory(2, 16)
    for call in (storage.put, storage.get):
        with pytest.raises(ValueError, match="a: given twice in one call, with other sizes"):
            call([memory.item("a", 0), memory.item("a", 1, 2)])
        with pytest.raises(ValueError, match="a: every part needs at least 1 byte"):
            call([Item("a", ((memory.base, 0),))])
    assert storage.chunks == []


def test_after_close_every_call_says_so() -> None:
    storage, memory = Recording(), kit.Memory(1, 16)
    with storage:
        pass
    storage.close()
    assert storage.closed == 1
    item = memory.item("a", 0)
    for call, given in (
        (storage.put, item),
        (storage.get, item),
        (storage.exists, "a"),
        (storage.remove, "a"),
    ):
        with pytest.raises(PoolError, match="storage recording is closed: open a new one"):
            call([given])  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_after_a_fork_the_child_is_told() -> None:
    storage = Recording()
    storage.exists(["a"])
    pid = os.fork()
    if pid == 0:
        try:
            storage.exists(["a"])
        except WrongProcess:
            storage.close()
            os._exit(storage.closed)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_impossible_chunks_and_workers_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="recording: chunk: expected an integer of at least 1"):
        Recording(chunk=bad)
    with pytest.raises(ValueError, match="recording: workers: expected an integer of at least 1"):
        Recording(workers=bad)


# ---- the breaker


def test_the_breaker_rests_then_lets_one_try() -> None:
    now = [0.0]
    breaker = Breaker(5.0, lambda: now[0])
    assert breaker.enter() and breaker.enter()
    breaker.leave(failed=False)
    breaker.leave(failed=True)
    now[0] = 4.9
    assert not breaker.enter()
    now[0] = 5.0
    assert breaker.enter() and not breaker.enter(), "one tries, the others are told at once"
    breaker.leave(failed=True)
    now[0] = 9.9
    assert not breaker.enter()
    now[0] = 10.0
    assert breaker.enter()
    breaker.leave(failed=False)
    assert breaker.enter() and breaker.enter()


def test_a_call_from_before_does_not_close_the_breaker() -> None:
    now = [0.0]
    breaker = Breaker(5.0, lambda: now[0])
    assert breaker.enter() and breaker.enter()
    breaker.leave(failed=True)
    breaker.leave(failed=False)
    assert not breaker.enter()
    now[0] = 5.0
    assert breaker.enter()
    other = threading.Thread(target=breaker.leave, args=(False,))
    other.start()
    other.join()
    assert not breaker.enter(), "the one that tries has not come back"


# ---- prefixes


@pytest.mark.parametrize(
    ("kv", "state", "pages"),
    [
        ("", "", 0),
        ("hhhh", "hhhh", 4),
        ("hhhh", "mhmm", 2),
        ("hhhh", "mmmm", 0),
        ("hhmh", "mmmh", 0),
        ("hhmh", "hmmh", 1),
        ("mhhh", "hhhh", 0),
        ("hreh", "hhhh", 1),
    ],
)
def test_a_prefix_needs_every_page_and_the_last_state(kv: str, state: str, pages: int) -> None:
    named = {"h": HIT, "m": MISS, "r": REFUSED, "e": ERROR}
    kvs, states = [named[c] for c in kv], [named[c] for c in state]
    assert usable_prefix({"kv": kvs}, {"state": states}) == pages
    assert usable_prefix({"kv": kvs, "indexer": kvs}, {"state": states}) == pages
    run = next((at for at, status in enumerate(kvs) if status is not HIT), len(kvs))
    assert usable_prefix({"kv": kvs}) == run


def test_statuses_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one a page for every pool, got {'kv': 1, 'state': 2}"):
        usable_prefix({"kv": [HIT]}, {"state": [HIT, HIT]})


# ---- pages of pools


class Broken:
    """A pool of which page 1 was not written."""

    format_tag, layers = "00ff", (0,)

    def __init__(self, memory: kit.Memory) -> None:
        self.memory = memory

    def page_objects(self, page: int) -> Sequence[tuple[str, int, int]]:
        if page == 1:
            raise TransferError("broken", "write-back", [1], "a test")
        return [("page", self.memory.base + page * self.memory.nbytes, self.memory.nbytes)]


def test_a_page_that_was_never_written_is_not_stored(tmp_path: Path) -> None:
    memory = kit.Memory(3, 64)
    hashes = token_hashes(range(3), 1)
    with FileStorage(tmp_path, 1 << 20) as files:
        store = PageStore(files, Broken(memory), model="m", name="kv", shard="all")
        assert store.put(hashes, [0, 1, 2]) == [HIT, ERROR, HIT]
        assert store.exists(hashes) == [HIT, MISS, HIT]
        assert store.remove(hashes) == [HIT, MISS, HIT]


def test_pages_and_hashes_go_in_pairs(tmp_path: Path) -> None:
    hashes = token_hashes(range(2), 1)
    with FileStorage(tmp_path, 1 << 20) as files:
        store = PageStore(files, Broken(kit.Memory(3, 64)), model="m", name="kv", shard="all")
        with pytest.raises(ValueError, match="kv: expected a page for each hash, got 2 hashes and 1 pages"):
            store.put(hashes, [0])
        with pytest.raises(ValueError, match="kv: get: a page stands twice in the list"):
            store.get(hashes, [2, 2])
