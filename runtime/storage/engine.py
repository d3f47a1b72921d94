"""The door to Mooncake's client library: what is asked of it, and how a client of a running master is made.

Setting one up against a master that does not answer takes the library 90 s, in which no other thread of
Python runs: so a process of its own tries first. Its default waits are 30 s each: they are shortened, through
environment variables that are not yet set.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from poolwright.runtime.errors import BackendUnavailable

_log = logging.getLogger("poolwright")

STALL_S = 1
REPLY_S = 2
SETUP_S = 15.0
TRIAL = """
import json, os, sys
from mooncake.store import MooncakeDistributedStore
os._exit(MooncakeDistributedStore().setup(*json.loads(sys.argv[1])) != 0)
"""
LOCAL_BUFFER = 16 << 20
PACKAGES = {"libibverbs": "libibverbs1", "libnuma": "libnuma1", "libcurl": "libcurl4"}
"""Debian's packages of the system libraries that Mooncake is linked with."""
START = "make mooncake-up for one on this machine, or see docs/scaling.md"


class Engine(Protocol):
    """The part of `mooncake.store.MooncakeDistributedStore` that is used. Codes: 0 or bytes, or negative."""

    def batch_put_from_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]: ...

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]: ...

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...

    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...

    def register_buffer(self, address: int, nbytes: int) -> int: ...

    def unregister_buffer(self, address: int) -> int: ...

    def close(self) -> int: ...


@dataclass(frozen=True)
class Waits:
    """How long the library waits, in seconds: for a transfer that makes no progress, for the master."""

    stall_s: float
    reply_s: float


def shorten() -> Waits:
    """Shorten the library's waits, unless the environment sets them. Raises ValueError for odd values."""
    names = ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_RPC_TIMEOUT_MS")
    wanted = (STALL_S, STALL_S, 1000 * REPLY_S)
    found = []
    for name, value in zip(names, wanted, strict=True):
        text = os.environ.get(name, "").strip() or str(value)
        if not text.isdecimal() or int(text) < 1:
            expected = "an integer of at least 1"
            raise ValueError(f"{name}: expected {expected}, got {text!r}; change it or unset it")
        os.environ[name] = text
        found.append(int(text))
    return Waits(max(found[:2]), found[2] / 1000)


def connect(master: str, host: str, protocol: str, device: str) -> Engine:
    """A client that lends no memory. Raises ValueError for an address that is none, BackendUnavailable for
    what is missing: the library, a system library, a master that answers.
    """
    _ask(master)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        command = installs(str(error)) or "pip install 'poolwright[mooncake]'"
        raise BackendUnavailable("mooncake.store", str(error), command) from error
    _log.warning(
        "Mooncake opens ports on every interface of this machine, and asks nobody who reaches them for a "
        "password: peers can read and overwrite what is stored. Use it in a trusted network only."
    )
    arguments = (host, "P2PHANDSHAKE", 0, LOCAL_BUFFER, protocol, device, master)
    _try(arguments, master)
    store = MooncakeDistributedStore()
    code = store.setup(*arguments)
    if code != 0:
        raise BackendUnavailable(f"Mooncake master {master}", f"setup failed with code {code}", START)
    return cast(Engine, store)


def installs(said: str) -> str:
    """The command that brings the system library of which a loader said that it is missing; or nothing."""
    package = next((package for library, package in PACKAGES.items() if f"{library}.so" in said), None)
    return f"apt-get install {package}" if package else ""


def _ask(master: str) -> None:
    """Raises where nobody listens at this address."""
    name, colon, port = master.rpartition(":")
    if not colon or not name or not port.isdecimal():
        raise ValueError(f"master: expected host:port such as 127.0.0.1:50051, got {master!r}")
    try:
        socket.create_connection((name, int(port)), timeout=2).close()
    except (OSError, OverflowError) as error:
        raise BackendUnavailable(f"Mooncake master {master}", str(error), START) from error


def _try(arguments: Sequence[object], master: str) -> None:
    """Raises where `setup` fails or does not come to an end."""
    why = f"no answer within {SETUP_S:.0f} s"
    try:
        done = subprocess.run(
            [sys.executable, "-c", TRIAL, json.dumps(arguments)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SETUP_S,
        )
        if done.returncode == 0:
            return
        why = f"setup failed: {' '.join(done.stderr.splitlines()[-1:])}"
    except subprocess.TimeoutExpired:
        pass
    raise BackendUnavailable(f"Mooncake master {master}", why, START)
