"""What an engine's scheduler holds on to: write-backs and loads as operations, in order, with acks.

`CacheController` stands over one pool, `HybridCacheController` over a group, `Tier` puts storage behind
either. The core of the runtime does not know this package.
"""

from poolwright.runtime.controller.cache import CacheController
from poolwright.runtime.controller.flight import Flight
from poolwright.runtime.controller.hybrid import HybridCacheController
from poolwright.runtime.controller.operation import Ack, Operation
from poolwright.runtime.controller.tier import Tier

__all__ = ["Ack", "CacheController", "Flight", "HybridCacheController", "Operation", "Tier"]
