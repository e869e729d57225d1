"""tools/run_variants.py: variants run and agree with the reference, and planted bugs are seen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainium.test_matrix import small
from tests.trainium.tiny_plans import config_of, plan_of
from trnc.compiler.backends.stablehlo.build import Plan
from trnc.compiler.backends.stablehlo.mlir import split_functions
from trnc.core import TokenLogprobs
from trnc.presets import load_preset

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    """The tool, importable for the tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        import run_variants

        yield run_variants
    for name in [n for n in sys.modules if n.split(".")[0] in ("run_variants", "variants")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def plan() -> Plan:
    """DeepSeek with an MTP layer, every feature, an int8 cache, and little of everything."""
    preset = replace(small(load_preset("mtp-throughput")), mtp_depths=(2,))
    return plan_of(config_of("deepseek_v3", preset))


@pytest.fixture(scope="module")
def devices(tool: Any) -> Any:
    return tool.Stepwise()


def test_every_variant_runs_and_picks_what_the_reference_picks(tool, plan, devices):
    tally = tool.Tally()
    tool.check_plan(plan, list(plan.programs), devices, 0, tally)
    assert tally.differences == []
    assert tally.variants == len(plan.programs) > 40
    assert tally.accepted > 0
    assert 0 < tally.largest_error < tool.BOUNDS["int8"]
    tool.check_plan(plan, list(plan.programs), devices, 0, tally)
    assert tally.variants == len(plan.programs)  # none is run twice


def test_a_whole_module_runs_as_its_functions_do(tool, plan):
    tally = tool.Tally()
    tool.check_plan(plan, tool.warm_keys(plan)[1:], tool.Devices("cpu", 1), 0, tally)
    assert (tally.differences, tally.variants) == ([], 1)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("mask", "compare EQ", "compare NE"),
        ("penalties", "stablehlo.divide", "stablehlo.multiply"),
        ("accept", "compare EQ", "compare NE"),
        ("logprobs", "stablehlo.log ", "stablehlo.exponential "),
    ],
)
def test_a_planted_bug_is_told(tool, plan, devices, kind, right, wrong):
    tally = tool.Tally()
    (key,) = (k for k in tool.largest(list(plan.programs)) if k.step == "verify")
    modules = {k: plan.lower(k) for k in (*tool.warm_keys(plan), key)}
    (function,) = (f for f in split_functions(modules[key].text) if f"@{kind}(" in f[:60])
    assert right in function
    text = modules[key].text.replace(function, function.replace(right, wrong))
    pair = tool.Pair(plan, modules | {key: replace(modules[key], text=text)}, devices, 0)
    for _ in range(8):  # not every step that is drawn shows it
        pair.check(key, tally)
    assert str(key) in tally.differences[0]


def test_which_features_and_buckets(tool):
    assert len(list(tool.feature_sets(["none", "each", "all"]))) == len(tool.FEATURES) + 2
    preset = tool.cut(load_preset("mtp-throughput"), 384, 2)
    assert (preset.decode_rows, preset.prefill_tokens) == ((1, 2), (16, 64))
    assert (preset.max_context, preset.trainium.context_buckets) == (384, (96,))


def test_scores_with_other_best_tokens_are_infinitely_wrong(tool):
    one, other = (((TokenLogprobs(-1.0, ((token, -1.0),)),),) for token in (5, 6))
    assert tool.score_error(one, one) == 0
    assert tool.score_error(one, other) == float("inf")
