"""An executor with checkable arithmetic in place of a model, for tests of whatever drives one.

It keeps a real paged store of token ids. A step writes its tokens into the pages that its plan
names, and the next token is a function of the whole history, read back through those pages:

    h = 0;  for each token t of the history:  h = (h * 31 + t + 1) mod 1_000_003
    next = h mod vocab_size                                       at temperature 0
    next = (h + 7919 * seed + 104_729 * output_index) mod 1_000_003 mod vocab_size     otherwise

So a wrong block table, a stale page, a hole or a wrong position gives a wrong token or an
AssertionError, and `expected_tokens` tells by hand what a request must get. Broken contracts of a
plan are AssertionErrors, too.

A draft guesses with the same arithmetic: `right(position)` says whether the guess of a position is
the token that the target will pick. It asserts that the MTP layer's cells have no gap: each earlier
position knows the token that follows it (but for the last one of a page, which may be shared by two
texts that part there).

Options: `script` maps a prompt prefix to a fixed reply (then the eos id, if there is one); `gate`
holds each step until the test releases the semaphore; `fail_at` are the step numbers (from 0) that
raise an EngineError, `die_at` those that raise a RuntimeError, and `refuse_at` those for which
`submit` itself raises an EngineError.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
    mtp_depths: tuple[int, ...] = (),
    mtp_always: bool = False,
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
        mtp_depths=mtp_depths,
        mtp_always=mtp_always,
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


def penalized(token: int, counts: bytes, info: ExecutorInfo) -> int:
    """Return a token that depends on all the ids and numbers in `SequencePlan.counts`."""
    values = memoryview(counts).cast("i").tolist()
    ids, numbers = values[: len(values) // 2], values[len(values) // 2 :]
    shift = sum((i + 3) * (n + 1) for i, n in zip(ids, numbers, strict=True))
    return (token + shift) % info.vocab_size


def nearest_allowed(token: int, mask: bytes, info: ExecutorInfo) -> int:
    """Return the token, or the next one that its mask allows (after the last comes 0)."""
    if not mask:
        return token
    words = memoryview(mask).cast("I")
    cycle = (*range(token, info.vocab_size), *range(token))
    return next(t for t in cycle if words[t // 32] >> t % 32 & 1)


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
    right: Callable[[int], bool] = bool
    compiles: int = 0
    closed: bool = False
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.info.page_size
        self._pages: list[list[tuple[int, int] | None]] = [
            [None] * size for _ in range(self.info.num_pages)
        ]  # (position, token) of each cell
        self._mtp = [list(page) for page in self._pages]  # (position, token that follows)
        self._last: list[int | None] = [None] * self.info.max_rows
        self._lengths = [0] * self.info.max_rows
        self._drafts: list[list[int]] = [[] for _ in range(self.info.max_rows)]
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
        run = self._draft if plan.step == "draft" else self._compute
        tokens = [run(plan, s, s.slot in handle.lost_slots) for s in plan.sequences]
        for sequence, picked in zip(plan.sequences, tokens, strict=True):
            if plan.step == "draft":
                self._drafts[sequence.slot] = picked
            elif picked:
                kept = len(picked) if plan.step == "verify" else sequence.count
                self._last[sequence.slot] = picked[-1]
                self._lengths[sequence.slot] = sequence.start + kept
        logprobs = tuple(
            tuple(expected_logprobs(token, wanted, self.info) for token in picked)
            if (wanted := sequence.sampling.logprobs) is not None and plan.step != "draft"
            else ()
            for sequence, picked in zip(plan.sequences, tokens, strict=True)
        )
        prompt_logprobs = tuple(
            tuple(
                expected_logprobs(target, sequence.sampling.prompt_logprobs or 0, self.info)
                for target in sequence.targets
                if target >= 0
            )
            for sequence in plan.sequences
        )
        return StepResult(tuple(map(tuple, tokens)), logprobs, duration(plan), prompt_logprobs)

    def _compute(self, plan: StepPlan, sequence: SequencePlan, lost: bool) -> list[int]:
        """Write a sequence's tokens and return what it picks, in a verify what is accepted."""
        token_ids = self._token_ids(sequence, lost)
        self._write(self._pages, sequence, token_ids)
        end = sequence.start + sequence.count
        first = sequence.start + 1 if plan.step == "verify" else end
        picks = [
            self._pick(self._history(sequence, length, lost), sequence, offset)
            for offset, length in enumerate(range(first, end + 1))
            if sequence.sample
        ]
        following = [*token_ids[1:], sequence.following]
        if picks:
            following[-len(picks) :] = picks
        self._write(self._mtp, sequence, following)
        accepted = 0
        while accepted < len(picks) - 1 and picks[accepted] == token_ids[accepted + 1]:
            accepted += 1
        return picks[: accepted + 1]

    def _draft(self, plan: StepPlan, sequence: SequencePlan, lost: bool) -> list[int]:
        """Guess the tokens after the last one, from where the device is."""
        last, length = self._last[sequence.slot], self._lengths[sequence.slot]
        assert lost or (last is not None and length <= sequence.start)
        length = min(length, sequence.start)
        moved = replace(sequence, start=length, count=0)
        history = [*self._history(moved, length, lost), last or 0]
        if not lost:
            self._check_mtp(sequence, history)
        guesses: list[int] = []
        for offset in range(plan.depth):
            index = length + sequence.output_index - sequence.start
            token = self._pick([*history, *guesses], replace(sequence, output_index=index), offset)
            right = self.right(length + offset)
            guesses.append(token if right else (token + 1) % self.info.vocab_size)
        return guesses

    def _check_mtp(self, sequence: SequencePlan, history: list[int]) -> None:
        size = self.info.page_size
        for position, following in enumerate(history[1:]):
            cell = self._mtp[sequence.pages[position // size]][position % size]
            shared = position % size == size - 1
            expected = (position, cell[1] if shared and cell else following)
            assert cell == expected, f"the MTP layer has {cell} at {position}, not {following}"

    def _token_ids(self, sequence: SequencePlan, lost: bool) -> list[int]:
        """What the plan names, then what the slot has: its last token, and its drafts."""
        last = self._last[sequence.slot]
        known = list(sequence.token_ids or ())
        if not known:
            assert last is not None or lost, f"slot {sequence.slot} has not sampled a token"
            known = [last or 0]
        drafts = self._drafts[sequence.slot][len(known) - 1 : sequence.count - 1]
        token_ids = known + drafts if len(known) < sequence.count else known
        missing = sequence.count - len(token_ids)
        assert not missing or lost, f"slot {sequence.slot} has too few drafts"
        return token_ids + [0] * missing

    def _write(
        self,
        pages: list[list[tuple[int, int] | None]],
        sequence: SequencePlan,
        tokens: Sequence[int | None],
    ) -> None:
        size = self.info.page_size
        for position, token in enumerate(tokens, start=sequence.start):
            cell = None if token is None else (position, token)
            pages[sequence.pages[position // size]][position % size] = cell

    def _pick(self, history: list[int], sequence: SequencePlan, offset: int) -> int:
        index = sequence.output_index + offset
        token = scripted_token(history, index, self.script, self.info)
        if token is None:
            token = next_token(history, sequence.sampling, index, self.info)
        mask = sequence.masks[offset] if offset < len(sequence.masks) else b""
        counts = sequence.counts[offset] if sequence.counts else b""
        return nearest_allowed(penalized(token, counts, self.info), mask, self.info)

    def _history(self, sequence: SequencePlan, length: int, lost: bool) -> list[int]:
        """Read positions `0 .. length - 1` back through the pages."""
        size = self.info.page_size
        history: list[int] = []
        for position in range(length):
            cell = self._pages[sequence.pages[position // size]][position % size]
            if cell is not None and cell[0] == position:
                history.append(cell[1])
                continue
            assert lost, f"position {position} of {sequence} was never written: the cell has {cell}"
            history.append(0)
        return history


def duration(plan: StepPlan) -> int:
    """A step takes as long as it has tokens, after a fixed time; drafting is cheap."""
    rows = sum(s.count for s in plan.sequences)
    return 10 * rows if plan.step == "draft" else 100 + 30 * rows


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
    assert plan.step == "prefill" or sequence.sample
    if plan.step == "draft":
        assert sequence.count == plan.depth
        assert plan.depth in info.mtp_depths
        assert sequence.token_ids is None
        end = min(end + 1, len(sequence.pages) * info.page_size)  # drafts may not all be wanted
    elif plan.step == "verify":
        assert sequence.count <= plan.depth + 1
    else:
        assert plan.step == "prefill" or (sequence.count == 1 and not info.mtp_always)
    assert end <= info.max_context
    assert (sequence.following is None) == (sequence.sample or plan.step == "draft")
    if sequence.token_ids is None:
        assert plan.step != "prefill" or sequence.count == 1
    else:
        assert len(sequence.token_ids) == sequence.count or plan.step == "verify"
        assert all(0 <= token < info.vocab_size for token in sequence.token_ids)
    assert len(sequence.pages) == -(-end // info.page_size)
    assert len(set(sequence.pages)) == len(sequence.pages), f"a page twice: {sequence.pages}"
    assert all(0 < page < info.num_pages for page in sequence.pages)


def _written_pages(sequence: SequencePlan, info: ExecutorInfo) -> set[int]:
    first = sequence.start // info.page_size
    return set(sequence.pages[first:])
