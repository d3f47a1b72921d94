"""One number or truth value of whatever library: what stands for it in, Python's own out, or None.

Neither numpy nor torch is imported: whoever has a value of theirs has done so.
"""

from __future__ import annotations

import operator
import sys


def index(value: object) -> int | None:
    """The integer that a value stands for; a truth value stands for none."""
    if type(value) is int:
        return value
    try:
        return None if truth(value) is not None or _of_truths(value) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # RuntimeError: a tensor whose number cannot be read
        return None


def truth(value: object) -> bool | None:
    """True or False, Python's or numpy's."""
    numpys = getattr(sys.modules.get("numpy"), "bool_", bool)
    return bool(value) if isinstance(value, (bool, numpys)) else None


def _of_truths(value: object) -> bool:
    """Whether it is a tensor of truth values, which torch would take for 0 and 1."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.dtype == torch.bool
