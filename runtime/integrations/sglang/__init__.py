"""Generated pools as host pools of SGLang 0.5.23 (HiCache): a pool or group in, what its classes call out.

Duck-typed: nothing of that library is imported. `host_pools` gives one `HiCachePool` for each pool, to be put
into the engine's ``PoolEntry`` and ``HostPoolGroup``, its ``L2TransferEngine`` and its storage classes.
"""

from __future__ import annotations

from poolwright.runtime.integrations.sglang.adapt import host_pool, host_pools
from poolwright.runtime.integrations.sglang.host_pool import HiCachePool

__all__ = ["HiCachePool", "host_pool", "host_pools"]
