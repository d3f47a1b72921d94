"""What the steps of one pool document share: the document, its mistakes so far, its symbols."""

from __future__ import annotations

from dataclasses import dataclass

from poolwright.codegen import ir, schema
from poolwright.codegen.collect import Checks
from poolwright.codegen.load import Document
from poolwright.codegen.scope import Scope


@dataclass(frozen=True)
class Context:
    """One pool document on its way to `ir.Pool`. A step that fails is left out, those behind it still run."""

    document: Document[schema.Pool]
    checks: Checks
    scope: Scope
    variants: tuple[ir.Variant, ...]

    @property
    def spec(self) -> schema.Pool:
        return self.document.value

    @property
    def has_tokens(self) -> bool:
        """Whether pages consist of tokens, as `ir.Pool.has_tokens` says it."""
        return self.spec.index.unit == "token" and self.spec.index.row is None
