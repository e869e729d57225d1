"""A request's rules as a mask: against a definition that looks at the whole text each time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnc.engine.messages import Grammar, Rules, Thinking
from trnc.engine.rules import TokenRules, Words

VOCAB = 40
STOPS = (38, 39)
START, END, BLANK = 30, (31, 32), (29,)
WORDS = -(-VOCAB // 32)


class Counting:
    """The grammar 0 1* 2 (3 stop | stop), over token ids; 38 is its stop token."""

    def __init__(self) -> None:
        self.text: list[int] = []

    def allowed(self) -> set[int]:
        match self.text:
            case []:
                return {0}
            case [*_, 0 | 1]:
                return {1, 2}
            case [*_, 2]:
                return {3, 38}
            case [*_, 3]:
                return {38}
        return set()

    def accept(self, token: int) -> bool:
        if token not in self.allowed():
            return False
        self.text.append(token)
        return True

    def rollback(self, count: int) -> None:
        assert count <= len(self.text)
        del self.text[len(self.text) - count :]

    def restrict(self, words: Words) -> None:
        words &= packed(self.allowed())

    @property
    def ended(self) -> bool:
        return self.text[-1:] == [38]


def packed(tokens: set[int]) -> Words:
    words = np.zeros(WORDS, np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def unpacked(mask: bytes) -> set[int]:
    if not mask:
        return set(range(VOCAB))
    words = np.frombuffer(mask, np.uint32)
    return {t for t in range(VOCAB) if words[t // 32] >> np.uint32(t % 32) & 1}


def thoughts(output: Sequence[int], thinking: Thinking | None) -> tuple[str, int]:
    """Where a text stands, and where its answer (or its thoughts, if it is in them) begins."""
    if thinking is None:
        return "answering", 0
    begin = 0
    if not thinking.open:
        while begin < len(output) and output[begin] in thinking.blank_ids:
            begin += 1
        if begin == len(output):
            return "undecided", begin
        if output[begin] != thinking.start_id:
            return "answering", begin
        begin += 1
    for end in range(begin + len(thinking.end_ids), len(output) + 1):
        if tuple(output[end - len(thinking.end_ids) : end]) == thinking.end_ids:
            return "answering", end
    return "thinking", begin


def allowed(output: Sequence[int], rules: Rules, stops: Sequence[int]) -> set[int]:
    """The tokens that may follow `output`, by the numbered rules of `trnc.engine.rules`."""
    phase, begin = thoughts(output, rules.thinking)
    budget = rules.thinking.budget if rules.thinking is not None else None
    if phase == "thinking" and budget is not None and len(output) - begin >= budget:
        ends = [n for n in range(len(END)) if tuple(output[len(output) - n :]) == END[:n]]
        inside = [n for n in ends if n <= len(output) - begin]
        return {END[max(inside)]}
    may = set(range(VOCAB))
    if rules.allowed_token_ids is not None:
        may = set(rules.allowed_token_ids)
    for *before, last in rules.bad_words:
        if list(output[len(output) - len(before) :]) == before and len(output) >= len(before):
            may.discard(last)
    if rules.grammar is not None:
        matcher = Counting()
        if phase == "thinking":
            may -= set(stops)
        else:
            for token in output[begin:] if phase == "answering" else ():
                if token not in stops:
                    assert matcher.accept(token)
            grammatical = may & matcher.allowed()
            may = grammatical | (may & {START, *BLANK} if phase == "undecided" else set())
    if len(output) < rules.min_tokens:
        may = may - set(stops) or may
    return may


def led(
    output: Sequence[int], drafts: Sequence[int], rules: Rules, stops: Sequence[int]
) -> tuple[int, ...]:
    """The drafts, those that are not allowed replaced as long as only one token is."""
    seen = list(output)
    for draft in drafts:
        may = allowed(seen, rules, stops)
        token = draft if draft in may or len(may) != 1 else min(may)
        if token not in may:
            break
        seen.append(token)
        if token in stops:
            break
    known = seen[len(output) :]
    return (*known, *drafts[len(known) :])


def token_rules(rules: Rules, output: Sequence[int] = (), stops: Sequence[int] = STOPS):
    matcher = Counting() if rules.grammar is not None else None
    return TokenRules(rules, vocab_size=VOCAB, stop_token_ids=stops, matcher=matcher, output=output)


tokens = st.integers(0, VOCAB - 1)
thinkings = st.builds(
    Thinking,
    end_ids=st.just(END),
    start_id=st.just(START),
    blank_ids=st.just(BLANK),
    open=st.booleans(),
    budget=st.none() | st.integers(0, 6),
)
all_rules = st.builds(
    Rules,
    grammar=st.sampled_from([None, Grammar("json")]),
    thinking=st.none() | thinkings,
    allowed_token_ids=st.none()
    | st.sets(tokens, min_size=25).map(lambda s: tuple(sorted(s | {0, 1, 2, 30, 31, 32, 38}))),
    bad_words=st.lists(
        st.lists(st.sampled_from([1, 2, 7, 31]), min_size=1, max_size=3).map(tuple), max_size=2
    ).map(tuple),
    min_tokens=st.integers(0, 5),
)


@settings(max_examples=300, deadline=None)
@given(rules=all_rules, stops=st.sampled_from([STOPS, ()]), data=st.data())
def test_masks_are_their_definition_along_any_text(rules, stops, data):
    state, output = token_rules(rules, stops=stops), []
    for _ in range(14):
        wanted = allowed(output, rules, stops)
        drafts = data.draw(st.lists(tokens | st.sampled_from([0, 1, 2, 30, 31, 32]), max_size=3))
        rows = state.masks(len(output), drafts) or (b"",) * (len(drafts) + 1)
        assert len(rows) == len(drafts) + 1
        seen, here = list(output), set()
        for row, draft in zip(rows, [*drafts, None], strict=True):
            if seen != output and (seen[-1] in stops or seen[-1] not in here):
                break  # nobody reads what follows a draft that cannot be accepted
            here = unpacked(row)
            assert here == allowed(seen, rules, stops)
            seen.append(draft)
        assert state.lead(drafts) == led(output, drafts, rules, stops)
        assert state.masks(len(output)) == (rows[:1] if rows[0] else ()), "drafts leave no trace"
        assert not state.broken
        if not wanted:
            assert state.over or not state.need_last_token
            break
        assert not state.over
        token = data.draw(st.sampled_from(sorted(wanted)))
        if token in stops:
            break
        state.advance(token)
        output.append(token)
        if (
            rules.grammar is not None
            and token == 38
            and thoughts(output, rules.thinking)[0] == "answering"
        ):
            assert state.over
            break
        resumed = token_rules(rules, output, stops)
        assert resumed.masks(len(output)) == state.masks(len(output))


def test_a_token_outside_the_grammar_is_noticed():
    state = token_rules(Rules(grammar=Grammar("json")))
    state.advance(0)
    state.advance(7)
    assert state.broken


def test_nothing_is_masked_where_nothing_is_asked():
    assert token_rules(Rules(min_tokens=2)).masks(2, (1, 2)) == ()
    assert token_rules(Rules(bad_words=((1, 2),))).masks(0) == ()
    assert token_rules(Rules(thinking=Thinking(END, budget=3, open=True))).masks(0) == ()


@pytest.mark.parametrize(
    ("rules", "needs"),
    [
        (Rules(min_tokens=3, allowed_token_ids=(1, 2), bad_words=((4,),)), False),
        (Rules(bad_words=((4, 5),)), True),
        (Rules(thinking=Thinking(END, open=True)), False),
        (Rules(thinking=Thinking(END, open=True, budget=9)), True),
        (Rules(grammar=Grammar("json")), True),
    ],
)
def test_who_needs_the_last_token(rules, needs):
    assert token_rules(rules).need_last_token == needs
