"""Both loops end to end: the same tokens per request, whatever arrives and on however few pages."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.driver import Driver, Loop, submit
from tests.scripted_executor import ScriptedExecutor, expected_tokens, small_info
from trnc.core import ExecutorInfo, SamplingParams, StepPlan
from trnc.engine.loops import overlapped_loop, plain_loop
from trnc.engine.messages import Abort, GetStats, Shutdown, Submit, ToEngine

LOOPS = pytest.mark.parametrize("loop", [plain_loop, overlapped_loop])
GREEDY = SamplingParams()

limits = st.builds(
    small_info,
    max_rows=st.integers(1, 4),
    max_prefill_tokens=st.integers(1, 12),
    max_context=st.just(24),
    page_size=st.sampled_from([1, 2, 4]),
    num_pages=st.integers(25, 40),
)
# Few token values and short prompts, so that prefixes collide and pages are shared.
submits = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=14),
    st.integers(1, 10),
    st.integers(0, 2),
    st.frozensets(st.integers(0, 96), max_size=12),
)
schedules = st.lists(
    st.tuples(st.integers(0, 30), submits, st.none() | st.integers(0, 12)), min_size=1, max_size=14
)
Schedule = list[tuple[int, tuple[list[int], int, int, frozenset[int]], int | None]]


def tight(info: ExecutorInfo) -> ExecutorInfo:
    """The smallest pool in which a full context still fits."""
    return small_info(
        max_rows=info.max_rows,
        max_prefill_tokens=info.max_prefill_tokens,
        max_context=info.max_context,
        page_size=info.page_size,
        num_pages=info.max_context // info.page_size + 1,
    )


def arrivals_of(schedule: Schedule) -> tuple[dict[int, list[ToEngine]], dict[str, Submit]]:
    """Turn (turn, request, aborted after) into what arrives at each turn."""
    arrivals: dict[int, list[ToEngine]] = defaultdict(list)
    requests = {}
    for number, (turn, (prompt, max_tokens, seed, stop), aborted) in enumerate(schedule):
        sampling = SamplingParams(temperature=float(seed > 0), seed=seed)
        message = submit(
            str(number), prompt, max_tokens, sampling=sampling, stop_token_ids=tuple(sorted(stop))
        )
        arrivals[turn].append(message)
        requests[message.request_id] = message
        if aborted is not None:
            arrivals[turn + aborted].append(Abort(message.request_id))
    return arrivals, requests


@settings(max_examples=120, deadline=None)
@given(info=limits, schedule=schedules, squeeze=st.booleans())
def test_both_loops_give_each_request_its_tokens(
    info: ExecutorInfo, schedule: Schedule, squeeze: bool
) -> None:
    info = tight(info) if squeeze else info
    arrivals, requests = arrivals_of(schedule)
    aborted = {m.request_id for ms in arrivals.values() for m in ms if isinstance(m, Abort)}
    for loop in (plain_loop, overlapped_loop):
        driver = Driver(executor=ScriptedExecutor(info=info), arrivals=arrivals).serve(loop)
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


@settings(max_examples=40, deadline=None)
@given(info=limits, schedule=schedules, fail_at=st.sets(st.integers(0, 30), max_size=4))
def test_a_failed_step_loses_its_requests_and_no_others(
    info: ExecutorInfo, schedule: Schedule, fail_at: set[int]
) -> None:
    arrivals, requests = arrivals_of([(turn, what, None) for turn, what, _ in schedule])
    for loop in (plain_loop, overlapped_loop):
        executor = ScriptedExecutor(info=tight(info), fail_at=fail_at)
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
            if failed is not None:
                assert failed.message.startswith("engine error: step ")


@LOOPS
def test_200_requests_over_8_rows_on_a_tiny_pool(loop: Loop) -> None:
    info = small_info(max_rows=8, max_prefill_tokens=32, page_size=4, num_pages=33)
    arrivals: dict[int, list[ToEngine]] = defaultdict(list)
    for i in range(200):
        prompt = [i % 5] * (i % 17 + 1) + [i % 97]
        sampling = SamplingParams(temperature=float(i % 2), seed=i)
        arrivals[i // 10].append(submit(str(i), prompt, 10 + i % 30, sampling=sampling))
    driver = Driver(executor=ScriptedExecutor(info=info), arrivals=arrivals).serve(loop)
    for message in (m for ms in arrivals.values() for m in ms):
        assert isinstance(message, Submit)
        expected = expected_tokens(message.prompt_ids, message.max_tokens, message.sampling, info)
        assert driver.tokens(message.request_id) == expected
        assert driver.finish(message.request_id) == "length"
    stats = driver.engine.stats()
    assert stats.preemptions > 0
    assert stats.finished == 200
    assert stats.cached_tokens > 0
    assert max(len(plan.sequences) for plan in driver.executor.plans) == 8


def test_the_overlapped_loop_submits_a_step_before_it_reads_the_one_before() -> None:
    unread: list[int] = []
    executor = ScriptedExecutor(info=small_info())
    submit_step, run_oldest = executor.submit, executor.run_oldest
    in_flight = 0

    def counting_submit(plan: StepPlan) -> object:
        nonlocal in_flight
        in_flight += 1
        unread.append(in_flight)
        return submit_step(plan)

    def counting_run() -> None:
        nonlocal in_flight
        run_oldest()
        in_flight -= 1

    executor.submit, executor.run_oldest = counting_submit, counting_run  # type: ignore[assignment,method-assign]
    Driver(executor=executor, arrivals={0: [submit("a", range(5), 6)]}).serve(overlapped_loop)
    assert unread == [1, 2, 2, 2, 2, 2]
    assert [p.sequences[0].token_ids is None for p in executor.plans] == [False] + [True] * 5


def test_a_stop_seen_late_drops_the_stale_row() -> None:
    info = small_info()
    expected = expected_tokens(range(5), 10, GREEDY, info)
    executor = ScriptedExecutor(info=info)
    message = submit("a", range(5), 10, stop_token_ids=(expected[2],))
    driver = Driver(executor=executor, arrivals={0: [message]}).serve(overlapped_loop)
    assert driver.tokens("a") == expected[:3]
    assert [delta.stop_token_id for delta in driver.deltas("a")] == [None, None, expected[2]]
    assert len(executor.plans) == 4  # the last one was planned before the stop was read


@LOOPS
def test_an_abort_is_silent_and_the_others_go_on(loop: Loop) -> None:
    info = small_info(max_rows=2)
    arrivals: dict[int, list[ToEngine]] = {
        0: [submit("a", range(5), 30), submit("b", range(9), 30), submit("waits", [7], 3)],
        2: [submit("gone", [8], 3), Abort("gone")],
        4: [Abort("a"), Abort("unknown")],
    }
    driver = Driver(executor=ScriptedExecutor(info=info), arrivals=arrivals).serve(loop)
    assert driver.finish("a") is None
    assert 0 < len(driver.tokens("a")) < 30
    assert driver.deltas("gone") == []
    assert driver.tokens("b") == expected_tokens(range(9), 30, GREEDY, info)
    assert driver.tokens("waits") == expected_tokens([7], 3, GREEDY, info)


@LOOPS
def test_a_refused_request_is_told_why(loop: Loop) -> None:
    arrivals: dict[int, list[ToEngine]] = {
        0: [submit("long", range(64)), submit("good", range(4), 2)],
    }
    driver = Driver(executor=ScriptedExecutor(info=small_info()), arrivals=arrivals).serve(loop)
    failed = driver.failures()["long"]
    assert failed.param == "prompt"
    assert "64" in failed.message
    assert driver.finish("good") == "length"


@LOOPS
def test_a_step_that_submit_refuses_fails_in_its_turn(loop: Loop) -> None:
    executor = ScriptedExecutor(info=small_info(), refuse_at={1})
    arrivals: dict[int, list[ToEngine]] = {
        0: [submit("a", range(4), 5)],
        9: [submit("b", range(4), 5)],
    }
    driver = Driver(executor=executor, arrivals=arrivals).serve(loop)
    assert driver.tokens("a") == expected_tokens(range(4), 1, GREEDY, executor.info)
    assert "step 1 was refused" in driver.failures()["a"].message
    assert driver.tokens("b") == expected_tokens(range(4), 5, GREEDY, executor.info)


@LOOPS
def test_an_error_that_is_not_the_engines_own_leaves_the_loop(loop: Loop) -> None:
    executor = ScriptedExecutor(info=small_info(), die_at={1})
    driver = Driver(executor=executor, arrivals={0: [submit("a", range(4), 5)]})
    with pytest.raises(RuntimeError, match="broke the device"):
        loop(driver.engine)
    assert driver.scheduler.request_ids == ["a"]


@LOOPS
def test_stats_are_sent_when_asked_and_about_every_second_of_work(loop: Loop) -> None:
    arrivals: dict[int, list[ToEngine]] = {
        0: [submit("a", range(6), 4)],
        100: [GetStats()],
    }
    executor = ScriptedExecutor(info=small_info(), compiles=3)
    driver = Driver(executor=executor, arrivals=arrivals).serve(loop)
    stats = driver.stats()
    assert len(stats) >= 3  # the driver's clock makes a turn a second
    last = stats[-1]
    assert (last.running, last.waiting) == (0, 0)
    assert (last.prompt_tokens, last.output_tokens, last.finished) == (6, 4, 1)
    assert (last.prefill_steps, last.decode_steps) == (1, 3)
    assert (last.free_pages, last.total_pages) == (64, 64)
    assert last.compiles_after_ready == 3


@LOOPS
def test_a_shutdown_ends_the_loop_after_the_current_step(loop: Loop) -> None:
    arrivals: dict[int, list[ToEngine]] = {
        0: [submit("a", range(4), 30)],
        3: [Shutdown()],
    }
    driver = Driver(executor=ScriptedExecutor(info=small_info()), arrivals=arrivals)
    loop(driver.engine)
    assert len(driver.tokens("a")) == len(driver.executor.plans) == 3
