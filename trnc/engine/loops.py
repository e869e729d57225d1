"""The engine's loops: how host and device take turns.

There is one engine thread. It owns the scheduler and the executor, and everything happens in it:
reading the inbox, planning, submitting, reading results, sending. The executor runs the steps
that it was given one after the other, in the order of `submit`, and may do so while this thread
works. That order is all the synchronisation that there is.

**The plain loop** has at most one step in flight: drain the inbox, plan, submit, wait for the
result, commit, send, repeat. The device idles while the host works, and the host while the device
does. It is here to be read, and to be compared with.

**The overlapped loop** plans and submits step n+1 while step n runs, and only then waits for n:

    host     plan 1 | plan 2 | commit 1, plan 3 | commit 2, plan 4 | ...
    device            step 1 . step 2           . step 3           . ...

A plan is thus made with one step unread. What makes this right:

1. *The token that is not read yet.* A decode planned behind a step that samples has
   `token_ids=None`: the device reads the token that it sampled last in that slot. The position and
   its page are known without the token.
2. *A request that turns out to have ended.* Its end (a stop token, an abort, a failed step) is seen
   at the commit of step n, or between two steps, when step n+1 already has a row for it: a
   *stale row*. Its result is dropped. An end by `max_tokens` is known ahead, and no stale row is
   planned for it.
3. *Pages of a stale row.* They go back to the pool at once, while step n+1 will still write into
   them. Whoever gets them next gets them in a plan made later, so in step n+2 or after; steps run
   in order, so the stale write comes before the new owner's first write, and nobody attends to a
   position before its owner has written it. A stale row writes behind the positions that ended
   steps computed; pages in the prefix tree hold only such positions, so it never writes into
   a page of the tree.
4. *Slots of a stale row.* The same: the stale row writes the slot's last token in step n+1, the new
   owner's prefill writes it in n+2 or after, before a row of the new owner reads it.
5. *Preemption while a step is in flight.* The victim's pages may be handed out within the plan
   that preempts it. That plan holds no row of the victim (victims are newer than the rows placed so
   far), and step n, which does, runs before. The token that step n samples for the victim is
   a good one: it is sent, and the victim waits for it before it is admitted again. What step n
   computed for it is not counted, for the pages are gone.
6. *Pages that two requests both filled.* At a commit a request may give up its own full page for
   an equal one in the tree. Step n+1 still reads the old one: rule 3 again.
7. *A verify is not read yet.* Only a draft is planned behind it: the device knows how many drafts
   it accepted, and so at which position the next round begins. Its pages are taken for the case
   that all were.
8. *A step that raises.* If it raises an EngineError, the step's requests fail and the executor is
   sound: the loop goes on, and step n+1's rows of the failed requests are stale rows (they may have
   read a token or a page that was never written; their results are dropped). Any other
   exception leaves the loop: nothing is known about the device any more.

Both loops give every request the same tokens; the plans differ, because the overlapped loop learns
of each end one step later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from trnc.core import StepPlan, StepResult
from trnc.engine.executor import Executor, StepHandle
from trnc.engine.messages import (
    Abort,
    Deltas,
    Failed,
    FlushCache,
    Flushed,
    GetStats,
    Shutdown,
    Stats,
    Submit,
    ToApi,
    ToEngine,
)
from trnc.engine.rules import Matcher
from trnc.engine.scheduler import Scheduler
from trnc.engine.trace import Broke, Ended, Planned, TraceSink
from trnc.errors import EngineError, RequestError

STATS_SECONDS = 1.0

Receive = Callable[[bool], Iterable[ToEngine]]
Send = Callable[[ToApi], None]
Clock = Callable[[], float]


class Grammars(Protocol):
    """Compiles the grammars of requests while the engine goes on."""

    def start(self, message: Submit) -> None:
        """Begin with the grammar of a request."""

    def finished(self) -> Iterable[tuple[Submit, Matcher | RequestError]]:
        """Return the requests whose grammar is there, or was refused, since the last time."""

    def cancel(self, request_id: str) -> None:
        """Forget a request that waits for its grammar, if it does."""


class NoGrammars:
    """The `Grammars` of an engine whose variants have no structured outputs: it refuses them."""

    def __init__(self) -> None:
        self._refused: list[tuple[Submit, Matcher | RequestError]] = []

    def start(self, message: Submit) -> None:
        """Refuse a request."""
        param = message.rules.grammar_param
        error = RequestError(f"'{param}' needs --structured-outputs.", param=param)
        self._refused.append((message, error))

    def finished(self) -> Iterable[tuple[Submit, Matcher | RequestError]]:
        """Return the requests that were refused."""
        refused, self._refused = self._refused, []
        return refused

    def cancel(self, request_id: str) -> None:
        """Do nothing: no request waits."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was submitted at `started` (seconds) and whose result has not been read."""

    plan: StepPlan
    handle: StepHandle
    started: float


@dataclass(frozen=True, slots=True)
class RefusedStep:
    """The handle of a step that `submit` would not take."""

    error: EngineError

    def result(self) -> StepResult:
        """Raise what `submit` raised, when it is this step's turn to be read."""
        raise self.error


class Engine:
    """The parts that both loops are made of.

    `receive(wait)` returns the messages at hand, in order; if `wait`, it first waits for one (or
    returns none after a while, or when a grammar is there). `send` must not wait. `clock` returns
    seconds.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        grammars: Grammars,
        receive: Receive,
        send: Send,
        trace: TraceSink,
        clock: Clock,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._grammars = grammars
        self._receive = receive
        self._send = send
        self._trace = trace
        self._clock = clock
        self._device_seconds = 0.0
        self._waited = 0.0
        self._began = self._last_result = self._last_stats = clock()

    def drain(self, *, busy: bool) -> bool:
        """Take in what has arrived, waiting if nothing else is to be done; False on a Shutdown."""
        wait = not busy and not self.scheduler.has_work
        began = self._clock()
        messages = self._receive(wait)
        if wait:
            self._waited += self._clock() - began
        goes_on = all(self._handle(message) for message in messages)
        for message, outcome in self._grammars.finished():
            self._submit(message, outcome)
        return goes_on

    def launch(self) -> Flight | None:
        """Plan a step and submit it; None if there is nothing to run."""
        if not self.scheduler.has_work:
            return None
        plan = self.scheduler.plan()
        self._trace(Planned(plan))
        if plan is None:
            return None
        started = self._clock()
        try:
            return Flight(plan, self._executor.submit(plan), started)
        except EngineError as error:
            return Flight(plan, RefusedStep(error), started)

    def land(self, flight: Flight) -> None:
        """Wait for the oldest step in flight and send what it gave."""
        outcome = self._wait(flight)
        if isinstance(outcome, EngineError):
            self._trace(Broke(str(outcome)))
            for failed in self.scheduler.fail(flight.plan, f"engine error: {outcome}"):
                self._send(failed)
        else:
            self._trace(Ended(outcome))
            if deltas := self.scheduler.commit(flight.plan, outcome):
                self._send(Deltas(tuple(deltas)))
        if self._last_result - self._last_stats >= STATS_SECONDS:
            self._last_stats = self._last_result
            self._send(self.stats())

    def stats(self) -> Stats:
        """Return the counters and gauges of now."""
        counters = self.scheduler.counters
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            free_pages=self.scheduler.kv.available,
            total_pages=self._executor.info.num_pages - 1,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            output_tokens=counters.output_tokens,
            finished=counters.finished,
            preemptions=counters.preemptions,
            prefill_steps=counters.prefill_steps,
            decode_steps=counters.decode_steps,
            draft_steps=counters.draft_steps,
            verify_steps=counters.verify_steps,
            drafted=tuple(counters.drafted),
            accepted=tuple(counters.accepted),
            device_seconds=self._device_seconds,
            host_seconds=self._clock() - self._began - self._waited,
            compiles_after_ready=self._executor.compiles_after_ready(),
        )

    def _wait(self, flight: Flight) -> StepResult | EngineError:
        began = self._clock()
        try:
            return flight.handle.result()
        except EngineError as error:
            return error
        finally:
            ended = self._clock()
            self._waited += ended - began
            self._device_seconds += ended - max(flight.started, self._last_result)
            self._last_result = ended

    def _handle(self, message: ToEngine) -> bool:
        match message:
            case Submit():
                if message.rules.grammar is None:
                    self._submit(message, None)
                else:
                    self._grammars.start(message)
            case Abort(request_id):
                self._trace(message)
                self._grammars.cancel(request_id)
                self.scheduler.abort(request_id)
            case FlushCache():
                self._trace(message)
                self._send(Flushed(self.scheduler.flush()))
            case GetStats():
                self._send(self.stats())
            case Shutdown():
                return False
        return True

    def _submit(self, message: Submit, matcher: Matcher | RequestError | None) -> None:
        try:
            if isinstance(matcher, RequestError):
                raise matcher
            self._trace(message)
            if deltas := self.scheduler.submit(message, matcher):
                self._send(Deltas(tuple(deltas)))
        except RequestError as error:
            self._send(Failed(message.request_id, str(error), error.param, error.code))


def plain_loop(engine: Engine) -> None:
    """Serve until a Shutdown, one step at a time."""
    while engine.drain(busy=False):
        if flight := engine.launch():
            engine.land(flight)


def overlapped_loop(engine: Engine) -> None:
    """Serve until a Shutdown, planning each step while the one before it runs."""
    flight = None
    while engine.drain(busy=flight is not None):
        following = engine.launch()
        if flight is not None:
            engine.land(flight)
        flight = following
    if flight is not None:
        engine.land(flight)
