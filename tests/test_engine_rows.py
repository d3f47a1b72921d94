"""Rows in the byte formats of engines, built here from their published description, through the pools.

Each format is built field by field with torch (quantised values, scales, rotary part, padding) and laid
into an engine's buffer at offsets that are written down here; after a write-back every field has to be
found at its place on the host, after a load every byte on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from poolwright.generated import pool_class
from poolwright.runtime.pool import HostPool

LAYERS, PAGES, TOKENS = (1, 4, 5), 7, 64
TAKEN = (5, 0, 3, 2)
"""Device pages that are written back; the others must stay as they are."""
FILL, POISON = 0xEE, 0x5A
E4M3_MAX = 448.0


@dataclass(frozen=True)
class Field:
    """Bytes [page, entry, width] of one field; entry e of a page stands at ``first + e * step``."""

    name: str
    data: torch.Tensor
    first: int
    step: int


@dataclass(frozen=True)
class Format:
    """Pages of one layer: so many bytes each, made of fields. `read`: fields by name to `values`, nearly."""

    nbytes: int
    fields: tuple[Field, ...]
    read: Callable[[dict[str, torch.Tensor]], torch.Tensor]
    values: torch.Tensor

    def buffer(self) -> torch.Tensor:
        """The engine's memory [page, byte]; what no field covers is padding."""
        made = torch.full((PAGES, self.nbytes), FILL, dtype=torch.uint8)
        for field in self.fields:
            self.part(made, field)[:] = field.data
        return made

    @staticmethod
    def part(pages: torch.Tensor, field: Field) -> torch.Tensor:
        """A view [page, entry, width] of a field in pages [page, byte]."""
        count, entries, width = field.data.shape
        strides = (pages.stride(0), field.step, 1)
        return pages.as_strided((count, entries, width), strides, pages.storage_offset() + field.first)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def quantised(values: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn values and one float32 scale for each block of the last dim."""
    blocks = values.unflatten(-1, (-1, block))
    scales = blocks.abs().amax(-1).clamp(min=1e-4) / E4M3_MAX
    return (blocks / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2), scales


def quantised_by_powers(values: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantised`, the scales powers of two, kept as their exponents above -127 in one byte each."""
    blocks = values.unflatten(-1, (-1, block))
    exponents = (blocks.abs().amax(-1).clamp(min=1e-4) / E4M3_MAX).log2().ceil()
    scaled = blocks / exponents.exp2()[..., None]
    return scaled.to(torch.float8_e4m3fn).flatten(-2), (exponents + 127).to(torch.uint8)


def widened(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Quantised bytes as float32, with their scales [..., block] applied."""
    blocks = data.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (scales.shape[-1], -1))
    return (blocks * scales[..., None]).flatten(-2)


def floats(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return data.contiguous().view(dtype).float()


def powers(data: torch.Tensor) -> torch.Tensor:
    return (data.float() - 127).exp2()


# ---- the formats ------------------------------------------------------------------------------


def latent_rows(seed: int) -> Format:
    """A token is 656 bytes: 512 quantised values, four float32 scales, 64 rotary values of bfloat16."""
    values = random(seed, TOKENS, 512 + 64)
    latent, scales = quantised(values[..., :512], 128)
    fields = (
        Field("latent", as_bytes(latent), 0, 656),
        Field("scale", as_bytes(scales), 512, 656),
        Field("rope", as_bytes(values[..., 512:].bfloat16()), 528, 656),
    )

    def read(found: dict[str, torch.Tensor]) -> torch.Tensor:
        wide = widened(found["latent"], floats(found["scale"], torch.float32))
        return torch.cat([wide, floats(found["rope"], torch.bfloat16)], -1)

    return Format(TOKENS * 656, fields, read, values)


def indexer_pages(seed: int) -> Format:
    """A page of 64 keys is 8,448 bytes: all keys of 128 quantised values, then one float32 scale for each."""
    values = random(seed, TOKENS, 128)
    keys, scales = quantised(values, 128)
    fields = (Field("key", as_bytes(keys), 0, 128), Field("scale", as_bytes(scales), TOKENS * 128, 4))

    def read(found: dict[str, torch.Tensor]) -> torch.Tensor:
        return widened(found["key"], floats(found["scale"], torch.float32))

    return Format(TOKENS * 132, fields, read, values)


def compressed_pages(seed: int) -> Format:
    """64 entries of 584 bytes: values (448 quantised, 64 rotary of bfloat16) of all entries, then scales
    (seven exponents and a byte of padding) of all; the page is padded to a multiple of 576 bytes."""
    values = random(seed, TOKENS, 448 + 64)
    latent, scales = quantised_by_powers(values[..., :448], 64)
    after = TOKENS * 576
    fields = (
        Field("latent", as_bytes(latent), 0, 576),
        Field("rope", as_bytes(values[..., 448:].bfloat16()), 448, 576),
        Field("scale", scales, after, 8),
        Field("pad", torch.zeros(PAGES, TOKENS, 1, dtype=torch.uint8), after + 7, 8),
    )

    def read(found: dict[str, torch.Tensor]) -> torch.Tensor:
        wide = widened(found["latent"], powers(found["scale"]))
        return torch.cat([wide, floats(found["rope"], torch.bfloat16)], -1)

    return Format(37_440, fields, read, values)


def narrow_pages(seed: int, *, together: bool) -> Format:
    """64 entries of 528 bytes: 512 quantised values and 16 exponents, those of an entry `together` or not."""
    values = random(seed, TOKENS, 512)
    latent, scales = quantised_by_powers(values, 32)
    first, step, wide = (512, 528, 528) if together else (TOKENS * 512, 16, 512)
    fields = (Field("latent", as_bytes(latent), 0, wide), Field("scale", scales, first, step))

    def read(found: dict[str, torch.Tensor]) -> torch.Tensor:
        return widened(found["latent"], powers(found["scale"]))

    return Format(33_792, fields, read, values)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(PAGES, *shape, generator=torch.Generator().manual_seed(seed)) * 3


# ---- pools that take them ---------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A pool for a format. `row`: bytes of one row of the device tensor, a token's or a page's."""

    pool: str
    make: Callable[[int], Format]
    sizes: dict[str, Any]
    row: int
    bound: str
    page_size: int = TOKENS


CASES = {
    "mla_fp8": Case(
        "mla_fp8", latent_rows, dict(kv_lora_rank=512, qk_rope_head_dim=64, block=128), 656, "row"
    ),
    "mla_uint8": Case(
        "mla", latent_rows, dict(kv_lora_rank=528, qk_rope_head_dim=128, dtype=torch.uint8), 656, "kv"
    ),
    "dsa_indexer": Case(
        "dsa_indexer", indexer_pages, dict(index_head_dim=128, block=128, ratio=1), 8448, "row"
    ),
    "dsv4_paged_v4": Case("dsv4_paged", compressed_pages, dict(ratio=4, format="v4"), 37_440, "row", 256),
    "dsv4_paged_v41": Case(
        "dsv4_paged",
        functools.partial(narrow_pages, together=False),
        dict(ratio=4, format="v41"),
        33_792,
        "row",
        256,
    ),
    "dsv4_paged_v41_new": Case(
        "dsv4_paged",
        functools.partial(narrow_pages, together=True),
        dict(ratio=4, format="v41_new"),
        33_792,
        "row",
        256,
    ),
}
# Where a row stands on the host, outermost axis first, by layout.
HOST_ORDERS = {
    "layer_first": ("layer", "page", "row"),
    "page_first": ("page", "row", "layer"),
    "page_first_direct": ("page", "layer", "row"),
}
PROGRAMS = [
    (name, layout)
    for name, case in CASES.items()
    for layout in HOST_ORDERS
    if layout in pool_class(case.pool).spec.layouts
]


def pool_for(name: str, layout: str) -> HostPool:
    case = CASES[name]
    made: HostPool = pool_class(case.pool)(
        **case.sizes, layers=LAYERS, page_size=case.page_size, layout=layout, capacity_pages=PAGES
    )
    return made


def host_pages(pool: HostPool, name: str, layout: str) -> torch.Tensor:
    """A copy [layer, page, byte] of the host memory, by the order that the layout stands for."""
    case = CASES[name]
    rows = pool.page_bytes // len(LAYERS) // case.row
    extents = {"layer": len(LAYERS), "page": PAGES, "row": rows}
    order = HOST_ORDERS[layout]
    size = PAGES * pool.page_bytes
    seen = pool.kv_buffer[:size].reshape(*(extents[axis] for axis in order), case.row)
    return seen.permute(*(order.index(axis) for axis in ("layer", "page", "row")), 3).flatten(2)


def ids(pages: list[int], page_size: int, unit: str) -> torch.Tensor:
    starts = torch.tensor(pages)
    if unit == "page":
        return starts
    return (starts[:, None] * page_size + torch.arange(page_size)).reshape(-1)


@pytest.mark.parametrize(
    ("name", "row", "page"),
    [
        ("mla_fp8", 656, 41_984),
        ("mla_uint8", 656, 41_984),
        ("dsa_indexer", 8_448, 8_448),
        ("dsv4_paged_v4", 37_440, 37_440),
        ("dsv4_paged_v41", 33_792, 33_792),
        ("dsv4_paged_v41_new", 33_792, 33_792),
    ],
)
def test_bytes_of_a_page(name: str, row: int, page: int) -> None:
    pool, made = pool_for(name, "page_first"), CASES[name].make(0)
    assert CASES[name].row == row
    assert made.nbytes == page
    assert pool.page_bytes == page * len(LAYERS)
    pool.destroy()


def test_formats_of_one_size_have_tags_of_their_own() -> None:
    pools = [pool_for(f"dsv4_paged_{format_}", "page_first") for format_ in ("v41", "v41_new")]
    assert len({pool.page_bytes for pool in pools}) == 1
    assert len({pool.format_tag for pool in pools}) == 2


@pytest.mark.parametrize(
    ("unit", "path"),
    [("page", "host"), ("page", "zero_copy"), ("page", "staged"), ("page", "torch"), ("token", "host")],
)
@pytest.mark.parametrize(("name", "layout"), PROGRAMS)
def test_every_field_has_its_place_on_the_host(name: str, layout: str, unit: str, path: str) -> None:
    case, pool = CASES[name], pool_for(name, layout)
    formats = [case.make(layer) for layer in LAYERS]
    pages = [made.buffer() for made in formats]
    pool.bind({case.bound: [buffer.view(-1, case.row) for buffer in pages]})
    pool.kv_buffer.fill_(POISON)
    taken, host = list(TAKEN), [6, 1, 2, 4]
    where = [ids(each, case.page_size, unit) for each in (host, taken)]
    pool.write_back(*where, unit, path=path).wait()
    there = host_pages(pool, name, layout)
    for layer, made in enumerate(formats):
        for field in made.fields:
            part = made.part(there[layer].contiguous(), field)
            assert torch.equal(part[host], field.data[taken]), (layer, field.name)
        assert torch.equal(there[layer][host], pages[layer][taken]), "padding"
    left = [page for page in range(PAGES) if page not in host]
    assert bool((there[:, left] == POISON).all())
    pool.destroy()


@pytest.mark.parametrize("path", ["host", "zero_copy", "staged", "torch"])
@pytest.mark.parametrize(("name", "layout"), PROGRAMS)
def test_every_byte_comes_back(name: str, layout: str, path: str) -> None:
    """Into other pages than it came from; pages that nobody asked for keep every byte."""
    case, pool = CASES[name], pool_for(name, layout)
    formats = [case.make(layer) for layer in LAYERS]
    pages = [made.buffer() for made in formats]
    pool.bind({case.bound: [buffer.view(-1, case.row) for buffer in pages]})
    before = [buffer.clone() for buffer in pages]
    taken, host, into = list(TAKEN), [6, 1, 2, 4], [1, 6, 4, 0]
    pool.write_back(ids(host, 1, "page"), ids(taken, 1, "page"), "page", path=path).wait()
    for buffer in pages:
        buffer.fill_(POISON)
    pool.load(ids(host, 1, "page"), ids(into, 1, "page"), "page", path=path).wait()
    for layer, made in enumerate(formats):
        assert torch.equal(pages[layer][into], before[layer][taken])
        left = [page for page in range(PAGES) if page not in into]
        assert bool((pages[layer][left] == POISON).all())
        found = {field.name: made.part(pages[layer], field)[into] for field in made.fields}
        assert_close(made.read(found), made.values[taken])
    pool.destroy()


def assert_close(found: torch.Tensor, values: torch.Tensor) -> None:
    """Up to what three bits of mantissa lose: the fields were read as what they are."""
    lost = (found - values).abs()
    assert bool((lost <= values.abs() / 8 + 0.01).all())
    assert float(lost.mean()) < 0.1


# ---- rings of states --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize(("ring", "overlap"), [(8, 1), (128, 0)])
def test_rings_of_compressor_states(ring: int, overlap: int, layout: str) -> None:
    """An engine keeps states as rows of one tensor; a page is a ring of them. The rest stays."""
    head_dim, wide = 16, 2 * (1 + overlap) * 16
    pool = pool_class("dsv4_state")(
        head_dim=head_dim,
        overlap=overlap,
        ring=ring,
        dtype=torch.float32,
        layers=LAYERS,
        page_size=128,
        layout=layout,
        capacity_pages=PAGES,
    )
    generator = torch.Generator().manual_seed(ring)
    rows = [torch.randn(PAGES * ring + 3, wide, generator=generator) for _ in LAYERS]
    before = [each.clone() for each in rows]
    pool.bind({"state": rows})
    taken, host, into = list(TAKEN), [6, 1, 2, 4], [1, 6, 4, 0]
    pool.write_back(ids(host, 128, "token"), ids(taken, 128, "token")).wait()
    size = ring * wide
    floats_ = pool.kv_buffer[: PAGES * pool.page_bytes].view(torch.float32)
    order = ("layer", "page") if layout == "layer_first" else ("page", "layer")
    extents = {"layer": len(LAYERS), "page": PAGES}
    there = floats_.reshape(*(extents[axis] for axis in order), size)
    there = there if layout == "layer_first" else there.transpose(0, 1)
    for layer, each in enumerate(before):
        assert torch.equal(there[layer][host], each[: PAGES * ring].reshape(PAGES, size)[taken])
    for each in rows:
        each.fill_(7)
    pool.load(ids(host, 128, "token"), ids(into, 128, "token")).wait()
    for each, old in zip(rows, before, strict=True):
        rings = each[: PAGES * ring].reshape(PAGES, size)
        assert torch.equal(rings[into], old[: PAGES * ring].reshape(PAGES, size)[taken])
        left = [page for page in range(PAGES) if page not in into]
        assert bool((rings[left] == 7).all()) and bool((each[PAGES * ring :] == 7).all())
    pool.destroy()
