"""SGLang 0.5.23's transfer kernels, called as SGLang calls them: device rows and pinned host rows in,
transfers on torch's current stream out.

In: `build/peer`, made by `benchmarks/sglang_build.py`. The host order is SGLang's page_first, which is the
order of this project's layout of that name, so that both sides' bytes can be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from sglang_build import FOLDER, ROWS

STAGING_PAGES = 64
"""SGLang's _WRITE_BACK_STAGING_PAGE_CHUNK."""

TMA_STAGE = 32 << 10


def available() -> str:
    """Why the peer cannot be called here, with the command that mends it; "" when it can."""
    if not (FOLDER / "lib" / "mamba.so").exists():
        return "build/peer is not there: run `python benchmarks/sglang_build.py fetch build`"
    return ""


@dataclass(frozen=True)
class Ids:
    """Token ids of one transfer, as SGLang has them: host ids on the CPU and on the GPU, device ids there."""

    host: torch.Tensor
    host_on_device: torch.Tensor
    device: torch.Tensor


class Peer:
    """The kernels of one pool, of one or two components that have rows of one width.

    `device`: for each component one uint8 ``[tokens, row]`` tensor a layer; `host`: for each component uint8
    ``[tokens, layers, row]``, pinned. `states`: rows are recurrent states, which SGLang moves with kernels
    of their own. Raises RuntimeError when the libraries are not there.
    """

    def __init__(
        self,
        device: Sequence[Sequence[torch.Tensor]],
        host: Sequence[torch.Tensor],
        page_size: int,
        *,
        states: bool = False,
    ) -> None:
        why = available()
        if why:
            raise RuntimeError(why)
        self.device, self.host, self.page_size = device, host, page_size
        self.row, self.layers = int(device[0][0].shape[1]), len(device[0])
        self._both, self._states = len(device) == 2, states
        where = device[0][0].device
        self._tables = [_table([rows.data_ptr() for rows in component], where) for component in device]
        starts = ([side.data_ptr() + at * self.row for at in range(self.layers)] for side in host)
        self._host_tables = [_table(addresses, where) for addresses in starts]
        self._views = [[side[:, at] for at in range(self.layers)] for side in host]
        self._staging: list[torch.Tensor] = []
        self._modules: dict[str, Any] = {}

    @property
    def write_backs(self) -> tuple[str, ...]:
        """Names that `write_back` takes."""
        if self._states:
            return ("mamba",)
        return ("staged",) if self.row in ROWS else ()

    @property
    def loads(self) -> tuple[str, ...]:
        """Names that `load` takes."""
        if self._states:
            return ("mamba",)
        known = ("register",) if self.row in ROWS else ()
        return (*known, "tma") if self.row <= TMA_STAGE else known

    def ids(self, host_pages: torch.Tensor, device_pages: torch.Tensor) -> Ids:
        """Token ids for lists of page ids on the CPU."""
        steps = torch.arange(self.page_size)
        tokens = [
            (pages[:, None] * self.page_size + steps).reshape(-1) for pages in (host_pages, device_pages)
        ]
        where = self._tables[0].device
        return Ids(tokens[0], tokens[0].to(where), tokens[1].to(where))

    def write_back(self, kind: str, ids: Ids) -> None:
        """All layers to the host, as `backup_from_device_all_layer` does it for page_first."""
        if kind == "mamba":
            launch, row = self._module("mamba").write_back, self.row
            for table, side in zip(self._tables, self.host, strict=True):
                launch(table, side, ids.device, ids.host_on_device, row, row * self.layers, self.layers)
            return
        name = "launch_all_lf_pf_staged" if self._both else "launch_all_mla_lf_pf_staged"
        launch = getattr(self._module(f"staged_{self.row}"), name)
        size, pages = self.page_size, ids.device[:: self.page_size].contiguous()
        staging = self._stage(len(pages))
        for first in range(0, len(pages), STAGING_PAGES):
            count = min(STAGING_PAGES, len(pages) - first)
            launch(
                *self.host,
                ids.host[first * size : (first + count) * size],
                *(stage[: count * size] for stage in staging),
                pages[first : first + count],
                *self._tables,
                size,
            )

    def load(self, kind: str, ids: Ids, *, layered: bool) -> list[torch.cuda.Event]:
        """To the device: all layers in one launch, or one launch and one event a layer.

        Returns the events in the order of layers; states are always moved layer by layer.
        """
        if kind == "mamba":
            return [self._load_state(layer, ids) for layer in range(self.layers)]
        module = self._module("tma" if kind == "tma" else f"register_{self.row}")
        if layered:
            launch = module.launch_one if self._both else module.launch_one_mla
            return [self._load_layer(launch, layer, ids) for layer in range(self.layers)]
        launch = module.launch_all if self._both else module.launch_all_mla
        strides: tuple[int, ...] = (self.row * self.layers, self.row)
        launch(
            *(*self._tables, ids.device, *self._host_tables, ids.host_on_device),
            *(strides if kind != "tma" else (*strides, self.row)),
        )
        return []

    def _load_layer(self, launch: Any, layer: int, ids: Ids) -> torch.cuda.Event:
        to = [rows[layer] for rows in self.device]
        source = [views[layer] for views in self._views]
        launch(*to, ids.device, *source, ids.host_on_device)
        return _recorded()

    def _load_state(self, layer: int, ids: Ids) -> torch.cuda.Event:
        launch, row = self._module("mamba").load, self.row
        for rows, side in zip(self.device, self.host, strict=True):
            launch(side, rows[layer], ids.host_on_device, ids.device, layer, row, row * self.layers)
        return _recorded()

    def _stage(self, pages: int) -> list[torch.Tensor]:
        """Staging for at most STAGING_PAGES pages of each component."""
        tokens = min(pages, STAGING_PAGES) * self.page_size
        if not self._staging or len(self._staging[0]) < tokens:
            shape, where = (tokens, self.layers, self.row), self._tables[0].device
            self._staging = [torch.empty(shape, dtype=torch.uint8, device=where) for _ in self.device]
        return self._staging

    def _module(self, name: str) -> Any:
        if name not in self._modules:
            self._modules[name] = _ffi().load_module(str(FOLDER / "lib" / f"{name}.so"))
        return self._modules[name]


def on_stream(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
    """Makes `stream` the current one: for torch, and for the peer's kernels where they can be called."""
    if available():
        return torch.cuda.stream(stream)
    context: AbstractContextManager[Any] = _ffi().use_torch_stream(torch.cuda.stream(stream))
    return context


def _ffi() -> Any:
    site = str(FOLDER / "site")
    if site not in sys.path:
        sys.path.append(site)
    import tvm_ffi

    return tvm_ffi


def _table(addresses: Sequence[int], where: torch.device) -> torch.Tensor:
    return torch.tensor(addresses, dtype=torch.uint64, device=where)


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event
