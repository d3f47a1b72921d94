"""The Mooncake adapter against a library that lies: no wrong byte is published, no write believed in vain."""

from __future__ import annotations

import ctypes
import itertools
import sys
from pathlib import Path

import pytest
import storage_kit as kit
from lying_engine import LyingEngine

from poolwright.runtime.errors import BackendUnavailable, PoolError
from poolwright.runtime.storage import MooncakeStorage, Status, engine
from poolwright.runtime.storage.cluster import Cluster
from poolwright.runtime.storage.engine import Waits
from poolwright.runtime.storage.envelope import SIZE
from poolwright.runtime.storage.scratch import PACK_BYTES, PACK_PARTS

HIT, MISS, REFUSED, ERROR = Status.HIT, Status.MISS, Status.REFUSED, Status.ERROR
PAGE = 4096 + 7
WAITS = Waits(1.0, 2.0)
CUTS = pytest.mark.parametrize(
    ("parts", "nbytes"),
    [(1, PAGE), (160, PAGE), (1, PACK_BYTES), (PACK_PARTS, PACK_BYTES + 1), (PACK_PARTS + 1, PACK_BYTES)],
)
"""Pages copied behind their envelopes, and pages that move by address."""


def storage_of(lying: LyingEngine, protocol: str = "tcp", workers: int = 1) -> MooncakeStorage:
    return MooncakeStorage(lying, WAITS, protocol=protocol, workers=workers, clock=lambda: lying.now)


@CUTS
def test_what_was_put_is_got(parts: int, nbytes: int) -> None:
    with storage_of(LyingEngine(), workers=2) as storage:
        traffic = kit.Traffic.of("k", 20, nbytes)
        assert storage.exists(traffic.keys) == [MISS] * 20
        assert storage.get(traffic.incoming(parts)) == [MISS] * 20
        assert storage.put(traffic.outgoing(parts)) == [HIT] * 20
        assert storage.exists(traffic.keys) == [HIT] * 20
        assert storage.get(traffic.incoming(parts)) == [HIT] * 20
        assert all(traffic.right(at) for at in range(20)) and traffic.unharmed()
        assert storage.remove(traffic.keys[:3]) == [HIT] * 3
        assert storage.remove(traffic.keys[:3]) == [MISS] * 3


def test_a_large_page_moves_by_address_and_an_object_is_envelope_and_page() -> None:
    lying = LyingEngine()
    traffic = kit.Traffic.of("k", 1, PACK_BYTES)
    with storage_of(lying) as storage:
        (item,) = traffic.outgoing(2)
        storage.put([item])
        assert lying.seen[-1][1:] == list(item.parts), "the library was given the page itself"
        (item,) = traffic.incoming(2)
        storage.get([item])
        assert lying.seen[-1][1:] == list(item.parts)
    assert lying.objects["k/0"][SIZE:] == traffic.written[0]


@CUTS
@pytest.mark.parametrize(
    "lie",
    ["leaves the buffers", "stops half way", "delivers another object", "cuts"]
    + [f"flips {at}" for at in (0, 8, 16, 48, 60, SIZE, SIZE + 99, -1)],
)
def test_what_is_not_right_is_a_miss_and_is_dropped(lie: str, parts: int, nbytes: int) -> None:
    lying = LyingEngine()
    traffic = kit.Traffic.of("k", 2, nbytes)
    with storage_of(lying) as writer, storage_of(lying) as reader:
        assert writer.put(traffic.outgoing(parts)) == [HIT] * 2
        lying.lie = lie
        assert reader.get(traffic.incoming(parts)) == [MISS] * 2
        assert lying.objects == {}, "what is stored first stays: it must not be in the way"
        lying.lie = ""
        assert writer.put(traffic.outgoing(parts)) == [HIT] * 2
        assert reader.get(traffic.incoming(parts)) == [HIT] * 2
        assert traffic.right(0) and traffic.right(1)


def test_an_envelope_of_an_earlier_call_cannot_pass_for_this_one() -> None:
    """The same key again, the page's memory still right, and the library fills nothing: not a hit."""
    lying = LyingEngine()
    traffic = kit.Traffic.of("k", 1, PAGE)
    with storage_of(lying) as storage:
        storage.put(traffic.outgoing())
        items = traffic.incoming()
        assert storage.get(items) == [HIT]
        lying.lie = "leaves the buffers"
        assert storage.get(items) == [MISS]


@CUTS
def test_a_failed_get_is_an_error_whatever_it_wrote(parts: int, nbytes: int) -> None:
    lying = LyingEngine(lie="fails when half is written")
    traffic = kit.Traffic.of("k", 2, nbytes)
    with storage_of(lying) as storage:
        storage.put(traffic.outgoing(parts))
        assert storage.get(traffic.incoming(parts)) == [ERROR] * 2
        assert set(lying.objects) == set(traffic.keys), "a lease that ran out says nothing of the object"


@CUTS
def test_equal_keys_in_a_batch_all_get_the_bytes(parts: int, nbytes: int) -> None:
    lying = LyingEngine()
    traffic, target = kit.Traffic.of("k", 2, nbytes), kit.Memory(5, nbytes)
    with storage_of(lying) as storage:
        storage.put(traffic.outgoing(parts))
        names = ["k/0", "k/1", "k/0", "k/0", "k/1"]
        assert storage.get(target.items(names, parts=parts)) == [HIT] * 5
    assert [target[at] for at in range(5)] == [kit.content(name, nbytes) for name in names]


def test_a_put_that_stored_nothing_is_refused() -> None:
    lying = LyingEngine(lie="stores nothing")
    traffic = kit.Traffic.of("k", 2, PAGE)
    with storage_of(lying) as storage:
        assert storage.put(traffic.outgoing()) == [REFUSED] * 2
        lying.lie = ""
        assert storage.put(traffic.outgoing()) == [HIT] * 2
        assert storage.get(traffic.incoming()) == [HIT] * 2
    assert traffic.unharmed()


@pytest.mark.parametrize(
    ("code", "put", "get", "exists", "remove"),
    [
        (-200, REFUSED, ERROR, ERROR, ERROR),
        (-600, ERROR, ERROR, ERROR, ERROR),
        (-703, ERROR, MISS, ERROR, ERROR),
        (-704, ERROR, MISS, ERROR, MISS),
        (-706, ERROR, ERROR, ERROR, ERROR),
        (-707, ERROR, ERROR, ERROR, ERROR),
        (-800, ERROR, ERROR, ERROR, ERROR),
        (-900, ERROR, ERROR, ERROR, ERROR),
        (-901, ERROR, ERROR, ERROR, ERROR),
        (-12345, ERROR, ERROR, ERROR, ERROR),
    ],
)
def test_each_code_is_a_status(code: int, put: Status, get: Status, exists: Status, remove: Status) -> None:
    traffic = kit.Traffic.of("k", 1, PAGE)
    calls = {
        "put": lambda s: s.put(traffic.outgoing()),
        "get": lambda s: s.get(traffic.incoming()),
        "exists": lambda s: s.exists(traffic.keys),
        "remove": lambda s: s.remove(traffic.keys),
    }
    for name, status in (("put", put), ("get", get), ("exists", exists), ("remove", remove)):
        lying = LyingEngine(lie=str(code))
        with storage_of(lying) as storage:
            assert calls[name](storage) == [status], name
        assert [call for call, _ in lying.calls] == [name], "no code by itself has an object dropped"
    assert traffic.unharmed()


@pytest.mark.parametrize("lie", ["raises", "too few codes"])
def test_a_library_that_breaks_is_an_error_of_every_key(lie: str) -> None:
    traffic = kit.Traffic.of("k", 2, PAGE)
    with storage_of(LyingEngine(lie=lie)) as storage:
        for _ in range(2):  # and leaves nothing behind that would keep the next call waiting
            assert storage.put(traffic.outgoing()) == [ERROR] * 2
            assert storage.get(traffic.incoming()) == [ERROR] * 2
            assert storage.exists(traffic.keys) == [ERROR] * 2
            assert storage.remove(traffic.keys) == [ERROR] * 2


# ---- time


@pytest.mark.parametrize(("lie", "seconds"), [("-900", 0.0), ("-901", 2.0), ("-800", 1.0), ("raises", 0.0)])
def test_after_a_failure_that_costs_time_the_library_is_left_alone(lie: str, seconds: float) -> None:
    lying = LyingEngine()
    traffic = kit.Traffic.of("k", 40, PAGE)
    with storage_of(lying) as storage:
        assert storage.put(traffic.outgoing()) == [HIT] * 40
        lying.lie, lying.seconds, lying.calls = lie, seconds, []
        assert storage.get(traffic.incoming()) == [ERROR] * 40
        assert len(lying.calls) == 1, "the first chunk met it, the others were spared"
        for call in (storage.exists, storage.remove):
            assert call(traffic.keys) == [ERROR] * 40
        assert storage.put(traffic.outgoing()) == [ERROR] * 40
        assert len(lying.calls) == 1
        lying.lie, lying.seconds = "", 0.0
        lying.now += 4.9
        assert storage.get(traffic.incoming()) == [ERROR] * 40
        lying.now += 0.2
        assert storage.get(traffic.incoming()) == [HIT] * 40
        assert all(traffic.right(at) for at in range(40))
    assert traffic.unharmed()


def test_a_dead_node_s_keys_fail_at_once_and_others_go_on() -> None:
    lying = LyingEngine(lie="-800")
    traffic = kit.Traffic.of("k", 24, PAGE)
    with storage_of(lying) as storage:
        assert storage.get(traffic.incoming()) == [ERROR] * 24
        assert len(lying.calls) == 3


def test_the_bound_says_what_it_is_made_of() -> None:
    with storage_of(LyingEngine(), workers=2) as storage:
        assert storage.bound_s == 2 * 8 * 1.0 + 3 * 4.5


# ---- memory


def test_over_tcp_nothing_is_registered() -> None:
    lying = LyingEngine()
    traffic = kit.Traffic.of("k", 3, PAGE)
    with storage_of(lying) as storage:
        storage.register(traffic.read.base, 3 * PAGE)
        storage.put(traffic.outgoing(160))
        storage.get(traffic.incoming(160))
        assert lying.registered == []


def test_over_rdma_everything_that_moves_is_registered_once() -> None:
    lying = LyingEngine()
    traffic = kit.Traffic.of("k", 3, PAGE)
    with storage_of(lying, "rdma") as storage:
        for _ in range(2):
            storage.register(traffic.read.base, 3 * PAGE)
        with pytest.raises(PoolError, match="cannot be registered: code -600"):
            storage.register(traffic.read.base, 2 * PAGE)
        storage.put(traffic.outgoing(1)[:1])
        storage.put(traffic.outgoing(160))  # needs more memory beside the pages than the call before
        storage.get(traffic.incoming(160))
        assert lying.registered[0] == (traffic.read.base, 3 * PAGE)
        assert len(lying.registered) == 2, "the smaller block was given back"
    assert lying.registered == [] and lying.closed == 1


def test_memory_beside_the_pages_is_aligned_and_apart() -> None:
    from poolwright.runtime.storage.scratch import Scratch

    scratch = Scratch(lambda *_: None, lambda *_: None)
    memory, large = kit.Memory(2, PAGE), kit.Memory(1, PACK_BYTES)
    places = scratch.place([memory.item("a", 0, 160), large.item("b", 0), memory.item("c", 1, 160)])
    assert [place.packed for place in places] == [True, False, True]
    ranges = [each for place in places for each in place.ranges if not place.item.parts[0] == each]
    spans = sorted((address, address + nbytes) for address, nbytes in ranges)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(place.head % 64 == 0 for place in places)
    for address, nbytes in ranges:
        ctypes.memset(address, 1, nbytes)
    scratch.free()
    scratch.free()


# ---- connecting


def test_a_master_that_is_not_there_is_named_at_once() -> None:
    from poolwright.runtime.storage.cluster import free_port

    with pytest.raises(
        BackendUnavailable, match=r"Mooncake master 127.0.0.1:\d+ is not available.*mooncake-up"
    ):
        MooncakeStorage.connect(f"127.0.0.1:{free_port()}")


@pytest.mark.parametrize("bad", ["", "localhost", ":50051", "127.0.0.1:", "127.0.0.1:port", "127.0.0.1:-1"])
def test_addresses_that_are_none_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="master: expected host:port such as"):
        MooncakeStorage.connect(bad)


def test_unknown_protocols_are_refused() -> None:
    with pytest.raises(ValueError, match="protocol: expected tcp or rdma, got 'udp'"):
        MooncakeStorage.connect("127.0.0.1:1", protocol="udp")


NAMES = ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_RPC_TIMEOUT_MS")


def test_waits_are_shortened_where_the_environment_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # as good as unset
    assert engine.shorten() == Waits(1, 2)
    for name, value in zip(NAMES, ("3", "4", "5000"), strict=True):
        monkeypatch.setenv(name, value)
    assert engine.shorten() == Waits(4, 5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", ["0", "-1", "1.5", "soon"])
def test_waits_that_are_none_are_refused(name: str, bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in NAMES:
        monkeypatch.setenv(each, "1")
    monkeypatch.setenv(name, bad)
    with pytest.raises(ValueError, match=f"{name}: expected an integer of at least 1, got {bad!r}"):
        engine.shorten()


LOADER = (
    "mooncake_master: error while loading shared libraries: libibverbs.so.1: cannot open shared object file"
)


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        (LOADER, BackendUnavailable, "libibverbs.so.1: .*; to mend it: apt-get install libibverbs1$"),
        (
            "bind: port in use",
            PoolError,
            r"ended with 127; it said last: bind: port in use; its log is .*\.log$",
        ),
        ("", PoolError, "ended with 127; it said last: nothing; its log is "),
    ],
)
def test_a_server_that_ends_says_why(
    said: str, kind: type[PoolError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("")
    (tmp_path / "mooncake" / "cli.py").write_text(
        f"import sys; print({said!r}, file=sys.stderr); sys.exit(127)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "mooncake", raising=False)
    with Cluster(tmp_path / "servers") as servers, pytest.raises(PoolError, match=message) as caught:
        servers.start_master()
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("error", "command"),
    [
        ("No module named 'mooncake'", r"pip install 'poolwright\[mooncake\]'"),
        ("libibverbs.so.1: cannot open shared object file", "apt-get install libibverbs1"),
        ("libcurl.so.4: cannot open shared object file", "apt-get install libcurl4"),
    ],
)
def test_a_library_that_is_missing_says_how_to_get_it(
    error: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("")
    (tmp_path / "mooncake" / "store.py").write_text(f"raise ImportError({error!r})")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mooncake", "mooncake.store"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(engine, "_ask", lambda master: None)
    with pytest.raises(
        BackendUnavailable, match=f"mooncake.store is not available: .*; to mend it: {command}"
    ):
        engine.connect("127.0.0.1:1", "127.0.0.1", "tcp", "")
