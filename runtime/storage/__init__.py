"""Pages of host pools in storage that outlives them: a folder, or Mooncake Store.

`PageStore` stores pages of one pool under hashes of their tokens, through any `Storage`: `FileStorage`
needs nothing but a folder, `MooncakeStorage` a running master. The core of the runtime does not know this
package.
"""

from poolwright.runtime.storage.base import Item, Status, Storage
from poolwright.runtime.storage.file import FileStorage
from poolwright.runtime.storage.keys import Namespace, token_hashes
from poolwright.runtime.storage.mooncake import MooncakeStorage
from poolwright.runtime.storage.page_store import PageSource, PageStore
from poolwright.runtime.storage.prefix import usable_prefix

__all__ = [
    "FileStorage",
    "Item",
    "MooncakeStorage",
    "Namespace",
    "PageSource",
    "PageStore",
    "Status",
    "Storage",
    "token_hashes",
    "usable_prefix",
]
