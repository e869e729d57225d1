"""The scheduler: which tokens of which requests the next step computes.

Continuous batching, first come first served. Requests stand in one line, in the order of their
arrival: `running` is its front (they hold a slot and pages), `waiting` its tail. Admission moves
the boundary by one request to the right and preemption by one to the left, so no request that
waits is older than one that runs, and the oldest one goes on in every pair of steps: pages can
always be had for it by preempting the others. That is why this cannot live-lock.

Prefill and decode steps alternate while there is work for both: a long prompt does not stop the
running decodes for longer than one chunk, nor do they stop a new request. A prefill step packs
chunks of several requests; whoever has one position left before its next token goes into a decode
step, whether that position is of its prompt or its output.

`plan` may run ahead of `commit` (the overlapped loop has two steps in flight). Then a decode is
planned for a token that the host has not read. What the scheduler knows ahead it uses
(`max_tokens`); what it does not (a stop token, an abort, an error) leaves a row in flight whose
result `commit` drops. `loops.py` says why the slots and pages of such a row may be reused at once.

Everything is deterministic: the same calls in the same order give the same plans.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from trnc.core import (
    ExecutorInfo,
    FinishReason,
    SequencePlan,
    Step,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from trnc.engine.kv import KvCache
from trnc.engine.messages import QUEUE_FULL, Delta, Failed, Submit
from trnc.engine.request import Request, new_request
from trnc.errors import RequestError


class Row(NamedTuple):
    """One request's part of a step in flight; `end` positions are computed when it has ended."""

    request: Request
    preemptions: int
    end: int
    plan: SequencePlan


@dataclass(slots=True)
class Counters:
    """Totals since the start; what they mean is in `messages.Stats`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    preemptions: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0


class Scheduler:
    """Owns every request and every KV page; speaks in plain data only."""

    def __init__(self, *, info: ExecutorInfo, max_waiting: int | None = None) -> None:
        self.kv = KvCache(num_pages=info.num_pages, page_size=info.page_size)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.counters = Counters()
        self._info = info
        self._max_waiting = max_waiting
        self._requests: dict[str, Request] = {}
        self._free_slots = list(range(info.max_rows))
        self._in_flight: deque[tuple[StepPlan, list[Row]]] = deque()
        self._last_step: Step = "decode"

    @property
    def request_ids(self) -> list[str]:
        """The requests that have not ended, oldest first."""
        return list(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    def submit(self, message: Submit) -> list[Delta]:
        """Put a request at the end of the line; a resumed one that has all its tokens ends here.

        Raises:
            RequestError: a limit is broken, the id is taken, or the queue is full.
        """
        if message.request_id in self._requests:
            raise RequestError(f"request id '{message.request_id}' is in use", param="request_id")
        if len(self.waiting) >= self._queue_room():
            raise RequestError(
                f"The request queue is full ({self._max_waiting} are waiting); try again later.",
                code=QUEUE_FULL,
            )
        request = new_request(message, self._info)
        if message.fork_of is not None:
            request.leader = self._requests.get(message.fork_of)
        if request.next_output >= request.max_tokens:
            return [Delta(request.request_id, (), finish_reason="length")]
        self._requests[request.request_id] = request
        self.waiting.append(request)
        return []

    def abort(self, request_id: str) -> None:
        """Forget a request. An unknown id is one that ended while the abort was on its way."""
        if request_id in self._requests:
            self._end(self._requests[request_id])

    def flush(self) -> int | None:
        """Forget all cached prefixes; return the number of pages, or None while there is work."""
        return None if self.has_work else self.kv.flush()

    def plan(self) -> StepPlan | None:
        """Return the next step, or None if there is nothing to do before the next `commit`."""
        turns: tuple[Step, ...] = ("prefill", "decode")
        if self._last_step == "prefill":
            turns = ("decode", *turns)  # again at the end, for those whom the prefill turn admits
        for step in turns:
            rows = self._plan_prefill() if step == "prefill" else self._plan_decode()
            if rows:
                plan = StepPlan(step, tuple(row.plan for row in rows))
                self._in_flight.append((plan, rows))
                self._last_step = step
                return plan
        assert self._in_flight or not self._requests, "requests are left but nothing can run"
        return None

    def commit(self, plan: StepPlan, result: StepResult) -> list[Delta]:
        """Take in the result of the oldest step in flight, which must be `plan`."""
        deltas = []
        rows = self._land(plan)
        for row, token, logprobs in zip(rows, result.tokens, result.logprobs, strict=True):
            if row.request.ended:
                continue
            if row.preemptions == row.request.preemptions:
                row.request.computed = row.end
                self.kv.absorb(row.request)
            if row.plan.sample:
                assert token is not None, "the executor returns a token for each row that samples"
                deltas.append(self._accept(row.request, token, logprobs))
        if plan.step == "prefill":
            self.counters.prefill_steps += 1
        else:
            self.counters.decode_steps += 1
        return deltas

    def fail(self, plan: StepPlan, message: str) -> list[Failed]:
        """Give up the requests of the oldest step in flight, which must be `plan`."""
        lost = [row.request for row in self._land(plan) if not row.request.ended]
        for request in lost:
            self._end(request)
        return [Failed(request.request_id, message) for request in lost]

    def _queue_room(self) -> float:
        """How long the line may be; who gets a slot in the next step does not count as waiting."""
        if self._max_waiting is None:
            return math.inf
        return self._max_waiting + len(self._free_slots)

    def _plan_prefill(self) -> list[Row]:
        rows: list[Row] = []
        budget = self._info.max_prefill_tokens
        position = 0
        while budget and (position < len(self.running) or self._admit_next()):
            request = self.running[position]
            position += 1
            if request.remaining > 1:
                count = min(request.remaining, budget)
                budget -= count
                rows.append(self._row(request, count))
        return rows

    def _plan_decode(self) -> list[Row]:
        rows: list[Row] = []
        position = 0
        while position < len(self.running):  # a preemption cuts off the end
            request = self.running[position]
            position += 1
            if request.can_decode and self._make_room(request):
                rows.append(self._row(request, 1))
        return rows

    def _row(self, request: Request, count: int) -> Row:
        """Schedule the next `count` positions of a running request."""
        assert request.slot is not None, "only running requests are scheduled"
        start, end = request.scheduled, request.scheduled + count
        pages = -(-end // self._info.page_size)
        if len(request.table) != pages:
            request.table = tuple(request.pages[:pages])
        plan = SequencePlan(
            slot=request.slot,
            start=start,
            count=count,
            token_ids=None if request.pending else tuple(request.token_ids[start:end]),
            pages=request.table,
            sample=count == request.remaining,
            output_index=request.next_output,
            sampling=request.sampling,
        )
        request.scheduled = end
        request.pending += plan.sample
        return Row(request, request.preemptions, end, plan)

    def _admit_next(self) -> bool:
        """Let the oldest request that waits run, if a slot and pages for all its tokens are free.

        A page for each running request is left, so that it is not preempted in the next step.
        """
        if not self.waiting or not self._free_slots:
            return False
        request = self.waiting[0]
        if request.pending:  # preempted while its last token was in flight
            return False
        if self._awaits_leader(request):
            return False
        if not self.kv.admit(request, headroom=len(self.running)):
            return False
        if request.preemptions == 0:
            request.cached_tokens = request.computed
            self.counters.prompt_tokens += request.prompt_tokens
            self.counters.cached_tokens += request.cached_tokens
        request.leader = None
        request.slot = heapq.heappop(self._free_slots)
        self.running.append(self.waiting.popleft())
        return True

    def _awaits_leader(self, request: Request) -> bool:
        """Whether pages that the request will share are still being computed.

        Its leader stands before it in the line, so it runs, or has ended: this never blocks for
        good. Those behind wait with it, which costs them nothing as long as the leader's chunks
        fill the prefill steps.
        """
        leader = request.leader
        if leader is None or leader.ended:
            return False
        size = self._info.page_size
        return leader.computed < (request.prompt_tokens - 1) // size * size

    def _make_room(self, request: Request) -> bool:
        """Get the page of the request's next position; False if it was preempted itself."""
        while not self.kv.grow(request):
            newest = self.running.pop()
            self._vacate(newest)
            newest.preemptions += 1
            self.waiting.appendleft(newest)
            self.counters.preemptions += 1
            if newest is request:
                return False
        return True

    def _vacate(self, request: Request) -> None:
        assert request.slot is not None, "only running requests have a slot"
        self.kv.release(request)
        heapq.heappush(self._free_slots, request.slot)
        request.slot = None

    def _accept(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> Delta:
        """Take one sampled token; the request may have been preempted meanwhile."""
        request.pending -= 1
        request.token_ids.append(token)
        self.counters.output_tokens += 1
        wants_logprobs = request.sampling.logprobs is not None
        stopped = token in request.stop_token_ids
        reason: FinishReason | None = None
        if stopped:
            reason = "stop"
        elif len(request.token_ids) - request.prompt_tokens >= request.max_tokens:
            reason = "length"
        if reason is not None:
            self._end(request)
            self.counters.finished += 1
        return Delta(
            request_id=request.request_id,
            token_ids=(token,),
            logprobs=(logprobs,) if wants_logprobs and logprobs is not None else (),
            finish_reason=reason,
            stop_token_id=token if stopped else None,
            cached_tokens=request.cached_tokens,
        )

    def _end(self, request: Request) -> None:
        request.ended = True
        del self._requests[request.request_id]
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._vacate(request)

    def _land(self, plan: StepPlan) -> list[Row]:
        oldest, rows = self._in_flight.popleft()
        assert oldest is plan, "steps end in the order in which they were planned"
        return rows
