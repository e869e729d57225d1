"""A recorded trace replays to the same plans, and a difference is seen."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.engine.driver import Driver, Loop, submit
from tests.engine.test_loops import LOOPS, Schedule, arrivals_of, limits, schedules, tight
from tests.scripted_executor import ScriptedExecutor, small_info
from trnc.core import ExecutorInfo
from trnc.engine.loops import overlapped_loop, plain_loop
from trnc.engine.messages import Abort, FlushCache, Flushed, ToEngine
from trnc.engine.trace import (
    Began,
    Broke,
    Planned,
    TraceEvent,
    encode_event,
    read_trace,
    replay,
)
from trnc.errors import EngineError


def recorded(loop: Loop) -> list[TraceEvent]:
    """A run with preemptions, aborts, a refusal and a failed step."""
    info = small_info(max_rows=4, page_size=4, num_pages=17)
    arrivals: dict[int, list[ToEngine]] = defaultdict(list)
    for i in range(12):
        arrivals[i // 2].append(submit(str(i), range(i % 3, 9), 12 + i))
    arrivals[4] += [Abort("1"), Abort("9"), submit("refused", []), FlushCache()]
    arrivals[1000] += [
        FlushCache(),
        submit("fork", range(9), 3),
        submit("f", range(9), 3, fork_of="fork"),
    ]
    executor = ScriptedExecutor(info=info, fail_at={7})
    driver = Driver(executor=executor, arrivals=arrivals, max_waiting=9).serve(loop)
    assert driver.scheduler.counters.preemptions
    assert "refused" in driver.failures()
    flushed = [message.pages for message in driver.sent if isinstance(message, Flushed)]
    assert flushed[0] is None
    assert flushed[1] > 0
    return driver.events


@LOOPS
def test_a_trace_replays_through_a_file(loop: Loop, tmp_path: Path) -> None:
    events = recorded(loop)
    assert any(isinstance(event, Broke) for event in events)
    path = tmp_path / "trace"
    path.write_bytes(b"".join(map(encode_event, events)))
    assert list(read_trace(path)) == events
    assert replay(read_trace(path)) == sum(isinstance(event, Planned) for event in events)


@settings(max_examples=40, deadline=None)
@given(info=limits, schedule=schedules)
def test_every_run_replays(info: ExecutorInfo, schedule: Schedule) -> None:
    arrivals, _ = arrivals_of(schedule)
    for loop in (plain_loop, overlapped_loop):
        executor = ScriptedExecutor(info=tight(info))
        events = Driver(executor=executor, arrivals=arrivals).serve(loop).events
        assert replay(events) == sum(isinstance(event, Planned) for event in events)


def test_a_plan_that_differs_is_shown() -> None:
    events = recorded(plain_loop)
    began = events[0]
    assert isinstance(began, Began)
    other = Began(small_info(max_rows=3, page_size=4, num_pages=17), began.max_waiting)
    with pytest.raises(EngineError, match=r"plan \d+ differs[^$]*recorded: [^$]*made: "):
        replay([other, *events[1:]])


def test_a_trace_needs_its_beginning() -> None:
    events = recorded(plain_loop)
    with pytest.raises(EngineError, match="beginning"):
        replay(events[1:])
    with pytest.raises(EngineError, match="second Began"):
        replay([events[0], events[0]])


def test_a_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(encode_event(recorded(plain_loop)[0]) + b'{"type":"Nonsense"}\n')
    with pytest.raises(EngineError, match="trace, line 2"):
        list(read_trace(path))
