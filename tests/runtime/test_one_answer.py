"""One request, one answer: the same bits whatever else runs, and however its prompt was cut."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.driver import Loop
from tests.models.tiny import PRESET, VOCAB
from tests.runtime.serving import alone, outcome, serve
from trnc.core import SamplingParams
from trnc.engine.loops import overlapped_loop, plain_loop
from trnc.engine.messages import Abort, Submit, ToEngine
from trnc.ops import native
from trnc.runtime.executor import ProgramExecutor

LOOPS = pytest.mark.parametrize("loop", [plain_loop, overlapped_loop])
EXECUTORS = pytest.mark.parametrize("name", ["quantized", "f32", "glm4_moe", "deepseek_v3"])
TEXT = tuple((i * 7919 + i * i * 31) % VOCAB for i in range(PRESET.max_context))
GREEDY = SamplingParams(logprobs=5)
SEEDED = SamplingParams(temperature=0.9, top_k=60, top_p=0.9, min_p=0.01, seed=77, logprobs=2)
REQUEST = Submit("it", TEXT[:53], GREEDY, 14)


@pytest.fixture
def executor(name: str, request: pytest.FixtureRequest) -> ProgramExecutor:
    started: ProgramExecutor = request.getfixturevalue(name)
    return started


def strangers(count: int) -> list[Submit]:
    """Other requests of several lengths, some of which are sampled."""
    sampled = SamplingParams(temperature=1.5, seed=3)
    return [
        Submit(f"stranger {i}", TEXT[i + 1 : 3 * i + 5], sampled if i % 2 else GREEDY, 8 + i)
        for i in range(count)
    ]


@EXECUTORS
@LOOPS
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_in_a_batch_of_eight_as_alone(
    executor: ProgramExecutor, loop: Loop, sampling: SamplingParams
) -> None:
    request = Submit("it", REQUEST.prompt_ids, sampling, 14)
    before, after = strangers(7)[:3], strangers(7)[3:]
    together = serve(executor, {0: before, 2: [request], 3: after}, loop=loop)
    rows = [len(plan.sequences) for plan in together.executor.plans]
    assert max(rows) == 8
    assert outcome(together, "it") == alone(executor, request)


@EXECUTORS
@LOOPS
def test_in_chunks_of_any_size(executor: ProgramExecutor, loop: Loop) -> None:
    expected = alone(executor, REQUEST)
    assert len(expected[0]) == 14
    assert len(set(expected[0])) > 5, "the text must wander for this to be a test"
    for size in range(1, PRESET.max_prefill_tokens + 1):
        chunked = serve(executor, {0: [REQUEST]}, loop=loop, max_prefill_tokens=size)
        assert outcome(chunked, "it") == expected, f"chunks of {size}"


@EXECUTORS
@LOOPS
def test_after_a_hit_in_the_prefix_cache(executor: ProgramExecutor, loop: Loop) -> None:
    first = Submit("first", TEXT[:40], GREEDY, 3)
    served = serve(executor, {0: [first], 30: [REQUEST]}, loop=loop)
    assert served.deltas("it")[0].cached_tokens == 32
    assert outcome(served, "it") == alone(executor, REQUEST)


@EXECUTORS
@LOOPS
@pytest.mark.parametrize("length", [47, 48, 49])
def test_again_with_all_of_its_prompt_in_the_cache(
    executor: ProgramExecutor, loop: Loop, length: int
) -> None:
    request, again = (Submit(name, TEXT[:length], SEEDED, 6) for name in ("it", "again"))
    served = serve(executor, {0: [request], 30: [again]}, loop=loop)
    assert served.deltas("again")[0].cached_tokens == (length - 1) // 16 * 16
    assert outcome(served, "again") == outcome(served, "it") == alone(executor, request)


@EXECUTORS
@LOOPS
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_after_a_preemption(
    executor: ProgramExecutor, loop: Loop, sampling: SamplingParams
) -> None:
    requests = [Submit(f"{i}", TEXT[i : i + 30], sampling, 40) for i in range(3)]
    served = serve(executor, {0: requests}, loop=loop, num_pages=10)
    assert served.scheduler.counters.preemptions > 0
    for request in requests:
        assert outcome(served, request.request_id) == alone(executor, request)


@EXECUTORS
def test_on_any_number_of_threads(executor: ProgramExecutor) -> None:
    expected = alone(executor, REQUEST)
    threads = native.num_threads()
    try:
        for count in (1, 2, 3):
            native.set_num_threads(count)
            assert alone(executor, REQUEST) == expected
    finally:
        native.set_num_threads(threads)


# Random schedules


@dataclass(frozen=True)
class Arrival:
    turn: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    aborted_after: int | None


# Prompts share a prefix of any length, then go their own ways.
prompts = st.builds(
    lambda shared, own: (TEXT[:shared] + tuple(own))[:90],
    st.integers(0, 80),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
)
biases = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=3)
greedy = st.builds(SamplingParams, logprobs=st.none() | st.integers(0, 20))
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 150]),
    top_p=st.sampled_from([1.0, 0.9, 0.2]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**63 - 1),
    logprobs=st.none() | st.integers(0, 20),
    logit_bias=biases.map(lambda entries: tuple(entries.items())),
)
schedules = st.lists(
    st.builds(
        Arrival,
        turn=st.integers(0, 25),
        prompt=prompts,
        max_tokens=st.integers(1, 30),
        sampling=greedy | samplings,
        aborted_after=st.none() | st.none() | st.integers(0, 12),
    ),
    min_size=1,
    max_size=10,
)
limits = st.fixed_dictionaries(
    {
        "num_pages": st.integers(9, 65),  # one full context fits into 8 pages
        "max_prefill_tokens": st.integers(1, 32),
        "max_rows": st.integers(1, 8),
    }
)


@EXECUTORS
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(schedule=schedules, limits=limits, loop=st.sampled_from([plain_loop, overlapped_loop]))
def test_on_any_schedule(
    executor: ProgramExecutor, schedule: list[Arrival], limits: dict[str, int], loop: Loop
) -> None:
    arrivals: dict[int, list[ToEngine]] = defaultdict(list)
    requests = []
    for i, arrival in enumerate(schedule):
        request = Submit(str(i), arrival.prompt, arrival.sampling, arrival.max_tokens)
        requests.append(request)
        arrivals[arrival.turn].append(request)
        if arrival.aborted_after is not None:
            arrivals[arrival.turn + arrival.aborted_after].append(Abort(str(i)))
    served = serve(executor, arrivals, loop=loop, **limits)
    assert not served.failures()
    for request, arrival in zip(requests, schedule, strict=True):
        tokens, logprobs, finish = outcome(served, request.request_id)
        wanted_tokens, wanted_logprobs, wanted_finish = alone(executor, request)
        if arrival.aborted_after is None:
            assert finish == wanted_finish
        if finish is not None:
            assert len(tokens) == len(wanted_tokens)
        assert tokens == wanted_tokens[: len(tokens)]
        assert logprobs == wanted_logprobs[: len(logprobs)]
    assert executor.compiles_after_ready() == 0
