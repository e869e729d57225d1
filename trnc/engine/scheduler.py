"""The scheduler: which tokens of which requests the next step computes.

Continuous batching, first come first served. Requests stand in one line, in the order of their
arrival: `running` is its front (they hold a slot and pages), `waiting` its tail. Admission moves
the boundary by one request to the right and preemption by one to the left. The first one goes on in
every pair of steps: pages can always be had for it by preempting the others. That is why this
cannot live-lock. A request of a higher priority goes before those of lower ones that wait; nobody
is preempted for it.

Prefill and decode steps alternate while there is work for both: a long prompt does not stop the
running decodes for longer than one chunk, nor do they stop a new request. A prefill step packs
chunks of several requests; whoever has one position left before its next token goes into a decode
step, whether that position is of its prompt or its output.

With speculation a round of generation is a draft, in which the device guesses tokens, and a verify,
which computes them all and keeps those that are right; `depth.py` says how many. A verify may be
followed by a draft before it is read, for the device knows where it ended, but by nothing else.

`plan` may run ahead of `commit` (the overlapped loop has two steps in flight). Then a decode is
planned for a token that the host has not read. What the scheduler knows ahead it uses
(`max_tokens`); what it does not (a stop token, an abort, an error) leaves a row in flight whose
result `commit` drops. `loops.py` says why the slots and pages of such a row may be reused at once.

Everything is deterministic: the same calls in the same order give the same plans.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
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
from trnc.engine.depth import DepthPolicy
from trnc.engine.kv import KvCache
from trnc.engine.messages import QUEUE_FULL, Delta, Failed, Submit
from trnc.engine.request import Request, new_request
from trnc.engine.rules import Matcher
from trnc.errors import RequestError


class Row(NamedTuple):
    """One request's part of a step in flight, planned after `preemptions` of them.

    A verify checks `drafts` tokens of it.
    """

    request: Request
    preemptions: int
    plan: SequencePlan
    drafts: int = 0

    @property
    def lost(self) -> bool:
        """Whether a preemption since has given back what the step writes."""
        return self.preemptions != self.request.preemptions


@dataclass(slots=True)
class Counters:
    """Totals since the start; what they mean is in `messages.Stats`. Drafts are by position."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    preemptions: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    draft_steps: int = 0
    verify_steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count_drafts(self, checked: int, accepted: int) -> None:
        """Count the drafts of one sequence: how many were checked, and how many were right."""
        self.drafted += [0] * (checked - len(self.drafted))
        self.accepted += [0] * (checked - len(self.accepted))
        for position in range(checked):
            self.drafted[position] += 1
            self.accepted[position] += position < accepted


Planned = tuple[Step, int, list[Row]]  # the step, its depth, its rows; no rows: nothing to do


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
        self._arrivals = 0
        self._free_slots = list(range(info.max_rows))
        self._in_flight: deque[tuple[StepPlan, list[Row]]] = deque()
        self._depths = DepthPolicy(
            depths=info.mtp_depths, always=info.mtp_always, measured=info.rounds
        )
        self._last_step: Step = "decode"

    @property
    def request_ids(self) -> list[str]:
        """The requests that have not ended, oldest first."""
        return list(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    def submit(self, message: Submit, matcher: Matcher | None = None) -> list[Delta]:
        """Put a request into the line; a resumed one that has all its tokens ends here.

        `matcher` is that of its grammar, if it has one. One that no token may follow ends, too.

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
        request = new_request(message, self._info, matcher)
        if message.fork_of is not None:
            request.leader = self._requests.get(message.fork_of)
        if request.next_output >= request.max_tokens:
            return [Delta(request.request_id, (), finish_reason="length")]
        if request.rules is not None and request.rules.over:
            return [Delta(request.request_id, (), finish_reason="stop")]
        self._requests[request.request_id] = request
        request.place = (-message.priority, self._arrivals)
        self._arrivals += 1
        insort(self.waiting, request, key=_place)
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
        turns = [self._plan_prefill, self._plan_generation]
        if self._last_step in ("prefill", "draft"):
            # Again at the end, for those whom the prefill turn admits.
            turns.insert(0, self._plan_generation)
        for turn in turns:
            step, depth, rows = turn()
            if rows:
                plan = StepPlan(step, tuple(row.plan for row in rows), depth)
                self._in_flight.append((plan, rows))
                self._last_step = step
                return plan
        assert self._in_flight or not self._requests, "requests are left but nothing can run"
        return None

    def commit(self, plan: StepPlan, result: StepResult) -> list[Delta]:
        """Take in the result of the oldest step in flight, which must be `plan`."""
        rows = self._land(plan)
        self._count(plan, rows, result)
        if plan.step == "draft":
            for row, tokens in zip(rows, result.tokens, strict=True):
                if row.request.needs_last_token and not row.lost:
                    row.request.take_drafts(tokens)
            return []
        deltas: list[Delta] = []
        scores = result.prompt_logprobs or ((),) * len(rows)
        for row, tokens, logprobs, scored in zip(
            rows, result.tokens, result.logprobs, scores, strict=True
        ):
            if not row.request.ended:
                deltas += self._score(row, scored) if scored else []
                delta = self._commit_row(row, tokens, logprobs)
                deltas += [delta] if delta is not None else []
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

    def _plan_prefill(self) -> Planned:
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
        return "prefill", 0, rows

    def _plan_generation(self) -> Planned:
        """A decode, or the next half of a round of speculation."""
        if drafted := max((r.drafts for r in self.running if r.can_decode), default=0):
            return "verify", drafted, self._plan_next_tokens()
        depth = self._depths.choose(sum(r.remaining == 1 for r in self.running))
        if depth and (rows := self._plan_draft(depth)):
            return "draft", depth, rows
        if self._info.mtp_always:
            return "verify", depth, self._plan_next_tokens()
        return "decode", 0, self._plan_next_tokens()

    def _plan_next_tokens(self) -> list[Row]:
        """Rows of a decode or a verify: the last token of each request, and its drafts."""
        rows: list[Row] = []
        position = 0
        while position < len(self.running):  # a preemption cuts off the end
            request = self.running[position]
            position += 1
            if not request.can_decode:
                continue
            count = 1 + min(request.drafts, request.max_tokens - request.next_output - 1)
            if self._make_room(request, request.scheduled + count):
                rows.append(self._row(request, count))
        return rows

    def _plan_draft(self, depth: int) -> list[Row]:
        """Rows of a draft, with pages for all that its verify computes if it accepts everything."""
        rows: list[Row] = []
        position = 0
        # A draft is better where its rules are known. Others do not wait for that.
        wait = all(request.follows_rules for request in self.running)
        while position < len(self.running):
            request = self.running[position]
            position += 1
            if wait and request.pending:
                continue
            end = min(request.scheduled + depth + 1, request.most_positions)
            if request.can_draft and self._make_room(request, end):
                rows.append(self._draft_row(request, depth, end))
        return rows

    def _row(self, request: Request, count: int) -> Row:
        """Schedule the next `count` positions of a running request."""
        start, end = request.scheduled, request.scheduled + count
        known = request.token_ids[start:end]
        sample = count >= request.remaining
        drafts = count - 1 if request.drafts else 0
        # A request that needs them has its drafts here; the rules of others only count them.
        draft_ids = (request.draft_ids or (0,) * drafts)[:drafts]
        rules = request.rules if sample else None
        plan = SequencePlan(
            slot=self._slot(request),
            start=start,
            count=count,
            token_ids=None if request.pending else (*known, *(request.draft_ids or ())[:drafts]),
            pages=self._table(request, end),
            sample=sample,
            output_index=request.next_output,
            sampling=request.sampling,
            following=request.token_ids[end] if end < len(request.token_ids) else None,
            masks=rules.masks(request.next_output, draft_ids) if rules is not None else (),
            counts=request.counts.packed(draft_ids) if sample and request.counts else (),
            targets=_targets(request, start, end),
        )
        request.scheduled = end
        if plan.sample:
            request.pending += 1 + drafts
            request.speculated += drafts
        request.primed = plan.sample
        request.drafts, request.draft_ids = 0, None
        return Row(request, request.preemptions, plan, drafts)

    def _draft_row(self, request: Request, depth: int, end: int) -> Row:
        """Schedule a draft. Its first token is masked if the host knows what that one follows."""
        request.drafts = depth
        rules = None if request.pending else request.rules
        plan = SequencePlan(
            slot=self._slot(request),
            start=request.scheduled,
            count=depth,
            token_ids=None,
            pages=self._table(request, end),
            sample=True,
            output_index=request.next_output,
            sampling=request.sampling,
            masks=rules.masks(request.next_output) if rules is not None else (),
        )
        return Row(request, request.preemptions, plan)

    def _table(self, request: Request, end: int) -> tuple[int, ...]:
        """The pages of positions `0 .. end - 1`, the same object as long as they do not change."""
        pages = -(-end // self._info.page_size)
        if len(request.table) != pages:
            request.table = tuple(request.pages[:pages])
        return request.table

    def _slot(self, request: Request) -> int:
        assert request.slot is not None, "only running requests are scheduled"
        return request.slot

    def _admit_next(self) -> bool:
        """Let the first request that waits run, if a slot and pages for all its tokens are free.

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

    def _make_room(self, request: Request, end: int) -> bool:
        """Get pages for positions `0 .. end - 1`; False if the request was preempted itself."""
        while not self.kv.grow(request, end):
            newest = self.running.pop()
            self._vacate(newest)
            newest.preemptions += 1
            insort(self.waiting, newest, key=_place)
            self.counters.preemptions += 1
            if newest is request:
                return False
        return True

    def _vacate(self, request: Request) -> None:
        self.kv.release(request)
        heapq.heappush(self._free_slots, self._slot(request))
        request.slot = None
        request.primed = False
        request.drafts, request.draft_ids = 0, None

    def _commit_row(
        self, row: Row, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> Delta | None:
        """Take in what a step computed and picked; the request may have been preempted since."""
        request, plan = row.request, row.plan
        missing = 0
        if plan.sample:
            assert tokens, "the executor returns a token for each row that samples"
            missing = 1 + row.drafts - len(tokens)
            request.pending -= 1 + row.drafts
            request.speculated -= row.drafts
        taken, reason = request.take(tokens)
        if not row.lost:
            request.scheduled -= missing
            # What an accepted run has behind the end of the text is in the pages, but no token.
            request.computed = min(plan.start + plan.count - missing, len(request.token_ids))
            self.kv.absorb(request)
        return self._delta(row, taken, logprobs, reason) if plan.sample else None

    def _delta(
        self,
        row: Row,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        reason: FinishReason | None,
    ) -> Delta:
        request = row.request
        self.counters.output_tokens += len(tokens)
        if row.drafts:
            request.drafted += row.drafts
            request.accepted += len(tokens) - 1
        if reason is not None:
            self._end(request)
            self.counters.finished += 1
        return Delta(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=logprobs[: len(tokens)] if request.sampling.logprobs is not None else (),
            finish_reason=reason,
            stop_token_id=tokens[-1] if tokens[-1] in request.stop_token_ids else None,
            cached_tokens=request.cached_tokens,
            drafted_tokens=request.drafted,
            accepted_tokens=request.accepted,
        )

    def _count(self, plan: StepPlan, rows: list[Row], result: StepResult) -> None:
        """Count a step, and tell the policy of depths what it gave and cost."""
        match plan.step:
            case "prefill":
                self.counters.prefill_steps += 1
            case "decode":
                self.counters.decode_steps += 1
                self._depths.decoded(len(rows), result.micros)
            case "draft":
                self.counters.draft_steps += 1
                self._depths.drafted(result.micros)
            case "verify":
                self.counters.verify_steps += 1
                outcomes = [
                    (row.drafts, len(tokens) - 1)
                    for row, tokens in zip(rows, result.tokens, strict=True)
                ]
                for outcome in outcomes:
                    self.counters.count_drafts(*outcome)
                self._depths.verified(len(rows), plan.depth, result.micros, outcomes)

    def _score(self, row: Row, scores: tuple[TokenLogprobs, ...]) -> list[Delta]:
        """Send log-probabilities of the prompt, but not again what a preemption computes again."""
        request = row.request
        first = 1 + row.plan.start + next(i for i, t in enumerate(row.plan.targets) if t >= 0)
        fresh = scores[request.score_next - first :]
        request.score_next += len(fresh)
        return [Delta(request.request_id, (), prompt_logprobs=fresh)] if fresh else []

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


def _place(request: Request) -> tuple[int, int]:
    return request.place


def _targets(request: Request, start: int, end: int) -> tuple[int, ...]:
    """Return `SequencePlan.targets` of positions `start .. end - 1`."""
    first, last = max(request.score_next - 1, start), min(request.prompt_tokens - 1, end)
    if first >= last:
        return ()
    wanted = request.token_ids[first + 1 : last + 1]
    return (*(-1,) * (first - start), *wanted, *(-1,) * (end - last))
