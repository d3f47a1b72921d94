"""What docs/embedding.md shows is true: its blocks run, on the simulated driver and in processes."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from simulation import Driver, first, last, runs_of

from poolwright.runtime import testing

TEXT = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
CHOICES = {"first": first, "last": last, "random": random.Random(3).randrange}


def blocks(mark: str) -> list[str]:
    return re.findall(rf"<!-- {mark} -->\n```python\n(.*?)```", TEXT, re.DOTALL)


class Engine:
    """The engine's part: its cache on the simulated device, its stream, what it does between calls."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self.driver = Driver(choose)
        self.cache: dict[str, dict[str, Any]] = {}
        self.layers_run = 0

    def make_cache(self) -> dict[str, dict[str, Any]]:
        def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            made = self.driver.tensor(shape, dtype)
            for address, nbytes in runs_of(made):
                self.driver.cpu("first contents", address, nbytes, writes=True)
            return made.normal_()

        kv = {name: [tensor(32, 2, 4) for _ in range(2)] for name in ("k", "v")}
        state = {"temporal": tensor(3, 8, 1, 4, 4, dtype=torch.float32), "conv": tensor(3, 8, 12, 1)}
        self.cache = {"kv": kv, "state": state}
        return self.cache

    def forward_layer(self, layer: int) -> None:
        """Compute reads the rows that were loaded for this layer; the simulator tells a race."""
        kv, state = self.cache["kv"], self.cache["state"]
        rows = [kv["k"][at][16:24] for at in range(2) if (1, 4)[at] == layer]
        rows += [state["temporal"][at][3] for at in range(3) if (0, 2, 3)[at] == layer]
        reads = [place for each in rows for place in runs_of(each)]
        assert reads
        self.driver.compute(self.driver.caller, f"layer {layer}", lambda: None, reads=reads)
        self.layers_run += 1

    def reduce(self, number: int) -> int:
        """One rank agrees with itself; the device goes on meanwhile."""
        self.driver.run(5)
        return number

    def wait_for_ack(self, controller: Any, direction: str) -> list[Any]:
        """Acks of storage, once one is there. The simulator is told of bytes that a worker has written."""
        found: list[Any] = []
        while not found:
            found = controller.pop_acks(direction=direction)
        for ack in found if direction == "fetch" else ():
            for name, pages in ack.operation.pages.items():
                for page in pages:
                    for _, address, nbytes in controller._pools.pools[name].page_objects(page):
                        self.driver.cpu("storage", address, nbytes, writes=True)
        return found

    def names(self) -> dict[str, Any]:
        return {
            "device": "cpu",
            "compute": self.driver.caller,
            "make_cache": self.make_cache,
            "release_cache": self.cache.clear,
            "forward_layer": self.forward_layer,
            "load_weights": object,
            "serve": lambda free: None,
            "all_reduce_min": self.reduce,
            "break_the_device": lambda: self.driver.fail("launch"),
        }


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_the_blocks_run_one_after_the_other(
    choose: Callable[[int], int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = Engine(choose)
    monkeypatch.setattr(testing, "driver_in_use", lambda: engine.driver)  # in every thread
    names, found = engine.names(), blocks("run")
    names |= {
        "folder": tmp_path,
        "wait_for_ack": lambda direction: engine.wait_for_ack(names["controller"], direction),
    }
    elsewhere = blocks("script") + blocks("sglang")  # the latter under its classes, see test_sglang
    assert len(found) == TEXT.count("```python") - len(elsewhere) > 10
    for at, block in enumerate(found):
        exec(compile(block, f"docs/embedding.md, block {at}", "exec"), names)
    engine.driver.run()
    assert engine.layers_run == 5


def test_the_script_runs(tmp_path: Path) -> None:
    (script,) = blocks("script")
    file = tmp_path / "ranks.py"
    file.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".src")}
    subprocess.run([sys.executable, str(file)], env=environment, check=True, timeout=120)
