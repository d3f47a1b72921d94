"""What callers hand over: a value in, the same value out as its type says; ValueError by name for any other.

Every function takes `owner`, the pool or group that is called, and `name`, the argument, for its message. A
number is whatever stands for an integer, as those of numpy and torch do, but no truth value; a flag may be
numpy's. Both come out as Python's.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from poolwright.runtime.driver import Driver, Stream
from poolwright.runtime.scalars import index, truth

LONGEST = 80
"""Characters of a value in a message."""


def refusal(owner: str, name: str, expected: str, value: object, step: str = "") -> ValueError:
    """The error: what was expected, what was got, and the next step."""
    return wrong(owner, name, expected, shown(value), step)


def wrong(owner: str, name: str, expected: str, got: object, step: str = "") -> ValueError:
    """As `refusal`, with what was got in words."""
    return ValueError(f"{owner}: {name}: expected {expected}, got {got}{step and f'; {step}'}")


def shown(value: object) -> str:
    """The value in a message; a tensor by its kind, since its numbers may lie on a device."""
    if isinstance(value, torch.Tensor):
        strided = "" if value.is_contiguous() else "strided "
        layout = strided if value.layout is torch.strided else f"{value.layout} "
        return f"a {layout}tensor of {value.dtype} {list(value.shape)} on {value.device}"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def whole(owner: str, name: str, value: object, least: int) -> int:
    """An integer of at least `least`."""
    found = index(value)
    if found is None or found < least:
        raise refusal(owner, name, f"an integer of at least {least}", value)
    return found


def integer(owner: str, name: str, value: object) -> int:
    """An integer."""
    found = index(value)
    if found is None:
        raise refusal(owner, name, "an integer", value)
    return found


def flag(owner: str, name: str, value: object) -> bool:
    """True or False."""
    found = truth(value)
    if found is None:
        raise refusal(owner, name, "True or False", value)
    return found


def one_of(owner: str, name: str, value: object, known: Collection[str]) -> str:
    """One of these words."""
    if not isinstance(value, str) or value not in known:
        raise refusal(owner, name, f"one of {', '.join(known)}", value)
    return value


def layer_ids(owner: str, name: str, ids: object) -> tuple[int, ...]:
    """Layer ids from 0, in their order."""
    try:
        found: tuple[object, ...] = tuple(ids)  # type: ignore[arg-type]
    except TypeError:  # also of a tensor without dimensions, which says that it can be walked
        raise refusal(owner, name, "layer ids such as range(3)", ids) from None
    numbers = tuple(index(layer) for layer in found)
    if any(number is None or number < 0 for number in numbers):
        raise refusal(owner, name, "layer ids from 0", list(found))
    return tuple(number for number in numbers if number is not None)


def device(owner: str, value: object) -> torch.device:
    """A device by name, or as torch has it."""
    try:
        return torch.device(value)  # type: ignore[call-overload, no-any-return]
    except (RuntimeError, TypeError, ValueError):
        raise refusal(owner, "device", "cpu or a device such as cuda:0", value) from None


def stream(owner: str, name: str, value: Stream, driver: Driver) -> None:
    """A stream of this driver's: its number, or an object of torch's; None: the current one."""
    if value is None or (type(value) is int and 0 <= value < 1 << 64):
        return
    kinds = ("cuda_stream",) if driver.name == "cuda" else ("cuda_stream", "wait_stream", "simulated")
    if not any(hasattr(value, kind) for kind in kinds):
        raise refusal(owner, name, "a stream", value, "pass torch.cuda.current_stream(), or None for it")
