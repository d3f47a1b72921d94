"""Pools under SGLang's own transfer engine: bytes compared, CPU time of a submission, when layers arrive.

`together`: what the adapter does, one load in layer order for all pools. `by layer`: a submission for each
layer and pool, as the engine asks for them. Median of the rounds. Needs the wheel's sources: run
``pytest tests/test_sglang.py`` once where there is a package index, and carry `build/sglang-0.5.23` along.

Run ``python benchmarks/sglang_engine.py``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import sglang_wheel
from asked import asked

from poolwright.generated import group_class
from poolwright.generated.pools.mha.pool import MHATokenToKVPoolHost
from poolwright.runtime.integrations.sglang import host_pool, host_pools

PAGE = 64
COLUMNS = ("pools", "ids", "loads", "MiB", "out: CPU us", "GB/s", "in: CPU us", "first layer us", "GB/s")


class ByLayer:
    """A host pool whose ids are not announced, so that every call is a submission of its own."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def prepare_transfer_indices(self, host: Any, device: Any, io_backend: str) -> tuple[Any, Any]:
        return host, device


@dataclass(frozen=True)
class Case:
    """Pools to move: as the engine sees them, their device tensors, bytes of a page of all of them."""

    name: str
    pools: Mapping[str, Any]
    rows: Mapping[str, list[torch.Tensor]]
    layers: int
    page_bytes: int
    destroy: Callable[[], None]


def mha(device: str, layers: int, pages: int) -> Case:
    pool = MHATokenToKVPoolHost(
        heads=8,
        head_dim=128,
        v_head_dim=128,
        dtype=torch.bfloat16,
        layers=range(layers),
        page_size=PAGE,
        layout="page_first_direct",
        capacity_pages=pages,
        device=device,
    )
    made = [torch.randn(2 * pages * PAGE, 8, 128, device=device).bfloat16() for _ in range(2 * layers)]
    pool.bind({"k": made[:layers], "v": made[layers:]})
    return Case("mha", {"kv": host_pool(pool)}, {"kv": made}, layers, pool.page_bytes, pool.destroy)


def dsv32(device: str, layers: int, pages: int) -> Case:
    group = group_class("dsv32")(
        kv={
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "dtype": torch.bfloat16,
            "layers": range(layers),
            "layout": "page_first_direct",
        },
        indexer={"index_head_dim": 128, "layers": range(layers), "layout": "page_first"},
        page_size=PAGE,
        capacity_pages={"kv": pages},
        device=device,
    )
    latents = [torch.randn(2 * pages * PAGE, 576, device=device).bfloat16() for _ in range(layers)]
    size = (2 * pages, PAGE * 132)
    keys = [torch.randint(0, 255, size, dtype=torch.uint8, device=device) for _ in range(layers)]
    group.bind({"kv": {"kv": latents}, "indexer": {"row": keys}})
    page = sum(pool.page_bytes for pool in group.pools.values())
    return Case("dsv32", host_pools(group), {"kv": latents, "indexer": keys}, layers, page, group.destroy)


class Rounds:
    """One case, one place for ids, one way to load."""

    def __init__(self, engine: Any, case: Case, backend: str, together: bool, pages: int) -> None:
        self.engine, self.case, self.backend, self.pages = engine, case, backend, pages
        # Index keys move with the latents whose ids they take.
        self.pools = case.pools if together else {"kv": ByLayer(case.pools["kv"])}
        self.label = (case.name, backend, "together" if together else "by layer")
        self.l2 = engine("mem_cache.l2_transfer").L2TransferEngine(backend)
        device = case.rows["kv"][0].device
        order = torch.randperm(2 * pages)
        self.source, self.target = (self._tokens(each) for each in (order[:pages], order[pages:]))
        self.host = self._tokens(torch.randperm(pages))
        self.loaded = self.host
        if backend == "kernel":  # where the engine puts ids: those of a load's host pages are read back
            self.source, self.target = self.source.to(device), self.target.to(device)
            self.loaded = self.host.to(device) if together else self.host
        self.times: list[tuple[float, ...]] = []

    @staticmethod
    def _tokens(pages: torch.Tensor) -> torch.Tensor:
        return (pages[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)

    def transfers(self, pools: Mapping[str, Any], host: torch.Tensor, device: torch.Tensor) -> list[Any]:
        made = self.engine("mem_cache.l2_transfer").L2Transfer
        return [made(pool, None, host, device, lambda layer: layer) for pool in pools.values()]

    def run(self) -> None:
        event = self.engine.devices.Event
        moved = self.pages * self.case.page_bytes
        self.engine.devices.synchronize()
        began = time.perf_counter()
        done = self.l2.submit_device_to_host(self.transfers(self.case.pools, self.host, self.source))
        out = time.perf_counter() - began
        done.finish_event.synchronize()
        out_all = done.start_event.elapsed_time(done.finish_event) / 1e3
        layers = [event(enable_timing=True) for _ in range(self.case.layers)]
        self.engine.devices.synchronize()
        began = time.perf_counter()
        done = self.l2.submit_host_to_device(
            self.transfers(self.pools, self.loaded, self.target),
            transfer_layer_id_max=self.case.layers,
            on_layer_done=lambda layer: layers[layer].record(),
        )
        into = time.perf_counter() - began
        done.finish_event.synchronize()
        into_all = done.start_event.elapsed_time(done.finish_event) / 1e3
        first = done.start_event.elapsed_time(layers[0]) * 1e3
        self.times.append((out * 1e6, moved / out_all / 1e9, into * 1e6, first, moved / into_all / 1e9))

    def check(self) -> None:
        """Every row that came back is what went out. Raises AssertionError."""
        for name, rows in self.case.rows.items():
            for at, row in enumerate(rows):
                source, target = self.source.to(row.device), self.target.to(row.device)
                if name == "indexer":
                    source, target = source[::PAGE] // PAGE, target[::PAGE] // PAGE
                assert torch.equal(row[target], row[source]), f"{self.label}: {name}, tensor {at} differs"

    def line(self) -> str:
        figures = [f"{statistics.median(column):.1f}" for column in zip(*self.times, strict=True)]
        return " | ".join([*self.label, f"{self.pages * self.case.page_bytes / 2**20:.0f}", *figures])


def main() -> None:
    parser = argparse.ArgumentParser(description="Pools under SGLang's transfer engine")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pages", type=int, nargs="+", default=(4, 64))
    options = asked(parser)
    print(" | ".join(COLUMNS), flush=True)
    with sglang_wheel.engine(sglang_wheel.wheel_folder(), torch.cuda) as engine:
        for make, layers in ((mha, 32), (dsv32, 61)):
            for pages in options.pages:
                case = make("cuda", layers, pages)
                for backend in ("direct", "kernel"):
                    for together in (True, False):
                        rounds = Rounds(engine, case, backend, together, pages)
                        for _ in range(options.rounds + 3):
                            rounds.run()
                        rounds.check()
                        del rounds.times[:3]
                        print(rounds.line(), flush=True)
                case.destroy()
    print("every row came back as it went out")


if __name__ == "__main__":
    main()
