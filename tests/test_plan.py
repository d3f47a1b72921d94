"""`codegen plan`: what it says of a model is what the model caches and what the pools then take."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from conftest import ROOT, Run

from poolwright.codegen import cli, expr
from poolwright.codegen.commands.common import InputError
from poolwright.codegen.plan.config import PlanError, read_config
from poolwright.codegen.plan.families import CACHES, FAMILIES, read_model
from poolwright.codegen.plan.plan import Asked, Plan, Planned, make_plan
from poolwright.codegen.plan.rank import divided_params
from poolwright.codegen.resolve import Specs, read_specs
from poolwright.runtime.group import HostPoolGroup
from poolwright.runtime.pool import HostPool

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
REFUSALS = json.loads((ROOT / "tests" / "fixtures" / "plan_refusals.json").read_text())
TOKENS = (61, 3)
TERA = 10**12

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def specs() -> Specs:
    return read_specs(ROOT / "specs", ROOT)


def plan_of(path: Path, specs: Specs, cache: str = "engine", kv: str | None = None, **asked: Any) -> Plan:
    model = read_model(read_config(path), cache, kv)
    pools = {pool.name: pool for pool in specs.pools}
    groups = {group.name: group for group in specs.groups}
    if "tokens" not in asked:
        asked = {"host_bytes": TERA, **asked}
    return make_plan(model, pools, groups, Asked(**asked))


def published(name: str) -> dict[str, Any]:
    fields = json.loads((CONFIGS / f"{name}.json").read_text())
    # The one published config here that does not say its dtype.
    return fields if name != "gpt_oss" else {**fields, "dtype": "bfloat16"}


def written(fields: object, folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return path


def run_json(capsys: Capture, *words: str) -> dict[str, Any]:
    assert cli.main(["plan", *words, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def refusal(capsys: Capture, *words: str) -> str:
    """What the command says on stderr when it refuses: exit code 1, nothing on stdout."""
    capsys.readouterr()
    assert cli.main(["plan", *words]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    return err


# ---- what transformers caches -----------------------------------------------------------------


def test_every_model_type_has_a_tiny_model_and_a_published_config() -> None:
    assert set(FAMILIES) - {"gemma3"} == set(tiny_models.TINY)
    assert set(FAMILIES) - {"gemma3_text"} == {path.stem for path in CONFIGS.glob("*.json")}


def held(one: Planned, page_size: int, tokens: int) -> int:
    """Bytes of one layer that a sequence of so many tokens fills in the pool."""
    params, rows = one.params, one.member.rows
    if one.pool.name == "qsa_indexer":  # entries, one for as many tokens as `ratio`
        return whole(one, page_size // params["ratio"]) * (tokens // params["ratio"])
    if one.pool.name == "dsv4_state":  # of the last ring: what is no entry yet, and half of the window before
        overlap = params["overlap"]
        rate = params["ring"] // (1 + overlap)
        slot = whole(one, params["ring"])
        return slot * (tokens % rate) + overlap * slot // 2 * rate * (tokens >= rate)
    return whole(one, rows.page(page_size)) * rows.held(tokens)


def whole(one: Planned, rows: int) -> int:
    """Bytes of one of so many equal rows that a page of one layer has."""
    found, left = divmod(one.size.page_bytes, rows * len(one.member.layers))
    assert left == 0
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", sorted(tiny_models.TINY))
def test_the_bytes_are_those_of_the_cache_of_transformers(
    model_type: str, specs: Specs, tmp_path: Path
) -> None:
    """Layer by layer, from a prefill that fills windows and entries and one that does not."""
    dtype = torch.float32 if model_type in ("qwen3_next", "deepseek_v4") else torch.bfloat16
    config = tiny_models.config_of(model_type, dtype)
    config.save_pretrained(tmp_path)
    plan = plan_of(tmp_path / "config.json", specs, "transformers", page_size=12)
    for tokens in TOKENS:
        layers = tiny_models.cache_of(config, tokens).layers
        planned = [0] * len(layers)
        for one in plan.members:
            for layer in one.member.layers:
                planned[layer] += held(one, plan.page_size, tokens)
        assert planned == [tiny_models.tensor_bytes(layer) for layer in layers]


@pytest.mark.parametrize("model_type", sorted(tiny_models.TINY))
def test_fields_that_published_configs_leave_out_have_the_defaults_of_the_class(model_type: str) -> None:
    import transformers

    defaults = FAMILIES[model_type].defaults
    name = tiny_models.TINY[model_type][0]
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")()
    found = {field: getattr(config, field, getattr(config, f"_{field}", None)) for field in defaults}
    assert found == dict(defaults)


# ---- what engines cache -----------------------------------------------------------------------

BF16, FP32 = 2, 4


def kv(heads: int, width: int, layers: int) -> int:
    """Bytes that keys and values of one token take."""
    return 2 * heads * width * layers * BF16


def ssm(layers: int, state: int, channels: int, taps: int = 3) -> int:
    """Bytes of one state: the recurrent state in 32 bits and the window of the convolution."""
    return layers * (state * FP32 + channels * taps * BF16)


V4_INDEX = 128 + 4
V4_ROW_256 = -(-256 * 584 // 576) * 576
V4_RINGS = 21 * 8 * 4 * (512 + 128)

EXPECTED: dict[str, tuple[float | None, int | None]] = {
    "bamba": (kv(8, 128, 3), ssm(29, 128 * 64 * 128, 128 * 64 + 2 * 128)),
    "deepseek_v3": (576 * BF16 * 61, None),
    "deepseek_v32": ((576 * BF16 + 132) * 61, None),
    "deepseek_v4": (
        (21 * 37_440 + 21 * 64 * V4_INDEX + 20 * 1_728) / 256,
        43 * V4_ROW_256 + V4_RINGS * FP32,
    ),
    "falcon_h1": (kv(2, 64, 36), ssm(36, 24 * 64 * 128, 24 * 64 + 2 * 128)),
    "gemma3": (kv(4, 256, 5), kv(4, 256, 29) * 1024),
    "gpt_oss": (kv(8, 64, 12), kv(8, 64, 12) * 128),
    "kimi_linear": (576 * BF16 * 7, ssm(20, 32 * 128 * 128, 3 * 32 * 128)),
    "llama": (kv(8, 128, 32), None),
    "mamba2": (None, ssm(64, 128 * 64 * 128, 128 * 64 + 2 * 8 * 128)),
    "mistral": (kv(8, 128, 32), None),
    "qwen2": (kv(4, 128, 28), None),
    "qwen3": (kv(8, 128, 36), None),
    "qwen3_moe": (kv(4, 128, 48), None),
    "qwen3_next": (kv(2, 256, 12), ssm(36, 32 * 128 * 128, 2 * 16 * 128 + 32 * 128)),
}
"""By published config: bytes of a token and of a place to resume at, from the models' own descriptions."""


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_published_configs_take_what_their_models_describe(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    data = run_json(capsys, "--config", str(written(published(name), tmp_path)))
    token, state = EXPECTED[name]
    assert (data["token_bytes"], data["tokens"] is None) == (token or 0, token is None)
    assert (data["state_bytes"], data["states"] is None) == (state or 0, state is None)


def test_quantised_latents_of_sparse_attention_are_rows_of_656_bytes(tmp_path: Path, capsys: Capture) -> None:
    path = str(written(published("deepseek_v32"), tmp_path))
    data = run_json(capsys, "--config", path, "--kv-dtype", "float8_e4m3fn")
    assert [one["pool"] for one in data["members"]] == ["mla_fp8", "dsa_indexer"]
    assert data["token_bytes"] == (656 + 132) * 61


# ---- tensor parallelism -----------------------------------------------------------------------


def test_the_spec_decides_what_is_divided(specs: Specs) -> None:
    found = {pool.name: divided_params(pool) for pool in specs.pools}
    assert found["mha"] == {"heads"}
    assert found["mla"] == set()
    assert found["kda_state"] == {"heads"}
    assert found["gated_delta_net"] == {"k_heads", "v_heads"}
    assert found["mamba"] == {"heads", "conv_dim_0", "conv_dim_1", "conv_dim_2"}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_ranks_divide_all_but_what_they_all_need(name: str, specs: Specs, tmp_path: Path) -> None:
    path = written(published(name), tmp_path)
    whole = {one.member.name: one.size.page_bytes for one in plan_of(path, specs).members}
    for one in plan_of(path, specs, ranks=2).members:
        divides = bool(divided_params(one.pool))
        if one.pool.name == "mamba" and name != "mamba2":
            # One group of B and C serves all heads, so both ranks keep it.
            assert whole[one.member.name] / 2 < one.size.page_bytes < whole[one.member.name]
        else:
            assert one.size.page_bytes == whole[one.member.name] / (2 if divides else 1)
            assert one.copies == (1 if divides or not one.pool.components else 2)


def test_more_ranks_than_heads_keep_copies(tmp_path: Path, capsys: Capture) -> None:
    path = str(written(published("llama"), tmp_path))
    for ranks, heads, copies in ((1, 8, 1), (8, 1, 1), (16, 1, 2), (32, 1, 4)):
        (one,) = run_json(capsys, "--config", path, "--tp", str(ranks))["members"]
        assert (one["params"]["heads"], one["copies"]) == (heads, copies)


def test_groups_of_a_state_space_model_are_divided_or_kept(tmp_path: Path, capsys: Capture) -> None:
    fields = {**published("mamba2"), "num_heads": 128, "n_groups": 8}
    path = str(written(fields, tmp_path))
    for ranks, groups in ((1, 8), (8, 1), (16, 1)):
        (one,) = run_json(capsys, "--config", path, "--tp", str(ranks), "--states", "1")["members"]
        assert one["params"]["conv_dim"] == [128 // ranks * 64 + 2 * groups * 128]


# ---- capacity ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_what_fits_fits_and_no_page_more(name: str, specs: Specs, tmp_path: Path) -> None:
    path, host_bytes = written(published(name), tmp_path), 9 * 10**9
    plan = plan_of(path, specs, host_bytes=host_bytes)
    assert plan.host_bytes <= host_bytes
    assert host_bytes - plan.host_bytes < plan.token_bytes * plan.page_size + plan.state_bytes + 4096
    for one in plan.members:
        assert one.pages == (
            plan.tokens // plan.page_size if one.grows else plan.states * one.state_pages  # type: ignore[operator]
        )


@pytest.mark.parametrize("name", sorted(name for name in EXPECTED if name != "mamba2"))
def test_memory_for_tokens_holds_them_and_asking_back_gives_them(
    name: str, specs: Specs, tmp_path: Path
) -> None:
    path = written(published(name), tmp_path)
    states = None if EXPECTED[name][1] is None else 3
    plan = plan_of(path, specs, tokens=10_001, states=states)
    assert plan.tokens == -(-10_001 // plan.page_size) * plan.page_size
    assert plan.states == states
    back = plan_of(path, specs, host_bytes=plan.host_bytes, states=states)
    assert (back.tokens, back.states) == (plan.tokens, states)


def test_a_group_s_budget_divides_the_memory(specs: Specs, tmp_path: Path) -> None:
    plan = plan_of(written(published("qwen3_next"), tmp_path), specs, host_bytes=10**12)
    assert plan.group is not None
    weights = {name: float(text) for name, text in plan.group.budget}
    for one in plan.members:
        assert one.host_bytes == pytest.approx(weights[one.member.name] * 10**12, rel=1e-3)


# ---- configs that cannot be planned -----------------------------------------------------------


def test_an_unknown_model_type_is_answered_with_what_was_not_understood(
    tmp_path: Path, capsys: Capture
) -> None:
    fields = {**published("bamba"), "model_type": "falcon_h7"}
    path = str(written(fields, tmp_path))
    assert refusal(capsys, "--config", path).splitlines() == [
        f"{path}: model_type: 'falcon_h7' is none that plan can read",
        f"  known: {', '.join(FAMILIES)}",
        "  fields found that shape a cache: num_hidden_layers, num_attention_heads, hidden_size, "
        "mamba_d_state, num_key_value_heads",
        "  looked for and not found: head_dim, layer_types, index_head_dim, kv_lora_rank, "
        "linear_attn_config, linear_num_value_heads, sliding_window, state_size",
        "  nearest by name and fields: falcon_h1, bamba, llama, qwen3",
        "  how its layers combine is not in these fields, so nothing is planned: read in the model's code "
        "what it caches, then take a pool that fits, or write a spec: codegen new NAME --like POOL",
    ]


def test_the_language_model_inside_an_unknown_one_is_named(tmp_path: Path, capsys: Capture) -> None:
    fields = {"model_type": "llama_with_eyes", "text_config": published("llama")}
    lines = refusal(capsys, "--config", str(written(fields, tmp_path))).splitlines()
    assert lines[-1].startswith("  its text_config is of model type 'llama', which plan can read: ")
    assert lines[-2] == "  nearest by name and fields: llama, qwen3"


FALLBACKS = ("head_dim", "mamba_d_ssm", "num_key_value_heads", "num_nextn_predict_layers", "sliding_window")
"""Fields that are derived from others, or mean `none`, when they are not there."""


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_missing_field_is_named(name: str, tmp_path: Path, capsys: Capture) -> None:
    """Each field is left out in turn: it is named, or it decides nothing, or it has a known fallback."""
    fields = published(name)
    path = str(written(fields, tmp_path))
    whole = run_json(capsys, "--config", path)
    for field in fields:
        written({key: value for key, value in fields.items() if key != field}, tmp_path)
        code = cli.main(["plan", "--config", path, "--json"])
        out, err = capsys.readouterr()
        if code == 0:
            assert field in FALLBACKS or json.loads(out) == whole
        else:
            assert code == 1
            assert err.startswith(f"{path}: ")
            assert field in err or field in FALLBACKS


WRONG = ("x", -1, 0, True, [7], {"a": 1}, 10**30)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_no_value_of_a_field_makes_a_traceback(name: str, specs: Specs, tmp_path: Path) -> None:
    fields = published(name)
    for field in fields:
        for wrong in WRONG:
            path = written({**fields, field: wrong}, tmp_path)
            with contextlib.suppress(PlanError, InputError):
                assert plan_of(path, specs).host_bytes <= TERA


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case["message"].split(":")[1].strip()[:30])
def test_what_contradicts_is_named(case: dict[str, Any], tmp_path: Path, capsys: Capture) -> None:
    """Options against the model, fields against fields: the whole message."""
    path = str(written({**published(case["config"]), **case.get("change", {})}, tmp_path))
    message = case["message"].replace("CONFIG", path)
    assert refusal(capsys, "--config", path, *case.get("words", [])) == message + "\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kda_layers": [1, 2, 3]}, "kda_layers: layer 5 stands neither here nor in full_attn_layers"),
        ({"full_attn_layers": [28]}, "full_attn_layers: layer 28: there are 27 layers, counted from 1"),
        ({"kda_layers": [1, 1]}, "kda_layers: layer 1: listed twice"),
        ({"kda_layers": None}, "kda_layers: missing; the cache of model type 'kimi_linear' cannot be sized "
         "without it: add it, or take the config.json that is published with the model"),
        ({"num_heads": 0}, "num_heads: expected a whole number from 1 to 4294967296, got 0"),
    ],
)  # fmt: skip
def test_a_field_of_a_table_is_named_with_the_table(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: Capture
) -> None:
    fields = published("kimi_linear")
    fields["linear_attn_config"] |= change
    path = str(written(fields, tmp_path))
    assert refusal(capsys, "--config", path) == f"{path}: linear_attn_config.{message}\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", ":1:1: no JSON: Expecting value"),
        (b"{", ":1:2: no JSON: Expecting property name enclosed in double quotes"),
        (b"\xff\xfe\x00", ": not UTF-8 text; expected the config.json of a model"),
        (b"[1]", ": expected a JSON object with a model's fields, got [1]"),
        (b"[" * 100_000, ": nested too deep, or a number too long"),
        (b'{"a": ' + b"9" * 10_000 + b"}", ": nested too deep, or a number too long"),
        (b" " * 5_000_000, ": larger than 4,194,304 bytes; expected the config.json of a model"),
        (b"{}", ": model_type: missing; it says how the other fields are read"),
    ],
    ids=["empty", "cut", "binary", "list", "deep", "digits", "large", "no type"],
)  # fmt: skip
def test_a_file_that_is_no_config_is_refused(
    data: bytes, message: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    assert refusal(capsys, "--config", str(path)).startswith(f"{path}{message}")


def test_a_path_that_cannot_be_read_is_named(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "none.json"
    assert refusal(capsys, "--config", str(path)).startswith(f"{path}: No such file")
    assert refusal(capsys, "--config", str(tmp_path)).startswith(f"{tmp_path}: Is a directory")


def test_a_plan_does_not_load_torch(codegen: Run, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch is imported')")
    done = codegen(
        "plan",
        "--config",
        str(CONFIGS / "qwen3_next.json"),
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT / '.src'}"},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_plan_needs_no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_json(capsys, "--config", str(CONFIGS / "llama.json"))["token_bytes"] == 131_072


# ---- what is printed --------------------------------------------------------------------------


def test_the_table_is_plain_text(tmp_path: Path, capsys: Capture) -> None:
    path = str(CONFIGS / "llama.json")
    assert cli.main(["plan", "--config", path, "--tp", "16", "--tokens", "1000"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "llama: the cache as engines keep it, each of 16 ranks, pages of 64 tokens\nno group\n"
    )
    assert (
        out.split("no group\n")[1]
        == """
member  pool  layers     a page  a token  to resume  pages  host bytes  ranks     holds
kv      mha       32  1,048,576   16,384                16  16,777,216  2 copies  keys and values

one token   16,384 bytes; room for 1,024 tokens
host        16.78 MB a rank, 268.44 MB in all
staging     67.11 MB of device memory a rank

import torch
from poolwright.generated import MHATokenToKVPoolHost

device = "cuda:0" if torch.cuda.is_available() else "cpu"
pool = MHATokenToKVPoolHost(
    heads=1,
    head_dim=128,
    v_head_dim=128,
    dtype=torch.bfloat16,
    layers=range(32),
    page_size=64,
    layout="page_first",
    capacity_pages=16,
    device=device,
)
"""
    )


def test_notes_say_what_was_assumed(capsys: Capture) -> None:
    assumed = "8 GB of host memory a rank; --host-gb or --tokens sets it"
    window = "every layer has a window of 4,096 tokens: only so many behind a prefix are needed"
    drafts = "draft layers are not planned (num_nextn_predict_layers is 1)"
    for name, words, notes in (
        ("llama", [], [assumed]),
        ("llama", ["--tokens", "1"], []),
        ("mamba2", ["--states", "1"], []),
        ("mistral", ["--host-gb", "1"], [window]),
        ("deepseek_v3", ["--host-gb", "1"], [drafts]),
        ("deepseek_v4", [], [drafts, assumed]),
    ):
        assert run_json(capsys, "--config", str(CONFIGS / f"{name}.json"), *words)["notes"] == notes
    assert cli.main(["plan", "--config", str(CONFIGS / "mistral.json"), "--host-gb", "1"]) == 0
    assert f"\nnote        {window}\n" in capsys.readouterr().out


def test_the_document_names_every_model_type_and_option(capsys: Capture) -> None:
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    assert [name for name in FAMILIES if f"`{name}`" not in text] == []
    assert cli.main(["plan", "--help"]) == 0
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert [option for option in sorted(options) if option not in text] == []


# ---- the code that is printed -----------------------------------------------------------------


def check_built(data: dict[str, Any]) -> None:
    """Run the printed code; its pools, in the order of the plan's members, have the plan's bytes."""
    names: dict[str, Any] = {}
    exec(compile(data["python"], "plan", "exec"), names)
    made = [value for value in names.values() if isinstance(value, HostPool | HostPoolGroup)]
    pools = [pool for one in made for pool in getattr(one, "pools", {"": one}).values()]
    try:
        found = [(pool.page_bytes, pool.page_num, pool.kv_buffer.nbytes) for pool in pools]
        assert found == [(one["page_bytes"], one["pages"], one["host_bytes"]) for one in data["members"]]
    finally:
        for one in made:
            one.destroy()


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_code_for_a_published_config_runs(name: str, tmp_path: Path, capsys: Capture) -> None:
    """Built with one page of history and one place to resume at; as many bytes as the plan says."""
    path = str(written(published(name), tmp_path))
    token, state = EXPECTED[name]
    words = [*(["--tokens", "1"] if token else []), *(["--states", "1"] if state else [])]
    check_built(run_json(capsys, "--config", path, "--tp", "2", *words))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", sorted(tiny_models.TINY))
def test_the_code_for_the_form_of_transformers_runs(model_type: str, tmp_path: Path, capsys: Capture) -> None:
    tiny_models.config_of(model_type, torch.bfloat16).save_pretrained(tmp_path)
    words = ["--cache", "transformers", "--page-size", "12", "--host-gb", "0.01"]
    check_built(run_json(capsys, "--config", str(tmp_path / "config.json"), *words))


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_classes_ask_for_what_the_plan_says(name: str, tmp_path: Path, capsys: Capture) -> None:
    """Host memory and staging, as the printed class computes them before anything is built."""
    path = str(written(published(name), tmp_path))
    data = run_json(capsys, "--config", path, "--tp", "2", "--host-gb", "20")
    text = re.sub(r"^(group|pool) = (\w+)\(", r"need = \2.required_bytes(", data["python"], flags=re.M)
    names: dict[str, Any] = {}
    exec(compile(text.replace("    device=device,\n", ""), "plan", "exec"), names)
    assert (names["need"].host, names["need"].staging) == (data["host_bytes"], data["staging_bytes"])


def test_every_group_has_the_members_that_plan_gives_it(specs: Specs, tmp_path: Path) -> None:
    """By name and pool, and the parameters that a group fixes are the model's."""
    groups = {group.name: group for group in specs.groups}
    asked = [(name, cache, None) for name in EXPECTED for cache in CACHES]
    grouped = set()
    for name, cache, kv in (*asked, ("deepseek_v32", "engine", "float8_e4m3fn")):
        model = read_model(read_config(written(published(name), tmp_path)), cache, kv)
        grouped.add(model.group)
        if model.group is None:
            assert len(model.members) == 1
            continue
        refs = {ref.name: ref for ref in groups[model.group].pools}
        assert {(one.name, one.pool) for one in model.members} == {(r.name, r.pool) for r in refs.values()}
        for one in model.members:
            fixed = {name: expr.evaluate(size, {}) for name, size in refs[one.name].params}
            assert fixed == {name: one.params[name] for name in fixed}
    assert grouped >= {"mha_indexer", "dsv4_plain", "dsv32", "dsv4", "dsv32_fp8", None}
