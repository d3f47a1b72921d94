"""Specs of a test's own: YAML text in, a generated package out, loaded in this process."""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import ModuleType

from poolwright.codegen import lower, render, resolve
from poolwright.runtime.tools.package import load_package


def generate(folder: Path, name: str, *texts: str, layouts: str = "") -> ModuleType:
    """Build the specs into `folder`/`name` and load it; import names are not shared between tests."""
    specs, output = folder / "specs", folder / name
    specs.mkdir()
    for text in texts:
        spec = textwrap.dedent(text)
        stem = next(line for line in spec.splitlines() if line.startswith("pool:")).split()[1]
        (specs / f"{stem}.yaml").write_text(spec, encoding="utf-8")
    if layouts:
        (specs / "layouts.yaml").write_text(textwrap.dedent(layouts), encoding="utf-8")
    pools = resolve.read_specs(specs, folder).pools
    for path, content in render.render([lower.lower(pool) for pool in pools]).items():
        file = output / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    return load_package(name, output)
