"""Fits the constants of the cost model to measured transfers, by least squares of relative errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from poolwright.runtime.costs import Rates, alone

LARGEST = 1e15
"""Bytes a second that stand for a rate which cannot be told from the measurements."""


@dataclass(frozen=True)
class Sample:
    """One measured transfer: bytes, chunks it went in (0: none, kernels over the link), copies; seconds on
    the device and of the submission."""

    nbytes: int
    chunks: int
    copies: int
    seconds: float
    submit: float


def fit(samples: Sequence[Sample], start: Rates) -> Rates:
    """The constants of one direction that predict these times best; `start` gives those not measured, of the
    rate beside the other direction its share of the rate alone.

    Raises ValueError with fewer than two transfers by kernels or four that were staged.
    """
    direct = [sample for sample in samples if not sample.chunks]
    staged = [sample for sample in samples if sample.chunks]
    if len(direct) < 2 or len(staged) < 4:
        raise ValueError(
            f"expected at least 2 transfers by kernels and 4 staged ones, got {len(direct)} and {len(staged)}"
        )
    seconds = [sample.seconds for sample in direct]
    begin, per_byte = _solve([[1.0, s.nbytes] for s in direct], seconds)
    seconds = [sample.seconds for sample in staged]
    rows = [[1.0, s.chunks, s.nbytes * alone(s.chunks), s.nbytes] for s in staged]
    first, chunk, relayout, link = _solve(rows, seconds)
    submits = [sample.submit for sample in staged]
    per_chunk, per_copy = _solve([[float(s.chunks), float(s.copies)] for s in staged], submits)
    rate = _rate(per_byte)
    return replace(
        start,
        direct_start=_time(begin),
        direct_rate=rate,
        direct_beside=rate * (start.direct_beside / start.direct_rate),
        staged_start=_time(first),
        chunk=_time(chunk),
        relayout_rate=_rate(relayout),
        link_rate=_rate(link),
        submit_direct=_time(sum(sample.submit for sample in direct) / len(direct)),
        submit_chunk=_time(per_chunk),
        submit_copy=_time(per_copy),
    )


def _solve(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Constants of a sum, so that relative errors are least."""
    weights = torch.tensor([1 / value for value in seconds], dtype=torch.float64)
    table = torch.tensor(rows, dtype=torch.float64) * weights[:, None]
    scale = table.abs().amax(dim=0).clamp(min=1e-300)  # columns of bytes and of ones, alike
    found = torch.linalg.lstsq(table / scale, torch.ones(len(rows), 1, dtype=torch.float64)).solution
    return [float(value) for value in found[:, 0] / scale]


def _time(seconds: float) -> float:
    """No constant is below what can be measured."""
    return max(seconds, 1e-8)


def _rate(seconds_per_byte: float) -> float:
    return min(1 / max(seconds_per_byte, 1e-30), LARGEST)
