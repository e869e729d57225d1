"""The promises are proved for real configurations, and refuted for graphs that break them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import pytest

from tests.compiler.tiny_stages import DEEPSEEK, DENSE, EXPERTS, GLM, LATENT, MODEL
from trnc.compiler import promises as module
from trnc.compiler.program import ProgramConfig, build_program
from trnc.compiler.promises import NEUTRAL, Claim, OneLayer, Prover, SamePrograms, claims
from trnc.compiler.texts import stage_texts
from trnc.core import SamplingParams, SequencePlan, StepPlan, VariantKey
from trnc.equiv.prove import Proof
from trnc.models.registry import build_stage
from trnc.models.stage import LayerFormats, StageSpec, WeightFormats
from trnc.presets import Preset
from trnc.runtime.inputs import build_inputs

PRESET = Preset("tiny", "", (2,), (8,), max_context=128, page_size=16, penalty_buckets=(8,))


def config(model, layer: LayerFormats, **changes: object) -> ProgramConfig:
    model = replace(model, num_layers=2, mtp_layers=1 if "mtp_depths" in changes else 0)
    if model.moe is not None:
        model = replace(model, moe=replace(model.moe, first_layer=0))
    formats = WeightFormats("i8g32", "i8g32", (layer,) * (2 + model.mtp_layers))
    return ProgramConfig(model, formats, replace(PRESET, **changes))  # type: ignore[arg-type]


CONFIGS = {
    "dense, int8": config(MODEL, DENSE, kv_dtype="int8"),
    "experts": config(GLM, replace(EXPERTS, eh_proj="f32"), mtp_depths=(1, 2)),
    "latent, int8": config(DEEPSEEK, LATENT, kv_dtype="int8"),
}
STATIC = replace(config(GLM, EXPERTS), static_buckets=True)


class Texts(dict[StageSpec, str]):
    """Traces what is asked for, once for all tests."""

    def __missing__(self, spec: StageSpec) -> str:
        self[spec] = stage_texts([spec], workers=1)[spec].text
        return self[spec]


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts()


def answers(texts: Texts, made: Iterator[Claim]) -> dict[str, Proof]:
    prover = Prover(texts=texts)
    return {claim.statement: prover.prove(claim) for claim in made}


def broken(proofs: dict[str, Proof]) -> dict[str, str]:
    return {name: proof.verdict for name, proof in proofs.items() if proof.verdict != "proved"}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_promise_is_proved(texts: Texts, name: str) -> None:
    proofs = answers(texts, claims(CONFIGS[name]))
    assert broken(proofs) == {}
    (layer,) = (p for s, p in proofs.items() if "in any bucket" in s)
    assert "row of attention" in layer.rules


def test_promises_are_made_of_every_feature_step_and_layer() -> None:
    made = [claim.statement for claim in claims(CONFIGS["experts"])]
    assert len(made) == len(set(made))
    for feature in ("logprobs", "logit_bias", "mask", "penalties8", "prompt_logprobs"):
        assert f"prefill-8x2/greedy+{feature} with neutral inputs is prefill-8x2/greedy" in made
    everything = "/sample+logprobs+logit_bias+mask+penalties130"
    for step in ("decode-2", "verify-2d1", "verify-2d2"):
        assert f"{step}{everything} with neutral inputs is {step}/sample" in made
    assert "draft-2d2/greedy+logit_bias with neutral inputs is draft-2d2/greedy" in made
    steps = "decode, prefill, draft, verify"
    assert f"moe_layer, a row of {steps} in any bucket is a step of one token" in made


def test_every_static_bucket_has_the_layer_of_one_token(texts: Texts) -> None:
    layers = (c for c in claims(STATIC) if isinstance(c.subject, OneLayer))
    proofs = answers(texts, layers)
    assert list(proofs) == [
        "moe_layer, a row of decode-2 is a step of one token",
        "moe_layer, a row of prefill-8x2 is a step of one token",
    ]
    assert broken(proofs) == {}


@pytest.mark.parametrize("step", ["decode", "verify", "draft"])
def test_neutral_is_what_the_host_gives_for_a_request_without_features(step) -> None:
    depth = 0 if step == "decode" else 2
    tokens = 6 if step == "verify" else 2
    key = VariantKey(step, tokens, 2, "sample", True, True, depth, mask=True, penalties=8)
    one = SequencePlan(0, 3, depth + 1, (5,), (1,), True, 0, SamplingParams())
    plan = StepPlan(step, (one,), depth)
    given = build_inputs(plan, key, max_pages=4, spare_slot=2, vocab_size=200)
    assert {name: set(given[name].flatten().tolist()) for name in NEUTRAL} == {
        name: {value} for name, value in NEUTRAL.items()
    }


def test_inputs_without_a_neutral_number_belong_to_outputs_that_only_a_feature_has() -> None:
    for claim in claims(CONFIGS["experts"]):
        if isinstance(claim.subject, SamePrograms):
            own, other = (
                {name for call in program.calls for name in call.inputs}
                for program in (claim.subject.program, claim.subject.plain)
            )
            inputs = {name.removeprefix("input.") for name in own - other if "input." in name}
            assert inputs <= {*NEUTRAL, "prompt_rows", "targets"}


# Broken promises


@pytest.mark.parametrize(
    ("feature", "numbers"),
    [
        ("logit_bias", {"bias_ids": 3, "bias_values": 1}),
        ("mask", {"mask": -2}),
        ("penalties", {"penalty_ids": 0, "repetition": 2}),
        ("penalties", {"penalty_ids": 0, "frequency": 1, "penalty_counts": 1}),
        ("penalties", {"penalty_ids": 0, "presence": 1, "penalty_counts": 1}),
    ],
)
def test_inputs_that_are_not_neutral_are_refuted(
    texts: Texts, monkeypatch: pytest.MonkeyPatch, feature: str, numbers: dict[str, float]
) -> None:
    monkeypatch.setattr(module, "NEUTRAL", {**NEUTRAL, **numbers})
    module.neutral_ports.cache_clear()
    try:
        found = broken(answers(texts, decode_claims()))
    finally:
        module.neutral_ports.cache_clear()
    assert found
    assert set(found.values()) == {"refuted"}
    assert all(f"+{feature}" in statement for statement in found)


def decode_claims() -> Iterator[Claim]:
    return (c for c in claims(CONFIGS["dense, int8"]) if c.statement.startswith("decode"))


@pytest.mark.parametrize("kind", ["mask", "logit_bias", "penalties"])
def test_a_feature_that_is_not_free_is_refuted_with_an_input(texts: Texts, kind: str) -> None:
    stages = dict.fromkeys(chain.from_iterable(claim.stages for claim in decode_claims()))
    (spec,) = (spec for spec in stages if spec.kind == kind)
    text = texts[spec]
    scaled = "%1: f32[s0, 200] = aten.mul.Tensor(%0, 1.001)\noutput %1"
    planted = Texts({**texts, spec: text.replace("output %0", scaled)})
    proofs = answers(planted, decode_claims())
    feature = {"penalties": "penalties8"}.get(kind, kind)
    proof = proofs[f"decode-2/greedy+{feature} with neutral inputs is decode-2/greedy"]
    assert proof.verdict == "refuted"
    assert "output 0 differs by" in proof.reason
    assert "random input 0" in proof.reason
    assert proofs["decode-2/greedy+logprobs with neutral inputs is decode-2/greedy"].verdict == (
        "proved"
    )


def test_a_feature_that_writes_other_state_is_not_proved(texts: Texts) -> None:
    form = CONFIGS["dense, int8"]
    plain = build_program(form, VariantKey("decode", 2, 2))
    other = build_program(form, VariantKey("decode", 2, 2, logprobs=True))
    changes = [
        replace(other, steps=other.steps[:-1]),
        replace(other, steps=(*other.steps, replace(other.updates[-1], op="other"))),
        replace(other, steps=(*other.steps, replace(other.updates[-1], inputs=("state.new",)))),
        replace(other, steps=(other.steps[0], *other.steps[2:])),
    ]
    prover = Prover(texts=texts)
    assert prover.prove(Claim("", SamePrograms(other, plain))).verdict == "proved"
    for changed in changes:
        assert prover.prove(Claim("", SamePrograms(changed, plain))).verdict == "unknown"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1e-05", "2e-05"),
        ("aten.add.Tensor", "aten.sub.Tensor"),
        ("True, 2.5)", "False, 2.5)"),
        ("paged_attention.default(%17", "paged_attention.default(%4"),
    ],
)
def test_a_bucket_with_another_layer_is_refuted(texts: Texts, old: str, new: str) -> None:
    (claim,) = (c for c in claims(STATIC) if "moe_layer, a row of prefill" in c.statement)
    assert isinstance(claim.subject, OneLayer)
    spec = claim.subject.step
    assert old in texts[spec]
    planted = Texts({**texts, spec: texts[spec].replace(old, new, 1)})
    proofs = answers(planted, iter([claim]))
    assert broken(proofs) == {claim.statement: "refuted"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_that_sees_another_row_is_refuted(texts: Texts, name: str) -> None:
    """The rows of a step in another order: each row by itself is right, and in the wrong place."""
    (claim,) = (c for c in claims(CONFIGS[name]) if "in any bucket" in c.statement)
    assert isinstance(claim.subject, OneLayer)
    spec = claim.subject.step
    text = texts[spec]
    hidden = next(line for line in text.splitlines() if line.startswith("output"))
    shape = build_stage(spec).inputs["hidden"].shape
    turned = f"%999: f32[s0, {shape[1]}] = aten.flip.default({hidden.split()[1]}, [0])"
    planted = Texts({**texts, spec: text.replace(hidden, f"{turned}\noutput %999", 1)})
    assert broken(answers(planted, iter([claim]))) == {claim.statement: "refuted"}


def test_the_plain_variant_has_no_feature() -> None:
    key = VariantKey("verify", 6, 2, "sample", True, True, 2, True, 64, context=128)
    assert module.without_features(key) == VariantKey(
        "verify", 6, 2, "sample", depth=2, context=128
    )
