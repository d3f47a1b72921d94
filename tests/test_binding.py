"""What an engine may hand to `bind`: every way to say the same bytes, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from own_pools import generate

HEAD = """
    pool: {name}
    class: {title}PoolHost
    summary: A pool for tests.
    index: token
    updates: append
    params: {{w: {{min: 1}}, x: {{min: 1, default: 3}}, first: {{min: 0, default: 0}}}}
"""
PLAIN = """
    components: {a: {element: {dim: w, lane: 2}, dtype: int16}}
    device:
      per_layer: {tensors: [component, layer], order: [page, token, element], base: first}
      stacked: {tensors: [component], order: [layer, page, token, element], base: first}
      strided: {tensors: [component, layer], order: [page, token, element], stride: {page: any, token: any}}
      lanes: {tensors: [component, layer], order: [page, lane, token, dim], base: first}
    layouts: [page_record]
    require: [x >= 1]
"""
SHARED = """
    components: {a: {element: {dim: w}, dtype: int16}, b: {element: {dim: x}, dtype: int16}}
    device:
      paged: {tensors: [layer], order: [page, component, token, element], base: first}
      strided: {tensors: [layer], order: [page, component, token, element], stride: {page: any}}
    layouts: [page_record]
"""
ALIKE = """
    components: {a: {element: {dim: w}, dtype: int16}, b: {element: {dim: w}, dtype: int16}}
    device:
      paged: {tensors: [layer], order: [page, component, token, element]}
      halves: {tensors: [layer], order: [component, page, token, element]}
    layouts: [page_record]
    require: [x >= 1, first >= 0]
"""
SCALED = """
    components:
      a: {element: {dim: w}, dtype: int16}
      s: {element: {lane: x}, dtype: int16, per: page}
    device:
      per_layer: {tensors: [component, layer], order: [page, token, element]}
    layouts: [page_record]
    require: [first >= 0]
"""
WIDTH, TOKENS, PAGES, LAYERS = 3, 4, 5, (2, 4, 7)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    texts = [
        HEAD.format(name=name, title=name.capitalize()) + body
        for name, body in (("plain", PLAIN), ("shared", SHARED), ("alike", ALIKE), ("scaled", SCALED))
    ]
    return generate(tmp_path_factory.mktemp("binding"), "binding_out", *texts)


Make = Callable[..., Any]


@pytest.fixture
def make(package: Any) -> Iterator[Make]:
    made: list[Any] = []

    def build(name: str, **given: Any) -> Any:
        given = {"w": WIDTH, "layers": LAYERS, "page_size": TOKENS, "capacity_pages": 2, **given}
        made.append(package.pool_class(name)(**given))
        return made[-1]

    yield build
    for pool in made:
        pool.destroy()


def numbered(*shape: int) -> torch.Tensor:
    """A tensor of different numbers."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.int16).reshape(shape)


def moved(pool: Any, page: int) -> torch.Tensor:
    """What a write-back of one page brings to the host, and a load back takes to where it was."""
    pool.kv_buffer.zero_()
    pool.write_back(torch.tensor([1]), torch.tensor([page]), "page").wait()
    return pool.kv_buffer[pool.page_bytes :].view(torch.int16).clone()


def page_of(rows: torch.Tensor, page: int, first: int = 0) -> torch.Tensor:
    """The page in the order of page_record: token, layer, element. `rows`: layer, row, element."""
    start = first + page * TOKENS
    return rows[:, start : start + TOKENS].transpose(0, 1).flatten()


ROWS = numbered(3, PAGES * TOKENS, WIDTH, 2)


@pytest.mark.parametrize(
    "shape", [(20, 3, 2), (20, 6), (5, 4, 3, 2), (5, 4, 6), (20, 1, 6), (5, 24), (120,), (20, 3, 2, 1)]
)
@pytest.mark.parametrize("form", ["per_layer", "stacked"])
def test_axes_merged_or_not(make: Make, form: str, shape: tuple[int, ...]) -> None:
    pool = make("plain", form=form)
    rows = ROWS.reshape(3, *shape)
    pool.bind({"a": list(rows) if form == "per_layer" else rows})
    assert torch.equal(moved(pool, 3), page_of(ROWS, 3))


@pytest.mark.parametrize("rows", [TOKENS, TOKENS + 1, 2 * TOKENS - 1])
@pytest.mark.parametrize("layers", [LAYERS, LAYERS[:1]])
def test_exactly_one_page(make: Make, layers: tuple[int, ...], rows: int) -> None:
    """The pages are an axis of extent 1, or merged with the tokens, or not there: no other axis is taken
    for them, whatever its extent; rows may be left over behind it."""
    for form in ("per_layer", "stacked"):
        pool = make("plain", form=form, layers=layers)
        one = numbered(len(layers), rows, WIDTH, 2)
        shapes = [(rows, WIDTH, 2), (rows, 2 * WIDTH), (1, rows, WIDTH, 2), (rows, 1, 2 * WIDTH)]
        shapes += [(TOKENS * WIDTH * 2,)] * (rows == TOKENS)
        for shape in shapes:
            given = one.reshape(len(layers), *shape)
            pool.rebind({"a": list(given) if form == "per_layer" else given})
            assert pool._bound.pages == 1
            assert torch.equal(moved(pool, 0), page_of(one, 0))
            before = one.clone()
            one.zero_()
            pool.load(torch.tensor([1]), torch.tensor([0]), "page").wait()
            assert torch.equal(one[:, :TOKENS], before[:, :TOKENS]) and not one[:, TOKENS:].any()
            one.copy_(before)
            with pytest.raises(ValueError, match="device ids: expected 0 to 0, got 1"):
                pool.load(torch.tensor([1]), torch.tensor([1]), "page")


def test_a_row_for_each_token_is_not_one_for_each_page(make: Make) -> None:
    pool, x = make("scaled", layers=LAYERS[:1]), 3
    rows = {"a": [numbered(PAGES * TOKENS, WIDTH)]}
    many = numbered(PAGES * TOKENS, x)
    message = "^scaled: s: rows: expected one a page, 5 or a few more, got 20, one for each token; bind its"
    with pytest.raises(ValueError, match=message):
        pool.bind({**rows, "s": [many]})
    for count in (PAGES, PAGES + 1, 2 * PAGES, PAGES * TOKENS - 1):
        pool.rebind({**rows, "s": [many[:count]]})
        found = moved(pool, 3)
        assert torch.equal(found[TOKENS * WIDTH :], many[3])
        assert torch.equal(found[: TOKENS * WIDTH], rows["a"][0][3 * TOKENS : 4 * TOKENS].flatten())


def test_exactly_one_page_of_components_in_one_tensor(make: Make) -> None:
    """Outside the pages there may be components, or the stride of the pages is the tensor's."""
    halves = make("alike", form="halves")
    pages = numbered(3, 2, TOKENS, WIDTH)
    for shape in ((2, 1, TOKENS, WIDTH), (2, TOKENS, WIDTH), (2, TOKENS * WIDTH)):
        halves.rebind({"alike": list(pages.reshape(3, *shape))})
        assert torch.equal(moved(halves, 0), record_of(pages[:, :1], pages[:, 1:], 0))
    shared = make("shared", x=5, form="strided")
    block = numbered(3, 1, 32)
    shared.bind({"shared": list(block)})
    a, b = block[:, :, :12].reshape(3, 1, 4, 3), block[:, :, 12:].reshape(3, 1, 4, 5)
    assert torch.equal(moved(shared, 0), record_of(a, b, 0))


def test_layers_in_one_tensor_or_apart_for_both_kinds_of_form(make: Make) -> None:
    for form in ("per_layer", "stacked"):
        pool = make("plain", form=form)
        ways: list[Any] = [ROWS, list(ROWS), tuple(ROWS), dict(zip(LAYERS, ROWS, strict=True))]
        for given in ways:
            pool.rebind({"a": given})
            assert torch.equal(moved(pool, 2), page_of(ROWS, 2))


def test_one_layer_in_a_list_or_not(make: Make) -> None:
    rows = ROWS[:1]
    for form in ("per_layer", "stacked"):
        pool = make("plain", form=form, layers=(2,))
        for given in (rows, rows[0], [rows[0]], {2: rows[0]}):
            pool.rebind({"a": given})
            assert torch.equal(moved(pool, 3), page_of(rows, 3))


def test_layers_that_do_not_lie_evenly_need_a_form_of_their_own(make: Make) -> None:
    pool = make("plain", form="stacked")
    for uneven in ([row.clone() for row in ROWS], [ROWS[0], ROWS[2], ROWS[1]]):
        with pytest.raises(
            ValueError, match="plain: a: this form has one tensor with an axis of layers, got"
        ):
            pool.bind({"a": uneven})
    with pytest.raises(ValueError, match="plain: a: expected one tensor, got int"):
        pool.bind({"a": 3})


def test_layers_that_the_pool_leaves_out(make: Make) -> None:
    """The engine holds layers 1 to 7; every other one is a placeholder without rows, or not kept."""
    every = numbered(8, PAGES * TOKENS, WIDTH, 2)
    wanted = every[list(LAYERS)]
    placeholder = torch.empty(0, WIDTH, 2, dtype=torch.int16)
    listed = [every[layer] if layer in LAYERS else placeholder for layer in range(8)]
    pool = make("plain")
    pool.bind({"a": listed}, layer_ids=range(8))
    assert torch.equal(moved(pool, 1), page_of(wanted, 1))
    even = make("plain", form="stacked", layers=(1, 3, 5))
    even.bind({"a": every}, layer_ids=range(8))  # every second layer of the engine's one tensor
    assert torch.equal(moved(even, 4), page_of(every[[1, 3, 5]], 4))
    with pytest.raises(ValueError, match="this form has one tensor with an axis of layers"):
        make("plain", form="stacked").bind({"a": every}, layer_ids=range(8))  # 2, 4, 7 are uneven


def test_a_placeholder_of_a_layer_that_is_kept(make: Make) -> None:
    rows = [ROWS[0], torch.empty(0, WIDTH, 2, dtype=torch.int16), ROWS[2]]
    with pytest.raises(ValueError, match="a: rows: expected at least one whole page, got shape"):
        make("plain").bind({"a": rows})


def test_layer_ids_of_a_stage_and_of_a_draft(make: Make) -> None:
    """Ids are whatever the engine calls its layers; a draft's layers come behind the target's."""
    target, draft = numbered(2, 20, WIDTH, 2), numbered(1, 20, WIDTH, 2) + 500
    pool = make("plain", layers=(40, 41, 60))
    pool.bind({"a": [*target, *draft]})
    assert torch.equal(moved(pool, 0), page_of(torch.cat([target, draft]), 0))
    pool.rebind({"a": [*draft, *target]}, layer_ids=[60, 40, 41])
    assert torch.equal(moved(pool, 0), page_of(torch.cat([target, draft]), 0))


def test_strides_read_from_the_tensor(make: Make) -> None:
    wide = numbered(3, 23, 9, 2)
    pool = make("plain", form="strided")
    pool.bind({"a": [row[:, :WIDTH] for row in wide]})
    assert torch.equal(moved(pool, 2), page_of(wide[:, :, :WIDTH], 2))
    with pytest.raises(ValueError, match=r"stride of dim \(shape#1\): expected 4 bytes, got 8"):
        pool.rebind({"a": [row[:, ::2][:, :WIDTH] for row in wide]})


@pytest.mark.parametrize("first", [1, 4, 6])
def test_rows_in_front_of_page_0(make: Make, first: int) -> None:
    """Rows are tokens where they are one dimension with the pages; elsewhere only whole pages can be left."""
    rows = numbered(3, 4 * TOKENS + 2, WIDTH, 2)
    for form in ("per_layer", "stacked"):
        pool = make("plain", form=form, first=first)
        pool.bind({"a": list(rows) if form == "per_layer" else rows})
        assert torch.equal(moved(pool, 2 if first < 4 else 1), page_of(rows, 2 if first < 4 else 1, first))
        unmerged = rows[:, : 4 * TOKENS].reshape(3, 4, TOKENS, WIDTH, 2)
        if first == 4:
            pool.rebind({"a": list(unmerged)} if form == "per_layer" else {"a": unmerged.contiguous()})
            assert torch.equal(moved(pool, 1), page_of(rows, 1, first))
        elif form == "per_layer":
            with pytest.raises(ValueError, match=rf"page 0 starts at row {first}, inside a page of 4 rows"):
                pool.rebind({"a": list(unmerged)})
    lanes = make("plain", form="lanes", first=first)
    pages = numbered(3, PAGES, 2, TOKENS, WIDTH)
    if first == 4:
        lanes.bind({"a": list(pages)})
        assert torch.equal(moved(lanes, 0).view(TOKENS, 3, WIDTH, 2), pages[:, 1].permute(2, 0, 3, 1))
    else:
        with pytest.raises(ValueError, match="inside a page of 4 rows"):
            lanes.bind({"a": list(pages)})


def test_no_page_is_left_behind_the_rows_in_front(make: Make) -> None:
    with pytest.raises(ValueError, match="expected at least one whole page"):
        make("plain", first=17).bind({"a": list(ROWS)})


# ---- components in one tensor -------------------------------------------------------------------


def record_of(a: torch.Tensor, b: torch.Tensor, page: int) -> torch.Tensor:
    """The page in page_record; both: layer, page, token, element."""
    return torch.cat([part[:, page].transpose(0, 1).flatten() for part in (a, b)])


def test_unequal_components_are_the_bytes_of_a_block(make: Make) -> None:
    """One page is 4 rows of a (3 wide), then 4 rows of b (5 wide): 32 items, 64 bytes."""
    pages = numbered(3, PAGES, 32)
    a, b = pages[:, :, :12].reshape(3, PAGES, 4, 3), pages[:, :, 12:].reshape(3, PAGES, 4, 5)
    pool = make("shared", x=5)
    for given in (pages, pages.view(torch.uint8), pages.view(torch.float32), pages.view(3, PAGES, 2, 4, 4)):
        pool.rebind({"shared": list(given)})
        assert torch.equal(moved(pool, 3), record_of(a, b, 3))
        kept = pages.clone()
        pages[:, 1] = 0
        pool.load(torch.tensor([1]), torch.tensor([1]), "page").wait()
        assert torch.equal(pages[:, 1], kept[:, 3])
        pages.copy_(kept)
    strided = make("shared", x=5, form="strided")
    wide = numbered(3, PAGES, 40)
    strided.bind({"shared": [row[:, :32] for row in wide]})
    a, b = wide[:, :, :12].reshape(3, PAGES, 4, 3), wide[:, :, 12:32].reshape(3, PAGES, 4, 5)
    assert torch.equal(moved(strided, 2), record_of(a, b, 2))
    with pytest.raises(ValueError, match=r"expected \[page=any, block=64\] bytes .*, got \(5, 31\) of"):
        pool.rebind({"shared": [row[:, :31].clone() for row in pages]})


def test_alike_components_are_an_axis(make: Make) -> None:
    pages = numbered(3, PAGES, 2, TOKENS, WIDTH)
    a, b = pages[:, :, 0], pages[:, :, 1]
    pool = make("alike")
    for shape in (
        (PAGES, 2, TOKENS, WIDTH),
        (PAGES * 2, TOKENS, WIDTH),
        (PAGES, 24),
        (PAGES, 2, TOKENS, 1, 3),
    ):
        pool.rebind({"alike": list(pages.reshape(3, *shape))})
        assert torch.equal(moved(pool, 2), record_of(a, b, 2))
    halves = make("alike", form="halves")
    swapped = pages.transpose(1, 2).contiguous()
    for shape in ((2, PAGES, TOKENS, WIDTH), (2, PAGES * TOKENS, WIDTH), (2, PAGES * TOKENS * WIDTH)):
        halves.rebind({"alike": list(swapped.reshape(3, *shape))})
        assert torch.equal(moved(halves, 2), record_of(a, b, 2))
    apart = numbered(3, 2, 8, TOKENS, WIDTH)[:, :, :PAGES]  # room between the halves
    halves.rebind({"alike": list(apart)})
    assert torch.equal(moved(halves, 4), record_of(apart[:, 0], apart[:, 1], 4))
    with pytest.raises(ValueError, match=r"alike: shape: expected \[component=2, page=any, token=4, dim=3\]"):
        halves.rebind({"alike": [row[:1].contiguous() for row in swapped]})


def test_a_binding_keeps_its_tensors_alive(make: Make) -> None:
    pool = make("plain")
    pool.bind({"a": {layer: row.clone() for layer, row in zip(LAYERS, ROWS, strict=True)}})
    torch.empty(3, PAGES * TOKENS * WIDTH * 2, dtype=torch.int16).fill_(-1)
    assert torch.equal(moved(pool, 3), page_of(ROWS, 3))
    assert len(pool._bound.tensors) == 3


# ---- parameters with defaults -------------------------------------------------------------------


def test_defaults_of_parameters(make: Make) -> None:
    assert make("shared").page_bytes == make("shared", x=3, first=0).page_bytes
    assert make("shared", x=4).page_bytes > make("shared").page_bytes


def test_components_of_one_tensor_have_one_layer_list(tmp_path: Path) -> None:
    from poolwright.codegen.lower import LowerError

    body = SHARED.replace(
        "b: {element: {dim: x}, dtype: int16}", "b: {element: {dim: x}, dtype: int16, layers: none}"
    )
    body = body.replace("order: [page, component", "order: [page, component")
    with pytest.raises(LowerError, match="form paged: one tensor a layer holds a and b") as refused:
        generate(tmp_path, "refused_out", HEAD.format(name="shared", title="Shared") + body)
    assert refused.value.where == "device.paged.tensors"
