"""Mooncake Store itself, on this machine's loopback: a master, nodes, writers and readers that die or hang.

Whatever happens: no wrong byte is published, no call takes longer than the bound that the storage states,
no page of the writer is harmed, and when the servers are back, so is the storage.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import storage_kit as kit
from conftest import ROOT
from storage_pools import goes_through, kinds

from poolwright.runtime.errors import BackendUnavailable
from poolwright.runtime.storage import MooncakeStorage, Status, engine
from poolwright.runtime.storage import cluster as clusters
from poolwright.runtime.storage.cluster import Cluster
from poolwright.runtime.storage.envelope import SIZE

pytest.importorskip(
    "mooncake.store", reason="needs poolwright[mooncake] and libibverbs1", exc_type=ImportError
)

HIT, MISS, REFUSED, ERROR = Status.HIT, Status.MISS, Status.REFUSED, Status.ERROR
PAGE = 256 << 10
NODE = 64 << 20
DISCARD_S = 3


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A master and a node. Everything ends with the test, also when it fails."""
    for name in ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_RPC_TIMEOUT_MS"):
        monkeypatch.setenv(name, "1")  # remembered, so that what a client sets goes with the test
        monkeypatch.delenv(name)
    options = ("--client_ttl=2", f"--put_start_discard_timeout_sec={DISCARD_S}")
    with Cluster(tmp_path / "servers", options=options) as servers:
        servers.start_master()
        servers.start_node(NODE)
        yield servers


def connect(cluster: Cluster, **options: int) -> MooncakeStorage:
    return MooncakeStorage.connect(cluster.address, rest_s=0.2, **options)


@pytest.fixture
def storage(cluster: Cluster) -> Iterator[MooncakeStorage]:
    with connect(cluster, chunk=4, workers=1) as made:
        yield made


def master(cluster: Cluster) -> subprocess.Popen[bytes]:
    return cluster.processes[0]


def node(cluster: Cluster) -> subprocess.Popen[bytes]:
    return cluster.processes[1]


def got(storage: MooncakeStorage, traffic: kit.Traffic, parts: int = 1) -> list[Status]:
    """A get within the bound, after which every hit has the right bytes."""
    with kit.bounded(storage):
        statuses = storage.get(traffic.incoming(parts))
    assert all(traffic.right(at) for at, status in enumerate(statuses) if status is HIT)
    return statuses


def put(storage: MooncakeStorage, traffic: kit.Traffic, parts: int = 1) -> list[Status]:
    """A put within the bound, which leaves the writer's pages as they are."""
    with kit.bounded(storage):
        statuses = storage.put(traffic.outgoing(parts))
    assert traffic.unharmed()
    return statuses


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, "this should have become true"
        time.sleep(0.1)


def comes_back(storage: MooncakeStorage, name: str) -> None:
    """New pages can be stored and read again."""
    traffic = kit.Traffic.of(name, 4, PAGE)
    eventually(lambda: put(storage, traffic) == [HIT] * 4)
    eventually(lambda: got(storage, traffic) == [HIT] * 4)


# ---- nothing fails


def test_what_one_client_puts_another_gets(cluster: Cluster) -> None:
    with connect(cluster) as writer, connect(cluster) as reader:
        for nbytes, parts in itertools.product((200, 4096 + 7, 1 << 20), (1, 2, 16, 17, 160)):
            traffic = kit.Traffic.of(f"{nbytes} in {parts}", 10, nbytes)
            assert got(reader, traffic, parts) == [MISS] * 10
            assert put(writer, traffic, parts) == [HIT] * 10
            assert put(writer, traffic, parts) == [HIT] * 10
            assert reader.exists(traffic.keys) == [HIT] * 10
            assert got(reader, traffic, parts) == [HIT] * 10
            assert reader.remove(traffic.keys[:5]) == [HIT] * 5, "also within the lease of the read"
            assert writer.remove(traffic.keys[:5]) == [MISS] * 5
            assert got(reader, traffic, parts) == [MISS] * 5 + [HIT] * 5
            assert writer.remove(traffic.keys[5:]) == [HIT] * 5


def test_pages_of_every_pool_go_through(storage: MooncakeStorage) -> None:
    for kind in kinds():
        goes_through(storage, *kind)


def test_equal_keys_in_a_batch_all_get_their_bytes(storage: MooncakeStorage) -> None:
    traffic, target = kit.Traffic.of("k", 2, PAGE), kit.Memory(6, PAGE)
    names = ["k/0", "k/1", "k/0", "k/1", "k/0", "k/0"]
    assert storage.put([traffic.outgoing()[int(name[-1])] for name in names]) == [HIT] * 6
    assert storage.get(target.items(names)) == [HIT] * 6
    assert [target[at] for at in range(6)] == [kit.content(name, PAGE) for name in names]


def test_two_writers_of_one_key(cluster: Cluster) -> None:
    traffic = kit.Traffic.of("k", 64, PAGE)
    with connect(cluster) as left, connect(cluster) as right:
        for _ in range(3):
            writers = [threading.Thread(target=put, args=(each, traffic)) for each in (left, right)]
            for writer in writers:
                writer.start()
            while any(writer.is_alive() for writer in writers):
                assert set(got(left, traffic)) <= {HIT, MISS}
            eventually(lambda: put(left, traffic) == [HIT] * 64)
            assert got(right, traffic) == [HIT] * 64
            left.remove(traffic.keys)


# ---- objects that are not what they should be


def test_objects_cut_short_or_damaged_are_never_published(cluster: Cluster, storage: MooncakeStorage) -> None:
    traffic = kit.Traffic.of("k", 6, PAGE)
    assert put(storage, traffic) == [HIT] * 6
    with closing(engine.connect(cluster.address, "127.0.0.1", "tcp", "")) as raw:
        objects = [raw.get(key) for key in traffic.keys]  # type: ignore[attr-defined]
        assert [len(each) for each in objects] == [PAGE + SIZE] * 6
        flipped = bytearray(objects[1])
        flipped[SIZE + PAGE // 2] ^= 1
        bad = [objects[0][:-1], bytes(flipped), objects[3], objects[3] + b"\0", b"x"]
        assert raw.batch_remove(traffic.keys[:5], True) == [0] * 5
        for key, content in zip(traffic.keys, bad, strict=False):
            assert raw.put(key, content) == 0  # type: ignore[attr-defined]
    statuses = [storage.get([item])[0] for item in traffic.incoming()]
    assert HIT not in statuses[:5] and statuses[5] is HIT and traffic.right(5)
    assert statuses[1:3] == [MISS, MISS], "of the right size, but not the right bytes"
    assert put(storage, traffic)[1:3] == [HIT, HIT], "what was damaged is not in the way"
    assert got(storage, traffic)[1:3] == [HIT, HIT]


# ---- writers

WRITER = """
import sys
import storage_kit as kit
from poolwright.runtime.storage import MooncakeStorage
traffic = kit.Traffic.of(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
storage = MooncakeStorage.connect(sys.argv[1], workers=1)
print("ready", flush=True)
sys.stdin.readline()
print(*(status.value for status in storage.put(traffic.outgoing())), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def writer(cluster: Cluster) -> Iterator[subprocess.Popen[str]]:
    """A process that puts 8 pages when it reads a line and stays until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, cluster.address, "k", "8", str(PAGE)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / ".src"), str(ROOT / "tests"), *sys.path]),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def go(writer: subprocess.Popen[str]) -> None:
    assert writer.stdin is not None
    writer.stdin.write("go\n")
    writer.stdin.flush()


def test_pages_outlive_the_process_that_stored_them(
    writer: subprocess.Popen[str], storage: MooncakeStorage
) -> None:
    go(writer)
    assert writer.stdout is not None and writer.stdout.readline() == " ".join(["hit"] * 8) + "\n"
    writer.kill()
    writer.wait()
    assert got(storage, kit.Traffic.of("k", 8, PAGE)) == [HIT] * 8


def test_a_writer_killed_in_a_put_leaves_nothing_to_read_and_nothing_to_believe(
    cluster: Cluster, writer: subprocess.Popen[str], storage: MooncakeStorage
) -> None:
    traffic = kit.Traffic.of("k", 8, PAGE)
    node(cluster).send_signal(signal.SIGSTOP)  # so that the put is under way, and stays it
    go(writer)
    eventually(lambda: "master_allocated_bytes 0" not in cluster.metrics())
    writer.kill()
    writer.wait()
    node(cluster).send_signal(signal.SIGCONT)
    while HIT not in (statuses := put(storage, traffic)):
        assert HIT not in got(storage, traffic)
        assert set(statuses) <= {REFUSED, ERROR}
        time.sleep(0.1)
    eventually(lambda: put(storage, traffic) == [HIT] * 8)
    assert got(storage, traffic) == [HIT] * 8


# ---- servers


def test_a_node_that_is_killed_takes_its_pages_along(cluster: Cluster, storage: MooncakeStorage) -> None:
    old, new = kit.Traffic.of("old", 16, PAGE), kit.Traffic.of("new", 16, PAGE)
    assert put(storage, old) == [HIT] * 16
    node(cluster).kill()
    assert HIT not in got(storage, old)
    assert HIT not in put(storage, new)
    eventually(lambda: storage.exists(old.keys) == [MISS] * 16)
    assert HIT not in got(storage, old)
    cluster.start_node(NODE)
    comes_back(storage, "later")


def test_a_node_that_hangs_costs_the_bound_at_most(cluster: Cluster, storage: MooncakeStorage) -> None:
    old, new = kit.Traffic.of("old", 16, PAGE), kit.Traffic.of("new", 16, PAGE)
    assert put(storage, old) == [HIT] * 16
    node(cluster).send_signal(signal.SIGSTOP)
    assert HIT not in got(storage, old)
    assert HIT not in put(storage, new)
    for page in range(16):  # the call is over, so the pages have another use
        old.read[page] = b"\x5a" * PAGE
    node(cluster).send_signal(signal.SIGCONT)
    comes_back(storage, "later")
    assert all(old.read[page] == b"\x5a" * PAGE for page in range(16)), "nothing arrives after the call"
    got(storage, old)


def test_a_master_that_is_killed_and_started_again(cluster: Cluster, storage: MooncakeStorage) -> None:
    old, new = kit.Traffic.of("old", 16, PAGE), kit.Traffic.of("new", 16, PAGE)
    assert put(storage, old) == [HIT] * 16
    master(cluster).kill()
    master(cluster).wait()
    assert got(storage, old) == [ERROR] * 16
    assert put(storage, new) == [ERROR] * 16
    with kit.bounded(storage):
        assert storage.exists(old.keys) == [ERROR] * 16
        assert storage.remove(old.keys) == [ERROR] * 16
    cluster.start_master()
    comes_back(storage, "later")
    assert HIT not in got(storage, old), "a new master knows no old keys"


def test_a_master_that_hangs_costs_the_bound_at_most(cluster: Cluster, storage: MooncakeStorage) -> None:
    old, new = kit.Traffic.of("old", 16, PAGE), kit.Traffic.of("new", 16, PAGE)
    assert put(storage, old) == [HIT] * 16
    master(cluster).send_signal(signal.SIGSTOP)
    assert HIT not in got(storage, old)
    assert HIT not in put(storage, new)
    master(cluster).send_signal(signal.SIGCONT)
    comes_back(storage, "later")
    got(storage, old)


def test_a_store_that_is_full_refuses_and_keeps_what_it_took(
    cluster: Cluster, storage: MooncakeStorage
) -> None:
    traffic = kit.Traffic.of("k", 2 * NODE >> 20, 1 << 20)
    statuses = put(storage, traffic)
    assert set(statuses) == {HIT, REFUSED}
    after = got(storage, traffic)
    assert HIT in after
    assert HIT not in [found for found, stored in zip(after, statuses, strict=True) if stored is not HIT]


# ---- connecting and the command


def test_a_master_that_never_answers_is_given_up(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    master(cluster).send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "SETUP_S", 3.0)
        with pytest.raises(BackendUnavailable, match=r"Mooncake master .* no answer within"):
            connect(cluster)
    master(cluster).send_signal(signal.SIGCONT)
    eventually(lambda: bool(cluster.nodes()))
    with connect(cluster) as storage:
        comes_back(storage, "k")


def test_open_ports_are_warned_of(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with connect(cluster):
        pass
    assert "Mooncake opens ports on every interface" in caplog.text


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "poolwright.runtime.storage.cluster", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / ".src"), *sys.path])}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_up_and_down(tmp_path: Path) -> None:
    ports = [str(clusters.free_port()), str(clusters.free_port())]
    options = ["--folder", str(tmp_path / "servers"), "--mib", "64", "--ports", *ports]
    assert run("down", *options).stdout == "ended 0 servers\n"
    try:
        first, second = run("up", *options), run("up", *options)
        assert first.returncode == 0 and first.stdout.startswith(f"Mooncake master at 127.0.0.1:{ports[0]}")
        assert second.returncode == 1 and "end them first: make mooncake-down" in second.stderr
        with MooncakeStorage.connect(f"127.0.0.1:{ports[0]}") as storage:
            comes_back(storage, "k")
    finally:
        assert run("down", *options).stdout == "ended 2 servers\n"
    with pytest.raises(BackendUnavailable):
        MooncakeStorage.connect(f"127.0.0.1:{ports[0]}")
