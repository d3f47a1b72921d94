"""Calls that ``torch.compile`` does not look into: a compiled function breaks its graph there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def opaque(function: _F) -> _F:
    """Mark a function, as ``torch.compiler.disable`` does, which would import the compiler (0.8 s) for it.

    The mark keeps it out of the graphs of its callers; the strategy keeps the compiler out of its own frame
    and of all frames below it. The latter is no public interface: a torch without it compiles what it can of
    these frames, and the calls still do what they do.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy") and hasattr(frames, "_FrameExecStrategy"):
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, skip)
    return function
