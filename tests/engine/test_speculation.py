"""Speculation in the scheduler and both loops: the same tokens, however many guesses are right."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.driver import Driver, Loop, submit
from tests.engine.test_loops import Schedule, arrivals_of, limits, schedules, tight
from tests.scripted_executor import ScriptedExecutor, expected_tokens, small_info
from trnc.core import ExecutorInfo, SamplingParams
from trnc.engine.loops import overlapped_loop, plain_loop
from trnc.engine.messages import Abort
from trnc.engine.trace import replay

LOOPS = pytest.mark.parametrize("loop", [plain_loop, overlapped_loop])
GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=1.0, seed=5, logprobs=2)
DEPTHS = st.sampled_from([(1,), (3,), (1, 2, 3), (2, 5)])


def speculating(info: ExecutorInfo, depths: tuple[int, ...], *, always: bool) -> ExecutorInfo:
    return replace(info, mtp_depths=depths, mtp_always=always)


@settings(max_examples=150, deadline=None)
@given(
    info=limits,
    schedule=schedules,
    squeeze=st.booleans(),
    depths=DEPTHS,
    always=st.booleans(),
    right=st.integers(1, 7),
)
def test_each_request_gets_its_tokens_whatever_is_guessed(
    info: ExecutorInfo,
    schedule: Schedule,
    squeeze: bool,
    depths: tuple[int, ...],
    always: bool,
    right: int,
) -> None:
    info = speculating(tight(info) if squeeze else info, depths, always=always)
    arrivals, requests = arrivals_of(schedule)
    aborted = {m.request_id for ms in arrivals.values() for m in ms if isinstance(m, Abort)}
    for loop in (plain_loop, overlapped_loop):
        # Of seven positions in a row, `right` are guessed right.
        executor = ScriptedExecutor(info=info, right=lambda position: position % 7 < right)
        driver = Driver(executor=executor, arrivals=arrivals).serve(loop)
        assert not driver.failures()
        for name, message in requests.items():
            expected = expected_tokens(
                message.prompt_ids,
                message.max_tokens,
                message.sampling,
                info,
                stop_token_ids=message.stop_token_ids,
            )
            got = driver.tokens(name)
            if name in aborted and driver.finish(name) is None:
                assert got == expected[: len(got)]
                continue
            assert got == expected
            stopped = expected[-1] in message.stop_token_ids
            assert driver.finish(name) == ("stop" if stopped else "length")
        assert replay(driver.events) == sum(1 for e in driver.events if hasattr(e, "plan"))


@settings(max_examples=40, deadline=None)
@given(info=limits, schedule=schedules, fail_at=st.sets(st.integers(0, 30), max_size=4))
def test_a_failed_step_loses_its_requests_and_no_others(
    info: ExecutorInfo, schedule: Schedule, fail_at: set[int]
) -> None:
    arrivals, requests = arrivals_of([(turn, what, None) for turn, what, _ in schedule])
    info = speculating(tight(info), (2,), always=True)
    for loop in (plain_loop, overlapped_loop):
        executor = ScriptedExecutor(info=info, fail_at=fail_at)
        driver = Driver(executor=executor, arrivals=arrivals).serve(loop)
        for name, message in requests.items():
            expected = expected_tokens(
                message.prompt_ids,
                message.max_tokens,
                message.sampling,
                info,
                stop_token_ids=message.stop_token_ids,
            )
            got = driver.tokens(name)
            failed = driver.failures().get(name)
            assert (failed is None) == (driver.finish(name) is not None)
            assert got == (expected if failed is None else expected[: len(got)])


@LOOPS
def test_right_guesses_are_all_accepted_and_counted(loop: Loop) -> None:
    info = small_info(mtp_depths=(3,), mtp_always=True)
    executor = ScriptedExecutor(info=info, right=lambda position: True)
    message = submit("a", range(5), 13, sampling=SEEDED)
    driver = Driver(executor=executor, arrivals={0: [message]}).serve(loop)
    assert driver.tokens("a") == expected_tokens(range(5), 13, SEEDED, info)
    assert [len(delta.token_ids) for delta in driver.deltas("a")] == [1, 4, 4, 4]
    assert [len(delta.logprobs) for delta in driver.deltas("a")] == [1, 4, 4, 4]
    last = driver.deltas("a")[-1]
    assert (last.drafted_tokens, last.accepted_tokens) == (9, 9)
    stats = driver.engine.stats()
    assert stats.drafted == stats.accepted == (3, 3, 3)
    assert (stats.verify_steps, stats.decode_steps) == (3, 0)
    assert stats.draft_steps == (3 if loop is plain_loop else 4)  # the last one was planned blind
    assert stats.output_tokens == 13


@LOOPS
def test_wrong_guesses_cost_steps_and_no_tokens(loop: Loop) -> None:
    info = small_info(mtp_depths=(2,), mtp_always=True)
    executor = ScriptedExecutor(info=info, right=lambda position: False)
    driver = Driver(executor=executor, arrivals={0: [submit("a", range(5), 6)]}).serve(loop)
    assert driver.tokens("a") == expected_tokens(range(5), 6, GREEDY, info)
    assert driver.engine.stats().accepted == (0, 0)


@LOOPS
@pytest.mark.parametrize("place", range(1, 5))
def test_a_stop_token_inside_an_accepted_run_ends_the_text_there(loop: Loop, place: int) -> None:
    info = small_info(mtp_depths=(5,), mtp_always=True)
    expected = expected_tokens(range(5), 10, GREEDY, info)
    stop = expected[place]
    executor = ScriptedExecutor(info=info, right=lambda position: True)
    message = submit("a", range(5), 10, stop_token_ids=(stop,))
    driver = Driver(executor=executor, arrivals={0: [message]}).serve(loop)
    assert driver.tokens("a") == expected[: expected.index(stop) + 1]
    assert driver.deltas("a")[-1].stop_token_id == stop
    assert driver.finish("a") == "stop"


@LOOPS
@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_is_never_overshot_nor_computed_beyond(loop: Loop, max_tokens: int) -> None:
    info = small_info(mtp_depths=(3,), mtp_always=True)
    executor = ScriptedExecutor(info=info, right=lambda position: True)
    message = submit("a", range(5), max_tokens)
    driver = Driver(executor=executor, arrivals={0: [message]}).serve(loop)
    assert len(driver.tokens("a")) == max_tokens
    ends = [
        p.sequences[0].start + p.sequences[0].count for p in executor.plans if p.step == "verify"
    ]
    assert max(ends, default=0) <= 5 + max_tokens - 1


def test_a_draft_is_planned_before_the_verify_before_it_is_read() -> None:
    info = small_info(mtp_depths=(2,), mtp_always=True)
    executor = ScriptedExecutor(info=info, right=lambda position: position % 3 > 0)
    unread: list[tuple[str, str]] = []
    submit_step = executor.submit

    def watched(plan):  # type: ignore[no-untyped-def]
        if executor.busy:
            unread.append((executor.plans[-1].step, plan.step))
        return submit_step(plan)

    executor.submit = watched  # type: ignore[method-assign]
    driver = Driver(executor=executor, arrivals={0: [submit("a", range(5), 20)]})
    driver.serve(overlapped_loop)
    assert ("verify", "draft") in unread
    assert ("draft", "verify") in unread
    assert ("verify", "verify") not in unread


@LOOPS
def test_always_never_decodes_plainly(loop: Loop) -> None:
    info = small_info(mtp_depths=(1, 3), mtp_always=True, max_rows=3)
    arrivals = {turn: [submit(str(turn), range(turn + 1), 1 + turn)] for turn in range(8)}
    driver = Driver(executor=ScriptedExecutor(info=info), arrivals=arrivals).serve(loop)
    assert {plan.step for plan in driver.executor.plans} == {"prefill", "draft", "verify"}
    assert {plan.depth for plan in driver.executor.plans if plan.step == "verify"} == {3}


@LOOPS
def test_a_preemption_between_draft_and_verify_loses_nothing(loop: Loop) -> None:
    info = small_info(
        max_rows=3, num_pages=10, page_size=4, max_context=32, mtp_depths=(3,), mtp_always=True
    )
    executor = ScriptedExecutor(info=info, right=lambda position: position % 4 > 0)
    requests = [submit(str(i), range(i, i + 6), 16) for i in range(3)]
    driver = Driver(executor=executor, arrivals={0: requests}).serve(loop)
    assert driver.engine.stats().preemptions > 0
    for request in requests:
        expected = expected_tokens(request.prompt_ids, 16, GREEDY, info)
        assert driver.tokens(request.request_id) == expected
