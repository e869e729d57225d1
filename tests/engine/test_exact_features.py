"""Token rules and penalties in the engine: speculation, loops and preemption change no token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.driver import Driver
from tests.engine.test_rules import STOPS, Counting, all_rules, allowed
from tests.scripted_executor import ScriptedExecutor, next_token, small_info
from trnc.core import ExecutorInfo, SamplingParams
from trnc.engine.loops import overlapped_loop, plain_loop
from trnc.engine.messages import Rules, Submit
from trnc.engine.rules import Matcher
from trnc.engine.trace import replay
from trnc.errors import RequestError

INFO = small_info(vocab_size=40, max_context=96, num_pages=65)


class Instant:
    """`Grammars` that are compiled at once; all of them are the one grammar of `Counting`."""

    def __init__(self) -> None:
        self._ready: list[tuple[Submit, Matcher | RequestError]] = []

    def start(self, message: Submit) -> None:
        self._ready.append((message, Counting()))

    def finished(self) -> Iterable[tuple[Submit, Matcher | RequestError]]:
        ready, self._ready = self._ready, []
        return ready

    def cancel(self, request_id: str) -> None:
        self._ready = [each for each in self._ready if each[0].request_id != request_id]


def expected(message: Submit, info: ExecutorInfo) -> tuple[list[int], str]:
    """What a request must get, from the whole text each time."""
    output: list[int] = []
    sampling, stops = message.sampling, message.stop_token_ids
    penalizes = (
        sampling.repetition_penalty != 1
        or sampling.frequency_penalty != 0
        or sampling.presence_penalty != 0
    )
    scope = message.prompt_ids if sampling.repetition_penalty != 1 else ()
    scope = scope if sampling.penalize_prompt else ()
    while True:
        may = allowed(output, message.rules, stops)
        if not may or (message.rules.grammar is not None and output[-1:] == [38]):
            return output, "stop"
        token = next_token([*message.prompt_ids, *output], sampling, len(output), info)
        if penalizes:
            counts = Counter(dict.fromkeys(scope, 0))
            counts.update(output)
            token += sum((t + 3) * (n + 1) for t, n in counts.items())
        token = min((t for t in may), key=lambda t: (t - token) % info.vocab_size)
        output.append(token)
        if token in stops:
            return output, "stop"
        if message.rules.grammar is not None and token == 38:
            return output, "stop"
        if len(output) == message.max_tokens:
            return output, "length"


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 50),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    penalize_prompt=st.booleans(),
)
requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 39), min_size=1, max_size=20),
        samplings,
        st.just(Rules()) | all_rules,
        st.integers(1, 12),
        st.integers(0, 8),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=120, deadline=None)
@given(
    wanted=requests,
    depths=st.sampled_from([(), (1,), (3,), (1, 2, 5)]),
    always=st.booleans(),
    right=st.integers(0, 7),
    num_pages=st.integers(9, 60),
)
def test_every_feature_is_exact_whatever_is_guessed(wanted, depths, always, right, num_pages):
    info = replace(INFO, mtp_depths=depths, mtp_always=always and bool(depths), num_pages=num_pages)
    arrivals: dict[int, list[Any]] = {}
    messages = []
    for i, (prompt, sampling, rules, max_tokens, turn) in enumerate(wanted):
        message = Submit(f"{i}", tuple(prompt), sampling, max_tokens, STOPS, rules=rules)
        messages.append(message)
        arrivals.setdefault(turn, []).append(message)
    for loop in (plain_loop, overlapped_loop):
        executor = ScriptedExecutor(info=info, right=lambda position: position % 7 < right)
        driver = Driver(executor=executor, arrivals=arrivals, grammars=Instant()).serve(loop)
        assert not driver.failures()
        for message in messages:
            got = driver.tokens(message.request_id), driver.finish(message.request_id)
            assert got == expected(message, info)
        assert replay(driver.events, matcher_of=lambda _: Counting()) > 0


def test_only_those_who_need_their_last_token_wait_for_it():
    """In the overlapped loop a plain request is planned blind, beside one that cannot be."""
    plain = Submit("plain", (1, 2, 3), SamplingParams(), 12)
    needy = Submit("needy", (4, 5, 6), SamplingParams(presence_penalty=1.0), 12)
    executor = ScriptedExecutor(info=INFO)
    Driver(executor=executor, arrivals={0: [plain, needy]}).serve(overlapped_loop)
    rows = [row for plan in executor.plans for row in plan.sequences]
    blind = {row.token_ids is None for row in rows if not row.counts and row.output_index > 1}
    assert blind == {True}
    assert all(row.token_ids is not None for row in rows if row.counts)


def scored(prompt: Sequence[int], info: ExecutorInfo, first: int, **limits: Any) -> list[int]:
    message = Submit(
        "it", tuple(prompt), SamplingParams(prompt_logprobs=1), 5, prompt_logprobs_from=first
    )
    others = [Submit(f"{i}", (i, 7, 7), SamplingParams(), 30) for i in range(3)]
    executor = ScriptedExecutor(info=replace(info, **limits))
    driver = Driver(executor=executor, arrivals={0: others, 2: [message]}).serve(overlapped_loop)
    entries = [entry for delta in driver.deltas("it") for entry in delta.prompt_logprobs]
    return [entry.top[0][0] for entry in entries]


@given(
    st.lists(st.integers(0, 39), min_size=1, max_size=40),
    st.integers(0, 45),
    st.integers(1, 16),
    st.integers(14, 40),
)
@settings(max_examples=60, deadline=None)
def test_each_token_of_a_prompt_is_scored_once(prompt, first, chunk, num_pages):
    """However the prompt is cut, and whether or not it is preempted."""
    wanted = prompt[max(first, 1) :]
    assert scored(prompt, INFO, first, max_prefill_tokens=chunk, num_pages=num_pages) == wanted
