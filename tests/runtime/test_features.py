"""Features as variants: unused they change nothing, used they are exact in any company."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.models.tiny import VOCAB
from tests.runtime.serving import Limited, alone, outcome, serve
from tests.runtime.test_one_answer import TEXT, schedules
from trnc.core import SamplingParams
from trnc.engine.loops import overlapped_loop, plain_loop
from trnc.engine.messages import Rules, Submit, Thinking, ToEngine
from trnc.runtime.executor import ProgramExecutor

loops = st.sampled_from([plain_loop, overlapped_loop])
depths = st.sampled_from([(), (1, 2, 3)])
ALL = SamplingParams(logprobs=20)
END = (11, 12)


@pytest.fixture
def plain(featured: ProgramExecutor) -> Limited:
    """It never speculates."""
    return Limited(executor=featured, info=replace(featured.info, mtp_depths=()))


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(schedule=schedules, loop=loops, depths=depths)
def test_unused_features_change_no_bit(featured, glm4_moe, schedule, loop, depths):
    """Every other request has features, so that plain ones share their variants."""
    arrivals: dict[int, list[ToEngine]] = defaultdict(list)
    plain = []
    for i, arrival in enumerate(schedule):
        request = Submit(f"{i}", arrival.prompt, arrival.sampling, arrival.max_tokens)
        other = replace(arrival.sampling, repetition_penalty=1.3, prompt_logprobs=2)
        fancy = Submit(
            f"{i} fancy", arrival.prompt, other, 9, rules=Rules(bad_words=((1, 2), (3,)))
        )
        arrivals[arrival.turn] += [fancy, request]
        plain.append(request)
    served = serve(featured, arrivals, loop=loop, mtp_depths=depths)
    for request in plain:
        assert outcome(served, request.request_id) == alone(glm4_moe, request)


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.9]),
    seed=st.integers(0, 9),
    logprobs=st.none() | st.just(3),
    logit_bias=st.sampled_from([(), ((5, 4.0), (9, -3.0))]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.8, 0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, -0.4]),
    penalize_prompt=st.booleans(),
    prompt_logprobs=st.none() | st.integers(0, 4),
)
rule_sets = st.builds(
    Rules,
    thinking=st.none()
    | st.builds(Thinking, end_ids=st.just(END), open=st.just(True), budget=st.integers(0, 5)),
    allowed_token_ids=st.none() | st.just((*range(0, VOCAB, 2), 11)),
    bad_words=st.sampled_from([(), ((4,), (8, 6))]),
    min_tokens=st.integers(0, 8),
)
requests = st.lists(
    st.tuples(st.integers(1, 70), samplings, rule_sets, st.integers(1, 14)), min_size=1, max_size=6
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(wanted=requests, loop=loops, depths=depths, data=st.data())
def test_features_are_exact_in_any_company(plain, featured, wanted, loop, depths, data):
    limits = {
        "mtp_depths": depths,
        "num_pages": data.draw(st.integers(9, 30)),
        "max_prefill_tokens": data.draw(st.integers(2, 32)),
    }
    made = [
        Submit(f"{i}", TEXT[i : i + length], sampling, tokens, (2, 3), rules=rules)
        for i, (length, sampling, rules, tokens) in enumerate(wanted)
    ]
    served = serve(featured, {i: [request] for i, request in enumerate(made)}, loop=loop, **limits)
    for request in made:
        lone = serve(plain, {0: [request]})
        assert outcome(served, request.request_id) == outcome(lone, request.request_id)
        scores = [s for d in served.deltas(request.request_id) for s in d.prompt_logprobs]
        assert scores == [s for d in lone.deltas(request.request_id) for s in d.prompt_logprobs]
        asked = request.sampling.prompt_logprobs
        assert len(scores) == (0 if asked is None else len(request.prompt_ids) - 1)
        assert all(len(score.top) == asked for score in scores)
        check_rules(lone.tokens(request.request_id), request, lone.finish(request.request_id))


def check_rules(output: list[int], request: Submit, finish: str | None) -> None:
    rules, forced = request.rules, set()
    if rules.thinking is not None:
        budget = rules.thinking.budget
        assert budget is not None
        ends = [i for i in range(len(output) - 1) if tuple(output[i : i + 2]) == END]
        cut = budget + (output[budget - 1 : budget] != [END[0]]) if budget else 1
        assert ends or len(output) <= budget + 2 or output[cut : cut + 1] == [END[1]]
        forced = set(range(budget, len(output)) if not ends else range(budget, ends[0] + 2))
    for i, token in enumerate(output):
        if i in forced:
            continue
        assert rules.allowed_token_ids is None or token in rules.allowed_token_ids
        for *before, last in rules.bad_words:
            tail = output[max(0, i - len(before)) : i]
            assert token != last or tail != before
        assert i >= rules.min_tokens or token not in request.stop_token_ids
    assert finish in ("stop", "length")


def test_penalties_do_what_they_say(plain):
    """The picks, from the raw log-probabilities of the very same text: greedy, step by step."""
    prompt = TEXT[:9]
    sampling = replace(ALL, repetition_penalty=1.7, frequency_penalty=0.9, presence_penalty=0.4)
    tokens, logprobs, _ = alone(plain, Submit("it", prompt, sampling, 16))
    free, _, _ = alone(plain, Submit("it", prompt, ALL, 16))
    assert tokens != free, "strong penalties change the text"
    # Repetition looks at logits, not log-probabilities; with r = 1 the order is the penalised one.
    sampling = replace(sampling, repetition_penalty=1.0)
    tokens, logprobs, _ = alone(plain, Submit("it", prompt, sampling, 16))
    for i, (token, entry) in enumerate(zip(tokens, logprobs, strict=True)):
        counts = Counter(tokens[:i])
        penalised = {t: lp - 0.9 * counts[t] - 0.4 * (t in counts) for t, lp in entry.top}
        assert token == max(penalised, key=lambda t: penalised[t])


def test_prompt_logprobs_are_those_of_an_output(plain):
    """A text has the same log-probabilities whether it was generated or given, bit for bit."""
    request = Submit("it", TEXT[:21], ALL, 20)
    tokens, logprobs, _ = alone(plain, request)
    both = Submit(
        "both",
        (*request.prompt_ids, *tokens),
        SamplingParams(prompt_logprobs=20),
        1,
        prompt_logprobs_from=21,
    )
    for limit in (32, 7):
        served = serve(plain, {0: [request], 30: [both]}, max_prefill_tokens=limit)
        scores = [s for d in served.deltas("both") for s in d.prompt_logprobs]
        assert scores == logprobs
        assert served.deltas("both")[-1].cached_tokens == 16, "what is not scored may be cached"
