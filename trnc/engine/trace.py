"""A plan trace: everything that went into a scheduler and every plan that came out, in order.

Scheduling is deterministic, so a trace replays: a fresh scheduler that is given the recorded
arrivals and results must make the recorded plans. A trace of a server that misbehaved is therefore
a test case, with no model and no clock in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from trnc.core import ExecutorInfo, StepPlan, StepResult
from trnc.engine.messages import Abort, FlushCache, Grammar, Submit
from trnc.engine.rules import Matcher
from trnc.engine.scheduler import Scheduler
from trnc.errors import EngineError, RequestError


class Began(msgspec.Struct, frozen=True, tag=True):
    """The first event: what the scheduler was made of."""

    info: ExecutorInfo
    max_waiting: int | None


class Planned(msgspec.Struct, frozen=True, tag=True):
    """The scheduler was asked for a plan. An empty answer counts: asking has side effects."""

    plan: StepPlan | None


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The oldest step in flight ended."""

    result: StepResult


class Broke(msgspec.Struct, frozen=True, tag=True):
    """The oldest step in flight raised, and its requests were given up."""

    message: str


TraceEvent = Began | Submit | Abort | FlushCache | Planned | Ended | Broke
TraceSink = Callable[[TraceEvent], None]

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(TraceEvent)


def discard(event: TraceEvent) -> None:
    """The sink of an engine that records no trace."""


def encode_event(event: TraceEvent) -> bytes:
    """Return the event as one line of JSON."""
    return _encoder.encode(event) + b"\n"


def read_trace(path: Path) -> Iterator[TraceEvent]:
    """Yield the events of a trace file; raises EngineError naming the line that is not one."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield _decoder.decode(line)
            except msgspec.DecodeError as error:
                raise EngineError(f"{path}, line {number} is not a trace event: {error}") from None


MatcherOf = Callable[[Grammar], Matcher]


def replay(events: Iterable[TraceEvent], *, matcher_of: MatcherOf | None = None) -> int:
    """Run a fresh scheduler on a trace and return how many plans were the same.

    `matcher_of` compiles the grammars of its requests, which needs the model's tokenizer.

    Raises:
        EngineError: a plan differs, with both plans; or the trace does not begin with `Began`, or
            has a grammar and there is no `matcher_of`.
    """
    remaining = iter(events)
    began = next(remaining, None)
    if not isinstance(began, Began):
        raise EngineError("the trace does not start with a Began event; its beginning is missing")
    player = _Player(Scheduler(info=began.info, max_waiting=began.max_waiting), matcher_of)
    for event in remaining:
        player.play(event)
    return player.plans


class _Player:
    def __init__(self, scheduler: Scheduler, matcher_of: MatcherOf | None) -> None:
        self.plans = 0
        self._matcher_of = matcher_of
        self._scheduler = scheduler
        self._in_flight: list[StepPlan] = []

    def play(self, event: TraceEvent) -> None:
        match event:
            case Submit():
                matcher = self._matcher(event.rules.grammar)
                with suppress(RequestError):  # it was refused then, too
                    self._scheduler.submit(event, matcher)
            case Abort(request_id):
                self._scheduler.abort(request_id)
            case FlushCache():
                self._scheduler.flush()
            case Planned(recorded):
                self._compare(recorded)
            case Ended(result):
                self._scheduler.commit(self._in_flight.pop(0), result)
            case Broke(message):
                self._scheduler.fail(self._in_flight.pop(0), message)
            case Began():
                raise EngineError("the trace has a second Began event; replay one engine at a time")

    def _matcher(self, grammar: Grammar | None) -> Matcher | None:
        if grammar is None:
            return None
        if self._matcher_of is None:
            raise EngineError("the trace has requests with grammars: replay it with a tokenizer")
        return self._matcher_of(grammar)

    def _compare(self, recorded: StepPlan | None) -> None:
        made = self._scheduler.plan()
        if made != recorded:
            raise EngineError(
                f"plan {self.plans} differs from the trace\nrecorded: {recorded}\nmade:     {made}"
            )
        self.plans += 1
        if made is not None:
            self._in_flight.append(made)
