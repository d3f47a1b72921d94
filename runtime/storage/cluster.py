"""A Mooncake master and storage nodes on this machine's loopback: for trying out, tests and benchmarks.

Run ``python -m poolwright.runtime.storage.cluster up`` (or ``down``): one master, one node, and a file that
remembers them. Both return when the servers are ready, or gone.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from poolwright.runtime.errors import BackendUnavailable, PoolError
from poolwright.runtime.storage.engine import installs

HOST = "127.0.0.1"
READY_S = 30.0


class Cluster:
    """Servers of one master. `folder` takes their logs; ports are free ones unless given.

    `options`: further arguments of the master. As a context manager it ends every server it started.
    """

    def __init__(
        self, folder: Path, *, options: Sequence[str] = (), ports: tuple[int, int] | None = None
    ) -> None:
        _find()
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._options = folder, tuple(options)
        self._port, self._http = ports or (free_port(), free_port())
        self.processes: list[subprocess.Popen[bytes]] = []
        self._logs: dict[int, Path] = {}

    @property
    def address(self) -> str:
        """The master, as clients name it."""
        return f"{HOST}:{self._port}"

    def start_master(self) -> subprocess.Popen[bytes]:
        """Start the master and wait until it serves. Raises PoolError with its log's end, BackendUnavailable
        where a system library is missing."""
        process = self._start(
            "mooncake.cli",
            f"--rpc_address={HOST}",
            f"--rpc_port={self._port}",
            f"--metrics_host={HOST}",
            f"--metrics_port={self._http}",
            "--logtostderr",
            *self._options,
        )
        self._wait(process, lambda: '"service_ready":true' in self._ask("/health"))
        return process

    def start_node(self, nbytes: int) -> subprocess.Popen[bytes]:
        """Start a node that lends so many bytes, and wait until the master knows it. Raises as above."""
        known = self.nodes()
        process = self._start(
            "mooncake.cli_client",
            f"--host={HOST}",
            f"--port={free_port()}",
            f"--master_server_address={self.address}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            f"--global_segment_size={nbytes >> 20} MB",
            "--threads=1",
        )
        self._wait(process, lambda: len(self.nodes() - known) == 1)
        return process

    def nodes(self) -> set[str]:
        """The nodes that the master knows, dead ones included until it has noticed."""
        return set(self._ask("/get_all_segments").split())

    def metrics(self) -> str:
        """What the master counts, in the text format of Prometheus."""
        return self._ask("/metrics")

    def stop(self) -> None:
        """End every server that was started here. Idempotent."""
        for process in self.processes:
            process.kill()  # also ends one that was stopped
        for process in self.processes:
            process.wait()
        self.processes.clear()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"{module}.{len(self.processes)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        self._logs[process.pid] = log
        return process

    def _wait(self, process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
        end = time.monotonic() + READY_S
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                raise self._failure(process)
            time.sleep(0.02)

    def _failure(self, process: subprocess.Popen[bytes]) -> PoolError:
        """Why a server is not ready."""
        log = self._logs[process.pid]
        said = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"])[-1]
        if process.poll() is not None and (command := installs(said)):
            return BackendUnavailable("Mooncake's server", said, command)
        ended = "did not get ready" if process.poll() is None else f"ended with {process.returncode}"
        return PoolError(f"{process.args!r} {ended}; it said last: {said}; its log is {log}")

    def _ask(self, path: str) -> str:
        """What the master's HTTP server says; nothing while it does not answer."""
        connection = http.client.HTTPConnection(HOST, self._http, timeout=1)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        except (OSError, http.client.HTTPException):
            return ""
        finally:
            connection.close()


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def up(folder: Path, nbytes: int, ports: tuple[int, int]) -> str:
    """Start a master and a node that outlive this process. Returns the master's address."""
    memory = folder / "servers.json"
    if memory.exists():
        raise PoolError(f"{memory} says that servers are up; end them first: make mooncake-down")
    cluster = Cluster(folder, ports=ports)
    try:
        cluster.start_master()
        cluster.start_node(nbytes)
        memory.write_text(json.dumps([process.pid for process in cluster.processes]))
    except BaseException:
        cluster.stop()
        raise
    return cluster.address


def down(folder: Path) -> int:
    """End what `up` started; how many servers that were still there."""
    memory = folder / "servers.json"
    if not memory.exists():
        return 0
    mine = [pid for pid in json.loads(memory.read_text()) if _is_server(pid)]
    for pid in mine:
        os.kill(pid, signal.SIGKILL)
    while any(_is_server(pid) for pid in mine):
        time.sleep(0.02)
    memory.unlink()
    return len(mine)


def _is_server(pid: int) -> bool:
    """Whether this process still is a Mooncake server: its number may be another's by now."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("mooncake_")
    except OSError:
        return False


def _find() -> None:
    if importlib.util.find_spec("mooncake") is None:
        command = "pip install 'poolwright[mooncake]'"
        raise BackendUnavailable("Mooncake", "the package is not installed", command)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"expected a port of 1 to 65535, got {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. 0: done; 1: it could not be."""
    parser = argparse.ArgumentParser(prog="python -m poolwright.runtime.storage.cluster", description=__doc__)
    parser.add_argument("what", choices=["up", "down"])
    parser.add_argument("--folder", type=Path, default=Path("build/mooncake"), help="logs, process numbers")
    parser.add_argument("--mib", type=int, default=1024, help="memory that the node lends")
    parser.add_argument("--ports", type=_port, nargs=2, default=[50051, 9003], metavar=("RPC", "HTTP"))
    options = parser.parse_args(arguments)
    try:
        if options.what == "down":
            print(f"ended {down(options.folder)} servers")
        else:
            address = up(options.folder, options.mib << 20, tuple(options.ports))
            print(f"Mooncake master at {address}, one node with {options.mib} MiB; logs in {options.folder}")
            print("the node's ports are open on every interface, and nobody is asked for a password")
    except PoolError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
