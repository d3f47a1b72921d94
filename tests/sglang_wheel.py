"""SGLang's published wheel: its Python files in a folder, and its cache modules with all else stubbed.

The modules under test are the wheel's own files. What they import beyond those in `REAL` (kernels, models,
the server) is a stub: a module that has a class of any name.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHEEL = "sglang==0.5.23"
VARIABLE = "POOLWRIGHT_SGLANG"
KEPT = ROOT / "build" / "sglang-0.5.23"
PARTS = (
    "sglang/srt/mem_cache/",
    "sglang/srt/managers/",
    "sglang/srt/disaggregation/",
    "sglang/srt/environ.py",
)

REAL = (
    "sglang.srt.environ",
    "sglang.srt.managers.cache_controller",
    "sglang.srt.mem_cache.hicache_storage",
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller",
    "sglang.srt.mem_cache.l2_transfer",
    "sglang.srt.mem_cache.pool_host",
    "sglang.srt.mem_cache.pool_host.base",
    "sglang.srt.mem_cache.pool_host.common",
    "sglang.srt.mem_cache.pool_host.group",
    "sglang.srt.mem_cache.storage",
    "sglang.srt.mem_cache.storage.backend_factory",
    "sglang.srt.mem_cache.storage.file",
    "sglang.srt.mem_cache.storage.file.lru_file_evictor",
)


def wheel_folder() -> Path:
    """The folder that holds the wheel's `sglang`: the one named in the environment, or a download, kept."""
    named = os.environ.get(VARIABLE)
    folder = Path(named) if named else KEPT
    if not named and not (folder / "sglang").is_dir():
        _fetch(folder)
    if not (folder / REAL[0].replace(".", "/")).with_suffix(".py").is_file():
        raise RuntimeError(
            f"{folder} holds no sglang/srt/environ.py: have {VARIABLE} name a folder with the unpacked wheel"
            f" (pip download --no-deps {WHEEL}, then unzip)"
        )
    return folder


def _fetch(folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        if not _download(Path(place)):
            raise RuntimeError(
                f"pip cannot download {WHEEL}: give it a package index, or have {VARIABLE} name a folder"
                f" with the unpacked wheel (pip download --no-deps {WHEEL}, then unzip)"
            )
        (wheel,) = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [each for each in archive.namelist() if each.endswith(".py") and each.startswith(PARTS)]
            archive.extractall(Path(place) / "unpacked", names)
        (Path(place) / "unpacked").rename(folder)


def _download(folder: Path) -> bool:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return bool(importlib.import_module("sglang_build").download(WHEEL, "3.11", folder))
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


class Stub(types.ModuleType):
    """A module that has a class of any name; it is a package, too."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class Finder(MetaPathFinder, Loader):
    """Finds the modules of `REAL` in a folder, and stubs for all others of the engine."""

    def __init__(self, folder: Path, given: dict[str, dict[str, Any]]) -> None:
        self._folder, self._given = folder, given

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "sglang":
            return None
        if fullname not in REAL:
            return importlib.util.spec_from_loader(fullname, self, is_package=True)
        place = self._folder / fullname.replace(".", "/")
        package = place.is_dir()
        file = place / "__init__.py" if package else place.with_suffix(".py")
        places = [str(place)] if package else None
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=places)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.update(self._given.get(module.__name__, {}))


class Parallel:
    """One rank of one."""

    tp_rank = pp_rank = attn_dcp_rank = 0
    tp_size = pp_size = attn_dcp_size = launch_world_size = nnodes = 1


class Devices:
    """The engine's module of a device, over a driver that each test sets."""

    __name__ = "devices"

    def __init__(self) -> None:
        devices = self
        self.driver: Any = None

        class Stream:
            def __init__(self, handle: Any = None) -> None:
                self.handle = devices.driver.new_stream("engine") if handle is None else handle

            def wait_stream(self, other: Stream) -> None:
                devices.driver.follow(self.handle, other.handle)

            def wait_event(self, event: Event) -> None:
                event.wait(self)

            def synchronize(self) -> None:
                devices.driver.synchronize(devices.driver.record(self.handle))

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.handle: Any = None

            def record(self, stream: Stream | None = None) -> None:
                place = devices.driver.current_stream() if stream is None else stream.handle
                self.handle = devices.driver.record(place)

            def wait(self, stream: Stream | None = None) -> None:
                place = devices.driver.current_stream() if stream is None else stream.handle
                if self.handle is not None:
                    devices.driver.wait(place, self.handle)

            def query(self) -> bool:
                return self.handle is None or devices.driver.done(self.handle)

            def synchronize(self) -> None:
                if self.handle is not None:
                    devices.driver.synchronize(self.handle)

        self.Stream, self.Event = Stream, Event

    def stream(self, stream: Any) -> Any:
        return self.driver.use_stream(stream.handle)

    def current_stream(self) -> Any:
        return self.Stream(self.driver.current_stream())


def _given(devices: Any) -> dict[str, dict[str, Any]]:
    """What stubs have that the modules under test call."""

    def no(*_: Any) -> bool:
        return False

    answers = {name: no for name in ("is_cuda", "is_hip", "is_npu", "is_xpu", "is_mps")}
    return {
        "sglang.srt.utils": {**answers, "get_device_module": lambda: devices},
        "sglang.srt.utils.common": {"human_readable_int": int},
        "sglang.srt.runtime_context": {"get_parallel": Parallel},
        "sglang.srt.layers.dp_attention": {"is_dp_attention_enabled": no},
        "sglang.srt.mem_cache.utils": {"get_storage_hash_str": page_hashes, "get_hash_str": None},
    }


def page_hashes(tokens: Sequence[int], last_hash: str | None = None, *, page_size: int) -> list[str]:
    """A name for every full page of a prompt, which depends on all before it."""
    found, last = [], last_hash or ""
    for at in range(0, len(tokens) // page_size * page_size, page_size):
        last = hashlib.sha256(f"{last}:{list(tokens[at : at + page_size])}".encode()).hexdigest()
        found.append(last)
    return found


class Engine:
    """The wheel's modules: ``engine("mem_cache.l2_transfer")``. `devices` is their module of a device."""

    def __init__(self, devices: Any) -> None:
        self.devices = devices

    def __call__(self, name: str) -> Any:
        return importlib.import_module(f"sglang.srt.{name}")


@contextmanager
def engine(folder: Path, devices: Any = None) -> Iterator[Engine]:
    """The wheel's modules, importable as long as this lasts. Nothing of it stays behind.

    `devices`: such as ``torch.cuda``; left out, one over a driver that is set later.
    """
    devices = Devices() if devices is None else devices
    finder = Finder(folder, _given(devices))
    before = {name for name in sys.modules if name.partition(".")[0] == "sglang"}
    if before:
        raise RuntimeError(f"sglang is imported already: {sorted(before)[:3]}")
    sys.meta_path.insert(0, finder)
    try:
        yield Engine(devices)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]
