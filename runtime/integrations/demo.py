"""Moves the caches of two real models through every layout of their pools and goes on decoding.

`python -m poolwright.runtime.integrations.demo [--device cpu|cuda] [--corrupt] [--json]`: a table on
stdout, progress on stderr; exit code 0 when every logit is bit-identical, 1 when anything differs.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from poolwright.generated import pool_class
from poolwright.runtime import jit
from poolwright.runtime.errors import PoolError
from poolwright.runtime.integrations import models
from poolwright.runtime.integrations.transformers import CacheMover, LayerGroup, layer_groups

PAGE_SIZE = 16
PROMPT = 3 * PAGE_SIZE + 5
SEQUENCES = 2
STEPS = 16
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Row:
    """One cache moved. `nbytes`: of whole pages, one way; `kl`: nats, summed over all new tokens."""

    model: str
    dtype: str
    pool: str
    form: str
    layout: str
    path: str
    nbytes: int
    poisoned_bytes: int
    gb_per_s: float
    identical: bool
    kl: float
    recomputed: int

    @property
    def fine(self) -> bool:
        return self.identical and self.kl == 0 and self.recomputed == 0


@dataclass(frozen=True)
class Case:
    """A model after its prefill, and what it decodes when its cache was never moved."""

    name: str
    model: Any
    cache: Any
    first: torch.Tensor
    reference: torch.Tensor


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m poolwright.runtime.integrations.demo", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the models run")
    parser.add_argument("--corrupt", action="store_true", help="flip a byte of a host page: must end with 1")
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("demo: --device cuda: torch sees no CUDA device; take --device cpu", file=sys.stderr)
        return 1
    try:
        with one_thread():
            rows = run(options.device, corrupt=options.corrupt)
    except (PoolError, DifferentReferences) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"fine": all(row.fine for row in rows), "rows": [*map(dataclasses.asdict, rows)]}))
    else:
        print(table(rows))
        print(verdict(rows))
    return 0 if all(row.fine for row in rows) else 1


class DifferentReferences(Exception):
    """Two runs of a model from one cache disagree, so nothing can be said about a moved cache."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread: at these sizes it is faster, and sums have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(device: str, *, corrupt: bool = False) -> list[Row]:
    """Every model, dtype and layout in turn; forms take turns, so that each meets every layout."""
    rows: list[Row] = []
    say("loading torch and transformers")
    for name, make in models.MODELS.items():
        for turn, dtype in enumerate(DTYPES):
            case = prefill(name, make(dtype).to(device))
            say(f"{name}, {_short(dtype)}: prefilled {SEQUENCES} x {PROMPT} tokens; two reference runs agree")
            programs = _programs(layer_groups(case.cache)[0], turn)
            _compile(layer_groups(case.cache)[0], programs)
            flip = (PROMPT - 1, 0) if corrupt else None
            rows += [move(case, form, layout, flip=flip) for form, layout in programs]
    return rows


def prefill(name: str, model: Any, *, tokens: int = PROMPT, sequences: int = SEQUENCES) -> Case:
    """Fill a cache with random prompts; decode from two copies of it. Raises DifferentReferences."""
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(0, model.config.vocab_size, (sequences, tokens), generator=generator)
    cache = models.fresh_cache(model)
    with torch.inference_mode():
        logits = model(prompt.to(model.device), past_key_values=cache, use_cache=True).logits
    first = logits[:, -1].argmax(-1, keepdim=True)
    one, two = (decode(model, copy.deepcopy(cache), first)[0] for _ in range(2))
    if not same_bits(one, two):
        raise DifferentReferences(
            f"{name}: two runs from one cache give different logits on {model.device}; "
            f"set torch.use_deterministic_algorithms(True)"
        )
    return Case(name, model, cache, first, one)


def move(
    case: Case,
    form: str,
    layout: str,
    *,
    page_size: int = PAGE_SIZE,
    path: str | None = None,
    flip: tuple[int, int] | None = None,
) -> Row:
    """Take a copy of the case's cache through its pools, wipe it, decode from a fresh cache object.

    `flip`: a (token, byte of the token) of the first sequence to invert on the host, see `flip_byte`.
    """
    cache = copy.deepcopy(case.cache)
    with CacheMover(cache, page_size=page_size, layout=layout, form=form, path=path) as mover:
        mover.stage(cache)
        written = mover.write_back()
        poisoned = mover.poison(cache)
        if flip is not None:
            flip_byte(mover, *flip)
        # Into other device pages than they came from, as in an engine.
        loaded = mover.load(order=range(mover.movers[0].paging.pages)[::-1])
        fresh = models.fresh_cache(case.model)
        mover.fill(fresh)
    logits, fed = decode(case.model, fresh, case.first)
    nbytes = sum(moved.nbytes for moved in written)
    seconds = sum(moved.seconds for moved in (*written, *loaded))
    return Row(
        model=case.name,
        dtype=_short(case.cache.layers[0].dtype),
        pool=written[0].pool,
        form=form,
        layout=layout,
        path="/".join(dict.fromkeys(moved.path for moved in (*written, *loaded))),
        nbytes=nbytes,
        poisoned_bytes=poisoned,
        gb_per_s=2 * nbytes / seconds / 1e9,
        identical=same_bits(logits, case.reference),
        kl=divergence(case.reference, logits),
        recomputed=fed - case.first.numel() * STEPS,
    )


def decode(model: Any, cache: Any, first: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Logits [step, sequence, word] of greedy decoding from a cache, and how many tokens were computed."""
    fed: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: fed.append(ids[0].numel()))
    token, steps = first, []
    try:
        with torch.inference_mode():
            for _ in range(STEPS):
                logits = model(token, past_key_values=cache, use_cache=True).logits[:, -1]
                steps.append(logits)
                token = logits.argmax(-1, keepdim=True)
    finally:
        hook.remove()
    return torch.stack(steps), sum(fed)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes (NaNs too)."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def divergence(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Kullback-Leibler divergence in nats of two [..., word] logits, summed over everything else."""
    left, right = (logits.double().log_softmax(-1) for logits in (expected, got))
    return float((left.exp() * (left - right)).sum())


def flip_byte(mover: CacheMover, token: int, byte: int) -> None:
    """Invert a byte of a token of the first sequence on the host: first component, first layer.

    Tokens count from the start of the sequence; those behind its last one are the padding of its tail.
    """
    first = mover.movers[0]
    page, inner = divmod(int(first.host_ids[token]), first.pool.page_size)
    part = first.pool.host_layout(first.pool.page_num).parts[0]
    steps = {axis: step for axis, _, step in part.axes}
    first.pool.kv_buffer[part.base + page * steps["page"] + inner * steps["token"] + byte] ^= 0xFF


def table(rows: Sequence[Row]) -> str:
    """The rows as text, columns aligned."""
    texts = ("model", "dtype", "pool", "form", "layout", "path")
    head = (*texts, "bytes", "poisoned bytes", "GB/s", "KL", "recomputed", "logits")
    numbers = range(len(texts), len(head) - 1)
    lines = [head] + [
        (
            *(row.model, row.dtype, row.pool, row.form, row.layout, row.path),
            *(f"{row.nbytes:,}", f"{row.poisoned_bytes:,}", f"{row.gb_per_s:.2g}", f"{row.kl:.3g}"),
            *(str(row.recomputed), "identical" if row.identical else "DIFFERENT"),
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        [
            text.rjust(w) if at in numbers else text.ljust(w)
            for at, (text, w) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def verdict(rows: Sequence[Row]) -> str:
    wrong = [row for row in rows if not row.fine]
    if wrong:
        return f"FAILED: {len(wrong)} of {len(rows)} moved caches decode differently"
    return f"all {len(rows)} moved caches decode bit-identically: KL exactly 0, no token recomputed"


def say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


def _programs(group: LayerGroup, turn: int) -> list[tuple[str, str]]:
    """(form, layout) of each run: every layout once, forms in turn, shifted by `turn`."""
    spec = pool_class(group.pool).spec
    forms = list(spec.forms)
    return [(forms[(at + turn) % len(forms)], layout) for at, layout in enumerate(spec.layouts)]


def _compile(group: LayerGroup, programs: Sequence[tuple[str, str]]) -> None:
    """Compile all programs side by side; each pool then finds its own in the cache."""
    if group.device.type != "cpu":
        return
    made, start = pool_class(group.pool), time.perf_counter()
    dtypes = {name: group.dtype for name in made.spec.dtypes}
    units = [
        made.sized(group.params, dtypes, {"layers": group.layers}, {}, PAGE_SIZE, layout, form).unit(
            "atoms", 16
        )
        for form, layout in programs
    ]
    jit.host_libraries(units)
    if time.perf_counter() - start > 1:
        say(f"compiled {len(programs)} programs of {group.pool} in {time.perf_counter() - start:.0f} s")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
