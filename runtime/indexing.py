"""The last resort: moves pages by torch indexing over byte views, right everywhere, fast nowhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from poolwright.runtime.description import HostLayout, HostPart
from poolwright.runtime.indices import Batch
from poolwright.runtime.program import SizedProgram

Views = Mapping[str, Sequence[torch.Tensor]]
"""The bound tensors' bytes by component, as `Binding` has them."""

Positions = Mapping[str | None, Sequence[int]]
"""Layers to move: positions by layer list; under None [0] for components without layers, or nothing."""


def host_view(buffer: torch.Tensor, part: HostPart, size: int) -> torch.Tensor:
    """A component of a host (or staging) buffer: its axes, and the `size` bytes of one item last."""
    shape = [extent for _, extent, _ in part.axes]
    strides = [step for _, _, step in part.axes]
    return buffer.as_strided([*shape, size], [*strides, 1], buffer.storage_offset() + part.base)


def move(
    program: SizedProgram,
    layout: HostLayout,
    buffer: torch.Tensor,
    views: Views,
    direction: str,
    batch: Batch,
    layers: Positions | None,
) -> None:
    """Move a batch between `buffer` (uint8, all host bytes) and the bound tensors' byte views: all layers, or
    those at these positions."""
    pages, tokens = _ids(batch, program.sizes["page_size"], buffer.device)
    for part in program.device:
        bound = views.get(part.ident)
        if bound is None:
            continue  # not there, or its layer list is empty
        here = layout.part(part.ident)
        host, host_axes = host_view(buffer, here, bound[0].shape[-1]), [*(a for a, _, _ in here.axes), "byte"]
        axes = [*(axis for axis, _, _ in part.axes), "byte"]
        wanted = None if layers is None else layers[program.lists[part.ident]]
        for layer in _layers(host, host_axes, wanted):
            mine, mine_axes = _layer_of(host, host_axes, layer)
            tensor = bound[layer if part.table is not None else 0]
            theirs, their_axes = (tensor, axes) if part.table is not None else _layer_of(tensor, axes, layer)
            lead = _lead(their_axes)
            mine = mine.permute([mine_axes.index(axis) for axis in lead])
            theirs = theirs.permute([their_axes.index(axis) for axis in lead])
            both = [pages] if tokens is None or "token" not in lead else [pages, tokens]
            at_host = tuple(here for here, _ in both)
            at_device = tuple(there.to(theirs.device) for _, there in both)
            if direction == "write_back":
                mine[at_host] = theirs[at_device].to(mine.device)
            else:
                theirs[at_device] = mine[at_host].to(theirs.device)


Pairs = tuple[torch.Tensor, torch.Tensor]


def _ids(batch: Batch, page_size: int, near: torch.device) -> tuple[Pairs, Pairs | None]:
    """(host, device) pages, and tokens within them when ids address tokens, beside the buffer `near`.

    Skipped ids are left out of a buffer on the CPU. On a device nothing may wait, and leaving out would:
    they stand for row 0 there, for who compares and knows which were skipped.
    """
    host = _beside(batch.host, near)
    if batch.on_device is None:
        device = _beside(batch.device, near)
    else:
        device = batch.on_device.to(near, torch.int64)
        if batch.unit == "tokens":
            host = (host[:, None] * page_size + torch.arange(page_size, device=near)).reshape(-1)
        if near.type == "cpu":
            host, device = host[device >= 0], device[device >= 0]
        else:
            device = device.clamp(min=0)
    if batch.unit == "pages":
        return (host, device), None
    return (host // page_size, device // page_size), (host % page_size, device % page_size)


def _beside(ids: Sequence[int], near: torch.device) -> torch.Tensor:
    """Ids in the memory of `near`, without waiting for what runs there."""
    made = torch.tensor(ids, dtype=torch.int64)
    return made if near.type == "cpu" else made.pin_memory().to(near, non_blocking=True)


def _layers(host: torch.Tensor, axes: Sequence[str], layers: Sequence[int] | None) -> Sequence[int]:
    """Positions to move; a component without a layer axis has the position 0."""
    if "layer" not in axes:
        return [0] if layers is None else layers
    return range(host.shape[axes.index("layer")]) if layers is None else layers


def _layer_of(tensor: torch.Tensor, axes: Sequence[str], layer: int) -> tuple[torch.Tensor, list[str]]:
    if "layer" not in axes:
        return tensor, list(axes)
    at = list(axes).index("layer")
    return tensor.select(at, layer), [*axes[:at], *axes[at + 1 :]]


def _lead(axes: Sequence[str]) -> list[str]:
    """Page and token first, so that they can be indexed together."""
    first = [axis for axis in ("page", "token") if axis in axes]
    return first + [axis for axis in axes if axis not in first]
