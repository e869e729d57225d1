"""Speculation on compiled models: the bits of plain decoding, and drafts of the right noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.driver import Driver, Loop
from tests.models.tiny import PRESET, VOCAB
from tests.runtime.serving import Outcome, Prompted, alone, outcome, serve
from trnc.core import SamplingParams
from trnc.engine.loops import overlapped_loop, plain_loop
from trnc.engine.messages import Submit
from trnc.runtime.executor import ProgramExecutor

FAMILIES = pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
LOOPS = pytest.mark.parametrize("loop", [plain_loop, overlapped_loop])
TEXT = tuple((i * 7919 + i * i * 31) % VOCAB for i in range(PRESET.max_context))


@pytest.fixture
def plain(family: str, request: pytest.FixtureRequest) -> ProgramExecutor:
    started: ProgramExecutor = request.getfixturevalue(family)
    return started


@pytest.fixture
def speculating(family: str, request: pytest.FixtureRequest) -> ProgramExecutor:
    started: ProgramExecutor = request.getfixturevalue(f"{family}_mtp")
    return started


def requests_of(samplings: list[SamplingParams], lengths: list[int]) -> list[Submit]:
    """Requests whose seeds are their numbers, so that their answers can be looked up."""
    return [
        Submit(str(i), TEXT[i : i + length], replace(sampling, seed=i), 4 + (7 * i + length) % 17)
        for i, (sampling, length) in enumerate(zip(samplings, lengths, strict=True))
    ]


def prompted(
    executor: ProgramExecutor,
    requests: list[Submit],
    answers: list[Outcome],
    *,
    loop: Loop,
    right: int,
    **limits: object,
) -> Driver:
    """Serve with guesses of which `right` of five in a row are right; they arrive in two turns."""
    limited = Prompted(
        executor=executor,
        info=replace(executor.info, **limits),  # type: ignore[arg-type]
        answers={i: answer[0] for i, answer in enumerate(answers)},
        right=lambda index: index % 5 < right,
    )
    half = len(requests) // 2
    arrivals = {0: requests[half:], 3: requests[:half]}
    return Driver(executor=limited, arrivals=arrivals).serve(loop)  # type: ignore[arg-type]


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5, 150]),
    top_p=st.sampled_from([1.0, 0.9]),
    logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.sampled_from([(), ((7, 2.5), (11, -4.0))]),
)


@FAMILIES
@LOOPS
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(st.tuples(samplings, st.integers(1, 60)), min_size=1, max_size=9),
    right=st.integers(0, 5),
    always=st.booleans(),
    num_pages=st.integers(12, 65),
)
def test_the_bits_are_those_of_plain_decoding(
    plain: ProgramExecutor,
    speculating: ProgramExecutor,
    loop: Loop,
    rows: list[tuple[SamplingParams, int]],
    right: int,
    always: bool,
    num_pages: int,
) -> None:
    requests = requests_of([sampling for sampling, _ in rows], [length for _, length in rows])
    expected = [alone(plain, request) for request in requests]
    served = prompted(
        speculating,
        requests,
        expected,
        loop=loop,
        right=right,
        mtp_always=always,
        num_pages=num_pages,
    )
    for request, answer in zip(requests, expected, strict=True):
        assert outcome(served, request.request_id) == answer
    counters = served.scheduler.counters
    if always and right == 5:
        assert counters.accepted == counters.drafted


@FAMILIES
@LOOPS
def test_a_stop_token_in_an_accepted_run_ends_where_it_does_without(
    plain: ProgramExecutor, speculating: ProgramExecutor, loop: Loop
) -> None:
    sampling = SamplingParams(temperature=0.9, logprobs=1)
    whole = alone(plain, Submit("0", TEXT[:20], sampling, 12))[0]
    for place in range(1, 8):
        request = Submit("0", TEXT[:20], sampling, 12, stop_token_ids=(whole[place],))
        expected = alone(plain, request)
        served = prompted(
            speculating,
            [request],
            [(whole, [], None)],
            loop=loop,
            right=5,
            mtp_always=True,
        )
        assert outcome(served, "0") == expected


@FAMILIES
@LOOPS
def test_drafts_are_sampled_with_the_noise_of_the_position_that_they_are_for(
    speculating: ProgramExecutor, loop: Loop
) -> None:
    # So hot that the noise alone decides: whoever has the same noise picks the same token.
    hot = SamplingParams(temperature=1e4, seed=9)
    requests = [Submit(str(i), TEXT[: 7 + i], replace(hot, seed=i), 30) for i in range(3)]
    served = serve(speculating, {0: requests}, loop=loop, mtp_always=True)
    counters = served.scheduler.counters
    assert sum(counters.drafted) > 40
    assert counters.accepted == counters.drafted


def test_rounds_are_measured_at_the_start(glm4_moe, glm4_moe_mtp):
    rounds = glm4_moe_mtp.info.rounds
    expected = [(rows, depth) for rows in PRESET.decode_rows for depth in (0, 1, 2, 3)]
    assert [(rows, depth) for rows, depth, _ in rounds] == expected
    assert all(micros > 0 for *_, micros in rounds)
    assert glm4_moe.info.rounds == (), "nothing to choose from"
