"""Presets: every mistake names the key, and what is loaded keeps the rules."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trnc.errors import ConfigError
from trnc.presets import Preset, TrainiumOptions, load_preset, parse_preset, preset_names

GOOD = {
    "description": '"test"',
    "decode_rows": "[1, 2, 4]",
    "prefill_tokens": "[16, 64]",
    "max_context": "100",
}


def text(**changes: str | None) -> str:
    """TOML of a good preset with changes; None drops a key."""
    lines = {**GOOD, **changes}
    return "\n".join(f"{key} = {value}" for key, value in lines.items() if value is not None)


def error(**changes: str | None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_preset(text(**changes), name="p")
    return str(caught.value)


def test_a_preset_knows_its_limits():
    preset = parse_preset(text(), name="p")
    assert (preset.name, preset.description) == ("p", "test")
    assert (preset.max_rows, preset.max_prefill_tokens) == (4, 64)
    assert preset.max_pages == 4  # 100 keys in pages of 32
    assert (preset.kv_dtype, preset.kv_memory_mib) == ("float16", 0)
    assert preset.logprobs
    assert preset.logit_bias


def test_the_presets_that_ship_are_valid_and_hold_what_they_say():
    presets = {name: load_preset(name) for name in preset_names()}
    assert {name: (p.max_rows, p.mtp_depths) for name, p in presets.items()} == {
        "batch16": (16, ()),
        "batch8": (8, ()),
        "default": (4, ()),
        "mtp-always": (4, (2,)),
        "mtp-dynamic": (4, (1, 2, 3)),
        "mtp-latency": (2, (1, 2, 3, 5)),
        "mtp-throughput": (16, (1, 2)),
    }
    assert [name for name, p in presets.items() if p.mtp_always] == ["mtp-always"]


@pytest.mark.parametrize("key", ["description", "decode_rows", "prefill_tokens", "max_context"])
def test_a_missing_key_is_named(key):
    assert error(**{key: None}) == f"preset 'p': missing key '{key}'"


def test_an_unknown_key_is_named_with_the_nearest():
    assert error(decode_row="[1]") == (
        "preset 'p': unknown key 'decode_row'. Did you mean 'decode_rows'?"
    )
    assert "unknown key 'name'" in error(name='"x"')


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("description", "3", "must be str"),
        ("decode_rows", "4", "a list of integers"),
        ("decode_rows", "[]", "a list of integers"),
        ("decode_rows", "[1, true]", "a list of integers"),
        ("decode_rows", "[2, 1]", "ascending"),
        ("decode_rows", "[1, 1]", "ascending"),
        ("decode_rows", "[0, 1]", "positive"),
        ("decode_rows", "[1, 257]", "at most 256"),
        ("prefill_tokens", "[16.0]", "a list of integers"),
        ("prefill_tokens", "[64, 16]", "ascending"),
        ("prefill_tokens", "[8193]", "at most 8192"),
        ("max_context", '"100"', "must be int"),
        ("max_context", "true", "must be int"),
        ("max_context", "31", "at least one page"),
        ("page_size", "48", "16, 32 or 64"),
        ("kv_dtype", '"float8"', "float32, float16, bfloat16, int8"),
        ("kv_memory_mib", "-1", "0 (automatic) or more"),
        ("logprobs", "1", "must be bool"),
        ("logit_bias", '"no"', "must be bool"),
    ],
)
def test_a_wrong_value_names_its_key_and_the_rule(key, value, rule):
    said = error(**{key: value})
    assert said.startswith(f"preset 'p': '{key}' must be ")
    assert rule in said


def test_text_that_is_no_toml_says_where():
    with pytest.raises(ConfigError, match=r"preset 'p' is not valid TOML: .*line 1"):
        parse_preset("decode_rows = = 1", name="p")


def test_a_preset_by_path(tmp_path):
    path = tmp_path / "mine.toml"
    with pytest.raises(ConfigError, match="no such file"):
        load_preset(str(path))
    path.write_text(text(logprobs="false"))
    preset = load_preset(str(path))
    assert preset.name == "mine"
    assert not preset.logprobs
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_preset(str(path))


def test_an_unknown_name_names_the_nearest_and_all():
    with pytest.raises(ConfigError) as caught:
        load_preset("defualt")
    assert "--preset defualt" in str(caught.value)
    assert "Did you mean 'default'?" in str(caught.value)
    assert "batch16, batch8, default" in str(caught.value)


@given(
    decode=st.sets(st.integers(1, 256), min_size=1),
    prefill=st.sets(st.integers(1, 8192), min_size=1),
    context=st.integers(64, 10**6),
    page=st.sampled_from([16, 32, 64]),
    bias=st.booleans(),
)
def test_every_preset_within_the_rules_loads_as_written(decode, prefill, context, page, bias):
    preset = parse_preset(
        text(
            decode_rows=str(sorted(decode)),
            prefill_tokens=str(sorted(prefill)),
            max_context=str(context),
            page_size=str(page),
            logit_bias=str(bias).lower(),
        ),
        name="p",
    )
    assert preset.decode_rows == tuple(sorted(decode))
    assert preset.prefill_tokens == tuple(sorted(prefill))
    assert (preset.max_context, preset.page_size, preset.logit_bias) == (context, page, bias)
    assert 0 <= preset.max_pages * page - context < page


def test_presets_are_data():
    assert all(field.init for field in fields(Preset))
    with pytest.raises(AttributeError):
        load_preset("default").max_context = 1  # type: ignore[misc]


def test_the_table_of_trainium_is_checked_like_the_rest() -> None:
    text = 'description = "d"\ndecode_rows = [1]\nprefill_tokens = [16]\nmax_context = 4096\n'
    parsed = parse_preset(text + "[trainium]\nranks = 4\ncontext_buckets = [512]\n", name="t")
    assert parsed.trainium == TrainiumOptions(context_buckets=(512,), ranks=4)
    for table, said in {
        "[trainium]\nrank = 4": "unknown key 'trainium.rank'. Did you mean 'ranks'?",
        "[trainium]\nlnc = 3": "'trainium.lnc' must be 1 or 2, got 3",
        "[trainium]\ncontext_buckets = [500]": "'trainium.context_buckets' must be ascending",
        "[trainium]\nmatmul = 'fp8'": "'trainium.matmul' must be one of float32, bfloat16",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(said)):
            parse_preset(text + table, name="t")
    with pytest.raises(ConfigError, match="'trainium' must be a table"):
        parse_preset(text + "trainium = 3", name="t")
