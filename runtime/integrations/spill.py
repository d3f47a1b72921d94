"""A prompt's cache outlives the process that computed it: spilled to storage, fetched by another process.

`python -m poolwright.runtime.integrations.spill spill --store STORE`: a process prefills a tiny hybrid model,
stores every page and the state at every page's end, and is killed with SIGKILL. `... fetch --store STORE`:
another one, with pools of other capacity and other slots, fetches, computes what does not come, decodes and
compares with a run that fetched nothing; then again with one byte in storage changed, and with nothing there.
STORE: a folder, or mooncake:HOST:PORT. Exit code 0 when every logit is bit-identical, else 1.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from poolwright.runtime.controller import Ack, HybridCacheController, Tier
from poolwright.runtime.errors import PoolError
from poolwright.runtime.group import HostPoolGroup
from poolwright.runtime.integrations import demo, models
from poolwright.runtime.integrations.grouped import Grouped
from poolwright.runtime.integrations.members import taken_apart
from poolwright.runtime.integrations.transformers import CacheMover, MemberMover
from poolwright.runtime.storage import FileStorage, MooncakeStorage, Storage, envelope, token_hashes
from poolwright.runtime.storage.file import _digest

PAGE_SIZE, PAGES = 16, 3
MODELS = ("Qwen3-Next", "Kimi-Linear", "Bamba")
STORED = "stored"


@dataclass(frozen=True)
class Result:
    """Of one prompt: pages of keys and values that storage has whole and has not, pages restored, tokens
    computed again, cache tensors that differ from the reference, divergence of the decoding."""

    hit: int
    miss: int
    restored: int
    recomputed: int
    wrong: int
    kl: float
    identical: bool

    def __str__(self) -> str:
        counts = f"hit={self.hit} miss={self.miss} restored={self.restored} recomputed={self.recomputed}"
        return f"{counts} wrong={self.wrong} KL={self.kl:g}"


class Pools(NamedTuple):
    """What moves a cache, and the group, controller and storage that it goes through."""

    mover: CacheMover
    group: HostPoolGroup
    controller: HybridCacheController
    tier: Tier


class Prompt:
    """A model, a prompt of whole pages, and its hashes."""

    def __init__(self, name: str) -> None:
        models.be_quiet()
        self.name, self.tiny = name, models.MODELS[name]
        self.model = self.tiny.build(torch.float32)
        generator = torch.Generator().manual_seed(11)
        size = (1, PAGES * PAGE_SIZE + 1)
        self.tokens = torch.randint(0, self.model.config.vocab_size, size, generator=generator)
        self.hashes = token_hashes(self.tokens[0, :-1].tolist(), PAGE_SIZE, seed=name)

    def feed(self, cache: Any, tokens: torch.Tensor) -> None:
        """Compute tokens one by one: hybrid models take up their states for a single token only."""
        for at in range(tokens.shape[1]):
            models.logits(self.model, tokens[:, at : at + 1], cache)

    def cache(self, tokens: torch.Tensor) -> Any:
        """The cache of these tokens."""
        made = models.fresh_cache(self.model)
        self.feed(made, tokens)
        return made

    def decode(self, cache: Any) -> torch.Tensor:
        """Logits of greedy decoding behind the prompt."""
        return demo.decode(self.model, cache, self.tokens[:, -1:])[0]

    @contextmanager
    def pools(self, cache: Any, storage: Storage, spare: int = 0) -> Iterator[Pools]:
        """Pools for this cache, with so many pages more, and storage behind them."""
        taken: dict[str, Any] = {"pools": self.tiny.pools, "group": self.tiny.group, "names": self.tiny.names}
        with CacheMover(cache, page_size=PAGE_SIZE, spare=spare, **taken) as mover:
            assert isinstance(mover._fleet, Grouped)
            controller = HybridCacheController(mover._fleet.group)
            tier = Tier(controller, storage, model=f"demo/{self.name}", shard="all")
            try:
                yield Pools(mover, mover._fleet.group, controller, tier)
            finally:
                tier.close()


# ---- spilling


def spill(prompt: Prompt, storage: Storage) -> int:
    """Store every page, and the state at the end of every page; how many objects."""
    cache, stored = models.fresh_cache(prompt.model), 0
    for boundary in range(1, PAGES + 1):
        prompt.feed(cache, prompt.tokens[:, (boundary - 1) * PAGE_SIZE : boundary * PAGE_SIZE])
        with prompt.pools(copy.deepcopy(cache), storage) as (mover, group, controller, tier):
            mover.stage(cache)
            mover.write_back()
            wanted = {}
            for name, ids in mover._fleet.host_ids.items():
                count = ids.numel() // group.pools[name].page_size
                wanted[name] = (prompt.hashes[boundary - count : boundary], ids)
            tier.store(wanted)
            ack = _ended(controller, "store")
            statuses = [status for each in ack.statuses.values() for status in each]
            if ack.error is not None or any(status.value != "hit" for status in statuses):
                raise PoolError(f"storage {storage.name} did not take every page: {ack.error or statuses}")
            stored += len(statuses)
    return stored


def spill_and_die(options: argparse.Namespace) -> None:
    """Run `spill` in a process and kill it as soon as it has stored. Raises PoolError."""
    module = "poolwright.runtime.integrations.spill"
    command = [sys.executable, "-m", module, "child", "--store", options.store, "--model", options.model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        code = child.wait()
    if code != -signal.SIGKILL or not said.startswith(STORED):
        raise PoolError(f"the process that spills ended with {code} and said {said!r}")
    print(f"{options.model}: {said.strip()}, then killed")


# ---- fetching


def fetch(prompt: Prompt, storage: Storage) -> Result:
    """Restore what storage has, compute the rest, decode; beside a run of the same tokens without storage."""
    reference = prompt.cache(prompt.tokens[:, :-1])
    expected = prompt.decode(copy.deepcopy(reference))
    restored, hit, pages = models.fresh_cache(prompt.model), 0, PAGES
    while pages:  # a cache object knows how many tokens it has: once more for as many as there are
        whole, found, filled = _restore(prompt, storage, pages)
        hit = max(hit, whole)
        if found == pages:
            restored = filled
            break
        pages = found
    fed: list[int] = []
    hook = prompt.model.get_input_embeddings().register_forward_pre_hook(
        lambda _, ids: fed.append(ids[0].numel())
    )
    prompt.feed(restored, prompt.tokens[:, pages * PAGE_SIZE : -1])
    hook.remove()
    wrong = _differing(restored, reference, prompt)
    logits = prompt.decode(restored)
    kl, identical = demo.divergence(expected, logits), demo.same_bits(expected, logits)
    return Result(hit, PAGES - hit, pages, sum(fed), wrong, kl, identical)


def _restore(prompt: Prompt, storage: Storage, pages: int) -> tuple[int, int, Any]:
    """Fetch a prefix of so many pages: pages of the anchor that came, pages that can be restored, and, where
    that is all of them, a cache filled with them."""
    other = (prompt.tokens[:, : pages * PAGE_SIZE] + 1) % prompt.model.config.vocab_size
    template = prompt.cache(other)  # its shapes are right, every byte of it is not
    with prompt.pools(template, storage, spare=pages + 2) as (mover, group, controller, tier):
        mover.stage(template)
        mover.poison(template)
        controller.alloc({name: 2 * group.pools[name].page_size for name in group.available_size()})
        if tier.fetch(prompt.hashes[:pages]) is None:
            raise PoolError(f"{prompt.name}: no room for {pages} pages")
        ack = _ended(controller, "fetch")
        if ack.error is not None:
            raise ack.error
        shown: Any = controller.statistics()[group.spec.anchor]["fetch"]
        if ack.hit < pages:
            return shown["pages"], ack.hit, None
        kept = tier.keep(ack, pages)
        device = {each.member.name: _device(each) for each in mover.movers}
        controller.load({name: (ids, device[name]) for name, ids in kept.items()})
        controller.start_loading().wait_all()
        fresh = models.fresh_cache(prompt.model)
        mover.fill(fresh)
        return shown["pages"], pages, fresh


def _device(mover: MemberMover) -> torch.Tensor:
    """The device ids of a member's pages, as tokens."""
    move = mover.move("load()")
    size = mover.pool.page_size if move.unit == "page" else 1
    return (move.device[:, None] * size + torch.arange(size)).flatten()


def _ended(controller: HybridCacheController, direction: str) -> Ack:
    """The next ack of this direction, once it is there."""
    while not (found := controller.pop_acks(1, direction)):
        time.sleep(0.001)
    return found[0]


def _differing(restored: Any, reference: Any, prompt: Prompt) -> int:
    """How many tensors of a cache are not those of another."""
    pools = dict(prompt.tiny.pools)
    pairs = zip(taken_apart(restored, pools), taken_apart(reference, pools), strict=True)
    return sum(
        not demo.same_bits(mine.contents.tensors[path], tensor)
        for mine, theirs in pairs
        for path, tensor in theirs.contents.tensors.items()
    )


# ---- damage


def damage(prompt: Prompt, storage: Storage) -> None:
    """Change one byte of the second page's keys and values in storage. Raises PoolError."""
    with prompt.pools(prompt.cache(prompt.tokens[:, :PAGE_SIZE]), storage) as (_, group, _, tier):
        name = group.spec.anchor
        key, nbytes = tier.keys(prompt.hashes[1])[name], group.pools[name].page_bytes
    if isinstance(storage, FileStorage):
        path = storage._folder.path(_digest(key))
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    elif isinstance(storage, MooncakeStorage):
        engine, whole = storage._engine, (ctypes.c_uint8 * (envelope.SIZE + nbytes))()
        where: tuple[Any, ...] = ([key], [[ctypes.addressof(whole)]], [[len(whole)]])
        read = engine.batch_get_into_multi_buffers(*where)
        whole[-1] ^= 1
        codes = [*engine.batch_remove([key], True), *engine.batch_put_from_multi_buffers(*where)]
        if read != [len(whole)] or codes != [0, 0]:
            raise PoolError(
                f"storage {storage.name}: codes {read} and {codes} where a byte was to be changed"
            )


def wipe(prompt: Prompt, storage: Storage) -> None:
    """Forget every page."""
    with prompt.pools(prompt.cache(prompt.tokens[:, :PAGE_SIZE]), storage) as (_, _, _, tier):
        for page_hash in prompt.hashes:
            storage.remove(list(tier.keys(page_hash).values()))


# ---- command line


def opened(store: str) -> Storage:
    """The storage that an argument names. Raises PoolError."""
    kind, _, rest = store.partition(":")
    if kind == "mooncake":
        return MooncakeStorage.connect(rest or "127.0.0.1:50051")
    return FileStorage(Path(store), 1 << 30)


def check(prompt: Prompt, storage: Storage) -> bool:
    """Fetch three times: as it was spilled, with one byte changed, with nothing there. Prints the results."""
    fine = True
    expected = (("as spilled", PAGES, 0), ("one byte changed", PAGES - 1, 1), ("wiped", 0, PAGES))
    for (what, hit, miss), before in zip(expected, (None, damage, wipe), strict=True):
        if before is not None:
            before(prompt, storage)
        result = fetch(prompt, storage)
        right = result.identical and result.kl == 0 and result.wrong == 0
        right = right and (result.hit, result.miss) == (hit, miss)
        print(f"{prompt.name}, {what}: {result}{'' if right else '  FAILED'}", flush=True)
        fine = fine and right
    return fine


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. 0: all bits are the same; 1: not."""
    parser = argparse.ArgumentParser(
        prog="python -m poolwright.runtime.integrations.spill", description=__doc__
    )
    parser.add_argument("what", choices=["spill", "fetch", "child"])
    parser.add_argument("--store", required=True, help="a folder, or mooncake:HOST:PORT")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    options = parser.parse_args(arguments)
    try:
        if options.what == "spill":
            spill_and_die(options)
            return 0
        with demo.one_thread(), opened(options.store) as storage:
            prompt = Prompt(options.model)
            if options.what == "fetch":
                return 0 if check(prompt, storage) else 1
            print(f"{STORED} {spill(prompt, storage)} pages and states", flush=True)
            sys.stdin.read()  # until it is killed
            return 1
    except (PoolError, ValueError) as error:
        print(f"spill: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
