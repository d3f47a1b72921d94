"""Moves the caches of real models through pools, wipes them, brings them back and goes on decoding.

`python -m poolwright.runtime.integrations.demo [--device cpu|cuda] [--path PATH] [--model NAME] [--corrupt]
[--json]`: a table on stdout, progress on stderr; exit code 0 when every logit is bit-identical, 1 when
anything differs.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from poolwright.generated import pool_class
from poolwright.runtime import jit
from poolwright.runtime.choice import PATHS
from poolwright.runtime.errors import PoolError
from poolwright.runtime.integrations import models
from poolwright.runtime.integrations.members import Member, members_of, plans, taken_apart
from poolwright.runtime.integrations.transformers import CacheMover

PAGE_SIZE = 16
PROMPT = 3 * PAGE_SIZE + 5
SEQUENCES = 2
STEPS = 16
DTYPES = (torch.bfloat16, torch.float32)
EVERY_LAYOUT = ("Llama", "DeepSeek-V3")
"""Models that go through each layout of their pool; the others take turns."""


@dataclass(frozen=True)
class Row:
    """One cache moved. `nbytes`: of whole pages, one way; `kl`: nats, summed over all new tokens.

    `pools`, `layout`, `form` and `path` name each that was used once. `order`: of the load.
    """

    model: str
    dtype: str
    pools: str
    form: str
    layout: str
    order: str
    path: str
    nbytes: int
    poisoned_bytes: int
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
    tiny: models.Tiny
    cache: Any
    first: torch.Tensor
    reference: torch.Tensor

    @property
    def pools(self) -> Mapping[str, str]:
        """By role the pool to take where several fit."""
        return self.tiny.pools


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m poolwright.runtime.integrations.demo", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the models run")
    parser.add_argument("--path", choices=PATHS, help="the path that every transfer has to take")
    parser.add_argument("--model", choices=models.MODELS, help="only this model")
    parser.add_argument("--corrupt", action="store_true", help="flip a byte of a host page: must end with 1")
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("demo: --device cuda: torch sees no CUDA device; take --device cpu", file=sys.stderr)
        return 1
    try:
        with one_thread():
            names = models.MODELS if options.model is None else [options.model]
            rows = run(names, options.device, path=options.path, corrupt=options.corrupt)
    except (PoolError, ValueError, DifferentReferences) as error:
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


def run(names: Iterable[str], device: str, *, path: str | None = None, corrupt: bool = False) -> list[Row]:
    """Every model in turn. Layouts and dtypes take turns, and so do the orders of loading."""
    rows: list[Row] = []
    say("loading torch and transformers")
    models.be_quiet()
    for turn, name in enumerate(names):
        tiny = models.MODELS[name]
        for dtype in DTYPES if name in EVERY_LAYOUT else DTYPES[:1]:
            case = prefill(name, tiny.build(dtype).to(device))
            members = members_of(taken_apart(case.cache, case.pools))
            taken = _programs(members[0], name, turn, dtype)
            if tiny.group is None:
                _compile(members, taken)
            for form, layout in taken:
                order = "bulk" if path == "staged" or len(rows) % 2 else "layer"
                flip = last_byte(members[0]) if corrupt else None
                rows.append(move(case, form, layout, order=order, path=path, flip=flip))
            say(f"{name}, {_short(dtype)}: {SEQUENCES} x {PROMPT} tokens; two reference runs agree")
    return rows


def prefill(
    name: str,
    model: Any,
    *,
    tokens: int = PROMPT,
    sequences: int = SEQUENCES,
) -> Case:
    """Fill a cache with random prompts; decode from two copies of it. Raises DifferentReferences."""
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(0, model.config.vocab_size, (sequences, tokens), generator=generator)
    cache = models.fresh_cache(model)
    first = models.logits(model, prompt.to(model.device), cache)[:, -1].argmax(-1, keepdim=True)
    one, two = (decode(model, copy.deepcopy(cache), first)[0] for _ in range(2))
    if not same_bits(one, two):
        raise DifferentReferences(
            f"{name}: two runs from one cache give different logits on {model.device}; "
            f"set torch.use_deterministic_algorithms(True)"
        )
    return Case(name, model, models.MODELS[name], cache, first, one)


def move(
    case: Case,
    form: str | None,
    layout: str | None,
    *,
    page_size: int = PAGE_SIZE,
    order: str = "bulk",
    path: str | None = None,
    apart: bool = False,
    flip: Flip | None = None,
) -> Row:
    """Take a copy of the case's cache through its pools, wipe it, decode from a fresh cache object.

    `order` ``layer``: each layer is put into the fresh cache as soon as it is there. `apart`: move pools
    side by side also where there is a group for them. `flip`: a byte to invert on the host.
    """
    cache, fresh = copy.deepcopy(case.cache), models.fresh_cache(case.model)
    sizes: dict[str, Any] = dict(page_size=page_size, layout=layout, form=form, pools=case.pools)
    group, names = (None, None) if apart else (case.tiny.group, case.tiny.names)
    with CacheMover(cache, path=path, group=group, names=names, **sizes) as mover:
        mover.stage(cache)
        written = mover.write_back()
        poisoned = mover.poison(cache)
        if flip is not None:
            flip_byte(mover, flip)
        # Into other device pages than they came from, as in an engine.
        if order == "layer":
            loaded = mover.load_and_fill(fresh, backwards)
        else:
            loaded = mover.load(place=backwards)
            mover.fill(fresh)
        used = [(each.pool.spec.name, each.pool.form, each.pool.layout) for each in mover.movers]
    logits, fed = decode(case.model, fresh, case.first)
    nbytes = sum(moved.nbytes for moved in written)
    pools, forms, layouts = ("/".join(dict.fromkeys(names)) for names in zip(*used, strict=True))
    return Row(
        model=case.name,
        dtype=_short(case.model.dtype),
        pools=pools if group is None else f"{group}: {pools}",
        form=forms,
        layout=layouts,
        order=order,
        path="/".join(dict.fromkeys(moved.path for moved in (*written, *loaded))),
        nbytes=nbytes,
        poisoned_bytes=poisoned,
        identical=same_bits(logits, case.reference),
        kl=divergence(case.reference, logits),
        recomputed=fed - case.first.numel() * STEPS,
    )


def backwards(pages: int) -> Sequence[int]:
    """Places of pages from the last one to the first."""
    return range(pages)[::-1]


def decode(model: Any, cache: Any, first: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Logits [step, sequence, word] of greedy decoding from a cache, and how many tokens were computed."""
    fed: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: fed.append(ids[0].numel()))
    token, steps = first, []
    try:
        for _ in range(STEPS):
            steps.append(models.logits(model, token, cache)[:, -1])
            token = steps[-1].argmax(-1, keepdim=True)
    finally:
        hook.remove()
    return torch.stack(steps), sum(fed)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes (NaNs too)."""
    one, two = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(one, two)


def divergence(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Kullback-Leibler divergence in nats of two [..., word] logits, summed over everything else."""
    left, right = (logits.double().log_softmax(-1) for logits in (expected, got))
    return float((left.exp() * (left - right)).sum())


@dataclass(frozen=True)
class Flip:
    """A byte on the host: of the first sequence's `row` (0 in pools of slots), first layer of a component.

    `item`: index into the element dims of a row. It, `row` and `byte` count from the end if negative. Rows
    behind the last one of the sequence are the padding of its tail.
    """

    member: str
    component: str
    row: int = -1
    byte: int = -1
    item: tuple[int, ...] | None = None


def last_byte(member: Member) -> Flip:
    """The last byte of the last row of a member's first claim, where a change shows most."""
    return Flip(member.name, member.share.claims[0].component)


def flip_byte(mover: CacheMover, flip: Flip) -> None:
    """Invert a byte on the host."""
    first = next(each for each in mover.movers if each.member.name == flip.member)
    part, pool, tensors = first.tensors.parts[flip.component], first.pool, first.tensors
    host = pool.host_layout(pool.page_num).part(part.ident)
    steps = {axis: step for axis, _, step in host.axes}
    extents, dims = tensors.extents[flip.component], tensors.dims(flip.component)
    page, row = divmod(flip.row % first.paging.rows if flip.row < 0 else flip.row, first.paging.page_size)
    at = host.base + first.host_pages()[page] * steps["page"] + row * steps.get(tensors.row_axis, 0)
    for dim, index in zip(dims, flip.item or (-1,) * len(dims), strict=True):
        at += index % extents[dim] * steps[dim]
    pool.kv_buffer[at + flip.byte % pool.program.itemsize(part.ident)] ^= 0xFF


def table(rows: Sequence[Row]) -> str:
    """The rows as text, columns aligned."""
    texts = ("model", "dtype", "pools", "layout", "order", "path")
    head = (*texts, "bytes", "poisoned bytes", "KL", "recomputed", "logits")
    numbers = range(len(texts), len(head) - 1)
    lines = [head] + [
        (
            *(row.model, row.dtype, row.pools, row.layout, row.order, row.path),
            *(f"{row.nbytes:,}", f"{row.poisoned_bytes:,}", f"{row.kl:.3g}"),
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


def _programs(first: Member, name: str, turn: int, dtype: torch.dtype) -> list[tuple[str, str]]:
    """(form, layout) of each run of a model: the layouts of its first pool shared out over its dtypes."""
    spec = pool_class(first.share.pool).spec
    forms, layouts = [*spec.forms], [*spec.layouts]
    if name not in EVERY_LAYOUT:
        return [(forms[turn % len(forms)], layouts[turn % len(layouts)])]
    at = DTYPES.index(dtype)
    return [(forms[n // len(DTYPES) % len(forms)], layout) for n, layout in enumerate(layouts)][
        at :: len(DTYPES)
    ]


def _compile(members: Sequence[Member], taken: Sequence[tuple[str, str]]) -> None:
    """Compile all programs side by side; each pool then finds its own in the cache."""
    if members[0].share.device.type != "cpu":
        return
    start = time.perf_counter()
    programs = [
        plan.program()
        for form, layout in taken
        for plan in plans(members, page_size=PAGE_SIZE, layout=layout, form=form)
    ]
    jit.host_libraries([program.unit("atoms", 16) for program in programs])
    if time.perf_counter() - start > 1:
        say(f"compiled {len(programs)} programs in {time.perf_counter() - start:.0f} s")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
