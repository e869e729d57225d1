"""The scheduler's decisions, seen in its plans."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.driver import check_ownership, submit
from tests.scripted_executor import (
    ScriptedExecutor,
    ScriptedHandle,
    expected_logprobs,
    expected_tokens,
    small_info,
)
from trnc.core import MAX_LOGIT_BIAS, SamplingParams, StepPlan
from trnc.engine.messages import Delta, Submit
from trnc.engine.scheduler import Scheduler
from trnc.errors import EngineError, RequestError


class Bench:
    """A scheduler and an executor that are stepped by hand."""

    def __init__(self, max_waiting: int | None = None, **limits: int) -> None:
        self.info = small_info(**limits)  # type: ignore[arg-type]
        self.scheduler = Scheduler(info=self.info, max_waiting=max_waiting)
        self.executor = ScriptedExecutor(info=self.info)
        self.deltas: list[Delta] = []

    def add(
        self, request_id: str, prompt: Iterable[int], max_tokens: int = 4, **fields: object
    ) -> None:
        self.deltas += self.scheduler.submit(submit(request_id, prompt, max_tokens, **fields))

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None
        self.deltas += self.scheduler.commit(plan, self.executor.submit(plan).result())
        return plan

    def finish(self) -> None:
        while self.scheduler.request_ids:
            self.step()

    def tokens(self, request_id: str) -> list[int]:
        return [t for d in self.deltas if d.request_id == request_id for t in d.token_ids]


def shape(plan: StepPlan) -> tuple[str, list[int]]:
    return plan.step, [sequence.count for sequence in plan.sequences]


def test_a_prefill_step_packs_chunks_and_the_last_chunk_samples() -> None:
    bench = Bench(max_prefill_tokens=16)
    bench.add("a", range(10))
    bench.add("b", range(20, 40))
    first = bench.step()
    assert shape(first) == ("prefill", [10, 6])
    assert [s.sample for s in first.sequences] == [True, False]
    assert shape(bench.step()) == ("decode", [1])
    third = bench.step()
    assert shape(third) == ("prefill", [14])
    assert third.sequences[0].start == 6
    assert third.sequences[0].sample


def test_steps_alternate_so_that_neither_side_starves() -> None:
    bench = Bench(max_prefill_tokens=4)
    bench.add("short", range(3), 20)
    bench.add("long", range(20, 40), 2)
    kinds = [bench.step().step for _ in range(10)]
    assert kinds == ["prefill", "decode"] * 5


def test_a_position_left_alone_goes_into_a_decode_step() -> None:
    bench = Bench(max_prefill_tokens=4)
    bench.add("a", range(5), 2)
    assert shape(bench.step()) == ("prefill", [4])
    last = bench.step()
    assert shape(last) == ("decode", [1])
    assert last.sequences[0].token_ids == (4,)
    assert last.sequences[0].output_index == 0
    bench.finish()
    assert bench.tokens("a") == expected_tokens(range(5), 2, SamplingParams(), bench.info)


def test_admission_is_first_come_first_served_up_to_max_rows() -> None:
    bench = Bench(max_rows=2)
    for name in "abc":
        bench.add(name, range(3), 2)
    bench.step()
    assert [r.request_id for r in bench.scheduler.running] == ["a", "b"]
    bench.step()  # both end
    bench.step()
    assert [r.request_id for r in bench.scheduler.running] == ["c"]


def test_equal_prompts_share_pages_while_the_first_still_runs() -> None:
    bench = Bench(page_size=4)
    bench.add("a", range(9), 8)
    bench.step()
    bench.add("b", range(9), 8)
    bench.step()
    plan = bench.step()
    assert [(s.start, s.count) for s in plan.sequences] == [(10, 1), (8, 1)]
    assert plan.sequences[0].pages[:2] == plan.sequences[1].pages[:2]
    bench.finish()
    assert bench.tokens("a") == bench.tokens("b")
    assert {d.cached_tokens for d in bench.deltas if d.request_id == "b"} == {8}
    assert bench.scheduler.counters.cached_tokens == 8


def test_forks_wait_for_the_prefill_of_their_leader_and_share_it() -> None:
    bench = Bench(page_size=4, max_prefill_tokens=8, max_rows=4)
    bench.add("a", range(19), 3, sampling=SamplingParams(temperature=1.0, seed=5))
    for i in (1, 2):
        sampling = SamplingParams(temperature=1.0, seed=5 + i)
        bench.add(f"a{i}", range(19), 3, sampling=sampling, fork_of="a")
    shapes = [shape(bench.step()) for _ in range(4)]
    assert shapes == [
        ("prefill", [8]),
        ("prefill", [8]),
        ("prefill", [3, 3, 2]),
        ("decode", [1, 1, 1]),
    ]
    bench.finish()
    assert bench.scheduler.counters.cached_tokens == 2 * 16
    for i, name in enumerate(("a", "a1", "a2")):
        sampling = SamplingParams(temperature=1.0, seed=5 + i)
        assert bench.tokens(name) == expected_tokens(range(19), 3, sampling, bench.info)


def test_a_fork_of_nobody_and_one_whose_leader_is_gone_start_at_once() -> None:
    bench = Bench(page_size=4, max_prefill_tokens=8)
    bench.add("a", range(19), 2)
    bench.add("b", range(19), 2, fork_of="a")
    bench.add("c", range(19), 2, fork_of="nobody")
    bench.step()
    bench.scheduler.abort("a")
    assert [s.start for s in bench.step().sequences] == [8], "what the leader computed is kept"
    bench.finish()
    assert bench.tokens("b") == bench.tokens("c")


def test_a_flush_forgets_every_prefix_but_only_without_work() -> None:
    bench = Bench(page_size=4)
    bench.add("a", range(9), 2)
    assert bench.scheduler.flush() is None
    bench.step()
    assert bench.scheduler.flush() is None
    bench.finish()
    assert bench.scheduler.flush() == 2
    assert bench.scheduler.flush() == 0
    assert len(bench.scheduler.kv.pool) == bench.info.num_pages - 1
    check_ownership(bench.scheduler)
    bench.add("b", range(9), 2)
    assert [s.start for s in bench.step().sequences] == [0]
    bench.finish()
    assert bench.tokens("a") == bench.tokens("b")


def test_a_flush_under_a_step_in_flight_leaves_the_next_request_its_pages() -> None:
    bench = Bench(page_size=4, num_pages=6)
    bench.add("a", range(9), 8)
    flight = plan_and_submit(bench)
    bench.scheduler.abort("a")
    assert bench.scheduler.flush() == 0
    bench.add("b", range(20, 32), 4)
    following = plan_and_submit(bench)
    land(bench, flight)
    land(bench, following)
    bench.finish()
    assert bench.tokens("b") == expected_tokens(range(20, 32), 4, SamplingParams(), bench.info)


def test_a_later_turn_finds_the_prompt_and_the_output_of_the_one_before() -> None:
    bench = Bench(page_size=4)
    bench.add("a", range(6), 7)
    bench.finish()
    bench.add("b", [*range(6), *bench.tokens("a"), 1, 2, 3], 1)
    assert bench.step().sequences[0].start == 12  # 6 + 7 tokens, the last one was never computed


def test_preemption_takes_the_newest_and_sends_nothing_twice() -> None:
    bench = Bench(page_size=4, num_pages=7, max_context=24)
    bench.add("old", range(8), 14)
    bench.add("new", range(40, 48), 14)
    bench.finish()
    assert bench.scheduler.counters.preemptions > 0
    for name, prompt in (("old", range(8)), ("new", range(40, 48))):
        assert bench.tokens(name) == expected_tokens(prompt, 14, SamplingParams(), bench.info)
    ends = [d.request_id for d in bench.deltas if d.finish_reason]
    assert ends == ["old", "new"]


def test_what_is_computed_again_is_not_counted_again() -> None:
    bench = Bench(page_size=4, num_pages=7, max_context=24)
    bench.add("old", range(8), 14)
    bench.add("new", range(40, 48), 14)
    bench.finish()
    assert bench.scheduler.counters.preemptions > 0
    assert bench.scheduler.counters.prompt_tokens == 16
    assert bench.scheduler.counters.cached_tokens == 0
    assert {delta.cached_tokens for delta in bench.deltas} == {0}


def test_admission_waits_where_it_would_lead_to_a_preemption_at_once() -> None:
    bench = Bench(page_size=4, num_pages=5, max_context=16)
    bench.add("old", range(6), 8)
    bench.add("new", range(40, 46), 8)
    bench.step()
    assert [r.request_id for r in bench.scheduler.running] == ["old"]
    bench.finish()
    assert bench.scheduler.counters.preemptions == 0


def test_a_higher_priority_goes_first_of_those_that_wait() -> None:
    bench = Bench(max_rows=1)
    for name, priority in (("a", 0), ("b", 0), ("c", 7), ("d", 7), ("e", -1), ("f", 0)):
        bench.add(name, range(3), 2, priority=priority)
    bench.finish()
    ends = [d.request_id for d in bench.deltas if d.finish_reason]
    assert ends == ["c", "d", "a", "b", "f", "e"]


def test_who_is_preempted_waits_in_its_own_place() -> None:
    bench = Bench(page_size=4, num_pages=7, max_context=24, max_rows=2)
    bench.add("old", range(8), 14)
    bench.add("low", range(40, 48), 14, priority=-1)
    bench.step()
    bench.add("high", range(50, 54), 2, priority=1)
    while not bench.scheduler.counters.preemptions:
        bench.step()
    assert [r.request_id for r in bench.scheduler.waiting] == ["high", "low"]
    bench.finish()
    assert bench.tokens("low") == expected_tokens(range(40, 48), 14, SamplingParams(), bench.info)


def test_the_lowest_free_slot_is_taken() -> None:
    bench = Bench(max_rows=4)
    for name in "abc":
        bench.add(name, range(3), 9)
    bench.step()
    bench.scheduler.abort("a")
    bench.add("d", range(3), 9)
    bench.finish()
    last = {s.slot for plan in bench.executor.plans[2:] for s in plan.sequences}
    assert last == {0, 1, 2}


def test_output_index_goes_on_after_a_preemption() -> None:
    sampling = SamplingParams(temperature=1.0, seed=5)
    bench = Bench(page_size=4, num_pages=7, max_context=24)
    bench.add("old", range(8), 14, sampling=sampling)
    bench.add("new", range(40, 48), 14, sampling=sampling)
    bench.finish()
    assert bench.scheduler.counters.preemptions > 0
    assert bench.tokens("new") == expected_tokens(range(40, 48), 14, sampling, bench.info)


def test_stop_and_length() -> None:
    bench = Bench()
    expected = expected_tokens(range(5), 10, SamplingParams(), bench.info)
    bench.add("stop", range(5), 10, stop_token_ids=(expected[4],))
    bench.add("length", range(5), 5)
    bench.finish()
    for name in ("stop", "length"):
        assert bench.tokens(name) == expected[:5]
    ends = {d.request_id: (d.finish_reason, d.stop_token_id) for d in bench.deltas}
    assert ends == {"stop": ("stop", expected[4]), "length": ("length", None)}


def test_max_tokens_is_cut_to_the_context() -> None:
    bench = Bench(max_context=12)
    bench.add("a", range(9), 100)
    bench.finish()
    assert bench.tokens("a") == expected_tokens(range(9), 3, SamplingParams(), bench.info)
    assert bench.deltas[-1].finish_reason == "length"


def test_logprobs_come_with_the_tokens_only_when_asked_for() -> None:
    bench = Bench()
    bench.add("with", range(5), 3, sampling=SamplingParams(logprobs=2))
    bench.add("without", range(5), 3)
    bench.finish()
    for delta in bench.deltas:
        wanted = tuple(expected_logprobs(t, 2, bench.info) for t in delta.token_ids)
        assert delta.logprobs == (wanted if delta.request_id == "with" else ())


def test_a_resumed_request_goes_on_where_it_was() -> None:
    sampling = SamplingParams(temperature=0.7, seed=3)
    bench = Bench()
    expected = expected_tokens(range(5), 8, sampling, bench.info)
    resume = tuple(expected[:5])
    bench.add("a", range(5), 8, sampling=sampling, resume_ids=resume)
    bench.add("done", range(5), 5, sampling=sampling, resume_ids=resume)
    bench.finish()
    assert bench.tokens("a") == expected[5:]
    assert bench.deltas[0] == Delta("done", (), finish_reason="length")


def test_the_queue_limit_counts_those_who_get_no_row() -> None:
    bench = Bench(max_rows=2, max_waiting=1)
    for name in "abc":
        bench.add(name, range(3), 8)
    with pytest.raises(RequestError, match="queue is full"):
        bench.add("d", range(3))
    bench.step()
    with pytest.raises(RequestError, match="queue is full"):
        bench.add("d", range(3))
    bench.scheduler.abort("a")
    bench.add("d", range(3))


BIAS = tuple((0, 1.0) for _ in range(MAX_LOGIT_BIAS + 1))


@pytest.mark.parametrize(
    ("message", "param", "text"),
    [
        (submit("r", []), "prompt", "empty"),
        (submit("r", range(16)), "prompt", "16 tokens.*at most 16.*max_context"),
        (submit("r", [1, 97]), "prompt", "97.*vocabulary"),
        (submit("r", [1, -1]), "prompt", "-1.*vocabulary"),
        (submit("r", [1], resume_ids=(97,)), "prompt", "97.*vocabulary"),
        (submit("r", [1], 0), "max_tokens", "at least 1"),
        (submit("r", range(5), 9), "max_tokens", "4 KV pages.*there are 3.*kv_memory_mib"),
        (submit("r", range(13), 1), "prompt", "4 KV pages.*there are 3.*kv_memory_mib"),
        (submit("taken", [1]), "request_id", "'taken' is in use"),
        (submit("r", [1], sampling=SamplingParams(logit_bias=((97, 1.0),))), "logit_bias", "97"),
        (submit("r", [1], sampling=SamplingParams(logit_bias=BIAS)), "logit_bias", "at most 512"),
        (submit("r", [1], sampling=SamplingParams(logprobs=21)), "top_logprobs", "0 to 20"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_field(
    message: Submit, param: str, text: str
) -> None:
    bench = Bench(max_context=16, page_size=4, num_pages=4)
    bench.add("taken", range(3))
    with pytest.raises(RequestError, match=text) as caught:
        bench.scheduler.submit(message)
    assert caught.value.param == param
    assert bench.scheduler.request_ids == ["taken"]


def test_the_largest_request_that_fits_alone_is_served() -> None:
    bench = Bench(max_context=16, page_size=4, num_pages=4)
    bench.add("a", range(5), 8)  # 5 + 7 positions; the last token is never computed
    bench.finish()
    assert len(bench.tokens("a")) == 8


def test_an_abort_frees_at_once_and_an_unknown_id_is_nothing() -> None:
    bench = Bench(max_rows=1)
    bench.add("a", range(5), 50)
    bench.add("b", range(5), 2)
    bench.step()
    bench.scheduler.abort("a")
    bench.scheduler.abort("a")
    bench.scheduler.abort("never")
    assert bench.scheduler.kv.available == bench.info.num_pages - 1
    bench.finish()
    assert len(bench.tokens("a")) == 1
    assert bench.tokens("b") == expected_tokens(range(5), 2, SamplingParams(), bench.info)


def test_max_tokens_is_known_ahead_so_no_row_is_planned_beyond_it() -> None:
    bench = Bench()
    bench.add("a", range(5), 2)
    first, second = bench.scheduler.plan(), bench.scheduler.plan()
    assert first is not None
    assert second is not None
    assert second.sequences[0].token_ids is None
    assert bench.scheduler.plan() is None


def test_a_request_preempted_in_flight_keeps_the_token_of_that_step() -> None:
    bench = Bench(page_size=4, num_pages=6, max_context=16)
    bench.add("old", range(6), 10)
    bench.add("new", range(40, 46), 10)
    landed: list[tuple[StepPlan, ScriptedHandle]] = []
    in_flight_when_preempted = False
    while bench.scheduler.request_ids:
        before = bench.scheduler.counters.preemptions
        plan = bench.scheduler.plan()
        in_flight_when_preempted |= (
            bench.scheduler.counters.preemptions > before
            and bench.scheduler.waiting[0].pending == 1
        )
        if plan is not None:
            landed.append((plan, bench.executor.submit(plan)))
        if len(landed) == 2 or plan is None:
            oldest, handle = landed.pop(0)
            bench.deltas += bench.scheduler.commit(oldest, handle.result())
    assert in_flight_when_preempted
    for name, prompt in (("old", range(6)), ("new", range(40, 46))):
        assert bench.tokens(name) == expected_tokens(prompt, 10, SamplingParams(), bench.info)


def plan_and_submit(bench: Bench) -> tuple[StepPlan, ScriptedHandle]:
    plan = bench.scheduler.plan()
    assert plan is not None
    return plan, bench.executor.submit(plan)


def land(bench: Bench, flight: tuple[StepPlan, ScriptedHandle]) -> None:
    bench.deltas += bench.scheduler.commit(flight[0], flight[1].result())


def test_a_preempted_request_waits_for_its_token_before_it_is_admitted() -> None:
    bench = Bench(page_size=4, num_pages=6, max_context=16)
    bench.add("old", range(2), 6)
    bench.add("new", range(40, 46), 10)
    for _ in range(5):  # the prefill and four decodes
        bench.step()
    both, alone = plan_and_submit(bench), plan_and_submit(bench)
    assert [len(plan.sequences) for plan, _ in (both, alone)] == [2, 1]
    assert bench.scheduler.plan() is None  # no page is left for "new"
    assert bench.scheduler.counters.preemptions == 1
    land(bench, both)  # "old" ends, so there are pages now
    assert bench.scheduler.plan() is None
    land(bench, alone)
    bench.finish()
    assert bench.tokens("new") == expected_tokens(range(40, 46), 10, SamplingParams(), bench.info)


def test_a_step_of_an_earlier_stay_does_not_count_for_this_one() -> None:
    bench = Bench(page_size=4, num_pages=19, max_prefill_tokens=8)
    bench.add("old", range(7), 20)
    bench.add("new", range(20, 80), 2)
    before, last = plan_and_submit(bench), plan_and_submit(bench)
    while not bench.scheduler.counters.preemptions:
        land(bench, before)
        before, last = last, plan_and_submit(bench)
    assert (before[0].step, last[0].step) == ("prefill", "decode")
    bench.scheduler.abort("old")
    again = plan_and_submit(bench)  # "new" is back, with pages that only this step fills
    computed = again[0].sequences[0].start
    land(bench, before)
    assert bench.scheduler.running[0].computed == computed
    land(bench, last)
    land(bench, again)
    bench.finish()
    assert bench.tokens("new") == expected_tokens(range(20, 80), 2, SamplingParams(), bench.info)


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts and failures, up to three steps in flight, on a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.info = small_info(
            max_rows=3, max_prefill_tokens=6, max_context=20, page_size=2, num_pages=11
        )
        self.scheduler = Scheduler(info=self.info)
        self.executor = ScriptedExecutor(info=self.info, fail_at=set())
        self.flights: list[tuple[StepPlan, ScriptedHandle]] = []
        self.expected: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}
        self.arrivals = 0

    @rule(
        prompts=st.lists(
            st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=4
        ),
        max_tokens=st.integers(1, 16),
        seed=st.integers(0, 2),
        stop=st.sets(st.integers(0, 96), max_size=8),
        choices=st.integers(1, 3),
    )
    def arrive(
        self, prompts: list[list[int]], max_tokens: int, seed: int, stop: set[int], choices: int
    ) -> None:
        for prompt in prompts:
            leader = str(self.arrivals)
            for i in range(choices):
                fork_of = leader if i else None
                self.arrive_one(prompt, max_tokens, seed + i, stop, fork_of)

    def arrive_one(
        self,
        prompt: list[int],
        max_tokens: int,
        seed: int,
        stop: set[int],
        fork_of: str | None,
    ) -> None:
        name = str(self.arrivals)
        self.arrivals += 1
        sampling = SamplingParams(temperature=float(seed > 0), seed=seed)
        message = submit(
            name,
            prompt,
            max_tokens,
            sampling=sampling,
            stop_token_ids=tuple(sorted(stop)),
            fork_of=fork_of,
        )
        assert self.scheduler.submit(message) == []
        self.got[name] = []
        length = min(max_tokens, self.info.max_context - len(prompt))
        self.expected[name] = expected_tokens(
            prompt, length, sampling, self.info, stop_token_ids=stop
        )

    @precondition(lambda self: self.scheduler.request_ids)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.scheduler.request_ids))
        self.scheduler.abort(name)
        del self.expected[name]

    @rule()
    def flush(self) -> None:
        flushed = self.scheduler.flush()
        assert (flushed is None) == bool(self.scheduler.request_ids)
        assert flushed is None or not len(self.scheduler.kv.tree)

    @precondition(lambda self: len(self.flights) < 3)
    @rule(fails=st.sampled_from([False] * 9 + [True]))
    def launch(self, fails: bool) -> None:
        plan = self.scheduler.plan()
        if plan is None:
            assert self.flights or not self.scheduler.request_ids
            return
        if fails:
            self.executor.fail_at.add(len(self.executor.plans))  # type: ignore[attr-defined]
        self.flights.append((plan, self.executor.submit(plan)))

    @rule(steps=st.integers(4, 12), depth=st.integers(1, 3))
    def run(self, steps: int, depth: int) -> None:
        for _ in range(steps):
            if len(self.flights) < depth:
                self.launch(fails=False)
            if self.flights:
                self.land()

    @precondition(lambda self: self.flights)
    @rule()
    def land(self) -> None:
        plan, handle = self.flights.pop(0)
        try:
            result = handle.result()
        except EngineError:
            for failed in self.scheduler.fail(plan, "lost"):
                del self.expected[failed.request_id]
            return
        for delta in self.scheduler.commit(plan, result):
            name = delta.request_id
            self.got[name] += delta.token_ids
            assert self.got[name] == self.expected[name][: len(self.got[name])]
            ended = len(self.got[name]) == len(self.expected[name])
            assert ended == (delta.finish_reason is not None)
            if ended:
                del self.expected[name]

    @invariant()
    def pages_have_one_owner(self) -> None:
        check_ownership(self.scheduler)

    @invariant()
    def the_line_is_in_order_of_arrival(self) -> None:
        line = [int(r.request_id) for r in (*self.scheduler.running, *self.scheduler.waiting)]
        assert line == sorted(line)
        assert [str(n) for n in line] == self.scheduler.request_ids
        slots = [r.slot for r in self.scheduler.running]
        assert len(set(slots)) == len(slots) <= self.info.max_rows

    def teardown(self) -> None:
        """Whatever is left ends, and in a bounded number of steps."""
        self.run(steps=60 * (len(self.expected) + 1), depth=2)
        assert not self.expected
        assert self.scheduler.kv.available == self.info.num_pages - 1


SchedulerMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase
