"""What host memory is left for pools. In: the kernel's accounts. Out: bytes."""

from __future__ import annotations

from pathlib import Path

from poolwright.runtime.errors import PoolError

RESERVE_BYTES = 1 << 30


def available_host_bytes(root: Path = Path("/"), reserve: int = RESERVE_BYTES) -> int:
    """Bytes that this process may still take: the least of MemAvailable and what every enclosing cgroup
    (v1, v2) has left, less `reserve` (default 1 GiB) for everything that is not a pool.

    File cache that a cgroup can drop counts as left. `root` holds ``proc`` and ``sys``.
    """
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            left = [int(line.split()[1]) << 10]
            break
    else:
        raise PoolError(f"{root / 'proc/meminfo'} names no MemAvailable: use Linux 3.14 or newer")
    membership = root / "proc/self/cgroup"
    for entry in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            left += _headroom(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            left += _headroom(root / "sys/fs/cgroup/memory", path, *names)
    return max(0, min(left) - reserve)


def _headroom(mount: Path, path: str, limit: str, usage: str, cache: str) -> list[int]:
    """Bytes left in the cgroup `path` and in each one around it, as far as they are visible and limited."""
    inner = mount / path.lstrip("/")
    left = []
    for folder in (inner, *inner.parents):
        if folder.is_relative_to(mount) and (folder / limit).exists():
            most = (folder / limit).read_text().strip()
            if most != "max":
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / usage).read_text()) - int(stat.get(cache, 0))
                left.append(max(0, int(most) - used))
    return left
