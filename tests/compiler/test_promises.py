"""The promises are proved for real configurations, and not for graphs that break them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.compiler.tiny_stages import DEEPSEEK, EXPERTS, GLM, LATENT
from tests.models.tiny import PRESET
from trnc.compiler import promises as module
from trnc.compiler.program import ProgramConfig
from trnc.compiler.promises import Promises
from trnc.core import VariantKey
from trnc.models.stage import WeightFormats

SMALL = replace(PRESET, decode_rows=(2,), prefill_tokens=(8,))


def config(model, layer, **changes: object) -> ProgramConfig:
    model = replace(model, num_layers=2, moe=replace(model.moe, first_layer=0))
    formats = WeightFormats("i8g32", "i8g32", (layer, layer))
    return ProgramConfig(model, formats, replace(SMALL, **changes))  # type: ignore[arg-type]


GROUPED, LATENTS = config(GLM, EXPERTS), config(DEEPSEEK, LATENT, kv_dtype="int8")


@pytest.fixture(scope="module")
def prover() -> Promises:
    return Promises()


@pytest.mark.parametrize("form", [GROUPED, LATENTS], ids=["grouped", "latent, int8"])
def test_every_promise_is_proved(prover: Promises, form: ProgramConfig) -> None:
    made = {promise.statement: promise for promise in prover.of(form)}
    assert [p.statement for p in made.values() if not p.is_proved] == []
    assert "decode-2/greedy+logit_bias with neutral inputs is decode-2/greedy" in made
    symbolic = "moe_layer, a row of decode, prefill in any bucket is a step of one token"
    assert "row of attention" in made[symbolic].rules
    assert "moe_layer, a row of prefill-8x2 is a step of one token" in made


def unproved(prover: Promises, form: ProgramConfig) -> list[str]:
    return [p.statement for p in prover.of(form) if not p.is_proved]


def test_inputs_that_are_not_neutral_are_not_taken_for_neutral(
    prover: Promises, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NEUTRAL", {"bias_values": 1.0})
    fresh = Promises()
    fresh._texts = prover._texts
    assert unproved(fresh, GROUPED) == [
        f"{key} with neutral inputs is {module.without_features(key)}"
        for key in module.variant_matrix(SMALL)
        if key.logit_bias
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1e-05", "2e-05"),
        ("aten.add.Tensor", "aten.sub.Tensor"),
        ("True, 2.5)", "False, 2.5)"),
        ("paged_attention.default(%17", "paged_attention.default(%4"),
    ],
)
def test_a_bucket_with_another_layer_is_found(prover: Promises, old: str, new: str) -> None:
    list(prover.of(GROUPED))
    fresh = Promises()
    fresh._texts = dict(prover._texts)
    (spec,) = [
        s for s in fresh._texts if s.kind == "moe_layer" and s.tokens == 8 and not s.model.mla
    ]
    assert old in fresh._texts[spec]
    fresh._texts[spec] = fresh._texts[spec].replace(old, new, 1)
    assert unproved(fresh, GROUPED) == ["moe_layer, a row of prefill-8x2 is a step of one token"]


def test_the_plain_variant_has_no_feature() -> None:
    key = VariantKey("decode", 1, 1, "sample", logprobs=True, logit_bias=True)
    assert str(module.without_features(key)) == "decode-1/sample"
