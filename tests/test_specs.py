"""The front end: what specs become, what they are refused with, and that no text makes it fall over."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from poolwright.codegen import ir, load, resolve, schema
from poolwright.codegen.errors import Location, SpecError, SpecErrors
from poolwright.codegen.expr import Cond, Int, Op, Sym, parse, parse_cond
from poolwright.codegen.resolve_group import resolve_group
from poolwright.codegen.resolve_pool import resolve_pool

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SHIPPED = ROOT / "specs"
GOOD = TESTS / "fixtures" / "good_specs"
BAD = TESTS / "bad_specs"
UPDATE = "POOLWRIGHT_UPDATE_BAD_SPECS"
"""Set to 1 to rewrite the expected messages; review the diff."""


@cache
def good() -> resolve.Specs:
    return resolve.read_specs(GOOD, TESTS)


@cache
def shipped() -> resolve.Specs:
    return resolve.read_specs(SHIPPED, ROOT)


@cache
def layouts() -> Mapping[str, ir.Layout]:
    return {layout.name: layout for layout in good().layouts}


@cache
def pools() -> Mapping[str, ir.Pool]:
    return {pool.name: pool for pool in (*good().pools, *shipped().pools)}


def pool(name: str) -> ir.Pool:
    return pools()[name]


def component(owner: str, name: str) -> ir.Component:
    return next(c for c in pool(owner).components if c.name == name)


def read(data: bytes, path: str) -> object:
    """The text of a pool, group or layouts file, resolved; which it is follows from its name."""
    stem = Path(path).stem
    if stem.startswith("layouts"):
        document = load.load(data, path, schema.Layouts)
        return resolve.resolve_layouts(
            document, {} if path == "specs/layouts.yaml" else resolve.built_in_layouts()
        )
    if stem.startswith("group") or "groups" in path:
        return resolve_group(load.load(data, path, schema.Group), pools(), stem)
    return resolve_pool(load.load(data, path, schema.Pool), layouts(), stem)


def mistakes(data: bytes, path: str) -> tuple[SpecError, ...]:
    try:
        read(data, path)
    except SpecError as error:
        return (error,)
    except SpecErrors as errors:
        return errors.errors
    return ()


# ---- what specs become ------------------------------------------------------------------------


def test_shipped_pools() -> None:
    assert {"mha", "mla"} <= {p.name for p in shipped().pools}
    mla = next(p for p in shipped().pools if p.name == "mla")
    assert mla.class_name == "MLATokenToKVPoolHost"
    assert mla.source == "specs/mla.yaml"
    assert mla.has_tokens
    assert mla.components[0].dims == (ir.Dim("latent", parse("kv_lora_rank + qk_rope_head_dim")),)
    assert mla.components[0].storage == ir.Storage(group="kv")
    assert [layout.name for layout in mla.layouts] == [
        "layer_first",
        "page_first",
        "page_first_direct",
        "page_unified",
        "page_record",
    ]
    mha = next(p for p in shipped().pools if p.name == "mha")
    assert [(c.name, c.dims[1].size) for c in mha.components] == [
        ("k", Sym("head_dim")),
        ("v", Sym("v_head_dim")),
    ]
    assert [form.name for form in mha.forms] == ["per_layer", "head_major"]
    assert mha.forms[1].order == ("page", "head", "token", "dim")


def test_built_in_layouts_are_the_shipped_ones() -> None:
    built_in = resolve.built_in_layouts()
    assert tuple(built_in[name] for name in sorted(built_in)) == shipped().layouts
    assert built_in["page_record"].order == ("page", "component", "token", "layer", "element")


def test_slots_reserved_rows_shards_and_side_states() -> None:
    state = pool("kda_state")
    assert (state.index.unit, state.updates, state.reserved) == ("slot", "in_place", (0,))
    assert not state.has_tokens
    assert state.not_carried == ("intermediate_*",)
    assert state.valid_if == "no update is pending in the slot"
    assert component("kda_state", "conv").shard == ir.Shard((("channel", "tp"),), 3)
    side = component("kda_state", "ngram")
    assert (side.layers, side.token, side.when) == (None, False, parse_cond("ngram > 0"))
    assert side.storage == ir.Storage(dtype="int64")
    assert state.forms == (ir.Form("stacked", ("component",), ("layer", "page", "element"), ("page",)),)


def test_records_variants_and_converted_indices() -> None:
    paged = pool("dsv4_paged")
    assert paged.index == ir.Index("token", "kv", parse("i // page_size"))
    assert not paged.has_tokens
    assert [c.token for c in paged.components] == [False, False]
    assert paged.params[1] == ir.Param("rows", equals=parse("page_size // ratio"))
    assert paged.params[0] == ir.Param("ratio", one_of=(1, 2, 4, 128))
    assert paged.records == (ir.Record("row", "row", ("kv", "scale"), ("format.inner",), Sym("format.pad")),)
    assert component("dsv4_paged", "kv").dims[1].size == Sym("format.data")
    assert dict(dict(paged.variants[0].choices)["v41_new"])["inner"] == ("entry", "component", "dim")
    assert paged.forms[0].tensors == ("component", "layer")


def test_page_scales_alignment_conditions_and_logical_dtypes() -> None:
    scale = component("mxfp8", "k_scale")
    assert not scale.token
    assert scale.align == Int(128)
    assert scale.dims[1].size == parse("ceil_div(head_dim * page_size, block)")
    assert component("mxfp8", "k").token
    assert component("mxfp8", "v").storage == ir.Storage(dtype="uint8", logical="float4_e2m1")
    both, single = pool("mxfp8").require
    assert (both.op, len(both.parts), single.op) == ("and", 2, ">=")
    assert pool("mxfp8").forms[0].base == Sym("first_page")
    assert pool("mxfp8").forms[1].tensors == ()
    assert pool("mxfp8").tag == ("block", "rope: neox")


def test_splits_require_that_their_parts_multiply_to_the_dim() -> None:
    heads = pool("split_heads")
    in_group = parse("heads // head_groups")
    assert heads.splits == (
        ("head", (ir.Dim("head_group", Sym("head_groups")), ir.Dim("head_in_group", in_group))),
    )
    assert heads.require == (Cond("==", Op("*", Sym("head_groups"), in_group), Sym("heads")),)
    assert {c.layers for c in heads.components} == {"attention_layers"}


def test_repeats_take_elements_of_list_parameters() -> None:
    convs = pool("conv_list").components[:3]
    assert [(c.name, c.ident) for c in convs] == [
        ("conv[0]", "conv_0"),
        ("conv[1]", "conv_1"),
        ("conv[2]", "conv_2"),
    ]
    assert [c.dims[1].size for c in convs] == [Sym("width_0"), Sym("width_1"), Sym("width_2")]
    assert convs[1].when == Cond(">", Sym("width_1"), Int(0))
    assert pool("conv_list").params[0] == ir.Param("width", min=1, length=3)
    assert component("conv_list", "count").dims == ()


def test_layouts_of_a_project_extend_the_built_in_ones() -> None:
    assert {layout.name for layout in shipped().layouts} < {layout.name for layout in good().layouts}
    assert pool("conv_list").layouts[0].order == ("component", "page", "layer", "element")


def test_groups() -> None:
    dsv4, qwen = good().groups
    assert qwen.anchor == "kv"
    assert qwen.budget == (("kv", "0.7"), ("state", "0.3"))
    assert qwen.pools[1] == ir.PoolRef(
        "state", "kda_state", "linear_attention_layers", hit="trailing_pages", restore_with="kv"
    )
    assert dsv4.budget == (("kv", str(8 << 30)), ("c4", "500000"), ("c128", "off"))
    assert dict(dsv4.pools[0].params)["head_groups"] == parse("max(heads // 2, 1)")
    assert dsv4.pools[2].index == "kv"
    assert dsv4.params == (ir.Param("heads", min=1),)


def test_later_stages_can_point_into_a_spec() -> None:
    text = (SHIPPED / "mha.yaml").read_text(encoding="utf-8").splitlines()
    for where, word in (
        ("layouts[1]", "page_first"),
        ("device.head_major.order[1]", "head"),
        ("class", "MHA"),
    ):
        place = shipped().locate("specs/mha.yaml", where)
        assert text[place.line - 1][place.column - 1 :].startswith(word)
    place = shipped().locate("specs/mha.yaml", "components.k.dtype.store")
    assert text[place.line - 1][place.column - 1 :].startswith("kv")
    assert shipped().locate("specs/other.yaml", "pool") == Location("specs/other.yaml")


def test_short_forms_are_the_long_ones() -> None:
    short = (SHIPPED / "mla.yaml").read_text(encoding="utf-8")
    long = short.replace("index: token", "index: {unit: token}").replace("dtype: kv", "dtype: {store: kv}")
    assert long != short
    assert resolve.read_spec_text(long, "specs/mla.yaml", layouts()) == pool("mla")


# ---- folders ----------------------------------------------------------------------------------


def copy_of_mla(folder: Path, name: str, class_name: str) -> None:
    text = (SHIPPED / "mla.yaml").read_text(encoding="utf-8")
    text = text.replace("pool: mla", f"pool: {name}").replace("MLATokenToKVPoolHost", class_name)
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def test_every_mistake_of_a_folder_is_listed_by_file_and_place(tmp_path: Path) -> None:
    specs = tmp_path / "specs"
    specs.mkdir()
    copy_of_mla(specs, "first", "SamePoolHost")
    copy_of_mla(specs, "second", "SamePoolHost")
    (specs / "third.yml").write_text("pool: third\n", encoding="utf-8")
    (specs / ".hidden.yaml").write_text("{", encoding="utf-8")
    (specs / "notes.txt").write_text("{", encoding="utf-8")
    (specs / "z.yaml").write_text("pool: [\n", encoding="utf-8")
    found = [str(error) for error in resolve.check_specs(specs, tmp_path)]
    assert found == [
        "specs/second.yaml:2:8: class: 'SamePoolHost' is the class of specs/first.yaml already: "
        "take another name",
        "specs/third.yml:1:1: specs end in .yaml: rename the file",
        found[2],
    ]
    assert found[2].startswith("specs/z.yaml:2:1: not YAML: ")
    with pytest.raises(SpecError) as caught:
        resolve.read_specs(specs, tmp_path)
    assert str(caught.value) == found[0]


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"^specs:1:1: no such folder"):
        resolve.read_specs(tmp_path / "specs", tmp_path)


def test_mistakes_of_one_spec_come_together_and_in_order() -> None:
    text = (SHIPPED / "mla.yaml").read_text(encoding="utf-8")
    text = (
        text.replace("class: M", "class: m")
        .replace("dtype: kv", "dtype: kw")
        .replace("page_first,", "page_frist,")
    )
    places = [str(error.location) for error in mistakes(text.encode(), "specs/mla.yaml")]
    assert len(places) >= 3
    assert places == sorted(places, key=lambda place: [int(n) for n in place.split(":")[1:]])


def test_a_file_that_is_too_large_is_refused() -> None:
    (error,) = mistakes(b"# " + b"x" * 70_000, "specs/large.yaml")
    assert "at most 65536 are read" in str(error)


# ---- bad specs --------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(BAD.glob("*.yaml")), ids=lambda file: file.stem)
def test_bad_spec(file: Path) -> None:
    """The whole text of every message."""
    found = mistakes(file.read_bytes(), f"bad_specs/{file.name}")
    assert found, f"{file.name} is a good spec"
    text = "".join(f"{error}\n" for error in found)
    expected = file.with_suffix(".txt")
    if os.environ.get(UPDATE) == "1":
        expected.write_text(text, encoding="utf-8")
    assert text == expected.read_text(encoding="utf-8"), f"if this is better, run `{UPDATE}=1 pytest`"


def test_bad_specs_have_distinct_causes_and_no_orphans() -> None:
    texts = [file.read_text(encoding="utf-8").split(": ", 1)[1] for file in sorted(BAD.glob("*.txt"))]
    assert len(texts) == len(set(texts)) >= 40
    assert {file.stem for file in BAD.glob("*.txt")} == {file.stem for file in BAD.glob("*.yaml")}


def test_a_list_may_not_be_endless() -> None:
    text = (SHIPPED / "mla.yaml").read_text(encoding="utf-8") + "reserved:\n" + "  - 1\n" * 9_000
    (error,) = mistakes(text.encode(), "specs/mla.yaml")
    assert error.message == "more than 200 entries"


def test_programs_may_not_explode() -> None:
    table = ", ".join(f"c{i}: {{n: {i}}}" for i in range(20))
    text = (
        (SHIPPED / "mla.yaml").read_text(encoding="utf-8").replace("latent: kv_", "latent: a.n * b.n + kv_")
    )
    text += f"variants: {{\n a: {{{table}}},\n b: {{{table}}}}}\n"
    (error,) = mistakes(text.encode(), "specs/mla.yaml")
    assert error.message == "2000 programs (variants x forms x layouts), at most 256 are generated"


def test_components_and_programs_together_have_a_bound() -> None:
    """What building takes time for; each of the two alone is within its own bound."""
    text = (SHIPPED / "mla.yaml").read_text(encoding="utf-8")
    text = text.replace("dtype: kv}", "dtype: kv, repeat: 60}")
    forms = "".join(
        f"  f{i}: {{tensors: [component, layer], order: [page, token, element]}}\n" for i in range(9)
    )
    text = text.replace("device:\n", f"device:\n{forms}").replace("page_unified, ", "")
    (error,) = mistakes(text.encode(), "specs/mla.yaml")
    assert error.message == (
        "40 programs (variants x forms x layouts) of 60 components are 2400 placements, "
        "at most 1024 are generated"
    )


@pytest.mark.parametrize("name", ["fifo.yaml", "folder.yaml", "groups/fifo.yaml", "layouts.yaml"])
def test_what_is_no_file_is_not_read(name: str, tmp_path: Path) -> None:
    """A pipe would be waited for forever."""
    (tmp_path / "groups").mkdir()
    if name == "folder.yaml":
        (tmp_path / name).mkdir()
    else:
        os.mkfifo(tmp_path / name)
    (error,) = resolve.check_specs(tmp_path, tmp_path)
    assert str(error) == f"{name}:1:1: expected a file: remove it, or give it another ending"


def test_two_groups_of_one_class(tmp_path: Path) -> None:
    """Names that differ in underscores alone would be one class in the registry."""
    (tmp_path / "groups").mkdir()
    (tmp_path / "mla.yaml").write_bytes((SHIPPED / "mla.yaml").read_bytes())
    for name in ("kv1", "kv_1"):
        text = f"group: {name}\npools:\n  a: {{pool: mla}}\nanchor: a\n"
        (tmp_path / "groups" / f"{name}.yaml").write_text(text, encoding="utf-8")
    (error,) = resolve.check_specs(tmp_path, tmp_path)
    assert str(error) == (
        "groups/kv_1.yaml:1:8: group: its class is that of groups/kv1.yaml already: take another name"
    )


# ---- text from anywhere -----------------------------------------------------------------------

SOURCES = (*sorted(SHIPPED.rglob("*.yaml")), *sorted(GOOD.rglob("*.yaml")))


def spoiled(lines: list[str], at: int) -> Iterator[list[str]]:
    """The text with one line deleted, doubled, or garbled in one of several ways."""
    before, line, after = lines[:at], lines[at], lines[at + 1 :]
    middle = len(line) // 2
    yield [*before, *after]
    yield [*before, line, line, *after]
    for text in (
        line[:middle],
        line[:middle] + "{" + line[middle:],
        line[:-1] + "[",
        line.replace(":", "", 1),
        line.replace(": ", ": : ", 1),
        "\t" + line,
        line + " '",
        line.replace("}", "", 1) + ' "',
        line[:middle] + " wurst " + line[middle:],
        line.replace("1", "9" * 90, 1) + " " + "9" * 90,
        line.split(":")[0] + ": " + "[" * 90,
        line.split(":")[0] + ": " + "{a: " * 60,
        line.split(":")[0] + ": " + "[" * 3000,
        line.split(":")[0] + ": &a *a",
        "\x00" + line,
    ):
        yield [*before, text, *after]


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_spoiling_any_line_gives_a_place_and_never_a_traceback(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    path = ("groups/" if file.parent.name == "groups" else "specs/") + file.name
    slowest = 0.0
    for at in range(len(lines)):
        for text in spoiled(lines, at):
            start = time.process_time()
            found = mistakes("\n".join(text).encode(), path)
            slowest = max(slowest, time.process_time() - start)
            for error in found:
                assert 1 <= error.location.line <= len(text) + 1
                assert error.location.column >= 1
                assert str(error).startswith(f"{path}:{error.location.line}:") and "\n" not in str(error)
    assert slowest < 5.0  # a hang, not a benchmark


# ---- the schema -------------------------------------------------------------------------------


def test_json_schema_knows_every_key_and_the_short_forms() -> None:
    text = schema.json_schema()
    assert text["$ref"] == "#/$defs/Pool"
    definitions = text["$defs"]
    assert set(definitions) >= {"Pool", "Component", "Form", "Group", "Layouts"}
    assert {"class", "components", "split", "tag"} <= set(definitions["Pool"]["properties"])
    assert definitions["Pool"]["additionalProperties"] is False
    assert set(definitions["Component"]["required"]) == {"element", "dtype"}
    assert definitions["Component"]["properties"]["dtype"] == {
        "anyOf": [{"type": "string"}, {"$ref": "#/$defs/Storage"}]
    }
    assert definitions["Storage"]["properties"]["as"] == {"type": "string"}
