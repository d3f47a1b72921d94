"""What a benchmark was asked for: a parser in, checked options out."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

COUNTS = ("repeats", "rounds")


def asked(
    parser: argparse.ArgumentParser,
    on_gpu: Callable[[argparse.Namespace], bool] = lambda options: True,
    without: str = "see `codegen doctor`",
) -> argparse.Namespace:
    """The options. Ends the program for a count below 1, and, where they are `on_gpu`, without a CUDA device;
    `without`: what to do then."""
    options = parser.parse_args()
    for name in COUNTS:
        value = getattr(options, name, 1)
        if value < 1:
            parser.error(f"--{name}: expected at least 1, got {value}")
    if on_gpu(options) and not torch.cuda.is_available():
        parser.error(f"{Path(parser.prog).stem} needs a CUDA device, and torch sees none: {without}")
    return options
