"""Which tokens a request may get next: everything that its `Rules` say, as one mask.

What goes before what, where they meet:

1. A thinking budget that is spent forces the end of the thoughts, token by token, whatever else
   holds.
2. `allowed_token_ids`, `bad_words` and the grammar hold together. The grammar starts after the
   thoughts; before a text has said whether it thinks, it may do either. In its thoughts a text that
   owes an answer in a grammar cannot stop.
3. `min_tokens` takes the stop tokens away, unless nothing else is left: a grammar that is complete
   and has nothing more to say ends the text.
4. Where nothing at all is left, the text ends there.

The state is a value (`_State`) and a grammar matcher that can be rolled back, so masks can be
computed along drafted tokens that are then dropped again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from trnc.engine.messages import Rules, Thinking

Words = NDArray[np.int32]


class Matcher(Protocol):
    """A grammar and how far a text has come in it."""

    def accept(self, token: int) -> bool:
        """Go on by one token; False, and nothing happens, where the grammar does not have it."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens that were accepted."""

    def restrict(self, words: Words) -> None:
        """Clear the bits of the tokens that cannot come next."""

    @property
    def ended(self) -> bool:
        """Whether the text is complete and its end was accepted."""


@dataclass(frozen=True, slots=True)
class _State:
    """Where a text stands.

    `matched` is how much of the end of the thoughts the text ends with, `spent` how many tokens it
    has thought, `tail` the last tokens, as far as bad words look back.
    """

    phase: Literal["undecided", "thinking", "answering"]
    output: int = 0
    matched: int = 0
    spent: int = 0
    tail: tuple[int, ...] = ()


class TokenRules:
    """The rules of one request and its state. Masks are `SequencePlan.masks`; b"" allows all."""

    def __init__(
        self,
        rules: Rules,
        *,
        vocab_size: int,
        stop_token_ids: Collection[int],
        matcher: Matcher | None,
        output: Iterable[int],
    ) -> None:
        """Start after `output`. `matcher` is there exactly if the rules have a grammar."""
        assert (matcher is None) == (rules.grammar is None), "a grammar comes with its matcher"
        self._rules = rules
        self._matcher = matcher
        self._stops = sorted(stop_token_ids)
        self._look_back = max((len(word) - 1 for word in rules.bad_words), default=0)
        self._all = _mask_of(range(vocab_size), vocab_size)
        self._base = self._all
        if rules.allowed_token_ids is not None:
            self._base = _mask_of(rules.allowed_token_ids, vocab_size)
        self._state = _State(_first_phase(rules.thinking))
        self.broken = False
        for token in output:
            self.advance(token)
        self._next: bytes | None = None

    @property
    def need_last_token(self) -> bool:
        """Whether a mask depends on more than the number of tokens."""
        thinking = self._rules.thinking
        counts_thoughts = thinking is not None and thinking.budget is not None
        return self._matcher is not None or counts_thoughts or self._look_back > 0

    @property
    def over(self) -> bool:
        """Whether no token may follow."""
        if self._matcher is not None and self._matcher.ended:
            return True
        return self.need_last_token and not any(self._mask_here())

    def advance(self, token: int) -> None:
        """Take in one output token; `broken` is set if the grammar does not have it."""
        self._next = None
        self._state, accepted = self._step(self._state, token)
        self.broken = self.broken or accepted is False

    def masks(self, output_index: int, drafts: Sequence[int] = ()) -> tuple[bytes, ...]:
        """Return the mask of output number `output_index`, then of each one after the drafts.

        Rows after a draft that is itself not allowed are b"": they are never read. () where all
        rows are.
        """
        if not self.need_last_token:
            states = (replace(self._state, output=output_index + i) for i in range(len(drafts) + 1))
            rows = [self._packed(self._words(state)) for state in states]
        else:
            assert self._state.output == output_index, "planned blind"
            rows = [self._packed(np.frombuffer(self._mask_here(), np.int32))]
            rows += self._masks_along(drafts)
        return tuple(rows) if any(rows) else ()

    def lead(self, drafts: Sequence[int]) -> tuple[int, ...]:
        """Return the drafts, those that are not allowed replaced where only one token is.

        They are left as they are from the first one on for which there is a choice.
        """
        led = [token for token, _ in self._walk(drafts, lead=True)]
        return (*led, *drafts[len(led) :])

    def _masks_along(self, drafts: Sequence[int]) -> list[bytes]:
        rows = [self._packed(words) for _, words in self._walk(drafts)]
        return rows + [b""] * (len(drafts) - len(rows))

    def _walk(self, drafts: Sequence[int], *, lead: bool = False) -> list[tuple[int, Words]]:
        """Return each draft and the mask after it, while drafts are allowed and the text goes on.

        With `lead`, a draft that is not allowed is replaced by the only token that is.
        """
        state, accepted = self._state, 0
        walked: list[tuple[int, Words]] = []
        words = np.frombuffer(self._mask_here(), np.int32)
        for draft in drafts:
            allowed = draft if _has(words, draft) else None
            token = _only(words) if lead and allowed is None else allowed
            if token is None:
                break
            if token in self._stops:
                walked.append((token, words))  # nobody reads what would follow
                break
            state, took = self._step(state, token)
            accepted += took is True
            words = self._words(state)
            walked.append((token, words))
        if self._matcher is not None and accepted:
            self._matcher.rollback(accepted)
        return walked

    def _mask_here(self) -> bytes:
        """The mask of the next token, computed once for each."""
        if self._next is None:
            self._next = self._words(self._state).tobytes()
        return self._next

    def _packed(self, words: Words) -> bytes:
        return b"" if np.array_equal(words, self._all) else words.tobytes()

    def _step(self, state: _State, token: int) -> tuple[_State, bool | None]:
        """Return the state after a token, and whether the grammar took it (None: not asked)."""
        tail = (*state.tail, token)[-self._look_back :] if self._look_back else ()
        state = replace(state, output=state.output + 1, tail=tail)
        thinking = self._rules.thinking
        if thinking is not None and state.phase == "undecided":
            if token == thinking.start_id:
                return replace(state, phase="thinking"), None
            if token in thinking.blank_ids:
                return state, None
            state = replace(state, phase="answering")
        elif thinking is not None and state.phase == "thinking":
            matched = _matched(thinking.end_ids, state.matched, token)
            over = matched == len(thinking.end_ids)
            phase: Literal["answering", "thinking"] = "answering" if over else "thinking"
            return replace(state, phase=phase, matched=matched, spent=state.spent + 1), None
        if self._matcher is None or token in self._stops:
            return state, None
        return state, self._matcher.accept(token)

    def _words(self, state: _State) -> Words:
        forced = self._forced(state)
        if forced is not None:
            return _mask_of((forced,), len(self._all) * 32)
        words = self._base.copy()
        for word in self._rules.bad_words:
            before = len(word) - 1
            if len(state.tail) >= before and state.tail[len(state.tail) - before :] == word[:-1]:
                _clear(words, word[-1:])
        if self._matcher is not None:
            self._restrict(words, state, self._matcher)
        if state.output < self._rules.min_tokens:
            longer = words.copy()
            _clear(longer, self._stops)
            return longer if longer.any() else words
        return words

    def _restrict(self, words: Words, state: _State, matcher: Matcher) -> None:
        thinking = self._rules.thinking
        if state.phase == "thinking":
            _clear(words, self._stops)
            return
        any_way = words.copy()
        matcher.restrict(words)
        if state.phase == "undecided" and thinking is not None:
            openers = (
                *thinking.blank_ids,
                *(() if thinking.start_id is None else (thinking.start_id,)),
            )
            words |= any_way & _mask_of(openers, len(words) * 32)

    def _forced(self, state: _State) -> int | None:
        thinking = self._rules.thinking
        if thinking is None or thinking.budget is None or state.phase != "thinking":
            return None
        return thinking.end_ids[state.matched] if state.spent >= thinking.budget else None


def _first_phase(thinking: Thinking | None) -> Literal["undecided", "thinking", "answering"]:
    if thinking is None:
        return "answering"
    return "thinking" if thinking.open else "undecided"


def _matched(pattern: tuple[int, ...], matched: int, token: int) -> int:
    """Return how much of a pattern a text ends with after one more token."""
    seen = (*pattern[:matched], token)
    fitting = (n for n in range(len(seen), 0, -1) if seen[-n:] == pattern[:n])
    return next(fitting, 0)


def _mask_of(tokens: Iterable[int], vocab_size: int) -> Words:
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    ids = np.fromiter(tokens, np.int64)
    np.bitwise_or.at(words, ids // 32, (1 << (ids % 32)).astype(np.uint32))
    return words.view(np.int32)


def _clear(words: Words, tokens: Iterable[int]) -> None:
    for token in tokens:
        words[token // 32] &= np.int32(~np.uint32(1 << token % 32).view(np.int32))


def _only(words: Words) -> int | None:
    """Return the token that is the only one allowed, if there is one."""
    (used,) = np.nonzero(words)
    if len(used) != 1:
        return None
    word = int(words[used[0]]) & 0xFFFFFFFF
    return int(used[0]) * 32 + word.bit_length() - 1 if word & (word - 1) == 0 else None


def _has(words: Words, token: int) -> bool:
    return bool(words[token // 32] >> (token % 32) & 1)
