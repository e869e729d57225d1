"""An executor with checkable arithmetic in place of a model, for tests of whatever drives one.

It keeps a real paged store of token ids. A step writes its tokens into the pages that its plan
names, and the next token is a function of the whole history, read back through those pages:

    h = 0;  for each token t of the history:  h = (h * 31 + t + 1) mod 1_000_003
    next = h mod vocab_size                                       at temperature 0
    next = (h + 7919 * seed + 104_729 * output_index) mod 1_000_003 mod vocab_size     otherwise

So a wrong block table, a stale page, a hole or a wrong position gives a wrong token or an
AssertionError, and `expected_tokens` tells by hand what a request must get. Broken contracts of a
plan are AssertionErrors, too.

Options: `script` maps a prompt prefix to a fixed reply (then the eos id, if there is one); `gate`
holds each step until the test releases the semaphore; `fail_at` are the step numbers (from 0) that
raise an EngineError, `die_at` those that raise a RuntimeError, and `refuse_at` those for which
`submit` itself raises an EngineError.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from trnc.core import (
    ExecutorInfo,
    SamplingParams,
    SequencePlan,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from trnc.errors import EngineError

Script = Mapping[tuple[int, ...], Sequence[int]]
MODULUS = 1_000_003


def small_info(
    *,
    max_rows: int = 4,
    max_prefill_tokens: int = 16,
    max_context: int = 64,
    page_size: int = 4,
    num_pages: int = 65,
    vocab_size: int = 97,
    eos_token_ids: tuple[int, ...] = (),
) -> ExecutorInfo:
    """Return limits that are small enough to be hit by a test."""
    return ExecutorInfo(
        max_rows=max_rows,
        max_prefill_tokens=max_prefill_tokens,
        max_context=max_context,
        page_size=page_size,
        num_pages=num_pages,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
    )


def next_token(
    history: Sequence[int], sampling: SamplingParams, output_index: int, info: ExecutorInfo
) -> int:
    """Return the token that follows `history` (prompt and output), by the formula above."""
    h = 0
    for token in history:
        h = (h * 31 + token + 1) % MODULUS
    if sampling.temperature > 0:
        h = (h + 7919 * sampling.seed + 104_729 * output_index) % MODULUS
    return h % info.vocab_size


def scripted_token(
    history: Sequence[int], output_index: int, script: Script, info: ExecutorInfo
) -> int | None:
    """Return the token of the longest prompt prefix in `script`, or None if none matches."""
    prompt = tuple(history[: len(history) - output_index])
    matching = [prefix for prefix in script if prompt[: len(prefix)] == prefix]
    if not matching:
        return None
    reply = script[max(matching, key=len)]
    if output_index < len(reply):
        return reply[output_index]
    return info.eos_token_ids[0] if info.eos_token_ids else None


def expected_tokens(
    prompt: Sequence[int],
    n: int,
    sampling: SamplingParams,
    info: ExecutorInfo,
    *,
    stop_token_ids: Collection[int] = (),
    script: Script | None = None,
) -> list[int]:
    """Return the at most `n` output tokens that a request must get, the stop token included."""
    history = list(prompt)
    output: list[int] = []
    while len(output) < n and not (output and output[-1] in stop_token_ids):
        token = scripted_token(history, len(output), script or {}, info)
        if token is None:
            token = next_token(history, sampling, len(output), info)
        history.append(token)
        output.append(token)
    return output


def expected_logprobs(token: int, alternatives: int, info: ExecutorInfo) -> TokenLogprobs:
    """Return the logprobs that go with a chosen token: it is the first of the alternatives."""
    top = tuple(((token + i) % info.vocab_size, -0.5 - i) for i in range(alternatives))
    return TokenLogprobs(-0.5, top)


@dataclass(eq=False)
class ScriptedHandle:
    """A step in flight; the executor runs it, and those before it, when a result is asked for."""

    executor: ScriptedExecutor
    plan: StepPlan
    number: int
    lost_slots: frozenset[int]  # their rows may follow on what a step that failed did not write
    outcome: StepResult | Exception | None = None

    def result(self) -> StepResult:
        while self.outcome is None:
            self.executor.run_oldest()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@dataclass(eq=False, kw_only=True)
class ScriptedExecutor:
    """Implements `trnc.engine.executor.Executor`; see the module docstring."""

    info: ExecutorInfo
    script: Script = field(default_factory=dict)
    gate: threading.Semaphore | None = None
    fail_at: Collection[int] = ()
    die_at: Collection[int] = ()
    refuse_at: Collection[int] = ()
    compiles: int = 0
    closed: bool = False
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.info.page_size
        self._pages: list[list[tuple[int, int] | None]] = [
            [None] * size for _ in range(self.info.num_pages)
        ]  # (position, token) of each cell
        self._last: list[int | None] = [None] * self.info.max_rows
        self._queue: deque[ScriptedHandle] = deque()
        self._refused: frozenset[int] = frozenset()

    def submit(self, plan: StepPlan) -> ScriptedHandle:
        assert not self.closed, "a step after close()"
        check_plan(plan, self.info)
        number = len(self.plans)
        self.plans.append(plan)
        if number in self.refuse_at:
            self._refused = frozenset(s.slot for s in plan.sequences)
            raise EngineError(f"step {number} was refused")
        handle = ScriptedHandle(self, plan, number, self._refused)
        self._refused = frozenset()
        self._queue.append(handle)
        return handle

    @property
    def busy(self) -> bool:
        """Whether a step has been submitted that has not run."""
        return bool(self._queue)

    def compiles_after_ready(self) -> int:
        return self.compiles

    def close(self) -> None:
        self.closed = True

    def run_oldest(self) -> None:
        """Run the oldest step in the queue, once the gate lets it pass."""
        if self.gate is not None:
            self.gate.acquire()
        handle = self._queue.popleft()
        try:
            handle.outcome = self._run(handle)
        except Exception as error:  # a handle raises what its step raised
            handle.outcome = error

    def _run(self, handle: ScriptedHandle) -> StepResult:
        plan = handle.plan
        if handle.number in self.die_at:
            raise RuntimeError(f"step {handle.number} broke the device")
        if handle.number in self.fail_at:
            for later in self._queue:
                later.lost_slots |= {s.slot for s in plan.sequences}
            raise EngineError(f"step {handle.number} failed")
        # All of a step's reads come before its sampled tokens are stored, as on a device.
        tokens = [self._run_sequence(s, s.slot in handle.lost_slots) for s in plan.sequences]
        for sequence, token in zip(plan.sequences, tokens, strict=True):
            if token is not None:
                self._last[sequence.slot] = token
        logprobs = tuple(
            (expected_logprobs(token, sequence.sampling.logprobs, self.info),)
            if token is not None and sequence.sampling.logprobs is not None
            else ()
            for sequence, token in zip(plan.sequences, tokens, strict=True)
        )
        return StepResult(tuple(() if t is None else (t,) for t in tokens), logprobs)

    def _run_sequence(self, sequence: SequencePlan, lost: bool) -> int | None:
        size = self.info.page_size
        token_ids = sequence.token_ids
        if token_ids is None:
            last = self._last[sequence.slot]
            assert last is not None or lost, f"slot {sequence.slot} has not sampled a token"
            token_ids = (0 if last is None else last,)
        for position, token in enumerate(token_ids, start=sequence.start):
            self._pages[sequence.pages[position // size]][position % size] = (position, token)
        history = self._history(sequence, lost)
        if not sequence.sample:
            return None
        reply = scripted_token(history, sequence.output_index, self.script, self.info)
        if reply is not None:
            return reply
        return next_token(history, sequence.sampling, sequence.output_index, self.info)

    def _history(self, sequence: SequencePlan, lost: bool) -> list[int]:
        """Read positions `0 .. start + count - 1` back through the pages."""
        size = self.info.page_size
        history: list[int] = []
        for position in range(sequence.start + sequence.count):
            cell = self._pages[sequence.pages[position // size]][position % size]
            if cell is not None and cell[0] == position:
                history.append(cell[1])
                continue
            assert lost, f"position {position} of {sequence} was never written: the cell has {cell}"
            history.append(0)
        return history


def check_plan(plan: StepPlan, info: ExecutorInfo) -> None:
    """Assert what a StepPlan promises."""
    assert plan.sequences, "an empty step"
    assert len(plan.sequences) <= info.max_rows
    slots = [sequence.slot for sequence in plan.sequences]
    assert len(set(slots)) == len(slots), f"a slot twice in one step: {slots}"
    if plan.step == "prefill":
        assert sum(s.count for s in plan.sequences) <= info.max_prefill_tokens
    for sequence in plan.sequences:
        _check_sequence(plan, sequence, info)
    written = [_written_pages(sequence, info) for sequence in plan.sequences]
    for i, pages in enumerate(written):
        for j, other in enumerate(plan.sequences):
            assert i == j or not pages & set(other.pages), f"pages {pages} are shared: {plan}"


def _check_sequence(plan: StepPlan, sequence: SequencePlan, info: ExecutorInfo) -> None:
    end = sequence.start + sequence.count
    assert 0 <= sequence.slot < info.max_rows
    assert sequence.start >= 0
    assert sequence.count >= 1
    assert end <= info.max_context
    assert plan.step == "prefill" or (sequence.count == 1 and sequence.sample)
    if sequence.token_ids is None:
        assert sequence.count == 1
    else:
        assert len(sequence.token_ids) == sequence.count
        assert all(0 <= token < info.vocab_size for token in sequence.token_ids)
    assert len(sequence.pages) == -(-end // info.page_size)
    assert len(set(sequence.pages)) == len(sequence.pages), f"a page twice: {sequence.pages}"
    assert all(0 < page < info.num_pages for page in sequence.pages)


def _written_pages(sequence: SequencePlan, info: ExecutorInfo) -> set[int]:
    first = sequence.start // info.page_size
    return set(sequence.pages[first:])
