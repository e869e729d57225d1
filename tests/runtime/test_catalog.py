"""The catalog picks the smallest variant that holds a step and has what its requests need."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.tiny import PRESET
from tests.runtime.serving import serve
from trnc.compiler.matrix import variant_matrix
from trnc.core import SamplingParams, SequencePlan, Step, StepPlan, VariantKey
from trnc.engine.messages import Submit
from trnc.errors import EngineError
from trnc.runtime.catalog import Catalog
from trnc.runtime.executor import ProgramExecutor

CATALOG = Catalog.of(reversed(variant_matrix(PRESET)))
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.sampled_from([(), ((1, 2.0),)]),
)


def plan(step: Step, *parts: tuple[int, bool, SamplingParams]) -> StepPlan:
    return StepPlan(
        step,
        tuple(
            SequencePlan(slot, 0, count, (1,) * count, (slot + 1,), sample, 0, sampling)
            for slot, (count, sample, sampling) in enumerate(parts)
        ),
    )


@given(
    st.sampled_from(["prefill", "decode"]),
    st.lists(st.tuples(st.integers(1, 4), st.booleans(), samplings), min_size=1, max_size=8),
)
def test_the_smallest_bucket_with_just_what_is_needed(
    step: Step, parts: list[tuple[int, bool, SamplingParams]]
) -> None:
    if step == "decode":
        parts = [(1, True, sampling) for _, _, sampling in parts]
    key = CATALOG.select(plan(step, *parts))
    tokens = sum(count for count, _, _ in parts)
    picking = [sampling for _, sample, sampling in parts if sample]
    sizes = PRESET.decode_rows if step == "decode" else PRESET.prefill_tokens
    assert key.step == step
    assert key.tokens == min(size for size in sizes if size >= tokens)
    assert key.rows >= len(parts)
    assert (key.sampling == "sample") == any(s.temperature > 0 for s in picking)
    assert key.logprobs == any(s.logprobs is not None for s in picking)
    assert key.logit_bias == any(s.logit_bias for s in picking)


@given(
    starts=st.lists(st.integers(0, PRESET.max_context - 1), min_size=1, max_size=8),
    contexts=st.sets(st.integers(1, PRESET.max_context - 1), max_size=3),
)
def test_the_shortest_context_bucket_that_holds_every_sequence(
    starts: list[int], contexts: set[int]
) -> None:
    buckets = (*sorted(contexts), PRESET.max_context)
    catalog = Catalog.of(variant_matrix(PRESET, buckets))
    greedy = SamplingParams()
    sequences = tuple(
        SequencePlan(slot, start, 1, (1,), (slot + 1,), True, 0, greedy)
        for slot, start in enumerate(starts)
    )
    key = catalog.select(StepPlan("decode", sequences))
    assert key.context == min(bucket for bucket in buckets if bucket > max(starts))
    assert key.rows == min(rows for rows in PRESET.decode_rows if rows >= len(starts))


@pytest.mark.parametrize(
    ("unknown", "said"),
    [
        (plan("decode", *[(1, True, SamplingParams())] * 9), "decode of 9 tokens in 9 sequences"),
        (plan("prefill", (33, True, SamplingParams())), "prefill of 33 tokens in 1 sequences"),
    ],
)
def test_a_step_that_no_variant_holds_is_an_engine_error(
    quantized: ProgramExecutor, unknown: StepPlan, said: str
) -> None:
    with pytest.raises(EngineError, match=said):
        quantized.submit(unknown)
    served = serve(quantized, {0: [Submit("next", (1, 2, 3), SamplingParams(), 4)]})
    assert len(served.tokens("next")) == 4, "the executor goes on"


def test_a_feature_that_was_not_compiled_is_named() -> None:
    plain = Catalog.of((VariantKey("decode", 1, 1),))
    with pytest.raises(EngineError, match="greedy', logprobs=True, logit_bias=False"):
        plain.select(plan("decode", (1, True, SamplingParams(logprobs=0))))


FULL = replace(
    PRESET,
    structured_outputs=True,
    penalties=True,
    penalty_buckets=(8, 300),
    prompt_logprobs=True,
)
FULL_CATALOG = Catalog.of(variant_matrix(FULL))
MASK = (bytes(28),)


@given(
    st.sampled_from(["prefill", "decode"]),
    st.lists(
        st.tuples(samplings, st.sampled_from([(), MASK]), st.integers(0, 128), st.booleans()),
        min_size=1,
        max_size=8,
    ),
)
def test_features_are_had_wherever_they_are_needed(step, parts):
    """And nothing beside them that another variant could do without."""
    sequences = tuple(
        SequencePlan(
            slot,
            0,
            1,
            (1,),
            (slot + 1,),
            True,
            0,
            sampling,
            masks=masks,
            counts=(bytes(8 * counted),),
            targets=(2,) if scored and step == "prefill" else (),
        )
        for slot, (sampling, masks, counted, scored) in enumerate(parts)
    )
    key = FULL_CATALOG.select(StepPlan(step, sequences))
    counted = max(count for _, _, count, _ in parts)
    sizes = (0, 8, 128)  # 300 is more than a full context, which is always there
    assert key.prompt_logprobs == any(sequence.targets for sequence in sequences)
    if not key.prompt_logprobs:
        assert key.penalties == min(size for size in sizes if size >= counted)
        masked = any(masks for _, masks, _, _ in parts)
        assert key.mask == (masked or bool(counted))
    assert key.mask >= any(masks for _, masks, _, _ in parts)
    assert key.penalties >= counted
    assert key.logprobs >= any(s.logprobs is not None for s, _, _, _ in parts)
    assert key.logit_bias >= any(s.logit_bias for s, _, _, _ in parts)
    assert (key.sampling == "sample") == any(s.temperature > 0 for s, _, _, _ in parts)


def test_features_add_variants_and_do_not_multiply_them():
    plain, full = set(variant_matrix(PRESET)), set(variant_matrix(FULL))
    assert plain < full
    buckets = len(PRESET.decode_rows) + len(PRESET.prefill_tokens)
    # logprobs or not, greedy or not; nothing, bias, mask, and two sizes of penalties
    assert len(full) == buckets * 4 * 5 + len(PRESET.prefill_tokens) * 2
    for name in ("token_masks", "min_tokens", "thinking_budget"):
        assert set(variant_matrix(replace(FULL, **{name: True}))) == full, "they share the mask"
