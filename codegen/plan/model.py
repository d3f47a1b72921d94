"""What a model's cache is made of: members, each with a pool, its sizes for the whole model, its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from poolwright.codegen.plan.config import Config, PlanError


@dataclass(frozen=True)
class Heads:
    """A number of heads or groups (config field `field`) that tensor parallelism divides over the ranks.

    `copies`: with more ranks than heads each rank keeps one whole head, so ranks hold the same ones.
    """

    count: int
    field: str
    copies: bool = False

    def of(self, ranks: int) -> int:
        """How many each rank holds. Raises PlanError when they cannot be divided."""
        if self.count % ranks == 0:
            return self.count // ranks
        if self.copies and ranks % self.count == 0:
            return 1
        also = " or a multiple" if self.copies else ""
        raise PlanError(
            f"--tp {ranks}: {self.field} is {self.count}, which {ranks} ranks cannot share; take a "
            f"divisor{also} of {self.count}"
        )


@dataclass(frozen=True)
class Split:
    """A size made of blocks, each a number of heads times a width, each divided over the ranks."""

    blocks: tuple[tuple[Heads, int], ...]

    def of(self, ranks: int) -> int:
        """The size on one rank. Raises PlanError."""
        return sum(heads.of(ranks) * width for heads, width in self.blocks)


def split(heads: Heads) -> Split:
    """A number of heads itself, divided."""
    return Split(((heads, 1),))


Size = int | Split | tuple[int | Split, ...]


@dataclass(frozen=True)
class Rows:
    """How many rows of a layer a sequence has, and how a page holds them.

    `kind`: ``token`` one a token, or an entry for every `number` tokens of a page; ``window`` one for each
    of the last `number` tokens; ``slot`` one a state.
    """

    kind: str
    number: int = 1

    @property
    def grows(self) -> bool:
        """Whether every token of the history keeps rows, or only the place where it can be resumed."""
        return self.kind == "token"

    def held(self, tokens: int) -> int:
        """Rows of one layer that a sequence of so many tokens has."""
        return {"token": tokens, "window": min(tokens, self.number), "slot": 1}[self.kind]

    def page(self, page_size: int) -> int:
        """Rows of a page when a page of tokens has `page_size`. Raises PlanError unless entries fit."""
        if self.kind == "token" and page_size % self.number:
            raise PlanError(
                f"--page-size {page_size}: one entry stands for {self.number} tokens, so a page needs a "
                f"multiple of {self.number}"
            )
        return 1 if self.kind == "slot" else page_size

    def pages_of_state(self, page_size: int) -> int:
        """Pages that one place to resume at takes."""
        return -(-self.number // page_size) if self.kind == "window" else 1


TOKEN = Rows("token")
SLOT = Rows("slot")


@dataclass(frozen=True)
class Member:
    """One pool of a model: sizes (`params`) are the whole model's, dtypes go by the spec's dtype groups."""

    name: str
    pool: str
    holds: str
    layers: tuple[int, ...]
    params: Mapping[str, Size]
    dtypes: Mapping[str, str]
    rows: Rows = TOKEN
    variants: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """The cache of a model. `group`: the group that its members make, None for side-by-side pools.

    `divided`: heads without a cache of their own that the ranks have to divide as well.
    """

    members: tuple[Member, ...]
    group: str | None = None
    divided: tuple[Heads, ...] = ()
    page_size: int = 64
    notes: tuple[str, ...] = ()


Builder = Callable[[Config, str, str | None], Model]
"""How a config is read: (config, ``engine`` or ``transformers``, dtype of keys and values or None)."""
